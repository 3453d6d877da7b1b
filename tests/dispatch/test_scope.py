"""Promises of scoped choices: for which calls they hold, and how a forward's reaches its backward."""

import contextlib
import io
import sys
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context

import pytest
import torch
import torch.nn.functional as F
from support.dense import assert_right, qkv, with_gradients

import attnreg
from attnreg.core import registry
from attnreg.core.dispatch import scope
from attnreg.core.selection.decision import Preference

pytestmark = pytest.mark.usefixtures("one_thread")


def choice_of(*names):
    return scope.make_choice(Preference(f"a test of {names}", names))


def gradients(out, inputs):
    return torch.autograd.grad(out, inputs, torch.ones_like(out))


# ---- choices and tokens


def test_there_is_one_choice_of_each_content_and_its_number_finds_it():
    one, same, other = choice_of("cpu"), choice_of("cpu"), choice_of("math")
    assert one is same
    assert one is not other
    assert scope.by_number(one.number) is one
    assert scope.by_number(other.number) is other
    assert scope.by_number(0) is None
    assert scope.make_choice(one.preference, "no gradient").number not in (one.number, other.number)


@pytest.mark.parametrize("names", [("math",), ("cpu", "math")])
def test_the_text_of_a_block_in_a_graph_is_one_line(names):
    text = scope.text_of(names)
    assert text.isprintable()  # Inductor's C++ wrapper writes it between quotes
    preference = scope.from_text(text).preference
    assert (preference.names, preference.exclusive) == (names, False)
    assert scope.from_text(names[0]).preference.exclusive


def test_threads_that_make_the_same_choice_get_one():
    names = [f"backend {number}" for number in range(50)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: [choice_of(name) for name in names], range(8)))
    for column in zip(*made, strict=True):
        assert len(set(map(id, column))) == 1


TENSORS = {
    "contiguous": torch.randn(2, 3, 8),
    "transposed": torch.randn(2, 8, 3).transpose(1, 2),
    "scalar": torch.randn(()),
    "empty": torch.randn(0, 3),
    "integers": torch.arange(4),
}


@pytest.mark.parametrize("is_part", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_tensor_carries_a_choice_with_its_values_and_strides(tensor, is_part):
    for choice in (choice_of("cpu"), choice_of("math")):
        given = tensor.clone()
        if is_part:  # of memory that others hold, too, so it isn't marked where it is
            strides = given.stride()
            given = torch.cat((given.new_zeros(2), given.as_strided((given.numel(),), (1,))))[2:]
            given = given.as_strided(tensor.shape, strides)
        token = scope.with_token(given, choice)
        assert (token is given) == (not is_part)
        assert scope.read_token(token) is choice
        assert scope.read_token(token.detach()) is choice  # as autograd saves it
        assert torch.equal(token, tensor)
        assert (token.dtype, token.stride()) == (tensor.dtype, tensor.stride())
        assert token.data_ptr() % 16 == 0
        assert scope.read_token(token.clone()) is None
        if is_part:
            assert scope.read_token(given) is None
    assert scope.read_token(tensor) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_tensor_that_carries_a_choice_can_be_written_to_a_file(dtype):
    """As a program does in `saved_tensors_hooks`."""
    token, file = scope.with_token(torch.randn(3, 5, dtype=dtype), choice_of("math")), io.BytesIO()
    torch.save(token, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded, token)
    assert scope.read_token(loaded) is choice_of("math")


def test_an_inference_tensor_isnt_copied_for_a_choice_as_autograd_saves_none():
    with torch.inference_mode():
        part = torch.randn(6)[2:]
        assert scope.with_token(part, choice_of("cpu")) is part
        whole = torch.arange(3.0)
        assert scope.with_token(whole, choice_of("cpu")) is whole
    assert scope.read_token(part) is None
    assert whole.tolist() == [0.0, 1.0, 2.0]


def test_no_part_of_a_tensor_that_carries_a_choice_carries_it():
    choices = [choice_of(f"number {number}") for number in range(30)]
    for choice in choices:
        token = scope.with_token(torch.randn(100), choice)
        parts = [token[start:stop] for start in range(100) for stop in (start, 50, 99, 100)]
        assert {scope.read_token(part) for part in parts if part.numel() < 100} == {None}


def test_a_scalar_carries_a_choice_or_none():
    for choice in (None, choice_of("cpu"), choice_of("math")):
        token = scope.choice_token(choice, torch.ones(3))
        assert (token.shape, token.dtype, token.device) == ((), torch.uint64, torch.device("cpu"))
        assert scope.read_token(token) is choice
        assert scope.read_token(token.detach()) is choice


def test_no_slice_of_an_ordinary_tensor_is_taken_for_a_token():
    choice_of("cpu")
    whole = torch.randn(100)
    for start in range(100):
        for stop in range(start, 101):
            taken = scope.read_token(whole[start:stop])
            assert taken is None or stop == 100 - scope.GUARD
    assert scope.read_token(torch.empty(1000)[4 * 200 :][:1]) is None


def test_a_function_for_the_first_choice_is_called_before_that_choice_can_hold(monkeypatch):
    monkeypatch.setattr(scope, "_choices", [])
    monkeypatch.setattr(scope, "_by_content", {})
    monkeypatch.setattr(scope, "_by_mark", {})
    monkeypatch.setattr(scope, "_waiting", [])
    called = []
    scope.on_first_choice(called.append)
    scope.make_choice(None, "no gradient")  # which is of one call's backward, and of no scope
    assert called == []
    choice_of("cpu")
    assert called == [scope.variable]
    choice_of("math")
    assert called == [scope.variable]
    scope.on_first_choice(called.append)
    assert called == [scope.variable] * 2


# ---- dense calls, planned and repeated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["math", "cpu"])
def test_a_scoped_call_is_kept_and_its_backward_gets_the_choice(installed, planned, ran, name, dtype):
    other = {"math": "cpu", "cpu": "math"}[name]
    inputs = qkv(dtype=dtype)

    def step():
        with attnreg.use_backend(name):
            out = F.scaled_dot_product_attention(*inputs)
        assert_right(with_gradients(out, inputs), inputs)
        assert ran() == {name: (1, 1)}

    with attnreg.register_backend(other):
        for _ in range(3):
            step()
            gradients(F.scaled_dot_product_attention(*inputs), inputs)
            assert ran() == {other: (1, 1)}
        assert planned(step) == 0


@pytest.mark.parametrize("enter", [attnreg.use_backend, attnreg.register_backend])
@pytest.mark.parametrize("bshd", [False, True])
def test_strides_and_values_are_those_of_torchs_own_kernel(installed, planned, enter, bshd):
    inputs = qkv()
    if bshd:
        inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs]

    def attend():
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs)
        return out, lse, *gradients(out, inputs)

    plain = attend()
    for name in ("math", "cpu"):
        with enter(name):
            for _ in range(4):
                torch.testing.assert_close(attend(), plain, check_stride=True)
            assert planned(attend) == 0


def test_a_scope_is_obeyed_by_no_other_thread(installed, ran):
    inputs = [x.detach() for x in qkv()]
    attnreg.register_backend("cpu")
    for _ in range(3):
        F.scaled_dot_product_attention(*inputs)
        with attnreg.use_backend("math"):
            F.scaled_dot_product_attention(*inputs)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(F.scaled_dot_product_attention, *inputs).result()
    assert ran() == {"cpu": (6, 0), "math": (3, 0)}


def test_a_thread_of_autograds_inherits_the_choice_of_where_backward_was_called(installed, ran, monkeypatch):
    """As that of a GPU, which computes forwards of a checkpoint again; a hook plays such a thread."""
    monkeypatch.setattr(scope, "is_inherited", True)  # as a build for GPUs does
    inputs = qkv()

    def forward_without_a_context(grad):
        with monkeypatch.context() as patched:
            patched.setattr(scope, "get_ident", lambda: -1)
            for _ in range(3):
                Context().run(F.scaled_dot_product_attention, *inputs)

    def forward_in_a_block_of_its_own(grad):
        with monkeypatch.context() as patched:
            patched.setattr(scope, "get_ident", lambda: -1)
            own = Context()  # as of a thread that autograd keeps
            own.run(in_a_block)
            assert own.run(scope.variable.get) is None, "the outer choice stays in force on that thread"

    def in_a_block():
        with attnreg.use_backend("cpu"):
            F.scaled_dot_product_attention(*inputs)
        F.scaled_dot_product_attention(*inputs)

    out = torch.ones(3, requires_grad=True) * 2
    out.register_hook(forward_in_a_block_of_its_own)
    with attnreg.use_backend("math"):
        out.sum().backward()
    assert ran() == {"cpu": (1, 0), "math": (1, 0)}

    for entered, expected in (
        (attnreg.use_backend("math"), {"math": (3, 0)}),
        (attnreg.use_backend("cpu"), {"cpu": (3, 0)}),
        (contextlib.nullcontext(), {}),
    ):
        out = torch.ones(3, requires_grad=True) * 2
        out.register_hook(forward_without_a_context)
        with entered:
            out.sum().backward()
        assert ran() == expected


@pytest.mark.skipif(scope._erase is None and scope.is_inherited, reason="this torch erases nothing")
def test_a_thread_that_has_left_its_blocks_has_nothing_in_torchs_state():
    """Else it waits for the interpreter's lock when it ends, after it was joined: SIGABRT at exit."""

    def enter_and_leave():
        with attnreg.use_backend("cpu"):
            inside.append(torch._C._is_key_in_tls(scope._IN_TORCHS_STATE))
            with attnreg.use_backend("math"):
                pass
            inside.append(torch._C._is_key_in_tls(scope._IN_TORCHS_STATE))
        with contextlib.suppress(ZeroDivisionError), attnreg.use_backend("math"):
            raise ZeroDivisionError
        after.append(torch._C._is_key_in_tls(scope._IN_TORCHS_STATE))

    inside, after = [], []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(enter_and_leave).result()
    assert inside == [scope.is_inherited] * 2
    assert after == [False]


def test_torch_keeps_a_reference_to_the_choice_itis_inherited(monkeypatch):
    """Torch 2.11 drops one that it hasn't added, which ended the process some blocks later."""
    monkeypatch.setattr(scope, "is_inherited", True)
    choice = choice_of("math")
    kept = choice, object()
    with attnreg.use_backend("cpu"):
        before = [sys.getrefcount(one) for one in kept]
        for _ in range(50):
            scope._keep(kept)
        assert [sys.getrefcount(one) for one in kept] == before
        assert torch._C._get_obj_in_tls(scope._IN_TORCHS_STATE)[1] is kept
        assert sys.getrefcount(kept) > 2


def test_a_backward_in_another_thread_and_after_other_scopes_gets_its_own_choice(installed, ran):
    inputs = qkv()
    attnreg.register_backend("cpu")
    for _ in range(4):
        outs = []
        for name in ("math", "cpu"):
            with attnreg.use_backend(name):
                outs.append(F.scaled_dot_product_attention(*inputs))
        ran()
        with attnreg.use_backend("cpu"), ThreadPoolExecutor(1) as pool:
            pool.submit(gradients, outs[0], inputs).result()
            assert ran() == {"math": (0, 1)}
        with attnreg.use_backend("math"):
            gradients(outs[1], inputs)
            assert ran() == {"cpu": (0, 1)}


def test_where_hooks_copied_what_was_saved_the_backward_is_decided_without_the_choice(installed, ran):
    """All that a dense backward gets of its forward are those tensors."""
    inputs = qkv()
    for _ in range(4):
        with attnreg.use_backend("math"), torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            out = F.scaled_dot_product_attention(*inputs)
        assert_right(with_gradients(out, inputs), inputs)
    assert ran() == {"math": (4, 0)}  # torch's own kernel ran the backwards, as nothing is registered


def test_an_lse_that_begins_inside_a_storage_is_not_taken_for_a_token(installed, ran):
    """There the LSE carries the choice, by where it begins and ends; and addresses come back."""
    attnreg.register_backend("cpu")
    q, k, v = (x.detach() for x in qkv())
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    out, lse = forward(q, k, v)
    ran()
    for _ in range(50):
        for start in (16, 0):
            inside = torch.empty(lse.numel() + 64).as_strided(lse.shape, lse.stride(), start).copy_(lse)
            backward(out, q, k, v, out, inside, 0.0, False)
            del inside
        with attnreg.use_backend("math"):
            results = forward(q, k, v)
        backward(results[0], q, k, v, *results, 0.0, False)
        del results
    assert ran() == {"cpu": (0, 100), "math": (50, 50)}


def test_what_a_kernel_keeps_of_its_results_is_left_as_it_is(installed):
    kept, math = [], registry.find("math").kernels()

    def forward(*given):
        out, lse = math.forward(*given)
        kept.append(lse := lse.transpose(1, 2).contiguous().transpose(1, 2))  # laid out as torch's is
        return out, lse

    limits = attnreg.Capabilities(devices=("cpu",), dtypes=("float32",))
    keeps = attnreg.Backend(
        name="keeps", forward=limits, backward=limits, load=lambda: attnreg.Kernels(forward, math.backward)
    )
    with attnreg.register_backend(keeps), attnreg.use_backend("keeps"):
        outs = [F.scaled_dot_product_attention(*qkv()) for _ in range(4)]
    assert all(out.isfinite().all() for out in outs) and len(kept) == 4
    assert [lse.untyped_storage().nbytes() for lse in kept] == [4 * lse.numel() for lse in kept]


def test_the_call_cache_and_python_read_each_others_tokens(op):
    """Of torch's own kernel, of a launcher and of a plan; `op` has the token as its fourth result."""
    inputs = [torch.randn(2, 6, 2, 8) for _ in "qkv"]
    choice = choice_of("math")
    entered = scope.enter(choice)
    try:
        for launcher in (None, lambda q, k, v: (q, q.sum(-1).transpose(1, 2))):
            op.module.drop()
            op.forward = launcher
            op.planned(*inputs)
            was_planned, (*_, token, _) = op.planned(*inputs)
            assert not was_planned
            assert scope.read_token(token) is choice
    finally:
        scope.leave(entered)
    op.planned(*inputs)
    was_planned, (*_, none, _) = op.planned(*inputs)
    assert not was_planned
    assert scope.read_token(none) is None
    given = [torch.randn(2, 6, 2, 8) for _ in range(5)] + [torch.zeros(2, 2, 6)]
    op.backward = lambda grad, *_: (grad, grad, grad)
    for one in (token, none, scope.choice_token(choice, inputs[0]), token):
        op.planned_back(*given, one)
    assert [op.planned_back(*given, one)[0] for one in (token, none)] == [False, False]
    assert op.planned_back(*given, scope.choice_token(choice_of("cpu"), inputs[0]))[0]


@pytest.mark.parametrize("name", [pytest.param("math", marks=pytest.mark.slow), "cpu"])
def test_what_is_compiled_passes_the_choice_of_a_repeated_call_on(installed, ran, name):
    """AOTAutograd runs the forward where no gradient is recorded, and the backward's op itself."""
    inputs = qkv()
    attnreg.register_backend({"math": "cpu", "cpu": "math"}[name])
    torch._dynamo.reset()
    compiled = torch.compile(F.scaled_dot_product_attention, backend="aot_eager")
    for _ in range(5):
        with attnreg.use_backend(name):
            out = compiled(*inputs)
        gradients(out, inputs)
        assert ran() == {name: (1, 1)}


def test_a_cache_of_the_current_choice_is_reset_even_where_entering_or_leaving_is_interrupted(monkeypatch):
    class Interrupted:
        def set(self, _):
            raise KeyboardInterrupt

        reset, get = set, staticmethod(lambda: None)

    calls = []
    monkeypatch.setattr(scope, "variable", Interrupted())
    monkeypatch.setattr(scope, "_remembering", [lambda: calls.append(True)])
    for change in (scope.enter, scope.leave):
        with pytest.raises(KeyboardInterrupt):
            change(None)
    assert calls == [True, True]

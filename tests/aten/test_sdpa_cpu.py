"""`F.scaled_dot_product_attention` on a CPU, with attnreg below it."""

import contextlib
import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from support import truth
from support.dense import (
    ADDED,
    CAUSAL,
    LAYOUTS,
    OPEN,
    SCATTERING,
    WithoutGradient,
    assert_right,
    qkv,
    random_like,
    with_gradients,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnreg
from attnreg.backends.cpu import choice

pytestmark = pytest.mark.usefixtures("routers", "one_thread")


def results(inputs, **options):
    """Return the output and the gradients."""
    out = F.scaled_dot_product_attention(*inputs, **options)
    return with_gradients(out, inputs)


def torchs_own(inputs, **options):
    """Return what torch gives without attnreg."""
    attnreg.uninstall()
    own = results(inputs, **options)
    attnreg.install()
    return own


BOOLEAN = torch.rand(2, 4, 6, 6, generator=torch.Generator().manual_seed(5)) > 0.4

CALLS = {
    "plain": ({}, {}, {}),
    "causal": ({}, {"is_causal": True}, {"window": CAUSAL}),
    "fewer queries": ({"len_q": 3}, {}, {}),
    "causal with fewer queries": ({"len_q": 3}, {"is_causal": True}, {"window": CAUSAL}),
    "causal with fewer keys": ({"len_k": 3}, {"is_causal": True}, {"window": CAUSAL}),
    "one query": ({"len_q": 1}, {"is_causal": True}, {"window": CAUSAL}),
    "one key": ({"len_k": 1}, {"is_causal": True}, {"window": CAUSAL}),
    "scale": ({}, {"scale": 0.6}, {"scale": 0.6}),
    "scale 0": ({}, {"scale": 0.0}, {"scale": 0.0}),
    "negative scale": ({}, {"scale": -0.6}, {"scale": -0.6}),
    "boolean mask": ({}, {"attn_mask": BOOLEAN}, {"bias": BOOLEAN}),
    "boolean mask of the keys": ({}, {"attn_mask": BOOLEAN[:, :1, :1]}, {"bias": BOOLEAN[:, :1, :1]}),
    "mask for every head and batch": ({}, {"attn_mask": BOOLEAN[0, 0]}, {"bias": BOOLEAN[0, 0]}),
    "added mask": ({}, {"attn_mask": ADDED}, {"bias": ADDED}),
    "added mask for every batch": ({}, {"attn_mask": ADDED[:1]}, {"bias": ADDED[:1]}),
    "grouped heads": ({"heads_k": 2}, {"enable_gqa": True}, {}),
    "one key head, causal": ({"heads_k": 1}, {"enable_gqa": True, "is_causal": True}, {"window": CAUSAL}),
}


@pytest.mark.parametrize(("shape", "options", "meant"), CALLS.values(), ids=CALLS)
def test_a_registered_backend_really_runs_is_right_and_has_torchs_own_strides(ran, shape, options, meant):
    inputs = qkv(**shape)
    own = torchs_own(inputs, **options)
    with attnreg.register_backend("math"):
        got = results(inputs, **options)
    assert ran() == {"math": (1, 1)}
    assert_right(got, inputs, top_left=True, **meant)
    assert [(x.shape, x.stride()) for x in got] == [(x.shape, x.stride()) for x in own]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "causal with fewer queries", "boolean mask", "grouped heads"])
def test_every_dtype_is_right(ran, dtype, name):
    shape, options, meant = CALLS[name]
    inputs = qkv(**shape, dtype=dtype)
    with attnreg.register_backend("math"):
        got = results(inputs, **options)
    assert ran() == {"math": (1, 1)}
    assert {x.dtype for x in got} == {dtype}
    assert_right(got, inputs, top_left=True, **meant)


def test_an_added_mask_may_be_of_the_querys_dtype_or_float32(ran):
    inputs = qkv(dtype=torch.bfloat16)
    with attnreg.register_backend("math"):
        for mask in (ADDED.bfloat16(), ADDED):
            assert_right(results(inputs, attn_mask=mask), inputs, bias=mask)
    assert ran() == {"math": (2, 2)}


def test_rows_that_a_mask_hides_altogether_give_zeros():
    mask = BOOLEAN.clone()
    mask[:, :, 2] = False
    inputs = qkv()
    with attnreg.register_backend("math"):
        got = results(inputs, attn_mask=mask)
    assert torch.equal(got[0][:, :, 2], torch.zeros(2, 4, 8))
    assert_right(got, inputs, bias=mask)


@pytest.mark.each_value("scattering", "causal", "layout")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scattering", [False, True])
def test_strides_are_torchs_own_however_inputs_and_a_backends_results_lie(
    fake, ran, layout, causal, scattering
):
    inputs = [layout(x.detach()).requires_grad_() for x in qkv(6, 4)]
    own = torchs_own(inputs, is_causal=causal)
    options = {"load": lambda: SCATTERING} if scattering else {}
    with attnreg.register_backend(fake("mine", **options).backend):
        for _ in range(3):
            got = results(inputs, is_causal=causal)
            lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs)[1]
            assert ran() == {"mine": (2, 1)}
            assert_right(got, inputs, top_left=True, window=CAUSAL if causal else OPEN)
            assert [x.stride() for x in got] == [x.stride() for x in own]
            assert lse.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("shape", [{}, {"heads": 1}, {"len_q": 1}], ids=str)
@pytest.mark.parametrize("scattering", [False, True])
def test_a_scoped_forward_copies_the_lse_laid_out_as_torchs_own_with_the_choice(fake, ran, shape, scattering):
    inputs = qkv(**shape)
    own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs)[1]
    options = {"load": lambda: SCATTERING} if scattering else {}
    with attnreg.register_backend(fake("mine", **options).backend), attnreg.register_backend("cpu"):
        for _ in range(3):
            with attnreg.use_backend("mine"):
                out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs)
            assert lse.transpose(1, 2).is_contiguous()
            torch.testing.assert_close(lse, own)
            assert_right(with_gradients(out, inputs), inputs)
            assert ran() == {"mine": (1, 1)}


@pytest.mark.each_value("either_cpu_kernel", "dtype", "lengths", "scale")
@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-46])  # the last is 0 in float32
@pytest.mark.parametrize("lengths", [(6, 6), (3, 6), (6, 3), (1, 6), (70, 70)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_causal_mask_holds_with_a_scale_of_zero_or_below(
    either_routers, either_cpu_kernel, ran, scale, lengths, dtype
):
    # Torch's own kernel scales the mask's -inf as well, and returns nan.
    attnreg.uninstall()
    with attnreg.register_backend("cpu"):
        for seed in range(3):
            inputs = qkv(*lengths, dtype=dtype, seed=seed)
            got = results(inputs, is_causal=True, scale=scale)
            assert_right(got, inputs, top_left=True, window=CAUSAL, scale=scale)
            assert ran() == {"cpu": (1, 1)}
    attnreg.uninstall()


# ---- torch's own kernel


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize(("shape", "options", "_"), CALLS.values(), ids=CALLS)
def test_torchs_kernel_is_the_default_bit_by_bit_and_counts_as_cpu_if_installed(
    ran, installed, shape, options, _, monkeypatch
):
    # On some machines the compiled kernel replaces it even in calls as small as these.
    monkeypatch.setattr(choice, "machine", lambda: choice.CpuMachine(avx=False, amx=False, slow_mkl=False))
    inputs = qkv(**shape)
    own = torchs_own(inputs, **options)
    if not installed:
        attnreg.uninstall()
        attnreg.register_backend("math").remove()
    for _ in range(3):
        got = results(inputs, **options)
        assert all(map(torch.equal, got, own))
        assert [x.stride() for x in got] == [x.stride() for x in own]
        assert ran() == ({"cpu": (1, 1)} if installed else {})


def test_what_torchs_selector_gives_to_its_math_never_reaches_attnreg(ran):
    query, key, value = qkv()
    with attnreg.register_backend("math"):
        narrow = results((query, key, value[..., :5]))
        assert_right(narrow, (query, key, value[..., :5]))
        mask = ADDED.clone().requires_grad_()
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask).sum().backward()
        assert mask.grad is not None
        F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(query, key, value)
        assert ran() == {}
        explained = attnreg.explain(query, key, value[..., :5])
    assert (explained.backend, explained.source) == ("torch's math kernel", "torch's own selector")


def test_dropout_at_the_op_is_torchs_own_affair(ran):
    inputs = [x.detach() for x in qkv()]
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    errors = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            op(*inputs, 0.5)
        errors.append(str(error.value).splitlines()[0])
        attnreg.uninstall()
    assert errors[0] == errors[1]
    assert ran() == {}


NO_NUMBERS = {
    "scale nan": ({"scale": math.nan}, "scale: got nan, expected a finite number"),
    "scale inf": ({"scale": math.inf}, "scale: got inf, expected a finite number"),
    "dropout below 0": ({"dropout_p": -0.1}, "dropout_p: got -0.1, expected 0 to 1"),
    "dropout nan": ({"dropout_p": math.nan}, "dropout_p: got nan, expected 0 to 1"),
}


@pytest.mark.parametrize(("options", "message"), NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_a_scale_or_probability_that_is_none_is_an_error(ran, options, message):
    with attnreg.register_backend("math"), pytest.raises(attnreg.InvalidInputError) as error:
        F.scaled_dot_product_attention(*qkv(), **options)
    assert str(error.value) == message
    assert ran() == {}


# ---- tensors that are more than memory


def test_tensors_that_are_copied_when_written_to_are_not_copied(either_routers, ran):
    attnreg.uninstall()
    inputs = [x.detach() for x in qkv()]
    lazy = [torch._lazy_clone(x) for x in inputs]
    with attnreg.register_backend("math"):
        for _ in range(3):
            out = F.scaled_dot_product_attention(*lazy)
            truth.assert_near(out, truth.dense(*inputs)[0])
    assert ran() == {"math": (3, 0)}
    assert all(map(torch._C._is_cow_tensor, lazy))
    attnreg.uninstall()


@pytest.fixture
def mesh():
    """Make a mesh of this process alone, for distributed tensors."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.slow  # torch takes seconds to find out how the op is spread over ranks
def test_distributed_tensors_run_on_what_is_registered(mesh, ran):
    from torch.distributed.tensor import Shard, distribute_tensor

    inputs = [x.detach() for x in qkv()]
    over_heads = [distribute_tensor(x, mesh, [Shard(1)]) for x in inputs]
    with attnreg.register_backend("math"):
        out = F.scaled_dot_product_attention(*over_heads)
    assert ran() == {"math": (1, 0)}
    truth.assert_near(out.full_tensor(), truth.dense(*inputs)[0])


def test_packed_distributed_tensors_are_an_error_of_torchs(mesh, packed, ran):
    from torch.distributed.tensor import Replicate, distribute_tensor

    *tensors, max_q, max_k = packed([3, 4], grad=False)
    # No rule says how the op is spread over ranks.
    with pytest.raises(NotImplementedError, match=r"attnreg\._varlen_attn.* sharding strategy"):
        attnreg.varlen_attn(*[distribute_tensor(x, mesh, [Replicate()]) for x in tensors], max_q, max_k)
    assert ran() == {}


# ---- which backend runs


def test_a_scope_holds_for_its_calls_and_their_backward(fake, ran):
    inputs = qkv()
    with attnreg.register_backend(fake("mine").backend), attnreg.register_backend("math"):
        with attnreg.use_backend("mine"):
            out = F.scaled_dot_product_attention(*inputs, is_causal=True)
        other = F.scaled_dot_product_attention(*inputs)
        assert ran() == {"mine": (1, 0), "math": (1, 0)}
        grads = torch.autograd.grad(out, inputs, random_like(out))
        assert ran() == {"mine": (0, 1)}
        other.sum().backward()
        assert ran() == {"math": (0, 1)}
    assert_right([out, *grads], inputs, window=CAUSAL)


@pytest.mark.parametrize(
    ("limit", "options", "meant", "reason"),
    [
        ("causal", {"is_causal": True}, {"window": CAUSAL}, "is_causal must be False, got True"),
        ("bias", {"attn_mask": ADDED}, {"bias": ADDED}, "attn_bias must be None, got a tensor"),
    ],
    ids=["causal", "a mask"],
)
def test_a_backend_that_cannot_run_the_call_gives_way(fake, ran, limit, options, meant, reason):
    inputs = qkv()
    with attnreg.register_backend(fake("mine", **{limit: False}).backend):
        for _ in range(3):
            assert_right(results(inputs), inputs)
            assert_right(results(inputs, **options), inputs, **meant)
        (row,) = attnreg.stats().fallbacks
    assert (row.backend, row.reason, row.count) == ("mine", reason, 6)
    assert ran() == {"cpu": (3, 3), "mine": (3, 3)}


# ---- transforms and modules


def test_a_double_backward_is_an_error_not_wrong_numbers(either_routers, ran):
    attnreg.uninstall()  # so that the routers asked for are put in
    inputs = qkv()
    for registered in (False, True):
        with attnreg.register_backend("math") as handle:
            if not registered:
                handle.remove()
            for _ in range(3):
                out = F.scaled_dot_product_attention(*inputs)
                (grad,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
                with pytest.raises(RuntimeError, match="derivative for aten::_scaled"):
                    grad.sum().backward()
    assert ran() == {"math": (3, 3)}
    attnreg.uninstall()


@pytest.mark.parametrize("name", ["cpu", "math"])
def test_an_output_without_a_gradient_gives_its_inputs_none(either_routers, name):
    inputs = qkv(6, 6)
    with attnreg.register_backend(name):
        for _ in range(3):
            out = F.scaled_dot_product_attention(*inputs)
            grads = torch.autograd.grad(WithoutGradient.apply(out).sum(), inputs, allow_unused=True)
            assert grads == (None, None, None)
            assert_right(results(inputs), inputs)  # and what is kept of the call before is right for this one


# Torch has no batching rule for the op, with or without attnreg, and says that its loop is slow.
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented")
def test_vmap_and_functional_gradients_give_what_a_loop_and_autograd_do(either_routers, ran):
    attnreg.uninstall()
    inputs = qkv()
    many = [torch.stack((x, x + 1, x * 2)).detach() for x in inputs]
    attend = F.scaled_dot_product_attention
    grad = random_like(inputs[0])
    with attnreg.register_backend("math"):
        for _ in range(3):
            mapped = torch.vmap(attend)(*many)
            assert set(ran()) == {"math"}
            expected = torch.stack([attend(*each) for each in zip(*many, strict=True)])
            torch.testing.assert_close(mapped, expected)
            ran()
            grads = torch.func.grad(lambda *x: (attend(*x) * grad).sum(), (0, 1, 2))(*inputs)
            assert ran() == {"math": (1, 1)}
            assert_right([attend(*inputs), *grads], inputs)
            ran()
    attnreg.uninstall()


MODULES = {
    "MultiheadAttention": (
        lambda: torch.nn.MultiheadAttention(16, 4, batch_first=True),
        lambda module, x: module(x, x, x, need_weights=False)[0],
    ),
    "TransformerEncoderLayer": (
        lambda: torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True),
        lambda module, x: module(x),
    ),
}


@pytest.mark.parametrize(("make", "call"), MODULES.values(), ids=MODULES)
def test_modules_of_torch_train_on_a_registered_backend(ran, make, call):
    torch.manual_seed(0)
    module = make().train()
    twin = copy.deepcopy(module).double()
    x = torch.randn(3, 6, 16)
    with attnreg.register_backend("math"):
        out = call(module, x)
        out.square().sum().backward()
    assert ran() == {"math": (1, 1)}
    attnreg.uninstall()
    expected = call(twin, x.double())
    expected.square().sum().backward()
    truth.assert_near(out, expected)
    for parameter, other in zip(module.parameters(), twin.parameters(), strict=True):
        truth.assert_near(parameter.grad, other.grad)


# ---- compiled

COMPILERS = ["aot_eager", pytest.param("", marks=pytest.mark.slow, id="inductor")]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_the_choice_is_made_when_it_runs(whole_graph, compiler, inductor, fake, ran):
    inputs = qkv(dim=16)

    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).sin()

    expected = with_gradients(attend(*inputs), inputs)
    ran()
    compiler = compiler or inductor
    function = whole_graph(attend, backend=compiler)

    def check(runs, scope=None):
        with scope or contextlib.nullcontext():
            out = function(*inputs)
        torch.testing.assert_close(with_gradients(out, inputs), expected)
        assert ran() == runs

    check({})
    with torch._dynamo.config.patch(error_on_recompile=True):
        with attnreg.register_backend("math"):
            check({"math": (1, 1)})
        with attnreg.register_backend(fake("mine").backend):
            check({"mine": (1, 1)})
        check({})
        # Inductor lays the LSE out anew, and with it goes what a scope tells the backward: on a CPU it
        # holds for that only in eager, and through attnreg.varlen_attn.
        check({"math": (1, int(compiler != "inductor"))}, attnreg.use_backend("math"))


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_with_a_backend_registered_before_it_runs_that(whole_graph, compiler, inductor, ran):
    inputs = qkv(3, 7, heads_k=2, dim=16)
    mask = BOOLEAN[:, :, :3].repeat(1, 1, 1, 2)[..., :7]
    attend = functools.partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
    with attnreg.register_backend("math"):
        got = with_gradients(whole_graph(attend, backend=compiler or inductor)(*inputs), inputs)
    assert ran() == {"math": (1, 1)}
    assert_right(got, inputs, bias=mask)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, id=name, marks=[pytest.mark.slow] * (name != "bshd")) for name, x in LAYOUTS.items()],
)
def test_compiled_strides_are_those_that_the_compiler_expects(whole_graph, layout, ran):
    inputs = [layout(x.detach()).requires_grad_() for x in qkv()]

    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(2, 6, -1)

    with attnreg.register_backend("math"):
        expected = with_gradients(attend(*inputs), inputs)
        ran()
        # What Inductor generates asserts the strides of everything that an op returns.
        got = with_gradients(whole_graph(attend)(*inputs), inputs)
        assert ran() == {"math": (1, 1)}
    torch.testing.assert_close(got, expected)


class Layer(torch.nn.Module):
    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def test_an_exported_program_holds_ops_of_torch_alone_and_runs_what_is_registered(ran):
    inputs = [x.detach() for x in qkv()]
    with attnreg.register_backend("math"):
        program = torch.export.export(Layer(), tuple(inputs))
        ops = {node.target for node in program.graph.nodes if node.op == "call_function"}
        assert {op.namespace for op in ops} == {"aten"}
        ran()
        truth.assert_near(program.module()(*inputs), truth.dense(*inputs, window=CAUSAL)[0])
        assert ran() == {"math": (1, 0)}
    program.module()(*inputs)
    assert "math" not in ran()

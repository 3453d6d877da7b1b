"""Promises about the efficient ops, which torch has for CUDA alone: values, layouts, and who runs them."""

import contextlib
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from support import fake_cudnn, truth
from support.cuda_ops import LENGTHS_K, LENGTHS_Q
from support.dense import ADDED, CAUSAL, OPEN, assert_near, qkv, random_like, with_gradients
from support.efficient_ops import BACKWARD, FORWARD, call, native_kernels, rounded, varlen
from support.known import know
from support.packages import on_cpu

import attnreg
from attnreg.backends import cudnn, math
from attnreg.backends import efficient as backend
from attnreg.core.aten import efficient
from attnreg.core.policy import current as policy
from attnreg.core.times import traces
from attnreg.core.torchlib import captured, versions
from attnreg.errors import UnsupportedInputError
from attnreg.tools.tuning.representatives import recorded_kinds
from attnreg.tools.warmup import run_decided

pytestmark = pytest.mark.usefixtures("one_thread")


def in_steps(bias):
    """Return a bias with rows of whole sixteen bytes, as `F.scaled_dot_product_attention` makes them."""
    return F.pad(bias, (0, -bias.shape[-1] % 4))[..., : bias.shape[-1]]


SHAPES = {"square": {}, "fewer queries": {"len_q": 3}, "fewer keys": {"len_k": 3}}


def assert_right(result, inputs, **meant):
    """Check output, LSE and gradients of a dense call against the reference."""
    length = inputs[0].shape[2]
    expected, expected_lse = truth.dense(*inputs, **meant)
    lse = result[1]
    assert lse.shape[-1] == rounded(length)
    assert (lse[..., length:] == torch.inf).all()
    truth.assert_near(lse[..., :length], expected_lse, torch.float32)
    assert result[0].transpose(1, 2).is_contiguous()
    assert_near(with_gradients(result[0], inputs), inputs, expected)


@pytest.mark.pairwise("dtype", "shape", "causal")
@pytest.mark.parametrize("native", [False, True], ids=["math", "torch's own"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dense_call_is_right_with_the_ops_own_alignment(route, ran, native, causal, shape, dtype):
    route(native_kernels())
    inputs = qkv(**shape, dtype=dtype)
    policy.activate(True)
    if not native:
        attnreg.register_backend("math")
    for _ in range(3):
        result = call(inputs, causal=causal, scale=0.4)
        assert_right(result, inputs, window=CAUSAL if causal else OPEN, top_left=True, scale=0.4)
    assert ran() == {"efficient" if native else "math": (3, 3)}


def test_with_nothing_registered_the_call_and_its_results_are_torchs(route, ran):
    kernels = native_kernels()
    route(kernels)
    inputs = qkv()
    bias = in_steps(ADDED)
    out, _, seed, offset = call(inputs, bias=bias)
    out.sum().backward()
    assert (int(seed), int(offset)) == (3, 4)
    ((args, _),) = kernels[FORWARD].calls
    assert args[3] is bias
    assert len(kernels[BACKWARD].calls) == 1
    assert ran() == {}


@pytest.mark.parametrize("native", [False, True], ids=["math", "torch's own"])
@pytest.mark.parametrize("bias", [None, ADDED], ids=["no bias", "bias"])
def test_shared_heads_are_right_as_torch_2_14_passes_them(route, ran, monkeypatch, native, bias):
    monkeypatch.setattr(versions, "EFFICIENT_SHARES_HEADS", True)
    route(native_kernels())
    inputs, bias = qkv(heads_k=2), None if bias is None else in_steps(bias)
    policy.activate(True)
    if not native:
        attnreg.register_backend("math")
    for _ in range(3):
        assert_right(call(inputs, bias=bias), inputs, bias=bias)
    assert ran() == {"efficient" if native else "math": (3, 3)}


BIASES = {
    "added": ADDED,
    "of the keys": ADDED[:, :, :1].expand(2, 4, 6, 6),
    "for all heads": ADDED[:1, :1].expand(2, 4, 6, 6),
    "hiding": ADDED.masked_fill(ADDED > 0.5, -torch.inf),
}


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_a_bias_counts_forward_and_backward(route, ran, bias):
    route()
    inputs = qkv()
    attnreg.register_backend("math")
    assert_right(call(inputs, bias=bias), inputs, bias=bias)
    assert ran() == {"math": (1, 1)}


def test_a_backend_that_declares_no_bias_runs_no_call_with_one(route, ran, fake):
    route(native_kernels())
    attnreg.register_backend(fake("plain", bias=False).backend)
    inputs = qkv()
    call(inputs)
    assert ran() == {"plain": (1, 0)}
    padded = in_steps(ADDED)
    assert_right(call(inputs, bias=padded), inputs, bias=padded)
    reasons = {row.reason for row in attnreg.stats().fallbacks if row.backend == "plain"}
    assert "attn_bias must be None, got a tensor" in reasons
    assert ran() == {"efficient": (1, 1)}


@pytest.mark.parametrize("keys", [16, 24, 7, 1000])
def test_the_gradient_of_a_bias_lies_as_torchs_meta_function_says(keys):
    q, k = (torch.empty(2, length, 4, 8, dtype=torch.bfloat16, device="meta") for length in (5, keys))
    bias = torch.empty(2, 4, 5, keys, dtype=torch.bfloat16, device="meta")
    lse, word = torch.empty(2, 4, 32, device="meta"), torch.empty((), dtype=torch.int64, device="meta")
    meta = torch.ops.aten._efficient_attention_backward(
        q, q, k, k, bias, q, None, None, 5, keys, lse, 0.0, word, word, 0, True
    )[3]
    grad = torch.randn(2, 4, 5, keys, dtype=torch.bfloat16)
    for given, missing in (
        (grad, 0),
        (grad.transpose(0, 1).contiguous().transpose(0, 1), 0),
        (grad[..., 1:], 1),
    ):
        found = efficient._whole(given, bias)
        assert (found.shape, found.stride()) == (meta.shape, meta.stride())
        assert torch.equal(found[..., : keys - missing], given)
        assert not found[..., keys - missing :].any()


@pytest.mark.parametrize("first", ["math", "efficient"])
def test_a_row_that_the_bias_hides_entirely_pairs_with_either_backward(route, ran, first):
    route(native_kernels())
    policy.activate(True)
    bias = in_steps(ADDED).clone()
    bias[:, :, 2] = -torch.inf
    inputs = qkv()
    with attnreg.register_backend("math") if first == "math" else contextlib.nullcontext():
        result = call(inputs, bias=in_steps(bias))
    second = {"math": "efficient", "efficient": "math"}[first]
    with attnreg.register_backend("math") if second == "math" else contextlib.nullcontext():
        grads = with_gradients(result[0], inputs)[1:]
    assert ran() == {first: (1, 0), second: (0, 1)}
    assert_near([result[0], *grads], inputs, truth.dense(*inputs, bias)[0])


NO_GRADIENT = "attn_bias must need no gradient"


@pytest.fixture
def without_gradient(fake):
    """Return a function that registers a backend without gradients of a bias until the test ends.

    A test calls it after `route`: what is installed before isn't taken out any more.
    """
    with contextlib.ExitStack() as registered:

        def register():
            backend = fake("plain", bias=True, dropout=True).backend
            registered.enter_context(attnreg.register_backend(backend))
            return backend.name

        yield register


@pytest.mark.parametrize("enter", [attnreg.register_backend, attnreg.use_backend])
@pytest.mark.parametrize("name", ["math", "plain"])
def test_the_gradient_of_a_bias_comes_from_a_backend_that_declares_it(
    route, ran, enter, name, without_gradient
):
    route(native_kernels())
    without_gradient()
    leaf = F.pad(ADDED[:1], (0, 2)).requires_grad_()
    inputs = qkv()
    with enter(name):
        out = call(inputs, bias=leaf[..., :6].expand(2, 4, 6, 6))[0]
        got = torch.autograd.grad(out, [*inputs, leaf], random_like(out))
    fallback = [row for row in attnreg.stats().fallbacks if row.backend == name]
    if name == "math":
        assert ran() == {"math": (1, 1)}
        assert fallback == []
    else:
        assert ran() == {name: (1, 0), "efficient": (0, 1)}
        assert [(row.reason, row.count) for row in fallback] == [(NO_GRADIENT, 1)]
    expected, _ = truth.dense(*inputs, leaf[..., :6])
    right = torch.autograd.grad(expected, [*inputs, leaf], random_like(out).double())
    for one, other in zip(got, right, strict=True):
        truth.assert_near(one, other.double())


@pytest.fixture
def with_cudnn(route, monkeypatch):
    """Have cuDNN, efficient and math run calls on the CPU, by fakes of their packages."""
    kernels = native_kernels()
    route(kernels)
    monkeypatch.setattr(captured, "kernel", lambda op, key: kernels[op])
    fake_cudnn.install(monkeypatch)
    of_h200 = dataclasses.replace(on_cpu(cudnn.BACKEND), version=lambda: "9.19.0")
    know(monkeypatch, math.BACKEND, on_cpu(backend.BACKEND), of_h200)


# What runs a call with a bias of a shape where cuDNN is asked for, and the reason against cuDNN.
SERVED_BY_CUDNN = {
    "for each sequence": ((2, 4, 6, 8), {"cuDNN": (1, 1)}, ""),
    "for all sequences": ((1, 4, 6, 8), {"cuDNN": (1, 1)}, ""),
    "for all heads": ((2, 1, 6, 8), {"cuDNN": (1, 1)}, ""),
    "for all queries": (
        (2, 1, 1, 8),
        {"cuDNN": (1, 0), "efficient": (0, 1)},
        "attn_bias must have a row for each query in a backward, got one row for 6 queries",
    ),
    "seven keys": (
        (2, 4, 6, 7),
        {"cuDNN": (1, 0), "efficient": (0, 1)},
        "max_k must be a multiple of 8 for the gradient of attn_bias, got 7",
    ),
}


@pytest.mark.parametrize(("shape", "runs", "reason"), SERVED_BY_CUDNN.values(), ids=SERVED_BY_CUDNN)
def test_cudnn_adds_a_bias_where_it_is_asked_for(with_cudnn, ran, shape, runs, reason):
    inputs = qkv(len_k=shape[-1], dtype=torch.bfloat16)
    leaf = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
    for _ in range(3):
        with attnreg.register_backend("cuDNN"):
            rows = F.pad(leaf, (0, -shape[-1] % 8))[..., : shape[-1]]
            out = call(inputs, bias=rows.expand(2, 4, 6, shape[-1]))[0]
            got = torch.autograd.grad(out, [*inputs, leaf], random_like(out))
        assert [row.reason for row in attnreg.stats().fallbacks if row.backend == "cuDNN"] == [reason] * bool(
            reason
        )
        assert ran() == runs
        expected, _ = truth.dense(*inputs, leaf)
        right = torch.autograd.grad(expected, [*inputs, leaf], random_like(out).double())
        for one, other in zip(got, right, strict=True):
            truth.assert_near(one, other.double())


def test_a_bias_that_all_queries_share_does_not_keep_cudnn_from_other_lengths(with_cudnn, ran):
    with attnreg.register_backend("cuDNN"):
        for length, rows, runs in (
            (6, 1, {"cuDNN": (1, 0), "efficient": (0, 1)}),
            (5, 5, {"cuDNN": (1, 1)}),
            (6, 1, {"cuDNN": (1, 0), "efficient": (0, 1)}),
        ):
            inputs = qkv(len_q=length, len_k=8, dtype=torch.bfloat16)
            bias = ADDED[:, :, :rows, :1].bfloat16().expand(2, 4, rows, 8).contiguous()
            call(inputs, bias=bias.expand(2, 4, length, 8))[0].sum().backward()
            assert ran() == runs


def test_where_nothing_asks_for_cudnn_torchs_kernel_adds_the_bias(with_cudnn, ran):
    policy.activate(True)
    inputs = qkv(len_k=8, dtype=torch.bfloat16)
    bias = torch.ones(2, 4, 6, 8, dtype=torch.bfloat16, requires_grad=True)
    call(inputs, bias=bias)[0].sum().backward()
    assert ran() == {"efficient": (1, 1)}
    with attnreg.register_backend("math"), attnreg.use_backend("efficient"):
        call(inputs, bias=bias)[0].sum().backward()
    assert ran() == {"efficient": (1, 1)}


def test_strict_makes_a_backward_that_cudnn_declines_an_error(with_cudnn):
    attnreg.configure({"strict": True})
    inputs, bias = qkv(len_k=8, dtype=torch.bfloat16), torch.ones(2, 4, 1, 8, dtype=torch.bfloat16)
    with attnreg.use_backend("cuDNN"):
        out = call(inputs, bias=bias.expand(2, 4, 6, 8))[0]
        with pytest.raises(UnsupportedInputError, match="attn_bias must have a row for each query"):
            out.sum().backward()


@pytest.mark.parametrize("first", ["math", "efficient"])
def test_a_bias_may_be_all_that_needs_a_gradient(route, ran, first):
    """Torch asks for no LSE then, without which the backward is an error (pytorch#148476)."""
    route(native_kernels())
    policy.activate(True)
    inputs = [x.detach() for x in qkv()]
    for _ in range(3):
        call(inputs, bias=in_steps(ADDED), lse=False)  # the same kind, but for the gradient
    attnreg.reset_stats()
    for _ in range(3):
        leaf = F.pad(ADDED, (0, 2)).requires_grad_()
        with attnreg.use_backend("math") if first == "math" else contextlib.nullcontext():
            out, lse, *_ = call(inputs, bias=leaf[..., :6], lse=False)
        assert lse.shape == (2, 4, rounded(6))
        (got,) = torch.autograd.grad(out, leaf, random_like(out))
        expected, _ = truth.dense(*inputs, leaf[..., :6])
        (right,) = torch.autograd.grad(expected, leaf, random_like(out).double())
        truth.assert_near(got, right.double())
    assert ran() == {first: (3, 3)}
    with torch.no_grad():
        assert call(inputs, bias=leaf[..., :6], lse=False)[1].shape == (2, 4, 0)


def test_strict_makes_it_an_error_that_another_backend_gives_the_gradient_of_a_bias(route, without_gradient):
    route(native_kernels())
    attnreg.configure({"strict": True})
    with attnreg.use_backend(without_gradient()):
        out = call(qkv(), bias=in_steps(ADDED).requires_grad_())[0]
        with pytest.raises(UnsupportedInputError, match="strict"):
            out.sum().backward()


def test_with_dropout_the_gradient_of_a_bias_has_its_backend_run_the_forward_too(
    route, ran, without_gradient
):
    kernels = native_kernels()
    route(kernels)
    without_gradient()
    bias = in_steps(ADDED).requires_grad_()
    call(qkv(), bias=bias, dropout=0.2)[0].sum().backward()
    assert ran() == {"efficient": (1, 1)}
    assert kernels[BACKWARD].calls[0][0][15] is True
    with attnreg.use_backend("math"):
        call(qkv(), bias=bias, dropout=0.2)[0].sum().backward()
    assert ran() == {"math": (1, 1)}


def test_dropout_ties_the_backward_to_the_forwards_backend(route, ran):
    route(native_kernels())
    inputs = qkv()
    with attnreg.register_backend("math"):
        out = call(inputs, dropout=0.2)[0]
    policy.activate(True)
    out.sum().backward()
    assert ran() == {"math": (1, 1)}
    out = call(inputs, dropout=0.2)[0]
    with attnreg.register_backend("math"):
        out.sum().backward()
    assert ran() == {"efficient": (1, 1)}


def test_the_choice_of_a_scope_goes_to_the_backward_outside_it(route, ran):
    route(native_kernels())
    policy.activate(True)
    inputs = qkv()
    for _ in range(3):
        with attnreg.use_backend("math"):
            out = call(inputs)[0]
        out.sum().backward()
    assert ran() == {"math": (3, 3)}


def test_without_a_gradient_torch_is_given_an_lse_without_rows(route):
    route()
    attnreg.register_backend("math")
    out, lse, *_ = call([x.detach() for x in qkv()], lse=False)
    assert (tuple(out.shape), tuple(lse.shape)) == ((2, 4, 6, 8), (2, 4, 0))


def test_a_batch_that_torchs_kernel_cannot_launch_is_cut_by_the_backend(route, ran, monkeypatch):
    kernels = native_kernels()
    route(kernels)
    monkeypatch.setattr(backend, "GRID", 2)
    monkeypatch.setattr(captured, "kernel", lambda op, key: kernels[op])
    policy.activate(True)
    know(monkeypatch, math.BACKEND, on_cpu(backend.BACKEND))
    inputs = qkv(batch=5)
    for shape in (None, (1, 4, 6, 6)):
        bias = None if shape is None else in_steps(ADDED[:1]).expand(5, 4, 6, 6)
        assert_right(call(inputs, bias=bias), inputs, bias=bias)
    assert ran() == {"efficient": (2, 2)}
    for fake in kernels.values():
        assert [args[0].shape[0] for args, _ in fake.calls] == [2, 2, 1] * 2
    for shape in ((1, 4, 6, 6), (5, 1, 1, 6)):
        leaf = in_steps(ADDED[:1, : shape[1], : shape[2]]).expand(shape).clone().requires_grad_()
        given = in_steps(leaf.expand(5, 4, 6, 6))
        (got,) = torch.autograd.grad(call(inputs, bias=given)[0].sum(), leaf)
        (right,) = torch.autograd.grad(truth.dense(*inputs, leaf)[0].sum(), leaf)
        truth.assert_near(got, right.double())


def with_shared_keys(**options):
    """Return query, key and value, one key and value expanded to all heads; none needs a gradient."""
    query, key, value = (x.detach() for x in qkv(**options, heads_k=1))
    return query, *(x.expand(-1, query.shape[1], -1, -1) for x in (key, value))


@pytest.mark.parametrize("bias", [None, ADDED[:1, :, :1]], ids=["no bias", "bias"])
@pytest.mark.parametrize("lse", [False, True])
def test_one_key_for_all_heads_is_right_and_copies_nothing(route, ran, bias, lse):
    kernels = native_kernels()
    route(kernels)
    policy.activate(True)
    inputs = with_shared_keys(len_q=33)
    bias = None if bias is None else in_steps(bias.expand(2, 4, 33, 6).contiguous())
    for _ in range(3):
        out, got_lse, *_ = call(inputs, bias=bias, lse=lse)
        truth.assert_near(out, truth.dense(*inputs, bias)[0], torch.float32)
        assert got_lse.shape == (2, 4, rounded(33) if lse else 0)
    assert ran() == {"efficient": (3, 0)}
    assert {args[1].stride(2) for args, _ in kernels[FORWARD].calls} == {0}


@pytest.mark.parametrize("options", [{}, {"seqlen_k": torch.tensor(LENGTHS_K, dtype=torch.int32)}], ids=str)
def test_one_key_for_all_heads_is_right_in_packed_calls_that_only_torchs_kernel_understands_too(
    route, options
):
    kernels = native_kernels()
    route(kernels)
    policy.activate(True)
    (query, key, value), *lengths = packed_inputs()
    key, value = (x.detach()[:, :1].expand(-1, 4, -1) for x in (key, value))
    out, lse, *_ = varlen((query.detach(), key, value), *lengths, lse=False, **options)
    truth.assert_near(out[0], truth.varlen(query, key, value, *lengths[:2])[0], torch.float32)
    assert lse.shape[-1] == 0


def test_recorded_are_the_calls_that_the_op_serves(route, tmp_path):
    route(native_kernels())
    with attnreg.record(tmp_path / "calls.jsonl"):
        inputs = qkv()
        for _ in range(2):
            call(inputs, bias=in_steps(ADDED))[0].sum().backward()
    (one,) = traces.read(tmp_path / "calls.jsonl")
    assert (one.spec.bias, one.spec.dtype, one.forward, one.backward) == (True, "float32", 2, 2)


def test_a_recorded_call_whose_bias_needs_a_gradient_is_warmed_as_it_was_called(route, ran, fake, tmp_path):
    """A backend that builds something for each kind of call builds nothing more in the calls themselves."""
    route(native_kernels())
    inputs, leaf, built = qkv(), in_steps(ADDED).requires_grad_(), set()
    with attnreg.record(tmp_path / "calls.jsonl"):
        call(inputs, bias=leaf)[0].sum().backward()
    recorder = fake("mine", bias_gradient=True)

    def building(kernel):
        def run(*given):
            built.add((kernel.__name__, given[-1].attn_bias is not None, given[-1].bias_gradient))
            return kernel(*given)

        return run

    kernels = attnreg.Kernels(building(recorder.forward), building(recorder.backward))
    recorded = traces.read(tmp_path / "calls.jsonl")
    with attnreg.register_backend(fake("mine", bias_gradient=True, load=lambda: kernels).backend):
        for kind in recorded_kinds(recorded, attnreg.Device("cpu")):
            for direction in kind.directions:
                assert [(one.backend, one.error) for one in run_decided(kind, direction)] == [("mine", None)]
        assert built == {("forward", True, False), ("backward", True, True)}
        warmed = set(built)
        attnreg.reset_stats()
        out = call(inputs, bias=leaf)[0]
        got = torch.autograd.grad(out, [*inputs, leaf], random_like(out))
    assert built == warmed
    assert ran() == {"mine": (1, 1)}
    expected, _ = truth.dense(*inputs, leaf)
    right = torch.autograd.grad(expected, [*inputs, leaf], random_like(out).double())
    for one, other in zip(got, right, strict=True):
        truth.assert_near(one, other.double())


# Packed, as nested tensors call the op


def packed_inputs(lengths_k=LENGTHS_K):
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), 4, 8) for lengths in (LENGTHS_Q, lengths_k, lengths_k)]
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (LENGTHS_Q, lengths_k))
    return tensors, cu_q, cu_k, max(LENGTHS_Q), max(lengths_k)


@pytest.mark.parametrize("native", [False, True], ids=["math", "torch's own"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_packed_call_is_right_forward_and_backward(route, ran, native, causal):
    kernels = native_kernels()
    route(kernels)
    policy.activate(True)
    if not native:
        attnreg.register_backend("math")
    tensors, cu_q, cu_k, max_q, max_k = packed_inputs(LENGTHS_Q if causal else LENGTHS_K)
    cu_k = cu_q if causal else cu_k  # self-attention: the two alignments are one
    out, lse, *_ = varlen(tensors, cu_q, cu_k, max_q, max_k, mask=int(causal), scale=0.4)
    window = CAUSAL if causal else OPEN
    expected, expected_lse = truth.varlen(*tensors, cu_q, cu_k, window=window, scale=0.4)
    for index, length in enumerate(LENGTHS_Q):
        row = lse[index]
        assert (row[:, length:] == torch.inf).all()
        start = int(cu_q[index])
        truth.assert_near(row[:, :length], expected_lse[:, start : start + length], torch.float32)
    assert_near([out[0], *with_gradients(out, tensors)[1:]], tensors, expected)
    assert ran() == {"efficient" if native else "math": (1, 1)}


@pytest.mark.parametrize("rows", [0, 2], ids=["no rows", "rows of no sequence"])
@pytest.mark.parametrize("max_length", [0, 5])
def test_a_packed_call_without_tokens_gives_nothing(route, ran, max_length, rows):
    route()
    attnreg.register_backend("math")
    tensors = [torch.zeros(rows, 4, 8, requires_grad=True) for _ in range(3)]
    offsets = torch.zeros(3, dtype=torch.int32)
    out, lse, *_ = varlen(tensors, offsets, offsets, max_length, max_length)
    assert out.shape == (1, rows, 4, 8)
    assert not out.any()
    assert lse.shape == (2, 4, rounded(max_length))
    assert (lse == torch.inf).all()
    grads = torch.autograd.grad(out.sum(), tensors)
    assert [x.shape for x in grads] == [(rows, 4, 8)] * 3
    assert not any(x.any() for x in grads)
    assert ran() == {"math": (1, 1)}


ONLY_TORCHS = {
    "a window": {"window_size": 2, "mask": 1},
    "top-left over other keys": {"mask": 1},
}


@pytest.mark.parametrize("options", ONLY_TORCHS.values(), ids=ONLY_TORCHS)
def test_what_only_torchs_kernel_understands_is_left_to_it_or_an_error(route, ran, options):
    kernels = native_kernels()
    route(kernels)
    attnreg.register_backend("math")
    varlen(*packed_inputs(), **options)
    assert len(kernels[FORWARD].calls) == 1
    assert ran() == {}
    route()
    with pytest.raises(UnsupportedInputError, match="torch has no kernel for this device"):
        varlen(*packed_inputs(), **options)

"""Promises of cuDNN's calls with a bias: values, what it reads, what it refuses and declines."""

import dataclasses

import pytest
import torch
from support import truth
from support.packages import gpu_spec

from attnreg.backends import cudnn, efficient, math
from attnreg.core.contract.backend import Call
from attnreg.core.registry.entry import Entry
from attnreg.errors import UnsupportedInputError
from attnreg.tools.measure import CASES
from attnreg.tools.measure.rule import measure_taken

ENTRY = Entry("cuDNN", "a test", cudnn.BACKEND)
B, H, S_Q, S_K = 2, 4, 40, 24

SHAPES = {
    "full": (B, H, S_Q, S_K),
    "of all sequences": (1, H, S_Q, S_K),
    "of all heads": (B, 1, S_Q, S_K),
    "of both": (1, 1, S_Q, S_K),
    "three dims": (H, S_Q, S_K),
    "two dims": (S_Q, S_K),
    "of all keys": (B, H, S_Q, 1),
}
WINDOWS = {"all": (-1, -1), "causal": (-1, 0)}


def drawn(shape, length_q=S_Q, length_k=S_K, heads_k=H, dtype=torch.bfloat16):
    """Return query, key, value and gradient (B, S, H, D), and a bias of a shape."""
    generator = torch.Generator().manual_seed(3)
    shapes = (B, length_q, H, 16), *[(B, length_k, heads_k, 16)] * 2, (B, length_q, H, 16), shape
    return [torch.randn(size, generator=generator).to(dtype) for size in shapes]


def run_both(kernels, q, k, v, grad, bias, window=(-1, -1), wants_bias=True):
    """Return output, LSE and all gradients."""
    call = Call(0.25, q.shape[1], k.shape[1], window, attn_bias=bias)
    out, lse = kernels.forward(q, k, v, call)
    return out, lse, *kernels.backward(grad, q, k, v, out, lse, call._replace(bias_gradient=wants_bias))


def assert_right(kernels, q, k, v, grad, bias, window=(-1, -1), wants_bias=True):
    """Hold output, LSE and gradients to float64, in the shapes and dtypes of the contract."""
    results = run_both(kernels, q, k, v, grad, bias, window, wants_bias)
    models = (q, k, v, bias) if wants_bias else (q, k, v)
    assert [(x.shape, x.dtype) for x in results[2:]] == [(x.shape, x.dtype) for x in models]
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    added = bias if bias.dtype == torch.bool else bias.double().requires_grad_()
    out, lse = truth.dense(*(x.transpose(1, 2) for x in leaves), added, scale=0.25, window=window)
    wanted = leaves + [added] * wants_bias
    right = torch.autograd.grad(out, wanted, grad.transpose(1, 2).double())
    truth.assert_near(results[1], lse, torch.float32)
    for got, expected in zip((results[0], *results[2:]), (out.transpose(1, 2), *right), strict=True):
        truth.assert_near(got, expected, q.dtype)


# Values


@pytest.mark.each_value("shape", "wants_bias", "dtype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wants_bias", [True, False], ids=["with its gradient", "without"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape_that_broadcasts_is_right(kernels, shape, wants_bias, dtype):
    assert_right(kernels, *drawn(shape, dtype=dtype), wants_bias=wants_bias)


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)], ids=["sequences", "heads", "both"])
def test_an_expanded_bias_is_read_where_it_lies(kernels, module, dims):
    shape = [1 if n in dims else size for n, size in enumerate((B, H, S_Q, S_K))]
    q, k, v, grad, bias = drawn(shape)
    expanded = bias.expand(B, H, S_Q, S_K)
    assert_right(kernels, q, k, v, grad, expanded)
    for graph in module.graphs:
        given = graph.options["bias"]
        assert given.stride == [*expanded.stride()]
        assert graph.running.addresses[given.uid] == bias.data_ptr()


@pytest.mark.parametrize("wants_bias", [True, False])
@pytest.mark.parametrize("heads_k", [4, 2, 1])
def test_a_causal_mask_beside_a_bias_is_aligned_top_left(kernels, module, heads_k, wants_bias):
    given = drawn((B, H, S_K, S_K), S_K, S_K, heads_k)
    assert_right(kernels, *given, window=(-1, 0), wants_bias=wants_bias)
    assert [graph.options["diagonal_alignment"] for graph in module.graphs] == ["TOP_LEFT"] * 2


def test_scores_that_a_causal_mask_hides_give_the_bias_no_gradient(kernels, monkeypatch):
    """Whatever the memory has held: the fake doesn't write the gradients of hidden scores."""
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, size, **_: x.new_full(size, torch.nan))
    *_, grad = run_both(kernels, *drawn((H, S_K, S_K), S_K, S_K), window=(-1, 0))
    assert torch.equal(grad, grad.tril())
    assert grad.tril().any()


@pytest.mark.parametrize("wants_bias", [True, False])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("heads", [H, 1])
def test_a_row_that_a_bias_hides_has_no_output_and_no_gradient(kernels, heads, window, wants_bias):
    q, k, v, grad, bias = drawn((B, heads, S_K, S_K), S_K, S_K)
    bias[bias > 0.7] = -torch.inf
    bias[:, :, ::5] = -torch.inf
    assert_right(kernels, q, k, v, grad, bias, window, wants_bias)
    out, lse, grad_q, _, _, *of_bias = run_both(kernels, q, k, v, grad, bias, window, wants_bias)
    assert (lse[:, :, ::5] == -torch.inf).all()
    assert not out[:, ::5].any()
    assert not grad_q[:, ::5].any()
    assert not any(x[:, :, ::5].any() for x in of_bias)


def test_a_boolean_bias_hides_keys(kernels):
    q, k, v, grad, bias = drawn((B, 1, S_Q, S_K))
    visible = bias > -0.5
    visible[:, :, ::7] = False
    assert_right(kernels, q, k, v, grad, visible, wants_bias=False)


@pytest.mark.parametrize("length_k", [23, 25, 1])
def test_any_number_of_keys_is_right_without_the_gradient_of_the_bias(kernels, length_k):
    given = drawn((B, H, S_Q, length_k), length_k=length_k)
    assert_right(kernels, *given, wants_bias=False)


def test_a_bias_of_other_strides_or_alignment_is_copied(kernels, module):
    q, k, v, grad, bias = drawn((1, H, S_Q, S_K))
    across = bias.mT.contiguous().mT
    apart = bias.new_zeros(1, H, S_Q, S_K + 3)[..., 3:].copy_(bias)
    every_second = bias.new_zeros(1, H, S_Q, 2 * S_K)[..., ::2].copy_(bias)
    for given in (across, apart, every_second):
        assert_right(kernels, q, k, v, grad, given)
    # Each copy is contiguous and expanded, so that all have the same execution plans.
    assert [graph.options["bias"].stride for graph in module.graphs] == [[0, S_Q * S_K, S_K, 1]] * 2


def test_calls_without_queries_or_keys_have_gradients_of_zeros(kernels, module):
    q, k, v, grad, bias = drawn((H, S_Q, S_K))
    for given in ((q[:, :0], k, v, grad[:, :0], bias[:, :0]), (q, k[:, :0], v[:, :0], grad, bias[..., :0])):
        results = run_both(kernels, *given)
        assert results[5].shape == given[4].shape
        assert not any(x.any() for x in (results[0], *results[2:]))
    assert not module.graphs


# Biases that all queries share


@pytest.mark.parametrize("shape", [(B, 1, 1, S_K), (1, H, 1, S_K), (S_K,)], ids=str)
def test_a_bias_that_all_queries_share_counts_forward_and_is_declined_backward(kernels, module, shape):
    q, k, v, grad, bias = drawn(shape)
    bias[..., ::3] = -torch.inf
    for given in (bias, bias.expand(B, H, S_Q, S_K), bias > -torch.inf):
        call = Call(0.25, S_Q, S_K, attn_bias=given)
        out, lse = kernels.forward(q, k, v, call)
        expected, expected_lse = truth.dense(*(x.transpose(1, 2) for x in (q, k, v)), given, scale=0.25)
        truth.assert_near(out, expected.transpose(1, 2), q.dtype)
        truth.assert_near(lse, expected_lse, torch.float32)
        for wants_bias in (True, False):
            with pytest.raises(UnsupportedInputError) as refused:
                kernels.backward(grad, q, k, v, out, lse, call._replace(bias_gradient=wants_bias))
            assert str(refused.value) == (
                "attn_bias must have a row for each query in a backward, got one row for 40 queries"
            )
    assert all(len(graph.inputs) == 3 for graph in module.graphs)  # no backward was built


def test_a_bias_of_a_single_query_is_no_shared_one(kernels):
    *given, bias = drawn((B, H, 1, S_K), length_q=1)
    of_many = bias.expand(B, H, S_Q, S_K)
    assert of_many[:, :, :1].stride(2) == 0
    for one in (bias, of_many[:, :, :1]):
        assert_right(kernels, *given, one)


@pytest.mark.parametrize("name", ["key padding mask bfloat16", "key padding mask float16"])
def test_of_a_padding_mask_the_kit_checks_the_forward(kernels, name):
    (case,) = [case for case in CASES if str(case) == name]
    errors, declined = measure_taken(kernels, case)
    assert errors.keys() == {"out", "lse"}
    assert all(error.passed for error in errors.values())
    assert declined == "attn_bias must have a row for each query in a backward, got one row for 63 queries"


# What it builds and keeps


def test_each_shape_and_layout_of_a_bias_has_an_execution_plan_of_its_own(kernels, module):
    plans = kernels.forward.args[0]
    for _ in range(2):
        run_both(kernels, *drawn((B, H, S_Q, S_K)))
        run_both(kernels, *drawn((1, H, S_Q, S_K)))
        run_both(kernels, *drawn((B, H, S_Q, S_K)), wants_bias=False)
    assert plans.built == {"forward": 2, "backward": 3}
    assert [graph.options.get("dBias") is not None for graph in module.graphs] == [
        False, True, False, True, False
    ]  # fmt: skip


def test_a_call_without_a_bias_has_another_execution_plan(kernels):
    q, k, v, grad, bias = drawn((H, S_Q, S_K))
    call = Call(0.25, S_Q, S_K)
    plain, _ = kernels.forward(q, k, v, call)
    out, *_ = run_both(kernels, q, k, v, grad, bias)
    assert not torch.equal(out, plain)
    assert torch.equal(kernels.forward(q, k, v, call)[0], plain)


def test_a_capture_runs_what_ran_before_and_declines_the_rest(kernels, module, monkeypatch):
    q, k, v, grad, bias = drawn((H, S_Q, S_K))
    before = run_both(kernels, q, k, v, grad, bias)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = run_both(kernels, q, k, v, grad, bias)
    assert all(torch.equal(one, other) for one, other in zip(before, captured, strict=True))
    with pytest.raises(UnsupportedInputError, match="run the call once before the capture"):
        run_both(kernels, q[:, :16], k, v, grad[:, :16], bias[:, :16])
    assert len(module.graphs) == 2


def test_no_launcher_runs_a_call_with_a_bias(kernels):
    q, k, v, grad, bias = drawn((H, S_Q, S_K))
    call = Call(0.25, S_Q, S_K, attn_bias=bias)
    out, lse = kernels.forward(q, k, v, call)
    kernels.backward(grad, q, k, v, out, lse, call)
    assert kernels.specialize("forward", (q, k, v), call) is None
    assert kernels.specialize("backward", (grad, q, k, v, out, lse), call) is None
    assert kernels.specialize("forward", (q, k, v), call._replace(attn_bias=None)) is not None


# What it refuses


def test_a_bias_in_another_dtype_is_declined_before_anything_is_built(kernels, module):
    q, k, v, _, bias = drawn((H, S_Q, S_K))
    with pytest.raises(UnsupportedInputError) as refused:
        kernels.forward(q, k, v, Call(0.25, S_Q, S_K, attn_bias=bias.float()))
    assert str(refused.value) == "attn_bias must be boolean or torch.bfloat16, got torch.float32"
    assert not module.graphs


KEYS = "max_k must be a multiple of 8 for the gradient of attn_bias, got {}"


@pytest.mark.parametrize("length", [1, 2, 65, 71, 73, 1023])
def test_the_gradient_of_a_bias_needs_a_multiple_of_eight_keys(length):
    spec = gpu_spec(bias=True, bias_gradient=True, max_q=72, max_k=length)
    assert ENTRY.reasons(spec, "backward") == (KEYS.format(length),)
    assert ENTRY.reasons(spec, "forward") == ()
    assert ENTRY.reasons(spec.but(bias_gradient=False), "backward") == ()
    assert ENTRY.reasons(spec.but(max_k=length + -length % 8), "backward") == ()


def test_whether_keys_are_a_multiple_is_decided_for_each_number():
    """A cut would have all greater numbers be one class."""
    spec = gpu_spec(bias=True, bias_gradient=True)
    assert "max_k" in ENTRY.unnamed_reads(spec, "backward")
    assert "max_k" not in {name for cut in cudnn.BACKEND.cuts(spec) for name in cut.names}


def test_seqused_k_with_a_bias_is_refused():
    spec = gpu_spec(bias=True, seqused_k=True, max_k=72)
    dense, packed = (ENTRY.reasons(spec.but(varlen=varlen), "forward") for varlen in (False, True))
    assert dense == ("seqused_k must be None with dense tensors, got a tensor",)
    assert packed == ("attn_bias must be None with packed tensors, got a tensor",)


# Its place in the default order


def test_with_a_bias_efficient_comes_first_and_math_last():
    plain, biased = gpu_spec(), gpu_spec(bias=True)
    ranks = [
        Entry(one.name, "a test", one).priority(biased)
        for one in (efficient.BACKEND, cudnn.BACKEND, math.BACKEND)
    ]
    assert ranks == sorted(ranks, reverse=True)
    assert len({*ranks}) == 3
    assert cudnn.BACKEND.priority_for(plain) == 20
    assert dataclasses.replace(cudnn.BACKEND, priority=20).priority_for(biased) == 20

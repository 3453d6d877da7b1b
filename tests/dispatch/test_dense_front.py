"""Promises of the call cache for flash-attn's dense function: what it runs, and that nothing else changes."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import truth
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg.core.dispatch import call_cache
from attnreg.errors import InvalidInputError
from attnreg.flash_attn import flash_attn_func, flash_attn_varlen_func

pytestmark = pytest.mark.usefixtures("one_thread", "no_graph_trees")

# Lengths of queries and keys, the batch first, of one class: see `contract.lengths.OF_ALL`.
OF_A_CLASS = [(2, 4, 8), (3, 3, 20), (5, 2, 3), (7, 4, 21)]


def batch(size=2, length_q=4, length_k=8, dtype=torch.float32, heads_k=4, seed=0):
    """Return q, k and v of a dense batch, (B, S, H, D), which need a gradient."""
    torch.manual_seed(seed)
    shapes = (size, length_q, 4, 16), (size, length_k, heads_k, 16), (size, length_k, heads_k, 16)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def assert_right(inputs, with_lse=True, **options):
    """Call the function, forward and backward, also by the LSE, and compare all results with float64."""
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    group = inputs[0].shape[2] // inputs[1].shape[2]
    q, k, v = leaves[0], *(x.repeat_interleave(group, dim=2) for x in leaves[1:])
    window = options.get("window_size", (-1, 0 if options.get("causal") else -1))
    expected, expected_lse = truth.dense(
        *(x.transpose(1, 2) for x in (q, k, v)), window=window, scale=options.get("softmax_scale")
    )
    results = flash_attn_func(*inputs, return_attn_probs=with_lse, **options)
    out, lse = results[:2] if with_lse else (results, None)
    grads = torch.autograd.grad(out.double().square().sum(), inputs)
    truths = torch.autograd.grad(expected.square().sum(), leaves)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.05}[inputs[0].dtype]
    pairs = [(out, expected.transpose(1, 2)), *zip(grads, truths, strict=True)]
    for got, true in [*pairs, (lse, expected_lse)] if with_lse else pairs:
        assert (got.double() - true).norm() <= tolerance * true.norm()
    assert out.shape == inputs[0].shape and out.dtype == inputs[0].dtype
    assert lse is None or (lse.dtype == torch.float32 and lse.is_contiguous())


@pytest.mark.parametrize("with_lse", [True, False])
@pytest.mark.parametrize(
    ("options", "of_batch"),
    [
        ({}, {}),
        ({"causal": True}, {"heads_k": 2}),
        ({"window_size": (5, 1), "softmax_scale": 0.3}, {"dtype": torch.bfloat16}),
    ],
    ids=["plain", "causal, shared key heads", "window and scale, bfloat16"],
)
@pytest.mark.parametrize("name", ["cpu", "math"])
def test_new_lengths_of_a_class_take_no_plan_and_are_right(
    compiled, planned, ran, name, options, of_batch, with_lse
):
    with attnreg.register_backend(name):
        for _ in range(5):
            assert_right(batch(*OF_A_CLASS[0], **of_batch), with_lse, **options)
        ran()
        for number, lengths in enumerate(OF_A_CLASS[:1] if "window_size" in options else OF_A_CLASS):
            inputs = batch(*lengths, seed=number, **of_batch)
            assert planned(lambda: assert_right(inputs, with_lse, **options)) == 0  # noqa: B023
            assert ran() == {name: (1, 1)}


def test_rows_that_see_no_key_are_left_to_the_plan(compiled, planned, ran):
    """A kernel's LSE of such a row, and its gradients, take more than the kernel."""
    with attnreg.register_backend("cpu"):
        for _ in range(3):
            assert_right(batch(2, 8, 8), causal=True)
        q, k, v = batch(2, 8, 3)
        for _ in range(3):
            results = []
            assert planned(
                lambda: results.extend(flash_attn_func(q, k, v, causal=True, return_attn_probs=True))  # noqa: B023
            )
            out, lse, _ = results
            assert torch.equal(out[:, :5], torch.zeros(2, 5, 4, 16))
            assert torch.equal(lse[:, :, :5], torch.full((2, 4, 5), -torch.inf))
            for grad in torch.autograd.grad(out.sum(), (q, k, v)):
                assert grad.isfinite().all()
    assert set(ran()) == {"cpu"}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 4, 4, 16), (3, 4, 4, 16), (3, 4, 4, 16)), "batch: got 2 for q and 3 for k, expected equal"),
        (((2, 4, 4, 16), (2, 4, 4, 16), (2, 5, 4, 16)), "got "),
        (((2, 4, 4, 16), (2, 4, 3, 16), (2, 4, 3, 16)), "got "),
        (((4, 4, 16), (4, 4, 16), (4, 4, 16)), r"q: got shape \(4, 4, 16\), expected 4 dimensions"),
    ],
    ids=["batch", "keys", "heads", "dimensions"],
)
def test_tensors_that_do_not_fit_are_the_same_error_as_without_the_cache(compiled, shapes, message):
    said = []
    for _ in range(2):
        flash_attn_func(*batch())  # a call of the kind is kept
    for around in (contextlib.nullcontext, call_cache.paused):
        with around(), pytest.raises(InvalidInputError, match=message) as error:
            flash_attn_func(*(torch.randn(shape) for shape in shapes))
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("function", ["dense", "packed"])
def test_whether_the_lse_is_returned_is_read_as_a_truth_value(compiled, function):
    q, k, v = batch()
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    for asked in (1, "yes", None, 0):
        if function == "dense":
            found = flash_attn_func(q, k, v, return_attn_probs=asked)
        else:
            given = k[0], k[0], v[0], offsets, offsets, 8, 8
            found = flash_attn_varlen_func(*given, return_attn_probs=asked)
        assert isinstance(found, tuple) is bool(asked)


def test_offsets_that_a_packed_call_lacks_do_not_make_it_a_dense_call(compiled):
    q, k, v = batch()
    for _ in range(3):
        flash_attn_func(q, k, v)
    with pytest.raises(InvalidInputError, match="cu_seq_q: got None, expected a tensor"):
        attnreg.varlen_attn(q, k, v, None, None, 4, 8)


def test_a_freed_storage_is_an_error_and_not_read(compiled):
    q, k, v = (x.detach() for x in batch())
    for _ in range(3):
        flash_attn_func(q, k, v)
    k.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"^k: got a tensor whose storage was freed"):
        flash_attn_func(q, k, v)


@pytest.mark.parametrize("place", range(4), ids=["query", "key", "value", "output"])
def test_what_is_written_to_between_forward_and_backward_is_an_error(compiled, place):
    for _ in range(2):
        assert_right(batch())
    inputs = batch()
    copies = [x.clone() for x in inputs]
    out = flash_attn_func(*copies)
    with torch.no_grad():
        (*copies, out)[place].add_(0)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        torch.autograd.grad(out, inputs, torch.ones_like(out))


def test_a_gradient_of_the_lse_a_batch_of_gradients_and_a_checkpoint_are_right(compiled):
    q, k, v = batch()
    for _ in range(3):
        out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
        (got,) = torch.autograd.grad(lse.sum(), q, retain_graph=True)
        scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 4
        (expected,) = torch.autograd.grad(scores.logsumexp(-1).sum(), q)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    vectors = torch.randn(3, *out.shape)
    batched = torch.autograd.grad(out, (q, k, v), vectors, is_grads_batched=True, retain_graph=True)
    singly = [torch.autograd.grad(out, (q, k, v), one, retain_graph=True) for one in vectors]
    for got, each in zip(batched, zip(*singly, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(each))
    repeated = checkpoint(flash_attn_func, q, k, v, use_reentrant=False)
    for got, expected in zip(
        torch.autograd.grad(repeated.sum(), (q, k, v)), torch.autograd.grad(out.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_a_second_derivative_is_an_error(compiled):
    q, k, v = batch()
    for _ in range(3):
        out = flash_attn_func(q, k, v)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attnreg"):
        torch.autograd.grad(grad.sum(), q)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_autograd_computes_the_same_gradients(compiled, ran):
    inputs = batch(heads_k=2)
    ran()
    for scale in (0.25, 0.5):  # a scale is part of the graph that compiled autograd keeps
        with attnreg.use_backend("math"):
            out, lse, _ = flash_attn_func(*inputs, 0.0, scale, causal=True, return_attn_probs=True)
        loss = out.square().sum() + lse.sum()
        expected = torch.autograd.grad(loss, inputs, retain_graph=True)
        for x in inputs:
            x.grad = None
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        torch.testing.assert_close([x.grad for x in inputs], [*expected])
        assert ran() == {"math": (1, 2)}


def test_a_choice_applies_to_the_call_and_to_its_backward(compiled, planned, ran):
    inputs = batch()
    for name in ("math", "cpu", "math", "cpu"):
        with attnreg.use_backend(name):
            out = flash_attn_func(*inputs)
        torch.autograd.grad(out.sum(), inputs)
        assert ran() == {name: (1, 1)}


def test_threads_get_their_own_results(compiled):
    for _ in range(3):
        assert_right(batch())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: assert_right(batch(seed=seed)), range(40)))


def test_autocast_gives_its_dtype(compiled):
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            out = flash_attn_func(*batch())
        assert out.dtype == torch.bfloat16

"""The reference backend beyond the matrix of `test_conformance`."""

import dataclasses
import re

import pytest
import torch
from support.chosen_cases import is_chosen
from support.truth import assert_accurate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from attnreg.backends import math as reference
from attnreg.backends.math import batch, mask
from attnreg.core.contract.backend import Call, Kernels
from attnreg.core.contract.options import OPTIONS
from attnreg.core.contract.spec import Device
from attnreg.errors import InvalidInputError
from attnreg.tools.measure import CASES, QUICK, Case, inputs, measure

forward, backward, *_ = reference.BACKEND.load()
CAUSAL = (-1, 0)


@pytest.fixture(autouse=True)
def below_autograd():
    with torch.no_grad():
        yield


def use_tiles(monkeypatch, queries, keys):
    monkeypatch.setattr(mask, "TILE_QUERIES", queries)
    monkeypatch.setattr(mask, "TILE_KEYS", keys)


@pytest.fixture
def lengths_unread(monkeypatch):
    """Let the lengths be unknown to the host, as they are on a GPU."""
    monkeypatch.setattr(batch, "_on_host", lambda lengths: False)


@pytest.mark.parametrize("tiled", ["", "held", "computed twice"])
@pytest.mark.parametrize(("dtype", "rows", "keys", "seeds"), [("float32", 257, 1, 3), ("bfloat16", 2, 2, 40)])
def test_gradients_are_right_where_their_terms_cancel(monkeypatch, dtype, rows, keys, seeds, tiled):
    if tiled:
        use_tiles(monkeypatch, 64, 1)
    if tiled == "computed twice":
        monkeypatch.setattr(reference, "HELD", 0)
    sizes = {"lens_q": (rows,), "lens_k": (keys,), "heads": (1, 1), "dims": (96, 96)}
    case = Case(name="few keys", **sizes, dtype=dtype, scale=0.5)
    for seed in range(seeds):
        assert_accurate(reference.BACKEND.load(), case, seed)


def tensors(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def dense(batch=2, len_q=7, len_k=9, heads=(4, 2), dims=(5, 3), dtype=torch.float64, **options):
    """Return query, key, value, grad_out and call."""
    (h, hk), (d, dv) = heads, dims
    shapes = (batch, len_q, h, d), (batch, len_k, hk, d), (batch, len_k, hk, dv), (batch, len_q, h, dv)
    return *tensors(*shapes, dtype=dtype), Call(d**-0.5, len_q, len_k, **options)


def varlen(lens_q, lens_k, **options):
    q, k, v, grad_out, call = dense(1, sum(lens_q), sum(lens_k), **options)
    call = call._replace(max_q=max(lens_q), max_k=max(lens_k))
    call = call._replace(cu_seqlens_q=offsets(lens_q), cu_seqlens_k=offsets(lens_k))
    return q[0], k[0], v[0], grad_out[0], call


def offsets(lens):
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


def rng_state(seed=2**40 + 7, offset=3):
    return torch.tensor([seed, offset], dtype=torch.uint64)


def run(q, k, v, grad_out, call):
    out, lse = forward(q, k, v, call)
    return out, lse, *backward(grad_out, q, k, v, out, lse, call)


def assert_same(got, expected, tolerance=1e-12):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call):
        out, lse = forward(q, k, v, call)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx, grad_out):
        return *backward(grad_out, *ctx.saved_tensors, ctx.call), None


SMALL = {"len_q": 4, "len_k": 5, "heads": (2, 1), "dims": (2, 3)}
GIVEN = {
    "plain": dense(**SMALL),
    "causal": dense(**SMALL, window=CAUSAL),
    "window": dense(**SMALL | {"len_q": 6}, window=(2, 1)),
    "bias": dense(**SMALL, attn_bias=tensors((2, 4, 5))[0]),
    "boolean bias": dense(**SMALL, attn_bias=tensors((2, 1, 4, 5))[0] > 0),
    "alibi": dense(**SMALL, alibi_slopes=torch.tensor([0.5, 0.25])),
    "softcap": dense(**SMALL, softcap=0.4, attn_bias=tensors((2, 4, 5))[0]),
    "packed softcap": varlen((3, 2), (4, 3), heads=(2, 1), dims=(2, 3), window=CAUSAL, softcap=1.0),
    "seqused_k": dense(**SMALL, seqused_k=torch.tensor([2, 5]), attn_bias=tensors((1, 1, 4, 5))[0]),
    "dropout": dense(**SMALL, dropout=0.4, rng_state=rng_state()),
    "varlen": varlen((3, 0, 2), (4, 2, 3), heads=(2, 1), dims=(2, 3), window=CAUSAL),
    "packed dropout": varlen(
        (3, 1), (2, 4), seqused_k=torch.tensor([0, 3]), dropout=0.3, rng_state=rng_state()
    ),
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_gradients_are_those_of_the_forward(given, monkeypatch):
    use_tiles(monkeypatch, 3, 4)
    q, k, v, _, call = given
    with torch.enable_grad():
        assert torch.autograd.gradcheck(
            lambda *qkv: Attention.apply(*qkv, call),
            [x.clone().requires_grad_() for x in (q, k, v)],
            fast_mode=True,
        )


def test_an_lse_that_was_summed_in_another_order_is_not_that_of_more_keys():
    case = Case(name="c", lens_q=(63,), lens_k=(128,), dims=(192, 192), dtype="float32", scale=1.0)
    q, k, v, grad_out, call = inputs(case)
    out, lse = forward(q, k, v, call)
    other = lse + 3 * torch.finfo(torch.float32).eps * lse.abs()
    grads = zip(*(backward(grad_out, q, k, v, out, one, call) for one in (lse, other)), strict=True)
    assert all(torch.equal(*pair) for pair in grads)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize(("window", "dim"), [((0, 0), 64), (CAUSAL, 128)])
def test_gradients_are_right_after_a_forward_that_summed_its_scores_in_another_order(
    sinks, window, dim, seed
):
    def other_order(q, k, v, call):
        dims = torch.randperm(dim, generator=torch.Generator().manual_seed(1))
        return forward(q[..., dims].contiguous(), k[..., dims].contiguous(), v, call)

    lengths = {"lens_q": (40, 17), "lens_k": (40, 30), "varlen": True, "heads": (4, 2), "dims": (dim, dim)}
    case = Case(name="c", dtype="float32", scale=1.0, window=window, sinks=sinks, **lengths)
    errors = measure(Kernels(other_order, backward), case, seed=seed)
    assert all(error.passed for error in errors.values()), errors


def test_float64_gradients_do_not_rest_on_a_float32_lse():
    q, k, v, grad_out, call = dense(window=CAUSAL)
    out, lse = forward(q, k, v, call)
    assert lse.dtype == torch.float64
    exact = backward(grad_out, q, k, v, out, lse, call)
    assert_same(backward(grad_out, q, k, v, out, lse.float(), call), exact, tolerance=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_lse_is_float32_and_results_have_the_dtype_of_the_inputs(dtype):
    out, lse, *grads = run(*dense(dtype=dtype))
    assert lse.dtype == torch.float32
    assert {x.dtype for x in (out, *grads)} == {dtype}


@pytest.mark.parametrize(
    "name", ["length 33", "packed window (4, 4)", "window (8, 2), few keys", "additive bias"]
)
def test_tile_borders_leave_no_trace(name, monkeypatch):
    use_tiles(monkeypatch, 17, 23)
    case = next(case for case in QUICK if str(case) == f"{name} float32")
    assert all(error.passed for error in measure(reference.BACKEND.load(), case).values())


# Masks


def test_a_bias_broadcasts_over_every_dimension():
    q, k, v, grad_out, call = dense()
    for shape in ((9,), (7, 1), (4, 1, 9), (2, 1, 1, 9), (2, 4, 7, 1), (1, 4, 7, 9)):
        bias = tensors(shape)[0]
        full = run(q, k, v, grad_out, call._replace(attn_bias=bias.expand(2, 4, 7, 9).contiguous()))
        assert_same(run(q, k, v, grad_out, call._replace(attn_bias=bias)), full)


def test_alibi_is_a_bias_that_grows_with_the_distance():
    q, k, v, grad_out, call = dense()
    slopes = torch.tensor([[0.5, 0.25, 0.125, 1.0], [0.0, 0.5, -0.25, 2.0]])
    distance = (torch.arange(7)[:, None] + 2 - torch.arange(9)).abs()
    bias = -slopes[:, :, None, None].double() * distance
    as_bias = run(q, k, v, grad_out, call._replace(attn_bias=bias))
    assert_same(run(q, k, v, grad_out, call._replace(alibi_slopes=slopes)), as_bias)
    both = run(q, k, v, grad_out, call._replace(alibi_slopes=slopes, attn_bias=bias))
    assert_same(both, run(q, k, v, grad_out, call._replace(attn_bias=2 * bias)))


# Lengths


@pytest.mark.parametrize("used", [None, (2, 12, 0)])
def test_pages_equal_the_same_keys_in_one_piece(used):
    table = torch.tensor([[5, 1, 7], [0, 6, 2], [3, 8, 4]], dtype=torch.int32)
    used_k = None if used is None else torch.tensor(used, dtype=torch.int32)
    q, k, v, grad_out, call = dense(batch=3, len_q=6, len_k=12, window=CAUSAL, seqused_k=used_k)
    pools = [torch.full((10, 4, 2, size), torch.nan).double() for size in (5, 3)]
    for pool, x in zip(pools, (k, v), strict=True):
        pool[table.long()] = x.unflatten(1, (3, 4))
    expected = run(q, k, v, grad_out, call)
    out, lse, grad_q, *grads = run(q, *pools, grad_out, call._replace(block_table=table))
    assert_same((out, lse, grad_q, *(g[table.long()].flatten(1, 2) for g in grads)), expected)
    packed = call._replace(block_table=table, cu_seqlens_q=offsets((6, 6, 6)))
    assert_same([forward(q.flatten(0, 1), *pools, packed)[0]], [out.flatten(0, 1)])


def test_sequences_that_share_a_page_add_up_their_gradients():
    q, k, v, grad_out, call = dense(batch=2, len_q=3, len_k=4)
    k, v = k[:1].expand(2, 4, 2, 5), v[:1].expand(2, 4, 2, 3)
    *_, grad_k, grad_v = run(q, k, v, grad_out, call)
    shared = call._replace(block_table=torch.zeros(2, 1, dtype=torch.int32))
    *_, pool_grad_k, pool_grad_v = run(q, k[:1], v[:1], grad_out, shared)
    assert_same((pool_grad_k, pool_grad_v), (grad_k.sum(0, True), grad_v.sum(0, True)))


# How tensors lie in memory, how large values are and how many heads there are says nothing of lengths.
FLOAT64 = [
    case
    for case in QUICK
    if case.dtype == "float64"
    and is_chosen(case)
    and not re.search("layout|values|scale 0.3|heads|batch-invariant|deterministic|num_splits", case.name)
]


# One case of each set of options, with empty sequences and without, and with each form of a packed window.
KINDS = {
    (
        case.varlen,
        0 in (*case.lens_q, *case.lens_k),
        case.bias,
        tuple(side < 0 for side in case.window) if case.varlen else case.window == (-1, -1),
        *(case.has(row) for row in OPTIONS),
    ): case
    for case in FLOAT64
    if case.max_k < 300
}.values()


@pytest.mark.parametrize("case", [case for case in KINDS if case.varlen or case.seqused_k], ids=str)
def test_unread_lengths_change_nothing(case, request):
    given = inputs(case.scaled(0.3, 0.3))
    expected = run(*given)
    request.getfixturevalue("lengths_unread")
    loose = given.call._replace(max_q=given.call.max_q + 9, max_k=given.call.max_k + 9)
    assert_same(run(*given[:4], loose), expected, tolerance=1e-10)


# Without values an option is read as by itself also beside others.
ALONE = [case for case in KINDS if not (case.varlen and ", " in case.name and not case.score_mod)]


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_no_value_is_read_on_the_host(case):
    # A meta tensor has no value: reading one raises.
    q, k, v, grad_out, call = inputs(case)
    on_meta = [x.to("meta") for x in (q, k, v, grad_out)]
    call = Call(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in call))
    if call.score_mod is not None:  # the case's functions read tensors that aren't on meta
        call = call._replace(score_mod=lambda score, batch, head, query, key: score * (batch + query - key))
    if call.mask_mod is not None:
        call = call._replace(mask_mod=lambda batch, head, query, key: query + head >= key)
    # What is dropped depends on lengths, heads and windows, not on options.
    if case.bias == "none" and not any(case.has(row) for row in OPTIONS):
        call = call._replace(dropout=0.1, rng_state=rng_state().to("meta"))
    lse = grad_out[..., 0].mT
    of_bias = [call.attn_bias] if case.bias_gradient else []
    assert [x.shape for x in run(*on_meta, call)] == [x.shape for x in (grad_out, lse, q, k, v, *of_bias)]


def test_groups_of_sequences_equal_sequences_one_by_one(monkeypatch):
    lens = (3, 4, 4, 17, 2, 0, 16, 16)
    given = varlen(lens, lens[::-1], dropout=0.2, rng_state=rng_state())
    together = run(*given)
    monkeypatch.setattr(reference, "GROUP_SIZE", 1)
    assert_same(run(*given), together)


# Dropout


def weights_kept(len_q=64, len_k=48, state=None, **options):
    """Return which weights survive: with an identity for values the output is the weights."""
    state = rng_state() if state is None else state
    q, k, _, _, call = dense(2, len_q, len_k, dropout=0.3, rng_state=state, **options)
    identity = torch.eye(len_k, dtype=q.dtype)[None, :, None].expand(2, len_k, 2, len_k)
    return forward(q, k, identity, call)[0].transpose(1, 2) != 0


def test_dropout_drops_each_weight_with_its_probability():
    kept = weights_kept(len_q=512, len_k=512).double()
    for everything_but in ((0, 1, 2, 3), (2, 3), (0, 1, 3), (0, 1, 2)):  # nothing, heads, rows, columns
        share = kept.mean(everything_but)
        sigma = (0.3 * 0.7 / (kept.numel() // share.numel())) ** 0.5
        assert ((share - 0.7).abs() < 5 * sigma).all()


def test_dropout_masks_of_heads_batches_rows_and_states_are_independent():
    kept = weights_kept(len_q=256, len_k=256)
    pairs = [
        (kept[0], kept[1]),
        (kept[:, 0], kept[:, 1]),
        (kept[:, :, 1:], kept[:, :, :-1]),
        (kept[..., 1:], kept[..., :-1]),
        (kept, kept.mT),
        (kept, weights_kept(len_q=256, len_k=256, state=rng_state(offset=4))),
        (kept, weights_kept(len_q=256, len_k=256, state=rng_state(seed=7))),
    ]
    for one, other in pairs:
        both = (one & other).double().mean()
        # A weight is part of two neighbouring pairs: the count varies more than that of single draws.
        sigma = 2 * (0.49 * 0.51 / one.numel()) ** 0.5
        assert abs(both - 0.49) < 5 * sigma


def test_dropout_mask_depends_on_the_state_and_not_on_tiles_or_padding(monkeypatch, lengths_unread):
    kept = weights_kept()
    assert torch.equal(weights_kept(), kept)
    use_tiles(monkeypatch, 10, 7)
    assert torch.equal(weights_kept(), kept)
    assert torch.equal(weights_kept(seqused_k=torch.tensor([48, 48])), kept)


def test_dropout_equals_autograd_over_the_same_mask():
    q, k, v, grad_out, call = dense(len_q=64, len_k=48, dropout=0.3, rng_state=rng_state())
    with torch.enable_grad():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        bhsd = [x.transpose(1, 2) for x in leaves]
        query, key, value = bhsd[0], *(x.repeat_interleave(2, 1) for x in bhsd[1:])
        weights = (query @ key.mT * call.scale).softmax(-1)
        out = (weights * weights_kept() / 0.7 @ value).transpose(1, 2)
        grads = torch.autograd.grad(out, leaves, grad_out)
    got = run(q, k, v, grad_out, call)
    assert_same((got[0], *got[2:]), (out.detach(), *grads))


def test_dropping_everything_gives_zero_and_no_gradient():
    out, lse, *grads = run(*dense(dropout=1.0, rng_state=rng_state()))
    assert all((x == 0).all() for x in (out, *grads))
    assert lse.isfinite().all()


def test_dropout_without_a_random_state_is_refused():
    with pytest.raises(InvalidInputError, match=r"rng_state: got None with dropout_p 0\.1"):
        forward(*dense()[:3], dense(dropout=0.1)[-1])


# Values


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (2, -1)},  # with nine keys and three queries, keys 0 to 3 are out of reach
        {"attn_bias": torch.arange(9) > 3},
        {"attn_bias": torch.where(torch.arange(9) > 3, 0.0, -torch.inf)},
    ],
    ids=["window", "boolean bias", "infinite bias"],
)
def test_what_no_query_sees_does_not_come_through(options, bad):
    q, k, v, grad_out, call = dense(len_q=3, **options)
    clean = run(q, k, v, grad_out, call)
    k[:, :4], v[:, :4] = bad, -bad
    assert_same(run(q, k, v, grad_out, call), clean)
    assert (clean[3][:, :4] == 0).all()
    assert (clean[4][:, :4] == 0).all()


def test_nan_in_a_row_that_sees_nothing_reaches_no_gradient():
    q, k, v, grad_out, call = dense(len_q=9, len_k=4, window=CAUSAL)
    clean = run(q, k, v, grad_out, call)
    q[:, :5], grad_out[:, :5] = torch.nan, torch.nan
    assert_same(run(q, k, v, grad_out, call), clean)


def test_nan_that_is_seen_propagates():
    q, k, v, grad_out, call = dense(len_q=6, len_k=6, window=CAUSAL, heads=(2, 2))
    for poisoned in (k, v):
        poisoned[0, 4, 1] = torch.nan
        out = forward(q, k, v, call)[0]
        assert out[0, 4:, 1].isnan().all()
        assert out[0, :, 0].isfinite().all() and out[1].isfinite().all()
        poisoned[0, 4, 1] = 1.0
    q[0, 2, 1] = torch.nan
    out, lse, grad_q, grad_k, _ = (x.isnan() for x in run(q, k, v, grad_out, call))
    assert out[0, 2, 1].all() and lse[0, 1, 2]
    assert grad_q[0, 2, 1].all() and grad_k[0, :3, 1].all()
    assert not out[0, 3:].any()


@pytest.mark.parametrize("scale", [torch.nan, torch.inf])
def test_a_scale_that_is_no_number_propagates(scale):
    q, k, v, _, call = dense()
    assert forward(q, k, v, call._replace(scale=scale))[0].isnan().any()


def test_values_that_overflow_float16_scores_stay_finite():
    q, k, v, grad_out, call = dense(dtype=torch.float16, dims=(64, 64))
    assert all(x.isfinite().all() for x in run(q * 100, k * 100, v, grad_out / 100, call._replace(scale=1.0)))


def test_autocast_does_not_lower_the_precision():
    given = dense(dtype=torch.float32)
    expected = run(*given)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(run(*given), expected, tolerance=0.0)


def test_runs_are_bitwise_equal_and_num_splits_splits_nothing():
    q, k, v, grad_out, call = dense(dtype=torch.bfloat16, len_q=70, len_k=90)
    once = run(q, k, v, grad_out, call._replace(deterministic=True))
    assert_same(run(q, k, v, grad_out, call._replace(deterministic=True, num_splits=4)), once, tolerance=0.0)


# Cost


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an op returned, views aside."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize(
    "options", [{}, {"dropout": 0.1, "rng_state": rng_state()}, {"alibi_slopes": torch.ones(1)}]
)
def test_nothing_of_the_size_of_the_score_matrix_is_made(options):
    given = dense(1, 1024, 1024, (1, 1), (8, 8), dtype=torch.float32, **options)
    with Largest() as largest:
        run(*given)
    assert largest.elements <= 1024 * 1024 // 8


def flops(length, window):
    given = dense(1, length, length, (1, 1), (8, 8), dtype=torch.float32, window=window)
    with FlopCounterMode(display=False) as counter:
        run(*given)
    return counter.get_total_flops()


@pytest.mark.slow
def test_work_grows_with_the_window_and_not_with_the_square_of_the_length():
    windowed, everything = flops(2048, (16, 0)), flops(2048, (-1, -1))
    assert windowed < 2.2 * flops(1024, (16, 0))
    assert windowed < 0.15 * everything
    assert flops(2048, CAUSAL) < 0.65 * everything


@pytest.mark.parametrize("empty", [{"batch": 0}, {"len_q": 0}, {"len_k": 0}])
def test_an_empty_call_computes_nothing(empty):
    with FlopCounterMode(display=False) as counter:
        out, lse, *grads = run(*dense(**empty))
    assert counter.get_total_flops() == 0
    assert all((x == 0).all() for x in (out, *grads))
    assert (lse == -torch.inf).all()


def test_every_call_of_the_matrix_is_supported_on_every_device():
    for device in (Device("cpu"), Device("cuda", (9, 0)), Device("mps")):
        for case in CASES:
            # It knows of no sinks: its results are rescaled.
            spec = dataclasses.replace(case.spec(device), sinks=False)
            assert reference.BACKEND.forward.unsupported(spec) == ()


def at_the_end(kind, queries=3, keys=100_000, window=(2, 0)):
    """Return the tensors and call of few queries at the end of long keys, and the call on those seen."""
    q, k, v, grad, call = dense(1, queries, keys, window=window)
    seen = slice(keys - min(keys, queries + window[0]), keys)
    short = q, k[:, seen], v[:, seen], call._replace(max_k=k[:, seen].shape[1])
    if kind == "bias":
        bias = torch.randn(2, queries, keys, dtype=q.dtype).repeat(1, 2, 1, 1).view(1, 4, queries, keys)
        short = *short[:3], short[3]._replace(attn_bias=bias[..., seen])
        return q, k, v, grad, call._replace(attn_bias=bias), short
    if kind == "dense":
        return q, k, v, grad, call, short
    call = call._replace(cu_seqlens_q=offsets([queries]), cu_seqlens_k=offsets([keys]))
    if kind == "packed":
        return q[0], k[0], v[0], grad[0], call, short
    pages = [torch.cat([x, x.new_full((1, 500, *x.shape[2:]), torch.nan)], 1) for x in (k, v)]
    k, v = (x.view(-1, 100, *x.shape[2:]) for x in pages)
    table = torch.arange(len(k), dtype=torch.int32)[None]
    call = call._replace(cu_seqlens_k=None, seqused_k=torch.tensor([keys], dtype=torch.int32))
    return q[0], k, v, grad[0], call._replace(block_table=table, max_k=keys + 500), short


@pytest.mark.parametrize("kind", ["dense", "packed", "pages", "bias"])
@pytest.mark.parametrize("window", [(2, 0), (40, -1)])
def test_keys_that_a_window_hides_from_all_queries_are_not_read(kind, window):
    q, k, v, grad, call, (q_short, k_short, v_short, short) = at_the_end(kind, window=window)
    with Largest() as largest:
        out, lse = forward(q, k, v, call)
    assert largest.elements < 10_000
    expected = forward(q_short, k_short, v_short, short)
    torch.testing.assert_close(out.view_as(expected[0]), expected[0], rtol=0, atol=0)
    torch.testing.assert_close(lse.view_as(expected[1]), expected[1], rtol=0, atol=0)
    grads = backward(grad, q, k, v, out, lse, call)
    right = backward(grad.view_as(expected[0]), q_short, k_short, v_short, *expected, short)
    assert torch.equal(grads[0].view_as(right[0]), right[0])
    for got, one in zip(grads[1:], right[1:], strict=True):
        rows = got.reshape(-1, *one.shape[2:])[:100_000]
        assert torch.equal(rows[-one.shape[1] :], one[0])
        assert not rows[: -one.shape[1]].any()


def test_queries_that_see_no_key_are_not_read():
    q, k, v, grad, call = dense(1, 100_000, 4, window=CAUSAL)
    with Largest() as largest:
        out, lse = forward(q, k, v, call)
    assert largest.elements == out.numel() + out[0, 0].numel()  # with a row for padding
    part = q[:, -4:], k, v, call._replace(max_q=4)
    expected = forward(*part)
    assert torch.equal(out[:, -4:], expected[0]) and not out[:, :-4].any()
    assert torch.equal(lse[..., -4:], expected[1]) and (lse[..., :-4] == -torch.inf).all()
    grads, right = (
        backward(grad, q, k, v, out, lse, call),
        backward(grad[:, -4:], *part[:3], *expected, part[3]),
    )
    assert torch.equal(grads[0][:, -4:], right[0]) and not grads[0][:, :-4].any()
    assert all(map(torch.equal, grads[1:], right[1:]))


@pytest.mark.parametrize("window", [(2, 0), (0, 1), (3, -1), (-1, 2), (5, 3)])
@pytest.mark.parametrize("used", [False, True])
def test_sequences_that_a_window_cuts_are_right_whatever_the_host_knows(monkeypatch, window, used):
    lens_q, lens_k = (3, 1, 0, 20, 7), (90, 2, 5, 4, 7)
    case = Case(
        name="cut", lens_q=lens_q, lens_k=lens_k, varlen=True, window=window, dtype="float64",
        seqused_k=(60, 2, 1, 3, 0) if used else None,
    )  # fmt: skip
    assert_accurate(reference.BACKEND.load(), case)
    monkeypatch.setattr(batch, "_on_host", lambda lengths: False)
    assert_accurate(reference.BACKEND.load(), case)


@pytest.mark.parametrize("dims", [(0, 0), (8, 0), (0, 8)], ids=str)
def test_a_head_dim_of_0_gives_gradients(dims):
    shapes = [(1, 5, 2, dim) for dim in (dims[0], *dims)]
    query, key, value = map(torch.randn, shapes)
    kernels, call = reference.BACKEND.load(), Call(1.0, 5, 5)
    out, lse = kernels.forward(query, key, value, call)
    grads = kernels.backward(torch.ones_like(out), query, key, value, out, lse, call)
    assert [tuple(x.shape) for x in (out, *grads)] == [(1, 5, 2, dims[1]), *shapes]
    assert all(torch.isfinite(x).all() for x in (out, *grads))

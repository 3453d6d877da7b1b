"""The reference: attention in plain PyTorch operations, for every call, dtype and device.

Correctness comes before speed. It computes in float32 or float64, and supports every option of the contract.
It stores nothing of the size S_q x S_k, and never reads a tensor of another device on the host.

`batch.py` converts dense, packed and paged tensors to rows, `mask.py` computes which scores count, and
`softmax.py` keeps the sums of a row. This module computes each padded group, tile by tile: query (b, H, S_q,
D), key (b, H_k, S_k, D), value (b, H_k, S_k, D_v). The forward keeps a running softmax for each row (Milakov
and Gimelshein, https://arxiv.org/abs/1805.02867). The backward computes each tile's weights twice, because it
needs the sums of a row first. Imports from `contract`. Start with README.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from attnreg.backends.math.batch import Group, as_rows, groups, sequences
from attnreg.backends.math.mask import TILE_QUERIES, Mask, Tile
from attnreg.backends.math.softmax import ForwardResults, Output, Softmax
from attnreg.core.contract.backend import Backend, Call, Kernels
from attnreg.core.contract.capabilities import ANY_SIZE, Capabilities
from attnreg.core.contract.spec import AttentionSpec

# Elements of a padded group: enough to keep a GPU busy, few enough to fit on any device.
GROUP_SIZE = 2**22
# How many scores of a block of rows a backward stores. For more scores it computes the products twice.
HELD = 2**23

# Up to so many rows a sum over a group of heads is short.
FEW_ROWS = 16
# How many terms of a score are summed at a time on a GPU. A cuBLAS kernel may add up all terms in sequence.
# Large scores are then less exact than in PyTorch's own attention, whose products have other shapes.
SUMMED = 32

EVERYTHING = Capabilities(
    devices=("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "npu", "xla", "privateuseone", "meta"),
    dtypes=("float16", "bfloat16", "float32", "float64"),
    head_dim_v=ANY_SIZE,
    page_size=ANY_SIZE,
    varlen=True,
    gqa=True,
    causal=True,
    window=True,
    dropout=True,
    bias=True,
    bias_gradient=True,
    alibi=True,
    seqused_k=True,
    key_ranges=True,
    score_mod=True,
    mask_mod=True,
    num_splits=True,
    any_scale=True,
    softcap=True,
    grad_lse=True,
    deterministic=True,
    batch_invariant=True,
    capture=True,
)


def _refuses(spec: AttentionSpec) -> tuple[str, ...]:
    if spec.batch_invariant and spec.device.type != "cpu":
        # Lengths aren't read there, so each sequence is padded to the batch's longest.
        return (f"device must be cpu to be batch-invariant, got {spec.device.type}",)
    if spec.seqused_k and not spec.varlen and spec.bias_gradient:
        return ("seqused_k must be None where attn_bias needs a gradient, got a tensor",)
    return ()


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the output, in the query's dtype, and the LSE, (B, H, S_q) or (H, T_q).

    Query, key and value are (B, S, H, D) or packed (T, H, D), on any device, in any dtype of `EVERYTHING`.
    With pages key and value are (pages, page size, H, D). The LSE is float64 for float64 inputs, else
    float32.

    Raises:
        InvalidInputError: the call has dropout and no random state.
    """
    work = _working_dtype(q)
    q_rows, k_rows, v_rows = as_rows(q), as_rows(k), as_rows(v)
    tokens, heads, _ = q_rows.shape
    # The last row is for padding: leaving padding out would need a count from the device.
    out = q.new_zeros(tokens + 1, heads, v.shape[-1])
    lse = q.new_full((tokens + 1, heads, 1), -torch.inf, dtype=work)
    with _without_autocast(q.device):
        for group in _groups(q, k, v, call):
            query = group.queries.gather(q_rows, work)
            key, value = group.keys.gather(k_rows, work), group.keys.gather(v_rows, work)
            part_out, part_lse = _attend(query, key, value, Mask(call, group, heads))
            group.queries.scatter(part_out, out)
            group.queries.scatter(part_lse, lse)
    bhs = lse[:-1].view(q.shape[:-1]).transpose(-1, -2).contiguous()
    return out[:-1].view(*q.shape[:-1], v.shape[-1]), bhs


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, in their shapes and dtypes, then the bias's if wanted.

    `grad_out` and `out` are like a forward's output, `lse` like its LSE. Raises as `forward` does.
    """
    work = _working_dtype(q)
    bias = call.attn_bias if call.bias_gradient else None
    grad_bias = None if bias is None else torch.zeros_like(bias, dtype=work)
    of_queries = as_rows(grad_out), as_rows(q)
    results = as_rows(out), as_rows(lse.mT[..., None])
    grad_lse = None if call.grad_lse is None else as_rows(call.grad_lse.mT[..., None])
    of_keys = as_rows(k), as_rows(v)
    grads = [x.new_zeros(x.shape[0] + 1, *x.shape[1:]) for x in (of_queries[1], *of_keys)]
    with _without_autocast(q.device):
        for group in _groups(q, k, v, call):
            grad, query = (group.queries.gather(x, work) for x in of_queries)
            key, value = (group.keys.gather(x, work) for x in of_keys)
            mask = Mask(call, group, query.shape[1], grad_bias)
            of_lse = None if grad_lse is None else group.queries.gather(grad_lse, work)
            of_out, of_all = (group.queries.gather(x, work) for x in results)
            # The forward's products may have had other shapes and orders of summation. Scores then differ by
            # more the more terms they have. In 16 bits another kernel's scores may be off by more.
            terms = 16.0 if q.dtype.itemsize == 2 else max(q.shape[-1] ** 0.5 / 4, 2.0)
            rounding = torch.finfo(lse.dtype).eps * terms
            forward_results = ForwardResults(of_out, of_all, rounding, is_exact=q.dtype.itemsize > 2)
            part_q, part_k, part_v = _attend_backward(grad, query, key, value, forward_results, of_lse, mask)
            group.queries.scatter(part_q, grads[0])
            # Sequences may share pages of a cache: their gradients add up.
            group.keys.scatter(part_k, grads[1], add=True)
            group.keys.scatter(part_v, grads[2], add=True)
    grad_q, grad_k, grad_v = (grad[:-1].view(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))
    of_bias = () if bias is None or grad_bias is None else (grad_bias.to(bias.dtype),)
    return grad_q, grad_k, grad_v, *of_bias


def _groups(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Iterator[Group]:
    # The memory of a token: its row in the gathered tensors or its scores in a tile, whichever is larger.
    cost = q.shape[-2] * max(q.shape[-1], v.shape[-1], TILE_QUERIES)
    queries = sequences(q, call.cu_seqlens_q, call.max_q)
    keys = sequences(k, call.cu_seqlens_k, call.max_k, call.block_table, call.seqused_k)
    # The rounding of matrix products depends on their shapes: batch-invariant calls get one group a sequence.
    return groups(queries, keys, call.window, cost, 0 if call.batch_invariant else GROUP_SIZE)


def _working_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Keep autocast from rounding the products of the float32 work to its own dtype."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE (b, H, S_q, 1)."""
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full((*q.shape[:-1], 1), -torch.inf)
    for rows in mask.row_blocks():
        out[:, :, rows], lse[:, :, rows] = _attend_rows(q[:, :, rows], k, v, mask, rows)
    return out, lse


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rows: slice) -> tuple[Tensor, Tensor]:
    softmax = Softmax(q)
    weighted = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for tile in mask.tiles(rows):
        scores = mask.modified(_scores(q, _seen_keys(k, tile), mask), tile)
        weights, fade = softmax.add(_masked(scores, tile, mask))
        kept = mask.kept(tile, q.dtype)
        dropped = weights if kept is None else weights * kept
        weighted = weighted * fade + _times(dropped, _seen_keys(v, tile))
    return weighted / softmax.divisor, softmax.peak + softmax.total.log()


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward_results: ForwardResults,
    grad_lse: Tensor | None,
    mask: Mask,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; `grad_lse` is (b, H, S_q, 1).

    The weights, and `delta`, which the softmax's backward subtracts, are computed anew. exp(score - LSE) and
    sum(grad * out) would be equal and cheaper. But LSE and output are rounded, and the error stays in the
    gradients where scores are large, or where terms cancel, as with one or two keys. So the forward's results
    serve a single purpose: a difference from the new results shows that a row sees more keys than are passed
    here.
    """
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows in mask.row_blocks():
        of_rows = q[:, :, rows], grad[:, :, rows]
        area = of_rows[0].shape[:-1].numel() * k.shape[2]
        products = list(_products(*of_rows, k, v, mask, rows)) if area <= HELD else None
        softmax = Softmax(of_rows[0])
        has_output = forward_results.is_exact and v.shape[-1] > 0  # there may be nothing to compare
        output = Output(of_rows[0], forward_results.out[:, :, rows]) if has_output else None
        delta = torch.zeros_like(softmax.total)
        for tile, scores, grad_weights, kept, _ in products or _products(*of_rows, k, v, mask, rows):
            weights, fade = softmax.add(scores)
            delta = delta * fade + (weights * grad_weights).sum(-1, keepdim=True)
            if output is not None:
                key_value = _seen_keys(k, tile), _seen_keys(v, tile)
                output.add(
                    _times(weights if kept is None else weights * kept, key_value[1]), fade, *key_value
                )
        share, delta = forward_results.share(rows, softmax), delta / softmax.divisor
        if output is not None:
            part, rest, is_precise = output.compared(softmax, mask.scale)
            share = part.where(is_precise, share)
            delta = delta * part + (rest * of_rows[1]).sum(-1, keepdim=True)
        else:
            delta = torch.where(share == 1.0, delta, forward_results.delta(rows, of_rows[1]))
        delta = delta - (0.0 if grad_lse is None else grad_lse[:, :, rows])
        share = share / softmax.divisor
        for tile, scores, grad_weights, kept, slope in products or _products(*of_rows, k, v, mask, rows):
            queries, grads = (_seen_rows(x, tile) for x in of_rows)
            weights = softmax.weights(scores) * share
            grad_v[:, :, tile.cols] += _summed(weights if kept is None else weights * kept, grads, k)
            of_added = weights * (grad_weights - delta)
            grad_scores = of_added * mask.scale
            mask.add_gradients(of_added, tile)
            grad_scores = _hide(grad_scores if slope is None else grad_scores * slope, tile, 0.0)
            grad_q[:, :, rows] += _times(grad_scores, _seen_keys(k, tile))
            grad_k[:, :, tile.cols] += _summed(grad_scores, queries, k)
    return grad_q, grad_k, grad_v


def _products(
    q_rows: Tensor, grad_rows: Tensor, k: Tensor, v: Tensor, mask: Mask, rows: slice
) -> Iterator[tuple[Tile, Tensor, Tensor, Tensor | None, Tensor | None]]:
    """Yield the backward's products for each tile of some rows.

    They are the tile's scores, the gradients of its weights, the factors of dropout, and the slope of the
    softcap and of `score_mod`.
    """
    softcap = mask.call.softcap
    for tile in mask.tiles(rows):
        scores = _scores(_seen_rows(q_rows, tile), _seen_keys(k, tile), mask)
        slope = 1.0 - (scores / softcap).square_() if softcap else None
        scores, of_function = mask.modified_with_slope(scores, tile)
        if of_function is not None:
            slope = of_function if slope is None else slope * of_function
        scores = _masked(scores, tile, mask)
        grad_weights = _times(_seen_rows(grad_rows, tile), _seen_keys(v, tile).mT)
        kept = mask.kept(tile, q_rows.dtype)
        grad_weights = _hide(grad_weights if kept is None else grad_weights.mul_(kept), tile, 0.0)
        yield tile, scores, grad_weights, kept, slope


def _scores(q: Tensor, keys: Tensor, mask: Mask) -> Tensor:
    """Return the scores of a tile, scaled and bounded by the softcap, before anything is added."""
    scores, softcap = _in_short_sums(q, keys).mul_(mask.scale), mask.call.softcap
    return scores.div_(softcap).tanh_().mul_(softcap) if softcap else scores


def _in_short_sums(q: Tensor, keys: Tensor) -> Tensor:
    """Return the products of queries and keys, unscaled; on a GPU in float32, by sums of `SUMMED` terms."""
    if not q.is_cuda or q.dtype != torch.float32:
        return _times(q, keys.mT)
    first, *rest = zip(torch.split(q, SUMMED, -1), torch.split(keys, SUMMED, -1), strict=True)
    scores = _times(first[0], first[1].mT)
    for some_q, some_k in rest:
        scores += _times(some_q, some_k.mT)
    return scores


def _masked(scores: Tensor, tile: Tile, mask: Mask) -> Tensor:
    """Add the bias and slopes to the scores of a tile, and set hidden scores to -inf."""
    added = mask.added(tile, scores.dtype)
    if added is not None:
        scores += added
    return _hide(scores, tile, -torch.inf)


def _hide(x: Tensor, tile: Tile, value: float) -> Tensor:
    return x if tile.visible is None else x.masked_fill_(~tile.visible, value)


def _seen_rows(x: Tensor, tile: Tile) -> Tensor:
    """Return rows with 0 in rows that see no key of the tile: their NaN would survive a weight of 0."""
    return x if tile.visible is None else x.masked_fill(~tile.visible.any(-1)[..., None], 0.0)


def _seen_keys(x: Tensor, tile: Tile) -> Tensor:
    """Return the keys or values of a tile, with 0 in keys that no query sees."""
    x = x[:, :, tile.cols]
    if tile.visible is None:
        return x
    visible = tile.visible.any(-2)
    if visible.shape[1] > 1:  # per query head: a key counts if any head of the group sees it
        visible = visible.view(visible.shape[0], x.shape[1], -1, visible.shape[2]).any(2)
    return x.masked_fill(~visible[..., None], 0.0)


def _times(x: Tensor, y: Tensor) -> Tensor:
    """Return (b, H, n, a) times (b, H_k, a, c) as (b, H, n, c), each y shared by a group of heads."""
    return (_folded(x, y.shape[1]) @ y).view(*x.shape[:-1], y.shape[-1])


def _summed(weights: Tensor, x: Tensor, k: Tensor) -> Tensor:
    """Return the transposed weights (b, H, n, m) times (b, H, n, c), summed over groups of heads.

    Each head's rows are summed separately. The longer a sum in float32, the larger its error, above all for
    equal numbers, as in the gradient of `out.sum()`. For few rows a single sum is faster.
    """
    heads = k.shape[1]
    if weights.shape[2] <= FEW_ROWS:
        return _folded(weights, heads).mT @ _folded(x, heads)
    sums = weights.mT @ x
    return sums.view(len(sums), heads, -1, *sums.shape[2:]).sum(2)


def _folded(x: Tensor, heads: int) -> Tensor:
    """Return (b, H, n, c) as (b, heads, H / heads * n, c): heads that share a key become rows."""
    batch, all_heads, rows, size = x.shape
    return x.reshape(batch, heads, all_heads // heads * rows, size)


def _load() -> Kernels:
    return Kernels(forward, backward)


def _version() -> str:
    return str(torch.__version__)


BACKEND = Backend(
    name="math",
    forward=EVERYTHING,
    backward=EVERYTHING,
    load=_load,
    version=_version,
    refuses=_refuses,
    priority=-100,
    stands_in=True,
)

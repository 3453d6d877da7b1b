"""Sinks: the results of a kernel as if each row saw one more key, of a given score and without a value.

A backend that declares `sinks` is given them where it is known to return the same (`counted`); no backend is
chosen by that. The results of all others, which don't know of sinks, are rescaled. Let L be
log(sum_j exp(s_j) + exp(sink)), and out the output with the sink's weight counted. A kernel's backward that
is given out and L in the place of its forward's results returns the gradients of query, key and value:
weights are exp(s_j - L), and it subtracts rowsum(grad_out * out) as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from attnreg.contract.backend import Call
from attnreg.contract.offsets import facts_of
from attnreg.contract.spec import Direction
from attnreg.contract.validation import check_results, every_row_sees_a_key
from attnreg.dispatch import counters
from attnreg.dispatch.call_cache import FORWARD_TENSORS
from attnreg.dispatch.calls import wants_batch_invariant
from attnreg.dispatch.state import Plan
from attnreg.torchlib.layout import stream_of

# How many rows are computed at a time. On a CPU torch makes copies of 16-bit numbers that it computes with in
# a wider dtype: of few rows, which stay in the cache, that took a fifth of the time. On a GPU a product in
# float32 of all rows of a long batch would be larger than any of its tensors.
_ROWS, _ROWS_OF_GPU = 128, 8192

# What kernels are given; sinks of another dtype are counted in that of the LSE.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def may_be_counted(plan: Plan, sinks: Tensor) -> bool:
    """Whether the kernel of a plan is given sinks, if it is known that every row sees a key.

    Not in a plan's first call, so that the kernel has run without them before a CUDA graph is captured, where
    nothing is known of offsets. Of a forward whose LSE the program gets this isn't asked: a kernel's may be
    infinite where a sink is far above the scores.
    """
    if plan.counts_sinks is None or not plan.is_checked:
        return False
    # A lazily negated tensor has the other sign in memory, which kernels read.
    in_memory = sinks.dtype in _DTYPES and sinks.is_contiguous() and not sinks.is_neg()
    return in_memory and plan.counts_sinks()


def counted(plan: Plan, tensors: tuple[Tensor, ...], call: Call, sinks: Tensor) -> tuple[Tensor, ...] | None:
    """Return the results of a plan's kernel with sinks counted by itself; None where they are to be rescaled.

    A backward's have the gradient of sinks, too. A kernel that can't run with sinks isn't given any again.
    """
    if not may_be_counted(plan, sinks) or not _every_row_sees_a_key(tensors, call):
        return None
    given = call._replace(sinks=sinks)
    direction: Direction = "forward" if len(tensors) == FORWARD_TENSORS else "backward"
    try:
        results: tuple[Tensor, ...] = plan.kernel(*tensors, given)
        check_results(results, direction, (*tensors, given), plan.backend)
    except Exception as error:
        if plan.sinks_decline_reason(error) is None:  # counts it
            raise
        return None
    counters.count(plan.counters)
    return results


def _every_row_sees_a_key(tensors: tuple[Tensor, ...], call: Call) -> bool:
    """Whether that is known; a kernel's LSE of a row without keys may be the sink."""
    query, key = tensors[:2] if len(tensors) == FORWARD_TENSORS else tensors[1:3]
    cu_seqlens_q, cu_seqlens_k = call.cu_seqlens_q, call.cu_seqlens_k
    if not query.is_cuda:
        return query.is_cpu and every_row_sees_a_key(query, key, call)
    if cu_seqlens_q is None or cu_seqlens_k is None or call.seqused_k is not None:
        return False
    tokens = len(query), len(key)
    return facts_of(cu_seqlens_q, cu_seqlens_k, *tokens, stream_of(query)).every_row_sees_a_key


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return a forward's results with sinks, (H,), counted; writes to `out`, which is the kernel's own.

    Rows that see no key stay as they are.
    """
    # Of -inf, the sink of a head without one, a row that sees no key would make NaN.
    sinks = sinks.to(lse.dtype).clamp(min=torch.finfo(lse.dtype).min)[:, None]
    above = lse - sinks
    if lse.is_cpu and wants_batch_invariant():
        # Torch computes contiguous numbers as vectors and those that are left over one by one, which rounds
        # differently, by their place in the batch. Numbers with gaps between them it computes one by one.
        above, lse = (torch.stack((x, x), dim=-1)[..., 0] for x in (above, lse))
    total = torch.logaddexp(lse, sinks).masked_fill_(lse == -torch.inf, -torch.inf)
    for part, share in _parts(out, above.sigmoid_().mT[..., None]):
        part.mul_(share)
    return out, total.contiguous()


def grad_of_sinks(
    grad_out: Tensor | None, results: Sequence[Tensor], sinks: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """Return the gradient of sinks; `results` are what `with_sinks` has returned.

    That of a score is its weight times (gradient of the weight - rowsum(grad_out * out) + grad_lse), and the
    weight of a sink has no gradient, as it has no value.
    """
    out, lse = results
    of_rows = 0.0 if grad_lse is None else grad_lse.to(lse.dtype)
    if grad_out is not None:
        # A sum with a wide zero is computed in its dtype, without a wide copy of the factors on a GPU.
        zero = lse.new_zeros(1)
        deltas = [torch.addcmul(zero, grad, part).sum(-1) for grad, part in _parts(grad_out, out)]
        of_rows = of_rows - (deltas[0] if len(deltas) == 1 else torch.cat(deltas)).mT
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
    # The weight of a row without a key is infinite here. A NaN stays one.
    return torch.where(lse == -torch.inf, 0.0, weights * of_rows).sum(-1).to(sinks.dtype)


def _parts(rows: Tensor, others: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Return some rows of both at a time; all of them where a graph is traced, as their number may change."""
    if not type(rows) is type(others) is Tensor:
        return ((rows, others),)
    count = _ROWS if rows.is_cpu else _ROWS_OF_GPU
    return zip(torch.split(rows, count), torch.split(others, count), strict=True)

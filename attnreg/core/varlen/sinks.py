"""Sinks: the results of a kernel as if each row saw one more key, of a given score and without a value.

A backend that declares `sinks` is given them where it is known to return the same (`counted`). The results
of all others, which don't know of sinks, are rescaled (`adaptation.sinks`). So no
backend is refused for sinks. The time of a call depends on which of the two happens, so that tables have
times of calls with sinks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnreg.core.adaptation.sinks import rescaled
from attnreg.core.contract.backend import Call
from attnreg.core.contract.spec import Direction
from attnreg.core.dispatch import counters
from attnreg.core.dispatch.call_cache import FORWARD_TENSORS
from attnreg.core.dispatch.calls import wants_batch_invariant
from attnreg.core.dispatch.state import Plan
from attnreg.core.launching.offsets import facts_of
from attnreg.core.launching.validation import check_results, every_row_sees_a_key
from attnreg.core.torchlib.layout import stream_of

# What kernels are given; sinks of another dtype are counted in that of the LSE.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def may_be_counted(plan: Plan, sinks: Tensor) -> bool:
    """Whether the kernel of a plan is given sinks, (H,), if it is known that every row sees a key.

    Not in a plan's first call, so that the kernel has run without them before a CUDA graph is captured, where
    nothing is known of offsets. Of a forward whose LSE the program gets this isn't asked: a kernel's may be
    infinite where a sink is far above the scores. Sinks in another dtype than float16, bfloat16 or float32
    aren't given.
    """
    if plan.counts_sinks is None or not plan.is_checked:
        return False
    # A lazily negated tensor has the other sign in memory, which kernels read.
    in_memory = sinks.dtype in _DTYPES and sinks.is_contiguous() and not sinks.is_neg()
    return in_memory and plan.counts_sinks()


def counted(plan: Plan, tensors: tuple[Tensor, ...], call: Call, sinks: Tensor) -> tuple[Tensor, ...] | None:
    """Return the results of a plan's kernel with sinks counted by itself; None where they are to be rescaled.

    A backward's have the gradient of sinks, too. A kernel that can't run with sinks isn't given any again.

    Args:
        plan: its kernel runs.
        tensors: the kernel's tensors, in the contract's shapes and dtypes: (T, H, D), and a backward's LSE
            (H, T_q).
        call: the other arguments, without sinks.
        sinks: (H,), floating point.
    """
    if not may_be_counted(plan, sinks) or not _every_row_sees_a_key(tensors, call):
        return None
    given = call._replace(sinks=sinks)
    direction: Direction = "forward" if len(tensors) == FORWARD_TENSORS else "backward"
    try:
        results: tuple[Tensor, ...] = plan.kernel(*tensors, given)
        check_results(results, direction, (*tensors, given), plan.backend)
    except BaseException as error:
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
    """Do what `rescaled` does, by the policy that is in force.

    `out` is (T_q, H, D_v), `lse` (H, T_q), `sinks` (H,), floating point.
    """
    return rescaled(out, lse, sinks, wants_batch_invariant())

"""Sinks: the results of a kernel as if each row saw one more key, of a given score and without a value.

A backend that declares `sinks` is given them where it is known to return the same (`may_be_counted`). The
results of all others, which don't know of sinks, are rescaled (`adaptation.sinks`). So no backend is refused
for sinks. The time of a call depends on which of the two happens, so that tables have times of calls with
sinks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnreg.core.adaptation.sinks import grad_of_sinks, rescaled
from attnreg.core.contract.backend import Call
from attnreg.core.contract.spec import Direction
from attnreg.core.dispatch import counters
from attnreg.core.dispatch.calls import wants_batch_invariant
from attnreg.core.dispatch.state import Plan
from attnreg.core.launching.memory import inputs_of
from attnreg.core.launching.offsets import every_row_sees_a_key
from attnreg.core.launching.validation import check_results

# The dtypes of sinks that kernels get; sinks of another dtype are counted in the dtype of the LSE.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def may_be_counted(plan: Plan, sinks: Tensor) -> bool:
    """Whether the kernel of a plan is given sinks, (H,), if it is known that every row sees a key.

    Not in a plan's first call, so that the kernel has run without them before a CUDA graph is captured, where
    nothing is known of offsets. Sinks in another dtype than float16, bfloat16 or float32 aren't given.
    """
    if plan.counts is None or not plan.is_checked:
        return False
    # A lazily negated tensor has the other sign in memory, which kernels read.
    in_memory = sinks.dtype in _DTYPES and sinks.is_contiguous() and not sinks.is_neg()
    return in_memory and plan.counts()


def counted(plan: Plan, tensors: tuple[Tensor, ...], call: Call, direction: Direction) -> tuple[Tensor, ...]:
    """Return the results of a plan's kernel that counts the sinks of a call; empty where it doesn't.

    A backward's have the gradient of sinks, too. A kernel that can't run with sinks isn't given any again.
    A kernel's LSE of a row without keys may be the sink, so that every row has to be known to see a key.

    Args:
        plan: its kernel runs.
        tensors: the kernel's tensors, in the contract's shapes and dtypes: (T, H, D), and a backward's LSE
            (H, T_q).
        call: the other arguments.
        direction: the direction of the kernel.
    """
    if call.sinks is None or not may_be_counted(plan, call.sinks):
        return ()
    query, key, _ = inputs_of(tensors)
    if not every_row_sees_a_key(query, key, call):
        return ()
    try:
        results: tuple[Tensor, ...] = plan.kernel(*tensors, call)
        check_results(results, direction, (*tensors, call), plan.backend)
    except BaseException as error:
        if plan.decline_reason_of_counting(error) is None:  # counts it
            raise
        return ()
    counters.count(plan.counters)
    return results


def rescaled_for(
    call: Call, direction: Direction, tensors: tuple[Tensor, ...], results: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return the results of a kernel that wasn't given a call's sinks as if it had counted them.

    Tensors and results have the contract's shapes and dtypes. A backward's have the gradient of sinks, too.
    """
    if call.sinks is None:
        return results
    if direction == "forward":
        return rescaled(results[0], results[1], call.sinks, call.batch_invariant)
    return (*results, grad_of_sinks(tensors[0], tensors[4:], call.sinks, call.grad_lse))


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Do what `rescaled` does, by the policy that is in force.

    `out` is (T_q, H, D_v), `lse` (H, T_q), `sinks` (H,), floating point.
    """
    return rescaled(out, lse, sinks, wants_batch_invariant())

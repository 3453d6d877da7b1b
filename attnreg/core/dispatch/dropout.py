"""A forward that may have dropout: seed and offset of its mask, and the backend that alone can repeat it."""

from __future__ import annotations

import torch
from torch import Tensor

from attnreg.core.contract.backend import Call
from attnreg.core.dispatch.declined import DeclinedError
from attnreg.core.dispatch.scope import ScopedChoice, make_choice
from attnreg.core.dispatch.state import Plan
from attnreg.core.selection.decision import tied_to


def run_forward_kernel(
    plan: Plan, query: Tensor, key: Tensor, value: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run a forward; returns output, LSE, and with dropout the seed and offset of its mask.

    Seed and offset come from the device's default generator. Where the kernel declines the call, the
    generator is put back: the same state has to draw the same mask, whichever backend was tried before.

    Args:
        plan: its kernel runs.
        query, key, value: in the contract's shapes and dtypes, (B, S, H, D) or packed (T, H, D).
        call: the other arguments.

    Returns:
        The output and the LSE as in the contract; seed and offset as uint64 (2,), which the kernel may have
        overwritten, or None without dropout.

    Raises:
        DeclinedError: the kernel can't run the call.
    """
    if call.dropout == 0.0:
        return *plan.run(query, key, value, call), None
    generator = generator_of(query)
    before = None if query.is_cuda and torch.cuda.is_current_stream_capturing() else generator.get_state()
    seed = torch.randint(0, 2**62, (2,), dtype=torch.int64, device=query.device).view(torch.uint64)
    try:
        out, lse = plan.run(query, key, value, call._replace(rng_state=seed))
    except DeclinedError:
        if before is not None:
            generator.set_state(before)
        raise
    return out, lse, seed


def generator_of(query: Tensor) -> torch.Generator:
    """Return the default generator of a tensor's device, from which the mask of dropout comes.

    The tensor has any shape and dtype.
    """
    return torch.cuda.default_generators[query.device.index] if query.is_cuda else torch.default_generator


def forward_choice(
    choice: ScopedChoice | None, plan: Plan, dropout: float, no_gradient: str = ""
) -> ScopedChoice | None:
    """Return what a forward passes on to its backward: the choice that led it, or its dropout's backend."""
    if dropout == 0.0 and not no_gradient:
        return choice
    preference = choice.preference if choice is not None else None
    if dropout > 0.0:
        preference = tied_to(plan.backend)
    return make_choice(preference, no_gradient)

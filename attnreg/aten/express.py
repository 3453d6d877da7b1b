"""The shortest way of `varlen_attn` to torch's own flash kernel and back.

Where FA2 was chosen, every row is known to see a key, and the tensors lie as the kernel wants them,
nothing is to be put right around that kernel: it gets the arguments as they came. Knowing such a call
again costs a quarter of taking it apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnreg import counters, scope
from attnreg.packed import facts_of, stream_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnreg.planning import Plan
    from attnreg.state import State

__all__ = ["backward", "forward", "remember"]

FORWARD, BACKWARD = 10, 14  # arguments without a keyword

_carriers: dict[torch.device, Tensor] = {}

_deterministic = torch.are_deterministic_algorithms_enabled


def forward(
    original: Callable[..., Any], args: tuple[Any, ...], now: State, pin: scope.Pin | None
) -> tuple[Any, ...] | None:
    """Return the results of a forward that has come this way before; None if it has to go the long way."""
    if pin is not scope.OWN or len(args) != FORWARD:
        return None
    query, key, value, ends_q, ends_k = args[:5]
    ran = now.passes.get(_known_as("forward", args))
    if ran is None or not _as_wanted(query, key, value, ends_q, ends_k):
        return None
    out, lse, rng_state, _, debug_mask = original(*args)
    counters.count(ran)
    return out, lse, rng_state, _carrier(query), debug_mask


def backward(
    original: Callable[..., Any], args: tuple[Any, ...], now: State, pin: scope.Pin | None
) -> tuple[Any, ...] | None:
    """Return the gradients likewise; a backward's pin comes with an argument, whatever scope it runs in."""
    if len(args) != BACKWARD or scope.read_stamp(args[13]) is not scope.OWN:
        return None
    grad_out, query, key, value, out, _, ends_q, ends_k = args[:8]
    ran = now.passes.get(_known_as("backward", args[1:4] + args[6:12]))
    if ran is None or not _as_wanted(query, key, value, ends_q, ends_k):
        return None
    if not (_lies_well(grad_out) and _lies_well(out)):
        return None
    grads: tuple[Any, ...] = original(*args)
    counters.count(ran)
    return grads


def remember(direction: str, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan, now: State) -> None:
    """Have calls like this one, which FA2 has served, come this way from now on."""
    arguments = args if direction == "forward" else args[1:4] + args[6:12]
    expected = FORWARD if direction == "forward" else BACKWARD
    if kwargs or len(args) != expected or arguments[3] is None or arguments[5] == 1:
        return  # with one query per sequence the kernel takes no empty sequence
    now.remember(_known_as(direction, arguments), plan)


def _known_as(direction: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return everything that decided: the arguments from the query on, without the offsets' values."""
    query, key, value, ends_q, ends_k, *numbers = arguments
    return (
        direction, query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype,
        query.device, key.device, value.device, *numbers,
        None if ends_q is None else ends_q.shape, None if ends_k is None else ends_k.shape, _deterministic(),
        torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
    )  # fmt: skip


def _carrier(query: Tensor) -> Tensor:
    """Return what carries the pin to the backward: always the same, as nobody writes or reads its value."""
    found = _carriers.get(query.device)
    if found is None:
        found = _carriers[query.device] = scope.stamp(scope.OWN, query)
    return found


def _as_wanted(query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor) -> bool:
    known = facts_of(ends_q, ends_k, query.shape[0], key.shape[0], stream_of(query))
    return known.covered and _lies_well(query) and _lies_well(key) and _lies_well(value)


def _lies_well(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % 16 == 0

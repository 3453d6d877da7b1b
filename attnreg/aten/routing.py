"""How a router works: leave a call alone, or hand it to its op's `serve` function with what it needs.

A `Route` is one aten op as data. Its `serve` turns the op's arguments into the contract's layout
and the results back; everything that all ops share is here.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnreg import counters, scope
from attnreg.errors import UnsupportedInputError
from attnreg.selection import Preference
from attnreg.state import state

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnreg.planning import Native, Plan

__all__ = ["Route", "Turn", "like", "new_rng_state", "passed_on", "router", "tied"]


class Turn(NamedTuple):
    """One call as a router passes it on.

    Attributes:
        op: the op's name, for messages.
        torch: runs torch's own kernel on the very same arguments; None where torch has none.
        native: the backend that kernel belongs to; None where torch has none.
        pin: the choice that holds for this call alone.
    """

    op: str
    torch: Callable[[], Any] | None
    native: Native | None
    pin: scope.Pin | None

    def untouched(self, why: str) -> Any:
        """Run torch's own kernel on a call that only it understands.

        Raises:
            UnsupportedInputError: torch has none for this device.
        """
        if self.torch is None:
            raise UnsupportedInputError(f"aten::{self.op}: {why}, and torch has no kernel for this device")
        return self.torch()

    def run(self, plan: Plan, kernel: Callable[[], Any]) -> Any:
        """Run `kernel`, or torch's own where the plan says so, and count it."""
        result = self.torch() if plan.original and self.torch is not None else kernel()
        counters.count(plan.counters)
        return result


class Route(NamedTuple):
    """One aten op that attnreg takes over.

    Attributes:
        op: its name, without "aten::".
        keys: the dispatch keys to take.
        arguments: its arguments as a class (see `schemas`).
        serve: what answers a call.
        native: the backend that torch's own kernel of this op belongs to.
        carrier: in a backward, the argument through which the forward's choice comes.
        since: the torch that brought it; older ones go without.
    """

    op: str
    keys: tuple[str, ...]
    arguments: Callable[..., Any]
    serve: Callable[[Any, Turn], Any]
    native: Native
    carrier: str = ""
    since: str = "2.11"


def router(
    route: Route, original: Callable[..., Any] | None, unknown: frozenset[str] = frozenset()
) -> Callable[..., Any]:
    """Return the function to register for a route; `unknown` are arguments of a newer torch."""
    native = route.native if original is not None else None
    op, arguments, serve, carrier = route.op, route.arguments, route.serve, route.carrier

    def routed(*args: Any, **kwargs: Any) -> Any:
        pin = None
        if not carrier:
            pin = scope.current()
            if pin is None and original is not None and not state().active:
                return original(*args, **kwargs)
        own = functools.partial(original, *args, **kwargs) if original is not None else None
        if unknown and not unknown.isdisjoint(kwargs):
            return Turn(op, own, native, pin).untouched(f"unknown argument {sorted(unknown & set(kwargs))}")
        asked = arguments(*args, **kwargs)
        if carrier:
            pin = scope.read_stamp(getattr(asked, carrier))
            if pin is None and original is not None and not state().active:
                return original(*args, **kwargs)
        return serve(asked, Turn(op, own, native, pin))

    return routed


def new_rng_state(device: torch.device) -> Tensor:
    """Return a fresh seed and offset for a dropout mask, from the device's default generator."""
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device).view(torch.uint64)


def like(result: Tensor, model: Tensor) -> Tensor:
    """Return `result` with the strides that torch's own kernel gives an output shaped like `model`.

    torch.compile asserts them. The first two tests spare the usual layouts the work.
    """
    if result.shape != model.shape or result.stride() == model.stride():
        return result
    expected = torch.empty_like(model)
    return result if result.stride() == expected.stride() else expected.copy_(result)


def passed_on(pin: scope.Pin | None, plan: Plan, dropout: float, no_gradient: str = "") -> scope.Pin | None:
    """Return what a forward tells its backward: the choice that was in force, or a dropout's tie."""
    if dropout == 0.0 and not no_gradient:
        return pin
    preference = pin.preference if pin is not None else None
    if dropout > 0.0:
        preference = Preference("the forward's dropout mask", (plan.backend,), exclusive=True)
    return scope.pin(preference, no_gradient)


def tied(turn: Turn, dropout: float) -> scope.Pin | None:
    """Return a backward's pin, after checking that a dropout mask says whose it is.

    Raises:
        UnsupportedInputError: the forward ran before attnreg was active, or something copied the
            tensors that were saved for the backward.
    """
    if dropout > 0.0 and turn.pin is None:
        raise UnsupportedInputError(
            f"aten::{turn.op}: dropout_p {dropout}: can't tell which backend drew the mask, as its forward "
            "ran before attnreg was active or a hook copied what it saved; register backends earlier"
        )
    return turn.pin

"""How a router works: leave a call alone, or hand it to its op's `serve` function with what it needs.

A `Route` is one aten op as data. Its `serve` turns the op's arguments into the contract's layout
and the results back; everything that all ops share is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnreg.aten import compiled
from attnreg.aten.again import Answer, tried
from attnreg.contract.declines import DeclinedError, served
from attnreg.contract.launchers import AddressLauncher
from attnreg.dispatch import counters, scope
from attnreg.dispatch.state import state
from attnreg.errors import UnsupportedInputError
from attnreg.selection.decision import Preference

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnreg.contract.backend import Call
    from attnreg.dispatch.planning import Native, Plan
    from attnreg.dispatch.state import State

# Keywords of which a call may have some and be known again; a mask isn't plain.
PLAIN = frozenset({"scale", "attn_mask"})

__all__ = ["Quick", "Route", "Turn", "drawn", "like", "passed_on", "router", "tied"]


class Quick(NamedTuple):
    """Where an op's arguments say enough to know a dense call again without taking them apart.

    Attributes:
        query: the place of the query; key and value come next.
        flags: the places of the plain values that capabilities read.
        carrier: the place of a backward's carrier; 0 in a forward.
        absent: the places of two tensors that a call mustn't have for that: a bias, or the offsets that
            make it a packed one.
    """

    query: int
    flags: slice
    carrier: int = 0
    absent: tuple[int, int] | None = None


class Turn(NamedTuple):
    """One call as a router passes it on.

    Attributes:
        op: the op's name, for messages.
        original: torch's own kernel of the op; None where torch has none.
        args, kwargs: the op's arguments as they came.
        native: the backend that kernel belongs to; None where torch has none.
        pin: the choice that holds for this call alone.
        known_as: how to know the call again; None where that takes more than a `Quick`.
        now: the state that the call began in, which is the one to keep things in; None where nothing is kept.
        own: what attnreg's own front calls it; None of other fronts' calls.
    """

    op: str
    original: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    native: Native | None
    pin: scope.Pin | None
    known_as: tuple[Any, ...] | None = None
    now: State | None = None
    own: scope.Own | None = None

    def torch(self, plan: Plan, alone: bool = True) -> Any:
        """Run torch's own kernel on the very same arguments, because the plan says so; counts it.

        `alone` says that this is all there is to do, so that calls like this one needn't come here.
        """
        result = self.original(*self.args, **self.kwargs)  # type: ignore[misc]
        counters.count(plan.counters)
        if alone:
            self.again(plan, Answer(self.original))  # type: ignore[arg-type]
        return result

    def again(self, plan: Plan, answer: Answer | None) -> None:
        """Have calls like this one answered that way from now on."""
        if answer is not None and plan.proven and self.known_as is not None and self.now is not None:
            self.now.remember(self.known_as, answer, plan.counters)
            _accept(answer, self.original, plan.counters, self.args)

    def untouched(self, why: str) -> Any:
        """Run torch's own kernel on a call that only it understands.

        Raises:
            UnsupportedInputError: torch has none for this device.
        """
        if self.original is None:
            raise UnsupportedInputError(f"aten::{self.op}: {why}, and torch has no kernel for this device")
        return self.original(*self.args, **self.kwargs)


class Route(NamedTuple):
    """One aten op that attnreg takes over.

    Attributes:
        op: its name, without "aten::".
        keys: the dispatch keys to take.
        arguments: its arguments as a class (see `schemas`).
        serve: what answers a call.
        native: the backend that torch's own kernel of this op belongs to.
        carrier: in a backward, the argument through which the forward's choice comes.
        quick: how to know a call again without taking its arguments apart.
        express: what may answer a packed call before anything else is asked, or return None.
        since: the torch that brought it; older ones go without.
    """

    op: str
    keys: tuple[str, ...]
    arguments: Callable[..., Any]
    serve: Callable[[Any, Turn], Any]
    native: Native
    carrier: str = ""
    quick: Quick | None = None
    express: Callable[..., Any] | None = None
    since: str = "2.11"


def router(
    route: Route, original: Callable[..., Any] | None, unknown: frozenset[str] = frozenset()
) -> Callable[..., Any]:
    """Return the function to register for a route; `unknown` are arguments of a newer torch."""
    native = route.native if original is not None else None
    op, arguments, serve, carrier, quick = route.op, route.arguments, route.serve, route.carrier, route.quick
    express = route.express
    at, flags, carried_at, absent = quick or Quick(0, slice(0))
    this, that = absent or (0, 0)
    # Names of this function are found faster than attributes of modules; this is every call's way.
    current, enter, leave, OWN, Own = scope.current, scope.enter, scope.leave, scope.OWN, scope.Own  # noqa: N806
    read_stamp, count = scope.read_stamp, counters.count
    grad_enabled, deterministic = torch.is_grad_enabled, torch.are_deterministic_algorithms_enabled
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled
    capturing = torch.cuda.is_current_stream_capturing

    def routed(*args: Any, **kwargs: Any) -> Any:
        now, known_as, scoped = state(), None, current()
        if type(scoped) is Own:
            token = enter(OWN)  # what a kernel calls in its turn isn't the front's call
            try:
                return long_way(args, kwargs, now, OWN, None, scoped)
            finally:
                leave(token)
        if quick is not None and (absent is None or (args[this] is None and args[that] is None)):
            pin = read_stamp(args[carried_at]) if carrier else scoped
            if (
                pin is None
                and original is not None
                and (not kwargs or (kwargs.keys() <= PLAIN and kwargs.get("attn_mask") is None))
            ):
                if not now.active:
                    return passed(args, kwargs)
                query, key, value = args[at], args[at + 1], args[at + 2]
                known_as = (
                    op, query.shape, key.shape, value.shape, query.dtype, query.device,
                    args[flags], *kwargs.values(),
                    grad_enabled(), query.requires_grad or key.requires_grad or value.requires_grad,
                    deterministic(), warn_only(), query.is_cuda and capturing(),
                )  # fmt: skip
                known = now.known.get(known_as)
                if known is not None:
                    answer, counted = known
                    result = answer.run(*args, **kwargs)
                    if result is not None:
                        count(counted)
                        _accept(answer, original, counted, args)
                        return result
        return long_way(args, kwargs, now, scoped, known_as, None)

    def passed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if compiled.extension is not None:
            compiled.extension.accept_passing()
        return original(*args, **kwargs)  # type: ignore[misc]

    def long_way(
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        now: State,
        scoped: scope.Pin | None,
        known_as: tuple[Any, ...] | None,
        own: scope.Own | None,
    ) -> Any:
        if express is not None:
            result = express(original, args, kwargs, now, own)
            if result is not None:
                return result
        if unknown and not unknown.isdisjoint(kwargs):
            return Turn(op, original, args, kwargs, native, None).untouched(_told(unknown, kwargs))
        asked = arguments(*args, **kwargs)
        pin = read_stamp(getattr(asked, carrier)) if carrier else scoped
        if pin is None and original is not None and not now.active:
            return passed(args, kwargs)
        turn = Turn(op, original, args, kwargs, native, pin, known_as, now, own)
        return served(lambda: serve(asked, turn))

    return routed


def _accept(
    answer: Answer,
    original: Callable[..., Any] | None,
    counted: tuple[counters.Counter, ...],
    args: tuple[Any, ...],
) -> None:
    """Have compiled routers, if there are any, answer further calls like the one under way."""
    extension = compiled.listening()
    if extension is None:
        return
    if answer.run is original:
        extension.accept(None, counted)
    elif answer.turned is None:
        extension.accept(answer.where_layouts_are_known(), counted)
    else:
        turned, beside = answer.turned, answer.turned.beside(args)
        found = turned.kernel_call(args)
        if isinstance(found, AddressLauncher):
            extension.accept_turned(found.described(), counted, beside)
        elif found is None or not tried(extension.accept_op, (*found.described(), counted, beside)):
            extension.accept_turned(turned.again(), counted, beside)


def _told(unknown: frozenset[str], kwargs: dict[str, Any]) -> str:
    return f"argument {', '.join(sorted(unknown & set(kwargs)))} is of a newer torch than attnreg knows"


def drawn(plan: Plan, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Run a forward with dropout; returns output, LSE, and the seed and offset of its mask.

    These come from the device's default generator, which is put back where the kernel declines the call: one
    that is made again from the same state has to draw the same, whoever was asked before.
    """
    device = query.device
    generator = torch.cuda.default_generators[device.index] if query.is_cuda else torch.default_generator
    before = None if query.is_cuda and torch.cuda.is_current_stream_capturing() else generator.get_state()
    seed = torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device).view(torch.uint64)
    try:
        out, lse = plan.run(query, key, value, call._replace(rng_state=seed))
    except DeclinedError:
        if before is not None:
            generator.set_state(before)
        raise
    return out, lse, seed


def like(result: Tensor, model: Tensor) -> Tensor:
    """Return `result` with the strides that torch's own kernel gives an output shaped like `model`.

    torch.compile asserts them. The first two tests spare the usual layouts the work.
    """
    if result.stride() == model.stride() or result.shape != model.shape:
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

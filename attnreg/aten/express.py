"""The shortest way through a router for `varlen_attn`: a call that came before is known by its arguments.

Taking a call apart, checking it and looking up its plan costs the host as much as a small kernel. All
of that came out the same for the last call with these arguments, so what is left is to run the plan.
Where that plan is torch's own kernel and every row is known to see a key, the kernel even gets the
arguments as they came. Only calls of attnreg's own front come this way: nothing compiles around them,
so what an op has to return beside its results can be the same tensors every time. The front looks its
call up and hands what it found to the router in the scope (`scope.Own`); a backward is found by the
tensor that its forward sent it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnreg.aten import compiled
from attnreg.aten.again import Again, address_call
from attnreg.aten.beside import flash_extras, shared
from attnreg.contract.offsets import facts_of, of_a_graph
from attnreg.contract.validation import check_values
from attnreg.dispatch import counters, scope
from attnreg.errors import UnsupportedInputError
from attnreg.torchlib.layout import stream_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnreg.contract.backend import Call
    from attnreg.dispatch.planning import Plan
    from attnreg.dispatch.scope import Own
    from attnreg.dispatch.state import State

__all__ = ["Express", "backward", "forward", "known_as", "remember"]

FORWARD, BACKWARD = 10, 14  # arguments without a keyword
TENSORS = 5  # of them in a forward
NEEDS_GRADIENT = -1  # how `known_as` ends
DESCRIBED = 9  # shapes, dtypes and devices of query, key and value: how `known_as` begins
PLAIN = frozenset({"scale", "window_size_left", "window_size_right"})

_deterministic = torch.are_deterministic_algorithms_enabled
_warn_only = torch.is_deterministic_algorithms_warn_only_enabled
_capturing = torch.cuda.is_current_stream_capturing


class Express(NamedTuple):
    """What a call came down to.

    Attributes:
        plan: what runs it.
        call: its call without offsets.
        direct: whether the plan is torch's own kernel, so that the op's arguments will do.
        beside: what a forward's op has beside its results: a random state, what carries the pin to
            the backward, a debug mask. Nobody reads or writes their values.
    """

    plan: Plan
    call: Call
    direct: bool
    beside: tuple[Tensor, ...] = ()


class Return(NamedTuple):
    """The way back of a forward that came here, known by the very tensor that it sends its backward.

    The graph keeps a backward's arguments together, and torch checks that nobody has written to them:
    what held of them the first time needn't be looked at again.

    Attributes:
        carrier: that tensor.
        known: what the backward came down to; None before the first.
        modes: the modes that it ran in.
    """

    carrier: Tensor
    known: Express | None = None
    modes: tuple[bool, bool] | None = None


def known_as(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    *numbers: object,
) -> tuple[object, ...]:
    """Return everything that decides: the arguments but for the values of tensors, and the modes."""
    return (
        query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype,
        query.device, key.device, value.device, *numbers,
        cu_seqlens_q is not None and (cu_seqlens_q.shape, cu_seqlens_q.dtype, cu_seqlens_q.device),
        cu_seqlens_k is not None and (cu_seqlens_k.shape, cu_seqlens_k.dtype, cu_seqlens_k.device),
        _deterministic(), _warn_only(),
        torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
    )  # fmt: skip


def forward(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], now: State, own: Own | None
) -> tuple[Any, ...] | None:
    """Return the results of a forward that came before; None if it has to go the long way."""
    known = own.express if own is not None else None
    if known is None or own is None or _captured(args[0]) or not _as_sent(own, args, kwargs):
        return None
    if now.express.get(own.known_as) is not own:
        return None  # something has changed since the front has sent it
    query, key, _, cu_seqlens_q, cu_seqlens_k = args[:5]
    if _on_host(query):
        return _by_values(own, known, args)
    if not facts_of(
        cu_seqlens_q, cu_seqlens_k, query.shape[0], key.shape[0], stream_of(query)
    ).every_row_sees_a_key:
        return None
    as_sent = known.direct and all(map(_lies_well, args[:3]))
    if as_sent:
        out, lse, *_ = original(*args, **kwargs)
    else:
        results = _saved(own, _run(known, *args[:TENSORS]))
        if results is None:
            return None
        out, lse = results
    counters.count(known.plan.counters)
    if compiled.extension is not None:
        run, saved = None, own.known_as[NEEDS_GRADIENT]
        if not as_sent:
            run = _by_address(known, args[:TENSORS], (out, lse)) or _again(
                known, functools.partial(_run_apart, known), functools.partial(_saved, own)
            )
        compiled.extension.accept_sent(run, known.plan.counters, known.beside, saved)
        compiled.extension.accept_offsets(cu_seqlens_q, cu_seqlens_k, query.shape[0], key.shape[0])
    return out, lse, *known.beside


def _by_values(own: Own, known: Express, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the results of a forward whose offsets are at hand; None likewise.

    Whoever shares the memory of its offsets can write to them without a trace: they are looked at each time,
    and compiled routers are told nothing.
    """
    query, key, _, cu_seqlens_q, cu_seqlens_k = args[:TENSORS]
    check_values(query, key, known.call._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k))
    results = _saved(own, _run(known, *args[:TENSORS]))
    if results is None:
        return None
    counters.count(known.plan.counters)
    return *results, *known.beside


def _run(known: Express, *tensors: Tensor) -> Any:
    """Run a plan on what its kernel takes, followed by the offsets; None if the kernel can't after all."""
    *operands, cu_seqlens_q, cu_seqlens_k = tensors
    try:
        return known.plan.kernel(
            *operands, known.call._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        )
    except UnsupportedInputError:
        return None  # the long way finds out what does run it


def _run_apart(known: Express, *tensors: Tensor) -> Any:
    token = scope.enter(scope.OWN)  # what a kernel calls in its turn isn't the front's call
    try:
        return _run(known, *tensors)
    finally:
        scope.leave(token)


def _saved(own: Own, results: Any) -> Any:
    """Return a forward's results as autograd may save them.

    A hook may hand the LSE to any backward, and torch's own reads it as if it were contiguous.
    """
    if results is None or not own.known_as[NEEDS_GRADIENT]:
        return results
    out, lse = results
    return out, lse.contiguous()


def _again(
    known: Express, run: Callable[..., Any], back: Callable[[Any], Any] | None = None
) -> Callable[..., Any]:
    """Return what answers calls like this one, `run` unless the backend has a shorter way.

    `back` makes of a kernel's results what is returned.
    """

    def finished(kernel: Callable[..., Any]) -> Callable[..., Any]:
        return kernel if back is None else lambda *tensors: back(kernel(*tensors))

    def shorter(*tensors: Tensor) -> Callable[..., Any] | None:
        found = _shorter(known, *tensors)
        return None if found is None else finished(found)

    return finished(run) if known.plan.again is None else Again(finished(run), shorter)


def _by_address(known: Express, tensors: tuple[Tensor, ...], results: Any) -> tuple[Any, ...] | None:
    """Return the kernel that answers calls like this one on their addresses, as compiled routers take it."""
    if of_a_graph(tensors[-1]):
        return None  # nothing is kept
    found = address_call(functools.partial(_shorter, known), tensors, results)
    return None if found is None else found.described()


def _shorter(known: Express, *tensors: Tensor) -> Callable[..., Any] | None:
    """Return the backend's shorter way for what a kernel takes, followed by the offsets."""
    *operands, cu_seqlens_q, cu_seqlens_k = tensors
    if known.plan.again is None:
        return None
    return known.plan.again(
        tuple(operands), known.call._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    )


def backward(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], now: State, _: Own | None
) -> tuple[Any, ...] | None:
    """Return the gradients likewise; a backward's pin comes with an argument."""
    if len(args) != BACKWARD:
        return None
    carrier = args[13]
    modes = _deterministic(), _warn_only()
    back = now.returns.get(id(carrier))
    mine = back is not None and back.carrier is carrier
    known = back.known if back is not None and mine and back.modes == modes else None
    if known is None:
        known = _looked_up(args, kwargs, now)
        if known is None:
            return None
        if mine:
            now.returns[id(carrier)] = Return(carrier, known, modes)
    if _captured(args[0]):
        return None
    grads: tuple[Any, ...] | None
    as_sent = known.direct and all(map(_lies_well, args[:6]))
    if as_sent:
        grads = original(*args, **kwargs)
    else:
        grads = _run(known, *args[:8])
        if grads is None:
            if mine:
                now.returns[id(carrier)] = Return(carrier)
            return None
    counters.count(known.plan.counters)
    if mine and compiled.extension is not None:
        run = None
        if not as_sent:
            run = _by_address(known, args[:8], grads) or _again(known, functools.partial(_run, known))
        compiled.extension.accept_returned(carrier, run, known.plan.counters)
    return grads


def _looked_up(args: tuple[Any, ...], kwargs: dict[str, Any], now: State) -> Express | None:
    if scope.read_stamp(args[13]) is not scope.OWN:
        return None
    known: Express | None = now.backwards.get(_backward_known_as(args, kwargs))
    if known is None:
        return None
    query, key, cu_seqlens_q, cu_seqlens_k = args[1], args[2], args[6], args[7]
    if _on_host(query):
        return known  # whose kernel reads the offsets
    return (
        known
        if facts_of(
            cu_seqlens_q, cu_seqlens_k, query.shape[0], key.shape[0], stream_of(query)
        ).every_row_sees_a_key
        else None
    )


def remember(
    direction: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: Plan,
    call: Call,
    native: str,
    now: State,
    own: Own | None,
) -> None:
    """Have calls like this one, which `plan` has served, come this way from now on.

    `native` is the backend that torch's own kernel of the op belongs to; `own` is what the front calls a
    forward.
    """
    query = args[0 if direction == "forward" else 1]
    if len(args) != (FORWARD if direction == "forward" else BACKWARD):
        return
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        return
    if call.dropout or not kwargs.keys() <= PLAIN or query.dtype == torch.float64:
        return  # the LSE of float64 has to be made aten's float32
    if of_a_graph(call.cu_seqlens_q):
        return  # what is kept would lie in the graph's memory, and nothing is known of the offsets there
    # With one query per sequence torch's kernel takes no empty sequence.
    direct = plan.backend == native and call.max_q > 1
    bare = call._replace(cu_seqlens_q=None, cu_seqlens_k=None)
    known = Express(plan, bare, direct)
    if direction == "backward":
        now.recognise_backward(_backward_known_as(args, kwargs), known)
    elif own is not None and _as_sent(own, args, kwargs):
        # The same calls come again and again while their offsets are unknown.
        before = now.express.get(own.known_as)
        beside = _beside(query) if before is None else before.express.beside
        own.express = known._replace(beside=beside)
        now.recognise(own.known_as, own)
        now.returns.setdefault(id(beside[1]), Return(beside[1]))


def _as_sent(own: Own, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this is the call that the front has sent: a dispatch mode may have made another of it."""
    query, key, value = args[:3]
    described = (
        query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype,
        query.device, key.device, value.device,
    )  # fmt: skip
    return args[TENSORS:] == own.rest and kwargs == own.options and described == own.known_as[:DESCRIBED]


def _backward_known_as(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, ...]:
    return known_as(*args[1:4], *args[6:12], *kwargs.items())


def _beside(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the op has beside its results; see `Express`. The carrier is a new one."""
    with torch.inference_mode(False):  # or autograd couldn't save them later
        rng_state, _, mask = shared(flash_extras, query)
        return rng_state, scope.stamp(scope.OWN, rng_state), mask


def _on_host(tensor: Tensor) -> bool:
    return tensor.is_cpu


def _captured(tensor: Tensor) -> bool:
    return not _on_host(tensor) and _capturing()


def _lies_well(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % 16 == 0

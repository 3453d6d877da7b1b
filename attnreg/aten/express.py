"""The shortest way through a router for `varlen_attn`: a call that came before is known by its arguments.

Taking a call apart, checking it and looking up its plan costs the host as much as a small kernel. All
of that came out the same for the last call with these arguments, so what is left is to run the plan.
Where that plan is torch's own kernel and every row is known to see a key, the kernel even gets the
arguments as they came. Only calls of attnreg's own front come this way: nothing compiles around them,
so what an op has to return beside its results can be the same tensors every time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnreg import counters, scope
from attnreg.packed import facts_of, stream_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnreg.backend import Call
    from attnreg.planning import Plan
    from attnreg.state import State

__all__ = ["Express", "backward", "forward", "remember"]

FORWARD, BACKWARD = 10, 14  # arguments without a keyword
PLAIN = frozenset({"scale", "window_size_left", "window_size_right"})

_deterministic = torch.are_deterministic_algorithms_enabled
_warn_only = torch.is_deterministic_algorithms_warn_only_enabled
_capturing = torch.cuda.is_current_stream_capturing
_further: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}


class Express(NamedTuple):
    """What a call came down to.

    Attributes:
        plan: what runs it.
        call: its call without offsets.
        direct: whether the plan is torch's own kernel, so that the op's arguments will do.
    """

    plan: Plan
    call: Call
    direct: bool


def forward(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], now: State, pin: Any
) -> tuple[Any, ...] | None:
    """Return the results of a forward that came before; None if it has to go the long way."""
    if pin is not scope.OWN or len(args) != FORWARD:
        return None
    known = now.express.get(_known_as("forward", args, kwargs))
    if known is None or _capturing():
        return None
    query, key, value, ends_q, ends_k = args[:5]
    covered = facts_of(ends_q, ends_k, query.shape[0], key.shape[0], stream_of(query)).covered
    if not covered:
        return None
    if known.direct and _lies_well(query) and _lies_well(key) and _lies_well(value):
        out, lse, *_ = original(*args, **kwargs)
    else:
        out, lse = known.plan.kernel(
            query, key, value, known.call._replace(cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
        )
    counters.count(known.plan.counters)
    return out, lse, *_beside(query)


def backward(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], now: State, _: Any
) -> tuple[Any, ...] | None:
    """Return the gradients likewise; a backward's pin comes with an argument."""
    if len(args) != BACKWARD or scope.read_stamp(args[13]) is not scope.OWN:
        return None
    known = now.express.get(_known_as("backward", args[1:4] + args[6:12], kwargs))
    if known is None or _capturing():
        return None
    grad_out, query, key, value, out, lse, ends_q, ends_k = args[:8]
    covered = facts_of(ends_q, ends_k, query.shape[0], key.shape[0], stream_of(query)).covered
    if not covered:
        return None
    grads: tuple[Any, ...]
    if known.direct and all(map(_lies_well, (grad_out, query, key, value, out))):
        grads = original(*args, **kwargs)
    else:
        call = known.call._replace(cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
        grads = known.plan.kernel(grad_out, query, key, value, out, lse, call)
    counters.count(known.plan.counters)
    return grads


def remember(
    direction: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: Plan,
    call: Call,
    native: str,
    now: State,
) -> None:
    """Have calls like this one, which `plan` has served, come this way from now on.

    `native` is the backend that torch's own kernel of the op belongs to.
    """
    arguments = args if direction == "forward" else args[1:4] + args[6:12]
    expected = FORWARD if direction == "forward" else BACKWARD
    if len(args) != expected or call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        return
    if call.dropout or not kwargs.keys() <= PLAIN or arguments[0].dtype == torch.float64:
        return  # the LSE of float64 has to be made aten's float32
    # With one query per sequence torch's kernel takes no empty sequence.
    direct = plan.backend == native and call.max_q > 1
    bare = call._replace(cu_seqlens_q=None, cu_seqlens_k=None)
    now.recognise(_known_as(direction, arguments, kwargs), Express(plan, bare, direct))


def _known_as(direction: str, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return everything that decided: the arguments from the query on, but for the values of tensors."""
    query, key, value, ends_q, ends_k, *numbers = arguments
    return (
        direction, query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype,
        query.device, key.device, value.device, *numbers, *kwargs.items(),
        ends_q is not None and (ends_q.shape, ends_q.dtype, ends_q.device),
        ends_k is not None and (ends_k.shape, ends_k.dtype, ends_k.device),
        _deterministic(), _warn_only(),
        torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
    )  # fmt: skip


def _beside(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the op has beside its results: a random state, what carries the pin, a debug mask.

    Nobody reads or writes their values.
    """
    found = _further.get(query.device)
    if found is None:
        with torch.inference_mode(False):  # or autograd couldn't save them later
            rng_state = torch.empty(2, dtype=torch.uint64, device=query.device)
            found = rng_state, scope.stamp(scope.OWN, rng_state), query.new_empty(0)
        _further[query.device] = found
    return found


def _lies_well(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % 16 == 0

"""How a router works: it leaves a call to torch, or hands it to its op's `serve` function.

A `Route` is one aten op as data. Its `serve` brings the op's arguments into the contract's layout, looks
up and runs the plan, and brings the results back; what ops share is here. A router returns the op's results
together with what the compiled call cache needs to run further calls like this one (`Kept`); without the
compiled part that is dropped. Below SDPA torch's selector has chosen an op: its own kernel comes first in the
default order, on the arguments as they came, and only another backend's call is brought into the contract's
layout.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.core.contract.backend import Call
from attnreg.core.contract.lengths import Cut
from attnreg.core.contract.spec import Direction
from attnreg.core.dispatch import call_cache, calls, counters, scope
from attnreg.core.dispatch.call_cache import Kept, kept_for
from attnreg.core.dispatch.declined import NOBODY, Declined, retry_on_decline
from attnreg.core.dispatch.planning import Native
from attnreg.core.dispatch.scope import ScopedChoice
from attnreg.core.dispatch.state import Plan, state
from attnreg.core.launching.memory import check_in_memory
from attnreg.core.torchlib.layout import inductor_is_running, readable
from attnreg.errors import UnsupportedInputError

TORCH_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

# An op's results, and how the call cache is to run further calls; True where nothing is registered, so that
# every call of the op is torch's own.
RouterResult = tuple[Any, Kept | bool | None]


class Layout(NamedTuple):
    """How the tensors of an aten op lie, as far as the compiled router has to know.

    Attributes:
        query: the place of the query among the op's arguments; key and value come next.
        token_argument: the place of a backward's argument that carries the forward's choice; -1 in a forward.
        token_result: the place of a forward's result that carries it there; -1 in a backward.
        bhsd: whether tensors are (B, H, S, D), not (B, S, H, D).
        lse_ends_in_one: whether the LSE is (B, H, S, 1), not (B, H, S).
        lse_bsh: whether the LSE of a forward has the strides of (B, S, H).
        gradients_bshd: whether gradients have the strides of (B, S, H, D), not those of the inputs.
    """

    query: int
    token_argument: int = -1
    token_result: int = -1
    bhsd: bool = False
    lse_ends_in_one: bool = False
    lse_bsh: bool = False
    gradients_bshd: bool = False


class Route(NamedTuple):
    """One aten op that attnreg takes over.

    Attributes:
        op: its name, without "aten::".
        keys: the dispatch keys to take.
        arguments: its arguments as a class (see `schemas`).
        serve: what runs a call, given its arguments and how it came.
        native: the backend that torch's own kernel of this op belongs to.
        layout: how its tensors lie.
        token: the name of the argument at `layout.token_argument`.
        since: the torch that brought the op; older ones go without.
    """

    op: str
    keys: tuple[str, ...]
    arguments: Callable[..., Any]
    serve: Callable[[Any, RoutedCall], RouterResult]
    native: Native
    layout: Layout
    token: str = ""
    since: tuple[int, int] = (2, 11)


class RoutedCall(NamedTuple):
    """One call as a router passes it on.

    Attributes:
        op: the op's name, for messages.
        original: torch's own kernel of the op; None where torch has none.
        args, kwargs: the op's arguments as they came.
        native: the backend that kernel belongs to; None where torch has none.
        choice: the choice for this call alone.
        loaded: the places of the arguments that a kernel on a GPU loads 16 bytes at a time; none on a CPU.
        declined: the backends that have declined the call.
    """

    op: str
    original: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    native: Native | None
    choice: ScopedChoice | None
    loaded: tuple[int, ...] = ()
    declined: Declined = NOBODY

    def plan_for(
        self,
        direction: Direction,
        tensors: Sequence[Tensor],
        call: Call,
        choice: ScopedChoice | None,
        native: Native | None,
        needs_backward: bool = True,
        bhsd: bool = False,
    ) -> Plan:
        """Return the plan of the call: `calls.plan_for`, without the backends that have declined it.

        `tensors` are query, key and value: (B, S, H, D) or (T, H, D), or (B, H, S, D) with `bhsd`.
        """
        query, key, value = tensors
        return calls.plan_for(
            direction, query, key, value, call, choice, native, needs_backward, bhsd, self.declined
        )

    def run_native(
        self, plan: Plan, call: Call, keeps: bool = True, cuts: tuple[Cut, ...] = ()
    ) -> tuple[Any, Kept | None]:
        """Run torch's own kernel, because the plan says so; counts it.

        It gets the arguments as they came but for `loaded` tensors that it would read wrongly, as torch's
        kernels don't check where these lie. On rows or addresses that aren't multiples of 16 bytes cuDNN's
        gives NaN, and the flash op's ends the CUDA context (torch 2.11 on an H200).

        Unless the kernel draws a dropout mask, its backward would be wrong, or arguments were copied, further
        calls may be kept. They aren't if a mask that is aligned top-left reaches further right in each.
        """
        args = self.args
        if self.loaded:
            copied = list(args)
            for place in self.loaded:
                copied[place] = readable(args[place])
            args = tuple(copied)
            keeps = keeps and all(map(operator.is_, args, self.args))
        try:
            if plan.turn is None:
                result = self.original(*args, **self.kwargs)  # type: ignore[misc]
            else:
                run = functools.partial(self.original, *args, **self.kwargs)  # type: ignore[misc,arg-type]
                result = plan.turn.timed(run, args[0])
        except Exception as error:
            counters.failed(plan.counters[0], error)
            raise
        counters.count(plan.counters)
        keeps = keeps and plan.is_checked and call_cache.load() is not None
        keeps = keeps and (call.varlen or bool(cuts) or call.window[1] <= 0)
        return result, Kept(None, plan, cuts=cuts) if keeps else None

    def untouched(self, why: str) -> RouterResult:
        """Run torch's own kernel on a call that only it understands; refuse where it has none."""
        if self.original is None:
            raise UnsupportedInputError(f"aten::{self.op}: {why}, and torch has no kernel for this device")
        return self.original(*self.args, **self.kwargs), None


def router(
    route: Route, original: Callable[..., Any] | None, unknown: frozenset[str] = frozenset()
) -> Callable[..., RouterResult]:
    """Return the function that serves a route's calls; `unknown` are arguments of a newer torch."""
    native = route.native if original is not None else None
    op, arguments, serve, token = route.op, route.arguments, route.serve, route.token
    loaded: tuple[int, ...] = ()
    if "CUDA" in route.keys:
        of_backward = ("grad_out", "grad_out_", "out") if token else ()
        fields: tuple[str, ...] = arguments._fields  # type: ignore[attr-defined]
        loaded = tuple(
            place for place, name in enumerate(fields) if name in ("query", "key", "value", *of_backward)
        )
    no_gradients = (None,) * len(getattr(torch.ops.aten, op).default._schema.returns)

    def routed(*args: Any, **kwargs: Any) -> RouterResult:
        if unknown and (further := sorted(unknown & kwargs.keys())):
            reason = f"argument {', '.join(further)} is of a newer torch than attnreg knows"
            return RoutedCall(op, original, args, kwargs, native, None).untouched(reason)
        given = arguments(*args, **kwargs)
        if token and given.grad_out is None:  # nothing that came of the output has a gradient
            return no_gradients, None
        choice = scope.read_token(getattr(given, token)) if token else scope.current()
        if choice is None and original is not None and not state().active:
            return original(*args, **kwargs), True
        check_in_memory(**given._asdict())
        call = RoutedCall(op, original, args, kwargs, native, choice, loaded)
        return retry_on_decline(lambda declined: serve(given, call._replace(declined=declined)))

    return routed


def kept_dense(
    plan: Plan,
    call: Call,
    length_k: int,
    tensors: tuple[Tensor, ...],
    auxiliary: tuple[Any, ...] = (),
    cuts: tuple[Cut, ...] = (),
) -> Kept | None:
    """Return how the call cache is to run further calls like this dense one; see `kept_for`.

    None where it takes more than the kernel: keys that no query sees (of the `length_k` that the op was
    given), rows that see no key, the conversion of a float64 LSE.
    """
    is_float64 = tensors[0].dtype == torch.float64
    if call.max_k != length_k or not calls.every_dense_row_sees_a_key(call) or is_float64:
        return None
    return kept_for(plan, tensors, call, auxiliary, cuts)


def with_lasting_offsets(call: Call) -> Call:
    """Return a call whose offsets keep their values: called by Inductor's code, they are new tensors."""
    return calls.with_aliased_offsets(call) if call.varlen and inductor_is_running() else call


def with_strides_of(result: Tensor, model: Tensor) -> Tensor:
    """Return `result` with the strides that torch's own kernel gives an output shaped like `model`.

    torch.compile asserts them. The first two tests spare the usual layouts the work.
    """
    if result.stride() == model.stride() or result.shape != model.shape:
        return result
    expected = torch.empty_like(model)
    return result if result.stride() == expected.stride() else expected.copy_(result)


def with_choice(results: tuple[Any, ...], place: int, choice: ScopedChoice | None) -> tuple[Any, ...]:
    """Return a forward's results with a choice in the tensor at `place`, which goes to the backward."""
    if choice is None:
        return results
    before = results[place]
    token = scope.choice_token(choice, results[0]) if before is None else scope.with_token(before, choice)
    return (*results[:place], token, *results[place + 1 :])


def backward_choice(call: RoutedCall, dropout: float) -> ScopedChoice | None:
    """Return a backward's choice, after checking that it says which backend drew a dropout mask.

    It doesn't if the forward ran before attnreg was active, or something copied the tensors that were saved.
    """
    if dropout > 0.0 and call.choice is None:
        raise UnsupportedInputError(
            f"aten::{call.op}: dropout_p {dropout}: can't tell which backend drew the mask, as its forward "
            "ran before attnreg was active or a hook copied what it saved; register backends earlier"
        )
    return call.choice


def call_of(given: Any, bias: Tensor | None, rng_state: Tensor | None = None) -> Call:
    """Return the contract's `Call` of the arguments of a (B, H, S, D) op.

    SDPA's causal mask is aligned top-left, the contract's bottom-right. Of more keys than queries the last
    are seen by no query, and `max_k` leaves them out; of more queries than keys the mask reaches further
    right.
    """
    query = given.query
    length_q, length_k = query.shape[2], given.key.shape[2]
    window = (-1, -1)
    if given.is_causal and length_q < length_k:
        length_k, window = length_q, (-1, 0)
        bias = bias[..., :length_k] if bias is not None and bias.shape[-1] > 1 else bias
    elif given.is_causal:
        window = (-1, length_q - length_k)
    window = calls.bounds(window, False, length_q, length_k)
    # By place, as every call that C++ doesn't keep comes here: names cost a quarter of a microsecond.
    return Call(
        calls.scale_of(query, given.scale), length_q, length_k, window,
        None, None, None, None, bias, None, given.dropout_p, rng_state, None, calls.wants_deterministic(),
        calls.wants_batch_invariant(),
    )  # fmt: skip


def dense_plan(
    direction: Direction, given: Any, routed: RoutedCall, call: Call, choice: ScopedChoice | None
) -> Plan:
    """Return the plan of a (B, H, S, D) call."""
    query, key, value = given.query, given.key, given.value
    needs_backward = direction == "backward" or calls.wants_gradient(query, key, value)
    inputs = query, key, value
    return routed.plan_for(direction, inputs, call, choice, routed.native, needs_backward, bhsd=True)


def run_backward(plan: Plan, given: Any, call: Call, lse: Tensor) -> tuple[tuple[Tensor, ...], Kept | None]:
    """Run a backend's backward of a (B, H, S, D) call, and count it.

    Returns:
        The gradients in the contract's layout, and how the call cache is to run further calls like this one.
    """
    length_k = given.key.shape[2]
    inputs = calls.to_bshd(given.query, given.key, given.value, call)
    tensors = given.grad_out.transpose(1, 2), *inputs, given.out.transpose(1, 2), lse
    grad_q, grad_k, grad_v = plan.run(*tensors, call)
    kept = kept_dense(plan, call, length_k, tensors)
    if unseen := length_k - grad_k.shape[1]:  # keys that a top-left causal mask hides from every query
        grad_k, grad_v = (F.pad(grad, (0, 0, 0, 0, 0, unseen)) for grad in (grad_k, grad_v))
    return (grad_q, grad_k, grad_v), kept

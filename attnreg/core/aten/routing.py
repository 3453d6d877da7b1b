"""How a router works: it passes a call to torch's own kernel, or to its op's `serve` function.

A `Route` describes an aten op as data. Its `serve` function converts the op's arguments to the contract's
layout, looks up and runs the plan, and converts the results back. This module has the parts that ops share.

A router returns the op's results, and a `Kept`: how the compiled call cache runs further calls like this one.
Without the compiled part the `Kept` is dropped.

Below SDPA torch's selector has chosen the op, so torch's own kernel comes first in the default order. It runs
on the arguments as they came. Only a call of another backend is converted to the contract's layout.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.core.contract.backend import Call
from attnreg.core.contract.lengths import Cut, bounds
from attnreg.core.contract.spec import Direction
from attnreg.core.dispatch import call_cache, calls, counters, scope, trace
from attnreg.core.dispatch.call_cache import Kept
from attnreg.core.dispatch.declined import NOBODY, Declined, retry_on_decline
from attnreg.core.dispatch.planning import Native
from attnreg.core.dispatch.scope import ScopedChoice
from attnreg.core.dispatch.state import Plan, state
from attnreg.core.launching.memory import check_in_memory, inputs_of
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.layout import inductor_is_running, readable, with_last_stride_1
from attnreg.errors import UnsupportedInputError

# An op's results, and how the call cache runs further calls. True means that nothing is registered, so that
# torch's own kernels run every call of all routed ops.
RouterResult = tuple[Any, Kept | Literal[True] | None]


class OpLayout(NamedTuple):
    """The layouts and places of an aten op's tensors that the compiled router uses.

    A choice token replaces a result. Only result 1, the LSE, stays: its storage carries the choice. `lse_bsh`
    is for torch's CPU op alone, because C++ reads the arguments of such an op by their places.

    Attributes:
        query: the index of the query among the op's arguments. Key and value follow it.
        token_argument: the index of a backward's argument with the choice token. It is -1 in a forward.
        token_result: the index of a forward's result with the choice token. It is -1 in a backward.
        bhsd: whether tensors are (B, H, S, D), not (B, S, H, D).
        lse_ends_in_one: whether the LSE is (B, H, S, 1), not (B, H, S).
        lse_bsh: whether the LSE of a forward has the strides of (B, S, H).
        gradients_bshd: whether gradients have the strides of (B, S, H, D), not the inputs' strides.
    """

    query: int
    token_argument: int = -1
    token_result: int = -1
    bhsd: bool = False
    lse_ends_in_one: bool = False
    lse_bsh: bool = False
    gradients_bshd: bool = False


class Route(NamedTuple):
    """An aten op that attnreg registers routers for.

    Attributes:
        op: the op's name, without "aten::".
        keys: the dispatch keys of its routers: of backends ("CPU", "CUDA"), below autograd. An op that torch
            composes of others has no kernel there, and can't be routed.
        arguments: the class of its arguments (see `schemas`).
        serve: the function that runs a call, from its `arguments` and its `RoutedCall`.
        native: the backend of torch's own kernel of this op.
        layout: the layouts and places of its tensors.
        token: the name of the argument at `layout.token_argument`.
        since: the torch version that added the op. Older versions get no router.
    """

    op: str
    keys: tuple[str, ...]
    arguments: Callable[..., Any]
    serve: Callable[[Any, RoutedCall], RouterResult]
    native: Native
    layout: OpLayout
    token: str = ""
    since: tuple[int, int] = (2, 11)


class RoutedCall(NamedTuple):
    """A call as a router passes it to `serve`.

    Attributes:
        op: the op's name, for messages.
        original: torch's own kernel of the op. None where torch has no kernel.
        args, kwargs: the op's arguments as they came.
        native: the backend of torch's own kernel. None where torch has no kernel.
        choice: the choice for this call alone.
        loaded: the places of the arguments whose layout torch's own kernel doesn't check.
        readable: the function that copies a tensor which that kernel would read wrongly.
        declined: the backends that have declined the call.
    """

    op: str
    original: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    native: Native | None
    choice: ScopedChoice | None
    loaded: tuple[int, ...] = ()
    readable: Callable[[Tensor], Tensor] = readable
    declined: Declined = NOBODY

    def run_native(
        self, plan: Plan, call: Call, keeps: bool = True, cuts: tuple[Cut, ...] = ()
    ) -> tuple[Any, Kept | None]:
        """Run torch's own kernel, which the plan chose, and count the call.

        The kernel receives the arguments as they came, except for `loaded` tensors that it would read
        wrongly: these are copied. Torch's kernels don't check alignment. On rows or addresses that aren't
        multiples of 16 bytes cuDNN's kernel returns NaN, and the flash op's kernel destroys the CUDA context
        (torch 2.11 on an H200). The kernel of the CPU reads past the end of a tensor whose last stride is 0,
        as torch's dispatcher makes one of zeros without memory.

        The call cache may run further calls, except in five cases: the kernel draws a dropout mask, its
        backward would be wrong (both: `keeps` is False), arguments were copied, calls are timed, or a
        top-left aligned mask has another right bound at each length.

        Args:
            plan: the plan of the call.
            call: the call in the contract's form.
            keeps: whether `serve` allows the call cache to run further calls.
            cuts: where the choice of torch's kernel changes with lengths.

        Returns:
            The op's results, and how the call cache runs further calls, or None.
        """
        args = self.args
        if self.loaded:
            copied = list(args)
            for place in self.loaded:
                copied[place] = self.readable(args[place])
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
        keeps = keeps and plan.is_checked and plan.turn is None and call_cache.load() is not None
        keeps = keeps and (call.varlen or bool(cuts) or call.window[1] <= 0)
        return result, Kept(None, plan, cuts=cuts) if keeps else None

    def untouched(self, why: str) -> RouterResult:
        """Run torch's own kernel on a call that only this kernel supports, and count it with the reason.

        Raises UnsupportedInputError where torch has no kernel.
        """
        if self.original is None or self.native is None:
            raise UnsupportedInputError(f"aten::{self.op}: {why}, and torch has no kernel for this device")
        result = self.original(*self.args, **self.kwargs)
        inputs = inputs_of(self.args if self.op.endswith("backward") else self.args[:3])
        trace.count_bypassed(f"aten::{self.op}", self.native.kernel, why, inputs)
        return result, None


def router(
    route: Route, original: Callable[..., Any] | None, unknown: frozenset[str] = frozenset()
) -> Callable[..., RouterResult]:
    """Return the router of an op, to be registered over `original`.

    `unknown` are arguments of a torch that is newer than `schemas`.
    """
    native = route.native if original is not None else None
    op, arguments, serve, token = route.op, route.arguments, route.serve, route.token
    on_gpu = "CUDA" in route.keys
    # On a CPU torch's kernel copies a gradient itself.
    of_backward = ("grad_out", "grad_out_", "out") if token and on_gpu else ()
    fields: tuple[str, ...] = arguments._fields  # type: ignore[attr-defined]
    names = "query", "key", "value", *of_backward
    loaded = tuple(place for place, name in enumerate(fields) if name in names)
    read = readable if on_gpu else with_last_stride_1
    no_gradients = (None,) * len(getattr(torch.ops.aten, op).default._schema.returns)

    def routed(*args: Any, **kwargs: Any) -> RouterResult:
        if unknown and (further := sorted(unknown & kwargs.keys())):
            reason = f"argument {', '.join(further)} is of a newer torch than attnreg knows"
            return RoutedCall(op, original, args, kwargs, native, None).untouched(reason)
        parsed = arguments(*args, **kwargs)
        if token and parsed.grad_out is None:  # no result that depends on the output has a gradient
            return no_gradients, None
        choice = scope.read_token(getattr(parsed, token)) if token else scope.current()
        if choice is None and original is not None and not state().active:
            return original(*args, **kwargs), True
        check_in_memory(**parsed._asdict())
        call = RoutedCall(op, original, args, kwargs, native, choice, loaded, read)
        return retry_on_decline(lambda declined: serve(parsed, call._replace(declined=declined)))

    return routed


def with_lasting_offsets(call: Call) -> Call:
    """Return a call whose offsets keep their values: code generated by Inductor may reuse their memory."""
    return calls.with_aliased_offsets(call) if call.varlen and inductor_is_running() else call


def with_strides_of(result: Tensor, model: Tensor) -> Tensor:
    """Return `result` with the strides that torch's own kernel uses for an output shaped like `model`.

    `result` has any shape and dtype. If its shape differs from `model`'s, it is returned unchanged.
    torch.compile asserts these strides. The first two tests are a fast path for the usual layouts.
    """
    if result.stride() == model.stride() or result.shape != model.shape:
        return result
    expected = torch.empty_like(model)
    return result if result.stride() == expected.stride() else expected.copy_(result)


def with_dims_ordered_as(query: Tensor, out: Tensor) -> Tensor:
    """Return the output (B, H, S, D_v) with its dimensions in the order of `query`, like torch's kernels.

    The query is (B, H, S, D).
    """
    if out.shape == query.shape:
        return with_strides_of(out, query)
    order = sorted(range(4), key=query.stride().__getitem__, reverse=True)
    expected = torch.empty_permuted(out.shape, order, dtype=out.dtype, device=out.device)
    return out if out.stride() == expected.stride() else expected.copy_(out)


def with_choice(results: tuple[Any, ...], place: int, choice: ScopedChoice | None) -> tuple[Any, ...]:
    """Return a forward's results with a choice token in the tensor at `place`, which reaches the backward."""
    if choice is None:
        return results
    before = results[place]
    token = scope.choice_token(choice, results[0]) if before is None else scope.with_token(before, choice)
    return (*results[:place], token, *results[place + 1 :])


def backward_choice(call: RoutedCall, dropout: float) -> ScopedChoice | None:
    """Return a backward's choice; with dropout the choice must exist, because it names the mask's backend.

    Raises UnsupportedInputError if it doesn't: the forward ran before attnreg was active, or a hook copied
    the saved tensors.
    """
    if dropout > 0.0 and call.choice is None:
        raise UnsupportedInputError(
            f"aten::{call.op}: dropout_p {dropout}: can't tell which backend drew the mask, as its forward "
            "ran before attnreg was active or a hook copied what it saved; register backends earlier"
        )
    return call.choice


def call_of(arguments: Any, bias: Tensor | None, rng_state: Tensor | None = None) -> Call:
    """Return the contract's `Call` for the arguments of an op with (B, H, S, D) tensors.

    SDPA's causal mask is aligned top-left, the contract's bottom-right. With more keys than queries the last
    keys are hidden from every query, and `max_k` excludes them. With more queries than keys the window gets a
    positive right bound.

    Args:
        arguments: the op's arguments, with fields `query`, `key`, `is_causal`, `scale` and `dropout_p`.
        bias: None, or a tensor that broadcasts to (B, H, S_q, S_k), boolean or floating point.
        rng_state: the seed and the offset of a dropout mask, (2,) uint64.
    """
    query = arguments.query
    length_q, length_k = query.shape[2], arguments.key.shape[2]
    window = (-1, -1)
    if arguments.is_causal and length_q < length_k:
        length_k, window = length_q, (-1, 0)
        bias = bias[..., :length_k] if bias is not None and bias.shape[-1] > 1 else bias
    elif arguments.is_causal:
        window = (-1, length_q - length_k)
    window = bounds(window, False, length_q, length_k)
    # By position, because every call outside of the call cache passes here: names cost 0.25 us.
    return Call(
        calls.scale_of(query, arguments.scale), length_q, length_k, window,
        None, None, None, None, bias, None, arguments.dropout_p, rng_state, None, calls.wants_deterministic(),
        calls.wants_batch_invariant(),
    )  # fmt: skip


def dense_plan(
    direction: Direction, arguments: Any, routed: RoutedCall, call: Call, choice: ScopedChoice | None
) -> Plan:
    """Return the plan of a call whose tensors are (B, H, S, D)."""
    query, key, value = arguments.query, arguments.key, arguments.value
    needs_backward = direction == "backward" or calls.wants_gradient(query, key, value)
    native, declined = routed.native, routed.declined
    return calls.plan_for(
        direction, query, key, value, call, choice, native, needs_backward, bhsd=True, declined=declined
    )


def run_backward(
    plan: Plan, arguments: Any, call: Call, lse: Tensor
) -> tuple[tuple[Tensor, ...], Kept | None]:
    """Run a backend's backward of a call whose tensors are (B, H, S, D), and count it.

    `lse` is (B, H, S).

    Returns:
        The gradients in the contract's layout, (B, S, H, D), and how the call cache runs further such calls.
    """
    inputs = calls.to_bshd(arguments.query, arguments.key, arguments.value, call)
    tensors = arguments.grad_out.transpose(1, 2), *inputs, arguments.out.transpose(1, 2), lse
    grad_q, grad_k, grad_v = plan.run(*tensors, call)
    unseen = arguments.key.shape[2] - call.max_k
    kept = None if unseen else call_cache.kept_dense(plan, tensors, call)
    if unseen:  # keys that a top-left causal mask hides from every query
        grad_k, grad_v = (F.pad(grad, (0, 0, 0, 0, 0, unseen)) for grad in (grad_k, grad_v))
    return (grad_q, grad_k, grad_v), kept


leave_module_uncompiled(__name__)

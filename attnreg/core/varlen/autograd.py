"""Calls that the call cache doesn't run, packed or dense, with their autograd.

Calls come in the contract's layout, with checked arguments: with options that the call cache leaves out, from
flash-attn's dense functions, and without the compiled part all calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from attnreg.core.adaptation.sinks import grad_of_sinks
from attnreg.core.contract.backend import Call
from attnreg.core.contract.options import options_on
from attnreg.core.dispatch.calls import plan_for, wants_deterministic, wants_gradient
from attnreg.core.dispatch.declined import Declined, retry_on_decline
from attnreg.core.dispatch.dropout import forward_choice, run_with_dropout
from attnreg.core.dispatch.scope import ScopedChoice
from attnreg.core.dispatch.state import Plan
from attnreg.core.launching.memory import check_all_in_memory
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.locks import open_after_fork
from attnreg.core.torchlib.modes import differentiable_once, in_memory
from attnreg.core.varlen import custom_op
from attnreg.core.varlen.sinks import counted, with_sinks
from attnreg.errors import UnsupportedInputError

T = TypeVar("T")


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    choice: ScopedChoice | None,
    sinks: Tensor | None = None,
    returns_lse: bool = True,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE, as the kernel has laid them out.

    Query, key and value are packed (T, H, D) or dense (B, S, H, D), in one floating-point dtype. Output and
    LSE have the contract's shapes and dtypes.

    A kernel that counts sinks, (H,), is given them unless the program gets the LSE: see
    `sinks.may_be_counted`. `plan` is one that was made for this call, without a gradient.

    Raises:
        UnsupportedInputError: no backend can run the call.
    """
    needs_backward = wants_gradient(query, key, value)
    if needs_backward or (sinks is not None and sinks.requires_grad and torch.is_grad_enabled()):
        given = query, key, value, sinks, call, choice, needs_backward, returns_lse
        return _VarlenAttention.apply(*given)  # type: ignore[no-untyped-call,no-any-return]
    inputs = query, key, value
    out, lse, *_ = run_forward(inputs, call, choice, False, sinks, returns_lse, plan)
    return out, lse


def run_forward(
    inputs: tuple[Tensor, Tensor, Tensor],
    call: Call,
    choice: ScopedChoice | None,
    needs_backward: bool,
    sinks: Tensor | None = None,
    returns_lse: bool = True,
    first: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, ScopedChoice | None]:
    """Return output, LSE, and for a backward the random state and the choice, which dropout ties.

    Shapes and dtypes are those of `attend`; `inputs` are query, key and value. The random state is uint64
    (2,), None without dropout. `first` is the plan to run, if one was made; where its kernel declines there
    is another.

    Raises:
        UnsupportedInputError: no backend can run the call.
    """
    made = [] if first is None else [first]

    def plan_and_run(declined: Declined) -> tuple[Tensor, Tensor, Tensor | None, ScopedChoice | None]:
        if made:
            plan = made.pop()
        else:
            given = call if sinks is None or returns_lse else call._replace(sinks=sinks)
            plan = plan_for(
                "forward", *inputs, given, choice, needs_backward=needs_backward, declined=declined
            )
        rng_state, chosen = None, choice
        results = None if sinks is None or returns_lse else counted(plan, inputs, call, sinks)
        if results is not None:
            return results[0], results[1], rng_state, chosen
        if call.dropout > 0.0:
            out, lse, rng_state = run_with_dropout(plan, *inputs, call)
            chosen = forward_choice(choice, plan, call.dropout)
        else:
            out, lse = plan.run(*inputs, call)
        return *((out, lse) if sinks is None else with_sinks(out, lse, sinks)), rng_state, chosen

    return _launched(plan_and_run, call)


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        call: Call,
        choice: ScopedChoice | None,
        needs_backward: bool,
        returns_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        inputs, given = (query, key, value), (call, choice, needs_backward, sinks, returns_lse)
        out, lse, rng_state, ctx.choice = run_forward(inputs, *given)
        saved = tensors_of_backward(call)
        ctx.save_for_backward(*inputs, out, lse, sinks, rng_state, *saved.values())
        ctx.names, ctx.is_in_op = tuple(saved), custom_op.takes(call)
        is_by_call = call.deterministic and not wants_deterministic()  # by the call itself
        of_forward = {row.name: row.off for row in options_on(call) if "backward" not in row.directions}
        without = call.with_options(dict.fromkeys(saved) | of_forward)
        ctx.call = without._replace(cu_seqlens_q=None, cu_seqlens_k=None, deterministic=is_by_call)
        ctx.set_materialize_grads(False)  # without a gradient of the LSE more backends can run the backward
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * 8
        kept = ctx.saved_tensors  # a checkpoint lets them be read once
        (*tensors, sinks, rng_state), saved = kept[:7], kept[7:]
        if not ctx.needs_input_grad[3]:
            sinks = None
        is_compiling, needs_kernel = torch.compiler.is_compiling(), any(ctx.needs_input_grad[:3])
        # Else the backward has it computed.
        is_ours = sinks is not None and (is_compiling or grad_lse is not None or not needs_kernel)
        of_sinks = grad_of_sinks(grad_out, tensors[3:], sinks, grad_lse) if is_ours else None
        if not needs_kernel:
            return None, None, None, of_sinks, *(None,) * 4
        grad_out = torch.zeros_like(tensors[3]) if grad_out is None else grad_out
        names, call, choice = ctx.names, ctx.call, ctx.choice
        if is_compiling and ctx.is_in_op and not call.deterministic:  # by compiled autograd, into the graph
            grads = custom_op.backward_of(call, choice, grad_out, tensors, grad_lse, names, saved)
        else:
            run = _backward_uncompiled if is_compiling else _backward
            rest = None if is_ours else sinks, rng_state, names, saved
            grads = run(grad_out, tensors, call, choice, grad_lse, *rest)
            of_sinks = of_sinks if is_ours or sinks is None else grads[3]
        return *grads[:3], of_sinks, *(None,) * 4


def tensors_of_backward(call: Call) -> dict[str, Tensor]:
    """Return the tensors of a forward's call that its backward's has as well, by the fields or options."""
    offsets = {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k}
    options = {row.name: getattr(call, row.name) for row in options_on(call) if "backward" in row.directions}
    tensors = {name: x for name, x in (offsets | options).items() if isinstance(x, Tensor)}
    return {name: x for name, x in tensors.items() if name not in ("sinks", "grad_lse")}


def _backward(
    grad_out: Tensor,
    tensors: list[Tensor],
    call: Call,
    choice: ScopedChoice | None,
    grad_lse: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    names: tuple[str, ...],
    saved: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    given = dict(zip(names, saved, strict=True))
    offsets = given.pop("cu_seqlens_q", None), given.pop("cu_seqlens_k", None)
    call = call._replace(cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], rng_state=rng_state)
    call = call.with_options(given)
    return run_backward(grad_out, tensors, call, choice, grad_lse, sinks)


def run_backward(
    grad_out: Tensor,
    tensors: list[Tensor],
    call: Call,
    choice: ScopedChoice | None,
    grad_lse: Tensor | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, in their shapes and dtype.

    `tensors` are query, key, value, the output and the LSE, as in `attend`. `grad_out` and `grad_lse` have
    the shapes and dtypes of output and LSE. `call` has what the forward's had. The gradient of `sinks`, (H,),
    comes fourth if they are given, without a gradient of the LSE.

    Raises:
        UnsupportedInputError: no backend can run the call.
    """
    grad_lse = None if grad_lse is None else _in_memory(grad_lse)
    call = call._replace(deterministic=call.deterministic or wants_deterministic(), grad_lse=grad_lse)
    grad_out, (query, key, value, *results) = _in_memory(grad_out), tensors

    inputs = grad_out, query, key, value, *results
    check_all_in_memory(inputs, call, sinks)

    def plan_and_run(declined: Declined) -> tuple[Tensor, ...]:
        given = call if sinks is None else call._replace(sinks=sinks)
        plan = plan_for("backward", query, key, value, given, choice, declined=declined)
        grads = None if sinks is None else counted(plan, inputs, call, sinks)
        if grads is not None:
            return grads
        grads = plan.run(*inputs, call)
        return grads if sinks is None else (*grads, grad_of_sinks(grad_out, results, sinks, None))

    return _launched(plan_and_run, call)


# Torch's own lazy `torch.compiler.disable`: that imports all of Dynamo at once.
_backward_uncompiled = _disable_dynamo(_backward)


_lock = open_after_fork(threading.RLock())
_deterministic_calls = 0
_mode_before = 0


def _launched(plan_and_run: Callable[[Declined], T], call: Call) -> T:
    """Run a call, in torch's deterministic mode if it asks for that, as some kernels obey nothing else.

    The mode is one for all threads: it stays on until the last of these calls was launched. No lock is held
    meanwhile, as a call may wait for another thread that loads a backend.
    """
    global _deterministic_calls, _mode_before
    if not call.deterministic or (wants_deterministic() and not _deterministic_calls):
        return retry_on_decline(plan_and_run)
    with _lock:
        if not _deterministic_calls:
            _mode_before = torch.get_deterministic_debug_mode()
            torch.use_deterministic_algorithms(True)
        _deterministic_calls += 1
    try:
        return retry_on_decline(plan_and_run)
    finally:
        with _lock:
            _deterministic_calls -= 1
            if not _deterministic_calls:
                torch.set_deterministic_debug_mode(_mode_before)


def _in_memory(grad: Tensor) -> Tensor:
    """Return a gradient as memory that kernels can read.

    The dispatcher would make it that, but it isn't asked here. In C++ `as_memory` does the same.

    Raises:
        UnsupportedInputError: it is a wrapper that doesn't unwrap.
    """
    found = in_memory(grad)
    if found is None:
        raise UnsupportedInputError("a gradient must be a plain tensor, got a tensor subclass")
    return found


leave_module_uncompiled(__name__)

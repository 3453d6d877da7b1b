"""Calls that the call cache doesn't run, packed or dense, with their autograd.

Calls come in the contract's layout, with checked arguments: with options that the call cache leaves out, from
flash-attn's dense functions, and without the compiled part all calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from attnreg.core.adaptation.sinks import grad_of_sinks
from attnreg.core.contract.backend import Call
from attnreg.core.contract.options import OPTIONS, options_on
from attnreg.core.dispatch.calls import wants_deterministic, wants_gradient
from attnreg.core.dispatch.scope import ScopedChoice
from attnreg.core.dispatch.state import Plan
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.modes import differentiable_once, in_memory
from attnreg.core.varlen import custom_op
from attnreg.core.varlen.plans import run
from attnreg.errors import UnsupportedInputError

_LEARNED = [row for row in OPTIONS if row.gradient]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    choice: ScopedChoice | None,
    returns_lse: bool = True,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE, as the kernel has laid them out.

    Query, key and value are packed (T, H, D) or dense (B, S, H, D), in one floating-point dtype. Output and
    LSE have the contract's shapes and dtypes. `plan` is one that was made for this call, without a gradient.

    Raises:
        UnsupportedInputError: no backend can run the call.
    """
    learned = [row for row in _LEARNED if getattr(call, row.name) is not None]
    tensors = [getattr(call, row.name) for row in learned]
    needing = [row for row, x in zip(learned, tensors, strict=True) if x.requires_grad]
    needs_grad = torch.is_grad_enabled()
    # The gradient of an option that results are rescaled for needs no kernel.
    of_kernel = needs_grad and not all(row.rescales for row in needing)
    needs_backward = wants_gradient(query, key, value) or of_kernel
    if needs_backward or (needs_grad and needing):
        arguments = query, key, value, call, choice, needs_backward, returns_lse, *tensors
        return _VarlenAttention.apply(*arguments)  # type: ignore[no-untyped-call,no-any-return]
    out, lse = run("forward", (query, key, value), call, choice, False, returns_lse, plan).results
    return out, lse


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: Call,
        choice: ScopedChoice | None,
        needs_backward: bool,
        returns_lse: bool,
        *_learned: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ran = run("forward", (query, key, value), call, choice, needs_backward, returns_lse)
        out, lse = ran.results
        on = list(options_on(call))
        saved = {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k}
        saved |= {row.name: getattr(call, row.name) for row in on if "backward" in row.directions}
        saved = {name: x for name, x in saved.items() if isinstance(x, Tensor)}
        ctx.save_for_backward(query, key, value, out, lse, ran.call.rng_state, *saved.values())
        ctx.names, ctx.choice, ctx.is_in_op = tuple(saved), ran.choice, custom_op.takes(call)
        ctx.learned = tuple((row.name, row.rescales) for row in on if row.gradient)
        is_by_call = call.deterministic and not wants_deterministic()  # by the call itself
        of_forward = {row.name: row.off for row in on if "backward" not in row.directions}
        ctx.call = call.with_options(dict.fromkeys(saved) | of_forward)._replace(deterministic=is_by_call)
        ctx.set_materialize_grads(False)  # without a gradient of the LSE more backends can run the backward
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = dict(zip(("query", "key", "value"), ctx.needs_input_grad, strict=False))
        needs |= dict(zip((name for name, _ in ctx.learned), ctx.needs_input_grad[7:], strict=True))
        if grad_out is None and grad_lse is None:
            return (None,) * (7 + len(ctx.learned))
        kept = ctx.saved_tensors  # a checkpoint lets them be read once
        tensors, rng_state, saved = kept[:5], kept[5], dict(zip(ctx.names, kept[6:], strict=True))
        # Output and LSE have these options already.
        rescaled = {name: saved.pop(name) for name, rescales in ctx.learned if rescales}
        rescaled = {name: x for name, x in rescaled.items() if needs[name]}
        grads: dict[str, Tensor | None] = {}
        is_compiling = torch.compiler.is_compiling()
        needs_kernel = any(is_needed for name, is_needed in needs.items() if name not in rescaled)
        in_graph = is_compiling and ctx.is_in_op and not ctx.call.deterministic  # by compiled autograd
        if in_graph or not needs_kernel:
            grads = {name: grad_of_sinks(grad_out, kept[3:5], x, grad_lse) for name, x in rescaled.items()}
            rescaled = {}
        if needs_kernel:
            backward: Any = _backward_uncompiled if is_compiling else _backward
            backward = custom_op.backward_of if in_graph else backward
            grad_out = torch.zeros_like(tensors[3]) if grad_out is None else grad_out
            options = saved | rescaled
            of_kernel = backward(grad_out, tensors, ctx.call, ctx.choice, grad_lse, rng_state, options)
            names = "query", "key", "value", *(name for name, _ in ctx.learned if name in options)
            grads |= dict(zip(names, of_kernel, strict=True))
        of_learned = (grads.get(name) for name, _ in ctx.learned)
        return *map(grads.get, ("query", "key", "value")), *(None,) * 4, *of_learned


def _backward(
    grad_out: Tensor,
    tensors: tuple[Tensor, ...],
    call: Call,
    choice: ScopedChoice | None,
    grad_lse: Tensor | None,
    rng_state: Tensor | None,
    saved: dict[str, Tensor],
) -> tuple[Tensor, ...]:
    call = call.with_options(saved)._replace(rng_state=rng_state)
    return run_backward(grad_out, tensors, call, choice, grad_lse)


def run_backward(
    grad_out: Tensor,
    tensors: tuple[Tensor, ...],
    call: Call,
    choice: ScopedChoice | None,
    grad_lse: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, in their shapes and dtype, then the options' gradients.

    `tensors` are query, key, value, the output and the LSE, as in `attend`. `grad_out` and `grad_lse` have
    the shapes and dtypes of output and LSE. `call` has what the forward's had.

    Raises:
        UnsupportedInputError: no backend can run the call.
    """
    grad_lse = None if grad_lse is None else _in_memory(grad_lse)
    call = call._replace(deterministic=call.deterministic or wants_deterministic(), grad_lse=grad_lse)
    return run("backward", (_in_memory(grad_out), *tensors), call, choice).results


# Torch's own lazy `torch.compiler.disable`: that imports all of Dynamo at once.
_backward_uncompiled = _disable_dynamo(_backward)


def _in_memory(grad: Tensor) -> Tensor:
    """Return a gradient as memory that kernels can read. In C++ `as_memory` does the same.

    The dispatcher would make it that, but it isn't asked here.
    """
    materialized = in_memory(grad)
    if materialized is None:
        raise UnsupportedInputError("a gradient must be a plain tensor, got a tensor subclass")
    return materialized


leave_module_uncompiled(__name__)

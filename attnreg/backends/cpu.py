"""The backend on CPU, built on torch's own CPU flash kernel."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from attnreg.backend import Backend, Kernels
from attnreg.backends import _cpu_dense as dense
from attnreg.backends import _cpu_varlen as varlen
from attnreg.backends._cpu_flash import Flash, additive, readable, working_dtype
from attnreg.backends._cpu_runs import runs_of
from attnreg.capabilities import Capabilities, Range

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.backend import Call

__all__ = ["BACKEND"]


def forward(flash: Flash, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE."""
    if not (q.numel() and k.numel()):
        return _nothing_seen(q, call)
    if _is_packed(call):
        tensors = [_rows(x) for x in (q, k, v)]
        out, lse = varlen.forward(flash, tensors[0], tensors[1], tensors[2], call.scale, runs_of(q, k, call))
        return out.view(q.shape), _heads_first(lse, q)
    query, key, value = (readable(x) for x in (q, k, v))
    bias = additive(call.attn_bias, working_dtype(q))
    out, lse = dense.forward(flash, query, key, value, call.scale, call.window, bias)
    return out.to(q.dtype), lse.transpose(1, 2).contiguous()


def backward(
    flash: Flash, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    if not (q.numel() and k.numel()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if lse.dtype != torch.promote_types(q.dtype, torch.float32):
        lse = forward(flash, q, k, v, call)[1]
    if _is_packed(call):
        g, query, key, value, o = (_rows(x) for x in (grad_out, q, k, v, out))
        rows = lse.transpose(-1, -2).reshape(-1, q.size(-2))
        grads = varlen.backward(flash, g, query, key, value, o, rows, call.scale, runs_of(q, k, call))
    else:
        g, query, key, value, o = (readable(x) for x in (grad_out, q, k, v, out))
        bias = additive(call.attn_bias, working_dtype(q))
        grads = dense.backward(flash, g, query, key, value, o, lse, call.scale, call.window, bias)
    grad_q, grad_k, grad_v = (
        grad.reshape(x.shape).to(q.dtype) for grad, x in zip(grads, (q, k, v), strict=True)
    )
    return grad_q, grad_k, grad_v


def _nothing_seen(q: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return what rows get that have no key: output 0 and an LSE of -inf."""
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.zeros_like(q), lse.t().contiguous() if q.dim() == 3 else lse.transpose(1, 2).contiguous()


def _is_packed(call: Call) -> bool:
    return call.varlen or call.seqused_k is not None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-2:])


def _heads_first(lse: Tensor, q: Tensor) -> Tensor:
    return lse.t().contiguous() if q.ndim == 3 else lse.view(q.shape[:3]).transpose(1, 2).contiguous()


RANGE = Capabilities(
    devices=("cpu",),
    dtypes=("float16", "bfloat16", "float32", "float64"),
    head_dim=Range(1, 2**31 - 1),
    varlen=True,
    gqa=True,
    causal=True,
    window=True,
    bias=True,
    seqused_k=True,
    num_splits=True,
    any_scale=True,
    deterministic=True,
)


def load() -> Kernels:
    """Capture torch's kernels."""
    flash = Flash.captured()
    return Kernels(functools.partial(forward, flash), functools.partial(backward, flash))


BACKEND = Backend(name="cpu", priority=100, forward=RANGE, backward=RANGE, load=load)

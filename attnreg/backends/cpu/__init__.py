"""The backend on CPU, built on torch's own CPU flash kernel, and on one of its own where that is compiled.

That kernel is what SDPA runs on a CPU too; here it also takes packed sequences, windows and
bottom-right masks. `_cpu_runs` finds the sequences of a call, `_cpu_tiles` cuts their masks,
`_cpu_dense` and `_cpu_varlen` call the kernel, which `_cpu_flash` keeps to the contract. Where the
CPU multiplies bfloat16 in hardware, `_cpu_bfloat16` has a faster backward for it. `_cpu_compiled` calls the
kernel in `cpu_kernel`; what it doesn't take goes the way that all calls go without it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from attnreg.backends.cpu import bfloat16, compiled, dense, varlen
from attnreg.backends.cpu.flash import Flash, additive, forward_dtype, lse_dtype, readable
from attnreg.backends.cpu.runs import runs_of
from attnreg.contract.backend import Backend, Kernels
from attnreg.contract.capabilities import Capabilities, Range

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.contract.backend import Call

__all__ = ["BACKEND"]


def forward(flash: Flash, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE."""
    if not (q.numel() and k.numel()):
        return _nothing_seen(q)
    if _is_packed(call):
        query, key, value = (_rows(x) for x in (q, k, v))
        out, lse = varlen.forward(flash, query, key, value, call.scale, runs_of(q, k, call))
        return out.view(q.shape), _heads_first(lse, q)
    dtype = forward_dtype(q)
    query, key, value = (readable(x, dtype) for x in (q, k, v))
    out, lse = dense.forward(
        flash, query, key, value, call.scale, call.window, additive(call.attn_bias, dtype)
    )
    return out.to(q.dtype), lse.transpose(1, 2).contiguous()


def backward(
    flash: Flash, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    if not (q.numel() and k.numel()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dtype = lse_dtype(q)
    if lse.dtype != dtype:
        lse = forward(flash, q, k, v, call)[1]
    multiplies = bfloat16.takes(q, call)
    if multiplies or _is_packed(call):
        g, query, key, value, o = (_rows(x) for x in (grad_out, q, k, v, out))
        rows = lse.mT.reshape(-1, q.size(-2))
        solve = bfloat16.backward if multiplies else functools.partial(varlen.backward, flash)
        grads = solve(g, query, key, value, o, rows, call.scale, runs_of(q, k, call))
    else:
        g, query, key, value, o = (readable(x, dtype) for x in (grad_out, q, k, v, out))
        bias = additive(call.attn_bias, dtype)
        grads = dense.backward(flash, g, query, key, value, o, lse, call.scale, call.window, bias)
    grad_q, grad_k, grad_v = (
        grad.reshape(x.shape).to(q.dtype) for grad, x in zip(grads, (q, k, v), strict=True)
    )
    return grad_q, grad_k, grad_v


def _nothing_seen(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return what rows get that have no key: output 0 and an LSE of -inf."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    return out, _heads_first(q.new_full(q.shape[:-1], -torch.inf, dtype=lse_dtype(q)), q)


def _is_packed(call: Call) -> bool:
    return call.varlen or call.seqused_k is not None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-2:])


def _heads_first(lse: Tensor, q: Tensor) -> Tensor:
    return lse.view(q.shape[:-1]).mT.contiguous()


CAPABILITIES = Capabilities(
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
    """Capture torch's kernels, and load the compiled one where there is one."""
    flash = Flash.captured()
    kernels = Kernels(functools.partial(forward, flash), functools.partial(backward, flash))
    own = compiled.load()
    return kernels if own is None else own.before(kernels)


def version() -> str:
    """Return torch's version, and whether the compiled kernel is there: times and numbers differ by it."""
    return f"{torch.__version__} (compiled kernel)" if compiled.is_there() else str(torch.__version__)


BACKEND = Backend(
    name="cpu", priority=100, forward=CAPABILITIES, backward=CAPABILITIES, load=load, version=version
)

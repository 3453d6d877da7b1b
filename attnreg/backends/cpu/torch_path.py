"""Any call of the contract by torch's CPU flash kernel.

The kernel reads packed rows in place, and a call of it costs a few microseconds. So one call for each batch
of equally long neighbours is faster than sorting and padding sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

import torch
from torch import Tensor

from attnreg.backends.cpu import dense
from attnreg.backends.cpu.flash import Flash, additive, forward_dtype, lse_dtype, readable
from attnreg.backends.cpu.paged import gathered_backward, gathered_forward
from attnreg.backends.cpu.sequences import UniformBatch, sequences_of
from attnreg.core.contract.backend import Call
from attnreg.core.torchlib.modes import resolved
from attnreg.errors import UnsupportedInputError

# Where an LSE is beyond this, rounding it and the output to their dtypes costs more than the accuracy rule
# allows: such calls are computed in float64.
_LARGE = 24.0
# Where rows of a 16-bit call see so few keys, the rounding of the output is most of a gradient's error.
_FEW_KEYS = 16


@gathered_forward
def forward(flash: Flash, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the output, in the query's dtype, and the LSE, (B, H, S) or (H, T), in `lse_dtype`.

    Query, key and value are (B, S, H, D) or (T, H, D); with pages key and value are (pages, page size, H, D).

    Raises:
        UnsupportedInputError: the kernel has no argument for an option of the call.
        InvalidInputError: offsets, counts of keys or pages don't fit.
    """
    if call.batch_invariant:
        return _each_forward(flash, q, k, v, call)
    out, lse = _forward(flash, q, k, v, call)
    if q.dtype != torch.float32 or not _needs_float64(q, lse):
        return out, lse
    out, lse = _forward(flash, q.double(), k.double(), v.double(), call)
    return out.float(), lse.float()


def _each(q: Tensor, k: Tensor, call: Call) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...], Call]]:
    """Yield the rows and keys of each sequence, and a dense call for this sequence alone.

    The rounding of the kernel, MKL and oneDNN depends on the number of tasks, on shapes and on alignment.
    """
    alone = call._replace(cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None, batch_invariant=False)
    bias = call.attn_bias
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    for sequence in sequences_of(q, k, call).each:
        batch = () if call.varlen else (slice(sequence.batch, sequence.batch + 1),)
        if bias is not None:  # of all rows and keys, which it may hide
            part = bias[batch] if len(bias) > 1 else bias
            # Only existing elements are copied: an expanded mask may be as large as all scores.
            own = part[tuple(slice(1) if step == 0 else slice(None) for step in part.stride())].clone()
            yield batch, batch, alone._replace(attn_bias=own.expand(part.shape))
            continue
        rows, keys = (
            slice(sequence.row, sequence.row + sequence.rows),
            slice(sequence.key, sequence.key + sequence.keys),
        )
        alone = alone._replace(
            max_q=sequence.rows, max_k=sequence.keys, window=(sequence.left, sequence.right)
        )
        yield (*batch, rows), (*batch, keys), alone


def _alone(x: Tensor, rows: tuple[slice, ...]) -> Tensor:
    """Copy a sequence to a dense batch of its own memory."""
    return x[rows].clone(memory_format=torch.contiguous_format).view(1, -1, *x.shape[-2:])


def _each_forward(flash: Flash, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full(q.shape[:-1], -inf, dtype=lse_dtype(q))
    for rows, keys, alone in _each(q, k, call):
        results = forward(flash, _alone(q, rows), _alone(k, keys), _alone(v, keys), alone)
        out[rows], lse[rows] = results[0].view(out[rows].shape), results[1].mT.reshape(lse[rows].shape)
    return out, lse.mT.contiguous()


def _each_backward(flash: Flash, tensors: Sequence[Tensor], call: Call) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, q, k, v, out, lse = tensors
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    of_rows = grad_out, q, out, lse.mT.unsqueeze(-1)
    for rows, keys, alone in _each(q, k, call):
        grad_part, query, out_part, lse_part = (_alone(x, rows) for x in of_rows)
        key, value = _alone(k, keys), _alone(v, keys)
        lse_part = lse_part[..., 0].mT.contiguous()
        parts = backward(flash, grad_part, query, key, value, out_part, lse_part, alone)
        for grad, place, part in zip(grads, (rows, keys, keys), parts, strict=True):
            grad[place] = part.view(grad[place].shape)
    return grads


def _needs_float64(q: Tensor, lse: Tensor) -> bool:
    return q.dtype != torch.float64 and bool(((lse.abs() > _LARGE) & lse.isfinite()).any())


def _forward(flash: Flash, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    if not (q.numel() and k.numel()):
        lse = q.new_full(q.shape[:-1], -inf, dtype=lse_dtype(q)).mT.contiguous()
        return torch.zeros_like(q, memory_format=torch.contiguous_format), lse
    _check_options(call)
    if _is_packed(call):
        batches = sequences_of(q, k, call).uniform_batches
        query, key, value = (_packed(x) for x in (q, k, v))
        out, lse = _packed_forward(flash, query, key, value, call.scale, batches)
        return out.view(q.shape), lse.view(q.shape[:-1]).mT.contiguous()
    dtype = forward_dtype(q)
    query, key, value = (readable(x, dtype) for x in (q, k, v))
    bias = additive(call.attn_bias, dtype)
    out, lse = dense.forward(flash, query, key, value, call.scale, call.window, bias)
    return out.to(q.dtype), lse.transpose(1, 2).contiguous()


@gathered_backward
def backward(
    flash: Flash, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, in their shapes and the query's dtype.

    `grad_out` and `out` are like a forward's output, `lse` like its LSE. Raises as `forward` does.
    """
    lse = resolved(lse)
    if call.batch_invariant:
        return _each_backward(flash, (grad_out, q, k, v, out, lse), call)
    if not (q.numel() and k.numel()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    _check_options(call)
    if _needs_float64(q, lse):
        wide = q.double(), k.double(), v.double()
        results = of_all_keys(_forward(flash, *wide, call), out, lse)
        grads = backward(flash, grad_out.double(), *wide, *results, call)
        return grads[0].to(q.dtype), grads[1].to(q.dtype), grads[2].to(q.dtype)
    dtype = lse_dtype(q)
    if q.dtype != dtype and _sees_few(call):
        out, lse = of_all_keys(_forward(flash, q.to(dtype), k.to(dtype), v.to(dtype), call), out, lse)
    elif lse.dtype != dtype:
        out, lse = of_all_keys(forward(flash, q, k, v, call), out, lse)
    if _is_packed(call):
        tensors = [*(_packed(x) for x in (grad_out, q, k, v, out)), lse.mT.reshape(-1, q.size(-2))]
        grads = _packed_backward(flash, tensors, call.scale, sequences_of(q, k, call).uniform_batches)
    else:
        tensors = [*(readable(x, dtype) for x in (grad_out, q, k, v, out)), lse]
        bias = additive(call.attn_bias, dtype)
        grads = dense.backward(flash, tensors, call.scale, call.window, bias)
    grad_q, grad_k, grad_v = (
        grad.reshape(x.shape).to(q.dtype) for grad, x in zip(grads, (q, k, v), strict=True)
    )
    return grad_q, grad_k, grad_v


def of_all_keys(own: tuple[Tensor, Tensor], out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the output and LSE by the more exact results of a new forward, `own`.

    Rows whose results include more keys than the call's (with sinks, or over ranks) keep `out` and `lse`. The
    tensors are (..., S, H, D) and (..., H, S), in any floating dtype.
    """
    # A difference within rounding is no further key. In 16 bits another kernel's scores may be off by more.
    rounding = torch.finfo(lse.dtype).eps * (16 if out.dtype.itemsize == 2 else 2)
    is_more = own[1] < lse - rounding * lse.abs().clamp(min=1.0)
    return out.to(own[0].dtype).where(is_more.mT[..., None], own[0]), lse.to(own[1].dtype).where(
        is_more, own[1]
    )


def _check_options(call: Call) -> None:
    """Decline options that the kernel has no argument for, and `_refuses` allows for the compiled kernel."""
    if call.softcap:
        raise UnsupportedInputError(f"softcap must be 0 for torch's kernel, got {call.softcap}")
    for name in ("grad_lse", "alibi_slopes"):
        if getattr(call, name) is not None:
            raise UnsupportedInputError(f"{name} must be None for torch's kernel, got a tensor")
    if call.dropout:
        raise UnsupportedInputError(f"dropout_p must be 0 for torch's kernel, got {call.dropout}")


def _sees_few(call: Call) -> bool:
    left, right = call.window
    return min(call.max_k, left + right + 1 if left >= 0 <= right else call.max_k) <= _FEW_KEYS


def _is_packed(call: Call) -> bool:
    # With counts of keys, the sequences of a dense tensor differ in length as packed ones do.
    return call.varlen or call.seqused_k is not None


def _packed(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-2:])


def _packed_forward(
    flash: Flash, q: Tensor, k: Tensor, v: Tensor, scale: float, batches: Sequence[UniformBatch]
) -> tuple[Tensor, Tensor]:
    rows, keys = _Spans(batches, "row"), _Spans(batches, "key")
    out = rows.result(q.shape, q.dtype)
    lse = rows.result(q.shape[:2], lse_dtype(q), -inf)
    to = zip(batches, rows.views(out), rows.views(lse), strict=True)
    dtype = forward_dtype(q)
    tensors = zip(rows.batches(q, dtype), keys.batches(k, dtype), keys.batches(v, dtype), strict=True)
    for (batch, batch_out, batch_lse), (query, key, value) in zip(to, tensors, strict=True):
        results = dense.forward(flash, query, key, value, scale, batch.window)
        batch_out.view(results[0].shape).copy_(results[0])
        batch_lse.view(results[1].shape).copy_(results[1])
    return out, lse


def _packed_backward(
    flash: Flash, tensors: Sequence[Tensor], scale: float, batches: Sequence[UniformBatch]
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, q, k, v, out, lse = tensors
    rows, keys = _Spans(batches, "row"), _Spans(batches, "key")
    grads = rows.result(q.shape, q.dtype), keys.result(k.shape, k.dtype), keys.result(v.shape, v.dtype)
    to = zip(rows.views(grads[0]), keys.views(grads[1]), keys.views(grads[2]), strict=True)
    sides = (rows, grad_out), (rows, q), (keys, k), (keys, v), (rows, out), (rows, lse.unsqueeze(-1))
    parts = zip(*(side.batches(x, lse.dtype) for side, x in sides), strict=True)
    for batch, views, (*inputs, row_lse) in zip(batches, to, parts, strict=True):
        part_grads = dense.backward(flash, (*inputs, row_lse[..., 0]), scale, batch.window)
        for view, grad in zip(views, part_grads, strict=True):
            view.view(grad.shape).copy_(grad)
    return grads


class _Spans:
    """The spans of rows, or keys, of all batches in a packed tensor."""

    def __init__(self, batches: Sequence[UniformBatch], side: str) -> None:
        self._counts = [batch.count for batch in batches]
        self._cuts: list[int] = []
        end = 0
        for batch in batches:
            start, length = (batch.row, batch.rows) if side == "row" else (batch.key, batch.keys)
            size = length * batch.count
            self._cuts += (start - end, size)
            end = start + size
        self._end = end

    def _split(self, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        return torch.split(x, [*self._cuts, x.size(dim) - self._end], dim)

    def views(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the part of each batch."""
        return self._split(x)[1::2]

    def result(self, shape: Sequence[int], dtype: torch.dtype, fill: float = 0.0) -> Tensor:
        """Allocate a tensor for the parts of all batches; the gaps between them are filled."""
        x = torch.empty(shape, dtype=dtype, device="cpu")
        for gap in self._split(x)[::2]:
            gap.fill_(fill)
        return x

    def batches(self, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Return the part of each batch as (count, H, S, D), in a layout that the kernels can read."""
        parts = self._split(readable(x.unsqueeze(0), dtype), 2)[1::2]
        return [
            part if count == 1 else part[0].unflatten(1, (count, -1)).transpose(0, 1)  # type: ignore[no-untyped-call]
            for part, count in zip(parts, self._counts, strict=True)
        ]

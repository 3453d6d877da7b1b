"""What a call is to cuDNN: the problem to plan, and the offsets that its kernels read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnreg.backends.cudnn.offsets import Offsets
from attnreg.backends.cudnn.problem import Problem
from attnreg.backends.cudnn.sharing import rounded
from attnreg.contract.offsets import derived_from
from attnreg.torchlib.layout import dense, stream_of

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.contract.backend import Call
    from attnreg.contract.spec import Direction

__all__ = ["described", "lse_lies", "offsets_of", "with_results"]


def described(
    direction: Direction, query: Tensor, key: Tensor, value: Tensor, call: Call
) -> tuple[Problem, Offsets | None, int]:
    """Return the problem of a call, the offsets of packed tensors, and the stream to run on.

    What is planned is for `Plans.planned` to say.
    """
    device, packed = query.get_device(), call.cu_seqlens_q is not None
    stream = stream_of(query)
    batch, max_q, max_k, tokens = query.shape[0], call.max_q, call.max_k, (0, 0)
    offsets = None
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        batch, max_q, max_k = rounded(call.cu_seqlens_q.shape[0] - 1, max_q, max_k, query.shape[0])
        tokens = query.shape[0], key.shape[0] if direction == "backward" else 0
        offsets = offsets_of(batch, stream, call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k)
    problem = Problem(
        direction, device, query.dtype, batch, max_q, max_k, query.shape[-2], key.shape[-2],
        query.shape[-1], value.shape[-1], float(call.scale), call.window, packed, *tokens,
        _strides(query, packed), _strides(key, packed), _strides(value, packed),
    )  # fmt: skip
    return problem, offsets, stream


def offsets_of(
    batch: int, stream: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, used: Tensor | None = None
) -> Offsets:
    """Return what the kernels read of a packed batch, derived once for as long as it stays as it is."""
    tensors = [cu_seqlens_q, cu_seqlens_k] if used is None else [cu_seqlens_q, cu_seqlens_k, used]
    return derived_from(
        tensors, stream, ("cuDNN", batch), lambda: Offsets(cu_seqlens_q, cu_seqlens_k, used, batch)
    )


def with_results(problem: Problem, out: Tensor, grad_out: Tensor, call: Call) -> Problem:
    """Return the problem of a backward, which reads the forward's output and its gradient, too."""
    return problem._replace(
        strides_out=_strides(out, problem.packed),
        strides_grad_out=_strides(grad_out, problem.packed),
        square=call.window != (-1, -1) and _is_square(call),
    )


def lse_lies(problem: Problem, query: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return size and strides of the LSE that a problem's kernels write or read."""
    *batch, rows, heads = query.shape[:-1]
    size = *batch, heads, rows
    return size, (1, heads) if problem.packed and not problem.own else dense(size)


def _is_square(call: Call) -> bool:
    """Whether it is known on the host that every sequence has as many keys as queries."""
    if call.cu_seqlens_q is None:
        return call.max_q == call.max_k
    return call.cu_seqlens_q is call.cu_seqlens_k and call.seqused_k is None


def _strides(x: Tensor, packed: bool) -> tuple[int, int, int]:
    """Return the strides of (batch, head, token)."""
    if packed:
        token, head, _ = x.stride()
        return 0, head, token
    batch, token, head, _ = x.stride()
    return batch, head, token

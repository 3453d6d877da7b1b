"""Rotates heads by their tokens' positions, as flash-attn's `apply_rotary_emb` and `apply_rotary` do."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.modes import is_plain
from attnreg.core.varlen.plans import check_tensors
from attnreg.errors import InvalidInputError
from attnreg.flash_attn.attention import naming


@naming({})
def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Return `x` with the first dims of each head rotated by the position of its token.

    Args:
        x: (B, S, H, D), or (T, H, D) with `cu_seqlens`; floating point.
        cos, sin: (positions, rotary dim / 2); floating point.
        interleaved: whether dims 0 and 1, 2 and 3, ... are rotated together; else dims of two halves.
        inplace: whether to write the result into `x` and return `x`.
        seqlen_offsets: the position of every sequence's first token, or integers (B,), one a sequence.
        cu_seqlens: int32 (B + 1,), offsets of the sequences. Rows past the last offset stay as they are.
        max_seqlen: unused.

    Returns:
        A tensor of the shape and dtype of `x`.

    Raises:
        InvalidInputError: the shapes contradict each other, or, on a CPU, a position is beyond the tables.
    """
    tensors = {"x": x, "cos": cos, "sin": sin} | ({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens})
    check_tensors(**tensors)
    if cu_seqlens is not None and (
        cu_seqlens.dim() != 1 or not len(cu_seqlens) or cu_seqlens.dtype not in (torch.int32, torch.int64)
    ):
        got = f"{cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        raise InvalidInputError(f"cu_seqlens: got {got}, expected int32 of shape (sequences + 1,)")
    dims = 4 if cu_seqlens is None else 3
    if x.dim() != dims or cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise InvalidInputError(
            f"x, cos and sin: got shapes {tuple(x.shape)}, {tuple(cos.shape)} and {tuple(sin.shape)}, "
            f"expected {dims} dimensions, equal tables (positions, rotary dim / 2) of at most the head dim"
        )
    check_tables(cos, sin, x)
    count = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
    if isinstance(seqlen_offsets, Tensor):
        if seqlen_offsets.shape != (count,) or seqlen_offsets.is_floating_point():
            got = f"{seqlen_offsets.dtype} of shape {tuple(seqlen_offsets.shape)}"
            raise InvalidInputError(f"seqlen_offsets: got {got}, expected integers of shape ({count},)")
        first = seqlen_offsets
    elif not isinstance(seqlen_offsets, Integral):
        raise InvalidInputError(
            f"seqlen_offsets: got {seqlen_offsets!r}, expected a whole number or a tensor"
        )
    else:
        first = torch.full((count,), int(seqlen_offsets), dtype=torch.int32, device=x.device)
    if cu_seqlens is None:
        out = rotated(x, positions(first, x.shape[1]), cos, sin, interleaved)
    else:
        tokens = torch.arange(len(x), dtype=torch.int32, device=x.device)
        sequence = torch.searchsorted(cu_seqlens[1:], tokens, right=True)
        is_of_none = sequence >= count
        sequence = sequence.clamp(max=max(count - 1, 0))
        at = torch.where(is_of_none, 0, tokens - cu_seqlens[sequence] + first[sequence])
        out = rotated(x[None], at[None], cos, sin, interleaved, sequence)[0]
        out = torch.where(is_of_none[:, None, None], x, out)
    return x.copy_(out) if inplace else out


@naming({})
@torch.no_grad()
def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Return `apply_rotary_emb` without a gradient, as `flash_attn.ops.triton.rotary.apply_rotary` does.

    Args:
        x: (B, S, H, D), or (T, H, D) with `cu_seqlens`; floating point.
        cos, sin: (positions, rotary dim / 2); floating point.
        conjugate: whether to rotate in the opposite direction.

    Further arguments, the result and errors are as for `apply_rotary_emb`.
    """
    sin = -sin if conjugate and isinstance(sin, Tensor) else sin
    return apply_rotary_emb(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)


def check_tables(cos: Tensor, sin: Tensor, x: Tensor, name: str = "x") -> None:
    """Check that tables, (positions, rotary dim / 2), are on the device of the heads that they rotate.

    `x` has these heads in its last two dims; `name` is its name.
    """
    if not cos.device == sin.device == x.device:
        got = f"tensors on {cos.device} and {sin.device}"
        raise InvalidInputError(f"cos and sin: got {got}, expected {x.device}, where {name} is")


def positions(first: Tensor, count: int) -> Tensor:
    """Return the positions of `count` tokens from `first` on, integers (B,): (B, count)."""
    return first[:, None] + torch.arange(count, dtype=torch.int32, device=first.device)


def check_compiled(name: str, numbers: Tensor, below: int) -> None:
    """Make compiled code on a CPU raise a `RuntimeError` if numbers aren't within 0 to `below - 1`.

    `numbers` are integers of any shape.
    """
    if torch.compiler.is_compiling() and numbers.is_cpu:
        fit = ((numbers >= 0) & (numbers < below)).all()
        # The message hasn't the limit: dynamic code would be compiled anew for each limit.
        torch._assert_async(fit, f"{name}: got a number below 0, or one that is too large")


def rotated(
    x: Tensor, at: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sequence: Tensor | None = None
) -> Tensor:
    """Return `x`, (B, S, H, D), rotated by positions `at`, (B, S) or (B, 1); computed in float32 or wider.

    `sequence`, integers (S,), says to which sequence each token of a packed batch belongs; B is 1 then.
    """
    if not torch.compiler.is_compiling() and at.is_cpu and is_plain(at) and at.numel():
        least, most = int(at.min()), int(at.max())
        if least < 0 or most >= len(cos):
            wrong = least if least < 0 else most
            row, token = (at == wrong).nonzero()[0].tolist()
            of = row if sequence is None else int(sequence[token])
            raise InvalidInputError(
                f"cos and sin: got position {wrong} of sequence {of}, expected 0 to {len(cos) - 1}"
            )
    check_compiled("cos and sin, by position", at, len(cos))
    size, dtype = 2 * cos.shape[-1], torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table.to(dtype)[at.long()][:, :, None] for table in (cos, sin))
    head = x[..., :size].to(dtype)
    left, right = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, dim=-1)
    both = left * cos - right * sin, left * sin + right * cos
    rotated = torch.stack(both, dim=-1).flatten(-2) if interleaved else torch.cat(both, dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., size:]), dim=-1)


leave_module_uncompiled(__name__)

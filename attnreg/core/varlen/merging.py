"""`merge`: attention over all keys, from calls that each saw a part of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.errors import InvalidInputError, short_repr

__all__ = ["merge"]


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return attention over all keys, from the results of calls that each saw a part of the keys.

    Each call has the same queries, and no key belongs to two calls. The weight of a call's row is
    exp(LSE - LSE over all keys), as in section 3.1 of FlashAttention-2 (arXiv 2307.08691). Both results have
    gradients, for outputs and LSEs. Sums are in float32, or float64 for float64.
    Options that results are rescaled for (`Option.rescales`) are in one call alone.

    Args:
        outs: the calls' outputs, each (T, H, D_v), or dense (B, S, H, D_v), floating point.
        lses: the calls' LSEs, natural log, each (H, T), or dense (B, H, S). A row that saw no key has -inf.

    Returns:
        The output, in the shape and dtype of `outs[0]`, and the LSE over all keys, like `lses[0]`. A row that
        saw no key in any call has an output of 0 and an LSE of -inf.

    Raises:
        InvalidInputError: there is no call, or shapes, dtypes or devices don't fit together.
    """
    outs, lses = tuple(outs), tuple(lses)
    _check(outs, lses)
    dtype = torch.promote_types(outs[0].dtype, torch.float32)
    scores = torch.stack([lse.to(dtype) for lse in lses])
    sees_none = scores == -torch.inf
    # The lowest number in place of -inf, because the gradient of -inf - -inf is NaN.
    finite = scores.masked_fill(sees_none, torch.finfo(dtype).min / 2)
    total = finite.logsumexp(0)
    weights = (finite - total).exp()
    # What lies in rows that see no key counts nothing: it may be a buffer that nobody has written.
    merged = sum(
        _by_row(weight) * out.masked_fill(_by_row(unseen), 0.0)
        for out, weight, unseen in zip(outs, weights, sees_none, strict=True)
    )
    lse = total.masked_fill(sees_none.all(0), -torch.inf)
    return merged.to(outs[0].dtype), lse.to(lses[0].dtype)  # type: ignore[union-attr]


def _by_row(of_heads: Tensor) -> Tensor:
    """Return numbers (..., H, S) as (..., S, H, 1)."""
    return of_heads.transpose(-1, -2).unsqueeze(-1)


def _check(outs: tuple[Tensor, ...], lses: tuple[Tensor, ...]) -> None:
    """Raise the error of results that can't be merged; outputs (..., S, H, D_v), LSEs (..., H, S)."""
    if not outs or len(outs) != len(lses):
        raise InvalidInputError(
            f"merge: got {len(outs)} outputs and {len(lses)} LSEs, expected as many LSEs as outputs, "
            "and at least 1"
        )
    for name, tensors in (("outs", outs), ("lses", lses)):
        for number, x in enumerate(tensors):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                got = x.dtype if isinstance(x, Tensor) else short_repr(x)
                raise InvalidInputError(f"{name}[{number}]: got {got}, expected a floating-point tensor")
    first = outs[0]
    if first.dim() not in (3, 4):
        raise InvalidInputError(
            f"outs[0]: got shape {tuple(first.shape)}, expected (T, H, D_v) or (B, S, H, D_v)"
        )
    *batch, length, heads, _ = first.shape
    _check_alike("outs", outs, tuple(first.shape), first)
    _check_alike("lses", lses, (*batch, heads, length), lses[0])
    if lses[0].device != first.device:
        raise InvalidInputError(
            f"lses[0]: got device {lses[0].device}, expected that of outs, {first.device}"
        )


def _check_alike(name: str, tensors: tuple[Tensor, ...], shape: tuple[int, ...], model: Tensor) -> None:
    """Raise the error of a tensor, (..., S, H, D_v) or (..., H, S), of other shape, dtype or device."""
    for number, x in enumerate(tensors):
        properties = tuple(x.shape), x.dtype, x.device
        if properties != (shape, model.dtype, model.device):
            raise InvalidInputError(
                f"{name}[{number}]: got {properties[0]}, {x.dtype} on {x.device}, "
                f"expected {shape}, {model.dtype} on {model.device}"
            )


leave_module_uncompiled(__name__)

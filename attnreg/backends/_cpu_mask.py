"""Which scores of a batch count: a band, keys that are padding, a bias.

`Mask` is what the two kernels take beside their tensors; each turns it into what it understands.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ALL_KEYS", "Mask"]


class Mask(NamedTuple):
    """What rows see of keys.

    Attributes:
        band: (low, high), row i sees key j if low <= j - i <= high; None for all.
        real: bool (B, S_k), False where a key is padding; None where none is.
        bias: additive or boolean, broadcasts to (B, H, S_q, S_k); None for none.
    """

    band: tuple[int, int] | None = None
    real: Tensor | None = None
    bias: Tensor | None = None

    def is_causal(self, rows: int) -> bool:
        """Whether this is the one mask that the flash kernel has by itself, aligned top-left."""
        plain = self.real is None and self.bias is None
        return plain and self.band is not None and self.band[1] == 0 and self.band[0] <= 1 - rows

    def additive(self, rows: int, keys: int, dtype: torch.dtype) -> Tensor | None:
        """Return it as a tensor to add to the scores, (B or 1, H or 1, rows or 1, keys), or None."""
        total = None if self.bias is None else _additive_bias(self.bias, dtype)
        if self.real is not None:
            total = _hide(total, ~self.real[:, None, None, :], dtype)
        if self.band is not None:
            total = _hide(total, _outside(self.band, rows, keys), dtype)
        return total


ALL_KEYS = Mask()


def _additive_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    # The kernel takes two or four dimensions, and reads the last one without its stride.
    bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    if bias.dtype == torch.bool:
        return torch.zeros_like(bias, dtype=dtype).masked_fill_(~bias, -inf)
    return bias.to(dtype).contiguous()


def _hide(total: Tensor | None, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    if total is None:
        return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -inf)
    return total.masked_fill(hidden, -inf)


def _outside(band: tuple[int, int], rows: int, keys: int) -> Tensor:
    here = torch.arange(keys, device="cpu") - torch.arange(rows, device="cpu")[:, None]
    return ((here < band[0]) | (here > band[1]))[None, None]

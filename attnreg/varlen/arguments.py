"""What the arguments of `varlen_attn` mean, for the front itself and for `explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnreg.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["autocast", "heads_differ", "window"]

# Asked here, once: the torch.compile of torch 2.11 can't trace the question.
_AUTOCASTS = frozenset(
    filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "hpu", "mtia", "mps", "xla"))
)


def heads_differ(query: Tensor, key: Tensor) -> InvalidInputError:
    """Return the error of fewer key than query heads where that wasn't allowed."""
    return InvalidInputError(
        f"heads: got {query.shape[1]} for query and {key.shape[-2]} for key, "
        "expected as many (or enable_gqa=True)"
    )


def autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast as autocast does for `F.scaled_dot_product_attention`; torch's own varlen op has no such rule."""
    device = query.device.type
    if device not in _AUTOCASTS or not torch.is_autocast_enabled(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    query, key, value = (x.to(dtype) if x.is_floating_point() else x for x in (query, key, value))
    return query, key, value


def window(window_size: Sequence[int] | None, is_causal: bool) -> tuple[int, int]:
    """Return (left, right) from the two arguments that say it.

    Raises:
        InvalidInputError: it isn't two numbers, or one is below -1.
    """
    left, right = (-1, -1) if window_size is None else _pair(window_size)
    return left, 0 if is_causal else right


def _pair(window_size: Sequence[int]) -> tuple[int, int]:
    if len(window_size) != 2 or min(window_size) < -1:
        raise InvalidInputError(
            f"window_size: got {tuple(window_size)}, expected (left, right), each -1 or more"
        )
    return window_size[0], window_size[1]

"""What the arguments of `varlen_attn` mean, for the front itself and for `explain`."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from attnreg.contract.backend import Call
from attnreg.contract.spec import UNBOUNDED
from attnreg.contract.validation import check
from attnreg.dispatch.calls import bounds, keys_used, scale_of, wants_deterministic
from attnreg.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# Asked here, once: the torch.compile of torch 2.11 can't trace the question.
_AUTOCASTS = frozenset(
    filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "hpu", "mtia", "mps", "xla"))
)


def check_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
) -> None:
    """Check that there are as many key as query heads, for calls without `enable_gqa`.

    Raises:
        InvalidInputError: there aren't, or something else is wrong with the call.
    """
    if query.shape[1:2] != key.shape[-2:-1]:
        # What is wrong otherwise is the better message: a key of other dimensions has no heads to compare.
        check(query, key, value, Call(1.0, max_q, max_k, UNBOUNDED, cu_seq_q, cu_seq_k))
        raise InvalidInputError(
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


def call_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float | None,
    bound: tuple[int, int],
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Call:
    """Return the contract's `Call` of these arguments; `bound` is what `window` returned.

    Raises:
        InvalidInputError: a length or the window isn't of integers.
    """
    left, right = bound
    if not type(max_q) is type(max_k) is type(left) is type(right) is int:
        # Those of NumPy are taken as well, as torch's own ops do; specs and kernels get Python's.
        max_q, max_k = _integer("max_q", max_q), _integer("max_k", max_k)
        bound = _integer("window_size", left), _integer("window_size", right)
    return Call(
        scale_of(query, scale), max_q, max_k, bounds(bound, False, max_q, max_k), cu_seq_q, cu_seq_k,
        keys_used(seqused_k, cu_seq_k, block_table), block_table, None, None, 0.0, None, num_splits or None,
        wants_deterministic(),
    )  # fmt: skip


def _integer(name: str, number: int) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise InvalidInputError(f"{name}: got {number!r}, expected an integer") from None

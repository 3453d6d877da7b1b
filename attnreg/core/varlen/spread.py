"""Which calls of `varlen_attn` are spread over ranks: those with `group=`, and all in a `with` block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils.weak import WeakIdKeyDictionary

from attnreg.core.contract.options import OPTIONS
from attnreg.errors import InvalidInputError

# The options of calls that can be spread, by the argument of `varlen_attn`.
SPREAD = frozenset(row.argument for row in OPTIONS if row.spread)

# What calls are spread by while its `with` block lasts. It is one for all threads, as an activation that is
# checkpointed is computed once more on a thread of autograd's. Compiled code looks at `is_on` alone, as it is
# compiled once more for each new object that it looks at.
_over: Any = None
is_on = False

# How many tokens the whole batch has whose offsets a `ContextParallel` made.
_whole_batches: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_whole_batch(offsets: Tensor, tokens: int) -> None:
    """Remember that offsets, int32 (B + 1,), are of a whole batch, which ranks have parts of."""
    _whole_batches[offsets] = tokens


def check_is_whole(offsets: object, query: object) -> None:
    """Refuse a rank's rows with the offsets of the whole batch: on a GPU nobody looks how far these reach.

    Such offsets come from a call outside of the block, or from a forward that a checkpoint repeats after the
    block's end.
    """
    tokens = _whole_batches.get(offsets) if isinstance(offsets, Tensor) else None  # type: ignore[no-untyped-call]
    if tokens is not None and isinstance(query, Tensor) and query.dim() and len(query) < tokens:
        raise InvalidInputError(
            f"cu_seq_q: got the offsets of a batch of {tokens} tokens that is spread over ranks, for "
            f"{len(query)} rows, expected a call inside of the `with` block, which has to last until the "
            "backward is done, or group="
        )


def spread_over(context: Any) -> Any:
    """Have calls spread by a `ContextParallel`, or by None; returns what they were spread by before."""
    global _over, is_on
    before, _over, is_on = _over, context, context is not None
    return before


def check_is_off(instead: str) -> None:
    """Refuse a call that isn't spread in a `with` block: queries would see keys of this rank alone."""
    if is_on:
        raise InvalidInputError(
            "context parallel: got a call on this rank's own tokens inside of the `with` block, expected "
            f"{instead}; what isn't spread belongs outside of the block"
        )


def attend(
    group: Any,
    mesh: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[Tensor, Tensor | None, int, int],
    mask: tuple[bool, Sequence[int] | None, float | None, bool],
    options: dict[str, Any],
    backend: str | None,
    returns_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Return output and LSE of a call of `varlen_attn` that is spread over ranks.

    They are (T_q, H, D_v) and (H, T_q). Query, key and value are this rank's rows, (T, H, D), in one
    floating-point dtype. `lengths` are both offsets, int32 (B + 1,), and both longest lengths. `mask` is
    (is_causal, window_size, scale, enable_gqa).

    Raises:
        InvalidInputError: `mesh` or `group` is wrong, or an option can't be spread.
    """
    if mesh is not None:
        raise InvalidInputError(
            f"mesh: got {mesh!r}, expected None: give it to attnreg.context_parallel(mesh, cu_seq), and what "
            "that returns to group="
        )
    over = _over if group is None else group
    if not hasattr(over, "attend"):
        raise InvalidInputError(
            f"group: got {over!r}, expected what attnreg.context_parallel(group, cu_seq) returns, as it says "
            "which rank has which tokens"
        )
    offsets, longest = dict(zip(("cu_seq_q", "cu_seq_k"), lengths, strict=False)), lengths[2:]
    names = "is_causal", "window_size", "scale", "enable_gqa"
    arguments: dict[str, Any] = dict(zip(names, mask, strict=True))
    arguments |= {"backend": backend, "with_lse": returns_lse}
    refused = {name: options[name] for name in options if name not in SPREAD}
    arguments |= {name: options[name] for name in options if name in SPREAD}
    lasts = dict(zip(("max_q", "max_k"), longest, strict=True))
    return over.attend(query, key, value, offsets, lasts, arguments, refused)  # type: ignore[no-any-return]


# A compiled program breaks its graph there: what ranks exchange is in the order of Python's calls.
attend_uncompiled = _disable_dynamo(attend)

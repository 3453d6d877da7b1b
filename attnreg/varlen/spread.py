"""Which calls of `varlen_attn` are spread over ranks: those with `group=`, and all in a `with` block."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils.weak import WeakIdKeyDictionary

from attnreg.errors import InvalidInputError

# What calls are spread by while its `with` block lasts. It is one for all threads, as an activation that is
# checkpointed is computed once more on a thread of autograd's. Compiled code looks at `is_on` alone, as it is
# compiled once more for each new object that it looks at.
_over: Any = None
is_on = False

# Offsets, group, version of the offsets, and what `context_parallel` made of them, of the last calls with a
# group in the place of that.
_contexts: list[tuple[Tensor, Any, int | None, Any]] = []
MOST_CONTEXTS = 16

# How many tokens the whole batch has whose offsets a `ContextParallel` made.
_whole_batches: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_whole_batch(offsets: Tensor, tokens: int) -> None:
    """Remember that offsets are of a whole batch, which ranks have parts of."""
    _whole_batches[offsets] = tokens


def check_is_whole(offsets: object, query: object) -> None:
    """Refuse a rank's rows with the offsets of the whole batch: on a GPU nobody looks how far these reach.

    So are those of a call outside of the block, or of one that autograd computes once more after its end.
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
    group: Any, mesh: Any, query: Tensor, key: Tensor, value: Tensor, offsets: dict[str, Any], *rest: Any
) -> tuple[Tensor, Tensor]:
    """Return the results of a call that is spread."""
    if group is not None and mesh is not None:
        raise InvalidInputError("group and mesh: got both, expected one of them")
    over = group if mesh is None else mesh
    over = _over if over is None else over
    if not hasattr(over, "attend"):
        over = _contiguous(over, offsets["cu_seq_q"])
    return over.attend(query, key, value, offsets, *rest)  # type: ignore[no-any-return]


def _contiguous(group: Any, offsets: Any) -> Any:
    """Return what `context_parallel` makes of a group and offsets: the same for the same ones."""
    is_counted = isinstance(offsets, Tensor) and not offsets.is_inference()
    version = offsets._version if is_counted else None
    for *of_context, context in _contexts:
        if of_context[0] is offsets and of_context[1:] == [group, version]:
            return context
    # By its name: the room is above this one, and only programs of several ranks load it.
    context = importlib.import_module("attnreg.parallel.front").context_parallel(group, offsets)
    if is_counted:
        _contexts.append((offsets, group, version, context))
        del _contexts[:-MOST_CONTEXTS]
    return context


# A compiled program breaks its graph there: what ranks exchange is in the order of Python's calls.
attend_uncompiled = _disable_dynamo(attend)

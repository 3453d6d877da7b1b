"""The meaning of transformers' mask functions, (row, head, query, key) -> bool.

transformers' own functions are recognised by their code; their parameters are in their closures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.integrations.packing import Window, last_true


class MaskFunctionStructure(NamedTuple):
    """A window, (left, right) as for `varlen_attn`, and each token's document number, integers (B, S)."""

    window: Window
    documents: Tensor | None = None


def is_bidirectional(mask_function: Callable[..., Any] | None) -> bool:
    """Whether every query sees every key."""
    from transformers.masking_utils import bidirectional_mask_function

    return mask_function is bidirectional_mask_function


def structure_of(mask_function: Callable[..., Any] | None) -> MaskFunctionStructure | None:
    """Return the structure of a mask function; None if it means more than a window and documents."""
    from transformers import masking_utils as theirs

    if mask_function in (None, theirs.causal_mask_function):
        return MaskFunctionStructure((-1, 0))
    if is_bidirectional(mask_function):
        return MaskFunctionStructure((-1, -1))
    parts, nothing = _parts(mask_function), torch.empty(0)
    if len(parts) != 2:
        return None
    remap = getattr(theirs, "remap_positions_for_packed_sequence", None)  # not in every version
    remapped = None if remap is None else remap(theirs.causal_mask_function, nothing)
    for first, second in (parts, parts[::-1]):  # documents come first in transformers 5.23, last in others
        window = _made_by(theirs.sliding_window_overlay(1), first).get("sliding_window")
        if window is not None and second is theirs.causal_mask_function:
            return MaskFunctionStructure((window - 1, 0))
        documents = documents_of(first)
        inner = structure_of(_made_by(remapped, second).get("mask_function", second))
        if documents is not None and inner is not None:
            return inner._replace(documents=documents)
    return None


def _parts(mask_function: Any) -> tuple[Any, ...]:
    """Return the functions that all have to be true where a key is seen."""
    from transformers import masking_utils as theirs

    made: Any = _made_by(theirs.and_masks(theirs.causal_mask_function), mask_function)
    return made.get("mask_functions", ())  # type: ignore[no-any-return]


def documents_of(mask_function: Any) -> Any:
    """Return the document numbers, (B, S), that transformers has put into a mask function, or None."""
    from transformers import masking_utils as theirs

    like = theirs.packed_sequence_mask_function(torch.empty(0))
    made = (_made_by(like, function) for function in (mask_function, *_parts(mask_function)))
    candidates = (closure.get("packed_sequence_mask") for closure in made)
    return next((numbers for numbers in candidates if numbers is not None), None)


def restarted(mask_function: Callable[..., Any], starts: Tensor) -> Callable[..., Any]:
    """Return a mask function whose places are counted anew in each document, as if each were the first.

    It doesn't separate documents. `starts` is bool (B, S), true where a document starts.
    """
    places, latest = torch.arange(starts.shape[1], device=starts.device), last_true(starts)
    first = starts.int().argmax(-1, keepdim=True)  # padding may lie before it
    counted = places - torch.where(latest < 0, first, latest) + first

    def counts_anew(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Any:
        return mask_function(row, head, counted[row, query], counted[row, key])

    return counts_anew


def _made_by(like: Any, function: Any) -> dict[str, Any]:
    """Return the closure of a function, by name, if it has the code of `like`, else an empty dict."""
    if like is None or getattr(function, "__code__", None) is not like.__code__:
        return {}
    code: Any = function.__code__
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True))


leave_module_uncompiled(__name__)

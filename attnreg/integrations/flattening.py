"""A warning about batches of transformers' `DataCollatorWithFlattening` that nothing says documents of.

Layers can't tell such a batch from one long document. So the collator is looked at, in the process that
collates. It changes `DataCollatorWithFlattening.__call__` (public; its attributes as of transformers 5.23),
until it has warned.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any

from attnreg.core.torchlib.replacing import MethodReplacement

log = logging.getLogger("attnreg")

WARNING = (
    "DataCollatorWithFlattening: got return_position_ids=False and no return_flash_attn_kwargs, expected "
    "one of them: nothing in its batches says where documents begin, so each sees the documents before it, "
    "unless the program adds position_ids or cu_seq_lens_q itself (said once)"
)


def warn_of_mixed_documents() -> None:
    """Have the first batch that mixes documents logged as a warning; a second call changes nothing."""
    try:
        theirs = importlib.import_module("transformers.data.data_collator")
    except ImportError:  # of another version: nobody is warned
        return
    collator: Any = getattr(theirs, "DataCollatorWithFlattening", None)
    usual = getattr(collator, "__call__", None)  # noqa: B004 - of the class
    if usual is None or isinstance(usual, MethodReplacement):
        return

    def collate(self: Any, features: Sequence[Any], *rest: Any, **options: Any) -> Any:
        if _mixes(self, features):
            if collator.__call__ is ours:  # a replacement of other code stays
                collator.__call__ = usual
            log.warning("%s", WARNING)
        return usual(self, features, *rest, **options)

    place = f"{theirs.__name__}:{collator.__name__}.__call__"
    ours = collator.__call__ = MethodReplacement(usual, place, collate)


def _mixes(collator: Any, features: Sequence[Any]) -> bool:
    """Whether a batch has several documents, and says nowhere where they begin."""
    says = (getattr(collator, name, True) for name in ("return_position_ids", "return_flash_attn_kwargs"))
    return len(features) > 1 and not any(says)

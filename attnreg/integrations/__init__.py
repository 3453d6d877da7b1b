"""attnreg behind other libraries: `attnreg.integrations.transformers`.

Here: one module for each library (`transformers`), and what its calls are made of: how a batch's
tokens lie as sequences (`packing`) and what all layers of a model share of a mask (`shared_mask`).
May import: `flash_attn` and all below it. Read `transformers.py` first. Nothing else of attnreg imports this
room, and a library is imported when `install` is called.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Import a library's module where a program names it without an import."""
    if name != "transformers":
        raise AttributeError(f"module 'attnreg.integrations' has no attribute {name!r}")
    return importlib.import_module("attnreg.integrations.transformers")

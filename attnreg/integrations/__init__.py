"""attnreg behind other libraries: `attnreg.integrations.transformers`.

Here, module by module:
- `transformers`, to be read first: a layer's call, and `install`. Each library has a module of its name.
- `shared_mask`, `mask_functions`: the mask that all layers of a model share.
- `packing`: the sequences of a batch. `masked`: calls that need a dense mask.
- `for_others`: calls in jit.trace, vmap and functionalize. `behind_flash`: the name `flash_attention_2`.

May import: `flash_attn` and all below it. Nothing else of attnreg imports this room. A library is imported
when `install` is called.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Import a library's module when a program names it without an import."""
    if name != "transformers":
        raise AttributeError(f"module 'attnreg.integrations' has no attribute {name!r}")
    return importlib.import_module("attnreg.integrations.transformers")

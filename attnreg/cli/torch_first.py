"""Importing torch, which comes before attnreg's own modules in every command that needs them."""

from __future__ import annotations

import warnings

__all__ = ["import_torch"]


def import_torch() -> None:
    """Import torch, without the warning about settings that can't be read: the command reports those.

    Torch's entry point installs attnreg's routers if a variable asks for it. It must not meet
    modules that are half imported, as they are while one of them imports torch.
    """
    warnings.filterwarnings("ignore", message="attnreg", category=UserWarning)
    import torch  # noqa: F401

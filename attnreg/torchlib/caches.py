"""Where attnreg keeps on disk what it has compiled, or had compiled."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["folder"]


def folder(purpose: str) -> Path:
    """Return the folder for a purpose, below the user's cache folder; it may not exist yet.

    That is `XDG_CACHE_HOME`, or `~/.cache`, as the XDG Base Directory Specification has it.

    Raises:
        RuntimeError: the user has no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "attnreg" / purpose

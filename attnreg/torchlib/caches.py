"""Where attnreg keeps on disk what it has compiled, or had compiled, and who else can write there."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def folder(purpose: str) -> Path:
    """Return the folder for a purpose, below the user's cache folder; it may not exist yet.

    That is `XDG_CACHE_HOME`, or `~/.cache`, as the XDG Base Directory Specification has it. Raises
    RuntimeError if the user has no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "attnreg" / purpose


def check_writable(folder: Path) -> None:
    """Raise OSError if this user can't make files in a folder, or can't make the folder; makes neither."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise PermissionError(f"{there} can't be written to, and {folder} is where compiled libraries go")


def unsafe(*places: Path) -> str:
    """Return why code in these files and folders must not be run: others can write to it; empty if none can.

    Raises OSError if one of them isn't there or can't be looked at.
    """
    for place in places:
        found = place.stat()
        if found.st_uid not in (os.getuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"{place} belongs to another user, or others may write to it"
    return ""

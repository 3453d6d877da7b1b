"""The folders of compiled code on disk, and checks that no other user can write there."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Iterator
from pathlib import Path


def folder(purpose: str) -> Path:
    """Return the folder for a purpose, below the user's cache folder; it may not exist yet.

    The cache folder is `XDG_CACHE_HOME`, or `~/.cache`, by the XDG Base Directory Specification. Raises
    RuntimeError if the user has no home folder, or HOME isn't an absolute path.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # By the specification relative paths are ignored.
    if not Path(base).is_absolute():
        # Python reads an empty HOME as the root, and a relative HOME as below the current folder.
        if not Path(home := os.environ.get("HOME", "/")).is_absolute():
            raise RuntimeError(f"HOME must be an absolute path, got {home!r}")
        base = str(Path.home() / ".cache")
    return Path(base, "attnreg", purpose)


@contextlib.contextmanager
def readable_errors(done: str = "written") -> Iterator[None]:
    """Reword a system's error as attnreg's own: which file can't be written or read, and why."""
    try:
        yield
    except OSError as error:
        if error.filename and error.strerror:
            raise type(error)(f"{error.filename} can't be {done}: {error.strerror}") from error
        raise


@readable_errors()
def make(folder: Path) -> None:
    """Make a folder and its missing parents, for this user alone whatever the umask is."""
    if not folder.exists():
        make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


@readable_errors()
def check_writable(folder: Path) -> None:
    """Raise OSError if this user can't make files in a folder, or others can, or can replace it; makes none.

    For a missing folder the nearest existing parent is checked: the folder has to be one that could be made.
    """
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    # Ownership first: that a folder belongs to another user explains more than that it isn't writable.
    if existing.is_dir() and (problem := unsafe(existing.resolve(), to_be_made_in=existing != folder)):
        raise PermissionError(problem)
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        place = "there" if existing == folder else f"to {folder}"
        raise PermissionError(f"{existing} can't be written to, and compiled libraries go {place}")


def unsafe(place: Path, to_be_made_in: bool = False) -> str:
    """Return why code in a file or folder must not be run: another user can replace it; empty if none can.

    If the result is empty, the path still leads to the same file when it is opened later. Nobody else can
    rename or write to the path's files and folders up to the root. The exception are owners that a user
    namespace lacks: for the folders above the place they count as root. `place` has to be without links, as
    `Path.resolve` returns it. With `to_be_made_in` it is a folder in which this user is about to make the
    code's folder. The reason names the uppermost unsafe folder, so it is the same for all files below.

    Raises:
        OSError: `place` or a folder above it is missing, or its mode can't be read.
    """
    for each in (*reversed(place.parents), place):
        status, is_above = each.lstat(), each != place or to_be_made_in
        if not (_is_trusted(status.st_uid) or (is_above and status.st_uid == _unmapped_owner())):
            return f"{each} belongs to another user (id {status.st_uid})"
        # In a folder with the sticky bit, such as /tmp, nobody can rename or remove another user's files.
        is_sticky = is_above and status.st_mode & stat.S_ISVTX
        others = stat.S_IWOTH if _is_private(status.st_gid) else stat.S_IWOTH | stat.S_IWGRP
        if status.st_mode & others and not is_sticky:
            return (
                f"others may write to {each} (mode {stat.S_IMODE(status.st_mode):o}; `chmod go-w` ends that)"
            )
    return ""


def check_contents(folder: Path) -> None:
    """Raise OSError if another user owns something in a folder: it was put there while others could write."""
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                if not _is_trusted(owner := (each := Path(place, name)).lstat().st_uid):
                    raise PermissionError(f"{each} belongs to another user (id {owner})")


def _is_trusted(owner: int) -> bool:
    return owner in (os.geteuid(), 0)


def _unmapped_owner() -> int | None:
    """Return the owner that a user namespace shows for all users it lacks; None where it lacks none.

    A rootless container lacks the machine's root, who owns `/`, `/home` and `/tmp`.
    """
    try:
        if Path("/proc/self/uid_map").read_text(encoding="ascii").split() != ["0", "0", str(2**32 - 1)]:
            return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except OSError:
        pass  # not Linux, or /proc isn't mounted
    return None


@functools.cache
def _is_private(group: int) -> bool:
    """Return whether this user is alone in a group: many systems make a group for each user."""
    import grp
    import pwd

    try:
        user, entry = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    # In some containers every user is in the group root. `gr_mem` lacks users whose primary group this is.
    others = set(entry.gr_mem) | {account.pw_name for account in pwd.getpwall() if account.pw_gid == group}
    return group != 0 and entry.gr_name == user and others <= {user}

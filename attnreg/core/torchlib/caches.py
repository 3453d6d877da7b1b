"""Where attnreg keeps on disk what it has compiled, or had compiled, and who else can write there."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Iterator
from pathlib import Path


def folder(purpose: str) -> Path:
    """Return the folder for a purpose, below the user's cache folder; it may not exist yet.

    That is `XDG_CACHE_HOME`, or `~/.cache`, as the XDG Base Directory Specification has it. Raises
    RuntimeError if the user has no home folder, or HOME isn't the whole path of one.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    if not Path(base).is_absolute():
        # With an empty HOME Python takes the root, with a relative one the folder that the program is in.
        if not Path(home := os.environ.get("HOME", "/")).is_absolute():
            raise RuntimeError(f"HOME must be an absolute path, got {home!r}")
        base = str(Path.home() / ".cache")
    return Path(base, "attnreg", purpose)


@contextlib.contextmanager
def readable_errors(done: str = "written") -> Iterator[None]:
    """Have an error of the system's say which file can't be written, or read, and why, as attnreg's do."""
    try:
        yield
    except OSError as error:
        if error.filename and error.strerror:
            raise type(error)(f"{error.filename} can't be {done}: {error.strerror}") from error
        raise


@readable_errors()
def make(folder: Path) -> None:
    """Make a folder and those above it that aren't there, for this user alone whatever the umask is."""
    if not folder.exists():
        make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


@readable_errors()
def check_writable(folder: Path) -> None:
    """Raise OSError if this user can't make files in a folder, or others can, or can replace it; makes none.

    A folder that isn't there yet has to be one that could be made.
    """
    there = next(place for place in (folder, *folder.parents) if place.exists())
    # Whose it is says more than that it can't be written to.
    if there.is_dir() and (problem := unsafe(there.resolve(), to_be_made_in=there != folder)):
        raise PermissionError(problem)
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        place = "there" if there == folder else f"to {folder}"
        raise PermissionError(f"{there} can't be written to, and compiled libraries go {place}")


def unsafe(place: Path, to_be_made_in: bool = False) -> str:
    """Return why code in a file or folder must not be run: another user can replace it; empty if none can.

    Where it is empty, what is opened by the path afterwards is what was looked at: nobody else can rename or
    write to the path's files and folders up to the root. Only owners whom a user namespace lacks could: for
    the folders above the place they count as root. The path has to be without links, as `Path.resolve`
    returns it. With `to_be_made_in` it is a folder in which this user is about to make one for the code.
    The reason is that of the uppermost one, which is the same for all files below it. Raises OSError if one
    of them isn't there or can't be looked at.
    """
    for each in (*reversed(place.parents), place):
        found, is_above = each.lstat(), each != place or to_be_made_in
        if not (_is_trusted(found.st_uid) or (is_above and found.st_uid == _unmapped_owner())):
            return f"{each} belongs to another user (id {found.st_uid})"
        # In a folder with the sticky bit, as /tmp has it, others can't rename or remove what isn't theirs.
        is_sticky = is_above and found.st_mode & stat.S_ISVTX
        others = stat.S_IWOTH if _is_private(found.st_gid) else stat.S_IWOTH | stat.S_IWGRP
        if found.st_mode & others and not is_sticky:
            return (
                f"others may write to {each} (mode {stat.S_IMODE(found.st_mode):o}; `chmod go-w` ends that)"
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

    In a rootless container root is one of them, who owns `/`, `/home` and `/tmp`.
    """
    try:
        if Path("/proc/self/uid_map").read_text(encoding="ascii").split() != ["0", "0", str(2**32 - 1)]:
            return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except OSError:
        pass  # not Linux, or /proc isn't mounted
    return None


@functools.cache
def _is_private(group: int) -> bool:
    """Return whether this user is alone in a group: many systems make one of each user's name."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    # In some containers every user is in the group root. `gr_mem` lacks those whose own group it is.
    others = set(found.gr_mem) | {one.pw_name for one in pwd.getpwall() if one.pw_gid == group}
    return group != 0 and found.gr_name == user and others <= {user}

"""Files that are written whole, folders for compiled files, and checks that no other user can write there."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


def folder(purpose: str) -> Path:
    """Return the folder for a purpose, below the user's cache folder; it may not exist yet.

    The cache folder is `XDG_CACHE_HOME` or `~/.cache`, by the XDG Base Directory Specification. Raises
    OSError if the user has no home folder, or HOME isn't an absolute path.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore relative paths.
    if not Path(base).is_absolute():
        # Python reads an empty HOME as the root, and a relative HOME as relative to the current folder.
        if not Path(home := os.environ.get("HOME", "/")).is_absolute():
            raise OSError(f"HOME must be an absolute path, got {home!r}")
        try:
            base = str(Path.home() / ".cache")
        except RecursionError:
            raise  # a RuntimeError, too, but of a program that recurses
        except RuntimeError as error:
            raise OSError(f"{str(error).rstrip('.')}: set XDG_CACHE_HOME, or HOME") from error
    return Path(base, "attnreg", purpose)


def resolve(path: Path, strict: bool = False) -> Path:
    """Return a path without links, as `Path.resolve` does; raises OSError for a loop of links."""
    try:
        return path.resolve(strict=strict)
    except RecursionError:
        raise
    except RuntimeError as error:  # of a loop, up to Python 3.12
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error


@contextlib.contextmanager
def readable_errors(done: str = "written") -> Iterator[None]:
    """Reword an OSError of the block in attnreg's style: which file can't be written (or read), and why."""
    try:
        yield
    except OSError as error:
        if error.filename and error.strerror:
            raise type(error)(f"{error.filename} can't be {done}: {error.strerror}") from error
        raise


@readable_errors()
def make(folder: Path) -> None:
    """Create a folder and its missing parents, with access for this user alone whatever the umask is."""
    if not folder.exists():
        if folder.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, "a link to nothing, or to itself", str(folder))
        make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: readers see the old contents or the new, also after an interruption.

    An existing file keeps its mode, a new one has the umask's. What UTF-8 lacks, as in the names of some
    files, is written as `\\udcff`.
    """
    target = resolve(path)
    mode = target.stat().st_mode & 0o777 if target.exists() else None
    temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}.part")
    # To read the umask would be to set it, for all threads.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        if mode is not None:
            temporary.chmod(mode)
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


@readable_errors()
def check_writable(folder: Path) -> None:
    """Raise OSError if this user can't create files in a folder, or another user can, or can replace it.

    Creates nothing. Of a folder that doesn't exist, the nearest existing parent is checked.
    """
    nearest = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    # The owner first: it explains more than "can't be written to".
    if nearest.is_dir() and (problem := unsafe(resolve(nearest), to_be_made_in=nearest != folder)):
        raise PermissionError(problem)
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        place = "there" if nearest == folder else f"to {folder}"
        raise PermissionError(f"{nearest} can't be written to, and compiled libraries go {place}")


def check_can_make(folder: Path) -> None:
    """Raise OSError if no file can be made in a folder, or in the nearest that exists; leaves nothing there.

    For root the rights of a folder say nothing, as on a file system that can't be written.
    """
    nearest = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise type(error)(f"{nearest} can't be written: {error.strerror}") from error


def unsafe(place: Path, to_be_made_in: bool = False) -> str:
    """Return why code in a file or folder must not run: another user can replace it; empty if nobody can.

    An empty result is an invariant: whoever opens the path afterwards opens the file that was checked. Nobody
    else can rename or write to the path's files and folders up to the root. The exception are owners that a
    user namespace doesn't map: they count as root for the folders above `place`.

    Of several unsafe folders the uppermost is reported, so all files below it get the same reason.

    Args:
        place: a path without links, as `Path.resolve` returns it.
        to_be_made_in: `place` is a folder in which this user is about to create a folder for code.

    Raises:
        OSError: a part of the path doesn't exist or can't be examined.
    """
    for path in (*reversed(place.parents), place):
        status, is_above = path.lstat(), path != place or to_be_made_in
        if not (_is_trusted(status.st_uid) or (is_above and status.st_uid == _unmapped_owner())):
            return f"{path} belongs to another user (id {status.st_uid})"
        # In a folder with the sticky bit, such as /tmp, users can't rename or remove other users' files.
        is_sticky = is_above and status.st_mode & stat.S_ISVTX
        writers = stat.S_IWOTH if _is_private(status.st_gid) else stat.S_IWOTH | stat.S_IWGRP
        if status.st_mode & writers and not is_sticky:
            return (
                f"others may write to {path} (mode {stat.S_IMODE(status.st_mode):o}; `chmod go-w` ends that)"
            )
    return ""


def check_contents(folder: Path) -> None:
    """Raise OSError if another user owns a file in a folder: it was written while others had access."""
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                if not _is_trusted(owner := (each := Path(place, name)).lstat().st_uid):
                    raise PermissionError(f"{each} belongs to another user (id {owner})")


def _is_trusted(owner: int) -> bool:
    return owner in (os.geteuid(), 0)


def _unmapped_owner() -> int | None:
    """Return the user id that a user namespace shows for all unmapped users; None if it maps all users.

    In a rootless container the host's root is unmapped, and owns `/`, `/home` and `/tmp`.
    """
    try:
        if Path("/proc/self/uid_map").read_text(encoding="ascii").split() != ["0", "0", str(2**32 - 1)]:
            return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except OSError:
        pass  # not Linux, or /proc isn't mounted
    return None


@functools.cache
def _is_private(group: int) -> bool:
    """Return whether this user is alone in a group: many systems create a group for each user."""
    import grp
    import pwd

    try:
        user, entry = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    # In some containers every user is in the group root. `gr_mem` lacks the users whose primary group it is.
    members = set(entry.gr_mem) | {account.pw_name for account in pwd.getpwall() if account.pw_gid == group}
    return group != 0 and entry.gr_name == user and members <= {user}

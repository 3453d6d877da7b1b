"""Names of kernels from the hub: `hub:owner/repository@revision`, or `hub:` and a folder."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from attnreg.errors import did_you_mean, short_repr

PREFIX = "hub:"
# Repositories whose kernels have flash-attn's functions, to suggest where a name is wrong.
KNOWN = tuple(f"kernels-community/{name}" for name in ("flash-attn2", "flash-attn3", "vllm-flash-attn3"))

LONGEST = 200  # characters of a name that a message repeats
LONGEST_PATH = 4096
_REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_REVISION = re.compile(r"[\w./+-]{1,250}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubName(NamedTuple):
    """Where a kernel comes from: a repository and its revision (branch, tag or commit), or a folder."""

    repository: str = ""
    revision: str = ""
    folder: str = ""

    @property
    def is_pinned(self) -> bool:
        """Whether the name means the same kernel at each start: a whole commit does, a branch doesn't."""
        return not self.repository or _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return PREFIX + (self.folder or f"{self.repository}@{self.revision}")


def is_hub_name(name: object) -> bool:
    """Whether a name asks for a kernel from the hub; it may still be malformed."""
    return isinstance(name, str) and name.strip().casefold().startswith(PREFIX)


def parse(name: str, base: Path | None = None) -> HubName:
    """Read a name that begins with `hub:`; a relative folder is one of `base`, else of the current folder.

    Raises ValueError, which says what was got and expected.
    """
    text = name.strip()[len(PREFIX) :].strip()
    if text.startswith((".", "/", "~", os.sep)):
        if len(text) > LONGEST_PATH:
            raise ValueError(f"got {short_repr(name)}, expected a path of at most {LONGEST_PATH} characters")
        try:
            folder = Path(base or "", Path(text).expanduser())
        except RuntimeError:
            raise ValueError(f"got {short_repr(name)}, but there is no home folder for its ~") from None
        try:
            return HubName(folder=os.path.abspath(folder))  # noqa: PTH100 - links stay
        except FileNotFoundError:
            raise ValueError(
                f"got {short_repr(name)}, expected an absolute path: the current folder has been removed"
            ) from None
    repository, at, revision = text.partition("@")
    is_known, is_short = repository in KNOWN, len(repository) <= LONGEST
    near = did_you_mean(repository, KNOWN) if is_short and not is_known else ""
    if not _REPOSITORY.fullmatch(repository) or ".." in repository:
        raise ValueError(
            f"got {short_repr(name)}, expected {PREFIX}owner/repository@revision, or {PREFIX} and the path "
            f"of a folder (./, ~/ or / first){near}"
        )
    if not _REVISION.fullmatch(revision) or ".." in revision:
        got = (
            "an empty revision" if at and not revision else "no revision" if not at else short_repr(revision)
        )
        raise ValueError(
            f"{short_repr(name)}: got {got}, expected one behind an @: a commit, which always means the same "
            f"kernel, or a branch such as {PREFIX}{repository}@v1{near}"
        )
    return HubName(repository, revision)


def canonical(name: str, base: Path | None = None) -> str:
    """Return the registry's name of a kernel from the hub; any other name as given."""
    try:
        return str(parse(name, base)) if is_hub_name(name) else name
    except ValueError:
        return name


def problem_of(name: str) -> str:
    """Return what is wrong with a name that begins with `hub:`; empty if nothing is."""
    try:
        parse(name)
    except ValueError as error:
        return str(error)
    return ""


def is_well_formed(name: object) -> bool:
    """Whether a name is that of a kernel from the hub."""
    return isinstance(name, str) and is_hub_name(name) and not problem_of(name)


def suggested(name: str) -> str:
    """Return `"; did you mean 'hub:...'?"` for a name that lacks the prefix; else an empty string."""
    _, _, rest = name.rpartition(":")
    repository = rest.partition("@")[0].strip()
    if len(rest) > LONGEST:
        return ""
    return f"; did you mean '{PREFIX}{rest.strip()}'?" if _REPOSITORY.fullmatch(repository) else ""

"""Kernels that are known to be wrong or to crash: the rows of `known_issues.toml`.

A row is one more reason against the calls that it describes. The file is read once, at the first
decision. A test holds it to its form; a row that is malformed all the same is left out with a
warning, as it mustn't cost a program its attention.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from attnreg.contract import issue_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnreg.contract.issue_rows import Issue
    from attnreg.contract.spec import AttentionSpec

__all__ = ["FILE", "against"]

FILE = Path(__file__).with_name("known_issues.toml")

log = logging.getLogger("attnreg")


def against(
    backend: str, version: Callable[[], str | None], spec: AttentionSpec, direction: str
) -> tuple[str, ...]:
    """Return what is known against a backend's kernel for a call; `version` is asked only if it matters."""
    found = [
        issue
        for issue in _rows()
        if issue.backend.casefold() == backend.casefold() and issue.affects(spec, direction)
    ]
    if any(issue.versions for issue in found):
        here = _told(version)
        found = [issue for issue in found if issue.affects_version(here, spec.device.simulated)]
    return tuple(f"{issue.reason}; see {issue.link}" for issue in found)


@functools.cache
def _rows() -> tuple[Issue, ...]:
    issues, problems = issue_rows.read(FILE)
    for problem in problems:
        log.warning("%s; the row is left out", problem)
    return issues


def _told(version: Callable[[], str | None]) -> str:
    try:
        return str(version() or "")
    except Exception:  # noqa: BLE001 - as good as none
        return ""

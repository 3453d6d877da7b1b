"""Kernels that are known to be wrong or to crash: the rows of `known_issues.toml`.

A row is one more reason against the calls that it describes. The file is read once, at the first decision. A
test checks its form.
"""

from __future__ import annotations

import functools
import math
import operator
import pkgutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from attnreg.core.contract.lengths import LENGTHS, Cut
from attnreg.core.contract.spec import AttentionSpec
from attnreg.core.torchlib.isolation import raise_if_of_program

NAME = "known_issues.toml"


def against(
    backend: str, version: Callable[[], str | None], spec: AttentionSpec, direction: str
) -> tuple[str, ...]:
    """Return the known issues of a backend's kernel for a call; calls `version` only if one depends on it."""
    name = backend.casefold()
    issues = [row for row in _rows() if row.backend.casefold() == name and row.affects(spec, direction)]
    if any(row.versions for row in issues):
        here = text_of(version)
        issues = [row for row in issues if row.affects_version(here, spec.device.simulated)]
    return tuple(f"{row.reason}; see {row.link}" for row in issues)


def cuts(backend: str, spec: AttentionSpec) -> tuple[tuple[Cut, ...], frozenset[str]]:
    """Return where known issues of a backend begin or end to affect calls of a spec's kind.

    And the lengths that are tested in a way that no cut can say, such as by a remainder.
    """
    places: list[Cut] = []
    beyond: set[str] = set()
    for row in _rows():
        tests = [test for test in row.where if _lengths_of(test)]
        others = all(_holds(spec, *test) for test in row.where if test not in tests)
        if row.backend.casefold() != backend.casefold() or not others:
            continue
        for field, test, operand in tests:
            if test not in _STEPS:
                beyond |= _lengths_of((field, test, operand))
            elif field not in LENGTHS:  # something else, say a side of the window, is compared with a length
                number = (_value(spec, field) or 0) - operand.added
                places += (Cut.of(operand.field, at=number + step) for step in (0, 1))
            elif isinstance(operand, Sum) and operand.field in LENGTHS:
                places += (Cut.beyond(field, operand.field, operand.added + step) for step in _STEPS[test])
            else:
                number = _value(spec, operand.field) + operand.added if isinstance(operand, Sum) else operand
                places += (Cut.of(field, at=math.ceil(number) + step) for step in _STEPS[test])
    return tuple(places), frozenset(beyond)


def _lengths_of(test: tuple[str, str, Any]) -> frozenset[str]:
    """Return the lengths that a test is about, on either side."""
    field, _, operand = test
    return frozenset((field, operand.field if isinstance(operand, Sum) else "")) & {*LENGTHS}


# Which lengths from an operand on a test changes its outcome at.
_STEPS = {
    **dict.fromkeys(("equals", "differs_from"), (0, 1)),
    **dict.fromkeys(("at_least", "less_than"), (0,)),
    **dict.fromkeys(("at_most", "more_than"), (0, 1)),
}


@functools.cache
def _rows() -> tuple[Issue, ...]:
    content = pkgutil.get_data(__package__, NAME)  # not by a path: the package may lie in a zip file
    if content is None:
        raise FileNotFoundError(NAME)
    return read(content.decode())


def text_of(version: Callable[[], str | None]) -> str:
    """Return a provider's version, or an empty string if it has none or the check raises."""
    try:
        return str(version() or "")
    except BaseException as error:  # noqa: BLE001 - only shown and compared
        raise_if_of_program(error)
        return ""


DIRECTIONS = {"forward": ("forward",), "backward": ("backward",), "both": ("forward", "backward")}

# The fields that a row can test, with their types.
FIELDS = {field.name: str(field.type) for field in fields(AttentionSpec)} | {
    "causal": "bool",
    "windowed": "bool",
    "window_left": "int",
    "window_right": "int",
}
del FIELDS["device"], FIELDS["window"]

TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "equals": operator.eq,
    "differs_from": operator.ne,
    "at_least": operator.ge,
    "at_most": operator.le,
    "less_than": operator.lt,
    "more_than": operator.gt,
    "multiple_of": lambda got, divisor: got % divisor == 0,
    "modulo": lambda got, of: got % of[0] == of[1],
}


class Sum(NamedTuple):
    """Another field plus a number, the operand of a test: `"max_q - 1"`."""

    field: str
    added: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """One row.

    Attributes:
        backend: the backend whose kernels have the fault.
        reason, link: what is wrong with them, and where that was reported.
        directions: the affected directions.
        versions: the affected versions of the provider, as a specifier; empty for all.
        compute_capability: the lowest and highest affected one; None for all.
        where: tests that an affected call passes, as (field, test, operand).
    """

    backend: str
    reason: str
    link: str
    directions: tuple[str, ...]
    versions: str = ""
    compute_capability: tuple[tuple[int, int], tuple[int, int]] | None = None
    where: tuple[tuple[str, str, Any], ...] = ()

    def affects(self, spec: AttentionSpec, direction: str) -> bool:
        """Whether a call is affected, if the provider's version is."""
        known = spec.device.capability
        if self.compute_capability is not None and known is not None:
            lowest, highest = self.compute_capability
            if not lowest <= known <= highest:
                return False
        return direction in self.directions and all(_holds(spec, *test) for test in self.where)

    def affects_version(self, version: str, simulated: bool = False) -> bool:
        """Whether a provider's version has the fault; the first word of `version` is the version.

        An unknown version counts as affected, except on a simulated device.
        """
        return not self.versions or _contains(self.versions, version, simulated)


@functools.cache
def _contains(versions: str, version: str, simulated: bool) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(versions).contains(Version(version.split()[0]), prereleases=True)
    except (IndexError, InvalidVersion):
        return not simulated


def read(content: str) -> tuple[Issue, ...]:
    """Return the rows of a file's content; any exception means that a row is malformed."""
    return tuple(map(_issue, tomllib.loads(content)["issue"]))


def _issue(row: dict[str, Any]) -> Issue:
    ends = row.get("compute_capability")
    converted = {
        "directions": DIRECTIONS[row["directions"]],
        "compute_capability": ends and tuple(tuple(map(int, end.split("."))) for end in ends),
        "where": tuple(_tests(row.get("where", {}))),
    }
    return Issue(**row | converted)


def _tests(where: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for field, tests in where.items():
        for test, operand in (tests if isinstance(tests, dict) else {"equals": tests}).items():
            is_sum = isinstance(operand, str) and FIELDS[field] != "str"
            yield field, test, _sum(operand) if is_sum else operand


def _sum(text: str) -> Sum:
    """Return the sum of `"max_q"` or `"max_q - 1"`."""
    field, *rest = text.split(" ", 1)
    return Sum(field, int("".join(rest).replace(" ", "") or 0))


def _holds(spec: AttentionSpec, field: str, test: str, operand: object) -> bool:
    got = _value(spec, field)
    if isinstance(operand, Sum):
        operand = _value(spec, operand.field) + operand.added
    return got is not None and TESTS[test](got, operand)


def _value(spec: AttentionSpec, field: str) -> Any:
    if field in ("window_left", "window_right"):
        return spec.window[field == "window_right"]
    return getattr(spec, field)

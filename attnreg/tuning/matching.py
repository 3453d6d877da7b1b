"""Whether a table speaks of this machine: each difference that matters, or is only worth a note.

A difference that can matter refuses the whole table. Half a table would compare times that were
taken on two machines.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnreg.tuning.table import Environment

__all__ = ["Match", "matched", "matched_simulated"]


class Rule(NamedTuple):
    """One fact of an environment.

    Attributes:
        field: its name.
        exact: how many leading numbers of a version have to be the same; 0 for the whole text.
        matters: whether a difference in those refuses the table; if not, it is noted.
        words: what the sentence calls it.
    """

    field: str
    exact: int
    matters: bool
    words: str


RULES = (
    Rule("device", 0, True, "device"),
    Rule("compute_capability", 0, True, "compute capability"),
    Rule("torch", 2, True, "torch"),
    Rule("cuda", 2, True, "CUDA"),
    Rule("cudnn", 0, True, "cuDNN"),
    Rule("threads", 0, True, "threads"),
    Rule("attnreg", 2, True, "attnreg"),
    Rule("driver", 0, False, "driver"),
)


class Match(NamedTuple):
    """What speaks against a table here, and what is only worth saying."""

    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def matched(measured: Environment, here: Environment, done: str = "measured", whole: bool = False) -> Match:
    """Compare where a table was measured, or whatever else was done, with where it is to be used.

    `whole` says that versions have to be the same to the last number.
    """
    refused: list[str] = []
    notes: list[str] = []
    for rule in RULES:
        there, now = getattr(measured, rule.field), getattr(here, rule.field)
        if there == now:
            continue
        sentence = f"{done} with {rule.words} {there or 'none'}, here it is {now or 'none'}"
        same = not whole and rule.exact and _leading(there, rule.exact) == _leading(now, rule.exact)
        (refused if rule.matters and not same else notes).append(sentence)
    for name, there in measured.backends.items():
        now = here.backends.get(name)
        if now is None:
            notes.append(f"{name} was {done} and doesn't load here")
        elif _own(there, measured.torch) != _own(now, here.torch):
            refused.append(f"{done} with {name} {there or 'of no version'}, here it is {now or 'none'}")
    notes += [f"{name} wasn't measured: it keeps its place" for name in _unmeasured(measured, here)]
    return Match(tuple(refused), tuple(notes))


def matched_simulated(measured: Environment, capability: str, done: str = "measured") -> Match:
    """Compare with a device that isn't here, of which nothing but its compute capability is known."""
    if measured.compute_capability != capability:
        there = measured.compute_capability or "none"
        return Match((f"{done} with compute capability {there}, here it is {capability or 'none'}",))
    return Match(notes=(f"takes for granted that the device is {measured.device}, with the same versions",))


def _unmeasured(measured: Environment, here: Environment) -> Iterator[str]:
    return (name for name in here.backends if name not in measured.backends and name != "math")


def _leading(version: str, count: int) -> list[str]:
    return re.findall(r"\d+", version)[:count]


def _own(version: str, torch: str) -> str:
    """Return a backend's version without torch's, which has a rule of its own."""
    return version.removeprefix(torch) if torch else version

"""The environment variables `ATTNREG_*`.

`read` turns them into an `EnvironmentSettings` or raises an error that lists what is wrong with them. It is
called when settings are needed, never at import. Names of backends are kept as they were written; the
registry checks whether they exist.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.errors import MOST_LISTED, ConfigError, did_you_mean, first_ten, short_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PREFIX = "ATTNREG_"

# The backend that runs the calls that no other backend can run.
REFERENCE = "math"

AS_GIVEN, LARGE, RECOGNISE = "as_given", "large", "recognise"

ON_ERROR, RAISE, NATIVE = "ATTNREG_ON_ERROR", "raise", "native"


class EnvironmentSettings(NamedTuple):
    """The values of the variables; one that is unset or blank leaves its field at the default."""

    backend: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    config: Path | None = None
    strict: bool | None = None
    policy: str = ""
    masks: str = ""
    record: Path | None = None
    stats: Path | None = None
    report: Path | None = None
    lock: Path | None = None
    routers: str = ""
    build: str = ""
    transformers: str = ""
    as_flash_attn: bool | None = None
    on_error: str = ""


class Variable(NamedTuple):
    """How the text of a variable is parsed, and a line for the documentation.

    It sets the field of `EnvironmentSettings` that has its name without the prefix, in lower case.
    """

    parse: Callable[[str], object]
    description: str


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if "" in names:
        raise ValueError(f"got {short_repr(text)}, expected a name before and after a comma")
    earlier: set[str] = set()
    for name in names:
        if name.casefold() in earlier:
            raise ValueError(f"got {name!r} twice, expected each name once")
        earlier.add(name.casefold())
    return names


def _path(text: str) -> Path:
    """Return a path that stays the same when the program changes its current folder."""
    try:
        return Path(text).expanduser().absolute()
    except FileNotFoundError as error:
        raise ValueError(
            f"got {short_repr(text)}, expected an absolute path: the current folder has been removed"
        ) from error
    except RuntimeError as error:
        raise ValueError(
            f"got {short_repr(text)}, expected a path (there is no home folder for its ~)"
        ) from error


_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


SWITCH = "(1 or 0; also true, yes, on, false, no, off)"


def _boolean(text: str) -> bool:
    if text.casefold() not in _BOOLEANS:
        raise ValueError(f"got {short_repr(text)}, expected one of {', '.join(_BOOLEANS)}")
    return _BOOLEANS[text.casefold()]


def _one_of(*choices: str) -> Callable[[str], str]:
    *others, last = choices

    def parse(text: str) -> str:
        if text.casefold() not in choices:
            near = did_you_mean(text, choices)
            raise ValueError(f"got {short_repr(text)}, expected {', '.join(others)} or {last}{near}")
        return text.casefold()

    return parse


def _switch_or(name: str) -> Callable[[str], str]:
    """Parse a boolean as "1" or "0", or a name."""

    def parse(text: str) -> str:
        if text.casefold() == name:
            return name
        if text.casefold() not in _BOOLEANS:
            raise ValueError(f"got {short_repr(text)}, expected one of {', '.join(_BOOLEANS)} or {name}")
        return "1" if _boolean(text) else "0"

    return parse


VARIABLES = {
    "ATTNREG_BACKEND": Variable(
        _names, "the backend to prefer, or several separated by commas, the first preferred most"
    ),
    "ATTNREG_DISABLE": Variable(_names, "backends that must not run, separated by commas"),
    "ATTNREG_CONFIG": Variable(_path, "the settings file (TOML) to read"),
    "ATTNREG_STRICT": Variable(
        _boolean, "whether it is an error if none of the preferred backends can run a call " + SWITCH
    ),
    "ATTNREG_POLICY": Variable(
        _one_of("measured", "order", "adaptive", "batch_invariant"),
        "what decides where no backend is preferred: measured (a table of times), order (the default order), "
        "adaptive (the times of the program's own first calls), or batch_invariant (only backends whose "
        "results for a sequence don't depend on its batch)",
    ),
    "ATTNREG_MASKS": Variable(
        _one_of(AS_GIVEN, LARGE, RECOGNISE),
        "recognise: calls of F.scaled_dot_product_attention whose boolean mask is padding, causal, a window "
        "or documents run packed, without the mask; large: only large calls on a GPU do (the default where "
        "the policy measured or adaptive is set); as_given (else the default): no mask is looked at",
    ),
    "ATTNREG_RECORD": Variable(
        _path, "the file (JSONL) to record the program's calls in, for `attnreg tune --from`"
    ),
    "ATTNREG_STATS": Variable(
        _path, "the file (JSON lines) to which each process of the program adds what ran in it, when it ends"
    ),
    "ATTNREG_REPORT": Variable(
        _path,
        "the file (JSON lines) to which each process adds what ATTNREG_STATS adds, and the times of calls, "
        "for `attnreg report`; each call then goes through Python",
    ),
    "ATTNREG_LOCK": Variable(
        _path,
        "the lockfile (JSON) of `attnreg lock`: a call that can't run on its locked backend is an error",
    ),
    "ATTNREG_ROUTERS": Variable(
        _one_of("compiled", "python"),
        "compiled: an error unless the compiled call cache is there (`attnreg build`); python: neither it "
        "nor the compiled kernel for CPUs is used",
    ),
    "ATTNREG_BUILD": Variable(
        _one_of("background", "now", "off"),
        "how missing C++ libraries are compiled at the first call: background (the default: a process of low "
        "priority does it), now (the call waits for it) or off",
    ),
    ON_ERROR: Variable(
        _one_of(RAISE, NATIVE),
        "what a fault in variables, settings files, or files that they name does: raise (the default: each "
        "call raises the error), or native (an error is logged, the settings are left out, and torch's own "
        "kernels run; with a lockfile each call raises the error)",
    ),
    "ATTNREG_AS_FLASH_ATTN": Variable(
        _boolean,
        "whether `import flash_attn` finds attnreg's functions where flash-attn isn't installed " + SWITCH,
    ),
    "ATTNREG_TRANSFORMERS": Variable(
        _switch_or("flash_attention_2"),
        "1: transformers knows attn_implementation='attnreg'; flash_attention_2: this name runs attnreg, too",
    ),
}


# Whether no lockfile is in force in this process, whatever settings name: `attnreg lock` writes one.
ignores_lock = False


def read(environ: Mapping[str, str] = os.environ, most: int = MOST_LISTED) -> EnvironmentSettings:
    """Parse the variables; a `ConfigError` has one line for each of the first problems, `most` of them.

    It is one if a value is wrong, two contradict each other, or a name that starts with `ATTNREG_` is no
    variable of attnreg.
    """
    values: dict[str, Any] = {}
    problems: list[tuple[str, str]] = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or not (text := environ[name].strip()):
            continue
        if name not in VARIABLES:
            problems.append((name, ""))
            continue
        try:
            values[name.removeprefix(PREFIX).lower()] = VARIABLES[name].parse(text)
        except ValueError as error:
            problems.append((name, str(error)))
    environment = EnvironmentSettings(**values)
    disabled = {name.casefold() for name in environment.disable}
    problems += [
        ("ATTNREG_BACKEND and ATTNREG_DISABLE", f"both name {name}, expected it in one of them only")
        for name in environment.backend
        if name.casefold() in disabled
    ]
    if problems:
        raise ConfigError("\n".join(first_ten(problems, _text_of, most)))
    return environment


def _text_of(problem: tuple[str, str]) -> str:
    name, what = problem
    known = f"{', '.join(VARIABLES)}{'' if what else did_you_mean(name, VARIABLES)}"
    return f"{name}: {what or f'unknown variable, expected one of {known}'}"

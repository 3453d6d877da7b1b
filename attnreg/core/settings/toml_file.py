"""A TOML file, and the line of each of its keys.

`read` returns the data and its `Origin`, which has the line of each key (tomllib has none). Every error names
the file and, if it is known, the line.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnreg.errors import ConfigError

KeyPath = tuple[str | int, ...]

# The lines of so many keys below each other are known. Settings have three, and a malformed file any number.
DEEPEST = 8


@dataclass(frozen=True, slots=True)
class Origin:
    """Where settings come from: a file, or without a path a call of attnreg. Lines count from 1."""

    path: Path | None = None
    lines: Mapping[KeyPath, int] = field(default_factory=dict, repr=False, hash=False)
    call: str = "configure(...)"

    def describe(self, key: KeyPath = ()) -> str:
        """Return where a key is in short, `attnreg.toml:7`, or `configure(...)`."""
        if self.path is None:
            return self.call
        line = self.line(key)
        return f"{self.path.name}:{line}" if line else self.path.name

    def problem(self, key: KeyPath, sentence: str) -> str:
        """Return a line of an error: the full path, the line in the file, the key, and what is wrong."""
        line = self.line(key)
        place = str(self.path or self.describe()) + (f":{line}" if line else "")
        return f"{place}: {key_text(key)}: {sentence}"

    def line(self, key: KeyPath) -> int:
        """Return the line of a key, or else of the table for it; 0 if there is neither."""
        prefixes = (key[:length] for length in range(min(len(key), DEEPEST), 0, -1))
        return next((self.lines[prefix] for prefix in prefixes if prefix in self.lines), 0)


def key_text(key: KeyPath) -> str:
    """Return a key path as it is written in a file: `devices."sm_90".order[2]`."""
    text = ""
    for part in key:
        is_bare = isinstance(part, str) and re.fullmatch("[A-Za-z_-]+", part)
        shown = part if is_bare else json.dumps(part, ensure_ascii=False)
        text += f"[{part}]" if isinstance(part, int) else f".{shown}"
    return text.removeprefix(".")


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Origin]:
    """Return the data of a TOML file and the lines of its keys.

    Raises `ConfigError` if the file can't be read, isn't UTF-8 or isn't TOML.
    """
    file = Path(path)
    try:
        file = file.expanduser().absolute()
        raw = file.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        reason = _inside_sentence(getattr(error, "strerror", None) or str(error))
        raise ConfigError(f"{file}: can't be read ({reason}), expected a settings file in TOML") from error
    try:
        # Editors on Windows put a byte order mark first, which TOML itself doesn't know.
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        raise ConfigError(f"{file}:{line}: got byte 0x{byte:02x}, expected UTF-8 text") from error
    try:
        return tomllib.loads(text), Origin(file, lines_of(text))
    except RecursionError as error:
        raise ConfigError(f"{file}: got TOML that is nested too deeply, expected a settings file") from error
    except ValueError as error:
        raise ConfigError(_malformed(str(error), text, file)) from error


def _malformed(message: str, text: str, file: Path) -> str:
    parts = re.fullmatch(r"(.+) \(at (?:line (\d+), column \d+|end of document)\)", message)
    if parts is None:
        return f"{file}: not TOML that can be read: {_inside_sentence(message)}"
    reason = _inside_sentence(parts[1])
    if parts[2] is None:
        last = text.rstrip().count("\n") + 1
        return f"{file}:{last}: not TOML: {reason}, at the end"
    return f"{file}:{parts[2]}: not TOML: {reason}"


def _inside_sentence(text: str) -> str:
    return text[:1].lower() + text[1:].removesuffix(".")


# The beginning of a line with a table or a key.
_BEGINNING = re.compile(
    r"""\s*(?: \[\[? (?P<table> [^\[\]]+ ) \] | (?P<key> (?: "[^"]*" | '[^']*' | [^=\#"'\[\]] )+ ) = )""",
    re.VERBOSE,
)


def lines_of(text: str) -> dict[KeyPath, int]:
    """Return the lines of tables and keys of a text that tomllib has accepted.

    What a value consists of, elements and inline tables, has no line of its own.
    """
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.split("\n"), 1):
        begins = _BEGINNING.match(line)
        path = () if begins is None else _path_of(begins["table"] or begins["key"])
        if begins is None or not path:
            continue
        table = path if begins["table"] else table
        key = path if begins["table"] else (*table, *path)
        for length in range(1, len(key[:DEEPEST]) + 1):
            lines.setdefault(key[:length], number)
    return lines


def _path_of(key: str) -> KeyPath:
    """Return the parts of a key; none for what is no key, as in a text of several lines."""
    parts: list[str] = []
    with suppress(tomllib.TOMLDecodeError, RecursionError):
        data = tomllib.loads(f"[{key}]")
        while data:
            ((part, data),) = data.items()
            parts.append(part)
    return tuple(parts)

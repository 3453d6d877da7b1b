"""A TOML file and where it says what.

`read` returns the data and its `Origin`, which gives the place of each key. Every failure names the
file and, where it is known, the line.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnreg.errors import ConfigError
from attnreg.settings.toml_positions import NOWHERE, positions

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from attnreg.settings.toml_positions import KeyPath, Position

__all__ = ["Origin", "key_text", "read"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where settings come from: a file, or without a path a value given to `configure`."""

    path: Path | None = None
    positions: Mapping[KeyPath, Position] = field(default_factory=dict, repr=False, hash=False)

    def describe(self, key: KeyPath = ()) -> str:
        """Return the short place of a key, `attnreg.toml:7`, or `configure(...)`."""
        if self.path is None:
            return "configure(...)"
        line = self.position(key).line
        return f"{self.path.name}:{line}" if line else self.path.name

    def problem(self, key: KeyPath, sentence: str) -> str:
        """Return one line of an error: the full place, the key and what is wrong with it."""
        line, column = self.position(key)
        place = str(self.path or self.describe()) + (f":{line}:{column}" if line else "")
        return f"{place}: {key_text(key)}: {sentence}"

    def position(self, key: KeyPath) -> Position:
        """Return where a key stands, or else the table that would hold it; `(0, 0)` if nowhere."""
        prefixes = (key[:length] for length in range(len(key), 0, -1))
        return next((self.positions[prefix] for prefix in prefixes if prefix in self.positions), NOWHERE)


def key_text(key: KeyPath) -> str:
    """Return a key path as one would write it in the file: `devices."sm_90".order[2]`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{_quoted(part)}" for part in key)
    return "".join(parts).removeprefix(".")


def _quoted(part: str) -> str:
    return part if re.fullmatch("[A-Za-z_-]+", part) else json.dumps(part, ensure_ascii=False)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Origin]:
    """Return the data of a TOML file and where each key of it stands.

    Raises:
        ConfigError: the file can't be read, isn't UTF-8 or isn't TOML.
    """
    file = Path(path)
    try:
        file = file.expanduser()
        file = file.absolute()
        raw = file.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        reason = _inside_sentence(getattr(error, "strerror", None) or str(error))
        raise ConfigError(f"{file}: can't be read ({reason}), expected a settings file in TOML") from error
    text = _decoded(raw, file)
    try:
        return tomllib.loads(text), Origin(file, positions(text))
    except (ValueError, RecursionError) as error:
        raise ConfigError(_malformed(str(error), text, file)) from error


def _decoded(raw: bytes, file: Path) -> str:
    try:
        # Editors on Windows put a byte order mark first, which TOML itself doesn't know.
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode("utf-8")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        found = error.object[error.start]
        raise ConfigError(f"{file}:{line}:{column}: got byte 0x{found:02x}, expected UTF-8 text") from error


def _malformed(message: str, text: str, file: Path) -> str:
    parts = re.fullmatch(r"(.+) \(at (?:line (\d+), column (\d+)|end of document)\)", message)
    if parts is None:
        return f"{file}: not TOML that can be read: {_inside_sentence(message)}"
    reason = _inside_sentence(parts[1])
    if parts[2] is None:
        last = text.rstrip().count("\n") + 1
        return f"{file}:{last}: not TOML: {reason}, at the end"
    return f"{file}:{parts[2]}:{parts[3]}: not TOML: {reason}"


def _inside_sentence(text: str) -> str:
    return text[:1].lower() + text[1:].removesuffix(".")

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
    parts = (f"[{part}]" if isinstance(part, int) else f".{_quoted(part)}" for part in key)
    return "".join(parts).removeprefix(".")


def _quoted(part: str) -> str:
    return part if re.fullmatch("[A-Za-z_-]+", part) else json.dumps(part, ensure_ascii=False)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Origin]:
    """Return the data of a TOML file and the lines of its keys.

    Raises `ConfigError` if the file can't be read, isn't UTF-8 or isn't TOML.
    """
    if not str(path).strip():
        raise ConfigError(f"settings file: got {path!r}, expected the path of a file in TOML")
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
    parts = re.fullmatch(r"(.+) \(at (?:line (\d+), column (\d+)|end of document)\)", message)
    if parts is None:
        return f"{file}: not TOML that can be read: {_inside_sentence(message)}"
    at_end = parts[2] is None
    line, at = ("", 0) if at_end else (text.split("\n")[int(parts[2]) - 1], int(parts[3]) - 1)
    reason = _about_value(parts[1], line, at) or _inside_sentence(parts[1])
    if at_end:
        last = text.rstrip().count("\n") + 1
        return f"{file}:{last}: not TOML: {reason}, at the end"
    return f"{file}:{parts[2]}: not TOML: {reason}"


# What ends a value without quotes.
_BARE = r"[^\s,=\[\]{}#\"']"


def _about_value(message: str, line: str, at: int) -> str:
    """Return what is wrong with a value that has no quotes, or isn't there; empty for another fault.

    Args:
        message: what tomllib says.
        line: the line with the fault; empty at the end of a file.
        at: where tomllib stopped. It takes the `inf` of `info` for a number, and stops behind it.
    """
    if not re.match("Invalid value|Expected newline|Unclosed (array|inline)", message):
        return ""
    rest = line[at:]
    begun, ended = re.findall(rf"{_BARE}*$", line[:at])[0], re.findall(rf"^{_BARE}*", rest)[0]
    if not begun and message != "Invalid value":
        return ""
    if begun and not ended and _is_value(begun):
        return ""  # what is wrong comes behind it
    word = begun + ended
    if not word:
        return "got nothing, expected a value" if not rest.strip() or rest.lstrip()[0] == "#" else ""
    if word.casefold() in ("true", "false"):
        return f"got {word}, expected {word.casefold()}, in lower case" if word != word.casefold() else ""
    if re.fullmatch(r"[+-]?\d[\d_]*[eE]?", word):
        return f"got {word}, expected a value"
    plain = word.strip("\u201c\u201d\u2018\u2019`")
    quotes = "quotes" if plain == word else "straight quotes"
    quoted = f"'{plain}'" if "\\" in plain else f'"{plain}"'  # in double quotes a backslash escapes
    return f"got {word}, expected a value; a string needs {quotes}: {quoted}"


def _is_value(text: str) -> bool:
    try:
        tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return False
    return True


def _inside_sentence(text: str) -> str:
    return text[:1].lower() + text[1:].removesuffix(".")


# No alternative matches blanks, so `finditer` skips them.
_TOKEN = re.compile(
    r"""
      (?P<comment> \#[^\n]* )
    | (?P<string>
          \"{3} (?: \\. | [^\\] )*? \"{3,5}
        | '{3} .*? '{3,5}
        | \" (?: \\. | [^\"\\] )* \"
        | ' [^']* '
      )
    | (?P<mark> [\[\]{}=,.\n] )
    | (?P<word> [^\s\[\]{}=,.\"'\#]+ )
    """,
    re.VERBOSE | re.DOTALL,
)


def lines_of(text: str) -> dict[KeyPath, int]:
    """Return the line of each key and each array element of `text`, which tomllib has accepted."""
    return _Scanner(text).scan()


class _Scanner:
    """Walks over the tokens of a document, with one method for each form that TOML nests."""

    def __init__(self, text: str) -> None:
        self._lines: dict[KeyPath, int] = {}
        self._text = text
        self._line, self._offset = 1, 0  # tokens come in order: each line is counted once
        # Reversed: `pop` takes from the end.
        self._tokens = [token for token in _TOKEN.finditer(text) if token.lastgroup != "comment"][::-1]

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while self._tokens:
            if self._next() == "\n":
                self._tokens.pop()
            elif self._next() == "[":
                # [[x]] is read as [x]: no setting is an array of tables, so the error is about the first one.
                self._skip("[")
                table = self._key(())
                self._skip("]")
            else:
                self._pair(table)
        return self._lines

    def _next(self) -> str:
        return self._tokens[-1].group() if self._tokens else "\n"

    def _skip(self, *marks: str) -> None:
        while self._tokens and self._next() in marks:
            self._tokens.pop()

    def _key(self, table: KeyPath) -> KeyPath:
        while True:
            token = self._tokens.pop()
            quoted = token.lastgroup == "string"
            name = tomllib.loads(f"key = {token.group()}")["key"] if quoted else token.group()
            table = (*table, name)[:DEEPEST]
            self._note(table, token.start())
            if self._next() != ".":
                return table
            self._tokens.pop()

    def _pair(self, table: KeyPath) -> None:
        key = self._key(table)
        self._skip("=")
        self._value(key)

    def _value(self, key: KeyPath) -> None:
        closing = {"[": "]", "{": "}"}.get(self._next())
        if closing is None:
            while self._next() not in ("\n", ",", "]", "}"):
                self._tokens.pop()
            return
        self._tokens.pop()
        self._skip("\n", ",")
        index = 0
        while self._next() != closing:
            if closing == "}":
                self._pair(key)
            else:
                self._note((*key, index), self._tokens[-1].start())
                self._value((*key, index))
                index += 1
            self._skip("\n", ",")
        self._tokens.pop()

    def _note(self, key: KeyPath, offset: int) -> None:
        self._line += self._text.count("\n", self._offset, offset)
        self._offset = offset
        self._lines.setdefault(key[:DEEPEST], self._line)

"""Where each key of a TOML text stands, which tomllib doesn't tell.

`positions` follows the structure of a text that tomllib has accepted, so it checks nothing.
"""

from __future__ import annotations

import bisect
import re
import tomllib
from typing import NamedTuple

__all__ = ["NOWHERE", "KeyPath", "Position", "positions"]

KeyPath = tuple[str | int, ...]


class Position(NamedTuple):
    """A place in a text; both count from 1."""

    line: int
    column: int


NOWHERE = Position(0, 0)

# Blanks are none of these, so they are passed over.
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
    | (?P<bare> [^\s\[\]{}=,.\"'\#]+ )
    """,
    re.VERBOSE | re.DOTALL,
)


def positions(text: str) -> dict[KeyPath, Position]:
    """Return where each key and each element of an array stands in `text`, which is valid TOML."""
    scanner = _Scanner(text)
    scanner.scan()
    return scanner.found


class _Scanner:
    """Walks over the tokens of a document, one method for each form that TOML nests."""

    def __init__(self, text: str) -> None:
        self.found: dict[KeyPath, Position] = {}
        self._line_starts = [0, *(newline.end() for newline in re.finditer("\n", text))]
        # Taken from the end, so that the next token is the last one.
        self._tokens = [token for token in _TOKEN.finditer(text) if token.lastgroup != "comment"][::-1]

    def scan(self) -> None:
        table: KeyPath = ()
        while self._tokens:
            if self._next() == "\n":
                self._tokens.pop()
            elif self._next() == "[":
                table = self._header()
            else:
                self._pair(table)

    def _next(self) -> str:
        return self._tokens[-1].group() if self._tokens else "\n"

    def _skip(self, *marks: str) -> None:
        while self._tokens and self._next() in marks:
            self._tokens.pop()

    def _header(self) -> KeyPath:
        # [[x]] is taken for [x]: no setting is an array of tables, so the first of them is at fault.
        self._skip("[")
        table = self._key(())
        self._skip("]")
        return table

    def _key(self, table: KeyPath) -> KeyPath:
        while True:
            token = self._tokens.pop()
            quoted = token.lastgroup == "string"
            name = tomllib.loads(f"key = {token.group()}")["key"] if quoted else token.group()
            table = (*table, name)
            self._note(table, token.start())
            if self._next() != ".":
                return table
            self._tokens.pop()

    def _pair(self, table: KeyPath) -> None:
        key = self._key(table)
        self._skip("=")
        self._value(key)

    def _value(self, key: KeyPath) -> None:
        opening = self._next()
        if opening == "[":
            self._array(key)
        elif opening == "{":
            self._inline_table(key)
        else:
            while self._next() not in ("\n", ",", "]", "}"):
                self._tokens.pop()

    def _array(self, key: KeyPath) -> None:
        self._tokens.pop()
        self._skip("\n", ",")
        index = 0
        while self._next() != "]":
            element = (*key, index)
            self._note(element, self._tokens[-1].start())
            self._value(element)
            self._skip("\n", ",")
            index += 1
        self._tokens.pop()

    def _inline_table(self, key: KeyPath) -> None:
        self._tokens.pop()
        self._skip("\n", ",")
        while self._next() != "}":
            self._pair(key)
            self._skip("\n", ",")
        self._tokens.pop()

    def _note(self, key: KeyPath, offset: int) -> None:
        line = bisect.bisect_right(self._line_starts, offset)
        self.found.setdefault(key, Position(line, offset - self._line_starts[line - 1] + 1))

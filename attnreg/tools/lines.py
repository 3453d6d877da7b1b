"""Lines that fit a terminal, in which commands and shapes stay whole; a pipe or a file gets whole lines."""

from __future__ import annotations

import codecs
import re
import shutil
from collections.abc import Iterable, Iterator
from typing import IO, Any, TextIO

# What is never broken: commands, and shapes with their commas. Any other blank may end a line.
WHOLE = re.compile(
    r"`[^`]*`"
    r"|(?<=install it with: )[^;(]*[^;( ]"
    r"|\b(?:pip install|attnreg|python -m)(?: -[-\w]+)* [-\w./']\S*"
    r"|\([-\d, ]+\)|\([A-Z](?:, [A-Z])+\)"
)
GAP = 2
# A last column that would be narrower begins on a line of its own.
LEAST_WIDTH = 28
# The indentation and the first column of a row.
FIRST_COLUMN = re.compile(rf" *\S+ {{{GAP},}}")
# What replaces a character that the encoding of stdout lacks; "?" for all others.
IN_ASCII = {"µ": "u", "·": ".", "×": "x"}
# The name of the error handler of encodings that replaces them so.
REPLACING = "attnreg"


def counted(number: int, noun: str) -> str:
    """Return "1 row" or "2 rows"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def width_of(stream: IO[str]) -> int | None:
    """Return the columns of a terminal; None for a pipe or a file, whose lines are never wrapped."""
    try:
        is_terminal = stream.isatty()
    except (AttributeError, ValueError):  # what some programs put in the place of stdout; a closed one
        is_terminal = False
    return shutil.get_terminal_size().columns if is_terminal else None


def register_replacing() -> None:
    """Register the error handler `REPLACING`."""

    def replacement(error: Any) -> tuple[str, int]:
        return IN_ASCII.get(error.object[error.start], "?"), error.start + 1

    codecs.register_error(REPLACING, replacement)


def encodable(text: str, stream: TextIO) -> str:
    """Return a text that a stream can encode: what its encoding lacks is replaced if it would be an error."""
    try:
        text.encode(stream.encoding, stream.errors or "strict")
    except UnicodeEncodeError:
        register_replacing()
        return text.encode(stream.encoding, REPLACING).decode(stream.encoding)
    except (AttributeError, TypeError, LookupError):  # what some programs put in the place of stdout
        pass
    return text


def wrapped(text: str, width: int | None) -> list[str]:
    """Return a text as lines of at most `width` columns; a word that is longer has a line of its own."""
    if width is None or len(text) <= width:
        return [text]
    kept = WHOLE.sub(lambda match: match[0].replace(" ", "\0"), text)
    lines: list[str] = []
    for word in kept.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [line.replace("\0", " ") for line in lines]


def fitted(text: str, width: int | None) -> str:
    """Return a text of several lines, the long ones wrapped behind their indentation and first column."""
    return "\n".join(line for long in text.split("\n") for line in _continued(long, width))


def _continued(line: str, width: int | None) -> Iterator[str]:
    if width is None or len(line) <= width:
        yield line
        return
    indent = len(line) - len(line.lstrip())
    column = match.end() if (match := FIRST_COLUMN.match(line)) else indent
    if width - column - GAP < LEAST_WIDTH:
        column = indent
    first, *rest = wrapped(line[column:], max(width - column - GAP, 1))
    yield line[:column] + first
    yield from (" " * (column + GAP) + more for more in rest)


def aligned(rows: Iterable[Iterable[str]], width: int | None, *, right: int = 0) -> Iterator[list[str]]:
    """Yield lines of padded cells: the last `right` columns flush right, else the last column wrapped."""
    table = [list(row) for row in rows]
    columns = max(map(len, table), default=0)
    table = [[*row, *[""] * (columns - len(row))] for row in table]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    before = GAP + sum(size + GAP for size in widths[:-1])
    room = None if width is None or right else width - before
    # The room on a line of its own, if the last column begins there.
    below = 0
    if width is not None and room is not None and columns > 1 and room < min(LEAST_WIDTH, widths[-1]):
        below = max(width - 3 * GAP, 1)
    for row in table:
        *first, last = row
        cells = [
            cell.rjust(size) if index >= columns - right else cell.ljust(size)
            for index, (cell, size) in enumerate(zip(first, widths, strict=False))
        ]
        cells = [f"{cell}{' ' * GAP}" for cell in cells]
        if below and last:
            if any(cell.strip() for cell in cells):
                yield [" " * GAP, *cells]
            yield from ([" " * 3 * GAP, text] for text in _cell(last, below))
            continue
        head, *rest = _cell(last.rjust(widths[-1]) if right else last, room)
        yield [" " * GAP, *cells, head]
        yield from ([" " * before, text] for text in rest)


def _cell(text: str, width: int | None) -> list[str]:
    return [line for long in text.split("\n") for line in wrapped(long, width)]

"""Real text for the demo, found in every Python installation, so that nothing is downloaded.

A document is a docstring of the standard library, its licence, or a file of attnreg's. None is chosen
for its length; what exceeds the model's context is cut.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_OWN = Path(__file__).parents[1]
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def corpus(context: int) -> list[bytes]:
    """Return every document found here, each once and cut to `context` bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    found = [text for path in sorted(library.glob("*.py")) for text in _docstrings(path)]
    found += [_text(path) for path in (library / "LICENSE.txt", *_own_files())]
    cut = (text.encode()[:context] for text in found)
    return list(dict.fromkeys(text for text in cut if len(text) > 1))  # one byte has none to predict


def batches(documents: list[bytes], size: int, count: int, seed: int) -> Iterator[list[bytes]]:
    """Yield `count` batches of `size` documents, drawn at random."""
    draw = random.Random(seed)
    for _ in range(count):
        yield draw.sample(documents, size)


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(_text(path))
    except (SyntaxError, ValueError):
        return  # some distributions have templates among their modules
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield docstring


def _own_files() -> list[Path]:
    """Return attnreg's modules, and its documentation if this is a checkout."""
    root = _OWN.parent
    pages = [*root.glob("*.md"), *root.glob("docs/*.md")] if (root / "pyproject.toml").exists() else []
    return [*sorted(_OWN.rglob("*.py")), *sorted(pages)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # Debian has the licence elsewhere; an embedded Python has its modules in an archive

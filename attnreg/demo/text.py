"""Real text for the demo: what every Python installation carries, at the lengths that it has.

A document is a docstring of the standard library, its licence, or a file of attnreg's own. Nothing
is downloaded, and nothing is chosen for its length: only what exceeds the model's context is cut.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["batches", "corpus"]

_OWN = Path(__file__).parents[1]
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def corpus(context: int) -> list[bytes]:
    """Return every document that can be found here, each once and `context` bytes at most."""
    library = Path(sysconfig.get_path("stdlib"))
    found = [text for path in sorted(library.glob("*.py")) for text in _docstrings(path)]
    found += [_text(path) for path in (library / "LICENSE.txt", *_own_files())]
    cut = (text.encode()[:context] for text in found)
    return list(dict.fromkeys(text for text in cut if len(text) > 1))  # the shortest predicts one byte


def batches(documents: list[bytes], size: int, count: int, seed: int) -> Iterator[list[bytes]]:
    """Yield `count` batches of `size` documents, drawn at random, whatever their lengths."""
    draw = random.Random(seed)
    for _ in range(count):
        yield draw.sample(documents, size)


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(_text(path))
    except (SyntaxError, ValueError):
        return  # distributions ship templates and files for other Pythons among their modules
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield docstring


def _own_files() -> list[Path]:
    """Return attnreg's modules, and its pages where this is a checkout."""
    root = _OWN.parent
    pages = [*root.glob("*.md"), *root.glob("docs/*.md")] if (root / "pyproject.toml").exists() else []
    return [*sorted(_OWN.rglob("*.py")), *sorted(pages)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # Debian keeps the licence elsewhere, an embedded Python its modules in an archive

"""Real text for the demo, found in every Python installation, as batches in two layouts.

A document is a docstring of the standard library, its licence, or a file of attnreg. No document is chosen
for its length, and a document longer than the model's context is cut. A `BatchLayout` has all that a model
trains on, attention included, so the model is the same for both. Each layout is written as a user of attnreg
or of plain torch would write it.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import attnreg

_OWN = Path(__file__).parents[2]
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# The target at padding: the default `ignore_index` of `cross_entropy`.
IGNORED = -100


def corpus(context: int) -> list[bytes]:
    """Return every document found here, each once and cut to `context` bytes."""
    library, root = Path(sysconfig.get_path("stdlib")), _OWN.parent
    docstrings = [text for path in sorted(library.glob("*.py")) for text in _docstrings(path)]
    # A checkout has documentation as well.
    pages = [*root.glob("*.md"), *root.glob("docs/*.md")] if (root / "pyproject.toml").exists() else []
    files = (library / "LICENSE.txt", *sorted(_OWN.rglob("*.py")), *sorted(pages))
    cut = (text.encode()[:context] for text in (*docstrings, *map(_text, files)))
    return list(dict.fromkeys(text for text in cut if len(text) > 1))  # one byte has none to predict


def draw(documents: list[bytes], size: int, count: int, seed: int) -> Iterator[list[bytes]]:
    """Yield `count` batches of `size` documents, drawn at random."""
    generator = random.Random(seed)
    for _ in range(count):
        yield generator.sample(documents, size)


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(_text(path))
    except (SyntaxError, ValueError):
        return  # some distributions have templates among their modules
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield docstring


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # Debian has the licence elsewhere; an embedded Python has its modules in an archive


class BatchLayout(NamedTuple):
    """One batch of documents, as the model takes it."""

    tokens: Tensor  # Bytes, int64, (T,) or (B, S).
    positions: Tensor  # The index of each byte in its document, int64. Broadcasts to `tokens`.
    targets: Tensor  # The byte that follows each, int64, in the shape of `tokens`.
    # Causal attention within each document. Query, key and value are (*tokens.shape, heads, head_dim).
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]


def packed(documents: list[bytes], device: torch.device) -> BatchLayout:
    """Lay the documents end to end, (T,), and attend through `attnreg.varlen_attn`."""
    tokens, targets = (torch.cat(rows).to(device) for rows in _shifted(documents))
    lengths = [len(document) - 1 for document in documents]
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = attnreg.varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, is_causal=True)
        assert isinstance(out, torch.Tensor)
        return out

    return BatchLayout(tokens, positions, targets, attend)


def padded(documents: list[bytes], device: torch.device) -> BatchLayout:
    """Pad the documents to the longest, (B, S), and attend through `F.scaled_dot_product_attention`.

    The padding is at the end, where a causal mask hides it from all text, so `is_causal` is enough.
    """
    rows, following = _shifted(documents)
    tokens = pad_sequence(rows, batch_first=True).to(device)
    targets = pad_sequence(following, batch_first=True, padding_value=IGNORED).to(device)
    positions = torch.arange(tokens.shape[1], device=device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)

    return BatchLayout(tokens, positions, targets, attend)


def _shifted(documents: list[bytes]) -> tuple[list[Tensor], list[Tensor]]:
    """Return each document without its last byte, and without its first."""
    rows = [torch.tensor(list(document)) for document in documents]
    return [row[:-1] for row in rows], [row[1:] for row in rows]

"""What other libraries call kernels, for the suggestions of errors about an unknown name of a backend."""

from __future__ import annotations

import re
from collections.abc import Collection

from attnreg.errors import did_you_mean, nearest

# The first pattern that a name in lower case, without its punctuation, has in it.
_BACKENDS = (
    (r"(flash|fa)[a-z]*4", "FA4"),
    (r"(flash|fa)[a-z]*3", "FA3"),
    (r"flex", "flex"),
    (r"cudnn", "cuDNN"),
    (r"efficient|xformers|cutlass", "efficient"),
    (r"flash|fa2", "FA2"),
    (r"eager|math|naive|reference", "math"),
)
_OF_TORCH = frozenset({"sdpa", "torchsdpa", "torch", "pytorch", "native", "default", "auto", "none"})


def backend_meant(name: str, known: Collection[str]) -> str:
    """Return `"; did you mean 'FA2'?"` for a name of another library or a misspelt one, or an empty string.

    Only backends in `known` are suggested.
    """
    plain = re.sub(r"[^a-z0-9]", "", name[:100].casefold())
    if plain in _OF_TORCH:
        return "; did you mean PyTorch's own choice? It runs where no backend is named."
    if not nearest(name, known, likeness=0.8):  # as of an installed backend with "flash" in its name
        for pattern, backend in _BACKENDS:
            if backend in known and re.search(pattern, plain):
                return f"; did you mean {backend!r}?"
    return did_you_mean(name, known)

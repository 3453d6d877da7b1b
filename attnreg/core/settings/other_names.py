"""What people and other libraries call kernels and devices, for the suggestions of errors about names."""

from __future__ import annotations

import re
from collections.abc import Collection

from attnreg.errors import did_you_mean, nearest

# The first pattern that a name in lower case, without its punctuation, has in it.
_BACKENDS = (
    (r"flash[a-z]*4|^fa4", "FA4"),
    (r"flash[a-z]*3|^fa3", "FA3"),
    (r"flex", "flex"),
    (r"cudnn", "cuDNN"),
    (r"efficient|xformers|cutlass", "efficient"),
    (r"flash(?!mla|linear)|^fa2", "FA2"),
    (r"eager|math|naive|reference", "math"),
)
_OF_TORCH = frozenset({"sdpa", "torchsdpa", "torch", "pytorch", "native", "default", "auto", "none"})


# What people call devices, with the keys that settings have for them. A GPU's key is its compute capability.
_DEVICES = {
    **dict.fromkeys(("gpu", "nvidia", "rocm", "amd"), "cuda"),
    **dict.fromkeys(("v100", "volta"), "sm_70"),
    **dict.fromkeys(("t4", "turing"), "sm_75"),
    **dict.fromkeys(("a100", "ampere"), "sm_80"),
    **dict.fromkeys(("a10", "a10g", "a40"), "sm_86"),
    **dict.fromkeys(("l4", "l40", "l40s", "ada"), "sm_89"),
    **dict.fromkeys(("h100", "h200", "gh200", "hopper"), "sm_90"),
    **dict.fromkeys(("b200", "gb200", "blackwell"), "sm_100"),
}


def backend_meant(name: str, known: Collection[str]) -> str:
    """Return `"; did you mean 'FA2'?"` for a name of another library or a misspelt one, or an empty string.

    Only backends in `known` are suggested.
    """
    plain = re.sub(r"[^a-z0-9]", "", name[:100].casefold())
    if plain in _OF_TORCH:
        return "; did you mean PyTorch's own choice? It runs where no backend is named: leave this name out."
    if not nearest(name, known, likeness=0.8):  # as of an installed backend with "flash" in its name
        for pattern, backend in _BACKENDS:
            if backend in known and re.search(pattern, plain):
                return f"; did you mean {backend!r}?"
    return did_you_mean(name, known)


def device_meant(name: str, known: Collection[str], types: Collection[str] | None = None) -> str:
    """Return `"; did you mean 'sm_90'?"` for what else people call a device, or an empty string.

    Where only devices of some `types` will do, no other is suggested; "sm_90" is of the type "cuda".
    """
    arch = re.fullmatch(r"sm[ _-]?([1-9]\d{1,2})[af]?", name[:100].casefold())
    meant = f"sm_{arch[1]}" if arch else _DEVICES.get(name[:100].casefold())
    if meant and types is not None and ("cuda" if meant.startswith("sm_") else meant) not in types:
        return ""
    return f"; did you mean '{meant}'?" if meant else did_you_mean(name, known)

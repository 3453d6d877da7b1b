"""What is here to measure."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from attnreg import _registry
from attnreg.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["available", "need_gpu"]


def need_gpu() -> torch.device:
    """Return the GPU; ends the program with one sentence where there is none."""
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU, and torch finds none here")
    return torch.device("cuda", 0)


def available(names: Iterable[str] = ("FA2", "FA4", "cuDNN")) -> list[str]:
    """Return the backends that load here; prints why the others don't."""
    found = []
    for name in names:
        try:
            _registry.find(name).kernels()
        except BackendUnavailableError as error:
            print(f"left out: {error}")
        else:
            found.append(name)
    return found

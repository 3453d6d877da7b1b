"""Which kernel is the faster one, by measurement."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from attnreg.backends.cpu.sequences import sequences_of

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.contract.backend import Call
    from attnreg.contract.spec import AttentionSpec, Direction

__all__ = ["leaves_to_torch", "replaces_torch"]

# From these lengths, and so many rows in each of its calls, torch's bfloat16 forward gains by AMX.
_LONG, _ROWS_OF_A_CALL = 256, 1024
# Rows of a key head that aren't worth packing its keys for, and keys to a row that are many.
_FEW, _MANY = 8, 16


def leaves_to_torch(q: Tensor, k: Tensor, call: Call) -> bool:
    if q.dtype == torch.bfloat16:
        if call.max_k < _LONG or not _has_amx():
            return False
        return q.shape[:-2].numel() >= _ROWS_OF_A_CALL * len(sequences_of(q, k, call).uniform_batches)
    rows = call.max_q * q.size(-2) // k.size(-2)
    return q.dtype == torch.float32 and rows <= _FEW and call.max_k >= _MANY * rows


def replaces_torch(direction: Direction, spec: AttentionSpec) -> bool:
    return False


@functools.cache
def _has_amx() -> bool:
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def corrects_torch(direction: Direction, spec: AttentionSpec) -> bool:
    return spec.window != (-1, -1) and not spec.positive_scale

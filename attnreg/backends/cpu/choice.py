"""Decides by measured times which kernel runs a call that both can run: torch's or the compiled kernel.

`leaves_to_torch` decides about calls of the backend, `replaces_torch` about dense calls that torch's selector
has sent to torch's kernel. The numbers are from `benchmarks/cpu_sdpa.py`; README.md has its tables.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.backends.cpu.sequences import sequences_of
from attnreg.core.contract.backend import Call
from attnreg.core.contract.lengths import Cut
from attnreg.core.contract.spec import AttentionSpec, Direction
from attnreg.core.torchlib import building
from attnreg.errors import BuildError

DTYPES = ("float32", "bfloat16", "float16")
OPEN = (-1, -1)

_ANY_NUMBER = 2**62

# Torch's bfloat16 forward gains by AMX from so many keys on, and so many rows in each of its calls.
_LONG, _ROWS_OF_A_CALL = 256, 1024

# Below so many rows of a key head (of all its query heads) torch's kernel was faster, if the compiled kernel
# packs keys and values first. The first number holds where MKL is slow, the second elsewhere.
_ROWS_SLOW_MKL, _ROWS = 16, 48
# From so many keys on the compiled kernel is faster under a causal mask: it skips smaller hidden blocks.
_CAUSAL_KEYS = 128
# Up to so many keys it is faster with shared key heads: it computes their query heads as rows of one product.
_GROUP_KEYS = 128
# Up to this product of keys and head dim torch's bfloat16 forward is slower in spite of AMX: the time passes
# between its products, not in them.
_AMX_FORWARD = 8192
# Limits of the compiled kernel's own AMX products: `takes_tiles` in kernel/module.cpp. With these it was
# faster in all shapes that were measured.
_TILE_DIMS, _LARGEST_TILE_DIM, _TILE_ROWS = 32, 256, 32


class CpuMachine(NamedTuple):
    """Properties of a machine that decide which kernel is faster.

    Attributes:
        avx: whether it is x86 with AVX2 or AVX512, like the machines of the measurements.
        amx: whether torch multiplies bfloat16 by AMX.
        slow_mkl: whether torch's MKL uses half of the vector width in float32, as on AMD CPUs with AVX512.
        tiles: whether the compiled kernel may multiply bfloat16 by AMX, too. Linux grants that to a process.
        lanes: the compiled kernel's forward packs nothing up to so many rows, and from this head dim on.
            See `takes` in kernel/few_rows.h.
    """

    avx: bool
    amx: bool
    slow_mkl: bool
    tiles: bool = False
    lanes: int = 8


@functools.cache
def machine() -> CpuMachine:
    """Return the properties of this machine."""
    flags, vectors = torch.cpu.get_capabilities(), torch.backends.cpu.get_cpu_capability()
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    is_amd = str(flags.get("cpu_name", "")).startswith("AMD")
    return CpuMachine(
        avx=vectors.startswith("AVX"),
        amx=bool(flags.get("amx_bf16")),
        slow_mkl=is_amd and has_mkl and vectors.startswith("AVX512"),
        tiles=_has_tiles(),
        lanes=16 if vectors.startswith("AVX512") else 8,
    )


def _has_tiles() -> bool:
    with contextlib.suppress(BuildError, AttributeError):
        return bool(building.loaded_cpu_kernel().attnreg_has_tiles())
    return False


def _has_tile_dims(head_dim: int) -> bool:
    """Return whether the compiled kernel multiplies bfloat16 heads of this size by AMX, given enough rows."""
    return head_dim % _TILE_DIMS == 0 and head_dim <= _LARGEST_TILE_DIM and machine().tiles


class TorchsCalls(NamedTuple):
    """Limits of the bfloat16 forwards of a kind that torch's kernel may run faster.

    Attributes:
        keys: the least number of keys.
        tokens: the least number of query tokens in all.
        rows: one more than the largest number of rows of a key head.
    """

    keys: int
    tokens: int
    rows: int


def torchs_calls(q: Tensor, call: Call) -> TorchsCalls | None:
    """Return the limits of forwards of a call's kind that torch's kernel may run faster, or None.

    Torch's kernel multiplies bfloat16 by AMX also where the compiled kernel multiplies in float32. The gain
    depends on the batch, so batch-invariant calls ignore it. `q` is (B, S, H, D) or (T, H, D).
    """
    if call.batch_invariant or q.dtype != torch.bfloat16 or not machine().amx:
        return None
    keys, head_dim = max(_LONG, _AMX_FORWARD // q.size(-1) + 1), q.size(-1)
    return TorchsCalls(keys, _ROWS_OF_A_CALL, _TILE_ROWS if _has_tile_dims(head_dim) else _ANY_NUMBER)


def leaves_to_torch(q: Tensor, k: Tensor, call: Call) -> bool:
    """Return whether torch's kernel runs a forward that the compiled kernel could run, too.

    `q` and `k` are (B, S, H, D), or packed (T, H, D).
    """
    limits = torchs_calls(q, call)
    if limits is None or call.max_k < limits.keys or call.max_q * q.size(-2) // k.size(-2) >= limits.rows:
        return False
    return q.shape[:-2].numel() >= limits.tokens * len(sequences_of(q, k, call).uniform_batches)


def replaces_torch(direction: Direction, spec: AttentionSpec) -> bool:
    """Return whether the compiled kernel replaces torch's kernel in a dense SDPA call."""
    return corrects_torch(direction, spec) or _is_faster(direction, spec, machine())


def corrects_torch(direction: Direction, spec: AttentionSpec) -> bool:
    """Return whether torch's kernel computes a dense SDPA call wrongly: see README.md."""
    if direction == "backward" and spec.dtype in ("float16", "bfloat16"):
        return True  # it adds up blocks of rows, and query heads, in the dtype of the query
    if spec.bias and spec.dtype == "float64":
        return True  # SDPA accepts a float32 mask, which the kernel reads as float64
    # A causal mask of one query hides all keys but the first: its spec has a single key and no mask.
    return not spec.positive_scale and (spec.window != OPEN or spec.max_q == spec.max_k == 1)


def cuts(spec: AttentionSpec) -> Iterator[Cut]:
    """Yield the lengths of a dense call at which the result of `replaces_torch` may change."""
    if spec.varlen:
        return
    if not spec.positive_scale:
        yield from (Cut.of(length, at=at) for length in ("max_q", "max_k") for at in (1, 2))
    here = machine()
    if not _is_known(spec, here):
        return
    group = spec.heads_q // spec.heads_k
    for rows in (here.lanes + 1, _least_rows(here)):
        yield Cut(((group, ("max_q",)),), rows)
    yield Cut(((spec.heads_k, ("batch",)),), torch.get_num_threads())
    for keys in (_CAUSAL_KEYS, _GROUP_KEYS + 1, _AMX_FORWARD // spec.head_dim + 1):
        yield Cut.of("max_k", at=keys)


def _is_known(spec: AttentionSpec, machine: CpuMachine) -> bool:
    """Return whether the two kernels were compared on calls of this spec."""
    return machine.avx and spec.dtype in DTYPES and not (spec.bias or spec.varlen or spec.dropout)


def _least_rows(machine: CpuMachine) -> int:
    return _ROWS_SLOW_MKL if machine.slow_mkl else _ROWS


def _is_faster(direction: Direction, spec: AttentionSpec, machine: CpuMachine) -> bool:
    """Return whether the compiled kernel is faster; not for 16-bit backwards, which it always runs."""
    group = spec.heads_q // spec.heads_k
    if not _is_known(spec, machine):
        return False
    rows = spec.max_q * group
    if direction == "forward" and _is_faster_without_packing(spec, rows, machine):
        return True
    if rows < _least_rows(machine):
        return False
    if machine.slow_mkl:
        return True
    is_causal = spec.window != OPEN and spec.max_k >= _CAUSAL_KEYS
    if spec.dtype == "float32":
        # Without a gradient: see `_is_faster_without_packing`.
        shares = group > 1 and spec.max_k <= _GROUP_KEYS and not spec.needs_backward
        return is_causal or (direction == "forward" and shares)
    if spec.dtype == "float16" or not machine.amx or spec.max_k * spec.head_dim <= _AMX_FORWARD:
        return True
    return _has_tile_dims(max(spec.head_dim, spec.head_dim_v))  # rows and keys suffice for tiles


def _is_faster_without_packing(spec: AttentionSpec, rows: int, machine: CpuMachine) -> bool:
    """Return whether a forward has so few rows that the compiled kernel packs nothing."""
    if not rows <= machine.lanes <= min(spec.head_dim, spec.head_dim_v):
        return False
    # The compiled kernel has a task for each sequence and key head, torch's kernel for each query head.
    if spec.batch * spec.heads_k < torch.get_num_threads():
        return False
    if spec.dtype == "float32":
        # Torch's backward needs the LSE of torch's forward. With scores of 50 or more and another kernel's
        # LSE its weights were 5 times as far off, because the rounding of the scores no longer cancels.
        return not spec.needs_backward
    return spec.dtype == "float16" or not machine.amx  # AMX wasn't measured

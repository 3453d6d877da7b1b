"""The rows of attention alone: packed training steps, decoding, dense SDPA."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from attnreg import api
from attnreg.core.dispatch import call_cache
from attnreg.flash_attn import flash_attn_func, flash_attn_with_kvcache
from attnreg.tools.bench.compare import Batch
from attnreg.tools.bench.fresh.turns import NEW, SAME, FreshRow, Stream, Way
from attnreg.tools.bench.report import Job
from attnreg.tools.bench.shapes import BOTH, FORWARD, decode, dense, packed
from attnreg.tools.bench.sides import Front, by_default, results, settings, torch_alone
from attnreg.tools.measure import Case
from attnreg.tools.measure.sample import Verdict

OURS, LED, IN_PYTHON = "attnreg", "attnreg, ", "attnreg, Python"
PACKAGE = "flash-attn-4's own"
VARLEN, SDPA, KVCACHE, DENSE = "varlen_attn", "SDPA", "flash_attn_with_kvcache", "flash_attn_func"
# The functions that take (B, S, H, D).
IN_FLASH_LAYOUT = KVCACHE, DENSE

SEQUENCES = 8
# Keys that a cache of `flash_attn_with_kvcache` has room for.
ROOM = 2048
# How many keys a cache holds, by device: one more in each call of all sides, then again the first number.
# On a CPU the time of a call of many keys would be the kernel's, and the host's work would not show.
HELD = {"cuda": range(600, 2000), "cpu": range(8, 72)}
# A batch whose numbers have come before is drawn anew so often; then all have come, and all may come again.
ATTEMPTS = 200

# What is called for a batch.
FrontOf = Callable[[Batch], Front]


@dataclass(frozen=True)
class Setting:
    """The calls of some rows: their part, what they go through, and an endless supply of shapes."""

    part: str
    front: str
    case: str
    shapes: Callable[[], Iterator[Case]]
    steps: tuple[str, ...] = (BOTH, FORWARD)


def packed_shapes(longest: int, *rest: Any) -> Iterator[Case]:
    """Yield packed causal batches; none has both the tokens and the longest length of one before.

    Where there are lengths enough each eighth of them has a sequence: batches then take about as long.
    """
    draw, part = random.Random(longest), longest // SEQUENCES
    before: set[tuple[int, int]] = set()
    parts = [(1, longest)] * SEQUENCES
    if part >= SEQUENCES:
        parts = [(number * part + 1, (number + 1) * part) for number in range(SEQUENCES)]
    while True:
        for _ in range(ATTEMPTS):
            lengths = [draw.randint(*bounds) for bounds in draw.sample(parts, SEQUENCES)]
            if (size := (sum(lengths), max(lengths))) not in before:
                break
        else:
            before.clear()
        before.add(size)
        yield packed(lengths, *rest)


def growing(held: range, heads: tuple[int, int], dim: int, dtype: str, varlen: bool) -> Iterator[Case]:
    """Yield single queries over a cache that grows by a key at each call, until it begins anew."""
    for keys in itertools.cycle(held):
        yield decode(SEQUENCES, 1, keys, *heads, dim, dtype, varlen)


def dense_shapes(sizes: list[tuple[int, int]], *rest: Any) -> Iterator[Case]:
    """Yield all of some batch sizes with lengths, in an order of chance."""
    draw = random.Random(0)
    while True:
        yield from (dense(*size, *rest) for size in draw.sample(sizes, len(sizes)))


def settings_of(device: str) -> list[Setting]:
    """Return what is measured on a kind of device; a CPU's calls are so small that the host's work shows."""
    gpu = device == "cuda"
    dtype = "bfloat16" if gpu else "float32"
    longest = ((256, 8, 64), (4096, 16, 128)) if gpu else ((15, 2, 16),)
    wanted = [
        Setting(
            "varlen", VARLEN, f"packed, {SEQUENCES} of up to {length} tokens, {heads} heads of {dim}, causal",
            functools.partial(packed_shapes, length, heads, heads, dim, True, dtype),
        )
        for length, heads, dim in longest
    ]  # fmt: skip
    held, (heads, dim) = HELD[device], ((32, 8), 128) if gpu else ((2, 2), 16)
    wanted += [
        Setting(
            "decode", front, f"decoding, {front}, {SEQUENCES} sequences, "
            f"heads {heads[0]}:{heads[1]} of {dim}, {held[0]} keys and more",
            functools.partial(growing, held, heads, dim, dtype, front == VARLEN), (FORWARD,),
        )
        for front in (SDPA, KVCACHE, VARLEN)
    ]  # fmt: skip
    sizes = [(2, length) for length in range(100, 1001)]
    if not gpu:
        sizes = list(itertools.product(range(1, 17), range(2, 41)))
    count, dim = (8, 64) if gpu else (2, 16)
    named = "2" if gpu else "1 to 16"
    case = f"batch {named}, {sizes[0][1]} to {sizes[-1][1]} tokens, {count} heads of {dim}"
    shapes = functools.partial(dense_shapes, sizes, count, count, dim, False, dtype)
    wanted += [Setting("dense", front, f"dense {front}, {case}", shapes) for front in (SDPA, DENSE)]
    return wanted


def rows(job: Job) -> list[FreshRow]:
    """Return the rows of the job's parts; of each part the first rows where that is enough."""
    wanted = [setting for setting in settings_of(job.device.type) if job.wants(setting.part)]
    if job.quick:
        wanted = list({setting.part: setting for setting in reversed(wanted)}.values())[::-1]
    return [_row(setting, step, job) for setting in wanted for step in setting.steps]


def _row(setting: Setting, step: str, job: Job) -> FreshRow:
    # The batches that the repeating stream drops aren't missing from the new ones.
    draw_same, draw_new = (_drawing(setting.shapes(), job) for _ in range(2))
    cache = _Cache() if setting.front == KVCACHE else None
    return FreshRow(
        setting.part, setting.case, step, _sides(setting, step, job, cache),
        {SAME: Stream(draw_same, repeats=True), NEW: Stream(draw_new)},
        functools.partial(_verdict, setting.front), _touch if cache is None else cache.touch,
        f"torch's {setting.front}",
    )  # fmt: skip


def _drawing(shapes: Iterator[Case], job: Job) -> Callable[[], Batch]:
    return lambda: Batch(next(shapes), job.device)


def _verdict(front: str, batch: Batch, results: list[Tensor]) -> Verdict:
    return batch.verdict(results, batch.sets if front in IN_FLASH_LAYOUT else batch.front_sets)


def _touch(batch: Batch) -> None:
    """Read the tensors of a batch."""
    for x in batch.sets[0]:
        x.detach().sum()


def _sides(setting: Setting, step: str, job: Job, kvcache: _Cache | None) -> dict[str, Way]:
    """Return what is compared: torch's function, the package's own, attnreg by choice, and each backend."""
    front, gpu = setting.front, job.device.type == "cuda"
    ours: FrontOf = (
        kvcache.front if kvcache is not None
        else functools.partial(_flash, flash_attn_func) if front == DENSE
        else lambda batch: batch.with_attnreg
    )  # fmt: skip
    chosen = functools.partial(settings, "measured", job.table, job.backends) if front == SDPA else by_default
    ways: dict[str, tuple[FrontOf, Any, str]] = {}
    if front == SDPA or (front == VARLEN and gpu):  # there is no kernel for torch's on a CPU
        ways[f"torch's {front}"] = (lambda batch: batch.with_torch), torch_alone, ""
    if front in (VARLEN, DENSE) and "FA4" in job.backends:
        ways[PACKAGE] = functools.partial(_of_the_package, front), torch_alone, ""
    ways[OURS] = ours, chosen, ""
    if not gpu and call_cache.load() is not None:
        ways[IN_PYTHON] = ours, functools.partial(_in_python, chosen), ""
    for name in job.backends:
        ways[LED + name] = ours, functools.partial(api.use_backend, name), name
    sets = "sets" if front in IN_FLASH_LAYOUT else "front_sets"
    return {
        name: Way(
            functools.partial(_prepared, call, sets, step),
            within if step == BOTH else functools.partial(_without_gradient, within), wanted,
        )
        for name, (call, within, wanted) in ways.items()
    }  # fmt: skip


def _prepared(front_of: FrontOf, sets: str, step: str, batch: Batch) -> Callable[[], list[Tensor]]:
    front, tensors = front_of(batch), getattr(batch, sets)[0]
    if step == BOTH:
        return lambda: results(front, tensors)
    inputs = tensors.inputs()
    return lambda: [front(*inputs)]


def _of_the_package(front: str, batch: Batch) -> Front:
    """Return the function of flash-attn-4, which attnreg's FA4 calls kernels of, that is like a front."""
    package = import_module("flash_attn.cute.interface")
    if front == DENSE:
        return _flash(package.flash_attn_func, batch)
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    offsets = dict(zip(names, batch.offsets, strict=True))
    return _flash(functools.partial(package.flash_attn_varlen_func, **offsets), batch)


def _flash(function: Callable[..., Any], batch: Batch) -> Front:
    """Return a function of flash-attn's arguments as one of query, key and value."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        results = function(q, k, v, causal=batch.case.is_causal)
        out: Tensor = results[0] if isinstance(results, tuple) else results
        return out

    return run


class _Cache:
    """Keys and values as decoding keeps them: one memory for all calls, longer than what it holds."""

    _kept: tuple[Tensor, Tensor, Tensor] | None = None

    def front(self, batch: Batch) -> Front:
        """Return a function that adds the last key and value of the batch to those before, and attends."""
        keys, values = (x.detach() for x in batch.sets[0].inputs()[1:])
        key_cache, value_cache, lengths = self._memory(keys)
        held = keys.shape[1] - 1
        key_cache[:, :held], value_cache[:, :held] = keys[:, :held], values[:, :held]
        lengths.fill_(held)
        new = keys[:, held:], values[:, held:]
        return lambda q, k, v: flash_attn_with_kvcache(q, key_cache, value_cache, *new, cache_seqlens=lengths)

    def touch(self, batch: Batch) -> None:
        """Read the query of a batch, and as many keys and values of the memory as it has keys."""
        batch.sets[0].q.detach().sum()
        for x in self._memory(batch.sets[0].k)[:2]:
            x[:, : batch.case.max_k].sum()

    def _memory(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self._kept is None:
            keys, values = (like.new_zeros(len(like), ROOM, *like.shape[2:]) for _ in "kv")
            self._kept = keys, values, torch.zeros(len(like), dtype=torch.int32, device=like.device)
        return self._kept


@contextlib.contextmanager
def _in_python(within: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    with within(), call_cache.paused():
        yield


@contextlib.contextmanager
def _without_gradient(within: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    with within(), torch.no_grad():
        yield

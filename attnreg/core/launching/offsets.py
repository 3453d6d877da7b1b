"""Values derived from offsets of packed sequences, or from a mask, kept for as long as these exist unchanged.

The layers of a model share their offsets, so a backend derives each value once per batch, not once per layer.

The host doesn't know the values of a CUDA tensor; `facts` starts an async read-back and doesn't wait. Until
it has arrived no property is assumed, and backends zero rows that may belong to no sequence. During
the capture of a CUDA graph nothing is cached: a replay has to read the values that the offsets have then.

Torch counts its own writes to a tensor, but not writes of a collective, of `x.data.copy_()`, of a kernel of
the user's or of a graph's replay. So what is used for longer than `TRUSTED` is derived once more, and the
device compares the two. Once it has reported that they differ a call is an error, or the end of the process
logs one: some calls before may have used the old values.

Kernels load whole tiles. A tile that ends beyond its sequence also loads the rows after it, at a weight of
zero, and zero times NaN is NaN. So for some kernels rows that no query may see (`find_unused`) have to be
finite, whatever the caller has left there.
"""

from __future__ import annotations

import atexit
import logging
import operator
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, Protocol, Self, TypeVar

import torch
from torch import Tensor

from attnreg.core.contract.backend import Call
from attnreg.core.launching.rows import facts as compute_facts
from attnreg.core.torchlib.layout import needs_graph_memory, stream_of
from attnreg.core.torchlib.locks import open_after_fork
from attnreg.core.torchlib.readback import AsyncReadback
from attnreg.errors import InvalidInputError

# Entries for the offsets in use: of self and cross attention, in a few micro-batches, for each purpose.
_MOST_CACHED = 64

# For how many seconds what was derived is used before the device compares it. That call is planned anew and
# takes the host 0.4 to 0.7 ms in place of 20 us (H200; `benchmarks/ablation.py`).
# The call cache asks as often.
TRUSTED = 0.05

CHANGED = (
    "offsets of packed sequences were written to in a way that torch doesn't count (a collective, `.data`, a "
    "kernel of your own, a graph's replay), and calls since then may have used the old ones: after such a "
    "write call torch.autograd.graph.increment_version(offsets), or write to a new tensor"
)

log = logging.getLogger("attnreg")


class Derived(Protocol):
    """What is derived from tensors."""

    def differs(self, newer: Self) -> Tensor:
        """Return on the device whether calls that used this were wrong, if the tensors give `newer`."""


T = TypeVar("T", bound=Derived)


@dataclass(slots=True, eq=False)
class _Kept:
    """What was derived, of which tensors and how; when it was last compared, and the comparison under way.

    `said` returns the error where they differ; empty if no call has used the value.
    """

    tensors: tuple[weakref.ref[Tensor] | None, ...]
    storages: object  # ids and addresses are reused once a storage has gone
    make: Callable[..., Any]
    value: Any
    said: Callable[[Any], str]
    compared: float
    comparison: AsyncReadback | None = None

    def live_tensors(self) -> list[Tensor | None]:
        return [None if ref is None else ref() for ref in self.tensors]

    def changed(self) -> Tensor:
        """Return on the device whether calls that used the value were wrong."""
        return self.value.differs(self.make(*self.live_tensors()))  # type: ignore[no-any-return]


_lock = open_after_fork(threading.RLock())
# Keys: the stream (other streams don't wait for a value derived on it), the purpose, the tensors' states.
_cache: dict[tuple[object, ...], _Kept] = {}

# Called before the error is raised, to forget what else is known of offsets.
on_changed: list[Callable[[], object]] = []


def _say_changed(_: object) -> str:
    return CHANGED


def _seen(tensors: Sequence[Tensor | None]) -> list[tuple[int, int, int] | None]:
    # The address, too: `x.data = y` changes that alone.
    return [None if x is None else (id(x), x._version, x.data_ptr()) for x in tensors]


def _ids(source: tuple[Any, ...]) -> list[int | None]:
    return [None if state is None else state[0] for state in source[2:]]


def derived_from(
    tensors: tuple[Tensor | None, ...],
    stream: int,
    purpose: tuple[object, ...],
    make: Callable[..., T],
    used: T | None = None,
    said: Callable[[T], str] = _say_changed,
    is_compared: bool = True,
) -> T:
    """Return `make(*tensors)`, cached per purpose until the tensors change.

    Tensors are offsets, int32 (B + 1,), and `seqused_k`, int32 (B,), or a boolean mask. `stream` is the CUDA
    stream that the result is computed on, 0 on a CPU. `make` must not refer to a tensor. `used` was derived
    elsewhere, and calls have used it for `TRUSTED` seconds. If nothing is cached, it is cached, and compared
    at once. Without `is_compared` writes that torch doesn't count aren't looked for. `said` returns the error
    of such a write from what was derived before. If it is empty, the value is derived anew.

    Raises:
        InvalidInputError: they have changed in a way that torch doesn't count, and were used meanwhile. The
            message is by `said`.
    """
    present = [x for x in tensors if x is not None]
    if needs_graph_memory(present[0]):
        return make(*tensors)
    try:
        source = stream, purpose, *_seen(tensors)
    except RuntimeError:
        return make(*tensors)  # an inference tensor has no version counter
    cached = _cache.get(source)
    if cached is not None and all(map(operator.is_, cached.live_tensors(), tensors)):
        is_due = cached.comparison is not None or time.monotonic() - cached.compared > TRUSTED
        if not (is_compared and is_due) or _still_holds(cached):
            return cached.value  # type: ignore[no-any-return]
    storages, now = [x.untyped_storage() for x in present], time.monotonic()
    made = make(*tensors) if used is None else used
    with _lock:
        for old in [x for x in _sources() if x[:2] == source[:2] and _ids(x) == _ids(source)]:
            _cache.pop(old, None)  # what the tensors were before they were written to
        for oldest in _sources()[: max(len(_cache) + 1 - _MOST_CACHED, 0)]:
            _cache.pop(oldest, None)
        alive = [None if x is None else weakref.ref(x, lambda _: _cache.pop(source, None)) for x in tensors]
        kept = _cache[source] = _Kept(tuple(alive), storages, make, made, said, now)
    if used is not None:
        kept.compared, kept.comparison = now, AsyncReadback(kept.changed())
    return made


def _sources() -> list[tuple[object, ...]]:
    """Return the cache's keys, oldest first. A tensor that is collected meanwhile removes its own."""
    while True:
        with suppress(RuntimeError):  # "dictionary changed size during iteration"
            return list(_cache)


def _still_holds(kept: _Kept) -> bool:
    """Whether no change was found: see what came of the comparison, and begin the next when it is time."""
    comparison = kept.comparison  # read once: another thread may clear it meanwhile
    if comparison is not None:
        numbers = comparison.read()
        if numbers is None:
            return True
        if numbers[0]:
            if said := kept.said(kept.value):
                raise_changed(said)
            return False  # the comparison stays: another thread may ask before the value is derived anew
        kept.comparison = None
    if time.monotonic() - kept.compared > TRUSTED:
        kept.compared, kept.comparison = time.monotonic(), AsyncReadback(kept.changed())
    return True


def raise_changed(said: str = CHANGED) -> NoReturn:
    """Raise the error of tensors that were written to without a trace, after all has forgotten them."""
    _cache.clear()
    for forget in on_changed:
        forget()
    raise InvalidInputError(said)


@atexit.register
def _say_at_exit() -> None:
    """Say at the end of the process what no call came to say any more; waits for nothing."""
    with suppress(Exception):
        for kept in list(_cache.values()):
            numbers = None if kept.comparison is None else kept.comparison.read()
            if numbers is not None and numbers[0] and (said := kept.said(kept.value)):
                return log.error(said)


class Facts:
    """Properties of a packed batch, computed on the device; False until their read-back has arrived."""

    def __init__(self, launch: Callable[[Tensor], Tensor] | None = None) -> None:
        """Compute the properties; they stay unknown without a function.

        Args:
            launch: writes the two properties to pinned memory, (2,) uint8, and returns them on the device.
        """
        self._properties: Any = None
        self._readback = None if launch is None else AsyncReadback(partial(self._compute, launch))
        self._no_unused_rows = self._every_row_sees_a_key = self._leaves_rows_out = False

    def differs(self, newer: Facts) -> Tensor:
        """Return on the device whether a property isn't true any more."""
        return (self._properties > newer._properties).any()  # type: ignore[no-any-return]

    def _compute(self, launch: Callable[[Tensor], Tensor], place: Tensor) -> None:
        self._properties = launch(place)

    @property
    def no_unused_rows(self) -> bool:
        """Whether every row belongs to a sequence, and each sequence has both queries and keys or neither."""
        self._read()
        return self._no_unused_rows

    @property
    def leaves_rows_out(self) -> bool:
        """Whether a row belongs to no sequence, or a sequence has queries alone or keys alone."""
        self._read()
        return self._leaves_rows_out

    @property
    def every_row_sees_a_key(self) -> bool:
        """Whether also no sequence has fewer keys than queries: a causal mask leaves each row a key."""
        self._read()
        return self._every_row_sees_a_key

    def _read(self) -> None:
        readback = self._readback  # read once: another thread may reset it
        if readback is not None and (numbers := readback.read()) is not None:
            self._no_unused_rows, self._every_row_sees_a_key = map(bool, numbers)
            self._leaves_rows_out = not self._no_unused_rows
            self._readback = None


_UNKNOWN = Facts()


def facts(call: Call, tokens_q: int, tokens_k: int, stream: int) -> Facts:
    """Return the known properties of a packed call's sequences."""
    cu_seqlens_q, cu_seqlens_k = call.cu_seqlens_q, call.cu_seqlens_k
    shortened = call.seqused_k is not None or call.block_table is not None
    if cu_seqlens_q is None or cu_seqlens_k is None or shortened:
        return _UNKNOWN
    return facts_of(cu_seqlens_q, cu_seqlens_k, tokens_q, tokens_k, stream)


def facts_of(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, tokens_q: int, tokens_k: int, stream: int) -> Facts:
    """Return the known properties of the sequences of two offsets, int32 (B + 1,), without `seqused_k`.

    `stream` is the CUDA stream of the call.
    """
    pair, tokens = (cu_seqlens_q, cu_seqlens_k), (tokens_q, tokens_k)
    if cu_seqlens_q.is_cpu or needs_graph_memory(cu_seqlens_q) or any(x.is_inference() for x in pair):
        return _UNKNOWN  # nothing is cached for these, so no later call would see the read-back
    return derived_from(
        pair, stream, ("facts", *tokens), lambda q, k: Facts(partial(compute_facts, q, k, *tokens))
    )


def every_row_sees_a_key(query: Tensor, key: Tensor, call: Call) -> bool:
    """Whether each row of a call is known to see a key, whatever the bias: no LSE is infinite then.

    Each row of a packed call has to belong to a sequence, none with fewer keys than queries. On a CPU offsets
    are read; on a GPU it is known once the device has answered, and of other devices never.

    Query and key are (B, S, H, D) or packed (T, H, D), in any dtype. With `seqused_k`, pages or `key_ranges`
    the result is False, as it is with a `score_mod` or `mask_mod`, which may hide keys.
    """
    hiding = call.seqused_k, call.block_table, call.key_ranges, call.score_mod, call.mask_mod
    if any(x is not None for x in hiding):
        return False
    if call.cu_seqlens_q is None:
        return call.max_k > 0 and (call.max_q <= call.max_k or call.window == (-1, -1))
    if call.cu_seqlens_k is None or not query.is_cpu:
        return query.is_cuda and facts(call, len(query), len(key), stream_of(query)).every_row_sees_a_key
    queries, keys = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    lengths = zip(pairwise(queries), pairwise(keys), strict=False)
    filled = (queries[0], queries[-1], keys[0], keys[-1]) == (0, len(query), 0, len(key))
    return filled and all(0 <= q1 - q0 <= k1 - k0 for (q0, q1), (k0, k1) in lengths)


def none_unused(query: Tensor, key: Tensor, call: Call) -> bool:
    """Whether every row is known to belong to a sequence and to count.

    Query and key are (B, S, H, D) or packed (T, H, D), in any dtype.
    """
    if call.cu_seqlens_q is None:
        return call.seqused_k is None
    return facts(call, len(query), len(key), stream_of(query) if query.is_cuda else 0).no_unused_rows


class Unused(NamedTuple):
    """Masks of the query rows and key rows that no sequence counts; None if there can't be any."""

    queries: Tensor | None
    keys: Tensor | None

    def differs(self, newer: Unused) -> Tensor:
        """Return on the device whether a row counts now that didn't, or the other way round."""
        pairs = [(a, b) for a, b in zip(self, newer, strict=True) if a is not None and b is not None]
        return torch.cat([(a != b).flatten() for a, b in pairs]).any()


def find_unused(query: Tensor, key: Tensor, call: Call) -> Unused:
    """Return which query rows and key rows no sequence counts.

    Query and key are (B, S, H, D) or packed (T, H, D), in any dtype. The masks are bool, (T_q,) of queries
    and (T_k,) of keys. Of a dense call with `seqused_k` the mask of keys is (B, S_k).
    """
    tensors, paged = (call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k), call.block_table is not None
    if call.cu_seqlens_q is None and (call.seqused_k is None or paged):
        return Unused(None, None)
    stream, rows_q, rows_k = stream_of(query) if query.is_cuda else 0, query.shape[:-2], key.shape[:-2]
    make = partial(_find, rows_q[0], rows_k, paged)
    return derived_from(tensors, stream, ("unused rows", paged, rows_q, rows_k), make)


def zeroed(rows: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return copies of the tensors with zeros in the rows of a mask; the tensors themselves if it is None.

    It copies each tensor, because only the GPU knows where a packed batch ends. A mask (T,) goes with tensors
    (T, H, D) in any floating-point dtype, one (B, S) with tensors (B, S, H, D).
    """
    if rows is None:
        return tensors
    return tuple(tensor.masked_fill(rows[..., None, None], 0.0) for tensor in tensors)


def _find(
    tokens_q: int,
    rows_k: torch.Size,
    paged: bool,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    used: Tensor | None,
) -> Unused:
    queries = None if cu_seqlens_q is None else _arange(tokens_q, cu_seqlens_q) >= cu_seqlens_q[-1]
    if paged:
        return Unused(queries, None)
    if cu_seqlens_k is None:
        return Unused(queries, None if used is None else _arange(rows_k[1], used) >= used[:, None])
    if used is None:
        return Unused(queries, _arange(rows_k[0], cu_seqlens_k) >= cu_seqlens_k[-1])
    rows = _arange(rows_k[0], cu_seqlens_k)
    # A further end, 0, after the sequences' ends: no row past the last offset counts.
    ends = torch.cat((cu_seqlens_k[:-1] + used, cu_seqlens_k.new_zeros(1)))
    return Unused(queries, rows >= ends[torch.searchsorted(cu_seqlens_k[1:].contiguous(), rows, right=True)])


def is_empty(query: Tensor, key: Tensor, call: Call) -> bool:
    """Whether a call has no score to compute; kernels refuse some of these calls.

    Query and key are (B, S, H, D) or packed (T, H, D), in any dtype; the key may be pages.
    """
    sequences = 1 if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1
    return not (query.numel() and key.numel() and sequences and call.max_q and call.max_k)


def empty_results(query: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return output and LSE of rows that see no key: zeros and -inf.

    Args:
        query: (B, S_q, H, D) or packed (T_q, H, D).
        value: (..., D_v).
        call: says whether the call is packed.

    Returns:
        The output (B, S_q, H, D_v) or (T_q, H, D_v), in the query's dtype, and the LSE in float32, (B, H,
        S_q) or (H, T_q).
    """
    *rows, heads, _ = query.shape
    shape = (heads, *rows) if call.varlen else (rows[0], heads, rows[1])
    out = query.new_zeros((*rows, heads, value.shape[-1]))
    return out, query.new_full(shape, -torch.inf, dtype=torch.float32)


def _arange(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=like.dtype, device=like.device)

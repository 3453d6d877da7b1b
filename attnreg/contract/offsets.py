"""Values derived from the offsets of packed sequences, cached for as long as the offsets exist unchanged.

The layers of a model share their offsets, so a backend derives each value once per batch, not once per layer.

The host doesn't know the values of a CUDA tensor; `facts` starts an async read-back and doesn't wait. Until
it has arrived no property is assumed to hold, and backends zero rows that may belong to no sequence. During
the capture of a CUDA graph nothing is cached: a replay has to read the values that the offsets have then.

Kernels load whole tiles. A tile that ends beyond its sequence also loads the rows after it, at a weight of
zero, and zero times NaN is NaN. So for some kernels rows that no query may see (`find_unused`) have to be
finite, whatever the caller has left there.
"""

from __future__ import annotations

import operator
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from attnreg.contract.backend import Call
from attnreg.torchlib.layout import stream_of
from attnreg.torchlib.locks import open_after_fork
from attnreg.torchlib.readback import AsyncReadback

# Entries for the offsets in use: those of a model's self and cross attention, in a few micro-batches, times
# the number of purposes.
_MOST_CACHED = 64

GRAPH_TREES = "torch._inductor.cudagraph_trees"

T = TypeVar("T")


_lock = open_after_fork(threading.Lock())
# Keys: stream (another one doesn't wait for a value derived on this one), purpose, and of each tensor its id,
# its version and its address, as `x.data = y` changes that alone. Values: references to the tensors and their
# storages, because ids and addresses are reused, and the derived value.
_cache: dict[tuple[object, ...], tuple[tuple[weakref.ref[Tensor], ...], object, object]] = {}


def derived_from(tensors: list[Tensor], stream: int, purpose: tuple[object, ...], make: Callable[[], T]) -> T:
    """Return what `make` derives from offsets and `seqused_k`, cached per purpose until they change."""
    if tensors and needs_graph_memory(tensors[0]):
        return make()
    try:
        source = (stream, purpose, *[(id(x), x._version, x.data_ptr()) for x in tensors])
    except RuntimeError:
        return make()  # an inference tensor has no version counter
    found = _cache.get(source)
    if found is not None and all(map(operator.is_, [ref() for ref in found[0]], tensors)):
        return found[1]  # type: ignore[return-value]
    storages = [x.untyped_storage() for x in tensors]
    made = make()
    with _lock:
        while len(_cache) >= _MOST_CACHED:
            _cache.pop(next(iter(_cache), ()), None)
        alive = tuple(weakref.ref(x, lambda _: _cache.pop(source, None)) for x in tensors)
        _cache[source] = alive, made, storages
    return made


class Facts:
    """Properties of a packed batch, computed on the device; False until their read-back has arrived."""

    def __init__(self, readback: AsyncReadback | None = None) -> None:
        self._readback = readback
        self._no_unused_rows = self._every_row_sees_a_key = False

    @property
    def no_unused_rows(self) -> bool:
        """Whether every row belongs to a sequence, and each sequence has both queries and keys or neither."""
        self._read()
        return self._no_unused_rows

    @property
    def every_row_sees_a_key(self) -> bool:
        """Whether also no sequence has fewer keys than queries: a causal mask leaves each row a key."""
        self._read()
        return self._every_row_sees_a_key

    def _read(self) -> None:
        readback = self._readback  # read once: another thread may reset it
        if readback is not None and (numbers := readback.read()) is not None:
            self._no_unused_rows, self._every_row_sees_a_key = map(bool, numbers)
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
    """Return the known properties of the sequences of two offsets, without `seqused_k`."""
    if (
        cu_seqlens_q.is_cpu
        or needs_graph_memory(cu_seqlens_q)
        or cu_seqlens_q.is_inference()
        or cu_seqlens_k.is_inference()
    ):
        return _UNKNOWN  # nothing is cached for these, so no later call would see the read-back
    given = cu_seqlens_q, cu_seqlens_k, tokens_q, tokens_k
    purpose = ("facts", tokens_q, tokens_k)
    return derived_from([*given[:2]], stream, purpose, lambda: Facts(AsyncReadback(_properties(*given))))


def _properties(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, tokens_q: int, tokens_k: int) -> Tensor:
    """Return both properties as a tensor on the device; one number if they are equal."""
    queries = cu_seqlens_q.diff()
    filled = (cu_seqlens_q[0] == 0) & (cu_seqlens_q[-1] == tokens_q) & (queries >= 0).all()
    if cu_seqlens_k is cu_seqlens_q:
        return filled & (tokens_q == tokens_k)
    keys = cu_seqlens_k.diff()
    filled &= (cu_seqlens_k[0] == 0) & (cu_seqlens_k[-1] == tokens_k) & (keys >= 0).all()
    no_unused = filled & ((queries > 0) == (keys > 0)).all()
    return torch.stack((no_unused, no_unused & (keys >= queries).all()))


def find_unused(query: Tensor, key: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Return masks of the query rows and key rows that no sequence counts; None if there can't be any."""
    if call.cu_seqlens_q is None and call.seqused_k is None:
        return None, None
    tensors = [x for x in (call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k) if x is not None]
    stream = stream_of(query) if query.is_cuda else 0
    purpose = ("unused rows", call.block_table is None, query.shape[:-2], key.shape[:-2])
    return derived_from(tensors, stream, purpose, lambda: _find(query, key, call))


def _find(query: Tensor, key: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
    cu_seqlens_q, cu_seqlens_k, used = call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k
    queries = None if cu_seqlens_q is None else _past(query.shape[0], cu_seqlens_q)
    if call.block_table is not None:
        return queries, None
    if cu_seqlens_k is None:
        return queries, None if used is None else _arange(key.shape[1], used) >= used[:, None]
    if used is None:
        return queries, _past(key.shape[0], cu_seqlens_k)
    rows = _arange(key.shape[0], cu_seqlens_k)
    # One end more than there are sequences: that of the rows past the last, of which none counts.
    ends = torch.cat((cu_seqlens_k[:-1] + used, cu_seqlens_k.new_zeros(1)))
    return queries, rows >= ends[torch.searchsorted(cu_seqlens_k[1:].contiguous(), rows, right=True)]


def empty_results(query: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return output and LSE of rows that see no key."""
    *rows, heads, _ = query.shape
    shape = (heads, *rows) if call.varlen else (rows[0], heads, rows[1])
    out = query.new_zeros((*rows, heads, value.shape[-1]))
    return out, query.new_full(shape, -torch.inf, dtype=torch.float32)


def _past(tokens: int, offsets: Tensor) -> Tensor:
    return _arange(tokens, offsets) >= offsets[-1]


def _arange(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=like.dtype, device=like.device)


def needs_graph_memory(offsets: Tensor) -> bool:
    """Whether a CUDA graph is being captured, or new tensors may be in a graph's memory pool.

    Inductor's CUDA-graph trees run a function once in the graph's pool before they capture it, and check
    that no tensor is left there afterwards.
    """
    if GRAPH_TREES in sys.modules:
        return True
    return offsets.is_cuda and torch.cuda.is_current_stream_capturing()

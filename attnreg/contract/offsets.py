"""What is derived from the offsets of packed sequences, kept for as long as they exist unchanged.

The layers of a model share their offsets, so whatever a backend derives from them, it derives once.
A CUDA tensor's values aren't at hand on the host; `facts` asks the device and doesn't wait: until
the answer is there, nothing is taken for granted, and rows that may belong to no sequence cost what
they cost. While a CUDA graph is captured nothing is kept: a replay reads what the offsets hold then.
"""

from __future__ import annotations

import operator
import sys
import threading
import weakref
from typing import TYPE_CHECKING, TypeVar

import torch

from attnreg.torchlib.locks import open_after_fork
from attnreg.torchlib.readback import AsyncReadback

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnreg.contract.backend import Call

__all__ = ["GRAPH_TREES", "Facts", "derived", "derived_from", "facts", "facts_of", "of_a_graph"]

# Offsets in use at a time: of a model's self and cross attention, in a few micro-batches, for each of
# the purposes that something is derived for.
_KEPT = 64

GRAPH_TREES = "torch._inductor.cudagraph_trees"

T = TypeVar("T")


_lock = open_after_fork(threading.Lock())
# By stream, as another one doesn't wait for what this one derives; by identity and version of the
# tensors; and by purpose. Then what they were, as identities come back, and what was derived.
_kept: dict[tuple[object, ...], tuple[tuple[weakref.ref[Tensor], ...], object]] = {}


def derived(call: Call, stream: int, purpose: tuple[object, ...], make: Callable[[], T]) -> T:
    """Return what `make` derives from a call's offsets for a purpose, made anew only if they changed."""
    tensors = [x for x in (call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k) if x is not None]
    return derived_from(tensors, stream, purpose, make)


def derived_from(tensors: list[Tensor], stream: int, purpose: tuple[object, ...], make: Callable[[], T]) -> T:
    """Return the same for these offsets, and how many keys count if that is told."""
    if tensors and of_a_graph(tensors[0]):
        return make()
    try:
        source = (stream, purpose, *[(id(x), x._version) for x in tensors])
    except RuntimeError:
        return make()  # an inference tensor: its changes leave no trace
    found = _kept.get(source)
    if found is not None and all(map(operator.is_, [ref() for ref in found[0]], tensors)):
        return found[1]  # type: ignore[return-value]
    made = make()
    with _lock:
        while len(_kept) >= _KEPT:
            _kept.pop(next(iter(_kept), ()), None)
        _kept[source] = tuple(weakref.ref(x, lambda _: _kept.pop(source, None)) for x in tensors), made
    return made


class Facts:
    """What the device has said about a packed batch; nothing holds before it has."""

    def __init__(self, answer: AsyncReadback | None = None) -> None:
        self._answer = answer
        self._no_unused_rows = self._every_row_sees_a_key = False

    @property
    def no_unused_rows(self) -> bool:
        """Whether every row belongs to a sequence, and each sequence has both queries and keys or neither."""
        self._read()
        return self._no_unused_rows

    @property
    def every_row_sees_a_key(self) -> bool:
        """Whether, beside that, no sequence has fewer keys than queries, so that no mask blinds a row."""
        self._read()
        return self._every_row_sees_a_key

    def _read(self) -> None:
        answer = self._answer  # once: another thread may hear it meanwhile
        if answer is not None and (numbers := answer.read()) is not None:
            self._no_unused_rows, self._every_row_sees_a_key = map(bool, numbers)
            self._answer = None


_UNKNOWN = Facts()


def facts(call: Call, tokens_q: int, tokens_k: int, stream: int) -> Facts:
    """Return what is known of a packed call's sequences by now."""
    cu_seqlens_q, cu_seqlens_k = call.cu_seqlens_q, call.cu_seqlens_k
    if (
        cu_seqlens_q is None
        or cu_seqlens_k is None
        or call.seqused_k is not None
        or call.block_table is not None
    ):
        return _UNKNOWN
    return facts_of(cu_seqlens_q, cu_seqlens_k, tokens_q, tokens_k, stream)


def facts_of(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, tokens_q: int, tokens_k: int, stream: int) -> Facts:
    """Return what is known by now of the sequences that two offsets describe, all of whose keys count."""
    if (
        cu_seqlens_q.is_cpu
        or of_a_graph(cu_seqlens_q)
        or cu_seqlens_q.is_inference()
        or cu_seqlens_k.is_inference()
    ):
        return _UNKNOWN  # nothing is kept of those, so that the answer would come too late
    purpose = ("facts", tokens_q, tokens_k)

    def ask() -> Facts:
        return Facts(AsyncReadback(_said(cu_seqlens_q, cu_seqlens_k, tokens_q, tokens_k)))

    return derived_from([cu_seqlens_q, cu_seqlens_k], stream, purpose, ask)


def _said(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, tokens_q: int, tokens_k: int) -> Tensor:
    """Return both facts on the device, as one number where they are the same."""
    queries = cu_seqlens_q.diff()
    filled = (cu_seqlens_q[0] == 0) & (cu_seqlens_q[-1] == tokens_q) & (queries >= 0).all()
    if cu_seqlens_k is cu_seqlens_q:
        return filled & (tokens_q == tokens_k)
    keys = cu_seqlens_k.diff()
    filled &= (cu_seqlens_k[0] == 0) & (cu_seqlens_k[-1] == tokens_k) & (keys >= 0).all()
    no_unused = filled & ((queries > 0) == (keys > 0)).all()
    return torch.stack((no_unused, no_unused & (keys >= queries).all()))


def of_a_graph(offsets: Tensor) -> bool:
    """Whether a CUDA graph is captured, or what is allocated may have to go with one.

    Inductor's CUDA-graph trees run a function once in a graph's memory before they capture it, and
    count what is left there afterwards.
    """
    if GRAPH_TREES in sys.modules:
        return True
    return offsets.is_cuda and torch.cuda.is_current_stream_capturing()

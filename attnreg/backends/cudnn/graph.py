"""Describing a problem to cuDNN, and having it planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attnreg.backends.cudnn.addresses import by_address
from attnreg.backends.cudnn.problem import Slot, Start
from attnreg.errors import UnsupportedInputError

if TYPE_CHECKING:
    from types import ModuleType

    from attnreg.backends.cudnn.addresses import ByAddress
    from attnreg.backends.cudnn.problem import Problem, Strides

__all__ = ["Graph", "build"]

_OF_KEYS = frozenset({Slot.K, Slot.V, Slot.GRAD_K, Slot.GRAD_V})
# One thread plans at a time.
_kinds: dict[tuple[Slot | Start, ...], int] = {}
# The uid of a tensor's beginnings is its own and this.
_STARTS = 100


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Graph:
    """A built plan: `run.execute(buffers, workspace, handle=..., tensor_uids=uids)` runs it.

    Attributes:
        run: cuDNN's graph.
        workspace: bytes that a run needs.
        tensors: what the first buffers are, ascending.
        vectors: what the others are: lengths and beginnings of packed sequences.
        kind: a number of just these vectors; looked up faster than they are.
        uids: cuDNN's numbers of all of them.
        by_address: how to run it on their addresses; None if the frontend doesn't tell.
    """

    run: Any
    workspace: int
    tensors: tuple[Slot, ...]
    vectors: tuple[Slot | Start, ...]
    kind: int
    uids: tuple[int, ...]
    by_address: ByAddress | None = None


def build(cudnn: ModuleType, problem: Problem, handle: Any) -> Graph:
    """Describe a problem to cuDNN and have it planned.

    Raises:
        UnsupportedInputError: cuDNN has no kernel for it; says what cuDNN says.
    """
    try:
        return _Description(cudnn, problem, handle).build()
    except cudnn.cudnnGraphNotSupportedError as error:
        raise UnsupportedInputError(
            f"cuDNN has no {problem.direction} plan for this call: {error}"
        ) from error


class _Description:
    """A graph while it is being described."""

    def __init__(self, cudnn: ModuleType, problem: Problem, handle: Any) -> None:
        types = cudnn.data_type
        self._cudnn = cudnn
        self._problem = problem
        self._handle = handle
        self._dtype = {torch.float16: types.HALF, torch.bfloat16: types.BFLOAT16}[problem.dtype]
        self._graph = cudnn.pygraph(
            handle=handle,
            io_data_type=self._dtype,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
        )
        self._tensors: dict[int, Slot] = {}
        self._vectors: dict[int, Slot | Start] = {}

    def build(self) -> Graph:
        """Return the planned graph."""
        if self._problem.direction == "forward":
            self._forward()
        else:
            self._backward()
        graph, modes = self._graph, self._cudnn.heur_mode
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        graph.check_support()
        graph.build_plans()
        tensors, vectors = dict(sorted(self._tensors.items())), tuple(self._vectors.values())
        uids = (*tensors, *self._vectors)
        return Graph(
            graph, graph.get_workspace_size(), tuple(tensors.values()), vectors,
            _kinds.setdefault(vectors, len(_kinds)), uids, by_address(graph, uids, self._handle),
        )  # fmt: skip

    def _forward(self) -> None:
        problem = self._problem
        out, stats = self._graph.sdpa(
            **self._inputs(), **self._options(), generate_stats=True, name="forward"
        )
        out_strides = _contiguous(problem, problem.max_q, problem.heads_q, problem.head_dim_v)
        self._result(out, Slot.OUT, (problem.heads_q, problem.max_q, problem.head_dim_v), out_strides)
        self._result(stats, Slot.STATS, (problem.heads_q, problem.max_q, 1), self._stats_strides())
        stats.set_data_type(self._cudnn.data_type.FLOAT)

    def _backward(self) -> None:
        problem = self._problem
        rows = (problem.heads_q, problem.max_q, problem.head_dim_v)
        operands = {
            **self._inputs(),
            "o": self._tensor(Slot.OUT, rows, problem.strides_out),
            "dO": self._tensor(Slot.GRAD_OUT, rows, problem.strides_grad_out),
            "stats": self._tensor(
                Slot.STATS,
                (problem.heads_q, problem.max_q, 1),
                self._stats_strides(),
                self._cudnn.data_type.FLOAT,
            ),
        }
        totals = {"max_total_seq_len_q": problem.tokens_q, "max_total_seq_len_kv": problem.tokens_k}
        grads = self._graph.sdpa_backward(
            **operands, **self._options(), **(totals if problem.packed else {}), name="backward"
        )
        keys = (problem.heads_k, problem.max_k)
        shapes = {
            Slot.GRAD_Q: (problem.heads_q, problem.max_q, problem.head_dim),
            Slot.GRAD_K: (*keys, problem.head_dim),
            Slot.GRAD_V: (*keys, problem.head_dim_v),
        }
        for grad, (slot, (heads, length, size)) in zip(grads, shapes.items(), strict=True):
            self._result(grad, slot, (heads, length, size), _contiguous(problem, length, heads, size))

    def _inputs(self) -> dict[str, Any]:
        problem = self._problem
        query = (problem.heads_q, problem.max_q, problem.head_dim)
        key = (problem.heads_k, problem.max_k, problem.head_dim)
        value = (problem.heads_k, problem.max_k, problem.head_dim_v)
        return {
            "q": self._tensor(Slot.Q, query, problem.strides_q),
            "k": self._tensor(Slot.K, key, problem.strides_k),
            "v": self._tensor(Slot.V, value, problem.strides_v),
        }

    def _options(self) -> dict[str, Any]:
        left, right = self._problem.window
        options: dict[str, Any] = {"attn_scale": self._problem.scale}
        if self._problem.packed:
            options["use_padding_mask"] = True
            for option, slot in (("seq_len_q", Slot.ROWS), ("seq_len_kv", Slot.KEYS)):
                dtype = self._cudnn.data_type.INT32
                options[option] = self._vector(slot, int(slot), self._problem.batch, dtype)
        if left >= 0 or right >= 0:
            alignments = self._cudnn.diagonal_alignment
            square = self._problem.square
            options["diagonal_alignment"] = alignments.TOP_LEFT if square else alignments.BOTTOM_RIGHT
        if left >= 0:
            options["diagonal_band_left_bound"] = left + 1  # cuDNN counts the diagonal itself
        if right >= 0:
            options["diagonal_band_right_bound"] = right
        return options

    def _stats_strides(self) -> Strides:
        """Strides of the LSE: of packed tensors with the token first, (T, H), or in order, (H, T)."""
        heads, rows = self._problem.heads_q, self._problem.max_q
        if self._problem.packed:
            return (0, self._problem.tokens_q, 1) if self._problem.own else (0, 1, heads)
        return heads * rows, rows, 1

    def _tensor(self, slot: Slot, shape: tuple[int, int, int], strides: Strides, dtype: Any = None) -> Any:
        tensor = self._graph.tensor(
            name=slot.name,
            uid=int(slot),
            dim=[self._problem.batch, *shape],
            stride=_with_batch(strides, shape[1]),
            data_type=dtype or self._dtype,
        )
        self._place(tensor, slot, strides)
        return tensor

    def _result(self, tensor: Any, slot: Slot, shape: tuple[int, int, int], strides: Strides) -> None:
        tensor.set_output(True).set_uid(int(slot)).set_data_type(self._dtype)
        tensor.set_dim([self._problem.batch, *shape]).set_stride(_with_batch(strides, shape[1]))
        self._place(tensor, slot, strides)

    def _place(self, tensor: Any, slot: Slot, strides: Strides) -> None:
        self._tensors[int(slot)] = slot
        if self._problem.packed:
            start, dtype = Start(slot in _OF_KEYS, strides[2]), self._cudnn.data_type.INT64
            tensor.set_ragged_offset(self._vector(start, _STARTS + int(slot), self._problem.batch + 1, dtype))

    def _vector(self, operand: Slot | Start, uid: int, count: int, dtype: Any) -> Any:
        self._vectors[uid] = operand
        shape = {"dim": [count, 1, 1, 1], "stride": [1, 1, 1, 1]}
        return self._graph.tensor(name=f"vector {uid}", uid=uid, data_type=dtype, **shape)


def _contiguous(problem: Problem, length: int, heads: int, size: int) -> Strides:
    return 0 if problem.packed else length * heads * size, size, heads * size


def _with_batch(strides: Strides, length: int) -> list[int]:
    """Return strides with the head dim's; cuDNN wants one for the batch even where it reads offsets."""
    batch, head, token = strides
    return [batch or length * token, head, token, 1]

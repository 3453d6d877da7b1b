"""Builds an execution plan: describes a problem to cuDNN as a graph, and finds out how to run the result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from attnreg.backends.cudnn.problem import (
    GIVEN,
    OF_KEYS,
    OF_VALUES,
    Problem,
    RaggedOffset,
    Slot,
    strides_of_scores,
)
from attnreg.core.launching.launchers import Prepared
from attnreg.errors import BackendUnavailableError, UnsupportedInputError, is_of_device

# Needs no lock, because one thread builds at a time.
_lengths_keys: dict[tuple[Slot | RaggedOffset, ...], int] = {}
# The uid of a ragged offset is its tensor's uid plus this number.
_RAGGED = 100
# The begin of the docstring of the frontend's function on addresses, in 1.32.
_ON_ADDRESSES = "(self, user_ptrs_array: int, n_user: int, workspace: int, handle: int, plan_index: int"

log = logging.getLogger("attnreg")


@dataclass(slots=True, eq=False, weakref_slot=True)
class ExecutionPlan:
    """A built graph: `graph.execute(buffers, workspace, handle=..., tensor_uids=uids)` runs it.

    Attributes:
        graph: the frontend's graph.
        workspace: the bytes that a run needs.
        tensors: the first buffers, by ascending uid.
        lengths: the other buffers: lengths and ragged offsets of packed sequences.
        lengths_key: a number that execution plans with equal `lengths` share. It is a faster key than
            `lengths`.
        uids: cuDNN's numbers of all buffers, ascending.
        run_on_addresses: a function of three numbers. The first is the address of the buffers' addresses (by
            ascending uid), the second the address of the workspace, the third a handle's `backend_handle`.
            None if this release of the frontend has no such function.
        prepared: how the execution plan is launched on addresses, for any call.
    """

    graph: Any
    workspace: int
    tensors: tuple[Slot, ...]
    lengths: tuple[Slot | RaggedOffset, ...]
    lengths_key: int
    uids: tuple[int, ...]
    run_on_addresses: Callable[[int, int, int], None] | None
    prepared: Prepared | None = None


def build(cudnn: ModuleType, problem: Problem, handle: Any) -> ExecutionPlan:
    """Describe a problem to cuDNN and build the execution plan.

    Raises:
        UnsupportedInputError: cuDNN has no kernel for the problem; with cuDNN's reason.
        BackendUnavailableError: the build failed for another reason than an error of the device.
    """
    try:
        return _Description(cudnn, problem, handle).build()
    except Exception as error:
        if is_of_device(error):
            raise  # out of memory, for example: the next attempt may succeed, so this must not be remembered
        if isinstance(error, cudnn.cudnnGraphNotSupportedError):
            reason = f"cuDNN has no {problem.kind.direction} execution plan for this call: {error}"
            raise UnsupportedInputError(reason) from error
        reason = f"building a {problem.kind.direction} execution plan failed: {type(error).__name__}: {error}"
        raise BackendUnavailableError(reason) from error


class _Description:
    """A graph while it is being described."""

    def __init__(self, cudnn: ModuleType, problem: Problem, handle: Any) -> None:
        types = cudnn.data_type
        self._cudnn = cudnn
        self._problem = problem
        self._handle = handle
        self._dtype = {torch.float16: types.HALF, torch.bfloat16: types.BFLOAT16}[problem.kind.dtype]
        # Without a handle a graph would always run on stream 0.
        self._graph = cudnn.pygraph(
            handle=handle,
            io_data_type=self._dtype,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
        )
        self._tensors: dict[int, Slot] = {}
        self._lengths: dict[int, Slot | RaggedOffset] = {}

    def build(self) -> ExecutionPlan:
        """Return the execution plan."""
        if self._problem.kind.direction == "forward":
            self._forward()
        else:
            self._backward()
        graph, modes = self._graph, self._cudnn.heur_mode
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        graph.check_support()
        graph.build_plans()
        tensors, vectors = dict(sorted(self._tensors.items())), dict(sorted(self._lengths.items()))
        uids, lengths = (*tensors, *vectors), tuple(vectors.values())
        lengths_key = _lengths_keys.setdefault(lengths, len(_lengths_keys))
        return ExecutionPlan(
            graph, graph.get_workspace_size(), tuple(tensors.values()), lengths, lengths_key, uids,
            _on_addresses(graph, uids, self._handle),
        )  # fmt: skip

    def _forward(self) -> None:
        inputs = self._inputs(q=Slot.Q, k=Slot.K, v=Slot.V, **self._bias())
        out, stats = self._graph.sdpa(**inputs, **self._options(), generate_stats=True, name="forward")
        self._result(out, Slot.OUT)
        self._result(stats, Slot.STATS)

    def _backward(self) -> None:
        problem = self._problem
        of_results = {"o": Slot.OUT, "dO": Slot.GRAD_OUT, "stats": Slot.STATS}
        inputs = self._inputs(q=Slot.Q, k=Slot.K, v=Slot.V, **of_results, **self._bias())
        if problem.kind.bias_gradient:
            inputs |= self._inputs(dBias=Slot.GRAD_BIAS)
        if problem.kind.deterministic:
            inputs["use_deterministic_algorithm"] = True
        # Without these totals the workspace would have room for a batch of longest sequences.
        totals = {"max_total_seq_len_q": problem.tokens_q, "max_total_seq_len_kv": problem.tokens_k}
        grads = self._graph.sdpa_backward(
            **inputs, **self._options(), **(totals if problem.kind.packed else {}), name="backward"
        )
        for grad, slot in zip(grads, (Slot.GRAD_Q, Slot.GRAD_K, Slot.GRAD_V), strict=True):
            self._result(grad, slot)

    def _bias(self) -> dict[str, Slot]:
        return {"bias": Slot.BIAS} if self._problem.kind.bias else {}

    def _options(self) -> dict[str, Any]:
        left, right = self._problem.kind.window
        options: dict[str, Any] = {"attn_scale": self._problem.kind.scale}
        if self._problem.kind.dropout:
            options["dropout"] = self._problem.kind.dropout, *map(self._word, (Slot.SEED, Slot.OFFSET))
        if self._problem.kind.packed:
            options["use_padding_mask"] = True
            for option, slot in (("seq_len_q", Slot.SEQ_LEN_Q), ("seq_len_kv", Slot.SEQ_LEN_K)):
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

    def _inputs(self, **slots: Slot) -> dict[str, Any]:
        """Return a new tensor of the graph for each slot, by the frontend's keyword."""
        inputs = {}
        for keyword, slot in slots.items():
            dims, strides, dtype = self._layout(slot)
            inputs[keyword] = self._graph.tensor(
                name=slot.name, uid=int(slot), dim=dims, stride=strides, data_type=dtype
            )
            self._add(inputs[keyword], slot, strides)
        return inputs

    def _result(self, tensor: Any, slot: Slot) -> None:
        dims, strides, dtype = self._layout(slot)
        tensor.set_output(True).set_uid(int(slot)).set_data_type(dtype)
        tensor.set_dim(dims).set_stride(strides)
        self._add(tensor, slot, strides)

    def _layout(self, slot: Slot) -> tuple[list[int], list[int], Any]:
        """Return dims and strides of a tensor, as (batch, head, token, head dim), and its dtype."""
        problem, float32 = self._problem, self._cudnn.data_type.FLOAT
        if slot in (Slot.BIAS, Slot.GRAD_BIAS):
            scores = problem.batch, problem.kind.heads_q, problem.max_q, problem.max_k
            of_scores = problem.bias if slot is Slot.BIAS else strides_of_scores(scores)
            return [*scores], [*of_scores], self._dtype
        kind, of_keys = problem.kind, slot in OF_KEYS
        heads, length = (kind.heads_k, problem.max_k) if of_keys else (kind.heads_q, problem.max_q)
        size = 1 if slot is Slot.STATS else kind.head_dim_v if slot in OF_VALUES else kind.head_dim
        batch, head, token = _strides(problem, slot, heads, length, size)
        dims = [problem.batch, heads, length, size]
        # cuDNN requires a stride of the batch even where it reads ragged offsets.
        strides = [batch or length * token, head, token, 1]
        return dims, strides, float32 if slot is Slot.STATS else self._dtype

    def _add(self, tensor: Any, slot: Slot, strides: list[int]) -> None:
        """Add a tensor to the execution plan, with a ragged offset if it is packed."""
        self._tensors[int(slot)] = slot
        if self._problem.kind.packed:
            offset, dtype = RaggedOffset(slot in OF_KEYS, strides[2]), self._cudnn.data_type.INT64
            vector = self._vector(offset, _RAGGED + int(slot), self._problem.batch + 1, dtype)
            tensor.set_ragged_offset(vector)

    def _word(self, slot: Slot) -> Any:
        """Return a new tensor of the graph with a single number."""
        self._tensors[int(slot)] = slot
        layout = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1], "data_type": self._cudnn.data_type.INT64}
        return self._graph.tensor(name=slot.name, uid=int(slot), **layout)

    def _vector(self, operand: Slot | RaggedOffset, uid: int, count: int, dtype: Any) -> Any:
        self._lengths[uid] = operand
        shape = {"dim": [count, 1, 1, 1], "stride": [1, 1, 1, 1]}
        return self._graph.tensor(name=f"vector {uid}", uid=uid, data_type=dtype, **shape)


def _strides(problem: Problem, slot: Slot, heads: int, length: int, size: int) -> tuple[int, int, int]:
    """Return the strides of (batch, head, token): the call's for its tensors, contiguous for results."""
    packed = problem.kind.packed
    if slot is Slot.STATS:  # the LSE
        if packed:
            return (0, 1, heads) if problem.token_first else (0, problem.tokens_q, 1)
        return heads * length, length, 1
    strides_of = dict(zip(GIVEN[problem.kind.direction], problem.strides, strict=False))
    if slot not in strides_of:
        return 0 if packed else length * heads * size, size, heads * size
    *batch, token, head, _ = strides_of[slot]
    return batch[0] if batch else 0, head, token


def _on_addresses(graph: Any, uids: Sequence[int], handle: Any) -> Callable[[int, int, int], None] | None:
    """Return `ExecutionPlan.run_on_addresses` of a built graph; None if this release differs from 1.32.

    The frontend's `execute` inspects each tensor, which costs the host as much as cuDNN's launch. The
    functions that it calls are private. If a release has changed them, execution plans are run by `execute`.
    """
    try:
        if graph.selected_engine is not None:
            return None  # an engine of the frontend's, written in Python
        lowered, index = graph._lowered_graph, graph.plans[graph._plan_index].cpp_index
        execute = lowered._execute_with_raw_ptrs
        if _ON_ADDRESSES not in execute.__doc__ or not isinstance(handle.backend_handle, int):
            raise TypeError(f"the signature of _execute_with_raw_ptrs has changed: {execute.__doc__}")
        lowered._prepare_variant_pack_template()
        expected = lowered._get_variant_pack_uids_sorted()
    except Exception as error:  # noqa: BLE001 - `execute` runs the plan as well
        log.debug("this execution plan isn't run on addresses: %s: %s", type(error).__name__, error)
        return None
    if list(uids) != list(expected):
        log.debug("this execution plan isn't run on addresses: it reads %s, expected %s", expected, uids)
        return None
    count, index = len(uids), -1 if index is None else index

    def run(addresses: int, workspace: int, handle: int) -> None:
        execute(addresses, count, workspace, handle, index)

    return run

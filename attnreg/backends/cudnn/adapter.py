"""The two directions of a call, in the contract's layout, and launchers for further calls of a kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.backends.cudnn import rounding
from attnreg.backends.cudnn.execution_plans import ExecutionPlans
from attnreg.backends.cudnn.lengths import inputs_of
from attnreg.backends.cudnn.problem import (
    GIVEN,
    STEP,
    PlanKind,
    Problem,
    Slot,
    Strides,
    kind_of,
    problem_of,
    strides_of_scores,
)
from attnreg.core.contract.backend import Call
from attnreg.core.contract.spec import Direction
from attnreg.core.launching import rows
from attnreg.core.launching.launchers import LSE, AddressLauncher, Launcher, Prepared
from attnreg.core.launching.offsets import empty_results, is_empty
from attnreg.core.torchlib.layout import aligned, readable, stream_of, with_strides
from attnreg.errors import InvalidInputError, UnsupportedInputError


def forward(
    plans: ExecutionPlans, query: Tensor, key: Tensor, value: Tensor, call: Call
) -> tuple[Tensor, Tensor]:
    """Return the output, in the query's dtype, and the LSE in float32, (B, H, S) or (H, T).

    Query and key are (B, S, H, D) or packed (T, H, D), the value has D_v; float16 or bfloat16 on a GPU.

    Raises:
        UnsupportedInputError: cuDNN has no kernel, or a CUDA graph is captured and no execution plan exists.
        BackendUnavailableError: building the execution plan failed.
    """
    if is_empty(query, key, call):
        return empty_results(query, value, call)
    tensors = query, key, value
    out, lse = _run_forward(plans, kind_of("forward", tensors, call), tensors, call)
    # A hook on saved tensors may pass the LSE to any backend, and torch's kernel ignores its strides.
    return out, lse.contiguous()


def backward(
    plans: ExecutionPlans,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, in their shapes and dtype, then the bias's if wanted.

    `grad_out` and `out` are like a forward's output, `lse` like its LSE. Raises as `forward` does.
    """
    if is_empty(query, key, call):
        inputs = query, key, value, call.attn_bias if call.bias_gradient else None
        return tuple(x.new_zeros(x.shape) for x in inputs if x is not None)
    tensors = grad_out, query, key, value, out, lse
    return _run_backward(plans, kind_of("backward", tensors, call), tensors, call)


def _run_forward(
    plans: ExecutionPlans, kind: PlanKind, tensors: Sequence[Tensor], call: Call, all_written: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the output, and the LSE with cuDNN's strides, which may have the token first.

    Args:
        all_written: whether cuDNN is known to write every row of the results.
    """
    bias = _readable_bias(tensors[0], tensors[1], call)
    problem, (query, key, value) = _select(plans, kind, tensors, call, *bias)
    *batch, count, heads, _ = query.shape
    out, size = query.new_empty((*query.shape[:-1], value.shape[-1])), (*batch, heads, count)
    lse = query.new_empty_strided(size, problem.lse_strides(size), dtype=torch.float32)
    if call.seqused_k is not None:
        out.zero_()
        lse.fill_(-torch.inf)
    _run(plans, problem, (query, key, value, out, lse, *bias, *_random_state(call)), call)
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None and not all_written:
        rows.clear_forward(out, lse, call.cu_seqlens_q, call.cu_seqlens_k, call.window)
    return out, lse


def _run_backward(
    plans: ExecutionPlans, kind: PlanKind, tensors: Sequence[Tensor], call: Call, all_written: bool = False
) -> tuple[Tensor, ...]:
    """Return the gradients; see `_run_forward`."""
    grad_out, query, key, value, out, lse = tensors
    inputs = query, key, value
    # cuDNN 9.19 writes a wrong gradient of packed queries that aren't contiguous.
    query = _laid_out(query, kind.contiguous(Slot.Q)) if kind.packed else query
    bias = _readable_bias(query, key, call)
    if bias and bias[0].stride(2) == 0 and (queries := query.shape[1]) > 1:
        # cuDNN 9.19 computes wrong gradients with such a bias, even of the value.
        raise UnsupportedInputError(
            f"attn_bias must have a row for each query in a backward, got one row for {queries} queries"
        )
    problem, read = _select(plans, kind, (grad_out, query, key, value, out), call, *bias)
    # The weights of a row without a key are 0 with this LSE, whatever cuDNN has for a score there.
    lse = torch.where(lse == -torch.inf, torch.inf, lse) if bias else lse
    lse = with_strides(lse, problem.lse_strides(tuple(lse.shape)))
    shortened = call.seqused_k is not None
    grad_q, grad_k, grad_v = (x.new_zeros(x.shape) if shortened else x.new_empty(x.shape) for x in inputs)
    of_bias = [x.new_empty(x.shape) for x in bias] if kind.bias_gradient else []
    further = *bias, *of_bias, *_random_state(call)
    _run(plans, problem, (*read[1:], lse, read[0], grad_q, grad_k, grad_v, *further), call)
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None and not (all_written or shortened):
        rows.clear_backward(grad_q, grad_k, grad_v, call.cu_seqlens_q, call.cu_seqlens_k)
    return grad_q, grad_k, grad_v, *(_gradient_of_bias(x, call) for x in of_bias)


def _readable_bias(query: Tensor, key: Tensor, call: Call) -> list[Tensor]:
    """Return the bias as execution plans read it: (B, H, S_q, S_k), in the query's dtype; empty without one.

    A dimension in which it is broadcast has stride 0. The last dimension has stride 1, the others have
    strides of whole sixteen bytes: else the bias is copied.
    """
    bias, size = call.attn_bias, (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    if bias is None:
        return []
    if bias.dtype == torch.bool:
        bias = query.new_zeros(()).masked_fill(~bias, -torch.inf)
    if bias.dtype != query.dtype:
        raise UnsupportedInputError(f"attn_bias must be boolean or {query.dtype}, got {bias.dtype}")
    bias = bias.expand(size)
    in_steps = not (bias.data_ptr() % 16 or any(stride % STEP for stride in bias.stride()[:-1]))
    if not in_steps or bias.stride(-1) != 1:
        once = bias[tuple(slice(None if stride else 1) for stride in bias.stride()[:-1])]
        copied = once.new_empty_strided(once.shape, strides_of_scores(tuple(once.shape)))
        bias = copied.copy_(once).expand(size)
    return [bias]


def _random_state(call: Call) -> list[Tensor]:
    """Return seed and offset of dropout as execution plans read them, (1,) int64; empty without dropout."""
    if not call.dropout:
        return []
    if call.rng_state is None:
        got = f"got None with dropout_p {call.dropout}"
        raise InvalidInputError(f"rng_state: {got}, expected a seed and an offset, uint64")
    state = call.rng_state.view(torch.int64)
    return [state[:1], state[1:]]


def _gradient_of_bias(grad: Tensor, call: Call) -> Tensor:
    """Return the gradient of the bias in its shape, from the gradient of all scores, (B, H, S_q, S_k)."""
    if call.window[1] == 0:
        grad.tril_()  # nothing says that cuDNN writes the gradients of scores that the mask hides
    return grad if call.attn_bias is None else grad.sum_to_size(call.attn_bias.shape)


def _select(
    plans: ExecutionPlans, kind: PlanKind, tensors: Sequence[Tensor], call: Call, *bias: Tensor
) -> tuple[Problem, list[Tensor]]:
    """Return the problem whose execution plan runs a call, and the tensors as it reads them."""
    read = [readable(x, repeats=False) for x in tensors]
    problem = problem_of(kind, read, call)
    problem, _ = plans.select(problem._replace(bias=bias[0].stride()) if bias else problem)
    return problem, [_laid_out(x, strides) for x, strides in zip(read, problem.strides, strict=True)]


def _laid_out(x: Tensor, strides: Strides) -> Tensor:
    """Return a tensor with these strides; they are its own or contiguous."""
    if x.stride() == strides or not x.is_contiguous():
        return with_strides(x, strides)
    return x.as_strided(x.shape, strides)  # only the stride of a dimension of size one differs


def _run(plans: ExecutionPlans, problem: Problem, tensors: tuple[Tensor, ...], call: Call) -> None:
    """Run the execution plan of a problem on its tensors, by `Slot`, ascending."""
    if torch.cuda.current_device() != problem.kind.device:
        with torch.cuda.device(problem.kind.device):
            return _run(plans, problem, tensors, call)
    plan, stream, lengths = plans.get(problem), stream_of(tensors[0]), None
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        offsets = call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k
        lengths = inputs_of(plan, plans.read, problem.batch, stream, *offsets)
    plans.execute(plan, problem.kind.device, tensors, lengths, stream)
    return None


def specialize(
    plans: ExecutionPlans, direction: Direction, tensors: tuple[Tensor, ...], call: Call
) -> Launcher | None:
    """Return a launcher for all calls of a call's kind; see `Kernels.specialize`.

    `tensors` are query, key and value, of a backward (grad_out, query, key, value, out, lse), in the shapes
    and dtypes of `forward` and `backward`: (B, S, H, D) or (T, H, D).
    """
    kind = kind_of(direction, tensors, call)
    if call.seqused_k is not None or not kind.is_plain or not (kind.heads_q and kind.heads_k):
        return None
    # Without offsets, because the launcher would keep these tensors alive.
    constants = call._replace(cu_seqlens_q=None, cu_seqlens_k=None)
    calls = _CallsOfAKind(plans, kind, constants, kind.contiguous(Slot.Q))
    if is_empty(*_rows(kind, tensors), call):
        return AddressLauncher(calls.run, calls.prepare, call.window)
    if any(_is_copied(kind, slot, x) for slot, x in zip(GIVEN[direction], tensors[:LSE], strict=False)):
        return calls.run
    _, plan = plans.select(problem_of(kind, tensors[:LSE], call))
    if plan is not None and plan.prepared is None:
        return calls.run  # this release of the frontend can't run on addresses
    return AddressLauncher(calls.run, calls.prepare, call.window)


def _is_copied(kind: PlanKind, slot: Slot, x: Tensor) -> bool:
    """Whether `_select` copies a tensor, for this or for most other numbers of tokens."""
    strides = (x.stride(),)
    if not aligned(x, repeats=False) or (kind.packed and rounding.any_tokens(kind, strides) != strides):
        return True
    is_query = kind.packed and kind.direction == "backward" and slot is Slot.Q
    return is_query and x.stride() != kind.contiguous(slot)


def _rows(kind: PlanKind, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return query and key of a function's tensors."""
    return (tensors[0], tensors[1]) if kind.direction == "forward" else (tensors[1], tensors[2])


class _CallsOfAKind(NamedTuple):
    """All calls of a kind.

    Attributes:
        constants: the arguments that all calls share.
        contiguous_query: the strides of a packed query that is contiguous.
    """

    plans: ExecutionPlans
    kind: PlanKind
    constants: Call
    contiguous_query: Strides

    def run(self, *arguments: Any) -> tuple[Tensor, ...] | None:
        """Run a call; see `launching.launchers`."""
        plans, kind, call, _ = self
        tensors: Sequence[Any] = arguments
        all_written = True
        if kind.packed:
            *tensors, cu_q, cu_k, max_q, max_k, all_written = arguments
            call = call._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_q=max_q, max_k=max_k)
        query, key = _rows(kind, tensors)
        if not kind.packed:
            call = call._replace(max_q=query.shape[1], max_k=key.shape[1])
        if is_empty(query, key, call):
            return None
        run_direction = _run_forward if kind.direction == "forward" else _run_backward
        return run_direction(plans, kind, tensors, call, all_written)

    def prepare(
        self, batch: int, max_q: int, max_k: int, tokens_q: int, tokens_k: int, strides: tuple[Strides, ...]
    ) -> Prepared | None:
        """Return how a call is launched, or None if Python has to run it; see `AddressLauncher`."""
        plans, kind, _, contiguous_query = self
        if not (batch and max_q and max_k and tokens_q and tokens_k):
            return None
        if kind.packed and kind.direction == "backward" and strides[1] != contiguous_query:
            return None  # such a query is copied
        return plans.prepare(kind.problem(batch, max_q, max_k, tokens_q, tokens_k, strides))

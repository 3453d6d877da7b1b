"""The execution plans of this process, the cuDNN handles of its threads, and what is read of `cu_seqlens`.

An execution plan is immutable and may run in several threads; a handle belongs to one thread and one device.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attnreg.backends.cudnn import rounding
from attnreg.backends.cudnn.graph import ExecutionPlan, build
from attnreg.backends.cudnn.problem import Problem, RaggedOffset, Slot
from attnreg.contract.offsets import derived_from
from attnreg.errors import UnsupportedInputError
from attnreg.torchlib.isolation import run_in_thread
from attnreg.torchlib.layout import uninitialized
from attnreg.torchlib.locks import open_after_fork

# More than a training run needs, as packed problems are rounded, and few enough to stay small: an execution
# plan takes some hundred kilobytes of host memory.
_KEPT = 512


class _Handles(dict[int, list[Any]]):
    """The handles of one thread by device, with the stream that each is set to; destroyed with the thread."""

    def __init__(self, destroy: Callable[[Any], None]) -> None:
        self._destroy = destroy

    def __del__(self) -> None:
        for handle, _ in self.values():
            try:
                # Destroying waits for the device, which would end a capture: then the handle is better lost.
                if not torch.cuda.is_current_stream_capturing():
                    self._destroy(handle)
            except Exception:  # noqa: BLE001 - at the end of the process CUDA may be gone already
                pass


class ExecutionPlans:
    """The execution plans that this process has built.

    Attributes:
        built: how many execution plans were built for each direction.
    """

    def __init__(self, cudnn: ModuleType) -> None:
        self.built = {"forward": 0, "backward": 0}
        self._cudnn: Callable[[], Any] = weakref.ref(cudnn)  # what is kept here may outlive it
        self._building = open_after_fork(threading.Lock())
        self._plans: dict[Problem, ExecutionPlan] = {}
        self._declined: dict[Problem, str] = {}
        self._first_tokens = rounding.FirstTokens()
        self._thread = threading.local()
        atexit.register(self._release)

    def select(self, problem: Problem) -> Problem:
        """Return the problem whose execution plan runs this one: for exactly its tokens, or shared."""
        if not problem.packed:
            return problem
        problem = rounding.exact(problem)
        if problem in self._plans:
            return problem
        # A capture can't build an execution plan, but it may find a shared one that has run before.
        if self._first_tokens.allow_exact(problem) and not torch.cuda.is_current_stream_capturing():
            return problem
        return rounding.shared(problem)

    def find(self, problem: Problem) -> ExecutionPlan | None:
        """Return the execution plan of a problem that `select` has returned, if it is built."""
        return self._plans.get(problem)

    def run(self, problem: Problem, tensors: Sequence[Tensor], lengths: Lengths | None, stream: int) -> None:
        """Run the execution plan of a problem that `select` has returned; builds it if need be.

        Raises:
            UnsupportedInputError: cuDNN has no kernel for it, or an execution plan would have to be built
                while a CUDA graph is captured.
        """
        plan = self._plans.get(problem) or self._build_once(problem)
        self.execute(plan, problem.device, tensors, lengths, stream)

    def execute(
        self,
        plan: ExecutionPlan,
        device: int,
        tensors: Sequence[Tensor],
        lengths: Lengths | None,
        stream: int,
    ) -> None:
        """Run an execution plan; its device has to be the current one.

        Args:
            tensors: those of the execution plan, by `Slot`, ascending.
            lengths: those of packed tensors.
            stream: a CUDA stream of the device.
        """
        buffers = [*tensors, *lengths.inputs_of(plan)] if lengths is not None else tensors
        workspace = None
        if plan.workspace:
            workspace = uninitialized((plan.workspace,), (1,), torch.uint8, tensors[0].device)
        plan.graph.execute(buffers, workspace, handle=self.handle(device, stream), tensor_uids=plan.uids)

    def _release(self) -> None:
        """Drop all of the frontend's objects at the end of the process: it prints a list of what outlives it.

        This object does: the routers in torch's dispatcher refer to it.
        """
        self._plans.clear()
        self._thread = threading.local()

    def _build_once(self, problem: Problem) -> ExecutionPlan:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedInputError(
                f"cuDNN has no execution plan yet for this {problem.direction}, and can't build one while "
                "a CUDA graph is captured; run the call once before the capture"
            )
        with self._building:
            if problem in self._declined:
                raise UnsupportedInputError(self._declined[problem])
            if problem not in self._plans:
                if problem.exact:
                    self._first_tokens.remember(problem)
                while len(self._plans) >= _KEPT:
                    del self._plans[next(iter(self._plans))]
                self._plans[problem] = self._build(problem)
                self.built[problem.direction] += 1
            return self._plans[problem]

    def _build(self, problem: Problem) -> ExecutionPlan:
        handle = self.handle(problem.device, torch.cuda.current_stream().cuda_stream)

        def there() -> ExecutionPlan:
            with torch.cuda.device(problem.device):
                return build(self._cudnn(), problem, handle)

        try:
            # In a thread, as the frontend leaves the error of a failed attempt in a cycle with all frames
            # above it, and these keep the caller's tensors alive. The handle is this thread's, which waits.
            return run_in_thread(there)
        except UnsupportedInputError as error:
            if len(self._declined) >= _KEPT:
                self._declined.clear()
            self._declined[problem] = str(error)  # batches of other lengths come to the same problem
            raise

    def handle(self, device: int, stream: int) -> Any:
        """Return this thread's handle of a device, set to a stream."""
        handles = getattr(self._thread, "handles", None)
        if handles is None:
            handles = self._thread.handles = _Handles(self._cudnn().destroy_handle)
        found = handles.get(device)
        if found is None:
            found = handles[device] = [self._cudnn().create_handle(), None]
        if found[1] != stream:
            self._cudnn().set_stream(found[0], stream)
            found[1] = stream
        return found[0]


def lengths_of(
    batch: int, stream: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_k: Tensor | None = None
) -> Lengths:
    """Return the lengths of a packed batch, derived once for as long as the offsets exist unchanged."""
    given = cu_seqlens_q, cu_seqlens_k, seqused_k
    return derived_from(given, stream, ("cuDNN", batch), partial(Lengths, batch))


class Lengths:
    """The lengths and ragged offsets of one batch, padded with empty sequences to an execution plan's size.

    Args:
        batch: how many sequences the execution plan is for.
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,).
        seqused_k: how many keys of each sequence count, int32 (B,); None for all.
    """

    def __init__(
        self, batch: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_k: Tensor | None
    ) -> None:
        starts_q = _padded(cu_seqlens_q, batch)
        starts_k = starts_q if cu_seqlens_k is cu_seqlens_q else _padded(cu_seqlens_k, batch)
        queries = starts_q.diff()
        keys = queries if starts_k is starts_q else starts_k.diff()
        if seqused_k is not None:
            keys = torch.nn.functional.pad(seqused_k, (0, batch - len(seqused_k)))
        # cuDNN 9.19 writes NaN for a sequence without keys; one without queries it leaves alone.
        queries = queries if keys is queries else queries * (keys > 0)
        self._inputs: dict[Slot | RaggedOffset, Tensor] = {Slot.SEQ_LEN_Q: queries, Slot.SEQ_LEN_K: keys}
        self._starts = starts_q.long(), starts_k.long()
        self._of_plans: dict[int, list[Tensor]] = {}

    def differs(self, newer: Lengths) -> Tensor:
        """Return on the device whether a sequence begins elsewhere or has another length."""
        ours, theirs = (torch.cat((*x._starts, x._inputs[Slot.SEQ_LEN_K])) for x in (self, newer))
        return (ours != theirs).any()

    def inputs_of(self, plan: ExecutionPlan) -> list[Tensor]:
        """Return an execution plan's inputs: lengths, int32 (batch,), ragged offsets, int64 (batch + 1,)."""
        found = self._of_plans.get(plan.lengths_key)
        if found is None:
            for wanted in plan.lengths:
                if isinstance(wanted, RaggedOffset) and wanted not in self._inputs:
                    self._inputs[wanted] = self._starts[wanted.of_keys] * wanted.token_stride
            found = self._of_plans[plan.lengths_key] = [self._inputs[wanted] for wanted in plan.lengths]
        return found


def _padded(cu_seqlens: Tensor, batch: int) -> Tensor:
    missing = batch + 1 - len(cu_seqlens)
    return torch.cat((cu_seqlens, cu_seqlens[-1:].expand(missing))) if missing else cu_seqlens

"""The execution plans of this process, the cuDNN handles of its threads, and how a plan is launched.

An execution plan is immutable and may run in several threads; a handle belongs to one thread and one device.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attnreg.backends.cudnn import rounding
from attnreg.backends.cudnn.graph import ExecutionPlan, build
from attnreg.backends.cudnn.lengths import (
    Inputs,
    OffsetsRead,
    Rows,
    inputs_of,
    kernel_of,
    tensors_of,
)
from attnreg.backends.cudnn.problem import GIVEN, RESULTS, Problem
from attnreg.core.launching.derivation import Derivation
from attnreg.core.launching.launchers import Prepared
from attnreg.core.torchlib.isolation import run_in_thread
from attnreg.core.torchlib.layout import stream_of, uninitialized
from attnreg.core.torchlib.locks import open_after_fork
from attnreg.errors import UnsupportedInputError

# How many execution plans are kept. A training run needs fewer, because packed problems are rounded. Each
# takes some hundred kilobytes of host memory.
_KEPT = 512

# A longer build, in seconds, is logged.
_LONG = 1.0

log = logging.getLogger("attnreg")


class _Handles(dict[int, list[Any]]):
    """A thread's handles by device, each with the stream that it is set to; destroyed with the thread."""

    def __init__(self, destroy: Callable[[Any], None]) -> None:
        self._destroy = destroy

    def __del__(self) -> None:
        for handle, _ in self.values():
            try:
                # Destroying a handle waits for the device, which would break a capture: then it is leaked.
                if not torch.cuda.is_current_stream_capturing():
                    self._destroy(handle)
            except Exception:  # noqa: BLE001 - at the end of the process CUDA may be gone already
                pass


class ExecutionPlans:
    """The execution plans that this process has built.

    Attributes:
        built: the number of execution plans built for each direction.
        read: the ragged offsets that execution plans read.
    """

    def __init__(self, cudnn: ModuleType) -> None:
        self.built = {"forward": 0, "backward": 0}
        self._cudnn: Callable[[], Any] = weakref.ref(cudnn)  # what is kept here may outlive it
        self._building = open_after_fork(threading.RLock())
        self.read = OffsetsRead()
        self._plans: dict[Problem, ExecutionPlan] = {}
        self._declined: dict[Problem, str] = {}
        self._first_tokens = rounding.FirstTokens()
        self._thread = threading.local()
        atexit.register(self._release)

    def select(self, problem: Problem) -> tuple[Problem, ExecutionPlan | None]:
        """Return the rounded problem whose execution plan runs this one, and the plan if it exists.

        The execution plan is exact, for just the number of tokens, or shared. An existing execution plan is
        preferred. A shared execution plan may need tensors with other strides.
        """
        plans = self._plans
        if not problem.kind.packed:
            return problem, plans.get(problem)
        problem = rounding.exact(problem)
        plan = plans.get(problem)
        if plan is not None:
            return problem, plan
        shared = rounding.shared(problem)
        plan = plans.get(shared)
        # A capture can't build an execution plan, so a problem in a capture doesn't count as the first.
        builds = plan is None and not torch.cuda.is_current_stream_capturing()
        if builds and self._first_tokens.allow_exact(problem):
            return problem, None
        return shared, plan

    def prepare(self, problem: Problem) -> Prepared | None:
        """Return how a problem's execution plan is launched, and for which other lengths that is the same.

        None if the execution plan doesn't exist, or if tensors would have to be copied to get its strides.
        """
        selected, plan = self.select(problem)
        if plan is None or plan.prepared is None or selected.strides != problem.strides:
            return None
        if not problem.kind.packed:
            return plan.prepared
        lengths = rounding.lengths_served(problem, selected, self._first_tokens.of(problem))
        # The kernel writes all that execution plans read by now. Both directions share that once each was
        # prepared after both execution plans were built.
        rows, derivation = self.read.now, plan.prepared.derivation
        if derivation is not None:
            kernel = kernel_of(plan, rows, selected.batch, problem.kind.device)
            derivation = Derivation(functools.partial(derivation.derive, rows), kernel)
        return plan.prepared._replace(lengths=lengths, derivation=derivation)

    def get(self, problem: Problem) -> ExecutionPlan:
        """Return the execution plan of a problem that `select` has returned; builds it if need be.

        Raises:
            UnsupportedInputError: cuDNN has no kernel for it, or an execution plan would have to be built
                while a CUDA graph is captured.
        """
        return self._plans.get(problem) or self._build_once(problem)

    def execute(
        self,
        plan: ExecutionPlan,
        device: int,
        tensors: Sequence[Tensor],
        lengths: Inputs | None,
        stream: int,
    ) -> None:
        """Run an execution plan; its device must be the current device.

        Shapes and dtypes of the tensors are as in the problem that it was built for.

        Args:
            plan: the execution plan.
            device: the index of its device.
            tensors: the tensors of the execution plan, by `Slot`, ascending.
            lengths: the lengths of packed tensors.
            stream: a CUDA stream of the device.
        """
        workspace, handle = None, self.handle(device, stream)
        if plan.workspace:
            workspace = uninitialized((plan.workspace,), (1,), torch.uint8, tensors[0].device)
        if plan.run_on_addresses is None:
            buffers = tensors if lengths is None else [*tensors, *tensors_of(plan, lengths)]
            plan.graph.execute(buffers, workspace, handle=handle, tensor_uids=plan.uids)
            return
        operands = [x.data_ptr() for x in tensors]
        if lengths is not None:
            buffer, places = lengths
            first = buffer.data_ptr()
            operands += [first + place for place in places]
        addresses = (ctypes.c_void_p * len(operands))(*operands)
        place = 0 if workspace is None else workspace.data_ptr()
        plan.run_on_addresses(ctypes.addressof(addresses), place, handle.backend_handle)

    def _release(self) -> None:
        """Drop all objects of the frontend at the end of the process, which prints a list of leaked objects.

        They would leak with this object, because the routers in torch's dispatcher refer to it.
        """
        self._plans.clear()
        self._thread = threading.local()

    def _build_once(self, problem: Problem) -> ExecutionPlan:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedInputError(
                f"cuDNN has no execution plan yet for this {problem.kind.direction}, and can't build one "
                "while a CUDA graph is captured; run the call once before the capture"
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
                self.built[problem.kind.direction] += 1
            return self._plans[problem]

    def _prepared_for(self, problem: Problem, plan: ExecutionPlan) -> Prepared:
        """Return how an execution plan is launched, for any call.

        The result doesn't keep the execution plan alive: a dropped execution plan must be freed, above all
        when the process ends. Launching it then does nothing and returns False.
        """
        kind, device, reference = problem.kind, problem.kind.device, weakref.ref(plan)

        def launch(addresses: int, workspace: int, stream: int) -> bool:
            plan = reference()
            if plan is None or plan.run_on_addresses is None:
                return False
            plan.run_on_addresses(addresses, workspace, self.handle(device, stream).backend_handle)
            return True

        def derive(
            rows: Rows, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, written: Tensor | None = None
        ) -> Inputs | None:
            plan = reference()
            if plan is None:
                return None
            known = None if written is None else (rows, written)
            batch, offsets = problem.batch, (cu_seqlens_q, cu_seqlens_k)
            return inputs_of(plan, self.read, batch, stream_of(cu_seqlens_q), *offsets, written=known)

        # The execution plan's lengths and ragged offsets come after all tensors.
        order = *GIVEN[kind.direction], *RESULTS[kind.direction]
        operands = *map(order.index, plan.tensors), *range(len(order), len(plan.uids))
        lse_strides = None
        if kind.direction == "backward":
            rows = problem.tokens_q if kind.packed else problem.max_q
            size = (kind.heads_q, rows) if kind.packed else (problem.batch, kind.heads_q, rows)
            lse_strides = problem.lse_strides(size)
        return Prepared(
            launch, operands, plan.workspace,
            problem.token_first and kind.direction == "forward", lse_strides,
            Derivation(derive) if kind.packed else None,
        )  # fmt: skip

    def _build(self, problem: Problem) -> ExecutionPlan:
        handle = self.handle(problem.kind.device, torch.cuda.current_stream().cuda_stream)

        def build_on_device() -> ExecutionPlan:
            with torch.cuda.device(problem.kind.device):
                return build(self._cudnn(), problem, handle)

        began = time.monotonic()
        try:
            # In another thread: the frontend leaves the error of a failed build in a cycle with all frames
            # above it, which keep the caller's tensors alive. The handle belongs to this thread, which waits.
            plan = run_in_thread(build_on_device)
        except UnsupportedInputError as error:
            if len(self._declined) >= _KEPT:
                self._declined.clear()
            self._declined[problem] = str(error)  # batches of other lengths lead to the same problem
            raise
        finally:
            took = time.monotonic() - began
            if took > _LONG:
                log.info("cuDNN took %.1f s to build the execution plan of a %s", took, problem)
        self.read.add(plan)
        if plan.run_on_addresses is not None and problem.kind.is_plain:  # no launcher runs other calls
            plan.prepared = self._prepared_for(problem, plan)
        return plan

    def handle(self, device: int, stream: int) -> Any:
        """Return this thread's handle of a device, set to a stream."""
        handles = getattr(self._thread, "handles", None)
        if handles is None:
            handles = self._thread.handles = _Handles(self._cudnn().destroy_handle)
        entry = handles.get(device)
        if entry is None:
            entry = handles[device] = [self._cudnn().create_handle(), None]
        if entry[1] != stream:
            self._cudnn().set_stream(entry[0], stream)
            entry[1] = stream
        return entry[0]

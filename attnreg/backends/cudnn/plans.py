"""cuDNN's plans and handles: built once, found again.

A plan is immutable and may run in several threads; a handle belongs to one thread and one device.
"""

from __future__ import annotations

import atexit
import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from attnreg.backends.cudnn.graph import build
from attnreg.backends.cudnn.sharing import Firsts, exact, shared
from attnreg.errors import UnsupportedInputError
from attnreg.torchlib.isolation import run_in_thread
from attnreg.torchlib.layout import uninitialized
from attnreg.torchlib.locks import open_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from torch import Tensor

    from attnreg.backends.cudnn.graph import Graph
    from attnreg.backends.cudnn.offsets import Offsets
    from attnreg.backends.cudnn.problem import Problem

__all__ = ["Plans"]

# More than a training run needs (packed problems are rounded), few enough to stay small: a plan
# holds some hundred kilobytes of host memory.
_KEPT = 512


class _Handles(dict[int, list[Any]]):
    """The handles of one thread by device, with the stream that each is set to; they end with it."""

    def __init__(self, destroy: Callable[[Any], None]) -> None:
        self._destroy = destroy

    def __del__(self) -> None:
        for handle, _ in self.values():
            try:
                # It waits for the device, which would end a capture: then the handle is better lost.
                if not torch.cuda.is_current_stream_capturing():
                    self._destroy(handle)
            except Exception:  # noqa: BLE001 - at the end of the process CUDA may be gone already
                pass


class Plans:
    """The plans of this process.

    Attributes:
        built: how many plans were built for each direction.
    """

    def __init__(self, cudnn: ModuleType) -> None:
        self.built = {"forward": 0, "backward": 0}
        self._module = weakref.ref(cudnn)  # what is kept here may outlive it
        self._building = open_after_fork(threading.Lock())
        self._plans: dict[Problem, Graph] = {}
        self._declined: dict[Problem, str] = {}
        self._firsts = Firsts()
        self._own = threading.local()
        atexit.register(self._let_go)

    def planned(self, problem: Problem) -> Problem:
        """Return the problem whose plan is to run this one."""
        if not problem.packed:
            return problem
        own = exact(problem)
        if own in self._plans:
            return own
        if self._firsts.may_be(problem) and not torch.cuda.is_current_stream_capturing():
            return own
        return shared(problem)

    def run(self, problem: Problem, tensors: Sequence[Tensor], offsets: Offsets | None, stream: int) -> None:
        """Run a problem's plan on a stream of its device, which has to be the current one.

        Args:
            problem: what to run, one that `planned` has returned.
            tensors: those of the plan, by `Slot`, ascending.
            offsets: those of packed tensors.
            stream: a CUDA stream.

        Raises:
            UnsupportedInputError: cuDNN has no kernel for it, or it would have to be planned while a
                CUDA graph is captured.
        """
        plan = self._plans.get(problem) or self._plan(problem)
        self.launch(plan, problem.device, tensors, offsets, stream)

    def known(self, problem: Problem) -> Graph | None:
        """Return a problem's plan if there is one."""
        return self._plans.get(problem)

    def launch(
        self, plan: Graph, device: int, tensors: Sequence[Tensor], offsets: Offsets | None, stream: int
    ) -> None:
        """Run a plan, likewise."""
        buffers = [*tensors, *offsets.operands(plan)] if offsets is not None else tensors
        size, workspace = plan.workspace, None
        if size:
            workspace = uninitialized((size,), (1,), torch.uint8, tensors[0].device)
        plan.run.execute(buffers, workspace, handle=self._handle(device, stream), tensor_uids=plan.uids)

    def launch_on_addresses(
        self, run: Callable[[int, int, int], None], device: int, addresses: int, workspace: int, stream: int
    ) -> None:
        """Run a plan by its `ByAddress.run`, likewise."""
        run(addresses, workspace, self._handle(device, stream).backend_handle)

    def _let_go(self) -> None:
        """Give back what is the package's, at the end of the process: it prints a list of what outlives it.

        Routers are registered in torch's dispatcher, which does, and lead here.
        """
        self._plans.clear()
        self._own = threading.local()

    @property
    def _cudnn(self) -> Any:
        return self._module()

    def _plan(self, problem: Problem) -> Graph:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedInputError(
                f"cuDNN has no plan yet for this {problem.direction}, and can't make one while a CUDA "
                "graph is captured; run the call once before the capture"
            )
        with self._building:
            if problem in self._declined:
                raise UnsupportedInputError(self._declined[problem])
            if problem not in self._plans:
                if problem.own:
                    self._firsts.met(problem)
                while len(self._plans) >= _KEPT:
                    del self._plans[next(iter(self._plans))]
                handle = self._handle(problem.device, torch.cuda.current_stream().cuda_stream)
                # The package leaves an error of a failed attempt in a cycle with the frames above it. What it
                # imports to build a plan is its own, and the handle is the caller's, who waits.
                try:
                    self._plans[problem] = run_in_thread(functools.partial(self._build, problem, handle))
                except UnsupportedInputError as error:
                    if len(self._declined) >= _KEPT:
                        self._declined.clear()
                    self._declined[problem] = str(error)  # batches of new sizes come to the same problem
                    raise
                self.built[problem.direction] += 1
            return self._plans[problem]

    def _build(self, problem: Problem, handle: Any) -> Graph:
        with torch.cuda.device(problem.device):
            return build(self._cudnn, problem, handle)

    def _handle(self, device: int, stream: int) -> Any:
        handles = getattr(self._own, "handles", None)
        if handles is None:
            handles = self._own.handles = _Handles(self._cudnn.destroy_handle)
        found = handles.get(device)
        if found is None:
            found = handles[device] = [self._cudnn.create_handle(), None]
        if found[1] != stream:
            self._cudnn.set_stream(found[0], stream)
            found[1] = stream
        return found[0]

"""The sides of a GPU benchmark: a function of query, key and value, its inputs, and who serves it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch
from _gpu import gpu_per_call

import attnreg
from attnreg import _registry, aten
from attnreg.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from _batch import Tensors
    from torch import Tensor

    Front = Callable[[Tensor, Tensor, Tensor], Tensor]
    Step = Callable[[Front, Tensors], object]

__all__ = [
    "STEPS",
    "Side",
    "available",
    "by_default",
    "forward",
    "forward_backward",
    "led_by",
    "misled",
    "mixed",
    "served",
    "torch_alone",
]


@contextlib.contextmanager
def torch_alone() -> Iterator[None]:
    """Have torch's ops as they are without attnreg."""
    attnreg.uninstall()
    yield


@contextlib.contextmanager
def by_default() -> Iterator[None]:
    """Have nothing registered: attnreg's own order decides."""
    aten.ensure()
    yield


def led_by(backend: str | attnreg.Backend) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return what registers a backend for as long as a `with` block lasts."""
    return lambda: attnreg.register_backend(backend)


def available(names: Iterable[str] = ("FA2", "FA4", "cuDNN")) -> list[str]:
    """Return the backends that load here; prints why the others don't."""
    found = []
    for name in names:
        try:
            _registry.find(name).kernels()
        except BackendUnavailableError as error:
            print(f"left out: {error}")
        else:
            found.append(name)
    return found


def mixed(forward: str, backward: str) -> attnreg.Backend:
    """Return a backend made of one's forward and another's backward, which both have to load."""
    first, second = _registry.find(forward), _registry.find(backward)
    if first.backend is None or second.backend is None:
        raise BackendUnavailableError(f"{forward} or {backward} is broken")
    return attnreg.Backend(
        name=f"{forward}+{backward}",
        forward=first.backend.forward,
        backward=second.backend.backward,
        load=lambda: attnreg.Kernels(first.kernels().forward, second.kernels().backward),
    )


def served() -> str:
    """Return which backends ran since the counters were last set to zero, and why not others."""
    found = attnreg.stats()
    ran = ", ".join(f"{name} ({' and '.join(d for d in n if n[d])})" for name, n in found.calls.items())
    return "; ".join((ran or "none", *(f"{row.backend}: {row.reason}" for row in found.fallbacks[:2])))


def misled(backend: str) -> str:
    """Return what ran, if that isn't both directions of the backend that was to run; else nothing."""
    ran = served()
    return "" if ran == f"{backend} (forward and backward)" else f"ran {ran}"


@dataclass(frozen=True)
class Side:
    """What is timed.

    Attributes:
        front: what is called with query, key and value, and returns the output.
        sets: its inputs, taken in turn.
        within: the context in which it is called.
    """

    front: Front
    sets: Sequence[Tensors]
    within: Callable[[], contextlib.AbstractContextManager[Any]]

    def results(self) -> list[Tensor]:
        """Return output and gradients of the first set."""
        tensors = self.sets[0]
        with self.within():
            out = self.front(*tensors.inputs())
            return [out.detach(), *torch.autograd.grad(out, tensors.inputs(), tensors.grad)]

    def timed(
        self,
        step: Step,
        calls: int,
        timer: Callable[[Callable[[], object], int], float] = gpu_per_call,
    ) -> Callable[[], float]:
        """Return what measures the seconds of a call of `step`."""

        def measure() -> float:
            sets = cycle(self.sets)
            with self.within():
                step(self.front, next(sets))  # a registration forgets the plans: the first call makes them
                return timer(lambda: step(self.front, next(sets)), calls)

        return measure


def forward(front: Front, tensors: Tensors) -> Tensor:
    """Run a forward of which no gradient will be asked."""
    with torch.no_grad():
        return front(*tensors.inputs())


def forward_backward(front: Front, tensors: Tensors) -> tuple[Tensor, ...]:
    """Run a forward and its backward."""
    return torch.autograd.grad(front(*tensors.inputs()), tensors.inputs(), tensors.grad)


STEPS: dict[str, Step] = {"forward": forward, "forward + backward": forward_backward}

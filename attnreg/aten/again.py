"""Answering calls that came before without taking them apart, by a backend's shorter way if it has one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from attnreg.contract.launchers import AddressLauncher, OpLauncher
from attnreg.errors import RegistrationError, UnsupportedInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnreg.contract.backend import Call
    from attnreg.dispatch.planning import Plan

__all__ = ["Again", "Answer", "Layout", "Turned", "address_call", "alike", "answer", "tried"]

T = TypeVar("T")

log = logging.getLogger("attnreg")


class Layout(NamedTuple):
    """How an op's dense calls are brought into the contract's layout, and results out of it.

    Attributes:
        query: the place of the query among the op's arguments; key and value come next.
        turned: returns what a kernel takes of the op's arguments.
        back: returns the op's results, given the kernel's and the op's arguments.
        beside: returns what stands behind the kernel's results among the op's. Only where `turned` and
            `back` are what compiled routers can do themselves, which is what `aten.cudnn` does.
    """

    query: int
    turned: Callable[[tuple[Any, ...]], tuple[Tensor, ...]]
    back: Callable[[Any, tuple[Any, ...]], Any]
    beside: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None


class Turned(NamedTuple):
    """What answers calls for who brings the tensors into the contract's layout, and the results out of it."""

    layout: Layout
    run: Callable[..., Any]
    shorter: Callable[..., Callable[..., Any] | None] | None

    def again(self) -> Callable[..., Any]:
        """Return what answers calls whose tensors all lie alike."""
        return self.run if self.shorter is None else Again(self.run, self.shorter)

    def kernel_call(self, given: tuple[Any, ...]) -> OpLauncher | AddressLauncher | None:
        """Return the kernel, if that is all, that answers calls whose tensors lie as the op's arguments."""
        found = None if self.shorter is None else tried(self.shorter, self.layout.turned(given))
        return found if isinstance(found, (OpLauncher, AddressLauncher)) else None

    def beside(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what stands behind its results among those of the op."""
        return self.layout.beside(given) if self.layout.beside else ()


class Answer(NamedTuple):
    """What answers calls like one that has run, given the op's arguments as they come.

    Attributes:
        run: answers them wherever their tensors lie; None from it means the long way.
        shorter: asks the backend for what answers only those whose tensors lie as these; None if it has
            no such thing.
        turned: the same for compiled routers, where they can turn the tensors.
    """

    run: Callable[..., Any]
    shorter: Callable[..., Callable[..., Any] | None] | None = None
    turned: Turned | None = None

    def where_layouts_are_known(self) -> Callable[..., Any]:
        """Return what answers calls whose tensors all lie alike."""
        return self.run if self.shorter is None else Again(self.run, self.shorter)


class Again:
    """Answers calls that differ in nothing but the values of tensors.

    A backend may find its shorter way later than with the first call, so it is asked after the first,
    second, fourth call, and so on.
    """

    __slots__ = ("_calls", "_expected", "_run", "_short", "_shorter")

    def __init__(self, run: Callable[..., Any], shorter: Callable[..., Callable[..., Any] | None]) -> None:
        self._run = run
        self._shorter = shorter
        self._short: Callable[..., Any] | None = None
        self._expected: list[Any] = []
        self._calls = 0

    def __call__(self, *given: Any) -> Any:
        """Return the results; None if the call has to take the long way.

        Raises:
            RegistrationError: the shorter way has returned something else than the long one.
        """
        short = self._short
        if short is not None:
            results = short(*given)
            if results is not None:
                if self._expected:
                    self._examine(results)
                return results
            self._short = None
        results = self._run(*given)
        self._calls += 1
        if results is not None and not self._calls & (self._calls - 1):
            self._ask(given, results)
        return results

    def _ask(self, given: tuple[Any, ...], results: tuple[Any, ...]) -> None:
        self._expected, self._short = _described(results), tried(self._shorter, given)

    def _examine(self, results: Any) -> None:
        _compare(_described(results), self._expected)
        self._expected = []


def address_call(
    shorter: Callable[..., Callable[..., Any] | None], given: tuple[Any, ...], results: Any
) -> AddressLauncher | None:
    """Return a backend's shorter way if it is a kernel to be run on addresses; `results` are the long way's.

    Raises:
        RegistrationError: it would return something else than the long one.
    """
    found = tried(shorter, given)
    if not isinstance(found, AddressLauncher):
        return None
    _compare([(size, dtype) for size, _, dtype in found.results], _described(results))
    return found


def tried(ask: Callable[..., T | None], given: tuple[Any, ...]) -> T | None:
    """Return the answer, or None where asking fails: that is no reason for the call to."""
    try:
        return ask(*given)
    except Exception as error:  # noqa: BLE001 - the call itself has run
        log.info("no shorter way for a call that came before: %s: %s", type(error).__name__, error)
        return None


def _compare(got: list[Any], expected: list[Any]) -> None:
    if got != expected:
        raise RegistrationError(
            f"a backend's Kernels.specialize breaks the contract: got {got}, expected {expected}"
        )


def _described(results: Any) -> list[Any]:
    """Return the shape and the dtype of each tensor of a tuple, and the type of what is none."""
    if not isinstance(results, tuple):
        return [type(results).__name__]
    return [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__ for x in results]


def answer(plan: Plan, call: Call, layout: Layout) -> Answer:
    """Return what answers dense calls like this one, of which each row sees a key."""
    kernel, ask, (query, turned, back, beside) = plan.kernel, plan.again, layout

    def run_turned(*tensors: Tensor) -> Any:
        try:
            return kernel(*tensors, call)
        except UnsupportedInputError:
            return None  # the long way finds out what does run it

    def shorter_turned(*tensors: Tensor) -> Callable[..., Any] | None:
        return None if ask is None else ask(tensors, call)

    def run(*given: Any, **_: Any) -> Any:
        results = run_turned(*turned(given)) if alike(*given[query : query + 3]) else None
        return None if results is None else back(results, given)

    def shorter(*given: Any) -> Callable[..., Any] | None:
        short = shorter_turned(*turned(given))
        if short is None:
            return None

        def shortly(*given: Any) -> Any:
            results = short(*turned(given))
            return None if results is None else back(results, given)

        return shortly

    has_shorter = ask is not None
    by_routers = Turned(layout, run_turned, shorter_turned if has_shorter else None) if beside else None
    return Answer(run, shorter if has_shorter else None, by_routers)


def alike(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether all three have one dtype and one device, of which a known call is told by the query's."""
    return query.dtype == key.dtype == value.dtype and query.device == key.device == value.device

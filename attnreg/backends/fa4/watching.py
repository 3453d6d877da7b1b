"""Watching one call of the package, to know what it allocates and launches.

Allocations are seen by a dispatch mode. Kernels are launched through compile caches, which spies stand in
for meanwhile. What can't be put in a recipe does the call no harm: the fault is noted and the call goes on.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnreg.backends.fa4.package import launchers
from attnreg.backends.fa4.recipe import Allocation, Recipe, pick

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

__all__ = ["told_apart", "watched"]

EMPTY = {f"aten::{name}" for name in ("empty_like", "new_empty", "empty_strided", "new_empty_strided")}
EMPTY |= {"aten::empty.memory_format"}
ZEROS = {"aten::zeros", "aten::zeros_like", "aten::new_zeros"}
PLAIN = (type(None), bool, int, float, str)


def watched(run: Callable[[], Any], inputs: Sequence[Tensor | None], count: int) -> tuple[Any, Recipe | str]:
    """Run a call; return its results, and the recipe of the first `count` of them or why there is none."""
    watch = _Watch(inputs)
    with _spying(watch), watch:
        results = run()
    return results, watch.fault or watch.recipe(results, count)


def told_apart(inputs: Sequence[Tensor | None]) -> bool:
    """Whether no two tensors are the same memory seen the same way, so that it is known which goes where."""
    places = [_place(x) for x in inputs if x is not None]
    return len(set(places)) == len(places)


def _place(x: Tensor) -> tuple[object, ...]:
    """Return what tells a tensor from others that exist; a detached one is the same."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What one call in one thread allocates and launches."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fault = ""
        self.thread = threading.get_ident()
        # Tensors stay in their slots until the call is over, so that no two have the same place.
        self._slots: list[object] = list(inputs)
        self._inputs = len(inputs)
        self._slot_of = {_place(x): slot for slot, x in enumerate(inputs) if x is not None}
        self._device = next(x.device for x in inputs if x is not None)
        self._allocations: list[Allocation] = []
        self._zeroed: list[int] = []
        self._tuples: list[tuple[int, Callable[[Any], object], Callable[[Any], Any]]] = []
        self._launches: list[tuple[Callable[..., object], Callable[[Any], Any]]] = []
        self._launching = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._launching:  # a launch will do again by itself what it does
            name = func.name()
            if name in EMPTY or name in ZEROS:
                self._allocated(result, name in ZEROS)
            elif name != "aten::detach":
                self._note(f"{name} isn't known")
        return result

    def launching(self, function: Callable[..., object]) -> Callable[..., object]:
        """Return the function that launches as `function` does and is seen."""

        def launch(*args: Any, **kwargs: Any) -> object:
            if kwargs:
                self._note("a launch takes keywords")
            self._launches.append((function, pick([self._slot(x) for x in args])))
            self._launching = True
            try:
                return function(*args, **kwargs)
            finally:
                self._launching = False

        return launch

    def recipe(self, results: Any, count: int) -> Recipe | str:
        """Return the recipe of what was seen, or why there is none."""
        first = results[:count] if isinstance(results, tuple) else ()
        slots = [self._slot_of.get(_place(x), -1) for x in first if isinstance(x, torch.Tensor)]
        if len(slots) < count or min(slots) < self._inputs:
            return "a result isn't one of its allocations"
        if not self._launches:
            return "no launch was seen"
        rest = (None if isinstance(x, torch.Tensor) else x for x in self._slots[self._inputs :])
        return Recipe(
            self._device, tuple(rest), tuple(self._allocations), tuple(self._zeroed), tuple(self._tuples),
            tuple(self._launches), pick(slots),
        )  # fmt: skip

    def _note(self, fault: str) -> None:
        self.fault = self.fault or fault

    def _added(self, content: object) -> int:
        self._slots.append(content)
        return len(self._slots) - 1

    def _allocated(self, tensor: Tensor, zeros: bool) -> None:
        if tensor.device != self._device or tensor.layout is not torch.strided:
            self._note(f"it allocates a {tensor.layout} tensor on {tensor.device}")
        slot = self._slot_of[_place(tensor)] = self._added(tensor)
        self._allocations.append((slot, tuple(tensor.shape), tensor.stride(), tensor.dtype))
        if zeros:
            self._zeroed.append(slot)

    def _slot(self, argument: Any) -> int:
        """Return the slot of a launch's argument, a new one unless it is a tensor."""
        if isinstance(argument, torch.Tensor):
            slot = self._slot_of.get(_place(argument))
            if slot is None:
                self._note("a launch is given a tensor that is neither an input nor an allocation")
            return slot or 0
        if _constant(argument):
            return self._added(argument)
        make = type(argument) if type(argument) is tuple else getattr(type(argument), "_make", None)
        if make is None:
            self._note(f"a launch is given a {type(argument).__name__}")
            return 0
        contents = pick([self._slot(x) for x in argument])
        self._tuples.append((slot := self._added(None), make, contents))
        return slot


def _constant(value: Any) -> bool:
    if type(value) in PLAIN:
        return True
    made = type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_make"))
    return made and all(map(_constant, value))


class _Spy:
    """Stands in for a compile cache, and shows the watch what is launched through it in its thread."""

    def __init__(self, cache: Any, watch: _Watch) -> None:
        self._cache = cache
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def __contains__(self, key: object) -> bool:
        return key in self._cache

    def __setitem__(self, key: object, function: object) -> None:
        self._cache[key] = function

    def __getitem__(self, key: object) -> Any:
        function = self._cache[key]
        return self._watch.launching(function) if threading.get_ident() == self._watch.thread else function


@contextlib.contextmanager
def _spying(watch: _Watch) -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        for launcher in launchers():
            undo.callback(setattr, launcher, "compile_cache", launcher.compile_cache)
            launcher.compile_cache = _Spy(launcher.compile_cache, watch)
        yield

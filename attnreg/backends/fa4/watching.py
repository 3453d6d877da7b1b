"""Records the functions that the package looks up in its compile caches, and their arguments.

Substitutes for the caches do so.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.backends.fa4.package import functions_with_caches


class RefutedError(Exception):
    """A launch of `launches` differs from the package's; the message says how."""


class TakenFunctions(NamedTuple):
    """A call of a compiled function: `by` names the package's function that looked it up."""

    by: str
    function: Callable[..., object]
    arguments: tuple[Any, ...]


class Watcher(contextlib.ExitStack):
    """Records the compiled functions that this thread looks up in the package's caches, and their arguments.

    With `launches` False none of them runs, and a lookup that would compile raises RefutedError.
    """

    def __init__(self, launches: bool = True) -> None:
        super().__init__()
        self.launches, self.taken = launches, list[TakenFunctions]()
        # The program may use the package itself in another thread, without the lock.
        self.thread = threading.get_ident()

    def __enter__(self) -> Watcher:
        for function in functions_with_caches():
            self.callback(setattr, function, "compile_cache", function.compile_cache)
            function.compile_cache = _WatchedCache(function.compile_cache, function.__name__, self)
        return self

    def watching(self, by: str, function: Callable[..., object]) -> Callable[..., object]:
        """Wrap a compiled function so that its arguments are recorded; it runs if `launches` is True."""

        def run(*arguments: Any) -> object:
            self.taken.append(TakenFunctions(by, function, arguments))
            return function(*arguments) if self.launches else None

        return run


class _WatchedCache:
    """A substitute for a compile cache while its watcher is active."""

    def __init__(self, cache: Any, by: str, watcher: Watcher) -> None:
        self._cache, self._by, self._watcher = cache, by, watcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def __contains__(self, key: object) -> bool:
        is_cached = key in self._cache
        if not is_cached and self._is_watched() and not self._watcher.launches:
            raise RefutedError(f"{self._by} compiles other functions for other lengths")
        return is_cached

    def __setitem__(self, key: object, function: object) -> None:
        self._cache[key] = function

    def __getitem__(self, key: object) -> Any:
        function = self._cache[key]
        return self._watcher.watching(self._by, function) if self._is_watched() else function

    def _is_watched(self) -> bool:
        return threading.get_ident() == self._watcher.thread


def compare(
    expected: Sequence[TakenFunctions], got: Sequence[TakenFunctions], call_tensors: tuple[Tensor, ...]
) -> None:
    """Raise RefutedError if `got` has other functions than `expected`, or other arguments.

    `call_tensors` are the tensors of the call, of any shape and dtype: arguments are compared by their places
    among these.
    """
    if [theirs[:2] for theirs in expected] != [theirs[:2] for theirs in got]:
        names = ", ".join(theirs.by for theirs in expected)
        raise RefutedError(
            f"for lengths like these it launches {names}, and not with the functions that it took"
        )
    # A tensor is identified by the order of its first appearance, after the tensors of the call.
    orders = [dict[int, int]() for _ in range(2)]
    for order in orders:
        for x in call_tensors:
            order.setdefault(x.data_ptr(), len(order))
    for theirs, launched in zip(expected, got, strict=True):
        right, ours = (
            [_described(x, order) for x in taken.arguments]
            for taken, order in zip((theirs, launched), orders, strict=True)
        )
        if right != ours:
            differ = [pair for pair in zip(right, ours, strict=False) if pair[0] != pair[1]]
            raise RefutedError(
                f"{theirs.by} is given other arguments: {differ[:1] or (len(right), len(ours))}"
            )


def _described(argument: Any, order: dict[int, int]) -> Any:
    if isinstance(argument, torch.Tensor):
        place = order.setdefault(argument.data_ptr(), len(order))
        return place, tuple(argument.shape), argument.dtype
    if isinstance(argument, tuple):
        return type(argument).__name__, [_described(x, order) for x in argument]
    return argument

"""Recording one call of the package: what it allocates and which compiled kernels it launches.

`describe` has what these depend on. A dispatch mode sees the allocations. Kernels are launched through the
package's compile caches, which are replaced while the call runs. Whatever a recipe can't express is noted as
a fault; the call itself goes on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnreg.backends.fa4.package import PackageCall, functions_with_caches
from attnreg.contract.backend import Call
from attnreg.torchlib.layout import uninitialized

EMPTY = {f"aten::{name}" for name in ("empty_like", "new_empty", "empty_strided", "new_empty_strided")}
EMPTY |= {"aten::empty.memory_format"}
ZEROS = {"aten::zeros", "aten::zeros_like", "aten::new_zeros"}
PLAIN = (type(None), bool, int, float, str)

# The size of a call (elements of the query times the longest keys) above which a GPU is busy for far longer
# than the package's Python takes on the host: a replay would gain nothing, and its comparison take memory.
LARGEST = 2**39

Description = tuple[object, ...]
# Slot, size, strides and dtype.
Allocation = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


def describe(call: Call, *tensors: Tensor) -> Description | None:
    """Return everything that decides what the package launches; None of a call that is never replayed.

    The number of tensors tells the direction. The package copies tensors that aren't aligned, and sees that
    by their addresses, which differ from call to call.
    """
    cu_seqlens_q, cu_seqlens_k = call.cu_seqlens_q, call.cu_seqlens_k
    if (
        call.seqused_k is not None
        or call.block_table is not None
        or call.attn_bias is not None
        or call.alibi_slopes is not None
        or call.dropout
        or call.grad_lse is not None
        or tensors[0].numel() * call.max_k > LARGEST
    ):
        return None
    description = [call.scale, call.max_q, call.max_k, call.window, call.softcap, call.repeatable]
    description.append(tensors[0].get_device())
    addresses = 0
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        if cu_seqlens_q is None or cu_seqlens_k is None:
            return None
        if cu_seqlens_q.stride() != (1,) or cu_seqlens_k.stride() != (1,):
            return None
        addresses = cu_seqlens_q.data_ptr() | cu_seqlens_k.data_ptr()
        # If both are one tensor, a recording can't tell which of the two a launch was given.
        description += (len(cu_seqlens_q), len(cu_seqlens_k), cu_seqlens_q is cu_seqlens_k)
    for x in tensors if call.sinks is None else (*tensors, call.sinks):
        addresses |= x.data_ptr()
        description += (x.shape, x.stride(), x.dtype)
    return None if addresses & 15 else tuple(description)


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """A recorded call: tensors to allocate and kernels to launch.

    Everything that launches are given has a slot: first the call's tensors, then the rest in the order in
    which it came up.

    Attributes:
        device: where the tensors are; has to be the current device.
        rest: the slots after the call's tensors: constants, and None where a tensor or a tuple comes in.
        allocations: the tensors to allocate.
        zeroed: the slots of those that start as zeros.
        tuples: slot, constructor and contents of each tuple that contains a tensor.
        launches: compiled functions, each with the function that picks its arguments out of the slots.
        results: picks the results.
        addresses: where each tensor was when the call was recorded, by slot.
    """

    device: torch.device
    rest: tuple[object, ...]
    allocations: tuple[Allocation, ...]
    zeroed: tuple[int, ...]
    tuples: tuple[tuple[int, Callable[[Any], object], Callable[[Any], Any]], ...]
    launches: tuple[tuple[Callable[..., object], Callable[[Any], Any]], ...]
    results: Callable[[Any], tuple[Tensor, ...]]
    addresses: dict[int, int]

    def replay(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the results for these tensors, computed on the current stream."""
        slots: list[Any] = [*tensors, *self.rest]
        for slot, size, stride, dtype in self.allocations:
            slots[slot] = uninitialized(size, stride, dtype, self.device)
        for slot in self.zeroed:
            slots[slot].zero_()
        return self.launch(slots)

    def launch(self, slots: list[Any]) -> tuple[Tensor, ...]:
        """Launch the kernels on slots that have all tensors, and return the results."""
        for slot, make, contents in self.tuples:
            slots[slot] = make(contents(slots))
        for function, arguments in self.launches:
            function(*arguments(slots))
        return self.results(slots)


def record(call: PackageCall) -> tuple[tuple[Tensor, ...], Recipe | str]:
    """Run a call; return its results, and its recipe or why it can't be replayed."""
    recorder = _Recorder(tuple(call.tensors.values()))
    with _recording_caches(recorder), recorder:
        results = call()
    return results, recorder.fault or recorder.recipe(results)


def distinguishable(tensors: dict[str, Tensor]) -> bool:
    """Whether no two have the same address, shape, strides and dtype; both offsets may be one tensor."""
    one = tensors.get("cu_seqlens_q") is tensors.get("cu_seqlens_k")
    places = [_place(x) for name, x in tensors.items() if not (one and name == "cu_seqlens_k")]
    return len(set(places)) == len(places)


def pick(slots: Sequence[int]) -> Callable[[Any], Any]:
    """Return the function that picks these slots, as a tuple."""
    if len(slots) > 1:
        return itemgetter(*slots)
    return lambda given: tuple(given[slot] for slot in slots)


def _place(x: Tensor) -> tuple[object, ...]:
    """Return what identifies a tensor among those that exist; a detached one is the same."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what one call in one thread allocates and launches."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fault = ""
        self.thread = threading.get_ident()
        # Tensors stay in their slots until the call is over, so that no two have the same place.
        self._slots: list[object] = list(tensors)
        self._given = len(tensors)
        self._slot_of = {_place(x): slot for slot, x in enumerate(tensors)}
        self._device = tensors[0].device
        self._allocations: list[Allocation] = []
        self._zeroed: list[int] = []
        self._tuples: list[tuple[int, Callable[[Any], object], Callable[[Any], Any]]] = []
        self._launches: list[tuple[Callable[..., object], Callable[[Any], Any]]] = []
        self._launching = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._launching:  # ops inside a launch are repeated by repeating the launch
            name = func.name()
            if name in EMPTY or name in ZEROS:
                self._allocated(result, name in ZEROS)
            elif name != "aten::detach":  # the package detaches what it passes on
                self._note(f"it calls {name}")
        return result

    def launching(self, function: Callable[..., object]) -> Callable[..., object]:
        """Return the function that launches as `function` does and records it."""

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

    def recipe(self, results: tuple[Tensor, ...]) -> Recipe | str:
        """Return what was recorded, or why the call can't be replayed."""
        slots = [self._slot_of.get(_place(x), -1) for x in results]
        if min(slots) < self._given:
            return "a result isn't one of its allocations"
        if not self._launches:
            return "no launch was seen"
        tensors = {slot: x.data_ptr() for slot, x in enumerate(self._slots) if isinstance(x, torch.Tensor)}
        rest = (None if slot in tensors else x for slot, x in enumerate(self._slots))
        return Recipe(
            self._device, tuple(rest)[self._given :], tuple(self._allocations), tuple(self._zeroed),
            tuple(self._tuples), tuple(self._launches), pick(slots), tensors,
        )  # fmt: skip

    def _note(self, fault: str) -> None:
        self.fault = self.fault or fault

    def _added(self, content: object) -> int:
        self._slots.append(content)
        return len(self._slots) - 1

    def _allocated(self, tensor: Tensor, zeros: bool) -> None:
        # `uninitialized` allocates on the current device only, and strided tensors only.
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
                self._note("a launch is given a tensor that is neither the call's nor allocated in it")
            return slot or 0
        if _constant(argument):
            return self._added(argument)
        # Named tuples have `_make`; subclasses of tuple without it, such as torch.Size, can't be made again.
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


class _RecordingCache:
    """Takes a compile cache's place, and records what the recorder's thread launches through it."""

    def __init__(self, cache: Any, recorder: _Recorder) -> None:
        self._cache = cache
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def __contains__(self, key: object) -> bool:
        return key in self._cache

    def __setitem__(self, key: object, function: object) -> None:
        self._cache[key] = function

    def __getitem__(self, key: object) -> Any:
        function = self._cache[key]
        # The program may use the package itself in another thread, without the lock.
        mine = threading.get_ident() == self._recorder.thread
        return self._recorder.launching(function) if mine else function


@contextlib.contextmanager
def _recording_caches(recorder: _Recorder) -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        for function in functions_with_caches():
            undo.callback(setattr, function, "compile_cache", function.compile_cache)
            function.compile_cache = _RecordingCache(function.compile_cache, recorder)
        yield

"""Choices for some calls only, and how a forward passes its choice on to its backward.

`use_backend(...)` and `backend=` make a `ScopedChoice`. The backward of a call often runs outside the `with`
block, on another thread, and all that an aten op's backward gets of its forward are saved tensors. So a
forward returns a *choice token*: one of the op's auxiliary outputs, in a storage whose length, and where the
token begins in it, say the choice's number. On a GPU that takes no kernel and no host sync; on a CPU, where
the LSE is the token, its storage is resized or copied. It survives autograd, CUDA graphs and, for scalars,
torch.compile (Inductor may give a larger tensor a storage of its own; then the backward is decided without
the choice).
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from threading import get_ident
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.core import registry
from attnreg.core.policy import current as policy
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.decision import Preference
from attnreg.core.torchlib import versions
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.locks import open_after_fork
from attnreg.core.torchlib.modes import OwnMode
from attnreg.errors import BackendUnavailableError, InvalidInputError


@dataclass(frozen=True, eq=False, slots=True)
class ScopedChoice:
    """A choice of backends that overrides all others for the calls it is given to.

    Attributes:
        number: its place in the list of all choices, from 1.
        preference: the backends that it puts first; None if it only forbids a gradient.
        no_gradient: why a backward of this call would be wrong; empty if it is right.
    """

    number: int
    preference: Preference | None
    no_gradient: str


_lock = open_after_fork(threading.RLock())
_choices: list[ScopedChoice] = []
_by_content: dict[tuple[Preference | None, str], ScopedChoice] = {}
_by_mark: dict[int, ScopedChoice] = {}  # by how many bytes longer the storage of a marked tensor is
# Choices by names, source and whether they are exclusive, with the registry's generation then.
_by_names: dict[tuple[tuple[str, ...], str, bool], tuple[object, ScopedChoice]] = {}
MOST_NAMES = 64
_remembering: list[Callable[[], object]] = []
_waiting: list[Callable[[ContextVar[ScopedChoice | None]], object]] = []


def make_choice(preference: Preference | None, no_gradient: str = "") -> ScopedChoice:
    """Return the one choice of that content."""
    choice = _by_content.get((preference, no_gradient))
    if choice is None:
        with _lock:
            choice = _by_content.get((preference, no_gradient))
            if choice is None:
                choice = ScopedChoice(len(_choices) + 1, preference, no_gradient)
                _choices.append(choice)
                _by_mark[MARKED * choice.number + MARKED_GUARD] = choice
                if preference is not None:
                    _call_waiting()  # before another thread can find the choice and enter it
                _by_content[preference, no_gradient] = choice
    return choice


def by_number(number: int) -> ScopedChoice | None:
    """Return the choice of that number; None for 0."""
    return _choices[number - 1] if number else None


def on_first_choice(callback: Callable[[ContextVar[ScopedChoice | None]], object]) -> None:
    """Have a function called with the context variable before it may contain a choice of backends."""
    with _lock:
        _waiting.append(callback)
        if any(choice.preference is not None for choice in _choices):
            _call_waiting()


def _call_waiting() -> None:
    while _waiting:
        _waiting.pop()(variable)


variable: ContextVar[ScopedChoice | None] = ContextVar("attnreg_choice", default=None)

# The key in the state that torch's threads inherit. Autograd runs the backward of a GPU on a thread of its
# own. This thread has the thread-local state of the caller of `backward()`, but not its context variables. A
# checkpoint computes its forwards again there.
_IN_TORCHS_STATE = "attnreg_choice"
# By names of their own: Dynamo compiles a function that looks anything up in torch, as far as it can.
_stash = torch._C._stash_obj_in_tls
# Torch 2.13 and later. A thread that ends with an object in torch's state acquires the interpreter's lock
# after `Thread.join` has returned. If the interpreter is ending by then, that ends the process with SIGABRT.
_erase: Callable[[str], object] | None = getattr(torch._C, "_remove_obj_from_tls", None)
# Whether such a thread inherits the choice. An earlier torch never erases, so a build without GPUs, whose
# backwards stay on their thread, keeps nothing.
is_inherited = _erase is not None or torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]


def _keep(choice: ScopedChoice | None) -> None:
    if not is_inherited:
        return
    inherited = _inherited()
    if choice is None and inherited is None and _erase is not None:
        _erase(_IN_TORCHS_STATE)
        return
    kept = get_ident(), choice, inherited
    if _takes_over:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    _stash(_IN_TORCHS_STATE, kept)


def _takes_over_references() -> bool:
    """Return whether this torch drops a reference to what it keeps that it has never added: 2.11 does."""
    kept = get_ident(), None, None
    before = sys.getrefcount(kept)
    _stash(_IN_TORCHS_STATE, kept)
    takes_over = sys.getrefcount(kept) == before
    if takes_over:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    return takes_over


_takes_over = _takes_over_references()


def current() -> ScopedChoice | None:
    """Return the choice in force for this thread or task."""
    names = backends_in_graph() if _count_modes() else ()
    return preferred(names) if names else variable.get() or _inherited()


_count_modes = torch._C._len_torch_function_stack  # by a name of its own: calls ask each time


def _inherited() -> ScopedChoice | None:
    """Return, on a thread of autograd's, the choice in force where `backward()` was called."""
    if torch._C._current_graph_task_id() == -1 or not torch._C._is_key_in_tls(_IN_TORCHS_STATE):
        return None
    thread, choice, before = torch._C._get_obj_in_tls(_IN_TORCHS_STATE)
    # On the thread that entered it the context variable knows better: tasks of asyncio share that thread.
    # `before` is what that thread had inherited itself, and does again where its block has ended.
    inherited: ScopedChoice | None = before if thread == get_ident() else choice or before
    return inherited


def inherited_number() -> int:
    """Return the number of the inherited choice, 0 for none; the compiled call cache calls it."""
    choice = _inherited()
    return choice.number if choice is not None else 0


def preferred(names: tuple[str, ...], source: str = "") -> ScopedChoice:
    """Return the choice for a `use_backend` block; raises if a backend is unknown or can't load here."""
    return _named(names, source, exclusive=False)


def exclusive(name: str, source: str = "") -> ScopedChoice:
    """Return the choice for `backend=` on a call; raises if it is unknown or can't load here."""
    return _named((name,), source, exclusive=True)


def _load(entry: Entry, is_new: bool) -> None:
    """Load a backend; one that can't be and that nothing has named before leaves the registry."""
    try:
        entry.kernels()
    except BackendUnavailableError:
        if is_new:
            registry.discard(entry)
        raise


def _named(names: tuple[str, ...], source: str, exclusive: bool) -> ScopedChoice:
    try:
        kept = _by_names.get((names, source, exclusive))
    except TypeError:  # what can't be hashed is no name
        kept = None
    if kept is not None and kept[0] is registry.generation:
        return kept[1]  # each call with `backend=` comes here, and each block that is entered
    known = registry.entries()
    entries = [registry.find(name) for name in names]
    for entry in entries:
        # A disabled one's code doesn't run; the decision says why it isn't used.
        if not entry.on_request or entry.name.casefold() not in policy.disabled_backends():
            _load(entry, is_new=entry.name.casefold() not in known)
    generation = registry.generation
    quoted = ", ".join(repr(entry.name) for entry in entries)
    source_or_own = source or (f"backend={quoted}" if exclusive else f"use_backend({quoted})")
    backends = tuple(entry.name for entry in entries)
    choice = make_choice(Preference(source_or_own, backends, exclusive=exclusive))
    if len(_by_names) >= MOST_NAMES:
        _by_names.clear()
    _by_names[names, source, exclusive] = generation, choice
    return choice


class ScopeInGraph(OwnMode):
    """A `use_backend` block while it is traced: calls get its backends as an argument of attnreg's ops.

    Dynamo traces what is below. After a graph break inside the block the mode is in force as well: each of
    torch's functions then runs by the choice, as in a block that isn't compiled.

    Attributes:
        names: the backends that the block puts first.
    """

    names: tuple[str, ...]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten:
            func = torch.unflatten  # the method calls `super()`, which Dynamo can't trace here
        if not torch.compiler.is_compiling():
            return _run_between_graphs(self.names, func, args, kwargs)
        if func is SDPA:
            return torch.ops.attnreg._sdpa(*args, **kwargs, backends=list(self.names))
        ops = _varlen_ops()
        if func is ops._varlen_attn or func is ops._varlen_attn.default:
            return _varlen_attn(self.names, args, kwargs)
        if versions.HAS_OUT and (func is ops._varlen_attn_out or func is ops._varlen_attn_out.default):
            with torch.no_grad():  # as torch's op, which has no gradient
                out, lse, _ = _varlen_attn(self.names, args[1:], kwargs)
                if args[0].shape != out.shape or args[0].dtype != out.dtype:
                    got, expected = ((x.dtype, tuple(x.shape)) for x in (args[0], out))
                    raise InvalidInputError(f"out: got {got}, expected {expected}")
                args[0].copy_(out)
            return lse
        if func is F.multi_head_attention_forward:
            with self:
                return _multi_head_attention(*args, **kwargs)
        # Without this mode in force a checkpoint, say, would trace its function outside of the block.
        args = tuple([self._around(x) if isinstance(x, _TRACED) else x for x in args])
        return func(*args, **kwargs)

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        names = self.names

        def in_block(*args: Any, **kwargs: Any) -> Any:
            enter_in_graph(names)
            try:
                return function(*args, **kwargs)
            finally:
                leave_in_graph()

        return in_block


def _varlen_ops() -> Any:
    """Return the namespace of torch's varlen ops, for which a block that is traced has ops of attnreg's."""
    import torch.nn.attention.varlen  # defines them. Not above: it imports Dynamo, in one to two seconds

    return torch.ops.torch_attn


def _varlen_attn(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the results of attnreg's op for the arguments of torch's, by the backends of a block."""
    needs_backward = torch.is_grad_enabled() and any(x.requires_grad for x in args[:3])
    kwargs = kwargs | {"backend": text_of(names), "needs_backward": needs_backward}
    return torch.ops.attnreg._varlen_attn(*args[:CHOSEN_BY_TORCH], **kwargs)


# The argument of torch's op, from torch 2.15 on, with the number of the kernel that torch's selector chose.
CHOSEN_BY_TORCH = 14
SDPA = torch._C._nn.scaled_dot_product_attention  # also `F.scaled_dot_product_attention`
_TRACED = (FunctionType, MethodType, torch.nn.Module)  # what higher-order ops trace

# `F.multi_head_attention_forward` without its look at modes, which would never reach its call of SDPA.
_multi_head_attention = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda _: False},
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
)


def enter_in_graph(names: tuple[str, ...]) -> None:
    """Begin a block that is traced."""
    block = ScopeInGraph()
    block.names = names
    torch._C._push_on_torch_function_stack(block)


def leave_in_graph() -> None:
    """End what `enter_in_graph` began."""
    torch._C._pop_torch_function_stack()


def backends_in_graph() -> tuple[str, ...]:
    """Return the backends of the innermost block that is traced, or is in force between graphs."""
    count = _count_modes()
    if not count:  # almost always, and blocks ask each time
        return ()
    for place in reversed(range(count)):
        mode = torch._C._get_function_stack_at(place)
        if isinstance(mode, ScopeInGraph):
            return mode.names
    return ()


def text_of(names: tuple[str, ...]) -> str:
    """Return the backends of a block as the argument `backend` of an op: a comma follows each name.

    No name has one. Inductor's C++ wrapper writes the text between quotes as it is: no line may end in it.
    """
    return "".join([f"{name}," for name in names])


def from_text(backend: str) -> ScopedChoice | None:
    """Return the choice that an op's argument `backend` is: a single backend, or what `text_of` returns."""
    if not backend:
        return None
    *names, last = backend.split(",")
    return exclusive(last) if last else preferred(tuple(names))


_function_in_scope: ContextVar[Any] = ContextVar("attnreg_function", default=None)


def _run_between_graphs(
    names: Sequence[str], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run one of torch's functions by the innermost block: torch asks the modes of outer blocks as well."""
    if _function_in_scope.get() is function:
        return function(*args, **kwargs)
    token = _function_in_scope.set(function)
    try:
        return run_with(names, function, args, kwargs)
    finally:
        _function_in_scope.reset(token)


def run_with(names: Sequence[str], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function in the scope of backends, as inside `use_backend`; returns its result."""
    token = enter(preferred(tuple(names)))
    try:
        return function(*args, **kwargs)
    finally:
        leave(token)


def enter(choice: ScopedChoice | None) -> Token[ScopedChoice | None]:
    """Put a choice in force in this thread or task until `leave`."""
    try:
        return variable.set(choice)
    finally:
        _entered()


def leave(token: Token[ScopedChoice | None]) -> None:
    """End what `enter` began."""
    try:
        variable.reset(token)
    finally:
        _entered()


def on_enter(callback: Callable[[], object]) -> None:
    """Have a function called after each change of a choice in force, by what remembers it for a thread."""
    _remembering.append(callback)


def _entered() -> None:
    for callback in _remembering:
        callback()
    _keep(variable.get())


# A token that is made begins `ALIGNED * number` elements into its storage, so that it is aligned to sixteen
# bytes. `GUARD` elements follow it: a length that no slice of an ordinary tensor is likely to have.
# A tensor on a CPU that is there already is marked where it is, which takes a third of the time: its storage
# is made longer by `MARKED * number + MARKED_GUARD` bytes, multiples of 8, because `torch.load` reads
# whole elements. An eighth of `MARKED` is a prime, so a part of the tensor is unlikely to carry a choice.
# `csrc/layouts.h` has the same numbers.
ALIGNED, GUARD, MARKED, MARKED_GUARD = 4, 13, 1016, 104


def choice_token(choice: ScopedChoice | None, like: Tensor) -> Tensor:
    """Return a uint64 scalar on the device of `like` that carries a choice."""
    if choice is None:
        return like.new_empty((), dtype=torch.uint64)
    base = like.new_empty(ALIGNED * choice.number + 1 + GUARD, dtype=torch.uint64)
    return base.as_strided((), (), ALIGNED * choice.number)


def with_token(tensor: Tensor, choice: ScopedChoice) -> Tensor:
    """Have a new tensor, which nothing else refers to, carry a choice; returns it or a copy.

    Shape, strides and values stay. An inference tensor that would be copied carries none: autograd saves
    none for a backward.
    """
    storage = tensor.untyped_storage()
    stored = storage.nbytes()
    # All of it is there, once: what it spans is its storage. Inference tensors are marked, too: to say if
    # it is one, a tensor gives the interpreter's lock up and takes it again, as slow as marking.
    if stored == tensor.nbytes and tensor.is_cpu:
        storage.resize_(stored + MARKED * choice.number + MARKED_GUARD)
        return tensor
    if tensor.is_inference():
        return tensor
    shape, stride, start = tensor.shape, tensor.stride(), ALIGNED * choice.number
    extent = _extent(shape, stride)
    return tensor.new_empty(start + extent + GUARD).as_strided_(shape, stride, start).copy_(tensor)


def read_token(tensor: Tensor) -> ScopedChoice | None:
    """Return the choice that a tensor, of any shape and dtype, carries, or None; reads no element."""
    stored = tensor.untyped_storage().nbytes()
    start = int(tensor.storage_offset())
    if not start:  # if it carries one, it was marked where it is, so that it spans as many elements as it has
        return _by_mark.get(stored - tensor.nbytes)
    number, rest = divmod(start, ALIGNED)
    rest = rest or stored // tensor.element_size() - start - _extent(tensor.shape, tensor.stride()) - GUARD
    return _choices[number - 1] if not rest and 0 < number <= len(_choices) else None


@functools.lru_cache(maxsize=1024)
def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return how many elements of its storage a tensor spans: strides count, not elements."""
    return max(1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)), 0)


leave_module_uncompiled(__name__)

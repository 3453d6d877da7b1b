"""The functions of the public API that change settings: registering, configuring, installing, recording."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import (
    AbstractContextManager,
    ContextDecorator,
    _AsyncGeneratorContextManager,
    _GeneratorContextManager,
)
from contextvars import ContextVar
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import torch

from attnreg import _autoload
from attnreg.core import aten, registry
from attnreg.core.aten import bypassed
from attnreg.core.contract.backend import Backend
from attnreg.core.contract.spec import Device
from attnreg.core.dispatch import scope, trace
from attnreg.core.policy import current as policy
from attnreg.core.policy.sources import keeps_native, transformers, under_a_lock
from attnreg.core.registry.entry import Entry
from attnreg.core.settings.other_names import device_meant
from attnreg.core.times.traces import check_writable
from attnreg.core.torchlib.frames import (
    leave_module_uncompiled,
    leave_wrapper_uncompiled,
    raise_between_graphs,
)
from attnreg.errors import (
    AttnregError,
    BackendUnavailableError,
    ConfigError,
    InvalidInputError,
    RegistrationError,
    first_ten,
)
from attnreg.masks import serving

if TYPE_CHECKING:  # importing this takes 0.1 s, and most programs need no settings file
    from attnreg.core.settings.config import Settings

__all__ = [
    "Handle", "configure", "install", "list_backends", "record", "register_backend", "reload",
    "uninstall", "use_backend",
]  # fmt: skip

log = logging.getLogger("attnreg")

F = TypeVar("F", bound=Callable[..., Any])


class Handle:
    """The result of `register_backend`: `remove` undoes the registration.

    A context manager, too: the registration ends with the `with` block.
    """

    def __init__(self, registration: registry.Registration | None, entry: Entry) -> None:
        self._registration = registration
        self._entry = entry

    @property
    def backend(self) -> str:
        """The name of the registered backend."""
        return self._entry.name

    def remove(self) -> None:
        """Undo the registration; a second call changes nothing.

        Without any registration the routers pass every call to torch's own kernel. A backend of the program's
        own is forgotten with its last registration.
        """
        registration, self._registration = self._registration, None
        if registration is not None:
            registry.forget(registration)
        registry.discard(self._entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def __reduce__(self) -> NoReturn:
        advice = "register the backend in the other process, or set ATTNREG_BACKEND for both"
        raise TypeError(f"a Handle can't be pickled or copied: it undoes a change of this process; {advice}")

    def __repr__(self) -> str:
        state = "registered" if self._registration is not None else "removed"
        return f"<attnreg.Handle {self.backend!r}, {state}>"


def register_backend(
    backend: str | Backend, *, devices: str | Iterable[str] | None = None, required: bool = True
) -> Handle:
    """Put a backend first for the devices that it serves, and run PyTorch's own functions on it.

    Each call adds a registration, also for the same backend, and a handle undoes only its own. A notebook's
    cell that runs twice therefore leaves one behind: use a `with` block in cells that run again.

    Args:
        backend: the name of a known backend, in any case, or of a kernel from the hub
            (`hub:owner/repository@revision`), or a `Backend` of the caller's own.
        devices: where it is preferred: "cuda", "cpu", "sm_90", ...; by default every device that it serves.
        required: whether it is an error if the backend can't load here. Otherwise that is logged.

    Returns:
        A handle that undoes the registration.

    Raises:
        UnknownBackendError: no backend has this name. The message lists known names and the nearest.
        BackendUnavailableError: it can't load here. The message has the reason and what to install.
        RegistrationError: another backend has its name, it doesn't serve one of `devices`, or the routers
            can't be installed.

    An error changes nothing.
    """
    policy.sources()  # raises, before anything changes, if settings can't be read
    known = registry.entries().values()
    if isinstance(backend, Backend):
        caller = sys._getframe(1)  # for messages about two backends of the same name
        entry = registry.add(backend, f"registered at {caller.f_code.co_filename}:{caller.f_lineno}")
    else:
        entry = registry.find(backend)
    try:
        if entry.on_request and (off := policy.current().disabled.get(entry.name.casefold())):
            raise RegistrationError(f"{entry.name} is disabled by {off}, expected one whose code may run")
        led = _devices(entry, devices)
        if not entry.unavailable():
            aten.ensure()  # captures torch's own kernels before a package that loads can override ops
        try:
            entry.kernels()
        except BackendUnavailableError as error:
            if required:
                raise
            log.warning("%s; going on without it", error)
            return Handle(None, entry)
    except BaseException:
        if entry not in known:
            registry.discard(entry)
        raise
    if source := policy.current().disabled.get(entry.name.casefold()):
        log.warning("%s is registered, but it is disabled by %s and won't run", entry.name, source)
    return Handle(registry.prefer(entry, led), entry)


def list_backends() -> list[str]:
    """Return the names of all known backends, whether or not they can load here."""
    return [entry.name for entry in registry.entries().values()]


def configure(path_or_settings: str | os.PathLike[str] | Settings | Mapping[str, Any]) -> None:
    """Apply a settings file, or a `Settings` made in the program.

    A file replaces an earlier file, settings of the program replace earlier ones. Settings of the program
    override a file's; the environment overrides both.

    Raises:
        ConfigError: the file can't be read, or a value is wrong. The message has file, line, key, and what
            was got and expected. For a file with the line `on_error = "native"`, and with
            ATTNREG_ON_ERROR=native, the message is logged instead, unless a lockfile is asked for.
        RegistrationError: the routers can't be installed.

    An error changes nothing.
    """
    registry.entries()  # discovers, which it mustn't do behind the lock
    with registry.lock:
        try:
            fresh = policy.changed_by(path_or_settings)
        except ConfigError as error:
            if not isinstance(path_or_settings, str | os.PathLike):
                raise
            if not keeps_native(path_or_settings):
                raise under_a_lock(error, path_or_settings) from error
            policy.leave_out(error, policy.EARLIER_SETTINGS)
            return
        aten.ensure()
        policy.apply(fresh)
        serving.follow()
    _autoload.run_behind_transformers(transformers(fresh))


def reload() -> None:
    """Read the environment variables and the settings files again.

    A kernel from the hub that couldn't be loaded is tried again when it is next needed. A fault is an error,
    also with `on_error = "native"`: the settings in force stay.

    Raises:
        ConfigError: a variable or a file is wrong.
        RegistrationError: the routers can't be installed.

    An error changes nothing.
    """
    registry.forget_failures()  # not behind the lock, where backends aren't discovered or waited for
    with registry.lock:
        fresh = policy.reread()
        if policy.serves(fresh):
            aten.ensure()
        policy.apply(fresh)
        serving.follow()
    _autoload.run_behind_transformers(transformers(fresh))


# The choice before each open `use_backend`. It isn't in the object, because all threads share a decorator's.
_outer: ContextVar[tuple[scope.ScopedChoice | None, ...]] = ContextVar("attnreg_outer_choices", default=())


# What a function returns whose body runs after the call.
_LATER = (
    GeneratorType, CoroutineType, AsyncGeneratorType, _GeneratorContextManager, _AsyncGeneratorContextManager,
)  # fmt: skip


class _Block(ContextDecorator, AbstractContextManager[None]):
    """A `with` block that decorates functions as well, if their bodies run inside of it."""

    def __call__(self, func: F) -> F:
        if isinstance(func, staticmethod | classmethod):
            return type(func)(self(func.__func__))
        self._check(func)

        @functools.wraps(func)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                result = func(*args, **kwargs)
            if isinstance(result, _LATER):
                if isinstance(result, CoroutineType):
                    result.close()  # else Python warns that nothing has awaited it
                self._refuse_later(func, f"which returned {result!r}, whose body")
            return result

        return leave_wrapper_uncompiled(inside)  # type: ignore[return-value]

    def _check(self, func: object) -> None:
        """Raise an error if calls of `func` would run after the block, or not be noticed at all."""
        name = type(self).__name__
        if isinstance(func, type):
            raise InvalidInputError(
                f"{name}: got the class {func.__qualname__}, whose methods run after it is called, expected "
                f"a function: decorate its methods, or write `with {name}(...)` inside them"
            )
        if not callable(func):
            raise InvalidInputError(
                f"{name}: got {func!r} to decorate, expected a function: write @{name}(...) below a "
                "decorator like @property"
            )
        later = inspect.isgeneratorfunction, inspect.isasyncgenfunction, inspect.iscoroutinefunction
        if any(runs_later(candidate) for runs_later in later for candidate in (func, type(func).__call__)):
            self._refuse_later(func, "whose body")

    def _refuse_later(self, func: object, which: str) -> NoReturn:
        name, shown = type(self).__name__, getattr(func, "__qualname__", func)
        raise InvalidInputError(
            f"{name}: got {shown}, {which} runs after the call (async def, or a generator), expected a "
            f"function that runs at once: write `with {name}(...)` inside it, around no yield"
        )


class use_backend(_Block, scope.ScopeInGraph):  # noqa: N801 - a context manager, named as it is used
    """Put backends first inside a `with` block or a decorated function.

    Names are tried in order. The block applies to this thread or task alone. It also applies to the backward
    of calls inside the block, and to forwards that activation checkpointing repeats in a backward called
    inside. If `backward()` is called after the block, use `backend=` on the call, or `register_backend`, for
    checkpointed forwards. The backward of torch's own `varlen_attn` remembers nothing of its forward: it runs
    on the registered backends. So does, on a CPU, SDPA's backward in code that Inductor has compiled, if the
    block is around that code and not in it.
    On a GPU a repeated forward runs on a thread of autograd's, by the choice of the thread that called
    `backward()`. If several tasks of asyncio share that thread, the last task that entered a block decides.

    In code that torch.compile or torch.export traces, the choice becomes part of the graph. A block inside a
    checkpointed function can't be part of one graph, but a block around the checkpoint can.

        with attnreg.use_backend("math"):
            out = F.scaled_dot_product_attention(query, key, value)

    Raises:
        UnknownBackendError: no backend has one of the names.
        BackendUnavailableError: one of them can't load here.
        RegistrationError: the routers can't be installed.
    """

    def __init__(self, *names: str) -> None:
        if not names:
            raise InvalidInputError("use_backend: got no name, expected at least one backend")
        choice = choice_or_error(names)
        if not isinstance(choice, scope.ScopedChoice):
            raise_between_graphs(choice)
        self.names, self._choice = names, choice

    def __reduce__(self) -> tuple[type[Self], tuple[str, ...]]:
        return type(self), self.names  # choices have other numbers in another process

    def __enter__(self) -> None:
        if torch.compiler.is_compiling() or scope.backends_in_graph():
            scope.enter_in_graph(self.names)
            return
        _outer.set((*_outer.get(), scope.variable.get()))  # without inherited choices
        scope.enter(self._choice)

    def __exit__(self, *exc: object) -> None:
        if torch.compiler.is_compiling() or scope.backends_in_graph():
            scope.leave_in_graph()
            return
        if not (outer := _outer.get()):
            raise InvalidInputError("use_backend: the block is left in a thread or task that didn't enter it")
        *further, before = outer
        _outer.set(tuple(further))
        scope.enter(before)


def choice_or_error(names: tuple[str, ...], source: str = "") -> scope.ScopedChoice | AttnregError:
    """Return the choice of a block, or the error: Dynamo, which traces calls of this, would wrap it."""
    try:
        choice = scope.preferred(names, source)
        aten.ensure_often()
    except AttnregError as error:
        return error
    return choice


# As `torch.compiler.assume_constant_result` marks a function, which imports all of Dynamo.
choice_or_error._dynamo_marked_constant = True  # type: ignore[attr-defined]


class record(_Block):  # noqa: N801 - a context manager, named as it is used
    """Write each distinct attention call of a `with` block to a file, once, with its count.

    The file is written every minute and when the block ends. Counts are added to the file's counts. All
    threads are recorded. Recording changes no choice: unless a backend is requested, torch chooses.

    Raises:
        ConfigError: the file can't be written, or isn't a file of recorded calls.
        RegistrationError: the routers can't be installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._recordings: list[trace.Recording] = []  # one for each time that the block is open

    def __enter__(self) -> None:
        file = check_writable(self._path)
        aten.ensure()
        self._recordings.append(trace.start(file))
        policy.watch(1)
        bypassed.observe(1)

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        recording = self._recordings.pop()
        policy.watch(-1)
        bypassed.observe(-1)
        trace.stop(recording)
        try:
            recording.write()
        except ConfigError as error:
            if error_type is None:
                raise
            log.warning("%s", error)  # the program's own exception is more informative
        recording.say_what_it_lacks()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a record can't be pickled or copied: it records the calls of this process; make one by "
            "attnreg.record(path) in the other process, or set ATTNREG_RECORD for both"
        )


def install() -> None:
    """Serve PyTorch's own functions, even if no backend is registered.

    Registering or configuring does this, too. A second call changes nothing.

    Raises:
        RegistrationError: torch lacks an op or declares another schema, or other Python code overrides the
            op.
    """
    aten.ensure()
    policy.activate(True)


def uninstall() -> None:
    """Remove the routers, so that torch's ops are as without attnreg.

    Registrations and settings are kept, and apply again after the next `install`. Don't call this while
    another
    thread calls attention: torch can't unregister a kernel that is in use.
    """
    policy.activate(False)
    aten.restore()


def _devices(entry: Entry, devices: str | Iterable[str] | None) -> tuple[str, ...]:
    backend = entry.open()
    serves = backend.devices if backend is not None else ()
    if devices is None:
        return serves
    several = (devices,) if isinstance(devices, str | bytes | torch.device) else devices
    several = tuple(several) if isinstance(several, Iterable) else (several,)
    for device in several:
        if not isinstance(device, str | torch.device | Device) or not str(device).strip():
            raise RegistrationError(f"devices: got {device!r}, expected kinds of devices ('cuda', 'sm_90')")
    named = tuple(Device.parse(str(device)) for device in several)
    single = sorted(str(device) for device in named if device.index is not None)
    if single:
        got = ", ".join(first_ten(single))
        raise RegistrationError(
            f"devices: got {got}, expected a kind of device ('cuda', 'sm_90'), not a single one"
        )
    foreign = sorted({device.type for device in named} - set(serves))
    if (foreign or not named) and backend is not None:
        near = device_meant(foreign[0], (), serves) if foreign else ""
        raise RegistrationError(
            f"devices: got {', '.join(first_ten(foreign)) or 'none'}, expected some of those that "
            f"{entry.name} supports: {', '.join(serves)}{near}"
        )
    return tuple(device.keys[0] for device in named)


leave_module_uncompiled(__name__)

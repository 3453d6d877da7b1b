"""Contexts that decide which kernel runs: torch alone, attnreg by itself or by measurement, one backend."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from attnreg import _registry, api, aten
from attnreg.contract.backend import Backend, Kernels
from attnreg.dispatch import planning
from attnreg.errors import BackendUnavailableError, ConfigError
from attnreg.selection import policy
from attnreg.tuning.tables import Report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Set aside what environment variables and files ask for; afterwards all is as it was."""
    routers, active = aten.installed(), policy.activate(False)
    put_back = policy.set_aside()
    try:
        yield
    finally:
        put_back()
        policy.activate(active)
        (aten.ensure if routers else aten.restore)()


@contextlib.contextmanager
def torch_alone() -> Iterator[None]:
    """Have torch's ops as they are without attnreg."""
    api.uninstall()
    yield


@contextlib.contextmanager
def in_the_callers_thread(within: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Have a backward run in the thread that calls it, inside another of these blocks."""
    with within(), torch.autograd.set_multithreading_enabled(False):
        yield


@contextlib.contextmanager
def by_default() -> Iterator[None]:
    """Have nothing registered: what attnreg does by itself."""
    aten.ensure()
    yield


def settings(
    chosen_by: str, table: Path | None = None, among: Iterable[str] = ()
) -> Callable[[], AbstractContextManager[None]]:
    """Return what has `policy` in force, "measured" or "order", for as long as a `with` block lasts.

    With `among`, no other backends are chosen, but for `math`, to which all else falls back.
    """
    wanted = {"math", *(name.casefold() for name in among)}
    others = (
        [entry.name for name, entry in _registry.entries().items() if name not in wanted] if among else []
    )

    @contextlib.contextmanager
    def within() -> Iterator[None]:
        before = policy.sources()
        named = {} if table is None else {"tuned": table}
        api.configure({"policy": chosen_by, "disabled": others} | named)
        try:
            yield
        finally:
            policy.apply(before)

    return within


def table_in_force(device: torch.device, table: Path | None = None) -> str:
    """Return the name of the measured table that decides on a device, or why none does.

    Raises:
        ConfigError: a table was named, and isn't true of this machine.
    """
    with settings("measured", table)():
        tables = policy.current().tables
        report = tables.report(planning.device_of(device)) if tables is not None else Report()
    named = report.in_force is not None and bool(report.in_force.source)
    if table is not None and not named:
        reason = "; ".join(report.refused) or f"it is of another kind of device than {device.type}"
        raise ConfigError(f"--table: {table}: {reason}")
    if report.in_force is None:
        return "; ".join(("the default order, as no table is in force", *report.refused))
    return str(report.in_force)


def led_by(backend: str | Backend) -> Callable[[], AbstractContextManager[Any]]:
    """Return what registers a backend for as long as a `with` block lasts."""
    return lambda: api.register_backend(backend)


def scoped(backend: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what chooses a backend by `use_backend` for as long as a `with` block lasts."""
    return lambda: api.use_backend(backend)


def mixed(forward: str, backward: str) -> Backend:
    """Return a backend made of one's forward and another's backward, which both have to load."""
    first, second = _registry.find(forward), _registry.find(backward)
    if first.backend is None or second.backend is None:
        raise BackendUnavailableError(f"{forward} or {backward} is broken")
    return Backend(
        name=f"{forward}+{backward}",
        forward=first.backend.forward,
        backward=second.backend.backward,
        load=lambda: Kernels(first.kernels().forward, second.kernels().backward),
    )

"""Finding backends: the modules of `attnreg/backends/` and the entry points `attnreg.backends`.

Backends are imported at the first call of `discover`, not at import. A broken backend never hides the others:
it becomes an `Entry` that keeps the exception, so that `info` and `explain` can show it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points

from attnreg.core.contract.backend import Backend
from attnreg.core.registry.entry import Entry
from attnreg.core.torchlib.isolation import raise_if_temporary, strip_tracebacks
from attnreg.errors import RegistrationError

FOLDER, GROUP = "attnreg.backends", "attnreg.backends"


def discover() -> list[Entry]:
    """Return all backends of this installation, broken ones included."""
    return [_entry(*arguments) for arguments in _points()]


def _points() -> Iterator[tuple[EntryPoint, str, bool]]:
    """Yield each entry point, its origin, and whether another package than attnreg has installed it."""
    # By name: the contract is below the backends in the order of imports.
    for module in pkgutil.iter_modules(importlib.import_module(FOLDER).__path__):
        if not module.name.startswith("_"):
            path = f"{FOLDER}.{module.name}"
            yield EntryPoint(module.name, f"{path}:BACKEND", GROUP), path, False
    # Sorted: which of two backends of one name comes first mustn't depend on the file system.
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        package = f" of {point.dist.name} {point.dist.version}" if point.dist else ""
        yield point, f"entry point {point.value}{package}", True


def _entry(point: EntryPoint, origin: str, installed: bool = False) -> Entry:
    try:
        backend = point.load()
        if not isinstance(backend, Backend):
            raise RegistrationError(f"{origin}: got {type(backend).__name__}, expected attnreg.Backend")
    except BaseException as error:  # noqa: BLE001 - the other backends have to load
        raise_if_temporary(error)
        return Entry(point.name, origin, cause=strip_tracebacks(error), installed=installed)
    return Entry(backend.name, origin, backend, installed=installed)

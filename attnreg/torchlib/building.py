"""Loading what attnreg has in C++, if it has been compiled; the other rooms use these functions.

`ensure_built` has it compiled in the background, `build` compiles it now.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import logging
from pathlib import Path
from types import ModuleType

from attnreg.errors import BuildError
from attnreg.torchlib import libraries
from attnreg.torchlib.background import Status, build, ensure_built, is_left_out, status, wait_built
from attnreg.torchlib.libraries import (
    CALL_CACHE,
    CPU_KERNEL,
    LIBRARIES,
    Library,
    existing,
    in_one_line,
    target,
)

__all__ = [
    "CALL_CACHE", "CPU_KERNEL", "LIBRARIES", "Status", "build", "built", "ensure_built", "has_file",
    "in_one_line", "loaded", "loaded_cpu_kernel", "status", "target",
]  # fmt: skip

log = logging.getLogger("attnreg")


def built() -> Path | None:
    """Return the file of the call cache, if it is compiled."""
    return existing(CALL_CACHE)


def loaded() -> ModuleType:
    """Return the call cache as a module, loaded once; with ATTNREG_BUILD=now it is compiled first.

    Raises BuildError if it isn't compiled, is damaged or can't be loaded, or others can write to it.
    """
    wait_built()
    if file := built():
        return _load(file)
    libraries.checked(CALL_CACHE)  # raises with the reason
    raise BuildError("the call cache isn't compiled for this torch and Python; `attnreg build` does it")


@functools.cache
def _load(file: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(CALL_CACHE.name, str(file))
    spec = importlib.util.spec_from_file_location(CALL_CACHE.name, file, loader=loader)
    try:
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]  # there is a loader
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"{file} can't be loaded: {error}; `attnreg build` compiles it again") from error
    log.info("repeated calls use the compiled call cache, %s", file)
    return module


def loaded_cpu_kernel() -> ctypes.CDLL:
    """Return the kernel of the CPU backend, loaded once; with ATTNREG_BUILD=now it is compiled first.

    Raises BuildError as `loaded` does, and where ATTNREG_ROUTERS leaves out what is compiled.
    """
    if is_left_out():
        raise BuildError("ATTNREG_ROUTERS=python leaves compiled libraries out")
    wait_built()
    return _load_kernel(libraries.checked(CPU_KERNEL))


@functools.cache
def _load_kernel(file: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        raise BuildError(f"{file} can't be loaded: {error}; `attnreg build` compiles it again") from error
    log.info("the cpu backend uses the compiled kernel, %s", file)
    return library


def has_file(library: Library) -> bool:
    """Return whether a library was compiled and no setting leaves it out, even if it can't be loaded."""
    try:
        return not is_left_out() and target(library).is_file()
    except (BuildError, OSError):
        return False

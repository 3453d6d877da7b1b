"""Loads the compiled C++ libraries; other rooms use the functions of this module.

`ensure_built` starts a build in the background, `build` compiles at once.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import logging
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from attnreg.core.torchlib import background, caches, libraries, locks
from attnreg.core.torchlib.background import (
    build,
    ensure_built,
    follow_setting,
    is_left_out,
    require_kernel,
    wait_built,
)
from attnreg.core.torchlib.libraries import (
    CALL_CACHE,
    CPU_KERNEL,
    LIBRARIES,
    Library,
    find_file,
    in_one_line,
    target,
)
from attnreg.errors import BuildError

__all__ = [
    "CALL_CACHE", "CPU_KERNEL", "LIBRARIES", "Status", "build", "built", "ensure_built", "follow_setting",
    "in_one_line", "instructions", "is_current", "is_loaded", "loaded", "loaded_cpu_kernel", "may_be_loaded",
    "require_kernel", "slow_path", "status", "target", "wait_built",
]  # fmt: skip

log = logging.getLogger("attnreg")


class Status(NamedTuple):
    """The state of a library, as `attnreg info` shows it."""

    # "built", "prebuilt AVX2" (by a wheel), "built, not used", "building", "failed", "off" or "not built"
    state: str
    file: Path | None = None
    reason: str = ""  # why it isn't built or used, and what the user can do


def built() -> Path | None:
    """Return the file of the call cache, if it is compiled."""
    return find_file(CALL_CACHE)


def may_be_loaded(library: Library) -> bool:
    """Whether a library is compiled and ATTNREG_ROUTERS allows it; acquires no lock, unlike `status`."""
    return not is_left_out() and find_file(library) is not None


def is_current(library: Library) -> bool:
    """Return whether a library is compiled on this machine from the present source and isn't damaged.

    Doesn't load it: the call cache would need torch, whose import takes seconds.
    """
    file = find_file(library)
    return file is not None and file.parent != libraries.PREBUILT


def loaded() -> ModuleType:
    """Return the call cache as a module, loaded once; with ATTNREG_BUILD=now it is compiled first.

    Raises BuildError if its file is missing, is damaged, can't be loaded, or other users can write to it.
    """
    wait_built()
    if file := built():
        return _load_module(file)
    libraries.check_file(CALL_CACHE)  # raises with the reason
    raise BuildError("the call cache isn't compiled for this torch and Python; `attnreg build` does it")


@functools.cache
def _load_module(file: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(CALL_CACHE.name, str(file))
    spec = importlib.util.spec_from_file_location(CALL_CACHE.name, file, loader=loader)
    try:
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]  # there is a loader
        loader.exec_module(module)
        _check_identity(CALL_CACHE, module.library)
    except (ImportError, AttributeError) as error:
        raise BuildError(
            f"{file} can't be loaded: {error}; `attnreg build --force` compiles it again"
        ) from error
    log.info("repeated calls use the compiled call cache, %s", file)
    return module


def loaded_cpu_kernel() -> ctypes.CDLL:
    """Return the library of the CPU backend, loaded once, compiled here or brought by a wheel.

    With ATTNREG_BUILD=now it is compiled first where there is neither.

    Raises BuildError as `loaded` does, and where ATTNREG_ROUTERS=python excludes compiled libraries.
    """
    if is_left_out():
        raise BuildError("ATTNREG_ROUTERS=python leaves compiled libraries out")
    wait_built()
    return _load_kernel(libraries.check_file(CPU_KERNEL))


@functools.cache
def _load_kernel(file: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(file))
        library.attnreg_library.restype = ctypes.c_char_p
        _check_identity(CPU_KERNEL, library.attnreg_library().decode(errors="replace"))
    except (OSError, ImportError, AttributeError) as error:
        raise BuildError(
            f"{file} can't be loaded: {error}; `attnreg build --force` compiles it again"
        ) from error
    log.info("the cpu backend uses the compiled kernel, %s", file)
    return library


def instructions() -> str:
    """Return which instructions the loaded kernel of the CPU backend uses: "AVX-512, AMX for bfloat16".

    Raises BuildError as `loaded_cpu_kernel` does.
    """
    level = libraries.machine_level()
    names = [level.name if level else "those of any CPU of this kind"]
    if loaded_cpu_kernel().attnreg_has_tiles():
        names.append("AMX for bfloat16")
    return ", ".join(names)


def _check_identity(library: Library, name: str) -> None:
    """Raise ImportError unless a file has the library of its name, as after a wrong copy.

    Another library would take the arguments of its functions for something else.
    """
    if name != (expected := libraries.identity(library)):
        raise ImportError(f"it has another library, {name}, expected {expected}")


def is_loaded(library: Library) -> bool:
    """Return whether this process has loaded a library."""
    return (_load_module if library is CALL_CACHE else _load_kernel).cache_info().currsize > 0


def slow_path(library: Library) -> str:
    """Return what runs without a library and what that costs, as a sentence."""
    return f"{library.title} isn't used (`attnreg info` says why), so {library.without}"


def status(library: Library) -> Status:
    """Return whether a library is built, or the reason why it isn't."""
    try:
        if file := find_file(library):
            left_out = "ATTNREG_ROUTERS=python leaves compiled libraries out" if is_left_out() else ""
            return Status("off" if left_out else libraries.how_built(file), file, left_out)
        if process := locks.holder(background.lock_path()):
            return Status("building", reason=f"process {process} is compiling now")
        if failure := background.earlier_failure(library):
            return Status("failed", reason=failure)
        if reason := libraries.why_not_used(library):
            return Status("built, not used", target(library), reason)
        for folder in (target(library).parent, background.lock_path().parent):
            caches.check_writable(folder)
            caches.check_can_make(folder)
        libraries.find()
    except (BuildError, OSError) as error:
        return Status("not built", reason=str(error))
    mode = background.build_mode()
    if mode == "left out":
        return Status("off", reason="ATTNREG_ROUTERS=python leaves compiled libraries out")
    if mode == "off":
        return Status("off", reason=f"{background.asked_by()} forbids it; `attnreg build` does it")
    when = "in the background at" if mode == "background" else "before"
    return Status("not built", reason=f"compiled {when} a program's first call; `attnreg build` does it now")

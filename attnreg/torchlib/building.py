"""Compiling what attnreg has in C++: where the results lie, how they are made, and how they are loaded.

There are the routers, in `aten/routers`, and the kernel of the CPU backend, in `backends/cpu_kernel`; the
`module.cpp` of each says what for. They are made once for an installation of torch and of Python, by whoever
asks for it, never on the way: a program that just runs attention starts no compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnreg.errors import AttnregError, BuildError
from attnreg.settings import environment
from attnreg.torchlib import caches

if TYPE_CHECKING:
    from types import ModuleType

__all__ = [
    "CPU_KERNEL",
    "ROUTERS",
    "build",
    "built",
    "has_cpu_kernel",
    "has_cpu_kernel_file",
    "loaded",
    "loaded_cpu_kernel",
    "target",
]

MODULE = "attnreg_call_cache"
COMPILERS = ("c++", "g++", "clang++")
MOST_SAID = 2000  # characters of what a compiler says

# What a process of its own does with what was made: it may be broken in any way.
TRY_MODULE = """
import importlib.util, sys, torch
from importlib.machinery import ExtensionFileLoader
loader = ExtensionFileLoader(*sys.argv[1:])
spec = importlib.util.spec_from_file_location(*sys.argv[1:], loader=loader)
loader.exec_module(importlib.util.module_from_spec(spec))
"""
TRY_LIBRARY = """
import ctypes, sys, torch
library = ctypes.CDLL(sys.argv[2])
library.attnreg_forward, library.attnreg_backward
"""


class Library(NamedTuple):
    """Something to compile.

    Attributes:
        name: what its files begin with.
        folder: where they lie, as `caches.folder` has it.
        what: what to call it in messages.
        main: the source; it includes only headers beside it, and torch's.
        flags: for the compiler.
        libraries: torch's that it is linked to.
        trial: a script that loads it, given its name and file.
        is_native: whether it is compiled for the instructions that torch uses on this machine.
    """

    name: str
    folder: str
    what: str
    main: Path
    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    trial: str
    is_native: bool = False

    def all_flags(self) -> tuple[str, ...]:
        """Return the flags with those for this machine."""
        return ("-std=c++20", "-fPIC", "-shared", "-w", *self.flags, *(_native() if self.is_native else ()))


ROUTERS = Library(
    MODULE,
    "routers",
    "the routers",
    Path(__file__).parents[1] / "dispatch" / "csrc" / "module.cpp",
    ("-O2",),
    ("c10", "torch_cpu", "torch_python"),
    TRY_MODULE,
)
CPU_KERNEL = Library(
    "attnreg_cpu",
    "cpu_kernel",
    "the CPU kernel",
    Path(__file__).parents[1] / "backends" / "cpu" / "kernel" / "module.cpp",
    ("-O3", "-ffp-contract=fast"),
    ("c10", "torch_cpu"),
    TRY_LIBRARY,
    is_native=True,
)


@functools.cache
def target(library: Library = ROUTERS) -> Path:
    """Return the file that `build` makes: another for each torch, Python and state of the source.

    One that is compiled for the machine's instructions has a file for each set of them: a home folder may be
    shared by machines.

    Raises:
        BuildError: the source isn't there, or the user has no home folder.
    """
    try:
        files = library.main, *sorted(library.main.parent.glob("*.h"))
        sources = [file.read_text(encoding="utf-8") for file in files]
        parts = (*sources, *library.all_flags(), *map(str, _versions()))
        name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        return caches.folder(library.folder) / f"{library.name}-{name}.so"
    except (OSError, RuntimeError) as error:
        raise BuildError(f"{library.what} can't be compiled: {error}") from error


def built() -> Path | None:
    """Return the file of the routers, if it was made here before."""
    return _built(ROUTERS)


def _built(library: Library) -> Path | None:
    try:
        file = target(library)
    except BuildError:
        return None
    return file if file.is_file() else None


def build(library: Library = ROUTERS) -> Path:
    """Compile it; takes some seconds, and replaces what was made before.

    Raises:
        BuildError: there is no compiler, or it fails, or what it made can't be loaded; says what it said.
    """
    file = target(library)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Other processes may do the same, or load the file: it is there whole or not at all.
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder) / file.name
            _run(library, _command(library, made))
            _run(library, [sys.executable, "-c", library.trial, library.name, str(made)])
            made.chmod(0o700)
            made.replace(file)
    except OSError as error:
        raise BuildError(f"{library.what} can't be compiled into {file}: {error}") from error
    return file


def loaded() -> ModuleType:
    """Return the routers that `build` has made as a module, loaded once.

    Raises:
        BuildError: nothing is built, or it can't be loaded, or isn't to be trusted.
    """
    file = built()
    if file is None:
        raise BuildError("none are compiled for this torch and Python; `attnreg build` does it")
    return _load(file)


@functools.cache
def _load(file: Path) -> ModuleType:
    _check_ours(file)
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(file))
    spec = importlib.util.spec_from_file_location(MODULE, file, loader=loader)
    if spec is None:
        raise BuildError(f"{file} is no module of Python")
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"{file} can't be loaded: {error}; `attnreg build` makes it anew") from error
    return module


def loaded_cpu_kernel() -> ctypes.CDLL:
    """Return the kernel of the CPU backend that `build` has made.

    Raises:
        BuildError: as `loaded`, or ATTNREG_ROUTERS leaves out what is compiled.
    """
    file = _cpu_kernel_to_load()
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise BuildError(f"{file} can't be loaded: {error}; `attnreg build` makes it anew") from error


def has_cpu_kernel() -> bool:
    """Return whether there is a kernel of the CPU backend to load: looks at the file, not into it."""
    try:
        _cpu_kernel_to_load()
    except BuildError:
        return False
    return True


def has_cpu_kernel_file() -> bool:
    """Return whether it was built and nobody has left it out, even if it can't be loaded."""
    return not _are_left_out() and _built(CPU_KERNEL) is not None


def _cpu_kernel_to_load() -> Path:
    if _are_left_out():
        raise BuildError("ATTNREG_ROUTERS=python leaves it out")
    file = _built(CPU_KERNEL)
    if file is None:
        raise BuildError("none is compiled for this torch and this machine; `attnreg build` does it")
    try:
        _check_ours(file)
    except OSError as error:
        raise BuildError(f"{file} can't be read: {error}") from error
    return file


def _are_left_out() -> bool:
    try:
        return environment.read().routers == "python"
    except AttnregError:
        return False  # what is wrong there is an error of the calls that it would govern


def _check_ours(file: Path) -> None:
    """Check that nobody else can have put there what is about to be run."""
    for place in (file.parent, file):
        found = place.stat()
        if found.st_uid not in (os.getuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise BuildError(f"{place} isn't loaded: it belongs to another user, or others may write to it")


def _versions() -> tuple[str | None, ...]:
    """Return what the result depends on beside its source."""
    return torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI")


def _native() -> tuple[str, ...]:
    """Return the flags for the instructions that torch uses here, in their portable steps."""
    known = torch.backends.cpu.get_cpu_capability()
    if known.startswith("AVX512"):
        return ("-march=x86-64-v4",)
    return ("-march=x86-64-v3",) if known == "AVX2" else ()


def _command(library: Library, output: Path) -> list[str]:
    inside = Path(torch.__file__).parent
    includes = (
        inside / "include",
        inside / "include" / "torch" / "csrc" / "api" / "include",
        sysconfig.get_path("include"),
    )
    runtime = f"libcudart.so.{(torch.version.cuda or '0').partition('.')[0]}"
    return [
        *_compiler(library),
        *library.all_flags(),
        f'-DATTNREG_CUDART="{runtime}"',
        *(f"-I{folder}" for folder in includes),
        str(library.main),
        *("-o", str(output)),
        f"-L{inside / 'lib'}",
        *(f"-l{name}" for name in library.libraries),
    ]


def _compiler(library: Library) -> list[str]:
    if sys.platform != "linux":
        raise BuildError(f"{library.what} can be compiled on Linux only, got {sys.platform}")
    asked = os.environ.get("CXX", "").strip()
    try:
        choices = [shlex.split(asked)] if asked else [[name] for name in COMPILERS]
    except ValueError as error:
        raise BuildError(f"{library.what} can't be compiled: CXX={asked}: {error}") from error
    for name, *arguments in choices:
        if found := shutil.which(name):
            return [found, *arguments]
    wanted = f"CXX={asked}" if asked else " or ".join(COMPILERS)
    raise BuildError(f"{library.what} can't be compiled: there is no C++ compiler, looked for {wanted}")


def _run(library: Library, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        said = done.stderr.strip()[:MOST_SAID] or f"exit status {done.returncode}"
        raise BuildError(f"{library.what} can't be compiled: {command[0]} says\n{said}")

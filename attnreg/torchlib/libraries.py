"""What attnreg has in C++, and the file that each library is compiled into.

There are two: the call cache, which serves repeated calls without Python, and the kernel of the CPU backend.
The `module.cpp` of each says more. A library has a file for each version of torch and Python.
"""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch

from attnreg.errors import BuildError
from attnreg.torchlib import caches

ROOT = Path(__file__).parents[1]

# What a process of its own does with a new file, given a name and the file: it may be broken in any way.
TRY_MODULE = """
import importlib.util, torch
from importlib.machinery import ExtensionFileLoader
loader = ExtensionFileLoader(name, file)
spec = importlib.util.spec_from_file_location(name, file, loader=loader)
loader.exec_module(importlib.util.module_from_spec(spec))
"""
TRY_LIBRARY = """
import ctypes, torch
library = ctypes.CDLL(file)
library.attnreg_forward, library.attnreg_backward
"""


class Library(NamedTuple):
    """Something to compile.

    Attributes:
        name: what its files begin with; of a Python module, its name.
        folder: where they lie, as `caches.folder` has it.
        title: what to call it in messages.
        main: the source; it includes only headers of its own folder, and torch's.
        flags: for the compiler.
        libraries: torch's that it is linked to.
        trial: a script that loads it, with variables `name` and `file`.
        is_native: whether it is compiled for the instructions that torch uses on this machine.
    """

    name: str
    folder: str
    title: str
    main: Path
    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    trial: str
    is_native: bool = False

    def all_flags(self) -> tuple[str, ...]:
        """Return the flags with those for this machine."""
        return ("-std=c++20", "-fPIC", "-shared", "-w", *self.flags, *(_native() if self.is_native else ()))


CALL_CACHE = Library(
    "attnreg_call_cache",
    "call_cache",
    "the call cache",
    ROOT / "dispatch" / "csrc" / "module.cpp",
    ("-O2",),
    ("c10", "torch_cpu", "torch_python"),
    TRY_MODULE,
)
CPU_KERNEL = Library(
    "attnreg_cpu",
    "cpu_kernel",
    "the CPU kernel",
    ROOT / "backends" / "cpu" / "kernel" / "module.cpp",
    ("-O3", "-ffp-contract=fast"),
    ("c10", "torch_cpu"),
    TRY_LIBRARY,
    is_native=True,
)
LIBRARIES = (CALL_CACHE, CPU_KERNEL)


@functools.cache
def target(library: Library = CALL_CACHE) -> Path:
    """Return the file of a library: another for each torch, Python and state of the source.

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
        raise BuildError(f"{library.title} can't be compiled: {error}") from error


def existing(library: Library) -> Path | None:
    """Return the file of a library if it is there; None as well where it can't be looked for."""
    try:
        file = target(library)
        return file if file.is_file() else None
    except (BuildError, OSError):  # is_file raises PermissionError in a home folder that can't be read
        return None


def _versions() -> tuple[str | None, ...]:
    """Return what the result depends on beyond its source."""
    return torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI")


def _native() -> tuple[str, ...]:
    """Return the flags for the instructions that torch uses here, in their portable steps."""
    known = torch.backends.cpu.get_cpu_capability()
    if known.startswith("AVX512"):
        return ("-march=x86-64-v4",)
    return ("-march=x86-64-v3",) if known == "AVX2" else ()

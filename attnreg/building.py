"""Compiling the routers: where the result lies, how it is made, and how it is loaded.

What is compiled lies in `aten/routers`; its `module.cpp` says what for. It is made once for an
installation of torch and of Python, by whoever asks for it, never on the way: a program that just runs
attention starts no compiler.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING

import torch

from attnreg import caches
from attnreg.errors import BuildError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["build", "built", "loaded", "target"]

MODULE = "attnreg_routers"
SOURCES = Path(__file__).parent / "aten" / "routers"
MAIN = SOURCES / "module.cpp"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-w")
LIBRARIES = ("c10", "torch_cpu", "torch_python")
MOST_SAID = 2000  # characters of what a compiler says

# What a process of its own does with what was made: it may be broken in any way.
TRIAL = """
import importlib.util, sys, torch
from importlib.machinery import ExtensionFileLoader
loader = ExtensionFileLoader(*sys.argv[1:])
spec = importlib.util.spec_from_file_location(*sys.argv[1:], loader=loader)
loader.exec_module(importlib.util.module_from_spec(spec))
"""


@functools.cache
def target() -> Path:
    """Return the file that `build` makes: another for each torch, Python and state of the source.

    Raises:
        BuildError: the source isn't there, or the user has no home folder.
    """
    try:
        sources = [file.read_text(encoding="utf-8") for file in (MAIN, *sorted(SOURCES.glob("*.h")))]
        parts = (*sources, *FLAGS, *map(str, _versions()))
        name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        return caches.folder("routers") / f"{MODULE}-{name}.so"
    except (OSError, RuntimeError) as error:
        raise BuildError(f"the routers can't be compiled: {error}") from error


def built() -> Path | None:
    """Return the file, if it was made here before."""
    try:
        file = target()
    except BuildError:
        return None
    return file if file.is_file() else None


def build() -> Path:
    """Compile the routers; takes some seconds, and replaces what was made before.

    Raises:
        BuildError: there is no compiler, or it fails, or what it made can't be loaded; says what it said.
    """
    file = target()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Other processes may do the same, or load the file: it is there whole or not at all.
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder) / file.name
            _run(_command(made))
            _run([sys.executable, "-c", TRIAL, MODULE, str(made)])
            made.chmod(0o700)
            made.replace(file)
    except OSError as error:
        raise BuildError(f"the routers can't be compiled into {file}: {error}") from error
    return file


def loaded() -> ModuleType:
    """Return what `build` has made as a module, loaded once.

    Raises:
        BuildError: nothing is built, or it can't be loaded, or isn't to be trusted.
    """
    file = built()
    if file is None:
        raise BuildError("none are compiled for this torch and Python; `attnreg build` does it")
    return _load(file)


@functools.cache
def _load(file: Path) -> ModuleType:
    for place in (file.parent, file):
        _check_ours(place)
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


def _check_ours(place: Path) -> None:
    """Check that nobody else can have put there what is about to be run."""
    found = place.stat()
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"{place} isn't loaded: it belongs to another user, or others may write to it")


def _versions() -> tuple[str | None, ...]:
    """Return what the result depends on beside its source."""
    return torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI")


def _command(output: Path) -> list[str]:
    inside = Path(torch.__file__).parent
    includes = (
        inside / "include",
        inside / "include" / "torch" / "csrc" / "api" / "include",
        sysconfig.get_path("include"),
    )
    runtime = f"libcudart.so.{(torch.version.cuda or '0').partition('.')[0]}"
    return [
        *_compiler(),
        *FLAGS,
        f'-DATTNREG_CUDART="{runtime}"',
        *(f"-I{folder}" for folder in includes),
        str(MAIN),
        *("-o", str(output)),
        f"-L{inside / 'lib'}",
        *(f"-l{library}" for library in LIBRARIES),
    ]


def _compiler() -> list[str]:
    if sys.platform != "linux":
        raise BuildError(f"the routers can be compiled on Linux only, got {sys.platform}")
    asked = os.environ.get("CXX", "").strip()
    try:
        choices = [shlex.split(asked)] if asked else [[name] for name in COMPILERS]
    except ValueError as error:
        raise BuildError(f"the routers can't be compiled: CXX={asked}: {error}") from error
    for name, *arguments in choices:
        if found := shutil.which(name):
            return [found, *arguments]
    wanted = f"CXX={asked}" if asked else " or ".join(COMPILERS)
    raise BuildError(f"the routers can't be compiled: there is no C++ compiler, looked for {wanted}")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        said = done.stderr.strip()[:MOST_SAID] or f"exit status {done.returncode}"
        raise BuildError(f"the routers can't be compiled: {command[0]} says\n{said}")

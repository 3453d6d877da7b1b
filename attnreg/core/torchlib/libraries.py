"""The C++ libraries: their sources and flags, the file of each, and how the compiler is run.

There are two: the call cache, which runs repeated calls without Python, and the kernel of the CPU backend.
Each is described in its `module.cpp`. The call cache has a file for each version of torch and Python. The
kernel knows neither. It has a file for each level of instructions, and a wheel brings these (`PREBUILT`).
Torch takes seconds to import. It is imported to compile only, so that `attnreg build` is quick where
everything is compiled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

from attnreg.core.torchlib import caches, children
from attnreg.errors import BuildError

ROOT = Path(__file__).parents[2]
# Libraries that a wheel brings; `make wheels` compiles them, and a checkout has none.
PREBUILT = ROOT / "backends" / "cpu" / "prebuilt"

COMPILERS = ("c++", "g++", "clang++")
# The prefix of folders of unfinished builds; nothing else in the cache has it.
SCRATCH = ".building-"
# How many characters of a compiler's output a message has, and after how many seconds the compiler is killed.
MOST_CHARACTERS, TIMEOUT = 2000, 1800

# Scripts that load a new file in another process, because a broken file may crash it.
TRY_MODULE = """
import importlib.util, torch
from importlib.machinery import ExtensionFileLoader
loader = ExtensionFileLoader(name, file)
spec = importlib.util.spec_from_file_location(name, file, loader=loader)
loader.exec_module(importlib.util.module_from_spec(spec))
"""
TRY_LIBRARY = """
import ctypes
library = ctypes.CDLL(file)
library.attnreg_use_threads, library.attnreg_forward, library.attnreg_backward, library.attnreg_library
"""


class Level(NamedTuple):
    """A level of x86-64 instructions.

    Attributes:
        name: its name for users.
        capability: what the variable ATEN_CPU_CAPABILITY of torch calls it.
        march: what compilers call it.
        instructions: what a CPU of this level has, by the names of /proc/cpuinfo.
    """

    name: str
    capability: str
    march: str
    instructions: frozenset[str]


_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# The highest first. Code for AMX is part of AVX-512, and runs only on CPUs that have AMX.
LEVELS = (Level("AVX-512", "avx512", "x86-64-v4", _V4), Level("AVX2", "avx2", "x86-64-v3", _V3))


def machine_level() -> Level | None:
    """Return the highest level that this CPU has all of and torch may use, if there is one.

    ATEN_CPU_CAPABILITY limits it, as it limits torch. A virtual machine may hide single instructions.
    """
    limit = os.environ.get("ATEN_CPU_CAPABILITY")
    if limit == "default":
        return None
    first = next((place for place, level in enumerate(LEVELS) if level.capability == limit), 0)
    return next((level for level in LEVELS[first:] if level.instructions <= cpu_flags()), None)


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the names that Linux has for the instructions of an x86-64 CPU; empty elsewhere."""
    with (
        contextlib.suppress(OSError),
        Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines,
    ):
        for line in lines:
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


class InstalledTorch(NamedTuple):
    """The torch that `import torch` finds: its folder, and what its `version.py` says."""

    folder: Path
    version: str
    git_version: str
    cuda: str | None


@functools.cache
def installed_torch() -> InstalledTorch:
    """Return the installed torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    folder = Path(spec.origin).parent.absolute()
    facts = runpy.run_path(str(folder / "version.py"))
    return InstalledTorch(folder, facts["__version__"], facts["git_version"], facts["cuda"])


class Library(NamedTuple):
    """A C++ library, as its compiler command needs it.

    Attributes:
        name: the prefix of its files, and the name of a Python module.
        folder: the purpose that `caches.folder` takes.
        title: its name in messages.
        main: the source file. It includes only headers of its own folder, and torch's.
        flags: flags of the compiler.
        libraries: names of the torch libraries to link. Without any it serves every torch and Python.
        trial: a script that loads it, with variables `name` and `file`.
        without: what runs where it is missing, and what that costs by the pages of measurements.
        backend: the backend that alone uses it; empty if calls of all backends do.
        is_native: whether it is compiled for the instructions of this machine.
    """

    name: str
    folder: str
    title: str
    main: Path
    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    trial: str
    without: str
    backend: str = ""
    is_native: bool = False

    def all_flags(self) -> tuple[str, ...]:
        """Return all flags; native code targets the x86-64 level of this machine."""
        level = machine_level() if self.is_native else None
        of_level = [f"-march={level.march}"] if level else []
        return ("-std=c++20", "-fPIC", "-shared", "-w", *self.flags, *of_level)

    def for_level(self, level: Level) -> Library:
        """Return this library for a level, whichever this machine has."""
        return self._replace(flags=(*self.flags, f"-march={level.march}"), is_native=False)


CALL_CACHE = Library(
    "attnreg_call_cache",
    "call_cache",
    "the call cache",
    ROOT / "core" / "dispatch" / "csrc" / "module.cpp",
    # Functions of ours call each other without the linkage table. A small forward then reads 366 cache lines
    # of instructions, with the table 418. Repeated above a kernel that does nothing, it takes 3.98 us, with
    # the table 4.17 (AMD EPYC).
    ("-O2", "-fno-plt", "-Wl,-Bsymbolic-functions"),
    ("c10", "torch_cpu", "torch_python"),
    TRY_MODULE,
    "Python runs every call: on a CPU a forward of varlen_attn takes 32.2 µs of the host, with it 12.7, and "
    "SDPA 11.6 µs more than torch's, with it 0.6 (docs/results/overhead.md)",
)
CPU_KERNEL = Library(
    "attnreg_cpu",
    "cpu_kernel",
    "the CPU kernel",
    ROOT / "backends" / "cpu" / "kernel" / "module.cpp",
    ("-O3", "-ffp-contract=fast"),
    (),
    TRY_LIBRARY,
    "torch's kernel runs packed calls: forward + backward of ragged batches 1.23 times as fast as padding or "
    "a loop, with it 1.83; causal 1.17, with it 2.26 (2 cores, docs/benchmarks.md)",
    backend="cpu",
    is_native=True,
)
LIBRARIES = (CALL_CACHE, CPU_KERNEL)


# A library file ends with the digest of its other bytes, which loaders ignore. A file beside it could get out
# of step.
DIGEST = hashlib.sha256
DIGEST_BYTES = DIGEST().digest_size


def identity(library: Library) -> str:
    """Return the name of a library's file without its suffix; the library itself has the name, too.

    It depends on the source, the flags, and for a library that links torch's on torch and Python. A native
    library has a name for each level of instructions, because machines may share a home folder. Raises
    OSError if the source is missing.
    """
    files = library.main, *sorted(library.main.parent.glob("*.h"))
    sources = [file.read_text(encoding="utf-8") for file in files]
    versions = map(str, _versions() if library.libraries else ())
    parts = (*sources, *library.all_flags(), *versions, DIGEST.__name__)
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return f"{library.name}-{digest[:16]}"


@functools.cache
def target(library: Library = CALL_CACHE) -> Path:
    """Return the path that a library is compiled to.

    Raises BuildError if the source is missing, or the user has no home folder.
    """
    try:
        return caches.folder(library.folder) / f"{identity(library)}.so"
    except OSError as error:
        raise BuildError(f"{library.title} can't be compiled: {error}") from error


def find_file(library: Library) -> Path | None:
    """Return the file of a library, as `check_file` does; None where `check_file` raises."""
    try:
        return check_file(library)
    except BuildError:
        return None


def check_file(library: Library) -> Path:
    """Check the file of a library, and return the path to load it by, without links.

    A file that was compiled on this machine goes before one that a wheel brought. Raises BuildError if there
    is neither, if the file can't be read or is damaged, or if another user can replace the compiled one.
    """
    try:
        return _check_compiled(library)
    except BuildError:
        if file := _check_prebuilt(library):
            return file
        raise


def how_built(file: Path) -> str:
    """Return "built" for a file of `check_file`, or, if a wheel brought it, "prebuilt" and its level."""
    level = machine_level()
    return f"prebuilt {level.name}" if level and file.parent == PREBUILT else "built"


def _check_prebuilt(library: Library) -> Path | None:
    """Return the file that a wheel brought for this source and machine, None without one.

    Whoever can replace it can replace attnreg's Python as well, so its owner isn't checked. Raises BuildError
    if it is damaged.
    """
    try:
        file = PREBUILT / f"{identity(library)}.so"
        is_whole = _has_digest(file)
    except OSError:
        return None
    if not is_whole:
        raise BuildError(f"{file} is damaged: install attnreg again, or run `attnreg build`")
    return file


def _check_compiled(library: Library) -> Path:
    """Return the file of a library that was compiled on this machine; raises BuildError as `check_file`."""
    file = target(library)
    try:
        file = caches.resolve(file, strict=True)
        problem = caches.unsafe(file)
        if not problem and not _has_digest(file):
            problem = f"{file} is damaged, and `attnreg build` compiles it again"
    except FileNotFoundError:
        what = f"{library.title} isn't compiled for this torch, Python and machine"
        raise BuildError(f"{what}; `attnreg build` does it") from None
    except OSError as error:
        raise BuildError(f"{file} can't be read: {error.strerror or error}") from error
    if problem:
        raise BuildError(problem)
    return file


def why_not_used(library: Library) -> str:
    """Return why a library that is there isn't used; empty if it is used, or isn't there.

    Raises BuildError as `target` does, and OSError if the file's existence can't be determined.
    """
    with caches.readable_errors("read"):
        is_there = target(library).is_file() or (PREBUILT / target(library).name).is_file()
    try:
        if is_there:
            check_file(library)
    except BuildError as error:
        return str(error)
    return ""


def _has_digest(file: Path) -> bool:
    """Return whether a file is as it was when its digest was written behind it."""
    status = file.stat()
    return _digest_matches(file, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _digest_matches(file: Path, *_: int) -> bool:
    """Return whether a file ends with the digest of its contents: a truncated library crashes the process."""
    contents = memoryview(file.read_bytes())
    return DIGEST(contents[:-DIGEST_BYTES]).digest() == contents[-DIGEST_BYTES:]


def _versions() -> tuple[str | None, ...]:
    """Return the versions that a library depends on beyond its source."""
    torch = installed_torch()
    return torch.version, torch.git_version, sysconfig.get_config_var("SOABI")


def compile_library(library: Library) -> Path:
    """Compile a library, load it in another process for a test, and replace the previous file.

    Raises BuildError, with the output, if there is no compiler, it fails, or its result can't be loaded.
    """
    file, problem = target(library), f"{library.title} can't be compiled"
    try:
        caches.make(file.parent)
        place = caches.resolve(file.parent)
        caches.check_writable(place)
        # Other processes may load the file, or compile it as well: it must appear complete or not at all.
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=place) as folder:
            made = Path(folder) / file.name
            compile_into(library, made)
            made.chmod(0o700)
            # The contents reach the disk before the name does, so that a crash leaves no empty file.
            with made.open("rb") as contents:
                os.fsync(contents.fileno())
            made.replace(place / file.name)
    except BuildError as error:
        raise BuildError(f"{problem}: {error}") from error
    except OSError as error:
        raise BuildError(f"{problem} into {file}: {error}") from error
    return file


def compile_into(library: Library, file: Path, *flags: str) -> None:
    """Compile a library into a file with its digest at the end, and load it in another process for a test.

    Raises BuildError as `compile_library` does.
    """
    _run_command([*find(), *_make_arguments(library, file), *flags], str(file.parent))
    with file.open("ab") as contents:
        contents.write(DIGEST(file.read_bytes()).digest())
    trial = python(f"name, file = arguments\n{library.trial}", library.name, str(file))
    _run_command(trial, str(file.parent))


def find() -> list[str]:
    """Return the command of the compiler: CXX with its arguments, else the first of `COMPILERS`.

    Raises BuildError if no compiler exists, CXX can't be parsed, or the system isn't Linux.
    """
    if sys.platform != "linux":
        raise BuildError(f"attnreg compiles on Linux only, got {sys.platform}")
    wanted = os.environ.get("CXX", "").strip()
    try:
        choices = [shlex.split(wanted)] if wanted else [[name] for name in COMPILERS]
    except ValueError as error:
        raise BuildError(f"CXX={wanted}: {error}") from error
    for name, *arguments in choices:
        if path := shutil.which(name):
            return [str(Path(path).absolute()), *arguments]
    looked_for = f"CXX={wanted}" if wanted else " or ".join(COMPILERS)
    raise BuildError(f"there is no C++ compiler, looked for {looked_for}: install one")


def identify_compiler(command: list[str]) -> str:
    """Return a text that differs between compilers and versions, or raise OSError; runs no compiler."""
    file = caches.resolve(Path(command[0]))
    status = file.stat()
    return f"{shlex.join([str(file), *command[1:]])} {status.st_size} {status.st_mtime_ns}"


def python(script: str, *arguments: str) -> list[str]:
    """Return the command of a Python that runs a script and can import torch, but no module by accident.

    Its path has the standard library, torch's folder, and folders of installed packages. It lacks four
    folders that may contain modules of any name: the current folder, the program's own, PYTHONPATH and
    attnreg's.
    """
    installed = [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
    places = [str(installed_torch().folder.parent), *installed]
    begin = "import json, sys\nplaces, arguments = json.loads(sys.argv[1])\nsys.path += places\n"
    return [sys.executable, "-I", "-S", "-c", begin + script, json.dumps([places, arguments])]


def child_environment() -> dict[str, str]:
    """Return the environment of a process that compiles, where `import torch` installs no routers."""
    return os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "ATTNREG_BUILD": "off"}


def in_one_line(message: str) -> str:
    """Shorten a failed build's message to one line for a log: what failed, and the compiler's first line."""
    return " ".join(line.strip() for line in message.splitlines()[:2])


def _make_arguments(library: Library, output: Path) -> list[str]:
    names = [*library.all_flags(), f'-DATTNREG_LIBRARY="{identity(library)}"']
    files = [str(library.main), "-o", str(output)]
    if not library.libraries:
        return [*names, *files]
    torch = installed_torch()
    headers = torch.folder / "include"
    includes = headers, headers / "torch" / "csrc" / "api" / "include", sysconfig.get_path("include")
    runtime = f"libcudart.so.{(torch.cuda or '0').partition('.')[0]}"
    return [
        *names,
        f'-DATTNREG_CUDART="{runtime}"',
        *(f"-I{folder}" for folder in includes),
        *files,
        f"-L{torch.folder / 'lib'}",
        *(f"-l{name}" for name in library.libraries),
        *_find_runtime(),
    ]


def _find_runtime() -> list[str]:
    """Return the path of the C++ runtime that torch has loaded, for the linker; nothing where it isn't known.

    Torch is imported for that. Some compilers link their own runtime into a library, by `-static-libstdc++`
    or because they come with no other. Two runtimes in a process share some of their variables: the first
    number in a message was then a crash, also in torch's own code. A linker that was given torch's runtime
    takes nothing from the other.
    """
    importlib.import_module("torch")
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = (line.split(maxsplit=5)[-1] for line in lines)
    return list({file: None for file in files if Path(file).name.startswith("libstdc++.so")})


def _run_command(command: list[str], folder: str) -> None:
    """Run a command with its temporary files in a folder; raises BuildError with its output if it fails."""
    try:
        done = children.run(command, TIMEOUT, child_environment() | {"TMPDIR": folder}, folder)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {TIMEOUT} s") from error
    if done.returncode:
        output = done.stderr.strip()[:MOST_CHARACTERS] or f"exit status {done.returncode}"
        raise BuildError(f"{command[0]} says\n{output}")

"""attnreg's libraries in C++: their sources, their files, and the compiler's run.

There are two: the call cache, which runs repeated calls without Python, and the kernel of the CPU backend.
The `module.cpp` of each describes it. A library has a file for each version of torch and Python.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from attnreg.core.torchlib import caches
from attnreg.errors import BuildError

ROOT = Path(__file__).parents[2]

COMPILERS = ("c++", "g++", "clang++")
# The prefix of the folders of builds under way; no other name in the cache has it.
SCRATCH = ".building-"
# The characters of a compiler's output that go into a message, and the seconds until a compiler is stopped.
MOST_CHARACTERS, TIMEOUT = 2000, 1800

# Scripts that load a new file, with variables `name` and `file`. A separate process runs them, as the file
# may be broken in any way.
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
        name: the prefix of the library's files; of a Python module also the module's name.
        folder: the purpose by which `caches.folder` returns the files' folder.
        title: the library's name in messages.
        main: the source; it includes only headers of its own folder, and torch's.
        flags: the compiler's flags.
        libraries: the libraries of torch to link to.
        trial: a script that loads the library, with variables `name` and `file`.
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
        """Return all flags; the instructions that torch uses here are named by their x86-64 level."""
        known = torch.backends.cpu.get_cpu_capability() if self.is_native else ""
        native = {"AVX512": ("-march=x86-64-v4",), "AVX2": ("-march=x86-64-v3",)}.get(known[:6], ())
        return "-std=c++20", "-fPIC", "-shared", "-w", *self.flags, *native


CALL_CACHE = Library(
    "attnreg_call_cache",
    "call_cache",
    "the call cache",
    ROOT / "core" / "dispatch" / "csrc" / "module.cpp",
    ("-O2",),
    ("c10", "torch_cpu", "torch_python"),
    TRY_MODULE,
)
CPU_KERNEL = Library(
    "attnreg_cpu",
    "cpu_kernel",
    "the CPU kernel",
    ROOT / "core" / "backends" / "cpu" / "kernel" / "module.cpp",
    ("-O3", "-ffp-contract=fast"),
    ("c10", "torch_cpu"),
    TRY_LIBRARY,
    is_native=True,
)
LIBRARIES = (CALL_CACHE, CPU_KERNEL)


# A library's file ends with the digest of all bytes before, which loaders ignore. A digest in a second file
# could be of another version than the library.
DIGEST = hashlib.sha256
DIGEST_BYTES = DIGEST().digest_size


@functools.cache
def target(library: Library = CALL_CACHE) -> Path:
    """Return the file of a library: another for each torch, Python and state of the source.

    A library that is compiled for the machine's instructions has a file for each set of instructions, because
    machines may share a home folder. Raises BuildError if the source is missing, or the user has no home
    folder.
    """
    try:
        files = library.main, *sorted(library.main.parent.glob("*.h"))
        sources = [file.read_text(encoding="utf-8") for file in files]
        parts = (*sources, *library.all_flags(), *map(str, _versions()), DIGEST.__name__)
        name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        return caches.folder(library.folder) / f"{library.name}-{name}.so"
    except (OSError, RuntimeError) as error:
        raise BuildError(f"{library.title} can't be compiled: {error}") from error


def existing(library: Library) -> Path | None:
    """Return the file of a library as `checked` does; None where `checked` raises."""
    try:
        return checked(library)
    except BuildError:
        return None


def checked(library: Library) -> Path:
    """Return the path to load a library from, without links.

    Raises BuildError if the file is missing, can't be read, is damaged, or another user can replace it.
    """
    file = target(library)
    try:
        file = file.resolve(strict=True)
        problem, status = caches.unsafe(file), file.stat()
        if not problem and not _digest_matches(file, status.st_ino, status.st_size, status.st_mtime_ns):
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
    """Return why a compiled library isn't used; empty if it is used, or isn't compiled.

    Raises BuildError as `target` does, and OSError if the file's folder can't be read.
    """
    with caches.readable_errors("read"):
        is_there = target(library).is_file()
    try:
        if is_there:
            checked(library)
    except BuildError as error:
        return str(error)
    return ""


@functools.lru_cache(maxsize=16)
def _digest_matches(file: Path, *_: int) -> bool:
    """Return whether a file ends with the digest of its contents: a truncated file crashes its process."""
    contents = memoryview(file.read_bytes())
    return DIGEST(contents[:-DIGEST_BYTES]).digest() == contents[-DIGEST_BYTES:]


def _versions() -> tuple[str | None, ...]:
    """Return the versions that a compiled library depends on."""
    return torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI")


def compile_library(library: Library) -> Path:
    """Compile a library and load it in another process; replaces an existing file.

    Raises BuildError, with the output, if there is no compiler, it fails, or the new file can't be loaded.
    """
    file, problem = target(library), f"{library.title} can't be compiled"
    try:
        caches.make(file.parent)
        place = file.parent.resolve()
        caches.check_writable(place)
        # Other processes may load or compile the same file: it has to appear complete, in one step.
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=place) as folder:
            made = Path(folder) / file.name
            _run([*find(), *_arguments(library, made)], folder)
            with made.open("ab") as contents:
                contents.write(DIGEST(made.read_bytes()).digest())
            _run(python(f"name, file = arguments\n{library.trial}", library.name, str(made)), folder)
            made.chmod(0o700)
            # Write the contents to the disk before the name, or a crash may leave an empty file.
            with made.open("rb") as contents:
                os.fsync(contents.fileno())
            made.replace(place / file.name)
    except BuildError as error:
        raise BuildError(f"{problem}: {error}") from error
    except OSError as error:
        raise BuildError(f"{problem} into {file}: {error}") from error
    return file


def find() -> list[str]:
    """Return the compiler that CXX names, with CXX's arguments; without CXX one of `COMPILERS`.

    Raises BuildError if there is no compiler, or CXX can't be parsed.
    """
    if sys.platform != "linux":
        raise BuildError(f"attnreg compiles on Linux only, got {sys.platform}")
    wanted = os.environ.get("CXX", "").strip()
    try:
        choices = [shlex.split(wanted)] if wanted else [[name] for name in COMPILERS]
    except ValueError as error:
        raise BuildError(f"CXX={wanted}: {error}") from error
    for name, *arguments in choices:
        if program := shutil.which(name):
            return [str(Path(program).absolute()), *arguments]
    looked_for = f"CXX={wanted}" if wanted else " or ".join(COMPILERS)
    raise BuildError(f"there is no C++ compiler, looked for {looked_for}")


def identity(command: list[str]) -> str:
    """Return a text that differs between compilers and versions, or raise OSError; runs nothing."""
    file = Path(command[0]).resolve()
    status = file.stat()
    return f"{shlex.join([str(file), *command[1:]])} {status.st_size} {status.st_mtime_ns}"


def python(script: str, *arguments: str) -> list[str]:
    """Return the command of a Python that can import torch, and imports no module by accident, nor attnreg.

    Modules of any name may be in the current folder, the script's folder, PYTHONPATH and the folder that
    contains attnreg. So the path is the standard library, torch's folder, then the installed packages.
    """
    installed = [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
    places = [str(Path(torch.__file__).parents[1].absolute()), *installed]
    begin = "import json, sys\nplaces, arguments = json.loads(sys.argv[1])\nsys.path += places\n"
    return [sys.executable, "-I", "-S", "-c", begin + script, json.dumps([places, arguments])]


def child_environment() -> dict[str, str]:
    """Return the variables of a process that compiles: `import torch` installs no routers there."""
    return os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "ATTNREG_BUILD": "off"}


def in_one_line(message: str) -> str:
    """Return a build's error as one line for a log: what failed, and the compiler's first line."""
    return " ".join(line.strip() for line in message.splitlines()[:2])


def _arguments(library: Library, output: Path) -> list[str]:
    inside = Path(torch.__file__).parent
    headers = inside / "include"
    includes = headers, headers / "torch" / "csrc" / "api" / "include", sysconfig.get_path("include")
    runtime = f"libcudart.so.{(torch.version.cuda or '0').partition('.')[0]}"
    return [
        *library.all_flags(),
        f'-DATTNREG_CUDART="{runtime}"',
        *(f"-I{folder}" for folder in includes),
        *(str(library.main), "-o", str(output)),
        f"-L{inside / 'lib'}",
        *(f"-l{name}" for name in library.libraries),
    ]


def _run(command: list[str], folder: str) -> None:
    """Run a command, its temporary files in a folder; raises BuildError with its output if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, text=True, errors="replace",
            check=False, timeout=TIMEOUT, env=child_environment() | {"TMPDIR": folder}, cwd=folder,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {TIMEOUT} s") from error
    if done.returncode:
        output = done.stderr.strip()[:MOST_CHARACTERS] or f"exit status {done.returncode}"
        raise BuildError(f"{command[0]} says\n{output}")

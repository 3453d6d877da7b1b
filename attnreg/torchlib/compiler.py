"""Running the C++ compiler: which one, with what command, and what is done with the file that it makes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

from attnreg.errors import BuildError
from attnreg.torchlib.libraries import Library, target

COMPILERS = ("c++", "g++", "clang++")
# What the folders of builds under way begin with; nothing else in the cache does.
SCRATCH = ".building-"
# How much of what a compiler prints goes into a message, and after how many seconds it is stopped.
MOST_CHARACTERS, TIMEOUT = 2000, 1800


def compile_library(library: Library) -> Path:
    """Compile a library and load it in another process; replaces the file that was there.

    Raises:
        BuildError: there is no compiler, or it fails, or what it made can't be loaded; has its output.
    """
    file = target(library)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Other processes may load the file or compile it as well: it is there completely or not at all.
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=file.parent) as folder:
            made = Path(folder) / file.name
            _run(library, _command(library, made))
            _run(library, python(f"name, file = arguments\n{library.trial}", library.name, str(made)))
            made.chmod(0o700)
            _write_through(made)
            made.replace(file)
    except OSError as error:
        raise BuildError(f"{library.title} can't be compiled into {file}: {error}") from error
    return file


def find() -> list[str]:
    """Return the compiler, as CXX names it or by its usual names, with the arguments that CXX has.

    Raises:
        BuildError: there is none, or CXX can't be read.
    """
    if sys.platform != "linux":
        raise BuildError(f"attnreg compiles on Linux only, got {sys.platform}")
    wanted = os.environ.get("CXX", "").strip()
    try:
        choices = [shlex.split(wanted)] if wanted else [[name] for name in COMPILERS]
    except ValueError as error:
        raise BuildError(f"CXX={wanted}: {error}") from error
    for name, *arguments in choices:
        if found := shutil.which(name):
            return [str(Path(found).absolute()), *arguments]
    looked_for = f"CXX={wanted}" if wanted else " or ".join(COMPILERS)
    raise BuildError(f"there is no C++ compiler, looked for {looked_for}")


def identity(command: list[str]) -> str:
    """Return a text that differs between compilers and their versions; runs nothing.

    Raises:
        OSError: it is gone.
    """
    file = Path(command[0]).resolve()
    found = file.stat()
    return f"{shlex.join([str(file), *command[1:]])} {found.st_size} {found.st_mtime_ns}"


def python(script: str, *arguments: str) -> list[str]:
    """Return the command of a Python that imports torch and this attnreg, and nothing by accident.

    The current folder, that of the program's script and PYTHONPATH may hold modules of any name: only the
    standard library comes first, then the folders of attnreg and torch, then what is installed.
    """
    installed = [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
    own = [Path(__file__).parents[2], Path(torch.__file__).parents[1]]
    places = [*(str(place.absolute()) for place in own), *installed]
    begin = "import json, sys\nplaces, arguments = json.loads(sys.argv[1])\nsys.path += places\n"
    return [sys.executable, "-I", "-S", "-c", begin + script, json.dumps([places, arguments])]


def child_environment() -> dict[str, str]:
    """Return the variables of a process that compiles: `import torch` installs no routers there."""
    return os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "ATTNREG_BUILD": "off"}


def _command(library: Library, output: Path) -> list[str]:
    inside = Path(torch.__file__).parent
    includes = (
        inside / "include",
        inside / "include" / "torch" / "csrc" / "api" / "include",
        sysconfig.get_path("include"),
    )
    runtime = f"libcudart.so.{(torch.version.cuda or '0').partition('.')[0]}"
    try:
        compiler = find()
    except BuildError as error:
        raise BuildError(f"{library.title} can't be compiled: {error}") from error
    return [
        *compiler,
        *library.all_flags(),
        f'-DATTNREG_CUDART="{runtime}"',
        *(f"-I{folder}" for folder in includes),
        str(library.main),
        *("-o", str(output)),
        f"-L{inside / 'lib'}",
        *(f"-l{name}" for name in library.libraries),
    ]


def _run(library: Library, command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, text=True, errors="replace",
            check=False, timeout=TIMEOUT, env=child_environment(),
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"{library.title} can't be compiled: {command[0]} took more than {TIMEOUT} s"
        ) from error
    if done.returncode:
        output = done.stderr.strip()[:MOST_CHARACTERS] or f"exit status {done.returncode}"
        raise BuildError(f"{library.title} can't be compiled: {command[0]} says\n{output}")


def _write_through(file: Path) -> None:
    """Have the contents on the disk before the name is: after a crash the file isn't an empty one."""
    with file.open("rb") as made:
        os.fsync(made.fileno())

"""Running a program in this process as `python` would have run it in one of its own."""

from __future__ import annotations

import builtins
import io
import pkgutil
import runpy
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["lead_path", "run_module", "run_script"]


def run_script(name: str, arguments: list[str]) -> None:
    """Run a file as `python name arguments` does."""
    path = Path(name).absolute()
    sys.argv = [name, *arguments]
    if pkgutil.get_importer(str(path)) is not None:  # a folder or an archive with a __main__.py
        lead_path(str(path))
        runpy.run_path(str(path), run_name="__main__")
        return
    lead_path(str(path.resolve().parent))
    # `runpy.run_path` would give the module its path as typed, which is wrong after a chdir, and
    # would take it away before the program's threads and exit handlers are done with it.
    main = ModuleType("__main__")
    main.__file__, main.__builtins__ = str(path), builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    with io.open_code(str(path)) as file:
        code = compile(file.read(), str(path), "exec")
    exec(code, main.__dict__)  # noqa: S102 - running somebody's program is what this is for


def run_module(name: str, arguments: list[str]) -> None:
    """Run a module as `python -m name arguments` does, after `lead_path` with the current folder."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def lead_path(folder: str) -> None:
    """Put the program's folder where Python had put that of the command line."""
    if not sys.flags.safe_path:
        sys.path[0] = folder

"""Where in a user's program a call is made, as "file:line"."""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

# Between the program's line and the kernel lie frames of torch and of attnreg.
_SKIPPED = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[2]) + os.sep)
# Frames of other packages count only where no frame of the program itself is on the stack. Packages lie below
# the standard library in most environments, but not in all.
_PACKAGES = (
    *(path + os.sep for name in ("stdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))),
    f"{os.sep}site-packages{os.sep}",
    f"{os.sep}dist-packages{os.sep}",
)


def call_site() -> str:
    """Return the innermost line of the program on this thread's stack; empty if there is none.

    Where all frames belong to installed packages, that is the innermost line of a package other than torch.
    """
    return _innermost_of_program(_frames())


def traced_call_site() -> str:
    """Return the same of the call that Dynamo is tracing on this thread; else where its graph is called."""
    stack = torch._guards.TracingContext.extract_stack()
    traced = ((frame.filename, frame.lineno or 0) for frame in reversed(stack))
    return _innermost_of_program(itertools.chain(traced, _frames()))


def _frames() -> Iterator[tuple[str, int]]:
    frame = sys._getframe(2)  # without this module's own; more would be skipped anyway
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]


def _innermost_of_program(frames: Iterable[tuple[str, int]]) -> str:
    in_package = ""
    for file, line in frames:
        if file.startswith((*_SKIPPED, "<frozen ", "<eval_with_key>")):  # the last is the code of a graph
            continue
        if not file.startswith(_PACKAGES[:-2]) and not any(part in file for part in _PACKAGES[-2:]):
            return f"{file}:{line}"
        in_package = in_package or f"{file}:{line}"
    return in_package

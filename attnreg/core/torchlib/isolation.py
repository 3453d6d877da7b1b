"""Errors of packages: which of them are the program's own, and how to store one without its tensors.

An error refers to the frames that it passed, each frame to its caller, and a frame to its variables. Some
packages store an error, or leave it in a reference cycle with its frame. Then the tensors of all callers,
autograd's graph included, stay alive until a full garbage collection. At a model's first call these are all
tensors that its layers had in memory.
"""

from __future__ import annotations

import errno
import signal
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")
Error = TypeVar("Error", bound=BaseException)

# What a process may lack for a moment: file descriptors, memory, processes.
LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)


def raise_if_of_program(error: BaseException) -> None:
    """Raise an error again that was the program's, not of the backend's function that it interrupted.

    So is Ctrl-C, and whatever a signal handler raises. Every other error, SystemExit and GeneratorExit
    included, is a fault of that function.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__)):
        raise error


def raise_if_temporary(error: BaseException) -> None:
    """Raise an error again that is about the moment, not about the backend's function that it left.

    So is the program's own error, and one that says what the process lacked: memory, file descriptors, or
    room on the stack of a program that recurses. Kept as a fault, it would leave a backend out for good.
    """
    raise_if_of_program(error)
    lacks = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in LACKING)
    if isinstance(error, RecursionError):  # a function that recurses without end does so at any depth
        lacks = 2 * sum(1 for _ in traceback.walk_stack(None)) > sys.getrecursionlimit()
    if lacks:
        raise error


def run_in_thread(run: Callable[[], T]) -> T:
    """Run a function in a new thread, whose frames don't refer to the caller's tensors.

    The thread has ended when this returns or raises, also on Ctrl-C. If no thread can be started any more,
    the function runs in the caller's thread. Not for imports: a module that the caller is importing would
    wait for itself. The caller may be autograd's thread of a device, which waits here in the middle of a
    backward. So a backward of the function runs in the new thread itself: for the device's thread it would
    wait for ever.
    """
    outcome: Future[T] = Future()
    thread = Thread(target=_set_outcome, args=(outcome, run), name="attnreg", daemon=True)
    if sys.is_finalizing():  # `Thread.start` would wait for ever
        return run()
    try:
        thread.start()
    except RuntimeError:
        return run()
    try:
        thread.join()
    except BaseException:
        thread.join()  # the function uses objects of the caller, which continues after this line
        raise
    try:
        return outcome.result()
    finally:
        del outcome  # it refers to the error, and the error to this frame


def _set_outcome(outcome: Future[T], run: Callable[[], T]) -> None:
    import torch  # not above: decisions import this module without torch

    try:
        with torch.autograd.set_multithreading_enabled(False):
            outcome.set_result(run())
    except BaseException as error:  # noqa: BLE001 - `Future.result` raises it again
        outcome.set_exception(error)
    finally:
        del outcome


def strip_tracebacks(error: Error) -> Error:
    """Remove the frames of an error that is to be stored; notes say where it and its causes were raised."""
    waiting: list[BaseException | None] = [error]
    visited: set[int] = set()
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in visited:
            continue
        visited.add(id(current))
        if current.__traceback__ is not None:
            lines = "".join(traceback.format_tb(current.__traceback__)).rstrip()
            current.add_note(f"Raised here:\n{lines}")
            current.__traceback__ = None
        waiting += (current.__cause__, current.__context__, *getattr(current, "exceptions", ()))
    return error

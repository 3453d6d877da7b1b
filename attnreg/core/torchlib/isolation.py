"""Functions that stop an error which a package stores from keeping a call's tensors alive.

An error refers to the frames that it passed. A frame refers to its variables and to its caller's frame. So a
package that stores an error, or leaves an error in a reference cycle with its frame, keeps the tensors of all
callers, autograd's graph included, until a full garbage collection. In a model's first call these are all
activations of the layers so far.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")
Error = TypeVar("Error", bound=BaseException)


def run_in_thread(run: Callable[[], T]) -> T:
    """Run a function in a new thread, whose frames keep none of the caller's tensors alive.

    The function has ended when this returns or raises, also on Ctrl-C. If no thread can be started any more,
    the function runs in the caller's thread. Not for imports: a module that the caller is importing would
    wait for itself.
    """
    outcome: Future[T] = Future()
    thread = Thread(target=_settle, args=(outcome, run), name="attnreg", daemon=True)
    if sys.is_finalizing():  # starting a thread would wait for ever
        return run()
    try:
        thread.start()
    except RuntimeError:
        return run()
    try:
        thread.join()
    except BaseException:
        thread.join()  # the function uses the caller's objects, and the caller is about to go on
        raise
    try:
        return outcome.result()
    finally:
        del outcome  # the outcome refers to the error, and the error to this frame


def _settle(outcome: Future[T], run: Callable[[], T]) -> None:
    try:
        outcome.set_result(run())
    except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
        outcome.set_exception(error)
    finally:
        del outcome


def strip_tracebacks(error: Error) -> Error:
    """Return the error without frames, to be stored; notes name where it and its causes were raised."""
    waiting: list[BaseException | None] = [error]
    stripped: set[int] = set()
    while waiting:
        cause = waiting.pop()
        if cause is None or id(cause) in stripped:
            continue
        stripped.add(id(cause))
        if cause.__traceback__ is not None:
            lines = "".join(traceback.format_tb(cause.__traceback__)).rstrip()
            cause.add_note(f"Raised here:\n{lines}")
            cause.__traceback__ = None
        waiting += (cause.__cause__, cause.__context__, *getattr(cause, "exceptions", ()))
    return error

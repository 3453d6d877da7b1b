"""Keeping errors that a package stores from keeping the tensors of a call alive.

An error keeps the frames that it passed alive, these keep those that called them, and a frame keeps its
variables. A package that stores an error, or leaves one in a reference cycle with its frame, thereby keeps
the tensors of all callers, autograd's graph included, until a full garbage collection: for a model's first
call that is whatever its layers had in memory.
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
    """Run a function in a thread of its own, whose frames keep none of the caller's tensors alive.

    It has ended when this returns or raises, also on Ctrl-C. Where no thread can be started any more it runs
    in the caller's. Not for imports: a module that the caller is importing would wait for itself.
    """
    outcome: Future[T] = Future()
    thread = Thread(target=_settle, args=(outcome, run), name="attnreg", daemon=True)
    if sys.is_finalizing():  # starting one would wait for ever
        return run()
    try:
        thread.start()
    except RuntimeError:
        return run()
    try:
        thread.join()
    except BaseException:
        thread.join()  # it uses objects of the caller, who is about to go on
        raise
    try:
        return outcome.result()
    finally:
        del outcome  # it refers to the error, and the error to this frame


def _settle(outcome: Future[T], run: Callable[[], T]) -> None:
    try:
        outcome.set_result(run())
    except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
        outcome.set_exception(error)
    finally:
        del outcome


def strip_tracebacks(error: Error) -> Error:
    """Return an error that is to be stored, without frames; notes say where it and its causes were raised."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if one.__traceback__ is not None:
            lines = "".join(traceback.format_tb(one.__traceback__)).rstrip()
            one.add_note(f"Raised here:\n{lines}")
            one.__traceback__ = None
        waiting += (one.__cause__, one.__context__, *getattr(one, "exceptions", ()))
    return error

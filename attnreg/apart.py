"""Keeping what a package leaves behind from holding on to the tensors of a call.

An error holds the frames that it passed, these hold those that called them, and a frame holds its
variables. A package that keeps an error, or leaves one in a cycle with its frame, thereby keeps the
tensors of everybody above it, autograd's graph included, until a full collection of garbage: for a
model's first call that is whatever its layers had in memory.
"""

from __future__ import annotations

import traceback
from concurrent.futures import Future
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["apart", "bare"]

T = TypeVar("T")
Error = TypeVar("Error", bound=BaseException)


def apart(run: Callable[[], T]) -> T:
    """Run in a thread of its own, whose frames lead to nobody's tensors; return or raise what came of it.

    Not for imports: the module that is being imported by the caller would wait for itself.
    """
    outcome: Future[T] = Future()
    thread = Thread(target=_settle, args=(outcome, run), name="attnreg", daemon=True)
    thread.start()
    thread.join()
    try:
        return outcome.result()
    finally:
        del outcome  # it holds the error, the error this frame


def _settle(outcome: Future[T], run: Callable[[], T]) -> None:
    try:
        outcome.set_result(run())
    except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
        outcome.set_exception(error)
    finally:
        del outcome


def bare(error: Error) -> Error:
    """Return an error that is to be kept, with a note of where it came from in place of its frames."""
    told = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    if told:
        error.add_note(f"Raised here:\n{told}")
    return error

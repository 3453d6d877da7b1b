"""One log line for a step that a program waited for: what it was, and for how long."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

log = logging.getLogger("attnreg")


@contextlib.contextmanager
def log_if_slow(what: str, seconds: float = 1.0) -> Iterator[None]:
    """Log, at level info, what a block did and for how long, if it took more than `seconds`.

    A block that raises logs nothing: the handler of the exception reports it.
    """
    started = time.perf_counter()
    yield
    took = time.perf_counter() - started
    if took > seconds:
        log.info("%s took %.1f s", what, took)

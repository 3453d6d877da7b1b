"""`record`: what attention calls a block of code makes, for `attnreg tune --from`."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from attnreg import aten, policy, trace
from attnreg.errors import ConfigError
from attnreg.tuning.traces import check_writable

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

__all__ = ["record"]

log = logging.getLogger("attnreg")


@contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write each distinct attention call of a block once, with its count, when the block ends.

    Counts are added to those that the file has. All threads are recorded, and what runs stays the same:
    where nothing asks for a backend, torch's own choices stand.

    Raises:
        ConfigError: the file can't be written, or has something else in it.
        RegistrationError: the routers can't be installed.
    """
    file = Path(path).absolute()
    check_writable(file)
    aten.ensure()
    recording = trace.start(file)
    policy.watch(1)
    failing = True
    try:
        yield
        failing = False
    finally:
        policy.watch(-1)
        trace.stop(recording)
        try:
            recording.write()
        except ConfigError as error:
            if not failing:
                raise
            log.warning("%s", error)  # the program's own exception says more

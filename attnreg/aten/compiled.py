"""Compiled routers (`routers/module.cpp`): puts them over those in Python, where they were built.

While they are in, `extension` is their module, and the routers in Python tell it what they decide. Nothing
depends on it: whatever it doesn't know again comes to them.
"""

from __future__ import annotations

import atexit
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attnreg import _registry
from attnreg.dispatch import counters, scope
from attnreg.errors import AttnregError, BuildError
from attnreg.settings import environment
from attnreg.torchlib import building, captured

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["capture", "cover", "extension", "idle", "listening", "uncover"]

log = logging.getLogger("attnreg")

# What was loaded stays loaded: torch may have its code in use.
_loaded: Any = None
extension: Any = None
_idle = 0


def capture(places: Iterable[tuple[str, str, int, int]]) -> bool:
    """Capture torch's kernels, before routers in Python lie over them; whether `cover` is to follow.

    Args:
        places: ops with their namespace, dispatch keys, where the query is among the op's arguments,
            and where a backward has what its forward hands it (-1 in a forward).
    """
    module = _module()
    if module is None:
        return False
    module.uncover()  # what a failed install may have left
    for op, key, query, carrier in places:
        module.capture(*op.split("::"), key, query, carrier)
    return True


def cover() -> None:
    """Lay the compiled routers over those in Python."""
    global extension
    _loaded.cover()
    _loaded.lead_to("aten::_flash_attention_forward", scope.variable)
    extension, captured.compiled = _loaded, not _idle
    _registry.changed()


def uncover() -> None:
    """Take them out; no change if they aren't in."""
    global extension
    if _loaded is not None:
        extension, captured.compiled = None, None
        _loaded.uncover()
        _registry.changed()


def listening() -> Any:
    """Return the module of compiled routers while they answer calls, or None."""
    return extension if captured.compiled else None


@contextmanager
def idle() -> Iterator[None]:
    """Have all calls go to the routers in Python for a while, in every thread."""
    _rest(1)
    try:
        yield
    finally:
        _rest(-1)


def _rest(more: int) -> None:
    global _idle
    with _registry.lock:
        _idle += more
        if extension is not None:
            captured.compiled = not _idle
        if _loaded is not None:
            _loaded.enable(not _idle)
        _registry.changed()


def _module() -> Any:
    """Return the module, loaded once; None where there is none, or none is wanted."""
    global _loaded
    if _wanted() == "python":
        return None
    if _loaded is None:
        try:
            _loaded = building.loaded()
        except BuildError as error:
            # Where the variable asks for them this is an error of the settings as well.
            log.log(
                logging.WARNING if building.built() else logging.DEBUG,
                "the routers are those in Python: %s",
                error,
            )
            return None
        _registry.on_change(_loaded.forget)
        counters.count_also(_loaded.drain)
        scope.on_first_choice(_loaded.watch)
        # Torch takes the routers in Python out when the process ends; these have to be gone by then.
        atexit.register(uncover)
    return _loaded


def _wanted() -> str:
    try:
        return environment.read().routers
    except AttnregError:
        return ""  # what is wrong there is an error of the calls that it would govern

"""The routers' shortest way, compiled (`routers.cpp`): puts it over those in Python, where it was built.

While it is in, `extension` is its module, and the routers tell it what they decide. Nothing depends on
it: whatever it doesn't know again comes to them.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attnreg import _registry, building, counters, environment, native, scope
from attnreg.errors import AttnregError, BuildError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["capture", "cover", "extension", "idle", "uncover"]

log = logging.getLogger("attnreg")

VARIABLE = "ATTNREG_ROUTERS"

# What was loaded stays loaded: torch may have its code in use.
_loaded: Any = None
extension: Any = None


def capture(places: Iterable[tuple[str, str, int, int]]) -> bool:
    """Capture torch's kernels, before routers in Python lie over them; whether `cover` is to follow.

    Args:
        places: ops with their namespace, dispatch keys, where the query is among the op's arguments,
            and where a backward has what its forward hands it (-1 in a forward).

    Raises:
        ConfigError: ATTNREG_ROUTERS asks for compiled routers, and there are none.
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
    extension, native.compiled = _loaded, True
    _registry.changed()


def uncover() -> None:
    """Take them out; no change if they aren't in."""
    global extension
    if _loaded is not None:
        extension, native.compiled = None, False
        _loaded.uncover()
        _registry.changed()


@contextmanager
def idle() -> Iterator[None]:
    """Have all calls go to the routers in Python for a while, in every thread."""
    module = extension
    if module is None:
        yield
        return
    native.compiled = False
    module.enable(False)
    _registry.changed()
    try:
        yield
    finally:
        native.compiled = True
        module.enable(True)
        _registry.changed()


def _module() -> Any:
    """Return the module, loaded once; None where there is none, or none is wanted."""
    global _loaded
    wanted = _wanted()
    if wanted == "python":
        return None
    if _loaded is None:
        file = building.built()
        try:
            if file is None:
                raise BuildError("they aren't built for this torch and Python; `attnreg build` does it")
            _loaded = building.load(file)
        except BuildError as error:
            if wanted == "compiled":
                raise ConfigError(f"{VARIABLE}=compiled: {error}") from error
            log.log(logging.DEBUG if file is None else logging.WARNING, "routers are Python's: %s", error)
            return None
        _registry.on_change(_loaded.forget)
        counters.count_also(_loaded.drain)
        scope.on_first_choice(_loaded.watch)
    return _loaded


def _wanted() -> str:
    try:
        return environment.read().routers
    except AttnregError:
        return ""  # what is wrong there is an error of the calls that it would govern

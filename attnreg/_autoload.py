"""What `import torch` runs of attnreg: its entry point of the group `torch.backends`.

With none of attnreg's variables set this has to cost nothing: it looks at the environment, makes "attnreg"
known to `torch.nn.attention` and `torch.ops`, and imports nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import sys
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_TRANSFORMERS, _AS_FLASH_ATTN = "ATTNREG_TRANSFORMERS", "ATTNREG_AS_FLASH_ATTN"
# Where transformers keeps the names of attention functions; its own `__init__` imports it when it is needed.
_MODELING_UTILS = "transformers.modeling_utils"
# Where it says whether flash-attn is there. Programs take the function from there right after their import.
_IMPORT_UTILS = "transformers.utils.import_utils"


# Alone it asks for no backend, as it is about programs that do; a value that is wrong has to be said.
_BUILD, _WAYS = "ATTNREG_BUILD", ("background", "now", "off")

# Whether a variable of attnreg's that asks for something is set, so that `activate` has done what it can.
variables_are_set = False


def _is_way(value: str) -> bool:
    return value.strip().casefold() in _WAYS


def activate() -> None:
    """Install the routers if the environment asks for something; never an error of `import torch`.

    `import torch` calls it, and the first use of a name of attnreg: a program may set a variable in between.
    """
    global variables_are_set
    offer()
    # In any case: "attnreg_backend" does nothing on Linux, so a warning has to say so.
    if not any(
        name.upper().startswith("ATTNREG_") and value.strip() and not (name == _BUILD and _is_way(value))
        for name, value in os.environ.items()
    ):
        return
    variables_are_set = True
    from attnreg.errors import ConfigError

    try:
        from attnreg.core import aten
        from attnreg.core.policy import current as policy
        from attnreg.core.policy.sources import masks
        from attnreg.core.settings.environment import RECOGNISE

        aten.ensure()
        policy.current()
        aten.bypassed.follow()
        if masks(policy.sources()) == RECOGNISE:
            from attnreg.masks import serving

            serving.follow()
        if policy.sources().environment.as_flash_attn:
            _stand_in_for_flash_attn()
        if os.environ.get(_TRANSFORMERS, "").strip():
            _install_behind_transformers()
    except ConfigError as error:
        _warn(
            f"attnreg: {error}\nAttention calls to which this applies will raise it as an error."
            + _without_effect()
        )
    except Exception as error:  # noqa: BLE001 - `import torch` must not fail because of attnreg
        _warn(f"attnreg is not active: {type(error).__name__}: {error}")


def _without_effect() -> str:
    """Return a sentence on the variables that put attnreg into other packages, where an error came first."""
    idle = [name for name in (_TRANSFORMERS, _AS_FLASH_ATTN) if os.environ.get(name, "").strip()]
    return f" Until it is mended these have no effect: {', '.join(idle)}." if idle else ""


def _stand_in_for_flash_attn() -> None:
    try:
        from attnreg.flash_attn import activation

        activation.activate()
    except Exception as error:  # noqa: BLE001 - the other variables hold all the same
        _warn(f"attnreg doesn't stand in for flash-attn: {type(error).__name__}: {error}")


def _install_behind_transformers() -> None:
    """Do what ATTNREG_TRANSFORMERS says, now or when the program imports transformers."""
    from attnreg.core.settings import environment

    mode = environment.read().transformers
    if mode in ("", "0"):
        return
    if mode != "1":
        _after_import(_IMPORT_UTILS, _say_flash_attn_is_there)
    _after_import(_MODELING_UTILS, functools.partial(_install_in_transformers, mode))


def _after_import(name: str, then: Callable[[], None]) -> None:
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


def _say_flash_attn_is_there() -> None:
    """Do so before others have taken the function; what is wrong is said by the rest of the installation."""
    with contextlib.suppress(Exception):
        from attnreg.integrations import behind_flash, transformers

        transformers.check_version()
        behind_flash.say_available()


def _install_in_transformers(mode: str) -> None:
    try:
        from attnreg.integrations import transformers

        transformers.install(behind=None if mode == "1" else mode)
    except Exception as error:  # noqa: BLE001 - nor must `import transformers`
        _warn(f"attnreg is not installed in transformers: {type(error).__name__}: {error}")


class _AfterImport:
    """A finder of `sys.meta_path` that calls a function once a module is imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            self._then()

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def _warn(text: str) -> None:
    try:
        warnings.warn(text, stacklevel=3)
    except Warning:  # an error by the program's own filter, but not one of `import torch`
        logging.getLogger("attnreg").warning("%s", text)


def offer() -> None:
    """Make "attnreg" known to `torch.ops` and to `activate_flash_attention_impl`; never an error."""
    ops = getattr(sys.modules.get("torch._ops"), "ops", None)
    if ops is not None:
        ops.attnreg.__getattr__ = _load_op  # called for names that the module lacks
    registry = sys.modules.get("torch.nn.attention._registry")
    if registry is None:
        return
    try:
        registry.register_flash_attention_impl("attnreg", register_fn=_activated_by_torch)
    except Exception as error:  # noqa: BLE001 - it is private, and both `import torch` and ours call this
        _warn(f"attnreg can't be activated in torch.nn.attention: {type(error).__name__}: {error}")


def _load_op(name: str) -> object:
    """Define the ops of `varlen_attn` when `torch.ops.attnreg` is asked for one, as by a saved program."""
    if name in ("_varlen_attn", "_varlen_attn_backward"):
        importlib.import_module("attnreg.core.varlen.custom_op")
    raise AttributeError(name)  # torch's own look-up is next, and says what is missing


def _activated_by_torch() -> SimpleNamespace:
    """Serve PyTorch's own functions; return what torch's registry keeps while "attnreg" is active."""
    from attnreg.core import aten
    from attnreg.core.policy import current as policy

    installed_before = aten.installed()
    aten.ensure()
    active_before = policy.activate(True)

    def remove() -> None:
        """Leave things as `activate_flash_attention_impl` found them, but for what was registered since."""
        policy.activate(active_before)
        if not installed_before and not policy.is_active():
            aten.restore()

    return SimpleNamespace(remove=remove)

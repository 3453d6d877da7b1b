"""The entry point of attnreg that `import torch` runs, in the group `torch.backends`.

With none of attnreg's variables set this has to cost next to nothing: it reads the environment, and makes the
name "attnreg" known in `torch.nn.attention`, `torch.ops` and transformers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import re
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from traceback import walk_tb
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType, TracebackType

_TRANSFORMERS, _AS_FLASH_ATTN = "ATTNREG_TRANSFORMERS", "ATTNREG_AS_FLASH_ATTN"
# transformers' module with the names of attention functions; its `__init__` imports the module on first use.
_MODELING_UTILS = "transformers.modeling_utils"
# transformers' module with the check for flash-attn, whose function programs import at once.
_IMPORT_UTILS = "transformers.utils.import_utils"


# `ATTNREG_BUILD` alone requests no backend, because it only affects programs that do. A wrong value has to be
# reported, though.
_BUILD, _WAYS = "ATTNREG_BUILD", ("background", "now", "off")

_warned: dict[Any, Any] = {}  # what Python keeps of warnings, to give each once
_said: set[str] = set()  # variables without effect that a warning has named
# How names of variables with a misspelt prefix begin. Looking closer takes imports, and nearly every machine
# has a variable such as AWS_DEFAULT_REGION.
_NEAR_OURS = re.compile(".{0,2}ATTN|.{0,3}[NT]_?REG", re.IGNORECASE)
_is_offered = False  # whether transformers is told of the name "attnreg" when it is imported

# The names under which transformers runs attnreg, or will once it is imported.
_behind: set[str] = set()

# Whether a variable that requests something is set, so that `activate` has already run in full.
variables_are_set = False

# Whether a command of attnreg runs, which reports wrong settings itself.
is_command = False


def _is_way(value: str) -> bool:
    return value.strip().casefold() in _WAYS


def activate() -> None:
    """Install the routers if the environment requests something; never an error of `import torch`.

    `import torch` calls this, and so does the first use of a name of attnreg, because a program may set a
    variable in between. If a module of attnreg imports torch, all this happens once that module is whole.
    """
    global variables_are_set
    offer()
    ours = {name: value for name, value in os.environ.items() if name.upper().startswith("ATTNREG_")}
    near = [name for name in os.environ if _NEAR_OURS.match(name) and name not in ours]
    if (ours or near) and (importer := _find_importer_of_torch()):
        _after_import(importer, activate)
        return
    if others := [name for name, value in ours.items() if not name.startswith("ATTNREG_") and value.strip()]:
        _hint_at_case(others)
    if near:
        _hint_at_prefix(near)
    if not any(
        value.strip() and name not in others and not (name == _BUILD and _is_way(value))
        for name, value in ours.items()
    ):
        return
    variables_are_set = True
    _apply_variables()


def _apply_variables() -> None:
    """Install the routers and what else variables request; a fault is a warning."""
    from attnreg.errors import ConfigError

    try:
        from attnreg.core import aten
        from attnreg.core.policy import current as policy

        aten.ensure()
        policy.current()
        aten.bypassed.follow()
        if aten.bypassed.looks_at_masks():
            from attnreg.masks import serving

            serving.follow()
        if policy.sources().environment.as_flash_attn:
            _stand_in_for_flash_attn()
        run_behind_transformers(_asked_behind_transformers())
    except ConfigError as error:
        if not is_command:
            _warn(
                f"attnreg: {error}\nAttention calls to which this applies will raise it as an error."
                + _without_effect()
            )
            _print_in_short(error)
    except Exception as error:  # noqa: BLE001 - `import torch` must not fail because of attnreg
        _warn(f"attnreg is not active: {type(error).__name__}: {error}")


def _find_importer_of_torch() -> str:
    """Return the first module of attnreg that is half imported while torch is; else an empty string."""
    if not _is_running(sys.modules.get("torch")):
        return ""
    ours = [(name, module) for name, module in [*sys.modules.items()] if name.startswith("attnreg.")]
    return next((name for name, module in ours if _is_running(module)), "")


def _is_running(module: ModuleType | None) -> bool:
    """Return whether the code of a module has begun and not ended."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _hint_at_case(names: list[str]) -> None:
    """Say which variables in lower case have no effect; others of such names are no variables of attnreg."""
    from attnreg.core.settings.environment import VARIABLES

    for name in names:
        if name.upper() in VARIABLES and name not in _said:
            _said.add(name)
            _warn(f"attnreg: {name} has no effect, expected {name.upper()}: variables are in upper case")


def _hint_at_prefix(names: list[str]) -> None:
    """Say which variables have no effect because their prefix is misspelt; else such a setting is lost."""
    from difflib import SequenceMatcher

    from attnreg.core.settings.environment import PREFIX, VARIABLES

    for name in names:
        for variable in VARIABLES:
            prefix = name.upper().removesuffix(variable.removeprefix(PREFIX))
            is_near = prefix != name.upper() and SequenceMatcher(None, prefix, PREFIX).ratio() > 0.85
            if is_near and os.environ[name].strip() and name not in _said:
                _said.add(name)
                _warn(f"attnreg: {name} has no effect, expected {variable}")


def _without_effect() -> str:
    """Return a sentence on variables for other packages that an earlier error has left without effect."""
    idle = [name for name in (_TRANSFORMERS, _AS_FLASH_ATTN) if os.environ.get(name, "").strip()]
    return f" Until it is mended these have no effect: {', '.join(idle)}." if idle else ""


def offer_to_transformers() -> None:
    """Have a model of transformers that asks for `attn_implementation="attnreg"` find it; once."""
    global _is_offered
    if not _is_offered:
        _is_offered = True
        _after_import(_MODELING_UTILS, _install_when_asked_for)


def _install_when_asked_for() -> None:
    """Call `install` before transformers looks for the name, which else is an error."""
    models = getattr(sys.modules[_MODELING_UTILS], "PreTrainedModel", None)
    look_up = getattr(models, "get_correct_attn_implementation", None)
    if models is None or look_up is None:
        return  # of another version: the program calls `install` itself

    @functools.wraps(look_up)
    def install_and_look_up(model: object, requested: object, *args: Any, **kwargs: Any) -> Any:
        if requested == "attnreg":
            if models.get_correct_attn_implementation is install_and_look_up:
                models.get_correct_attn_implementation = look_up
            importlib.import_module("attnreg.integrations.transformers").install()
        return look_up(model, requested, *args, **kwargs)

    models.get_correct_attn_implementation = install_and_look_up


def _stand_in_for_flash_attn() -> None:
    try:
        from attnreg.flash_attn import activation

        activation.activate()
    except Exception as error:  # noqa: BLE001 - the other variables still apply
        _warn(f"attnreg doesn't stand in for flash-attn: {type(error).__name__}: {error}")


def _asked_behind_transformers() -> str:
    """Return the name under which transformers is to run attnreg, by ATTNREG_TRANSFORMERS or a setting."""
    from attnreg.core.policy import current as policy
    from attnreg.core.policy.sources import transformers
    from attnreg.core.settings import environment
    from attnreg.errors import ConfigError

    variable = ""
    with contextlib.suppress(ConfigError):  # `on_error = "native"` has left the variables out
        variable = environment.read().transformers
    return {"1": "attnreg", "0": "off"}.get(variable, variable) or transformers(policy.sources())


def run_behind_transformers(name: str) -> None:
    """Have transformers run attnreg under a name, "off" for none: now, or once it is imported."""
    if name == "off" or name in _behind:
        return
    _behind.add(name)
    if name != "attnreg":
        _after_import(_IMPORT_UTILS, _say_flash_attn_is_there)
    _after_import(_MODELING_UTILS, functools.partial(_install_in_transformers, name))


def _after_import(name: str, then: Callable[[], None]) -> None:
    """Call a function once a module is imported: now, if it is; else when its code has run to the end.

    Of a module whose code fails it is called only if the module is attnreg's own.
    """
    spec: Any = getattr(sys.modules.get(name), "__spec__", None)
    if name not in sys.modules:
        sys.meta_path.insert(0, _AfterImport(name, then))
    elif _is_running(sys.modules[name]):  # it is what imports torch for the first time
        if not isinstance(spec, _BeingImported):
            spec.__class__ = _BeingImported
        vars(spec).setdefault("attnreg_calls", []).append(then)
        if not spec._initializing:  # another thread has ended the import meanwhile
            for call in vars(spec).pop("attnreg_calls", []):
                call()
    else:
        then()


def _say_flash_attn_is_there() -> None:
    """Report flash-attn as available before programs import the check; `install` reports any error."""
    with contextlib.suppress(Exception):
        from attnreg.integrations import behind_flash, transformers

        transformers.check_version()
        behind_flash.say_available()


def _install_in_transformers(name: str) -> None:
    try:
        from attnreg.integrations import transformers

        transformers.install(behind=None if name == "attnreg" else name)
    except Exception as error:  # noqa: BLE001 - `import transformers` must not fail because of attnreg
        _warn(f"attnreg is not installed in transformers: {type(error).__name__}: {error}")


class _BeingImported(ModuleSpec):
    """The spec of a module whose code runs now: it calls functions when Python says that it has run."""

    @property
    def _initializing(self) -> bool:  # private in Python, which reads and writes it
        return bool(vars(self).get("_initializing"))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        vars(self)["_initializing"] = value
        if value:
            return
        calls = vars(self).pop("attnreg_calls", [])
        self.__class__ = ModuleSpec  # type: ignore[assignment]
        if self.name in sys.modules or self.name.startswith("attnreg."):  # else its code has failed
            for call in calls:
                call()


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
        loader = spec.loader
        execute = loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the loader then copies and pickles as without attnreg
            execute(module)
            self._then()

        loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def _print_in_short(error: Exception) -> None:
    """Have Python print a fault of the settings without a traceback, if it ends the program."""
    if sys.excepthook is not sys.__excepthook__:
        return  # a debugger's, or the program's own

    def print_short(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if kind is not type(error) or str(raised) != str(error):
            sys.__excepthook__(kind, raised, trace)
            return
        inner = tuple(
            str(Path(sys.modules[name].__file__ or "").parent) + os.sep for name in ("attnreg", "torch")
        )
        sites = [
            f"{frame.f_code.co_filename}:{line}"
            for frame, line in walk_tb(trace)
            if not frame.f_code.co_filename.startswith(inner)
        ]
        place = f" (raised at {sites[-1]})" if sites else ""
        print(f"attnreg.{kind.__name__}: {raised}{place}", file=sys.stderr)  # noqa: T201 - as Python does

    sys.excepthook = print_short


def _warn(text: str) -> None:
    try:
        # The line of torch's that has called is of no use to anybody.
        warnings.warn_explicit(text, UserWarning, "<attnreg>", 0, "attnreg", _warned)
    except Warning:  # the program's filter makes it an error, but `import torch` mustn't fail
        logging.getLogger("attnreg").warning("%s", text)


def offer() -> None:
    """Make the name "attnreg" known to torch and transformers; never an error."""
    offer_to_transformers()
    _leave_first_use_uncompiled()
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


def _leave_first_use_uncompiled() -> None:
    """Keep Dynamo away from the first use of a name, which imports modules.

    After a graph break that use is a frame of its own: Dynamo compiled a thousand functions of the modules.
    """
    if sys.modules.get("torch") is None:  # None in its place: the program forbids the import
        return
    # As in `core.torchlib.frames`, which isn't imported here: it would cost each `import torch`.
    with contextlib.suppress(Exception):  # of a torch without what is private there: Dynamo compiles more
        frames = sys.modules["torch"]._C._dynamo.eval_frame
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        for module in (sys.modules["attnreg"], sys.modules[__name__]):
            for function in [x for x in vars(module).values() if isinstance(x, FunctionType)]:
                frames.set_code_exec_strategy(function.__code__, skip)


def _load_op(name: str) -> object:
    """Define attnreg's ops on first access in `torch.ops.attnreg`, as by a saved program."""
    if name in ("_varlen_attn", "_varlen_attn_backward"):
        importlib.import_module("attnreg.core.varlen.custom_op")
    elif name.startswith(("_sdpa", "_scaled_dot_product")):
        importlib.import_module("attnreg.core.aten.scoped_ops")
    raise AttributeError(name)  # torch's own look-up is next, and raises if the op is missing


def _activated_by_torch() -> SimpleNamespace:
    """Serve PyTorch's own functions; return the handle that torch's registry keeps."""
    from attnreg.core import aten
    from attnreg.core.policy import current as policy

    installed_before = aten.installed()
    aten.ensure()
    active_before = policy.activate(True)

    def remove() -> None:
        """Restore the state before `activate_flash_attention_impl`; later registrations stay."""
        policy.activate(active_before)
        if not installed_before and not policy.is_active():
            aten.restore()

    return SimpleNamespace(remove=remove)

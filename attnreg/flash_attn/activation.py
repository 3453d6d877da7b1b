"""A module `flash_attn` for programs that import flash-attn and can't be edited.

`activate` puts modules of that name, with the functions of this room, into `sys.modules`. It adds metadata of
a distribution flash-attn, because programs check for version 2.x. The version has the local label "+attnreg",
which no release of flash-attn has.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
import threading
from collections.abc import Iterator
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.locks import open_after_fork
from attnreg.errors import RegistrationError
from attnreg.flash_attn import bert_padding, functions, kvcache, private, rotary

NAME, DISTRIBUTION = "flash_attn", "flash-attn"
VERSION = "2.8.3+attnreg"

METADATA = f"""\
Metadata-Version: 2.1
Name: {DISTRIBUTION}
Version: {VERSION}
Summary: attnreg.flash_attn under the name of flash-attn: no files of flash-attn are installed
"""

_FUNCTIONS = {
    name: function
    for room in (functions, kvcache)
    for name, function in vars(room).items()
    if name.startswith("flash_attn_")
}
_PADDING = {
    name: getattr(bert_padding, name)
    for name in (
        "__getattr__",
        "index_first_axis",
        "index_first_axis_residual",
        "index_put_first_axis",
        "pad_input",
        "unpad_input",
    )
}

# What each module of `flash_attn` has. One whose name begins others' is a package.
_CONTENTS: dict[str, dict[str, Any]] = {
    NAME: _FUNCTIONS | {"__version__": VERSION},
    f"{NAME}.flash_attn_interface": _FUNCTIONS | private.NAMES,
    f"{NAME}.bert_padding": _PADDING,
    f"{NAME}.layers": {},
    f"{NAME}.layers.rotary": {
        "apply_rotary_emb": rotary.apply_rotary_emb,
        "apply_rotary_emb_func": rotary.apply_rotary_emb,
    },
    f"{NAME}.ops": {},
    f"{NAME}.ops.triton": {},
    f"{NAME}.ops.triton.rotary": {"apply_rotary": rotary.apply_rotary},
}

_lock = open_after_fork(threading.RLock())
# The modules of that name that `activate` replaced; None while it isn't active.
_replaced: dict[str, ModuleType] | None = None
_standing_in: dict[str, ModuleType] = {}


def activate(replace: bool = False) -> None:
    """Make `import flash_attn` find attnreg's functions, in this process; no change if it already does.

    Objects that a program has imported before stay as they are.

    Args:
        replace: whether to replace an installed flash-attn, too. Its metadata stay, and attnreg's backend FA2
            keeps using its kernels.

    Raises:
        RegistrationError: flash-attn is installed and `replace` is false. Or flash-attn-4 is installed, whose
            modules are below the same name.
    """
    global _replaced
    with _lock:
        if _replaced is not None:
            return
        installed = _installed(DISTRIBUTION)
        _check_free(installed, replace)
        if installed:
            with contextlib.suppress(Exception):  # a flash-attn that doesn't load has no kernels to keep
                importlib.import_module(f"{NAME}.flash_attn_interface")
        _replaced = {name: sys.modules.pop(name) for name in _present()}
        _standing_in.update(_modules())
        sys.modules.update(_standing_in)
        if not installed:
            sys.meta_path.append(_finder)


def deactivate() -> None:
    """Undo `activate`; no change if it wasn't called."""
    global _replaced
    with _lock:
        if _replaced is None:
            return
        for name in _present():
            del sys.modules[name]
        sys.modules.update(_replaced)
        _replaced = None
        _standing_in.clear()
        if _finder in sys.meta_path:
            sys.meta_path.remove(_finder)


def _check_free(installed: str, replace: bool) -> None:
    try:
        spec = find_spec(NAME)
    except ValueError:  # the program made the loaded module itself, without a `__spec__`
        spec = ModuleSpec(NAME, None, origin="sys.modules, where the program has put it")
    fourth = _installed("flash-attn-4")
    # A folder without __init__.py is a package, too, but only flash-attn-4's has a folder `cute`.
    folders = [] if spec is None or spec.origin else [*(spec.submodule_search_locations or ())]
    cute = next((path for path in (Path(folder, "cute") for folder in folders) if path.is_dir()), None)
    if fourth or cute:
        got = f"flash-attn-4 {fourth}" if fourth else f"the folder {cute}"
        raise RegistrationError(
            f"flash_attn: got {got}, which a module of that name would hide, expected none; import from "
            "attnreg.flash_attn instead"
        )
    if spec is not None and spec.origin and not replace:
        got = f"flash-attn {installed}" if installed else f"a module from {spec.origin}"
        without = f"none (pip uninstall {DISTRIBUTION})" if installed else "none"
        raise RegistrationError(
            f"flash_attn: got {got}, expected {without}, or attnreg.flash_attn.activate(replace=True)"
        )


def _installed(distribution: str) -> str:
    """Return the version of an installed distribution, or an empty string."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _present() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == NAME]


def _modules() -> dict[str, ModuleType]:
    """Return new modules, the package's and those below it, by their full names."""
    modules = {}
    for name, contents in _CONTENTS.items():
        is_package = any(other.startswith(f"{name}.") for other in _CONTENTS)
        modules[name] = _module(name, contents, is_package)
    for name, module in modules.items():
        package, _, own = name.rpartition(".")
        if package:
            setattr(modules[package], own, module)
    return modules


def _module(name: str, contents: dict[str, Any], is_package: bool) -> ModuleType:
    module = ModuleType(name, f"attnreg's stand-in for {name}; attnreg.flash_attn.deactivate() takes it out.")
    module.__spec__ = ModuleSpec(name, None, origin=__file__, is_package=is_package)
    module.__file__ = __file__
    module.__package__ = name if is_package else name.rpartition(".")[0]
    if is_package:
        module.__path__ = []  # importing others, such as `flash_attn.losses`, is a ModuleNotFoundError
    vars(module).update(contents)
    return module


class _Metadata(importlib.metadata.Distribution):
    """The distribution that programs find when they check the version."""

    def read_text(self, filename: str) -> str | None:
        return {"METADATA": METADATA, "top_level.txt": f"{NAME}\n"}.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        return Path(__file__).parent / path


class _Loader(Loader):
    """Loads the modules of `activate` as they are."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _standing_in[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        pass


_loader = _Loader()
_EVERYTHING = importlib.metadata.DistributionFinder.Context()


class _Finder(importlib.metadata.DistributionFinder):
    """Finds `_Metadata`, and the modules of `activate` when a program imports or reloads them anew."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        module = _standing_in.get(name)
        if module is None:
            return None
        return ModuleSpec(name, _loader, origin=__file__, is_package=hasattr(module, "__path__"))

    def find_distributions(
        self,
        context: importlib.metadata.DistributionFinder.Context = _EVERYTHING,
    ) -> Iterator[importlib.metadata.Distribution]:
        named = context.name is None or context.name.replace("_", "-").lower() == DISTRIBUTION
        return iter([_Metadata()] if named and "path" not in vars(context) else [])


_finder = _Finder()


leave_module_uncompiled(__name__)

"""One registry for all the attention kernels of a machine.

    import attnreg

    attnreg.register_backend("math")  # F.scaled_dot_product_attention runs it where it can
    print(attnreg.stats())            # what really ran, and why not always that

Importing attnreg loads no kernel, touches no GPU and reads no file. Names are imported when they
are first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnreg.api import (
        Handle,
        configure,
        install,
        list_backends,
        record,
        register_backend,
        reload,
        uninstall,
        use_backend,
    )
    from attnreg.assignment import Assignment, assign
    from attnreg.core.contract.backend import Backend, Call, Kernels
    from attnreg.core.contract.capabilities import Capabilities, Range
    from attnreg.core.contract.lengths import Cut
    from attnreg.core.contract.spec import AttentionSpec, Device
    from attnreg.core.dispatch.counters import Stats, reset_stats, stats
    from attnreg.core.selection.decision import Decision
    from attnreg.core.settings.config import Settings
    from attnreg.core.varlen.front import AuxRequest, varlen_attn, varlen_attn_out
    from attnreg.core.varlen.merging import merge
    from attnreg.core.varlen.trees import tree_ranges
    from attnreg.errors import (
        AttnregError,
        BackendUnavailableError,
        BuildError,
        ConfigError,
        InvalidInputError,
        RanksDifferError,
        RegistrationError,
        UnknownBackendError,
        UnsupportedInputError,
    )
    from attnreg.parallel.balance import spread_documents
    from attnreg.parallel.context import ContextParallel
    from attnreg.parallel.front import context_parallel
    from attnreg.parallel.layout import Layout, Piece
    from attnreg.parallel.methods import explain_context_parallel
    from attnreg.tools.explanation import Explanation, explain
    from attnreg.tools.warmup import FirstCall, warmup

__version__ = "0.2.0"

_HOMES = {
    "api": "Handle configure install list_backends record register_backend reload uninstall use_backend",
    "assignment": "Assignment assign",
    "core.contract.backend": "Backend Call Kernels",
    "core.contract.capabilities": "Capabilities Range",
    "core.contract.lengths": "Cut",
    "core.contract.spec": "AttentionSpec Device",
    "core.dispatch.counters": "Stats reset_stats stats",
    "errors": "AttnregError BackendUnavailableError BuildError ConfigError InvalidInputError"
    " RanksDifferError RegistrationError UnknownBackendError UnsupportedInputError",
    "parallel.balance": "spread_documents",
    "parallel.context": "ContextParallel",
    "parallel.front": "context_parallel",
    "parallel.layout": "Layout Piece",
    "parallel.methods": "explain_context_parallel",
    "core.selection.decision": "Decision",
    "core.settings.config": "Settings",
    "tools.explanation": "Explanation explain",
    "tools.warmup": "FirstCall warmup",
    "core.varlen.front": "AuxRequest varlen_attn varlen_attn_out",
    "core.varlen.merging": "merge",
    "core.varlen.trees": "tree_ranges",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
_MODULES = {"flash_attn", "integrations"}  # parts of attnreg that a program may name without an import

__all__ = [  # noqa: RUF022 - by what they are for
    "register_backend", "Handle", "use_backend", "assign", "Assignment", "install", "uninstall",
    "list_backends",
    "configure", "reload", "Settings",
    "explain", "Explanation", "Decision", "AttentionSpec", "Device",
    "stats", "Stats", "reset_stats", "record", "warmup", "FirstCall",
    "varlen_attn", "varlen_attn_out", "AuxRequest", "merge", "tree_ranges",
    "context_parallel", "ContextParallel", "Layout", "Piece", "spread_documents", "explain_context_parallel",
    "Backend", "Kernels", "Call", "Capabilities", "Range", "Cut",
    "AttnregError", "BackendUnavailableError", "BuildError", "ConfigError", "InvalidInputError",
    "RanksDifferError", "RegistrationError", "UnknownBackendError", "UnsupportedInputError",
]  # fmt: skip


# Whether or not torch has run its entry point: a program may use no other name of attnreg. Not for `python -m
# attnreg`, which imports nothing while the current folder is on the path.
if sys.argv[:1] != ["-m"]:
    importlib.import_module("attnreg._autoload").offer_to_transformers()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"attnreg.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'attnreg' has no attribute {name!r}")
    # Torch first: importing it may import attnreg's own modules, which then have to be whole.
    importlib.import_module("torch")
    hook = importlib.import_module("attnreg._autoload")
    if not hook.variables_are_set:
        hook.activate()
    value = getattr(importlib.import_module(f"attnreg.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# torch's own registry learns the name "attnreg" here, or, where attnreg is installed as a package,
# when torch itself is imported.
if "torch" in sys.modules:
    from attnreg import _autoload

    _autoload.offer()

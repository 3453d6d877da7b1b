"""The package flash-attn-4: whether it is here whole, and its two functions once they are known to fit."""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import os
import tempfile
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnreg.errors import BackendUnavailableError
from attnreg.torchlib import caches
from attnreg.torchlib.layout import readable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

__all__ = [
    "KNOWN",
    "RESULTS",
    "first",
    "functions",
    "installed",
    "launchers",
    "quiet",
    "release",
    "unavailable",
]

PACKAGE = "flash-attn-4"
KNOWN = "4.0.0b19 to 4.0.0b36"

SHARED = (
    *("q", "k", "v", "softmax_scale", "causal", "softcap", "window_size_left", "window_size_right"),
    *("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k", "out", "lse"),
)
# Every keyword that the adapter passes. Betas rename them; a call must not be the first to notice.
TAKEN = {
    "_flash_attn_fwd": (*SHARED, "page_table", "num_splits", "return_lse"),
    "_flash_attn_bwd": (*SHARED, "dout", "deterministic", "dq", "dk", "dv"),
}

# Parameters that nothing has to be passed for.
SWALLOWING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

# How many of their results are asked for.
RESULTS = {"forward": 2, "backward": 3}

SWITCH, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"

log = logging.getLogger("attnreg")


def installed() -> str | None:
    """Return the version of the package; None where it isn't installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def release() -> str:
    """Return name and version, as messages give them."""
    return f"{PACKAGE} {installed()}"


def unavailable() -> str | None:
    """Return why the package can't be loaded here; imports nothing of it."""
    if installed() is None:
        return f"{PACKAGE} isn't installed"
    # flash-attn brings an old flash_attn/cute of its own, and the package installed last wins.
    if not any((Path(place) / "cute" / "cache_utils.py").is_file() for place in _places("flash_attn")):
        return (
            f"{release()} lacks flash_attn/cute/cache_utils.py, as when flash-attn is installed over it "
            f"or removed beside it; reinstall it with: pip install --force-reinstall --no-deps {PACKAGE}"
        )
    if not _places("cutlass"):
        return f"{release()} needs nvidia-cutlass-dsl, and there is no module cutlass"
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU here"
    return None


def functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Import the package and return its forward and its backward.

    Raises:
        BackendUnavailableError: one of them lacks a parameter; says which, and of what version.
    """
    _keep_compiled()  # the package reads both variables when it is imported
    try:
        with quiet():
            interface = import_module("flash_attn.cute.interface")
    finally:
        # What it leaves in cycles holds errors, whose frames lead to the tensors of a first call.
        gc.collect()
    forward, backward = (_checked(interface, name) for name in TAKEN)
    # From 4.0.0b26 on it copies by itself what its kernels can't load.
    copier = getattr(interface, "maybe_contiguous", None)
    if copier is not None and "align_bytes" in inspect.signature(copier).parameters:
        return forward, backward
    return _aligning(forward), _aligning(backward)


def first(results: Any, direction: str) -> tuple[Tensor, ...]:
    """Return the first results of a function; further ones differ from release to release."""
    count = RESULTS[direction]
    found = results[:count] if isinstance(results, tuple) else ()
    if len(found) == count and all(isinstance(one, torch.Tensor) for one in found):
        return found
    kinds = [type(one).__name__ for one in (results if isinstance(results, tuple) else (results,))]
    name = dict(zip(RESULTS, TAKEN, strict=True))[direction]
    raise BackendUnavailableError(
        f"{release()}: {name} returned {', '.join(kinds) or 'nothing'}, "
        f"expected {count} tensors or more; attnreg knows {KNOWN}"
    )


def launchers() -> list[Any]:
    """Return the package's functions that launch kernels, each through its `compile_cache`."""
    interface = import_module("flash_attn.cute.interface")
    named = list(vars(interface).values())
    return list({id(x): x for x in named if callable(x) and hasattr(x, "compile_cache")}.values())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep back what the package's compiler has to say about itself, which users can do nothing about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _places(module: str) -> list[str]:
    """Return the folders of a package, without importing it."""
    try:
        found = find_spec(module)
    except ValueError:  # somebody has put a module without a spec in its place
        return []
    return list(found.submodule_search_locations or ()) if found else []


def _checked(interface: Any, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] | None = getattr(interface, name, None)
    if function is None:
        raise BackendUnavailableError(f"{release()}: there is no {name}; attnreg knows {KNOWN}")
    takes = inspect.signature(function).parameters
    if missing := [keyword for keyword in TAKEN[name] if keyword not in takes]:
        raise BackendUnavailableError(
            f"{release()}: {name} takes no {', '.join(map(repr, missing))}; attnreg knows {KNOWN}"
        )
    wanted = [one.name for one in takes.values() if one.default is one.empty and one.kind not in SWALLOWING]
    if unknown := [keyword for keyword in wanted if keyword not in TAKEN[name]]:
        raise BackendUnavailableError(
            f"{release()}: {name} needs {', '.join(map(repr, unknown))}, which attnreg doesn't know; "
            f"it knows {KNOWN}"
        )
    return function


def _aligning(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that copies what sixteen-byte loads along the head dim can't read."""

    def run(**given: Any) -> Any:
        for name in ("q", "k", "v", "out", "dout"):
            tensor = given.get(name)
            if tensor is not None:
                given[name] = readable(tensor)
        return function(**given)

    return run


def _keep_compiled() -> None:
    """Have what gets compiled kept on disk, unless the user has settled that or no folder serves."""
    if os.environ.get(SWITCH, "1") != "1":
        return
    try:
        folder = Path(os.environ.get(FOLDER) or caches.folder("fa4"))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _try_out(folder)
    except (OSError, RuntimeError, ImportError) as error:
        log.warning("FA4 compiles anew in each process: its cache folder can't be used: %s", error)
        return
    os.environ.setdefault(SWITCH, "1")
    os.environ.setdefault(FOLDER, str(folder))


def _try_out(folder: Path) -> None:
    """Write and lock a file: the package waits fifteen seconds for a lock, and then fails."""
    import fcntl

    with tempfile.TemporaryFile(dir=folder) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

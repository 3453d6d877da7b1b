"""The package flash-attn-4: a check that it is complete, its two functions, its releases, its disk cache."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.launching.programs import pages_of, table_of
from attnreg.core.torchlib import caches
from attnreg.core.torchlib.layout import readable
from attnreg.core.torchlib.versions import version_of
from attnreg.errors import BackendUnavailableError

PACKAGE = "flash-attn-4"
INTERFACE = "flash_attn.cute.interface"
# The releases whose signatures the adapter has been written for.
KNOWN = "4.0.0b19 to 4.0.0b36"

# The exact releases whose launches are in `launches`. To add a release, install it, list it here and run
# `make test-gpu BACKENDS=FA4`: it may stay if everything passes. README.md has the details.
TESTED_RELEASES = ("4.0.0b36",)

_BOTH = (
    *("q", "k", "v", "softmax_scale", "causal", "softcap", "window_size_left", "window_size_right"),
    *("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k", "out", "lse"),
)
# Every keyword that the adapter passes. Beta releases rename keywords, which must fail at load, not in a
# call.
KEYWORDS = {
    "_flash_attn_fwd": (*_BOTH, "page_table", "num_splits", "return_lse"),
    "_flash_attn_bwd": (*_BOTH, "dout", "deterministic", "dlse", "dq", "dk", "dv"),
}
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

# How many results of each direction are used, without sinks. Further results differ from release to release.
RESULTS = {"forward": 2, "backward": 3}
# The keyword of sinks, with which a backward has a fourth result. Not all of `KNOWN` have it in both
# directions, so only `TESTED_RELEASES` receive sinks.
SINKS = "learnable_sink"

SWITCH, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"

log = logging.getLogger("attnreg")


class PackageCall(NamedTuple):
    """A call of one of the package's functions; calling this object performs it.

    Attributes:
        direction: "forward" or "backward".
        function: the package's function.
        tensors: tensors by the package's keywords, in the contract's order. The tensors of options follow.
            Both `cu_seqlens` of a packed call come last.
        options: all other keywords.
        as_pages: whether packed keys are read as pages.
    """

    direction: str
    function: Callable[..., Any]
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    as_pages: bool = False

    def __call__(self) -> tuple[Tensor, ...]:
        """Call the function, and return the results that are used.

        Raises:
            BackendUnavailableError: the package returned fewer tensors, or other objects.
        """
        tensors = self._with_pages() if self.as_pages else self.tensors
        results = self.function(**tensors, **self.options)
        count = RESULTS[self.direction] + (self.direction == "backward" and SINKS in self.tensors)
        used = results[:count] if isinstance(results, tuple) else ()
        if len(used) == count and all(isinstance(result, torch.Tensor) for result in used):
            return used
        kinds = [type(result).__name__ for result in (results if isinstance(results, tuple) else (results,))]
        name = dict(zip(RESULTS, KEYWORDS, strict=True))[self.direction]
        raise BackendUnavailableError(
            f"{release()}: {name} returned {', '.join(kinds) or 'nothing'}, "
            f"expected {count} tensors or more; attnreg knows {KNOWN}"
        )

    def _with_pages(self) -> dict[str, Tensor]:
        """Return the tensors with keys and values as overlapping pages, and offsets as their table."""
        tensors = dict(self.tensors)
        tensors["page_table"] = table_of(tensors.pop("cu_seqlens_k"))
        return tensors | {name: pages_of(tensors[name]) for name in ("k", "v")}


def installed() -> str | None:
    """Return the version of the package; None where it isn't installed."""
    return version_of(PACKAGE, version)


def release() -> str:
    """Return name and version, for messages."""
    return f"{PACKAGE} {installed()}"


def release_is_tested() -> bool:
    """Whether the installed release is one of `TESTED_RELEASES`; logs if not."""
    if installed() in TESTED_RELEASES:
        return True
    log.info(
        "FA4: each call goes through the Python of %s, as launches are written down only for %s",
        release(),
        ", ".join(TESTED_RELEASES),
    )
    return False


def unavailable() -> str | None:
    """Return why the package can't be loaded here; imports nothing of it."""
    if installed() is None:
        return f"{PACKAGE} isn't installed"
    # flash-attn contains an old flash_attn/cute, and the package installed last overwrites the other's files.
    if not any((Path(place) / "cute" / "cache_utils.py").is_file() for place in _places("flash_attn")):
        return (
            f"{release()} lacks flash_attn/cute/cache_utils.py, as when flash-attn is installed over it "
            f"or removed afterwards; reinstall it with: pip install --force-reinstall --no-deps {PACKAGE}"
        )
    if not _places("cutlass"):
        return f"{release()} needs nvidia-cutlass-dsl, and there is no module cutlass"
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU here"
    return None


def functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Import the package and return its forward and its backward.

    Raises:
        BackendUnavailableError: a function lacks a parameter, or requires an unknown one; names it and the
        version.
    """
    _keep_compiled()  # the package reads both variables at its import
    try:
        with quiet():
            interface = import_module(INTERFACE)
    finally:
        # The import leaves errors in reference cycles, whose frames keep the first call's tensors alive.
        gc.collect()
    forward, backward = (_checked(interface, name) for name in KEYWORDS)
    # From 4.0.0b26 on the package itself copies tensors that its kernels can't load.
    copier = getattr(interface, "maybe_contiguous", None)
    if copier is not None and "align_bytes" in inspect.signature(copier).parameters:
        return forward, backward
    return _aligning(forward), _aligning(backward)


def functions_with_caches() -> list[Any]:
    """Return the package's functions that launch kernels, each through its `compile_cache`."""
    interface = import_module(INTERFACE)
    named = list(vars(interface).values())  # some functions have two names
    return list({id(x): x for x in named if callable(x) and hasattr(x, "compile_cache")}.values())


# Suppresses warnings of the package's compiler about itself, which users can't act on.
quiet = functools.partial(warnings.catch_warnings, action="ignore")


def _places(module: str) -> list[str]:
    """Return the folders of a package, without importing it."""
    try:
        spec = find_spec(module)
    except ValueError:  # sys.modules has a module without a spec
        return []
    return list(spec.submodule_search_locations or ()) if spec else []


def _checked(interface: Any, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] | None = getattr(interface, name, None)
    if function is None:
        raise BackendUnavailableError(f"{release()}: there is no {name}; attnreg knows {KNOWN}")
    takes = inspect.signature(function).parameters
    if missing := [repr(keyword) for keyword in KEYWORDS[name] if keyword not in takes]:
        raise BackendUnavailableError(
            f"{release()}: {name} takes no {', '.join(missing)}; attnreg knows {KNOWN}"
        )
    wanted = [
        parameter.name
        for parameter in takes.values()
        if parameter.default is parameter.empty and parameter.kind not in VARIADIC
    ]
    if unknown := [repr(keyword) for keyword in wanted if keyword not in KEYWORDS[name]]:
        raise BackendUnavailableError(
            f"{release()}: {name} needs {', '.join(unknown)}, which attnreg doesn't know; it knows {KNOWN}"
        )
    return function


def _aligning(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that tensors are copied that sixteen-byte loads along the head dim can't read."""

    def run(**arguments: Any) -> Any:
        read = {
            name: readable(arguments[name]) for name in ("q", "k", "v", "out", "dout") if name in arguments
        }
        return function(**arguments | read)

    return run


def _keep_compiled() -> None:
    """Switch on the package's disk cache, unless the user forbids it or the folder can't be used.

    The package runs the files of that folder, so no other user may write to it.
    """
    if os.environ.get(SWITCH, "1") != "1":
        return
    try:
        folder = Path(os.environ.get(FOLDER) or caches.folder("fa4"))
        caches.make(folder)
        folder = caches.resolve(folder)
        caches.check_writable(folder)
        caches.check_contents(folder)
        _check_locks(folder)
    except (OSError, ImportError) as error:
        log.warning("FA4 compiles anew in each process: its cache folder can't be used: %s", error)
        if SWITCH in os.environ:
            os.environ[SWITCH] = "0"
        return
    os.environ.update({SWITCH: "1", FOLDER: str(folder)})


def _check_locks(folder: Path) -> None:
    """Raise OSError if files in a folder can't be written or locked.

    Without locks the package would wait fifteen seconds and then fail.
    """
    import fcntl

    with tempfile.TemporaryFile(dir=folder) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

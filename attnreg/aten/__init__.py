"""Front 1: routers over PyTorch's own attention ops, installed once and switched by data.

Registering or destroying a kernel while another thread calls the op is not safe in torch, so
`install` happens once, and what the routers do depends on what is registered at the time of a call.
With nothing registered they pass every call to torch's own kernel.
"""

from __future__ import annotations

import logging
import threading
import warnings
from typing import Any

import torch
from torch.nn.attention import _registry as torch_registry

from attnreg import _registry
from attnreg.aten import compiled, cpu, cudnn, flash
from attnreg.aten.routing import Route, router
from attnreg.errors import RegistrationError
from attnreg.torchlib import captured
from attnreg.torchlib.locks import open_after_fork

__all__ = ["NAME", "ROUTES", "ensure", "installed", "restore", "shadowed_by", "usable"]

log = logging.getLogger("attnreg")

NAME = "attnreg"
ROUTES: tuple[Route, ...] = (*flash.ROUTES, *cudnn.ROUTES, *cpu.ROUTES)

# Torch's kernels of these, below `F.scaled_dot_product_attention` on CUDA, do nothing but call ops that are
# routed. So they need no router, and a call enters Python once; but somebody's override would hide them.
ABOVE = tuple(
    f"_scaled_dot_product_{kernel}_attention{direction}"
    for kernel in ("flash", "cudnn")
    for direction in ("", "_backward")
)

_lock = open_after_fork(threading.RLock())
_library: torch.library.Library | None = None
_kept_out = False


def installed() -> bool:
    """Whether the routers are registered."""
    return _library is not None


def usable() -> bool:
    """Whether `varlen_attn` may go through aten's op; registers the routers when first asked.

    Not after `uninstall`, which promised that they stay out, nor where they can't be installed; nor
    where somebody activated another implementation in torch, which a mere call must not undo.
    """
    global _kept_out
    if _library is None and not _kept_out:
        if shadowed_by():
            return False
        try:
            ensure()
        except RegistrationError as error:
            _kept_out = True
            log.warning("varlen_attn goes through its own op: %s", error)
    return not _kept_out


def ensure(routes: tuple[Route, ...] = ROUTES) -> None:
    """Register the routers, all or none; no change if they are registered.

    An implementation that was activated in `torch.nn.attention` is restored first, with a warning:
    the kernels beneath it are the ones to fall back to.

    Raises:
        RegistrationError: torch lacks an op, declares it in another way, or somebody else has
            overridden it; every op is as it was.
    """
    global _library, _kept_out
    with _lock:
        _kept_out = False
        if _library is not None:
            return
        checked = [(route, _unknown_arguments(route)) for route in routes if _is_present(route)]
        above = shadowed_by()
        if above:
            torch_registry.restore_flash_attention_impl()
        try:
            _library = _registered(checked)
        except BaseException:
            if above:
                torch_registry.activate_flash_attention_impl(above)
            raise
        if above:
            known = above.casefold() in _registry.entries()
            asks = f"register_backend({above!r}) asks for it" if known else f"it knows no backend {above!r}"
            log.warning(
                "torch.nn.attention had %r active: attnreg has restored torch's own kernels, to which it "
                "falls back, and chooses for each call from now on; %s",
                above,
                asks,
            )


def restore() -> None:
    """Take the routers out and torch's own kernels back; no change if none are registered.

    Not while another thread calls attention: torch can't unregister a kernel that is in use.
    """
    global _library, _kept_out
    with _lock:
        _kept_out = True
        if _library is not None:
            compiled.uncover()
            captured.compiled = None
            _library._destroy()  # type: ignore[no-untyped-call]
            _library = None


def shadowed_by() -> str:
    """Return the implementation of `torch.nn.attention` that lies above the routers, or ''."""
    name = torch_registry.current_flash_attention_impl()
    return "" if name in (None, NAME) else str(name)


def _is_present(route: Route) -> bool:
    """Whether this torch has the op; one that is younger than this torch needn't be there."""
    if hasattr(torch.ops.aten, route.op):
        return True
    if _version() < tuple(map(int, route.since.split("."))):
        return False
    raise RegistrationError(f"torch {torch.__version__} has no aten::{route.op}")


def _unknown_arguments(route: Route) -> frozenset[str]:
    """Return the arguments that only a newer torch has, after checking that the others are as expected."""
    declared = getattr(torch.ops.aten, route.op).default._schema
    known: tuple[str, ...] = route.arguments._fields  # type: ignore[attr-defined]
    given = tuple(argument.name for argument in declared.arguments)
    positional = tuple(argument.name for argument in declared.arguments if not argument.kwarg_only)
    required = {argument.name for argument in declared.arguments if not argument.has_default_value()}
    if positional != known[: len(positional)] or not required <= set(known):
        raise RegistrationError(
            f"aten::{route.op} of torch {torch.__version__}: got {declared}, expected arguments {known}"
        )
    return frozenset(given) - frozenset(known)


def _registered(checked: list[tuple[Route, frozenset[str]]]) -> torch.library.Library:
    """Register the routers for some routes, all or none."""
    places = [(route, key, unknown) for route, unknown in checked for key in route.keys]
    for op, key in [(route.op, key) for route, key, _ in places] + [(op, "CUDA") for op in ABOVE]:
        captured.check_not_overridden(op, key)
    # All kernels are captured before the first router covers one.
    routers = [router(route, captured.capture(route.op, key), unknown) for route, key, unknown in places]
    is_compiled = compiled.capture(_compiled(route, key) for route, key, _ in places)
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for (route, key, _), function in zip(places, routers, strict=True):
            _register(library, route.op, key, function)
        captured.compiled = False
        if is_compiled:
            compiled.cover()
    except Exception as error:
        compiled.uncover()
        captured.compiled = None
        library._destroy()  # type: ignore[no-untyped-call]
        raise RegistrationError(f"routers can't be installed: {error}; every op is as it was") from error
    return library


def _compiled(route: Route, key: str) -> tuple[str, str, int, int]:
    """Return what the compiled router over a route's has to know of it."""
    names: tuple[str, ...] = route.arguments._fields  # type: ignore[attr-defined]
    carrier = names.index(route.carrier) if route.carrier else -1
    return f"aten::{route.op}", key, names.index("query"), carrier


def _register(library: torch.library.Library, op: str, key: str, function: Any) -> None:
    with warnings.catch_warnings():
        # Torch warns, once per process and for every op to come, that a kernel is overridden: our purpose.
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl(op, function, key)  # type: ignore[no-untyped-call]


def _version() -> tuple[int, ...]:
    return tuple(map(int, torch.__version__.split(".")[:2]))

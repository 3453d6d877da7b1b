"""Front 1: routers over PyTorch's own attention ops, installed once and switched by data.

Registering or destroying a kernel while another thread calls the op isn't safe in torch. So `ensure`
registers the routers once. What they do depends on the backends registered at the time of a call: without any
they pass every call to torch's own kernel.

Each family of ops has a file (`flash`, `cudnn`, `efficient`, `cpu`); they share `routing` and `schemas`.
`nested` sends nested tensors to the flash op. `observers` counts calls that no router sees in the ops where
they end, and `bypassed` says why. `scoped_ops` has ops for graphs that contain a `use_backend` block.
May import: `dispatch` and all below it. Read `routing.py` first.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

from attnreg.core import registry
from attnreg.core.aten import bypassed, cpu, cudnn, efficient, flash, nested, observers, scoped_ops
from attnreg.core.aten.routing import OpLayout, Route, RouterResult, router
from attnreg.core.dispatch import call_cache
from attnreg.core.torchlib import captured
from attnreg.core.torchlib.captured import torch_registry
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.versions import TORCH_VERSION
from attnreg.errors import RegistrationError

log = logging.getLogger("attnreg")

__all__ = ["ROUTES", "ensure", "ensure_often", "installed", "restore", "scoped_ops"]

ROUTES: tuple[Route, ...] = (*flash.ROUTES, *cudnn.ROUTES, *efficient.ROUTES, *cpu.ROUTES)

# Ops below `F.scaled_dot_product_attention` on CUDA whose kernels do nothing but call routed ops. They need
# no router, and a call enters Python once. But an override of one of them would hide the routers below.
ABOVE = tuple(
    f"_scaled_dot_product_{kernel}_attention{direction}"
    for kernel in ("flash", "cudnn", "efficient")
    for direction in ("", "_backward")
)

_remove: Callable[[], None] | None = None
_registers = False  # whether a thread is in `ensure`, which a signal handler or a finalizer may call, too


def installed() -> bool:
    """Whether the routers are registered."""
    return _remove is not None


def ensure(routes: tuple[Route, ...] = ROUTES) -> None:
    """Register the routers, all or none; no change if they are registered.

    An implementation that was activated in `torch.nn.attention` is switched off first, with a warning,
    because routers fall back to the kernels beneath it. An implementation that was activated after the
    routers were registered only causes a warning.

    Raises:
        RegistrationError: torch is too old, lacks an op, or declares it in another way, or other Python code
            overrides an op. Every op is as before.
    """
    global _remove, _registers
    with registry.lock:
        if _registers:
            return
        if _remove is not None:
            captured.warn_if_shadowed()
            bypassed.follow()
            return
        captured.check_version()
        checked = [(route, _unknown_arguments(route)) for route in routes if _is_present(route)]
        above = captured.shadowed_by()
        if above:
            torch_registry.restore_flash_attention_impl()
        try:
            _registers = True
            _remove = _register_all(checked)
        except BaseException:
            if above:
                torch_registry.activate_flash_attention_impl(above)
            raise
        finally:
            _registers = False
        if above:
            known = above.casefold() in registry.entries()
            log.warning(
                "torch.nn.attention had %r active: attnreg has restored torch's own kernels, to which it "
                "falls back, and chooses for each call from now on; %s",
                above,
                f"register_backend({above!r}) asks for it" if known else f"it knows no backend {above!r}",
            )
        bypassed.follow()


def ensure_often() -> None:
    """Register the routers for a block: as `ensure`, but overrides are looked for a hundredth of the time."""
    if _remove is None:
        ensure()
        return
    captured.warn_if_shadowed_lately()
    bypassed.follow()


def restore() -> None:
    """Remove the routers, so that torch's own kernels run; no change if none are registered.

    Must not run while another thread calls attention: torch can't unregister a kernel that is in use.
    """
    global _remove
    with registry.lock:
        if _remove is not None:
            captured.watch(())  # first: else the kernels beneath the routers would be taken for overrides
            _remove()
            _remove, captured.call_cache_in_use = None, None
            bypassed.follow()
            registry.changed()


def _is_present(route: Route) -> bool:
    """Whether this torch has the op; raises RegistrationError if its version should have it."""
    is_present = hasattr(torch.ops.aten, route.op)
    if not is_present and route.since <= TORCH_VERSION:
        raise RegistrationError(f"torch {torch.__version__} has no aten::{route.op}")
    return is_present


def _unknown_arguments(route: Route) -> frozenset[str]:
    """Check an op's arguments, and return the names of arguments that only a newer torch has.

    Raises RegistrationError if a known positional argument has moved, or a required argument is unknown.
    """
    declared = getattr(torch.ops.aten, route.op).default._schema
    known: tuple[str, ...] = route.arguments._fields  # type: ignore[attr-defined]
    names = tuple(argument.name for argument in declared.arguments)
    positional = tuple(argument.name for argument in declared.arguments if not argument.kwarg_only)
    required = {argument.name for argument in declared.arguments if not argument.has_default_value()}
    if positional != known[: len(positional)] or not required <= set(known):
        raise RegistrationError(
            f"aten::{route.op} of torch {torch.__version__}: got {declared}, expected arguments {known}"
        )
    return frozenset(names) - frozenset(known)


def _register_all(checked: list[tuple[Route, frozenset[str]]]) -> Callable[[], None]:
    """Register the routers of some routes, all or none; returns the function that removes them."""
    places = [(route, key, unknown) for route, unknown in checked for key in route.keys]
    for op, key in [(route.op, key) for route, key, _ in places] + [(op, "CUDA") for op in ABOVE]:
        captured.check_not_overridden(op, key)
    # All kernels are captured before the first router covers one.
    routers = [
        (route, key, router(route, captured.capture(route.op, key), unknown))
        for route, key, unknown in places
    ]
    call_cache.forget()
    module = call_cache.module_for_routers()
    library = module or torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    remove = call_cache.remove_routers if module else library._destroy
    try:
        for route, key, function in routers:
            _register(library, route.op, key, function, route.layout)
        end_observation = observers.install(library)
    except Exception as error:
        remove()
        raise RegistrationError(f"routers can't be installed: {error}; every op is as it was") from error
    if module:
        call_cache.routers_added()
    else:
        captured.call_cache_in_use = False
        # Up to torch 2.12 nobody else can override an op in this set, so that no implementation of
        # `torch.nn.attention` could be activated.
        getattr(torch.library, "_impls", set()).difference_update(getattr(library, "_op_impls", ()))
    registry.changed()
    restore_choice = nested.install()
    captured.watch(
        dict.fromkeys((*(route.op for route, _ in checked), *ABOVE, "scaled_dot_product_attention"))
    )

    def remove_all() -> None:
        end_observation()
        restore_choice()  # first: on a CPU the op that it chooses has no kernel without the routers
        remove()

    return remove_all


def _register(
    library: Any, op: str, key: str, function: Callable[..., RouterResult], layout: OpLayout
) -> None:
    """Register a router with a `torch.library.Library` or with the compiled call cache."""

    def results_alone(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)[0]

    with warnings.catch_warnings():
        # Torch warns, once per process, that a kernel is overridden: that is the purpose here.
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        if isinstance(library, torch.library.Library):
            library.impl(op, results_alone, key)  # type: ignore[no-untyped-call]
        else:
            library.add_router(op, key, tuple(layout), function)


leave_module_uncompiled(__name__)

"""The compiled call cache (`csrc/`): the fast path of both fronts, where it was built.

Its routers lie over torch's ops in the place of those in Python, and its `varlen` in front of `varlen_attn`.
Each describes a call by everything but the values of its tensors, and runs the launcher that is kept for that
description. A call that isn't kept goes to Python, which looks up its plan, runs it, and returns the results
together with what is to be kept (`Kept`), or with nothing. Whatever changes in the registry or the settings
drops everything.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from attnreg import _registry
from attnreg.contract import offsets
from attnreg.contract.backend import Call
from attnreg.contract.launchers import AddressLauncher, Launcher, OpLauncher
from attnreg.contract.validation import check_values, every_row_sees_a_key
from attnreg.dispatch import counters, scope
from attnreg.dispatch.state import Plan
from attnreg.errors import AttnregError, BuildError
from attnreg.settings import environment
from attnreg.torchlib import building, captured

log = logging.getLogger("attnreg")

FORWARD_TENSORS = 3  # query, key and value

# The module, while it looks calls up; None while it is paused or isn't there. `load` sets it.
active: Any = None
is_loaded = False  # whether `load` has looked for it

_module: Any = None  # what was loaded stays loaded: torch may have its code in use
_plans: tuple[Callable[..., Any], ...] | None = None
_pauses = 0
_has_routers = False  # whether the routers over torch's ops are the module's


class Kept(NamedTuple):
    """How the call cache is to run further calls like one that a plan has run.

    Attributes:
        launcher: runs them; None for torch's own kernel of the op, on the op's arguments as they are.
        plan: what ran it: it has what to add to at each call, and says whether an error declines one.
        is_final: whether Python need not be asked for a better launcher from time to time.
        auxiliary: what an aten op returns behind the kernel's results: None, numbers, and models of the
            tensors, on the device "meta". The values of these are never read.
        offsets: of a packed call on a GPU both offsets and how many tokens they are of, as it is known that
            every row sees a key. The launcher is used only where that is known.
        counts_sinks: whether the launcher is given sinks, in front of the offsets, and counts them.
    """

    launcher: Launcher | None
    plan: Plan
    is_final: bool = True
    auxiliary: tuple[Any, ...] = ()
    offsets: tuple[Tensor, Tensor, int, int] | None = None
    counts_sinks: bool = False


def kept_for(
    plan: Plan,
    tensors: tuple[Tensor, ...],
    call: Call,
    auxiliary: tuple[Any, ...] = (),
    offsets: tuple[Tensor, Tensor, int, int] | None = None,
) -> Kept | None:
    """Return how to run further calls like one that `plan` has just run, of which every row sees a key.

    Args:
        plan: what ran it.
        tensors: what its kernel was given.
        call: its other arguments, with both offsets of a packed call.
        auxiliary, offsets: see `Kept`.

    Returns:
        None for what the cache key or a launcher's arguments leave out: a bias, dropout, pages,
        lengths in use, slopes, a softcap, a gradient of the LSE; and for a first call, whose results were
        only just checked.
    """
    others = (
        call.attn_bias, call.seqused_k, call.block_table, call.alibi_slopes, call.num_splits, call.grad_lse
    )  # fmt: skip
    if load() is None or not plan.is_checked or call.dropout > 0.0 or call.softcap > 0.0:
        return None
    if any(one is not None for one in others):
        return None
    launcher = None if plan.specialize is None else _specialized(plan, tensors, call)
    is_final = launcher is not None or plan.specialize is None
    if launcher is None:
        launcher = _unspecialized(plan.kernel, call)
    return Kept(launcher, plan, is_final, auxiliary, offsets, call.sinks is not None)


def _specialized(plan: Plan, tensors: tuple[Tensor, ...], call: Call) -> Launcher | None:
    # A function of its own, as `benchmarks/ablation.py` switches it off.
    try:
        return plan.specialize(tensors, call)  # type: ignore[misc]
    except Exception as error:  # noqa: BLE001 - the call itself has run, and must not fail for this
        log.info("%s offers no launcher: %s: %s", plan.backend, type(error).__name__, error)
        return None


def _unspecialized(kernel: Callable[..., Any], call: Call) -> Launcher:
    """Return a backend's function as a launcher."""
    if call.cu_seqlens_q is None:
        return lambda *tensors: kernel(*tensors, call)

    rest = call._replace(cu_seqlens_q=None, cu_seqlens_k=None, sinks=None)  # those would be kept alive

    # Whatever shares the memory of offsets on a CPU may have written to them without a trace.
    def run_packed(*given: Tensor) -> Any:
        *tensors, cu_seqlens_q, cu_seqlens_k = given
        call = rest._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        if len(tensors) == FORWARD_TENSORS and tensors[0].is_cpu:
            check_values(tensors[0], tensors[1], call)
        return kernel(*tensors, call)

    def run_with_sinks(*given: Tensor) -> Any:
        *tensors, sinks, cu_seqlens_q, cu_seqlens_k = given
        call = rest._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sinks=sinks)
        query, key = tensors[:2] if len(tensors) == FORWARD_TENSORS else tensors[1:3]
        if query.is_cpu and not every_row_sees_a_key(query, key, call):
            return None
        return kernel(*tensors, call)

    return run_packed if call.sinks is None else run_with_sinks


def load() -> Any:
    """Return the module, loaded once for as long as the settings are these; None where there is none."""
    global _module, active, is_loaded
    if is_loaded:  # each plan asks
        return active
    with _registry.lock:
        if not is_loaded:
            if _module is None and _wanted() != "python":
                _module = _load()
            is_loaded = True
            active = None if _pauses or _wanted() == "python" else _module
        return active


def forget() -> None:
    """Look for the module anew when it is next needed: the settings may have changed."""
    global active, is_loaded
    with _registry.lock:
        active, is_loaded = None, False


def set_plans(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    with_sinks: Callable[..., Any],
    grad_of_sinks: Callable[..., Any],
) -> None:
    """Say which functions of Python run the calls of `varlen_attn` that aren't kept, and count sinks."""
    global _plans
    _plans = forward, backward, with_sinks, grad_of_sinks
    if _module is not None:
        _module.set_plans(*_plans)


def described(kept: Kept | bool | None) -> Any:
    """Return what is to be kept as plain tuples, as the module reads it."""
    if not isinstance(kept, Kept):
        return kept
    launcher: Any = kept.launcher
    if isinstance(launcher, (OpLauncher, AddressLauncher)):
        kind = "op" if isinstance(launcher, OpLauncher) else "addresses"
        launcher = kind, launcher, *launcher.described()
    plan = kept.plan
    decline_reason = plan.sinks_decline_reason if kept.counts_sinks else plan.decline_reason
    return launcher, plan.counters, decline_reason, *kept[2:]


def module_for_routers() -> Any:
    """Return the module to register routers with, also while it is paused; None where there is none."""
    load()
    return None if _wanted() == "python" else _module


def routers_added() -> None:
    """Have it known that the routers over torch's ops are the module's."""
    global _has_routers
    with _registry.lock:
        _has_routers = True
        captured.call_cache_in_use = not _pauses


def remove_routers() -> None:
    """Remove the module's routers from torch's dispatcher; no change if there are none."""
    global _has_routers
    _has_routers = False
    if _module is not None:
        _module.remove_routers()


@contextmanager
def paused() -> Iterator[None]:
    """Have every call go to Python for a while, in every thread."""
    _pause(1)
    try:
        yield
    finally:
        _pause(-1)


def _pause(more: int) -> None:
    global _pauses, active
    with _registry.lock:
        _pauses += more
        if _module is not None:
            _module.enable(not _pauses)
            active = None if _pauses or not is_loaded or _wanted() == "python" else _module
            if _has_routers:
                captured.call_cache_in_use = not _pauses
        _registry.changed()


def _load() -> Any:
    try:
        module = building.loaded()
    except BuildError as error:
        # `ensure_built` logs what isn't built or used. Where the variable asks for it this is an error of the
        # settings as well.
        level = logging.WARNING if building.may_be_loaded(building.CALL_CACHE) else logging.DEBUG
        log.log(level, "without the compiled call cache every call goes through Python: %s", error)
        return None
    _registry.on_change(module.drop)
    scope.on_enter(module.forget_choices)
    counters.count_also(module.drain)
    scope.on_first_choice(module.watch)
    if _plans is not None:
        module.set_plans(*_plans)
    module.trust_offsets(offsets.TRUSTED)
    offsets.on_changed.append(module.drop)
    module.enable(not _pauses)
    # Torch's dispatcher outlives Python: routers that call Python have to be gone before.
    atexit.register(remove_routers)
    return module


def _wanted() -> str:
    try:
        return environment.read().routers
    except AttnregError:
        return ""  # the calls that the settings apply to raise the error

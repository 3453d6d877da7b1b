"""The compiled call cache (`csrc/`): the fast path of both fronts, where it was built.

Its routers lie over torch's ops in the place of those in Python, and its `varlen` in front of `varlen_attn`.
Each describes a call by its kind and the class of its lengths, and runs the launcher that is kept for both. A
call that isn't kept goes to Python, which looks up its plan, runs it, and returns the results together with
what is to be kept (`Kept`), or with nothing. A change of the registry or the settings drops everything.
"""

from __future__ import annotations

import atexit
import functools
import logging
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core import registry
from attnreg.core.contract.backend import Call
from attnreg.core.contract.capabilities import one_line
from attnreg.core.contract.lengths import LENGTHS, OF_ALL, Cut
from attnreg.core.contract.options import options_on
from attnreg.core.dispatch import counters, scope, stats_file
from attnreg.core.dispatch.state import Detail, FurtherSteps, Plan
from attnreg.core.launching import offsets, rows
from attnreg.core.launching.launchers import Launcher, places_of, takes_options
from attnreg.core.launching.memory import inputs_of
from attnreg.core.launching.offsets import every_row_sees_a_key
from attnreg.core.launching.validation import check_values
from attnreg.core.settings import environment
from attnreg.core.torchlib import building, captured, device_code
from attnreg.core.torchlib.frames import FRAMES, leave_module_uncompiled, leave_uncompiled
from attnreg.core.torchlib.readback import pinned
from attnreg.errors import AttnregError, BuildError

log = logging.getLogger("attnreg")

ANSWERS = 256  # `kMostAnswers` of csrc/offsets.h

# The module, while it looks calls up; None while it is paused or isn't there. `load` sets it.
active: Any = None
is_loaded = False  # whether `load` has looked for it

_module: Any = None  # what was loaded stays loaded: torch may have its code in use
_plans: tuple[Callable[..., Any], ...] | None = None
_pauses = 0
_with_device_code: set[torch.device] = set()  # the GPUs of which it has the kernels for packed calls
_has_routers = False  # whether the routers over torch's ops are the module's


class Kept(NamedTuple):
    """How the call cache is to run further calls like one that Python has run. C++ reads it by names.

    Attributes:
        launcher: runs them; None for torch's own kernel of the op, on the op's arguments as they are.
        plan: the plan that ran the call. It has the counters, and says whether an error declines a call.
        is_final: whether Python need not be asked for a better launcher from time to time.
        auxiliary: what an aten op returns behind the kernel's results: None, numbers, or models of tensors.
            `MAX_Q` and `MAX_K` are lengths. Models are on the device "meta": their values are never read.
        counts_sinks: whether the launcher counts an option (`Option.rescales`), whose tensor it is given
            before the offsets. Of other options (`Option.cached`) it is always given the tensor.
        cuts: the lengths at which the front treats its arguments differently. The cuts of the plan's kind
            count, too.
    """

    launcher: Launcher | None
    plan: Plan
    is_final: bool = True
    auxiliary: tuple[Any, ...] = ()
    counts_sinks: bool = False
    cuts: tuple[Cut, ...] = ()

    @property
    def counters(self) -> tuple[counters.Counter, ...]:
        """What each call adds to."""
        return self.plan.counters

    @property
    def decline_reason(self) -> Callable[[BaseException], str | None]:
        """The function that returns why the backend declines a call, of an error; None if it doesn't."""
        return self.plan.decline_reason_of_counting if self.counts_sinks else self.plan.decline_reason

    @property
    def length_places(self) -> tuple[tuple[int, int], ...]:
        """Where lengths are among the auxiliary outputs, as `launchers.places_of` returns it."""
        return places_of(self.auxiliary)

    @property
    def cuts_as_numbers(self) -> tuple[tuple[object, ...], ...]:
        """All cuts of the kind of calls, as `_cuts_as_numbers` returns them."""
        kind = self.plan.kind
        return _cuts_as_numbers((*(OF_ALL if kind is None else kind.cuts), *self.cuts))

    @property
    def detail(self) -> int:
        """The number of the `Detail` of the call's class of lengths; C++ needs no reason for `SHAPES`."""
        detail = Detail.CLASS if self.plan.kind is None else self.plan.kind.detail_of(self.plan.key)
        return int(min(detail, Detail.EXACT))

    @property
    def steps(self) -> FurtherSteps | None:
        """What decides about further steps of the call's class, where steps count."""
        return None if self.plan.kind is None else self.plan.kind.steps_of(self.plan.key)


def kept_for(
    plan: Plan,
    tensors: tuple[Tensor, ...],
    call: Call,
    auxiliary: tuple[Any, ...] = (),
    cuts: tuple[Cut, ...] = (),
) -> Kept | None:
    """Return how to run further calls of the kind and class of one that `plan` has just run.

    Args:
        plan: what ran it.
        tensors: the arguments of its kernel, in the contract's shapes and dtypes: query, key and value, (B,
            S, H, D) or packed (T, H, D). A backward has grad_out before them, output and LSE after them.
        call: its other arguments, with both offsets of a packed call.
        auxiliary, cuts: see `Kept`.

    Returns:
        None for options that the call cache leaves out (`Option.cached`), for calls that are timed, and for a
        first call, whose results were only just checked.
    """
    if load() is None or not plan.is_checked or plan.turn is not None:
        return None
    if not all(row.cached for row in options_on(call)):
        return None
    launcher = None if plan.specialize is None else _specialized(plan, tensors, call)
    is_final = launcher is not None or plan.specialize is None
    if launcher is None:
        launcher = _unspecialized(plan.kernel, call)
    for function in (launcher, *(getattr(launcher, name, None) for name in ("run", "prepare", "programs"))):
        leave_uncompiled(function)  # C++ calls it, so no function of attnreg's is around it
    if call.varlen:
        provide_device_code(tensors[0].device)
    return Kept(launcher, plan, is_final, auxiliary, bool(_counted(call)), cuts)


def kept_dense(
    plan: Plan,
    tensors: tuple[Tensor, ...],
    call: Call,
    auxiliary: tuple[Any, ...] = (),
    cuts: tuple[Cut, ...] = (),
) -> Kept | None:
    """Return `kept_for` of a dense call, whose tensors are (B, S, H, D), with the LSE (B, H, S).

    None where a call needs more than the kernel: a row that sees no key, or the conversion of a float64 LSE.
    """
    query, key, _ = inputs_of(tensors)
    if query.dtype == torch.float64 or not every_row_sees_a_key(query, key, call):
        return None
    return kept_for(plan, tensors, call, auxiliary, cuts)


def _counted(call: Call) -> tuple[str, ...]:
    """Return the options that results would be rescaled for, if the kernel didn't count them."""
    return tuple(row.name for row in options_on(call) if row.rescales)


def _given(call: Call) -> tuple[str, ...]:
    """Return the options whose tensors a launcher is given before the offsets."""
    return tuple(row.name for row in options_on(call) if row.cached)


def _specialized(plan: Plan, tensors: tuple[Tensor, ...], call: Call) -> Launcher | None:
    # A function of its own, as `benchmarks/ablation.py` switches it off.
    try:
        launcher = plan.specialize(tensors, call)  # type: ignore[misc]
        if launcher is not None and not callable(launcher):
            raise TypeError(f"returned {one_line([reprlib.repr(launcher)])}, expected a launcher or None")
    except BaseException as error:  # noqa: BLE001 - the call itself has run, and must not fail for this
        plan.count_bad_launcher(error)
        return None
    return launcher if takes_options(launcher, call) else None


def _unspecialized(kernel: Callable[..., Any], call: Call) -> Launcher:
    """Return a backend's function as a launcher."""
    if call.cu_seqlens_q is None:

        def run_dense(*tensors: Tensor) -> Any:
            query, key, _ = inputs_of(tensors)
            return kernel(*tensors, call._replace(max_q=query.shape[1], max_k=key.shape[1]))

        return run_dense

    counted, names = _counted(call), _given(call)
    tensors: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", *names))
    rest = call._replace(**tensors)  # those would be kept alive

    def run_packed(*arguments: Any) -> Any:
        *tensors, cu_seqlens_q, cu_seqlens_k, max_q, max_k, _ = arguments
        options: dict[str, Any] = {name: tensors.pop() for name in reversed(names)}
        call = rest._replace(
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_q=max_q, max_k=max_k, **options
        )
        query, key, _ = inputs_of(tuple(tensors))
        if query.is_cpu:
            # Whatever shares the memory of offsets on a CPU may have written to them without a trace.
            if query is tensors[0]:  # a forward's
                check_values(query, key, call)
            if counted and not every_row_sees_a_key(query, key, call):
                return None
        return kernel(*tensors, call)

    return run_packed


def provide_device_code(device: torch.device) -> None:
    """Give the module the kernels for packed calls on a GPU, once."""
    if device.type != "cuda" or device in _with_device_code or active is None:
        return
    kernels = rows.CLEAR_FORWARD, rows.CLEAR_BACKWARD, rows.FACTS, rows.BLANK, rows.APPEND
    addresses = [kernel.address(device) for kernel in kernels]
    if None in addresses:
        return  # Python runs packed calls with rows of which nothing is known
    _with_device_code.add(device)
    active.set_device_code(device.index, device_code.launch_function(), *addresses, _answers().data_ptr())


@functools.cache
def _answers() -> Tensor:
    """Return pinned memory for what the module asks devices, for as long as the process lives."""
    return pinned(ANSWERS)


@atexit.register
def _say_at_exit() -> None:
    """Say at the end of the process what no call came to say any more; waits for nothing."""
    if _module is not None and _module.offsets_changed():
        log.error(offsets.CHANGED)


def load() -> Any:
    """Return the module, loaded once for as long as the settings are these; None where there is none."""
    global _module, active, is_loaded
    if is_loaded:  # each plan asks
        return active
    with registry.lock:
        if not is_loaded:
            if _module is None and _wanted() != "python":
                _module = _load()
            is_loaded = True
            active = None if _pauses or _wanted() == "python" else _module
        return active


def forget() -> None:
    """Look for the module anew when it is next needed: the settings may have changed."""
    global active, is_loaded
    with registry.lock:
        active, is_loaded = None, False


def set_plans(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    with_sinks: Callable[..., Any],
    grad_of_sinks: Callable[..., Any],
) -> None:
    """Say which functions of Python run the calls of `varlen_attn` that aren't kept, and rescale results."""
    global _plans
    _plans = forward, backward, with_sinks, grad_of_sinks
    if _module is not None:
        _module.set_plans(*_plans)


@functools.lru_cache(maxsize=256)
def _cuts_as_numbers(cuts: tuple[Cut, ...]) -> tuple[tuple[object, ...], ...]:
    """Return cuts as plain tuples: the lengths of a product as bits, numbers as the module computes them.

    The module runs no call with `key_ranges`, so that a product with their number is 0.
    """
    return tuple(
        (
            tuple(
                (float(coefficient), sum(1 << LENGTHS.index(name) for name in product))
                for coefficient, product in cut.terms
                if "ranges" not in product
            ),
            float(cut.at),
        )
        for cut in dict.fromkeys(cuts)
    )


def module_for_routers() -> Any:
    """Return the module to register routers with, also while it is paused; None where there is none."""
    load()
    return None if _wanted() == "python" else _module


def routers_added() -> None:
    """Have it known that the routers over torch's ops are the module's."""
    global _has_routers
    with registry.lock:
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
    with registry.lock:
        _pauses += more
        if _module is not None:
            _module.enable(not _pauses)
            active = None if _pauses or not is_loaded or _wanted() == "python" else _module
            if _has_routers:
                captured.call_cache_in_use = not _pauses
        registry.changed()


def _load() -> Any:
    try:
        module = building.loaded()
    except BuildError as error:
        # `ensure_built` logs what isn't built or used. Where the variable asks for it this is an error of the
        # settings as well.
        level = logging.WARNING if building.may_be_loaded(building.CALL_CACHE) else logging.DEBUG
        log.log(level, "without the compiled call cache every call goes through Python: %s", error)
        return None
    registry.on_change(module.drop)
    scope.on_enter(module.forget_choices)
    counters.count_also(module.drain)
    tracing = vars(torch.compiler), getattr(FRAMES, "get_eval_frame_callback", None)
    scope.on_first_choice(lambda variable: module.watch(variable, scope.is_inherited, *tracing))
    if _plans is not None:
        module.set_plans(*_plans)
    module.trust_offsets(offsets.TRUSTED)
    offsets.on_changed.append(module.drop)
    module.enable(not _pauses)
    atexit.register(_end)
    return module


def _end() -> None:
    """Remove the routers at the end: torch's dispatcher outlives Python, which routers call.

    What lies above them can't be told afterwards, so that the stats are written before.
    """
    stats_file.write()
    captured.watch(())  # first: else torch's kernels beneath the routers would be taken for overrides
    remove_routers()


def _wanted() -> str:
    try:
        return environment.read().routers
    except AttnregError:
        return ""  # the calls that the settings apply to raise the error


leave_module_uncompiled(__name__)

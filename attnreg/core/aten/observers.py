"""Ops and higher-order ops that run attention without a router: their calls are counted where they end.

A call that a backend runs never comes to these ops, so that observing them costs it nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.aten import bypassed
from attnreg.core.dispatch import trace
from attnreg.core.dispatch.counters import Counter
from attnreg.core.dispatch.state import state
from attnreg.core.torchlib import captured
from attnreg.core.torchlib.call_sites import traced_call_site
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.errors import RegistrationError

log = logging.getLogger("attnreg")

FLEX = "flex_attention"
_FLEX_MODULE = "torch._higher_order_ops.flex_attention"
TRACED = "in a graph of torch.compile: counted when it was traced, not when it runs"


class ObservedOp(NamedTuple):
    """An aten op whose calls are counted after torch's own kernel has run them.

    Attributes:
        op: the op's name, without "aten::".
        keys: the dispatch keys of its observers.
        places: the arguments that `count_call` is called with.
        count_call: counts a call. Returns the counter of all calls like it, unless each has to be looked at.
    """

    op: str
    keys: tuple[str, ...]
    places: tuple[int, ...]
    count_call: Callable[..., Counter | None]


def count_math(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, enable_gqa: bool
) -> Counter | None:
    """Count a call of torch's math kernel, and return the counter of all calls like it.

    `query` is (B, H_q, S_q, D), `key` (B, H_k, S_k, D) and `value` (B, H_k, S_k, D_v). `attn_mask` broadcasts
    to (B, H_q, S_q, S_k).
    """
    if not bypassed.counts():
        return None
    try:
        tensors = query, key, value
        # While a graph is traced, a symbolic size that is compared becomes a guard of the graph.
        if not all(type(n) is int for x in tensors for n in (*x.shape, *x.stride())):
            why = "; ".join(bypassed.reasons_of_sizes(dropout_p, 0, 0)) or bypassed.SELECTED
        elif 0 in (query.shape[-2], key.shape[-2]):
            return None  # counted above the op, if at all: from torch 2.12 on SDPA doesn't call it
        else:
            call = bypassed.SdpaCall(*tensors, attn_mask, dropout_p, enable_gqa=enable_gqa)
            why = bypassed.why_unrouted(call)
        return _count(f"aten::{_MATH.op}", bypassed.MATH, why, tensors)
    except Exception as error:  # noqa: BLE001 - the call itself has run, and must not fail for this
        log.debug("a call of torch's math kernel isn't counted: %s", error)
        return None


def count_fast_path(query: Tensor, key: Tensor, value: Tensor) -> Counter | None:
    """Count a call of the fast path of encoder layers, and return the counter of all calls like it.

    Query, key and value are (B, S, E).
    """
    if not bypassed.counts():
        return None
    op, why = f"aten::{_FAST_PATH.op}", bypassed.OF_FAST_PATH
    return _count(op, bypassed.FAST_PATH, why, (query, key, value))


def count_flex(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Count a call of `flex_attention`; its tensors have the shapes of `count_math`."""
    if bypassed.counts():
        kernel, why = "torch's flex_attention", "it has kernels of its own"
        _count(FLEX, kernel, why, (query, key, value), kept_by=("eager", "aot_eager"))


def _count(
    op: str, kernel: str, reason: str, tensors: tuple[Tensor, ...], kept_by: tuple[str, ...] = ("eager",)
) -> Counter | None:
    """Count a call that computes something, or that Dynamo traces into a graph.

    Most compiled graphs don't contain the op any more, so that its runs can't be counted. Dynamo's trace is
    counted, not AOTAutograd's: Dynamo traces also where the compiled graph comes from a cache.

    `tensors` are query, key and value, of any shapes. `kept_by` are backends of Dynamo whose graphs run the
    op itself. Returns the counter if all calls like this one count there, until settings change.
    """
    modes = torch._C._TorchDispatchModeKey
    if any(map(torch._C._get_dispatch_mode, (modes.PROXY, modes.FUNCTIONAL))):
        return None
    is_plain = type(tensors[0]) in (Tensor, torch.nn.Parameter)
    has_values = is_plain or not torch._subclasses.fake_tensor.is_fake(tensors[0])
    if torch._C._get_dispatch_mode(modes.FAKE) is None and has_values:
        counter = trace.count_bypassed(op, kernel, reason, tensors)
        return counter if state().active and not trace.is_recording() else None
    if _is_traced_by_dynamo(kept_by):
        trace.count_bypassed(op, kernel, f"{reason} ({TRACED})", tensors, traced_call_site)
    return None


def _is_traced_by_dynamo(kept_by: tuple[str, ...]) -> bool:
    """Whether Dynamo traces the call for another backend than these."""
    tracing: Any = sys.modules.get("torch._dynamo.symbolic_convert")
    if tracing is None or torch.compiler.is_exporting():
        return False
    if torch.fx.traceback.get_current_meta().get("stack_trace"):  # AOTAutograd runs a node of Dynamo's graph
        return False
    try:
        backend = tracing.InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:  # nothing is traced on this thread
        return False
    return not str(getattr(backend, "__name__", "")).startswith(kept_by)


# Above autograd alone: with a kernel for the device itself `run_decompositions` would keep the op whole.
_MATH = ObservedOp(
    "_scaled_dot_product_attention_math", ("AutogradCPU", "AutogradCUDA"), (0, 1, 2, 3, 4, 8), count_math
)
_FAST_PATH = ObservedOp(
    "_native_multi_head_attention", ("CPU", "NestedTensorCPU"), (0, 1, 2), count_fast_path
)
OBSERVED = _MATH, _FAST_PATH


def install(library: Any) -> Callable[[], None]:
    """Register the observers with the compiled call cache.

    An op that this torch lacks, or that other code overrides, isn't observed. Nor is any without the compiled
    part, where `library` is a `torch.library.Library`: an observer in Python takes longer than a small call.

    Returns:
        The function that ends the observation of what isn't an op of aten.
    """
    bypassed.ops_are_observed = not isinstance(library, torch.library.Library)
    for op, keys, places, count_call in OBSERVED if bypassed.ops_are_observed else ():
        with contextlib.suppress(RegistrationError, AttributeError, RuntimeError):
            for key in keys:
                captured.check_not_overridden(op, key)
            for key in keys:
                library.add_observer(op, key, places, count_call)
    restore_flex = _observe_flex()

    def remove() -> None:
        restore_flex()
        bypassed.ops_are_observed = False

    return remove


def _observe_flex() -> Callable[[], None]:
    """Observe `flex_attention`, where it runs and where Dynamo traces it; returns what ends that."""
    op: Any = getattr(sys.modules.get(_FLEX_MODULE), FLEX, None)
    replaced = []
    for table, name, skipped in (("py_kernels", "CompositeExplicitAutograd", 0), *_OF_TRACING):
        kernels = getattr(op, table, {})  # private: of another torch the calls aren't counted
        for key in [key for key in kernels if getattr(key, "name", getattr(key, "__name__", "")) == name]:
            replaced.append((kernels, key, kernels[key]))
            kernels[key] = _observing_flex(kernels[key], skipped)
    if replaced:
        op._dispatch_cache.clear()

    def restore() -> None:
        for kernels, key, torchs in replaced:
            kernels[key] = torchs
        if replaced:
            op._dispatch_cache.clear()

    return restore


# With the place of the query: in front of it is the mode.
_OF_TRACING = (("python_key_table", "FakeTensorMode", 1),)


def _observing_flex(torchs: Callable[..., Any], skipped: int) -> Callable[..., Any]:
    @functools.wraps(torchs)
    def observe(*args: Any, **kwargs: Any) -> Any:
        results = torchs(*args, **kwargs)
        count_flex(*args[skipped : skipped + 3])
        return results

    return observe


leave_module_uncompiled(__name__)

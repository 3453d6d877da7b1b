"""What the arguments of `varlen_attn` mean, and the look-up of its plans; used by all ways to call it."""

from __future__ import annotations

import operator
import reprlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.adaptation.sinks import grad_of_sinks
from attnreg.core.contract.backend import Call
from attnreg.core.contract.lengths import Cut, cuts_of_window
from attnreg.core.contract.options import OPTIONS
from attnreg.core.contract.spec import UNBOUNDED, Direction
from attnreg.core.dispatch import call_cache, scope
from attnreg.core.dispatch.call_cache import Kept, kept_for
from attnreg.core.dispatch.calls import (
    keys_used,
    packed_bounds,
    plan_for,
    scale_of,
    wants_batch_invariant,
    wants_deterministic,
)
from attnreg.core.dispatch.declined import Declined, retry_on_decline
from attnreg.core.dispatch.dropout import forward_choice, run_forward_kernel
from attnreg.core.dispatch.scope import ScopedChoice
from attnreg.core.dispatch.state import Plan
from attnreg.core.launching.memory import check_all_in_memory, check_in_memory, inputs_of
from attnreg.core.launching.validation import check, check_layouts, check_scale
from attnreg.core.torchlib.batches import each_of_batch, is_batch
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.layout import needs_graph_memory
from attnreg.core.torchlib.locks import open_after_fork
from attnreg.core.varlen.sinks import counted, may_be_counted, rescaled_for, with_sinks
from attnreg.core.varlen.spread import check_is_whole
from attnreg.errors import InvalidInputError, UnsupportedInputError

# `cu_seq_q`, `cu_seq_k`, `max_q` and `max_k`; a dense call has no offsets.
Lengths = tuple[Tensor, Tensor | None, int, int]


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 1  # numbers of lists in lists fill lines


_MAY_BE_NONE = {"cu_seq_k", *(row.argument for row in OPTIONS)}
_WITHOUT_GRADIENT = {row.argument for row in OPTIONS if not row.gradient}


def check_tensors(**tensors: object) -> None:
    """Check that arguments are tensors, or None where they may be; others fail inside torch."""
    for name, tensor in tensors.items():
        is_left_out = tensor is None and name in _MAY_BE_NONE
        if not (isinstance(tensor, Tensor) or is_left_out):
            raise InvalidInputError(f"{name}: got {_SHORT.repr(tensor)}, expected a tensor")
        wants_gradient = isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled()
        if name in _WITHOUT_GRADIENT and wants_gradient:
            raise InvalidInputError(f"{name}: got a tensor that needs a gradient, expected none: it has none")
    if "cu_seq_q" in tensors:  # nested tensors of dense calls are explained, too
        check_layouts(**tensors)
    check_in_memory(**tensors)


def check_heads(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths) -> None:
    """Check a call without `enable_gqa`: it has to have as many key as query heads.

    Query, key and value are (T, H, D), floating point; key and value may be pages, (pages, page size, H, D).

    Raises:
        InvalidInputError: the numbers of heads differ, or another argument doesn't fit.
    """
    if query.shape[1:2] != key.shape[-2:-1]:
        # What is wrong otherwise is the better message: a key of other dimensions has no heads to compare.
        cu_seq_q, cu_seq_k, max_q, max_k = lengths
        check(query, key, value, Call(1.0, max_q, max_k, UNBOUNDED, cu_seq_q, cu_seq_k))
        raise InvalidInputError(
            f"heads: got {query.shape[1]} for query and {key.shape[-2]} for key, "
            "expected equal numbers (or enable_gqa=True)"
        )


def check_sinks(query: Tensor, sinks: Tensor) -> None:
    """Check sinks, (H,), floating point: one for each head of the query, (T_q, H, D), on its device.

    Raises:
        InvalidInputError: shape, dtype, layout or device is another.
    """
    check_tensors(query=query, sinks=sinks)
    got = f"shape {tuple(sinks.shape)}, {sinks.dtype} on {sinks.device}"
    fits = sinks.shape == query.shape[1:2] and sinks.device == query.device
    if not (fits and sinks.is_floating_point() and not sinks.is_sparse):
        expected = f"({', '.join(map(str, query.shape[1:2]))},), floating-point, on {query.device}"
        raise InvalidInputError(f"sinks: got {got}, expected {expected}: one for each head of the query")


def check_untraced(instead: str) -> None:
    """Raise if torch.jit.trace records a call whose lengths would be constants of the trace."""
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        raise UnsupportedInputError(
            "torch.jit.trace: got a call whose lengths would stay those of the example, expected "
            f"{instead}, or torch.export"
        )


def _whole(number: Any) -> Any:
    """Return a whole number; a symbol stays one, so that a compiled program serves other numbers."""
    return number if isinstance(number, int | torch.SymInt) else operator.index(number)


def window(window_size: Sequence[int] | None, is_causal: bool) -> tuple[int, int]:
    """Return (left, right), two numbers from -1 on, from the two arguments that say it."""
    try:
        left, right = map(_whole, UNBOUNDED if window_size is None else window_size)
    except (TypeError, ValueError):
        left = right = -2
    if min(left, right) < -1:
        got = reprlib.repr(window_size)
        raise InvalidInputError(f"window_size: got {got}, expected (left, right), integers of -1 or more")
    if is_causal not in (True, False):
        raise InvalidInputError(f"is_causal: got {is_causal!r}, expected True or False")
    return left, 0 if is_causal else right


def call_of(
    query: Tensor, lengths: Lengths, scale: float | None, bound: tuple[int, int], **options: Any
) -> Call:
    """Return the contract's `Call` of these arguments.

    Args:
        query: (T_q, H, D), or (B, S_q, H, D) of a dense call.
        lengths: both offsets, None of a dense call, and the longest lengths.
        scale: the factor on the scores, one over the root of D for None.
        bound: what `window` returned.
        options: by their names in `contract.options`.

    Raises:
        InvalidInputError: a length is no integer, or the scale or an option no number.
    """
    cu_seq_q, cu_seq_k, max_q, max_k = lengths
    if not type(max_q) is type(max_k) is int:
        # Those of NumPy are taken as well, as torch's own ops do; specs and kernels get Python's.
        max_q, max_k = _integer("max_q", max_q), _integer("max_k", max_k)
    if scale is not None and type(scale) is not float:
        check_scale(scale)  # the call's key compares it
    call = Call(
        scale_of(query, scale), max_q, max_k, packed_bounds(bound, False, max_q, max_k), cu_seq_q, cu_seq_k,
        deterministic=wants_deterministic(), batch_invariant=wants_batch_invariant(),
    )  # fmt: skip
    if not options:
        return call
    rows = (row for row in OPTIONS if row.is_on(options.get(row.name)))
    call = call.with_options({row.name: row.checked(options[row.name]) for row in rows})
    return call._replace(seqused_k=keys_used(call.seqused_k, cu_seq_k, call.block_table))


def _integer(name: str, number: int) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise InvalidInputError(f"{name}: got {number!r}, expected an integer") from None


class Ran(NamedTuple):
    """A call that has run.

    Attributes:
        results: what it returns, in the contract's shapes and dtypes.
        plan: the plan that ran it.
        call: the call as the kernel got it: without options that the results were rescaled for, and with the
            random state that a forward with dropout drew.
        choice: what its backward runs by: dropout ties it to the backend.
    """

    results: tuple[Tensor, ...]
    plan: Plan
    call: Call
    choice: ScopedChoice | None


def run(
    direction: Direction,
    tensors: tuple[Tensor, ...],
    call: Call,
    choice: ScopedChoice | None,
    needs_backward: bool = True,
    returns_lse: bool = False,
    first: Plan | None = None,
) -> Ran:
    """Look up the plan of a call and run it: with its options, after a decline on the next backend.

    Args:
        direction: the direction of the kernel.
        tensors: what kernels of that direction take: query, key and value, (T, H, D) or dense (B, S, H, D);
            for a backward (grad_out, query, key, value, output, LSE). Shapes and dtypes are the contract's.
        call: the other arguments.
        choice: what overrides all other choices for this call.
        needs_backward: whether a forward's gradient will be wanted.
        returns_lse: whether the program gets a forward's LSE. Kernels that count sinks aren't given any then:
            a kernel's LSE may be infinite where a sink is far above the scores.
        first: a plan that was made for the call.

    Raises:
        UnsupportedInputError: no backend can run the call, or a tensor isn't in memory.
    """
    inputs = inputs_of(tensors)
    if direction == "backward":  # the fronts check a forward's
        check_all_in_memory(tensors, call)
    is_rescaled = call.sinks is not None and (returns_lse or call.grad_lse is not None)
    rescaled = call if call.sinks is None else call._replace(sinks=None)
    looked_up = rescaled if is_rescaled else call

    def plan_and_run(declined: Declined) -> Ran:
        plan = first
        if plan is None or declined:
            plan = plan_for(
                direction, *inputs, looked_up, choice, needs_backward=needs_backward, declined=declined
            )
        if results := counted(plan, tensors, looked_up, direction):
            return Ran(results, plan, call, choice)
        if direction == "backward":
            results = plan.run(*tensors, rescaled)
            return Ran(rescaled_for(call, direction, tensors, results), plan, rescaled, choice)
        out, lse, seed = run_forward_kernel(plan, *inputs, rescaled)
        call_of_kernel = rescaled if seed is None else rescaled._replace(rng_state=seed)
        results = rescaled_for(call, direction, tensors, (out, lse))
        return Ran(results, plan, call_of_kernel, forward_choice(choice, plan, call.dropout))

    is_on = not call.deterministic or (wants_deterministic() and not _deterministic_calls)
    with nullcontext() if is_on else _in_deterministic_mode():
        ran = retry_on_decline(plan_and_run)
    # Kernels may lay out results as views. Autograd refuses some writes to views: if one function returns
    # several of them, and if they were made while gradients were off. `detach` returns no view.
    return ran._replace(results=tuple(x.detach() for x in ran.results))


_lock = open_after_fork(threading.RLock())
_deterministic_calls = 0
_mode_before = 0


@contextmanager
def _in_deterministic_mode() -> Iterator[None]:
    """Have torch's deterministic mode on, as some kernels obey nothing else.

    The mode is one for all threads: it stays on until the last of these calls was launched. No lock is held
    meanwhile, as a call may wait for another thread that loads a backend.
    """
    global _deterministic_calls, _mode_before
    with _lock:
        if not _deterministic_calls:
            _mode_before = torch.get_deterministic_debug_mode()
            torch.use_deterministic_algorithms(True)
        _deterministic_calls += 1
    try:
        yield
    finally:
        with _lock:
            _deterministic_calls -= 1
            if not _deterministic_calls:
                torch.set_deterministic_debug_mode(_mode_before)


def _kept(ran: Ran, tensors: tuple[Tensor, ...], call: Call, cuts: tuple[Cut, ...]) -> Kept | None:
    """Return how the call cache repeats a call; `cuts` are as in `Kept`."""
    cu_seqlens_q, cu_seqlens_k = call.cu_seqlens_q, call.cu_seqlens_k
    if cu_seqlens_q is None:
        return call_cache.kept_dense(ran.plan, tensors, ran.call, cuts=cuts)
    has_keys = cu_seqlens_k is not None or call.block_table is not None
    if call_cache.load() is None or not has_keys:
        return None
    if needs_graph_memory(cu_seqlens_q):
        return None  # what is kept would lie in the graph's memory
    sinks = call.sinks if ran.call.sinks is None else None
    if sinks is not None and cu_seqlens_q.is_cuda and may_be_counted(ran.plan, sinks):
        return None  # rescaled only because the offsets weren't known yet: later calls are counted
    return kept_for(ran.plan, tensors, ran.call, cuts=cuts)


# The call cache calls these two for what it doesn't keep, below its autograd node. Sinks are None where the
# cache itself counts them afterwards.
def _plan(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Any, ...]:
    lengths, (is_causal, window_size, scale, enable_gqa, choice) = rest[:4], rest[4:9]
    needs_backward, sinks, used, table = rest[9:]
    if lengths[0] is None:  # of a dense call the tensors say the lengths
        lengths = None, None, query.shape[1], key.shape[1]
    check_is_whole(lengths[0], query)
    if not enable_gqa:
        check_heads(query, key, value, lengths)
    bound, inputs = window(window_size, is_causal), (query, key, value)
    call = call_of(query, lengths, scale, bound, sinks=sinks, seqused_k=used, block_table=table)
    check_all_in_memory(inputs, call)
    ran = run("forward", inputs, call, scope.by_number(choice), needs_backward)
    return *ran.results, _kept(ran, inputs, call, cuts_of_window(*bound))


def _plan_backward(*arguments: Any) -> tuple[Any, ...]:
    tensors, lengths = arguments[:6], arguments[6:10]
    if is_batch(arguments[0], arguments[14]):

        def of_one(grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Tensor, ...]:
            grads: tuple[Tensor, ...] = _plan_backward(grad_out, *arguments[1:14], grad_lse, arguments[15])[0]
            return grads

        return each_of_batch(of_one, (arguments[0], arguments[14]), (*arguments[1:4], arguments[15])), None
    is_causal, window_size, scale, choice, grad_lse, sinks = arguments[10:]
    bound = window(window_size, is_causal)
    call = call_of(tensors[1], lengths, scale, bound, grad_lse=grad_lse, sinks=sinks)
    ran = run("backward", tensors, call, scope.by_number(choice))
    return ran.results, _kept(ran, tensors, call, cuts_of_window(*bound))


call_cache.set_plans(_plan, _plan_backward, with_sinks, grad_of_sinks)


leave_module_uncompiled(__name__)

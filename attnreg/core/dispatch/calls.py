"""The look-up of a plan, from the arguments of a call to its kernel, for both fronts and both directions.

`plan_for` makes the key of a call's kind and looks up the plan for its class of lengths; only a call without
one is described as a spec and decided about. No host sync, no query of a device, no environment variable, no
log line on that path.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnreg.core.contract.backend import Call
from attnreg.core.contract.lengths import LENGTHS, Lengths, bounds
from attnreg.core.contract.options import OPTIONS
from attnreg.core.contract.spec import AttentionSpec, Direction, directions_of
from attnreg.core.dispatch.declined import NOBODY, Declined
from attnreg.core.dispatch.kinds import kind_of, refined_key
from attnreg.core.dispatch.planning import Native, decide, make_plan, spec_of
from attnreg.core.dispatch.scope import ScopedChoice
from attnreg.core.dispatch.state import Plan, state
from attnreg.core.launching.validation import check, check_scale, check_values
from attnreg.core.selection.decision import Decision
from attnreg.errors import UnsupportedInputError

_SHAPED = [row for row in OPTIONS if row.shapes]

# All lengths are 0 in a spec that is the key of a kind of calls.
NO_LENGTHS = dict.fromkeys(LENGTHS, 0)

LONGEST = 2**62
LONGEST_OF_KERNELS = 2**31  # which count lengths in 32 bits: see `check`


def plan_for(
    direction: Direction,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    choice: ScopedChoice | None,
    native: Native | None = None,
    needs_backward: bool = True,
    bhsd: bool = False,
    declined: Declined = NOBODY,
) -> Plan:
    """Return the plan of a call.

    Args:
        direction: which kernel is wanted.
        query, key, value: as in the contract, or (B, H, S, D) with `bhsd`.
        call: the other arguments, as in the contract. It has options that results are rescaled for
            (`Option.rescales`) only if the kernel may count them.
        choice: what overrides all other choices for this call.
        native: the kernel that torch was about to run.
        needs_backward: whether a forward's gradient will be wanted.
        bhsd: how the tensors lie. Keys beyond `call.max_k` are seen by no query then.
        declined: the backends that have declined the call.

    Raises:
        InvalidInputError: the call contradicts itself.
        UnsupportedInputError: no backend can run it, or none may.
    """
    now = state()
    if direction == "backward" and choice is not None and choice.no_gradient:
        raise UnsupportedInputError(choice.no_gradient)
    key_of_kind = (
        direction, needs_backward, native, choice, bhsd,
        torch.is_deterministic_algorithms_warn_only_enabled(),  # a plan that is made then warns
        query.is_cuda and torch.cuda.is_current_stream_capturing(),
        _heads_of(query, bhsd), _heads_of(key, bhsd), _heads_of(value, bhsd),
        query.dtype, key.dtype, value.dtype, query.device, key.device, value.device,
        None if call.block_table is None else key.shape[1],
        *call.kind(),
    )  # fmt: skip
    kind = now.kinds.get(key_of_kind)
    if kind is None or not lengths_fit(query, key, value, call, bhsd):
        check(*(to_bshd(query, key, value, call) if bhsd else (query, key, value)), call)
    lengths = lengths_of(query, key, call)
    plan_key = () if kind is None else kind.key(lengths)
    plan = None if kind is None else kind.plans.get(plan_key)
    if plan is None and kind is not None and (steps := kind.steps_of(plan_key)) is not None:
        plan = steps.plan_for(lengths)
    if plan is None:
        if bhsd:
            query, key, value = to_bshd(query, key, value, call)
        spec = spec_of(query, key, value, call, needs_backward)
        leading = choice.preference if choice is not None else None
        if kind is None:
            of_kind = kind_of(now, spec, direction, native.name if native is not None else "")
            kind = now.keep_kind(key_of_kind, of_kind)
        plan = make_plan(now, kind, kind.key(lengths), spec, direction, native, leading, declined)
    if direction == "forward":
        check_scale(call.scale)
        if call.cu_seqlens_q is not None and query.is_cpu:
            check_values(query, key, call)
    return plan


def _heads_of(x: Tensor, bhsd: bool) -> tuple[int, ...]:
    """Return the rank of a tensor, its heads and its head dim; all sizes of one without heads."""
    shape = x.shape
    return (len(shape), shape[1 if bhsd else -2], shape[-1]) if len(shape) > 2 else (len(shape), *shape)


def lengths_fit(query: Tensor, key: Tensor, value: Tensor, call: Call, bhsd: bool) -> bool:
    """Whether the lengths of a call's tensors fit each other, as far as `check` looks at lengths.

    A plan is made once for all lengths of a class, so that this is looked at in each call. Tensors are (B, S,
    H, D), (B, H, S, D) with `bhsd`, or packed (T, H, D), in any dtype. With a `block_table` key and value are
    pages, (pages, page size, H, D).
    """
    batch = query.shape[0] if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1
    for row in _SHAPED:
        tensor = getattr(call, row.name)
        if tensor is not None and tensor.shape not in row.shapes_of(batch, query.shape[1 if bhsd else -2]):
            return False
    if call.cu_seqlens_q is None:
        rows = 2 if bhsd else 1
        return query.shape[0] == key.shape[0] == value.shape[0] and key.shape[rows] == value.shape[rows]
    if batch < 0 or not (0 <= call.max_q < LONGEST_OF_KERNELS and 0 <= call.max_k < LONGEST_OF_KERNELS):
        return False
    for tensor, length in (
        (call.cu_seqlens_k, batch + 1), (call.seqused_k, batch), (call.block_table, batch),
    ):  # fmt: skip
        if tensor is not None and tensor.shape[0] != length:
            return False
    if call.key_ranges is not None and call.key_ranges.shape[::2] != (query.shape[0], 2):
        return False
    return key.shape[0] == value.shape[0]


def lengths_of(query: Tensor, key: Tensor, call: Call) -> Lengths:
    """Return the lengths of a checked call.

    Query and key are (B, S, H, D) or packed (T, H, D), in any dtype. With a `block_table` the key is pages.
    """
    if call.cu_seqlens_q is None:
        batch = query.shape[0]
        return Lengths(batch, call.max_q, call.max_k, batch * call.max_q, batch * call.max_k)
    batch = call.cu_seqlens_q.shape[0] - 1
    tokens_k = key.shape[0] if call.block_table is None else batch * call.max_k
    ranges = 0 if call.key_ranges is None else call.key_ranges.shape[1]
    return Lengths(batch, call.max_q, call.max_k, query.shape[0], tokens_k, ranges)


def to_bshd(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return (B, H, S, D) tensors as (B, S, H, D), without the keys that no query sees."""
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if key.shape[1] > call.max_k:
        key, value = key[:, : call.max_k], value[:, : call.max_k]
    return query, key, value


def keys_used(seqused_k: Tensor | None, cu_seq_k: Tensor | None, block_table: Tensor | None) -> Tensor | None:
    """Return how many keys of each sequence count; with pages offsets of the keys say so, too.

    Args:
        seqused_k: int32 (B,), or None for all keys.
        cu_seq_k: int32 (B + 1,), offsets of the keys, or None.
        block_table: int32 (B, pages of a sequence), or None without pages.

    Returns:
        int32 (B,), or None for all keys.
    """
    if block_table is None or seqused_k is not None or cu_seq_k is None:
        return seqused_k
    return cu_seq_k.diff()


def with_aliased_offsets(call: Call) -> Call:
    """Return a call with offsets that are tensors of their own, in the same memory.

    Inductor's code reuses a tensor that it no longer needs: it writes new offsets to it, at the same address
    and version. What was derived from the old offsets must not be found then.
    """
    queries, keys, used = (
        None if x is None else x.detach() for x in (call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k)
    )
    keys = queries if call.cu_seqlens_k is call.cu_seqlens_q else keys
    return call._replace(cu_seqlens_q=queries, cu_seqlens_k=keys, seqused_k=used)


def scale_of(query: Tensor, scale: float | None) -> float:
    """Return the softmax scale: as given, else one over the root of the head dim of `query`.

    The query is (..., D), in any dtype.
    """
    return scale if scale is not None else float((query.shape[-1] or 1) ** -0.5)


def wants_gradient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether autograd records a call of tensors of any shape; true below autograd as well as above."""
    return torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)


def wants_deterministic() -> bool:
    """Whether nondeterministic kernels are to be refused; `warn_only` leaves them be."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def wants_batch_invariant() -> bool:
    """Whether the bits of a sequence's results may not depend on its batch."""
    return state().batch_invariant


def packed_bounds(window: tuple[int, int], causal: bool, max_q: int, max_k: int) -> tuple[int, int]:
    """Return what `bounds` does for a packed call.

    The longest sequence says whether a bound excludes something, but may not say it of the others where
    results may not depend on the batch.
    """
    longest = (LONGEST, LONGEST) if wants_batch_invariant() else (max_q, max_k)
    return bounds(window, causal, *longest)


def decided(spec: AttentionSpec, choice: ScopedChoice | None) -> tuple[Decision, ...]:
    """Return what is decided about each direction of a call, the forward first, without a plan.

    As with plans, a class of lengths is decided once, or a step where times decide. So reasons may name other
    lengths than the call's; `decisions` names its own.

    Raises:
        AttnregError: what `decide` raises.
    """
    now = state()
    if now.policy.adaptive is not None:  # the next turn may change what is decided
        return tuple(decisions(spec, choice))
    key_of_kind = spec.but(**NO_LENGTHS), choice
    kind = now.kinds.get(key_of_kind) or now.keep_kind(key_of_kind, kind_of(now, spec, "forward"))
    key = kind.key(Lengths.of(spec))
    kept = now.decided.get((key_of_kind, key))
    if kept is not None and all(map(now.may_load, kept)):
        return kept
    here = tuple(decisions(spec, choice))
    key, _ = refined_key(now, kind, key, spec, "forward", here)
    now.keep_decided(key_of_kind, key, here)
    return here


def decisions(spec: AttentionSpec, choice: ScopedChoice | None) -> Iterator[Decision]:
    """Yield what would be decided now about each direction of a call, the forward first."""
    now = state()
    policy = now.policy.with_first(None if choice is None else choice.preference)
    for direction in directions_of(spec):
        yield decide(spec, direction, now.entries, policy)

"""What flash-attn's functions share: what their options mean, and the calls that `varlen_attn` doesn't take.

A packed call goes to `varlen_attn` unless it has ALiBi slopes, dropout or `deterministic=True`. A dense one
goes to backends as it lies, since flattening a transposed tensor would copy it. Under torch.compile, and
where modes, subclasses or function transforms are to see an op, it is a packed one of equal lengths.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from attnreg.aten.routing import forward_choice, run_with_dropout
from attnreg.contract.backend import Call
from attnreg.dispatch import scope
from attnreg.dispatch.calls import plan_for, wants_deterministic, wants_gradient
from attnreg.dispatch.scope import ScopedChoice
from attnreg.dispatch.state import retry_on_decline
from attnreg.errors import InvalidInputError
from attnreg.torchlib.locks import open_after_fork
from attnreg.varlen.front import AuxRequest, in_memory, is_plain, varlen_attn
from attnreg.varlen.plans import autocast, call_of, check_tensors, window

# Output and LSE.
Results = tuple[Tensor, Tensor]

# Offsets and longest sequence, of queries and of keys.
Lengths = tuple[Any, Tensor | None, int, int]

T = TypeVar("T")

_TENSORS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "alibi_slopes")
_NONE: dict[str, Any] = dict.fromkeys(_TENSORS)


class Options(NamedTuple):
    """The options that all of flash-attn's functions have, in their order."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False

    @property
    def bound_on_scores(self) -> float:
        """The softcap; flash-attn takes numbers below 0 for none as well."""
        return 0.0 if self.softcap < 0.0 else self.softcap

    def call(
        self,
        query: Tensor,
        lengths: Lengths,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> Call:
        """Return the contract's `Call`; both offsets are None for a dense one."""
        bound = window(self.window_size, self.causal)
        options = self.softmax_scale, bound, seqused_k, block_table, num_splits, self.bound_on_scores
        call = call_of(query, lengths, *options)
        if not (self.dropout_p or self.alibi_slopes is not None or self.deterministic):
            return call
        batch = len(query) if call.cu_seqlens_q is None else len(call.cu_seqlens_q) - 1
        return call._replace(
            dropout=float(self.dropout_p),
            alibi_slopes=_checked_slopes(self.alibi_slopes, query, batch),
            deterministic=self.deterministic or call.deterministic,
        )


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    options: Options,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Results:
    """Return the output (T_q, H, D_v) and the LSE (H, T_q) of packed sequences."""
    is_further = bool(options.dropout_p) or options.alibi_slopes is not None
    if is_further or (options.deterministic and not wants_deterministic()):
        check_tensors(
            query=q, key=k, value=v, cu_seq_q=lengths[0], cu_seq_k=lengths[1], seqused_k=seqused_k,
            block_table=block_table,
        )  # fmt: skip
        call = options.call(q, lengths, seqused_k, block_table, num_splits)
        attend = _attend_uncompiled if torch.compiler.is_compiling() else _attend
        return attend(q, k, v, call)
    found = varlen_attn(
        q, k, v, *lengths, options.causal, AuxRequest(lse=True), scale=options.softmax_scale,
        window_size=options.window_size, enable_gqa=True, seqused_k=seqused_k, block_table=block_table,
        num_splits=num_splits, softcap=options.bound_on_scores,
    )  # fmt: skip
    return found[0], found[1]


def attend_dense(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Results:
    """Return the output (B, S_q, H, D_v) and the LSE (B, H, S_q) of a dense batch."""
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            shown = str(tuple(tensor.shape)) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidInputError(
                f"{name}: got {shown}, expected 4 dimensions (batch, length, heads, head_dim)"
            )
    (batch, length_q), length_k = q.shape[:2], k.shape[1]
    if not batch == len(k) == len(v):
        got = f"{batch} for q, {len(k)} for k and {len(v)} for v"
        raise InvalidInputError(f"batch: got {got}, expected equal ones")
    if not torch.compiler.is_compiling() and is_plain(q, k, v):
        return _attend(q, k, v, options.call(q, (None, None, length_q, length_k)))
    offsets = regular_offsets(batch, length_q, q), regular_offsets(batch, length_k, k)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return unpacked(*attend_packed(q, k, v, (*offsets, length_q, length_k), options), batch)


def regular_offsets(batch: int, length: int, like: Tensor) -> Tensor:
    """Return the offsets, int32 (B + 1,) on the device of `like`, of a batch of equally long sequences."""
    return torch.arange(batch + 1, dtype=torch.int32, device=like.device) * length


def unpacked(out: Tensor, lse: Tensor, batch: int) -> Results:
    """Return the packed results of `batch` sequences of equal lengths as dense ones."""
    length = out.shape[0] // max(batch, 1)
    out = out.view(batch, length, *out.shape[1:])
    return out, lse.view(-1, batch, length).transpose(0, 1).contiguous()


def _attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Results:
    """Return output and LSE of a call in the contract's layout."""
    q, k, v = autocast(q, k, v)
    choice = scope.current()
    if wants_gradient(q, k, v):
        out, lse = _Attention.apply(q, k, v, call, choice)  # type: ignore[no-untyped-call]
    else:
        out, lse, *_ = _forward((q, k, v), call, choice, needs_backward=False)
    return out, lse.float().contiguous()


# What a compiled program calls, between two of its graphs. Torch's own lazy `torch.compiler.disable`: that
# imports all of Dynamo at once.
_attend_uncompiled = _disable_dynamo(_attend)


def _forward(
    inputs: tuple[Tensor, Tensor, Tensor], call: Call, choice: ScopedChoice | None, needs_backward: bool
) -> tuple[Tensor, Tensor, Tensor | None, ScopedChoice | None]:
    """Return output, LSE, and for a backward the random state and the choice, which dropout ties."""

    def plan_and_run() -> tuple[Tensor, Tensor, Tensor | None, ScopedChoice | None]:
        plan = plan_for("forward", *inputs, call, choice, needs_backward=needs_backward)
        if call.dropout > 0.0:
            return *run_with_dropout(plan, *inputs, call), forward_choice(choice, plan, call.dropout)
        return *plan.run(*inputs, call), None, choice

    return _launched(plan_and_run, call)


class _Attention(torch.autograd.Function):
    """The autograd of the calls that `varlen_attn` doesn't take."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call, choice: ScopedChoice | None
    ) -> Results:
        inputs = query, key, value
        out, lse, rng_state, ctx.choice = _forward(inputs, call, choice, needs_backward=True)
        ctx.save_for_backward(*inputs, out, lse, rng_state, *(getattr(call, name) for name in _TENSORS))
        ctx.call = call._replace(num_splits=None, **_NONE)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * 5
        query, key, value, out, lse, rng_state, *others = ctx.saved_tensors
        deterministic = ctx.call.deterministic or wants_deterministic()
        tensors = dict(zip(_TENSORS, others, strict=True))
        tensors |= {"rng_state": rng_state, "grad_lse": None if grad_lse is None else in_memory(grad_lse)}
        call: Call = ctx.call._replace(deterministic=deterministic, **tensors)
        grad = torch.zeros_like(out) if grad_out is None else in_memory(grad_out)

        def plan_and_run() -> tuple[Tensor, ...]:
            plan = plan_for("backward", query, key, value, call, ctx.choice)
            return plan.run(grad, query, key, value, out, lse, call)  # type: ignore[no-any-return]

        return *_launched(plan_and_run, call), None, None


_lock = open_after_fork(threading.RLock())


def _launched(plan_and_run: Callable[[], T], call: Call) -> T:
    """Run a call, in torch's deterministic mode if it asks for that, as some kernels obey nothing else.

    The mode is one for all threads, so the lock keeps it on until the kernel was launched.
    """
    if not call.deterministic:
        return retry_on_decline(plan_and_run)
    with _lock:
        before = torch.get_deterministic_debug_mode()
        torch.use_deterministic_algorithms(True)
        try:
            return retry_on_decline(plan_and_run)
        finally:
            torch.set_deterministic_debug_mode(before)


def _checked_slopes(slopes: Tensor | None, query: Tensor, batch: int) -> Tensor | None:
    if slopes is None:
        return None
    if not isinstance(slopes, Tensor):
        raise InvalidInputError(f"alibi_slopes: got {type(slopes).__name__}, expected a tensor or None")
    heads = query.shape[-2]
    shapes = (heads,), (batch, heads)
    if tuple(slopes.shape) not in shapes or slopes.dtype != torch.float32 or slopes.device != query.device:
        raise InvalidInputError(
            f"alibi_slopes: got shape {tuple(slopes.shape)}, {slopes.dtype} on {slopes.device}, expected "
            f"{shapes[0]} or {shapes[1]}, torch.float32 on {query.device}"
        )
    return slopes


def returned(results: Results, with_weights: bool) -> Any:
    """Return the output, or what flash-attn returns with `return_attn_probs`: no weights without dropout."""
    out, lse = results
    return (out, lse, out.new_empty(0)) if with_weights else out


def check_weights(dropout_p: float, with_weights: bool) -> None:
    """Refuse to return the dropped weights, which no backend gives."""
    if dropout_p and with_weights:
        raise InvalidInputError(
            f"return_attn_probs: got True with dropout_p {dropout_p}, expected False (no backend returns the "
            "dropped weights), or dropout_p 0 for the LSE alone"
        )

"""Planning and running the calls of `varlen_attn`: for its custom op, autograd and the call cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnreg.contract.offsets import facts_of, needs_graph_memory
from attnreg.dispatch import call_cache, scope
from attnreg.dispatch.call_cache import Kept, kept_for
from attnreg.dispatch.calls import plan_for
from attnreg.dispatch.state import retry_on_decline
from attnreg.torchlib.layout import stream_of
from attnreg.varlen.arguments import call_of, check_heads, window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnreg.contract.backend import Call
    from attnreg.dispatch.scope import ScopedChoice


def run_forward(
    query: Tensor, key: Tensor, value: Tensor, call: Call, choice: ScopedChoice | None, needs_backward: bool
) -> tuple[tuple[Tensor, Tensor], Kept | None]:
    """Plan and run a forward; returns output and LSE, and how the call cache is to run further ones."""

    def run() -> tuple[tuple[Tensor, Tensor], Kept | None]:
        plan = plan_for("forward", query, key, value, call, choice, needs_backward=needs_backward)
        results = plan.run(query, key, value, call)
        return results, _kept(plan, (query, key, value), query, key, call)

    return retry_on_decline(run)


def run_backward(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], call: Call, choice: ScopedChoice | None
) -> tuple[tuple[Tensor, Tensor, Tensor], Kept | None]:
    """Plan and run a backward on the gradient, query, key, value, output and LSE; returns likewise."""
    _, query, key, value, _, _ = tensors

    def run() -> tuple[tuple[Tensor, Tensor, Tensor], Kept | None]:
        plan = plan_for("backward", query, key, value, call, choice)
        results = plan.run(*tensors, call)
        return results, _kept(plan, tensors, query, key, call)

    return retry_on_decline(run)


def _kept(plan: Any, tensors: tuple[Tensor, ...], query: Tensor, key: Tensor, call: Call) -> Kept | None:
    """Return what `kept_for` does, if it is known that every row sees a key (on a CPU the kernels look)."""
    cu_seqlens_q, cu_seqlens_k = call.cu_seqlens_q, call.cu_seqlens_k
    if call_cache.load() is None or cu_seqlens_q is None or cu_seqlens_k is None:
        return None
    if not query.is_cuda:
        # A launcher is promised that every row sees a key, which takes a look at the offsets each time.
        return kept_for(plan._replace(specialize=None), tensors, call)
    if needs_graph_memory(cu_seqlens_q):
        return None  # what is kept would lie in the graph's memory
    tokens = query.shape[0], key.shape[0]
    facts = facts_of(cu_seqlens_q, cu_seqlens_k, *tokens, stream_of(query))
    if not facts.every_row_sees_a_key:
        return None
    return kept_for(plan, tensors, call, offsets=(cu_seqlens_q, cu_seqlens_k, *tokens))


def _plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    window_size: Sequence[int] | None,
    scale: float | None,
    enable_gqa: bool,
    choice: int,
    needs_backward: bool,
) -> tuple[Tensor, Tensor, Any]:
    """Plan and run a forward for the call cache, below its autograd node; what is to be kept comes last."""
    if not enable_gqa:
        check_heads(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    bound = window(window_size, is_causal)
    call = call_of(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, bound)
    (out, lse), kept = run_forward(query, key, value, call, scope.by_number(choice), needs_backward)
    return out, lse, call_cache.described(kept)


def _plan_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    window_size: Sequence[int] | None,
    scale: float | None,
    choice: int,
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Plan and run a backward likewise."""
    bound = window(window_size, is_causal)
    call = call_of(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, bound)
    grads, kept = run_backward((grad_out, query, key, value, out, lse), call, scope.by_number(choice))
    return *grads, call_cache.described(kept)


call_cache.set_plans(_plan, _plan_backward)

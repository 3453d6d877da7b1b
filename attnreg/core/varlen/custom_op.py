"""`attnreg::_varlen_attn`: `varlen_attn` as one opaque op with a fake, a backward and FLOP formulas.

torch.compile keeps it in the graph, where the backend is chosen when it runs; unlike aten's own ops
Inductor's C++ wrapper and AOTInductor can't pass it by. `_autoload` imports this module when
`torch.ops.attnreg` is asked for an op, as it is by a program that `torch.export` has saved.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attnreg.core.adaptation.sinks import grad_of_sinks
from attnreg.core.contract import options
from attnreg.core.contract.backend import Call
from attnreg.core.contract.spec import UNBOUNDED
from attnreg.core.dispatch import scope
from attnreg.core.dispatch.calls import with_aliased_offsets
from attnreg.core.dispatch.scope import ScopedChoice
from attnreg.core.launching.validation import check
from attnreg.core.torchlib import functionalize
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.varlen.plans import call_of, check_heads, check_tensors, run, window
from attnreg.core.varlen.sinks import with_sinks

# The options that the ops have, by the argument of `varlen_attn`.
OPTIONS = frozenset(row.argument for row in options.OPTIONS if row.in_op)


# torch's own `torch_attn::_varlen_attn` has these arguments in this order, up to `num_splits`.
@torch.library.custom_op("attnreg::_varlen_attn", mutates_args=())
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    backend: str = "",
    needs_backward: bool = False,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output (T_q, H, D_v), the LSE (H, T_q) float32, and what the backward has to know."""
    lengths = (cu_seq_q, cu_seq_k, max_q, max_k)
    check_tensors(
        query=query, key=key, value=value, cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k, seqused_k=seqused_k,
        block_table=block_table, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    if not enable_gqa:
        check_heads(query, key, value, lengths)
    bound = window(window_size, is_causal)
    given = {
        "seqused_k": seqused_k, "block_table": block_table, "num_splits": num_splits, "softcap": softcap,
        "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    call = with_aliased_offsets(call_of(query, lengths, scale, bound, **given))
    choice = scope.from_text(backend) or scope.current()
    (out, lse), _ = run("forward", (query, key, value), call, choice, needs_backward)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    # The backward gets `backend` as an argument of its own, the choice of a scope by a token. Its dtype is
    # one that the torch.export.save of torch 2.11 can write, which knows no uint64.
    token = scope.choice_token(None if backend else choice, query).view(torch.int64).zero_()
    return out.contiguous(), lse.float().contiguous(), token


# Fakes are given the arguments without those at the end that are as by default.
@forward.register_fake
def _forward_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    backend: str = "",
    needs_backward: bool = False,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if not enable_gqa:
        check_heads(query, key, value, (cu_seq_q, cu_seq_k, max_q, max_k))
    call = Call(1.0, max_q, max_k, UNBOUNDED, cu_seq_q, cu_seq_k, seqused_k, block_table)
    check(query, key, value, call._replace(alibi_slopes=alibi_slopes))
    tokens, heads, _dim = query.shape
    out = query.new_empty((tokens, heads, value.shape[-1]))
    return out, query.new_empty((heads, tokens), dtype=torch.float32), query.new_empty((), dtype=torch.int64)


# As torch's own `torch_attn::_varlen_attn_backward`, up to `window_size`.
@torch.library.custom_op("attnreg::_varlen_attn_backward", mutates_args=())
def backward(
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
    rng_state: Tensor | None,
    scale: float | None = None,
    window_size: list[int] | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    backend: str = "",
    choice: int = 0,
    softcap: float = 0.0,
    grad_lse: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, contiguous and in their shapes.

    The choice that the forward ran by is `backend`, or comes by its number, or with the forward's token,
    its third result: that is `rng_state`, as there is no dropout.
    """
    lengths, bound = (cu_seq_q, cu_seq_k, max_q, max_k), window(window_size, is_causal)
    given = {
        "seqused_k": seqused_k, "block_table": block_table, "softcap": softcap, "alibi_slopes": alibi_slopes,
        "grad_lse": grad_lse,
    }  # fmt: skip
    call = with_aliased_offsets(call_of(query, lengths, scale, bound, **given))
    scoped = scope.by_number(choice) if rng_state is None else scope.read_token(rng_state)
    chosen = scope.from_text(backend) or scoped
    grads, _ = run("backward", (grad_out, query, key, value, out, lse), call, chosen)
    return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous()


def takes(call: Call) -> bool:
    """Whether the ops have all options of a packed call as arguments."""
    return call.varlen and all(row.in_op for row in options.options_on(call))


def backward_of(
    call: Call,
    choice: ScopedChoice | None,
    grad_out: Tensor,
    tensors: list[Tensor],
    grad_lse: Tensor | None,
    names: tuple[str, ...],
    saved: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """Call the backward's op for a forward that ran past its op.

    Args:
        call: the forward's, without its tensors: these are `saved`, by `names`.
        choice: what the forward ran by.
        grad_out: (T_q, H, D_v), in the dtype of the output.
        tensors: query, key and value, the output and the LSE.
        grad_lse: (H, T_q) float32, or None.
    """
    given = dict(zip(names, saved, strict=True))
    return backward(  # type: ignore[no-any-return]
        grad_out, *tensors, given["cu_seqlens_q"], given.get("cu_seqlens_k"), call.max_q, call.max_k, False,
        None, call.scale, list(call.window), given.get("seqused_k"), given.get("block_table"), "",
        0 if choice is None else choice.number, call.softcap, grad_lse, given.get("alibi_slopes"),
    )  # fmt: skip


@backward.register_fake
def _backward_fake(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, cu_seq_q, cu_seq_k, *longest, is_causal, scale, window_size = inputs[:10]
    _gqa, seqused_k, block_table, _splits, backend, _needs_backward, softcap, slopes, sinks = inputs[10:]
    options = seqused_k, block_table, slopes, sinks
    ctx.save_for_backward(query, key, value, *output, cu_seq_q, cu_seq_k, *options)
    ctx.numbers, ctx.last = (longest, is_causal, scale, window_size), (backend, 0, softcap)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)  # without a gradient of the LSE more backends can run the backward


def _gradients(
    op: Any, ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return (None,) * 19
    *tensors, token, cu_seq_q, cu_seq_k, seqused_k, block_table, slopes, sinks = ctx.saved_tensors
    of_sinks = None
    if sinks is not None and ctx.needs_input_grad[18]:
        of_sinks = grad_of_sinks(grad_out, (tensors[3], tensors[4]), sinks, grad_lse)
    if not any(ctx.needs_input_grad[:3]):
        return *(None,) * 18, of_sinks
    longest, is_causal, scale, window_size = ctx.numbers
    given = *tensors, cu_seq_q, cu_seq_k, *longest, is_causal, token, scale, window_size
    grad_out = torch.zeros_like(tensors[3]) if grad_out is None else grad_out
    grads = op(grad_out, *given, seqused_k, block_table, *ctx.last, grad_lse, slopes)
    return *grads, *(None,) * 15, of_sinks


forward.register_autograd(functools.partial(_gradients, backward), setup_context=_save)


def _each(
    function: type[torch.autograd.Function], info: Any, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]
) -> list[tuple[Tensor, ...]]:
    """Return the results of a vmap's calls, one by one: torch's own rule can't be above functionalize."""
    pairs = tuple(zip(inputs, in_dims, strict=True))
    return [
        function.apply(*(x.select(dim, n) if isinstance(dim, int) else x for x, dim in pairs))  # type: ignore[no-untyped-call]
        for n in range(info.batch_size)
    ]


@functionalize.allow
class Transformable(torch.autograd.Function):
    """The op under function transforms (`torch.func`), which can't differentiate custom ops.

    Forward-mode AD isn't supported, and says so here; the op itself would drop the tangents.
    """

    setup_context = staticmethod(_save)

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        return forward(*inputs)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return a gradient for each argument of the op, None for those that have none.

        `grads` are the gradients of the output (T_q, H, D_v), of the LSE (H, T_q), in their dtypes, and of
        the forward's third result, or None.
        """
        return _gradients(_TransformableBackward.apply, ctx, *grads)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, ...]:
        outs, lses, tokens = zip(*_each(Transformable, info, in_dims, inputs), strict=True)
        # All calls have one choice: a stack of tokens would be none.
        return (torch.stack(outs), torch.stack(lses), tokens[0]), (0, 0, None)


@functionalize.allow
class _TransformableBackward(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        return backward(*inputs)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError("the backward of attnreg.varlen_attn is not differentiable")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, ...]:
        grads = zip(*_each(_TransformableBackward, info, in_dims, inputs), strict=True)
        return tuple(map(torch.stack, grads)), (0, 0, 0)


# These, too, are given the arguments without those at the end that are as by default.
@register_flop_formula(torch.ops.attnreg._varlen_attn, get_raw=True)
def _forward_flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any) -> int:
    lengths, seqused_k = rest[:4], rest[8] if len(rest) > 8 else None
    return 2 * _scores(query, lengths, seqused_k) * (query.shape[-1] + value.shape[-1])


@register_flop_formula(torch.ops.attnreg._varlen_attn_backward, get_raw=True)
def _backward_flops(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any) -> int:
    lengths, seqused_k = rest[2:6], rest[10] if len(rest) > 10 else None
    # The scores once more and the gradients of query and key; that of the weights and of the value.
    return 2 * _scores(query, lengths, seqused_k) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _scores(query: Tensor, lengths: tuple[Any, ...], seqused_k: Tensor | None) -> int:
    """Count the scores of all heads; like torch's own formulas it doesn't take off what a mask hides."""
    cu_seq_q, cu_seq_k, max_q, max_k = lengths
    known = [x for x in (cu_seq_q, cu_seq_k, seqused_k) if x is not None]
    batch = len(cu_seq_q) - 1
    lengths_q, lengths_k = [max_q] * batch, [max_k] * batch
    # While something traces, lengths are unknown and each sequence counts as the longest.
    if all(type(x) is Tensor and not x.is_meta for x in known):
        lengths_q = cu_seq_q.diff().tolist()
        if seqused_k is not None:
            lengths_k = seqused_k.tolist()
        elif cu_seq_k is not None:
            lengths_k = cu_seq_k.diff().tolist()
    per_head: int = sum(map(operator.mul, lengths_q, lengths_k))
    return query.shape[1] * per_head


leave_module_uncompiled(__name__)

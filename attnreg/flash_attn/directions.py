"""A forward or a backward alone, without autograd: flash-attn's private functions.

Programs call them in autograd functions of their own, ring attention's for example. Such a program may give a
backward output and LSE over more keys than it gives: the gradients are then these keys' part.
`activation` makes the functions importable under their private names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnreg.core.contract.backend import Call
from attnreg.core.contract.spec import UNBOUNDED
from attnreg.core.dispatch import scope
from attnreg.core.dispatch.calls import wants_deterministic
from attnreg.core.dispatch.scope import ScopedChoice
from attnreg.core.launching.validation import check, check_layouts
from attnreg.core.torchlib.modes import is_plain
from attnreg.core.varlen import custom_op, spread
from attnreg.core.varlen.autograd import run_backward
from attnreg.core.varlen.plans import check_tensors, check_untraced, run
from attnreg.errors import InvalidInputError, UnsupportedInputError
from attnreg.flash_attn.attention import (
    OF_DENSE,
    OF_PACKED,
    Inputs,
    Lengths,
    Options,
    as_packed,
    check_dense,
    naming,
    unpacked,
)

# Output, LSE, the weights, always an empty tensor, and the random state.
Results = tuple[Tensor, Tensor, Tensor, Tensor]

_OF_BACKWARD = {"grad_out": "dout", "lse": "softmax_lse"}


@naming(OF_DENSE)
def flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Results:
    """Compute the output of `flash_attn_func`, which takes no gradient, and what its backward needs.

    Args:
        q: (B, S_q, H, D).
        k, v: (B, S_k, H_k, D) and (B, S_k, H_k, D_v).
        window_size_left, window_size_right: the bounds of `window_size`.
        return_softmax: whether to return the weights; with dropout that is refused.

    Further arguments and errors are as for `flash_attn_func`.

    Returns:
        The output (B, S_q, H, D_v), the LSE (B, H, S_q), an empty tensor, and the random state, int64 (2,).
        The LSE is float32, of float64 inputs float64. By the random state the backward finds the forward's
        choice.
    """
    window = window_size_left, window_size_right
    options = Options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    check_dense(q, k, v)
    return _forward((q, k, v), (None, None, q.shape[1], k.shape[1]), options, return_softmax)


@naming(OF_PACKED)
def flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> Results:
    """Compute the output of `flash_attn_varlen_func`, which takes no gradient, and what its backward needs.

    Args:
        q: (T_q, H, D).
        k, v: (T_k, H_k, D) and (T_k, H_k, D_v); with a `block_table` (pages, page size, H_k, D).
        window_size_left, window_size_right: the bounds of `window_size`.
        return_softmax: whether to return the weights; with dropout that is refused.
        leftpad_k: refused; `flash_attn_with_kvcache` takes it.
        seqused_k: int32 (B,), the number of each sequence's keys that count.
        zero_tensors: no difference: rows of no sequence are always 0.

    Further arguments and errors are as for `flash_attn_varlen_func`.

    Returns:
        The output (T_q, H, D_v), the LSE (H, T_q), float32 or of float64 inputs float64, an empty tensor, and
        the random state, int64 (2,), by which the backward finds the forward's choice.
    """
    if leftpad_k is not None:
        raise UnsupportedInputError(
            "leftpad_k: got a tensor, expected None, or flash_attn_with_kvcache with cache_leftpad"
        )
    window = window_size_left, window_size_right
    options = Options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _forward((q, k, v), lengths, options, return_softmax, seqused_k, block_table)


@naming(OF_DENSE | _OF_BACKWARD)
def flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write the gradients of `flash_attn_func` into `dq`, `dk` and `dv`, unless they are None.

    Args:
        dout, out: (B, S_q, H, D_v), in the dtype of `q`: the gradient of the output, and the output.
        q, dq: (B, S_q, H, D).
        k, v, dk, dv: (B, S_k, H_k, D) and (B, S_k, H_k, D_v).
        softmax_lse: (B, H, S_q).
        rng_state: the forward's. Without it the scoped choice in force here decides, not the forward's.

    Further arguments and errors are as for `flash_attn_forward`.

    Returns:
        The row sums of `dout * out`, (B, H, S_q) float32, not padded to flash-attn's blocks.
    """
    window = window_size_left, window_size_right
    options = Options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    check_dense(q, k, v)
    lengths, results = (None, None, q.shape[1], k.shape[1]), (dout, out, softmax_lse)
    return _backward((q, k, v), results, (dq, dk, dv), lengths, options, rng_state)


@naming(OF_PACKED | _OF_BACKWARD)
def flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Write the gradients of `flash_attn_varlen_func` into `dq`, `dk` and `dv`, unless they are None.

    Args:
        dout, out: (T_q, H, D_v), in the dtype of `q`: the gradient of the output, and the output.
        q, dq: (T_q, H, D).
        k, v, dk, dv: (T_k, H_k, D) and (T_k, H_k, D_v).
        softmax_lse: (H, T_q).
        rng_state: the forward's. Without it the scoped choice in force here decides, not the forward's.
        zero_tensors: no difference: rows of no sequence always get 0.

    Further arguments and errors are as for `flash_attn_varlen_forward`.

    Returns:
        The row sums of `dout * out`, (H, T_q) float32, not padded to flash-attn's blocks.
    """
    window = window_size_left, window_size_right
    options = Options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    lengths, results = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), (dout, out, softmax_lse)
    return _backward((q, k, v), results, (dq, dk, dv), lengths, options, rng_state)


def _forward(
    inputs: Inputs,
    lengths: Lengths,
    options: Options,
    with_weights: bool,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Results:
    q = inputs[0]
    _check(inputs, lengths, options, seqused_k, block_table)
    if with_weights and options.dropout_p:
        raise UnsupportedInputError(
            f"return_softmax: got True with dropout_p {options.dropout_p}, expected False, or "
            "flash_attn_func with return_attn_probs=True"
        )
    # The program's own autograd function runs with gradients off, and is given the program's tensors.
    needs_backward = any(x.requires_grad for x in inputs)
    with torch.no_grad():
        if _is_in_graph(*inputs, *lengths[:2], seqused_k, block_table, options.alibi_slopes):
            out, lse, state = _forward_in_graph(inputs, lengths, options, seqused_k, block_table)
        else:
            call = options.call(q, lengths, seqused_k, block_table)
            ran = run("forward", inputs, call, scope.current(), needs_backward)
            (out, lse), seed = ran.results, ran.call.rng_state
            state = q.new_zeros(2, dtype=torch.int64) if seed is None else seed.view(torch.int64)
            state = state if ran.choice is None else scope.with_token(state, ran.choice)
    return out, lse.contiguous(), out.new_empty(0), state


def _backward(
    inputs: Inputs,
    results: Inputs,
    into: tuple[Tensor | None, ...],
    lengths: Lengths,
    options: Options,
    rng_state: Tensor | None,
) -> Tensor:
    """Write the gradients into `into`; `results` are the gradient of the output, the output and the LSE."""
    _check(inputs, lengths, options)
    if not torch.compiler.is_compiling():  # the op of compiled code checks them
        check(*inputs, Call(1.0, lengths[2], lengths[3], UNBOUNDED, lengths[0], lengths[1]))
    _check_results(inputs, results, into, is_packed=lengths[0] is not None)
    dout, out, lse = (x.detach() for x in results)
    lse = lse.to(torch.float64 if out.dtype == torch.float64 else torch.float32)
    with torch.no_grad():
        if _is_in_graph(*inputs, *results, *lengths[:2], options.alibi_slopes):
            grads = _backward_in_graph(inputs, (dout, out, lse), lengths, options, rng_state)
        else:
            choice = _choice_of(rng_state, options.dropout_p)
            call = options.call(inputs[0], lengths)
            if rng_state is not None and options.dropout_p:
                call = call._replace(rng_state=rng_state.view(torch.uint64))
            grads = run_backward(dout, (*inputs, out, lse), call, choice, None)
        for written, grad in zip(into, grads, strict=True):
            if written is not None:
                written.copy_(grad)
        return (dout.float() * out.float()).sum(-1).transpose(-1, -2)


def _choice_of(rng_state: Tensor | None, dropout_p: float) -> ScopedChoice | None:
    """Return the choice of the forward that returned this state; with dropout there has to be one."""
    choice = scope.current() if rng_state is None else scope.read_token(rng_state)
    if dropout_p and (rng_state is None or choice is None):
        got = "None" if rng_state is None else "a tensor that carries no backend, such as a copy"
        raise InvalidInputError(
            f"rng_state: got {got} with dropout_p {dropout_p}, expected the forward's fourth result"
        )
    return choice


def _check(
    inputs: Inputs,
    lengths: Lengths,
    options: Options,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> None:
    """Check that arguments are tensors of a call that runs on this rank; `check_dense` has done a part."""
    if lengths[0] is not None:
        check_untraced("flash_attn_varlen_func")
        spread.check_is_off("flash_attn_varlen_func")
        check_tensors(
            query=inputs[0], key=inputs[1], value=inputs[2], cu_seq_q=lengths[0], cu_seq_k=lengths[1],
            seqused_k=seqused_k, block_table=block_table,
        )  # fmt: skip
    check_tensors(alibi_slopes=options.alibi_slopes)
    check_layouts(alibi_slopes=options.alibi_slopes)


def _check_results(inputs: Inputs, results: Inputs, into: tuple[Tensor | None, ...], is_packed: bool) -> None:
    """Check shapes, dtypes and devices of what a kernel would read and write without asking."""
    q, k, v = inputs
    shape = (*q.shape[:-1], v.shape[-1])
    of_lse = (q.shape[1], q.shape[0]) if is_packed else (q.shape[0], q.shape[2], q.shape[1])
    named = {"dout": (results[0], shape), "out": (results[1], shape), "softmax_lse": (results[2], of_lse)}
    optional = {"dq": (into[0], q.shape), "dk": (into[1], k.shape), "dv": (into[2], v.shape)}
    named |= {name: (x, shape) for name, (x, shape) in optional.items() if x is not None}
    tensors = {name: x for name, (x, _) in named.items()}
    check_tensors(**tensors)
    check_layouts(**tensors)
    for name, (x, expected) in named.items():
        dtype = x.dtype if name == "softmax_lse" and x.is_floating_point() else q.dtype
        if (tuple(x.shape), x.dtype, x.device) != (tuple(expected), dtype, q.device):
            raise InvalidInputError(
                f"{name}: got {tuple(x.shape)}, {x.dtype} on {x.device}, expected {tuple(expected)}, "
                f"{torch.float32 if name == 'softmax_lse' else dtype} on {q.device}"
            )
        if name in optional and x.numel() > 1 and 0 in x.stride():
            raise InvalidInputError(f"{name}: got an expanded tensor, expected one with memory of its own")


def _is_in_graph(*tensors: Tensor | None) -> bool:
    """Whether a call has to be an op, for a graph or for what sees ops."""
    return torch.compiler.is_compiling() or not is_plain(*tensors)


def _forward_in_graph(
    inputs: Inputs,
    lengths: Lengths,
    options: Options,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, LSE and random state of a call, by the op of packed calls."""
    _check_for_op(options)
    q, packed, of_packed = inputs[0], *as_packed(inputs, lengths)
    out, lse, token = custom_op.forward(
        *packed, *of_packed, options.causal, options.softmax_scale, list(options.window_size), True,
        seqused_k, block_table, None, "", True, options.bound_on_scores, options.alibi_slopes,
    )  # fmt: skip
    if lengths[0] is None:
        out, lse = unpacked(out, lse, q.shape[0], q.shape[1])
    return out, lse, token.expand(2)


def _backward_in_graph(
    inputs: Inputs, results: Inputs, lengths: Lengths, options: Options, rng_state: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, by the op of packed calls."""
    _check_for_op(options)
    packed, of_packed = as_packed(inputs, lengths)
    dout, out, lse = results
    if lengths[0] is None:
        dout, out, lse = dout.flatten(0, 1), out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    grads = custom_op.backward(
        dout, *packed, out, lse, *of_packed, options.causal, rng_state, options.softmax_scale,
        list(options.window_size), None, None, "", 0, options.bound_on_scores, None, options.alibi_slopes,
    )  # fmt: skip
    return tuple(grad.view(x.shape) for grad, x in zip(grads, inputs, strict=True))


def _check_for_op(options: Options) -> None:
    """Refuse what the op of packed calls hasn't."""
    where = "in compiled code, in dispatch modes and for tensor subclasses"
    if options.dropout_p:
        raise UnsupportedInputError(f"dropout_p: got {options.dropout_p} {where}, expected 0")
    if options.deterministic and not wants_deterministic():
        raise UnsupportedInputError(
            f"deterministic: got True {where}, expected False, or torch.use_deterministic_algorithms(True)"
        )

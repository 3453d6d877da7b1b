"""Aten's efficient ops: dense (B, S, H, D), with or without a bias, and packed (1, T, H, D).

The efficient op below `F.scaled_dot_product_attention` calls the dense op. Torch's selector sends it calls
that neither flash nor cuDNN supports: float32, biases, head dims above 256. Nested tensors use the packed op.

The LSE is (B, H, S), also in packed calls, with S rounded up to 32 and +inf after the last row. The compiled
call cache stores only calls of torch's own kernel. It expects the output where the backward has the bias, and
it can't produce such an LSE.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.core.aten import routing
from attnreg.core.aten.routing import OpLayout, Route, RoutedCall, RouterResult
from attnreg.core.aten.schemas import EfficientBackward, EfficientForward, SdpaCpuForward
from attnreg.core.contract.backend import Call
from attnreg.core.contract.lengths import bounds
from attnreg.core.dispatch import calls
from attnreg.core.dispatch.dropout import forward_choice, run_forward_kernel
from attnreg.core.dispatch.planning import Native
from attnreg.core.torchlib.layout import contiguous_strides

EFFICIENT = Native("efficient", kernel="torch's efficient_attention kernel")
OP = "_efficient_attention"

# CustomMaskType in torch/aten/src/ATen/native/transformers/sdp_utils_cpp.h; 0 is no mask.
TOP_LEFT, BOTTOM_RIGHT = 1, 2

LSE_STEP = 32  # kAlignLSE of torch's kernel
BIAS_STEP = (
    16  # and the rows of a bias's gradient: `_efficient_attention_backward` in torch's attention_backward.cu
)

LSE = EfficientForward._fields.index("compute_log_sumexp")

TOKEN = 3  # the result that carries a choice: the offset of the random state


def _forward(arguments: EfficientForward, routed: RoutedCall) -> RouterResult:
    """Run a call, in two cases with an LSE even if the caller wants none.

    Torch asks for none where only the bias needs a gradient, and its backward then raises an error
    (pytorch#148476, torch 2.11 to 2.13). Without an LSE torch's kernel treats heads that share one key and
    value as queries where a block has a single query. It then reads the bias of other rows, writes heads past
    the output, and ignores a causal mask (pytorch#191937, torch 2.11 to 2.13).
    """
    of_bias = torch.is_grad_enabled() and arguments.bias is not None and arguments.bias.requires_grad
    is_shared = arguments.key.stride(2) == 0 == arguments.value.stride(2)
    if arguments.compute_log_sumexp or not (of_bias or is_shared):
        return _run_forward(arguments, routed)
    args = (*routed.args[:LSE], True, *routed.args[LSE + 1 :])
    if of_bias:
        arguments = arguments._replace(compute_log_sumexp=True)
        # The call cache would run further calls without an LSE.
        return _run_forward(arguments, routed._replace(args=args))[0], None
    (out, lse, *rest), _ = _run_forward(arguments, routed._replace(args=args))
    return (out, lse.new_empty((*lse.shape[:-1], 0)), *rest), None


def _run_forward(arguments: EfficientForward, routed: RoutedCall) -> RouterResult:
    if why := _only_torchs(arguments):
        return routed.untouched(why)
    dropout, choice = arguments.dropout_p, routed.choice
    tensors, call = _in_contract(arguments)
    if dropout > 0.0 and arguments.bias is not None and arguments.bias.requires_grad:
        call = call._replace(bias_gradient=True)  # the backward has to draw the same mask
    needs_backward, declined = arguments.compute_log_sumexp, routed.declined  # autograd asks for the LSE
    plan = calls.plan_for("forward", *tensors, call, choice, routed.native, needs_backward, declined=declined)
    choice = forward_choice(choice, plan, dropout)
    if plan.is_native:
        results, kept = routed.run_native(plan, call, keeps=choice is routed.choice)
        return routing.with_choice(results, TOKEN, choice), kept
    query = arguments.query
    out, lse, rng_state = run_forward_kernel(plan, *tensors, call)
    if rng_state is not None:
        seed, offset = (word.clone() for word in rng_state.view(torch.int64))
    else:
        # On the device that torch's kernel uses: activation checkpointing compares devices, and its
        # recomputation may run another kernel.
        capturing = query.is_cuda and torch.cuda.is_current_stream_capturing()
        device = query.device if capturing else torch.device("cpu")
        seed, offset = (torch.empty((), dtype=torch.int64, device=device) for _ in range(2))
    out = out.contiguous().view(*query.shape[:-1], out.shape[-1])
    lse = _to_op(lse, call) if arguments.compute_log_sumexp else _no_lse(lse, call)
    max_k = arguments.key.shape[1] if arguments.cu_seqlens_q is None else call.max_k
    return routing.with_choice((out, lse, seed, offset, call.max_q, max_k), TOKEN, choice), None


def _backward(arguments: EfficientBackward, routed: RoutedCall) -> RouterResult:
    if why := _only_torchs(arguments):
        return routed.untouched(why)
    dropout, rng_state = arguments.dropout_p, None
    if dropout > 0.0:
        rng_state = torch.stack((arguments.philox_seed, arguments.philox_offset)).view(torch.uint64)
    tensors, call = _in_contract(arguments, rng_state)
    choice = routing.backward_choice(routed, dropout)
    if arguments.bias_requires_grad:
        call = call._replace(bias_gradient=True)
    plan = calls.plan_for("backward", *tensors, call, choice, routed.native, declined=routed.declined)
    if plan.is_native:
        return routed.run_native(plan, call, keeps=dropout == 0.0)
    grad_out, out = (x if call.cu_seqlens_q is None else x[0] for x in (arguments.grad_out, arguments.out))
    lse = _from_op(arguments.logsumexp, tensors[0], call)
    grads = plan.run(grad_out, *tensors, out, lse, call)
    models = arguments.query, arguments.key, arguments.value
    laid_out = (_laid_out(grad, model) for grad, model in zip(grads, models, strict=False))
    return (*laid_out, _whole(grads[3], arguments.bias) if call.bias_gradient else None), None


def _only_torchs(arguments: EfficientForward | EfficientBackward) -> str:
    """Return which argument of a call only torch's own kernel supports, or an empty string."""
    if arguments.window_size is not None:
        return "window_size"
    if isinstance(arguments, EfficientForward):
        if arguments.seqlen_k is not None:
            return "seqlen_k"
        is_packed = arguments.cu_seqlens_q is not None
        if is_packed and (arguments.max_seqlen_q is None or arguments.max_seqlen_k is None):
            return "a packed call without its longest lengths"
    elif arguments.num_splits_key is not None or arguments.shared_storage_dqdkdv:
        return "num_splits_key or shared_storage_dqdkdv"
    if arguments.cu_seqlens_q is None:
        return ""
    if arguments.bias is not None:
        return "a packed call with a bias"
    if arguments.custom_mask_type == TOP_LEFT and arguments.cu_seqlens_q is not arguments.cu_seqlens_k:
        return "a packed call with a mask aligned top-left"
    return ""


def _in_contract(
    arguments: EfficientForward | EfficientBackward, rng_state: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor, Tensor], Call]:
    """Return query, key and value in the contract's layout, and the other arguments as a `Call`.

    The tensors are (B, S, H, D), or (T, H, D) if the call is packed.
    """
    query, key, value = arguments.query, arguments.key, arguments.value
    causal = arguments.custom_mask_type in (TOP_LEFT, BOTTOM_RIGHT)
    if arguments.cu_seqlens_q is not None:
        max_q, max_k = int(arguments.max_seqlen_q or 0), int(arguments.max_seqlen_k or 0)
        call = Call(
            calls.scale_of(query, arguments.scale), max_q, max_k,
            calls.packed_bounds((-1, -1), causal, max_q, max_k), arguments.cu_seqlens_q,
            arguments.cu_seqlens_k, dropout=arguments.dropout_p, rng_state=rng_state,
            deterministic=calls.wants_deterministic(), batch_invariant=calls.wants_batch_invariant(),
        )  # fmt: skip
        return (query[0], key[0], value[0]), routing.with_lasting_offsets(call)
    top_left = arguments.custom_mask_type == TOP_LEFT
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    dense = SdpaCpuForward(query, key, value, arguments.dropout_p, top_left, None, arguments.scale)
    call = routing.call_of(dense, arguments.bias, rng_state)
    if causal and not top_left:
        call = call._replace(window=bounds((-1, -1), True, call.max_q, call.max_k))
    return calls.to_bshd(query, key, value, call), call


def _to_op(lse: Tensor, call: Call) -> Tensor:
    """Convert the contract's LSE to the op's; rows without a key are +inf, like rows after the last.

    From (B, H, S) or packed (H, T), in float32 or float64, to (B, H, S rounded up to 32) in float32.
    """
    lse = torch.where(lse == -torch.inf, torch.inf, lse.float())
    if call.cu_seqlens_q is None:
        return F.pad(lse, (0, -lse.shape[-1] % LSE_STEP), value=torch.inf)
    starts, ends = call.cu_seqlens_q[:-1, None], call.cu_seqlens_q[1:, None]
    places = starts + torch.arange(call.max_q + -call.max_q % LSE_STEP, device=lse.device)
    if not lse.shape[1]:  # no token, but max_q may be above 0
        return lse.new_full((places.shape[0], lse.shape[0], places.shape[1]), torch.inf)
    rows = lse[:, places.clamp(max=lse.shape[1] - 1)].transpose(0, 1)
    return rows.masked_fill((places >= ends)[:, None], torch.inf).contiguous()


def _no_lse(lse: Tensor, call: Call) -> Tensor:
    batch = lse.shape[0] if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1
    return lse.new_empty((batch, lse.shape[0 if call.varlen else 1], 0))


def _from_op(lse: Tensor, query: Tensor, call: Call) -> Tensor:
    """Convert the op's LSE, (B, H, S rounded up to 32), to the contract's: (B, H, S), or packed (H, T).

    Torch's own kernel returns 0 for a row without a key. The 0 may stay: the row's weights, exp(-inf), are 0
    with any LSE.
    """
    if call.cu_seqlens_q is None:
        lse = lse[..., : call.max_q]
    elif not lse.numel():
        lse = lse.new_zeros(lse.shape[1], len(query))  # no token belongs to a sequence
    else:
        tokens = torch.arange(query.shape[0], dtype=torch.int32, device=lse.device)
        # Tokens past the last offset may get any row's LSE: they belong to no sequence.
        sequence = torch.searchsorted(call.cu_seqlens_q[1:], tokens, right=True).clamp(max=lse.shape[0] - 1)
        row = (tokens - call.cu_seqlens_q[sequence]).clamp(max=lse.shape[2] - 1)
        lse = lse[sequence, :, row].t()
    return torch.where(lse == torch.inf, -torch.inf, lse)


def _laid_out(grad: Tensor, model: Tensor) -> Tensor:
    """Return a gradient in the shape of its input, contiguous like the gradients of torch's kernel.

    `grad` is (B, S, H, D) or packed (T, H, D); keys that no query sees are missing, and get a gradient of 0.
    """
    unseen = 0 if grad.dim() == 3 else model.shape[1] - grad.shape[1]
    if unseen:  # keys that a top-left causal mask hides from every query
        grad = F.pad(grad, (0, 0, 0, 0, 0, unseen))
    return grad.contiguous().view(model.shape)


def _whole(grad: Tensor, bias: Tensor | None) -> Tensor:
    """Return the gradient of a bias, (B, H, S_q, S_k), with 0 for keys that no query sees.

    Its rows lie as torch's kernel writes them and as the meta function says, which compiled code relies on.
    """
    if bias is None:
        return grad
    *sizes, keys = bias.shape
    apart = *sizes, keys + -keys % BIAS_STEP
    if grad.shape == bias.shape and grad.stride() == contiguous_strides(apart):
        return grad
    rows = grad.new_empty(apart)[..., :keys]
    rows[..., : grad.shape[-1]] = grad
    rows[..., grad.shape[-1] :] = 0
    return rows


_FORWARD, _BACKWARD = OpLayout(query=0, token_result=TOKEN), OpLayout(query=1, token_argument=13)

ROUTES = (
    Route(OP + "_forward", ("CUDA",), EfficientForward, _forward, EFFICIENT, _FORWARD),
    Route(OP + "_backward", ("CUDA",), EfficientBackward, _backward, EFFICIENT, _BACKWARD, "philox_offset"),
)

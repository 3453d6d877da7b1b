"""Aten's efficient ops: dense (B, S, H, D), with or without a bias, and packed (1, T, H, D).

The efficient op below `F.scaled_dot_product_attention` calls the dense one. Torch's selector sends it what
neither flash nor cuDNN takes: float32, biases, head dims above 256. Nested tensors use the packed one.

The LSE is (B, H, S), of a packed call, too, with S rounded up to 32 and +inf behind the last row. The
compiled call cache keeps calls of torch's own kernel alone: in the backward the bias is where it expects the
output, and it doesn't lay out such an LSE.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.core.aten import routing
from attnreg.core.aten.routing import Layout, Route, RoutedCall, RouterResult
from attnreg.core.aten.schemas import EfficientBackward, EfficientForward, SdpaCpuForward
from attnreg.core.contract.backend import Call
from attnreg.core.contract.capabilities import GRID
from attnreg.core.dispatch import calls
from attnreg.core.dispatch.dropout import forward_choice, run_with_dropout
from attnreg.core.dispatch.planning import Native
from attnreg.core.dispatch.scope import ScopedChoice, make_choice
from attnreg.core.selection.decision import Preference
from attnreg.errors import UnsupportedInputError

EFFICIENT = Native("efficient")
OP = "_efficient_attention"

# CustomMaskType in torch/aten/src/ATen/native/transformers/sdp_utils_cpp.h; 0 is no mask.
TOP_LEFT, BOTTOM_RIGHT = 1, 2

LSE_STEP = 32  # kAlignLSE of torch's kernel

LSE = EfficientForward._fields.index("compute_log_sumexp")

TOKEN = 3  # the result that carries a choice: the offset of the random state

# The contract's backwards return no such gradient.
ALONE = EFFICIENT.name, "attn_bias needs a gradient, which torch's efficient kernel alone computes"
FOR_BIAS = Preference("the gradient of attn_bias", (), alone=ALONE)


def _forward(given: EfficientForward, routed: RoutedCall) -> RouterResult:
    """Run a call; where all heads share one key and value, torch's own kernel computes an unused LSE.

    Without it a block of a single query takes heads for queries. It then reads the bias of other rows, writes
    heads behind the output, and forgets a causal mask (pytorch#191937, with torch 2.11 to 2.13).
    """
    is_shared = given.key.stride(2) == 0 == given.value.stride(2)
    if given.compute_log_sumexp or not is_shared:
        return _run_forward(given, routed)
    args = (*routed.args[:LSE], True, *routed.args[LSE + 1 :])
    (out, lse, *rest), _ = _run_forward(given, routed._replace(args=args))
    return (out, lse.new_empty((*lse.shape[:-1], 0)), *rest), None


def _run_forward(given: EfficientForward, routed: RoutedCall) -> RouterResult:
    if why := _only_torchs(given):
        return routed.untouched(why)
    dropout, choice = given.dropout_p, routed.choice
    if dropout > 0.0 and given.bias is not None and given.bias.requires_grad:
        choice = _with_bias(choice)  # the backward has to draw the same mask
    tensors, call = _in_contract(given)
    # Autograd asks for the LSE where it records the call.
    plan = routed.plan_for("forward", tensors, call, choice, routed.native, given.compute_log_sumexp)
    choice = forward_choice(choice, plan, dropout)
    if plan.is_native:
        results, kept = routed.run_native(plan, call, keeps=choice is routed.choice)
        return routing.with_choice(results, TOKEN, choice), kept
    query = given.query
    if dropout > 0.0:
        out, lse, rng_state = run_with_dropout(plan, *tensors, call)
        seed, offset = (word.clone() for word in rng_state.view(torch.int64))
    else:
        out, lse = plan.run(*tensors, call)
        # On the device where torch's kernel has them: checkpointing compares devices, and what it computes
        # again may run another kernel.
        capturing = query.is_cuda and torch.cuda.is_current_stream_capturing()
        device = query.device if capturing else torch.device("cpu")
        seed, offset = (torch.empty((), dtype=torch.int64, device=device) for _ in range(2))
    out = out.contiguous().view(*query.shape[:-1], out.shape[-1])
    lse = _to_op(lse, call) if given.compute_log_sumexp else _no_lse(lse, call)
    max_k = given.key.shape[1] if given.cu_seqlens_q is None else call.max_k
    return routing.with_choice((out, lse, seed, offset, call.max_q, max_k), TOKEN, choice), None


def _backward(given: EfficientBackward, routed: RoutedCall) -> RouterResult:
    if why := _only_torchs(given):
        return routed.untouched(why)
    dropout, rng_state = given.dropout_p, None
    if dropout > 0.0:
        rng_state = torch.stack((given.philox_seed, given.philox_offset)).view(torch.uint64)
    tensors, call = _in_contract(given, rng_state)
    choice = routing.backward_choice(routed, dropout)
    if given.bias_requires_grad:
        choice = _with_bias(choice, dropout)
    plan = routed.plan_for("backward", tensors, call, choice, routed.native)
    if plan.is_native:
        return routed.run_native(plan, call, keeps=dropout == 0.0)
    if given.bias_requires_grad:  # a larger batch is cut, by the contract
        batch = given.query.shape[0]
        raise UnsupportedInputError(
            f"{ALONE[1]}, for a batch of at most {GRID}, got {batch}: split the batch"
        )
    grad_out, out = (x if call.cu_seqlens_q is None else x[0] for x in (given.grad_out, given.out))
    grads = plan.run(grad_out, *tensors, out, _from_op(given.logsumexp, tensors[0], call), call)
    models = given.query, given.key, given.value
    laid_out = (_laid_out(grad, model) for grad, model in zip(grads, models, strict=True))
    return (*laid_out, None), None


def _only_torchs(given: EfficientForward | EfficientBackward) -> str:
    """Return what of a call only torch's own kernel understands, or an empty string."""
    if given.window_size is not None:
        return "window_size"
    if isinstance(given, EfficientForward):
        if given.seqlen_k is not None:
            return "seqlen_k"
        is_packed = given.cu_seqlens_q is not None
        if is_packed and (given.max_seqlen_q is None or given.max_seqlen_k is None):
            return "a packed call without its longest lengths"
    elif given.num_splits_key is not None or given.shared_storage_dqdkdv:
        return "num_splits_key or shared_storage_dqdkdv"
    if given.cu_seqlens_q is None:
        return ""
    if given.bias is not None:
        return "a packed call with a bias"
    if given.custom_mask_type == TOP_LEFT and given.cu_seqlens_q is not given.cu_seqlens_k:
        return "a packed call with a mask aligned top-left"
    return ""


def _in_contract(
    given: EfficientForward | EfficientBackward, rng_state: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor, Tensor], Call]:
    """Return query, key and value, and the other arguments of a call, as the contract has them."""
    query, key, value = given.query, given.key, given.value
    causal = given.custom_mask_type in (TOP_LEFT, BOTTOM_RIGHT)
    if given.cu_seqlens_q is not None:
        max_q, max_k = int(given.max_seqlen_q or 0), int(given.max_seqlen_k or 0)
        call = Call(
            calls.scale_of(query, given.scale), max_q, max_k,
            calls.packed_bounds((-1, -1), causal, max_q, max_k), given.cu_seqlens_q, given.cu_seqlens_k,
            dropout=given.dropout_p, rng_state=rng_state, deterministic=calls.wants_deterministic(),
            batch_invariant=calls.wants_batch_invariant(),
        )  # fmt: skip
        return (query[0], key[0], value[0]), routing.with_lasting_offsets(call)
    top_left = given.custom_mask_type == TOP_LEFT
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    dense = SdpaCpuForward(query, key, value, given.dropout_p, top_left, None, given.scale)
    call = routing.call_of(dense, given.bias, rng_state)
    if causal and not top_left:
        call = call._replace(window=calls.bounds((-1, -1), True, call.max_q, call.max_k))
    return calls.to_bshd(query, key, value, call), call


def _with_bias(choice: ScopedChoice | None, drawn: float = 0.0) -> ScopedChoice:
    """Return the choice of a call that also gives the gradient of the bias; `drawn`: a backward's dropout."""
    preference = FOR_BIAS if choice is None or choice.preference is None else choice.preference
    if drawn > 0.0 and preference.names != ALONE[:1]:
        raise UnsupportedInputError(
            f"{ALONE[1]}, but the mask of dropout_p {drawn} was drawn by {', '.join(preference.names)}: "
            f"use_backend({EFFICIENT.name!r})"
        )
    return make_choice(replace(preference, alone=ALONE))


def _to_op(lse: Tensor, call: Call) -> Tensor:
    """Return the contract's LSE as the op has it; a row without a key is +inf, as those behind the last."""
    lse = torch.where(lse == -torch.inf, torch.inf, lse.float())
    if call.cu_seqlens_q is None:
        return F.pad(lse, (0, -lse.shape[-1] % LSE_STEP), value=torch.inf)
    starts, ends = call.cu_seqlens_q[:-1, None], call.cu_seqlens_q[1:, None]
    places = starts + torch.arange(_rounded(call.max_q), device=lse.device)
    if not lse.shape[1]:  # no token, but room for some
        return lse.new_full((places.shape[0], lse.shape[0], places.shape[1]), torch.inf)
    rows = lse[:, places.clamp(max=lse.shape[1] - 1)].transpose(0, 1)
    return rows.masked_fill((places >= ends)[:, None], torch.inf).contiguous()


def _no_lse(lse: Tensor, call: Call) -> Tensor:
    batch = lse.shape[0] if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1
    return lse.new_empty((batch, lse.shape[0 if call.varlen else 1], 0))


def _from_op(lse: Tensor, query: Tensor, call: Call) -> Tensor:
    """Return the op's LSE as the contract has it.

    Torch's own kernel has 0 for a row without a key. That stays, as its weights, exp(-inf), are 0 anyway.
    """
    if call.cu_seqlens_q is None:
        lse = lse[..., : call.max_q]
    elif not lse.numel():
        lse = lse.new_zeros(lse.shape[1], len(query))  # no token is of a sequence
    else:
        tokens = torch.arange(query.shape[0], dtype=torch.int32, device=lse.device)
        # Tokens past the last offset take any row: they belong to no sequence.
        sequence = torch.searchsorted(call.cu_seqlens_q[1:], tokens, right=True).clamp(max=lse.shape[0] - 1)
        row = (tokens - call.cu_seqlens_q[sequence]).clamp(max=lse.shape[2] - 1)
        lse = lse[sequence, :, row].t()
    return torch.where(lse == torch.inf, -torch.inf, lse)


def _rounded(length: int) -> int:
    return length + -length % LSE_STEP


def _laid_out(grad: Tensor, model: Tensor) -> Tensor:
    """Return a gradient in the shape of an input, contiguous as torch's kernel gives it."""
    unseen = 0 if grad.dim() == 3 else model.shape[1] - grad.shape[1]
    if unseen:  # keys that a top-left causal mask hides from every query
        grad = F.pad(grad, (0, 0, 0, 0, 0, unseen))
    return grad.contiguous().view(model.shape)


_FORWARD, _BACKWARD = Layout(query=0, token_result=TOKEN), Layout(query=1, token_argument=13)

ROUTES = (
    Route(OP + "_forward", ("CUDA",), EfficientForward, _forward, EFFICIENT, _FORWARD),
    Route(OP + "_backward", ("CUDA",), EfficientBackward, _backward, EFFICIENT, _BACKWARD, "philox_offset"),
)

"""`return_attn_probs` with dropout: the weights, and which of them were dropped.

The contract's kernels return no weights. Which weights a kernel drops depends on the random state and on
places alone, not on scores or values. So the same call is made beforehand with scores of 0, where all weights
of a row are equal, and with columns of the identity matrix as values. Column j of the output is then the
weight of key j, and 0 if it was dropped. Each such call shows as many keys as a value has dims. Torch's
generator is reset before each call, so that the call itself draws the same mask, and the call has to run on
the same backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from attnreg.core.contract.backend import Call
from attnreg.core.dispatch import scope
from attnreg.core.dispatch.calls import plan_for, wants_gradient
from attnreg.core.dispatch.dropout import generator_of
from attnreg.core.dispatch.scope import ScopedChoice
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.modes import autocast, is_plain
from attnreg.core.varlen import autograd, spread
from attnreg.core.varlen.plans import check_tensors, run
from attnreg.errors import UnsupportedInputError
from attnreg.flash_attn.attention import Lengths, Options
from attnreg.tools.measure import reference


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, lengths: Lengths) -> tuple[Tensor, ...]:
    """Return output, LSE and the weights, (B, H, S_q, S_k) in the dtype of `q`, which carry no gradient.

    A weight is `exp(score - the row's highest score)`, negative if it was dropped, and 0 if the query doesn't
    see the key. For a packed call S_q and S_k are the longest lengths.

    Args:
        q: (B, S_q, H, D), or packed (T_q, H, D), in half precision or float32.
        k: (B, S_k, H_k, D), or packed (T_k, H_k, D).
        v: (B, S_k, H_k, D_v), or packed (T_k, H_k, D_v).
        options: the options of flash-attn's functions.
        lengths: offsets, None for a dense call, and longest sequences.

    Raises:
        InvalidInputError: the arguments contradict each other.
        UnsupportedInputError: no backend can run the call, or it is captured, traced or transformed.
    """
    spread.check_is_off("return_attn_probs=False")
    if lengths[0] is not None:
        names = "cu_seq_q", "cu_seq_k", "alibi_slopes"
        others = dict(zip(names, (*lengths[:2], options.alibi_slopes), strict=True))
        check_tensors(query=q, key=k, value=v, **others)
    check_tensors(alibi_slopes=options.alibi_slopes)
    return (_uncompiled if torch.compiler.is_compiling() else _attend)(q, k, v, options, lengths)


def _attend(q: Tensor, k: Tensor, v: Tensor, options: Options, lengths: Lengths) -> tuple[Tensor, ...]:
    q, k, v = autocast(q, k, v)
    if not is_plain(q, k, v, *lengths[:2], options.alibi_slopes):
        raise UnsupportedInputError(
            "dropout_p must be 0 in dispatch modes, in function transforms and for tensor subclasses, "
            f"got {options.dropout_p}"
        )
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedInputError(
            "return_attn_probs must be False with dropout while a CUDA graph is captured: torch's generator "
            "can't be put back there"
        )
    call, choice = options.call(q, lengths), scope.current()
    needs_backward = wants_gradient(q, k, v)
    plan_for("forward", q, k, v, call, choice, needs_backward=needs_backward)  # checks the arguments
    kept, choice = _kept(q, k, v, call, choice, needs_backward)
    out, lse = autograd.attend(q, k, v, call, choice)
    lse = lse.float().contiguous()  # outside of `no_grad`, because the LSE has a gradient
    with torch.no_grad():
        return out, lse, _weights(q, k, call, kept)


# Torch's lazy form of `torch.compiler.disable`, which would import all of Dynamo at once.
_uncompiled = _disable_dynamo(_attend)


def _kept(
    q: Tensor, k: Tensor, v: Tensor, call: Call, choice: ScopedChoice | None, needs_backward: bool
) -> tuple[Tensor, ScopedChoice | None]:
    """Return which weights the next such call keeps, bool (B, S_q, H, S_k) or (T_q, H, S_k), and its backend.

    The backend, as a scoped choice, is the backend that has drawn this mask. Weights of keys that a query
    doesn't see count as not kept.
    """
    slopes = call.alibi_slopes
    equal = call._replace(alibi_slopes=None if slopes is None else torch.zeros_like(slopes))
    places, width = _places(k, call), v.shape[-1]
    generator, parts = generator_of(q), []
    before = generator.get_state()
    for first in range(0, max(call.max_k, 1), max(width, 1)):
        columns = torch.arange(first, first + width, device=v.device)
        values = (places[:, None] == columns).to(v.dtype)[:, None].expand(v.shape).contiguous()
        generator.set_state(before)
        inputs = torch.zeros_like(q), torch.zeros_like(k), values
        ran = run("forward", inputs, equal, choice, needs_backward)
        choice = ran.choice
        parts.append(ran.results[0] != 0)
    generator.set_state(before)
    return torch.cat(parts, -1)[..., : call.max_k], choice


def _places(k: Tensor, call: Call) -> Tensor:
    """Return each token's place in its sequence, int64 (S_k,) or (T_k,)."""
    offsets = call.cu_seqlens_k
    tokens = torch.arange(k.shape[-3], device=k.device)
    if offsets is None:
        return tokens
    sequence = torch.searchsorted(offsets[1:].contiguous(), tokens, right=True).clamp(max=len(offsets) - 2)
    return tokens - offsets[sequence]


def _weights(q: Tensor, k: Tensor, call: Call, kept: Tensor) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    sequences = [*_sequences(q, k, kept, call)]
    padded = q.new_zeros(len(sequences), q.shape[-2], call.max_q, call.max_k)
    # In float16 a smaller number would be rounded to -0, which isn't below 0.
    least = max(torch.finfo(q.dtype).tiny * torch.finfo(q.dtype).eps, torch.finfo(torch.float32).tiny)
    for at, (query, key, is_kept) in enumerate(sequences):
        len_q, len_k, slopes = len(query), len(key), call.alibi_slopes
        if not (len_q and len_k):
            continue
        eye = torch.eye(len_k, dtype=wide, device=q.device)[None, :, None].expand(1, -1, key.shape[1], -1)
        query, key = query[None].to(wide), key[None].to(wide)
        arguments = eye, call.scale, call.window
        is_visible = reference.attend(torch.zeros_like(query), torch.zeros_like(key), *arguments)[0] != 0
        slopes = slopes[at] if slopes is not None and slopes.dim() == 2 else slopes
        weights = reference.attend(query, key, *arguments, alibi_slopes=slopes, softcap=call.softcap)[0]
        weights = weights / weights.amax(-1, keepdim=True).clamp(min=torch.finfo(wide).tiny)
        dropped = is_visible & ~is_kept[None, ..., :len_k]
        weights = torch.where(dropped, -weights.clamp(min=least), weights)
        padded[at, :, :len_q, :len_k] = weights[0].transpose(0, 1).to(q.dtype)
    return padded


def _sequences(q: Tensor, k: Tensor, kept: Tensor, call: Call) -> Iterator[tuple[Tensor, ...]]:
    """Yield queries, keys and kept weights of each sequence; reading the offsets waits for the device."""
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        yield from zip(q, k, kept, strict=True)
        return
    of_q, of_k = (pairwise(offsets.tolist()) for offsets in (call.cu_seqlens_q, call.cu_seqlens_k))
    for (start_q, stop_q), (start_k, stop_k) in zip(of_q, of_k, strict=True):
        yield q[start_q:stop_q], k[start_k:stop_k], kept[start_q:stop_q]


leave_module_uncompiled(__name__)

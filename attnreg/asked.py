"""What a call asks, read from its arguments without running it: for `explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.attention import SDPBackend

from attnreg.aten import cpu, sdpa
from attnreg.aten.heads_first import contract
from attnreg.aten.schemas import SdpaCpuForward
from attnreg.backend import Call
from attnreg.dispatch import bounds, scale_of, wants_deterministic, wants_gradient
from attnreg.errors import InvalidInputError
from attnreg.planning import Native, spec_of
from attnreg.validation import check, check_scale

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnreg.spec import AttentionSpec

__all__ = ["Asked", "dense", "packed"]

# The kernels that torch's selector sends a call to and that attnreg routes.
ROUTED = {
    ("cpu", SDPBackend.FLASH_ATTENTION): cpu.CPU,
    ("cuda", SDPBackend.FLASH_ATTENTION): sdpa.FLASH,
    ("cuda", SDPBackend.CUDNN_ATTENTION): sdpa.CUDNN,
}


class Asked(NamedTuple):
    """A call as selection sees it.

    Attributes:
        spec: what it asks.
        native: the backend whose kernel torch itself was about to run.
        notes: what else decides whether attnreg sees the call at all.
    """

    spec: AttentionSpec
    native: Native | None = None
    notes: tuple[str, ...] = ()


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Asked:
    """Return what `F.scaled_dot_product_attention` asks with these arguments, (B, H, S, D).

    Raises:
        InvalidInputError: they contradict each other.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise InvalidInputError(
                f"{name}: got shape {tuple(tensor.shape)}, expected (batch, heads, length, head_dim), "
                "or (tokens, heads, head_dim) with cu_seq_q"
            )
    asked = SdpaCpuForward(query, key, value, dropout_p, is_causal, attn_mask, scale)
    inputs = contract(asked, attn_mask, True, None)
    check(*inputs)
    check_scale(inputs.call.scale)
    arguments = (query, key, value, attn_mask, dropout_p, is_causal)
    choice = SDPBackend(torch._fused_sdp_choice(*arguments, scale=scale, enable_gqa=enable_gqa))
    native = ROUTED.get((query.device.type, choice))
    note = (
        f"F.scaled_dot_product_attention sends this call to torch's {choice.name.lower()} kernel before "
        "attnreg sees it"
    )
    return Asked(spec_of(*inputs, wants_gradient(query, key, value)), native, () if native else (note,))


def packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: tuple[Tensor, Tensor | None],
    longest: tuple[int, int],
    is_causal: bool,
    window_size: Sequence[int] | None,
    scale: float | None,
    attn_mask: Tensor | None,
    dropout_p: float,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    num_splits: int | None,
) -> Asked:
    """Return what `varlen_attn` asks with these arguments, (T, H, D) with offsets.

    Raises:
        InvalidInputError: they contradict each other.
    """
    left, right = (-1, -1) if window_size is None else window_size
    call = Call(
        scale_of(query, scale), *longest, bounds((left, right), is_causal, *longest), *offsets,
        seqused_k, block_table, attn_mask, None, dropout_p, None, num_splits, wants_deterministic(),
    )  # fmt: skip
    check(query, key, value, call)
    check_scale(call.scale)
    return Asked(spec_of(query, key, value, call, wants_gradient(query, key, value)))

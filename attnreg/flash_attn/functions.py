"""flash-attn's functions without a cache; `attention` has their common part."""

from __future__ import annotations

from torch import Tensor

from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.errors import InvalidInputError, UnsupportedInputError
from attnreg.flash_attn import dropped_weights
from attnreg.flash_attn.attention import (
    OF_DENSE,
    OF_PACKED,
    Options,
    attend_dense,
    attend_packed,
    check_dense,
    naming,
    returned,
)

# The output; with `return_attn_probs` also the LSE and, with dropout, the weights, else an empty tensor.
Returned = Tensor | tuple[Tensor, ...]
Window = tuple[int, int]

_OF_KV = {"k": "kv", "v": "kv"}
_OF_QKV = {"q": "qkv", "k": "qkv", "v": "qkv"}
_OF_OFFSETS = {f"{name}_{side}": name for name in ("cu_seqlens", "max_seqlen") for side in "qk"}


@naming(OF_DENSE)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """Compute attention over a dense batch.

    Args:
        q: (B, S_q, H, D), in half precision or float32; which dtypes run depends on the backends.
        k, v: (B, S_k, H_k, D) and (B, S_k, H_k, D_v), of the same dtype. H is a multiple of H_k.
        dropout_p: the probability of dropping an attention weight. The seed is drawn from torch's generator
            of the device.
        softmax_scale: factor on the scores; by default 1 / sqrt(D).
        causal, window_size: the mask, aligned bottom-right. Query i sees key j if
            `i + S_k - S_q - left <= j <= i + S_k - S_q + right`; -1 is no bound, `causal` is right = 0.
        softcap: bound on the scores, `softcap * tanh(score / softcap)`; 0 for none.
        alibi_slopes: float32 (H,) or (B, H); `-slope * |i + S_k - S_q - j|` is added to each score.
        deterministic: whether the gradients have to be bitwise repeatable.
        return_attn_probs: whether to return the LSE, too, and with dropout the weights. Weights are for
            debugging: they need a further forward for each D_v keys, and memory that grows with S_q * S_k.

    Returns:
        The output (B, S_q, H, D_v), in the dtype of `q`. With `return_attn_probs` also the LSE, float32
        (B, H, S_q), natural log, and the weights (B, H, S_q, S_k). A weight is
        `exp(score - the row's highest score)`, negative if it was dropped.
        The weights carry no gradient. Without dropout they are an empty tensor. A row that sees no key has an
        output of 0 and an LSE of -inf.

    Raises:
        InvalidInputError: the arguments contradict each other. The message has what was got and expected.
        UnsupportedInputError: no backend can run the call. The message has every reason.
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    if dropout_p and return_attn_probs:
        check_dense(q, k, v)
        return dropped_weights.attend(q, k, v, options, (None, None, q.shape[1], k.shape[1]))
    results = attend_dense(q, k, v, options, with_lse=bool(return_attn_probs))
    return returned(results, return_attn_probs)  # type: ignore[no-any-return]


@naming(_OF_QKV)
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """Compute `flash_attn_func` of query, key and value in one tensor, `qkv` (B, S, 3, H, D)."""
    q, k, v = _parts("qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@naming(_OF_KV)
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """Compute `flash_attn_func` of key and value in one tensor, `kv` (B, S_k, 2, H_k, D)."""
    k, v = _parts("kv", kv, 2, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@naming(OF_PACKED)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Returned:
    """Compute attention over packed sequences, or over pages of a cache.

    Args:
        q: (T_q, H, D).
        k, v: (T_k, H_k, D) and (T_k, H_k, D_v); with a `block_table` (pages, page size, H_k, D).
        cu_seqlens_q, cu_seqlens_k: offsets of the sequences, int32 (B + 1,).
        max_seqlen_q, max_seqlen_k: the longest sequence, in tokens.
        block_table: int32 (B, pages of a sequence).

    Further arguments, dtypes and errors are as for `flash_attn_func`.

    Returns:
        The output (T_q, H, D_v). With `return_attn_probs` also the LSE, float32 (H, T_q), and the weights
        (B, H, max_seqlen_q, max_seqlen_k), 0 beyond a sequence. Without dropout the weights are an empty
        tensor.
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if dropout_p and return_attn_probs:
        if block_table is not None:
            raise UnsupportedInputError(
                f"return_attn_probs: got True with dropout_p {dropout_p} and a block_table, expected no "
                "block_table, or dropout_p 0 for the LSE alone"
            )
        return dropped_weights.attend(q, k, v, options, lengths)
    with_lse = bool(return_attn_probs)
    results = attend_packed(q, k, v, lengths, options, block_table=block_table, with_lse=with_lse)
    return returned(results, return_attn_probs)  # type: ignore[no-any-return]


@naming(_OF_QKV | _OF_OFFSETS)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """Compute `flash_attn_varlen_func` of query, key and value in one tensor, `qkv` (T, 3, H, D)."""
    q, k, v = _parts("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@naming(_OF_KV)
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """Compute `flash_attn_varlen_func` of key and value in one tensor, `kv` (T_k, 2, H_k, D)."""
    k, v = _parts("kv", kv, 2, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _parts(name: str, packed: Tensor, count: int, dims: int) -> tuple[Tensor, ...]:
    if not isinstance(packed, Tensor) or packed.dim() != dims or packed.shape[-3] != count:
        got = f"shape {tuple(packed.shape)}" if isinstance(packed, Tensor) else type(packed).__name__
        layout = "(batch, length, " if dims == 5 else "(tokens, "
        raise InvalidInputError(f"{name}: got {got}, expected {layout}{count}, heads, head_dim)")
    return packed.unbind(-3)


leave_module_uncompiled(__name__)

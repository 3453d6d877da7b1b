"""flash-attn's functions without a cache, as calls of `varlen_attn`.

A dense batch is a packed one of equal lengths. Its offsets are cached, so that the layers of a model share
them, and with them all that backends derive from offsets.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from attnreg.dispatch.calls import wants_deterministic
from attnreg.errors import InvalidInputError
from attnreg.torchlib.layout import needs_graph_memory, stream_of
from attnreg.varlen.front import AuxRequest, varlen_attn

# The output; with `return_attn_probs` also the LSE and, as no weights are returned, an empty tensor.
Returned = Tensor | tuple[Tensor, Tensor, Tensor]
Window = tuple[int, int]


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
        q: (B, S_q, H, D).
        k, v: (B, S_k, H_k, D) and (B, S_k, H_k, D_v). H is a multiple of H_k.
        dropout_p: has to be 0.
        softmax_scale: factor on the scores; 1 / sqrt(D) unless given.
        causal, window_size: the mask, aligned bottom-right. Query i sees key j if
            `i + S_k - S_q - left <= j <= i + S_k - S_q + right`; -1 is no bound, `causal` is right = 0.
        softcap: bound on the scores, `softcap * tanh(score / softcap)`; 0 for none.
        alibi_slopes: has to be None.
        deterministic: True needs torch's deterministic mode, which kernels obey.
        return_attn_probs: whether the LSE is returned, too.

    Returns:
        The output (B, S_q, H, D_v); with `return_attn_probs` also the LSE, float32 (B, H, S_q), natural log,
        and an empty tensor in the place of the dropped weights.

    Raises:
        InvalidInputError: the arguments contradict each other; says what was got and expected.
        UnsupportedInputError: no backend can run the call; with every reason.
    """
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    found = attend_dense(q, k, v, return_attn_probs, **options)
    return _returned(found, return_attn_probs)


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
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_func(q, k, v, *rest, return_attn_probs)


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
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_func(q, k, v, *rest, return_attn_probs)


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

    Other arguments and errors are those of `flash_attn_func`.

    Returns:
        The output (T_q, H, D_v); with `return_attn_probs` also the LSE, float32 (H, T_q), and an empty
        tensor.
    """
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    aux = AuxRequest(lse=return_attn_probs)
    found = varlen_attn(
        q, k, v, *lengths, return_aux=aux, enable_gqa=True, block_table=block_table, **options
    )
    return _returned(found, return_attn_probs)


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
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


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
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def attend_dense(q: Tensor, k: Tensor, v: Tensor, with_lse: bool = False, **options: Any) -> Any:
    """Return the output (B, S_q, H, D_v) of a dense batch, `with_lse` with the LSE (B, H, S_q).

    `options` are those of `varlen_attn`.
    """
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidInputError(
                f"{name}: got {got}, expected 4 dimensions (batch, length, heads, head_dim)"
            )
    if not len(q) == len(k) == len(v):
        sizes = f"{len(q)} for q, {len(k)} for k and {len(v)} for v"
        raise InvalidInputError(f"batch: got {sizes}, expected equal ones")
    (batch, length_q), length_k = q.shape[:2], k.shape[1]
    offsets_q = regular_offsets(batch, length_q, q)
    offsets_k = offsets_q if length_k == length_q else regular_offsets(batch, length_k, k)
    aux = AuxRequest(lse=with_lse)
    found: Any = varlen_attn(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), offsets_q, offsets_k, length_q, length_k,
        return_aux=aux, enable_gqa=True, **options,
    )  # fmt: skip
    out, lse = found if with_lse else (found, None)
    out = out.unflatten(0, (batch, length_q))
    if lse is None:
        return out
    return out, lse.unflatten(1, (batch, length_q)).transpose(0, 1).contiguous()


def regular_offsets(batch: int, length: int, like: Tensor) -> Tensor:
    """Return the offsets, int32 (B + 1,) on the device of `like`, of a batch of equally long sequences.

    They aren't cached where a CUDA graph is captured: its replays would read memory that the cache may give
    up. Another stream doesn't wait for those that were made on this one.
    """
    if torch.compiler.is_compiling() or needs_graph_memory(like):
        return torch.arange(batch + 1, dtype=torch.int32, device=like.device) * length
    return _cached_offsets(batch, length, like.device, stream_of(like) if like.is_cuda else 0)


@functools.lru_cache(maxsize=64)
def _cached_offsets(batch: int, length: int, device: torch.device, stream: int) -> Tensor:
    with torch.inference_mode(False):  # autograd can't save an inference tensor for a backward
        return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


def options_of(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
) -> dict[str, Any]:
    """Return the options of `varlen_attn` that mean the same."""
    if dropout_p:
        raise InvalidInputError(f"dropout_p: got {dropout_p}, expected 0: attnreg.flash_attn has no dropout")
    if alibi_slopes is not None:
        raise InvalidInputError("alibi_slopes: got a tensor, expected None: attnreg.flash_attn has no ALiBi")
    if deterministic and not wants_deterministic():
        raise InvalidInputError(
            "deterministic: got True, expected False, or torch.use_deterministic_algorithms(True) before the "
            "call, which every backend obeys"
        )
    options = {"scale": softmax_scale, "is_causal": causal, "window_size": window_size}
    return options | ({"softcap": softcap} if softcap else {})


def _parts(name: str, packed: Tensor, count: int, dims: int) -> tuple[Tensor, ...]:
    if not isinstance(packed, Tensor) or packed.dim() != dims or packed.shape[-3] != count:
        got = tuple(packed.shape) if isinstance(packed, Tensor) else type(packed).__name__
        layout = "(batch, length, " if dims == 5 else "(tokens, "
        raise InvalidInputError(f"{name}: got {got}, expected {layout}{count}, heads, head_dim)")
    return packed.unbind(-3)


def _returned(found: Any, return_attn_probs: bool) -> Returned:
    if not return_attn_probs:
        return found  # type: ignore[no-any-return]
    out, lse = found
    return out, lse, out.new_empty(0)

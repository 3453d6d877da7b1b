"""attnreg for transformers: `attn_implementation="attnreg"`, or behind the name `flash_attention_2`.

    import attnreg.integrations.transformers
    attnreg.integrations.transformers.install()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attnreg")

docs/transformers.md lists the supported models and calls.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.core import aten
from attnreg.core.policy import current as policy
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.modes import is_for_others
from attnreg.core.varlen import spread
from attnreg.errors import InvalidInputError, RegistrationError, UnsupportedInputError, short_repr
from attnreg.flash_attn.attention import naming
from attnreg.integrations import behind_flash
from attnreg.integrations.flattening import warn_of_mixed_documents
from attnreg.integrations.for_others import attend_for_others, mask_of
from attnreg.integrations.masked import joined, masked
from attnreg.integrations.packing import (
    LayerOptions,
    Packing,
    Window,
    attend,
    by_positions,
    check_all_tokens_count,
    of_equal_lengths,
)
from attnreg.integrations.shared_mask import SharedMask, shared_mask

__all__ = ["install"]

NAME = "attnreg"
# Before 5.4 mask functions have no `q_offset`; up to 5.7 results of ModernBERT, padded or packed, are wrong.
OLDEST = (5, 8)
# transformers' names of arguments, by their names in `varlen_attn`, for errors.
OF_LAYER = {
    "cu_seq_q": "cu_seq_lens_q", "cu_seq_k": "cu_seq_lens_k", "max_q": "max_length_q",
    "max_k": "max_length_k", "dropout_p": "dropout", "scale": "scaling", "sinks": "s_aux",
}  # fmt: skip


def install(*, behind: str | None = None) -> None:
    """Register "attnreg" as a name for `attn_implementation`; a second call changes nothing.

    Calls without padding go through PyTorch's own function, which attnreg serves from now on, as after
    `attnreg.install()`.

    Args:
        behind: "flash_attention_2" to run attnreg under that name, too. transformers then finds the package
            flash-attn installed, also on a CPU.

    Raises:
        InvalidInputError: `behind` is another name.
        RegistrationError: the installed transformers is too old, or an error of `attnreg.install()`.
    """
    if behind not in (None, behind_flash.NAME):
        raise InvalidInputError(f"behind: got {behind!r}, expected {behind_flash.NAME!r} or None")
    check_version()
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    aten.ensure()
    policy.activate(True)
    warn_of_mixed_documents()
    for name in (NAME,) if behind is None else (NAME, behind):
        AttentionMaskInterface.register(name, shared_mask)
        AttentionInterface.register(name, attention)
    if behind is not None:
        behind_flash.stand_behind_flash()


def check_version() -> None:
    """Raise `RegistrationError` if the installed transformers is too old."""
    import transformers

    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise RegistrationError(f"transformers: got {transformers.__version__}, expected {oldest} or later")


@naming(OF_LAYER)
def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: SharedMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention; transformers calls this, with arguments of these names.

    Args:
        module: the layer.
        query: (B, H, S_q, D), floating point.
        key: (B, H_k, S_k, D), of the same dtype.
        value: (B, H_k, S_k, D_v), of the same dtype.
        attention_mask: a shared mask, or a tensor (B, 1, S_q, S_k): bool, true where a key is seen, or
            numbers that are added to the scores. None for no mask besides causality and a window.
        dropout, scaling, softcap: as `dropout_p`, `scale` and `softcap` of `varlen_attn`.
        sliding_window: the tokens of a window, the query's own included; None for all.
        is_causal: by default the layer's `is_causal`.
        s_aux: (H,), the sinks.
        cache: the cache of continuous batching.
        others: further arguments of the layer, such as `position_ids`, `position_bias` and `cu_seq_lens_q`.
            `block_indices` number blocks of `module.indexer.block_size` keys.

    Returns:
        The output (B, S_q, H, D_v), and None, because there are no weights.

    Raises:
        InvalidInputError: the arguments contradict each other, or the name of one is misspelt.
        UnsupportedInputError: the layer passes an argument that isn't supported, or no backend can run the
            call.
    """
    _refuse(others)
    _refuse_offsets_of_text(module, others)
    if cache is not None:
        # Continuous batching: the cache writes the new keys, returns all, and puts their offsets into
        # `others`.
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=others
        )
    elif isinstance(attention_mask, SharedMask):
        attention_mask = _fitted(attention_mask, (query.shape[0], query.shape[2], key.shape[2]))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if sliding_window is not None and sliding_window < 0:
        raise InvalidInputError(f"sliding_window: got {sliding_window}, expected a number of tokens or None")
    left = -1 if sliding_window is None else sliding_window - 1
    window, options = (left, 0 if causal else left), LayerOptions(dropout, scaling, softcap or 0.0, s_aux)
    if any(others.get(name) is not None for name in _BY_SCORE):
        attention_mask = _with_scores(module, query, key, attention_mask, window, others)
    # Continuous batching pads its single row, so that CUDA graphs serve several lengths.
    is_padded = cache is not None
    out = _attend(query, key, value, attention_mask, window, options, others, is_padded)
    return out.contiguous(), None  # as from transformers' own functions: some layers view it


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: SharedMask | Tensor | None,
    window: Window,
    options: LayerOptions,
    others: dict[str, Any],
    is_padded: bool,
) -> Tensor:
    if query.is_meta or is_for_others():  # numbers can't be read back
        return attend_for_others(query, key, value, mask, window, options, others)
    sizes = query.shape[0], query.shape[2], key.shape[2]
    passed = _passed_packing(sizes, mask, others) if _has_offsets(others) else None
    # In a block of context parallelism offsets are of the whole batch, of which a rank has a part.
    if passed is not None and not is_padded and not spread.is_on:
        check_all_tokens_count(passed, sizes)
    if passed is None:
        spread.check_is_off("cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k of the whole batch")
    if isinstance(mask, Tensor):
        return masked(query, key, value, mask, options)
    positions = others.get("position_ids")
    if mask is not None:
        window = _window(mask, window, sizes[2])
        sizes = mask.sizes
    if passed is not None:
        if mask is not None and mask.is_only_dense:
            return masked(query, key, value, _dense_with_documents(mask, passed), options)
        packing: Packing | None = passed
    elif mask is None:
        # If a layer isn't causal, its positions may be a decoder's and its keys an encoder's.
        packing = by_positions(positions, sizes) if window[1] == 0 else None
    else:
        if mask.says_more_than_its_packing():
            # Calls with a structure were packed before a graph's capture, so no dense call has run.
            dense = mask.dense_apart(positions)
            return masked(query, key, value, dense, options, has_run=mask.structure is None)
        packing = mask.packing(positions)
        # Padding inside a sequence counts for a window, but packing would remove it.
        may_have_holes = packing is not None and packing.has_holes is not False and window[0] != -1
        if may_have_holes:
            return masked(query, key, value, mask.dense_apart(positions), options, has_run=False)
        key, value = key[:, :, : sizes[2]], value[:, :, : sizes[2]]
    if packing is None:
        return _dense(query, key, value, window, options)
    return _packed(query, key, value, packing.on(query.device), window, options)


def _dense(query: Tensor, key: Tensor, value: Tensor, window: Window, options: LayerOptions) -> Tensor:
    """Compute a call without padding, by PyTorch's own function if that has all of the options."""
    batch, length_q, length_k = query.shape[0], query.shape[2], key.shape[2]
    left = -1 if _holds(window[0] >= length_k - 1) else window[0]
    is_square = window[1] == -1 or length_q in (1, length_k)
    is_causal = window[1] == 0
    if length_q == 1:  # a branch, because in compiled code a comparison of lengths is no bool
        is_causal = False
    if left == -1 and is_square and not options.softcap and options.sinks is None:
        out = F.scaled_dot_product_attention(
            query, key, value, dropout_p=options.dropout, is_causal=is_causal,
            scale=options.scale, enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        return out.transpose(1, 2)
    packing = of_equal_lengths(batch, length_q, length_k, query.device)
    return _packed(query, key, value, packing, window, options)


def _holds(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on lengths holds; in a graph that runs on other lengths, whether it holds for all.

    torch.compile guards what it compares, so there it may hold for the lengths at hand only. Guards are an
    error in torch.export with a dynamic length, and nobody checks those of make_fx.
    """
    is_guarded = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    if is_guarded or not (torch.compiler.is_exporting() or isinstance(condition, torch.SymBool)):
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def _packed(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, window: Window, options: LayerOptions
) -> Tensor:
    """Compute a call as packed sequences; the output of padding is 0."""
    batch, heads, length, _ = query.shape
    rows_q, rows_k = packing.rows_q, packing.rows_k
    out = attend(_rows(query, rows_q), _rows(key, rows_k), _rows(value, rows_k), packing, window, options)
    if rows_q is not None:
        padded = out.new_zeros(batch * length, heads, out.shape[-1])
        out = padded.index_copy(0, rows_q, out)
    return out.view(batch, length, heads, -1)


def _rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """Return the rows of (B, H, S, D) that count, as (T, H, D)."""
    flat = tensor.transpose(1, 2).flatten(0, 1)
    return flat if rows is None else flat.index_select(0, rows)


def _passed_packing(
    sizes: tuple[int, int, int], mask: SharedMask | Tensor | None, others: dict[str, Any]
) -> Packing:
    """Return the packing that a collator, or a model, has passed."""
    batch, length_q, length_k = sizes
    if mask is not None and (isinstance(mask, Tensor) or mask.padding is not None):
        raise InvalidInputError(
            "attention_mask: got one with cu_seq_lens_q, expected one of them: a packed batch has no padding"
        )
    if mask is not None and mask.is_overlaid:
        raise InvalidInputError(
            "cu_seq_lens_q: got offsets for a model whose own mask says more than documents and a window; "
            "expected position_ids that start anew, alone, with use_cache=False"
        )
    cu_seq_q = _offsets("cu_seq_lens_q", others["cu_seq_lens_q"])
    passed_k = others.get("cu_seq_lens_k")
    cu_seq_k = cu_seq_q if passed_k is None else _offsets("cu_seq_lens_k", passed_k)
    max_q, max_k = others.get("max_length_q"), others.get("max_length_k")
    # A tensor isn't read back, which every layer would do: `max_q` may be more than the longest.
    return Packing(
        None, None, cu_seq_q, cu_seq_k,
        max_q if isinstance(max_q, int) else batch * length_q,
        max_k if isinstance(max_k, int) else batch * length_k,
    )  # fmt: skip


def _has_offsets(others: dict[str, Any]) -> bool:
    """Whether the program has passed offsets; raises an error if they are of the keys alone."""
    has_q, has_k = (others.get(f"cu_seq_lens_{side}") is not None for side in "qk")
    if has_k and not has_q:
        raise InvalidInputError("cu_seq_lens_q: got None with cu_seq_lens_k, expected offsets of both")
    return has_q


def _offsets(name: str, passed: object) -> Tensor:
    """Return offsets (sequences + 1,) as int32; raises an error if they are no integers of that rank."""
    if not isinstance(passed, Tensor):
        raise InvalidInputError(f"{name}: got {short_repr(passed)}, expected a tensor")
    if passed.ndim != 1 or passed.is_floating_point() or passed.dtype == torch.bool:
        raise InvalidInputError(
            f"{name}: got shape {tuple(passed.shape)}, {passed.dtype}, expected integers, (sequences + 1,)"
        )
    return passed.to(torch.int32)


def _dense_with_documents(mask: SharedMask, packing: Packing) -> Tensor:
    """Return a dense mask that expresses more than a packing can; it has to separate documents itself."""
    if len(packing.cu_seq_q) > mask.sizes[0] + 1 and not mask.has_documents:
        raise InvalidInputError(
            "cu_seq_lens_q: got several documents in a row, and a mask that has chunks, or more, and doesn't "
            "separate documents; expected use_cache=False and position_ids that start anew, by which "
            "transformers sees them"
        )
    return mask.dense()


def _fitted(mask: SharedMask, sizes: tuple[int, int, int]) -> SharedMask | Tensor:
    """Return a mask for tensors of a layer's sizes. It is dense if a single row or query stands for all.

    Raises an error if it fits in no such way.
    """
    of_mask = (*mask.sizes[:2], mask.length_k)
    if of_mask == sizes:
        return mask
    if of_mask[2] == sizes[2] and all(own in (1, wanted) for own, wanted in zip(of_mask, sizes, strict=True)):
        return mask.dense_apart(None)
    raise InvalidInputError(
        f"attention_mask: got one for (batch, queries, keys) {of_mask}, expected one for {sizes}, the sizes "
        "of the layer's query and key; 'eager' may serve a model that extends its mask"
    )


def _with_scores(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    mask: SharedMask | Tensor | None,
    window: Window,
    others: dict[str, Any],
) -> Tensor | None:
    """Return a layer's mask, (1 or B, 1 or H, S_q, S_k), with what `_BY_SCORE` names in it.

    A position bias, (1 or B, H, S_q, S_k), is added to the scores. Indices, (B, S_q, n), are the keys that
    each query sees. Block indices, (B, H_i, S_q, n), are the blocks of keys that it sees; those below 0 are
    unused.
    """
    bias, indices, blocks = (others.get(name) for name in _BY_SCORE)
    if others.get("cu_seq_lens_q") is not None:
        passed = next(name for name in _BY_SCORE if others.get(name) is not None)
        raise InvalidInputError(
            f"cu_seq_lens_q: got offsets for a layer that passes {passed}, expected none, because that is "
            "for rows of one document each; pad the documents"
        )
    positions, length = others.get("position_ids"), key.shape[2]
    if isinstance(mask, SharedMask):
        _window(mask, window, mask.sizes[2])
        mask = mask.dense_of_layer(positions)
    elif mask is None and window != (-1, -1):
        # If a layer isn't causal, its positions may be a decoder's and its keys an encoder's.
        mask = mask_of(query, key, window, positions if window[1] == 0 else None)
    if indices is not None:
        visible = indices.new_zeros(*indices.shape[:2], length, dtype=torch.bool)
        visible = visible.scatter(-1, indices.long(), True)[:, None]
        mask = visible if mask is None else joined(mask, visible)
    if blocks is not None:
        visible = _of_blocks(blocks, _block_size(module), query.shape[1], length)
        mask = visible if mask is None else joined(mask[..., :length], visible)
    if bias is None or mask is None:
        return mask if bias is None else bias[..., :length]
    return joined(bias[..., :length], mask[..., :length])


def _block_size(module: torch.nn.Module) -> int:
    """Return the keys of a block of a layer that passes `block_indices`; raises an error if it has none."""
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(size, int):
        raise UnsupportedInputError(
            f"attnreg: got block_indices from a layer whose indexer.block_size is {size!r}, expected the "
            "number of keys of a block; attn_implementation='sdpa' or 'eager' takes it"
        )
    return size


def _of_blocks(blocks: Tensor, size: int, heads: int, length: int) -> Tensor:
    """Return which keys are in a query's blocks, bool (B, H, S_q, S_k).

    Args:
        blocks: integers (B, H_i, S_q, n), numbers of blocks; those below 0 are unused.
        size: the keys of a block.
        heads: H, a multiple of H_i.
        length: S_k, the number of keys.
    """
    count = (length + size - 1) // size
    chosen = torch.where(blocks < 0, count, blocks).long()  # one more block, for what is unused
    is_chosen = blocks.new_zeros(*blocks.shape[:3], count + 1, dtype=torch.bool).scatter(-1, chosen, True)
    of_keys = is_chosen[..., :count].repeat_interleave(size, -1)[..., :length]
    return of_keys.repeat_interleave(heads // blocks.shape[1], 1)


def _window(mask: SharedMask, of_layer: Window, length_k: int) -> Window:
    """Return the window of a mask, checked against a layer's own.

    The mask alone decides about causality, because layers of some decoders claim not to be causal.
    """
    if mask.structure is None:
        return of_layer
    left, right = mask.structure.window
    if left == -1 and 0 <= of_layer[0] < length_k - 1:
        raise InvalidInputError(
            f"sliding_window: got {of_layer[0] + 1} from a layer whose mask has no window, expected the same "
            "of both (with 'eager' the mask decides, with 'flash_attention_2' the layer)"
        )
    return left, right


# What a layer adds to its scores, or chooses by them.
_BY_SCORE = ("position_bias", "indices", "block_indices")
_REFUSED = {
    "output_attentions": "attn_implementation='eager'",
    "sinks": "attn_implementation='eager'",
    "block_table": "attn_implementation='flash_attention_2' without attnreg",
}
# Offsets under other names, such as flash-attn's, which nothing reads: documents would see each other.
_MISSPELT = {
    f"{name}_{of}": f"cu_seq_lens_{of}" for name in ("cu_seqlens", "cu_seq_len", "cu_seqlen") for of in "qk"
}


def _refuse(others: dict[str, Any]) -> None:
    """Raise an error if a layer passes an argument that changes the result and isn't supported here."""
    for name, got in others.items():
        if name in _MISSPELT and got is not None:
            raise InvalidInputError(f"{name}: got offsets under this name, expected {_MISSPELT[name]}")
    for name, instead in _REFUSED.items():
        got = others.get(name)
        if got is not None and got is not False:
            raise UnsupportedInputError(f"attnreg: got {name}, expected no such argument; {instead} takes it")


def _refuse_offsets_of_text(module: torch.nn.Module, others: dict[str, Any]) -> None:
    """Raise an error if a vision tower gets offsets: they belong to the text around its images.

    Under the name "attnreg" towers compute each image by itself, and have no offsets of their own.
    """
    config: Any = getattr(module, "config", None)
    is_of_images = getattr(config, "base_config_key", None) == "vision_config"
    if is_of_images and config._attn_implementation == NAME and others.get("cu_seq_lens_q") is not None:
        raise InvalidInputError(
            "cu_seq_lens_q: got offsets of a text in its vision tower, expected them only in the language "
            "model: transformers 5.20 and later keep them there; before, pass position_ids that start anew"
        )


leave_module_uncompiled(__name__)

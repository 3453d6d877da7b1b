"""The mask that all layers of a model share: a structure instead of transformers' (B, 1, S, S) tensor."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.errors import UnsupportedInputError
from attnreg.integrations.mask_functions import (
    MaskFunctionStructure,
    documents_of,
    is_bidirectional,
    restarted,
    structure_of,
)
from attnreg.integrations.masked import apart
from attnreg.integrations.packing import (
    Packing,
    UnpackedBatch,
    is_readable,
    pack,
    starts_of,
    starts_of_positions,
)

_unpacked = threading.local()


_ADDING = (torch.Tensor.add, torch.Tensor.sub, torch.Tensor.mul, torch.add, torch.sub, torch.mul)


def _is_used_as_by_sdpa() -> bool:
    """Whether the code that uses a mask is of a model that supports `sdpa`, so that it takes a bool tensor.

    Other models take numbers to add. transformers tells mask functions nothing of the model, and other
    libraries look at masks, too. So callers' frames are inspected.
    """
    if torch.compiler.is_compiling():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "torch.utils._pytree"):
        frame = frame.f_back
    package = "" if frame is None else frame.f_globals.get("__name__", "").partition(".")[0]
    while frame is not None:
        of_frame = type(frame.f_locals.get("self"))
        supports = getattr(of_frame, "_supports_sdpa", None)
        if supports is not None:
            return bool(supports) and of_frame.__module__.partition(".")[0] == package
        frame = frame.f_back
    return False


class _NoAttributeError(UnsupportedInputError, AttributeError):
    """Also an `AttributeError`, because Accelerate and others check by `hasattr` for tensors."""


def _said(use: str) -> str:
    return (
        f"attnreg: got a model that computes with its attention mask itself ({use}), expected one whose "
        "layers pass it on to transformers' attention functions; attn_implementation='eager', or 'sdpa' "
        "where the model has it, runs it"
    )


class SharedMask:
    """A mask made by `shared_mask`; each layer gets it as `attention_mask`.

    Attributes:
        sizes: the number of rows of the batch, and of queries and keys of each row, without unused keys.
        length_k: the number of keys with unused keys at the end, as a static cache has.
        structure: window and documents. None if the mask is more than these and padding; then only `dense`
            expresses it.
        padding: whether each key counts, bool (B, S_k), and whether each query does (None: all). None if all
            count.
        is_overlaid: whether the mask lets queries see more than causality, a window and documents allow.
        is_only_dense: whether the mask is, or may be, more than offsets of documents and the layer's own
            window.
        has_documents: whether transformers has put documents into the mask.
        positions: the positions that the model has passed to a causal mask, integers (1 or B, S), or None.
            Not all models pass them to their layers as well.
    """

    # transformers passes an `attention_mask` of four dimensions on to the mask function. `generate` makes the
    # masks of a static cache before the model's forward, which would convert a mask of two dimensions again.
    ndim = 4

    def __init__(
        self,
        sizes: tuple[int, int, int],
        length_k: int,
        structure: MaskFunctionStructure | None,
        padding: tuple[Tensor, Tensor | None] | None,
        is_overlaid: bool,
        make_dense: Callable[..., Any],
        is_only_dense: bool = False,
        has_documents: bool = False,
        positions: Tensor | None = None,
    ) -> None:
        self.sizes, self.length_k, self.structure, self.padding = sizes, length_k, structure, padding
        self.is_overlaid, self._make_dense = is_overlaid, make_dense
        self.is_only_dense, self.has_documents = is_only_dense, has_documents
        self.positions = positions
        self._dense: Tensor | None = None
        self._dense_apart: Tensor | None = None
        self._packing: Packing | None = None
        self._is_packed = False
        self._siblings: list[weakref.ref[SharedMask]] = []
        if not torch.compiler.is_compiling():
            # The masks that a model makes before its first layer runs are read back together.
            before: list[weakref.ref[SharedMask]] = getattr(_unpacked, "masks", [])
            whole = [mask for mask in (sibling() for sibling in before) if mask is not None]
            if len(whole) == len(before) and not any(mask._is_packed for mask in whole):
                self._siblings = before
            self._siblings.append(weakref.ref(self))
            _unpacked.masks = self._siblings

    @property
    def shape(self) -> torch.Size:
        """The shape of transformers' tensor, (B, 1, S_q, S_k); some models read the number of keys."""
        batch, length_q, _ = self.sizes
        return torch.Size((batch, 1, length_q, self.length_k))

    def _others(self) -> list[SharedMask]:
        if not is_readable():
            return []  # for instance in compiled layers, if the masks were made before
        masks = (sibling() for sibling in self._siblings)
        others = (mask for mask in masks if mask is not None and mask is not self)
        return [mask for mask in others if mask.structure is not None]

    def __getattr__(self, name: str) -> Any:
        if _is_used_as_by_sdpa() and not name.startswith("_"):
            return getattr(self.dense_apart(None), name)
        raise _NoAttributeError(_said(f"mask.{name}"))

    def __copy__(self) -> SharedMask:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> SharedMask:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a SharedMask can't be pickled: it has functions of this process; pickle `mask.dense()`, or the "
            "attention_mask that the model got"
        )

    def __invert__(self) -> Tensor:
        return ~self._tensor("an operator")

    def __rsub__(self, _: Any) -> NoReturn:
        # Nothing is subtracted from a bool tensor, which `sdpa` makes.
        raise UnsupportedInputError(_said("an operator"))

    def _tensor(self, use: str) -> Tensor:
        """Return `dense_apart` for a model that gets a bool tensor with `sdpa`; refuse it to others."""
        if _is_used_as_by_sdpa():
            return self.dense_apart(None)
        raise UnsupportedInputError(_said(use))

    def __getitem__(self, item: Any) -> SharedMask | Tensor:
        """Return the mask of some queries, which Gemma 4 needs for the last queries, or another part."""
        is_of_queries = isinstance(item, tuple) and len(item) == 4
        if not is_of_queries or (*item[:2], item[3]) != (slice(None),) * 3:
            return self._tensor("an operator")[item]
        return self if item[2] in (slice(None), slice(0, None)) else self.dense_apart(None)[item]

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch calls this if a function has a mask as argument, also for `scores + mask`.
        use = torch.overrides.resolve_name(function) or str(function)
        if function in _ADDING:  # a bool tensor hides nothing by this
            raise UnsupportedInputError(_said(use))
        args, kwargs = torch.utils._pytree.tree_map_only(
            SharedMask, lambda mask: mask._tensor(use), (args, kwargs or {})
        )
        return function(*args, **kwargs)

    def contiguous(self) -> SharedMask:
        """Return the mask itself; `generate` calls this."""
        return self

    def packing(self, positions: Tensor | None) -> Packing | None:
        """Return the packing of the batch; None without padding if each row is one document.

        The first layer's call does the work for all layers. `positions` are a layer's, integers (1 or B, S):
        where they start anew, a document begins.
        """
        if not self._is_packed:
            masks = [self, *self._others()]
            for mask, packing in zip(masks, pack([mask._batch(positions) for mask in masks]), strict=True):
                mask._packing, mask._is_packed = packing, True
        return self._packing

    def _batch(self, positions: Tensor | None) -> UnpackedBatch:
        return UnpackedBatch(self.sizes, self.padding, self._starts(positions) if is_readable() else None)

    def _starts(self, positions: Tensor | None) -> Tensor | None:
        if self.padding is None and self.structure is not None and self.structure.documents is not None:
            return starts_of(self.structure.documents)
        if self.structure is not None and self.structure.window[1] != 0:
            return None  # a layer of cross attention gets the decoder's positions
        if self.positions is not None or self.structure is None:
            positions = self.positions  # a mask without a structure may be of cross attention
        if self.padding is None:
            return starts_of_positions(positions, self.sizes)
        keys, queries = self.padding
        return starts_of_positions(positions, self.sizes, keys) if queries is keys else None

    def says_more_than_its_packing(self) -> bool:
        """Whether only `dense` expresses the mask, at least in this call.

        In layers that are compiled one by one, or captured, the places of documents can't be read back.
        """
        if self.structure is None:
            return True
        return self.structure.documents is not None and not self._is_packed and not is_readable()

    def dense_apart(self, positions: Tensor | None) -> Tensor:
        """Return `dense`, bool (B, 1, S_q, S_k), with keys of other documents hidden.

        A layer's `positions`, integers (1 or B, S) or None, tell the documents.
        """
        if self._dense_apart is None:
            starts = self._starts(positions)
            dense = self.dense() if starts is None or self.has_documents else self._make_dense(starts)
            self._dense_apart = apart(dense, starts)
        return self._dense_apart

    def dense_of_layer(self, positions: Tensor | None) -> Tensor | None:
        """Return `dense_apart`, bool (1 or B, 1, S_q, S_k), or None where every query sees every key.

        A layer's `positions`, integers (1 or B, S) or None, tell the documents.
        """
        if self.says_more_than_its_packing() or self.packing(positions) is not None:
            return self.dense_apart(positions)
        is_of_all = self.structure is not None and self.structure.window == (-1, -1)
        return None if is_of_all else self.dense_apart(positions)[:1]

    def dense(self) -> Tensor:
        """Return transformers' own mask for SDPA, bool (B, 1, S_q, S_k), with all keys of a cache."""
        if self._dense is None:
            self._dense = self._make_dense()
        return self._dense


def shared_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | SharedMask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    config: Any = None,
    **others: Any,
) -> Any:
    """Return a `SharedMask`, or a tensor for a static cache.

    transformers calls this once for each kind of mask of a model's forward, with arguments of these names.
    `attention_mask` is bool or integers (B, S_k), 1 or True for each token that counts.
    """
    # Not `from transformers import masking_utils`: Dynamo of torch 2.11 can't trace its lazy module.
    from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

    if isinstance(attention_mask, SharedMask):
        return attention_mask
    is_chunked = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
    make_dense = functools.partial(
        _make_dense, causal_mask_function if mask_function is None else mask_function, is_chunked,
        functools.partial(
            sdpa_mask, batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask=attention_mask,
            local_size=local_size, allow_is_causal_skip=False, allow_is_bidirectional_skip=False,
            use_vmap=use_vmap, **others,
        ),
    )  # fmt: skip
    is_plain = allow_is_causal_skip or allow_is_bidirectional_skip
    # For a static cache: its length is on the device, or the mask is made outside of the compiled code, which
    # would be compiled anew for another object.
    if isinstance(q_offset, Tensor) or (q_length == 1 and not (is_plain or is_bidirectional(mask_function))):
        return make_dense()
    structure = None
    if is_plain and not (use_vmap or is_chunked):
        # `local_size` of a causal window includes the token itself; of a bidirectional window it doesn't.
        left = -1 if local_size is None else local_size - (1 if allow_is_causal_skip else 0)
        structure = MaskFunctionStructure((left, 0 if allow_is_causal_skip else left))
    elif not (use_vmap or torch.compiler.is_compiling()):
        structure = structure_of(mask_function)
    sizes, padding = (batch_size, q_length, kv_length), None
    positions = None if torch.compiler.is_compiling() else _positions_of_model(sizes, q_offset, kv_offset)
    if structure is not None:
        sizes, structure = _aligned(sizes, q_offset, kv_offset, structure)
    if attention_mask is not None and (structure is not None or positions is not None):
        keys = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        padding = _padding(keys, sizes, q_offset, kv_offset, structure)
    is_overlaid = use_vmap or getattr(mask_function, "__name__", "") == "or_mask"
    # Compiled code can't read mask functions, but chunks are recognised by their size.
    is_only_dense = structure is None and (is_chunked or not torch.compiler.is_compiling())
    has_documents = not is_plain if torch.compiler.is_compiling() else documents_of(mask_function) is not None
    return SharedMask(
        sizes, kv_length, structure, padding, is_overlaid, make_dense, is_only_dense, has_documents,
        positions,
    )  # fmt: skip


def _make_dense(
    mask_function: Callable[..., Any],
    is_chunked: bool,
    make: Callable[..., Any],
    starts: Tensor | None = None,
) -> Any:
    """Return a dense mask; of packed documents, by their `starts`, each has chunks of its own."""
    if is_chunked and starts is not None:
        mask_function = restarted(mask_function, starts)
    return make(mask_function=mask_function)


def _positions_of_model(sizes: tuple[int, int, int], q_offset: int, kv_offset: int) -> Tensor | None:
    """Return the positions that a model has passed to a causal mask of all its tokens, or None.

    transformers doesn't pass them on to its mask functions. So the frame that makes the mask is inspected.
    """
    if sizes[1] != sizes[2] or q_offset != 0 or kv_offset != 0:
        return None
    positions = sys._getframe(2).f_locals.get("position_ids")
    return positions if isinstance(positions, Tensor) else None


def _aligned(
    sizes: tuple[int, int, int], q_offset: int, kv_offset: int, structure: MaskFunctionStructure
) -> tuple[tuple[int, int, int], MaskFunctionStructure | None]:
    """Return the sizes without unused keys; no structure if the keys don't end with the queries."""
    batch, length_q, length_k = sizes
    if structure.window == (-1, -1):
        return sizes, structure
    end = q_offset + length_q - kv_offset
    if end > length_k or (end < length_k and structure.window[1] != 0):
        return sizes, None
    return (batch, length_q, end), structure


def _padding(
    keys: Tensor,
    sizes: tuple[int, int, int],
    q_offset: int,
    kv_offset: int,
    structure: MaskFunctionStructure | None,
) -> tuple[Tensor, Tensor | None]:
    """Return whether each key counts, (B, S_k), and each query (None: all), by the mask of all tokens so far.

    Without causality all queries count. The outputs of padded queries are as valid as others, and models read
    them: by convolutions, resamplers, or a pooler of the first or last token. And queries and keys may be
    different tokens. Only a window depends on each query's place among the keys.
    """
    window = (-1, 0) if structure is None else structure.window
    counted, is_causal = keys[:, kv_offset : kv_offset + sizes[2]], window[1] == 0
    if sizes[1] == 1 or not (is_causal or (window[0] != -1 and _is_of_text())):
        return counted, None
    if sizes[1] == sizes[2] and q_offset == kv_offset:
        return counted, counted
    return counted, keys[:, q_offset : q_offset + sizes[1]] if is_causal else None


def _is_of_text() -> bool:
    """Whether a mask with a window to both sides is for a text that attends to itself.

    transformers doesn't pass this to its mask functions. So callers' frames are inspected: the function that
    makes the mask has `encoder_hidden_states`, and the `forward` that calls it has an argument `input_ids`.
    If not, the mask is dense.
    """
    if torch.compiler.is_compiling():
        return False
    frame: FrameType | None = sys._getframe(3)
    if frame is None or frame.f_locals.get("encoder_hidden_states", frame) is not None:
        return False
    while frame is not None and frame.f_code.co_name != "forward":
        frame = frame.f_back
    return frame is not None and "input_ids" in frame.f_code.co_varnames


leave_module_uncompiled(__name__)

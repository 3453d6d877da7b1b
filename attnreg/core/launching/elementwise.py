"""Functions of single scores, `score_mod` and `mask_mod`, evaluated for whole tensors of scores.

They have the arguments that they have in torch's `flex_attention`: tensors (). `torch.vmap` calls them once
for all scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnreg.core.contract.backend import Call
from attnreg.core.contract.options import OPTIONS
from attnreg.core.torchlib.modes import outside_of_ops
from attnreg.errors import InvalidInputError, UnsupportedInputError

NO_GRADIENT = (
    "got a function that reads a tensor which needs a gradient, expected none, as it gets none: detach() it"
)
_ROWS = {row.name: row for row in OPTIONS if row.values == "function"}


class ReadAtTensors(TorchFunctionMode):
    """Let a function read a tensor at places that are tensors (): `bias[head, query - key]`.

    Torch reads such places on the host, which it can't while it traces or vectorizes.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch's; an index by tensors and whole numbers as the op of such an index."""
        if func is Tensor.__getitem__:
            x, index = args
            places = index if isinstance(index, tuple) else (index,)
            if any(isinstance(place, Tensor) for place in places) and all(map(_is_place, places)):
                like = next(place for place in places if isinstance(place, Tensor))
                tensors = [x if isinstance(x, Tensor) else torch.full_like(like, x) for x in places]
                return torch.ops.aten.index.Tensor(x, tensors)
        return func(*args, **(kwargs or {}))


def _is_place(place: object) -> bool:
    if isinstance(place, Tensor):
        return place.dim() == 0 and not (place.is_floating_point() or place.dtype == torch.bool)
    return isinstance(place, int) and not isinstance(place, bool)


def modified(
    function: Callable[..., Tensor], scores: Tensor, batch: Tensor, query: Tensor, key: Tensor
) -> Tensor:
    """Return `score_mod` of each score of some sequences, a new tensor in the scores' dtype.

    Args:
        function: as in `Call`.
        scores: (b, H, rows, columns), float32 or float64.
        batch: int32 (b,), the number of each sequence.
        query, key: int32 (b, rows) and (b, columns), their places in their sequence.
    """
    results = _over_all(function, (scores,), batch, scores.shape[1], query, key)
    # A function may return a tensor that it has captured, as one number for all scores.
    return results.to(scores.dtype, copy=True, memory_format=torch.contiguous_format)


def visible(function: Callable[..., Tensor], heads: int, batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return `mask_mod` of each score, bool (b, H, rows, columns).

    The numbers of sequences are int32 (b,), places int32 (b, rows) and (b, columns), as in `modified`.
    """
    return _over_all(function, (), batch, heads, query, key)


def _over_all(
    function: Callable[..., Tensor],
    scores: tuple[Tensor, ...],
    batch: Tensor,
    heads: int,
    query: Tensor,
    key: Tensor,
) -> Tensor:
    score = (0,) * len(scores)
    # From the innermost dimension to the outermost: the places along a dimension are the others' in common.
    for in_dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, 0, 0)):
        function = torch.vmap(function, (*score, *in_dims))
    head = torch.arange(heads, dtype=torch.int32, device=key.device)
    try:
        with outside_of_ops(), ReadAtTensors():
            return function(*scores, batch, head, query, key)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        name, reason = "score_mod" if scores else "mask_mod", str(error).partition("\n")[0]
        raise UnsupportedInputError(f"{name} can't be called for all scores at once: {reason}") from error


def check_functions(call: Call, query: Tensor) -> None:
    """Check the functions of a packed call by what they return for the first score of all.

    The query is (T_q, H, D), floating point. So each call finds captured tensors that need a gradient.

    Raises:
        InvalidInputError: a function returns something else than a score or a boolean, or what it returns
            needs a gradient.
    """
    has_sequences = call.cu_seqlens_q is None or len(call.cu_seqlens_q) > 1
    for name, row in _ROWS.items():
        function = getattr(call, name)
        if function is None or not (query.numel() and has_sequences):
            continue
        place = torch.zeros((), dtype=torch.int32, device=query.device)
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        score = [torch.zeros((), dtype=dtype, device=query.device)] if name == "score_mod" else []
        with ReadAtTensors():
            result = function(*score, *(place,) * 4)
        what = row.argument or row.name
        expected = "a floating-point tensor ()" if score else "a boolean tensor ()"
        fits = isinstance(result, Tensor) and result.dim() == 0
        if not fits or (not result.is_floating_point() if score else result.dtype != torch.bool):
            got = (
                f"shape {tuple(result.shape)}, {result.dtype}" if isinstance(result, Tensor) else repr(result)
            )
            raise InvalidInputError(f"{what}: got a function that returns {got}, expected {expected}")
        if result.requires_grad:
            raise InvalidInputError(f"{what}: {NO_GRADIENT}")

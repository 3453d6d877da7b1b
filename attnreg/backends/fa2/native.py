"""FA2's first provider: the kernels inside torch, below `aten::_flash_attention_forward` and its backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnreg.backends.fa2 import rows
from attnreg.contract.launchers import OpLauncher
from attnreg.contract.offsets import of_a_graph
from attnreg.torchlib import captured
from attnreg.torchlib.layout import aligned, readable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnreg.contract.backend import Call
    from attnreg.contract.spec import Direction

__all__ = ["PAGES", "SPLITS", "Native"]

OP = "_flash_attention_{}"

_taken = {argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments}

# Both came with torch 2.12.
PAGES, SPLITS = "block_table" in _taken, "num_splits" in _taken

OPTIONAL = ("seqused_k", "block_table", "num_splits")


class Native:
    """Torch's two kernels, captured before a router covers them."""

    def __init__(self) -> None:
        self._forward = captured.kernel(OP.format("forward"), "CUDA")
        self._backward = captured.kernel(OP.format("backward"), "CUDA")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return output and LSE as the kernel gives them."""
        tensors = map(readable, (query, key, value))
        out, lse, rng_state, *_ = self._forward(
            *tensors, *_lengths(query, key, call), False, **_options(query, call, OPTIONAL)
        )
        if call.rng_state is not None:
            # The kernel draws its mask from torch's generator and says with which seed and offset.
            call.rng_state.view(torch.int64).copy_(rng_state.view(torch.int64))
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients as the kernel gives them."""
        tensors = map(readable, (grad_out, query, key, value, out))
        rng_state, unused = _unread(query)
        grads = self._backward(
            *tensors, lse.contiguous(), *_lengths(query, key, call),
            rng_state if call.rng_state is None else call.rng_state, unused, **_options(query, call),
        )  # fmt: skip
        return grads[0], grads[1], grads[2]

    def specialize(
        self, direction: Direction, tensors: tuple[Tensor, ...], call: Call
    ) -> Callable[..., tuple[Tensor, ...]] | None:
        """Return what does such a call again: the kernel on the tensors as they are. See `Kernels`."""
        query, key = tensors[:2] if direction == "forward" else tensors[1:3]
        if call.dropout or any(given is not None for given in (*call[6:10], call.num_splits)):
            return None
        if rows.nothing_to_do(query, key, call) or not (call.varlen or rows.covered(query, key, call)):
            return None
        if not all(map(aligned, tensors[:5])) or not (direction == "forward" or tensors[5].is_contiguous()):
            return None
        absent = () if call.varlen else (None, None)
        rest, options = (*absent, *_lengths(query, key, call)[2:]), _options(query, call)
        if direction == "forward":
            return OpLauncher(OP.format("forward"), "CUDA", (*rest, False), options, 2)
        if query.device in _kept or not of_a_graph(query):
            return OpLauncher(OP.format("backward"), "CUDA", (*rest, *_unread(query)), options, 3)

        def backward(*given: Tensor) -> tuple[Tensor, ...]:
            # What nobody reads would lie in the graph's memory, if it were kept.
            grads = self._backward(*given, *rest, *_unread(given[1]), **options)
            return grads[0], grads[1], grads[2]

        return backward


_kept: dict[torch.device, tuple[Tensor, Tensor]] = {}


def _unread(query: Tensor) -> tuple[Tensor, Tensor]:
    """Return what stands for the random state of a call that drew nothing, and for the unused argument."""
    found = _kept.get(query.device)
    if found is None:
        state = torch.empty(2, dtype=torch.uint64, device=query.device)
        found = state, state[0]
        if not of_a_graph(query):
            _kept[query.device] = found
    return found


def _lengths(query: Tensor, key: Tensor, call: Call) -> tuple[Any, ...]:
    """Return the offsets, the longest lengths, dropout and is_causal, as both ops order them."""
    offsets = call.cu_seqlens_q, rows.key_offsets(call) if call.varlen else None
    return *offsets, *rows.longest(query, key, call), call.dropout, rows.mask(call)[0]


def _options(query: Tensor, call: Call, further: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what isn't as it would be anyway: taking a keyword apart costs torch a microsecond."""
    options: dict[str, Any] = {name: given for name in further if (given := getattr(call, name)) is not None}
    causal, left, right = rows.mask(call)
    if left >= 0 or (right >= 0 and not causal):
        options["window_size_left"], options["window_size_right"] = left, right
    if call.scale != query.shape[-1] ** -0.5:
        options["scale"] = call.scale
    return options

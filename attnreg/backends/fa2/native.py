"""FA2's kernels inside torch, and the conversion of a call's mask and lengths for both providers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnreg.core.contract.backend import Call
from attnreg.core.contract.spec import Direction
from attnreg.core.launching.launchers import MAX_K, MAX_Q, Launcher, OpLauncher
from attnreg.core.launching.offsets import every_row_sees_a_key, is_empty
from attnreg.core.launching.regular import fills
from attnreg.core.torchlib import captured
from attnreg.core.torchlib.layout import aligned, needs_graph_memory, readable

OP = "_flash_attention_{}"

_arguments = {argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments}

# Torch 2.12 added both arguments.
PAGES, SPLITS = "block_table" in _arguments, "num_splits" in _arguments

OPTIONAL = ("seqused_k", "block_table", "num_splits")


def kernel_mask(call: Call) -> tuple[bool, int, int]:
    """Return is_causal and the two bounds of the window, as the kernels need them."""
    left, right = call.window
    if call.alibi_slopes is not None and (left, right) == (-1, 0):
        # A causal kernel omits the part of the bias that all keys of a row share from the scores, and so from
        # the LSE. A left bound that reaches every key selects the window kernel, which adds the whole bias.
        return False, call.max_k - 1, 0
    return call.causal, left, right


def kernel_lengths(query: Tensor, key: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Return offsets, (B + 1,) int32 or None, and longest lengths, each of queries and of keys."""
    if call.cu_seqlens_q is None:
        return None, None, call.max_q, call.max_k
    cu_seqlens_k, max_q = call.cu_seqlens_k, call.max_q
    if cu_seqlens_k is None and call.seqused_k is not None:
        # Pages have no offsets: make offsets from the lengths.
        cu_seqlens_k = torch.nn.functional.pad(call.seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
    # With a longest query length of 1 and fewer key heads the kernel folds query heads into rows and splits
    # the keys. On an H100 that takes 80 us in place of 390, for 16 sequences of up to 8,192 keys and 4 query
    # heads for each key head. Each sequence must have a query then. A longest length of 2 prevents the
    # folding.
    folds = _may_fold(query, key, max_q)
    if folds and not (len(query) == len(call.cu_seqlens_q) - 1 and _every_row_counts(query, key, call)):
        max_q = 2
    return call.cu_seqlens_q, cu_seqlens_k, max_q, call.max_k


def _may_fold(query: Tensor, key: Tensor, max_q: int) -> bool:
    """Whether the kernel folds query heads into rows, with this longest length."""
    return max_q == 1 and query.shape[-2] != key.shape[-2]


def _marks_rows(direction: Direction, call: Call) -> bool:
    """Whether a backward's kernel needs rows without a key marked; with shared offsets a row sees itself."""
    return direction == "backward" and call.cu_seqlens_q is not call.cu_seqlens_k


def _every_row_counts(query: Tensor, key: Tensor, call: Call) -> bool:
    """Whether each row of a packed query is known to belong to a sequence."""
    return fills(call.cu_seqlens_q, len(query)) or every_row_sees_a_key(query, key, call)


def keeps_contract(query: Tensor, key: Tensor, call: Call) -> bool:
    """Whether the host knows that each query sees a key and no row is unused: nothing needs conversion.

    Query and key are (B, S, H, D) or packed (T, H, D), in any dtype. Facts that the device reports aren't
    used: clearing rows takes the host less time than looking these up.
    """
    if call.cu_seqlens_q is None:
        return every_row_sees_a_key(query, key, call)
    is_one = call.cu_seqlens_k is call.cu_seqlens_q and len(query) == len(key) and call.seqused_k is None
    return is_one and fills(call.cu_seqlens_q, len(query))


class TorchKernels:
    """Torch's two kernels of `aten::_flash_attention_*`, captured before a router covers them."""

    def __init__(self) -> None:
        self._forward = captured.kernel(OP.format("forward"), "CUDA")
        self._backward = captured.kernel(OP.format("backward"), "CUDA")

    def forward(self, tensors: tuple[Tensor, ...], call: Call) -> tuple[Tensor, Tensor]:
        """Return output and LSE of (query, key, value) in the kernel's conventions.

        Tensors are (B, S, H, D) or (T, H, D), float16 or bfloat16; the LSE is (B, H, S) or (H, T), float32.
        """
        query, key, _ = tensors
        out, lse, rng_state, *_ = self._forward(
            *map(readable, tensors), *_lengths(query, key, call), False, **_options(query, call, OPTIONAL)
        )
        if call.rng_state is not None:
            # The kernel draws seed and offset of its mask from torch's generator, and returns both.
            call.rng_state.view(torch.int64).copy_(rng_state.view(torch.int64))
        return out, lse

    def backward(self, tensors: tuple[Tensor, ...], call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value, in their shapes and dtype.

        `tensors` are (grad_out, query, key, value, out, lse), in the layouts of `forward`.
        """
        *inputs, lse = tensors
        query, key = tensors[1:3]
        rng_state, unused = _no_rng_state(query)
        # The kernel ignores the strides of an LSE.
        grads = self._backward(
            *map(readable, inputs), lse.contiguous(), *_lengths(query, key, call),
            rng_state if call.rng_state is None else call.rng_state, unused, **_options(query, call),
        )  # fmt: skip
        return grads[0], grads[1], grads[2]

    def specialize(self, direction: Direction, tensors: tuple[Tensor, ...], call: Call) -> Launcher | None:
        """Return a launcher where a call needs only the kernel; see `Kernels.specialize`.

        `tensors` are query, key and value, of a backward (grad_out, query, key, value, out, lse), in the
        layouts and dtypes of `forward`: (B, S, H, D) or (T, H, D).
        """
        query, key = tensors[:2] if direction == "forward" else tensors[1:3]
        further = call.block_table, call.attn_bias, call.alibi_slopes, call.num_splits
        if call.dropout or any(option is not None for option in further):
            return None
        is_forward, takes = direction == "forward", ("seqused_k",) if call.seqused_k is not None else ()
        if takes and not (is_forward and call.varlen):
            return None
        if is_empty(query, key, call):
            return None
        if not (call.varlen or keeps_contract(query, key, call)):
            return None
        folds = call.varlen and _may_fold(query, key, call.max_q)
        # These calls need more than the kernel, depending on the facts known about the offsets.
        if call.varlen and not is_forward and (folds or _marks_rows(direction, call)):
            return None
        if not all(map(aligned, tensors[:5])) or not (is_forward or tensors[5].is_contiguous()):
            return None
        no_cu_seqlens = () if call.varlen else (None, None)
        rest = *no_cu_seqlens, MAX_Q, MAX_K, call.dropout, kernel_mask(call)[0]
        options = _options(query, call)
        if is_forward:
            arguments = OP.format("forward"), "CUDA", (*rest, False), options, 2, call.window
            return OpLauncher(*arguments, takes=takes, folds=folds, zeroes_rows=True)
        if query.device not in _rng_states and needs_graph_memory(query):
            return None  # the launcher would keep tensors in the memory of a CUDA graph
        return OpLauncher(
            OP.format("backward"), "CUDA", (*rest, *_no_rng_state(query)), options, 3, call.window
        )


_rng_states: dict[torch.device, tuple[Tensor, Tensor]] = {}


def _no_rng_state(query: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two random-state arguments of a backward without dropout, which reads neither."""
    pair = _rng_states.get(query.device)
    if pair is None:
        state = torch.empty(2, dtype=torch.uint64, device=query.device)
        pair = state, state[0]
        if not needs_graph_memory(query):
            _rng_states[query.device] = pair
    return pair


def _lengths(query: Tensor, key: Tensor, call: Call) -> tuple[Any, ...]:
    """Return the offsets, the longest lengths, dropout and is_causal, in the order of both ops."""
    return *kernel_lengths(query, key, call), call.dropout, kernel_mask(call)[0]


def _options(query: Tensor, call: Call, further: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return only keywords that differ from their defaults, because each costs torch a microsecond."""
    options: dict[str, Any] = {name: value for name in further if (value := getattr(call, name)) is not None}
    causal, left, right = kernel_mask(call)
    if left >= 0 or (right >= 0 and not causal):
        options["window_size_left"], options["window_size_right"] = left, right
    if call.scale != query.shape[-1] ** -0.5:
        options["scale"] = call.scale
    return options

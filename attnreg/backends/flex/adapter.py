"""The contract's calls as calls of flex programs.

Flex takes (B, H, S, D); a packed batch is one sequence to it, (1, H, T, D), whose mask is the offsets'.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.backends.flex.graphs import TABLE
from attnreg.backends.flex.kinds import ProgramKind, layout_of
from attnreg.backends.flex.programs import program_for
from attnreg.core.contract.backend import Call
from attnreg.core.contract.spec import Direction
from attnreg.core.launching import visible
from attnreg.core.launching.lifted import Lifted, lift
from attnreg.core.launching.offsets import derived_from, empty_results, facts, find_unused
from attnreg.core.launching.visible import Visible
from attnreg.core.torchlib.layout import needs_graph_memory, stream_of

# The name of the length of each dimension, by tensor. Other sizes are fixed.
FUNCTIONS = "score_mod", "mask_mod"
OF_QUERIES, OF_KEYS = ("B", "", "S_q", ""), ("B", "", "S_k", "")
DIMENSIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("query", "out", "grad_out"), OF_QUERIES),
    **dict.fromkeys(("key", "value"), OF_KEYS),
    **dict.fromkeys(("lse", "grad_lse"), ("B", "", "S_q")),
    **dict.fromkeys(("low", "high"), ("B_mask", "", "S_q")),
    "place": ("B_mask", "S_q"),
    "sequence": ("S_q",),
    "places": ("", "S_q"),
    "bias": ("B", "", "S_q", "S_k"),
    **dict.fromkeys(("kv_num_blocks", "full_kv_num_blocks"), ("B_mask", "", "N_q")),
    **dict.fromkeys(("kv_indices", "full_kv_indices"), ("B_mask", "", "N_q", "N_k")),
    **dict.fromkeys(("q_num_blocks", "full_q_num_blocks"), ("B_mask", "", "N_k")),
    **dict.fromkeys(("q_indices", "full_q_indices"), ("B_mask", "", "N_k", "N_q")),
}


class _Request(NamedTuple):
    """A program's kind, its lengths and its tensors."""

    kind: ProgramKind
    lengths: Mapping[str, int]
    tensors: tuple[Tensor, ...]


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the output, in the query's dtype, and the LSE in float32, (B, H, S_q) or (H, T_q).

    Query and key are (B, S, H, D) or packed (T, H, D), the value has head dim D_v; all are float16, bfloat16
    or float32.

    Raises:
        BackendUnavailableError: torch can't compile the kernel.
        UnsupportedInputError: a function can't be traced.
    """
    if not (query.numel() and key.numel()):
        return empty_results(query, value, call)
    visible_keys = _visible(query, key, call)
    key, value = _without_unused(query, key, value, call)
    tensors = {"query": _bhsd(query), "key": _bhsd(key), "value": _bhsd(value)}
    out, lse = _run("forward", tensors, visible_keys, call)
    return _rows(out, call), lse[0] if call.varlen else lse


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, in their shapes and dtype.

    `grad_out` and `out` are like the forward's output, `lse` like its LSE. Raises as `forward` does.
    """
    if not (query.numel() and key.numel()):
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    visible_keys = _visible(query, key, call)
    key, value = _without_unused(query, key, value, call)
    if _may_be_blind(query, key, call):
        # Their weights are 0, and so is the product with a NaN only where the NaN is gone.
        blind = visible_keys.blind[0] if call.varlen else visible_keys.blind
        query, grad_out = (x.masked_fill(blind[..., None, None], 0) for x in (query, grad_out))
    tensors = {"query": _bhsd(query), "key": _bhsd(key), "value": _bhsd(value)}
    tensors |= {"out": _bhsd(out), "grad_out": _bhsd(grad_out)}
    tensors["lse"] = lse.contiguous()[None] if call.varlen else lse.contiguous()
    if call.grad_lse is not None:
        grad_lse = call.grad_lse.contiguous()[None] if call.varlen else call.grad_lse.contiguous()
        tensors["grad_lse"] = grad_lse.masked_fill(visible_keys.blind[:, None], 0.0)
    grad_q, grad_k, grad_v = _run("backward", tensors, visible_keys, call)
    return _rows(grad_q, call), _rows(grad_k, call), _rows(grad_v, call)


def _run(
    direction: Direction, tensors: dict[str, Tensor], visible_keys: Visible, call: Call
) -> tuple[Tensor, ...]:
    kind, lengths, inputs = _request(direction, tensors, visible_keys, call)
    return tuple(program_for(kind, lengths).run(*inputs))


def _request(direction: Direction, tensors: dict[str, Tensor], visible_keys: Visible, call: Call) -> _Request:
    tensors |= {
        "low": visible_keys.low,
        "high": visible_keys.high,
        **dict(zip(TABLE, visible_keys.table, strict=True)),
    }
    bias, slopes = "none", 0
    if call.attn_bias is not None:
        bias = "mask" if call.attn_bias.dtype == torch.bool else "added"
        tensors["bias"] = _expanded_bias(tensors["query"], tensors["key"], call.attn_bias)
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes.dim()
        tensors |= {
            "place": visible_keys.place,
            "sequence": visible_keys.sequence,
            "slopes": call.alibi_slopes,
        }
    texts = _with_functions(tensors, call)
    names = DIMENSIONS | {"slopes": ("B_slopes", "")[-slopes:]}
    # New sizes of what a function has captured need no new program either.
    names |= {
        name: tuple(f"{name}_{dim}" for dim in range(x.dim()))
        for name, x in tensors.items()
        if name.startswith(FUNCTIONS)
    }
    lengths = {
        length: size
        for name, x in tensors.items()
        for length, size in zip(names[name], x.shape, strict=True)
        if length
    }
    layouts = tuple((name, layout_of(x, names[name])) for name, x in tensors.items())
    block = visible.block_size(lengths["S_q"], lengths["S_k"])
    device = tensors["query"].device
    kind = ProgramKind(
        direction, device, call.scale, call.softcap, bias, slopes, call.varlen, block, layouts, *texts
    )
    return _Request(kind, lengths, tuple(tensors.values()))


def _with_functions(tensors: dict[str, Tensor], call: Call) -> list[str]:
    """Add what the functions of a call read to its tensors, by name; return their texts, "" for none."""
    device, texts = tensors["query"].device, []
    for name in FUNCTIONS:
        function = getattr(call, name)
        lifted = Lifted("", ()) if function is None else lift(name, function, device)
        texts.append(lifted.text)
        tensors |= {f"{name}_{number}": x for number, x in enumerate(lifted.tensors)}
    if any(texts):
        offsets = call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k
        stream, rows = stream_of(tensors["query"]) if device.type == "cuda" else 0, tensors["query"].shape[2]
        make = partial(visible.places_of_packed, rows)
        tensors["places"] = derived_from(offsets, stream, ("flex places", rows), make).table
    return texts


def _visible(query: Tensor, key: Tensor, call: Call) -> Visible:
    """Return which keys each query sees, derived once for all layers that share their offsets."""
    stream = stream_of(query) if query.is_cuda else 0
    rows = query.shape[-3], key.shape[-3]
    masked = call.mask_mod is not None
    masked = masked or (call.attn_bias is not None and call.attn_bias.dtype == torch.bool)
    if call.cu_seqlens_q is not None:
        return visible.derived_of_packed(query, key, call, masked)
    if call.seqused_k is not None:
        make_dense = partial(_of_used, *rows, call.window, masked)
        return derived_from((call.seqused_k,), stream, ("flex", *rows, call.window, masked), make_dense)
    return _of_shape(query.device, stream, *rows, call.window, masked)


def _of_used(rows_q: int, rows_k: int, window: tuple[int, int], masked: bool, used: Tensor) -> Visible:
    return visible.of_dense(rows_q, rows_k, window, masked, used.device, used)


# Dense masks by their shape: a model has a few.
_dense: dict[tuple[object, ...], Visible] = {}
_MOST_DENSE = 16


def _of_shape(
    device: torch.device, stream: int, rows_q: int, rows_k: int, window: tuple[int, int], masked: bool
) -> Visible:
    source = device, stream, rows_q, rows_k, window, masked
    visible_keys = _dense.get(source)
    if visible_keys is None:
        visible_keys = visible.of_dense(rows_q, rows_k, window, masked, device)
        if needs_graph_memory(visible_keys.low):
            return visible_keys
        while len(_dense) >= _MOST_DENSE:
            _dense.pop(next(iter(_dense)), None)
        _dense[source] = visible_keys
    return visible_keys


def _may_be_blind(query: Tensor, key: Tensor, call: Call) -> bool:
    """Whether a query may see no key, as far as the host knows."""
    if call.key_ranges is not None:
        return True
    if call.varlen:
        known = facts(call, query.shape[0], key.shape[0], stream_of(query) if query.is_cuda else 0)
        return not (known.every_row_sees_a_key and call.window in ((-1, -1), (-1, 0)))
    return call.seqused_k is not None or (call.window != (-1, -1) and query.shape[1] > key.shape[1])


def _without_unused(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return key and value with zeros in rows that no sequence counts: their NaN would reach other rows."""
    if call.varlen:
        known = facts(call, query.shape[0], key.shape[0], stream_of(query) if query.is_cuda else 0)
        if known.no_unused_rows:
            return key, value
    unused = find_unused(query, key, call).keys
    if unused is None:
        return key, value
    hidden = unused[..., None, None]
    return key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)


def _bhsd(x: Tensor) -> Tensor:
    """Return (B, S, H, D) or (T, H, D) as (B, H, S, D), copied only where the kernels can't read it."""
    if x.stride(-1) != 1 or any(
        step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)
    ):
        x = x.contiguous()
    return x.transpose(0, 1)[None] if x.dim() == 3 else x.transpose(1, 2)


def _rows(x: Tensor, call: Call) -> Tensor:
    """Return (B, H, S, D) as the contract has it."""
    return x[0].transpose(0, 1) if call.varlen else x.transpose(1, 2)


def _expanded_bias(query: Tensor, key: Tensor, bias: Tensor) -> Tensor:
    batch, heads, rows, _ = query.shape
    return bias[(None,) * (4 - bias.dim())].expand(batch, heads, rows, key.shape[2])

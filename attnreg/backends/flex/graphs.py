"""The graphs of flex's two ops, traced for a kind of call with symbols for its lengths.

The ops are the ops that torch's `flex_attention` calls. Their LSE has base 2. Imports from `torch._inductor`
and `torch.fx` happen when the first graph is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from attnreg.backends.flex.kinds import ProgramKind, TensorLayout
from attnreg.core.launching.lifted import function_of

# From torch/nn/attention/flex_attention.py: what `flex_attention` passes for a call that wants the LSE.
KERNEL_OPTIONS = {
    "BACKEND": "TRITON",  # not its decoding kernels, which serve other lengths
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}

# The names of the tensors that `flex_attention` takes in a tuple, in the order of `BlockMask`'s arguments.
TABLE = (
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
)
OF_SCORES = ("place", "sequence", "slopes", "bias")

LN_2 = math.log(2.0)


# How float32 is multiplied by tensor cores, as three products of TF32, and by other cores.
TENSOR_CORES, OTHER_CORES = "tf32x3", "ieee"


# Head dims up to which tensor cores multiply float32. Above, their kernels spill registers, and no run has
# compared them with other cores.
MOST_FLOAT32 = 256


def float32_product(device: torch.device, head_dim: int) -> str:
    """Return how float32 is multiplied on a device, by the name that Triton's `dot` has for it.

    Not as torch's global setting says, because the contract asks for the accuracy of float32. Three products
    of TF32 have about that accuracy. Tensor cores compute them, from compute capability 8.0 on.
    """
    if head_dim > MOST_FLOAT32:
        return OTHER_CORES
    has_tf32 = device.type == "cuda" and torch.version.hip is None
    return TENSOR_CORES if has_tf32 and torch.cuda.get_device_capability(device) >= (8, 0) else OTHER_CORES


def traced(
    kind: ProgramKind, lengths: Mapping[str, int], tiles: Mapping[str, int]
) -> tuple[torch.fx.GraphModule, list[Tensor], Any]:
    """Return the graph of a kind, its inputs as fake tensors, and what is assumed of lengths."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    symbols = _symbols(environment, kind, lengths)
    names = [name for name, _ in kind.layouts]
    product = float32_product(kind.device, kind.head_dim)
    options = {**KERNEL_OPTIONS, "FLOAT32_PRECISION": f"'{product}'", **tiles}
    run = _forward if kind.direction == "forward" else _backward
    with mode:
        fakes = [_fake(layout, symbols, kind.device) for _, layout in kind.layouts]
        graph = make_fx(lambda *tensors: run(kind, dict(zip(names, tensors, strict=True)), options))(*fakes)
    return graph, fakes, (environment, {name: symbol.node.expr for name, symbol in symbols.items()})


def _symbols(environment: Any, kind: ProgramKind, lengths: Mapping[str, int]) -> dict[str, torch.SymInt]:
    """Return a symbol for each length in a kind's layouts."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    sizes = {size for _, layout in kind.layouts for size in layout.sizes if isinstance(size, str)}
    symbols = {}
    for name in sorted(sizes):
        source, hint = ConstantSource(name), lengths[name]
        expression = environment.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        symbols[name] = environment.create_symintnode(expression, hint=hint, source=source)
    return symbols


def _fake(layout: TensorLayout, symbols: Mapping[str, torch.SymInt], device: torch.device) -> Tensor:
    sizes = [symbols[size] if isinstance(size, str) else size for size in layout.sizes]
    strides = []
    for number, names in layout.strides:
        stride: Any = number
        for name in names:
            stride = stride * symbols[name]
        strides.append(stride)
    return torch.empty_strided(sizes, strides, dtype=layout.dtype, device=device)


def _forward(
    kind: ProgramKind, tensors: Mapping[str, Tensor], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return output (B, H, S_q, D_v) and LSE (B, H, S_q), in the contract's base."""
    from torch._higher_order_ops.flex_attention import flex_attention

    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    score, of_score, of_mask = _modifications(kind, tensors)
    table = _table(kind, tensors)
    out, lse, *_ = flex_attention(query, key, value, score, table, kind.scale, options, of_score, of_mask)
    return out, lse * LN_2


def _backward(
    kind: ProgramKind, tensors: Mapping[str, Tensor], options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    from torch._higher_order_ops.flex_attention import create_fw_bw_graph, flex_attention_backward

    query, key, value, out, grad = (tensors[name] for name in ("query", "key", "value", "out", "grad_out"))
    score, of_score, of_mask = _modifications(kind, tensors)
    index = query.new_zeros((), dtype=torch.int32)
    example = (query.new_zeros((), requires_grad=True), index, index, index, index)
    graphs: tuple[Any, Any] = create_fw_bw_graph(score, example, of_score)
    grad_lse = tensors.get("grad_lse")
    if out.dtype != torch.float32:
        # Torch rounds the sum of output times gradient to the dtype of the output. That is the whole result
        # where gradients cancel, as a single key's do. So the gradient of the LSE brings the sum instead.
        total = (out.float() * grad.float()).sum(-1)
        out, grad_lse = torch.zeros_like(out), -total if grad_lse is None else grad_lse - total
    grads = flex_attention_backward(
        query, key, value, out, tensors["lse"] * (1.0 / LN_2), grad,
        None if grad_lse is None else grad_lse * LN_2,
        *graphs, _table(kind, tensors), kind.scale, options, of_score, of_mask,
    )  # fmt: skip
    return grads[0], grads[1], grads[2]


def _table(kind: ProgramKind, tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Return the table of blocks and the mask, as this version of torch passes them."""
    from torch.nn.attention.flex_attention import BlockMask

    lengths = tensors["query"].shape[2], tensors["key"].shape[2]
    blocks: dict[str, Any] = {name: tensors[name] for name in TABLE}
    sizes = kind.block, kind.block
    mask = BlockMask(seq_lengths=lengths, BLOCK_SIZE=sizes, mask_mod=_mask_of(kind), **blocks)
    return (*mask.as_tuple()[:-1], _mask_of(kind))


def _mask_of(kind: ProgramKind) -> Callable[..., Tensor]:
    """Return which key n a query m sees, of batch b and head h; its tensors are `_modifications`' third."""

    def mask(
        b: Tensor, h: Tensor, m: Tensor, n: Tensor, low: Tensor, high: Tensor, *others: Tensor
    ) -> Tensor:
        row = torch.zeros_like(b) if low.shape[0] == 1 else b
        is_visible = torch.zeros_like(n, dtype=torch.bool)
        for number in range(low.shape[1]):
            place = row, torch.full_like(b, number), m
            is_visible = is_visible | ((n >= _at(low, *place)) & (n < _at(high, *place)))
        if kind.bias == "mask":
            is_visible = is_visible & _at(others[0], b, h, m, n)
        if kind.mask_mod:
            places, *captured = others[kind.bias == "mask" :]
            shown = function_of(kind.mask_mod)(*_places(places, h, m, n), *captured)
            is_visible = is_visible & shown
        return is_visible

    return mask


def _places(places: Tensor, h: Tensor, m: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return sequence, head, query and key as functions of scores get them: see `QueryPlaces`."""
    sequence, place, first, last = (_at(places, torch.full_like(m, row), m) for row in range(4))
    # Keys of other sequences are hidden, and have places that exist.
    return sequence, h, place, torch.minimum(torch.maximum(n, first), last) - first


def _modifications(
    kind: ProgramKind, tensors: Mapping[str, Tensor]
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the function that changes scores, and the tensors that it and the mask read."""
    read = [name for name in OF_SCORES if name in tensors and (name != "bias" or kind.bias == "added")]
    captured = [name for name in tensors if name.startswith("score_mod")]
    read += ["places", *captured] if kind.score_mod else []

    def score_of(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor, *values: Tensor) -> Tensor:
        named = dict(zip(read, values, strict=True))
        if kind.softcap:
            score = torch.tanh(score / kind.softcap) * kind.softcap
        if kind.score_mod:
            of_scores = _places(named["places"], h, m, n)
            score = function_of(kind.score_mod)(score, *of_scores, *(named[name] for name in captured))
        if kind.slopes:
            place, slopes = named["place"], named["slopes"]
            row = _at(named["sequence"], m) if kind.packed else b
            slope = _at(slopes, h) if kind.slopes == 1 else _at(slopes, row, h)
            row = torch.zeros_like(b) if place.shape[0] == 1 else b
            score = score - slope * (_at(place, row, m) - n).abs()
        return score + _at(named["bias"], b, h, m, n) if "bias" in named else score

    of_mask = ["low", "high", *(["bias"] if kind.bias == "mask" else [])]
    of_mask += ["places", *(name for name in tensors if name.startswith("mask_mod"))] if kind.mask_mod else []
    return score_of, tuple(tensors[name] for name in read), tuple(tensors[name] for name in of_mask)


def _at(x: Tensor, *places: Tensor) -> Tensor:
    """Return an element; brackets would read the places on the host."""
    return torch.ops.aten.index.Tensor(x, list(places))  # type: ignore[no-any-return]

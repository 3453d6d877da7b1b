"""Calls with `score_mod` or `mask_mod` in a compiled program: their operations become text in its graph.

An op can't take a function. So Dynamo traces the functions into a graph of their own, as it does for torch's
`flex_attention`, by a higher-order operator (`torchlib.subgraphs`). When that graph is run or traced further,
its operations become the text of a function (`launching.lifted`). The call is then `attnreg::_varlen_attn`
with this text. Arguments of the op are what the functions have captured, and what they compute of it without
a score and its places: that runs in the program, where sizes may be symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnreg.core.launching import lifted
from attnreg.core.launching.elementwise import NO_GRADIENT, ReadAtTensors
from attnreg.core.torchlib import subgraphs
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.varlen import custom_op
from attnreg.errors import InvalidInputError, UnsupportedInputError

# Sizes of captured tensors while a function is traced. A text that is the same for both is so for all sizes.
_SIZES = 2**16, 2**16 + 1


def attend(
    arguments: tuple[Any, ...],
    score_mod: Callable[..., Tensor] | None,
    mask_mod: Callable[..., Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of the op with these arguments and functions; Dynamo traces this function.

    Arguments are of `custom_op.forward`: query, key and value are (T, H, D), floating point.
    """
    query = arguments[0]
    # With a dimension, as Dynamo would read an index () on the host. Each is another tensor, as Dynamo passes
    # one that is there twice once.
    score = torch.zeros(1, dtype=_dtype(query), device=query.device)
    places = [torch.zeros(1, dtype=torch.int32, device=query.device) for _ in range(4)]

    def both(score: Tensor, batch: Tensor, head: Tensor, place: Tensor, key: Tensor) -> Any:
        changed = None if score_mod is None else score_mod(score, batch, head, place, key)
        shown = None if mask_mod is None else mask_mod(batch, head, place, key)
        operands = [score, batch, head, place, key]
        return torch.ops.attnreg._varlen_attn_traced(operands, changed, shown, *arguments)

    results: tuple[Tensor, Tensor, Tensor] = OPERATOR(both, score, *places)
    return results


# What Dynamo sees of the call inside of the functions' graph. It has the results of `custom_op.forward`.
@torch.library.custom_op(
    "attnreg::_varlen_attn_traced",
    mutates_args=(),
    schema=f"(Tensor[] places, Tensor? changed, Tensor? shown, {custom_op.SCHEMA[1:]}",
)
def _traced(*_: Any) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("attnreg::_varlen_attn_traced runs as attnreg::_varlen_attn")


@_traced.register_fake
def _traced_fake(_places: Any, _changed: Any, _shown: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    results: tuple[Tensor, Tensor, Tensor] = custom_op.fake(*arguments)
    return results


def _run(graph: torch.fx.GraphModule, operands: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Make the call of a graph that Dynamo has traced of `both`."""
    if not isinstance(graph, torch.fx.GraphModule):
        raise UnsupportedInputError(
            "score_mod and mask_mod must be traced by Dynamo, got a program that is exported without: use "
            "torch.export.export(..., strict=True)"
        )
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    values: dict[Any, Any] = dict(zip(inputs, operands, strict=True))
    (call,) = (node for node in graph.graph.nodes if "_varlen_attn_traced" in str(node.target))
    places, changed, shown, *rest = call.args
    arguments = list(torch.fx.map_arg(rest, lambda node: _evaluated(node, values)))
    texts: dict[str, Any] = {}
    captured: list[Tensor] = []
    for name, result, operands_of_result in (("score_mod", changed, places), ("mask_mod", shown, places[1:])):
        if result is not None:
            of_function = {
                node: _captured(name, _evaluated(node, values), arguments[0])
                for node in _without_places(graph, result, operands_of_result)
            }
            texts[name], order = _text(graph, name, result, operands_of_result, of_function, arguments[0])
            captured += [of_function[node] for node in order]
    if len(captured) > len(custom_op.CAPTURED):
        most = len(custom_op.CAPTURED)
        raise UnsupportedInputError(
            f"score_mod and mask_mod must have captured at most {most} tensors in a compiled program, got "
            f"{len(captured)}"
        )
    options = texts | dict(zip(custom_op.CAPTURED, captured, strict=False))
    results: tuple[Tensor, ...] = torch.ops.attnreg._varlen_attn(*custom_op.with_options(arguments, options))
    return results


def _evaluated(node: Any, values: dict[Any, Any]) -> Any:
    """Return the value of a node of a graph, whose inputs have values."""
    if node not in values:
        arguments, options = torch.fx.map_arg((node.args, node.kwargs), lambda x: _evaluated(x, values))
        run = getattr(arguments[0], node.target) if node.op == "call_method" else node.target
        values[node] = run(*arguments[node.op == "call_method" :], **options)
    return values[node]


def _before(node: Any) -> set[Any]:
    """Return all nodes that a node depends on, itself included."""
    reached, open_nodes = set(), [node]
    while open_nodes:
        each = open_nodes.pop()
        if each not in reached:
            reached.add(each)
            open_nodes += each.all_input_nodes
    return reached


def _without_places(graph: torch.fx.GraphModule, result: Any, places: Any) -> list[Any]:
    """Return the last nodes of a function that don't depend on its places, in the order of the graph."""
    needed, dependent = _before(result), set(places)
    for node in graph.graph.nodes:
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    return [
        node
        for node in graph.graph.nodes
        if node in needed - dependent and (node is result or needed & dependent & node.users.keys())
    ]


def _captured(name: str, value: Any, query: Tensor) -> Tensor:
    """Return what a function has captured or computed of it as a tensor; the query is (T_q, H, D)."""
    if isinstance(value, Tensor):
        if value.requires_grad and torch.is_grad_enabled():
            raise InvalidInputError(f"{name}: {NO_GRADIENT}")
        return value
    dtype = _dtype(query) if isinstance(value, (float, torch.SymFloat)) else torch.int64
    return torch.full((), value, dtype=dtype, device=query.device)


def _text(
    graph: torch.fx.GraphModule,
    name: str,
    result: Any,
    places: Any,
    captured: dict[Any, Tensor],
    query: Tensor,
) -> tuple[str, list[Any]]:
    """Return the text of a function, and the nodes of what it has captured, in the order of its arguments."""
    cache: dict[Any, Any] = graph.__dict__.setdefault("_attnreg_texts", {})

    def trace(size: int | None) -> tuple[str, str, list[Any]]:
        return _traced_text(name, result, places, captured, query, size)

    if result not in cache:
        first, second = map(trace, _SIZES)
        cache[result] = first if first == second and not first[1] else None
    traced = cache[result]
    if traced is None:
        # Sizes that are symbols become numbers: other sizes are another graph.
        key = result, tuple(tuple(map(int, x.shape)) for x in captured.values())
        traced = cache[key] = cache.get(key) or trace(None)
    text, reason, nodes = traced
    if reason:
        raise UnsupportedInputError(f"{name} can't be traced for a kernel: {reason}")
    return text, nodes


def _traced_text(
    name: str, result: Any, places: Any, captured: dict[Any, Tensor], query: Tensor, size: int | None
) -> tuple[str, str, list[Any]]:
    """Return the text of a function, or why it can't be traced, and the nodes of its further arguments.

    A `size` takes the place of all sizes of captured tensors, but for 1.
    """
    with subgraphs.without_modes():
        examples = {node: _example(x, size) for node, x in captured.items()}

        def function(*values: Tensor) -> Any:
            return _evaluated(result, dict(zip(places, values, strict=True)) | examples)

        text, reason, tensors = lifted.traced(name, function, query.device, _dtype(query), ReadAtTensors())
    return text, reason, [next(node for node, x in examples.items() if x is tensor) for tensor in tensors]


def _example(x: Tensor, size: int | None) -> Tensor:
    sizes = [1 if isinstance(n, int) and n == 1 else size or int(n) for n in x.shape]
    return torch.zeros((1,) * x.dim(), dtype=x.dtype, device=x.device).expand(sizes)


def _dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


OPERATOR = subgraphs.operator_of("attnreg_functions", _run)

leave_module_uncompiled(__name__)

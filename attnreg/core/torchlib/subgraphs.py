"""A function that Dynamo traces into a graph of its own, inside the graph of a compiled program.

Torch has a base class of operators that take a function. Dynamo traces the function of any of them, and makes
an operand of each tensor that it has captured. The class is torch's own and may change: without it there is
no such operator, and programs break their graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

Run = Callable[[torch.fx.GraphModule, tuple[Any, ...]], Any]


def operator_of(name: str, run: Run) -> Any:
    """Return an operator that takes a function and its arguments; None if this torch has no such class.

    `run` gets the graph of the function, and its operands: whatever tensors and numbers the graph has as
    inputs, of any shape and dtype. It runs when the program runs, and when the program is traced further.
    """
    try:
        from torch._higher_order_ops.base_hop import BaseHOP
    except ImportError:
        return None

    class _Subgraph(BaseHOP):
        def __init__(self) -> None:
            super().__init__(name)

        def __call__(self, subgraph: Any, *operands: Any, **_kwargs: Any) -> Any:
            return run(subgraph, operands)

    _allow_views(name)
    return _Subgraph()


def _allow_views(name: str) -> None:
    """Let Dynamo trace an operator whose operands are views of one tensor, as those of a fused projection.

    Dynamo refuses such operands of an operator whose graph might be kept, and functionalized as it is. `run`
    only calls ops, which are functionalized one by one.
    """
    with contextlib.suppress(Exception):  # private; without it such a program breaks its graph
        from torch._dynamo.variables import higher_order_ops

        class _Variable(higher_order_ops.BaseHOPVariable):
            supports_aliasing = True

        higher_order_ops._hop_name_to_variable_class[name] = _Variable


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Leave all dispatch modes, such as those of a program that is traced, and function modes for a while.

    A function mode of `torch.export` would note in the program that gradients are switched off meanwhile.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    core: Any = torch._C
    function_modes = [core._pop_torch_function_stack() for _ in range(core._len_torch_function_stack())]
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(function_modes):
            core._push_on_torch_function_stack(mode)

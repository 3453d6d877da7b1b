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

    return _Subgraph()


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Leave all modes of the dispatcher for a while, such as those of a program that is traced."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield

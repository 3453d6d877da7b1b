"""Holding a kernel's results to the contract, the first time that a plan runs it.

A backend that returns another shape or dtype than it promised would give wrong numbers further on,
or a message about something else. Later runs of the plan go to the kernel directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnreg.errors import RegistrationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attnreg.contract.backend import Call
    from attnreg.contract.spec import Direction


def checked_against_contract(
    kernel: Callable[..., Any], direction: Direction, backend: str, passed: Callable[[], None]
) -> Callable[..., Any]:
    """Return the kernel with a look at its results; calls `passed` once they are as promised.

    The returned function raises RegistrationError where they aren't.
    """

    def run(*arguments: Any) -> Any:
        results = kernel(*arguments)
        expected = _forward(*arguments) if direction == "forward" else _backward(*arguments)
        problems = list(_differences(results, dict(expected)))
        if problems:
            raise RegistrationError(
                f"{backend} breaks the contract in its {direction}: {'; '.join(problems)}"
            )
        passed()
        return results

    return run


def _forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Iterator[tuple[str, Tensor]]:
    *rows, heads, _ = query.shape
    meta = query.new_empty(0, device="meta")
    yield "out", meta.new_empty((*rows, heads, value.shape[-1]))
    lse = torch.float64 if query.dtype == torch.float64 else torch.float32
    shape = (heads, *rows) if call.cu_seqlens_q is not None else (rows[0], heads, rows[1])
    yield "lse", meta.new_empty(shape, dtype=lse)


def _backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Iterator[Any]:
    return zip(("grad_q", "grad_k", "grad_v"), (query, key, value), strict=True)


def _differences(results: Any, expected: dict[str, Tensor]) -> Iterator[str]:
    if not isinstance(results, tuple) or len(results) != len(expected):
        got = f"{len(results)} values" if isinstance(results, tuple) else type(results).__name__
        yield f"got {got}, expected the tuple ({', '.join(expected)})"
        return
    for result, (name, model) in zip(results, expected.items(), strict=True):
        tensor = isinstance(result, torch.Tensor)
        shape, dtype = (tuple(result.shape), result.dtype) if tensor else (result, type(result))
        if (shape, dtype) != (tuple(model.shape), model.dtype):
            yield f"{name}: got {shape} {dtype}, expected {tuple(model.shape)} {model.dtype}"

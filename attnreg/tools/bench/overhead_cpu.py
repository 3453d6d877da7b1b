"""What attnreg costs the host per call on a CPU, the sides of each question taking turns.

1. The same aten op, and `F.scaled_dot_product_attention`, with and without attnreg.
2. `attnreg.varlen_attn`, the backend registered or chosen for some calls, and
   `torch.nn.attention.varlen.varlen_attn`, above kernels that do nothing.
3. `attnreg.varlen_attn` and a function that calls the same backend directly.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg import api
from attnreg.core import registry
from attnreg.core.contract.backend import Backend, Call, Kernels
from attnreg.core.contract.capabilities import Capabilities
from attnreg.core.varlen.front import varlen_attn
from attnreg.tools.bench.report import Job, PrintedTable
from attnreg.tools.bench.shapes import BOTH, FORWARD
from attnreg.tools.bench.sides import WARM_UP, by_default, called_directly, torch_alone
from attnreg.tools.measure.timing import interleaved, median_ratio, per_call

Context = Callable[[], AbstractContextManager[Any]]
Measures = dict[str, Callable[[], float]]

CALLS, QUICK_CALLS = 1000, 20


def answer(title: str, job: Job, answers: dict[str, Any]) -> None:
    """Add the answer to a question: median microseconds, and the difference from the yardstick."""
    key, base, measures = QUESTIONS[title]
    taken = interleaved(measures(QUICK_CALLS if job.quick else CALLS), job.rounds)
    results, rows = [], []
    for name, seconds in taken.items():
        against = taken[f"{name.rpartition(', ')[0]}, {base}"]
        median, ratio = statistics.median(seconds) * 1e6, median_ratio(seconds, against)
        added = statistics.median(a - b for a, b in zip(seconds, against, strict=True)) * 1e6
        results.append({"name": name, "microseconds": median, "added": added, "ratio": ratio})
        rows.append((name, f"{median:.2f}", f"{added:+.2f}", f"{ratio:.3f}"))
    answers[key] = results
    job.tables.append(PrintedTable(title, ("call", "µs", f"above {base}", "ratio"), rows))


def _measured(within: Context, calls: int, run: Callable[[], object]) -> Callable[[], float]:
    """Return a function that measures the seconds of a call inside a context."""

    def measure() -> float:
        with within():
            for _ in range(WARM_UP):
                run()
            return per_call(run, calls)

    return measure


@contextlib.contextmanager
def _active() -> Iterator[None]:
    api.install()
    yield
    api.uninstall()


def _routers(calls: int) -> Measures:
    """Measure op and SDPA without attnreg, with inactive routers, and with attnreg installed."""
    query = torch.randn(1, 1, 2, 8)
    learned = query.clone().requires_grad_()
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    runs: dict[str, Callable[[], object]] = {
        "aten op": lambda: op(query, query, query),
        "SDPA": lambda: F.scaled_dot_product_attention(query, query, query),
        "SDPA, with grad": lambda: F.scaled_dot_product_attention(learned, learned, learned),
    }
    states = {"torch alone": torch_alone, "nothing registered": by_default, "active": _active}
    return {
        f"{name}, {state}": _measured(within, calls, run)
        for name, run in runs.items()
        for state, within in states.items()
    }


def _fronts(calls: int) -> Measures:
    """Measure both fronts above kernels that do nothing."""
    from torch.nn.attention.varlen import varlen_attn as torch_varlen_attn

    limits = Capabilities(devices=("cpu",), dtypes=("float32",), varlen=True)
    nothing = Backend(
        name="nothing", forward=limits, backward=limits,
        load=lambda: Kernels(_nothing_forward, _nothing_backward),
    )  # fmt: skip
    tokens = torch.randn(4, 2, 8, requires_grad=True)
    offsets, grad = torch.tensor([0, 2, 4], dtype=torch.int32), torch.ones(4, 2, 8)
    arguments = tokens, tokens, tokens, offsets, offsets, 2, 2

    @contextlib.contextmanager
    def another_preferred() -> Iterator[None]:
        with api.register_backend(nothing), api.register_backend("math"):
            yield

    @contextlib.contextmanager
    def in_scope() -> Iterator[None]:
        with another_preferred(), api.use_backend(nothing.name):
            yield

    sides: dict[str, tuple[Context, Callable[[], Any]]] = {
        "torch": (_aten_nothing, lambda: torch_varlen_attn(*arguments)),
        "attnreg": (lambda: api.register_backend(nothing), lambda: varlen_attn(*arguments)),
        "use_backend()": (in_scope, lambda: varlen_attn(*arguments)),
        "backend=": (another_preferred, lambda: varlen_attn(*arguments, backend=nothing.name)),
    }
    return _both_steps("forward with grad", sides, grad, calls)


def _backend(calls: int) -> Measures:
    """Measure attnreg.varlen_attn against the `cpu` backend called directly, at a small real shape."""
    kernels, lengths = registry.find("cpu").kernels(), [40, 64, 17, 33]
    query, key, value = (torch.randn(sum(lengths), 4, 64, requires_grad=True) for _ in "qkv")
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    call = Call(64**-0.5, 64, 64, (-1, -1), offsets, offsets)
    direct = called_directly(kernels.forward, kernels.backward, call)
    sides: dict[str, tuple[Context, Callable[[], Any]]] = {
        "called directly": (_active, lambda: direct(query, key, value)),
        "attnreg": (_active, lambda: varlen_attn(query, key, value, offsets, offsets, 64, 64)),
    }
    return _both_steps(FORWARD, sides, torch.ones_like(query), max(calls // 10, 1))


def _both_steps(
    forward: str, sides: dict[str, tuple[Context, Callable[[], Tensor]]], grad: Tensor, calls: int
) -> Measures:
    """Return what times each side's forward, under that name, and its forward with the backward."""

    def back(attend: Callable[[], Tensor]) -> None:
        attend().backward(grad)  # type: ignore[no-untyped-call]

    forwards = {
        f"{forward}, {name}": _measured(within, calls, attend) for name, (within, attend) in sides.items()
    }
    return forwards | {
        f"{BOTH}, {name}": _measured(within, calls, functools.partial(back, attend))
        for name, (within, attend) in sides.items()
    }


def _nothing_forward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return tensors of the right shapes and no values."""
    return torch.empty_like(query), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


def _nothing_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@contextlib.contextmanager
def _aten_nothing() -> Iterator[None]:
    """Register kernels that do nothing for aten's flash ops on a CPU, to time torch's own varlen_attn."""
    api.uninstall()

    def forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        random_state = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
        return (*_nothing_forward(query, key, value), *random_state, query.new_empty(0))

    def backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        return _nothing_backward(grad_out, query, key, value)

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        library.impl("_flash_attention_forward", forward, "CPU")  # type: ignore[no-untyped-call]
        library.impl("_flash_attention_backward", backward, "CPU")  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


# By title: the name in the results, the side that the others are compared with, and what measures the sides.
QUESTIONS: dict[str, tuple[str, str, Callable[[int], Measures]]] = {
    "Routers over torch's ops": ("routers", "torch alone", _routers),
    "varlen_attn above kernels that do nothing": ("varlen", "torch", _fronts),
    "varlen_attn above the cpu backend": ("called_directly", "called directly", _backend),
}

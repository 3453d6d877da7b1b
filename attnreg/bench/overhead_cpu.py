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
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg import _registry, api, aten
from attnreg.bench.report import Report, Table
from attnreg.bench.sides import WARM_UP, called_directly
from attnreg.contract.backend import Backend, Call, Kernels
from attnreg.contract.capabilities import Capabilities
from attnreg.measure.timing import interleaved, median_ratio, per_call
from attnreg.varlen.front import varlen_attn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attnreg.bench.report import Job

CALLS, QUICK_CALLS = 1000, 20
PARTS = (
    ("routers", "Routers over torch's ops", "torch alone"),
    ("varlen", "varlen_attn above kernels that do nothing", "torch"),
    ("called_directly", "varlen_attn above the cpu backend", "called directly"),
)

Rows = dict[str, list[float]]


def measure(job: Job, report: Report, also: int = 0) -> int:
    """Answer the questions into a report; returns their number, to which so many others come."""
    for number, ((key, title, base), ask) in enumerate(
        zip(PARTS, (_routers, _fronts, _backend), strict=True)
    ):
        job.advance(number, len(PARTS) + also, title)
        if job.late:
            job.leave_out(title, "the time was spent")
            continue
        report.results[key], table = _tabled(
            title, ask(QUICK_CALLS if job.quick else CALLS, job.rounds), base
        )
        report.tables.append(table)
        job.keep(report.results)
    return len(PARTS)


def _tabled(title: str, taken: Rows, base: str) -> tuple[list[dict[str, Any]], Table]:
    """Return median microseconds, also as a difference from the yardstick, as data and as a table."""
    results, rows = [], []
    for name, seconds in taken.items():
        against = taken[f"{name.rpartition(', ')[0]}, {base}"]
        median, ratio = statistics.median(seconds) * 1e6, median_ratio(seconds, against)
        added = statistics.median(a - b for a, b in zip(seconds, against, strict=True)) * 1e6
        results.append({"name": name, "microseconds": median, "added": added, "ratio": ratio})
        rows.append((name, f"{median:.2f}", f"{added:+.2f}", f"{ratio:.3f}"))
    return results, Table(title, ("call", "µs", f"above {base}", "ratio"), rows)


def _routers(calls: int, rounds: int) -> Rows:
    """Measure op and SDPA without attnreg, with inactive routers, and with attnreg installed."""
    query = torch.randn(1, 1, 2, 8)
    learned = query.clone().requires_grad_()
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    runs: dict[str, Callable[[], object]] = {
        "aten op": lambda: op(query, query, query),
        "SDPA": lambda: F.scaled_dot_product_attention(query, query, query),
        "SDPA, with grad": lambda: F.scaled_dot_product_attention(learned, learned, learned),
    }
    states = (("torch alone", api.uninstall), ("nothing registered", aten.ensure), ("active", api.install))

    def measured(run: Callable[[], object], become: Callable[[], None]) -> Callable[[], float]:
        def once() -> float:
            become()
            run()  # makes the plan
            return per_call(run, calls)

        return once

    measures = {
        f"{name}, {state}": measured(run, become) for name, run in runs.items() for state, become in states
    }
    return interleaved(measures, rounds)


def _fronts(calls: int, rounds: int) -> Rows:
    """Measure both fronts above kernels that do nothing."""
    from torch.nn.attention.varlen import varlen_attn as torch_varlen_attn

    limits = Capabilities(devices=("cpu",), dtypes=("float32",), varlen=True)
    nothing = Backend(
        name="nothing", forward=limits, backward=limits,
        load=lambda: Kernels(_nothing_forward, _nothing_backward),  # type: ignore[arg-type]
    )  # fmt: skip
    tokens = torch.randn(4, 2, 8, requires_grad=True)
    offsets, grad = torch.tensor([0, 2, 4], dtype=torch.int32), torch.ones(4, 2, 8)

    def forward(front: Callable[..., Any], **options: Any) -> Tensor:
        found: Tensor = front(tokens, tokens, tokens, offsets, offsets, 2, 2, **options)
        return found

    def torchs(run: Callable[[], object]) -> float:
        with _aten_nothing():
            run()
            return per_call(run, calls)

    def registered(run: Callable[[], object]) -> float:
        with api.register_backend(nothing):
            for _ in range(WARM_UP):
                run()
            taken = per_call(run, calls)
        api.uninstall()
        return taken

    def scoped(run: Callable[[], object], name: str | None) -> float:
        # Another backend is preferred, so that the scoped choice decides.
        with (
            api.register_backend(nothing),
            api.register_backend("math"),
            api.use_backend(name) if name else contextlib.nullcontext(),
        ):
            for _ in range(WARM_UP):
                run()
            taken = per_call(run, calls)
        api.uninstall()
        return taken

    def sides(step: str, run: Callable[[Callable[[], Tensor]], object]) -> dict[str, Callable[[], float]]:
        named = functools.partial(forward, varlen_attn, backend=nothing.name)
        ours = functools.partial(forward, varlen_attn)
        return {
            f"{step}, torch": lambda: torchs(lambda: run(lambda: forward(torch_varlen_attn))),
            f"{step}, attnreg": lambda: registered(lambda: run(ours)),
            f"{step}, use_backend()": lambda: scoped(lambda: run(ours), nothing.name),
            f"{step}, backend=": lambda: scoped(lambda: run(named), None),
        }

    api.uninstall()
    forwards = sides("forward with grad", lambda attend: attend())
    return interleaved(forwards | sides("forward + backward", lambda attend: _back(attend(), grad)), rounds)


def _backend(calls: int, rounds: int) -> Rows:
    """Measure attnreg.varlen_attn against the `cpu` backend called directly, at a small real shape."""
    kernels, lengths = _registry.find("cpu").kernels(), [40, 64, 17, 33]
    query, key, value = (torch.randn(sum(lengths), 4, 64, requires_grad=True) for _ in range(3))
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    grad, fewer = torch.ones_like(query), max(calls // 10, 1)

    direct = called_directly(
        kernels.forward, kernels.backward, Call(64**-0.5, 64, 64, (-1, -1), offsets, offsets)
    )

    def attnregs() -> Tensor:
        return varlen_attn(query, key, value, offsets, offsets, 64, 64)  # type: ignore[return-value]

    api.install()
    return interleaved(
        {
            "forward, called directly": lambda: per_call(lambda: direct(query, key, value), fewer),
            "forward, attnreg": lambda: per_call(attnregs, fewer),
            "forward + backward, called directly": lambda: per_call(
                lambda: _back(direct(query, key, value), grad), fewer
            ),
            "forward + backward, attnreg": lambda: per_call(lambda: _back(attnregs(), grad), fewer),
        },
        rounds,
    )


def _back(out: Tensor, grad: Tensor) -> None:
    out.backward(grad)  # type: ignore[no-untyped-call]


def _nothing_forward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return tensors of the right shapes and no values."""
    return torch.empty_like(query), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


def _nothing_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    """Return gradients of the right shapes and no values."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@contextlib.contextmanager
def _aten_nothing() -> Iterator[None]:
    """Have such kernels straight under aten's flash ops on a CPU, for torch's own varlen_attn."""

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

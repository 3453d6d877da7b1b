"""The host time that each mechanism of the fast path saves: a mechanism is switched off at a time.

    python benchmarks/ablation.py [--tokens N] [--rounds N] [--out FILE]

The calls are `F.scaled_dot_product_attention` and `varlen_attn`, with 2 sequences of 128 tokens, 8 heads of
64. On a GPU they are in bfloat16, on FA2, FA4 and cuDNN. On a CPU they are in float32 on one thread, on `cpu`
and on kernels that do nothing. `--tokens 8` leaves little but the host's work. Steps are forward without and
with gradient, and forward + backward, without waiting for the device. Times are wall time of a few calls, on
a CPU the thread's CPU time. All rows run in the same process and take turns. The first two rows are equal:
their difference is noise. `docs/fast-path.md` describes each mechanism.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import statistics
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.nn.functional as F
from _program import parser_of, show, show_machine

import attnreg
from attnreg.core import aten, registry
from attnreg.core.contract.backend import Backend, Call, Kernels
from attnreg.core.contract.capabilities import Capabilities
from attnreg.core.dispatch import call_cache
from attnreg.core.launching import offsets
from attnreg.core.launching.launchers import AddressLauncher, OpLauncher
from attnreg.tools.bench.report import save
from attnreg.tools.measure import Case, inputs
from attnreg.tools.measure.timing import interleaved, per_call, timer_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

    Context = Callable[[], AbstractContextManager[Any]]

CALLS, WARM_UP = 30, 24
ALL_ON = "all on"


def replaced(where: object, name: str, value: object) -> Context:
    """Return a context in which an attribute has another value."""
    return functools.partial(mock.patch.object, where, name, value)


@contextlib.contextmanager
def called_as_functions(*kinds: type) -> Iterator[None]:
    """Make C++ call launchers of these kinds as functions of Python: it tells launchers apart by `form`."""
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(mock.patch.object(kind, "form", "callable"))
        yield


@contextlib.contextmanager
def compared_at_every_call() -> Iterator[None]:
    """Compare offsets with the derived values at every call, not only every 50 ms."""
    module, before = call_cache.load(), offsets.TRUSTED
    with mock.patch.object(offsets, "TRUSTED", 0.0):
        if module is not None:
            module.trust_offsets(0.0)
        yield
    if module is not None:
        module.trust_offsets(before)


@contextlib.contextmanager
def views_in_python() -> Iterator[None]:
    """Pass launchers the tensors of SDPA's ops; Python makes views of these, and of results."""

    def with_views(launcher: Any) -> Any:
        def run(*tensors: Tensor) -> Any:
            if tensors[0].dim() != 4:
                return launcher(*tensors)
            return tuple(x.transpose(1, 2) for x in launcher(*(x.transpose(1, 2) for x in tensors)))

        return run

    original = call_cache.kept_for

    def kept_for(*args: Any, **kwargs: Any) -> Any:
        kept = original(*args, **kwargs)
        return kept and kept._replace(launcher=with_views(kept.launcher))

    plain = {"bhsd": False, "lse_bsh": False, "gradients_bshd": False}
    routes = [route._replace(layout=route.layout._replace(**plain)) for route in aten.ROUTES]
    aten.restore()
    aten.ensure(tuple(routes))
    with mock.patch.object(call_cache, "kept_for", kept_for):
        yield
    aten.restore()
    aten.ensure()


@contextlib.contextmanager
def gradients_in_python() -> Iterator[None]:
    """Make Python connect packed calls to autograd; such calls aren't in the call cache."""
    module = call_cache.load()

    def varlen(*arguments: Any) -> Any:
        needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in arguments[:3])
        return None if needs_gradient else module.varlen(*arguments)

    with mock.patch.object(call_cache, "active", SimpleNamespace(varlen=varlen)):
        yield


def nothing() -> Backend:
    """Return a backend of kernels that do nothing, whose launchers are functions of Python's."""

    def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        *rows, heads, _ = q.shape
        shape = (heads, *rows) if call.varlen else (rows[0], heads, rows[1])
        return torch.empty_like(q), q.new_empty(shape, dtype=torch.float32)

    def backward(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, inputs[:3]))

    limits = Capabilities(devices=("cpu",), dtypes=("float32",), varlen=True)
    kernels = Kernels(forward, backward)  # type: ignore[arg-type]
    return Backend(name="nothing", forward=limits, backward=limits, load=lambda: kernels)


def mechanisms(gpu: bool) -> dict[str, Context]:
    """Return the rows: a name and the context in which a mechanism is off."""
    rows: dict[str, Context] = {
        ALL_ON: contextlib.nullcontext,
        f"{ALL_ON}, once more": contextlib.nullcontext,
        "call cache": call_cache.paused,
        "launchers of backends": replaced(call_cache, "_specialized", lambda *_: None),
        "launchers in C++": functools.partial(called_as_functions, OpLauncher, AddressLauncher),
        "autograd node in C++": gradients_in_python,
    }
    if not gpu:
        rows["views in C++"] = views_in_python
    else:
        rows["torch's op in C++"] = functools.partial(called_as_functions, OpLauncher)
        rows["kernels on addresses in C++"] = functools.partial(called_as_functions, AddressLauncher)
        rows["facts of offsets"] = replaced(offsets, "needs_graph_memory", lambda *_: True)
        rows["offsets compared at every call"] = compared_at_every_call
        with contextlib.suppress(ImportError):
            trials = importlib.import_module("attnreg.backends.fa4.trials")
            rows["FA4's launches by arguments"] = replaced(trials.Trials, "launcher", lambda *_: None)
    return rows


def calls_of(tokens: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the calls that are timed."""
    case = Case(
        name="ablation", lens_q=(tokens, tokens), lens_k=(tokens, tokens), varlen=True, heads=(8, 8),
        dtype="bfloat16" if device.type == "cuda" else "float32", one_cu_seqlens=True,
    )  # fmt: skip
    *rows, call = inputs(case, device, drawn_on=device)
    dense = [x.view(2, tokens, 8, 64).transpose(1, 2) for x in rows]
    cu_seqlens = call.cu_seqlens_q

    def varlen(*inputs: Tensor) -> Any:
        return attnreg.varlen_attn(*inputs, cu_seqlens, cu_seqlens, tokens, tokens)

    def steps(name: str, front: Callable[..., Any], tensors: list[Tensor]) -> dict[str, Callable[[], object]]:
        *plain, grad = tensors
        inputs = [x.clone().requires_grad_() for x in plain]
        return {
            f"{name}, no grad": lambda: front(*plain),
            f"{name}, grad": lambda: front(*inputs),
            f"{name}, + backward": lambda: torch.autograd.grad(front(*inputs), inputs, grad),
        }

    return steps("SDPA", F.scaled_dot_product_attention, dense) | steps("packed", varlen, rows)


@contextlib.contextmanager
def off(switch: Context) -> Iterator[None]:
    """Switch a mechanism off, and clear the call cache before and after."""
    with switch():
        registry.changed()
        yield
    registry.changed()


def measured(call: Callable[[], object], context: Context, device: torch.device) -> float:
    """Return a call's host time in a context, in microseconds."""
    with off(context):
        for number in range(WARM_UP):
            call()
            if number % 4 == 3 and device.type == "cuda":
                torch.cuda.synchronize(device)  # read-backs that launchers wait for have arrived
                time.sleep(0.001)
        if device.type == "cpu":  # with one thread: other programs don't add to its time
            return per_call(call, CALLS, time.thread_time) * 1e6
        return timer_for(device).host(call, CALLS) * 1e6


def main() -> None:
    """Time every call with each mechanism off, and print a table for each backend."""
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    show_machine()
    results: dict[str, Any] = {}
    for backend in ("FA2", "FA4", "cuDNN") if device.type == "cuda" else ("cpu", "nothing"):
        with attnreg.register_backend(nothing() if backend == "nothing" else backend):
            calls, rows = calls_of(options.tokens, device), mechanisms(device.type == "cuda")
            table: dict[str, dict[str, float]] = {row: {} for row in rows}
            for name, call in calls.items():
                sides = {
                    row: functools.partial(measured, call, switch, device) for row, switch in rows.items()
                }
                for row, taken in interleaved(sides, options.rounds).items():
                    table[row][name] = statistics.median(taken)
        results[backend] = table
        shown = [(row, *(f"{taken[name]:.1f}" for name in calls)) for row, taken in table.items()]
        show(f"{backend}: host time per call with one mechanism off, µs; median", ("off", *calls), shown)
    save(options.out, results)


if __name__ == "__main__":
    main()

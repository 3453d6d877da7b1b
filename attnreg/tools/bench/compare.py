"""A case's tensors and the fronts that take them; sides checked by the accuracy rule, then timed in turn."""

from __future__ import annotations

import functools
import inspect
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.core.dispatch.counters import reset_stats
from attnreg.core.varlen import front
from attnreg.tools.bench.report import Job, PrintedTable
from attnreg.tools.bench.shapes import facts_of, flops, trains
from attnreg.tools.bench.sides import (
    STEPS,
    WARM_UP,
    Side,
    Tensors,
    TimedRun,
    in_words,
    ran,
    who_ran,
    wrong_backend,
)
from attnreg.tools.measure import Case, Inputs, Sample, copies, copies_beyond_the_cache
from attnreg.tools.measure.sample import Verdict
from attnreg.tools.measure.timing import calls_for, interleaved, median_ratio, timer_for

T = TypeVar("T")
R = TypeVar("R")

# A model has some layers, and autograd's thread, once awake, goes through them all.
LAYERS, LAYERS_BYTES = 8, 2**30
# As long as a measurement takes; long enough for the clock, short enough for many rounds. And fewer launches
# than a GPU's queue has room for: else the host can't get ahead.
SECONDS, MOST = 0.01, 50


class Batch:
    """The tensors of a case, as several sets of values.

    Attributes:
        case: The call.
        inputs: The arguments of a kernel for the first set.
        sets: Tensors in the contract's layout, (B, S, H, D) or packed (T, H, D). Calls use the sets in turn,
            so that no set stays in the device's cache.
        front_sets: The same memory in SDPA's layout, (B, H, S, D). Packed sets are the same as `sets`.
        call: The other arguments of a kernel.
        offsets: Both tensors of offsets (B + 1,), int32, and the longest lengths, in `varlen_attn`'s order.
    """

    def __init__(self, case: Case, device: torch.device, sets: int = 1) -> None:
        self.case, self.device = case, device
        drawn = copies(case, device, sets)
        self.inputs: Inputs = drawn[0]
        self.call = call = self.inputs.call
        offsets: tuple[Any, Any] = call.cu_seqlens_q, call.cu_seqlens_k
        self.offsets = *offsets, call.max_q, call.max_k
        self.sets = [Tensors(*drawn_set[:4]).mapped(lambda x: x) for drawn_set in drawn]
        to_bhsd = (
            [tensors.mapped(lambda x: x.transpose(1, 2)) for tensors in self.sets] if not case.varlen else []
        )
        self.front_sets = to_bhsd or self.sets

    @functools.cached_property
    def sample(self) -> Sample:
        """The right results of the first set."""
        return Sample(self.case, self.inputs, backward=trains(self.case))

    def verdict(self, results: Iterable[Tensor], sets: Sequence[Tensors]) -> Verdict:
        """Return how wrong output and gradients are. They have the shapes and layout of `sets`."""
        as_they_are = sets is self.sets
        return self.sample.verdict(named(x if as_they_are else x.transpose(1, 2) for x in results))

    def with_attnreg(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Call attnreg's `varlen_attn` for packed tensors (T, H, D), torch's SDPA for dense (B, H, S, D).

        The tensors have the dtype of the case.
        """
        if not self.case.varlen:
            return self._sdpa(q, k, v)
        return front.varlen_attn(  # type: ignore[return-value]
            q, k, v, *self.offsets,
            is_causal=self.case.is_causal, enable_gqa=q.shape[1] != k.shape[1], **options,
        )  # fmt: skip

    def with_torch(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Call torch's function: its `varlen_attn` for packed tensors (T, H, D), else SDPA, (B, H, S, D)."""
        if not self.case.varlen:
            return self._sdpa(q, k, v)
        window = (-1, 0) if self.case.is_causal else (-1, -1)
        run = torch_varlen_attn(q.shape[1] != k.shape[1])
        return run(q, k, v, *self.offsets, window_size=window)  # type: ignore[no-any-return]

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[1] == k.shape[1]:
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.case.is_causal)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.case.is_causal, enable_gqa=True)


def named(results: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return output and gradients, or the output alone, of any shape, by the names of `measure.Sample`."""
    return {name: x.detach() for name, x in zip(("out", "dq", "dk", "dv"), results, strict=False)}


@functools.cache
def torch_varlen_attn(gqa: bool) -> Callable[..., Any]:
    """Return torch's `varlen_attn`, for calls in which query heads share key heads if `gqa`."""
    from torch.nn.attention.varlen import varlen_attn

    # Without an option for fewer key heads its kernel sees them.
    named = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return functools.partial(varlen_attn, enable_gqa=True) if gqa and named else varlen_attn


def batch_beyond_the_cache(case: Case, device: torch.device) -> Batch:
    """Return a batch whose sets are twice the GPU's last cache, and eight where they are small.

    Two on other devices.
    """
    if device.type != "cuda":
        return Batch(case, device, 2)
    fewest = LAYERS if LAYERS * case.nbytes <= LAYERS_BYTES else 1
    return Batch(case, device, copies_beyond_the_cache(case, device, fewest))


class Checked(NamedTuple):
    """A right side: its error over the allowed error, and which backend ran in each direction."""

    side: Side
    error: float
    ran: dict[str, str]


def checked(
    batch: Batch,
    sides: Mapping[str, Side],
    job: Job,
    verdict: Callable[[str, list[Tensor]], Verdict] | None = None,
) -> dict[str, Checked]:
    """Return the sides that are right, and record in the job why the others are left out.

    `verdict` returns how wrong the results of a side are, if `Batch.verdict` can't say.
    """
    right = {}
    if verdict is None:
        batch.sample  # noqa: B018 - computed outside of `try`: if it fails, no side is at fault
    for name, side in sides.items():
        what = f"{batch.case.name}, {name}"
        reset_stats()
        try:
            results = side.results(trains(batch.case))
            error, wrong = verdict(name, results) if verdict else batch.verdict(results, side.sets)
        except Exception as problem:  # noqa: BLE001 - one side that breaks must not hide the others
            job.leave_out(what, short(problem))
            continue
        backends = ran()
        if wrong:
            job.leave_out(what, f"WRONG: {wrong}; ran {in_words(backends)}")
        elif side.wanted and (why := wrong_backend(side.wanted, backends)):
            job.leave_out(what, why)
        else:
            right[name] = Checked(side, error, backends)
    return right


def measured_in_time(
    cases: Sequence[T], names: Sequence[str], measure: Callable[[T, Job], R | None], job: Job
) -> Iterator[tuple[int, R]]:
    """Measure cases while there is time, and yield each case's number and what was measured.

    A case of which nothing was measured is skipped. The job records cases that raise, by their name.
    """
    for number, case in enumerate(job.in_time(cases)):
        try:
            measured = measure(case, job)
        except Exception as problem:  # noqa: BLE001 - the other cases are worth their figures
            job.leave_out(names[number], short(problem))
            continue
        if measured:
            yield number, measured


def short(problem: Exception) -> str:
    """Return an exception in one line."""
    return textwrap.shorten(f"{type(problem).__name__}: {problem}".partition("\n")[0], 150)


def timed(
    case: Case, right: Mapping[str, Checked], yardstick: str, rate: float, job: Job
) -> list[dict[str, Any]]:
    """Time the sides of a case; returns a row for each side and step.

    Times are milliseconds of the device with the host ahead, the median of the rounds.
    """
    timers = {
        name: SideTimer(each.side, each.side.runs(STEPS), SECONDS, MOST) for name, each in right.items()
    }
    rows = []
    for step, taken in by_step(timers, job.rounds, "device").items():
        for name, seconds in taken.items():
            median = statistics.median(seconds)
            speed = flops(case, step) / median
            rows.append(
                {
                    "case": case.name,
                    "shape": facts_of(case),
                    "step": step,
                    "side": name,
                    "milliseconds": median * 1e3,
                    "fastest_and_slowest": [min(seconds) * 1e3, max(seconds) * 1e3],
                    "times_yardstick": median_ratio(taken[yardstick], seconds),
                    "teraflops": speed / 1e12,
                    "of_matmul_rate": speed / rate,
                    "error": right[name].error,
                    "ran": right[name].ran,
                }
            )
    return rows


class SideTimer:
    """Times a side in each step, all steps in a round.

    Args:
        side: What is timed.
        runs: Its steps.
        seconds: As long as a measurement takes, but for calls that take longer.
        most: The most calls of a measurement.
        bursts: A measurement is the least of so many in a row.
    """

    def __init__(
        self, side: Side, runs: Sequence[TimedRun], seconds: float, most: int, bursts: int = 1
    ) -> None:
        self._side, self._runs = side, runs
        self._seconds, self._most, self._bursts = seconds / bursts, most, bursts
        self._often: dict[str, int] = {}  # how often each step is run in a measurement

    def measure(self, clock: str = "back_to_back") -> dict[str, float]:
        """Return the seconds of a call in each step, by a clock of `Timer`."""
        taken, timer = {}, timer_for(self._side.sets[0].q.device)
        with self._side.within():
            for step, run, calls in self._runs:
                for _ in range(-(-WARM_UP // calls)):
                    run()
                if step not in self._often:
                    self._often[step] = calls_for(self._seconds, timer.back_to_back(run, 2), self._most)
                bursts = (getattr(timer, clock)(run, self._often[step]) for _ in range(self._bursts))
                taken[step] = min(bursts) / calls
        return taken


def by_step(timers: Mapping[str, SideTimer], rounds: int, clock: str) -> dict[str, dict[str, list[float]]]:
    """Time sides in turn; return the seconds of a call in each round, by step and side."""
    measures = {name: functools.partial(timer.measure, clock) for name, timer in timers.items()}
    taken = interleaved(measures, rounds)
    steps = next(iter(taken.values()))[0]
    return {
        step: {name: [seconds[step] for seconds in each] for name, each in taken.items()} for step in steps
    }


def table(title: str, rows: Sequence[Mapping[str, Any]], against: str) -> PrintedTable:
    """Return the rows of one case and step as a table; ratios are to the side `against`."""
    header = ("side", "ms", f"x {against}", "TFLOP/s", "of matmul", "of allowed", "ran")
    cells = [
        (
            row["side"], f"{row['milliseconds']:.3f}", f"{row['times_yardstick']:.2f}",
            f"{row['teraflops']:.3g}", f"{row['of_matmul_rate']:.0%}", f"{row['error']:.2f}",
            who_ran(row["step"], row["ran"]),
        )
        for row in rows
    ]  # fmt: skip
    return PrintedTable(title, header, cells)

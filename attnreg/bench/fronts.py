"""What the host takes for a call as a program makes it, with each backend: for `attnreg tune`.

2 sequences of 128 tokens, 8 heads of 64, bfloat16: so small that the host is all there is, and what
it takes hardly depends on the size. A backward counts as what forward and backward take together beyond
the forward, since autograd's thread is slower when it has slept in between, as it does in training.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from attnreg.bench.contexts import led_by, untouched
from attnreg.bench.inputs import Batch
from attnreg.bench.shapes import dense, packed
from attnreg.bench.sides import Side, forward_backward, misled, with_grad
from attnreg.bench.timing import host_per_call, interleaved
from attnreg.counters import reset_stats
from attnreg.tuning.points import Front

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

__all__ = ["SHAPES", "host_costs"]

SHAPES = (packed([128, 128], 8, 8, 64, False), dense(2, 128, 8, 8, 64, False))
CALLS, ROUNDS = 30, 11


def host_costs(device: torch.device, names: Sequence[str], rounds: int = ROUNDS) -> list[Front]:
    """Return what each backend's calls take the host through both fronts; of those that run them."""
    with untouched():
        return [front for varlen in (True, False) for front in _through(varlen, device, names, rounds)]


def _through(varlen: bool, device: torch.device, names: Sequence[str], rounds: int) -> Iterator[Front]:
    batch = Batch(SHAPES[not varlen], device)
    sides = {name: Side(batch.with_attnreg, batch.front_sets, led_by(name)) for name in names}
    able = {name: side for name, side in sides.items() if _runs(name, side)}
    steps = {
        (name, step): side.timed(step, CALLS, host_per_call)
        for name, side in able.items()
        for step in (with_grad, forward_backward)
    }
    taken = {place: statistics.median(seconds) * 1e6 for place, seconds in interleaved(steps, rounds).items()}
    for name in able:
        ahead = taken[name, with_grad]
        yield Front(name, varlen, "forward", ahead)
        yield Front(name, varlen, "backward", max(taken[name, forward_backward] - ahead, 0.0))


def _runs(name: str, side: Side) -> bool:
    reset_stats()
    try:
        side.results()
    except Exception:  # noqa: BLE001 - the points of the table will say what is wrong with it
        return False
    return not misled(name)

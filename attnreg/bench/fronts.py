"""What the host takes for a call as a program makes it, with each backend: for `attnreg tune`.

Calls on 2 sequences of 128 tokens, 8 heads of 64, bfloat16: so small that the host's work is all there is,
and what it takes hardly depends on the size. Several calls make one graph, as a model's layers do.

The fastest round counts. A round is the mean of many calls; some took twice as long as others, for seconds
and with all backends alike, as the machine had slowed down.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, get_args

from attnreg.bench.batches import Batch
from attnreg.bench.contexts import led_by, untouched
from attnreg.bench.shapes import dense, packed
from attnreg.bench.sides import Side, layers, layers_backward, ran, wrong_backend
from attnreg.contract.spec import Direction
from attnreg.dispatch import call_cache
from attnreg.dispatch.counters import reset_stats
from attnreg.measure.timing import interleaved, timer_for
from attnreg.torchlib import captured
from attnreg.tuning.checks import check_alive
from attnreg.tuning.points import Front

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch
    from torch import Tensor

SHAPES = (packed([128, 128], 8, 8, 64, False), dense(2, 128, 8, 8, 64, False))
LAYERS, ROUNDS = 24, 21


def host_costs(device: torch.device, names: Sequence[str], rounds: int = ROUNDS) -> list[Front]:
    """Return what each backend's calls take the host through both fronts; of those that run them.

    Without the compiled call cache, and with it where it is built.
    """
    with untouched():
        found = list(_through_both(device, names, rounds)) if captured.call_cache_in_use else []
        with call_cache.paused():
            return [*_through_both(device, names, rounds), *found]


def _through_both(device: torch.device, names: Sequence[str], rounds: int) -> Iterator[Front]:
    for varlen in (True, False):
        yield from _through(varlen, device, names, rounds)


def _through(varlen: bool, device: torch.device, names: Sequence[str], rounds: int) -> Iterator[Front]:
    batch = Batch(SHAPES[not varlen], device, LAYERS)
    sides = {name: Side(batch.with_attnreg, batch.front_sets, led_by(name)) for name in names}
    able = {
        name: functools.partial(_host, side, device)
        for name, side in sides.items()
        if _runs(name, side, device)
    }
    for name, taken in _guarded(able, device, rounds).items():
        for direction, seconds in zip(get_args(Direction), zip(*taken, strict=True), strict=True):
            yield Front(name, varlen, direction, min(seconds) * 1e6, bool(captured.call_cache_in_use))


def _host(side: Side, device: torch.device) -> tuple[float, float]:
    """Return the seconds that the host takes for one call of the graph, forward and backward."""
    sets, timer = side.sets, timer_for(device)
    with side.within():
        for _ in range(
            2
        ):  # each has several calls, more than it takes after a registration until all is cached
            layers_backward(layers(side.front, sets), sets)
        outs: list[Tensor] = []
        forward = timer.host(lambda: outs.extend(layers(side.front, sets)), 1)
        backward = timer.host(lambda: layers_backward(outs, sets), 1)
    return forward / len(sets), backward / len(sets)


def _guarded(
    measures: Mapping[str, Callable[[], tuple[float, float]]], device: torch.device, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Measure in rounds, without the backends that can't run so many calls at once."""
    able = {}
    for name, measure in measures.items():
        try:
            measure()
        except Exception as error:  # noqa: BLE001 - the points of the table will say what is wrong with it
            check_alive(device, error)
        else:
            able[name] = measure
    return interleaved(able, rounds)


def _runs(name: str, side: Side, device: torch.device) -> bool:
    reset_stats()
    try:
        side.results()
    except Exception as error:  # noqa: BLE001 - as above
        check_alive(device, error)
        return False
    return not wrong_backend(name, ran())

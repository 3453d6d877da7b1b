"""What the host takes for a call as a program makes it, with each backend: for `attnreg tune`.

Calls on 2 sequences of 128 tokens, 8 heads of 64, bfloat16: so small that the host's work is all there is,
and what it takes hardly depends on the size. Several calls make one graph, as a model's layers do; forwards
are also timed without one.

The fastest round counts. A round is the mean of many calls; some took twice as long as others, for seconds
and with all backends alike, as the machine had slowed down.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from attnreg import api
from attnreg.bench.compare import Batch
from attnreg.bench.shapes import dense, packed
from attnreg.bench.sides import Side, layers, layers_backward, ran, untouched, wrong_backend
from attnreg.contract.spec import Direction
from attnreg.dispatch import call_cache
from attnreg.dispatch.counters import reset_stats
from attnreg.measure.timing import interleaved, timer_for
from attnreg.torchlib import captured
from attnreg.tuning.checks import check_alive
from attnreg.tuning.points import Front

SHAPES = (packed([128, 128], 8, 8, 64, False), dense(2, 128, 8, 8, 64, False))
LAYERS, ROUNDS = 24, 21
# The directions, and whether autograd records the call.
MEASURED: tuple[tuple[Direction, bool], ...] = (("forward", True), ("backward", True), ("forward", False))


def host_costs(device: torch.device, names: Sequence[str], rounds: int = ROUNDS) -> list[Front]:
    """Return what each backend's calls take the host through both fronts; of those that run them.

    Without the compiled call cache, and with it where it is built.
    """
    with untouched():
        found = list(_through_both(device, names, rounds)) if captured.call_cache_in_use else []
        with call_cache.paused():
            return [*_through_both(device, names, rounds), *found]


def _through_both(device: torch.device, names: Sequence[str], rounds: int) -> Iterator[Front]:
    for shape in SHAPES:
        batch = Batch(shape, device, LAYERS)
        able = {}
        for name in names:
            within = functools.partial(api.register_backend, name)
            side = Side(batch.with_attnreg, batch.front_sets, within, wanted=name)
            if _is_able(side, device):
                able[name] = functools.partial(_host, side, device)
        for name, taken in interleaved(able, rounds).items():
            for (direction, recorded), seconds in zip(MEASURED, zip(*taken, strict=True), strict=True):
                compiled = bool(captured.call_cache_in_use)
                yield Front(name, shape.varlen, direction, min(seconds) * 1e6, compiled, recorded)


def _host(side: Side, device: torch.device) -> tuple[float, ...]:
    """Return the seconds that the host takes for one call of each that is `MEASURED`."""
    sets, timer = side.sets, timer_for(device)
    with side.within():
        # Each has several calls, more than it takes after a registration until all is cached.
        for _ in range(2):
            layers_backward(layers(side.front, sets), sets)
        outs: list[Tensor] = []
        forward = timer.host(lambda: outs.extend(layers(side.front, sets)), 1)
        backward = timer.host(lambda: layers_backward(outs, sets), 1)
        with torch.no_grad():
            layers(side.front, sets)
            alone = timer.host(lambda: layers(side.front, sets), 1)
    return forward / len(sets), backward / len(sets), alone / len(sets)


def _is_able(side: Side, device: torch.device) -> bool:
    """Whether the side's backend runs such a call, and so many of them at once."""
    reset_stats()
    try:
        side.results()
        if wrong_backend(side.wanted, ran()):
            return False
        _host(side, device)
    except Exception as error:  # noqa: BLE001 - the points of the table will say what is wrong with it
        check_alive(device, error)
        return False
    return True

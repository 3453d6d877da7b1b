"""What the host takes for a call as a program makes it, with each backend: for `attnreg tune`.

The calls are so small that only the host's time shows, in bfloat16. The host's time depends on which kernels
a call launches, hardly on its size. So there is a call for each front, and further calls for kernels that
split their keys. Several calls share a graph of autograd, as a model's layers do. Forwards are also timed
without a graph.

A round goes through all backends and shapes, and is the mean of many calls. The fastest round counts: at
times a machine slows down for seconds, and calls of all backends then take twice as long.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from attnreg import api
from attnreg.core import aten
from attnreg.core.contract.spec import AttentionSpec, Direction
from attnreg.core.dispatch import call_cache, planning
from attnreg.core.dispatch.counters import reset_stats
from attnreg.core.times.kinds import FEW, LONG, MANY, ONE, SHARED
from attnreg.core.times.points import Front
from attnreg.core.torchlib import captured
from attnreg.tools.bench.compare import Batch
from attnreg.tools.bench.shapes import decode, dense, packed, trains
from attnreg.tools.bench.sides import Side, layers, layers_backward, ran, untouched, wrong_backend
from attnreg.tools.measure import Case
from attnreg.tools.measure.timing import interleaved, timer_for
from attnreg.tools.tuning.checks import check_alive
from attnreg.tools.tuning.session import Session

SHAPES = (packed([128, 128], 8, 8, 64, False), dense(2, 128, 8, 8, 64, False))
OTHERS = (
    (MANY + SHARED, packed([128, 128], 8, 2, 64, False)),
    (MANY + SHARED, dense(2, 128, 8, 2, 64, False)),
    (FEW, dense(1, 512, 8, 8, 64, False)),
    (FEW + SHARED, dense(1, 512, 8, 2, 64, False)),
    (ONE, decode(4, 1, 384, 8, 2, 64)),
    (LONG, decode(4, 1, 2048, 8, 2, 64)),
)
LAYERS, ROUNDS = 24, 15
# The directions, and whether autograd records the call; without a gradient there is the last one only.
MEASURED: tuple[tuple[Direction, bool], ...] = (("forward", True), ("backward", True), ("forward", False))


def measure(session: Session, hurried: bool = False) -> None:
    """Measure the host time per call on a GPU, for each backend that lacks it in the table.

    `hurried`: only with the kind of routers in use, as without the call cache it takes three times as long.
    """
    if names := _missing(session, hurried):
        session.add_fronts(host_costs(session.device, names, as_used=hurried))


def specs(session: Session, hurried: bool = False) -> list[AttentionSpec]:
    """Return the calls that `measure` makes."""
    device = planning.device_of(session.device)
    shapes = (*SHAPES, *(shape for _, shape in OTHERS)) if _missing(session, hurried) else ()
    return [shape.spec(device, needs_backward=trains(shape)) for shape in shapes]


def _missing(session: Session, hurried: bool) -> list[str]:
    if session.device.type != "cuda":
        return []
    aten.ensure()  # installs the routers: after that it is known whether they are compiled
    in_use = bool(captured.call_cache_in_use)
    wanted = {in_use} if hurried else {False, in_use}
    # Older tables have times of fewer shapes.
    known = {(front.backend, front.compiled) for front in session.fronts if front.shape == MANY + SHARED}
    names = [entry.name for entry in session.entries]
    return [name for name in names if not known.issuperset((name, compiled) for compiled in wanted)]


def host_costs(
    device: torch.device, names: Sequence[str], rounds: int = ROUNDS, *, as_used: bool = False
) -> list[Front]:
    """Return the host time of each backend's calls through both fronts, if the backend runs them.

    Without the compiled call cache, and with it where it is built; `as_used`: then with it alone.
    """
    with untouched():
        compiled = list(_of_all(device, names, rounds)) if captured.call_cache_in_use else []
        if compiled and as_used:
            return compiled
        with call_cache.paused():
            return [*_of_all(device, names, rounds), *compiled]


def _of_all(device: torch.device, names: Sequence[str], rounds: int) -> Iterator[Front]:
    able = {}
    for like, shape in (*((MANY, shape) for shape in SHAPES), *OTHERS):
        batch = Batch(shape, device, LAYERS)
        for name in names:
            within = functools.partial(api.register_backend, name)
            side = Side(batch.with_attnreg, batch.front_sets, within, wanted=name)
            if _is_able(side, device, shape):
                able[name, like, shape] = functools.partial(_host, side, device, shape)
    compiled = bool(captured.call_cache_in_use)
    for (name, like, shape), taken in interleaved(able, rounds).items():
        measured = MEASURED if trains(shape) else MEASURED[-1:]
        for (direction, recorded), seconds in zip(measured, zip(*taken, strict=True), strict=True):
            yield Front(name, shape.varlen, direction, min(seconds) * 1e6, compiled, recorded, like)


def _host(side: Side, device: torch.device, shape: Case) -> tuple[float, ...]:
    """Return the seconds that the host takes for one call of each that is `MEASURED`."""
    sets, timer, taken = side.sets, timer_for(device), []
    with side.within():
        # Each has several calls, more than it takes after a registration until all is cached.
        if trains(shape):
            for _ in range(2):
                layers_backward(layers(side.front, sets), sets)
            outs: list[Tensor] = []
            taken.append(timer.host(lambda: outs.extend(layers(side.front, sets)), 1))
            taken.append(timer.host(lambda: layers_backward(outs, sets), 1))
        with torch.no_grad():
            layers(side.front, sets)
            taken.append(timer.host(lambda: layers(side.front, sets), 1))
    return tuple(seconds / len(sets) for seconds in taken)


def _is_able(side: Side, device: torch.device, shape: Case) -> bool:
    """Whether the side's backend runs such a call, and so many of them at once."""
    reset_stats()
    try:
        side.results(trains(shape))
        backends = ran()
        if not trains(shape):
            del backends["backward"]
        if wrong_backend(side.wanted, backends):
            return False
        _host(side, device, shape)
    except Exception as error:  # noqa: BLE001 - the points of the table will say what is wrong with it
        check_alive(device, error)
        return False
    return True

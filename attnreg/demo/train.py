"""Train one model twice, on packed and on padded batches of the same documents, and compare the two.

The two take turns step by step, so that other load on the machine slows both alike.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

import attnreg
from attnreg.demo.layout import packed, padded
from attnreg.demo.model import HEAD_DIM, HEADS, ByteTransformer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from attnreg import Explanation, Stats
    from attnreg.demo.layout import Layout

LAYOUTS = {"packed": packed, "padded": padded}

# Measured: rounding alone keeps the losses of the two within 3e-6 for 100 steps. Attention across two of
# twelve documents changes them by 7e-4, a softmax scale that is off by a hundredth by 9e-5.
TOLERANCE = 1e-5

# The first step allocates memory and fills caches: its time is not that of the others.
WARM_UP = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The losses and times of one batch.

    Attributes:
        lengths: of the documents, in bytes to predict.
        loss: for each layout, in nats per byte.
        seconds: for each layout: forward, backward and update.
    """

    lengths: tuple[int, ...]
    loss: dict[str, float]
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All steps, and what attnreg has to say about them.

    Attributes:
        steps: one for each batch.
        ran: how often each backend ran.
        why: which backend was chosen for the last batch, and why.
    """

    steps: tuple[Step, ...]
    ran: Stats
    why: Explanation

    @property
    def largest_difference(self) -> float:
        """The largest difference between the two losses of a step; NaN if any loss is."""
        differences = torch.tensor([step.loss["packed"] - step.loss["padded"] for step in self.steps])
        return float(differences.abs().max())

    @property
    def agrees(self) -> bool:
        """Whether the two trainings differ by rounding only."""
        return self.largest_difference <= TOLERANCE

    @property
    def lengths(self) -> list[int]:
        """The lengths of all documents, in bytes to predict, sorted."""
        return sorted(length for step in self.steps for length in step.lengths)

    @property
    def padding(self) -> float:
        """The share of the padded batches that is padding."""
        size = sum(len(step.lengths) * max(step.lengths) for step in self.steps)
        return 1 - sum(self.lengths) / size

    def throughput(self, layout: str) -> float:
        """Return the median bytes of text per second; padding is not counted."""
        return median(sum(step.lengths) / step.seconds[layout] for step in self.steps[WARM_UP:])

    @property
    def speedup(self) -> float:
        """The speed of the packed training, divided by that of the padded one."""
        return self.throughput("packed") / self.throughput("padded")


def train(batches: Iterable[list[bytes]], context: int, device: torch.device, seed: int) -> Iterator[Step]:
    """Yield a step per batch, from the same weights for both layouts."""
    torch.manual_seed(seed)
    model = ByteTransformer(context).to(device)
    models = {name: copy.deepcopy(model) for name in LAYOUTS}
    optimizers = {name: torch.optim.AdamW(models[name].parameters(), lr=3e-3) for name in LAYOUTS}
    order = list(LAYOUTS)
    for documents in batches:
        loss, seconds = {}, {}
        for name in order:
            layout = LAYOUTS[name](documents, device)
            loss[name], seconds[name] = _update(models[name], optimizers[name], layout)
        order.reverse()  # neither is always the one with warm caches
        yield Step(lengths=tuple(len(text) - 1 for text in documents), loss=loss, seconds=seconds)


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout) -> tuple[float, float]:
    """Take one step; return the loss before it, and how long it took."""
    _synchronize(layout.tokens.device)
    start = time.perf_counter()
    optimizer.zero_grad()
    loss = model(layout)
    loss.backward()
    optimizer.step()
    _synchronize(layout.tokens.device)
    return loss.item(), time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def explain_step(step: Step, device: torch.device) -> Explanation:
    """Return which backend attnreg chooses for the packed attention of a step, and why."""
    query = torch.empty(sum(step.lengths), HEADS, HEAD_DIM, device=device, requires_grad=True)
    offsets = torch.tensor([0, *step.lengths], device=device).cumsum(0, dtype=torch.int32)
    longest = max(step.lengths)
    return attnreg.explain(query, query, query, offsets, offsets, longest, longest, is_causal=True)

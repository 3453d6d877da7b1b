"""Train one model twice, on packed and on padded batches of the same documents, step by step.

The two take turns, so that whatever else the machine does slows both alike.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnreg.demo.layout import packed, padded
from attnreg.demo.model import ByteTransformer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from attnreg.demo.layout import Layout

__all__ = ["LAYOUTS", "Step", "train"]

LAYOUTS = {"packed": packed, "padded": padded}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one batch gave.

    Attributes:
        lengths: of the documents, in bytes to predict.
        loss: for each layout, in nats per byte.
        seconds: for each layout: forward, backward and update.
    """

    lengths: tuple[int, ...]
    loss: dict[str, float]
    seconds: dict[str, float]


def train(batches: Iterable[list[bytes]], context: int, device: torch.device, seed: int) -> Iterator[Step]:
    """Yield a step per batch, from the same weights for both layouts."""
    torch.manual_seed(seed)
    model = ByteTransformer(context).to(device)
    models = {name: copy.deepcopy(model) for name in LAYOUTS}
    optimizers = {name: torch.optim.AdamW(models[name].parameters(), lr=3e-3) for name in LAYOUTS}
    turns = list(LAYOUTS)
    for documents in batches:
        loss, seconds = {}, {}
        for name in turns:
            layout = LAYOUTS[name](documents, device)
            loss[name], seconds[name] = _update(models[name], optimizers[name], layout)
        turns.reverse()  # neither is always the one that finds the caches warm
        yield Step(lengths=tuple(len(text) - 1 for text in documents), loss=loss, seconds=seconds)


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout) -> tuple[float, float]:
    """Take one step; return the loss before it, and how long it took."""
    _wait(layout.tokens.device)
    start = time.perf_counter()
    optimizer.zero_grad()
    loss = model(layout)
    loss.backward()
    optimizer.step()
    _wait(layout.tokens.device)
    return loss.item(), time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

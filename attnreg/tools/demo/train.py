"""Train one model twice, on packed and on padded batches of the same documents, and compare the two.

The model is a small transformer over bytes, the same for both: only the attention depends on which bytes
belong to one document, and it comes with the batch. The two trainings take turns step by step, so that other
load on the machine slows both alike.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median, quantiles

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnreg
from attnreg import Explanation, Stats
from attnreg.tools.demo.batches import BatchLayout, packed, padded

LAYOUTS = {"packed": packed, "padded": padded}

LAYERS, HEADS, HEAD_DIM = 2, 4, 32
WIDTH = HEADS * HEAD_DIM

# Measured: rounding alone keeps the losses of the two within 3e-6 for 100 steps. Attention across two of
# twelve documents changes them by 7e-4, a softmax scale that is off by a hundredth by 9e-5.
TOLERANCE = 1e-5

# The first step allocates memory and fills caches, so its time doesn't count.
WARM_UP = 1


class Block(nn.Module):
    """A pre-norm transformer block: attention, then a multilayer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Return the hidden states after the block, (T, WIDTH) or (B, S, WIDTH) as `hidden`, float32."""
        qkv = self.qkv(self.before_attention(hidden)).unflatten(-1, (3, HEADS, HEAD_DIM))
        hidden = hidden + self.out(attend(*qkv.unbind(-3)).flatten(-2))
        out: Tensor = hidden + self.perceptron(hidden)
        return out


class ByteTransformer(nn.Module):
    """Predicts the next byte of a document from at most `context` bytes."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(context, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.logits = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, batch: BatchLayout) -> Tensor:
        """Return the mean cross entropy per byte of text, in nats; padding is not counted."""
        hidden = self.bytes(batch.tokens) + self.positions(batch.positions)
        for block in self.blocks:
            hidden = block(hidden, batch.attend)
        logits = self.logits(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """The losses and times of one batch."""

    lengths: tuple[int, ...]  # of the documents, in bytes to predict
    loss: dict[str, float]  # for each layout, in nats per byte
    seconds: dict[str, float]  # for each layout: forward, backward and update


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All steps, and what attnreg has to say about them."""

    steps: tuple[TrainingStep, ...]
    ran: Stats  # how often each backend ran
    why: Explanation  # which backend was chosen for the last batch

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
        return median(self.speeds(layout))

    def speeds(self, layout: str) -> list[float]:
        """Return the bytes of text per second of each step that counts, sorted."""
        return sorted(sum(step.lengths) / step.seconds[layout] for step in self.steps[WARM_UP:])

    def spread(self, layout: str) -> tuple[float, float]:
        """Return between which speeds the middle half of the steps lies."""
        speeds = self.speeds(layout)
        if len(speeds) == 1:
            return speeds[0], speeds[0]
        low, _, high = quantiles(speeds, method="inclusive")
        return low, high

    @property
    def speedup(self) -> float:
        """The speed of the packed training, divided by the speed of the padded training."""
        return self.throughput("packed") / self.throughput("padded")


def train(
    batches: Iterable[list[bytes]], context: int, device: torch.device, seed: int
) -> Iterator[TrainingStep]:
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
        yield TrainingStep(lengths=tuple(len(text) - 1 for text in documents), loss=loss, seconds=seconds)


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, layout: BatchLayout) -> tuple[float, float]:
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


def explain_step(step: TrainingStep, device: torch.device) -> Explanation:
    """Return which backend attnreg chooses for the packed attention of a step, and why."""
    query = torch.empty(sum(step.lengths), HEADS, HEAD_DIM, device=device, requires_grad=True)
    offsets = torch.tensor([0, *step.lengths], device=device).cumsum(0, dtype=torch.int32)
    longest = max(step.lengths)
    return attnreg.explain(query, query, query, offsets, offsets, longest, longest, is_causal=True)

"""What the two trainings say: whether they agree, and how fast each was."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

import attnreg
from attnreg.demo.model import HEAD_DIM, HEADS

if TYPE_CHECKING:
    from attnreg import Explanation, Stats
    from attnreg.demo.train import Step

__all__ = ["TOLERANCE", "Result", "explain_step"]

# Measured: rounding alone keeps the losses of the two within 3e-6 for 100 steps. Two documents of
# twelve that see each other move them by 7e-4, a softmax scale that is off by a hundredth by 9e-5.
TOLERANCE = 1e-5

# The first step allocates and fills caches: its time says nothing about the rest.
WARM_UP = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The steps that were taken, and attnreg's record of them.

    Attributes:
        ran: how often which backend ran.
        why: what decided, for the last batch.
    """

    steps: tuple[Step, ...]
    ran: Stats
    why: Explanation

    @property
    def largest_difference(self) -> float:
        """How far apart the two losses ever were; NaN if one ever was."""
        apart = torch.tensor([step.loss["packed"] - step.loss["padded"] for step in self.steps])
        return float(apart.abs().max())

    @property
    def agrees(self) -> bool:
        """Whether the two trainings are one but for rounding."""
        return self.largest_difference <= TOLERANCE

    @property
    def lengths(self) -> list[int]:
        """Of every document, in bytes to predict, the shortest first."""
        return sorted(length for step in self.steps for length in step.lengths)

    @property
    def padding(self) -> float:
        """The share of the padded batches that holds no text."""
        room = sum(len(step.lengths) * max(step.lengths) for step in self.steps)
        return 1 - sum(self.lengths) / room

    def throughput(self, layout: str) -> float:
        """Return the median bytes of text per second; padding doesn't count."""
        return median(sum(step.lengths) / step.seconds[layout] for step in self.steps[WARM_UP:])

    @property
    def speedup(self) -> float:
        """How many times as fast the packed training was."""
        return self.throughput("packed") / self.throughput("padded")


def explain_step(step: Step, device: torch.device) -> Explanation:
    """Return what attnreg decides about the packed attention of a step."""
    query = torch.empty(sum(step.lengths), HEADS, HEAD_DIM, device=device, requires_grad=True)
    offsets = torch.tensor([0, *step.lengths], device=device).cumsum(0, dtype=torch.int32)
    longest = max(step.lengths)
    return attnreg.explain(query, query, query, offsets, offsets, longest, longest, is_causal=True)

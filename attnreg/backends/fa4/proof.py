"""Whether a call done again comes out as the package's own.

A launch that nobody saw would be left out without a word. So one call of each kind is done again in
memory full of NaN, and the device compares; it isn't waited for (`answers`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from attnreg.torchlib.readback import AsyncReadback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnreg.backends.fa4.recipe import Recipe

__all__ = ["Proof", "proof_of"]

# What the device answers. Values of which none is finite tell nothing: a loss that is scaled too far
# brings such gradients.
NO, YES, VAGUE = 0, 1, 3  # 2 is `PENDING`

# Of the largest value: backwards add up in any order, so that not even the package repeats itself. A
# result that is nothing but rounding is held to the largest of all.
NEAR, ROUNDING = 0.02, 1e-4

log = logging.getLogger("attnreg")


class Proof:
    """What the device has said of a kind; nothing holds before it has.

    Attributes:
        vague: whether the call that it was asked about told nothing, so that another has to.
    """

    def __init__(self, direction: str, answer: AsyncReadback | None) -> None:
        self._direction = direction
        self._answer = answer
        self._holds = False
        self.vague = False

    @property
    def holds(self) -> bool:
        """Whether calls of the kind may be done again."""
        answer = self._answer  # once: another thread may hear it meanwhile
        if answer is not None and (numbers := answer.read()) is not None:
            self._hear(numbers[0])
            self._answer = None
        return self._holds

    @property
    def refuted(self) -> bool:
        """Whether they may never be."""
        return not (self.holds or self.vague) and self._answer is None

    def _hear(self, said: int) -> None:
        self._holds, self.vague = said == YES, said == VAGUE
        if said == NO:
            log.info(
                "FA4 goes through its package's Python for a kind of %s: launched without it, "
                "the results were others",
                self._direction,
            )


def proof_of(
    direction: str, recipe: Recipe, inputs: Sequence[Tensor | None], results: Sequence[Tensor]
) -> Proof | None:
    """Return the proof that a recipe leads to these results, begun; refuted where it breaks.

    None where there was no memory for it: another call of the kind may be smaller.
    """
    try:
        slots = recipe.allocated(inputs)
        for slot, *_, dtype in recipe.allocations:
            if slot not in recipe.zeroed:
                slots[slot].fill_(torch.nan if dtype.is_floating_point else 0)
        answer = AsyncReadback(_said(recipe.launched(slots), results))
    except torch.OutOfMemoryError:
        return None
    except Exception as error:  # noqa: BLE001 - the call itself has run, and must not fail for this
        log.info(
            "FA4 goes through its package's Python for a kind of %s: launched without it, it failed: %s",
            direction,
            error,
        )
        return Proof(direction, None)
    return Proof(direction, answer)


def _said(got: Sequence[Tensor], expected: Sequence[Tensor]) -> Tensor:
    """Return on the device whether all tensors are the same, as far as a GPU repeats itself."""
    largest = [x.nan_to_num(0.0, 0.0, 0.0).abs().amax().float() for x in expected]
    least = torch.stack(largest).amax() * ROUNDING
    pairs = zip(got, expected, largest, strict=True)
    same = torch.stack([_near(x, y, (NEAR * own).maximum(least)) for x, y, own in pairs]).all()
    vague = ~torch.stack([x.isfinite().any() for x in expected]).all()
    return same * (YES + vague * (VAGUE - YES))


def _near(got: Tensor, expected: Tensor, limit: Tensor) -> Tensor:
    # Of infinities the difference is NaN, which is near nothing.
    same = (got - expected).abs_() <= limit
    same |= got == expected
    same |= got.isnan() & expected.isnan()
    return same.all()

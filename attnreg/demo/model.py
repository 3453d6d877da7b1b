"""A transformer over bytes, as small as one that learns: for packed and padded batches alike.

Nothing but its attention knows which bytes belong to one document, and that comes with the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnreg.demo.layout import Layout

__all__ = ["ByteTransformer"]


class Block(nn.Module):
    """Attention, then a multilayer perceptron, each on normalised input and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Return what the next block reads."""
        qkv = self.qkv(self.before_attention(hidden)).unflatten(-1, (3, self.heads, -1))
        hidden = hidden + self.out(attend(*qkv.unbind(-3)).flatten(-2))
        return hidden + self.perceptron(hidden)


class ByteTransformer(nn.Module):
    """Predicts from the bytes of a document so far the next one."""

    def __init__(self, context: int, width: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, 256, bias=False)

    def forward(self, batch: Layout) -> Tensor:
        """Return the mean cross entropy per byte of text, in nats."""
        hidden = self.bytes(batch.tokens) + self.positions(batch.positions)
        for block in self.blocks:
            hidden = block(hidden, batch.attend)
        logits = self.logits(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())

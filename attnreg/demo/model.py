"""A small transformer over bytes, the same for packed and padded batches.

Only the attention depends on which bytes belong to one document, and it comes with the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnreg.demo.layout import Layout

LAYERS, HEADS, HEAD_DIM = 2, 4, 32
WIDTH = HEADS * HEAD_DIM


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
        """Return the hidden states after the block."""
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

    def forward(self, batch: Layout) -> Tensor:
        """Return the mean cross entropy per byte of text, in nats; padding is not counted."""
        hidden = self.bytes(batch.tokens) + self.positions(batch.positions)
        for block in self.blocks:
            hidden = block(hidden, batch.attend)
        logits = self.logits(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())

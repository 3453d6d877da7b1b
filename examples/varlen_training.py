"""Train on documents of different lengths, packed end to end, with no padding anywhere.

The documents are the paragraphs of this very file, and the model learns to predict their bytes.
Besides query, key and value, `varlen_attn` needs to know where each document starts. attnreg chooses
the backend, on a CPU as on a GPU.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnreg

WIDTH, HEADS, KV_HEADS = 64, 4, 2  # grouped-query attention: two query heads share a key head
HEAD_DIM = WIDTH // HEADS
STEPS = 40


class Attention(nn.Module):
    """Causal attention, each byte to those before it in its own document."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_DIM)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, offsets: Tensor, longest: int) -> Tensor:
        query = self.query(hidden).unflatten(-1, (HEADS, HEAD_DIM))
        key, value = self.key_value(hidden).unflatten(-1, (2, KV_HEADS, HEAD_DIM)).unbind(-3)
        attended = attnreg.varlen_attn(
            query, key, value, offsets, offsets, longest, longest, is_causal=True, enable_gqa=True
        )
        return hidden + self.out(attended.flatten(-2))


class Model(nn.Module):
    """Predicts each next byte from those before it in its document."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(longest, WIDTH)
        self.attention = Attention()
        self.logits = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, 256)
        )

    def forward(self, tokens: Tensor, offsets: Tensor, longest: int) -> Tensor:
        starts = offsets[:-1].repeat_interleave(offsets.diff())
        positions = torch.arange(len(tokens), device=tokens.device) - starts
        hidden = self.bytes(tokens) + self.positions(positions)
        return self.logits(self.attention(hidden, offsets, longest))


def pack(documents: list[Tensor]) -> tuple[Tensor, Tensor, int]:
    """Return all tokens, where each document starts and the last one ends, and the longest length."""
    lengths = torch.tensor([len(document) for document in documents])
    offsets = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return torch.cat(documents), offsets, int(lengths.max())


torch.manual_seed(0)
paragraphs = [torch.tensor(list(text.encode())) for text in Path(__file__).read_text().split("\n\n")]
tokens, offsets, longest = pack([document[:-1] for document in paragraphs])
targets, _, _ = pack([document[1:] for document in paragraphs])
model = Model(longest)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

print(f"{len(paragraphs)} documents of up to {longest} bytes, {len(tokens)} in all and none of them padding")
for step in range(1, STEPS + 1):
    loss = F.cross_entropy(model(tokens, offsets, longest), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 1 or step % 20 == 0:
        print(f"step {step:>2}  loss {loss.item():.3f}")
for backend, calls in attnreg.stats().calls.items():
    print(f"{backend} ran {calls['forward']} forwards and {calls['backward']} backwards")

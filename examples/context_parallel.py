"""Train on packed documents whose tokens are spread over GPUs, or over processes on a CPU with gloo.

    python examples/context_parallel.py                  # a process for each GPU, or two on a CPU
    python examples/context_parallel.py --tokens 65536 --longest 65536

Each rank has a part of the batch's tokens, and the whole model. Attention is the only part of a model in
which tokens meet, so the model stays as it is and runs inside `with spread:`. At the end rank 0 trains the
same model on the whole batch by itself and prints by how much the losses differ.
"""

import argparse
import contextlib
import random
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import attnreg

WIDTH, HEADS, LAYERS = 128, 8, 2


class Block(nn.Module):
    """Causal attention in each document, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: Tensor, offsets: Tensor, longest: int) -> Tensor:
        shape = len(hidden), 3, HEADS, WIDTH // HEADS  # of no tokens -1 would be any number
        query, key, value = self.qkv(self.norm(hidden)).view(shape).unbind(1)
        attended = attnreg.varlen_attn(query, key, value, offsets, offsets, longest, longest, is_causal=True)
        hidden = hidden + self.out(attended.flatten(1))
        return hidden + self.mlp(hidden)


class Model(nn.Module):
    """Predicts each next byte from those before it in its document."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(longest, WIDTH)
        self.blocks, self.logits = nn.ModuleList(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, positions: Tensor, offsets: Tensor, longest: int) -> Tensor:
        hidden = self.bytes(tokens) + self.positions(positions)
        for block in self.blocks:
            hidden = block(hidden, offsets, longest)
        return self.logits(hidden)


def documents(count: int, longest: int) -> tuple[list[int], Tensor]:
    """Return where documents begin and end, the first as long as any, and `count` + 1 bytes of this file."""
    draw, ends, text = random.Random(0), [0, longest], Path(__file__).read_bytes()
    while ends[-1] < count:
        ends.append(min(count, ends[-1] + draw.randint(min(count // 130 + 1, longest), longest)))
    return ends, torch.tensor(list(text * (count // len(text) + 2)))[: count + 1]


def train(spread: attnreg.ContextParallel, is_whole: bool, options: argparse.Namespace) -> list[float]:
    """Return the losses of training on a batch, on all ranks together or on this one alone."""
    torch.manual_seed(0)
    device, longest, offsets = options.device, spread.longest, spread.cu_seq(options.device)
    _, text = documents(options.tokens, options.longest)
    tokens, targets = text[:-1].to(device), text[1:].to(device)
    starts = offsets[:-1].repeat_interleave(offsets.diff())
    positions = torch.arange(options.tokens, device=device) - starts
    if not is_whole:
        tokens, targets, positions = (spread.shard(x) for x in (tokens, targets, positions))
    model = Model(longest).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(options.steps):
        with contextlib.nullcontext() if is_whole else spread:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = model(tokens, positions, offsets, longest)
            loss = F.cross_entropy(logits.float(), targets, reduction="sum") / options.tokens
            loss.backward()
        if not is_whole:  # as DDP and FSDP do, but they take the mean
            for x in (loss.detach(), *(parameter.grad for parameter in model.parameters())):
                dist.all_reduce(x)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def work(rank: int, store: str, options: argparse.Namespace) -> None:
    """Train as one rank; rank 0 then trains alone and prints both losses."""
    backend = "gloo"
    if options.device == "cuda":
        torch.cuda.set_device(rank)
        backend = "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    ends, _ = documents(options.tokens, options.longest)
    layout = attnreg.spread_documents(ends, options.ranks, width=WIDTH)
    spread = attnreg.context_parallel(dist.group.WORLD, layout, method=options.method)
    together = train(spread, False, options)
    if rank == 0:
        print(f"{len(ends) - 1} documents of up to {spread.longest} tokens; ranks have {layout.rows}")
        alone = train(spread, True, options)
        for step, (one, other) in enumerate(zip(together, alone, strict=True), 1):
            print(f"step {step}  loss {one:.5f}  on one rank {other:.5f}")
        print(f"largest difference {max(abs(a - b) for a, b in zip(together, alone, strict=True)):.1e}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start a process for each rank."""
    count = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if count > 1 else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=count if count > 1 else 2)
    parser.add_argument("--tokens", type=int, default=2000, help="of the batch, all documents together")
    parser.add_argument(
        "--longest",
        type=int,
        help="tokens of the longest document, up to --tokens; a third of them unless given",
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--method", default="auto", choices=("auto", "all_to_all", "all_gather", "ring"))
    options = parser.parse_args()
    for name in ("ranks", "tokens", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: got {getattr(options, name)}, expected a number from 1 on")
    if options.longest is None:
        options.longest = max(options.tokens // 3, 1)
    if not 1 <= options.longest <= options.tokens:
        parser.error(f"--longest: got {options.longest}, expected a number from 1 to {options.tokens}")
    if options.device == "cuda" and options.ranks > count:
        parser.error(
            f"--ranks: got {options.ranks} with cuda, expected at most the {count} GPUs that are here"
        )
    if options.method == "all_to_all" and HEADS % options.ranks:
        parser.error(f"--ranks: got {options.ranks} with all_to_all, expected a divisor of the {HEADS} heads")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (str(Path(folder, "store")), options), options.ranks)


if __name__ == "__main__":
    main()

"""Training steps of a Llama on packed documents, on each backend, and of the same, padded, through `sdpa`.

    python benchmarks/llama_packed.py [--device cpu|cuda] [--backends FA2,FA4,cuDNN] [--steps N]
        [--documents N] [--out FILE]

On a GPU the model has 1.1 billion parameters in bfloat16. A step has 8 documents of 100 to 4,000 tokens,
which with padding are too many for 80 GB (`--documents 4`). Lengths are new in each step, as in a training.
The same model is trained in several ways, which take turns with the same lengths: by attnreg's choice, on
each backend, and padded by transformers' own implementation. The figure is tokens per second without padding,
the median of the steps after the first two. A second figure is the share of a step that the host took to
enqueue it.
"""

from __future__ import annotations

import contextlib
import random
import statistics
from typing import TYPE_CHECKING, Any

import torch
from _program import parser_of, show, show_machine
from transformers import LlamaConfig, LlamaForCausalLM

import attnreg
from attnreg.integrations.transformers import install
from attnreg.tools.bench.report import save
from attnreg.tools.measure.timing import timer_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

CHOSEN, PADDED = "what attnreg chooses", "padded, sdpa"
WARM_UP = 2
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000,
    },
    "cpu": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256,
    },
}  # fmt: skip
LENGTHS = {"cuda": (100, 4000), "cpu": (10, 200)}


def packed(lengths: Sequence[int], words: int, device: str) -> dict[str, Tensor]:
    """Return a batch of packed documents, which their positions separate."""
    tokens = torch.randint(words, (1, sum(lengths)), device=device)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    return {"input_ids": tokens, "position_ids": positions, "labels": tokens}


def padded(lengths: Sequence[int], words: int, device: str) -> dict[str, Tensor]:
    """Return a batch of documents, a row each, padded on the right."""
    tokens = torch.randint(words, (len(lengths), max(lengths)), device=device)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long().to(device)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def measure(
    device: str, backends: Sequence[str], steps: int, seed: int, documents: int
) -> dict[str, list[dict[str, float]]]:
    """Return tokens per second and the host's share of each step, by way."""
    install()
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZES[device], use_cache=False)
    model = LlamaForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ways, timer, draw = (CHOSEN, *backends, PADDED), timer_for(torch.device(device)), random.Random(seed)
    rows_of: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(WARM_UP + steps):
        lengths = [draw.randint(*LENGTHS[device]) for _ in range(documents)]
        for way in draw.sample(ways, len(ways)):
            if way == PADDED:
                attnreg.uninstall()  # PyTorch's own kernels run it
                model.set_attn_implementation("sdpa")
            else:
                attnreg.install()
                model.set_attn_implementation("attnreg")
            batch = (padded if way == PADDED else packed)(lengths, config.vocab_size, device)
            timer.wait()
            started = timer.now()
            with attnreg.use_backend(way) if way in backends else contextlib.nullcontext():
                model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            host = timer.now() - started
            timer.wait()
            taken = timer.now() - started
            rows_of[way].append({"tokens_per_second": sum(lengths) / taken, "host": host / taken})
    return {way: rows[WARM_UP:] for way, rows in rows_of.items()}


def main() -> None:
    """Measure every way and print the table."""
    parser = parser_of(__doc__, devices=SIZES)
    parser.add_argument("--backends", help="comma list; default: FA2,FA4,cuDNN on a GPU, cpu on a CPU")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=8)
    options = parser.parse_args()
    names = (options.backends or ("FA2,FA4,cuDNN" if options.device == "cuda" else "cpu")).split(",")
    show_machine()
    rows_of = measure(options.device, names, options.steps, options.seed, options.documents)
    save(options.out, {"seed": options.seed, "documents": options.documents, "steps": rows_of})
    cells = [
        (
            way, f"{statistics.median(row['tokens_per_second'] for row in rows):,.0f}",
            f"{statistics.median(row['host'] for row in rows):.2f}",
        )
        for way, rows in rows_of.items()
    ]  # fmt: skip
    show("Training steps of a Llama", ("way", "tokens/s", "the host's share of a step"), cells)


if __name__ == "__main__":
    main()

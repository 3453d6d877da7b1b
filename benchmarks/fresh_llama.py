"""Training steps of a Llama on packed documents whose lengths are new in each, beside a batch that repeats.

    python benchmarks/fresh_llama.py [--device cpu|cuda] [--rounds N] [--table FILE] [--quick] [--out FILE]

Steps are forward + backward, by transformers' own `sdpa`, by `attn_implementation="attnreg"`, and by `sdpa`
with attnreg installed and the policy "measured". They are checked, timed and shown as `attnreg bench fresh`
does with calls of attention alone. FILE of `--table` is the measured table to choose by.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from _program import parser_of, show, show_machine
from torch import Tensor

from attnreg import api
from attnreg.tools.bench import fresh
from attnreg.tools.bench.fresh.attention import OURS
from attnreg.tools.bench.fresh.turns import SAME, FreshRow, Stream, Way
from attnreg.tools.bench.report import Job
from attnreg.tools.bench.shapes import BOTH
from attnreg.tools.bench.sides import settings, torch_alone, untouched
from attnreg.tools.measure.rule import compare
from attnreg.tools.measure.sample import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Streams: other documents of as many tokens in all, and of another number.
DOCUMENTS, TOTALS = "new", "new total"
NAMED, MEASURED, TORCH = OURS, f"{OURS}, sdpa, measured", "torch's sdpa"
# A model that adds query, key and value in the place of attention: what new lengths cost the rest of it.
CONTROL, ADDED = "no attention", "attnreg_benchmark_added"
# Documents of a batch. Each has at least half of their mean and at most half more: the last one is also
# computed alone, by whole matrices.
COUNT = 8
IGNORED = -100  # a label that doesn't count

WIDTH, VOCABULARY = 1024, 8192
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        "hidden_size": WIDTH, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 32768,
    },
    "cpu": {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 64,
    },
}  # fmt: skip
TOKENS = {"cuda": (2048, 16384), "cpu": (64, 256)}


class Documents(NamedTuple):
    """A packed batch: what the model takes, and the tokens of its last document."""

    inputs: dict[str, Tensor]
    last: Tensor


class Model:
    """A Llama with random weights, and copies of it that say what is right."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    @functools.cached_property
    def model(self) -> Any:
        """The model, in the dtype that a program would train it in."""
        from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

        from attnreg.integrations.transformers import install

        install()
        AttentionInterface.register(ADDED, added)
        torch.manual_seed(0)
        config = LlamaConfig(**SIZES[self.device.type], use_cache=False)
        return LlamaForCausalLM(config).to(self.device, self.dtype)

    @functools.cached_property
    def _plain(self) -> dict[torch.dtype, Any]:
        """The model by plain PyTorch: in float64, and in its own dtype."""
        copies = {dtype: copy.deepcopy(self.model).to(dtype) for dtype in (torch.float64, self.dtype)}
        for plain in copies.values():
            plain.set_attn_implementation("eager")
        return copies

    def draw(self, chance: random.Random, total: int) -> Documents:
        """Return documents of new lengths; only the last one counts in the loss."""
        mean = total // COUNT
        ends = [place * mean + chance.randint(-mean // 4, mean // 4) for place in range(1, COUNT)]
        lengths = [end - start for start, end in itertools.pairwise([0, *ends, total])]
        vocabulary = SIZES[self.device.type]["vocab_size"]
        tokens = torch.randint(vocabulary, (1, total), device=self.device)
        positions = torch.cat([torch.arange(length) for length in lengths])[None].to(self.device)
        labels, start = tokens.clone(), total - lengths[-1]
        labels[:, : start + 1] = IGNORED  # the last document's first token is the one before's label
        inputs = {"input_ids": tokens, "position_ids": positions, "labels": labels}
        return Documents(inputs, tokens[:, start:])

    def prepared(self, implementation: str, batch: Documents) -> Callable[[], list[Tensor]]:
        """Return a training step; it returns what `results_of` does."""
        if self.model.config._attn_implementation != implementation:
            self.model.set_attn_implementation(implementation)
        return lambda: results_of(self.model, batch.inputs, batch.last.shape[1])

    def verdict(self, batch: Documents, results: list[Tensor]) -> Verdict:
        """Return how wrong the last document's logits are, and a gradient that goes through all layers.

        The logits are (length of the document, vocabulary), the gradient has the shape of its weight.
        """
        alone = {"input_ids": batch.last, "labels": batch.last}
        exact, plain = (results_of(model, alone, batch.last.shape[1]) for model in self._plain.values())
        errors = {
            name: compare((ours,), theirs, truth, self.dtype)
            for name, ours, theirs, truth in zip(("logits", "gradient"), results, plain, exact, strict=True)
        }
        wrong = next((f"{name}: {error}" for name, error in errors.items() if not error.passed), "")
        return Verdict(max(error.share for error in errors.values()), wrong)


def results_of(model: Any, inputs: dict[str, Tensor], last: int) -> list[Tensor]:
    """Make a training step; returns the last tokens' logits, and a gradient of the first layer."""
    model.zero_grad(set_to_none=True)
    out = model(**inputs)
    out.loss.backward()
    return [out.logits[0, -last:].detach(), model.model.layers[0].self_attn.q_proj.weight.grad]


def rows(job: Job) -> list[FreshRow]:
    """Return a row for each number of tokens."""
    model = Model(job.device)
    return [row_of(model, tokens, job) for tokens in TOKENS[job.device.type][: 1 if job.quick else None]]


def row_of(model: Model, tokens: int, job: Job) -> FreshRow:
    chance = random.Random(tokens)

    def draw() -> Documents:
        return model.draw(chance, tokens)

    def draw_total() -> Documents:
        return model.draw(chance, chance.randint(tokens * 7 // 8, tokens * 9 // 8))

    measured = functools.partial(settings, "measured", job.table, job.backends)
    ways: dict[str, tuple[str, Any]] = {
        TORCH: ("sdpa", torch_alone),
        NAMED: ("attnreg", installed),
        MEASURED: ("sdpa", measured),
        CONTROL: (ADDED, torch_alone),
    }
    sizes = SIZES[job.device.type]
    layers, width = sizes["num_hidden_layers"], sizes["hidden_size"]
    case = f"a Llama of {layers} layers, {width} wide, {COUNT} packed documents, {tokens:,} tokens"
    return FreshRow(
        "transformers", case, BOTH,
        {
            name: Way(functools.partial(model.prepared, how), within, is_control=name == CONTROL)
            for name, (how, within) in ways.items()
        },
        {SAME: Stream(draw, repeats=True), DOCUMENTS: Stream(draw), TOTALS: Stream(draw_total)},
        model.verdict, lambda _: None, TORCH,  # the weights of a step take more than a cache
    )  # fmt: skip


def added(_: Any, query: Tensor, key: Tensor, value: Tensor, *_mask: Any, **__: Any) -> tuple[Tensor, None]:
    """Return (B, S, H, D) from three tensors (B, H, S, D) of equal heads, all of which get a gradient."""
    return (query + key + value).transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Install attnreg's routers, with no backend registered."""
    api.install()
    yield


def main() -> None:
    """Measure the rows and print their tables."""
    parser = parser_of(__doc__, rounds=5, devices=SIZES)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--quick", action="store_true", help="the smaller batch alone")
    options = parser.parse_args()
    show_machine()
    device = torch.device(options.device)
    job = Job(device, (), options.rounds, options.quick, out=options.out, table=options.table)
    with untouched():
        fresh.measure_rows(rows(job), job)
    for table in job.tables:
        show(*table)
    for line in (*(f"left out: {line}" for line in job.left_out), *job.summary):
        print(line)


if __name__ == "__main__":
    main()

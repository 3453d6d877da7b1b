"""Packed sequences of different lengths on a CPU: attnreg against usual code without it.

    python benchmarks/ragged_cpu.py [--rounds N] [--out FILE]

Forward and backward of 8 heads of 64, from packed tensors to packed gradients. Three sides take turns:

- `attnreg.varlen_attn`, on the backend that attnreg chooses.
- `F.scaled_dot_product_attention` on tensors padded to the longest sequence, with a mask. Padding and
unpadding
  are included.
- A loop of `F.scaled_dot_product_attention` over the sequences, split once and joined once.

The figure is the time of the faster side without attnreg over attnreg's time, by round, median. A side that
is three times slower than the faster in a first call is left out of the rounds.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from _program import parser_of, show, show_machine
from torch.nn.utils.rnn import pad_sequence

import attnreg
from attnreg.tools.bench.report import save
from attnreg.tools.measure import Case, Inputs, Sample, inputs
from attnreg.tools.measure.timing import interleaved, median_ratio, per_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

HEADS, DIM = 8, 64
DTYPES = ("float32", "bfloat16")
OTHERS = ("padded", "loop")
# A side is left out if it takes so many times as long as the faster: noise can't explain that.
TOO_SLOW = 3.0


class Setting(NamedTuple):
    """A batch: the number of sequences, and their greatest length."""

    name: str
    batch: int
    longest: int
    skewed: bool = False

    def lengths(self, seed: int = 0) -> list[int]:
        """Return the lengths: uniform, or mostly short with a long tail."""
        draw = random.Random(seed)
        if self.skewed:
            return [round(math.exp(draw.uniform(0.0, math.log(self.longest)))) for _ in range(self.batch)]
        return [draw.randint(1, self.longest) for _ in range(self.batch)]


SETTINGS = (
    Setting("8 x 1024", 8, 1024),
    Setting("32 x 256", 32, 256),
    Setting("64 x 64", 64, 64),
    Setting("128 x 512 skewed", 128, 512, skewed=True),
    Setting("4 x 4096", 4, 4096),
)


def case_of(setting: Setting, dtype: str, causal: bool) -> Case:
    """Return the call as `attnreg.tools.measure` describes it."""
    lengths = tuple(setting.lengths())
    return Case(
        name=setting.name, lens_q=lengths, lens_k=lengths, varlen=True, heads=(HEADS, HEADS), dims=(DIM, DIM),
        window=(-1, 0) if causal else (-1, -1), dtype=dtype, one_cu_seqlens=True,
    )  # fmt: skip


def sides(case: Case, drawn_inputs: Inputs) -> dict[str, Callable[[], list[Tensor]]]:
    """Return each side as a function that runs it forward and backward, and returns the gradients."""
    lengths, longest, causal = case.lens_q, case.max_q, case.window == (-1, 0)
    packed, grad_out = [x.requires_grad_() for x in drawn_inputs[:3]], drawn_inputs.grad_out
    offsets: Any = drawn_inputs.call.cu_seqlens_q
    positions = torch.arange(longest)
    is_token = positions < torch.tensor(lengths)[:, None]
    visible = is_token[:, None, None, :]
    if causal:
        visible = visible & (positions[:, None] >= positions)

    def with_attnreg() -> Any:
        return attnreg.varlen_attn(*packed, offsets, offsets, longest, longest, is_causal=causal)

    def padded() -> Tensor:
        q, k, v = (pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2) for x in packed)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)[is_token]

    def loop() -> Tensor:
        split = [[x.transpose(0, 1)[None] for x in tensor.split(lengths)] for tensor in packed]
        outs = [
            F.scaled_dot_product_attention(q, k, v, is_causal=causal) for q, k, v in zip(*split, strict=True)
        ]
        return torch.cat([out[0].transpose(0, 1) for out in outs])

    def both_directions(forward: Callable[[], Tensor]) -> Callable[[], list[Tensor]]:
        return lambda: list(torch.autograd.grad(forward(), packed, grad_out))

    return {
        "attnreg": both_directions(with_attnreg),
        "padded": both_directions(padded),
        "loop": both_directions(loop),
    }


def check(runs: dict[str, Callable[[], list[Tensor]]], case: Case, drawn_inputs: Inputs) -> dict[str, float]:
    """Exit if a side breaks the accuracy rule; return the seconds of each side."""
    results: dict[str, list[Tensor]] = {}
    seconds, sample = {}, Sample(case, drawn_inputs)
    for name, run in runs.items():
        seconds[name] = per_call(lambda name=name, run=run: results.update({name: run()}), 1)
        if wrong := sample.verdict(dict(zip(("dq", "dk", "dv"), results[name], strict=True))).wrong:
            sys.exit(f"{case}, {name}: {wrong}")
    return seconds


def measure(setting: Setting, dtype: str, causal: bool, rounds: int) -> dict[str, Any]:
    """Time a setting; return milliseconds of each side and the ratio of attnreg's speed."""
    case = case_of(setting, dtype, causal)
    drawn_inputs = inputs(case)
    runs = sides(case, drawn_inputs)
    seconds = check(runs, case, drawn_inputs)
    others = [name for name in OTHERS if seconds[name] <= TOO_SLOW * min(seconds[each] for each in OTHERS)]
    calls = max(1, round(0.05 / per_call(runs["attnreg"], 1)))
    taken = interleaved(
        {name: lambda run=runs[name]: per_call(run, calls) for name in ("attnreg", *others)}, rounds
    )
    better = [min(times) for times in zip(*(taken[name] for name in others), strict=True)]
    seconds |= {name: statistics.median(times) for name, times in taken.items()}
    return {
        "setting": setting.name,
        "dtype": dtype,
        "causal": causal,
        "milliseconds": {name: each * 1e3 for name, each in seconds.items()},
        "rounds": {name: len(taken.get(name, ())) for name in runs},
        "ratio": median_ratio(better, taken["attnreg"]),
    }


def row(result: dict[str, Any]) -> tuple[str, ...]:
    """Return a result as a row of the table."""
    what = f"{result['setting']}, {result['dtype']}{', causal' if result['causal'] else ''}"
    times = (f"{result['milliseconds'][side]:.2f}" for side in ("attnreg", *OTHERS))
    return (what, *times, f"{result['ratio']:.2f}")


def main() -> None:
    """Run every setting and print the table, the geometric mean and the worst."""
    parser = parser_of(__doc__, rounds=11)
    options = parser.parse_args()
    show_machine()
    results = []
    for setting, dtype, causal in itertools.product(SETTINGS, DTYPES, (False, True)):
        results.append(measure(setting, dtype, causal, options.rounds))
        print(" · ".join(row(results[-1])), file=sys.stderr, flush=True)
    header = ("batch x longest", "attnreg", *OTHERS, "times as fast")
    show(
        "Forward + backward, ms; last, the faster of the others over attnreg",
        header,
        [row(result) for result in results],
    )
    for causal in (False, True):
        ratios = [result["ratio"] for result in results if result["causal"] is causal]
        mean, which = statistics.geometric_mean(ratios), "causal" if causal else "not causal"
        print(f"{which}: geometric mean {mean:.2f}, worst {min(ratios):.2f}")
    print(f"backends: {attnreg.stats().calls}")
    save(options.out, results)


if __name__ == "__main__":
    main()

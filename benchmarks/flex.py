"""FlexAttention as a backend: against `math`, against torch's `flex_attention` called by hand, and SDPA.

    python benchmarks/flex.py [--parts large,float32,prefix,lengths,tiles] [--steps N] [--layers N]
                              [--forward] [--small] [--out FILE]

Parts are packed calls with a head dim of 512 and shared heads, packed float32, and documents with a shared
prefix. The last part is compared with SDPA with a dense mask. Only if named, two further parts run: calls
of short to long sequences against `math` alone, and tiles of the kernels by themselves. A step has new
lengths and several layers that share them, forward and backward. Its first step, which compiles, is a
figure of its own. Sides take turns; figures are medians of the seconds of a layer, on the device and on the
host together, with its share of what a step derives from its lengths.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from _program import parser_of, show, show_machine
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attnreg
from attnreg.backends.flex import programs, tiles
from attnreg.core import registry
from attnreg.tools.bench.report import save
from attnreg.tools.measure import Case, inputs
from attnreg.tools.measure.timing import timer_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

FLEX, MATH, BY_HAND, DENSE = "attnreg, flex", "attnreg, math", "flex by hand", "SDPA, dense mask"
CHOSEN = "attnreg, its choice"
# Tiles for the calls by hand with a head dim of 512: torch's own don't fit a GPU's shared memory.
TILES = tiles.LARGE["forward", True][0] | tiles.LARGE["backward", True][0]

Layer = "Callable[[Tensor, Tensor, Tensor], Tensor]"


@dataclass(frozen=True)
class Part:
    """Packed calls of one kind.

    Attributes:
        name: of the part.
        heads: of query and key.
        dim, dtype: of the tensors.
        tokens: of a batch.
        longest: sequence, in tokens.
        options: kernel options of the calls by hand.
        count: how many sequences a batch has, each at least half of the longest. None draws as many as its
            tokens need.
    """

    name: str
    heads: tuple[int, int]
    dim: int
    dtype: torch.dtype
    tokens: int
    longest: int
    options: dict[str, Any]
    count: int | None = None


PARTS = (
    Part("large", (16, 4), 512, torch.bfloat16, 16384, 4096, TILES),
    Part("float32", (16, 4), 128, torch.float32, 16384, 4096, {"FLOAT32_PRECISION": "'ieee'"}),
)
PREFIX, BRANCHES, BRANCH = 4096, 32, 512
# Batches of eight sequences of one to two times half of a length.
SHORT_TO_LONG = tuple(
    Part(f"{name}, up to {longest} tokens", heads, dim, dtype, 0, longest, {}, 8)
    for name, heads, dim, dtype in (
        ("float32", (8, 8), 64, torch.float32),
        ("head dim 512", (8, 2), 512, torch.bfloat16),
    )
    for longest in (16, 64, 256, 1024, 2048)
)


def lengths_of(part: Part, draw: random.Random) -> list[int]:
    """Draw the lengths of the sequences of a batch; together they are its tokens, to within a sequence."""
    if part.count is not None:
        return [draw.randint(part.longest // 2, part.longest) for _ in range(part.count)]
    lengths: list[int] = []
    while sum(lengths) < part.tokens:
        lengths.append(draw.randint(part.longest // 8, part.longest))
    return lengths


def offsets_of(lengths: list[int], device: torch.device) -> Tensor:
    """Return int32 offsets."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


@functools.cache
def compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return torch's two functions as a program would compile them for lengths that change."""
    return torch.compile(flex_attention, dynamic=True), torch.compile(create_block_mask, dynamic=True)


def by_hand(part: Part, lengths: list[int], device: torch.device, small: bool) -> Layer:
    """Return a causal layer over packed documents by torch's functions, its mask made once for all layers."""
    attention, make_mask = (flex_attention, create_block_mask) if small else compiled()
    document = torch.repeat_interleave(
        torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device)
    )

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (document[q] == document[k]) & (q >= k)

    total = sum(lengths)
    block_mask = make_mask(mask, None, None, total, total, device=device)
    return hand_layer(attention, block_mask, part.options, part.heads[0] != part.heads[1])


def hand_layer(attention: Any, block_mask: Any, options: dict[str, Any], shared: bool) -> Layer:
    """Return a layer that calls flex with a mask."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        arguments = {"block_mask": block_mask, "enable_gqa": shared, "kernel_options": options}
        return attention(query, key, value, **arguments)[0].transpose(0, 1)

    return run


def by_attnreg(backend: str, lengths: list[int], device: torch.device) -> Layer:
    """Return a causal layer of `attnreg.varlen_attn` on a backend."""
    offsets, longest = offsets_of(lengths, device), max(lengths)
    return functools.partial(_varlen, backend, offsets, longest)


def _varlen(backend: str, offsets: Tensor, longest: int, *tensors: Tensor) -> Tensor:
    out: Tensor = attnreg.varlen_attn(  # type: ignore[assignment]
        *tensors, offsets, offsets, longest, longest, is_causal=True, enable_gqa=True, backend=backend
    )
    return out


def drawn(part: Part, lengths: list[int], device: torch.device, seed: int) -> list[Tensor]:
    """Draw query, key, value and the output's gradient, (T, H, D)."""
    lens, dtype = tuple(lengths), str(part.dtype).removeprefix("torch.")
    case = Case(name="flex", lens_q=lens, lens_k=lens, varlen=True, heads=part.heads,
                dims=(part.dim, part.dim), dtype=dtype)  # fmt: skip
    *leaves, grad, _ = inputs(case, device, seed, drawn_on=device)
    return [*(x.requires_grad_() for x in leaves), grad]


def seconds_of(
    layer: Layer, tensors: list[Tensor], options: argparse.Namespace
) -> tuple[float, tuple[Tensor, ...]]:
    """Return the seconds of a layer, and the results of the last."""
    *leaves, grad = tensors if not options.forward else [x.detach() for x in tensors]
    grads: tuple[Tensor, ...] = ()
    timer = timer_for(grad.device)
    timer.wait()
    begun = timer.now()
    for _ in range(options.layers):
        out = layer(*leaves)
        if not options.forward:
            grads = torch.autograd.grad(out, leaves, grad)
    timer.wait()
    return (timer.now() - begun) / options.layers, (out.detach(), *grads)


@dataclass
class Side:
    """The seconds of a side: of each step, of the first, and how far its results are from another's."""

    steps: list[float]
    first: float | None = None
    off: float | None = None
    failed: str = ""


def measure(
    makes: dict[str, Callable[[Any], Layer]],
    batches: Iterator[tuple[Any, list[Tensor]]],
    options: argparse.Namespace,
) -> dict[str, Side]:
    """Time each side on each batch; the first side's results are what the others are compared with."""
    sides, timer = {name: Side([]) for name in makes}, timer_for(torch.device(options.device))
    for number, (batch, tensors) in enumerate(batches):
        names = [name for name, side in sides.items() if not side.failed]
        results: dict[str, tuple[Tensor, ...]] = {}
        for name in names if number == 0 else random.sample(names, len(names)):
            side = sides[name]
            try:
                timer.wait()
                begun = timer.now()
                layer = makes[name](batch)  # a mask belongs to a step, not to a layer
                timer.wait()
                made = timer.now() - begun
                taken, results[name] = seconds_of(layer, tensors, options)
            except Exception as error:  # noqa: BLE001 - a side that can't run is a row with its reason
                side.failed = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                continue
            if number == 0:
                side.first = made + taken * options.layers
            else:
                side.steps.append(taken + made / options.layers)
        reference = next(iter(results.values()), ())
        for name, got in results.items():
            off = max(float((x - y).abs().max()) for x, y in zip(got, reference, strict=True))
            sides[name].off = max(off, sides[name].off or 0.0)
    return sides


def packed(part: Part, options: argparse.Namespace) -> dict[str, Side]:
    """Measure a part of packed calls."""
    device, draw = torch.device(options.device), random.Random(0)
    if options.small:
        part = Part(part.name, (2, 1), 32, torch.float32, 200, min(part.longest, 90), {}, part.count)

    def batches() -> Iterator[tuple[list[int], list[Tensor]]]:
        for step in range(options.steps + 1):
            lengths = lengths_of(part, draw)
            yield lengths, drawn(part, lengths, device, step)

    makes = {
        FLEX: lambda lengths: by_attnreg("flex", lengths, device),
        BY_HAND: lambda lengths: by_hand(part, lengths, device, options.small),
        MATH: lambda lengths: by_attnreg("math", lengths, device),
    }
    if part.count is not None:
        del makes[BY_HAND]
    return measure(makes, batches(), options)


def prefix(options: argparse.Namespace) -> dict[str, Side]:
    """Measure branches that share a prefix: `key_ranges`, flex by hand, and SDPA with the dense mask.

    What attnreg chooses is shown once the calls have run.
    """
    device, draw = torch.device(options.device), random.Random(0)
    first, branches, longest = (20, 3, 16) if options.small else (PREFIX, BRANCHES, BRANCH)
    part = Part("prefix", (16, 16), 128, torch.bfloat16, 0, 0, {})
    if options.small:
        part = Part("prefix", (2, 2), 32, torch.float32, 0, 0, {})

    def batches() -> Iterator[tuple[tuple[int, list[int]], list[Tensor]]]:
        for number in range(options.steps + 1):
            # The lengths of the aim itself, and others in every second step, as they change in training.
            drawn_lengths = [
                longest if number % 2 else draw.randint(longest // 2, longest) for _ in range(branches)
            ]
            yield (first, drawn_lengths), drawn(part, [first + sum(drawn_lengths)], device, number)

    makes = {
        FLEX: lambda batch: tree_by_attnreg("flex", *batch, device),
        CHOSEN: lambda batch: tree_by_attnreg(None, *batch, device),
        BY_HAND: lambda batch: tree_by_hand(*batch, device, options.small),
        DENSE: lambda batch: tree_by_sdpa(*batch, device),
    }
    before = attnreg.stats()
    sides = measure(makes, batches(), options)
    others = {name: calls for name, calls in attnreg.stats().calls.items() if name != "flex"}
    print(f"{CHOSEN}: {others}, before {before.calls}")
    return sides


def tree_by_attnreg(backend: str | None, first: int, lengths: list[int], device: torch.device) -> Layer:
    """Return a layer over a prefix tree by `key_ranges`, on a backend or on what attnreg chooses."""
    parents, total = [-1, *[0] * len(lengths)], first + sum(lengths)
    ranges = attnreg.tree_ranges(parents, [first, *lengths], device=device)
    offsets = offsets_of([total], device)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = attnreg.varlen_attn(  # type: ignore[assignment]
            query, key, value, offsets, offsets, total, total, key_ranges=ranges, backend=backend
        )
        return out

    return run


def branch_of(first: int, lengths: list[int], device: torch.device) -> Tensor:
    """Return the branch of each token, -1 of the prefix."""
    counts = torch.tensor([first, *lengths], device=device)
    return torch.repeat_interleave(torch.arange(-1, len(lengths), device=device), counts)


def tree_by_hand(first: int, lengths: list[int], device: torch.device, small: bool) -> Layer:
    """Return a layer over a prefix tree by torch's functions."""
    attention, make_mask = (flex_attention, create_block_mask) if small else compiled()
    branch = branch_of(first, lengths, device)

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ((branch[k] < 0) | (branch[q] == branch[k]))

    total = first + sum(lengths)
    return hand_layer(attention, make_mask(mask, None, None, total, total, device=device), {}, False)


def tree_by_sdpa(first: int, lengths: list[int], device: torch.device) -> Layer:
    """Return a layer over a prefix tree by SDPA with a boolean mask of all pairs of tokens."""
    branch = branch_of(first, lengths, device)
    places = torch.arange(branch.shape[0], device=device)
    seen = (branch[None] < 0) | (branch[:, None] == branch[None])
    seen &= places[:, None] >= places[None]

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen[None, None])
        return out[0].transpose(0, 1)

    return run


TRIED = {
    ("forward", torch.bfloat16): [
        tiles.of_forward(*shape)
        for shape in ((64, 32, 2, 8), (64, 32, 2, 4), (64, 64, 1, 8), (128, 32, 1, 8), (32, 64, 1, 4),
                      (32, 32, 2, 4), (64, 16, 3, 8), (32, 64, 1, 8))
    ],
    ("backward", torch.bfloat16): [
        tiles.of_backward(*shape)
        for shape in ((16, 16, 1, 4), (32, 32, 1, 8), (16, 32, 1, 8), (32, 32, 1, 4), (32, 64, 1, 8),
                      (16, 64, 1, 8), (16, 32, 2, 8), (32, 32, 2, 8), (64, 64, 1, 8))
    ],
    ("forward", torch.float32): [
        {}, *({"FLOAT32_PRECISION": f"'{precision}'", **tiles.of_forward(*shape)}
              for precision in ("ieee", "tf32x3")
              for shape in ((64, 32, 1, 8), (64, 32, 2, 4), (32, 32, 2, 4), (64, 64, 1, 8)))
    ],
    ("backward", torch.float32): [
        {}, *({"FLOAT32_PRECISION": f"'{precision}'", **tiles.of_backward(*shape)}
              for precision in ("ieee", "tf32x3")
              for shape in ((32, 32, 1, 4), (32, 32, 1, 8), (32, 64, 1, 8), (16, 64, 1, 4)))
    ],
}  # fmt: skip


def tried_tiles(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time the kernels by themselves with other tiles than the backend's."""
    rows, chosen, timer = [], tiles.tiles_for, timer_for(torch.device(options.device))
    kernels = registry.find("flex").kernels()
    for part in PARTS:
        lengths = (120, 200) if options.small else (3000, 1000, 4000, 200)
        case = Case(
            name="tiles", lens_q=lengths, lens_k=lengths, varlen=True, window=(-1, 0), heads=part.heads,
            dims=(part.dim, part.dim), dtype=str(part.dtype).removeprefix("torch."), one_cu_seqlens=True,
        )  # fmt: skip
        q, k, v, grad, call = inputs(case, options.device)
        results = kernels.forward(q, k, v, call)
        runs = {
            "forward": lambda q=q, k=k, v=v, call=call: kernels.forward(q, k, v, call),
            "backward": lambda q=q, k=k, v=v, call=call, grad=grad, results=results: kernels.backward(
                grad, q, k, v, *results, call
            ),
        }
        for (direction, dtype), candidates in TRIED.items():
            for candidate in candidates if dtype == part.dtype else ():
                programs._programs.clear()
                programs.tiles_for = lambda kind, candidate=candidate: (candidate,)
                row = {"part": part.name, "direction": direction, "tiles": str(dict(candidate))}
                try:
                    begun = timer.now()
                    got = runs[direction]()
                    timer.wait()
                    row["first"] = timer.now() - begun
                    row["seconds"] = min(timer.back_to_back(runs[direction], 3) for _ in range(3))
                    row["finite"] = all(bool(x.isfinite().all()) for x in got)
                except Exception as error:  # noqa: BLE001 - what doesn't fit is a row
                    row["failed"] = f"{type(error).__name__}: {str(error)[-200:]}"
                rows.append(row)
                print(row, flush=True)
                save(options.out and options.out.with_suffix(".tiles.json"), rows)
    programs.tiles_for = chosen
    programs._programs.clear()
    return rows


def main() -> None:
    """Measure the parts that are named, and print their tables."""
    parser = parser_of(__doc__, devices=("cpu", "cuda"))
    parser.add_argument(
        "--parts", default="large,float32,prefix", help="comma list; `lengths` and `tiles` are further ones"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--forward", action="store_true", help="without the backward")
    parser.add_argument("--small", action="store_true", help="tiny calls, and torch's functions uncompiled")
    options = parser.parse_args()
    wanted = options.parts.split(",")
    show_machine()
    random.seed(0)
    torch.manual_seed(0)
    measured = {part.name: functools.partial(packed, part) for part in PARTS} | {"prefix": prefix}
    if "lengths" in wanted:
        further = {part.name: functools.partial(packed, part) for part in SHORT_TO_LONG}
        measured, wanted = measured | further, [*wanted, *further]
    rows: list[dict[str, Any]] = []
    for name, run in measured.items():
        if name not in wanted:
            continue
        sides = run(options)
        medians = {side: statistics.median(of.steps) for side, of in sides.items() if of.steps}
        best = next(iter(medians.values()), None)
        for side, of in sides.items():
            row: dict[str, Any] = {"part": name, "side": side, "first": of.first, "off": of.off}
            if side in medians and best:
                row |= {"seconds": medians[side], "ratio": medians[side] / best, "steps": of.steps}
            rows.append(row | ({"failed": of.failed} if of.failed else {}))
        save(options.out, rows)
        header = ("side", "ms a layer", "over the first", "first step, s", "off by")
        step = "forward" if options.forward else "forward and backward"
        show(f"{name}: {step}", header, [_cells(row) for row in rows if row["part"] == name])
    if "tiles" in wanted:
        tried_tiles(options)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    times = (f"{row['seconds'] * 1e3:.3f}", f"{row['ratio']:.2f}") if "seconds" in row else ("", "")
    first = "" if row["first"] is None else f"{row['first']:.1f}"
    return row["side"], *times, first, row.get("failed", "") or f"{row['off']:.1e}"


if __name__ == "__main__":
    main()

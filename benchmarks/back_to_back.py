"""What of a small call is new, and what that costs: tensors, offsets, lengths, or one key more.

    python benchmarks/back_to_back.py [--backends FA4,FA2,cuDNN] [--calls N] [--rounds N] [--out FILE]

All batches are drawn before the first call, so that nothing runs between calls: the host's caches are hot, as
between the layers of a model. `attnreg bench fresh` draws a batch before each call, which finds them cold. A
figure is a median in µs, from an idle device to an idle device; in parentheses is the host's part. The first
eight calls of a turn don't count. Torch's own function and flash-attn-4's are sides, where they run.

Packed calls come first, then decoding: a token each of eight sequences, with a cache of 600 keys and more.
Last come steps of decoding by `varlen_attn` in several layers. The layers of a step share their offsets.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import statistics
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from _program import parser_of, show, show_machine

import attnreg
from attnreg.flash_attn import flash_attn_with_kvcache
from attnreg.tools.bench.compare import short, torch_varlen_attn
from attnreg.tools.bench.report import save
from attnreg.tools.measure import Case, inputs
from attnreg.tools.measure.timing import shuffled, timer_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

SEQUENCES, LONGEST, HEADS, DIM, WARM_UP = 8, 256, 8, 64, 8
FIRST, ROOM, HEADS_Q, DIM_OF_CACHE = 600, 1024, 32, 128
TORCH, PACKAGE = "torch's varlen_attn", "flash-attn-4's own"
LAYERS = 1, 4, 8, 32

Batch = tuple[list["Tensor"], "Tensor", int]


def drawn(lengths: list[int], device: torch.device, grad: bool, seed: int) -> Batch:
    """Return query, key and value, (T, H, D), offsets and the longest length."""
    case = Case(
        name="small", lens_q=tuple(lengths), lens_k=tuple(lengths), varlen=True, heads=(HEADS, HEADS),
        dims=(DIM, DIM), dtype="bfloat16", window=(-1, 0), one_cu_seqlens=True,
    )  # fmt: skip
    *tensors, _, call = inputs(case, device, seed, drawn_on=device)
    return [x.detach().requires_grad_(grad) for x in tensors], call.cu_seqlens_q, max(lengths)


def states(count: int, device: torch.device, grad: bool) -> dict[str, list[Batch]]:
    """Return the batches of each state, `count` of them."""
    draw = random.Random(0)
    lengths = [[draw.randint(1, LONGEST) for _ in range(SEQUENCES)] for _ in range(count)]
    same = drawn(lengths[0], device, grad, 0)
    others = [drawn(lengths[0], device, grad, seed) for seed in range(count)]
    return {
        "same": [same] * count,
        "new tensors": [(tensors, same[1], same[2]) for tensors, _, _ in others],
        "new offsets": others,
        "new lengths": [drawn(each, device, grad, seed) for seed, each in enumerate(lengths)],
    }


def fronts(backends: list[str]) -> dict[str, Any]:
    """Return the functions to compare, of query, key, value, offsets and the longest length."""

    def ours(backend: str | None, tensors: list[Tensor], offsets: Tensor, longest: int) -> Any:
        given = offsets, offsets, longest, longest
        return attnreg.varlen_attn(*tensors, *given, is_causal=True, backend=backend)

    def torchs(tensors: list[Tensor], offsets: Tensor, longest: int) -> Any:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(*tensors, offsets, offsets, longest, longest, window_size=(-1, 0))

    def packages(tensors: list[Tensor], offsets: Tensor, longest: int) -> Any:
        from flash_attn.cute import flash_attn_varlen_func

        given = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "causal": True}
        return flash_attn_varlen_func(*tensors, max_seqlen_q=longest, max_seqlen_k=longest, **given)[0]

    named = {f"attnreg, {name}": functools.partial(ours, name) for name in backends}
    return {TORCH: torchs, PACKAGE: packages, "attnreg": functools.partial(ours, None), **named}


def anew(batches: list[Any]) -> list[Any]:
    """Return the batches of a turn with new offsets: an earlier turn has left knowledge of the others."""
    copies: dict[int, Any] = {}

    def copied(x: Any) -> Any:
        return copies.setdefault(id(x), x.clone()) if isinstance(x, torch.Tensor) else x

    return [tuple(map(copied, batch)) for batch in batches]


def turn(front: Any, batches: list[Any], grad: bool, device: torch.device) -> list[tuple[float, float]]:
    """Return the seconds of each call that counts: in all, and of the host."""
    timer, taken = timer_for(device), []
    for number, batch in enumerate(anew(batches)):
        timer.wait()
        begun = timer.now()
        out = front(*batch)
        if grad:
            torch.autograd.grad(out, batch[0], out.detach())
        host = timer.now() - begun
        timer.wait()
        if number >= WARM_UP:
            taken.append((timer.now() - begun, host))
    return taken


def packed(backends: list[str], grad: bool, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of packed calls; see `measure`."""
    device = torch.device(options.device)
    batches, sides = states(options.calls + WARM_UP, device, grad), fronts(backends)

    def right(tensors: list[Tensor], *rest: Any) -> Tensor:
        out: Tensor = fronts(["math"])["attnreg, math"]([x.detach().float() for x in tensors], *rest)
        return out

    step = "forward + backward" if grad else "forward"
    return measure(step, sides, batches, right, grad, options)


def decoding(backends: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of decoding with a cache: through SDPA, and by one call that appends a token."""
    device = torch.device(options.device)
    case = Case(
        name="decoding", lens_q=(1,) * SEQUENCES, lens_k=(ROOM,) * SEQUENCES, heads=(HEADS_Q, HEADS),
        dims=(DIM_OF_CACHE, DIM_OF_CACHE), dtype="bfloat16",
    )  # fmt: skip
    query, keys, values, *_ = inputs(case, device, drawn_on=device)
    counts = torch.arange(ROOM, dtype=torch.int32, device=device)
    held = [count.expand(SEQUENCES).contiguous() for count in counts - 1]
    new = [(keys[:, n : n + 1].clone(), values[:, n : n + 1].clone()) for n in range(ROOM)]

    def sdpa(x: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
        q, k, v = x.transpose(1, 2), k[:, :length].transpose(1, 2), v[:, :length].transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    def by_one_call(length: int) -> Tensor:
        return flash_attn_with_kvcache(query, keys, values, *new[length - 1], cache_seqlens=held[length])

    through_sdpa = functools.partial(sdpa, query, keys, values)
    sides: dict[str, Any] = {"torch's SDPA": through_sdpa, "flash_attn_with_kvcache": by_one_call}
    for name in backends:
        sides |= {f"SDPA, {name}": through_sdpa, f"flash_attn_with_kvcache, {name}": by_one_call}
    count = options.calls + WARM_UP
    batches = {"same": [(FIRST,)] * count, "one key more": [(FIRST + n,) for n in range(count)]}

    def right(length: int) -> Tensor:
        return sdpa(query.float(), keys.float(), values.float(), length)

    return measure("decoding", sides, batches, right, False, options)


def layers(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of decoding by packed calls, through layers that share the offsets of a step.

    Each layer has keys and values of its own in memory. The numbers in them are the same for all layers.
    """
    device = torch.device(options.device)
    case = Case(
        name="layers", lens_q=(1,) * SEQUENCES, lens_k=(ROOM,) * SEQUENCES, heads=(HEADS_Q, HEADS),
        dims=(DIM_OF_CACHE, DIM_OF_CACHE), dtype="bfloat16", varlen=True,
    )  # fmt: skip
    query, keys, values = inputs(case, device, drawn_on=device)[:3]
    memory = [(query, keys.clone(), values.clone()) for _ in range(max(LAYERS))]
    query_offsets = torch.arange(SEQUENCES + 1, dtype=torch.int32, device=device)

    def step(function: Any, count: int, offsets: Tensor, length: int) -> Tensor:
        given = query_offsets, offsets, 1, length
        for query, keys, values in memory[:count]:
            out: Tensor = function(query, *(x[: SEQUENCES * length] for x in (keys, values)), *given)
        return out

    functions = {
        TORCH: torch_varlen_attn(gqa=True), "attnreg": functools.partial(attnreg.varlen_attn, enable_gqa=True)
    }  # fmt: skip
    sides = {
        f"{name}, layers: {count}": functools.partial(step, function, count)
        for count in LAYERS
        for name, function in functions.items()
    }
    count = options.calls + WARM_UP
    offsets = [query_offsets * (FIRST + n) for n in range(count)]
    batches = {
        "same": [(offsets[0], FIRST)] * count,
        "one key more": [(offsets[n], FIRST + n) for n in range(count)],
    }

    def right(offsets: Tensor, length: int) -> Tensor:
        tensors = [query, *(x[: SEQUENCES * length] for x in (keys, values))]
        out: Tensor = attnreg.varlen_attn(
            *(x.float() for x in tensors), query_offsets, offsets, 1, length, enable_gqa=True, backend="math"
        )
        return out

    return measure("decoding by layers", sides, batches, right, False, options)


@contextlib.contextmanager
def within(side: str) -> Iterator[None]:
    """Choose the backend of a side of decoding, if it names one; SDPA needs routers for that."""
    front, _, backend = side.partition(", ")
    if front not in ("SDPA", "flash_attn_with_kvcache") or not backend:
        yield
        return
    if front == "SDPA":
        attnreg.install()
    try:
        with attnreg.use_backend(backend):
            yield
    finally:
        attnreg.uninstall()


def wrong_by(front: Any, batch: Any, right: Any) -> float:
    """Return how far a side's output is at most from the right one."""
    return float((front(*batch).detach().float() - right(*batch)).abs().max())


def measure(
    step: str,
    sides: dict[str, Any],
    batches: dict[str, list[Any]],
    right: Any,
    grad: bool,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Return a row for each side, with the medians of each state in µs.

    `right` returns a batch's output in float32.
    """
    device, rows = torch.device(options.device), []
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
    failed: dict[str, str] = {}
    off: dict[str, float] = {}
    for name in sides:
        try:
            with within(name):
                for state in batches:  # compiles and plans
                    turn(sides[name], batches[state], grad, device)
                off[name] = max(wrong_by(sides[name], given[-1], right) for given in batches.values())
        except Exception as error:  # noqa: BLE001 - a side that can't run is a row with its reason
            failed[name] = short(error)
    able = [(name, state) for name in sides if name not in failed for state in batches]
    for _ in range(options.rounds):
        for name, state in shuffled(able):
            with within(name):
                found = turn(sides[name], batches[state], grad, device)
            taken.setdefault((name, state), []).extend(found)
    for name in sides:
        row: dict[str, Any] = {"step": step, "side": name, "off": off.get(name)}
        for state in batches:
            if (calls := taken.get((name, state))) is not None:
                row[state] = [statistics.median(each) * 1e6 for each in zip(*calls, strict=True)]
        rows.append(row | ({"failed": failed[name]} if name in failed else {}))
    return rows


def main() -> None:
    """Measure packed forwards, forwards and backwards, decoding, and layers, and print their tables."""
    parser = parser_of(__doc__, rounds=3, devices=("cpu", "cuda"))
    parser.add_argument("--backends", default="FA4,FA2,cuDNN", help="comma list")
    parser.add_argument("--calls", type=int, default=50, help="of a turn that count")
    options = parser.parse_args()
    show_machine()
    rows: list[dict[str, Any]] = []
    backends = options.backends.split(",")
    parts = (
        (False, functools.partial(packed, backends, False)),
        (True, functools.partial(packed, backends, True)),
        (False, functools.partial(decoding, backends)),
        (False, layers),
    )
    for grad, part in parts:
        with torch.set_grad_enabled(grad):
            found = part(options)
        rows += found
        save(options.out, rows)
        measured = [name for name in found[-1] if name not in ("step", "side", "off", "failed")]
        cells = [cells_of(row, measured) for row in found]
        show(f"{found[0]['step']}, µs (of the host)", ("side", *measured, "off by"), cells)
        for row in found:
            if "failed" in row:
                print(f"{row['side']}: {row['failed']}\n")


def cells_of(row: dict[str, Any], states: list[str]) -> tuple[str, ...]:
    """Return the cells of a row of the printed table."""
    if "failed" in row:
        return row["side"], "failed", *[""] * len(states)
    return row["side"], *[f"{row[name][0]:.0f} ({row[name][1]:.0f})" for name in states], f"{row['off']:.1e}"


if __name__ == "__main__":
    main()

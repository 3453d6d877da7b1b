"""Which method a distributed call goes by: what each of the three would take, by a model of time and memory.

It looks at the layout, at shapes, and at memory and rates that are the same on all ranks, so all come to the
same choice, and so does `explain_context_parallel`, without a GPU, if it is given those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from attnreg.core.contract.spec import canonical_dtype
from attnreg.core.varlen.plans import window
from attnreg.errors import InvalidInputError, did_you_mean
from attnreg.parallel.by_heads import unsupported
from attnreg.parallel.estimates import ALL_GATHER, ALL_TO_ALL, RING, Estimate, Rates, Shape, estimates
from attnreg.parallel.layout import Layout
from attnreg.parallel.needs import Needs

__all__ = ["Choice", "explain_context_parallel"]

METHODS = (ALL_TO_ALL, ALL_GATHER, RING)


@dataclass(frozen=True)
class Choice:
    """What a call would take by each of the three methods, and the one that is taken.

    Attributes:
        method: the one that is taken.
        reason: why.
        methods: what each would take.
        pairs: for each rank how many pairs of query and key its own queries see.
        rows: for each rank how many tokens it has.
        rates: what the estimates assume of the machine.
        others: what "auto" takes in its place, in this order, where no kernel can run that method's calls.
    """

    method: str
    reason: str
    methods: tuple[Estimate, ...]
    pairs: tuple[int, ...]
    rows: tuple[int, ...]
    rates: Rates
    others: tuple[str, ...] = ()

    @property
    def imbalance(self) -> float:
        """The work of the most loaded rank as a multiple of the mean; all_to_all always has 1."""
        return max(self.pairs) * len(self.pairs) / sum(self.pairs) if sum(self.pairs) else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, for JSON."""
        return {"imbalance": self.imbalance, **asdict(self)}

    def __str__(self) -> str:
        lines = [
            f"{self.method}: {self.reason}",
            "",
            f"{'method':<12}{'time':>10}{'received, most':>18}{'sent, most':>18}{'memory':>12}",
        ]
        for one in self.methods:
            sizes = (max(one.received, default=0), 14), (max(one.sent, default=0), 14), (one.memory, 8)
            numbers = f"{one.seconds * 1e3:>7.2f} ms"
            numbers += "".join(f"{size / 2**20:>{width}.1f} MiB" for size, width in sizes)
            lines.append(f"{one.name:<12}" + (f"  no: {one.refusal}" if one.refusal else numbers))
        speed = f"{self.rates.flops / 1e12:.0f} TFLOP/s, a link of {self.rates.link / 1e9:.0f} GB/s"
        lines.append(f"times by {speed}, {self.rates.latency * 1e6:.0f} us an exchange")
        lines += ["", f"{'rank':<6}{'tokens':>10}{'pairs':>16}{'of the mean':>14}"]
        mean = sum(self.pairs) / len(self.pairs)
        for rank, (rows, pairs) in enumerate(zip(self.rows, self.pairs, strict=True)):
            share = pairs / mean if mean else 1.0
            lines.append(f"{rank:<6}{rows:>10,}{pairs:>16,}{share:>13.2f}x")
        return "\n".join(lines)


def check_asked(method: object, rates: object, memory: object) -> None:
    """Check what a program may say about the choice."""
    known = ["auto", *METHODS]
    if method not in known:
        hint = did_you_mean(str(method), known)
        raise InvalidInputError(f"method: got {method!r}, expected one of {known}{hint}")
    if rates is not None and not isinstance(rates, Rates):
        raise InvalidInputError(f"rates: got {rates!r}, expected attnreg.parallel.estimates.Rates")
    is_bool = isinstance(memory, bool)
    if memory is not None and (is_bool or not (isinstance(memory, int | float) and memory >= 0)):
        raise InvalidInputError(f"memory: got {memory!r}, expected a number of bytes")


def check_possible(method: str, shape: Shape, ranks: int) -> None:
    """Check that a call can go by the method that is asked for."""
    refusal = unsupported(shape.heads, shape.heads_k, ranks) if method == ALL_TO_ALL else ""
    if refusal:
        raise InvalidInputError(f"method: got {method!r}, but {refusal}")


def choose(needs: Needs, shape: Shape, method: str, rates: Rates, memory: int | None) -> Choice:
    """Return what each method would take, and the one that is taken.

    Raises `InvalidInputError` if the method that is asked for can't be taken.
    """
    pairs = tuple(needs.pairs.sum(1).tolist())
    found = estimates(needs, shape, rates)
    if method != "auto":
        check_possible(method, shape, needs.layout.ranks)
        names, reason = [method], "asked for"
    else:
        names, reason = _cheapest([one for one in found if not one.refusal], memory)
    return Choice(names[0], reason, found, pairs, needs.layout.rows, rates, tuple(names[1:]))


def _cheapest(possible: list[Estimate], memory: int | None) -> tuple[list[str], str]:
    """Return the methods, the best first, and why it is."""
    fitting = [one for one in possible if memory is None or one.memory <= memory]
    fitting.sort(key=lambda one: one.seconds)
    rest = sorted((one for one in possible if one not in fitting), key=lambda one: one.memory)
    reason = "the fastest"
    if not fitting:
        reason = "takes the least memory, and none has enough"
    elif faster := [one.name for one in rest if one.seconds < fitting[0].seconds]:
        reason = f"the fastest for which there is memory (not {', '.join(faster)})"
    return [one.name for one in fitting + rest], reason


def explain_context_parallel(
    layout: Layout,
    *,
    heads: int,
    heads_k: int | None = None,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype | str = "bfloat16",
    is_causal: bool = True,
    window_size: Sequence[int] | None = (-1, -1),
    needs_backward: bool = True,
    method: str = "auto",
    rates: Rates | None = None,
    memory: int | None = None,
) -> Choice:
    """Say by which method a call would go, what each would take, and how the work is spread over the ranks.

    Needs no GPU and no process group. Times are estimates by `rates`.

    Args:
        layout: which rank has which tokens, as of `spread_documents`.
        heads, heads_k: query heads, and key heads if there are fewer, before they are spread.
        head_dim, head_dim_v: of query and key, and of the value if it has another.
        dtype, is_causal, window_size, needs_backward: of the call, as of `varlen_attn`.
        method: as of `context_parallel`.
        rates: what the estimate assumes of the machine; two H200s joined by NVLink unless given.
        memory: how many bytes a call may take, for "auto"; any number unless given. A `ContextParallel` on
            GPUs takes an eighth of their memory, and its `explain` says what its own calls take.

    Raises:
        InvalidInputError: the heads don't go together, or an argument isn't what is expected.
    """
    if not isinstance(layout, Layout):
        raise InvalidInputError(f"layout: got {layout!r}, expected a Layout, as of spread_documents")
    check_asked(method, rates, memory)
    rates = Rates() if rates is None else rates
    heads_k = heads if heads_k is None else heads_k
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    sizes = {"heads": heads, "heads_k": heads_k, "head_dim": head_dim, "head_dim_v": head_dim_v}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidInputError(f"{name}: got {size!r}, expected a number from 1 on")
    if heads % heads_k:
        raise InvalidInputError(f"heads: got {heads} and heads_k {heads_k}, expected a multiple of heads_k")
    found = getattr(torch, canonical_dtype(dtype), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InvalidInputError(
            f"dtype: got {dtype!r}, expected one of torch's for floating-point numbers, such as bfloat16"
        )
    shape = Shape(heads, heads_k, head_dim, head_dim_v, found.itemsize, needs_backward)
    needs = Needs(layout, *window(window_size, is_causal))
    return choose(needs, shape, method, rates, memory)

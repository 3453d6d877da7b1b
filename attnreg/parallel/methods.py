"""The choice of a distributed call's method, by the estimated time and memory of each.

The choice depends on the layout, on shapes, and on memory and rates that are the same on all ranks. So all
ranks choose alike. `explain_context_parallel` makes the same choice from the same inputs, without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from attnreg.core.contract.spec import canonical_dtype
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.varlen.plans import window
from attnreg.errors import InvalidInputError, did_you_mean
from attnreg.parallel.by_heads import unsupported
from attnreg.parallel.estimates import ALL_GATHER, ALL_TO_ALL, RING, CallShape, Estimate, Rates, estimates
from attnreg.parallel.layout import Layout
from attnreg.parallel.needs import Needs

__all__ = ["Choice", "explain_context_parallel"]

METHODS = (ALL_TO_ALL, ALL_GATHER, RING)


@dataclass(frozen=True)
class Choice:
    """The chosen method of a call, and the estimates of all three methods.

    Attributes:
        method: the chosen method.
        reason: why it is chosen.
        methods: the estimate of each method.
        pairs: for each rank, the number of pairs of its own queries and the keys that they see.
        rows: for each rank, the number of its tokens.
        rates: what the estimates assume of the machine.
        others: the methods that "auto" tries next, in this order, if no kernel can run the chosen method's
            calls.
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
        for cost in self.methods:
            sizes = (max(cost.received, default=0), 14), (max(cost.sent, default=0), 14), (cost.memory, 8)
            numbers = f"{cost.seconds * 1e3:>7.2f} ms"
            numbers += "".join(f"{size / 2**20:>{width}.1f} MiB" for size, width in sizes)
            lines.append(f"{cost.name:<12}" + (f"  no: {cost.refusal}" if cost.refusal else numbers))
        speed = f"{self.rates.flops / 1e12:.0f} TFLOP/s, a link of {self.rates.link / 1e9:.0f} GB/s"
        lines.append(f"times by {speed}, {self.rates.latency * 1e6:.0f} us an exchange")
        lines += ["", f"{'rank':<6}{'tokens':>10}{'pairs':>16}{'of the mean':>14}"]
        mean = sum(self.pairs) / len(self.pairs)
        for rank, (rows, pairs) in enumerate(zip(self.rows, self.pairs, strict=True)):
            share = pairs / mean if mean else 1.0
            lines.append(f"{rank:<6}{rows:>10,}{pairs:>16,}{share:>13.2f}x")
        return "\n".join(lines)


def check_asked(method: object, rates: object, memory: object) -> None:
    """Check the arguments of a program that affect the choice."""
    known = ["auto", *METHODS]
    if method not in known:
        hint = did_you_mean(str(method), known)
        raise InvalidInputError(f"method: got {method!r}, expected one of {known}{hint}")
    if rates is not None and not isinstance(rates, Rates):
        raise InvalidInputError(f"rates: got {rates!r}, expected attnreg.parallel.estimates.Rates")
    is_bool = isinstance(memory, bool)
    if memory is not None and (is_bool or not (isinstance(memory, int | float) and memory >= 0)):
        raise InvalidInputError(f"memory: got {memory!r}, expected a number of bytes")


def check_possible(method: str, shape: CallShape, ranks: int) -> None:
    """Raise `InvalidInputError` if the requested method can't run a call."""
    refusal = unsupported(shape.heads, shape.heads_k, ranks) if method == ALL_TO_ALL else ""
    if refusal:
        raise InvalidInputError(f"method: got {method!r}, but {refusal}")


def choose(needs: Needs, shape: CallShape, method: str, rates: Rates, memory: int | None) -> Choice:
    """Return the choice of a method, with the estimates of all.

    Raises:
        InvalidInputError: the requested method can't run the call.
    """
    pairs = tuple(needs.pairs.sum(1).tolist())
    costs = estimates(needs, shape, rates)
    if method != "auto":
        check_possible(method, shape, needs.layout.ranks)
        names, reason = [method], "asked for"
    else:
        names, reason = _cheapest([cost for cost in costs if not cost.refusal], memory)
    return Choice(names[0], reason, costs, pairs, needs.layout.rows, rates, tuple(names[1:]))


def _cheapest(possible: list[Estimate], memory: int | None) -> tuple[list[str], str]:
    """Return the methods, the best first, and why the first is the best."""
    fitting = [cost for cost in possible if memory is None or cost.memory <= memory]
    fitting.sort(key=lambda cost: cost.seconds)
    rest = sorted((cost for cost in possible if cost not in fitting), key=lambda cost: cost.memory)
    reason = "the fastest"
    if not fitting:
        reason = "takes the least memory, and none has enough"
    elif faster := [cost.name for cost in rest if cost.seconds < fitting[0].seconds]:
        reason = f"the fastest for which there is memory (not {', '.join(faster)})"
    return [cost.name for cost in fitting + rest], reason


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
    """Return the method of a call, the estimates of all methods, and how the work is spread over ranks.

    Needs no GPU and no process group. Times are estimates by `rates`.

    Args:
        layout: which rank has which tokens, as `spread_documents` returns it.
        heads, heads_k: the numbers of query and key heads before they are spread; `heads_k` is `heads` by
            default.
        head_dim, head_dim_v: of query and key, and of the value; `head_dim_v` is `head_dim` by default.
        dtype, is_causal, window_size, needs_backward: of the call, as for `varlen_attn`.
        method: as for `context_parallel`.
        rates: what the estimate assumes of the machine; by default two H200s joined by NVLink.
        memory: for "auto": the most bytes that a call may need; by default any number. On GPUs a
            `ContextParallel` allows an eighth of their memory, and its `explain` has the choice for its
            calls.

    Raises:
        InvalidInputError: `heads` is no multiple of `heads_k`, or an argument isn't what is expected.
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
    torch_dtype = getattr(torch, canonical_dtype(dtype), None)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise InvalidInputError(
            f"dtype: got {dtype!r}, expected one of torch's for floating-point numbers, such as bfloat16"
        )
    shape = CallShape(heads, heads_k, head_dim, head_dim_v, torch_dtype.itemsize, needs_backward)
    needs = Needs(layout, *window(window_size, is_causal))
    return choose(needs, shape, method, rates, memory)


leave_module_uncompiled(__name__)

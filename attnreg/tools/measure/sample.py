"""The accuracy rule at a call's own size, where computing all of it in float64 would take too long.

A few heads of a few sequences are enough to find a wrong mask or offset. They also find a kernel that is
wrong only for long sequences, wide batches or large offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.contract.options import options_on
from attnreg.errors import InvalidInputError
from attnreg.tools.measure.cases import Case
from attnreg.tools.measure.inputs import Inputs
from attnreg.tools.measure.reference import attend, options_of_part, with_sinks
from attnreg.tools.measure.rule import Error, compare, factor_of

# As many scores as are computed at once: 512 MB of them in float64.
SCORES = 2**26

# Rows are compared in blocks. Under a causal mask the last rows are small: next to the first rows, an error
# as large as the last rows themselves would pass. A block needs enough rows to measure the error of plain
# operations. With a row or two that error is luck: a right backward failed in 5 % of short sequences. Like
# all flash backwards it reads the rounded `out`.
BLOCKS = 8
ROWS = 16


# Options that change the right results, and that neither a sample nor `attend` computes.
UNKNOWN = ("dropout", "seqused_k", "block_table")


class SamplePart(NamedTuple):
    """A key head of one sequence with the query heads that share it."""

    sequence: int
    head: int

    def __str__(self) -> str:
        return f"sequence {self.sequence}, key head {self.head}"


class Verdict(NamedTuple):
    """The largest error over the allowed error, and which result is wrong, where, by how much."""

    error: float
    wrong: str


class Sample:
    """The right results of some parts of a call: of the longest, the shortest and the last sequence.

    `given` are the tensors of the call in the contract's layout; `backward` has gradients compared as well.

    Raises:
        InvalidInputError: the call has dropout, or not all of its keys count, or they lie in pages.
    """

    def __init__(self, case: Case, inputs: Inputs, *, backward: bool = True) -> None:
        if options := [row.name for row in options_on(inputs.call) if row.name in UNKNOWN]:
            raise InvalidInputError(
                f"Sample: got a call with {' and '.join(options)}, expected one without: "
                "its right results aren't known"
            )
        self._case, self._inputs, self._backward = case, inputs, backward
        self._starts = [tuple(accumulate(lens, initial=0)) for lens in (case.lens_q, case.lens_k)]
        self._exact = {
            part: (self._computed(part, torch.float64), self._computed(part, inputs.q.dtype))
            for part in self._parts()
        }

    def errors(self, results: Mapping[str, Tensor]) -> dict[SamplePart, dict[str, Error]]:
        """Return the error of each result in each part; `results` have the contract's shapes."""
        by_part: dict[SamplePart, dict[str, Error]] = {}
        for part, (truth, plain) in self._exact.items():
            by_part[part] = {}
            for name, result in results.items():
                rows = self._rows(part, name, result)
                count = min(max(len(rows) // ROWS, 1), BLOCKS)
                blocks = zip(*(x.tensor_split(count) for x in (rows, plain[name], truth[name])), strict=True)
                errors = (
                    compare((ours,), theirs, exact, self._inputs.q.dtype)
                    for ours, theirs, exact in blocks
                    if len(exact)
                )
                errors = (error._replace(factor=factor_of(self._case)) for error in errors)
                by_part[part][name] = max(errors, key=lambda error: error.share)
        return by_part

    def verdict(self, results: Mapping[str, Tensor]) -> Verdict:
        """Return how wrong results are: any of `out`, `lse`, `dq`, `dk`, `dv`, in the contract's shapes."""
        for name, result in results.items():
            if name != "lse" and not bool(result.isfinite().all()):
                return Verdict(torch.inf, f"{name} has values that aren't finite")
        errors = [
            (error, f"{name} of {part}: {error}")
            for part, named in self.errors(results).items()
            for name, error in named.items()
        ]
        wrong = next((text for error, text in errors if not error.passed), "")
        return Verdict(max((error.share for error, _ in errors), default=0.0), wrong)

    def _parts(self) -> list[SamplePart]:
        lens = list(zip(self._case.lens_q, self._case.lens_k, strict=True))
        filled = [number for number, pair in enumerate(lens) if all(pair)]
        last = self._case.heads[1] - 1
        if not filled:
            return []
        longest = max(filled, key=lens.__getitem__)
        shortest = min(reversed(filled), key=lens.__getitem__)
        return list(
            dict.fromkeys((SamplePart(longest, 0), SamplePart(shortest, last), SamplePart(filled[-1], last)))
        )

    def _rows(self, part: SamplePart, name: str, x: Tensor) -> Tensor:
        """Return what belongs to a part: (S, heads, dim), or (S, heads) of the LSE."""
        group = self._case.heads[0] // self._case.heads[1]
        of_keys = name in ("k", "v", "dk", "dv")
        first, count = (part.head, 1) if of_keys else (part.head * group, group)
        heads = slice(first, first + count)
        starts = self._starts[of_keys]
        here = slice(starts[part.sequence], starts[part.sequence + 1])
        if name == "lse":
            return (x[heads, here] if self._case.varlen else x[part.sequence, heads]).mT
        return (x[here] if self._case.varlen else x[part.sequence])[:, heads]

    def _options(self, part: SamplePart, head: int, rows: slice) -> dict[str, Any]:
        """Return the options of the formula for some rows of a query head of a part."""
        device, group = self._inputs.q.device, self._case.heads[0] // self._case.heads[1]
        start, length = self._starts[0][part.sequence], self._case.lens_q[part.sequence]
        of_query = torch.arange(start, start + length, device=device)[None, rows]
        first = part.head * group + head
        sequences = torch.tensor([part.sequence], device=device)
        heads = slice(first, first + 1)
        return options_of_part(self._case, self._inputs.call, sequences, heads, of_query)

    @torch.enable_grad()  # a caller may have turned it off for the kernels
    def _computed(self, part: SamplePart, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the results of a part, computed in one dtype a query head and some rows at a time."""
        inputs, call = self._inputs, self._inputs.call
        named = (("q", inputs.q), ("k", inputs.k), ("v", inputs.v), ("q", inputs.grad_out))
        q, k, v, grad = (self._rows(part, name, x).detach().to(dtype) for name, x in named)
        of_lse = None if call.grad_lse is None else self._rows(part, "lse", call.grad_lse).to(dtype)
        k, v = k.requires_grad_(), v.requires_grad_()
        # The gradients of key and value are sums over heads and rows; summing itself is to cost nothing.
        sums = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in (("dk", k), ("dv", v))}
        heads: dict[str, list[Tensor]] = {"out": [], "lse": [], "dq": []}
        at_once = max(SCORES // len(k), 1)
        for head in range(q.shape[1]):
            sinks = None if call.sinks is None else call.sinks.to(dtype)[part.head * q.shape[1] + head, None]
            rows: dict[str, list[Tensor]] = {name: [] for name in heads}
            for first in range(0, len(q), at_once):
                some = q[first : first + at_once, head : head + 1].requires_grad_()
                out, lse = attend(
                    *(some[None], k[None], v[None], call.scale, call.window),
                    **self._options(part, head, slice(first, first + at_once)),
                    first_row=first,
                    len_q=len(q),
                )
                if sinks is not None:
                    out, lse = with_sinks(out, lse, sinks)
                rows["out"].append(out[0].detach())
                rows["lse"].append(lse[0].detach().mT)
                if self._backward:
                    results, incoming = [out], [grad[first : first + at_once, head : head + 1][None]]
                    if of_lse is not None:
                        results.append(lse)
                        further = of_lse[first : first + at_once, head : head + 1].mT[None]
                        incoming.append(further.masked_fill(lse == -torch.inf, 0.0))
                    dq, dk, dv = torch.autograd.grad(results, (some, k, v), incoming)
                    rows["dq"].append(dq)
                    sums["dk"] += dk
                    sums["dv"] += dv
            for name, parts in rows.items():
                heads[name].append(torch.cat(parts) if parts else q.new_zeros(0))
        joined = {name: torch.cat(parts, 1) for name, parts in heads.items() if parts[0].numel()}
        return joined | {name: total.to(dtype) for name, total in sums.items() if self._backward}

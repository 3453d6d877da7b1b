"""The calls that a backend is checked with: the input matrix, fitted to it, and calls drawn for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from attnreg.core.contract.backend import Backend
from attnreg.core.contract.capabilities import Capabilities, Range
from attnreg.core.contract.options import OPTIONS
from attnreg.errors import InvalidInputError
from attnreg.testing.fronts import FRONTS
from attnreg.tools import measure
from attnreg.tools.measure import CASES, QUICK, Case, Inputs
from attnreg.tools.measure.cases import DIMS, FREE_NUMBERS, WITHOUT_OPTIONS, Bias, Layout, field_of

# Most models compute in the first.
DTYPES_BY_USE = ("bfloat16", "float16", "float32", "float64")

# What a direction may declare, and which cases ask for it. Nothing here records a CUDA graph.
ABILITIES: dict[str, Callable[[Case], bool]] = {
    "dense": lambda case: not case.varlen,
    "varlen": lambda case: case.varlen,
    "gqa": lambda case: case.heads[0] != case.heads[1],
    "causal": lambda case: case.window == (-1, 0),
    "window": lambda case: case.window[0] >= 0 or case.window[1] > 0,
    **{row.field: partial(lambda option, case: case.has(option), row) for row in OPTIONS if field_of(row)},
    "any_scale": lambda case: case.scale is not None and case.scale <= 0.0,
    "delta_from_out": lambda case: case.grad_lse,
    "deterministic": lambda case: case.deterministic,
    "batch_invariant": lambda case: case.batch_invariant,
}

# How many calls are drawn: each ability has its turn.
DRAWN = max(24, len(ABILITIES))


# The abilities that only dense calls show, and those that only packed calls show.
OF_DENSE = ("dense", "bias", "bias_gradient")
OF_PACKED = ("varlen", "seqused_k", "key_ranges", "score_mod", "mask_mod", "page_size", "sinks")


# The ability and the field of each option with a number, and what is drawn for it: the numbers of the matrix.
NUMBERS = [
    (row.field, field_of(row), sorted({getattr(case, field_of(row)) for case in QUICK if case.has(row)}))
    for row in FREE_NUMBERS
]


class Check(NamedTuple):
    """A call to check a backend with.

    Attributes:
        case: the call.
        front: what the program calls, one of `FRONTS`; "" for the kernels themselves and their launchers.
    """

    case: Case
    front: str = ""

    @property
    def name(self) -> str:
        """The name without the dtype, unique within a dtype."""
        return f"{self.front}: {self.case.name}" if self.front else self.case.name

    def __str__(self) -> str:
        return f"{self.name} {self.case.dtype}"


def inputs(case: Case | Check, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    """Return the tensors of a case as its check has them: query, key, value, the output's gradient, the call.

    A check through a front makes three calls: call number n has the seed `seed` + n - 1, and the second call
    is the call of `case.reordered()`.

    Args:
        case: a case, or a check from `Conformance.checks` or `Conformance.find`.
        device: the device of the tensors; the values are the same on each.
        seed: the seed that the checks ran with.

    Raises:
        InvalidInputError: `case` is neither.
    """
    drawn = case.case if isinstance(case, Check) else case
    if not isinstance(drawn, Case):
        check = "Conformance(backend).find('heads 4:2 bfloat16')"
        raise InvalidInputError(f"case: got {case!r}, expected a Case or a Check, such as {check}")
    return measure.inputs(drawn, device, seed)


def checks_for(backend: Backend, dtypes: Iterable[str], seed: int, full: bool) -> list[Check]:
    """Return the checks of a backend: in these dtypes, or in the dtypes that it declares.

    Without `dtypes`, unless `full`, the matrix and the fronts are in one dtype, bfloat16 if that is declared,
    and the drawn cases in all: most faults show in every dtype.
    """
    limits = backend.forward
    wanted = list(dtypes) or [dtype for dtype in DTYPES_BY_USE if dtype in limits.dtypes]
    main = wanted if dtypes or full else wanted[:1]
    matrix = [fitted(case, limits) for case in (CASES if full else QUICK) if case.dtype in main]
    backward = set(declared(backend.backward))  # only a backward has to declare these
    of_both = replace(
        limits,
        grad_lse=not backward.isdisjoint(("grad_lse", "delta_from_out")),
        bias_gradient="bias_gradient" in backward,
    )
    drawn = [_drawn(of_both, wanted, seed, number) for number in range(DRAWN)] if wanted else []
    usual: dict[str, Any] = {"window": (-1, 0)} if limits.causal else {}
    repeated = [
        Check(fitted(replace(case, dtype=dtype, **usual), limits), front)
        for dtype in main[:1]
        for front, case in FRONTS.items()
    ]
    return [*map(Check, matrix), *map(Check, drawn), *repeated]


def declared(limits: Capabilities | None) -> list[str]:
    """Return which of `ABILITIES` a direction declares."""
    if limits is None:
        return []
    on = {field.name for field in fields(Capabilities) if getattr(limits, field.name)}
    on |= {row.field for row in OPTIONS if limits.runs(row)}
    return [name for name in ABILITIES if name in on]


def fitted(case: Case, limits: Capabilities) -> Case:
    """Return a case with the nearest head dims, heads and page size that a backend takes.

    Only if they are the usual ones: a case about a head dim of 5 stays about that.
    """
    changes: dict[str, Any] = {}
    dims = case.dims
    if dims == (64, 64) and 64 not in limits.head_dim:
        dim = _nearest(limits.head_dim, 64)
        changes["dims"] = dims = dim, dim if limits.head_dim_v is None else _nearest(limits.head_dim_v, dim)
    if case.dropout and case.max_k > dims[1]:
        changes["lens_k"] = tuple(min(length, dims[1]) for length in case.lens_k)
    if case.heads[0] not in limits.heads:
        factors = (factor for factor in range(2, 65) if case.heads[0] * factor in limits.heads)
        factor = next(factors, 1)
        changes["heads"] = case.heads[0] * factor, case.heads[1] * factor
    if case.page_size is not None and limits.page_size is not None:
        changes["page_size"] = _nearest(limits.page_size, case.page_size)
    return replace(case, **changes) if changes else case


def _nearest(allowed: Range, number: int) -> int:
    clamped = min(max(number, allowed.low), allowed.high)
    return max(clamped // allowed.step, -(-allowed.low // allowed.step)) * allowed.step


def _drawn(limits: Capabilities, dtypes: list[str], seed: int, number: int) -> Case:
    """Return a small call with some of what a backend declares, each in turn among it; the seed decides."""
    draw, abilities = random.Random(f"{seed} {number}"), declared(limits)
    in_turn = abilities[number % len(abilities)] if abilities else ""

    def maybe(ability: str, value: Any, otherwise: Any, chance: float = 0.2) -> Any:
        drawn = draw.random() < chance  # drawn in any case: what else is declared doesn't change the rest
        return value if ability in abilities and (drawn or in_turn == ability) else otherwise

    varlen = limits.varlen
    if varlen and limits.dense and in_turn not in OF_PACKED:
        varlen = in_turn not in OF_DENSE and draw.random() < 0.5
    lens_q, lens_k = _lengths(draw, limits, varlen)
    dim = draw.choice([dim for dim in DIMS if dim in limits.head_dim] or [_nearest(limits.head_dim, 64)])
    heads_k = draw.randint(1, 3)
    window = maybe("causal", (-1, 0), (-1, -1), 0.4)
    case = Case(
        name=f"drawn {number}",
        lens_q=lens_q,
        lens_k=lens_k,
        varlen=varlen,
        heads=(heads_k * maybe("gqa", draw.randint(2, 4), 1, 0.5), heads_k),
        dims=(dim, dim if limits.head_dim_v is None else _nearest(limits.head_dim_v, dim)),
        dtype=random.Random(f"{seed} {number} dtype").choice(dtypes),  # the rest is alike for all
        window=maybe("window", (draw.choice((0, 4, 40)), draw.choice((-1, 3, 40))), window),
        scale=maybe("any_scale", -0.1, draw.choice((None, draw.uniform(0.5, 2.0) * (dim or 1) ** -0.5)), 0.0),
        grad_layout=draw.choice(("plain", "plain", "bhsd", "expanded")),
        alibi=maybe("alibi", True, False),
        grad_lse=maybe("grad_lse", True, False),
        num_splits=maybe("num_splits", draw.randint(1, 4), None),
        deterministic=maybe("deterministic", True, False, 0.1),
        batch_invariant=maybe("batch_invariant", True, False, 0.1),
        **{
            field: maybe(ability, draw.choice(values), WITHOUT_OPTIONS[field])
            for ability, field, values in NUMBERS
        },
    )
    case = (_packed if varlen else _dense)(draw, case, in_turn, maybe)
    return fitted(_counting_sinks(case) if in_turn == "sinks" else case, limits)


def _dense(draw: random.Random, case: Case, in_turn: str, maybe: Callable[..., Any]) -> Case:
    """Return a dense case with an option that packed cases don't have; `maybe` is `_drawn`'s."""
    bias: Bias = draw.choice(("key padding", "additive"))
    if in_turn in ("bias", "bias_gradient"):
        bias = "additive"  # a small batch may have no padding
    case = replace(case, bias=bias if in_turn == "bias_gradient" else maybe("bias", bias, "none"))
    has_gradient = maybe("bias_gradient", True, False)
    return replace(case, bias_gradient=has_gradient and case.bias == "additive")


def _packed(draw: random.Random, case: Case, in_turn: str, maybe: Callable[..., Any]) -> Case:
    """Return a packed case with options that dense cases don't have; `maybe` is `_drawn`'s."""
    if in_turn == "page_size":
        return replace(case, seqused_k=tuple(draw.randint(0, length) for length in case.lens_k), page_size=16)
    used = maybe("seqused_k", tuple(draw.randint(0, length) for length in case.lens_k), None)
    layout: Layout = draw.choice(("plain", "bhsd", "odd rows"))
    case = replace(case, seqused_k=used, tail=draw.choice((0, 17)), poison=True, layout=layout)
    ranges = maybe("key_ranges", draw.randint(1, 3), 0, 0.0)
    functions = {name: maybe(name, True, False, 0.0) for name in ("score_mod", "mask_mod")}
    return replace(case, key_ranges=ranges, **functions)


def _counting_sinks(case: Case) -> Case:
    """Return a packed case whose kernels count sinks: every row sees another key, and no option is given."""
    changes = WITHOUT_OPTIONS | dict.fromkeys(("deterministic", "batch_invariant", "poison"), False)
    changes["lens_k"] = tuple(map(max, case.lens_q, case.lens_k))
    # The gradient has a number for each head: of a few numbers the largest error may be small by chance.
    changes["heads"] = tuple(count * -(-16 // case.heads[0]) for count in case.heads)
    return replace(case, **changes | {"counts_sinks": True, "tail": 0})


def _lengths(draw: random.Random, limits: Capabilities, varlen: bool) -> tuple[tuple[int, ...], ...]:
    batch = _nearest(limits.batch, draw.randint(1, 4))
    lens_q, lens_k = (tuple(draw.randint(1, 130) for _ in range(batch if varlen else 1)) for _ in "qk")
    if draw.random() < 0.5:
        lens_k = lens_q
    return (lens_q, lens_k) if varlen else (lens_q * batch, lens_k * batch)


def selected(checks: Iterable[Check], texts: Iterable[str]) -> Iterator[Check]:
    """Yield the checks with one of these texts in their names; of a whole name only the check that has it."""
    every = list(checks)
    folded, names = [text.casefold() for text in texts], {str(check).casefold() for check in every}
    whole = names.intersection(folded)
    parts = [text for text in folded if text not in whole]
    for check in every:
        name = str(check).casefold()
        if name in whole or any(text in name for text in parts):
            yield check

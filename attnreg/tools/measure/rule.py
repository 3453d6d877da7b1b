"""The accuracy rule, and the check of kernels by it.

Errors are largest differences from attention in float64. A kernel is right if its error is at most twice the
error of plain PyTorch operations in the inputs' dtype, plus the rounding of the result itself. With a softcap
the factor is three.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.contract.backend import Call, Kernels
from attnreg.core.contract.options import options_on
from attnreg.errors import UnsupportedInputError
from attnreg.tools.measure import promises
from attnreg.tools.measure.cases import Case
from attnreg.tools.measure.inputs import Guarded, inputs
from attnreg.tools.measure.invariance import check_batch_invariant
from attnreg.tools.measure.places import describe_faults
from attnreg.tools.measure.reference import Results, attention, kept_weights, sinks_of, with_sinks

FACTOR = 2.0
# With a softcap: GPU kernels take the tanh that the hardware approximates, as flash-attention's tests allow.
SOFTCAP_FACTOR = 3.0

# Relative and absolute, as torch.testing.assert_close has them by default.
TOLERANCES = {torch.float32: (1.3e-6, 1e-5), torch.float64: (1e-7, 1e-7)}

# A gradient may be 0 by cancellation, as with a single visible key. Then rounding costs nothing, but the
# kernel computed the 0 in float32.
LEAST = FACTOR * TOLERANCES[torch.float32][1]


class Error(NamedTuple):
    """The largest error of one tensor, against float64.

    Attributes:
        kernel: The kernel's error. Infinite if the result has a NaN or another shape.
        math: The error of plain PyTorch operations in the inputs' dtype.
        atol: The error of rounding the right result.
        factor: The kernel's error may be this many times the error `math`.
        has_nan: Whether the result has a NaN.
        place: Where the result is wrong, as text; empty if it is right, or if that isn't known.
    """

    kernel: float
    math: float
    atol: float
    factor: float = FACTOR
    has_nan: bool = False
    place: str = ""

    @property
    def allowed(self) -> float:
        """The most that passes."""
        return self.factor * self.math + self.atol

    @property
    def passed(self) -> bool:
        """Whether the kernel is right."""
        return self.kernel <= self.allowed

    @property
    def ratio(self) -> float:
        """The kernel's error over plain PyTorch's; infinite if plain PyTorch has none."""
        if self.kernel == 0.0:
            return 0.0
        return self.kernel / self.math if self.math else torch.inf

    @property
    def share(self) -> float:
        """The kernel's error over the largest allowed error."""
        if self.kernel == 0.0:
            return 0.0
        return self.kernel / self.allowed if self.allowed else torch.inf

    def __str__(self) -> str:
        sign = "<=" if self.passed else ">"
        error = "NaN" if self.has_nan else f"{self.kernel:.3g}"
        return f"{error} {sign} {self.factor:g} * {self.math:.3g} + {self.atol:.3g}"


def measure(
    kernels: Kernels,
    case: Case,
    device: torch.device | str = "cpu",
    seed: int = 0,
    same_class: Iterable[Case] = (),
) -> dict[str, Error]:
    """Run a case and return the errors of `out` and `lse`, and of `dq`, `dk`, `dv` with a backward.

    Where the kernels return launchers for repeated calls, these are run as well, and the larger error counts.
    Launchers are specialized for the case with its sequences reordered, and for each case of `same_class`:
    cases of the same kind and class of lengths.

    Raises:
        RegistrationError: the kernels break the contract otherwise: see `promises`.
        UnsupportedInputError: a kernel declines the case.
    """
    drawn = inputs(case, device, seed)
    guarded, kernels = Guarded(drawn), promises.checked(kernels)
    if case.sinks:
        kernels = _with_sinks(kernels)
    results = [promises.run_both(kernels, guarded.inputs)]
    kept = kept_weights(case, results[0][0]) if case.dropout else None
    truth = attention(case, drawn, torch.float64, kept)
    plain = attention(case, drawn, drawn.q.dtype, kept)
    if kernels.specialize is not None and _may_be_specialized(case, drawn.call, truth):
        for first in (case.reordered(), *same_class):
            earlier = Guarded(inputs(first, device, seed + 1)).inputs
            results += promises.launched(kernels.specialize, kernels, guarded.inputs, results[0], earlier)
    promises.check_memory(guarded, results)
    if case.dropout:
        promises.check_dropout(kernels, case, guarded.inputs)
    if case.seen_nan:
        promises.check_seen_nan(kernels, case, guarded.inputs)
    if case.deterministic:
        promises.check_repeatable(kernels, guarded.inputs)
    if case.batch_invariant:
        check_batch_invariant(kernels, guarded.inputs, results)
    errors = errors_of(results, plain, truth, drawn.q.dtype)
    errors = {name: error._replace(factor=factor_of(case)) for name, error in errors.items()}
    return _located(errors, case, results, truth)


def _located(
    errors: dict[str, Error], case: Case, results: Sequence[tuple[Tensor, ...]], truth: Results
) -> dict[str, Error]:
    """Return the errors of a case, with the place in the first wrong result of those that are too large.

    All results but the first are of launchers.
    """
    for place_of_result, (name, error) in enumerate(errors.items()):
        right = getattr(truth, name)
        for number, result in enumerate(results if not error.passed else ()):
            got = result[place_of_result]
            if place := describe_faults(case, name, got, right, error.allowed, truth.lse):
                errors = errors | {name: error._replace(place=("by a launcher: " if number else "") + place)}
                break
    return errors


def factor_of(case: Case) -> float:
    """Return how many times the error of plain PyTorch operations passes."""
    return SOFTCAP_FACTOR if case.softcap else FACTOR


def errors_of(
    results: Iterable[tuple[Tensor, ...]], plain: Results, truth: Results, dtype: torch.dtype
) -> dict[str, Error]:
    """Return the largest error of each tensor in one or more results for the same inputs.

    `results`, `plain` and `truth` have the contract's shapes; `dtype` is the dtype of the inputs.
    """
    names = (name for name, right in truth._asdict().items() if right is not None)
    named = zip(names, zip(*results, strict=True), strict=False)
    return {name: compare(got, getattr(plain, name), getattr(truth, name), dtype) for name, got in named}


def compare(got: Iterable[Tensor], plain: Tensor, truth: Tensor, dtype: torch.dtype) -> Error:
    """Return the largest error of one or more results for the same inputs.

    `got` are the results of kernels. `plain` is the result of plain PyTorch operations in the inputs'
    `dtype`, `truth` the result in float64. Any shape, the same for all.
    """
    every = list(got)
    largest = max(_distance(result, truth) for result in every)
    has_nan = largest == torch.inf and any(bool(result.isnan().any()) for result in every)
    return Error(largest, _distance(plain, truth), _rounding(truth, dtype), has_nan=has_nan)


def measure_taken(
    kernels: Kernels,
    case: Case,
    device: torch.device | str = "cpu",
    seed: int = 0,
    same_class: Sequence[Case] = (),
) -> tuple[dict[str, Error], str]:
    """Return the errors of the directions that the kernels run, and why they decline one; empty if none."""
    try:
        return measure(kernels, case, device, seed, same_class), ""
    except UnsupportedInputError as error:
        declined = str(error)
    if kernels.backward is None:
        return {}, declined
    errors, forwards = measure_taken(kernels._replace(backward=None), case, device, seed, same_class)
    return errors, forwards or declined


def _with_sinks(kernels: Kernels) -> Kernels:
    """Return the kernels with sinks counted between forward and backward, as callers of theirs do."""

    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = kernels.forward(*arguments)
        return with_sinks(out, lse, sinks_of(lse))

    return kernels._replace(forward=forward, specialize=None)


def _may_be_specialized(case: Case, call: Call, truth: Results) -> bool:
    """Whether a case is one for which routers may ask `Kernels.specialize` for a launcher."""
    lengths = zip(case.lens_q, case.lens_k, strict=True)
    no_unused_rows = not case.tail and all((queries > 0) == (keys > 0) for queries, keys in lengths)
    plain = all(row.cached for row in options_on(call))
    every_row_sees_a_key = bool(truth.lse.isfinite().all())
    return no_unused_rows and plain and every_row_sees_a_key


def _distance(got: Tensor, truth: Tensor) -> float:
    if got.shape != truth.shape:
        return torch.inf
    if not got.numel():
        return 0.0
    got = got.detach().to(torch.float64)
    distance = (got - truth).abs()
    if math.isfinite(largest := float(distance.amax())):
        return largest
    # An LSE of -inf has a distance of NaN from itself.
    distance = distance.masked_fill(got == truth, 0.0)
    return float(distance.nan_to_num(nan=torch.inf, posinf=torch.inf).amax())


def _rounding(truth: Tensor, dtype: torch.dtype) -> float:
    known = truth.isfinite()
    finite = truth if known.all() else truth[known]
    if not finite.numel():
        return 0.0
    if dtype in TOLERANCES:
        relative, absolute = TOLERANCES[dtype]
        return FACTOR * (absolute + relative * float(finite.abs().amax()))
    rounded = finite.to(dtype)
    return max(LEAST, FACTOR * float((rounded + 0.3 - 0.3 - rounded).abs().amax()))

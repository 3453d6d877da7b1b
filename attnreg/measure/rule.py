"""The accuracy rule, and holding kernels to it.

A kernel is right if its largest error against attention in float64 is at most twice that of plain PyTorch
operations in the inputs' own dtype, plus the rounding of the result itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.contract.backend import Backend, Call, Kernels
from attnreg.contract.discovery import Entry
from attnreg.contract.launchers import AddressLauncher
from attnreg.contract.spec import Device
from attnreg.errors import UnsupportedInputError
from attnreg.measure.cases import Case
from attnreg.measure.inputs import Inputs, inputs
from attnreg.measure.reference import Results, attention

FACTOR = 2.0

# Relative and absolute, those that torch.testing.assert_close uses by default.
TOLERANCES = {torch.float32: (1.3e-6, 1e-5), torch.float64: (1e-7, 1e-7)}

# Where a gradient is 0 by cancellation, as with one visible key, rounding it costs nothing; but the
# kernel has come there through float32.
LEAST = FACTOR * TOLERANCES[torch.float32][1]


class Error(NamedTuple):
    """The largest error of one tensor, against float64.

    Attributes:
        kernel: that of the kernel; infinite where the result has NaN or another shape.
        math: that of plain PyTorch operations in the inputs' dtype.
        atol: what rounding the result costs by itself.
    """

    kernel: float
    math: float
    atol: float

    @property
    def allowed(self) -> float:
        """The most that passes."""
        return FACTOR * self.math + self.atol

    @property
    def passed(self) -> bool:
        """Whether the kernel is right."""
        return self.kernel <= self.allowed

    @property
    def ratio(self) -> float:
        """The error in units of plain PyTorch's; infinite where that has none."""
        if self.kernel == 0.0:
            return 0.0
        return self.kernel / self.math if self.math else torch.inf

    @property
    def share(self) -> float:
        """The error in units of the most that passes."""
        if self.kernel == 0.0:
            return 0.0
        return self.kernel / self.allowed if self.allowed else torch.inf

    def __str__(self) -> str:
        sign = "<=" if self.passed else ">"
        return f"{self.kernel:.3g} {sign} {FACTOR:g} * {self.math:.3g} + {self.atol:.3g}"


class Outcome(NamedTuple):
    """The errors of one case by tensor name, the reasons why a direction wasn't run, and what was raised."""

    case: Case
    errors: dict[str, Error]
    reasons: tuple[str, ...] = ()
    failure: str = ""

    @property
    def passed(self) -> bool:
        """Whether all that was run is right."""
        return not self.failure and all(error.passed for error in self.errors.values())


def measure(
    kernels: Kernels, case: Case, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, Error]:
    """Run a case and return the errors of `out` and `lse`, and of `dq`, `dk`, `dv` with a backward.

    Where the kernels return launchers for repeated calls, these are run as well, and the larger error counts.
    """
    given = inputs(case, device, seed)
    q, k, v, grad_out, call = given
    truth = attention(case, given, torch.float64)
    plain = attention(case, given, q.dtype)
    with torch.no_grad():
        out, lse = kernels.forward(q, k, v, call)
        grads = kernels.backward(grad_out, q, k, v, out, lse, call) if kernels.backward else ()
        results = [(out, lse, *grads)]
        if kernels.specialize is not None and _may_be_specialized(case, call, truth):
            results += _launched(kernels.specialize, given, (out, lse, *grads))
    names = zip(Results._fields, zip(*results, strict=True), strict=False)
    return {name: compare(got, getattr(plain, name), getattr(truth, name), q.dtype) for name, got in names}


def compare(got: Iterable[Tensor], plain: Tensor, truth: Tensor, dtype: torch.dtype) -> Error:
    """Return the larger error of one or more results for the same inputs of some dtype.

    `got` is what kernels returned, `plain` what plain PyTorch operations give in that dtype, `truth` the same
    in float64.
    """
    return Error(max(_distance(one, truth) for one in got), _distance(plain, truth), _rounding(truth, dtype))


def measure_taken(
    kernels: Kernels, case: Case, device: torch.device | str = "cpu"
) -> tuple[dict[str, Error], str]:
    """Return the errors of the directions that the kernels take, and why they decline one; empty if none."""
    try:
        return measure(kernels, case, device), ""
    except UnsupportedInputError as error:
        declined = str(error)
    if kernels.backward is None:
        return {}, declined
    errors, forwards = measure_taken(kernels._replace(backward=None), case, device)
    return errors, forwards or declined


def _may_be_specialized(case: Case, call: Call, truth: Results) -> bool:
    """Whether a case is one for which routers may ask `Kernels.specialize` for a launcher."""
    lengths = zip(case.lens_q, case.lens_k, strict=True)
    no_unused_rows = not case.tail and all((queries > 0) == (keys > 0) for queries, keys in lengths)
    plain = call.seqused_k is None and call.block_table is None and not call.dropout
    every_row_sees_a_key = bool(truth.lse.isfinite().all())
    return no_unused_rows and plain and every_row_sees_a_key


def _launched(
    specialize: Callable[..., Any], given: Inputs, results: tuple[Tensor, ...]
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the results of every launcher, or a direction's kernel where it has none or that declines."""
    *inputs, grad_out, call = given
    offsets = () if call.cu_seqlens_q is None else (call.cu_seqlens_q, call.cu_seqlens_k)
    out, lse, *grads = results
    launchers = _calls_of(specialize("forward", tuple(inputs), call))
    forwards = [run(*inputs, *offsets) or (out, lse) for run in launchers]
    for forward in forwards or [(out, lse)]:
        tensors = grad_out, *inputs, *forward
        launchers = _calls_of(specialize("backward", tensors, call)) if grads else []
        for backward in [run(*tensors, *offsets) or grads for run in launchers] or [grads]:
            yield *forward, *backward


def _calls_of(launcher: Callable[..., Any] | None) -> list[Callable[..., Any]]:
    """Return how a launcher is called: as a function, and by the call cache on addresses."""
    if launcher is None:
        return []
    return [launcher, launcher.on_addresses] if isinstance(launcher, AddressLauncher) else [launcher]


def verify(backend: Backend, device: torch.device | str, cases: Iterable[Case]) -> Iterator[Outcome]:
    """Hold a backend to some cases; those outside its capabilities are not run."""
    kernels, device = backend.load(), torch.device(device)
    place = Device(device.type, index=device.index)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        place = Device("cuda", capability, device.index, torch.cuda.get_device_name(device))
    # What it lacks here, its loading has said: a fake package, say, lacks nothing.
    entry = Entry(backend.name, "verify", replace(backend, unavailable=lambda: None))
    for case in cases:
        spec = case.spec(place)
        against = entry.reasons(spec, "forward")
        if against:
            yield Outcome(case, {}, against)
            continue
        against = entry.reasons(spec, "backward")
        runnable = kernels._replace(backward=None) if against else kernels
        try:
            errors, declined = measure_taken(runnable, case, device)
        except Exception as error:  # noqa: BLE001 - one case that breaks must not hide the others
            yield Outcome(case, {}, against, f"{type(error).__name__}: {error}")
        else:
            yield Outcome(case, errors, (declined,) if declined else against)


def _distance(got: Tensor, truth: Tensor) -> float:
    if got.shape != truth.shape:
        return torch.inf
    got = got.to(torch.float64)
    distance = (got - truth).abs().masked_fill(got == truth, 0.0)  # an LSE of -inf has a distance of NaN
    return float(distance.nan_to_num(nan=torch.inf, posinf=torch.inf).amax()) if distance.numel() else 0.0


def _rounding(truth: Tensor, dtype: torch.dtype) -> float:
    finite = truth[truth.isfinite()]
    if not finite.numel():
        return 0.0
    if dtype in TOLERANCES:
        relative, absolute = TOLERANCES[dtype]
        return FACTOR * (absolute + relative * float(finite.abs().amax()))
    rounded = finite.to(dtype)
    return max(LEAST, FACTOR * float((rounded + 0.3 - 0.3 - rounded).abs().amax()))

"""The conformance kit: runs the checks of a backend, and reports what came of each."""

from __future__ import annotations

import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from attnreg.core import registry
from attnreg.core.contract.backend import Backend
from attnreg.core.contract.spec import AttentionSpec, canonical_dtype
from attnreg.core.dispatch.planning import device_of
from attnreg.core.registry.entry import CHECK_FAILED, Entry
from attnreg.core.registry.sourced import under_test
from attnreg.core.torchlib.isolation import raise_if_of_program
from attnreg.errors import BackendUnavailableError, InvalidInputError, did_you_mean
from attnreg.testing.cases import ABILITIES, Check, checks_for, declared, selected
from attnreg.testing.classes import difference, failure, of_same_class, unnamed
from attnreg.testing.fronts import against, measure_front
from attnreg.tools.measure import Case, Error, inputs, measure_taken
from attnreg.tools.measure.inputs import Guarded
from attnreg.tools.measure.promises import check_new

DTYPES = ("float16", "bfloat16", "float32", "float64")
# Cases of so few query tokens run twice more, to find kernels that reuse memory of earlier results. Such a
# kernel reuses it in every case.
FEW_TOKENS = 32
# How many wrong checks are shown in full; of the rest the names.
SHOWN = 10
# A clear reason against a call names what it got, or what it needs; what must be None or 0 was not. Known
# issues have a link.
CLEAR = re.compile(r"\bgot\b|\bneeds?\b|\bmust be (None|0)\b|^not deterministic\b|; see http")


class Outcome(NamedTuple):
    """The outcome of a check.

    Attributes:
        check: the call, and the front that it came through.
        errors: by tensor name, for what was run: `out`, `lse`, `dq`, `dk`, `dv`.
        reasons: why a direction wasn't run.
        failure: what is wrong besides the errors' sizes; empty if nothing is.
    """

    check: Check
    errors: dict[str, Error]
    reasons: tuple[str, ...] = ()
    failure: str = ""

    @property
    def case(self) -> Case:
        """The call without its front."""
        return self.check.case

    @property
    def refused(self) -> bool:
        """Whether nothing was run."""
        return not self.errors and not self.failure

    @property
    def passed(self) -> bool:
        """Whether all that was run is right."""
        return not self.failure and all(error.passed for error in self.errors.values())

    def __str__(self) -> str:
        wrong = [f"{name} {error}" for name, error in self.errors.items() if not error.passed]
        return f"{self.check}: {'; '.join([self.failure] * bool(self.failure) + wrong) or 'right'}"

    @property
    def places(self) -> tuple[str, ...]:
        """The shapes of the call, then for each wrong tensor a sentence that says where it is wrong."""
        wrong = (error.place for error in self.errors.values() if not error.passed and error.place)
        return self.case.shapes, *wrong


class Report(NamedTuple):
    """The outcomes of a backend's checks.

    Attributes:
        outcomes: The outcomes of the checks.
        never_ran: A sentence for each thing that the backend declares and refuses in every case.
        repeat: The line of Python that repeats a check, with `{}` for the check's name.
        tensors: The line that makes a check's tensors, likewise.
        notes: Sentences about what is right, but costs a program time.
    """

    outcomes: tuple[Outcome, ...]
    never_ran: tuple[str, ...]
    repeat: str
    tensors: str = ""
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether a check ran, all that ran are right, and all that the backend declares ran."""
        ran = [outcome for outcome in self.outcomes if not outcome.refused]
        return bool(ran) and not self.never_ran and all(outcome.passed for outcome in ran)

    @property
    def refused(self) -> Counter[str]:
        """How many checks weren't run, or without their backward, by the reason without its numbers."""
        return Counter(
            reason
            for outcome in self.outcomes
            for reason in {reason_text.partition(", got")[0] for reason_text in outcome.reasons}
        )

    def __str__(self) -> str:
        wrong = [outcome for outcome in self.outcomes if not outcome.passed]
        ran = sum(not outcome.refused for outcome in self.outcomes)
        lines = [f"{len(self.outcomes)} checks: {ran - len(wrong)} right, {len(wrong)} wrong"]
        for outcome in wrong[:SHOWN]:
            repeat = self.repeat.format(repr(str(outcome.check)))
            lines.append("\n  ".join((str(outcome), *outcome.places, repeat)))
        if others := [str(outcome.check) for outcome in wrong[SHOWN:]]:
            lines.append(f"{len(others)} more are wrong: {'; '.join(others)}")
        if wrong and self.tensors:
            lines.append(f"tensors of a check:\n  {self.tensors.format(repr(str(wrong[0].check)))}")
        lines += self.never_ran
        lines += [f"note: {text}" for text in self.notes]
        lines += [f"not run, {count} times: {reason}" for reason, count in self.refused.most_common()]
        return "\n".join(lines)


class Conformance:
    """A backend and its checks on a device.

    Args:
        backend: The name of a known backend, or a `Backend`.
        device: The device to run on. Default: this machine's GPU if the backend serves GPUs, else the CPU.
        dtypes: Names of dtypes. Default: see `checks_for`.
        seed: The seed of the drawn cases and of all values.
        full: Whether the checks include cases that take seconds or gigabytes.

    Attributes:
        checks: all of them, refused ones included.

    Raises:
        InvalidInputError: there is no such device or dtype, or the seed is no integer.
        UnknownBackendError: no backend has that name.
        BackendUnavailableError: the backend of that name is broken; says why.
    """

    def __init__(
        self,
        backend: str | Backend,
        device: torch.device | str | None = None,
        dtypes: Iterable[str] = (),
        seed: int = 0,
        *,
        full: bool = False,
    ) -> None:
        under_test = backend if isinstance(backend, Backend) else registry.find(backend).open()
        if under_test is None:
            raise BackendUnavailableError(f"{backend} {registry.find(str(backend)).unavailable()}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InvalidInputError(f"seed: got {seed!r}, expected an integer")
        self.backend, self.seed, self.dtypes, self.full = under_test, seed, _dtypes(dtypes), full
        self._is_named = isinstance(backend, str)
        if device is None:
            device = "cuda" if "cuda" in under_test.devices and torch.cuda.is_available() else "cpu"
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError):
            raise InvalidInputError(f"device: got {device!r}, expected 'cpu', 'cuda' or 'cuda:N'") from None
        self.checks = checks_for(under_test, self.dtypes, seed, full)
        # What it lacks here, its loading says: a fake package, say, lacks nothing.
        self._entry = Entry(under_test.name, "attnreg.testing", replace(under_test, unavailable=lambda: None))

    def run(self, check: Check | Case) -> Outcome:
        """Run one check, unless the backend refuses it.

        Raises `BackendUnavailableError` if the backend can't load here.
        """
        with under_test(self.backend.name, registry.changed):
            return self._run(check if isinstance(check, Check) else Check(check))

    def _run(self, check: Check) -> Outcome:
        spec = check.case.spec(device_of(self.device))
        kernels = self._entry.kernels(spec)
        forward = self._entry.reasons(spec, "forward")
        backward = self._entry.reasons(spec, "backward")
        unclear = self._unclear(spec, (*forward, *backward))
        unclear = unclear or failure(self._entry, spec) or difference(self._entry, spec, self.seed)
        if forward := forward or against(check.front, check.case, self.device):
            return Outcome(check, {}, forward, unclear)
        try:
            runnable = kernels._replace(backward=None) if backward else kernels
            alike = of_same_class(self._entry, check.case, spec, self.seed) if runnable.specialize else []
            errors, declined = measure_taken(runnable, check.case, self.device, self.seed, alike)
            if not declined and sum(check.case.lens_q) <= FEW_TOKENS:
                check_new(runnable, Guarded(inputs(check.case, self.device, self.seed)).inputs)
            if check.front:
                where = check.case, self.device, self.seed
                errors = {} if declined else measure_front(check.front, self.backend, *where, not backward)
        except BaseException as error:  # noqa: BLE001 - one check that breaks must not hide the others
            raise_if_of_program(error)
            return Outcome(check, {}, backward, f"{_place(error)}{type(error).__name__}: {error}")
        return Outcome(check, errors, (declined,) if declined else backward, unclear)

    def report(self, outcomes: Iterable[Outcome]) -> Report:
        """Return what came of these checks; if they are all checks, also what was declared and never ran."""
        outcome_of = {outcome.check: outcome for outcome in outcomes}
        never = self.never_ran(outcome_of.__getitem__) if len(outcome_of) == len(self.checks) else ()
        options = {"device": str(self.device), "dtypes": self.dtypes, "seed": self.seed, "full": self.full}
        arguments = ", ".join(f"{name}={value!r}" for name, value in options.items() if value)
        imported, argument = ("", repr(self.backend.name)) if self._is_named else _variable(self.backend)
        call = f"{imported}check_backend({argument}, {arguments}, cases=[{{}}])"
        check = f"{imported}inputs(Conformance({argument}, {arguments}).find({{}})"
        specs = {check.case.spec(device_of(self.device)) for check in outcome_of}
        return Report(
            tuple(outcome_of.values()),
            tuple(never),
            f"from attnreg.testing import check_backend; {call}",
            f"from attnreg.testing import Conformance, inputs; {check}, {str(self.device)!r}, {self.seed})",
            tuple(unnamed(self._entry, specs)),
        )

    def find(self, name: str) -> Check:
        """Return the check of that name, such as "heads 4:2 bfloat16".

        Raises `InvalidInputError` if there is none.
        """
        for check in self.checks:
            if str(check).casefold() == name.casefold():
                return check
        names = [str(check) for check in self.checks]
        hint = did_you_mean(name, names) or f", such as {names[0]!r}"
        raise InvalidInputError(f"check: got {name!r}, expected the whole name of one{hint}")

    def never_ran(self, run: Callable[[Check], Outcome]) -> list[str]:
        """Return a sentence for each thing that a direction declares and refuses in every check."""
        sentences = []
        directions = ("forward", "out", self.backend.forward), ("backward", "dq", self.backend.backward)
        for direction, tensor, limits in directions:
            for ability in declared(limits):
                reasons: dict[str, None] = {}
                for check in self.checks:
                    if ABILITIES[ability](check.case):
                        outcome = run(check)
                        if tensor in outcome.errors or outcome.failure:
                            break
                        reasons |= dict.fromkeys(outcome.reasons)
                else:
                    # What needs something that isn't here is no fault of the declaration.
                    if not any(re.search(r"\bneeds?\b", reason) for reason in reasons):
                        refusals = "; ".join(reasons) or "no check asks for it"
                        sentences.append(f"its {direction} declares {ability}, but never ran it: {refusals}")
        return sentences

    def _unclear(self, spec: AttentionSpec, reasons: tuple[str, ...]) -> str:
        """Return what is wrong with the reasons that functions `refuses` give; empty if nothing is."""
        directions = filter(None, (self.backend.forward, self.backend.backward))
        # A package's own class may have its own `unsupported`.
        fields = [replace(limits, refuses=None) for limits in directions]
        by_limits = [reason for limits in fields for reason in limits.unsupported(spec)]
        for reason in reasons:
            if reason.startswith(CHECK_FAILED):
                return reason
            if reason not in (*by_limits, "has no backward") and not CLEAR.search(reason):
                return f"refusal: got {reason!r}, expected a sentence such as 'head_dim must be 64, got 80'"
        return ""


def _place(error: BaseException) -> str:
    """Return the line of the backend's code that an exception comes from, such as "kernels.py:42: "."""
    ours, torchs = Path(__file__).parents[1], Path(torch.__file__ or "").parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        of_library = path.is_relative_to(ours) and not path.is_relative_to(ours / "backends")
        if not of_library and not path.is_relative_to(torchs):
            return f"{path.name}:{frame.lineno}: "
    return ""


def _variable(backend: Backend) -> tuple[str, str]:
    """Return the line that imports a backend, and its name there; of one that no module has, what it is.

    The module of its `load` is looked at first: others may have imported it from there.
    """
    first = getattr(backend.load, "__module__", None)
    for name in sorted(sys.modules, key=lambda name: (name != first, name)):
        for variable, value in list(getattr(sys.modules[name], "__dict__", {}).items()):
            if value is backend and variable.isidentifier():
                return f"from {name} import {variable}; " if name != "__main__" else "", variable
    return "", f"<the Backend {backend.name!r} that was given>"


def _dtypes(dtypes: Iterable[str]) -> tuple[str, ...]:
    """Return the names of dtypes as torch has them."""
    _check_list("dtypes", dtypes, "names of dtypes")
    names = tuple(map(canonical_dtype, dtypes))
    for name in names:
        dtype = getattr(torch, name, None)
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise InvalidInputError(
                f"dtypes: got {name!r}, expected floating-point dtypes{did_you_mean(name, DTYPES)}"
            )
    return names


def _check_list(name: str, value: object, of: str) -> None:
    if isinstance(value, str) or not isinstance(value, Iterable):  # each letter of a text would be one
        raise InvalidInputError(f"{name}: got {value!r}, expected a list of {of}")


def check_backend(
    backend: str | Backend,
    *,
    device: torch.device | str | None = None,
    dtypes: Iterable[str] = (),
    seed: int = 0,
    cases: Iterable[str] | None = None,
    full: bool = False,
) -> Report:
    """Check a backend's values, shapes, memory, repeatability, reasons and cuts, also through each front.

    Args:
        backend, device, dtypes, seed, full: as for `Conformance`.
        cases: parts of the names of checks, to run these alone; all of them unless given.

    Returns:
        The report, which says what was refused and how often: compare `refused` with what you expect.

    Raises:
        AssertionError: a check fails, or the backend runs nothing of what it declares; the message has for
            each failure the line that repeats it.
        InvalidInputError: no check has one of `cases` in its name; or as of `Conformance`.
        UnknownBackendError: no backend has that name.
        BackendUnavailableError: the backend can't load here.
    """
    if cases is not None:
        _check_list("cases", cases, "parts of names")
    kit = Conformance(backend, device, dtypes, seed, full=full)
    checks = kit.checks if cases is None else list(selected(kit.checks, cases))
    if not checks:
        raise InvalidInputError(
            f"cases: got {cases!r}, expected parts of names, such as {str(kit.checks[0])!r}"
        )
    report = kit.report(map(kit.run, checks))
    if not report.passed:
        raise AssertionError(f"{kit.backend.name} on {kit.device}: {report}")
    return report

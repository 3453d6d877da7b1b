"""What `explain` returns, and its text: the answer in the first line, then a line for each backend."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from attnreg.core.contract.capabilities import OTHER_DEVICE, one_line
from attnreg.core.contract.spec import AttentionSpec
from attnreg.core.dispatch.planning import NOTHING_ASKS
from attnreg.core.selection.decision import Decision
from attnreg.core.selection.predictions import Candidate, Prediction
from attnreg.core.selection.render import ELIGIBLE, decision_table, headline
from attnreg.core.torchlib import building
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.tools.explanation.call_spec import shapes_as
from attnreg.tools.lines import aligned, encodable, fitted, width_of

RUNS = "runs it"
# How the note begins that the first line has already where torch's own kernel runs the call.
NOBODY_ASKS = f"{NOTHING_ASKS}: "
ASSUMES = "assumes that the backends load on that device, with the packages that they need"
# Of `to_dict` no part: they are the same facts, as text.
OF_TEXT = ("inputs", "details", "overruled")


@dataclass(frozen=True, slots=True)
class Explanation:
    """The decisions about a call that isn't run.

    `print` shows the answer in the first line and a line for each backend, as wide as the terminal;
    `text(verbose=True)` has everything.

    Attributes:
        spec: the call that is explained.
        forward: the decision about its forward.
        backward: the decision about its backward; None where none is needed.
        notes: what else decides whether attnreg sees the call at all.
        unasked: the kernel of torch's that runs a dense call as long as nothing asks for a backend, by its
            name in `stats`; else empty. The decisions are then what would happen if something did.
        inputs: the shapes as the call has them, as text; empty if there is a spec alone.
        details: the notes on single backends of another machine, which only `text(verbose=True)` has.
        overruled: who asks for backends of which none can run a direction, and why not, as text.
    """

    spec: AttentionSpec
    forward: Decision
    backward: Decision | None = None
    notes: tuple[str, ...] = ()
    unasked: str = ""
    inputs: str = field(default="", repr=False, compare=False)
    details: tuple[str, ...] = field(default=(), repr=False, compare=False)
    overruled: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def backend(self) -> str | None:
        """The backend of the forward; None if none can run it."""
        return self.forward.backend

    @property
    def source(self) -> str:
        """Who decided about the forward."""
        return self.forward.source

    @property
    def rejected(self) -> dict[str, tuple[str, ...]]:
        """Why each of the others can't run the forward."""
        return self.forward.rejected

    @property
    def runs(self) -> bool:
        """Whether every direction that is needed has a backend."""
        return all(decision.backend is not None for decision in self._decisions())

    @property
    def answer(self) -> str:
        """The answer in one sentence: which backend runs each direction, and who decided."""
        for decision in self._decisions():
            if decision.backend is None:
                return headline(self.spec, decision)
        answer = _answer(self._decisions())
        if not self.unasked:
            return answer
        return f"{self.unasked}, because {NOTHING_ASKS}; attnreg itself would choose: {answer}"

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, for JSON."""
        data = {"runs": self.runs, "backend": self.backend, "source": self.source, **asdict(self)}
        for name in OF_TEXT:
            del data[name]
        for name in ("forward", "backward"):
            decision = getattr(self, name)
            if decision is not None and decision.predicted is not None:
                data[name]["predicted"] = decision.predicted.to_dict()
        return data

    def text(self, verbose: bool = False, width: int | None = None) -> str:
        """Return the explanation as text.

        Args:
            verbose: with every reason in each direction, where predicted times come from, and all notes.
            width: the columns that lines are wrapped at, commands apart; None for whole lines.
        """
        parts = _everything(self) if verbose else _usual(self, width)
        return "\n".join(fitted(part, width) for part in parts)

    def __str__(self) -> str:
        """Return the text, in lines that fit the terminal that stdout is; whole lines for a pipe.

        Characters that the encoding of stdout lacks are replaced, so that `print` doesn't fail. `text()` is
        whole, for a log or a file.
        """
        return encodable(self.text(width=width_of(sys.stdout)), sys.stdout)

    def _decisions(self) -> tuple[Decision, ...]:
        return (self.forward,) if self.backward is None else (self.forward, self.backward)


def _answer(decisions: tuple[Decision, ...]) -> str:
    """Return which backends run the directions, and who decided, each said once if both are the same."""
    names, sources = ({getattr(decision, what) for decision in decisions} for what in ("backend", "source"))
    if len(sources) > 1:
        return "; ".join(
            f"{decision.backend} {decision.direction}, by {decision.source}" for decision in decisions
        )
    directions = [
        decision.direction if len(names) == 1 else f"{decision.backend} {decision.direction}"
        for decision in decisions
    ]
    name = f"{decisions[0].backend} " if len(names) == 1 else ""
    return f"{name}{' and '.join(directions)}, by {decisions[0].source}"


def _inputs(explanation: Explanation) -> str:
    spec = explanation.spec
    shapes = explanation.inputs or _shapes_of(spec)
    return "  " + " · ".join([f"on {spec.device}: {shapes}", spec.dtype, *spec.flags()])


def _shapes_of(spec: AttentionSpec) -> str:
    """Return the shapes of a spec, as the command line takes them; of a packed call as `varlen_attn` does."""
    rows_q, rows_k = (
        ((spec.tokens_q,), (spec.tokens_k,))
        if spec.varlen
        else ((spec.batch, spec.max_q), (spec.batch, spec.max_k))
    )
    return shapes_as(
        "(T, H, D)" if spec.varlen else "(B, S, H, D)",
        query=(*rows_q, spec.heads_q, spec.head_dim),
        key=(*rows_k, spec.heads_k, spec.head_dim),
        value=(*rows_k, spec.heads_k, spec.head_dim_v),
    )


def _usual(explanation: Explanation, width: int | None) -> Iterator[str]:
    yield explanation.answer
    yield from explanation.overruled
    yield _inputs(explanation)
    yield from ("".join(line).rstrip() for line in aligned(_rows(explanation), width))
    if others := _for_other_devices(explanation):
        yield f"  for other devices: {', '.join(others)}"
    predicted = explanation.forward.predicted
    if predicted is not None and explanation.backend is not None:
        yield f"  times by {predicted.table}"
        yield from (f"  {line}" for line in _lead_lines(explanation.forward, predicted))
    yield from (f"note: {path}" for path in _slow_paths(explanation))
    if explanation.details:
        yield f"note: {ASSUMES}"
    for note in explanation.notes:
        is_in_answer = bool(explanation.unasked) and note.startswith(NOBODY_ASKS)
        if note not in explanation.details and not is_in_answer:
            yield f"note: {note}"


def _slow_paths(explanation: Explanation) -> Iterator[str]:
    """Yield what such a call costs here without the compiled libraries that are missing."""
    if explanation.spec.device.simulated:
        return
    run = {decision.backend for decision in explanation._decisions()}
    for library in building.LIBRARIES:
        if (not library.backend or library.backend in run) and not building.may_be_loaded(library):
            yield building.slow_path(library)


def _everything(explanation: Explanation) -> Iterator[str]:
    yield explanation.answer
    yield from explanation.overruled
    yield _inputs(explanation)
    for decision in explanation._decisions():
        yield ""
        yield decision_table(explanation.spec, decision)
        if decision.predicted is not None and decision.backend is not None:
            yield from _prediction_lines(explanation.spec, decision, decision.predicted)
    yield from (f"\nnote: {note}" for note in (*_slow_paths(explanation), *explanation.notes))


def _for_other_devices(explanation: Explanation) -> list[str]:
    """Return the backends that serve no device of the call's type."""
    reasons = explanation.rejected.items()
    return [name for name, why in reasons if any(reason.startswith(OTHER_DEVICE) for reason in why)]


def _rows(explanation: Explanation) -> Iterator[tuple[str, str]]:
    decisions, others = explanation._decisions(), _for_other_devices(explanation)
    texts = {
        name: [_text(name, decision) for decision in decisions]
        for name in explanation.forward.order
        if name not in others
    }
    refused = {name: tuple(text) for name, text in texts.items() if name in explanation.rejected}
    if len(refused) > 1 and len(set(refused.values())) == 1 and not others:
        # Of a call that attnreg never sees there is nothing to say of single backends.
        name, *rest = refused
        texts = {kept: text for kept, text in texts.items() if kept not in rest}
        texts = {"every other" if kept == name else kept: text for kept, text in texts.items()}
    for name, text in texts.items():
        if len(set(text)) == 1:
            yield name, text[0] + _times(name, decisions)
        else:
            both = "; ".join(f"{each.direction}: {what}" for each, what in zip(decisions, text, strict=True))
            yield name, both + _times(name, decisions)


def _text(name: str, decision: Decision) -> str:
    if reasons := decision.rejected.get(name):
        return one_line(reasons)
    candidate = _candidate(name, decision)
    trouble = f", but {candidate.trouble}" if candidate is not None and candidate.trouble else ""
    return f"{RUNS if name == decision.backend else ELIGIBLE}{trouble}"


def _candidate(name: str, decision: Decision) -> Candidate | None:
    return None if decision.predicted is None else decision.predicted.of(name)


def _times(name: str, decisions: tuple[Decision, ...]) -> str:
    """Return the predicted times of a backend in the directions that it can run, in milliseconds."""
    able = [decision for decision in decisions if name not in decision.rejected]
    known = [
        (decision.direction, candidate)
        for decision in able
        if (candidate := _candidate(name, decision)) is not None
    ]
    both = next((candidate.both_us for _, candidate in known if candidate.both_us is not None), None)
    if both is not None and len(known) > 1:
        return f", {_milliseconds(both)} forward + backward"
    single = [
        f", {_milliseconds(candidate.cost_us)} {direction}"
        for direction, candidate in known
        if candidate.cost_us is not None
    ]
    return "".join(single)


def _milliseconds(microseconds: float) -> str:
    """Return a time in milliseconds, with three decimals below 10 and one or none above."""
    number = microseconds / 1000
    decimals = 3 if number < 10 else 1 if number < 1000 else 0
    return f"{number:,.{decimals}f} ms"


def _prediction_lines(spec: AttentionSpec, decision: Decision, prediction: Prediction) -> Iterator[str]:
    """Yield a prediction: a row for each backend, the points that it comes from, and the notes."""
    where = "in a CUDA graph" if spec.capturing else "in eager mode"
    exact = all(point.itself for point in prediction.points)
    unit = "" if exact else "; a distance of 1 is a factor of two in a size"
    yield f"  predicted by {prediction.table}, {where}{unit}"
    rows = {}
    for candidate in prediction.candidates:
        refused = "; it can't run this call" if candidate.backend in decision.rejected else ""
        rows[candidate.backend] = f"{_time_of(candidate, spec)}{refused}"
    unknown = (name for name in decision.order if prediction.of(name) is None)
    rows |= {name: "not measured" for name in unknown if name not in decision.rejected}
    width = max(map(len, rows), default=0)
    yield from (f"    {name:<{width}}  {text}" for name, text in rows.items())
    for point in prediction.points:
        near = "this very call" if point.itself else f"at distance {point.distance:.2f}"
        yield f"    from {point.size}, {near}"
    yield from (f"    {line}" for line in _lead_lines(decision, prediction))
    for note in prediction.notes:
        yield f"    {note}"


def _lead_lines(decision: Decision, prediction: Prediction) -> Iterator[str]:
    """Yield why the fastest predicted backend isn't chosen, where its lead is too small."""
    able = [
        candidate
        for candidate in prediction.candidates
        if candidate.cost_us and candidate.backend not in decision.rejected
    ]
    chosen = prediction.of(decision.backend) if decision.backend else None
    if decision.source != prediction.table or chosen is None or not able or able[0].backend == chosen.backend:
        return
    by_host = chosen.both_us is None and chosen.host_us < able[0].host_us
    why = (
        f"{chosen.backend} takes the host less" if by_host else f"{chosen.backend} comes before it by default"
    )
    yield f"{able[0].backend}'s lead may be chance: {why}"


def _time_of(candidate: Candidate, spec: AttentionSpec) -> str:
    if candidate.cost_us is None:
        return candidate.trouble
    host = f"GPU {_milliseconds(candidate.gpu_us)}, host {_milliseconds(candidate.host_us)}, "
    parts = host if spec.device.type == "cuda" else ""
    both = f", forward + backward {_milliseconds(candidate.both_us)}" if candidate.both_us is not None else ""
    first = _milliseconds(candidate.first_call_s * 1e6)
    return f"{_milliseconds(candidate.cost_us)} ({parts}first call {first}){both}"


leave_module_uncompiled(__name__)

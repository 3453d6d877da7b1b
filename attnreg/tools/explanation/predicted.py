"""Where the predicted times of a decision come from, as text, in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

from attnreg.core.contract.spec import AttentionSpec
from attnreg.core.selection.decision import Decision
from attnreg.core.selection.predictions import Candidate, Prediction


def milliseconds(microseconds: float) -> str:
    """Return a time in milliseconds, with three decimals below 10 and one or none above."""
    number = microseconds / 1000
    decimals = 3 if number < 10 else 1 if number < 1000 else 0
    return f"{number:,.{decimals}f} ms"


def prediction_lines(spec: AttentionSpec, decision: Decision, prediction: Prediction) -> Iterator[str]:
    """Yield a prediction: a row for each backend, the points that it comes from, and the notes."""
    where = "in a CUDA graph" if spec.capturing else "in eager mode"
    exact = all(point.itself for point in prediction.points)
    unit = "" if exact else "; a distance of 1 is a factor of two in a size"
    yield f"  predicted by {prediction.table}, {where}{unit}"
    rows = {}
    for one in prediction.candidates:
        refused = "; it can't run this call" if one.backend in decision.rejected else ""
        rows[one.backend] = f"{_times(one, spec)}{refused}"
    unknown = (name for name in decision.order if prediction.of(name) is None)
    rows |= {name: "not measured" for name in unknown if name not in decision.rejected}
    width = max(map(len, rows))
    yield from (f"    {name:<{width}}  {text}" for name, text in rows.items())
    for point in prediction.points:
        near = "this very call" if point.itself else f"at distance {point.distance:.2f}"
        yield f"    from {point.size}, {near}"
    yield from (f"    {line}" for line in lead_lines(decision, prediction))
    for note in prediction.notes:
        yield f"    {note}"


def lead_lines(decision: Decision, prediction: Prediction) -> Iterator[str]:
    """Yield why the fastest predicted backend isn't chosen, where its lead is too small."""
    able = [one for one in prediction.candidates if one.cost_us and one.backend not in decision.rejected]
    if decision.source == prediction.table and able and able[0].backend != decision.backend:
        yield f"{able[0].backend}'s lead may be chance: {decision.backend} comes before it by default"


def _times(one: Candidate, spec: AttentionSpec) -> str:
    if one.cost_us is None:
        return one.trouble
    host = f"GPU {milliseconds(one.gpu_us)}, host {milliseconds(one.host_us)}, "
    parts = host if spec.device.type == "cuda" else ""
    both = f", forward + backward {milliseconds(one.both_us)}" if one.both_us is not None else ""
    first = milliseconds(one.first_call_s * 1e6)
    return f"{milliseconds(one.cost_us)} ({parts}first call {first}){both}"

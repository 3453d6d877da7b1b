"""The page: one HTML file without links to other files. Every value of a run is escaped where it enters."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any, NamedTuple

from attnreg.core.contract.spec import AttentionSpec
from attnreg.core.times.tables import DEFAULT_ORDER
from attnreg.tools.report.gains import Predicted, predicted
from attnreg.tools.report.lines import CallRow, RunReport, grouped, rows_of

# Rows of a table that are shown; the rest is one sentence.
MOST = 50

RECOGNISE = "<code>masks = &quot;recognise&quot;</code>"
NO_PLOTS = "The plots need matplotlib: <code>pip install 'attnreg[plots]'</code>."


class RunTable(NamedTuple):
    """A table about a run: its columns and its rows, the last `right` columns numbers."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: int = 0


def page(run: RunReport, of: str) -> str:
    """Return the page of a run; `of` is its last line, what it was made by and from."""
    sections = (
        _summary(run), _calls(run), _directions(run), _deciders(run), _fallbacks(run), _bypassed(run),
        _masks(run), _first_use(run), _gains(run), _processes(run), _versions(run),
    )  # fmt: skip
    programs = ", ".join(dict.fromkeys(line["program"] for line in run.processes)) or "no process"
    template, style = (
        resources.files(__package__).joinpath(f"page.{kind}").read_text(encoding="utf-8")
        for kind in ("html", "css")
    )
    return Template(template).substitute(
        programs=escape(programs), style=style, sections="\n".join(filter(None, sections)), of=escape(of)
    )


def _summary(run: RunReport) -> str:
    counted = sum(sum(both.values()) for both in run.calls.values())
    passed = sum(row["count"] for row in run.counted("bypassed"))
    if not counted and not passed:
        return "<p><b>No attention call went through attnreg.</b></p>"
    fallbacks = sum(row["count"] for row in run.counted("fallbacks"))
    failures = sum(row["count"] for row in run.counted("failures"))
    counts = (
        (counted, "call", "calls"), (passed, "passed by", "passed by"), (fallbacks, "fallback", "fallbacks"),
        (failures, "failure", "failures"), (len(run.processes), "process", "processes"),
    )  # fmt: skip
    facts = [(name if count == 1 else plural, f"{count:,}") for count, name, plural in counts]
    if run.total_us:
        facts.append(("time of kernels", duration(run.total_us)))
    tiles = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in facts)
    notes = [*run.sentences("overridden"), *run.sentences("slow_paths")]
    return f"<div class=tiles>{tiles}</div>\n" + "".join(
        f"<p class=note>{escape(note)}</p>" for note in notes
    )


def calls_of(run: RunReport) -> RunTable:
    """Return the kinds of calls, the longest total first."""
    rows = [
        (
            str(number), row.backend, row.direction, describe(row.spec), f"{row.calls:,}",
            duration(row.mean_us), _spread(row), duration(row.total_us), share(row.total_us, run.total_us),
        )
        for number, row in enumerate(run.rows, 1)
    ]  # fmt: skip
    heads = ("", "backend", "direction", "call", "calls", "mean", "shortest to longest", "total", "share")
    return RunTable(heads, rows, 5)


def _calls(run: RunReport) -> str:
    if not run.reports:
        return _section(
            "Calls by share of time",
            "<p>The calls weren't timed: these are lines of <code>ATTNREG_STATS</code>. "
            "<code>attnreg run --report report.html PROGRAM</code> times them.</p>",
        )
    if not run.rows:
        return ""
    is_gpu = any(row.spec.device.type == "cuda" for row in run.rows)
    how = (
        "On a GPU some calls of each row are timed between two events, with the device kept busy before: the "
        "time is that of the kernels, and the total is the mean times the number of calls."
        if is_gpu
        else "Each call on a CPU is timed; the first of a process counts for the mean only where it is alone."
    )
    untimed = f" {run.untimed:,} calls have no time." if run.untimed else ""
    lead = (
        "<p>A row has calls of one kind and of similar lengths; its shape is that of the first. "
        f"{how}{untimed} A report has each call pass through Python, so that the program runs slower.</p>"
    )
    plots = _plots(
        lambda charts: (charts.shares(run.rows), charts.times(run.rows, duration)) if run.total_us else ()
    )
    return _section("Calls by share of time", lead + plots + _table(calls_of(run)))


def directions_of(run: RunReport) -> RunTable:
    """Return the calls of each backend, by direction."""
    rows = [(name, f"{n['forward']:,}", f"{n['backward']:,}") for name, n in run.calls.items()]
    return RunTable(("backend", "forward", "backward"), rows, 2)


def _directions(run: RunReport) -> str:
    return _section("Backends by direction", _table(directions_of(run))) if run.calls else ""


def deciders_of(run: RunReport) -> RunTable:
    """Return who decided, most time first."""
    sums = grouped(run.rows, lambda row: row.source)
    rows = [(source, f"{calls:,}", duration(total or None)) for source, (calls, total) in sums.items()]
    return RunTable(("request, table or order", "calls", "time"), rows, 2)


def _deciders(run: RunReport) -> str:
    return _section("Who decided", _table(deciders_of(run))) if run.rows else ""


def fallbacks_of(run: RunReport) -> RunTable:
    """Return the backends that couldn't run calls, and why."""
    rows = [(row["backend"], row["reason"], f"{row['count']:,}") for row in run.counted("fallbacks")]
    return RunTable(("backend", "reason", "calls"), rows, 1)


def _fallbacks(run: RunReport) -> str:
    table = fallbacks_of(run)
    failed = [
        (row["backend"], row["direction"], f"{row['error']}: {row['message']}", f"{row['count']:,}")
        for row in run.counted("failures")
    ]
    text = _table(table) if table.rows else "<p>None.</p>"
    if failed:
        text += f"<h3>Failures</h3>{_table(RunTable(('backend', 'direction', 'error', 'calls'), failed, 1))}"
    return _section("Fallbacks", text)


def bypassed_of(run: RunReport) -> RunTable:
    """Return what PyTorch ran by kernels that attnreg doesn't replace."""
    rows = [
        (
            row["op"], row["kernel"], row["reason"], _shapes(row["shapes"]), row["site"], f"{row['count']:,}",
        )
        for row in run.counted("bypassed")
    ]  # fmt: skip
    heads = ("op", "kernel", "reason", "shapes of the first", "first call at", "calls")
    return RunTable(heads, rows, 1)


def _bypassed(run: RunReport) -> str:
    table = bypassed_of(run)
    lead = "<p>PyTorch ran these by kernels that attnreg doesn't replace; they aren't timed.</p>"
    return _section("What passed by", lead + _table(table) if table.rows else "<p>Nothing.</p>")


def masks_of(run: RunReport) -> RunTable:
    """Return the boolean masks, with their padding if it is known."""
    if masks := run.masks():
        heads = ("mask", "calls", "padding of queries", "of keys")
        rows = [
            (
                row["seen"], f"{row['count']:,}",
                share(1 - row["queries"], 1.0) if row["queries"] else "",
                share(1 - row["keys"], 1.0) if row["keys"] else "",
            )
            for row in masks
        ]  # fmt: skip
        return RunTable(heads, rows, 3)
    return RunTable(
        ("mask", "calls"), [(row["seen"], f"{row['count']:,}") for row in run.counted("masks")], 1
    )


def _masks(run: RunReport) -> str:
    table = masks_of(run)
    lead = (
        "<p>Boolean masks given to <code>F.scaled_dot_product_attention</code>. Padding is the share of "
        "queries, and of keys, that the mask hides from everything.</p>"
    )
    if table.rows:
        return _section("Padding in masks", (lead if run.masks() else "") + _table(table))
    return _section("Padding in masks", "<p>No boolean mask was seen.</p>") if run.reports else ""


def first_use_of(run: RunReport, most: int) -> RunTable:
    """Return the calls whose first use took longest."""
    rows = [
        (
            row.backend, row.direction, describe(row.spec), duration(row.decided_us), duration(row.first_us),
            duration(row.mean_us if row.timed else None),
        )
        for row in sorted(run.rows, key=lambda row: -row.first_use_us)[:most]
    ]  # fmt: skip
    return RunTable(
        ("backend", "direction", "call", "deciding, loading", "first call", "later calls"), rows, 3
    )


def _first_use(run: RunReport) -> str:
    if not run.rows:
        return ""
    total = duration(sum(row.first_use_us for row in run.rows))
    lead = (
        f"<p>{escape(total)} in all: deciding and loading kernels, and what first calls took on the host "
        "beyond later ones. A kernel that is compiled shows here.</p>"
    )
    return _section("First use", lead + _table(first_use_of(run, 10)))


def gains_of(result: Predicted) -> RunTable:
    """Return the calls that another backend is predicted to run faster."""
    rows = [
        (
            gain.row.direction, describe(gain.row.spec), f"{gain.row.backend}, {duration(gain.now_us)}",
            f"{gain.backend}, {duration(gain.then_us)}", duration(gain.saves_us),
        )
        for gain in result.gains
    ]  # fmt: skip
    return RunTable(("direction", "call", "ran", "predicted to be faster", "saves"), rows, 1)


def _gains(run: RunReport) -> str:
    if not run.rows:
        return ""
    result = predicted(run.rows)
    parts = []
    if result.gains:
        parts.append(
            f"<p><b>Another backend.</b> All times of this table are predictions of: {escape(result.note)}. "
            "None was measured in this run.</p>" + _table(gains_of(result))
        )
    else:
        note = "" if result.note == DEFAULT_ORDER else f" ({escape(result.note)})"
        text = (
            f"For {result.known:,} of {len(run.rows):,} rows a table has times{note}. By these no other "
            "backend would be more than 5 % faster."
            if result.known
            else f"No table predicts these calls{note}, so nothing is known of other backends. To measure: "
            f"{_code('attnreg run --record calls.jsonl PROGRAM')}, then "
            f"{_code('attnreg tune --from calls.jsonl')}."
        )
        parts.append(f"<p><b>Another backend.</b> {text}</p>")
    parts += _of_packing(run)
    return _section("What could be gained", "".join(parts))


def _of_packing(run: RunReport) -> Iterator[str]:
    """Yield what leaving padding out would save, in products of queries and keys: a count, not a time."""
    packed = {row["seen"] for row in run.counted("masks")}  # by masks = "recognise"
    for row in run.masks():
        kept = row["queries"] * row["keys"]
        if "padded" in row["seen"] and 0.0 < kept < 1.0 and row["seen"] not in packed:
            calls = f"{row['count']:,} {'call' if row['count'] == 1 else 'calls'}"
            text = (
                f"{calls} had the mask “{escape(row['seen'])}”. Without the padding "
                f"{share(1 - kept, 1.0)} of the products of queries and keys would be saved, on average. "
                f"Times weren't measured. {RECOGNISE} runs such calls packed. A program that packs its "
                "batches saves the padding of the other layers, too."
            )
            yield f"<p><b>Packing.</b> {text}</p>"


def _processes(run: RunReport) -> str:
    rows = []
    for line in run.processes:
        report = line.get("report", {})
        total = sum(row.total_us or 0.0 for row in rows_of([line]))
        counts = sum(sum(both.values()) for both in line["calls"].values())
        seconds = report.get("seconds")
        rows.append(
            (
                line["program"],
                str(line["pid"]),
                f"{counts:,}",
                f"{sum(row['count'] for row in line['bypassed']):,}",
                duration(total or None),
                duration(None if seconds is None else seconds * 1e6),
            )
        )
    heads = ("program", "process", "calls", "passed by", "time of kernels", "since attnreg began")
    return _section("Processes", _table(RunTable(heads, rows, 4))) if rows else ""


def _versions(run: RunReport) -> str:
    rows: dict[str, dict[str, None]] = {}
    for report in run.reports:
        for name in ("python", "platform"):
            rows.setdefault(name, {})[report[name]] = None
        for environment in report["environments"]:
            for name, value in environment.items():
                if name == "backends":
                    value = ", ".join(f"{backend} {version}" for backend, version in value.items())
                if value:
                    rows.setdefault(name.replace("_", " "), {})[str(value)] = None
    lines = [(name, "; ".join(values)) for name, values in rows.items()]
    return _section("Versions and machine", _table(RunTable((), lines))) if lines else ""


def describe(spec: AttentionSpec) -> str:
    """Return a call in a line: sizes, heads, dtype, options."""
    if spec.varlen:
        size = f"{spec.tokens_q:,} tokens"
        if (spec.tokens_k, spec.max_k) != (spec.tokens_q, spec.max_q):
            size += f" over {spec.tokens_k:,}"
    else:
        size = f"{spec.batch} × {spec.max_q:,}"
        size += f" over {spec.max_k:,}" if spec.max_k != spec.max_q else ""
    heads = f"{spec.heads_q} heads"
    heads += f" over {spec.heads_k}" if spec.heads_k != spec.heads_q else ""
    dims = (
        f"{spec.head_dim}" if spec.head_dim == spec.head_dim_v else f"{spec.head_dim} and {spec.head_dim_v}"
    )
    flags = [flag for flag in spec.flags() if flag != "needs grad"]
    return " · ".join([size, f"{heads} of {dims}", spec.dtype, *flags])


def duration(microseconds: float | None) -> str:
    """Return a time with a unit that suits it and three digits; empty if it isn't known."""
    if microseconds is None:
        return ""
    for unit, size in (("h", 3.6e9), ("min", 6e7), ("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.3g} {unit}"
    return f"{microseconds:.3g} µs"


def _spread(row: CallRow) -> str:
    return f"{duration(row.shortest_us)} to {duration(row.longest_us)}" if row.timed > 1 else ""


def share(part: float | None, whole: float) -> str:
    """Return a part of a whole in percent; empty if either isn't known."""
    if part is None or not whole:
        return ""
    share = part / whole
    return "< 1 %" if 0.0 < share < 0.01 else f"{100 * share:.0f} %"


def _shapes(shapes: Sequence[Sequence[object]]) -> str:
    texts = [f"({', '.join(map(str, shape))})" for shape in shapes]
    return texts[0] + " each" if len(texts) > 1 and len(set(texts)) == 1 else ", ".join(texts)


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _section(title: str, text: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{text}\n</section>"


def _table(table: RunTable) -> str:
    """Return a table; a narrow page shows each row as a card."""
    heads, rows, right = table

    def cells(row: Sequence[str]) -> Iterable[str]:
        for place, cell in enumerate(row):
            number = " class=n" if place >= len(row) - right else " class=s" if len(cell) < 15 else ""
            name = f' data-head="{escape(heads[place])}"' if heads and cell else ""
            yield f"<td{number}{name}>{escape(cell)}</td>"

    head = "".join(
        f"<th{' class=n' if place >= len(heads) - right else ''}>{escape(name)}</th>"
        for place, name in enumerate(heads)
    )
    body = "\n".join(f"<tr>{''.join(cells(row))}</tr>" for row in rows[:MOST])
    rest = f"<p>{len(rows) - MOST:,} more rows aren't shown.</p>" if len(rows) > MOST else ""
    thead = f"<thead><tr>{head}</tr></thead>" if heads else ""
    return f"<table>{thead}<tbody>\n{body}\n</tbody></table>{rest}"


def _plots(draw: Any) -> str:
    """Return plots side by side, or why there are none."""
    if importlib.util.find_spec("matplotlib") is None:
        return f"<p class=note>{NO_PLOTS}</p>"
    from attnreg.tools.report import charts

    drawn = draw(charts)
    return f"<div class=plots>{''.join(f'<figure>{svg}</figure>' for svg in drawn)}</div>" if drawn else ""

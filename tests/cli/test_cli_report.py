"""Promises of `attnreg report` and `attnreg run --report`: a page of a real run, with its numbers."""

import html
import importlib.util
import json
import re
import textwrap

import pytest
from support.command_line import invoke
from support.processes import COMMAND, forked

from attnreg.core.selection.predictions import Candidate, Prediction
from attnreg.errors import ConfigError
from attnreg.tools.report import gains, lines
from attnreg.tools.report.page import duration, page

PROGRAM = """
    import sys
    import torch
    import torch.nn.functional as F
    import attnreg

    query = torch.randn(2, 4, 32, 16, requires_grad=True)
    for _ in range(3):
        F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    with torch.no_grad():
        visible = (torch.arange(32) < torch.tensor([[32], [16]]))[:, None, None]
        F.scaled_dot_product_attention(query, query, query, attn_mask=visible)
        F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    with attnreg.use_backend("cpu"):
        F.scaled_dot_product_attention(query, query, query).sum().backward()
    with torch.multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(F.scaled_dot_product_attention, 3 * (query.detach(),), {"is_causal": True})
        pool.close()
        pool.join()
    sys.exit(7)
"""


def text_of(file):
    """Return a page's words, without its style, its plots and its markup."""
    text = re.sub(r"<(style|svg)\b.*?</\1>", " ", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Run a program, with a child, once; return the folder and how it ended."""
    folder = tmp_path_factory.mktemp("ran")
    (folder / "train<b>.py").write_text(textwrap.dedent(PROGRAM))
    options = "--report", str(folder / "report.html"), "--backend", "math"
    return folder, forked(COMMAND, "run", *options, str(folder / "train<b>.py"))


def test_the_page_of_a_run_has_its_calls_and_its_exit_code_stays(ran):
    folder, done = ran
    assert (done.returncode, done.stdout) == (7, ""), done.stderr
    assert done.stderr == f"attnreg: report: {folder / 'report.html'}\n"
    text = text_of(folder / "report.html")
    # Three causal calls with gradients, one with a mask, one in a block, and that of the child.
    assert "10 calls 1 passed by 0 fallbacks 0 failures 2 processes" in text
    assert "backend forward backward math 5 3 cpu 1 1 Who decided" in text
    deciders = re.search(r"Who decided request, table or order calls time (.*?) Fallbacks", text)[1]
    found = re.findall(r"(ATTNREG_BACKEND|use_backend\('cpu'\)) (\d+) ", deciders)
    assert sorted(found) == [("ATTNREG_BACKEND", "8"), ("use_backend('cpu')", "2")]
    assert "math forward 2 × 32 · 4 heads of 16 · float32 · causal 3 " in text
    site = f"{folder / 'train<b>.py'}:13 1 Padding"
    assert f"dropout_p must be 0 on a CPU, got 0.5 (2, 4, 32, 16) each {site}" in text
    assert "mask calls padding of queries of keys padded keys 1 0 % 25 %" in text
    assert "1 call had the mask “padded keys”. Without the padding 25 % of the products of" in text
    assert "No table predicts these calls, so nothing is known of other backends. To measure: " in text


def test_a_row_has_the_times_of_its_calls(ran):
    folder, _ = ran
    run = lines.read([folder / "report.html.jsonl"])
    forward = [row for row in run.rows if row.spec.causal and row.direction == "forward"]
    causal, of_child = sorted(forward, key=lambda row: -row.calls)
    assert (of_child.calls, of_child.spec.needs_backward) == (1, False)
    assert (causal.backend, causal.calls, causal.timed) == ("math", 3, 2)  # the first is apart
    assert 0.0 < causal.shortest_us <= causal.mean_us <= causal.longest_us
    assert causal.total_us == pytest.approx(3 * causal.mean_us)
    assert run.untimed == 0
    # The routers were there to the end: nothing lies above them.
    assert run.sentences("overridden") == []


def test_a_name_with_markup_is_text_and_the_page_loads_nothing(ran):
    folder, _ = ran
    source = (folder / "report.html").read_text(encoding="utf-8")
    assert "train&lt;b&gt;.py" in source and "train<b>" not in source
    assert re.findall(r"""(?:src|href)=["']?[^#"'][^ >]+""", source) == []
    assert "<script" not in source and "url(http" not in source
    assert source.count("<svg") == 2 and "var(--ink)" in source
    ids = re.findall(r' id="([^"]*)"', source)
    assert len(ids) == len(set(ids)) > 10


def test_without_matplotlib_the_page_has_tables_and_says_so(ran, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: (name != "matplotlib" and find(name)) or None
    )
    invoke("report", ran[0] / "report.html.jsonl", "--out", tmp_path / "plain.html")
    source = (tmp_path / "plain.html").read_text(encoding="utf-8")
    assert source.count("pip install 'attnreg[plots]'") == 1 and "<svg" not in source
    assert "10 calls" in text_of(tmp_path / "plain.html")


def test_a_program_that_raises_has_its_traceback_and_a_page(tmp_path):
    program = tmp_path / "raises.py"
    program.write_text(
        "import torch\nq = torch.ones(1, 2, 8, 16)\n"
        "torch.nn.functional.scaled_dot_product_attention(q, q, q)\nraise ValueError('mine')\n"
    )
    page_of = tmp_path / "report.html"
    done = forked(COMMAND, "run", "--report", str(page_of), str(program))
    assert done.returncode == 1
    assert "ValueError: mine\nattnreg: report: " in done.stderr
    # Nothing asks for a backend, so that torch's own kernel runs as it did; it is timed all the same.
    text = text_of(page_of)
    assert "1 call 0 passed by" in text
    kernel, why = "torch's flash_attention kernel", "nothing asks for a backend"
    assert f"backend forward backward {kernel} 1 0 Who decided" in text
    assert f"request, table or order calls time {why} 1 " in text


LINE = {
    "program": "a.py", "pid": 1, "calls": {"cpu": {"forward": 4, "backward": 0}}, "bypassed": [],
    "fallbacks": [{"backend": "<i>", "reason": "a < b", "count": 2}], "failures": [], "masks": [],
    "overridden": [], "slow_paths": ["<script>"],
}  # fmt: skip
TIMED = {"seconds": 1.0, "python": "3", "platform": "x", "environments": [], "plans": [], "masks": []}


def test_lines_of_stats_alone_make_a_page_that_says_what_it_lacks(tmp_path):
    (tmp_path / "stats.jsonl").write_text(2 * f"{json.dumps(LINE)}\n")
    result = invoke("report", tmp_path / "stats.jsonl")
    assert result.output.endswith(f"\nReport: {tmp_path / 'stats.html'}\n")
    text = text_of(tmp_path / "stats.html")
    assert "The calls weren't timed: these are lines of ATTNREG_STATS ." in text
    assert "cpu 8 0" in text and "<i> a < b 4" in text
    assert "<script" not in (tmp_path / "stats.html").read_text()


def test_names_that_are_no_text_are_written_as_escapes(tmp_path):
    """Python reads other bytes than UTF-8 in the name of a file as surrogates."""
    source, page_of = tmp_path / "stats\udcff.jsonl", tmp_path / "page.html"
    source.write_text(json.dumps({**LINE, "slow_paths": ["in /a/b\udcff"]}))
    assert invoke("report", source, "--out", page_of).exit_code == 0
    text = text_of(page_of)
    assert "in /a/b\\udcff" in text and "/stats\\udcff.jsonl" in text


def test_a_file_of_another_machine_controls_no_terminal(tmp_path):
    source = tmp_path / "calls.jsonl"
    source.write_text(json.dumps({**LINE, "calls": {"a\x1b[2J": {"forward": 4, "backward": 0}}}))
    assert "a\N{REPLACEMENT CHARACTER}[2J" in invoke("report", source, "--text").output


def test_text_alone_has_the_pages_numbers_and_writes_nothing(ran, tmp_path):
    source = tmp_path / "calls.jsonl"
    source.write_text((ran[0] / "report.html.jsonl").read_text(encoding="utf-8"), encoding="utf-8")
    result = invoke("report", source, "--text")
    text = " ".join(result.output.split())
    assert result.exit_code == 0
    assert "What ran backend forward backward math 5 3 cpu 1 1" in text
    assert re.search(r"Who decided calls time request, table or order .*8 .*? ATTNREG_BACKEND", text)
    assert "3 math forward 2 × 32 · 4 heads of 16 · float32 · causal" in text
    assert "torch's math kernel 1 dropout_p must be 0 on a CPU, got 0.5" in text
    assert f"first call of torch's math kernel: {ran[0] / 'train<b>.py'}:13\n" in result.output
    assert "padded keys 1 0 % 25 %" in text
    assert list(tmp_path.iterdir()) == [source]


def test_a_file_alone_is_printed_and_has_its_page_and_a_named_page_is_all_there_is(tmp_path):
    source = tmp_path / "stats.jsonl"
    source.write_text(json.dumps(LINE))
    assert (
        "What ran\n  backend  forward  backward\n  cpu            4         0\n"
        in invoke("report", source).stdout
    )
    assert (
        invoke("report", source, "--out", tmp_path / "page.html").stdout == f"Report: {tmp_path}/page.html\n"
    )
    result = invoke("report", source, "--text", "--out", tmp_path / "other.html")
    assert (result.exit_code, (tmp_path / "other.html").exists()) == (2, False)
    assert "--text: got --out as well, expected one of them" in result.stderr


def test_lines_are_printed_also_where_no_page_can_be_written(tmp_path):
    (tmp_path / "stats.jsonl").write_text(json.dumps(LINE))
    (tmp_path / "stats.html").mkdir()
    result = invoke("report", tmp_path / "stats.jsonl")
    assert result.exit_code == 2 and "What ran\n" in result.stdout and "stats.html: " in result.stderr


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no JSON", "Expecting value"),
        ('{"program": "a"}', "the line has no 'pid'"),
        ("[1]", "the line is no object"),
        (json.dumps(LINE | {"calls": {"cpu": {"forward": "1"}}}), "calls.cpu.forward is no whole number"),
        (json.dumps(LINE | {"fallbacks": [{"backend": "a"}]}), "fallbacks[0] has no 'count'"),
        (json.dumps(LINE | {"slow_paths": [None]}), "slow_paths[0] is no text"),
        (json.dumps(LINE | {"pid": 10**400}), "pid is out of range"),
        (json.dumps(LINE | {"report": None}), "report is no object"),
        (json.dumps(LINE | {"report": TIMED | {"plans": [{}]}}), "report.plans[0] has no 'direction'"),
        (json.dumps(LINE | {"report": TIMED | {"masks": [True]}}), "report.masks[0] is no object"),
    ],
)
def test_a_file_of_something_else_is_an_error_with_its_line(tmp_path, text, why):
    (tmp_path / "file.jsonl").write_text(f"{json.dumps(LINE)}\n{text}\n")
    with pytest.raises(ConfigError, match=r"file\.jsonl:2: got .*expected a line of `attnreg run") as raised:
        lines.read([tmp_path / "file.jsonl"])
    assert why in str(raised.value)


def test_a_run_that_is_killed_leaves_no_page_of_an_earlier_run(tmp_path):
    (tmp_path / "stats.jsonl").write_text(json.dumps(LINE))
    report = tmp_path / "report.html"
    assert invoke("report", tmp_path / "stats.jsonl", "--out", report).exit_code == 0
    program = tmp_path / "killed.py"
    program.write_text("import os\nos._exit(5)\n")
    done = forked(COMMAND, "run", "--report", str(report), str(program))
    assert (done.returncode, report.exists()) == (5, False)


def test_a_file_that_is_no_page_is_not_replaced(tmp_path):
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    (tmp_path / "stats.jsonl").write_text(json.dumps(LINE))
    result = invoke("report", tmp_path / "stats.jsonl", "--out", tmp_path / "mine.html")
    assert result.exit_code == 2
    assert "--out: " in result.stderr and "isn't a file that this command writes" in result.stderr
    assert (tmp_path / "mine.html").read_text() == "<p>mine</p>"


def plan_of(ran, length):
    return {
        "device": {"type": "cpu", "capability": None, "name": ""}, "direction": "forward", "backend": ran,
        "source": "default order for cpu", "calls": 5, "decided_us": 1.0, "first_us": 9.0, "timed": 4,
        "timed_us": 8.0, "shortest_us": 1.0, "longest_us": 3.0,
        "spec": {"dtype": "float32", "batch": 1, "max_q": length, "max_k": length, "heads_q": 2,
                 "heads_k": 2, "head_dim": 16, "head_dim_v": 16},
    }  # fmt: skip


def test_calls_of_one_step_of_lengths_share_a_row():
    plans = [plan_of("math", length) for length in (520, 700, 767, 768)]
    rows = lines.rows_of([{"report": {"plans": plans}}])
    assert sorted((row.spec.max_q, row.calls) for row in rows) == [(520, 15), (768, 5)]


@pytest.mark.parametrize(
    ("ran", "backend", "faster"),
    [("math", "math", "cpu"), ("torch's flash_attention kernel", "cpu", "math")],
)
def test_a_gain_is_a_prediction_of_a_table_for_a_backend_that_can_run_the_call(
    monkeypatch, ran, backend, faster
):
    plan = plan_of(ran, 8)
    report = {
        "seconds": 1.0,
        "python": "3",
        "platform": "x",
        "environments": [],
        "plans": [plan, plan | {"direction": "backward"}],
        "masks": [],
    }

    class Table:
        def identity(self, device):
            return "contents", "T"

        def predict(self, spec, direction):
            if direction == "backward":
                return None
            costs = {backend: 30.0, faster: 10.0, "FA2": 1.0}  # FA2 can't run it
            candidates = [Candidate(name, cost) for name, cost in costs.items()]
            return Prediction("table <T>", tuple(candidates))

    monkeypatch.setattr(gains, "_tables", Table)
    source = page(lines.RunReport([LINE | {"report": report}], lines.rows_of([{"report": report}])), "x")
    assert "All times of this table are predictions of: table &lt;T&gt;. None was" in source
    assert f">{html.escape(ran)}, 30 µs</td>" in source
    assert f">{faster}, 10 µs</td>" in source and ">100 µs</td>" in source


def test_times_are_shown_with_three_digits_and_a_unit():
    times = (0.25, 12.0, 1234.0, 5.678e6, 1.5e8, 7.2e9)
    assert [duration(time) for time in times] == [
        "0.25 µs", "12 µs", "1.23 ms", "5.68 s", "2.5 min", "2 h",
    ]  # fmt: skip

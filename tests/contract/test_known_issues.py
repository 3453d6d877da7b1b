"""Promises of the known issues: a row speaks of the calls that it describes and of no other."""

from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.specifiers import SpecifierSet
from support.processes import forked

import attnreg
from attnreg.core import registry
from attnreg.core.aten.bypassed import ROUTED
from attnreg.core.contract.lengths import Cut
from attnreg.core.registry import known_issues
from attnreg.core.registry.entry import Entry
from attnreg.testing import Conformance
from attnreg.tools.measure import Case

ROW = {"backend": "mine", "directions": "both", "reason": "it is wrong", "link": "https://example.org/1"}


def spec(device="sm_90", **changes):
    sizes = {
        "dtype": "bfloat16", "batch": 2, "max_q": 256, "max_k": 192, "heads_q": 8, "heads_k": 2,
        "head_dim": 64, "head_dim_v": 64,
    }  # fmt: skip
    return attnreg.AttentionSpec(**{"device": attnreg.Device.parse(device), **sizes, **changes})


def entry(fake, name="mine", **options):
    """Return the entry of a fake backend for GPUs."""
    return Entry(name, "a test", fake(name, **{"devices": ("cuda",), **options}).backend)


def toml(*rows):
    """Return a file of rows; values are TOML as they stand if they begin with a brace or a bracket."""
    lines = []
    for row in rows:
        lines.append("[[issue]]")
        for key, value in row.items():
            as_is = (isinstance(value, str) and value[:1] in ("{", "[")) or not isinstance(value, str)
            lines.append(f"{key} = {value if as_is else repr(value)}")
    return "\n".join(lines)


@pytest.fixture
def rows(tmp_path):
    """Read rows: `rows({...}, ...)` returns issues."""

    def read(*given):
        file = tmp_path / "issues.toml"
        file.write_text(toml(*given), encoding="utf-8")
        return known_issues.read(file.read_text("utf-8"))

    return read


@pytest.fixture
def shipped(rows, monkeypatch):
    """Let these rows be the ones that attnreg ships with."""

    def ship(*given):
        issues = rows(*given)
        monkeypatch.setattr(known_issues, "_rows", lambda: issues)

    return ship


def only(rows, **row):
    (issue,) = rows(ROW | row)
    return issue


# Which calls a row speaks of


@pytest.mark.parametrize(
    ("directions", "affected"),
    [("forward", {"forward"}), ("backward", {"backward"}), ("both", {"forward", "backward"})],
)
def test_a_row_applies_to_its_directions(rows, directions, affected):
    issue = only(rows, directions=directions)
    assert {one for one in ("forward", "backward") if issue.affects(spec(), one)} == affected


@pytest.mark.parametrize(
    ("device", "affected"),
    [("sm_80", False), ("sm_89", True), ("sm_90", True), ("sm_100", False), ("cuda", True), ("cpu", True)],
)
def test_a_row_applies_to_its_compute_capabilities_and_to_a_device_without_one(rows, device, affected):
    issue = only(rows, compute_capability='["8.9", "9.0"]')
    assert issue.affects(spec(device), "forward") is affected


@pytest.mark.parametrize(
    ("where", "affected"),
    [
        ("{}", True),
        ("{ max_q = 256 }", True),
        ("{ max_q = 255 }", False),
        ("{ max_q = { equals = 256 } }", True),
        ("{ max_q = { differs_from = 256 } }", False),
        ("{ max_q = { at_least = 256 } }", True),
        ("{ max_q = { at_least = 257 } }", False),
        ("{ max_q = { at_most = 256 } }", True),
        ("{ max_q = { at_most = 255 } }", False),
        ("{ max_q = { more_than = 256 } }", False),
        ("{ max_q = { less_than = 257 } }", True),
        ("{ max_q = { at_least = 1, less_than = 256 } }", False),
        ("{ max_k = { multiple_of = 64 } }", True),
        ("{ max_k = { multiple_of = 128 } }", False),
        ("{ max_k = { modulo = [128, 64] } }", True),
        ("{ max_q = { modulo = [128, 64] } }", False),
        ('{ max_k = { less_than = "max_q" } }', True),
        ('{ max_k = { less_than = "max_q - 64" } }', False),
        ('{ max_k = { at_most = "max_q - 64" } }', True),
        ('{ max_q = { equals = "max_k + 64" } }', True),
        ('{ heads_q = { more_than = "heads_k" } }', True),
        ('{ dtype = "bfloat16" }', True),
        ('{ dtype = { differs_from = "bfloat16" } }', False),
        ("{ varlen = true }", False),
        ("{ varlen = false, max_q = 256 }", True),
        ("{ varlen = false, max_q = 1 }", False),
        ("{ causal = true }", True),
        ("{ windowed = true }", True),
        ("{ window_left = 4, window_right = 0 }", True),
        ("{ window_left = -1 }", False),
        ("{ dropout = { more_than = 0.0 } }", False),
        ("{ page_size = { multiple_of = 16 } }", False),  # there are no pages
        ("{ num_splits = 0 }", False),
    ],
)
def test_a_row_applies_to_the_calls_that_pass_all_its_tests(rows, where, affected):
    issue = only(rows, where=where)
    assert issue.affects(spec(window=(4, 0)), "forward") is affected


@pytest.mark.parametrize(
    ("versions", "version", "affected"),
    [
        ("", "1.0", True),
        ("", "", True),
        (">=9.10.0,<9.10.2", "9.10.1", True),
        (">=9.10.0,<9.10.2", "9.10.2", False),
        (">=9.9", "9.10.0", True),  # as numbers: "9.10" is more than "9.9"
        ("==9.14.0", "9.14.0 (frontend 1.32.0)", True),
        ("<9.19", "9.19.0 (frontend 1.32.0)", False),
        (">=2.11", "2.11.0+cu130", True),
        ("==2.11.*", "2.11.0a0+git1234", True),
        (">=4.0.0b19", "4.0.0b36", True),
        ("==9.14.0", "", True),
        ("==9.14.0", "a build of my own", True),
    ],
)
def test_a_row_applies_to_its_versions_and_to_an_unknown_one(rows, versions, version, affected):
    assert only(rows, versions=versions).affects_version(version) is affected


def test_on_a_simulated_machine_no_row_applies_to_an_unknown_version(rows):
    issue = only(rows, versions="==9.14.0")
    assert not issue.affects_version("", simulated=True)
    assert issue.affects_version("9.14.0", simulated=True)


# What becomes of a row


def test_a_row_is_a_reason_that_ends_with_its_link(shipped, fake):
    shipped(ROW | {"where": "{ max_q = 8 }", "directions": "backward"})
    mine = entry(fake, "Mine")
    assert mine.reasons(spec(max_q=8), "backward") == ("it is wrong; see https://example.org/1",)
    assert mine.reasons(spec(max_q=8), "forward") == mine.reasons(spec(max_q=9), "backward") == ()
    assert entry(fake, "other").reasons(spec(max_q=8), "backward") == ()


def test_what_cannot_run_a_call_anyway_has_no_further_reason(shipped, fake):
    shipped(ROW)
    assert entry(fake, refuses=lambda spec: ("no",)).reasons(spec(), "forward") == ("no",)
    assert len(entry(fake, devices=("cpu",)).reasons(spec(), "forward")) == 1
    missing = entry(fake, unavailable=lambda: "it is not here")
    assert missing.reasons(spec("cuda"), "forward") == ("can't load here: it is not here",)


def test_the_version_is_read_only_where_a_row_needs_it(shipped, fake):
    shipped(ROW | {"versions": "<2", "where": "{ max_q = 8 }"}, ROW | {"where": "{ max_q = 9 }"})
    reads = []

    def version():
        reads.append(1)
        return "1.5 (something else 3.0)"

    mine = entry(fake, version=version)
    found = [(len(mine.reasons(spec(max_q=max_q), "forward")), len(reads)) for max_q in (7, 9, 8)]
    assert found == [(0, 0), (1, 0), (1, 1)]


def fail():
    raise ImportError("no version")


def test_a_version_that_raises_is_an_unknown_one(shipped, fake):
    shipped(ROW | {"versions": "<2"})
    mine = entry(fake, version=fail)
    assert mine.reasons(spec(), "forward") == ()
    assert len(mine.reasons(spec("cuda"), "forward")) == 1


def test_a_call_goes_to_another_backend_and_the_statistics_say_why(shipped, fake, packed, ran):
    shipped(ROW | {"where": "{ max_q = 3 }", "directions": "forward"})
    mine, other = fake("mine"), fake("other")
    with attnreg.register_backend(other.backend), attnreg.register_backend(mine.backend):
        attnreg.varlen_attn(*packed([3, 2])).sum().backward()
        (row,) = attnreg.stats().fallbacks
        assert (row.backend, row.reason) == ("mine", "it is wrong; see https://example.org/1")
        assert ran() == {"other": (1, 0), "mine": (0, 1)}
        attnreg.varlen_attn(*packed([4, 2])).sum().backward()
        assert ran() == {"mine": (1, 1)}


def test_verification_does_not_run_what_is_known_to_be_wrong(shipped, fake):
    shipped(ROW | {"where": "{ max_q = 3 }", "directions": "backward"}, ROW | {"where": "{ max_q = 4 }"})
    cases = [Case(name=f"length {n}", lens_q=(n,), lens_k=(n,), dtype="float32") for n in (3, 4, 5)]
    outcomes = list(map(Conformance(fake("mine").backend, "cpu").run, cases))
    assert [sorted(outcome.errors) for outcome in outcomes] == [
        ["lse", "out"],
        [],
        ["dk", "dq", "dv", "lse", "out"],
    ]
    assert outcomes[1].reasons == ("it is wrong; see https://example.org/1",)


# The rows that are shipped


NUMBERS = {"at_least", "at_most", "less_than", "more_than", "multiple_of", "modulo"}


def test_the_rows_that_are_shipped_are_well_formed_of_existing_backends_and_worded_as_all_reasons():
    issues = known_issues.read(Path(known_issues.__file__).with_name("known_issues.toml").read_text("utf-8"))
    known = {one.name for one in registry.entries().values()} | {one.name for one in ROUTED.values()}
    assert issues and {issue.backend for issue in issues} <= known
    for issue in issues:
        assert issue.reason == issue.reason.strip(" .\n") and not issue.reason[0].isupper(), issue
        assert issue.link.startswith("https://") and SpecifierSet(issue.versions) is not None, issue
        lowest, highest = issue.compute_capability or ((0, 0), (0, 0))
        assert len(lowest) == len(highest) == 2 and lowest <= highest, issue
        for field, test, operand in issue.where:
            kind = known_issues.FIELDS[field]
            assert test in known_issues.TESTS and (kind not in ("bool", "str") or test not in NUMBERS), issue
            if isinstance(operand, known_issues.Sum):
                assert known_issues.FIELDS[operand.field] == "int", issue
            else:
                is_number = kind not in ("bool", "str") and type(operand) in (int, list)
                assert type(operand).__name__ == kind or is_number, issue


@pytest.mark.parametrize(
    ("backend", "version", "call", "direction", "known"),
    [
        ("FA2", "2.11.0", {"window": (4, -1), "max_k": 254}, "forward", True),
        ("FA2", "2.11.0", {"window": (4, -1), "max_k": 255}, "forward", False),
        ("FA2", "2.11.0", {"window": (4, 4), "max_k": 100}, "forward", False),
        ("FA2", "2.11.0", {"window": (-1, 100), "max_k": 100}, "backward", True),
        ("FA2", "2.11.0", {"window": (-1, 99), "max_k": 100}, "backward", False),
        ("FA2", "2.11.0", {"window": (4, 120), "max_k": 100}, "forward", True),
        ("FA2", "2.11.0", {"window": (4, 255), "max_k": 300}, "forward", False),
        ("cuDNN", "9.10.1 (frontend 1.32.0)", {}, "forward", True),
        ("cuDNN", "9.10.2 (frontend 1.32.0)", {}, "forward", False),
        ("cuDNN", "9.14.0", {"window": (4, 4), "max_k": 1025}, "backward", True),
        ("cuDNN", "9.14.0", {"window": (4, 0), "max_k": 1025}, "backward", False),
        ("cuDNN", "9.14.0", {"window": (4, 4), "max_k": 1024}, "backward", False),
        ("cuDNN", "9.19.0", {"max_q": 1}, "backward", False),
        ("cuDNN", "9.26.0", {"max_q": 1}, "backward", True),
        ("cuDNN", "9.26.0", {"max_q": 1}, "forward", False),
        ("cuDNN", "9.19.0", {"bias": True, "max_k": 192}, "backward", True),
        ("cuDNN", "9.19.0", {"bias": True, "max_k": 256}, "backward", False),
        ("cuDNN", "9.19.0", {"max_k": 192}, "backward", False),
        ("cuDNN", "9.19.0", {"bias": True, "max_k": 192, "device": "sm_100"}, "backward", False),
    ],
)
def test_what_is_shipped_describes_the_calls_that_were_reported(backend, version, call, direction, known):
    assert bool(known_issues.against(backend, lambda: version, spec(**call), direction)) is known


def test_importing_and_listing_read_no_row():
    script = (
        "import attnreg; from attnreg.core.registry import discovery, known_issues; attnreg.list_backends(); "
        "assert not known_issues._rows.cache_info().currsize"
    )
    run = forked(script)
    assert (run.returncode, run.stderr) == (0, "")


IN_A_ZIP = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, attnreg
assert attnreg.__file__.startswith(sys.argv[1]), attnreg.__file__
from attnreg.core.registry import known_issues
assert known_issues._rows()
tokens, offsets = torch.randn(8, 2, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
found = attnreg.varlen_attn(tokens, tokens, tokens, offsets, offsets, 5, 5, backend="math")
assert attnreg.stats().calls == {"math": {"forward": 1, "backward": 0}}
for begin, end in ((0, 3), (3, 8)):
    rows = tokens[begin:end].transpose(0, 1)
    expected = torch.softmax(rows @ rows.mT / 4, -1) @ rows
    torch.testing.assert_close(found[begin:end], expected.transpose(0, 1))
"""


@pytest.mark.slow
def test_rows_are_read_from_a_package_in_a_zip_file(tmp_path):
    package = Path(attnreg.__file__).parent
    with ZipFile(tmp_path / "attnreg.zip", "w") as archive:
        for file in (*package.rglob("*.py"), *package.rglob("*.toml")):
            archive.write(file, file.relative_to(package.parent))
    run = forked(IN_A_ZIP, tmp_path / "attnreg.zip", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (run.returncode, run.stderr) == (0, "")


WHERE = [  # what a row tests, and where its outcome changes with lengths for a window of (16, 16)
    ("{ max_q = { at_least = 5 } }", {Cut.of("max_q", at=5)}),
    ("{ max_q = { at_most = 5 } }", {Cut.of("max_q", at=5), Cut.of("max_q", at=6)}),
    ('{ max_k = { less_than = "max_q - 1" } }', {Cut.beyond("max_k", "max_q", -1)}),
    ('{ window_right = { at_least = "max_k" } }', {Cut.of("max_k", at=16), Cut.of("max_k", at=17)}),
    ('{ window_right = { less_than = "max_q - 1" } }', {Cut.of("max_q", at=17), Cut.of("max_q", at=18)}),
    # The other test fails for a window of 16, whatever the lengths.
    ("{ window_left = 3, max_q = { at_least = 5 } }", set()),
]


@pytest.mark.parametrize(("where", "expected"), WHERE)
def test_a_row_divides_lengths_where_its_outcome_changes(tmp_path, monkeypatch, where, expected):
    file = tmp_path / "known_issues.toml"
    file.write_text(toml({**ROW, "where": where}))
    rows = known_issues.read(file.read_text("utf-8"))
    monkeypatch.setattr(known_issues, "_rows", lambda: rows)
    places, beyond = known_issues.cuts("mine", spec(window=(16, 16)))
    assert (set(places), beyond) == (expected, frozenset())


def test_lengths_that_a_row_tests_as_no_cut_can_say_are_named(tmp_path, monkeypatch):
    file = tmp_path / "known_issues.toml"
    file.write_text(toml({**ROW, "where": "{ max_q = { multiple_of = 8 } }"}))
    rows = known_issues.read(file.read_text("utf-8"))
    monkeypatch.setattr(known_issues, "_rows", lambda: rows)
    assert known_issues.cuts("mine", spec()) == ((), frozenset({"max_q"}))

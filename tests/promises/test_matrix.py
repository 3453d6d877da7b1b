"""Promises about `make matrix`: its rows begin where support begins, and its page says what came of them."""

from __future__ import annotations

import json
import tomllib

import matrix
import pytest
from packaging.requirements import Requirement

DEPENDENCIES = tomllib.loads((matrix.ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
TORCH = next(one for one in map(Requirement, DEPENDENCIES) if one.name == "torch")

REPORT = """<testsuites><testsuite tests="9" failures="2" errors="1" skipped="4"/></testsuites>"""
PASSED = {
    "torch": "2.15.0", "build": "CPU", "python": "3.11.7", "pydantic": "2.14.3", "packaging": "26.3",
    "typer": "0.29.1", "rich": "15.0.0", "passed": 2, "failed": 3, "skipped": 4, "date": "2026-11-23",
}  # fmt: skip
REFUSED = {"torch": "2.10.0", "build": "", "python": "3.11", "outcome": "refused", "date": "2026-11-23"}


def test_rows_begin_with_a_torch_that_pip_refuses_and_the_oldest_that_it_takes():
    refused, *others = (row.torch.partition("+")[0] for row in matrix.ROWS)
    assert not TORCH.specifier.contains(refused)
    assert all(map(TORCH.specifier.contains, others))
    assert others[0] == f"{matrix.lowest(TORCH)}.0"
    assert f"torch=={matrix.PINNED}" in (matrix.ROOT / "constraints.txt").read_text().splitlines()


def test_the_oldest_dependencies_are_the_lower_bounds_and_nothing_pins_others():
    row = matrix.Row(matrix.OLDEST, others="oldest")
    needed = {one.name: matrix.lowest(one) for one in matrix.dependencies()}
    assert {f"{name}=={version}.*" for name, version in needed.items()} < set(matrix.requirements(row))
    assert matrix.constraints(row) == []


def test_a_pinned_row_has_every_pin_but_torchs_and_what_an_old_torch_refuses():
    pins = [line for line in (matrix.ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    left_out = {Requirement(line).name for line in set(pins) - set(matrix.constraints(matrix.ROWS[0]))}
    assert left_out == {"torch", "setuptools"}


def test_rows_are_picked_by_the_beginning_of_their_names_and_an_unknown_one_is_an_error():
    names = [row.name for row in matrix.wanted("2.12, 2.15.0-python3.13")]
    assert names == ["2.12.1-python3.11-pinned", "2.12.1+cpu-python3.11-pinned", "2.15.0-python3.13-pinned"]
    assert matrix.wanted("") == list(matrix.ROWS)
    with pytest.raises(
        SystemExit, match=r"no row begins with '3\.0', expected .* 2\.10\.0-python3\.11-pinned"
    ):
        matrix.wanted("3.0")


def test_errors_count_as_failed_and_a_refusal_stands_where_the_counts_do(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    assert matrix.counts(tmp_path / "report.xml") == {"passed": 2, "failed": 3, "skipped": 4}
    assert matrix.table([REFUSED, PASSED]).splitlines() == [
        "| torch | build | Python | pydantic, packaging, typer, rich | passed | failed | skipped | on |",
        "|---|---|---|---|---|---|---|---|",
        "| 2.10.0 |  | 3.11 |  | refused |  |  | 2026-11-23 |",
        "| 2.15.0 | CPU | 3.11.7 | 2.14.3, 26.3, 0.29.1, 15.0.0 | 2 | 3 | 4 | 2026-11-23 |",
    ]


def test_the_page_names_the_rows_that_have_never_run():
    known = {one["row"]: one for one in json.loads(matrix.RESULTS.read_text())}
    said = matrix.left_out(known)
    names = [row.name for row in matrix.ROWS]
    assert matrix.left_out(names) == ""
    assert matrix.left_out(names[2:]) == f" Never run: `{names[0]}`, `{names[1]}`."
    assert f"; no GPU.{said}\n" in matrix.PAGE.read_text()

"""Promises of `docs/faults.md`: every test that it names is there, and every row has one."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def rows(page):
    """Return the first and the last cell of each row of the page's tables."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [(what, tests) for what, *_, tests in cells if tests != "test"]


def missing(page):
    """Return the tests that a page names and `tests/` lacks."""
    found = {}
    for file in {file for file, _ in NAMED.findall(page)}:
        path = ROOT / "tests" / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([])
        found[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return [f"{file}::{name}" for file, name in NAMED.findall(page) if name not in found[file]]


def test_every_test_that_the_page_names_is_there():
    here = "promises/test_faults_page.py"
    gone = f"`{here}::test_renamed` `no/such_file.py::test_x`"
    assert missing(f"| a | b | `{here}::test_every_test_that_the_page_names_is_there` {gone} |") == [
        f"{here}::test_renamed",
        "no/such_file.py::test_x",
    ]
    assert missing(PAGE) == []


def test_every_row_of_the_page_names_tests_and_nothing_else():
    assert len(rows(PAGE)) > 100
    assert [row for row in rows(PAGE) if NAMED.sub("", row[1]).strip() or not row[1]] == []

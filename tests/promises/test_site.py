"""Promises about the site of `make docs`: its pages, what is made from attnreg, its links. None builds it."""

import ast
import re
from pathlib import Path

import generated_pages
import pytest
import shared_entries
import site_hooks
from packaging.requirements import Requirement

import attnreg
from attnreg.core import registry
from attnreg.core.contract.options import OPTIONS
from attnreg.core.policy import lockfile
from attnreg.core.settings.config import Settings
from attnreg.core.settings.environment import VARIABLES
from attnreg.core.times import table
from attnreg.tools.cli import COMMANDS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made():
    return generated_pages.pages()


def test_every_page_is_in_the_navigation_once_and_nothing_else_is(made):
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = {file.relative_to(ROOT / "docs").as_posix() for file in (ROOT / "docs").rglob("*.md")}
    pages |= made.keys() | set(site_hooks.FROM_ROOT.values())
    assert sorted(re.findall(r"- ([\w/-]+\.md)$", navigation, re.MULTILINE)) == sorted(pages)
    assert [file for file in site_hooks.FROM_ROOT if not (ROOT / file).is_file()] == []


def test_the_matrix_has_every_backend_in_its_directions_and_every_option(made):
    _, *sections = made["reference/matrix.md"].split("\n## ")
    tables = {title: text for title, _, text in (section.partition("\n") for section in sections)}
    for device, title in (("cpu", "On a CPU"), ("cuda", "On a GPU (CUDA)")):
        for direction in ("forward", "backward"):
            heads, _, *rows = tables[f"{title}: {direction}"].strip().splitlines()
            able = [
                entry.name
                for entry in registry.entries().values()
                if not entry.installed and device in getattr(entry.backend, direction).devices
            ]
            assert [head.strip() for head in heads.split("|")[2:-1]] == able
            named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
            options = {row.argument or row.name for row in OPTIONS if direction in row.directions}
            assert options - named == set()


def test_cells_of_the_matrix_are_what_backends_declare(made):
    forward = made["reference/matrix.md"].partition("(CUDA): forward\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in forward.strip().splitlines()]
    cells = {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows}
    assert (cells["`dropout_p`"]["FA2"], cells["`dropout_p`"]["FA4"]) == ("✓", "–")
    assert (cells["`sinks`"]["FA4"], cells["`sinks`"]["FA2"]) == ("✓", "results rescaled")
    assert cells["`sinks`"]["efficient"] == "–"  # it takes no packed tensors
    assert cells["`block_table`: page sizes"]["FA4"] == "from 1"
    assert cells["compute capability"]["FA3"] == "9.0"


def test_settings_commands_and_public_names_are_all_in_the_reference(made):
    keys = set(re.findall(r"^\| `(?:devices\.\*\.)?(\w+)`", made["reference/settings.md"], re.MULTILINE))
    assert keys == {*Settings.model_fields.keys() - {"devices"}, "order", *VARIABLES}
    commands = re.findall(r"^## (.*)$", made["reference/commands.md"], re.MULTILINE)
    assert [name for name in commands if " " not in name] == list(COMMANDS)
    names = re.findall(r"^::: \S+\.(\w+)$", "\n".join(made.values()), re.MULTILINE)
    assert set(attnreg.__all__) - set(names) == set()
    assert {"flash_attn_func", "check_backend"} - set(names) == set()


def test_links_lead_to_pages_of_the_site_or_to_the_repository(monkeypatch):
    class Files:
        def get_file_from_path(self, path):
            return path if path in ("choosing.md", "results/fresh.md", "index.md") else None

    def fitted(text, origin, page):
        return site_hooks.fitting(text, origin, page, Files())

    assert fitted("[a](docs/choosing.md#b)", "README.md", "index.md") == "[a](choosing.md#b)"
    assert fitted("[a](../README.md) [b](#c)", "docs/choosing.md", "choosing.md") == "[a](index.md) [b](#c)"
    assert fitted("[a](../choosing.md)", "docs/results/fresh.md", "results/fresh.md") == "[a](../choosing.md)"
    monkeypatch.setattr(site_hooks, "_repository", lambda: "https://x.org/r")
    code = "[`a`](../Makefile) [b](../tests) [c](https://y.org/z)"
    in_repository = "[`a`](https://x.org/r/blob/HEAD/Makefile) [b](https://x.org/r/tree/HEAD/tests) "
    assert fitted(code, "docs/choosing.md", "choosing.md") == f"{in_repository}[c](https://y.org/z)"
    monkeypatch.setattr(site_hooks, "_repository", lambda: "")
    assert fitted("see [`a`](../Makefile).", "docs/choosing.md", "choosing.md") == "see `a`."
    assert fitted("[a](none.md)", "docs/choosing.md", "choosing.md") == "[a](none.md)"  # mkdocs refuses it


def test_what_builds_the_site_is_pinned_and_not_twice():
    def pinned(file):
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        return [Requirement(line) for line in lines if line and not line.startswith("#")]

    of_site, others = pinned("docs/requirements.txt"), {one.name.lower() for one in pinned("constraints.txt")}
    assert {"mkdocs-material", "mkdocstrings-python"} <= {one.name for one in of_site}
    assert [one.name for one in of_site if not re.fullmatch(r"==[\w.]+", str(one.specifier))] == []
    assert [one.name for one in of_site if one.name.lower() in others] == []


def texts_of(source):
    """Return the texts of a module; of an f-string those between its values."""
    return [
        x.value
        for x in ast.walk(ast.parse(source))
        if isinstance(x, ast.Constant) and isinstance(x.value, str)
    ]


def test_every_message_of_the_page_about_messages_is_in_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(messages) > 20
    texts = [text for file in (ROOT / "attnreg").rglob("*.py") for text in texts_of(file.read_text("utf-8"))]
    # A logger's format has its values as %s, %r and %d.
    said = "\n".join(re.sub(r"%[srd]", "\n", text) for text in texts)
    missing = {part for message in messages for part in message.split("…") if part not in said}
    assert missing == set()


def test_the_page_about_stable_interfaces_has_the_formats_that_are_written_and_read():
    page = (ROOT / "docs" / "stable-interfaces.md").read_text(encoding="utf-8")
    for module in (lockfile, table):
        row = f'`"format": "{module.FORMAT}"`, `"version": {module.VERSION}` | version {module.VERSION} |'
        assert row in page
    names = {
        entry.name for entry in registry.entries().values() if entry.origin.startswith("attnreg.backends")
    }
    row = next(line for line in page.splitlines() if line.startswith("| names of backends"))
    assert set(re.findall(r"`(\w+)`", row)) == names


def test_an_entry_of_a_docstring_for_several_names_becomes_one_for_each():
    docstring = "Args:\n    a, b: one,\n        two.\n    c: three, and four: five\n    d, e: six.\n"
    first = "    a: one,\n        two.\n    b: one,\n        two.\n"
    second = "    c: three, and four: five\n    d: six.\n    e: six."
    assert shared_entries.split_names(docstring).rstrip() == f"Args:\n{first}{second}"

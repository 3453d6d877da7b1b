"""Promise: every relative link of the README and of the pages under docs/ leads to a file and a heading."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE_BLOCK.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(text, folder):
    """Return the relative links of a page in `folder` whose file, or whose heading in it, doesn't exist."""
    broken = []
    for link in LINK.findall(CODE_BLOCK.sub("", text)):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = folder / path
        if not target.exists():
            broken.append(link)
            continue
        if anchor and anchor not in anchors(target.read_text(encoding="utf-8") if path else text):
            broken.append(link)
    return broken


def test_a_link_to_a_missing_file_or_heading_is_broken(tmp_path):
    (tmp_path / "page.md").write_text("# Host time: *one* batch\n")
    good = "# Here\n[a](page.md) [b](page.md#host-time-one-batch) [c](#here) [d](https://x.org/none)"
    assert broken_links(good, tmp_path) == []
    bad = "[a](pages.md) [b](page.md#host) [c](#here)\n```\n[d](none.md)\n```\n"
    assert broken_links(bad, tmp_path) == ["pages.md", "page.md#host", "#here"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page):
    assert broken_links(page.read_text(encoding="utf-8"), page.parent) == []

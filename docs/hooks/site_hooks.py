"""What mkdocs calls while it builds the site: pages from elsewhere are added, and links are made to fit.

The pages are written for GitHub. There a link may lead to any file of the repository. In the site it leads to
the page made of that file, else to the repository, else it is plain text. A link to nothing stays, for mkdocs
to refuse.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import generated_pages

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[2]

# Pages of the site that are files of the repository outside of docs/.
FROM_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/plugin/README.md": "plugin.md",
}

_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s#]+)(#[^)\s]*)?\)")
_CODE_BLOCK = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
# In GitHub's Markdown two spaces are enough for a list within a list.
_NESTED = re.compile(r"^( {2})(?=[-*] )", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from attnreg, and those outside of docs/."""
    from mkdocs.structure.files import File  # tests import this module without mkdocs

    made = generated_pages.pages()
    made |= {page: (ROOT / file).read_text(encoding="utf-8") for file, page in FROM_ROOT.items()}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return the text of a page with links that fit the site."""
    origin = {to: file for file, to in FROM_ROOT.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = _CODE_BLOCK.split(markdown)
    parts[::2] = [fitting(_NESTED.sub("    ", text), origin, page.file.src_uri, files) for text in parts[::2]]
    return "".join(parts)


def fitting(text: str, origin: str, page: str, files: Files) -> str:
    """Return a page's text with its links to files of the repository turned into links of the site.

    Args:
        text: the Markdown.
        origin: the file that it comes from, in the repository.
        page: its path in the site.
        files: the pages of the site.
    """

    def link(found: re.Match[str]) -> str:
        label, path, anchor = found[1], found[2], found[3] or ""
        if "://" in path or path.startswith("mailto:"):
            return found[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        target = FROM_ROOT.get(file, file.removeprefix("docs/"))
        if files.get_file_from_path(target) is not None:
            return f"{label}({posixpath.relpath(target, posixpath.dirname(page) or '.')}{anchor})"
        if not (ROOT / file).exists():
            return found[0]  # for mkdocs to refuse
        if repository := _repository():
            kind = "tree" if (ROOT / file).is_dir() else "blob"
            return f"{label}({repository}/{kind}/HEAD/{file}{anchor})"
        return label[1:-1]

    return _LINK.sub(link, text)


def _repository() -> str:
    """Return the address of the repository by pyproject.toml; empty if it has none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    urls = {name.casefold(): url for name, url in project.get("urls", {}).items()}
    return next((urls[name].rstrip("/") for name in ("repository", "source", "homepage") if name in urls), "")

"""Docstrings for the site: an entry for several names, `forward, backward: text`, becomes one for each."""

from __future__ import annotations

import re
from typing import Any

try:
    from griffe import Extension
except ImportError:  # tests call `split_names` without it
    Extension = object

# The names, and the text up to the next entry or the end of the section.
_ENTRY = re.compile(r"^( +)(\w+(?:, \w+)+): (.*?)(?=\n\1\S|\n\n|\n? *\Z)", re.MULTILINE | re.DOTALL)


def split_names(docstring: str) -> str:
    """Return a docstring in which each entry of a section has a single name."""

    def entries(found: re.Match[str]) -> str:
        indent, names, text = found.groups()
        return "\n".join(f"{indent}{name}: {text}" for name in names.split(", "))

    return _ENTRY.sub(entries, docstring)


class SharedEntries(Extension):
    """Has griffe read docstrings through `split_names`; it would take the second name for a type."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute once it is collected."""
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = split_names(obj.docstring.value)

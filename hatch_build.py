"""How hatchling packages attnreg: the tag of a wheel with compiled kernels, and the README's links.

Hatchling runs both hooks with each build. Neither compiles: `make wheels` puts the kernels there before.
"""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

KERNELS = "attnreg/backends/cpu/prebuilt"
# A link of Markdown to a file of the repository: no scheme, no heading of the same page.
RELATIVE_LINK = re.compile(r"\]\((?!\w+:|#)")


class WheelTag(BuildHookInterface):  # type: ignore[type-arg]
    """Tags a wheel with kernels: they are for a platform, but for every Python 3."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Set the tag, which `auditwheel repair` replaces: it looks for the oldest system that will do."""
        if self.target_name == "wheel" and any(Path(self.root, KERNELS).glob("*.so")):
            platform = re.sub(r"\W", "_", sysconfig.get_platform())
            build_data |= {"pure_python": False, "tag": f"py3-none-{platform}"}


class ProjectPage(MetadataHookInterface):
    """Makes the README the project's page on a package index, where links need the repository's address."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the page: the README, with each relative link below `project.urls.Source`."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        page = RELATIVE_LINK.sub(f"]({metadata['urls']['Source']}/blob/main/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": page}

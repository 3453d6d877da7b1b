"""Promise: what `make` installs is pinned, all of it, at versions that the package accepts."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from attnreg.core.torchlib import captured

ROOT = Path(__file__).parents[2]


def pinned_versions():
    """Return the pinned version of each package."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(one.name): next(iter(one.specifier)) for one in pinned}


def requirements():
    """Return what the package, its plots, its build and its development ask for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [
        Requirement(line)
        for line in (
            *project["build-system"]["requires"],
            *project["project"]["dependencies"],
            *project["project"]["optional-dependencies"]["plots"],
            *project["dependency-groups"]["dev"],
        )
    ]


def test_the_extras_that_messages_advise_exist_and_none_of_them_has_to_be_built():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    code = [file.read_text(encoding="utf-8") for file in (ROOT / "attnreg").rglob("*.py")]
    advised = {name for text in code for name in re.findall(r"pip install 'attnreg\[(\w+)\]'", text)}
    assert advised == {"fa4", "cudnn", "hub", "plots"}
    assert extras.keys() == advised | {"all"}
    assert extras["all"] == [f"attnreg[{','.join(name for name in extras if name != 'all')}]"]
    # Source only: pip can't even resolve it where torch and nvcc aren't at hand.
    needed = [Requirement(line).name for lines in extras.values() for line in lines]
    assert "flash-attn" not in map(canonicalize_name, needed)


def test_the_versions_of_torch_that_attnreg_was_run_with_are_the_same_everywhere():
    oldest, newest = (f"{major}.{minor}" for major, minor in (captured.OLDEST, captured.NEWEST))
    for name, line in (
        ("README.md", f"attnreg was run with {oldest} to {newest}."),
        ("pyproject.toml", f'"torch>={oldest}",  # attnreg was run with {oldest} to {newest};'),
        (
            "docs/troubleshooting.md",
            f"is newer than {newest}, the newest version that attnreg was tested with",
        ),
    ):
        assert line in (ROOT / name).read_text(), name


def test_every_pin_is_one_exact_version():
    assert [name for name, version in pinned_versions().items() if version.operator != "=="] == []


def test_every_requirement_is_pinned_to_a_version_that_it_allows():
    pinned = pinned_versions()
    for one in requirements():
        name = canonicalize_name(one.name)
        assert name in pinned, f"{one} has no line in constraints.txt"
        assert one.specifier.contains(pinned[name].version, prereleases=True), (
            f"{one} excludes {pinned[name]}"
        )


def test_what_the_pinned_packages_need_is_pinned_too():
    pinned = pinned_versions()
    installed = {canonicalize_name(one.name): one.requires or () for one in distributions()}
    # A torch that is built for GPUs pins the libraries that come with it.
    for name in pinned.keys() & installed.keys() - {"torch"}:
        for one in map(Requirement, installed[name]):
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                assert canonicalize_name(one.name) in pinned, f"{name} needs {one}, which isn't pinned"

"""Runs the tests that need no GPU with the versions of torch, Python and dependencies that `ROWS` lists.

    python tests/matrix.py [--versions 2.11,2.15.0-python3.13] [--venvs FOLDER] [--processes N]

Each row of `ROWS` gets a virtual environment of its own, which is kept for the next run; with CUDA's
libraries it takes 6 GB. What came of a row is written to docs/results/versions.json, and the table to
docs/versions.md. For Python 3.13, say, a row takes what the variable PYTHON313 names, else `python3.13` of
PATH.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement

from attnreg.tools.bench.report import machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"


@dataclass(frozen=True)
class Row:
    """What the tests run with.

    Attributes:
        torch: its exact version; with `+cpu` the build for CPUs, else the one that PyPI has.
        python: the version of Python, without its last number.
        others: which versions of the other dependencies: those of constraints.txt, the oldest that
            pyproject.toml allows, or the newest that there are.
    """

    torch: str
    python: str = "3.11"
    others: str = "pinned"

    @property
    def name(self) -> str:
        return f"{self.torch}-python{self.python}-{self.others}"


OLDEST, PINNED, NEWEST = "2.11.0", "2.13.0", "2.15.0"
ROWS = (
    Row("2.10.0"),  # older than attnreg allows: pip has to refuse
    *(Row(torch + build) for torch in (OLDEST, "2.12.1", PINNED, "2.14.1", NEWEST) for build in ("", "+cpu")),
    Row(OLDEST, others="oldest"),
    Row(NEWEST, others="newest"),
    Row(NEWEST, python="3.13"),
)
# torch 2.11 and 2.12 refuse the setuptools that constraints.txt has.
NOT_PINNED = {"torch", "setuptools"}
# In the words of pip: that a version isn't there, and what a package asks for that another excludes.
NOT_OFFERED = "No matching distribution found for torch"
CONFLICT = re.compile(r"^ +(attnreg \S+ depends on .+)$", re.MULTILINE)

VERSIONS = """
import json, platform, torch
from importlib.metadata import version
build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
found = {"torch": torch.__version__.partition("+")[0], "build": build, "python": platform.python_version()}
print(json.dumps(found | {name: version(name) for name in %r}))
"""


def dependencies() -> list[Requirement]:
    """Return what attnreg needs besides torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [one for one in map(Requirement, project["dependencies"]) if one.name != "torch"]


def requirements(row: Row) -> list[str]:
    """Return what pip is asked for."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    oldest = [f"{one.name}=={lowest(one)}.*" for one in dependencies()] if row.others == "oldest" else []
    return [f"torch==={row.torch}", *oldest, *tools, "--editable", str(ROOT)]


def lowest(requirement: Requirement) -> str:
    """Return the version that it begins with."""
    return next(one.version for one in requirement.specifier if one.operator == ">=")


def constraints(row: Row) -> list[str]:
    """Return the lines of constraints.txt that hold in a row: none where pytest itself has to be older."""
    if row.others != "pinned":
        return []
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    return [line for line in pins if Requirement(line).name not in NOT_PINNED]


def interpreter(version: str) -> str | None:
    """Return a Python of that version."""
    named = os.environ.get("PYTHON" + version.replace(".", ""))
    for candidate in (named,) if named else (sys.executable, shutil.which(f"python{version}")):
        # Asked, as what is called so on PATH may be a script that finds no such Python.
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        if candidate and output([candidate, "-c", code]).strip() == version:
            return candidate
    return None


def output(command: list[str]) -> str:
    """Return what a command prints, nothing if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def install(row: Row, folder: Path) -> str:
    """Set up a row's environment unless one with the same requirements is there; returns why it can't be."""
    ready, wanted = folder / "ready", "\n".join([*requirements(row), "", *constraints(row)])
    if ready.is_file() and ready.read_text() == wanted:
        return ""
    python = interpreter(row.python)
    if python is None:
        return f"not run: there was no Python {row.python}"
    subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    (folder / "constraints.txt").write_text("\n".join(constraints(row)) + "\n")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    command = [*pip, *requirements(row), "--constraint", str(folder / "constraints.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (folder / "install.log").write_text(done.stdout + done.stderr)
    if done.returncode == 0:
        ready.write_text(wanted)
        return ""
    conflict = CONFLICT.search(done.stdout + done.stderr)
    if conflict:
        return f"refused to install: {conflict[1]}"
    if NOT_OFFERED in done.stderr:
        return "not run: the package registry had no such build"
    raise SystemExit(f"{row.name}: pip failed, see {folder / 'install.log'}")


def test(folder: Path, processes: str, routers: str) -> dict[str, int]:
    """Run the tests in an environment, and return how many passed, failed and were skipped."""
    report = (folder / "report.xml").absolute()
    report.unlink(missing_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ATTNREG_")}
    # An environment that others have set up may have attnreg from elsewhere.
    clean |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    clean["TORCHINDUCTOR_CACHE_DIR"] = str(folder.absolute() / "inductor")
    options = [f"--numprocesses={processes}", "--dist=worksteal", f"--routers={routers}"]
    command = [str(folder.absolute() / "bin" / "python"), "-m", "pytest", *options]
    with (folder / "test.log").open("w") as log:
        subprocess.run(
            [*command, "-p", "no:cacheprovider", f"--junit-xml={report}"],
            cwd=ROOT, env=clean, stdout=log, stderr=log, check=False,
        )  # fmt: skip
    if not report.is_file():
        raise SystemExit(f"the tests didn't end: see {folder / 'test.log'}")
    return counts(report)


def counts(report: Path) -> dict[str, int]:
    """Return what a report of pytest says."""
    suites = ElementTree.parse(report).getroot().findall("testsuite")
    kinds = ("tests", "failures", "errors", "skipped")
    total = {kind: sum(int(one.get(kind, 0)) for one in suites) for kind in kinds}
    failed = total["failures"] + total["errors"]
    return {
        "passed": total["tests"] - failed - total["skipped"], "failed": failed, "skipped": total["skipped"],
    }  # fmt: skip


def run(row: Row, options: argparse.Namespace) -> dict[str, str | int]:
    """Return what came of a row."""
    folder = options.venvs / row.name
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    result = {"row": row.name, "date": today, "processor": machine()["processor"], "others": row.others}
    reason = install(row, folder)
    if reason:
        torch, _, build = row.torch.partition("+")
        return result | {"torch": torch, "build": build.upper(), "python": row.python, "outcome": reason}
    code = VERSIONS % [one.name for one in dependencies()]
    found = json.loads(output([str(folder / "bin" / "python"), "-c", code]))
    return result | found | test(folder, options.processes, options.routers)


def as_expected(row: Row, result: dict[str, str | int]) -> bool:
    """Return whether all tests of a row passed, or whether it was refused where it has to be."""
    if row.torch == ROWS[0].torch:
        return str(result.get("outcome")).startswith("refused")
    return result.get("failed", 0) == 0 and not str(result.get("outcome")).startswith("refused")


def table(results: list[dict[str, str | int]]) -> str:
    """Return the table of the page."""
    names = [one.name for one in dependencies()]
    lines = [
        f"| torch | build | Python | {', '.join(names)} | passed | failed | skipped | on |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        said = one.get("outcome")
        versions = ", ".join(str(one[name]) for name in names) if not said else ""
        values = [one["torch"], one["build"], one["python"], versions]
        values += [said, "", ""] if said else [one["passed"], one["failed"], one["skipped"]]
        lines.append(f"| {' | '.join(map(str, [*values, one['date']]))} |")
    return "\n".join(lines)


def write(results: dict[str, dict[str, str | int]]) -> None:
    """Keep the results, and put the table into the page."""
    kept = [results[row.name] for row in ROWS if row.name in results]
    RESULTS.write_text("[\n" + ",\n".join(" " + json.dumps(one) for one in kept) + "\n]\n")
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition("<!-- rows -->\n")
    _, end, after = rest.partition("<!-- end of rows -->")
    where = f"On {' and '.join(sorted({one['processor'] for one in kept}))}; no GPU.{left_out(results)}"
    PAGE.write_text(f"{before}{begin}{table(kept)}\n\n{where}\n{end}{after}", encoding="utf-8")


def left_out(results: Container[str]) -> str:
    """Return which rows have no results yet, as a sentence behind others; empty if all have some."""
    names = [f"`{row.name}`" for row in ROWS if row.name not in results]
    return f" Never run: {', '.join(names)}." if names else ""


def wanted(names: str) -> list[Row]:
    """Return the rows whose names begin as one of these do; all of them for none."""
    beginnings = [name.strip() for name in names.split(",") if name.strip()]
    for beginning in beginnings:
        if not any(row.name.startswith(beginning) for row in ROWS):
            known = ", ".join(row.name for row in ROWS)
            raise SystemExit(f"no row begins with {beginning!r}, expected the beginning of one of {known}")
    return [row for row in ROWS if not beginnings or row.name.startswith(tuple(beginnings))]


def main() -> None:
    """Run the rows that are asked for, and write the table after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", default="", help="comma list of beginnings of rows' names")
    parser.add_argument("--venvs", type=Path, default=ROOT / ".matrix", help="where environments are kept")
    parser.add_argument("--processes", default="auto", help="processes that run the tests of a row")
    parser.add_argument("--routers", choices=("compiled", "python"), default="compiled")
    options = parser.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    results = {one["row"]: one for one in kept}
    unexpected = []
    for row in wanted(options.versions):
        print(f"{row.name}: ", end="", flush=True)  # noqa: T201  # a command
        results[row.name] = result = run(row, options)
        print(result.get("outcome") or "{passed} passed, {failed} failed".format(**result))  # noqa: T201
        write(results)
        if not as_expected(row, result):
            unexpected.append(row.name)
    if unexpected:
        raise SystemExit(f"not as expected: {', '.join(unexpected)}; {options.venvs}/ROW/test.log says more")


if __name__ == "__main__":
    main()

"""`attnreg check`: the faults of settings and variables, and of the files that they name."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from attnreg.errors import AttnregError, ConfigError, file_errors
from attnreg.tools.cli.options import AsJson
from attnreg.tools.cli.output import USAGE, import_torch, print_json, stdout_to_stderr, table
from attnreg.tools.lines import counted
from attnreg.tools.report import BEGIN_OF_LINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from attnreg.core.settings.config import Settings

VARIABLES = "variables"
FILES = "settings (.toml), a lockfile or a table (.json), or a recording or lines of a report (.jsonl)"
ONLY_FORMAT = "only the format was read; `attnreg lock --check {}` says whether its rows hold on this machine"

Files = Annotated[
    list[Path] | None, typer.Argument(metavar="FILE", help=f"Files to check: {FILES}.", show_default=False)
]


class Finding(NamedTuple):
    """A line about a file or the variables: a fault, or a note on a setting that has no effect."""

    line: str
    is_fault: bool = True


def check(files: Files = None, as_json: AsJson = False) -> None:
    """Check files and variables, and show their faults.

    All faults of settings and variables are shown, and each wrong row of a lockfile, table or recording.
    The exit code is 2 if there is a fault. The files that variables and settings name are checked as well.
    Notes are about settings that are valid but have no effect. They don't change the exit code.

    Example: attnreg check rollout.toml lock.json
    """
    import_torch()
    with stdout_to_stderr():
        results = [_result(str(file), _of_file(file.absolute())) for file in files or ()]
        results.append(_result(VARIABLES, _of_variables()))
    if as_json:
        print_json({"checked": results})
    else:
        _print(results)
    if any(result["faults"] for result in results):
        raise typer.Exit(USAGE)


def _result(name: str, findings: Iterable[Finding]) -> dict[str, Any]:
    """Return the faults and the notes on a file, or on the variables, as plain data."""
    each_once = list(dict.fromkeys(findings))
    faults = [finding.line for finding in each_once if finding.is_fault]
    return {"name": name, "faults": faults, "notes": [x.line for x in each_once if not x.is_fault]}


def _faults(read: Callable[[Any], object], value: object, prefix: str = "") -> Iterator[Finding]:
    """Yield the lines of the error that `read` raises for a value."""
    try:
        read(value)
    except AttnregError as error:
        yield from (Finding(f"{prefix}{line}") for line in str(error).splitlines())


def _of_file(file: Path) -> Iterator[Finding]:
    from attnreg.core.times import traces
    from attnreg.tools.report import lines

    if file.suffix == ".toml":
        yield from _of_settings(file)
    elif file.suffix == ".json":
        yield from _of_json(file)
    elif file.suffix == ".jsonl":
        recording = functools.partial(traces.read, most=sys.maxsize)
        yield from _faults(recording if is_recording(file) else lambda file: lines.read([file]), file)
    else:
        missing = list(_faults(_look_up, file))
        yield from missing or [Finding(f"{file}: got the suffix {file.suffix!r}, expected {FILES}")]


def _look_up(file: Path) -> None:
    """Raise a `ConfigError` unless there is a file of this name."""
    with file_errors(file, "read"):
        file.stat()


def is_recording(file: Path) -> bool:
    """Whether a file of lines isn't one of ATTNREG_STATS or ATTNREG_REPORT, by its first kilobyte."""
    try:
        with file.open("rb") as opened:
            return BEGIN_OF_LINE.encode() not in opened.read(1024)
    except OSError:  # whoever reads it says so
        return True


def _of_json(file: Path) -> Iterator[Finding]:
    """Yield the faults of a lockfile or a measured table; a file that is neither is a fault."""
    from attnreg.core.policy import lockfile
    from attnreg.core.times import table as measured

    try:
        with file_errors(file, "read"):
            begin = file.read_text("utf-8", "replace")[:4096]
    except ConfigError as error:
        yield Finding(str(error))
        return
    name = re.search(r'"format"\s*:\s*"([^"]*)"', begin)
    if name is not None and name[1] == lockfile.FORMAT:
        yield from _of_lock(file, f"{file}: ", "")
    elif name is not None and name[1] == measured.FORMAT:
        yield from _faults(functools.partial(measured.load, most=sys.maxsize), file)
    else:
        got = f"the format {name[1]!r}" if name else "no format"
        yield Finding(f"{file}: got {got}, expected {lockfile.FORMAT!r} or {measured.FORMAT!r}")


def _of_lock(file: Path, named_by: str, prefix: str) -> Iterator[Finding]:
    """Yield the faults of a lockfile; if there are none, that its rows weren't compared."""
    from attnreg.core.policy import lockfile

    faults = list(_faults(functools.partial(lockfile.load, most=sys.maxsize), file, prefix))
    yield from faults or [Finding(f"{named_by}{ONLY_FORMAT.format(file)}", False)]


def _of_settings(file: Path) -> Iterator[Finding]:
    """Yield the faults of a settings file and of the table that it names, and notes."""
    from attnreg.core import registry
    from attnreg.core.settings import config
    from attnreg.core.times import table as measured

    names = [entry.name for entry in registry.entries().values()]
    yield from _faults(lambda file: config.check_file(file, names, sys.maxsize), file)
    named = _named_files(file)
    if "tuned" in named:
        path, line = named["tuned"]
        yield from _faults(functools.partial(measured.load, most=sys.maxsize), path, f"{line}: tuned: ")
    if "lock" in named:
        path, line = named["lock"]
        yield from _of_lock(path, f"{line}: lock: ", f"{line}: lock: ")
    try:
        loaded = config.load(file)
    except ConfigError:
        return
    yield from (Finding(loaded.origin.problem(*note), False) for note in _without_effect(loaded.settings))


def _named_files(path: Path) -> dict[str, tuple[Path, str]]:
    """Return the files that a settings file names, whatever else is wrong in it.

    By the key: the path, and the line with the key.
    """
    from attnreg.core.settings import config, toml_file

    files = {}
    for key in config.FILES:
        try:
            data, origin = toml_file.read(path)
            file = getattr(config.settings_from({key: data.get(key)}), key)
        except ConfigError:  # `check_file` says so
            continue
        if file is not None and origin.path is not None:
            files[key] = origin.path.parent / file, origin.describe((key,))
    return files


def _without_effect(settings: Settings) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the key of each setting that has no effect, with the reason."""
    from attnreg.core.settings.environment import REFERENCE

    for device, own in settings.devices.items():
        yield from _unable(device, own.order)
        if settings.strict and REFERENCE in (name.casefold() for name in own.order):
            key = ("devices", device, "order")
            yield key, f"names {REFERENCE!r}, which runs every call: strict = true refuses no call here"


def _unable(device: str, order: tuple[str, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the key of each backend in an order that can't run a call of these devices, with the reason."""
    from attnreg.core import registry
    from attnreg.core.contract.spec import Device

    place = Device.parse(device) if device.startswith("sm_") else Device(device)
    for index, name in enumerate(order):
        entry = registry.entries().get(name.casefold())  # an unknown name is a fault already
        if entry is not None and entry.backend is not None:
            for reason in entry.backend.forward.against_device(place):
                yield ("devices", device, "order", index), f"{name!r} runs no call there: {reason}"


def _of_variables() -> Iterator[Finding]:
    """Yield the faults of the variables and of the files that they name, and notes."""
    from attnreg.core import registry
    from attnreg.core.policy.sources import Sources, check_names, contradictions, read
    from attnreg.core.settings import config, environment
    from attnreg.core.times import traces
    from attnreg.core.times.table import check_writable

    findings = list(_faults(lambda environ: environment.read(environ, sys.maxsize), os.environ))
    # What is wrong with some variables hides no fault of the rest.
    wrong = {name for finding in findings for name in finding.line.partition(":")[0].split(" and ")}
    variables = environment.read({name: text for name, text in os.environ.items() if name not in wrong})
    for variable, names in (("ATTNREG_BACKEND", variables.backend), ("ATTNREG_DISABLE", variables.disable)):
        for name in names:
            findings += _faults(registry.find, name, f"{variable}: ")
    if variables.lock is not None:
        findings += _of_lock(variables.lock, "ATTNREG_LOCK: ", "ATTNREG_LOCK: ")
    if variables.record is not None:
        findings += _faults(traces.check_writable, variables.record, "ATTNREG_RECORD: ")
    for variable, file in (("ATTNREG_STATS", variables.stats), ("ATTNREG_REPORT", variables.report)):
        if file is not None:
            findings += _faults(check_writable, file, f"{variable}: ")
    sources = Sources(environment=variables)
    if variables.config is not None:
        findings += _of_settings(variables.config)
        with contextlib.suppress(ConfigError):  # its faults are listed already
            sources = replace(sources, environment_file=config.load(variables.config))
    findings += map(Finding, contradictions(sources))
    if not any(finding.is_fault for finding in findings):
        findings += _faults(lambda before: check_names(read(before)), Sources())
    yield from findings


def _print(results: list[dict[str, Any]]) -> None:
    rows = (
        (result["name"], counted(len(result["faults"]), "fault") if result["faults"] else "right")
        for result in results
    )
    table("Checked", rows)
    for kind in ("faults", "notes"):
        # A file that a variable names, too, has its lines once.
        if lines := list(dict.fromkeys(line for result in results for line in result[kind])):
            # Lines stay whole, so that a search finds them.
            typer.echo("\n".join([kind.capitalize(), *(f"  {line}" for line in lines), ""]))

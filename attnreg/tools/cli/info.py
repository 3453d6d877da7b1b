"""`attnreg info`: devices, backends, settings with their sources, and what torch does without attnreg.

Whatever is broken on a machine is what `info` is run for, so nothing that it collects raises.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import typer

from attnreg.errors import AttnregError
from attnreg.tools.cli.options import AsJson, Verbose
from attnreg.tools.cli.output import USAGE, import_torch, print_json, stdout_to_stderr, table
from attnreg.tools.lines import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnreg.core.contract.spec import Device
    from attnreg.core.registry.entry import Entry
    from attnreg.core.selection.decision import Policy
    from attnreg.core.torchlib.libraries import Library

    Rows = Iterator[tuple[str, ...]]


def info(verbose: Verbose = False, as_json: AsJson = False) -> None:
    """Show devices, backends, and the settings that are set.

    With --verbose also show where each backend comes from, every variable with its purpose, and torch's own
    choices. A backend that can't load and settings that can't be read are rows like any other: they don't
    stop the command. The exit code is 2 if settings can't be read.

    Example: attnreg info --json > report.json
    """
    import_torch()
    with stdout_to_stderr():
        facts = collected()
    if as_json:
        print_json(facts)
    else:
        _print(facts, verbose)
    if facts["settings"]["problem"]:
        raise typer.Exit(USAGE)


def collected() -> dict[str, Any]:
    """Return what `info` shows, as plain data."""
    from attnreg.core import aten, registry
    from attnreg.core.dispatch import planning
    from attnreg.core.policy import current as policy
    from attnreg.core.selection.decision import Policy
    from attnreg.core.torchlib import building, captured
    from attnreg.tools.cli import facts

    in_force, problem = Policy(), ""
    try:
        in_force = policy.current()
    except AttnregError as error:
        problem = str(error)
    left_out = policy.left_out()
    devices = [(planning.device_of(device), named) for device, named in facts.devices()]
    return {
        "versions": facts.versions(),
        "devices": [named | facts.order(device, in_force) for device, named in devices],
        "backends": [_backend(entry, in_force) for entry in registry.entries().values()],
        "settings": {
            "variables": list(_variables()),
            "in_force": [
                {"setting": name, "value": value, "source": source}
                for name, value, source in _settings(in_force)
            ],
            "problem": problem or left_out,
            "left_out": bool(left_out),
        },
        "tables": [{"device": named["device"], **_table(device, in_force)} for device, named in devices],
        "routers": {
            "installed": aten.installed(),
            "compiled": _compiled(),
            "serving": policy.is_active(),
            "shadowed_by": captured.shadowed_by(),
            "overridden": captured.shadow_notes(),
            "untouched_programs": facts.untouched_programs(),
        },
        "compiled": [_library(library) for library in building.LIBRARIES],
        "torch": facts.of_torch(),
    }


def _compiled() -> dict[str, str | None]:
    """Return the file of the compiled call cache, and why programs that start here don't use it."""
    from attnreg.core.torchlib import building

    file, problem = building.built(), None
    try:
        building.loaded()
    except AttnregError as error:
        problem = str(error)
    if os.environ.get("ATTNREG_ROUTERS", "").strip().casefold() == "python":
        problem = "ATTNREG_ROUTERS=python leaves them out"
    return {"file": str(file) if file else None, "problem": problem}


def _library(library: Library) -> dict[str, str | None]:
    """Return whether a library in C++ is compiled for the torch and the Python that run this, and loads."""
    from attnreg.core.torchlib import building

    state, path, reason = building.status(library)
    if state.startswith(("prebuilt", "built")) and not reason:
        try:
            (building.loaded if library is building.CALL_CACHE else building.loaded_cpu_kernel)()
        except AttnregError as error:
            state, reason = "can't load", str(error)
    title = library.title.removeprefix("the ")
    return {"library": title, "state": state, "file": str(path) if path else None, "reason": reason}


def _backend(entry: Entry, in_force: Policy) -> dict[str, Any]:
    from attnreg.tools.cli import facts

    state, reason = facts.state(entry, in_force)
    return {
        "name": entry.name,
        "version": entry.version(),
        "state": state,
        "reason": reason,
        "origin": entry.origin,
        "devices": list(entry.backend.devices) if entry.backend is not None else [],
    }


def _table(device: Device, in_force: Policy) -> dict[str, Any]:
    """Return which measured table decides on a device, and why others don't."""
    from attnreg.core.times.tables import NamedTables, TableReport

    tables = in_force.tables
    report = tables.report(device) if isinstance(tables, NamedTables) else TableReport()
    return {
        "in_force": None if report.in_force is None else str(report.in_force),
        "points": 0 if report.in_force is None else len(report.in_force.table.points),
        "notes": list(report.notes),
        "refused": list(report.refused),
    }


def _variables() -> Iterator[dict[str, str | None]]:
    """Yield attnreg's variables, then those that start with its prefix but are unknown."""
    from attnreg.core.settings import environment

    unknown = [name for name in os.environ if name.upper().startswith(environment.PREFIX)]
    for name in dict.fromkeys([*environment.VARIABLES, *sorted(unknown)]):
        known = environment.VARIABLES.get(name)
        purpose = known.description if known else "unknown to attnreg"
        yield {"name": name, "value": os.environ.get(name), "purpose": purpose}


def _settings(in_force: Policy) -> Iterator[tuple[str, str, str]]:
    """Yield the settings in force, highest precedence first: name, value, source."""
    from attnreg.core import registry
    from attnreg.core.policy import current as policy
    from attnreg.core.policy.sources import BY_POLICY, locked_by, masks

    for preference in in_force.preferences:
        where = f" on {', '.join(preference.devices)}" if preference.devices else ""
        yield f"prefer{where}", ", ".join(preference.names), preference.source
    for name, source in in_force.disabled.items():
        yield "disabled", registry.find(name).name, source
    if in_force.strict:
        yield "strict", "true", in_force.strict
    try:
        sources = policy.sources()
    except AttnregError:
        return
    if sources.lock is not None:
        rows = counted(len(sources.lock.rows), "row")
        yield "lock", f"{sources.lock.path}, {rows}", locked_by(sources)[1]
    for key in ("policy", "masks", "on_error", "record"):
        if value := getattr(sources.environment, key):
            yield key, str(value), f"ATTNREG_{key.upper()}"
    if masks(sources)[1] == BY_POLICY:
        yield "masks", masks(sources)[0], BY_POLICY
    for loaded in sources.loaded:
        for key in ("log_level", "policy", "masks", "on_error", "tuned", "build", "transformers"):
            if (value := getattr(loaded.settings, key)) and key in loaded.settings.model_fields_set:
                yield key, str(value), loaded.origin.describe((key,))
        for pattern, names in loaded.settings.modules.items():
            yield f"modules {pattern}", ", ".join(names), loaded.origin.describe(("modules", pattern))
        if loaded.origin.path is not None:
            by = "ATTNREG_CONFIG" if loaded is sources.environment_file else "configure(...)"
            yield "settings file", str(loaded.origin.path), by


def _print(facts: dict[str, Any], verbose: bool) -> None:
    versions = facts["versions"]
    names = ("attnreg", "python", "torch", "cuda", "cudnn")
    table("Versions", ((name, versions[name] or "none") for name in names))
    table("Devices, and their backends in order of preference", _device_rows(facts))
    table("Backends", _backend_rows(facts["backends"], verbose))
    table("Environment", _variable_rows(facts["settings"]["variables"], verbose))
    table("Settings in force, highest precedence first", _setting_rows(facts["settings"]))
    table("Measured tables", _table_rows(facts["tables"]))
    table("PyTorch's own functions", _router_rows(facts["routers"], facts["settings"]))
    table("Compiled part", _library_rows(facts["compiled"]))
    if verbose:
        choices = facts["torch"]["chooses"].items()
        rows = ((f"bfloat16, causal, on {device}", kernel) for device, kernel in choices)
        table("What torch does without attnreg", rows)


def _file_or_reason(library: dict[str, Any]) -> str:
    """Return the file of a library that loads, or why it doesn't."""
    state, file = library["state"], library["file"]
    if state == "built":
        return str(file)
    return f"{state}: {file if state.startswith('prebuilt') else library['reason']}"


def _device_rows(facts: dict[str, Any]) -> Rows:
    for device in facts["devices"]:
        capability = device["compute_capability"]
        yield device["device"], device["name"] + (f", compute capability {capability}" if capability else "")
        for rank, choice in enumerate(device["order"], 1):
            yield "", f"{rank}. {choice['backend']}, by {choice['source']}"
        if device["problem"]:
            yield "problem", device["problem"]
    if trouble := facts["versions"]["gpu_trouble"]:
        yield "cuda", f"none: {trouble}"


def _backend_rows(backends: list[dict[str, Any]], verbose: bool) -> Rows:
    for backend in backends:
        origin = backend["origin"]
        # attnreg's own all come from `attnreg.backends`, which says nothing.
        shown = f"from {origin}" if verbose or not origin.startswith("attnreg.backends.") else ""
        texts = [backend["version"], backend["reason"], shown]
        yield backend["name"], backend["state"], "; ".join(filter(None, texts))


def _variable_rows(variables: list[dict[str, Any]], verbose: bool) -> Rows:
    names = [variable for variable in variables if verbose or variable["value"] is not None]
    for variable in names:
        yield variable["name"], "not set" if variable["value"] is None else repr(variable["value"])
        if verbose:
            yield "", variable["purpose"]
    if not names:
        yield "none", "no variable of attnreg is set; `attnreg info --verbose` lists all"


def _library_rows(libraries: list[dict[str, Any]]) -> Rows:
    """Yield each library's file, or why it isn't used, and what that costs."""
    from attnreg.core.torchlib import building

    for library, row in zip(building.LIBRARIES, libraries, strict=True):
        name, state = row["library"], row["state"]
        yield name, _file_or_reason(row)
        if state != "built" and not state.startswith("prebuilt"):
            yield "", f"so {library.without}"


def _setting_rows(settings: dict[str, Any]) -> Rows:
    for line in settings["problem"].splitlines():
        yield "problem", line
    if settings["left_out"]:
        yield "", 'these settings are left out, as on_error = "native" asks'
    elif settings["problem"]:
        yield "", "attention calls are refused until this is corrected"
    for setting in settings["in_force"]:
        yield setting["setting"], f"{setting['value']}, by {setting['source']}"
    if not (settings["problem"] or settings["in_force"]):
        yield "none", "each device has its default order of backends"


def _table_rows(reports: list[dict[str, Any]]) -> Rows:
    for report in reports:
        in_force = f"{report['in_force']}, {counted(report['points'], 'point')}" if report["in_force"] else ""
        yield report["device"], in_force or "none: the default order decides"
        for line in (*report["refused"], *report["notes"]):
            yield "", line


# The devices' orders of preference stand above it.
_RUN_BY_TORCH = (
    "run by torch's own kernels, as nothing asks for a backend; attnreg.varlen_attn goes by the order"
)


def _router_rows(routers: dict[str, Any], settings: dict[str, Any]) -> Rows:
    compiled, trouble = routers["compiled"], routers["untouched_programs"]
    calls = "run by attnreg's backends" if routers["serving"] else _RUN_BY_TORCH
    if settings["problem"] and not settings["left_out"]:
        calls = "refused: see the problems above"
    yield "routers", "installed" if routers["installed"] else "not installed"
    yield "repeated calls", f"run by {'Python' if compiled['problem'] else 'the compiled call cache'}"
    if compiled["file"] and compiled["problem"]:
        yield "", f"the compiled call cache is not used: {compiled['problem']}"
    yield "calls", calls
    if routers["shadowed_by"]:
        yield "shadowed", f"torch.nn.attention has activated {routers['shadowed_by']!r} above the routers"
    for note in routers["overridden"]:
        yield "overridden", note
    yield (
        "programs that import only torch",
        f"can't use attnreg: {trouble}" if trouble else "use attnreg if a variable selects a backend",
    )

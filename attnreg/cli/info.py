"""`attnreg info`: devices, backends, settings with their sources, and what torch itself would do."""

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from attnreg.cli.output import AsJson, console, heading, print_json, table
from attnreg.cli.torch_first import import_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

__all__ = ["info"]


def info(as_json: AsJson = False) -> None:
    """Show devices, backends and settings.

    What is broken is a row among the others; so is what torch would do by itself.
    """
    import_torch()
    # A provider that greets on import must not get into the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        from attnreg.cli.inventory import inventory

        found = inventory()
    if as_json:
        print_json(found)
    else:
        _print(console(), found)


def _print(place: "Console", found: dict[str, Any]) -> None:
    versions = found["versions"]
    compiled_for = f"Compiled for torch {versions['torch']} and Python {versions['python']}"
    for title, headers, rows in (
        ("Versions", ("", ""), _versions(found["versions"])),
        ("Devices, and who serves them, the most preferred first", ("", ""), _devices(found)),
        ("Backends", ("name", "version", "state", "from"), _backends(found["backends"])),
        ("Environment", ("", ""), _variables(found["settings"])),
        ("Settings in force, the strongest first", ("", ""), _settings(found["settings"])),
        ("Measured tables", ("", ""), _tables(found["tables"])),
        ("PyTorch's entry points", ("", ""), _routers(found)),
        (compiled_for, ("", ""), _libraries(found["compiled"])),
        ("What torch does by itself", ("", ""), _torch(found["torch"])),
    ):
        heading(place, title)
        table(place, headers, rows)


def _versions(found: dict[str, Any]) -> "Iterator[tuple[str, str]]":
    return ((name, found[name] or "none") for name in ("attnreg", "python", "torch", "cuda", "cudnn"))


def _devices(found: dict[str, Any]) -> "Iterator[tuple[str, str]]":
    for device in found["devices"]:
        capability = device["compute_capability"]
        yield device["device"], device["name"] + (f", compute capability {capability}" if capability else "")
        for rank, choice in enumerate(device["order"], 1):
            yield "", f"{rank}. {choice['backend']}, by {choice['source']}"
        if device["problem"]:
            yield "problem", device["problem"]
    if trouble := found["versions"]["gpu_trouble"]:
        yield "cuda", f"none: {trouble}"


def _backends(found: list[dict[str, Any]]) -> "Iterator[tuple[str, ...]]":
    for backend in found:
        yield backend["name"], backend["version"], backend["state"], backend["origin"]
        if backend["reason"]:
            yield "", "", "", backend["reason"]


def _variables(found: dict[str, Any]) -> "Iterator[tuple[str, str]]":
    for one in found["variables"]:
        yield one["name"], "not set" if one["value"] is None else repr(one["value"])
        yield "", one["purpose"]


def _settings(found: dict[str, Any]) -> "Iterator[tuple[str, str]]":
    for line in found["problem"].splitlines():
        yield "problem", line
    if found["problem"]:
        yield "", "every attention call that they would have governed is refused until they are mended"
    for one in found["in_force"]:
        yield one["setting"], f"{one['value']}, by {one['source']}"
    if not (found["problem"] or found["in_force"]):
        yield "none", "every device has its default order"


def _tables(found: list[dict[str, Any]]) -> "Iterator[tuple[str, str]]":
    for one in found:
        state = f"{one['in_force']}, {one['points']} points" if one["in_force"] else "none: the default order"
        yield one["device"], state
        for line in (*one["refused"], *one["notes"]):
            yield "", line


def _routers(found: dict[str, Any]) -> "Iterator[tuple[str, str]]":
    routers = found["routers"]
    calls = "go to the backends" if routers["serving"] else "left to torch: nothing asks for a backend"
    missed = routers["untouched_programs"]
    yield "routers", "installed" if routers["installed"] else "not installed"
    compiled = routers["compiled"]
    yield "repeated calls", f"served by {'Python' if compiled['problem'] else 'the compiled call cache'}"
    if compiled["file"] and compiled["problem"]:
        yield "", f"the compiled call cache is not used: {compiled['problem']}"
    yield "calls", "refused: see the problems above" if found["settings"]["problem"] else calls
    if routers["shadowed_by"]:
        yield "shadowed", f"torch.nn.attention has {routers['shadowed_by']!r} active above the routers"
    yield (
        "programs nobody touched",
        f"not served: {missed}" if missed else "served when a variable asks for it",
    )


def _libraries(found: list[dict[str, Any]]) -> "Iterator[tuple[str, str]]":
    for one in found:
        yield one["library"], one["file"] or f"{one['state']}: {one['reason']}"


def _torch(found: dict[str, Any]) -> "Iterator[tuple[str, str]]":
    for device, kernel in found["chooses"].items():
        yield f"bfloat16, causal, on {device}", kernel
    # On the CPU torch heeds neither; it tries flash, then math.
    yield "order on CUDA", ", ".join(found["priority"])
    yield "enabled", ", ".join(name for name, on in found["enabled"].items() if on)
    yield "flash implementation", found["flash_implementation"] or "torch's own"
    yield "others it knows", ", ".join(found["flash_implementations"])

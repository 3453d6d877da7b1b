"""The pages of the site that are made from attnreg itself: matrix, settings, commands, names of Python.

Each function returns the Markdown of a page. None needs mkdocs or a GPU, so that tests call them, too.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attnreg

YES, NO = "✓", "–"


def pages() -> dict[str, str]:
    """Return the Markdown of each generated page by its path in the site."""
    return {
        "reference/matrix.md": matrix(),
        "reference/settings.md": settings(),
        "reference/commands.md": commands(),
        **{f"reference/python/{name}.md": text for name, text in python_pages()},
    }


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; `|` in cells is escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    cells = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


_ABOUT_THE_MATRIX = f"""# What each backend runs

Made from what the backends declare (`Capabilities`), the data that attnreg itself decides by. {YES} means
that it is declared, {NO} that such a call goes to another backend. A backend may refuse single calls for a
further reason, such as a missing package. `attnreg explain` says it for a call, without that GPU as well:
`--device sm_90`. Other head dims are padded to the next multiple of 8, and `efficient` pads to one of 4.
"""


def matrix() -> str:
    """Return the page: what each backend declares, by device and direction."""
    from attnreg.core import registry

    # A backend that another package has installed is no part of attnreg.
    known = [entry for entry in registry.entries().values() if not entry.installed]
    backends = [entry.backend for entry in known if entry.backend is not None]
    text = [_ABOUT_THE_MATRIX]
    for device, title in (("cuda", "On a GPU (CUDA)"), ("cpu", "On a CPU")):
        for direction in ("forward", "backward"):
            declared = [(one.name, getattr(one, direction)) for one in backends]
            able = {name: limits for name, limits in declared if limits and device in limits.devices}
            rows = [[what, *map(cell, able.values())] for what, cell in _matrix_rows(device, direction)]
            text.append(f"## {title}: {direction}\n\n{table(['', *able], rows)}")
    others = {name for one in backends for name in one.devices} - {"cpu", "cuda"}
    names = ", ".join(f"`{name}`" for name in sorted(others))
    only = ", ".join(f"`{one.name}`" for one in backends if others & set(one.devices))
    text.append(f"## On other devices\n\nOn {names}, {only} runs what it runs on a CPU.\n")
    return "\n".join(text)


def _matrix_rows(device: str, direction: str) -> Iterator[tuple[str, Callable[[Any], str]]]:
    """Yield what each row of the matrix is about, and the function that gives a backend's cell."""
    from attnreg.core.contract.options import OPTIONS

    def switch(name: str) -> Callable[[Any], str]:
        return lambda limits: YES if getattr(limits, name) else NO

    yield "dtypes", lambda limits: ", ".join(limits.dtypes)
    if device == "cuda":
        yield "compute capability", lambda limits: _versions(limits.compute_capability)
    yield "head dims", lambda limits: _numbers(limits.head_dim)
    yield "head dims of the value", lambda limits: _numbers(limits.head_dim_v, "as the query's")
    yield "dense tensors (SDPA)", switch("dense")
    yield "packed tensors (`varlen_attn`)", switch("varlen")
    yield "fewer key heads than query heads (GQA)", switch("gqa")
    yield "causal mask", switch("causal")
    yield "sliding window", switch("window")
    for row in OPTIONS:
        if direction in row.directions:
            sizes = ": page sizes" if row.values == "pages" else ""
            yield f"`{row.argument or row.name}`{sizes}", lambda limits, row=row: _option(row, limits)
    yield "scale of 0 or below", switch("any_scale")
    yield "deterministic", switch("deterministic")
    yield "batch-invariant", switch("batch_invariant")
    yield "in a CUDA graph", switch("capture")


def _option(row: Any, limits: Any) -> str:
    if row.values == "pages":
        return _numbers(limits.page_size, NO)
    if row.name == "sinks" and limits.varlen and not limits.sinks:
        return "results rescaled"
    if row.name == "grad_lse" and not limits.grad_lse and limits.delta_from_out:
        return "in 8 more columns"
    return YES if limits.runs(row) else NO


def _versions(limits: tuple[tuple[int, int], tuple[int, int]] | None) -> str:
    low, high = ("", "") if limits is None else (".".join(map(str, end)) for end in limits)
    return "any" if limits is None else low if low == high else f"{low} to {high}"


def _numbers(limits: Any, without: str = "") -> str:
    if limits is None:
        return without
    steps = f", steps of {limits.step}" if limits.step > 1 else ""
    least = max(limits.low, 1)
    return f"from {least}{steps}" if limits.high == 2**31 - 1 else f"{least} to {limits.high}{steps}"


_ABOUT_SETTINGS = """# Settings and variables

[Choosing](../choosing.md) says which source is stronger. `attnreg check FILE` shows all faults of a file, and
`attnreg info` what is set.
"""


def settings() -> str:
    """Return the page: the keys of a settings file, and the variables, from the models that check them."""
    from attnreg.core.settings.config import DeviceSettings, Settings
    from attnreg.core.settings.environment import VARIABLES

    rows = [row for name, *row in _keys(Settings) if name != "devices"]
    rows += [[f"`devices.*.{name}`", *row[1:]] for name, *row in _keys(DeviceSettings)]
    variables = [[f"`{name}`", variable.description] for name, variable in VARIABLES.items()]
    return (
        f"{_ABOUT_SETTINGS}\n"
        f"## Keys of a settings file\n\n{table(['key', 'value', 'default', 'meaning'], rows)}\n"
        f"`devices`: {Settings.model_fields['devices'].description}\n\n"
        f"## Environment variables\n\n{table(['variable', 'meaning'], variables)}"
    )


def _keys(model: Any) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the name of each key of a table, and its row."""
    facts = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        yield name, f"`{name}`", _type(facts[name]), _default(field), field.description or ""


def _type(fact: dict[str, Any]) -> str:
    if "enum" in fact:
        return ", ".join(f'`"{value}"`' for value in fact["enum"])
    if "anyOf" in fact:
        return " or ".join(_type(one) for one in fact["anyOf"] if one.get("type") != "null")
    names = {"array": "list of names", "boolean": "`true`, `false`", "object": "table"}
    return "path" if fact.get("format") == "path" else names.get(fact.get("type", ""), fact.get("type", ""))


def _default(field: Any) -> str:
    value = None if field.is_required() else field.get_default(call_default_factory=True)
    if value is None or value == {}:
        return NO
    return f"`{json.dumps(value)}`"


def commands() -> str:
    """Return the page: the help of each command."""
    from typer.main import get_command

    from attnreg.tools import cli

    text = ["# Commands\n\n`attnreg COMMAND --help` prints the same. `python -m attnreg` is `attnreg`.\n"]
    for name, command in _each_command("attnreg", get_command(cli.app)):
        context = command.context_class(command, info_name=name, terminal_width=100, max_content_width=100)
        title = "## All commands" if name == "attnreg" else f"## {name.removeprefix('attnreg ')}"
        text.append(f"{title}\n\n```text\n{command.get_help(context).rstrip()}\n```\n")
    return "\n".join(text)


def _each_command(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for part, inner in getattr(command, "commands", {}).items():
        yield from _each_command(f"{name} {part}", inner)


_ABOUT_PYTHON = (
    "`Settings` has the [keys of a settings file](../settings.md#keys-of-a-settings-file) as fields."
)


def python_pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each page about the public names of a module."""
    homes = {name: f"attnreg.{home}.{name}" for name, home in attnreg._HOME.items()}
    spread = [name for name in attnreg.__all__ if homes[name].startswith("attnreg.parallel.")]
    errors = [name for name in attnreg.__all__ if homes[name].startswith("attnreg.errors.")]
    kernels = ["Backend", "Kernels", "Call", "Capabilities", "Range", "Cut"]
    rest = [name for name in attnreg.__all__ if name not in {*spread, *errors, *kernels}]
    for page, title, names in (
        ("attnreg", f"attnreg\n\n{_ABOUT_PYTHON}", rest),
        ("backends", "attnreg: for authors of kernels", kernels),
        ("errors", "attnreg: errors", errors),
        ("parallel", "attnreg: several GPUs", spread),
    ):
        yield page, _python_page(title, [homes[name] for name in names])
    yield "flash_attn", _python_page("attnreg.flash_attn", _objects("attnreg.flash_attn"))
    yield "testing", _python_page("attnreg.testing", _objects("attnreg.testing"))


def _objects(module: str) -> list[str]:
    """Return where each public function and class of a module is defined."""
    found = importlib.import_module(module)
    objects = [getattr(found, name) for name in found.__all__]
    return [f"{one.__module__}.{one.__qualname__}" for one in objects if hasattr(one, "__qualname__")]


def _python_page(title: str, names: Iterable[str]) -> str:
    return f"# {title}\n\n" + "\n".join(f"::: {name}\n" for name in names)

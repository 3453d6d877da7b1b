"""The types of single settings, and the words in which a wrong one is refused.

A list of names, a device key and a file path are ordinary types with rules attached: pydantic runs
the rules and lists what they refuse next to what it refuses itself. `complaint` words both alike.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import AfterValidator, BeforeValidator, StringConstraints, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from attnreg.errors import did_you_mean

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from attnreg.settings.toml_positions import KeyPath

__all__ = ["DEVICE_KEY", "DEVICE_TYPES", "DeviceKey", "Names", "Problem", "TableFile", "complaint", "refusal"]

# What `torch.device` takes; written out, so that reading settings doesn't have to import torch.
DEVICE_TYPES = (
    "cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "maia", "ipu", "hip", "ve", "fpga", "lazy", "meta",
    "mkldnn", "opengl", "opencl", "ideep", "vulkan", "privateuseone",
)  # fmt: skip
DEVICE_KEY = rf"^({'|'.join(DEVICE_TYPES)}|sm_[1-9][0-9]{{1,2}})$"


class Problem(NamedTuple):
    """What a rule has against a value; `key` leads to it from the value that the rule was given."""

    key: KeyPath
    got: object
    expected: str


def refusal(*problems: Problem) -> ValidationError:
    """Return an error that pydantic merges into its own, each problem with its whole key."""
    details = [
        InitErrorDetails(
            type=PydanticCustomError("rule", "Expected {expected}", {"expected": problem.expected}),
            loc=problem.key,
            input=problem.got,
        )
        for problem in problems
    ]
    return ValidationError.from_exception_data("Settings", details)


# What pydantic expected, by the type of its complaint, in the words of all other messages.
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "invalid_key": "the name of a setting",
    "missing": "a list of at least one name",
    "model_type": "a table",
    "path_type": "the path of a file",
    "string_too_short": "a name",
    "string_type": "a string",
    "too_short": "at least one name",
}


def complaint(detail: ErrorDetails) -> str:
    """Return what was got and what was expected, for one error of pydantic's or of a rule."""
    kind, got = detail["type"], detail["input"]
    expected = detail.get("ctx", {}).get("expected") or _EXPECTED.get(kind, detail["msg"])
    if kind == "literal_error":
        expected += did_you_mean(str(got), expected.split("'")[1::2])
    return f"missing, expected {expected}" if kind == "missing" else f"got {got!r}, expected {expected}"


def _in_order(names: object) -> object:
    # pydantic would take a set too, whose order changes from run to run.
    if not isinstance(names, list | tuple):
        raise refusal(Problem((), names, "a list of names"))
    return names


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    keys = [name.casefold() for name in names]
    repeats = [
        Problem((index,), name, f"each name once: [{keys.index(keys[index])}] is the same, whatever the case")
        for index, name in enumerate(names)
        if keys.index(keys[index]) < index
    ]
    if repeats:
        raise refusal(*repeats)
    return names


def _device(key: str) -> str:
    if not re.fullmatch(DEVICE_KEY, key):
        arch = re.fullmatch(r"sm[ _-]?([1-9]\d{1,2})[af]?", key.casefold())
        near = f"; did you mean 'sm_{arch[1]}'?" if arch else did_you_mean(key, DEVICE_TYPES)
        raise refusal(Problem((), key, f"'cpu', 'cuda', another device type of torch or 'sm_NN'{near}"))
    return key


def _file(path: object) -> object:
    if not isinstance(path, str | Path):
        return path  # for pydantic to refuse
    if not Path(path).name:  # "" as well as "."
        raise refusal(Problem((), str(path), "the path of a file"))
    try:
        return Path(path).expanduser()
    except RuntimeError:
        homeless = Problem((), str(path), "the path of a file (its ~ stands for no home folder)")
        raise refusal(homeless) from None


Name = Annotated[str, StringConstraints(strict=True, strip_whitespace=True, min_length=1)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_in_order), AfterValidator(_each_once)]
DeviceKey = Annotated[str, AfterValidator(_device)]
TableFile = Annotated[Path, BeforeValidator(_file)]

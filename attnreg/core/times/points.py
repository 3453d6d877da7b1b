"""The rows of a table and their JSON: `Point` (kernels at one size), `Front` (host times of whole calls)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

from attnreg.core.times.kinds import HOST_SHAPES, MANY, MASKS, Kind, Size
from attnreg.errors import short_repr


class Malformed(ValueError):  # noqa: N818 - its message becomes that of a ConfigError
    """The data has the wrong form; the message begins with the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of a backend at a point.

    Attributes:
        gpu_us: microseconds on the GPU, or in total on a CPU.
        host_us: microseconds until the call returns, while the GPU still works; 0 on a CPU.
        first_call_s: seconds of the first call of this shape, which compiles or builds kernels.
        error: the largest error divided by the largest allowed error.
        wrong: what is wrong with its results; empty if they are right.
        failed: the exception that it raised; empty if it raised none.
    """

    gpu_us: float | None = None
    host_us: float = 0.0
    first_call_s: float = 0.0
    error: float = 0.0
    wrong: str = ""
    failed: str = ""

    @property
    def trouble(self) -> str:
        """Why it must not be chosen; empty if it may be."""
        return (self.wrong and f"wrong: {self.wrong}") or (self.failed and f"failed: {self.failed}")

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data."""
        if self.wrong:
            return {"wrong": self.wrong}
        if self.failed or self.gpu_us is None:
            return {"failed": self.failed}
        return {name: _rounded(getattr(self, name)) for name in TIMES}


TIMES = ("gpu_us", "host_us", "first_call_s", "error")


@dataclass(frozen=True, slots=True)
class Point:
    """A kind of call at a size, with the result of each backend."""

    kind: Kind
    size: Size
    backends: Mapping[str, Measured]

    @property
    def place(self) -> tuple[Kind, Size]:
        """Its key in a table."""
        return self.kind, self.size

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data."""
        row = self.kind._asdict() | self.size._asdict()
        row |= {"extras": list(self.kind.extras), "window": list(self.size.window)}
        return row | {"backends": {name: result.to_dict() for name, result in self.backends.items()}}

    @classmethod
    def from_dict(cls, data: object, place: str) -> Point:
        """Return the point of a row; `place` is the row's key in the file. Raises `Malformed`."""
        row = with_keys(data, (*Kind._fields, *Size._fields, "backends"), place, "a point")
        kind = Kind(**_fields(row, Kind._fields, place))
        size = Size(**_fields(row, Size._fields, place))
        inside = f"{place}.backends"
        backends = checked(row["backends"], inside, ("the result of each backend", is_dict))
        return cls(
            kind, size, {name: _measured(result, f"{inside}.{name}") for name, result in backends.items()}
        )


class Front(NamedTuple):
    """The host time of one direction of a whole call through SDPA or `varlen_attn`.

    A whole call goes through torch's dispatcher, a router, and autograd's thread. It takes several times as
    long as calling the kernel's function, by a factor that differs between backends.

    Attributes:
        backend: its name.
        varlen: whether it is a call of `varlen_attn`, else of SDPA.
        direction: `"forward"` or `"backward"`.
        host_us: microseconds until the call returns, among other calls of the same autograd graph.
        compiled: whether the compiled call cache was in use.
        recorded: whether autograd recorded the call; a forward alone may have another path through torch.
        shape: the call's entry of `HOST_SHAPES`.
    """

    backend: str
    varlen: bool
    direction: str
    host_us: float
    compiled: bool = False
    recorded: bool = True
    shape: str = MANY

    @property
    def place(self) -> tuple[str, bool, str, bool, bool, str]:
        """Its key in a table."""
        return self.backend, self.varlen, self.direction, self.compiled, self.recorded, self.shape

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data."""
        return {**self._asdict(), "host_us": _rounded(self.host_us)}

    @classmethod
    def from_dict(cls, data: object, place: str = "") -> Front:
        """Return the host time of a row; `place` is the row's key in the file. Raises `Malformed`."""
        row = with_keys(data, cls._fields, place, "a host time")
        return cls(**_fields(row, cls._fields, place))


def _measured(data: object, place: str) -> Measured:
    row = checked(data, place, ("times of a backend, or wrong, or failed", is_dict))
    for trouble in ("wrong", "failed"):
        if trouble in row:
            return Measured(**_fields(with_keys(row, (trouble,), place), (trouble,), place))
    values = _fields(with_keys(row, TIMES, place), TIMES, place)
    if not values["gpu_us"]:
        raise Malformed(f"{place}.gpu_us: got 0, expected more")
    return Measured(**values)


# An expectation of a value, in words and as a condition.
Rule = tuple[str, Callable[[Any], object]]


def checked(value: Any, place: str, *rules: Rule) -> Any:
    """Return a value; raises `Malformed`, with its place in the file, if it breaks a rule."""
    for expected, is_met in rules:
        if not is_met(value):
            raise Malformed(f"{place}: got {short_repr(value)}, expected {expected}")
    return value


def with_keys(data: Any, names: Iterable[str], place: str, expected: str = "an object") -> dict[str, Any]:
    """Return data as a dict; raises `Malformed` unless it has exactly these keys."""
    if wrong := sorted(set(names).symmetric_difference(checked(data, place, (expected, is_dict)))):
        problem = "unknown key" if wrong[0] in data else "missing"
        raise Malformed(f"{place}.{wrong[0]}: {problem}".removeprefix("."))
    return dict(data)


def one_of(*names: str) -> Rule:
    """Return the rule that a value is among these names."""
    return " or ".join(names), lambda value: value in names


def is_dict(value: object) -> bool:
    """Whether a value is an object of JSON."""
    return isinstance(value, dict)


def _fields(row: Mapping[str, Any], names: Iterable[str], place: str) -> dict[str, Any]:
    """Return the values of a row, each checked by its rules."""
    values = {}
    for name in names:
        key, (convert, *rules) = f"{place}.{name}", _RULES[name]
        value = checked(row[name], key, *rules)
        for item in value if isinstance(value, list) else ():
            checked(item, key, *_ITEMS[name])
        values[name] = convert(value)
    return values


def _rounded(number: float) -> float:
    return float(f"{number:.5g}")


ANY_TEXT: Rule = ("a text", lambda value: isinstance(value, str))
_TEXT: Rule = ("a text", lambda value: isinstance(value, str) and value)
_TRUTH: Rule = ("true or false", lambda value: isinstance(value, bool))
_WHOLE: Rule = ("a whole number", lambda value: type(value) is int)  # True is an int, too
_COUNT = (int, _WHOLE, ("1 or more", lambda value: value >= 1))
_NUMBER: Rule = (
    "a number of 0 or more",
    lambda value: type(value) in (int, float) and isfinite(value) and value >= 0,
)

# By key: the conversion of a value, then the rules that it has to fulfil before.
_RULES: dict[str, tuple[Any, ...]] = {
    "direction": (str, one_of("forward", "backward")),
    "dtype": (str, one_of("float64", "float32", "bfloat16", "float16")),
    "mask": (str, one_of(*MASKS)),
    "varlen": (bool, _TRUTH),
    "compiled": (bool, _TRUTH),
    "recorded": (bool, _TRUTH),
    "shape": (str, one_of(*HOST_SHAPES)),
    "extras": (tuple, ("a list of names", lambda value: isinstance(value, list))),
    "window": (tuple, ("two whole numbers", lambda value: isinstance(value, list) and len(value) == 2)),
    **dict.fromkeys(("ratio", "head_dim", "head_dim_v", "batch", "max_q", "max_k"), _COUNT),
    **dict.fromkeys(("heads_q", "tokens_q", "tokens_k"), _COUNT),
    **dict.fromkeys(TIMES, (float, _NUMBER)),
    **dict.fromkeys(("backend", "wrong", "failed"), (str, _TEXT)),
}
_ITEMS: dict[str, tuple[Rule, ...]] = {
    "extras": (_TEXT,),
    "window": (_WHOLE, ("-1 or more", lambda value: value >= -1)),
}

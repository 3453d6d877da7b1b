"""The rows of a table and their JSON: `Point` (kernels at one size), `Front` (host times of whole calls)."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.tuning.kinds import MASKS, Kind, Size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Malformed(ValueError):  # noqa: N818 - its message becomes that of a ConfigError
    """The data has the wrong form; the message begins with the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of one backend at one point.

    Attributes:
        gpu_us: microseconds on the GPU, or in all on a CPU.
        host_us: microseconds until the call returns, the GPU still at work; 0 on a CPU.
        first_call_s: seconds of the first call of this shape: planning, compiling.
        error: the largest error divided by the largest allowed one.
        wrong: what is wrong with its results; empty if nothing is.
        failed: the exception that it raised; empty if none.
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
        return {
            "gpu_us": _rounded(self.gpu_us),
            "host_us": _rounded(self.host_us),
            "first_call_s": _rounded(self.first_call_s),
            "error": _rounded(self.error),
        }


@dataclass(frozen=True, slots=True)
class Point:
    """One kind of call at one size, and the result of each backend."""

    kind: Kind
    size: Size
    backends: Mapping[str, Measured]

    @property
    def place(self) -> tuple[Kind, Size]:
        """Its key in a table."""
        return self.kind, self.size

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data."""
        found = self.kind._asdict() | self.size._asdict()
        found |= {"extras": list(self.kind.extras), "window": list(self.size.window)}
        return found | {"backends": {name: one.to_dict() for name, one in self.backends.items()}}

    @classmethod
    def from_dict(cls, data: object) -> Point:
        """Return the point of a row.

        Raises:
            Malformed: the row isn't one of a point.
        """
        table = _of(data, dict, "", "a point")
        expected = {*Kind._fields, *Size._fields, "backends"}
        if wrong := sorted(expected.symmetric_difference(table)):
            raise Malformed(f"{wrong[0]}: {'missing' if wrong[0] in expected else 'unknown key'}")
        kind = Kind(**{name: _FIELDS[name](table[name], name) for name in Kind._fields})
        size = Size(**{name: _FIELDS[name](table[name], name) for name in Size._fields})
        backends = _of(table["backends"], dict, "backends", "the result of each backend")
        return cls(kind, size, {name: _measured(one, f"backends.{name}") for name, one in backends.items()})


class Front(NamedTuple):
    """The host time of one direction of a whole call through SDPA or `varlen_attn`, at any size.

    A whole call goes through torch's dispatcher, a router, and autograd's thread, which takes several times
    as long as calling the kernel's function, by a factor that differs between backends.

    Attributes:
        backend: its name.
        varlen: whether the call is one of `varlen_attn`, else of SDPA.
        direction: `"forward"` or `"backward"`.
        host_us: microseconds until the call returns, among other calls of one autograd graph.
        compiled: whether the compiled call cache was in use.
    """

    backend: str
    varlen: bool
    direction: str
    host_us: float
    compiled: bool = False

    @property
    def place(self) -> tuple[str, bool, str, bool]:
        """Its key in a table."""
        return self.backend, self.varlen, self.direction, self.compiled

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data."""
        return {**self._asdict(), "host_us": _rounded(self.host_us)}

    @classmethod
    def from_dict(cls, data: object) -> Front:
        """Return the host time of a row.

        Raises:
            Malformed: the row isn't one of a host time.
        """
        table = _of(data, dict, "", "a host time")
        table = {"compiled": False, **table}  # absent in tables that are older than the call cache
        if wrong := sorted(set(cls._fields).symmetric_difference(table)):
            raise Malformed(f"{wrong[0]}: {'missing' if wrong[0] in cls._fields else 'unknown key'}")
        return cls(
            _text(table["backend"], "backend"),
            _boolean(table["varlen"], "varlen"),
            _one_of("forward", "backward")(table["direction"], "direction"),
            _seconds(table["host_us"], "host_us"),
            _boolean(table["compiled"], "compiled"),
        )


def _measured(data: object, key: str) -> Measured:
    table = _of(data, dict, key, "times of a backend, or wrong, or failed")
    if "wrong" in table:
        return Measured(wrong=_text(table["wrong"], f"{key}.wrong"))
    if "failed" in table:
        return Measured(failed=_text(table["failed"], f"{key}.failed"))
    names = ("gpu_us", "host_us", "first_call_s", "error")
    if wrong := sorted(set(names).symmetric_difference(table)):
        raise Malformed(f"{key}.{wrong[0]}: {'missing' if wrong[0] in names else 'unknown key'}")
    found: dict[str, Any] = {name: _seconds(table[name], f"{key}.{name}") for name in names}
    if not found["gpu_us"]:
        raise Malformed(f"{key}.gpu_us: got 0, expected more")
    return Measured(**found)


def _of(value: object, kind: type, key: str, expected: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise Malformed(f"{key}{': ' if key else ''}got {value!r}, expected {expected}")
    return value


def _whole(least: int) -> Callable[[object, str], int]:
    def read(value: object, key: str) -> int:
        if _of(value, int, key, "a whole number") < least:
            raise Malformed(f"{key}: got {value}, expected {least} or more")
        return int(value)  # type: ignore[call-overload, no-any-return]

    return read


def _text(value: object, key: str) -> str:
    if not _of(value, str, key, "a text"):
        raise Malformed(f"{key}: got '', expected a text")
    return str(value)


def _one_of(*names: str) -> Callable[[object, str], str]:
    def read(value: object, key: str) -> str:
        if value not in names:
            raise Malformed(f"{key}: got {value!r}, expected {' or '.join(names)}")
        return str(value)

    return read


def _seconds(value: object, key: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not isfinite(value) or value < 0:  # type: ignore[arg-type, operator]
        raise Malformed(f"{key}: got {value!r}, expected a number of 0 or more")
    return float(value)  # type: ignore[arg-type]


def _names(value: object, key: str) -> tuple[str, ...]:
    return tuple(_text(name, key) for name in _of(value, list, key, "a list of names"))


def _bounds(value: object, key: str) -> tuple[int, int]:
    found = _of(value, list, key, "two whole numbers")
    if len(found) != 2:
        raise Malformed(f"{key}: got {value!r}, expected two whole numbers")
    return _whole(-1)(found[0], key), _whole(-1)(found[1], key)


def _boolean(value: object, key: str) -> bool:
    return bool(_of(value, bool, key, "true or false"))


def _rounded(number: float) -> float:
    return float(f"{number:.5g}")


_FIELDS: dict[str, Callable[[object, str], Any]] = {
    "direction": _one_of("forward", "backward"),
    "dtype": _one_of("float64", "float32", "bfloat16", "float16"),
    "mask": _one_of(*MASKS),
    "varlen": _boolean,
    "extras": _names,
    "window": _bounds,
    "ratio": _whole(1),
    **dict.fromkeys(("head_dim", "head_dim_v", "batch", "max_q", "max_k"), _whole(1)),
    **dict.fromkeys(("heads_q", "tokens_q", "tokens_k"), _whole(1)),
}

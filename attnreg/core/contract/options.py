"""The options of attention calls: a row each, from which all that handles options is derived.

A row has the value of a call without the option, and the option's capability. It has the words of the reason
against a backend without this capability. It also says which parts of attnreg run calls with the option.
`Call`, `AttentionSpec` and `Capabilities` have a typed field for each option that attnreg's own kernels read.

A row without such fields is complete as well. Its value is in `Call.further` and `AttentionSpec.further`. A
backend declares it by its name in `Capabilities.options`, and a kernel reads it as `call.<name>`.
`docs/adding-an-option.md` has an example.
"""

from __future__ import annotations

import operator
import reprlib
import sys
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from attnreg.errors import InvalidInputError, did_you_mean

Direction = Literal["forward", "backward"]

# The smallest normal float32. Kernels round a scale to float32, where one below this may be flushed to 0: it
# counts as 0 in `AttentionSpec.positive_scale`.
LEAST_SCALE = 2.0**-126

BOTH: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of attention calls.

    Attributes:
        name: its field of `Call`.
        values: "number", "integer", "tensor" or "function"; "pages" of a table whose spec has the size of a
            page.
        off: the value of a call without it; a whole number is kept as an int.
        reason: the reason against a backend that doesn't declare it; `{}` is the spec's value. None where a
            range of `Capabilities` decides, or where no reason is needed.
        label: how errors and `explain` show a call with it; `{}` is the spec's value.
        argument: its name in `varlen_attn`, as `name` unless given. None if `varlen_attn` has no such
            argument.
        field: its field of `AttentionSpec` and `Capabilities`, as `name` unless given.
        low, high, expected: the least and greatest number besides `off`, and the words for what is allowed.
        shapes, dtype: the shapes that its tensor may have, of B sequences and H heads of the query, and the
            dtype; empty where other code checks them.
        directions: the directions whose kernels get it.
        tied: whether a forward with dropout gets it as well, because one backend then runs both directions.
        gradient: whether the tensor has a gradient. Backwards return it after the gradient of the value.
        rescales: whether attnreg rescales the results of kernels that don't count it. No backend is refused
            for it: only times depend on it. A backward needs it for its own gradient alone.
        distance: how far times with it are from times without it (`times.kinds`); None if neither can replace
            the other.
        cached: whether the compiled call cache runs calls with it. Its tensor is given to launchers.
        in_op: its place among the options of the custom op that compiled programs, modes and subclasses
            call; 0 if the op doesn't have it. A new option comes last, because exported programs contain the
            op's schema. A function is in the op as text, which only compiled programs make.
        spread: whether calls with it can be spread over ranks.
    """

    name: str
    values: Literal["number", "integer", "tensor", "function", "pages"]
    off: float | None = None
    reason: str | None = None
    label: str = ""
    argument: str | None = ""
    field: str = ""
    low: float = -sys.float_info.max
    high: float = sys.float_info.max
    expected: str = "a number"
    shapes: tuple[str, ...] = ()
    dtype: str = ""
    directions: tuple[Direction, ...] = BOTH
    tied: bool = False
    gradient: bool = False
    rescales: bool = False
    distance: float | None = None
    cached: bool = False
    in_op: int = 0
    spread: bool = False

    def __post_init__(self) -> None:
        if self.argument == "":
            object.__setattr__(self, "argument", self.name)
        object.__setattr__(self, "field", self.field or self.name)
        if isinstance(self.off, float) and self.off.is_integer():
            # Dynamo takes a float of a module for a symbol in dynamic graphs, and compiles these twice.
            object.__setattr__(self, "off", int(self.off))
        if self.in_op and self.gradient and not self.rescales:
            raise ValueError(
                f"{self.name}: got in_op with gradient, expected one: the op has three gradients"
            )

    @property
    def is_tensor(self) -> bool:
        """Whether its value is a tensor."""
        return self.values in ("tensor", "pages")

    @property
    def keyed(self) -> str:
        """How plans are kept by it, in the words of `contract.backend.KEYED_BY`.

        A function comes with each call. No decision depends on which function it is, so nothing keeps it
        alive, and a function that is made anew for each call finds the plan.
        """
        if self.rescales or self.values == "function":
            return "presence"
        return "tensor" if self.is_tensor else "value"

    def reaches(self, direction: str, dropout: float) -> bool:
        """Whether kernels of a direction get it in a call with that dropout."""
        return direction in self.directions or (self.tied and dropout > 0.0)

    def is_on(self, value: object) -> bool:
        """Whether a value of `Call`'s field, or of the argument, means a call with the option."""
        if value is None or (self.off is None and self.values != "integer"):
            return value is not None
        try:
            # 0 of an integer leaves it to the kernel, too.
            return bool(value) if self.values == "integer" else bool(value != self.off)
        except (RuntimeError, ValueError):
            return True  # several numbers in place of one, which `checked` refuses

    def shapes_of(self, batch: int, heads: int) -> list[tuple[int, ...]]:
        """Return the shapes that its tensor may have in a call with so many sequences and query heads."""
        sizes = {"B": batch, "H": heads}
        return [tuple(sizes[letter] for letter in shape) for shape in self.shapes]

    def described(self, value: Any) -> Any:
        """Return the value of `AttentionSpec`'s field: of a tensor or function only whether there is one."""
        return value is not None if self.values in ("tensor", "function") else value

    def got(self, value: Any) -> str:
        """Return what errors say that was got."""
        if self.is_tensor:
            return "a tensor"
        return "a function" if self.values == "function" else reprlib.repr(value)

    @property
    def off_in_spec(self) -> object:
        """The value of `AttentionSpec`'s field for a call without the option."""
        return False if self.values in ("tensor", "function") else self.off

    def is_on_in(self, spec: Any) -> bool:
        """Whether a spec is of a call with the option."""
        value: bool = getattr(spec, self.field) != self.off_in_spec
        return value

    def checked(self, value: Any) -> Any:
        """Return a number as Python's own.

        Raises:
            InvalidInputError: it is no number, or out of range, or a tensor that needs a gradient; or it
                isn't the function that was expected.
        """
        if self.is_tensor or value is self.off:
            return value
        if self.values == "function":
            if not callable(value):
                raise self._wrong(value)
            return value
        number = self.number(value)
        if number != self.off and not self.low <= number <= self.high:
            raise self._wrong(value)
        return number

    def number(self, value: Any) -> float:
        """Return a number as Python's own, whatever its range.

        Raises:
            InvalidInputError: it is no number, or a tensor that needs a gradient.
        """
        # Dynamo can't look for attributes of a number that it traces.
        if not isinstance(value, (int, float)) and getattr(value, "requires_grad", False):
            raise InvalidInputError(
                f"{self.argument or self.name}: got a tensor that needs a gradient, expected a number, as it "
                "gets none"
            )
        try:
            if self.values == "integer":
                return operator.index(value)
            if not isinstance(value, str):
                return float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
        raise self._wrong(value)

    def _wrong(self, value: Any) -> InvalidInputError:
        return InvalidInputError(f"{self.argument or self.name}: got {value!r}, expected {self.expected}")


OPTIONS: tuple[Option, ...] = (
    Option(
        name="dropout", argument="dropout_p", values="number", off=0, low=0.0, high=1.0, expected="0 to 1",
        reason="dropout_p must be 0, got {}", label="dropout {}",
    ),
    Option(
        # Kernels read a mask in different ways, which times without one don't have.
        name="attn_bias", field="bias", argument=None, values="tensor", distance=1.0,
        reason="attn_bias must be None, got a tensor", label="attn_bias",
    ),
    Option(
        name="bias_gradient", argument=None, values="integer", off=0, low=0, high=1, expected="0 or 1",
        directions=("backward",), tied=True,
        reason="attn_bias must need no gradient", label="gradient of attn_bias",
    ),
    Option(
        name="alibi_slopes", field="alibi", values="tensor", shapes=("H", "BH"), dtype="float32", in_op=6,
        reason="alibi_slopes must be None, got a tensor", label="alibi",
    ),
    Option(
        name="seqused_k", values="tensor", in_op=1, cached=True,
        reason="seqused_k must be None, got a tensor", label="seqused_k",
    ),
    Option(
        # `Capabilities.page_size` is a range of page sizes, so that no row's reason is needed.
        name="block_table", field="page_size", values="pages", in_op=2, label="pages of {}", cached=True,
    ),
    Option(
        name="key_ranges", values="tensor", in_op=8,
        reason="key_ranges must be None, got a tensor", label="key_ranges",
    ),
    Option(
        name="score_mod", values="function", in_op=9, label="score_mod",
        expected="a function of (score, batch, head, query, key)",
        reason="score_mod must be None, got a function",
    ),
    Option(
        name="mask_mod", values="function", in_op=10, label="mask_mod",
        expected="a function of (batch, head, query, key)", reason="mask_mod must be None, got a function",
    ),
    Option(
        name="num_splits", values="integer", low=0, expected="an integer of 0 or more", in_op=3,
        directions=("forward",),
        reason="num_splits must be None, got {}", label="num_splits {}",
    ),
    Option(
        name="softcap", values="number", off=0, low=LEAST_SCALE, high=1.0 / LEAST_SCALE, in_op=4,
        expected="0 for none, or a number above 0 that float32 can hold", spread=True,
        reason="softcap must be 0, got {}", label="softcap {}",
    ),
    Option(
        name="grad_lse", argument=None, values="tensor", in_op=5, directions=("backward",),
        reason="grad_lse must be None, got a tensor: no gradient of the LSE", label="gradient of the LSE",
    ),
    Option(
        name="sinks", values="tensor", gradient=True, rescales=True, distance=0.05, cached=True, in_op=7,
        spread=True,
        reason="sinks must be None, got a tensor: they are counted after the kernel", label="sinks",
    ),
)  # fmt: skip


# The names that arguments have in SDPA, flash-attn and transformers, and the argument of `varlen_attn`.
OTHER_NAMES = {
    "causal": "is_causal", "softmax_scale": "scale", "attn_mask": "key_ranges", "s_aux": "sinks",
}  # fmt: skip

# Arguments of `varlen_attn` and `explain` with defaults, which are no options.
ARGUMENTS = ("is_causal", "return_aux", "scale", "window_size", "enable_gqa", "backend")


def options_of(arguments: Mapping[str, Any], function: str = "varlen_attn") -> dict[str, Any]:
    """Return the options of a call of a function by their names, without options that are off.

    Raises:
        TypeError: the function has no such argument.
        InvalidInputError: a number is out of range.
    """
    rows = {row.argument: row for row in OPTIONS if row.argument}
    for argument in arguments:
        if argument not in rows:
            known = OTHER_NAMES.get(argument)
            near = did_you_mean(argument, (*rows, *ARGUMENTS))
            hint = f"; did you mean {known!r}?" if known else near
            raise TypeError(f"{function}() got an unexpected keyword argument {argument!r}{hint}")
    return {
        rows[argument].name: rows[argument].checked(value)
        for argument, value in arguments.items()
        if rows[argument].is_on(value)
    }


def checked_further(further: Any, own: Container[str]) -> tuple[tuple[str, Any], ...]:
    """Return a spec's options without fields of their own, sorted by name, without options that are off.

    Args:
        further: a mapping, or pairs of names and values.
        own: the names that are fields of the spec.

    Raises:
        InvalidInputError: it is no mapping and no pairs, there is no such option, or a value can't be hashed.
    """
    rows = {row.field: row for row in OPTIONS if row.field not in own}
    try:
        values = dict(further)
        hash(tuple(values.items()))
    except (TypeError, ValueError):
        expected = "a mapping of options to values that can be hashed"
        raise InvalidInputError(f"further: got {further!r}, expected {expected}") from None
    for name in values:
        if name not in rows:
            raise InvalidInputError(f"further: there is no option {name!r}{did_you_mean(str(name), rows)}")
    return tuple(sorted((name, value) for name, value in values.items() if value != rows[name].off_in_spec))


def further_value(name: str, further: tuple[tuple[str, Any], ...], of_spec: bool = False) -> Any:
    """Return the value of an option without a field of its own; AttributeError if there is no such option."""
    for known, value in further:
        if known == name:
            return value
    row = next((row for row in OPTIONS if name == (row.field if of_spec else row.name)), None)
    if row is None:
        raise AttributeError(name)
    return row.off_in_spec if of_spec else row.off


def options_on(call: Any) -> Iterator[Option]:
    """Yield the options of a `Call`."""
    return (row for row in OPTIONS if row.is_on(getattr(call, row.name)))

"""An attention call without its tensors.

Selection reads an `AttentionSpec` instead of tensors: capabilities turn it into reasons, `explain` prints it,
and tests build it for hardware that isn't there. `Device` is the device of the call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnreg.core.contract.options import (
    LEAST_SCALE,
    OPTIONS,
    Direction,
    Option,
    checked_further,
    further_value,
)
from attnreg.core.settings.other_names import device_meant
from attnreg.errors import InvalidInputError

__all__ = ["LEAST_SCALE", "AttentionSpec", "Device", "Direction", "canonical_dtype", "directions_of"]

UNBOUNDED = (-1, -1)

# The lengths of a call. All else of a spec is its kind.
LENGTHS = ("batch", "max_q", "max_k", "tokens_q", "tokens_k", "ranges")

# A length that every backend can run if it can run any.
USUAL = 1024

# Query rows of a key head, of all its query heads, below which a call with a cache decodes.
FEW_ROWS = 1024

# The minimum of each number; None means that the call doesn't have it.
LEAST = {
    **dict.fromkeys(("batch", "max_q", "max_k", "heads_q", "heads_k", "head_dim", "head_dim_v", "ranges"), 0),
    "page_size": 1,
    "num_splits": 0,
}

_DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}


def canonical_dtype(dtype: object) -> str:
    """Return the name of a dtype: `"bfloat16"` for `torch.bfloat16`, `"bf16"` and `"bfloat16"`."""
    name = str(dtype).removeprefix("torch.").lower()
    return _DTYPE_ALIASES.get(name, name)


@dataclass(frozen=True, slots=True)
class Device:
    """A device as selection sees it: its type and, for CUDA, its compute capability.

    `capability` is None where it isn't known ("cuda" on a machine without a GPU) or doesn't exist.
    A `simulated` device needn't be in this machine: `explain` takes one to show its decisions.
    """

    type: str
    capability: tuple[int, int] | None = None
    index: int | None = None
    name: str = ""
    simulated: bool = False

    @classmethod
    def parse(cls, text: str) -> Device:
        """Read `"cpu"`, `"cuda"`, `"cuda:1"` or a simulated GPU such as `"sm_90"`."""
        name = text.strip().lower() if isinstance(text, str) else ""
        if arch := re.fullmatch(r"sm_?(\d+)(\d)[af]?", name):
            return cls("cuda", (int(arch[1]), int(arch[2])), simulated=True)
        if plain := re.fullmatch(r"([a-z]+)(?::(\d+))?", name):
            return cls(plain[1], index=None if plain[2] is None else int(plain[2]))
        near = device_meant(name, ())
        raise InvalidInputError(f"device: got {text!r}, expected 'cpu', 'cuda', 'cuda:N' or 'sm_NN'{near}")

    @property
    def arch(self) -> str:
        """`"sm_90"` where the compute capability is known, else an empty string."""
        return "" if self.capability is None else f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def keys(self) -> tuple[str, ...]:
        """The settings keys that apply to this device, the most specific first."""
        return (self.arch, self.type) if self.arch else (self.type,)

    @property
    def place(self) -> str:
        """What torch calls it: `"cuda:1"`, or `"cuda"` without an index."""
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def __str__(self) -> str:
        arch = f"simulated {self.arch}" if self.simulated else self.arch
        details = ", ".join(part for part in (self.name, arch) if part)
        return f"{self.place} ({details})" if details else self.place


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One attention call, as far as the choice of a kernel depends on it.

    Lengths count tokens. No sequence of the batch is longer than `max_q` and `max_k` (each has that length
    where the batch is dense); `tokens_q` and `tokens_k` the packed totals, `batch * max`
    unless given. `ranges` is how many `key_ranges` a query has, 0 in a call without. `window` is (left,
    right) in tokens, -1 unbounded, aligned bottom-right; `(-1, 0)` is causal. `dtype` takes a `torch.dtype`
    or any usual name of one. `further` has the options without a field of their own (`contract.options`), as
    pairs or a mapping; each is read as an attribute.

    Raises:
        InvalidInputError: a number is out of range, `heads_q` isn't a multiple of `heads_k`, the device is no
            `Device`, or `further` has an option that doesn't exist.
    """

    device: Device
    dtype: str
    batch: int
    max_q: int
    max_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    tokens_q: int = -1
    tokens_k: int = -1
    ranges: int = 0
    varlen: bool = False
    window: tuple[int, int] = UNBOUNDED
    dropout: float = 0.0
    bias: bool = False
    alibi: bool = False
    seqused_k: bool = False
    page_size: int | None = None
    num_splits: int | None = None
    positive_scale: bool = True
    softcap: float = 0.0
    grad_lse: bool = False
    sinks: bool = False
    key_ranges: bool = False
    score_mod: bool = False
    mask_mod: bool = False
    bias_gradient: bool = False
    needs_backward: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    capturing: bool = False
    further: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.device, Device):
            raise InvalidInputError(
                f"device: got {self.device!r}, expected a Device, as Device.parse({str(self.device)!r}) gives"
            )
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        object.__setattr__(self, "window", tuple(self.window))
        for field, least in LEAST.items():
            number = getattr(self, field)
            is_left_out = number is None and self.__dataclass_fields__[field].default is None
            if not is_left_out and (not isinstance(number, int) or number < least):
                raise InvalidInputError(f"{field}: got {number!r}, expected an integer of {least} or more")
        if len(self.window) != 2 or min(self.window) < -1:
            expected = "(left, right), integers of -1 or more"
            raise InvalidInputError(f"window: got {self.window}, expected {expected}")
        if self.tokens_q < 0:
            object.__setattr__(self, "tokens_q", self.batch * self.max_q)
        if self.tokens_k < 0:
            object.__setattr__(self, "tokens_k", self.batch * self.max_k)
        if not self.key_ranges:
            object.__setattr__(self, "ranges", 0)
        if self.heads_k == 0 or self.heads_q % self.heads_k:
            raise InvalidInputError(
                f"heads: got {self.heads_q} for the query and {self.heads_k} for the key, "
                "expected the first to be a multiple of the second"
            )
        further = checked_further(self.further, self.__dataclass_fields__)
        object.__setattr__(self, "further", further)
        for option in OPTIONS:
            if option.values == "number":
                option.checked(getattr(self, option.field))

    def but(self, **changes: Any) -> AttentionSpec:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    @property
    def decodes(self) -> bool:
        """Whether few queries see a cache of which not all keys count: below `FEW_ROWS` for each key head."""
        counts = self.seqused_k and self.page_size is None
        return counts and self.max_q * self.heads_q < FEW_ROWS * self.heads_k

    @property
    def options(self) -> list[Option]:
        """The options that the call has."""
        further = dict(self.further)
        return [
            row
            for row, name, off, is_own in _ROWS
            if (getattr(self, name) != off if is_own else name in further)
        ]

    @property
    def gives_sinks(self) -> bool:
        """Whether a kernel that counts sinks may get the call's sinks; else all results are rescaled.

        Not if results have to have the same bits, because nobody has checked that with sinks.
        """
        has_to_repeat = self.deterministic or self.batch_invariant
        return self.sinks and self.varlen and not (has_to_repeat or self.grad_lse or self.dropout > 0.0)

    @property
    def unscaled(self) -> AttentionSpec:
        """The spec without options that results are rescaled for: a backend that runs it runs this call."""
        rescaled = [row for row in self.options if row.rescales]
        return self.without(*rescaled) if rescaled else self

    def of(self, direction: str) -> AttentionSpec:
        """Return the spec of one direction, without options that only the opposite direction has.

        It has no sinks where no kernel gets them. In a capture kernels get none, because it isn't known that
        every row sees a key. With a gradient of the LSE they get none either, because the program then gets
        the LSE.
        """
        if self.sinks and (self.capturing or self.grad_lse):
            return self.unscaled.of(direction)
        others = [row for row in self.options if not row.reaches(direction, self.dropout)]
        return self.without(*others) if others else self

    def without(self, *options: Option) -> AttentionSpec:
        """Return the spec of the same call without some of its options."""
        names = {row.field for row in options}
        own = {row.field: row.off_in_spec for row in options if row.field in self.__dataclass_fields__}
        return self.but(**own, further=tuple(pair for pair in self.further if pair[0] not in names))

    def of_any_batch(self) -> AttentionSpec:
        """Return a usual call with the same dtype, head dims, mask and options.

        Whether a gradient will be wanted, or a CUDA graph is captured, is left out, too.
        """
        return replace(
            self, batch=1, max_q=USUAL, max_k=USUAL, tokens_q=USUAL, tokens_k=USUAL, ranges=1,
            heads_q=self.heads_q // self.heads_k, heads_k=1, needs_backward=False, capturing=False,
        )  # fmt: skip

    @property
    def empty(self) -> bool:
        """Whether no query sees a key, as there are none of one of them: all results are zeros."""
        return not (self.batch and self.tokens_q and self.tokens_k)

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key (bottom-right aligned)."""
        return self.window[1] == 0

    @property
    def windowed(self) -> bool:
        """Whether the mask is a window other than plain causal."""
        return self.window[0] >= 0 or self.window[1] > 0

    def __str__(self) -> str:
        """Return the input line of errors and `explain`: shapes, dtype and options."""
        rows_q = (self.tokens_q,) if self.varlen else (self.batch, self.max_q)
        rows_k = (self.tokens_k,) if self.varlen else (self.batch, self.max_k)
        query = (*rows_q, self.heads_q, self.head_dim)
        key = (*rows_k, self.heads_k, self.head_dim)
        value = (*rows_k, self.heads_k, self.head_dim_v)
        shapes = f"query {query} · key {key} · value {value} · {self.dtype}"
        return " · ".join([shapes, *self.flags()])

    def flags(self) -> list[str]:
        """Return what a call has besides shapes and dtype, as the input line has it."""
        sequences = "1 sequence" if self.batch == 1 else f"{self.batch} sequences"
        shown = {
            f"packed, {sequences} up to {self.max_q} x {self.max_k}": self.varlen,
            "causal": self.causal and not self.windowed,
            f"window {self.window}": self.windowed,
            **{row.label.format(getattr(self, row.field)): row.is_on_in(self) for row in OPTIONS},
            "scale 0 or below": not self.positive_scale,
            "needs grad": self.needs_backward,
            "deterministic": self.deterministic,
            "batch-invariant": self.batch_invariant,
            "in a CUDA graph": self.capturing,
        }
        return [text for text, on in shown.items() if on]


def arguments_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options, by their fields, as arguments of an `AttentionSpec`: by `further` what has no field."""
    own = {name: value for name, value in options.items() if name in AttentionSpec.__dataclass_fields__}
    return own | {"further": {name: options[name] for name in options.keys() - own.keys()}}


def _option(spec: AttentionSpec, name: str) -> Any:
    """Return the value of an option that has no field."""
    try:
        return further_value(name, object.__getattribute__(spec, "further"), of_spec=True)
    except AttributeError:
        raise AttributeError(f"AttentionSpec has no attribute {name!r}") from None


# Decisions ask for the options of a spec a dozen times.
_ROWS = [
    (row, row.field, row.off_in_spec, row.field in AttentionSpec.__dataclass_fields__) for row in OPTIONS
]

# Not in the class, where a type checker would take any name for an attribute.
AttentionSpec.__getattr__ = _option  # type: ignore[attr-defined]


def directions_of(spec: AttentionSpec) -> tuple[Direction, ...]:
    """Return the directions that kernels run a call in: also backward where its gradient is wanted."""
    return ("forward", "backward") if spec.needs_backward else ("forward",)

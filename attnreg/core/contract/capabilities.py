"""What a backend can run, as data, and the one function that turns the data into reasons.

A limit is a field. What no field can express goes into a function, `Backend.refuses` or `refuses`. It returns
reasons of the same form: lower case, no full stop, subject first, what was expected and what was got.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

from attnreg.core.contract.lengths import Cut
from attnreg.core.contract.options import OPTIONS, Option
from attnreg.core.contract.spec import AttentionSpec, Device
from attnreg.errors import RegistrationError

__all__ = ["ANY_SIZE", "GRID", "Capabilities", "Range", "one_line", "one_of"]


UNLIMITED = 2**31 - 1


class Range(NamedTuple):
    """The whole numbers from `low` to `high`, both included, that are multiples of `step`."""

    low: int
    high: int = UNLIMITED
    step: int = 1

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self.low <= number <= self.high and number % self.step == 0

    def __str__(self) -> str:
        steps = f" in steps of {self.step}" if self.step > 1 else ""
        if self.high < UNLIMITED:
            return f"{self.low} to {self.high}{steps}"
        if self.step == 1:
            return f"{self.low} or more"
        return f"a multiple of {self.step}" + (f" from {self.low}" if self.low > self.step else "")


ANY_SIZE = Range(0)

# The maximum of the second and third dimension of a CUDA grid: https://docs.nvidia.com/cuda/cuda-c-programming-guide
GRID = 65535

# Torch's names. A package may add a device type to torch, by renaming "privateuseone".
DTYPES = (
    "float16", "bfloat16", "float32", "float64",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
)  # fmt: skip
# How the reason against a backend begins that serves no device of the call's type.
OTHER_DEVICE = "device must be "
DEVICES = (
    "cpu", "cuda", "mps", "xpu", "hpu", "mtia", "npu", "xla", "maia", "vulkan", "privateuseone", "meta",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The calls that one direction (forward or backward) of a backend can run.

    Attributes:
        devices: device types as torch names them, for example `("cuda",)`.
        dtypes: floating-point dtypes as torch names them, for example `("float16", "bfloat16")`.
        compute_capability: lowest and highest CUDA compute capability, both included; None for any.
        head_dim: head dims of query and key. Others are padded with zeros to a multiple of 8 if that is among
            them, but in pages (`adaptation.padded_dims`).
        head_dim_v: head dims of the value, likewise; None if it must equal the head dim of query and key.
        page_size: page sizes of a paged key-value cache; None if it can't read one.
        batch, heads: numbers of sequences and query heads. Many kernels map them to a dimension of their CUDA
            grid, which `GRID` limits.
        ranges: how many `key_ranges` a query may have.
        options: names of the options that it runs and that have no field here: see `contract.options`.
        refuses: returns what else it can't run, as `Backend.refuses` does for both directions. It is asked
            only about calls that the other fields accept.

    The booleans say whether it accepts dense and packed (`varlen`) tensors; fewer key than query heads
    (`gqa`); a causal mask; a sliding `window`; `dropout`; an additive or boolean `bias`; `alibi` slopes;
    `seqused_k`; `key_ranges`; a `score_mod`; a `mask_mod`; a given number of splits (`num_splits`); a
    `softcap`; a scale of 0 or below (`any_scale`); in a backward a gradient of the LSE (`grad_lse`); the
    gradient of a bias (`bias_gradient`). `delta_from_out` is for backwards without `grad_lse`: they compute
    delta as rowsum(grad_out * out), from the output that they get. So they can get the gradient of the LSE in
    further columns (`adaptation.lse_columns`). `sinks` says whether it counts the sinks of packed calls
    itself. If not, results are rescaled, and no call is refused. `deterministic` says whether its results are
    bitwise repeatable. `batch_invariant` says whether it is batch-invariant if a call asks for that: the bits
    of a sequence's results depend on no further sequence. `capture` says whether a CUDA graph can capture it.

    Raises:
        RegistrationError: a field has the wrong type, or a name that torch doesn't have; the message says
            which field.
    """

    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    compute_capability: tuple[tuple[int, int], tuple[int, int]] | None = None
    head_dim: Range = ANY_SIZE
    head_dim_v: Range | None = None
    page_size: Range | None = None
    batch: Range = ANY_SIZE
    heads: Range = ANY_SIZE
    ranges: Range = ANY_SIZE
    options: tuple[str, ...] = ()
    refuses: Callable[[AttentionSpec], Iterable[str]] | None = None
    dense: bool = True
    varlen: bool = False
    gqa: bool = False
    causal: bool = False
    window: bool = False
    dropout: bool = False
    bias: bool = False
    alibi: bool = False
    seqused_k: bool = False
    num_splits: bool = False
    any_scale: bool = False
    softcap: bool = False
    grad_lse: bool = False
    delta_from_out: bool = False
    sinks: bool = False
    key_ranges: bool = False
    score_mod: bool = False
    mask_mod: bool = False
    bias_gradient: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    capture: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if problem := _badly_typed(field.name, value):
                raise RegistrationError(f"Capabilities.{field.name}: got {value!r}, expected {problem}")

    def unsupported(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Return every reason why the backend can't run `spec`; empty if it can."""
        return self.against(spec) or reasons_of(self.refuses, spec)

    def against(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Return every reason of the fields against `spec`, without what `refuses` says."""
        of_device = tuple(self.against_device(spec.device))
        if spec.device.type not in self.devices:
            return of_device  # further reasons would be about a device that this backend doesn't serve
        return *of_device, *self._limits(spec), *self._switches(spec)

    def against_device(self, device: Device) -> Iterator[str]:
        """Yield the reason why the backend runs no call on a device; none if it may run some."""
        got = device.capability
        if device.type not in self.devices:
            yield f"{OTHER_DEVICE}{one_of(self.devices)}, got {device.type}"
        elif self.compute_capability is not None and got is not None:
            low, high = self.compute_capability
            if not low <= got <= high:
                expected = _dotted(low) if low == high else f"{_dotted(low)} to {_dotted(high)}"
                side = "old" if got < low else "new"
                yield f"compute capability must be {expected}, got {_dotted(got)} (too {side})"

    def runs(self, option: Option) -> bool:
        """Whether calls with an option are declared."""
        if option.field in self.__dataclass_fields__:
            return bool(getattr(self, option.field))
        return option.name in self.options

    def of_lengths(self, spec: AttentionSpec) -> dict[str, Range]:
        """Return the limits of lengths that calls of a spec's kind may be beyond."""
        limits = {"batch": self.batch, "ranges": self.ranges if spec.key_ranges else ANY_SIZE}
        return {name: allowed for name, allowed in limits.items() if allowed != ANY_SIZE}

    def cuts(self, spec: AttentionSpec) -> tuple[Cut, ...]:
        """Return where the limits of lengths lie; none of a range in steps, which no cut can say."""
        limits = [(name, *allowed) for name, allowed in self.of_lengths(spec).items()]
        return tuple(
            Cut.of(name, at=at) for name, low, high, step in limits if step == 1 for at in (low, high + 1)
        )

    def has_dims(self, spec: AttentionSpec) -> bool:
        """Whether each head dim of `spec` is declared; the value's maybe not together with the query's."""
        of_values = self.head_dim if self.head_dim_v is None else self.head_dim_v
        return spec.head_dim in self.head_dim and spec.head_dim_v in of_values

    def against_dims(self, spec: AttentionSpec) -> Iterator[str]:
        """Yield every reason against the head dims of `spec`."""
        if spec.head_dim not in self.head_dim:
            yield f"head_dim must be {self.head_dim}, got {spec.head_dim}"
        if self.head_dim_v is None and spec.head_dim_v != spec.head_dim:
            yield f"head_dim of the value must be that of the query, {spec.head_dim}, got {spec.head_dim_v}"
        if self.head_dim_v is not None and spec.head_dim_v not in self.head_dim_v:
            yield f"head_dim of the value must be {self.head_dim_v}, got {spec.head_dim_v}"

    def _limits(self, spec: AttentionSpec) -> Iterator[str]:
        if spec.dtype not in self.dtypes:
            yield f"dtype must be {one_of(self.dtypes)}, got {spec.dtype}"
        yield from self.against_dims(spec)
        if spec.page_size is not None and self.page_size is None:
            yield "block_table must be None: no paged key-value cache"
        if spec.page_size is not None and self.page_size is not None and spec.page_size not in self.page_size:
            yield f"page size must be {self.page_size}, got {spec.page_size}"
        # Of lengths none is read that isn't limited: see `reads_of`.
        if self.batch != ANY_SIZE and spec.batch not in self.batch:
            yield f"batch must be {self.batch}, got {spec.batch}"
        if spec.key_ranges and self.ranges != ANY_SIZE and spec.ranges not in self.ranges:
            yield f"key_ranges must have {self.ranges} ranges a query, got {spec.ranges}"
        if spec.heads_q not in self.heads:
            yield f"query heads must be {self.heads}, got {spec.heads_q}"

    def _switches(self, spec: AttentionSpec) -> Iterator[str]:
        q, k = spec.heads_q, spec.heads_k
        not_deterministic = "not deterministic, and deterministic algorithms are on"
        not_invariant = "not batch-invariant, and policy is batch_invariant"
        no_mask = f"dropout_p must be 0 where policy is batch_invariant, got {spec.dropout}"
        for requested, supported, reason in (
            (spec.varlen, self.varlen, "input must be dense, got packed"),
            (not spec.varlen, self.dense, "input must be packed, got dense"),
            (q != k, self.gqa, f"query and key must have the same number of heads, got {q} and {k}"),
            (spec.causal, self.causal, "is_causal must be False, got True"),
            (spec.windowed, self.window, f"window_size must be (-1, -1) or causal, got {spec.window}"),
            (not spec.positive_scale, self.any_scale, "scale must be above 0"),
            *(
                (True, self.runs(row), row.reason.format(getattr(spec, row.field)))
                for row in spec.options
                if row.reason is not None
            ),
            (spec.deterministic, self.deterministic, not_deterministic),
            (spec.batch_invariant, self.batch_invariant, not_invariant),
            (spec.batch_invariant and spec.dropout > 0.0, False, no_mask),
            (spec.capturing, self.capture, "can't be recorded in a CUDA graph"),
        ):
            if requested and not supported:
                yield reason


def reasons_of(
    refuses: Callable[[AttentionSpec], Iterable[str]] | None, spec: AttentionSpec
) -> tuple[str, ...]:
    """Return the reasons of a function `refuses`, which may be missing; a TypeError if they are none."""
    if refuses is None:
        return ()
    returned = refuses(spec)
    # As a sequence, each letter of a text would be a reason.
    is_sequence = isinstance(returned, Iterable) and not isinstance(returned, str)
    reasons = tuple(returned) if is_sequence else ()
    if not is_sequence or not all(isinstance(reason, str) for reason in reasons):
        raise TypeError(f"refuses() returned {returned!r}, expected a tuple of reasons")
    return reasons


def one_line(reasons: Iterable[str]) -> str:
    """Return reasons as one line, for logs and for sentences about one backend."""
    # The text of an exception may have lines.
    return "; ".join(" ".join(reason.split()) for reason in reasons)


def _badly_typed(name: str, value: object) -> str:
    """Return what was expected of the field, or an empty string."""
    if name in ("devices", "dtypes"):
        if not (isinstance(value, tuple) and value and all(isinstance(item, str) for item in value)):
            return "a non-empty tuple of names"
        known, exists = (DEVICES, _is_device) if name == "devices" else (DTYPES, DTYPES.__contains__)
        return "" if all(map(exists, value)) else f"torch's own names: {', '.join(known)}"
    if name == "options":
        return _expected_options(value)
    if name == "refuses":
        return "" if value is None or callable(value) else "a function or None"
    if name == "compute_capability":
        return (
            ""
            if value is None or _is_version_range(value)
            else "((major, minor), (major, minor)), the lowest first, or None"
        )
    if name in ("head_dim", "head_dim_v", "page_size", "batch", "heads", "ranges"):
        optional = value is None and name in ("head_dim_v", "page_size")
        return (
            ""
            if optional or _is_range(value)
            else "a Range of whole numbers from low to high, its step 1 or more"
        )
    return "" if isinstance(value, bool) else "True or False"


def _expected_options(value: object) -> str:
    """Return what was expected of `options`: options with a field are declared by that field alone."""
    names = value if isinstance(value, tuple) else (None,)
    without_field = [row.name for row in OPTIONS if row.field not in Capabilities.__dataclass_fields__]
    for row in OPTIONS:
        if row.name in names and row.name not in without_field:
            declared = "Range(...)" if row.values == "pages" else "True"
            return f"{row.field}={declared} in place of {row.name!r}, which has a field"
    if all(name in without_field for name in names):
        return ""
    return f"a tuple of options without a field: {', '.join(without_field) or 'there are none'}"


def _is_device(name: str) -> bool:
    """Whether torch has a device type of that name; one that a package adds has to be there already."""
    if name in DEVICES:
        return True
    torch = sys.modules.get("torch")  # limits are declared without importing it
    try:
        return torch is not None and torch.device(name).type == name
    except RuntimeError:
        return False


def _is_range(value: object) -> bool:
    return isinstance(value, Range) and _are_whole(value) and value.low <= value.high and value.step > 0


def _is_version_range(value: object) -> bool:
    pairs = value if isinstance(value, tuple) else ()
    are_versions = all(isinstance(end, tuple) and len(end) == 2 and _are_whole(end) for end in pairs)
    return len(pairs) == 2 and are_versions and pairs[0] <= pairs[1]


def _are_whole(numbers: tuple[object, ...]) -> bool:
    return all(isinstance(number, int) for number in numbers)


def one_of(names: tuple[str, ...]) -> str:
    """Return names as a sentence lists them: `a, b or c`."""
    return " or ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"

"""A distributed call: the check of its arguments, and the fields that have to be equal on all ranks."""

from __future__ import annotations

import functools
import hashlib
import operator
import reprlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.core.contract.backend import Call
from attnreg.core.contract.lengths import bounds
from attnreg.core.contract.options import OPTIONS
from attnreg.core.contract.spec import AttentionSpec, canonical_dtype
from attnreg.core.dispatch import scope
from attnreg.core.dispatch.calls import decided, decisions, wants_gradient
from attnreg.core.dispatch.planning import device_of, spec_of
from attnreg.core.dispatch.state import state
from attnreg.core.launching.validation import check_scale, checked_number
from attnreg.core.selection.render import refuse
from attnreg.core.varlen.plans import check_sinks, window
from attnreg.errors import InvalidInputError, UnsupportedInputError
from attnreg.parallel.estimates import CallShape
from attnreg.parallel.layout import Layout
from attnreg.parallel.stepwise import KernelOptions
from attnreg.tools.explanation import explain


class Arguments(NamedTuple):
    """The arguments of `varlen_attn` that a distributed call supports, except query, key and value."""

    is_causal: bool
    window_size: Sequence[int] | None
    scale: float | None
    enable_gqa: bool
    softcap: float
    sinks: Tensor | None
    with_lse: bool
    backend: str | None


class SpreadKind(NamedTuple):
    """The fields that calls of one kind share; a call runs only if they are equal on all ranks."""

    shape: CallShape
    window: tuple[int, int]
    dtype: str
    device: str
    scale: float | None
    softcap: float
    sinks: bool
    with_lse: bool
    gradients: tuple[bool, bool, bool]
    backend: str


def kind_of(query: Tensor, key: Tensor, value: Tensor, arguments: Arguments, longest: int) -> SpreadKind:
    """Return the kind of a call whose tensors have passed `check_tensors`.

    Query, key and value are (rows, H, D), (rows, H_k, D) and (rows, H_k, D_v), in one floating-point dtype.
    `longest` is the longest document, in tokens.

    Raises:
        InvalidInputError: the scale, an option or the window is wrong.
        UnknownBackendError: no backend has the name that the call asks for.
        BackendUnavailableError: that backend can't load here.
    """
    bound = bounds(window(arguments.window_size, arguments.is_causal), False, longest, longest)
    shape = CallShape(
        query.shape[1], key.shape[1], query.shape[2], value.shape[2], query.element_size(),
        wants_gradient(query, key, value),
    )  # fmt: skip
    # As a number: tensors compare as objects, so each would make another kind.
    check_scale(1.0 if arguments.scale is None else arguments.scale)
    scale = None if arguments.scale is None else float(arguments.scale)
    softcap = checked_number("softcap", arguments.softcap) if arguments.softcap else 0.0
    chosen = scope.current() if arguments.backend is None else scope.exclusive(arguments.backend)
    backends = "any" if chosen is None or chosen.preference is None else " or ".join(chosen.preference.names)
    gradients = query.requires_grad, key.requires_grad, value.requires_grad
    return SpreadKind(
        shape, bound, canonical_dtype(query.dtype), query.device.type, scale, softcap,
        arguments.sinks is not None, arguments.with_lse, gradients, backends,
    )  # fmt: skip


def check_tensors(query: Tensor, key: Tensor, value: Tensor, arguments: Arguments, rows: int) -> None:
    """Check that tensors are a rank's rows, in shapes and dtypes that match.

    Args:
        query: (rows, H, D), floating point, a plain strided tensor.
        key: (rows, H_k, D), of the same dtype.
        value: (rows, H_k, D_v), of the same dtype.
        arguments: the call's other arguments.
        rows: the number of this rank's tokens.

    Raises:
        InvalidInputError: a tensor isn't of this form, or on another device.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            got = type(tensor).__name__
            hint = "; a DTensor's is to_local()" if got == "DTensor" else ""
            raise InvalidInputError(f"{name}: got a {got}, expected this rank's rows as a plain tensor{hint}")
        if tensor.dim() != 3 or len(tensor) != rows or tensor.layout != torch.strided:
            expected = f"({rows}, heads, head dim): the rows of this rank, as context.shard gives them"
            got = "" if tensor.layout == torch.strided else f", {tensor.layout}"
            raise InvalidInputError(f"{name}: got shape {tuple(tensor.shape)}{got}, expected {expected}")
    if query.shape[1] != key.shape[1] and not arguments.enable_gqa:
        got = f"{query.shape[1]} for query and {key.shape[1]} for key"
        raise InvalidInputError(f"heads: got {got}, expected equal numbers (or enable_gqa=True)")
    same = (query.shape[2], key.shape[1], query.dtype) == (key.shape[2], value.shape[1], key.dtype)
    if not same or query.dtype != value.dtype or not key.shape[1] or query.shape[1] % key.shape[1]:
        got = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (query, key, value))
        raise InvalidInputError(
            f"query, key, value: got {got}, expected heads, head dims and dtypes to match"
        )
    if len({x.device for x in (query, key, value)}) > 1:
        got = f"query on {query.device}, key on {key.device}, value on {value.device}"
        raise InvalidInputError(f"device: got {got}, expected one device")
    if arguments.sinks is not None:
        check_sinks(query, arguments.sinks)


def problem_of(
    calls: Iterable[tuple[Tensor, Tensor, Tensor, Call]], options: KernelOptions
) -> UnsupportedInputError | None:
    """Return the error of the first of this rank's calls that no backend can run, or None.

    It is called before any call runs: afterwards ranks whose calls can run would wait for this rank. The
    tensors of a call are query, key and value, packed (T, H, D), floating point; no value is read.
    """
    for query, key, value, call in calls:
        spec = spec_of(query, key, value, call, options.needs_backward)
        if all(decision.backend is not None for decision in decided(spec, options.choice)):
            continue
        for decision in decisions(spec, options.choice):
            if decision.backend is None:
                try:
                    refuse(spec, decision, "forward")
                except UnsupportedInputError as error:
                    return error
    return None


_ROWS = {row.argument: row for row in OPTIONS}


def check_refused(refused: dict[str, object]) -> None:
    """Raise `UnsupportedInputError` for options that no method supports."""
    for name, got in refused.items():
        if _ROWS[name].is_on(got):
            shown = _ROWS[name].got(got)
            raise UnsupportedInputError(
                f"{name}: got {shown}, expected none: calls spread over ranks don't take it"
            )


def check_offsets(name: str, offsets: Tensor | None, layout: Layout) -> None:
    """Raise unless offsets equal a layout's; offsets on a GPU are read back, which waits for the GPU.

    `offsets` are int32 (documents + 1,).

    Raises:
        InvalidInputError: they are None, or others; the message has the argument's `name`.
    """
    got = "None"
    if offsets is not None:
        got = f"shape {tuple(offsets.shape)}, {offsets.dtype} on {offsets.device}"
        if offsets.dim() == 1 and offsets.dtype == torch.int32 and not offsets.is_meta:
            numbers = offsets.tolist()
            if numbers == list(layout.cu_seq):
                return
            got = short(numbers)
    raise InvalidInputError(
        f"{name}: got {got}, expected those of the whole batch, {short(layout.cu_seq)}, int32"
    )


def check_longest(lengths: dict[str, int], longest: int) -> None:
    """Check `max_q` and `max_k`: at least the longest document of the whole batch."""
    for name, got in lengths.items():
        try:
            is_enough = operator.index(got) >= longest
        except TypeError:
            raise InvalidInputError(f"{name}: got {got!r}, expected an integer") from None
        if not is_enough:
            raise InvalidInputError(
                f"{name}: got {got}, expected at least {longest}, the longest sequence of the whole batch"
            )


def check_tokens(tensor: object, dim: int, expected: int, of: str) -> None:
    """Check that a tensor has so many tokens along a dimension."""
    if not isinstance(tensor, Tensor):
        raise InvalidInputError(f"tensor: got {reprlib.repr(tensor)}, expected a tensor")
    if dim not in range(-tensor.dim(), tensor.dim()):
        raise InvalidInputError(f"dim: got {dim!r}, expected a dimension of shape {tuple(tensor.shape)}")
    if tensor.shape[dim] != expected:
        raise InvalidInputError(f"tensor: got {tensor.shape[dim]} tokens, expected the {expected} {of}")


def texts_of_layout(layout: Layout) -> dict[str, str]:
    """Return the text of a layout that ranks compare."""
    return {
        "offsets": f"{short(layout.cu_seq)} ({_digest(layout.cu_seq)})",
        "layouts": f"{short(layout.rows)} rows, {_first_pieces(layout)} ({_digest(layout.pieces)})",
    }


def _first_pieces(layout: Layout) -> str:
    first = [" and ".join(f"{begin} to {end}" for _, begin, end in rows[:2]) for rows in layout.pieces[:3]]
    return "rank by rank from " + ", ".join(pieces or "none" for pieces in first)


def texts(kind: SpreadKind, device: torch.device, method: str) -> dict[str, str]:
    """Return the text of a call that ranks compare, besides the layout."""
    fields = {name: str(field) for name, field in zip(kind._fields[1:], kind[1:], strict=True)}
    fields |= {name: str(field) for name, field in kind.shape._asdict().items()}
    spec = AttentionSpec(
        device=device_of(device), dtype=kind.dtype, batch=1, max_q=1024, max_k=1024, heads_q=kind.shape.heads,
        heads_k=kind.shape.heads_k, head_dim=kind.shape.dim, head_dim_v=kind.shape.dim_v, varlen=True,
        window=kind.window, softcap=kind.softcap, needs_backward=kind.shape.needs_backward,
    )  # fmt: skip
    return fields | {"method": method, "backend of a usual call": _backends(spec, scope.current(), state())}


@functools.lru_cache(maxsize=64)
def _backends(spec: AttentionSpec, chosen: object, now: object) -> str:
    """Return the backends of both directions; `chosen` and `now` are keys of the cache alone."""
    forward = explain(spec)
    return (
        f"{forward.backend}, backward {forward.backward.backend}"
        if forward.backward
        else str(forward.backend)
    )


def short(numbers: Sequence[int]) -> str:
    """Return numbers as text of bounded length."""
    shown = ", ".join(map(str, numbers[:8]))
    return f"({shown})" if len(numbers) < 9 else f"({shown}, ..., {numbers[-1]}; {len(numbers)} numbers)"


def _digest(numbers: object) -> str:
    return hashlib.sha256(repr(numbers).encode()).hexdigest()[:8]

"""Options that several commands share, and the functions that read them.

A reader turns the text of an option into a value, or raises an error that says what was got and what
was expected. An option of a single command is declared in that command's file.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnreg.core.settings.other_names import device_meant
from attnreg.errors import (
    BackendUnavailableError,
    ConfigError,
    InvalidInputError,
    UnknownBackendError,
    did_you_mean,
)
from attnreg.tools.lines import counted

if TYPE_CHECKING:
    import torch

    from attnreg.core.contract.spec import AttentionSpec
    from attnreg.core.registry.entry import Entry
    from attnreg.core.times.traces import Recorded


log = logging.getLogger("attnreg")


def valued(name: str, metavar: str, text: str, *, show_default: bool = False, **further: Any) -> Any:
    """Declare an option that takes a value; most defaults only mean that it isn't given."""
    # Every option gives its name: with a metavar alone, typer 0.27.0 to 0.27.3 loses it.
    return typer.Option(name, metavar=metavar, help=text, show_default=show_default, **further)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print everything.")]
DeviceHere = Annotated[
    str, valued("--device", "DEVICE", "cpu, cuda or cuda:1. Default: the GPU if there is one.")
]
Backends = Annotated[
    list[str], valued("--backend", "NAMES", "One or several with commas. Default: all that run here.")
]
Dtypes = Annotated[list[str], valued("--dtype", "DTYPES", "One or several with commas. Default: bf16.")]
Keys = Annotated[
    list[str], valued("--kv", "B,S,H,D", "Shape of key and value, one for each --q. Default: as --q.")
]
ValueDim = Annotated[int | None, valued("--head-dim-v", "N", "Head dim of the value, if it differs.", min=1)]
Causal = Annotated[bool, typer.Option("--causal", help="Causal mask: the last query sees all keys.")]
Window = Annotated[str, valued("--window", "L,R", "Sliding window: keys visible before and after; -1: all.")]
Varlen = Annotated[bool, typer.Option("--varlen", help="Packed sequences (cu_seqlens).")]
Paged = Annotated[int | None, valued("--paged", "N", "Paged key-value cache, N tokens a page.", min=1)]
CountedKeys = Annotated[
    bool, typer.Option("--seqused-k", help="With seqused_k: the number of keys of each sequence.")
]
Sinks = Annotated[
    bool, typer.Option("--sinks", help="With sinks: one more score for each head, without a value.")
]
Further = Annotated[
    list[str], valued("--option", "NAME=NUMBER", "Any option of calls by its name; NAME alone for a tensor.")
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="With torch's deterministic algorithms on.")
]
Backward = Annotated[bool, typer.Option("--backward/--no-backward", help="Run the backward as well.")]
Budget = Annotated[str, valued("--budget", "TIME", "Stop after this time: 60s, 5m or 1h. Default: no limit.")]
TRACE = valued("--from", "FILE", "Calls recorded by attnreg.record or ATTNREG_RECORD.")

DTYPES = ("float16", "bfloat16", "float32", "float64")
OF_PACKAGES = "a package's own is known once the package, with its entry point, is installed"


_WORDS = ("a whole number", *(f"{count} whole numbers" for count in ("two", "three", "four")))


def numbers(option: str, text: str, meaning: str) -> tuple[int, ...]:
    """Read as many whole numbers as `meaning` has words between its commas."""
    try:
        parts = tuple(int(part) for part in text.split(","))
    except ValueError:
        parts = ()
    if len(parts) != meaning.count(",") + 1:
        raise InvalidInputError(f"{option}: got {text!r}, expected {_WORDS[meaning.count(',')]}: {meaning}")
    return parts


def names(option: str, values: Sequence[str]) -> tuple[str, ...]:
    """Read an option that is repeated, or has several names with commas, or both."""
    named = [name.strip() for value in values for name in value.split(",")]
    if "" in named:
        raise InvalidInputError(f"{option}: got {','.join(values)!r}, expected names separated by commas")
    return tuple(dict.fromkeys(named))


def seconds(text: str) -> float:
    """Read `--budget`, a time such as `60s`, `5m` or `1.5h`; infinity if it isn't given."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if text and (match is None or not float(match[1])):
        raise InvalidInputError(f"--budget: got {text!r}, expected a time: 60s, 5m or 1h")
    return float(match[1]) * {"m": 60.0, "h": 3600.0}.get(match[2], 1.0) if match else math.inf


def further(texts: Sequence[str]) -> dict[str, Any]:
    """Read `--option`, repeated; returns fields of an `AttentionSpec`, `further` among them."""
    from attnreg.core.contract.options import OPTIONS
    from attnreg.core.contract.spec import arguments_of

    rows, values = {row.name: row for row in OPTIONS}, dict[str, Any]()
    for text in texts:
        name, is_number, number = text.partition("=")
        try:
            value: Any = (int(number) if number.isdigit() else float(number)) if is_number else True
        except ValueError:
            expected = "NAME=NUMBER, or the name of a tensor alone"
            raise InvalidInputError(f"--option: got {text!r}, expected {expected}") from None
        if name not in rows:
            raise InvalidInputError(f"--option: there is no option {name!r}{did_you_mean(name, rows)}")
        values[rows[name].field] = value
    return arguments_of(values)


def dtype_name(text: str) -> str:
    """Read a floating-point dtype by any usual name; returns torch's name."""
    import torch

    from attnreg.core.contract.spec import canonical_dtype

    name = canonical_dtype(text)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidInputError(
            f"--dtype: got {text!r}, expected a floating-point dtype: {', '.join(DTYPES)}, ..."
            f"{did_you_mean(name, DTYPES)}"
        )
    return name


def torch_device(text: str, option: str = "--device") -> torch.device:
    """Read a device that torch knows; this machine's GPU, else its CPU, if the option isn't given."""
    import torch

    gpus = torch.cuda.device_count()
    if not text:
        return torch.device("cuda:0" if gpus else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        meant = device_meant(text, ("cpu", "cuda"))
        meant = "; did you mean 'cuda'?" if "'sm_" in meant else meant  # which only `explain` simulates
        raise InvalidInputError(
            f"{option}: got {text!r}, expected 'cpu', 'cuda', 'cuda:N' or another device that torch knows"
            f"{meant}"
        ) from None
    if device.type == "cuda" and gpus:
        device = torch.device("cuda", device.index or 0)
        if device.index >= gpus:
            present = " or ".join(f"cuda:{index}" for index in range(gpus))
            raise InvalidInputError(f"{option}: got {text!r}, expected {present}")
    return device


def present_device(text: str, option: str = "--device") -> torch.device:
    """Read a device of this machine, to run something on."""
    import torch

    device = torch_device(text, option)
    if device.type == "meta":
        raise InvalidInputError(f"{option}: got 'meta', expected a device that computes")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError(f"{option}: got {text!r}, but torch finds no CUDA GPU here")
    return device


def recorded_on(trace: Path, device: str) -> list[Recorded]:
    """Return what `--from` has recorded on a type of device; logs how many calls on others are left out."""
    from attnreg.core.times import traces

    recorded = traces.read(trace)
    here = [call for call in recorded if call.spec.device.type == device]
    elsewhere = " and ".join(sorted({call.spec.device.type for call in recorded} - {device}))
    if elsewhere and not here:
        raise InvalidInputError(
            f"--from: got calls on {elsewhere}, expected some on {device}, the device of --device"
        )
    if elsewhere:
        left_out = counted(len(recorded) - len(here), "call")
        log.warning("--from: left out %s on %s, as the device is %s", left_out, elsewhere, device)
    if not here:
        raise InvalidInputError(f"--from: got {trace}, expected a file with at least one recorded call")
    return here


def check_writable(option: str, file: Path, mark: str = "") -> None:
    """Check that an option's file can be written, as `core.times.table.check_writable` does."""
    from attnreg.core.times import table

    try:
        table.check_writable(file, mark)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def candidates(named: tuple[str, ...], device: torch.device, files: bool = True) -> list[tuple[Entry, str]]:
    """Return the backends that are named by `--backend`, else all, each with why it can't run, or "".

    Without `files` the table and the lockfile that settings name needn't be readable: the command may be
    about to write them.
    """
    from attnreg.core import registry
    from attnreg.core.policy import current as policy

    try:
        # What runs on request only isn't loaded unasked.
        every = [entry for entry in registry.entries().values() if not entry.on_request]
        entries = list(dict.fromkeys(registry.find(name) for name in named)) or every
    except UnknownBackendError as error:
        raise UnknownBackendError(f"{error}; {OF_PACKAGES}") from None
    disabled = policy.current().disabled if files else policy.disabled_backends()
    return [(entry, _reason(entry, device, disabled.get(entry.name.casefold(), ""))) for entry in entries]


def measurable(named: tuple[str, ...], device: torch.device, files: bool = True) -> list[Entry]:
    """Return the backends to compare: those named, which have to run on the device, else all that do.

    Backends that stand in for others are left out on a GPU, unless they are named or the only ones.
    """
    reason_of = candidates(named, device, files)
    for entry, reason in reason_of:
        if named and reason:
            raise BackendUnavailableError(f"--backend: {entry.name} {reason}")
    entries = [entry for entry, reason in reason_of if not reason]
    if not named and device.type == "cuda" and len(entries) > 1:
        # There the reference takes longer than all others together, and is preferred to none of them.
        entries = [entry for entry in entries if not entry.stands_in] or entries
    if not entries:
        raise BackendUnavailableError(f"no backend can be measured on {device}")
    return entries


def _reason(entry: Entry, device: torch.device, disabled_by: str) -> str:
    import torch

    if disabled_by:
        return f"is disabled by {disabled_by}"
    backend = entry.open()
    if backend is not None and device.type not in backend.devices:
        lacks_gpu = "cuda" in backend.devices and not torch.cuda.is_available()
        here = f"{device.type}{'; torch finds no GPU here' if lacks_gpu else ''}"
        return f"runs on {', '.join(backend.devices)} only, and the device is {here}"
    try:
        entry.kernels()
    except BackendUnavailableError:
        return entry.unavailable()
    return ""


def window_of(text: str, causal: bool = False) -> tuple[int, int]:
    """Read `--window`, whose right side `--causal` closes."""
    left, right = numbers("--window", text, "left,right")
    if min(left, right) < -1:
        raise InvalidInputError(f"--window: got {text!r}, expected numbers of keys, -1 for all")
    return left, 0 if causal else right


def spec_of(
    q: str, kv: str, device: str, dtype: str, window: str, causal: bool, head_dim_v: int | None, **facts: Any
) -> AttentionSpec:
    """Read the options that describe one call; `facts` are further fields of its spec.

    The device is one of this machine, or a simulated one such as sm_90.
    """
    from attnreg.core.contract.lengths import bounds
    from attnreg.core.contract.spec import AttentionSpec, Device
    from attnreg.core.dispatch import planning

    batch, max_q, heads_q, head_dim = numbers("--q", q, "batch,length,heads,head_dim")
    batch_k, max_k, heads_k, head_dim_k = numbers("--kv", kv, "batch,length,heads,head_dim")
    if (batch, head_dim) != (batch_k, head_dim_k):
        raise InvalidInputError(
            f"--kv: got batch {batch_k} and head dim {head_dim_k}, expected those of --q, "
            f"{batch} and {head_dim}"
        )
    sides = window_of(window, causal)
    try:
        selected = Device.parse(device) if device else None
    except InvalidInputError as error:
        raise InvalidInputError(f"--{error}") from None  # it begins with "device"
    if selected is None or not selected.simulated:
        selected = planning.device_of(torch_device(device))
    return AttentionSpec(
        device=selected,
        dtype=dtype_name(dtype),
        batch=batch,
        max_q=max_q,
        max_k=max_k,
        heads_q=heads_q,
        heads_k=heads_k,
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        window=bounds(sides, causal, max_q, max_k),
        **facts,
    )


def specs_of(
    queries: list[str], keys: list[str], device: str, dtypes: list[str], *shared: Any, **facts: Any
) -> list[AttentionSpec]:
    """Read repeated `--q` and `--kv`, each pair in each dtype; `shared` and `facts` go to `spec_of`."""
    if keys and len(keys) != len(queries):
        raise InvalidInputError(f"--kv: got {len(keys)}, expected one for each --q, {len(queries)}, or none")
    return [
        spec_of(q, kv, device, dtype, *shared, **facts)
        for q, kv in zip(queries, keys or queries, strict=True)
        for dtype in names("--dtype", dtypes) or ("bf16",)
    ]

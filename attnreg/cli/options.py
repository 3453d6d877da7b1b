"""Options that several commands share, and the functions that read them.

A reader turns the text of an option into a value, or raises an error that says what was got and what
was expected. An option of a single command is declared in that command's file.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnreg.errors import InvalidInputError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from attnreg.contract.spec import AttentionSpec, Device

# Every option gives its name: with a metavar alone, typer 0.27.0 to 0.27.3 loses it.
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DeviceHere = Annotated[
    str,
    typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:1. Default: the GPU if there is one."),
]
Backends = Annotated[
    list[str],
    typer.Option(
        "--backend", metavar="NAMES", help="One or several with commas. Default: all that run here."
    ),
]
Dtypes = Annotated[
    list[str], typer.Option("--dtype", metavar="DTYPES", help="One or several with commas. Default: bf16.")
]
Keys = Annotated[
    list[str],
    typer.Option(
        "--kv", metavar="B,S,H,D", help="Shape of key and value, one for each --q. Default: as --q."
    ),
]
ValueDim = Annotated[
    int | None,
    typer.Option("--head-dim-v", metavar="N", min=1, help="Head dim of the value, if it differs."),
]
Causal = Annotated[bool, typer.Option("--causal", help="Causal mask.")]
Window = Annotated[
    str,
    typer.Option(
        "--window",
        metavar="L,R",
        show_default=False,
        help="Sliding window: keys visible before and after; -1: all.",
    ),
]
Varlen = Annotated[bool, typer.Option("--varlen", help="Packed sequences (cu_seqlens).")]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="With torch's deterministic algorithms on.")
]
Backward = Annotated[bool, typer.Option("--backward/--no-backward", help="Run the backward as well.")]
Budget = Annotated[
    str,
    typer.Option("--budget", metavar="TIME", help="Stop after 60s, 5m or 1h. Default: no limit."),
]

DTYPES = ("float16", "bfloat16", "float32", "float64")


def numbers(option: str, text: str, meaning: str) -> tuple[int, ...]:
    """Read as many whole numbers as `meaning` has words between its commas."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if len(found) != meaning.count(",") + 1:
        raise InvalidInputError(f"{option}: got {text!r}, expected whole numbers: {meaning}")
    return found


def names(option: str, values: Sequence[str]) -> tuple[str, ...]:
    """Read an option that is repeated, or has several names with commas, or both."""
    found = [name.strip() for value in values for name in value.split(",")]
    if "" in found:
        raise InvalidInputError(f"{option}: got {','.join(values)!r}, expected names separated by commas")
    return tuple(dict.fromkeys(found))


def seconds(option: str, text: str) -> float:
    """Read a time such as `60s`, `5m` or `1.5h`; infinity if the option isn't given."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if text and (found is None or not float(found[1])):
        raise InvalidInputError(f"{option}: got {text!r}, expected a time: 60s, 5m or 1h")
    return float(found[1]) * {"m": 60.0, "h": 3600.0}.get(found[2], 1.0) if found else math.inf


def dtype_name(option: str, text: str) -> str:
    """Read a floating-point dtype by any usual name; returns torch's name."""
    import torch

    from attnreg.contract.spec import canonical_dtype

    name = canonical_dtype(text)
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InvalidInputError(
            f"{option}: got {text!r}, expected a floating-point dtype: {', '.join(DTYPES)}, ..."
            f"{did_you_mean(name, DTYPES)}"
        )
    return name


def device_of(option: str, text: str) -> Device:
    """Read a device to select for: one of this machine, or a simulated one such as sm_90.

    Returns this machine's GPU, else its CPU, if the option isn't given.
    """
    from attnreg.contract.spec import Device
    from attnreg.dispatch import planning

    parsed = Device.parse(text) if text else None
    if parsed is not None and parsed.capability is not None:
        return parsed
    return planning.device_of(torch_device(option, text))


def torch_device(option: str, text: str) -> torch.device:
    """Read a device that torch knows; this machine's GPU, else its CPU, if the option isn't given."""
    import torch

    gpus = torch.cuda.device_count()
    if not text:
        return torch.device("cuda:0" if gpus else "cpu")
    try:
        found = torch.device(text)
    except RuntimeError:
        raise InvalidInputError(
            f"{option}: got {text!r}, expected 'cpu', 'cuda', 'cuda:N' or another device that torch knows"
        ) from None
    if found.type == "cuda" and gpus:
        found = torch.device("cuda", found.index or 0)
        if found.index >= gpus:
            there = " or ".join(f"cuda:{index}" for index in range(gpus))
            raise InvalidInputError(f"{option}: got {text!r}, expected {there}")
    return found


def present_device(option: str, text: str) -> torch.device:
    """Read a device of this machine, to run something on."""
    import torch

    found = torch_device(option, text)
    if found.type == "meta":
        raise InvalidInputError(f"{option}: got 'meta', expected a device that computes")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError(f"{option}: got {text!r}, but torch finds no CUDA GPU here")
    return found


def spec_of(
    q: str, kv: str, device: str, dtype: str, window: str, causal: bool, head_dim_v: int | None, **facts: Any
) -> AttentionSpec:
    """Read the options that describe one call; `facts` are further fields of its spec."""
    from attnreg.contract.spec import AttentionSpec
    from attnreg.dispatch.calls import bounds

    batch, max_q, heads_q, head_dim = numbers("--q", q, "batch,length,heads,head_dim")
    batch_k, max_k, heads_k, head_dim_k = numbers("--kv", kv, "batch,length,heads,head_dim")
    if (batch, head_dim) != (batch_k, head_dim_k):
        raise InvalidInputError(
            f"--kv: got batch {batch_k} and head dim {head_dim_k}, expected those of --q, "
            f"{batch} and {head_dim}"
        )
    left, right = numbers("--window", window, "left,right")
    if min(left, right) < -1:
        raise InvalidInputError(f"--window: got {window!r}, expected numbers of keys, -1 for all")
    return AttentionSpec(
        device=device_of("--device", device),
        dtype=dtype_name("--dtype", dtype),
        batch=batch,
        max_q=max_q,
        max_k=max_k,
        heads_q=heads_q,
        heads_k=heads_k,
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        window=bounds((left, right), causal, max_q, max_k),
        **facts,
    )


def specs_of(
    queries: Sequence[str],
    keys: Sequence[str],
    device: str,
    dtypes: Sequence[str],
    *shared: Any,
    **facts: Any,
) -> list[AttentionSpec]:
    """Read repeated `--q` and `--kv`, each pair in each dtype; `shared` and `facts` go to `spec_of`."""
    if keys and len(keys) != len(queries):
        raise InvalidInputError(f"--kv: got {len(keys)}, expected one for each --q, {len(queries)}, or none")
    return [
        spec_of(q, kv, device, dtype, *shared, **facts)
        for q, kv in zip(queries, keys or queries, strict=True)
        for dtype in names("--dtype", dtypes) or ("bf16",)
    ]

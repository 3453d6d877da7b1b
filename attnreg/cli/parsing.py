"""From the text of an option to its value, or an error that says what was got and what was wanted."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from attnreg.errors import InvalidInputError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from attnreg.contract.spec import AttentionSpec, Device

__all__ = [
    "device_of",
    "dtype_name",
    "names",
    "numbers",
    "present_device",
    "seconds",
    "spec_of",
    "torch_device",
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
    """Read an option that is repeated, takes a comma list, or both."""
    found = [name.strip() for value in values for name in value.split(",")]
    if "" in found:
        raise InvalidInputError(f"{option}: got {','.join(values)!r}, expected names separated by commas")
    return tuple(dict.fromkeys(found))


def seconds(option: str, text: str) -> float:
    """Read a time such as `60s`, `5m` or `1.5h`; without a text there is no end to it."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if text and (found is None or not float(found[1])):
        raise InvalidInputError(f"{option}: got {text!r}, expected a time: 60s, 5m or 1h")
    return float(found[1]) * {"m": 60.0, "h": 3600.0}.get(found[2], 1.0) if found else math.inf


def dtype_name(option: str, text: str) -> str:
    """Read a floating-point dtype by any usual name, and return torch's."""
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
    """Read a device for selection: one of this machine, or the architecture of a simulated GPU.

    Without a text it is this machine's GPU, else its CPU.
    """
    from attnreg.contract.spec import Device
    from attnreg.dispatch import planning

    parsed = Device.parse(text) if text else None
    if parsed is not None and parsed.capability is not None:
        return parsed
    return planning.device_of(torch_device(option, text))


def torch_device(option: str, text: str) -> torch.device:
    """Read a device that torch knows; without a text this machine's GPU, else its CPU."""
    import torch

    gpus = torch.cuda.device_count()
    if not text:
        return torch.device("cuda:0" if gpus else "cpu")
    try:
        found = torch.device(text)
    except RuntimeError:
        raise InvalidInputError(
            f"{option}: got {text!r}, expected 'cpu', 'cuda', 'cuda:N' or another device of torch's"
        ) from None
    if found.type == "cuda" and gpus:
        found = torch.device("cuda", found.index or 0)
        if found.index >= gpus:
            there = " or ".join(f"cuda:{index}" for index in range(gpus))
            raise InvalidInputError(f"{option}: got {text!r}, expected {there}")
    return found


def present_device(option: str, text: str) -> torch.device:
    """Read a device to run something on: one that is here."""
    import torch

    found = torch_device(option, text)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError(f"{option}: got {text!r}, and torch finds no CUDA GPU here")
    return found


def spec_of(
    q: str, kv: str, device: str, dtype: str, window: str, causal: bool, head_dim_v: int | None, **facts: Any
) -> AttentionSpec:
    """Read what the options say of a call: `--q`, `--kv`, `--device`, `--dtype` and `--window`."""
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
        raise InvalidInputError(f"--window: got {window!r}, expected numbers of keys, or -1 for all")
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

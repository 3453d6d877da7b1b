"""`attnreg warmup`: run given calls once, so that backends compile their kernels ahead of time."""

from __future__ import annotations

import contextlib
import time
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnreg.cli import options, output
from attnreg.errors import UnsupportedInputError

if TYPE_CHECKING:
    import torch

    from attnreg.contract.discovery import Entry
    from attnreg.contract.spec import AttentionSpec, Direction


def warmup(
    q: Annotated[
        list[str],
        options.valued(
            "--q", "B,S,H,D", "Query: batch, length, heads, head dim. Repeat it for several calls."
        ),
    ],
    kv: options.Keys = [],  # noqa: B006 - typer makes a new list for each call
    device: options.DeviceHere = "",
    dtype: options.Dtypes = [],  # noqa: B006
    causal: options.Causal = False,
    window: options.Window = "-1,-1",
    varlen: options.Varlen = False,
    head_dim_v: options.ValueDim = None,
    deterministic: options.Deterministic = False,
    backward: options.Backward = True,
    backend: options.Backends = [],  # noqa: B006
    as_json: options.AsJson = False,
) -> None:
    """Run calls once, so that backends compile their kernels now.

    Kernels that a backend keeps on disk are then ready when the next program starts. Prints how long
    each first call took.

    Example: attnreg warmup --q 1,4096,32,128 --causal --backend FA4
    """
    output.import_torch()
    place, named = options.present_device(device), options.names("--backend", backend)
    specs = options.specs_of(
        q, kv, str(place), dtype, window, causal, head_dim_v, varlen=varlen, deterministic=deterministic
    )
    with output.stdout_to_stderr():
        found = [
            (entry, reason)
            for entry, reason in options.candidates(named, place)
            # A backend for other devices is listed only if it is named.
            if named or entry.backend is None or place.type in entry.backend.devices
        ]
        directions: tuple[Direction, ...] = ("forward", "backward") if backward else ("forward",)
        planned = [(spec, *one, direction) for spec in specs for one in found for direction in directions]
        done: list[tuple[AttentionSpec, dict[str, Any]]] = []
        finished = False
        with contextlib.suppress(KeyboardInterrupt), output.progress(len(planned)) as update:
            for spec, entry, reason, direction in planned:
                update(description=f"{entry.name} {direction}")
                done.append((spec, _first_call(spec, entry, reason, direction, place)))
                update(advance=1)
            finished = True
    calls = [call for _, call in done]
    if as_json:
        output.print_json({"device": str(place), "finished": finished, "calls": calls})
    else:
        for spec, group in groupby(done, key=lambda one: one[0]):
            rows = (_row(call) for _, call in group)
            output.table(f"{spec} on {spec.device}", rows, ("backend", "direction", "seconds", ""))
    if not finished:
        raise typer.Exit(output.INTERRUPTED)
    states = [call["state"] for call in calls]
    if "failed" in states or "ran" not in states or (named and "refused" in states):
        raise typer.Exit(output.FAILED)


def _first_call(
    spec: AttentionSpec, entry: Entry, reason: str, direction: Direction, device: torch.device
) -> dict[str, Any]:
    """Run one direction of a call on a backend, unless there is a reason not to; return what came of it."""
    state, seconds = "refused", None
    reason = reason or "; ".join(entry.reasons(spec, direction))
    try:
        if not reason:
            kernel = entry.kernel(direction, spec)
            arguments = _arguments(spec, direction, device)
            _synchronize(device)
            started = time.perf_counter()
            kernel(*arguments)
            _synchronize(device)
            state, seconds = "ran", time.perf_counter() - started
    except UnsupportedInputError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - the other backends are still run
        state, reason = "failed", f"{type(error).__name__}: {error}"
    return {
        "backend": entry.name,
        "version": entry.version(),
        "call": str(spec),
        "direction": direction,
        "state": state,
        "seconds": seconds,
        "reason": reason,
    }


def _row(call: dict[str, Any]) -> tuple[str, ...]:
    seconds = "-" if call["seconds"] is None else f"{call['seconds']:.3f}"
    reason = call["reason"].partition("\n")[0]
    note = f"not run: {reason}" if call["state"] == "refused" else reason
    return call["backend"], call["direction"], seconds.rjust(7), note


def _arguments(spec: AttentionSpec, direction: Direction, device: torch.device) -> tuple[Any, ...]:
    """Return what a backend's kernel is called with: tensors of zeros and the rest of the call."""
    import torch

    from attnreg.contract.backend import Call

    def zeros(length: int, heads: int, dim: int) -> torch.Tensor:
        rows = (spec.batch * length,) if spec.varlen else (spec.batch, length)
        return torch.zeros((*rows, heads, dim), dtype=getattr(torch, spec.dtype), device=device)

    def cu_seqlens(length: int) -> torch.Tensor | None:
        offsets = torch.arange(spec.batch + 1, dtype=torch.int32, device=device) * length
        return offsets if spec.varlen else None

    call = Call(
        scale=float((spec.head_dim or 1) ** -0.5),
        max_q=spec.max_q,
        max_k=spec.max_k,
        window=spec.window,
        cu_seqlens_q=cu_seqlens(spec.max_q),
        cu_seqlens_k=cu_seqlens(spec.max_k),
        deterministic=spec.deterministic,
    )
    query = zeros(spec.max_q, spec.heads_q, spec.head_dim)
    key = zeros(spec.max_k, spec.heads_k, spec.head_dim)
    value = zeros(spec.max_k, spec.heads_k, spec.head_dim_v)
    if direction == "forward":
        return query, key, value, call
    out = zeros(spec.max_q, spec.heads_q, spec.head_dim_v)
    shape = (spec.heads_q, len(out)) if spec.varlen else (spec.batch, spec.heads_q, spec.max_q)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = torch.zeros(shape, dtype=dtype, device=device)
    return torch.zeros_like(out), query, key, value, out, lse, call


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""`attnreg warmup`: run given calls once, so that backends compile their kernels ahead of time."""

from __future__ import annotations

import contextlib
import time
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

import typer

from attnreg.cli import options, output
from attnreg.cli.backends import candidates
from attnreg.errors import UnsupportedInputError

if TYPE_CHECKING:
    import torch

    from attnreg.contract.discovery import Entry
    from attnreg.contract.spec import AttentionSpec, Direction

Queries = Annotated[
    list[str],
    options.valued("--q", "B,S,H,D", "Query: batch, length, heads, head dim. Repeat it for several calls."),
]


def warmup(
    q: Queries,
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
        planned = _planned(named, place, specs, backward)
        done: list[FirstCall] = []
        finished = False
        with contextlib.suppress(KeyboardInterrupt), output.progress(len(planned)) as update:
            for call in planned:
                update(description=f"{call.entry.name} {call.direction}")
                done.append(call.run(place))
                update(advance=1)
            finished = True
    if as_json:
        found = [call.to_dict() for call in done]
        output.print_json({"device": str(place), "finished": finished, "calls": found})
    else:
        for spec, calls in groupby(done, key=lambda call: call.spec):
            rows = (call.row() for call in calls)
            output.table(f"{spec} on {spec.device}", rows, ("backend", "direction", "seconds", ""))
    if not finished:
        raise typer.Exit(output.INTERRUPTED)
    refused = bool(named) and any(call.reason for call in done)
    if refused or any(call.failed for call in done) or all(call.seconds is None for call in done):
        raise typer.Exit(output.FAILED)


class FirstCall(NamedTuple):
    """One direction of a call on one backend."""

    entry: Entry
    spec: AttentionSpec
    direction: Direction
    seconds: float | None = None  # None if it wasn't run
    reason: str = ""  # why it wasn't run, or how it failed
    failed: bool = False  # whether it was run and failed

    def run(self, device: torch.device) -> FirstCall:
        """Run it, unless there is a reason not to; returns it with the time or the error."""
        if self.reason:
            return self
        try:
            kernel = self.entry.kernel(self.direction)
            arguments = _arguments(self.spec, self.direction, device)
            _synchronize(device)
            started = time.perf_counter()
            kernel(*arguments)
            _synchronize(device)
        except UnsupportedInputError as error:
            return self._replace(reason=str(error))
        except Exception as error:  # noqa: BLE001 - the other backends are still run
            return self._replace(reason=f"{type(error).__name__}: {error}", failed=True)
        return self._replace(seconds=time.perf_counter() - started)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, for JSON."""
        return {
            "backend": self.entry.name,
            "version": self.entry.version(),
            "call": str(self.spec),
            "direction": self.direction,
            "state": "failed" if self.failed else "refused" if self.reason else "ran",
            "seconds": self.seconds,
            "reason": self.reason,
        }

    def row(self) -> tuple[str, ...]:
        """Return the same as a row of the table."""
        seconds = "-" if self.seconds is None else f"{self.seconds:.3f}"
        reason = self.reason.partition("\n")[0]
        note = reason if self.failed or not reason else f"not run: {reason}"
        return self.entry.name, self.direction, seconds.rjust(7), note


def _planned(
    named: tuple[str, ...], device: torch.device, specs: list[AttentionSpec], backward: bool
) -> list[FirstCall]:
    """Return the calls of all backends, those that can't run with the reason."""
    from attnreg.contract.spec import Direction

    found = candidates(named, device)
    return [
        FirstCall(entry, spec, direction, reason=reason or "; ".join(entry.reasons(spec, direction)))
        for spec in specs
        for entry, reason in found
        # A backend for other devices is listed only if it is named.
        if named or entry.backend is None or device.type in entry.backend.devices
        for direction in get_args(Direction)
        if backward or direction == "forward"
    ]


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

"""What `warmup` does: each kind of call once, with tensors of zeros, and how long that took."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch

from attnreg.cli.verdicts import candidates
from attnreg.contract.backend import Call
from attnreg.contract.spec import Direction
from attnreg.errors import UnsupportedInputError

if TYPE_CHECKING:
    from attnreg.contract.discovery import Entry
    from attnreg.contract.spec import AttentionSpec

__all__ = ["FirstCall", "planned"]


class FirstCall(NamedTuple):
    """One direction of a call on one backend.

    Attributes:
        entry: the backend.
        spec: the call.
        direction: which of its directions.
        seconds: how long it took; None if it wasn't run.
        reason: why it wasn't run, or how it failed; empty if it ran.
        failed: whether it was run and failed.
    """

    entry: Entry
    spec: AttentionSpec
    direction: Direction
    seconds: float | None = None
    reason: str = ""
    failed: bool = False

    def run(self, device: torch.device) -> FirstCall:
        """Run it, unless something speaks against it, and return it with what came of that."""
        if self.reason:
            return self
        started = time.perf_counter()
        try:
            kernel = self.entry.kernel(self.direction)
            arguments = _arguments(self.spec, self.direction, device)
            _wait_for(device)
            started = time.perf_counter()
            kernel(*arguments)
            _wait_for(device)
        except UnsupportedInputError as error:
            return self._replace(reason=str(error))
        except Exception as error:  # noqa: BLE001 - the other backends have to get their turn
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


def planned(
    asked: tuple[str, ...], device: torch.device, specs: list[AttentionSpec], backward: bool
) -> list[FirstCall]:
    """Return what there is to run, and with it why the rest can't be.

    Raises:
        UnknownBackendError: no backend has one of the names.
        ConfigError: the environment or a settings file can't be read.
    """
    directions = [direction for direction in get_args(Direction) if backward or direction == "forward"]
    # A backend for other devices is worth a line only to somebody who has named it.
    verdicts = [one for one in candidates(asked, device) if asked or _serves(one.entry, device)]
    return [
        FirstCall(
            verdict.entry,
            spec,
            direction,
            reason=verdict.reason or "; ".join(verdict.entry.reasons(spec, direction)),
        )
        for spec in specs
        for verdict in verdicts
        for direction in directions
    ]


def _serves(entry: Entry, device: torch.device) -> bool:
    return entry.backend is None or device.type in entry.backend.devices


def _arguments(spec: AttentionSpec, direction: Direction, device: torch.device) -> tuple[Any, ...]:
    def zeros(length: int, heads: int, dim: int) -> torch.Tensor:
        rows = (spec.batch * length,) if spec.varlen else (spec.batch, length)
        return torch.zeros((*rows, heads, dim), dtype=getattr(torch, spec.dtype), device=device)

    def offsets(length: int) -> torch.Tensor | None:
        ends = torch.arange(spec.batch + 1, dtype=torch.int32, device=device) * length
        return ends if spec.varlen else None

    call = Call(
        scale=float((spec.head_dim or 1) ** -0.5),
        max_q=spec.max_q,
        max_k=spec.max_k,
        window=spec.window,
        cu_seqlens_q=offsets(spec.max_q),
        cu_seqlens_k=offsets(spec.max_k),
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


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

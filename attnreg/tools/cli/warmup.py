"""`attnreg warmup`: run kinds of calls once, so that backends compile their kernels ahead of time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnreg.errors import InvalidInputError
from attnreg.tools.cli import options, output

if TYPE_CHECKING:
    import torch

    from attnreg.tools.tuning.representatives import RepresentedKind
    from attnreg.tools.warmup import FirstCall

    # What the progress bar says of it, and what runs it.
    Job = tuple[str, Callable[[], list[FirstCall]]]


def warmup(
    q: Annotated[
        list[str],
        options.valued(
            "--q", "B,S,H,D", "Query: batch, length, heads, head dim. Repeat it for several calls."
        ),
    ] = [],  # noqa: B006 - typer makes a new list for each call
    kv: options.Keys = [],  # noqa: B006
    heads: Annotated[
        list[str],
        options.valued("--heads", "Q,K", "In place of --q, for any lengths: heads of query and key."),
    ] = [],  # noqa: B006
    head_dim: Annotated[
        list[str], options.valued("--head-dim", "NUMBERS", "With --heads: one or several with commas.")
    ] = [],  # noqa: B006
    trace: Annotated[Path | None, options.TRACE] = None,
    device: options.DeviceHere = "",
    dtype: options.Dtypes = [],  # noqa: B006
    causal: options.Causal = False,
    window: options.Window = "-1,-1",
    varlen: options.Varlen = False,
    head_dim_v: options.ValueDim = None,
    paged: options.Paged = None,
    seqused_k: options.CountedKeys = False,
    deterministic: options.Deterministic = False,
    backward: options.Backward = True,
    backend: options.Backends = [],  # noqa: B006
    as_json: options.AsJson = False,
) -> None:
    """Compile kernels ahead, by running kinds of calls once.

    Kernels that a backend caches on disk are then ready when the next program starts. What it builds for
    a single process, such as cuDNN's execution plans, isn't: call attnreg.warmup in the program for that.
    Without --backend, recorded calls run on the backends that the program's calls run on. Prints how long
    each first call took. A step of flash_attn_with_kvcache has --varlen --seqused-k and one query, or --paged
    as well, and no backward.

    Example: attnreg warmup --backend FA4 --heads 32,8 --head-dim 64,128 --varlen --causal
    """
    shared = {
        "--dtype": bool(dtype), "--causal": causal, "--window": window != "-1,-1", "--varlen": varlen,
        "--head-dim-v": head_dim_v is not None, "--paged": paged is not None, "--seqused-k": seqused_k,
        "--deterministic": deterministic,
    }  # fmt: skip
    _check_given(q, heads, head_dim, trace, shared)
    output.import_torch()
    from attnreg.core.dispatch import planning
    from attnreg.tools.tuning import representatives

    place, named = options.present_device(device), options.names("--backend", backend)
    with output.stdout_to_stderr():
        facts: dict[str, Any] = {"varlen": varlen, "deterministic": deterministic}
        facts |= {"page_size": paged, "seqused_k": seqused_k}
        specs = options.specs_of(q, kv, str(place), dtype, window, causal, head_dim_v, **facts)
        facts |= {"head_dim_v": head_dim_v, "window": options.window_of(window, causal)}
        kinds = [
            representatives.one_call(spec)._replace(directions=("forward", "backward")) for spec in specs
        ]
        kinds += _kinds(heads, head_dim, dtype, place, facts)
        calls = [] if trace is None else options.recorded_on(trace, place.type)
        recorded = representatives.recorded_kinds(calls, planning.device_of(place))
        if not backward or paged:
            kinds, recorded = _forwards(kinds), _forwards(recorded)
        jobs = list(_jobs(kinds, named, place))
        jobs += _jobs(recorded, named, place) if named else _jobs_as_decided(recorded)
        done, finished = _run(jobs)
    _show(done, finished, place, as_json)
    if not finished:
        raise typer.Exit(output.INTERRUPTED)
    failed = any(call.error is not None and not call.refused for call in done)
    refused = any(call.refused and (named or call.backend is None) for call in done)
    if failed or refused or not any(call.error is None for call in done):
        raise typer.Exit(output.FAILED)


def _check_given(
    q: list[str], heads: list[str], head_dim: list[str], trace: Path | None, shared: dict[str, bool]
) -> None:
    """Check that there is something to run, and that each option says something of it."""
    if not (q or heads or head_dim or trace):
        raise InvalidInputError("got nothing to run, expected --q, --heads and --head-dim, or --from")
    if bool(heads) != bool(head_dim):
        option, other = ("--heads", "--head-dim") if heads else ("--head-dim", "--heads")
        raise InvalidInputError(f"{option}: got no {other}, expected both")
    unused = [name for name, is_given in shared.items() if is_given]
    if unused and not (q or heads):
        raise InvalidInputError(
            f"{' and '.join(unused)}: got --from alone, expected the call that it describes: --q or --heads"
        )


def _kinds(
    heads: list[str], head_dims: list[str], dtypes: list[str], place: torch.device, facts: dict[str, Any]
) -> Iterator[RepresentedKind]:
    """Yield a kind without lengths, in both directions, for each heads, head dim and dtype."""
    from attnreg.core.dispatch import planning
    from attnreg.tools.tuning import representatives

    names = [options.dtype_name(name) for name in options.names("--dtype", dtypes) or ("bf16",)]
    for both, dim, dtype in product(heads, options.names("--head-dim", head_dims), names):
        heads_q, heads_k = options.numbers("--heads", both, "query heads,key heads")
        (head_dim,) = options.numbers("--head-dim", dim, "head dim")
        own = {"heads_q": heads_q, "heads_k": heads_k, "head_dim": head_dim, "dtype": dtype}
        same_dim = {"head_dim_v": head_dim} if facts["head_dim_v"] is None else {}
        fields = {**facts, **own, **same_dim, "needs_backward": True}
        yield representatives.without_lengths(fields, planning.device_of(place))


def _forwards(kinds: list[RepresentedKind]) -> list[RepresentedKind]:
    return [kind._replace(directions=("forward",)) for kind in kinds if "forward" in kind.directions]


def _jobs(kinds: Iterable[RepresentedKind], named: tuple[str, ...], place: torch.device) -> Iterator[Job]:
    """Yield what runs each kind on each backend that is named, else on all that serve the device."""
    entries = [
        (entry, against)
        for entry, against in options.candidates(named, place)
        # A backend for other devices is listed only if it is named.
        if named or entry.backend is None or place.type in entry.backend.devices
    ]
    for kind, (entry, against) in product(kinds, entries):
        for direction in kind.directions:
            yield f"{entry.name} {direction}", partial(_once, kind.spec, direction, entry, against)


def _once(*job: Any) -> list[FirstCall]:
    from attnreg.tools.warmup import run_once

    return [run_once(*job)]


def _jobs_as_decided(kinds: Iterable[RepresentedKind]) -> Iterator[Job]:
    """Yield what runs each kind on the backends that its calls would run on."""
    from attnreg.tools.warmup import run_decided

    for number, kind in enumerate(kinds, 1):
        for direction in kind.directions:
            yield f"kind {number} {direction}", partial(run_decided, kind, direction)


def _run(jobs: list[Job]) -> tuple[list[FirstCall], bool]:
    """Return what came of the jobs, and whether all were done."""
    done: list[FirstCall] = []
    with contextlib.suppress(KeyboardInterrupt), output.progress(len(jobs)) as update:
        for description, run in jobs:
            update(description=description)
            done += run()
            update(advance=1)
        return done, True
    return done, False


def _show(done: list[FirstCall], finished: bool, place: torch.device, as_json: bool) -> None:
    if as_json:
        calls = [_data(call) for call in done]
        output.print_json({"device": str(place), "finished": finished, "calls": calls})
        return
    for spec, group in groupby(done, key=lambda call: call.kind):
        title = f"{spec} on {spec.device}"
        output.table(title, map(_row, group), ("backend", "direction", "seconds", ""))


def _data(call: FirstCall) -> dict[str, Any]:
    from attnreg.core import registry

    state = "ran" if call.error is None else "refused" if call.refused else "failed"
    return {
        "backend": call.backend,
        "version": registry.find(call.backend).version() if call.backend else "",
        "call": str(call.kind),
        "direction": call.direction,
        "state": state,
        "seconds": call.seconds,
        "prepared": call.prepared,
        "reason": call.error or "",
    }


def _row(call: FirstCall) -> tuple[str, ...]:
    seconds = "-" if call.seconds is None else f"{call.seconds:.3f}"
    # An error of the compiler has many lines; the reasons of all backends are a table.
    reason = (call.error or "").partition("\n")[0] if call.backend else call.error or ""
    note = f"not run: {reason}" if call.refused else reason
    prepared = "compiled, built or loaded" if call.prepared else ""
    return call.backend or "-", call.direction, seconds.rjust(7), note or prepared

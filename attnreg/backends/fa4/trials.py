"""Trials compare the launches of `launches` with the package's, once for each kind, before they are used.

The package runs a call as usual. Meanwhile substitutes for its compile caches record which compiled functions
it looks up, and their arguments. Our launch must call the same functions with the same arguments. That is
checked for this call, and, with nothing launched, for a slightly shorter call. Then our launch runs on the
call's own tensors, in memory full of NaN. The device compares the results with the package's, and the host
doesn't wait.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnreg.backends.fa4.compiled_kinds import Class, Family, tiles
from attnreg.backends.fa4.launches import CompiledFunctions, LauncherArguments, launch_of
from attnreg.backends.fa4.package import SINKS, PackageCall
from attnreg.backends.fa4.watching import RefutedError, Watcher, compare
from attnreg.core.launching.launchers import FunctionLauncher
from attnreg.core.launching.programs import Memory
from attnreg.core.torchlib.layout import uninitialized
from attnreg.core.torchlib.readback import AsyncReadback

# The functions of the package that look up compiled functions, in order, without the summation of tiles.
FORWARD = ("_flash_attn_fwd",)
BACKWARD = ("_bwd_preprocess", "_flash_attn_bwd", "_bwd_postprocess_convert")
SUMS_TILES = "_compute_tile_cumsum"
# No kernel of Hopper reads what this function computes.
UNUSED = "_compute_blocks_to_batch"

# The device's verdict on a comparison; 2 is `readback.PENDING`. Results that aren't finite are inconclusive.
REFUTED, CONFIRMED, INCONCLUSIVE = 0, 1, 3

# A result may differ by NEAR times its largest value: backwards add up in any order, so that the package
# itself isn't repeatable. A result that is only rounding errors may differ by ROUNDING times the largest
# value of all results.
NEAR, ROUNDING = 0.02, 1e-4

log = logging.getLogger("attnreg")


@dataclass(slots=True, eq=False)
class _Trial:
    """The state of a kind's trial.

    Attributes:
        calls: the number of calls that have run through the package.
        over: whether the trial has ended.
        compiled: the functions that the package looked up, while a comparison is in progress.
        comparison: the read-back of the device's verdict.
    """

    calls: int = 0
    over: bool = False
    compiled: CompiledFunctions | None = None
    comparison: AsyncReadback | None = None


class Trials:
    """The kinds that have run, and the compiled functions of kinds whose launches are confirmed.

    Any thread may call `look`. The caller of `run` holds a lock.
    """

    def __init__(self) -> None:
        # The confirmed functions of each family; all launchers of a family share its dictionary.
        self._confirmed: dict[Family, dict[Class, CompiledFunctions]] = {}
        self._trials: dict[tuple[Family, Class], _Trial] = {}

    def launcher(self, family: Family, arguments: LauncherArguments) -> FunctionLauncher:
        """Return what launches calls of a family, as far as its kinds are confirmed."""
        return launch_of(family, arguments, self._confirmed.setdefault(family, {}))

    def look(self, family: Family, of_lengths: Class) -> bool:
        """Return whether a kind's launches are, or may still be, confirmed; reads the device's verdict."""
        trial = self._trials.get((family, of_lengths))
        if trial is None:
            return True
        comparison, compiled = trial.comparison, trial.compiled  # read once: other threads look as well
        reported = None if comparison is None else comparison.read()
        if reported is not None and compiled is not None:
            if reported[0] == CONFIRMED:
                self._confirmed.setdefault(family, {})[of_lengths] = compiled
            elif reported[0] == REFUTED and trial.comparison is comparison:
                _log_refuted(family, "launched by arguments it gives other results")
            trial.over, trial.comparison = reported[0] != INCONCLUSIVE, None
        return not trial.over or of_lengths in self._confirmed.get(family, ())

    def run(
        self,
        family: Family,
        of_lengths: Class,
        arguments: LauncherArguments,
        call: PackageCall,
        launch_arguments: list[Any],
    ) -> tuple[Tensor, ...]:
        """Return the package's results of a call, and begin a trial of its kind if none has begun.

        `launch_arguments` are the arguments of a launcher.
        """
        trial = self._trials.setdefault((family, of_lengths), _Trial())
        trial.calls += 1
        # An inconclusive trial, or a trial without memory, is repeated at the second, fourth, eighth call.
        if trial.over or trial.comparison is not None or trial.calls & (trial.calls - 1):
            return call()
        watcher = Watcher()
        with watcher:
            results = call()
        try:
            with torch.no_grad():
                compiled = _looked_at(family, of_lengths, arguments, call, watcher)
                launch = launch_of(family, arguments, {of_lengths: compiled}, SPOILT)
                comparison = AsyncReadback(_verdict(launch(*launch_arguments), results))
            trial.compiled, trial.comparison = compiled, comparison
        except torch.OutOfMemoryError:
            log.debug("FA4: there was no memory to try the launches of a %s", call.direction)
        except Exception as error:  # noqa: BLE001 - the caller's call has run, and must not fail for this
            trial.over = True
            _log_refuted(family, str(error))
        return results


def _log_refuted(family: Family, reason: str) -> None:
    log.info("FA4 calls the package's Python for each %s of %s: %s", family.direction, family, reason)


def _looked_at(
    family: Family, of_lengths: Class, arguments: LauncherArguments, call: PackageCall, watcher: Watcher
) -> CompiledFunctions:
    """Return the compiled functions of a call; raises RefutedError if our launch is another one."""
    wanted: tuple[str, ...] = FORWARD if family.direction == "forward" else BACKWARD
    if wanted is BACKWARD and family.group > 1:
        wanted += wanted[-1:] * 2  # of keys and values, too
    taken_functions = [function for function in watcher.taken if function.by not in (SUMS_TILES, UNUSED)]
    if tuple(function.by for function in taken_functions) != wanted:
        raise RefutedError(f"it launches {', '.join(function.by for function in watcher.taken) or 'nothing'}")
    sizes = tiles(family, call.options["max_seqlen_q"])
    compiled = CompiledFunctions(tuple(taken.function for taken in taken_functions), *sizes)
    for tried in filter(None, (call, _shorter(family, of_lengths, call))):
        taken = watcher.taken
        if tried is not call:
            with Watcher(launches=False) as rehearsal:
                tried()
            taken = rehearsal.taken
        with Watcher(launches=False) as rehearsal:
            functions = tuple(map(rehearsal.watching, wanted, compiled.functions))
            launch = launch_of(family, arguments, {of_lengths: compiled._replace(functions=functions)})
            further: list[Any] = []
            if "cu_seqlens_q" in tried.tensors:
                further = [*(tried.options[f"max_seqlen_{side}"] for side in "qk"), True]
            if "page_table" in tried.tensors:
                further.insert(0, None)  # pages have no offsets
            launch(*tried.tensors.values(), *further)
        compare([x for x in taken if x.by != UNUSED], rehearsal.taken, tuple(tried.tensors.values()))
    return compiled


def _shorter(family: Family, of_lengths: Class, call: PackageCall) -> PackageCall | None:
    """Return a shorter call of the same kind, on the first rows; None if it would be of another kind."""
    offsets, query = call.tensors.get("cu_seqlens_q"), call.tensors["q"]
    batch = max((len(query) if offsets is None else len(offsets) - 1) - 1, 1)
    max_q, max_k = (max(call.options[f"max_seqlen_{side}"] - 1, 1) for side in "qk")
    if family.class_of(batch, max_q, max_k) != of_lengths:
        return None
    if call.as_pages and len(call.tensors["k"]) - 1 == tiles(family, max_q)[1]:
        return None  # a page of a tile's size is loaded whole

    def cut(name: str, x: Tensor) -> Tensor:
        if name == SINKS:
            return x
        if name.startswith("cu_seqlens"):
            return x[: batch + 1]
        if name in ("seqused_k", "page_table"):
            return x[:batch]
        if name == "lse":
            *batches, heads, tokens = x.shape
            return x.new_empty((batch, heads, max_q) if batches else (heads, max(tokens - 1, 1)))
        length = max_k if name in ("k", "v") else max_q
        return x[: max(len(x) - 1, 1)] if offsets is not None else x[:batch, :length]

    results = ("out", "lse", "dq", "dk", "dv")  # preallocated results have the longer call's length
    options = {name: value for name, value in call.options.items() if name not in results}
    tensors = {name: cut(name, x) for name, x in call.tensors.items()}
    return call._replace(tensors=tensors, options=options | {"max_seqlen_q": max_q, "max_seqlen_k": max_k})


# The comparison on the device


def _with_nan(x: Tensor) -> Tensor:
    """Fill a tensor with NaN, because its memory may still contain right results."""
    return x.fill_(torch.nan) if x.is_floating_point() else x


SPOILT = Memory(lambda *layout: _with_nan(uninitialized(*layout)), lambda x: _with_nan(torch.empty_like(x)))


def _verdict(got: Sequence[Tensor] | None, expected: Sequence[Tensor]) -> Tensor:
    """Return the verdict on two lists of results, as a tensor () on the device: equal within `NEAR`, or not.

    Uses few kinds of operations, because the first of each kind has to be loaded onto the device.
    """
    if got is None:
        raise RefutedError("nothing was launched")
    pairs = [(_without_inf(x), _without_inf(y)) for x, y in zip(got, expected, strict=True)]
    sizes, errors = (
        torch.stack([torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32) for x in ofs])
        for ofs in ([y for _, y in pairs], [x - y for x, y in pairs])
    )
    same = (errors <= (sizes * NEAR).maximum(sizes.amax() * ROUNDING)).all()
    return same * CONFIRMED + ~sizes.isfinite().all() * INCONCLUSIVE


def _without_inf(x: Tensor) -> Tensor:
    """Return an LSE with 0 in rows that see no key, because the difference of infinities is NaN."""
    return x.nan_to_num(torch.nan, 0.0, 0.0) if x.dtype == torch.float32 else x

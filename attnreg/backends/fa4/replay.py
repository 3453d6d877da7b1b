"""Repeated calls without the package's Python: their recorded launches, replayed once they are confirmed.

Two calls of one description launch the same kernels with the same numbers, so a call's launches can be
recorded and repeated. What the recording missed would be left out silently, so a recipe is used only once the
device has found, on rearranged copies of a later call's tensors, that it gives the package's results.
README.md has each step. Only for the releases in `package.TESTED_RELEASES`; nothing is recorded or confirmed
in a CUDA graph's capture.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.backends.fa4.package import PackageCall
from attnreg.backends.fa4.recording import Description, Recipe, distinguishable, record
from attnreg.torchlib.layout import uninitialized
from attnreg.torchlib.readback import AsyncReadback

# Descriptions that are kept; when there are more, all are forgotten. Packed batches bring ever new ones.
MOST = 4096
# With more than so many, batches come in ever new sizes, and a description may come once for each layer and
# never again. Its comparison, two more calls, then waits for as many later calls as make up for it.
FEW, WAIT = 256, 32

# What the device reports of a comparison; 2 is `readback.PENDING`. Values of which none is finite show
# nothing, as gradients of a loss that was scaled too far.
REFUTED, CONFIRMED, INCONCLUSIVE = 0, 1, 3

# By how much of its largest value a result may differ: backwards add up in any order, so that not even the
# package repeats itself. A result that is rounding alone may differ by a part of the largest of all.
NEAR, ROUNDING = 0.02, 1e-4

log = logging.getLogger("attnreg")


@dataclass(slots=True, eq=False)
class _Entry:
    """What is known of one description.

    Attributes:
        recipe: None as long as none was recorded, and if there is none to be used.
        closed: whether nothing more will be tried: its recipe is refuted, or it has none.
        confirmed: whether the recipe may be used.
        comparison: what the device is about to report; None if no comparison is under way.
        later_calls: how many calls came since the recording.
    """

    recipe: Recipe | None = None
    closed: bool = False
    confirmed: bool = False
    comparison: AsyncReadback | None = None
    later_calls: int = 0


class Replays:
    """The call descriptions that have come up, and their recipes.

    `find` may be called by any thread, the rest by one at a time.
    """

    def __init__(self, tested_release: bool) -> None:
        self.tested_release = tested_release
        self._entries: dict[Description, _Entry] = {}

    def find(self, description: Description | None) -> Recipe | None:
        """Return the confirmed recipe of a description; None as long as there is none."""
        entry = self._entries.get(description) if description is not None else None
        if entry is None:
            return None
        comparison = entry.comparison  # read once: another thread may clear it meanwhile
        if comparison is not None and comparison.read() == [CONFIRMED] * 2:
            entry.confirmed = True  # before the comparison goes, as `run` looks at them in the other order
            entry.comparison = None
        return entry.recipe if entry.confirmed else None

    def seen(self, description: Description) -> bool:
        """Whether such a call has run before, of a release that may be replayed; notes that it has now."""
        if description in self._entries:
            return True
        if self.tested_release:
            if len(self._entries) >= MOST:
                self._entries.clear()
            self._entries[description] = _Entry()
        return False

    def run(self, description: Description, call: PackageCall) -> tuple[Tensor, ...]:
        """Run a call of a kind that has run before; record it, or compare its recipe as well."""
        entry = self._entries[description]
        if entry.closed or entry.confirmed:
            return call()  # confirmed: the device has reported since the caller looked
        if entry.recipe is None:
            return _record(entry, call) if distinguishable(call.tensors) else call()
        results = call()
        _settle(entry, call.direction)
        entry.later_calls += 1
        # At the first, second, fourth call and so on: a comparison that is inconclusive or finds no memory is
        # repeated without doubling the cost of each call.
        due = not entry.later_calls & (entry.later_calls - 1)
        due = due and (len(self._entries) <= FEW or entry.later_calls >= WAIT)
        if due and entry.comparison is None and not entry.confirmed and entry.recipe is not None:
            _start_comparison(entry, entry.recipe, call, results)
        return results


def _record(entry: _Entry, call: PackageCall) -> tuple[Tensor, ...]:
    results, recipe = record(call)
    if isinstance(recipe, Recipe):
        entry.recipe = recipe
    else:
        entry.closed = True
        log.debug("FA4 calls the package's Python for each %s like this one: %s", call.direction, recipe)
    return results


def _settle(entry: _Entry, direction: str) -> None:
    """Take note of what the device has reported by now."""
    comparison = entry.comparison
    reported = None if comparison is None else comparison.read()
    if reported is None:
        return
    entry.confirmed = reported[0] == CONFIRMED
    entry.comparison = None
    if reported[0] == REFUTED:
        _refute(entry, direction, "its launches, replayed, give other results")


def _refute(entry: _Entry, direction: str, reason: str) -> None:
    entry.recipe, entry.closed = None, True
    log.info("FA4 calls the package's Python for each %s like this one: %s", direction, reason)


def _start_comparison(entry: _Entry, recipe: Recipe, call: PackageCall, results: tuple[Tensor, ...]) -> None:
    """Have the device compare a replay with the package; `results` are the package's for this very call."""
    try:
        with torch.no_grad():
            entry.comparison = AsyncReadback(_compared(recipe, call, results))
    except torch.OutOfMemoryError:
        log.debug("FA4: there was no memory to compare the recorded launches of a %s", call.direction)
    except Exception as error:  # noqa: BLE001 - the caller's call has run, and must not fail for this
        _refute(entry, call.direction, f"its launches, replayed, fail: {error}")


class _Halves(NamedTuple):
    """The last half of each packed sequence, rounded up: a batch of other lengths within the same bounds.

    Masks are aligned bottom-right, so a row sees those of its keys that are left, and its LSE remains an
    upper bound: a backward of them can't overflow.

    Attributes:
        offsets: where the halves begin and end.
        rows: which row each row is taken from.
        used: which rows belong to a sequence, of the halves.
    """

    offsets: Tensor
    rows: Tensor
    used: Tensor

    @classmethod
    def of(cls, offsets: Tensor, tokens: int) -> _Halves:
        ends = ((offsets.diff() + 1) // 2).cumsum(0)
        rows = torch.arange(tokens, device=offsets.device)
        sequence = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1)
        source = (rows + (offsets[1:] - ends)[sequence]).clamp_(max=tokens - 1)
        return cls(torch.cat((offsets[:1], ends)).to(offsets.dtype), source, rows < ends[-1])


def _compared(recipe: Recipe, call: PackageCall, results: tuple[Tensor, ...]) -> Tensor:
    """Return on the device whether a replay gives the package's results, for rearranged copies of a call.

    Heads and head dims of the copies are in reverse order: that reverses the results, and at the recorded
    addresses, should the tensors still be there, is something else. Of packed sequences they have a half.
    """
    tensors, conclusive = call.tensors, torch.ones((), dtype=torch.bool, device=recipe.device)
    halves: dict[str, _Halves] = {}
    for side, tokens in (("q", len(tensors["q"])), ("k", len(tensors["k"]))):
        offsets = tensors.get(f"cu_seqlens_{side}")
        if offsets is not None:
            halves[side] = half = _Halves.of(offsets, tokens)
            if call.options[f"max_seqlen_{side}"] > 1:
                conclusive &= ~half.used.all()  # sequences of one token are their own half
    copies = _copies(recipe, tensors, halves)
    # Keys and values take the side of the keys, as do their gradients; that of sinks has no rows.
    sides = ("q", "q") if call.direction == "forward" else ("q", "k", "k", "")
    if halves:
        # Same shapes, strides and longest lengths: nothing is compiled. The caller owns the compile lock.
        expected = call._replace(tensors=copies)()
    else:
        expected = tuple(_rearranged(x, tensors["q"].dim(), None) for x in results)
    got = recipe.launch(_spoilt_slots(recipe, tuple(copies.values())))
    if halves:
        got, expected = (
            tuple(
                _without_unused(x, halves[side].used) if side else x
                for x, side in zip(given, sides, strict=False)
            )
            for given in (got, expected)
        )
    return _verdict(got, expected, conclusive)


def _copies(recipe: Recipe, tensors: dict[str, Tensor], halves: dict[str, _Halves]) -> dict[str, Tensor]:
    """Return rearranged copies of a call's tensors, none at the address at which it was recorded."""
    copies: dict[str, Tensor] = {}
    for slot, (name, x) in enumerate(tensors.items()):
        if name == "cu_seqlens_k" and x is tensors["cu_seqlens_q"]:
            copies[name] = copies["cu_seqlens_q"]
            continue
        side = "k" if name in ("k", "v", "cu_seqlens_k") else "q"
        half = halves.get(side)
        if half is not None and name.startswith("cu_seqlens"):
            changed = half.offsets
        else:
            changed = _rearranged(x, tensors["q"].dim(), half)
        copies[name] = _copied(changed, x, recipe.addresses[slot])
    return copies


def _rearranged(x: Tensor, dims: int, half: _Halves | None) -> Tensor:
    """Return a tensor, or the halves of its sequences, with heads and head dims in reverse order."""
    if x.dim() == 1:  # sinks, which may be all the same
        return x.flip(0) - 1.0
    is_lse = x.dim() < dims  # (B, H, S) and (H, T); the others are (B, S, H, D) and (T, H, D)
    x = x.flip(-2) if is_lse else x.flip(-2, -1)
    return x if half is None else x.index_select(-1 if is_lse else -3, half.rows)


def _copied(x: Tensor, like: Tensor, address: int) -> Tensor:
    """Return a copy of `x` with the strides of `like`, at another address than this one."""
    # An expanded dimension has one element in memory.
    size = tuple(length if step else 1 for length, step in zip(like.shape, like.stride(), strict=True))
    copy = _elsewhere(size, like.stride(), like.dtype, like.device, address)
    return copy.copy_(x[tuple(map(slice, size))]).expand(like.shape)


def _elsewhere(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device, address: int
) -> Tensor:
    """Return a new tensor at another address than this one."""
    tensor = uninitialized(size, stride, dtype, device)
    if tensor.data_ptr() != address:
        return tensor
    return uninitialized(size, stride, dtype, device)  # `tensor` still occupies that address


def _spoilt_slots(recipe: Recipe, tensors: tuple[Tensor, ...]) -> list[Any]:
    """Return slots for a replay: new memory, at other than the recorded addresses, with no results in it."""
    slots: list[Any] = [*tensors, *recipe.rest]
    for slot, size, stride, dtype in recipe.allocations:
        slots[slot] = _elsewhere(size, stride, dtype, recipe.device, recipe.addresses[slot])
        spoilt = dtype.is_floating_point and slot not in recipe.zeroed
        slots[slot].fill_(torch.nan if spoilt else 0)
    return slots


def _without_unused(x: Tensor, used: Tensor) -> Tensor:
    """Return a result with NaN in the rows of no sequence, which the package doesn't write."""
    return x.where(used if x.dim() == 2 else used[:, None, None], torch.nan)


def _verdict(got: Sequence[Tensor], expected: Sequence[Tensor], conclusive: Tensor) -> Tensor:
    """Return on the device whether all tensors are equal, as far as a GPU repeats itself."""
    largest = [x.nan_to_num(0.0, 0.0, 0.0).abs().amax().float() for x in expected]
    least = torch.stack(largest).amax() * ROUNDING
    pairs = zip(got, expected, largest, strict=True)
    same = torch.stack([_near(x, y, (NEAR * own).maximum(least)) for x, y, own in pairs]).all()
    conclusive = conclusive & torch.stack([x.isfinite().any() for x in expected]).all()
    return same * (INCONCLUSIVE + conclusive * (CONFIRMED - INCONCLUSIVE))


def _near(got: Tensor, expected: Tensor, limit: Tensor) -> Tensor:
    # The difference of infinities is NaN, which is near nothing.
    same = (got - expected).abs_() <= limit
    same |= got == expected
    same |= got.isnan() & expected.isnan()
    return same.all()

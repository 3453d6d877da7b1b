"""Calls that are known, done again without the package's Python.

A call costs the host 90 to 120 µs on an H200, of which a launch is 10: the rest is Python that examines,
chooses and looks up, longer than the kernels run on short sequences. For two equal calls it comes to the
same: the same tensors allocated, the same kernels launched with the same numbers. So a call that comes
back is watched once (`_fa4_watching`), and from then on done from what was seen (`_fa4_recipe`), as soon
as its kind has proved to come out the same that way (`_fa4_proof`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from attnreg.backends.fa4.proof import Proof, proof_of
from attnreg.backends.fa4.watching import told_apart, watched

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnreg.backends.fa4.kinds import Kind
    from attnreg.backends.fa4.recipe import Recipe
    from attnreg.contract.backend import Call

__all__ = ["Launches", "Name", "known_as"]

Name = tuple[object, ...]

# Calls that are told apart at a time; then all begins anew. Packed batches bring ever new ones.
MOST = 4096

log = logging.getLogger("attnreg")


def known_as(call: Call, *tensors: Tensor) -> Name | None:
    """Return everything that decides what a call comes to; None of one that isn't done again.

    The number of tensors tells the direction. The package copies what isn't aligned, and makes that
    out from pointers, which differ from call to call.
    """
    (
        scale,
        max_q,
        max_k,
        window,
        cu_seqlens_q,
        cu_seqlens_k,
        used,
        table,
        bias,
        slopes,
        dropout,
        *_,
        deterministic,
    ) = call
    if used is not None or table is not None or bias is not None or slopes is not None or dropout:
        return None
    name = [scale, max_q, max_k, window, deterministic, tensors[0].get_device()]
    pointers = 0
    if cu_seqlens_q is not None:
        if cu_seqlens_k is None or cu_seqlens_q.stride() != (1,) or cu_seqlens_k.stride() != (1,):
            return None
        pointers = cu_seqlens_q.data_ptr() | cu_seqlens_k.data_ptr()
        # Of two offsets that are one tensor it isn't seen which goes where.
        name += (len(cu_seqlens_q), len(cu_seqlens_k), cu_seqlens_q is cu_seqlens_k)
    for x in tensors:
        pointers |= x.data_ptr()
        name += (x.shape, x.stride(), x.dtype)
    return None if pointers & 15 else tuple(name)


class Launches:
    """The calls that a loaded backend has met; to be changed by one thread at a time."""

    def __init__(self) -> None:
        # Whether the next one is to be watched; afterwards nothing new would be seen.
        self._met: dict[Name, bool] = {}
        self._recipes: dict[Name | None, tuple[Recipe, Proof]] = {}
        # As many as kinds were compiled, each in seconds: no bound is needed.
        self._proofs: dict[Kind, Proof] = {}

    def recipe(self, name: Name | None) -> Recipe | None:
        """Return how to do a call again; None if that isn't known, or not known to be right."""
        found = self._recipes.get(name)
        return found[0] if found is not None and found[1].holds else None

    def meet(self, name: Name) -> bool:
        """Whether the call is to be watched: one that has been met before, and not seen to any purpose."""
        if name not in self._met and len(self._met) >= MOST:
            self._met.clear()
            self._recipes.clear()
        found = self._recipes.get(name)
        due = self._met.get(name, False) if found is None else found[1].vague
        self._met.setdefault(name, True)
        return due

    def watch(
        self, name: Name, kind: Kind, run: Callable[[], Any], inputs: tuple[Tensor | None, ...], count: int
    ) -> Any:
        """Run a call of a kind that has run before, and see what there is to be seen."""
        *tensors, cu_seqlens_q, cu_seqlens_k = inputs
        proof = self._proofs.get(kind)
        if (proof is not None and proof.refuted) or not told_apart((*tensors, *{cu_seqlens_q, cu_seqlens_k})):
            return run()
        results, recipe = watched(run, inputs, count)
        self._met[name] = False
        if isinstance(recipe, str):
            log.debug("FA4 goes through its package's Python for a %s: %s", kind[0], recipe)
        else:
            if proof is None or proof.vague:
                proof = proof_of(str(kind[0]), recipe, inputs, results[:count])
            if proof is not None:
                self._proofs[kind] = proof
                self._recipes[name] = recipe, proof
        return results

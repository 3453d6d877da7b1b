"""Whether the bits of a sequence's results depend on its batch, for kernels that are told they may not.

A batch is run as it is. Then its sequences are run in other batches: each by itself, and all in reverse order
with two more. There the longest lengths, the addresses and each thread's share of the work differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from attnreg.core.contract.backend import Kernels
from attnreg.errors import RegistrationError
from attnreg.tools.measure import promises
from attnreg.tools.measure.inputs import Inputs
from attnreg.tools.measure.places import first_difference
from attnreg.tools.measure.reference import Results, names_of

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_batch_invariant(kernels: Kernels, inputs: Inputs, results: Sequence[tuple[Tensor, ...]]) -> None:
    """Check that a batch's results, in the contract's shapes, repeat bit for bit.

    `results` are the results of several calls of the same batch. Its sequences are also run in other batches.
    Raises `RegistrationError` if any bit differs.
    """
    repeated = {
        name: first_difference(name, y, x)
        for other in results[1:]
        for name, x, y in zip(names_of(inputs.call), results[0], other, strict=False)
        if not _same(x, y)
    }
    if repeated:
        raise RegistrationError(
            f"{_listed(repeated)}: got other bits for a repeated batch-invariant call; {_first(repeated)}"
        )
    differing: dict[str, str] = {}
    for name, place in _differences(kernels, inputs):
        differing.setdefault(name, place)
    if differing:
        raise RegistrationError(
            f"{_listed(differing)}: got other bits for a sequence in another batch; {_first(differing)}"
        )


def dependent(kernels: Kernels, inputs: Inputs) -> set[str]:
    """Return which results have other bits for a sequence in another batch: some of `Results`."""
    return {name for name, _ in _differences(kernels, inputs)}


def _differences(kernels: Kernels, inputs: Inputs) -> Iterator[tuple[str, str]]:
    """Yield each result that has other bits for a sequence in another batch, with the sequence and place."""
    of_queries, of_keys = _rows(inputs)
    everyone = range(len(of_queries))
    whole = _by_sequence(kernels, inputs)
    for order in (*([number] for number in everyone), [*everyone[::-1], *everyone[:2]]):
        parts = _by_sequence(kernels, _batch(inputs, order, of_queries, of_keys))
        for number, part in zip(order, parts, strict=True):
            batch = "alone" if len(order) == 1 else f"in a batch of sequences {order}"
            for name, x, y in zip(Results._fields, part, whole[number], strict=False):
                if not _same(x, y):
                    yield name, f"sequence {number} {batch}: {first_difference(name, x, y)}"


def _rows(inputs: Inputs) -> tuple[list[slice], list[slice]]:
    """Return where the queries and keys of each sequence are; nothing for pages, which may be shared."""
    sides = (inputs.q, inputs.call.cu_seqlens_q), (inputs.k, inputs.call.cu_seqlens_k)
    queries, keys = (
        [slice(n, n + 1) for n in range(len(x))]
        if offsets is None
        else [slice(*two) for two in pairwise(offsets.tolist())]
        for x, offsets in sides
    )
    return queries, [] if inputs.call.block_table is not None else keys


def _batch(inputs: Inputs, order: Sequence[int], of_queries: list[slice], of_keys: list[slice]) -> Inputs:
    """Return a batch of these sequences in that order, in memory of its own."""
    q, k, v, grad_out, call = inputs

    def picked(x: Tensor, rows: list[slice]) -> Tensor:
        return torch.cat([x[rows[number]] for number in order]) if rows else x.clone()

    def each(x: Tensor | None, dims: int) -> Tensor | None:
        """Return the rows of a tensor that has one for each sequence, if it does."""
        if x is None or x.dim() != dims or len(x) != len(of_queries):
            return x
        return x[list(order)]

    changes: dict[str, Any] = {name: each(getattr(call, name), dims) for name, dims in _PER_SEQUENCE.items()}
    call = call._replace(**changes)
    if call.key_ranges is not None:
        call = call._replace(key_ranges=picked(call.key_ranges, of_queries))
    call = call._replace(
        score_mod=_of_order(call.score_mod, order, 1), mask_mod=_of_order(call.mask_mod, order, 0)
    )
    if call.grad_lse is not None:  # (B, H, S_q), packed (H, T_q)
        grad_lse = call.grad_lse if call.cu_seqlens_q is None else call.grad_lse.T
        grad_lse = picked(grad_lse, of_queries)
        call = call._replace(grad_lse=grad_lse if call.cu_seqlens_q is None else grad_lse.T.contiguous())
    if call.cu_seqlens_q is not None:
        call = call._replace(**_offsets("q", of_queries, order, call.cu_seqlens_q))
    if call.cu_seqlens_k is not None:
        call = call._replace(**_offsets("k", of_keys, order, call.cu_seqlens_k))
    return Inputs(
        picked(q, of_queries), picked(k, of_keys), picked(v, of_keys), picked(grad_out, of_queries), call
    )


def _of_order(
    function: Callable[..., Tensor] | None, order: Sequence[int], at: int
) -> Callable[..., Tensor] | None:
    """Return a function of scores for a batch in another order; argument number `at` is the sequence."""
    if function is None:
        return None
    numbers = torch.tensor(order, dtype=torch.int32)

    def ordered(*arguments: Tensor) -> Tensor:
        number = numbers.to(arguments[at].device)[arguments[at]]
        return function(*arguments[:at], number, *arguments[at + 1 :])

    return ordered


# The optional tensors of a call with a row for each sequence, and their dimensions then.
_PER_SEQUENCE = {"seqused_k": 1, "block_table": 2, "attn_bias": 4, "alibi_slopes": 2}


def _offsets(side: str, rows: list[slice], order: Sequence[int], like: Tensor) -> dict[str, Any]:
    lengths = [rows[number].stop - rows[number].start for number in order]
    offsets = like.new_tensor([*accumulate(lengths, initial=0)])
    return {f"cu_seqlens_{side}": offsets, f"max_{side}": max(lengths)}


def _by_sequence(kernels: Kernels, inputs: Inputs) -> list[tuple[Tensor, ...]]:
    """Run a batch; returns the results of each sequence. A bias may be of all, and so its gradient."""
    results, (of_queries, of_keys) = promises.results(kernels, inputs), _rows(inputs)
    lse = results[1] if inputs.call.cu_seqlens_q is None else results[1].T
    by_query, by_key = [results[0], lse, *results[2:3]], results[3:5] if of_keys else ()
    return [
        (*(x[rows] for x in by_query), *(x[of_keys[number]] for x in by_key))
        for number, rows in enumerate(of_queries)
    ]


def _same(x: Tensor, y: Tensor) -> bool:
    bits = _INTEGERS[x.element_size()]
    return x.dtype == y.dtype and torch.equal(x.contiguous().view(bits), y.contiguous().view(bits))


def _first(places: Mapping[str, str]) -> str:
    """Return the first place that isn't empty, as of tensors that differ only in their NaN."""
    return next(filter(None, places.values()), "in the bits of NaN alone")


def _listed(names: Collection[str]) -> str:
    return ", ".join(name for name in Results._fields if name in names)

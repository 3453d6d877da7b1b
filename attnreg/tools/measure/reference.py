"""Attention as textbooks write it: whole matrices, autograd, nothing clever. The one reference.

In float64 it is the truth; in the inputs' own dtype it is what a user would get without any kernel,
which says how wrong a kernel may be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.contract.backend import Call
from attnreg.core.contract.options import options_on
from attnreg.tools.measure.cases import Case
from attnreg.tools.measure.inputs import Inputs, key_rows, rows_of


class Results(NamedTuple):
    """The results of forward and backward, in the contract's shapes and dtypes."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None = None
    dbias: Tensor | None = None


def names_of(call: Call) -> tuple[str, ...]:
    """Return the fields of `Results` that kernels may return for a call, in their order."""
    *names, dsinks, dbias = Results._fields
    return *names, dbias if call.bias_gradient else dsinks


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: tuple[int, int] = (-1, -1),
    *,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    kept: Tensor | None = None,
    softcap: float = 0.0,
    key_ranges: Tensor | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    numbers: Tensor | None = None,
    first_head: int = 0,
    first_row: int = 0,
    len_q: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of sequences of equal lengths, in the dtype of the tensors.

    Args:
        query, key, value: (B, S_q, H, D), (B, S_k, H_k, D) and (B, S_k, H_k, D_v), any floating-point dtype.
        scale, window, bias, alibi_slopes, softcap: as in `Call`.
        key_ranges: int32 (B, S_q, R, 2), the ranges of `Call` for the rows of `query`.
        score_mod, mask_mod: as in `Call`; they are called once, with tensors that broadcast to the scores.
        numbers: (B,), the numbers of the sequences in their batch, for these functions; 0, 1, ... unless
            given.
        first_head: the number of the query's first head, for these functions.
        kept: (B, H, S_q, S_k), the factors of dropout. A dropped weight has the factor 0.
        first_row: where the rows start in the whole query.
        len_q: the length of the whole query, if `query` has only some of its rows.

    Returns:
        The output (B, S_q, H, D_v) and the LSE (B, H, S_q), both differentiable.
    """
    group = query.shape[2] // key.shape[2]
    query, key, value = (
        x.transpose(1, 2) for x in (query, *(x.repeat_interleave(group, dim=2) for x in (key, value)))
    )
    scores = query @ key.mT * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    rows, keys = scores.shape[-2:]
    i = torch.arange(first_row, first_row + rows, device=scores.device)[:, None]
    j = torch.arange(keys, device=scores.device)
    numbers = torch.arange(len(scores), device=scores.device) if numbers is None else numbers
    heads = torch.arange(first_head, first_head + scores.shape[1], device=scores.device)
    places = numbers[:, None, None, None], heads[:, None, None], i, j
    visible = torch.ones(rows, keys, dtype=torch.bool, device=scores.device)
    if score_mod is not None:
        scores = score_mod(scores, *places).to(scores.dtype)
    if mask_mod is not None:
        visible = visible & mask_mod(*places)
    i = i + keys - (rows if len_q is None else len_q)
    if window[0] >= 0:
        visible = visible & (j >= i - window[0])
    if window[1] >= 0:
        visible = visible & (j <= i + window[1])
    if key_ranges is not None:
        low, high = key_ranges[:, None, :, None].unbind(-1)
        visible = visible & ((j[:, None] >= low) & (j[:, None] < high)).any(-1)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None].to(scores.dtype) * (i - j).abs()
    if bias is not None:
        visible = visible & (bias if bias.dtype == torch.bool else bias > -torch.inf)
        if bias.dtype != torch.bool:
            scores = scores + bias.masked_fill(bias == -torch.inf, 0.0).to(scores.dtype)
    sees_a_key = visible.any(-1, keepdim=True)
    # A row without a key keeps its scores through the softmax and loses its weights after: no NaN arises.
    weights = scores.masked_fill(~visible & sees_a_key, -torch.inf).softmax(-1).masked_fill(~visible, 0.0)
    lse = scores.masked_fill(~visible, -torch.inf).logsumexp(-1)
    if kept is not None:
        weights = weights * kept.to(weights.dtype)
    return (weights @ value).transpose(1, 2), lse


# The options of a call that aren't in the formula: those who call `attend` handle them, or nothing has to.
NOT_IN_FORMULA = (
    "dropout", "num_splits", "seqused_k", "block_table", "grad_lse", "sinks", "bias_gradient",
)  # fmt: skip


def options_of_part(case: Case, call: Call, sequences: Tensor, heads: slice, rows: Tensor) -> dict[str, Any]:
    """Return the options of a call, as `attend` takes them, for some sequences and query heads.

    Each option of a call that `NOT_IN_FORMULA` doesn't list is an argument of `attend`, which refuses one
    that it doesn't know.

    Args:
        case: the case of the call.
        call: the call of all sequences.
        sequences: int64 (b,), the numbers of the sequences.
        heads: the numbers of the query heads.
        rows: int64 (b, s), the rows of their queries, in a query viewed as (T, H, D).
    """
    options = {}
    for row in options_on(call):
        value = getattr(call, row.name)
        if row.name == "attn_bias":
            sizes = len(case.lens_q), case.heads[0], case.max_q, case.max_k
            of_heads = value.expand(sizes)[:, heads]
            options["bias"] = of_heads[sequences[:, None], :, rows % case.max_q].transpose(1, 2)
        elif row.name == "key_ranges":
            options[row.name] = value[rows]
        elif row.shapes:  # (H,) or (B, H)
            options[row.name] = (value if value.dim() == 1 else value[sequences])[..., heads]
        elif row.values == "function":
            options |= {row.name: value, "numbers": sequences, "first_head": heads.start or 0}
        elif row.name not in NOT_IN_FORMULA:
            options[row.name] = value
    return options


@torch.enable_grad()  # a caller may have turned it off for the kernels
def attention(case: Case, inputs: Inputs, dtype: torch.dtype, kept: Tensor | None = None) -> Results:
    """Return the results of a case, computed in one dtype throughout.

    `kept` are the factors of dropout (B, H, max_q, max_k) that `kept_weights` returns.
    """
    q, k, v, grad = (_rows(x).detach().to(dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.grad_out))
    out, lse = q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_full(q.shape[:-1], -torch.inf)
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    call = inputs.call
    sinks = None if call.sinks is None else call.sinks.detach().to(dtype).requires_grad_()
    further: dict[str, Tensor] = {} if sinks is None else {"dsinks": sinks}
    if call.bias_gradient and call.attn_bias is not None:
        further["dbias"] = call.attn_bias.detach().to(dtype).requires_grad_()
        call = call._replace(attn_bias=further["dbias"])
    sums = {name: torch.zeros_like(leaf) for name, leaf in further.items()}
    grad_lse = None if call.grad_lse is None else _rows(call.grad_lse.mT[..., None])[..., 0].to(dtype)
    # No row belongs to two groups, so each has gradients of its own: rows of no sequence keep zeros.
    for batch, rows_q, rows_k in _same_lengths(case, inputs):
        query, key, value = (x.requires_grad_() for x in (q[rows_q], k[rows_k], v[rows_k]))
        part = attend(
            *(query, key, value, call.scale, call.window),
            **options_of_part(case, call, batch, slice(None), rows_q),
            kept=None if kept is None else kept[batch, :, : rows_q.shape[1], : rows_k.shape[1]],
        )
        if case.sinks or sinks is not None:
            part = with_sinks(*part, sinks_of(part[1]) if sinks is None else sinks)
        results, of_results = [part[0]], [grad[rows_q]]
        if grad_lse is not None:
            results.append(part[1].mT)
            of_results.append(grad_lse[rows_q].masked_fill(results[1] == -torch.inf, 0.0))
        leaves = query, key, value, *further.values()
        dq[rows_q], dk[rows_k], dv[rows_k], *others = torch.autograd.grad(results, leaves, of_results)
        for total, part_of_total in zip(sums.values(), others, strict=True):
            total += part_of_total
        out[rows_q], lse[rows_q] = part[0].detach(), part[1].detach().mT
    like = inputs.grad_out, inputs.q, inputs.k, inputs.v
    out, dq, dk, dv = (x.view(like_x.shape) for x, like_x in zip((out, dq, dk, dv), like, strict=True))
    return Results(out, lse.view(inputs.q.shape[:-1]).transpose(-1, -2), dq, dk, dv, **sums)


def sinks_of(lse: Tensor) -> Tensor:
    """Return the sinks (H,) of a case that has some, in the dtype of its LSE (B, H, S_q)."""
    return torch.linspace(-1.0, 3.0, lse.shape[-2], dtype=lse.dtype, device=lse.device)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and LSE as if each row that sees a key saw one more key, without a value.

    `out` is (B, S_q, H, D_v), `lse` (B, H, S_q) and `sinks` (H,), the score of that key. The results have
    the shapes and dtypes of `out` and `lse`.
    """
    unseen = lse == -torch.inf
    finite_lse = lse.masked_fill(unseen, 0.0)
    total = torch.logaddexp(finite_lse, sinks[:, None])
    return (out * (finite_lse - total).exp().mT[..., None]).to(out.dtype), total.masked_fill(
        unseen, -torch.inf
    )


def kept_weights(case: Case, out: Tensor) -> Tensor:
    """Return the factors of dropout (B, H, max_q, max_k), float64, that an output shows.

    The output is (B, S_q, H, D_v) or packed (T_q, H, D_v). The case's value is the identity, so column j of
    the output is the weight of key j.
    """
    kept = out.new_zeros(len(case.lens_q), case.heads[0], case.max_q, case.max_k, dtype=torch.float64)
    for number, rows in enumerate(rows_of(case.lens_q, case.lens_q)):
        columns = case.lens_k[number]
        shown = _rows(out)[rows.to(out.device), :, :columns] != 0.0
        kept[number, :, : len(rows), :columns] = shown.transpose(0, 1) / (1.0 - case.dropout)
    return kept


def _same_lengths(case: Case, inputs: Inputs) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield sequences of equal lengths: their numbers and their rows of queries and of keys."""
    numbers_of = defaultdict(list)
    for number, lens in enumerate(zip(case.lens_q, case.lens_seen, strict=True)):
        if all(lens):
            numbers_of[lens].append(number)
    rows_q, rows_k = rows_of(case.lens_q, case.lens_q), key_rows(case, inputs.call.block_table)
    for numbers in numbers_of.values():
        stacked = (torch.stack([rows[n] for n in numbers]) for rows in (rows_q, rows_k))
        at, queries, keys = (x.to(inputs.q.device) for x in (torch.tensor(numbers), *stacked))
        yield at, queries, keys


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x.flatten(0, 1)

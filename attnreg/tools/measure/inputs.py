"""The tensors of a case: the one generator of inputs, for tests, `verify`, `tune` and `bench`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.contract.backend import Call
from attnreg.core.contract.options import OPTIONS
from attnreg.tools.measure.cases import Case, field_of
from attnreg.tools.measure.places import first_difference

# A processor's last cache; a GPU tells the size of its own.
CPU_CACHE = 32 * 2**20
MOST_COPIES = 16
# With so many keys the LSE is about as large as sinks around 1.
FEW_KEYS = 16
# How many pages of a paged key-value cache belong to no sequence.
SPARE_PAGES = 3
# How many places a function of a case's scores tells apart.
TABLE = 7
# Elements before and after a guarded tensor: so many that its alignment to 64 bytes stays.
GUARD = 64


class Inputs(NamedTuple):
    """The arguments of a case's kernels: query, key and value, the output's gradient, and the call."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    call: Call


def inputs(
    case: Case, device: torch.device | str = "cpu", seed: int = 0, *, drawn_on: torch.device | str = "cpu"
) -> Inputs:
    """Draw the tensors of a case. The values depend on nothing but the seed and `drawn_on`.

    The generator runs on `drawn_on`. Values drawn on the CPU are the same for every device. For a large call
    on a GPU, draw on the GPU: that takes no time.
    """
    generator = torch.Generator(drawn_on).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device)

    def values(*shape: int) -> Tensor:
        return normal(*shape).mul_(case.magnitude).to(device, getattr(torch, case.dtype))

    table = _block_table(case, generator)
    rows_q, rows_k = _rows_shape(case, case.lens_q), _rows_shape(case, case.lens_k)
    if table is not None and case.page_size is not None:
        rows_k = (table.numel() + SPARE_PAGES, case.page_size)
    (heads_q, heads_k), (dim, dim_v) = case.heads, case.dims
    q = values(*rows_q, heads_q, dim)
    k, v = values(*rows_k, heads_k, dim), values(*rows_k, heads_k, dim_v)
    grad = values(*rows_q, heads_q, dim_v) / case.magnitude
    if case.dropout:
        places = torch.tensor([key for length in case.lens_k for key in range(length)], dtype=torch.long)
        identity = torch.eye(max(dim_v, case.max_k))[places, :dim_v]
        v = identity.view(*rows_k, 1, dim_v).expand(v.shape).to(v)
    if case.poison:
        unseen = torch.ones(rows_k, dtype=torch.bool)
        for rows in key_rows(case, table):
            unseen.view(-1)[rows] = False
        k[unseen.to(device)], v[unseen.to(device)] = torch.nan, torch.nan
        if case.tail:
            q[-case.tail :], grad[-case.tail :] = torch.nan, torch.nan
    q, k, v, grad = _laid_out(case, q, k, v, grad)
    call = _call(case, torch.device(device), table, _bias(case, normal, q))
    if case.grad_lse:
        shape = (heads_q, *rows_q) if case.varlen else (rows_q[0], heads_q, rows_q[1])
        call = call._replace(grad_lse=_grad_lse(case, normal(*shape).to(grad.device)))
    call = call._replace(**_masks_and_functions(case, generator, q.device))
    if case.counts_sinks:
        call = call._replace(sinks=_sinks(case, generator).to(q.device))
    if case.dropout:
        state = torch.randint(2**62, (2,), generator=generator, device=generator.device)
        call = call._replace(rng_state=state.to(device).view(torch.uint64))
    return Inputs(q, k, v, grad, call)


def _sinks(case: Case, generator: torch.Generator) -> Tensor:
    """Return sinks (H,) in the dtype of the query; float32 if that is float64.

    They grow with the number of keys, as the LSE does. An output would hardly show that smaller sinks are
    lost.
    """
    order = torch.randperm(case.heads[0], generator=generator, device=generator.device).cpu()
    sinks = torch.linspace(-1.0, 3.0, case.heads[0])[order] + math.log(max(case.max_k / FEW_KEYS, 1.0))
    return sinks if case.dtype == "float64" else sinks.to(getattr(torch, case.dtype))


def _key_ranges(case: Case, generator: torch.Generator) -> Tensor:
    """Return ranges of keys, int32 (T_q, R, 2), some of which are empty, overlap, or end beyond the keys."""
    longest = torch.ones(sum(case.lens_q) + case.tail)
    for rows, length in zip(rows_of(case.lens_q, case.lens_q), case.lens_k, strict=True):
        longest[rows] += length
    drawn = torch.rand(len(longest), case.key_ranges, 2, generator=generator, device=generator.device).cpu()
    return (drawn * 1.4 * longest[:, None, None] - 0.2 * longest[:, None, None]).to(torch.int32)


def _masks_and_functions(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, Any]:
    """Return the ranges of a case's keys and the functions of its scores, by their fields of `Call`."""
    fields: dict[str, Any] = {}

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).to(device)

    batch, heads = max(len(case.lens_q), 1), case.heads[0]
    if case.key_ranges:
        fields["key_ranges"] = _key_ranges(case, generator).to(device)
    if case.score_mod:
        fields["score_mod"] = _score_mod(normal(heads), normal(batch, TABLE))
    if case.mask_mod:
        fields["mask_mod"] = _mask_mod(normal(batch, heads, TABLE) < 0.7)
    return fields


def _score_mod(gains: Tensor, table: Tensor) -> Callable[..., Tensor]:
    """Return a function of a score, its head and places: `gains` are (H,), the table (B, `TABLE`)."""

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + torch.sin(score * gains[head]) + table[batch, (3 * query + key) % TABLE]

    return score_mod


def _mask_mod(table: Tensor) -> Callable[..., Tensor]:
    """Return a function of a head and places, from a boolean table (B, H, `TABLE`)."""

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return table[batch, head, (query + 2 * key) % TABLE]

    return mask_mod


def _bias(case: Case, normal: Callable[..., Tensor], q: Tensor) -> Tensor | None:
    if case.bias == "key padding":
        lens = case.max_k - torch.arange(len(case.lens_k)) % 3 * (case.max_k // 3)
        return (torch.arange(case.max_k) < lens[:, None])[:, None, None, :].to(q.device)
    if case.bias == "additive":
        bias = normal(case.heads[0], case.max_q, case.max_k)
        bias[:, ::5] = -torch.inf  # these rows see no key
        return bias.to(q.device, q.dtype)
    return None


def copies(case: Case, device: torch.device, count: int) -> list[Inputs]:
    """Return `count` sets of tensors of a call, each with its own values, drawn on the device.

    All sets share a `Call`, as the layers of a model do: backends cache what they derive from offsets.
    """
    first = inputs(case, device, drawn_on=device)
    others = (inputs(case, device, seed, drawn_on=device) for seed in range(1, count))
    return [first, *(drawn._replace(call=first.call) for drawn in others)]


def copies_beyond_the_cache(case: Case, device: torch.device, fewest: int = 1) -> int:
    """Return how many copies of a call's tensors are twice the device's last cache; at most 16."""
    size, cache, most = max(case.nbytes, 1), CPU_CACHE, math.inf
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        cache = int(getattr(properties, "L2_cache_size", 0)) or 2 * CPU_CACHE
        most = max(torch.cuda.mem_get_info(device)[0] // (8 * size), 1)
    return int(min(max(min(-(-2 * cache // size), MOST_COPIES), fewest), most))


class Guarded:
    """The inputs of a call inside larger buffers, to see whether a kernel stays within them.

    The memory around them is NaN, or the least integer, so that reading it shows in the results.

    Attributes:
        inputs: the same values, with the same strides and alignment.
    """

    def __init__(self, unguarded: Inputs) -> None:
        self._buffers: dict[int, Tensor] = {}  # by the memory that was copied: views may share it
        self._views: dict[int, Tensor] = {}
        q, k, v, grad_out, call = unguarded
        # All but the random state, which a forward may overwrite.
        options: list[Any] = [self._view(x) if isinstance(x, Tensor) else x for x in call]
        guarded = Call(*options)._replace(rng_state=call.rng_state)
        self.inputs = Inputs(self._view(q), self._view(k), self._view(v), self._view(grad_out), guarded)
        self._before = [(buffer, buffer.clone()) for buffer in self._buffers.values()]

    def written(self) -> str:
        """Return which input has changed and where, or that the memory around one has; empty if none has."""
        named = {**self.inputs._asdict(), **self.inputs.call._asdict()}
        for buffer, before in self._before:
            if torch.equal(buffer.view(torch.uint8), before.view(torch.uint8)):
                continue
            memory = buffer.untyped_storage()._cdata
            inside = {
                name: x
                for name, x in named.items()
                if isinstance(x, Tensor) and x.untyped_storage()._cdata == memory
            }
            for name, x in inside.items():
                unchanged = before.as_strided(x.shape, x.stride(), x.storage_offset())
                if text := first_difference(name, x, unchanged):
                    return text
            return f"around {' and '.join(inside)}"
        return ""

    def holds(self, result: Tensor) -> bool:
        """Whether a result, of any shape and dtype, lies in the memory of an input."""
        memory = result.untyped_storage()._cdata
        return any(memory == buffer.untyped_storage()._cdata for buffer in self._buffers.values())

    def _view(self, x: Tensor) -> Tensor:
        if id(x) not in self._views:
            memory = x.untyped_storage()
            if memory._cdata not in self._buffers:
                flat = x.new_empty(0).set_(memory)
                least = True if x.dtype == torch.bool else torch.nan
                if not (x.is_floating_point() or x.dtype == torch.bool):
                    least = torch.iinfo(x.dtype).min
                band = x.new_full((GUARD,), least)
                self._buffers[memory._cdata] = torch.cat((band, flat, band))
            buffer, start = self._buffers[memory._cdata], x.storage_offset() + GUARD
            self._views[id(x)] = buffer.as_strided(x.shape, x.stride(), start)
        return self._views[id(x)]


def rows_of(lens: tuple[int, ...], counted: tuple[int, ...]) -> list[Tensor]:
    """Return the rows of each sequence that count, each (rows,), int64, in tensors viewed as (T, H, D)."""
    starts = accumulate(lens, initial=0)
    return [torch.arange(start, start + n) for start, n in zip(starts, counted, strict=False)]


def key_rows(case: Case, table: Tensor | None) -> list[Tensor]:
    """Return the rows of each sequence's keys that count, in keys viewed as (T, H, D).

    `table` are the page numbers (B, pages), of any integer dtype, if the keys lie in pages.
    """
    if table is None or case.page_size is None:
        return rows_of(case.lens_k, case.lens_seen)
    pages = table.long().cpu()[:, :, None] * case.page_size + torch.arange(case.page_size)
    return [rows[:n] for rows, n in zip(pages.flatten(1), case.lens_seen, strict=True)]


def _rows_shape(case: Case, lens: tuple[int, ...]) -> tuple[int, ...]:
    """Return (T,) or (B, S)."""
    return (sum(lens) + case.tail,) if case.varlen else (len(lens), max(lens, default=0))


def _block_table(case: Case, generator: torch.Generator) -> Tensor | None:
    """Return page numbers (B, pages), int64, in random order, among more pages than are needed."""
    if case.page_size is None:
        return None
    count, width = len(case.lens_k), -(-case.max_k // case.page_size)
    pages = torch.randperm(count * width + SPARE_PAGES, generator=generator, device=generator.device)
    return pages[: count * width].view(count, width)


def _laid_out(case: Case, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the case's memory layouts, with the same values; an expanded gradient is 0.5."""
    if case.grad_layout == "expanded":
        grad = grad.new_full((1,) * grad.dim(), 0.5).expand(grad.shape)
    else:
        grad = _LAYOUTS[case.grad_layout](grad)
    if case.layout == "fused qkv":
        heads = [x.shape[-2] for x in (q, k, v)]
        return *torch.split(torch.cat((q, k, v), dim=-2), heads, dim=-2), grad
    if case.layout == "one key head":
        return q, *(x[..., :1, :].expand(x.shape) for x in (k, v)), grad
    return *map(_LAYOUTS[case.layout], (q, k, v)), grad


def _grad_lse(case: Case, drawn: Tensor) -> Tensor:
    """Return the gradient of the LSE, with NaN in the tail of a poisoned case."""
    drawn = drawn.double() if case.dtype == "float64" else drawn
    if case.grad_layout == "expanded":
        return drawn.new_full((1,) * drawn.dim(), 0.5).expand(drawn.shape)
    if case.poison and case.tail:
        drawn[:, -case.tail :] = torch.nan
    return drawn


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": torch.Tensor.contiguous,
    "bhsd": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2),
    # What lies between the elements is NaN, so that reading it shows.
    "last dim strided": lambda x: torch.stack((x, torch.full_like(x, torch.nan)), dim=-1)[..., 0],
    # One element after the start of the memory: no address is aligned.
    "offset": lambda x: torch.cat((x.new_full((1,), torch.nan), x.flatten()))[1:].view(x.shape),
    # One element between heads: no row but the first is aligned.
    "odd rows": lambda x: torch.nn.functional.pad(x, (0, 1), value=torch.nan)[..., :-1],
}


def _call(case: Case, device: torch.device, table: Tensor | None, bias: Tensor | None) -> Call:
    def int32(numbers: Iterable[int]) -> Tensor:
        return torch.tensor(tuple(numbers), dtype=torch.int32, device=device)

    cu_seqlens_q = cu_seqlens_k = int32(accumulate(case.lens_q, initial=0)) if case.varlen else None
    if not case.one_cu_seqlens:
        paged = table is not None
        cu_seqlens_k = int32(accumulate(case.lens_k, initial=0)) if case.varlen and not paged else None
    heads = case.heads[0]
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
    if case.varlen:  # (B, H), which the contract allows as well as (H,)
        slopes = slopes / torch.arange(1, len(case.lens_q) + 1)[:, None]
    call = Call(
        scale=case.dims[0] ** -0.5 if case.scale is None else case.scale,
        max_q=case.max_q,
        max_k=case.max_k,
        window=case.window,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=None if case.seqused_k is None else int32(case.seqused_k),
        block_table=None if table is None else table.to(device, torch.int32),
        attn_bias=bias,
        alibi_slopes=slopes.to(device) if case.alibi else None,
        deterministic=case.deterministic,
        batch_invariant=case.batch_invariant,
    )
    numbers = [row for row in OPTIONS if row.values in ("number", "integer") and field_of(row)]
    return call.with_options({row.name: getattr(case, field_of(row)) for row in numbers})

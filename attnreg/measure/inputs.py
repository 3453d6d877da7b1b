"""The tensors of a case: the one generator of inputs, for tests, `verify`, `tune` and `bench`."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnreg.contract.backend import Call

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnreg.measure.cases import Case

# A processor's last cache; a GPU tells the size of its own.
CPU_CACHE = 32 * 2**20
MOST_COPIES = 16


class Inputs(NamedTuple):
    """What the kernels of a case are called with."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    call: Call


def inputs(
    case: Case, device: torch.device | str = "cpu", seed: int = 0, *, drawn_on: torch.device | str = "cpu"
) -> Inputs:
    """Draw the tensors of a case; the values depend on the seed and on nothing else.

    Args:
        case: the call.
        device: where the tensors are to be.
        seed: of the random generator.
        drawn_on: where the generator runs. Values drawn on the CPU are the same for every device; those
            of a large call for a GPU are drawn there, which takes no time.
    """
    draw = _Draw(case, torch.device(device), torch.Generator(drawn_on).manual_seed(seed))
    table = draw.block_table()
    q_shape, k_shape = draw.token_shape(case.lens_q), draw.key_shape(table)
    (heads_q, heads_k), (dim, dim_v) = case.heads, case.dims
    q = draw.values(*q_shape, heads_q, dim)
    k, v = draw.values(*k_shape, heads_k, dim), draw.values(*k_shape, heads_k, dim_v)
    grad = draw.values(*q_shape, heads_q, dim_v) / case.magnitude
    if case.poison:
        unseen = draw.unseen_keys(k_shape, table)
        k[unseen], v[unseen] = torch.nan, torch.nan
        if case.tail:
            q[-case.tail :], grad[-case.tail :] = torch.nan, torch.nan
    q, k, v = draw.laid_out(q, k, v)
    return Inputs(q, k, v, draw.laid_out_grad(grad), draw.call(table))


def copies(case: Case, device: torch.device, count: int) -> list[Inputs]:
    """Return the tensors of a call so many times over, with values of their own, drawn on the device.

    All have the same `Call`, as the layers of a model have: backends keep what they derive from offsets.
    """
    first = inputs(case, device, drawn_on=device)
    others = (inputs(case, device, seed, drawn_on=device) for seed in range(1, count))
    return [first, *(one._replace(call=first.call) for one in others)]


def copies_beyond_the_cache(case: Case, device: torch.device, fewest: int = 1) -> int:
    """Return how many copies of a call's tensors are twice the device's last cache; at most 16."""
    size = max(case.nbytes, 1)
    wanted = max(min(-(-2 * _cache(device) // size), MOST_COPIES), fewest)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        wanted = min(wanted, max(free // (8 * size), 1))
    return wanted


def _cache(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_CACHE
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 2 * CPU_CACHE


class _Draw:
    """The parts of a case's tensors, from one random generator."""

    def __init__(self, case: Case, device: torch.device, generator: torch.Generator) -> None:
        self.case = case
        self.device = device
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.generator = generator

    def values(self, *shape: int) -> Tensor:
        """Return normal values."""
        return self.normal(*shape).mul_(self.case.magnitude).to(self.device, self.dtype)

    def normal(self, *shape: int) -> Tensor:
        """Return float32 values, where they are drawn."""
        return torch.randn(shape, generator=self.generator, device=self.generator.device)

    def token_shape(self, lens: tuple[int, ...]) -> tuple[int, ...]:
        """Return (T,) or (B, S)."""
        case = self.case
        return (sum(lens) + case.tail,) if case.varlen else (len(lens), max(lens, default=0))

    def key_shape(self, table: Tensor | None) -> tuple[int, ...]:
        """Return (T,), (B, S) or (pages, page size)."""
        if table is None or self.case.page_size is None:
            return self.token_shape(self.case.lens_k)
        return (table.numel() + 3, self.case.page_size)

    def block_table(self) -> Tensor | None:
        """Return page numbers (B, pages) in no order, out of three more than are needed."""
        case = self.case
        if case.page_size is None:
            return None
        count, width = len(case.lens_k), -(-case.max_k // case.page_size)
        pages = torch.randperm(count * width + 3, generator=self.generator, device=self.generator.device)
        pages = pages[: count * width]
        return pages.view(count, width).to(self.device, torch.int32)

    def unseen_keys(self, shape: tuple[int, ...], table: Tensor | None) -> Tensor:
        """Return which of the keys no query may see."""
        unseen = torch.ones(shape, dtype=torch.bool)
        for rows in key_rows(self.case, table):
            unseen.view(-1)[rows] = False
        return unseen.to(self.device)

    def laid_out(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same values in the memory layout of the case."""
        if self.case.layout == "fused qkv":
            return _fused(q, k, v)
        if self.case.layout == "one key head":
            k, v = (x[..., :1, :].expand(x.shape) for x in (k, v))
            return q, k, v
        q, k, v = (_LAYOUTS[self.case.layout](x) for x in (q, k, v))
        return q, k, v

    def laid_out_grad(self, grad: Tensor) -> Tensor:
        """Return the incoming gradient in its memory layout."""
        if self.case.grad_layout == "expanded":
            return grad.new_full((1,) * grad.dim(), 0.5).expand(grad.shape)
        return _LAYOUTS[self.case.grad_layout](grad)

    def call(self, table: Tensor | None) -> Call:
        """Return the arguments other than query, key and value."""
        case = self.case
        cu_seqlens_q = self._offsets(case.lens_q) if case.varlen else None
        cu_seqlens_k = cu_seqlens_q
        if not case.one_cu_seqlens:
            cu_seqlens_k = self._offsets(case.lens_k) if case.varlen and table is None else None
        return Call(
            scale=case.dims[0] ** -0.5 if case.scale is None else case.scale,
            max_q=case.max_q,
            max_k=case.max_k,
            window=case.window,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_k=None if case.seqused_k is None else self._int32(case.seqused_k),
            block_table=table,
            attn_bias=self._bias(),
            alibi_slopes=self._alibi_slopes(),
            deterministic=case.deterministic,
        )

    def _int32(self, numbers: tuple[int, ...]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def _offsets(self, lens: tuple[int, ...]) -> Tensor:
        return self._int32(tuple(accumulate(lens, initial=0)))

    def _bias(self) -> Tensor | None:
        case = self.case
        if case.bias == "none":
            return None
        if case.bias == "key padding":
            lens = torch.arange(case.max_k, 0, -max(1, case.max_k // 3))[: len(case.lens_k)]
            padding = torch.arange(case.max_k) < lens[:, None]
            return padding[:, None, None, :].to(self.device)
        bias = self.normal(case.heads[0], case.max_q, case.max_k)
        bias[:, ::5] = -torch.inf  # these rows see no key
        return bias.to(self.device, self.dtype)

    def _alibi_slopes(self) -> Tensor | None:
        heads = self.case.heads[0]
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
        return slopes.to(self.device) if self.case.alibi else None


def key_rows(case: Case, table: Tensor | None) -> list[Tensor]:
    """Return the rows of each sequence's keys that count, in keys viewed as (T, H, D)."""
    starts = accumulate(case.lens_k, initial=0)
    if table is None or case.page_size is None:
        return [torch.arange(start, start + n) for start, n in zip(starts, case.lens_seen, strict=False)]
    within = torch.arange(case.page_size)
    pages = table.long().cpu()[:, :, None] * case.page_size + within
    return [rows[:n] for rows, n in zip(pages.flatten(1), case.lens_seen, strict=True)]


def query_rows(case: Case) -> list[Tensor]:
    """Return the rows of each sequence's queries, in queries viewed as (T, H, D)."""
    starts = accumulate(case.lens_q, initial=0)
    return [torch.arange(start, start + n) for start, n in zip(starts, case.lens_q, strict=False)]


def _bhsd(x: Tensor) -> Tensor:
    """Return the values in the memory of (B, H, S, D)."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def _last_dim_strided(x: Tensor) -> Tensor:
    return torch.stack((x, x), dim=-1)[..., 0]


def _offset(x: Tensor) -> Tensor:
    """Return the values one element after the start of their memory: no address is aligned."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


def _odd_rows(x: Tensor) -> Tensor:
    """Return the values with one element between heads: no row but the first is aligned."""
    return torch.nn.functional.pad(x, (0, 1))[..., :-1]


def _fused(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of one tensor, as a fused projection gives them."""
    together = torch.cat((q, k, v), dim=-2)
    heads_q, heads_k = q.shape[-2], k.shape[-2]
    return (
        together[..., :heads_q, :],
        together[..., heads_q : heads_q + heads_k, :],
        together[..., heads_q + heads_k :, :],
    )


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": torch.Tensor.contiguous,
    "bhsd": _bhsd,
    "last dim strided": _last_dim_strided,
    "offset": _offset,
    "odd rows": _odd_rows,
}

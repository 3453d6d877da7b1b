"""The kernels of the stand-in for flash-attn-4 (`fake_fa4`): what a compiled function computes and writes."""

import ctypes
from typing import NamedTuple

import torch
from support import fake_fa4_masks, one_sequence

# Above so many sequences a launch of its own sums up their tiles.
MANY = 256


# Values


def scores(query, key, scale, causal, left, right, softcap, mask=None):
    """Return masked scores as the package reads its arguments: a bound counts unless it is None."""
    if mask is not None:  # of a mask function
        return one_sequence.scores(query, key, scale, mask)
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    mask = one_sequence.visible(len(query), len(key), left, 0 if causal else right)
    return one_sequence.scores(query, key, scale, mask, softcap or 0.0)


def softcap_of(score_mod, score_mod_bwd=None):
    """Return the softcap of functions of scores, and how many times their scores are to be multiplied."""

    def at(function, *values):
        names = "q_idx", "kv_idx", "seqlen_info", "aux_tensors"
        return function(*(torch.tensor(x).double() for x in values), 0, 0, **dict.fromkeys(names))

    softcap, factor = float(at(score_mod, torch.inf)), float(at(score_mod, 1e-9) / 1e-9)
    if score_mod_bwd is not None:
        x = torch.tensor([-3.0, -0.1, 0.0, 0.7, 2.0], dtype=torch.float64).mul_(softcap / factor)
        slope = 1.0 - (x * factor / softcap).tanh() ** 2
        torch.testing.assert_close(at(score_mod_bwd, 3.0, x.tolist()), 3.0 * factor * slope)
    return softcap, round(factor, 6)


def parts(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table=None):
    """Yield each sequence: where its queries are and its keys, and how many of these it counts."""
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    for index in range(batch):
        rows_q = rows_k = (index, slice(None))
        if cu_seqlens_q is not None:
            rows_q = slice(int(cu_seqlens_q[index]), int(cu_seqlens_q[index + 1]))
        if page_table is not None:
            rows_k = (page_table[index].long()[:, None], torch.arange(k.shape[1]))
        elif cu_seqlens_q is not None:
            rows_k = slice(int(cu_seqlens_k[index]), int(cu_seqlens_k[index + 1]))
        yield rows_q, rows_k, k[rows_k].shape[0] if seqused_k is None else int(seqused_k[index])


def read_pages(x, pages, places, length):
    """Return the first rows of pages by their addresses, as the kernel reads them, which may overlap."""
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    starts = (pages * x.stride(0) + places * x.stride(1)).flatten()[:length, None, None]
    heads, dims = torch.arange(x.shape[2])[:, None] * x.stride(2), torch.arange(x.shape[3]) * x.stride(3)
    return memory[x.storage_offset() + starts + heads + dims]


def loaded(x, rows, length):
    """Return the keys of a sequence and the rest of the tile behind them, which must be finite."""
    if isinstance(rows, slice):
        tile = x[rows.start : rows.start + length + 8]
    elif isinstance(rows[0], int):
        tile = x[rows].flatten(0, -3)[: length + 8]
    else:
        return read_pages(x, *rows, length)
    assert tile[length:].isfinite().all(), "NaN in the rows behind a sequence spreads"
    return tile[:length]


def unwritten(tensor):
    """Return a tensor with arbitrary values, as new memory has them; written without an op of torch's."""
    ctypes.memset(tensor.data_ptr(), 0x40, tensor.nbytes)
    return tensor


# Kernels: what a compiled function writes into the tensors that it is given


class AuxData(NamedTuple):
    """What the package passes to every kernel: bounds of a mask function, and what attnreg leaves empty."""

    tensors: tuple | None = None
    scalars: tuple | None = None


class SinkTensors(NamedTuple):
    """What the last kernel of a backward computes the gradient of sinks from, and that."""

    dpsum: torch.Tensor
    lse: torch.Tensor
    sinks: torch.Tensor
    gradient: torch.Tensor


def tile_cumsum(tile, factor):
    def run(total, splits, cu_seqlens, used, *others):
        assert splits is used is None and others == (None, None)
        total[0] = 0
        total[1:] = ((cu_seqlens.diff() * factor + tile - 1) // tile).cumsum(0)

    return run


def assert_tiles(sums, cu_seqlens, tile, factor=1):
    """Hold the sums of tiles to be there where there are many sequences, and to be right."""
    many = cu_seqlens is not None and len(cu_seqlens) > MANY + 1
    assert (sums is not None) is many
    if many:
        expected = torch.empty_like(sums)
        tile_cumsum(tile, factor)(expected, None, cu_seqlens, None, None, None)
        assert torch.equal(sums, expected)


def forward_kernel(causal, softcap, factor, tile, mask_mod=None):
    def run(
        q,
        k,
        v,
        out,
        lse,
        scale,
        cu_q,
        cu_k,
        used_q,
        used,
        pages,
        left,
        right,
        sinks,
        sparse,
        aux,
        tiles,
        splits,
    ):
        assert type(aux) is AuxData and aux.scalars is None
        assert used_q is splits is None
        group = q.shape[-2] // k.shape[-2]
        mask = None
        if sparse is not None:
            mask, read = fake_fa4_masks.visible(mask_mod, aux.tensors, sparse, q.shape[1], k.shape[1])
            assert v[0, read.any(0)].isfinite().all(), "NaN in a block of keys spreads"
        assert_tiles(tiles, cu_q, tile, group)
        for rows_q, rows_k, length in parts(q, k, cu_q, cu_k, used, pages):
            query, value = q[rows_q], loaded(v, rows_k, length)
            if pages is not None:
                key = read_pages(k, *rows_k, length)
            else:
                key = (k[rows_k] if isinstance(rows_k, slice) else k[rows_k].flatten(0, -3))[:length]
            part, part_lse = one_sequence.forward(
                scores(query, key, scale * factor, causal, left, right, softcap, mask), value
            )
            if sinks is not None:  # of a row without a key it is all of the LSE
                total = torch.logaddexp(part_lse, sinks.to(part_lse)[:, None])
                part, part_lse = part * (part_lse - total).exp().mT[..., None], total
            out[rows_q] = part.to(out.dtype)
            if cu_q is None:
                lse[rows_q[0]] = part_lse.float()
            else:
                lse[:, rows_q] = part_lse.float()

    return run


def sums_of(sums, like, dim):
    """Return a view of flat sums of heads, padded to tiles, in the shape of the rows that they are about."""
    step = 64 if dim > 128 else 32
    width = -(-like.shape[-1] // step) * step
    rows = sums.unflatten(-1, (-1, width)).transpose(-2, -3)
    return rows[..., : like.shape[-3], :, : like.shape[-1]]


def preprocess_kernel(tile):
    def run(
        out, dout, dpsum, lse, lse_log2, dq_sums, cu_q, used_q, dlse, row_max, scale_p, scale, tiles, rest
    ):
        assert used_q is row_max is scale_p is rest is None and scale == 1.0
        assert out.shape == dout.shape and dout.isfinite().all()
        assert dpsum.shape == lse_log2.shape and dpsum.shape[-1] % tile == 0
        assert_tiles(tiles, cu_q, tile)
        products = (out.double() * dout.double()).sum(-1)
        if dlse is not None:
            products -= dlse.mT
        count = out.shape[-3]
        dpsum[..., :count] = products.mT.float()
        lse_log2[..., :count] = lse
        dq_sums.zero_()

    return run


def backward_kernel(causal, shared, softcap, factor, deterministic, tiles, mask_mod=None):
    def run(
        q, k, v, dout, lse, dpsum, dq_sums, dk, dv, scale, cu_q, cu_k, used_q, used, left, right, turns_q,
        turns_k, turns_v, aux, sparse, tiles_k,
    ):  # fmt: skip
        assert type(aux) is AuxData and aux.scalars is None and q.isfinite().all()
        assert used_q is None
        mask = None
        if sparse is not None:
            mask, read = fake_fa4_masks.visible(mask_mod, aux.tensors, sparse, q.shape[1], k.shape[1], True)
            assert all(x[0, read.any(0)].isfinite().all() for x in (k, v)), "NaN in a block of keys spreads"
        assert_tiles(tiles_k, cu_k, tiles[1])
        turns = [x for x in (turns_q, turns_k, turns_v) if x is not None]
        assert len(turns) == (0 if not deterministic else 3 if shared else 1)
        assert not any(x.any() for x in turns)
        dim = q.shape[-1]
        dq = sums_of(dq_sums, q, dim)
        dk, dv = (sums_of(dk, k, dim), sums_of(dv, v, dim)) if shared else (dk, dv)
        for rows_q, rows_k, length in parts(q, k, cu_q, cu_k, used):
            query, grad = q[rows_q], dout[rows_q]
            key, value = (loaded(x, rows_k, length) for x in (k, v))
            found = scores(query, key, scale * factor, causal, left, right, softcap, mask)
            at = (rows_q[0], slice(None), slice(len(query))) if cu_q is None else (slice(None), rows_q)
            grad_q, *grads = one_sequence.backward(
                found, lse[at], dpsum[at].double(), query, key, value, grad, scale * factor, softcap
            )
            dq[rows_q] += grad_q.float()
            for result, part in zip((dk, dv), grads, strict=True):
                if shared:
                    result[rows_k][:length] += part.to(result.dtype)
                else:
                    result[rows_k][:length] = part.to(result.dtype)
        for x in turns:
            x += 1

    return run


def convert_kernel(tile, dim):
    def run(sums, result, scale, cu_seqlens, used, of_sinks, tiles):
        assert scale > 0.0
        assert_tiles(tiles, cu_seqlens, tile)
        found = sums_of(sums, result, dim)
        for rows, _, length in parts(result, result, cu_seqlens, cu_seqlens, used):
            result[rows][:length] = found[rows][:length].to(result.dtype)
        if of_sinks is not None:
            assert type(of_sinks) is SinkTensors
            weights = (of_sinks.sinks.double()[:, None] - of_sinks.lse.double()).exp()
            products = of_sinks.dpsum[..., : of_sinks.lse.shape[-1]].double()
            of_sinks.gradient.copy_(-(weights * products).sum(-1))

    return run

"""The reference: attention in plain PyTorch operations, for every call, dtype and device.

It is correct before it is fast: it computes in float32 or float64, keeps nothing of the size S_q x S_k, takes
every option of the contract, and never reads a tensor of another device on the host. `batch.py` brings dense,
packed and paged tensors to one form, `mask.py` says which scores count, `tiles.py` computes. Imports from
`contract`. Start with README.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from attnreg.backends.math.batch import Group, as_rows, groups, key_sequences, query_sequences
from attnreg.backends.math.mask import TILE_QUERIES, Mask
from attnreg.backends.math.tiles import attend, attend_backward
from attnreg.contract.backend import Backend, Call, Kernels
from attnreg.contract.capabilities import ANY_SIZE, Capabilities

# Elements of a padded group: enough to keep a GPU busy, few enough to fit on any device.
GROUP_SIZE = 2**22

EVERYTHING = Capabilities(
    devices=("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "npu", "xla", "privateuseone", "meta"),
    dtypes=("float16", "bfloat16", "float32", "float64"),
    head_dim_v=ANY_SIZE,
    page_size=ANY_SIZE,
    varlen=True,
    gqa=True,
    causal=True,
    window=True,
    dropout=True,
    bias=True,
    alibi=True,
    seqused_k=True,
    num_splits=True,
    any_scale=True,
    deterministic=True,
    capture=True,
)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE."""
    work = _working_dtype(q)
    q_rows, k_rows, v_rows = as_rows(q), as_rows(k), as_rows(v)
    tokens, heads, _ = q_rows.shape
    # The last row is for padding: to leave that out would take a count from the device.
    out = q.new_zeros(tokens + 1, heads, v.shape[-1])
    lse = q.new_full((tokens + 1, heads, 1), -torch.inf, dtype=work)
    with _without_autocast(q.device):
        for group in _groups(q, k, v, call):
            query = group.queries.gather(q_rows, work)
            key, value = group.keys.gather(k_rows, work), group.keys.gather(v_rows, work)
            part_out, part_lse = attend(query, key, value, Mask(call, group, heads))
            group.queries.scatter(part_out, out)
            group.queries.scatter(part_lse, lse)
    bhs = lse[:-1].view(q.shape[:-1]).transpose(-1, -2).contiguous()
    return out[:-1].view(*q.shape[:-1], v.shape[-1]), bhs


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    work = _working_dtype(q)
    if torch.finfo(lse.dtype).bits < torch.finfo(work).bits:
        lse = forward(q, k, v, call)[1]
    of_queries = [as_rows(x) for x in (grad_out, q, out, lse.transpose(-1, -2)[..., None])]
    of_keys = [as_rows(k), as_rows(v)]
    grads = [x.new_zeros(x.shape[0] + 1, *x.shape[1:]) for x in (of_queries[1], *of_keys)]
    with _without_autocast(q.device):
        for group in _groups(q, k, v, call):
            grad, query, output, stats = (group.queries.gather(x, work) for x in of_queries)
            key, value = (group.keys.gather(x, work) for x in of_keys)
            mask = Mask(call, group, query.shape[1])
            part_q, part_k, part_v = attend_backward(grad, query, key, value, output, stats, mask)
            group.queries.scatter(part_q, grads[0])
            # Sequences may share pages of a cache: their gradients add up.
            group.keys.scatter(part_k, grads[1], add=True)
            group.keys.scatter(part_v, grads[2], add=True)
    grad_q, grad_k, grad_v = (grad[:-1].view(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))
    return grad_q, grad_k, grad_v


def _groups(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Iterator[Group]:
    # A token takes its place in the gathered tensors, or its scores in a tile, whichever is larger.
    cost = q.shape[-2] * max(q.shape[-1], v.shape[-1], TILE_QUERIES)
    return groups(query_sequences(q, call), key_sequences(k, call), cost, GROUP_SIZE)


def _working_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Keep autocast from rounding the products of the float32 work to its own dtype."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


BACKEND = Backend(
    name="math",
    forward=EVERYTHING,
    backward=EVERYTHING,
    load=lambda: Kernels(forward, backward),
    version=lambda: str(torch.__version__),
    priority=-100,
)

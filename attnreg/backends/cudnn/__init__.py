"""cuDNN: NVIDIA's attention kernels, as graphs of nvidia-cudnn-frontend.

What differs from the contract: tensors are described as (B, H, S, D) with any strides; of packed
tensors the LSE mostly lies with the token first; a mask is a band with its own alignment, whose left bound
counts the diagonal; results of tokens that belong to no sequence are never written. `_cudnn_described`
makes a `_cudnn_problem` of a call, `_cudnn_sharing` rounds it, `_cudnn_graph` plans it, `_cudnn_plans`
keeps what was planned, `_cudnn_offsets` derives lengths, and `_cudnn_again` does a call that is known.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from importlib.util import find_spec
from math import inf
from typing import TYPE_CHECKING

import torch

from attnreg.backends.cudnn.describe import described, lse_lies, with_results
from attnreg.backends.cudnn.launcher import specialize
from attnreg.backends.cudnn.plans import Plans
from attnreg.contract.backend import Backend, Kernels
from attnreg.contract.capabilities import GRID, Capabilities, Range
from attnreg.contract.offsets import facts
from attnreg.torchlib.layout import readable, with_strides

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.backends.cudnn.offsets import Offsets
    from attnreg.backends.cudnn.problem import Problem
    from attnreg.contract.backend import Call
    from attnreg.contract.spec import AttentionSpec

__all__ = ["BACKEND"]

PACKAGE = "nvidia-cudnn-frontend"

FORWARD = Capabilities(
    devices=("cuda",),
    dtypes=("float16", "bfloat16"),
    compute_capability=((8, 0), (12, 1)),
    head_dim=Range(8, 256, 8),
    head_dim_v=Range(8, 256, 8),
    batch=Range(0, GRID),
    heads=Range(0, GRID),
    varlen=True,
    gqa=True,
    causal=True,
    window=True,
    seqused_k=True,
    deterministic=True,
    capture=True,
)
# Its deterministic backward takes B * H * S_q * S_k * 2 bytes on Hopper.
BACKWARD = replace(FORWARD, deterministic=False)


def _unavailable() -> str | None:
    try:
        installed(PACKAGE)
    except PackageNotFoundError:
        return f"{PACKAGE} isn't installed"
    if find_spec("cudnn") is None:
        return f"{PACKAGE} is installed, but its module cudnn is missing"
    return None if torch.cuda.is_available() else "torch finds no CUDA GPU here"


def _version() -> str | None:
    """Return cuDNN's version, then the frontend's: it is cuDNN whose kernels are right or wrong."""
    number = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if number is None:
        return None
    major, rest = divmod(number, 10000)
    return f"{major}.{rest // 100}.{rest % 100} (frontend {installed(PACKAGE)})"


def _refuses(spec: AttentionSpec) -> tuple[str, ...]:
    reasons = []
    masked = spec.window != (-1, -1)
    if not spec.varlen and masked and spec.max_q > spec.max_k:
        reasons.append(f"a mask must not meet more queries than keys, got {spec.max_q} and {spec.max_k}")
    if not spec.varlen and spec.seqused_k:
        reasons.append("seqused_k must be None with dense tensors, got a tensor")
    if not spec.varlen and spec.max_q == spec.max_k == 1:
        reasons.append("query and key must not both have length 1")
    size, capability = max(spec.head_dim, spec.head_dim_v), spec.device.capability
    if size > 128 and capability is not None and capability[0] not in (9, 10):
        reasons.append(f"head_dim must be 8 to 128 on compute capability {capability[0]}.x, got {size}")
    return tuple(reasons)


def _load() -> Kernels:
    import cudnn

    cudnn.backend_version()  # raises if the library is missing, which importing doesn't notice
    plans = Plans(cudnn)
    return Kernels(
        functools.partial(forward, plans),
        functools.partial(backward, plans),
        functools.partial(specialize, plans),
    )


def forward(plans: Plans, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE."""
    shape = (*query.shape[:-1], value.shape[-1])
    if not (query.numel() and key.numel() and call.max_q and call.max_k):
        *batch, rows, heads = query.shape[:-1]
        return query.new_zeros(shape), query.new_full((*batch, heads, rows), -inf, dtype=torch.float32)
    query, key, value = (readable(x, repeats=False) for x in (query, key, value))
    problem, offsets, stream = described("forward", query, key, value, call)
    problem = plans.planned(problem)
    whole = offsets is None or facts(call, query.shape[0], key.shape[0], stream).no_unused_rows
    out = query.new_empty(shape) if whole else query.new_zeros(shape)
    lse = query.new_empty_strided(*lse_lies(problem, query), dtype=torch.float32)
    if not whole:
        lse.fill_(-inf)
    _run(plans, problem, (query, key, value, out, lse), offsets, stream)
    return out, lse.contiguous()


def backward(
    plans: Plans,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    inputs = (query, key, value)
    if not (query.numel() and key.numel() and call.max_q and call.max_k):
        grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in inputs)
        return grad_q, grad_k, grad_v
    # Of packed queries that aren't contiguous cuDNN 9.19 writes a wrong gradient.
    query = query.contiguous() if call.varlen else query
    given = (query, key, value, out, grad_out)
    query, key, value, out, grad_out = (readable(x, repeats=False) for x in given)
    problem, offsets, stream = described("backward", query, key, value, call)
    problem = plans.planned(with_results(problem, out, grad_out, call))
    whole = offsets is None or facts(call, query.shape[0], key.shape[0], stream).no_unused_rows
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) if whole else x.new_zeros(x.shape) for x in inputs)
    lse = with_strides(lse, lse_lies(problem, query)[1])
    tensors = (query, key, value, out, lse, grad_out, grad_q, grad_k, grad_v)
    _run(plans, problem, tensors, offsets, stream)
    return grad_q, grad_k, grad_v


def _run(
    plans: Plans, problem: Problem, tensors: tuple[Tensor, ...], offsets: Offsets | None, stream: int
) -> None:
    if torch.cuda.current_device() == problem.device:
        plans.run(problem, tensors, offsets, stream)
    else:
        with torch.cuda.device(problem.device):
            plans.run(problem, tensors, offsets, stream)


BACKEND = Backend(
    name="cuDNN",
    forward=FORWARD,
    backward=BACKWARD,
    load=_load,
    unavailable=_unavailable,
    version=_version,
    refuses=_refuses,
    install="pip install 'attnreg[cudnn]'",
    priority=20,
)

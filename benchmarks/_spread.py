"""The sides of `context_parallel.py`: one GPU, attnreg's methods, torch's methods, and all-to-all by hand.

Each side has a function that runs a forward and a backward of a rank's part.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnreg
from attnreg.parallel import estimates, exchange, stepwise
from attnreg.tools import measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

METHODS = ("all_to_all", "all_gather", "ring", "auto")
ONE = "one GPU"
BALANCED = "balanced"  # the layout that `spread_documents` chooses by default


class Case(NamedTuple):
    """A batch, its causal window's left bound, and how its tokens are laid out over ranks."""

    name: str
    lengths: tuple[int, ...]
    left: int
    how: str


def cases(scale: int) -> list[Case]:
    """Return the batches to measure, with lengths that are `scale` times shorter, for a CPU."""
    draw = random.Random(0)
    documents: list[int] = []
    while sum(documents) < 65536:
        documents.append(min(draw.randint(500, 20000), 65536 - sum(documents)))
    packed = tuple(length // scale for length in documents)
    return [
        Case("causal, 65,536", (65536 // scale,), -1, "zigzag"),
        Case("causal, 16,384", (16384 // scale,), -1, "zigzag"),
        Case("packed, 65,536", packed, -1, BALANCED),
        Case("packed, window 4,096", packed, 4096 // scale, BALANCED),
    ]


class Place(NamedTuple):
    """A rank, its device and backend, and the heads, head dim and dtype of its calls."""

    rank: int
    device: torch.device
    backend: str | None
    heads: int
    dim: int
    dtype: torch.dtype


def training_step(call: Callable[..., Any], inputs: list[Tensor], grad: Tensor) -> Callable[[], object]:
    """Return a function that runs a forward and a backward."""
    return lambda: torch.autograd.grad(call(*inputs), inputs, grad)


def ours(here: Place, case: Case, whole: list[Tensor], method: str, how: str) -> Callable[[], object]:
    """Return a step of a spread call."""
    ends = list(itertools.accumulate([0, *case.lengths]))
    layout = attnreg.spread_documents(ends, dist.get_world_size(), how, window_size=(case.left, 0))
    spread = attnreg.context_parallel(dist.group.WORLD, layout, method=method)
    *inputs, grad = (spread.shard(x) for x in whole)
    inputs = [x.requires_grad_() for x in inputs]
    offsets, most = spread.cu_seq(here.device), spread.longest

    def call(*inputs: Tensor) -> Any:
        return attnreg.varlen_attn(
            *inputs, offsets, offsets, most, most, window_size=(case.left, 0), group=spread,
            backend=here.backend,
        )  # fmt: skip

    step: Any = training_step(call, inputs, grad)
    step.taken = spread.taken
    return step  # type: ignore[no-any-return]


def alone(here: Place, case: Case, whole: list[Tensor]) -> Callable[[], object]:
    """Return a step of the whole batch on this rank."""
    ends = torch.tensor([0, *case.lengths]).cumsum(0).int().to(here.device)
    *inputs, grad = (x.clone() for x in whole)
    inputs, most = [x.requires_grad_() for x in inputs], max(case.lengths)

    def call(*inputs: Tensor) -> Any:
        return attnreg.varlen_attn(
            *inputs, ends, ends, most, most, window_size=(case.left, 0), backend=here.backend
        )

    return training_step(call, inputs, grad)


class ByHand(torch.autograd.Function):
    """Exchange this rank's tokens of all heads for all tokens of some heads, or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to_heads: bool) -> Tensor:
        ctx.to_heads, ranks = to_heads, dist.get_world_size()
        tokens, heads, dim = x.shape
        if to_heads:
            x = x.view(tokens, ranks, heads // ranks, dim).transpose(0, 1).contiguous()
            moved = torch.empty_like(x)
            dist.all_to_all_single(moved, x)
            return moved.flatten(0, 1)
        x, moved = x.contiguous(), torch.empty_like(x)
        dist.all_to_all_single(moved, x)
        return moved.view(ranks, tokens // ranks, heads, dim).transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ByHand.apply(grad, not ctx.to_heads), None


def ulysses(here: Place, case: Case, whole: list[Tensor]) -> Callable[[], object]:
    """Return a step of all-to-all by hand, with consecutive tokens on each rank."""
    tokens, ranks = sum(case.lengths), dist.get_world_size()
    rows = slice(here.rank * tokens // ranks, (here.rank + 1) * tokens // ranks)
    *inputs, grad = (x[rows].clone() for x in whole)
    inputs = [x.requires_grad_() for x in inputs]
    ends = torch.tensor([0, *case.lengths]).cumsum(0).int().to(here.device)
    most, window = max(case.lengths), (case.left, 0)

    def call(*inputs: Tensor) -> Tensor:
        moved = [ByHand.apply(x, True) for x in inputs]
        out = attnreg.varlen_attn(*moved, ends, ends, most, most, window_size=window, backend=here.backend)
        return ByHand.apply(out, False)

    return training_step(call, inputs, grad)


@contextlib.contextmanager
def torchs(
    here: Place, whole: list[Tensor], rotation: str, backend: str | None
) -> Iterator[Callable[[], object]]:
    """Yield a step of torch's `context_parallel` with its flash kernel, or with `backend` instead."""
    from torch.distributed.tensor.experimental import _attention, context_parallel

    mesh = init_device_mesh(here.device.type, (dist.get_world_size(),))
    _attention.set_rotate_method(rotation)
    buffers = [x.transpose(0, 1)[None].contiguous() for x in whole]
    handle = attnreg.register_backend(backend) if backend else contextlib.nullcontext()
    spread = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers))
    with handle, sdpa_kernel(SDPBackend.FLASH_ATTENTION), spread:
        *inputs, grad = buffers
        for x in inputs:
            x.requires_grad_()

        def call(*inputs: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*inputs, is_causal=True)

        yield training_step(call, inputs, grad)
        for x in inputs:
            x.requires_grad_(False)


def whole_batch(here: Place, case: Case) -> list[Tensor]:
    """Return query, key, value and a gradient of the output; the same on all ranks."""
    described = measure.Case(
        name=case.name, lens_q=case.lengths, lens_k=case.lengths, varlen=True, heads=(here.heads, here.heads),
        dims=(here.dim, here.dim), dtype=str(here.dtype).removeprefix("torch."),
    )  # fmt: skip
    return list(measure.inputs(described, here.device, drawn_on=here.device)[:4])


class Unsent(exchange.Pending):
    """Own rows instead of received rows: a call takes its time without a link."""

    def __init__(self, rows: Tensor, sends: list[int], receives: list[int], *_: Any) -> None:
        count = sum(receives)
        self._received = rows if count == len(rows) else rows.repeat(count // len(rows) + 1, 1)[:count]
        self._done = None

    def wait(self) -> Tensor:
        """Return own rows at once."""
        return self._received


@contextlib.contextmanager
def changed(module: Any, name: str, value: object, step: Callable[[], Any]) -> Iterator[Callable[[], object]]:
    """Yield a step for which a module has another value."""
    usual = getattr(module, name)
    setattr(module, name, value)
    try:
        yield step()
    finally:
        setattr(module, name, usual)


def sides_of_parts(here: Place, case: Case) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield variants of all_gather and the ring: heads always in groups, and nothing sent."""
    whole = whole_batch(here, case)
    gather, ring = (partial(ours, here, case, whole, method, case.how) for method in ("all_gather", "ring"))
    yield "all_gather, in groups", lambda: changed(estimates, "WORTH", 0.0, gather)
    for name, step in (("all_gather", gather), ("ring", ring)):
        yield f"{name}, nothing sent", lambda step=step: changed(stepwise, "Pending", Unsent, step)


def sides(here: Place, case: Case) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each side: a name, and a function that returns a context manager of a step."""
    whole = whole_batch(here, case)
    yield ONE, lambda: contextlib.nullcontext(alone(here, case, whole))
    for method in METHODS:
        yield method, lambda method=method: contextlib.nullcontext(ours(here, case, whole, method, case.how))
    yield (
        "all_to_all, contiguous",
        lambda: contextlib.nullcontext(ours(here, case, whole, "all_to_all", "contiguous")),
    )
    if case.how != BALANCED:
        yield f"auto, {BALANCED}", lambda: contextlib.nullcontext(ours(here, case, whole, "auto", BALANCED))
    if len(case.lengths) == 1:
        yield from sides_of_parts(here, case)
    if sum(case.lengths) % dist.get_world_size() == 0:
        yield "all-to-all by hand", lambda: contextlib.nullcontext(ulysses(here, case, whole))


def sides_of_torch(here: Place, case: Case) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield torch's methods, which only support a single document on GPUs."""
    if len(case.lengths) > 1 or here.device.type == "cpu":
        return
    whole = whole_batch(here, case)
    for rotation, backend in itertools.product(("alltoall", "allgather"), (None, here.backend)):
        name = f"torch {rotation}, {backend or 'flash'}"
        yield name, lambda r=rotation, b=backend: torchs(here, whole, r, b)

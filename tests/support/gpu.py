"""What the GPU tests share: packed inputs, results in float64, kernel names, what backends may refuse."""

import contextlib
import functools
import re
import warnings
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support import truth
from torch.autograd import DeviceType
from torch.nn.attention.varlen import varlen_attn as torch_varlen_attn
from torch.profiler import ProfilerActivity, profile

import attnreg
from attnreg.backends.fa2.native import PAGES
from attnreg.core.contract.options import OPTIONS
from attnreg.tools.measure import QUICK

BF16 = torch.bfloat16

FRONTS = pytest.mark.parametrize("front", [torch_varlen_attn, attnreg.varlen_attn], ids=["torch", "attnreg"])


def on(named, **options):
    """Return attnreg's `varlen_attn` on one backend."""
    return functools.partial(attnreg.varlen_attn, backend=named, **options)


class Packed(NamedTuple):
    """Packed inputs in the order in which both `varlen_attn` take them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_q: int
    max_k: int

    @property
    def qkv(self):
        return self[:3]

    def detached(self):
        return Packed(*(x.detach() for x in self.qkv), *self[3:])


def packed(
    lengths_q=(5, 300, 0, 42),
    lengths_k=None,
    *,
    heads=(4, 4),
    dim=64,
    dtype=BF16,
    tail=0,
    grad=True,
    seed=0,
    device="cuda",
):
    """Draw packed inputs; with one list of lengths query and key share one tensor of offsets."""
    generator = torch.Generator(device).manual_seed(seed)

    def tokens(lengths, count):
        shape = (sum(lengths) + tail, count, dim)
        return torch.randn(shape, device=device, generator=generator).to(dtype).requires_grad_(grad)

    keys = lengths_q if lengths_k is None else lengths_k
    query, key, value = tokens(lengths_q, heads[0]), tokens(keys, heads[1]), tokens(keys, heads[1])
    cu_seqlens_q = offsets_of(lengths_q, device)
    cu_seqlens_k = cu_seqlens_q if lengths_k is None else offsets_of(lengths_k, device)
    return Packed(query, key, value, cu_seqlens_q, cu_seqlens_k, max(lengths_q), max(keys))


def offsets_of(lengths, device="cuda"):
    """Return int32 offsets."""
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def bhsd(batch=2, heads=4, length=300, dim=64, dtype=BF16, grad=True):
    """Draw query, key and value, (B, H, S, D)."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, heads, length, dim)
    return [
        torch.randn(shape, device="cuda", generator=generator).to(dtype).requires_grad_(grad) for _ in "qkv"
    ]


def incoming(out):
    """Return a gradient for an output: not of ones, whose dq and dk cancel, and without a stride of 0."""
    generator = torch.Generator(out.device).manual_seed(1)
    return torch.randn(out.shape, device=out.device, generator=generator).to(out.dtype)


def run(front, given, **options):
    """Return the output and the gradients of query, key and value.

    The output is detached: what holds on to the graph holds the leaves to the stream that they began on.
    """
    out = front(*given, **options)
    return (out.detach(), *torch.autograd.grad(out, given.qkv, incoming(out)))


def sdpa_and_back(inputs, **options):
    """Return the output of a dense call and the gradients of query, key and value."""
    out = F.scaled_dot_product_attention(*inputs, **options)
    return out, *torch.autograd.grad(out, inputs, incoming(out))


def expected_of_sdpa(inputs, **options):
    """Return what `sdpa_and_back` should have, in float64 on the CPU."""
    leaves = [x.detach().cpu().double().requires_grad_() for x in inputs]
    out, _ = truth.dense(*leaves, **options)
    return out, *torch.autograd.grad(out, leaves, incoming(inputs[0]).cpu().double())


def expected(given, **options):
    """Return what `run` should have, in float64 on the CPU, and the LSE."""
    leaves = [x.detach().cpu().double().requires_grad_() for x in given.qkv]
    out, lse = truth.varlen(*leaves, given.cu_seqlens_q.cpu(), given.cu_seqlens_k.cpu(), **options)
    grad = incoming(given.query).cpu().double()
    return (out, *torch.autograd.grad(out, leaves, grad)), lse


def assert_near(got, wanted, dtype=BF16):
    """Hold results to float64, at the precision of the dtype that was computed in."""
    for one, other in zip(got, wanted, strict=True):
        truth.assert_near(one.cpu(), other, dtype)


@contextlib.contextmanager
def no_waiting():
    """Make every wait of the host for the device an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(step):
    """Record a step, after it ran on a side stream; returns the graph and what it writes to."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    # A replay reads the tensors of the step, which may be alive nowhere else.
    graph.step = step
    return graph, results


def replay(graph, results):
    """Return what a replay has written, over results that were spoilt before it."""
    for result in results:
        result.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    return [result.clone() for result in results]


def relative_error(got, wanted):
    """Return the error of a whole tensor in units of its norm."""
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


# Of each backend's kernels some bear a name like these. FA4's hold "flash_fwd", too, cuDNN's "flash". FA3's
# hold "FlashAttn" and "cute", as FA4's do.
KERNELS = {
    "FA2": re.compile(r"^(?!.*(flash_attn|sm\d+flashattention|cudnn)).*flash_(fwd|bwd)", re.IGNORECASE),
    "FA3": re.compile(r"flashattn(fwd|bwd)", re.IGNORECASE),
    "FA4": re.compile(
        r"flash_?attn(?!fwd|bwd).*cute|flashattention(forward|backward)|flash_(fwd|bwd)_sm\d+", re.I
    ),
    "cuDNN": re.compile(r"^(?!attnreg_).*cudnn", re.IGNORECASE),  # attnreg_cudnn_lengths is our own
}


def kernels_of(step):
    """Return the names of the kernels of a step, of its second run: the first may compile and plan."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as trace:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in trace.events() if event.device_type == DeviceType.CUDA]
    assert names, "the profiler saw no kernel at all: is CUPTI there?"
    return names


def owners(names):
    """Return the backends that kernels belong to."""
    return {owner for owner, pattern in KERNELS.items() if any(map(pattern.search, names))}


# How many cases of `QUICK` the limits of each backend admit in both directions on an H200, those with a known
# issue included: a backend that came to refuse more than that would pass by running less. Torch's FA2 takes
# pages from torch 2.12 on.
ADMITTED = {"FA2": 318 if PAGES else 316, "FA3": 312, "FA4": 314, "cuDNN": 290, "flex": 522}
ADMITTED["math"] = sum(not (case.counts_sinks or case.batch_invariant) for case in QUICK)
HEAVY_ADMITTED = {"FA2": 10, "FA3": 10, "FA4": 10, "cuDNN": 10, "flex": 12, "math": 32}


# In reasons of FA3, whose package may be built without some kernels: no limit of its own.
NOT_BUILT = "flash_attn_3 is built without "

# In reasons of cuDNN, which declines a backward by what its bias is like.
SHARED_BIAS = "attn_bias must have a row for each query in a backward, "


def admitted(reasons):
    """Whether nothing is against a case but known issues, missing kernels, and what the tensors are like."""
    further = "; see https://", NOT_BUILT, SHARED_BIAS
    return all(any(words in reason for words in further) for reason in reasons)


# Everything that a backend may give as a reason against a case of the input matrix.
REFUSAL = re.compile(
    r"(head dims padded from .* to .*: )?("
    + "|".join(
        (
            r"dtype must be float16 or bfloat16, got float(32|64)$",
            r"head_dim must be 8 to 256 in steps of 8, got \d+$",
            r"head_dim must be 16 to 512 in steps of 8, got \d+$",
            r"head_dim of the value must be (8 to 256 in steps of 8|that of the query, \d+), got \d+$",
            r"head_dim of the value must be 16 to 512 in steps of 8, got \d+$",
            r"head_dim of the value must be at most the query's, \d+, got \d+$",
            r"head_dim of the value must be the query's where heads are shared, \d+, got \d+$",
            r"head_dim must not be 8, 16, .* whose gradients are wrong, got \d+$",
            r"head dims (that differ must be one of|must be multiples of 16 with pages)",
            *(re.escape(row.reason).replace(r"\{\}", r"[\d.]+") + "$" for row in OPTIONS if row.reason),
            r"seqused_k (must be None with|needs packed tensors, got) dense ",
            r"block_table (must be None: no paged key-value cache$|needs torch 2\.12 or )",
            r"batch must be 0 to 65535, got \d+$",
            r"page size must (not be that of a key tile|be )",
            r"scale must be above 0$",
            r"a masked dense call must have no more queries than keys, got \d+ and \d+$",
            r"query and key must have the same length with (attn_bias and a causal|dropout_p and a) mask, ",
            r"compute capability must be 9\.x with (attn_bias|dropout), got \d+\.\d+$",
            r"dropout_p must be (0 with (packed tensors|attn_bias)|below 1), got [\d.]+$",
            r"attn_bias must be None (with packed tensors|where deterministic algorithms are on), got a ",
            r"window_size must be \(-1, -1\) or causal with attn_bias, got \(-?\d+, -?\d+\)$",
            r"head_dim of query and value must be the same with attn_bias, got \d+ and \d+$",
            r"max_k must be a multiple of 8 for the gradient of attn_bias, got \d+$",
            rf"{SHARED_BIAS}got one row for \d+ queries$",
            r"input must be dense to be deterministic, got packed: it would allocate ",
            r"query and key must not both have length 1, got 1 and 1$",
            r"batch of dense tensors must be at most 65535, got \d+$",
            r"(alibi_slopes need|softcap needs) the package flash-attn",
            r"grad_lse takes 8 more columns of the head dim: head_dim must be .*, got \d+$",
            r"num_splits must be (1 or None|None for dense tensors), got \d+$",
            r"not deterministic, and deterministic algorithms are on$",
            r"not batch-invariant, and policy is batch_invariant$",
            r"device must be cpu to be batch-invariant, got cuda$",
            r"(seqused_k|block_table|softcap|key_ranges) must be (None|0) in batch-invariant calls",
            r"(head dims|seqused_k|softcap) must be .* with key_ranges, (got|which no test has tried)",
            r".*; see https://github\.com/",  # known issues
            rf"(.*: )?{NOT_BUILT}[A-Z0-9]+",
        )
    )
    + ")"
)

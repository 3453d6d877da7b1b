"""Stand-ins for FA2's two providers on a CPU: torch's kernels, and the ops of the package flash-attn 2.8.3.

Both compute the same, with plain PyTorch in float64 and by the rules of the real kernels: +inf for a row
without a key, nothing written past the last offset, windows as the C++ reads them, an LSE without the bias
that a causal row has in common, and gradients from the LSE that they are given. Dropout
is no more than its seed and offset.
"""

import sys
import types

import torch
from support import one_sequence, packages

from attnreg.backends.fa2 import flash_attn_package

MASK = (
    "float dropout_p, float softmax_scale, bool causal, int window_size_left, int window_size_right, "
    "float softcap, Tensor? alibi_slopes, "
)
PACKED = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, "
GRADS = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, "
    "Tensor(b!)? dk, Tensor(c!)? dv, "
)
SCHEMAS = {
    "_flash_attn_forward": (
        f"(Tensor q, Tensor k, Tensor v, {MASK}bool return_softmax) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "_flash_attn_varlen_forward": (
        f"(Tensor q, Tensor k, Tensor v, {PACKED}float dropout_p, float softmax_scale, bool causal, "
        "int window_size_left=-1, int window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, "
        "bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, "
        "Tensor? seqused_k=None, bool zero_tensors=False) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "_flash_attn_backward": f"({GRADS}{MASK}bool deterministic, Tensor? rng_state=None) -> Tensor",
    "_flash_attn_varlen_backward": (
        f"({GRADS}{PACKED}{MASK}bool deterministic, Tensor? rng_state=None, bool zero_tensors=False) "
        "-> Tensor"
    ),
}

# What the functions below call an argument; what torch's ops and the package's do.
NAMES = (
    "q k v out cu_q cu_k max_q max_k p scale causal left right softcap slopes seqused_k block_table dout lse"
)
OF_TORCH = (
    "query key value out cum_seq_q cum_seq_k max_q max_k dropout_p scale is_causal window_size_left "
    "window_size_right softcap alibi_slopes seqused_k block_table grad_out logsumexp"
)
OF_PACKAGE = (
    "q k v out cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal "
    "window_size_left window_size_right softcap alibi_slopes seqused_k block_table dout softmax_lse"
)


def renamed(given, names):
    return {name: given.get(theirs) for name, theirs in zip(NAMES.split(), names.split(), strict=True)}


def sequences(given):
    """Yield the number of each sequence, and the places of its queries and keys in (T, H, D)."""
    used, table = given["seqused_k"], given["block_table"]
    if given["cu_q"] is None:
        for index in range(given["q"].shape[0]):
            yield index, *(torch.arange(given[x].shape[1]) + index * given[x].shape[1] for x in "qk")
        return
    cu_q, cu_k = given["cu_q"].tolist(), given["cu_k"].tolist()
    for index in range(len(cu_q) - 1):
        keys = torch.arange(cu_k[index], cu_k[index + 1])
        if table is not None:
            size = given["k"].shape[1]
            keys = (table[index].long()[:, None] * size + torch.arange(size)).flatten()
        if used is not None:
            keys = keys[: int(used[index])]
        yield index, torch.arange(cu_q[index], cu_q[index + 1]), keys


def scores(given, index, q, k):
    """Return scaled and masked scores (H, S_q, S_k), by the rules of the kernels."""
    left, right, causal = given["left"], given["right"], given["causal"]
    left, right = (-1 if bound >= given["max_k"] else bound for bound in (left, right))
    right = 0 if causal else right
    causal = left < 0 and right == 0
    if left < 0 <= right:
        left = given["max_k"]
    elif right < 0 <= left:
        right = given["max_k"]
    bounds = (None if bound < 0 else bound for bound in (left, right))
    mask = one_sequence.visible(len(q), len(k), *bounds)
    found = one_sequence.scores(q, k, given["scale"], mask, given["softcap"] or 0.0)
    if given["slopes"] is not None:
        assert not given["softcap"]  # `run_backward` has the scores with both
        i, j = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
        slopes = given["slopes"].double()
        slopes = (slopes if slopes.dim() == 1 else slopes[index])[:, None, None]
        found = found + slopes * (j if causal else -(i - j).abs())
    return found


def flattened(given, names):
    return {name: given[name].flatten(0, given[name].dim() - 3).double() for name in names}


def each(given):
    """Yield each sequence: where its queries and keys are, its scores, and its tensors in float64."""
    flat = flattened(given, "qkv")
    for index, at_q, at_k in sequences(given):
        query, key, value = flat["q"][at_q], flat["k"][at_k], flat["v"][at_k]
        yield at_q, at_k, scores(given, index, query, key), query, key, value


def run_forward(given):
    q, heads_k = given["q"], given["k"].shape[-2]
    assert all(given[name].stride(-1) == 1 for name in "qkv")
    unmasked = given["left"] < 0 and given["right"] < 0 and given["slopes"] is None
    if given["max_q"] == 1 and q.shape[-2] != heads_k and unmasked and given["cu_q"] is not None:
        q.reshape(len(given["cu_q"]) - 1, heads_k, -1, q.shape[-1])  # heads become rows, or this raises
    rng_state = torch.randint(0, 2**40, (2,)) if given["p"] else torch.zeros(2, dtype=torch.int64)
    out = torch.full((q[..., 0, 0].numel(), *q.shape[-2:]), torch.nan, dtype=torch.float64)
    lse = torch.full((q.shape[-2], len(out)), torch.nan, dtype=torch.float64)
    for at_q, _, found, _, _, value in each(given):
        out[at_q], part_lse = one_sequence.forward(found, value)
        lse[:, at_q] = part_lse.masked_fill(part_lse == -torch.inf, torch.inf)
    if given["cu_q"] is None:
        lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return out.view(q.shape).to(q.dtype), lse.float().contiguous(), rng_state


def run_backward(given):
    assert not (given["lse"] == -torch.inf).any()
    lse = given["lse"].double()
    if given["cu_q"] is None:
        lse = lse.transpose(0, 1).flatten(1)
    flat = flattened(given, ("q", "k", "v", "out", "dout"))
    grads = {name: torch.full(flat[name].shape, torch.nan, dtype=torch.float64) for name in "qkv"}
    for at_q, at_k, found, *qkv in each(given):
        grad, delta = flat["dout"][at_q], (flat["dout"] * flat["out"])[at_q].sum(-1).T
        scale = given["scale"], given["softcap"] or 0.0
        found = one_sequence.backward(found, lse[:, at_q], delta, *qkv, grad, *scale)
        grads["q"][at_q], grads["k"][at_k], grads["v"][at_k] = found
    return [grad.view(given[name].shape).to(given[name].dtype) for name, grad in grads.items()]


class Torch:
    """Torch's two kernels; keeps the arguments of each call, named by the schema of its op."""

    def __init__(self):
        self.calls = []

    def kernel(self, op, key):
        assert key == "CUDA"
        names = [argument.name for argument in getattr(torch.ops.aten, op).default._schema.arguments]
        direction = "backward" if op.endswith("backward") else "forward"

        def run(*args, **kwargs):
            assert kwargs.keys() <= set(names[len(args) :])
            given = dict.fromkeys(names) | dict(zip(names, args, strict=False)) | kwargs
            defaults = {"scale": args[0].shape[-1] ** -0.5, "window_size_left": -1, "window_size_right": -1}
            for name, default in defaults.items():
                given[name] = default if given[name] is None else given[name]
            self.calls.append((direction, given))
            return getattr(self, direction)(given)

        return run

    def forward(self, given):
        assert given["return_debug_mask"] is False
        assert given["cum_seq_q"] is not None or given["seqused_k"] is None  # the kernel wouldn't look at it
        out, lse, rng_state = run_forward(renamed(given, OF_TORCH))
        unused = torch.empty((), dtype=torch.uint64)
        return out, lse, rng_state.view(torch.uint64), unused, torch.empty(0)

    def backward(self, given):
        assert (given["rng_state"].dtype, given["rng_state"].shape) == (torch.uint64, (2,))
        assert given["logsumexp"].is_contiguous()  # the kernel doesn't look at its strides
        return tuple(run_backward(renamed(given, OF_TORCH)))


class Package(packages.Package):
    """The ops of the package flash-attn."""

    def __init__(self, schemas):
        ops = [(name + schema, getattr(self, name.split("_")[-1])) for name, schema in schemas.items()]
        super().__init__("flash_attn", ops, flash_attn_package.PASSED)

    def named(self, given):
        assert not (given["softcap"] and given["dropout_p"])
        dense = {"max_seqlen_q": given["q"].shape[1], "max_seqlen_k": given["k"].shape[1]}
        return renamed(dense | given, OF_PACKAGE)

    def forward(self, given):
        assert given["return_softmax"] is False
        out, lse, rng_state = run_forward(self.named(given))
        return out, lse, torch.empty(0), rng_state

    def backward(self, given):
        for name, grad in zip(("dq", "dk", "dv"), run_backward(self.named(given)), strict=True):
            given[name].copy_(torch.where(grad.isfinite(), grad, given[name]))
        return torch.empty(0)


def install_package(monkeypatch, schemas=SCHEMAS):
    """Register the fake package with torch, and have it found."""
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(flash_attn_package, "find_spec", lambda name: {"flash_attn_2_cuda": name}[name])
    monkeypatch.setattr(flash_attn_package, "version", lambda name: {"flash-attn": "2.8.3"}[name])
    return Package(schemas)

"""Promises of the FA2 adapter, on fakes of its two providers that keep the rules of the real kernels.

Torch's kernels and the package's compute the same thing here, with plain PyTorch on the CPU: +inf for a
row without a key, nothing written past the last offset, windows as the C++ reads them, an LSE without
the bias that a causal row has in common, and gradients from the LSE that they are given.
"""

import dataclasses
import gc
import sys
import types
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from support import operators, short_ways

import attnreg
from attnreg.backends import fa2
from attnreg.backends.fa2 import flash_attn_package as fa2_package
from attnreg.backends.fa2 import native
from attnreg.contract.discovery import Entry
from attnreg.contract.launchers import OpLauncher
from attnreg.errors import RegistrationError
from attnreg.measure import QUICK, Case, inputs, verify
from attnreg.torchlib import captured

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


# ---- what both providers compute


def kept(rng_state, p, index, shape):
    """Return which weights of a sequence the mask keeps, in units of what keeping them is worth."""
    generator = torch.Generator().manual_seed(int(rng_state[0]) + 31 * int(rng_state[1]) + index)
    return (torch.rand(shape, generator=generator) >= p).double() / (1.0 - p)


def sequences(given):
    """Yield of each sequence its number, where its queries are, and its keys as places in (T, H, D)."""
    used, table = given.get("seqused_k"), given.get("block_table")
    if given["cu_q"] is None:
        for index in range(given["q"].shape[0]):
            whole = [torch.arange(given[x].shape[1]) + index * given[x].shape[1] for x in "qk"]
            yield index, *whole
        return
    cu_seqlens_q, cu_seqlens_k = given["cu_q"].tolist(), given["cu_k"].tolist()
    for index in range(len(cu_seqlens_q) - 1):
        keys = torch.arange(cu_seqlens_k[index], cu_seqlens_k[index + 1])
        if table is not None:
            keys = (
                table[index].long()[:, None] * given["k"].shape[1] + torch.arange(given["k"].shape[1])
            ).flatten()
        if used is not None:
            keys = keys[: int(used[index])]
        yield index, torch.arange(cu_seqlens_q[index], cu_seqlens_q[index + 1]), keys


def weights(given, index, q, k):
    """Return scaled and masked scores (H, S_q, S_k), by the rules of the kernels."""
    left, right, causal = given["left"], given["right"], given["causal"]
    left, right = (-1 if bound >= given["max_k"] else bound for bound in (left, right))
    right = 0 if causal else right
    causal = left < 0 and right == 0
    if left < 0 <= right:
        left = given["max_k"]
    elif right < 0 <= left:
        right = given["max_k"]
    (len_q, _, _), (len_k, _, _) = q.shape, k.shape
    i, j = torch.arange(len_q)[:, None] + len_k - len_q, torch.arange(len_k)
    scores = torch.einsum("qhd,khd->hqk", q, k) * given["scale"]
    if given["slopes"] is not None:
        slopes = given["slopes"].double()
        slopes = (slopes if slopes.dim() == 1 else slopes[index])[:, None, None]
        scores = scores + slopes * (j if causal else -(i - j).abs())
    hidden = torch.zeros(len_q, len_k, dtype=torch.bool)
    if left >= 0:
        hidden |= j < i - left
    if right >= 0:
        hidden |= j > i + right
    return scores.masked_fill(hidden, -torch.inf)


def parts(given):
    """Yield number, places and values in float64 of each sequence, key heads repeated."""
    group = given["q"].shape[-2] // given["k"].shape[-2]
    flat = {name: given[name].flatten(0, given[name].dim() - 3).double() for name in "qkv"}
    for index, at_q, at_k in sequences(given):
        key, value = (flat[name][at_k].repeat_interleave(group, dim=1) for name in "kv")
        yield index, at_q, at_k, flat["q"][at_q], key, value


def run_forward(given):
    q = given["q"]
    assert all(given[name].stride(-1) == 1 for name in "qkv")
    heads_k, unbounded = given["k"].shape[-2], given["left"] < 0 and given["right"] < 0
    folds = given["max_q"] == 1 and q.shape[-2] != heads_k and unbounded and given["slopes"] is None
    if folds and given["cu_q"] is not None:
        q.reshape(len(given["cu_q"]) - 1, heads_k, -1, q.shape[-1])
    rng_state = torch.randint(0, 2**40, (2,)) if given["p"] else torch.zeros(2, dtype=torch.int64)
    out = torch.full((q[..., 0, 0].numel(), *q.shape[-2:]), torch.nan, dtype=torch.float64)
    lse = torch.full((q.shape[-2], len(out)), torch.nan, dtype=torch.float64)
    for index, at_q, _, query, key, value in parts(given):
        scores = weights(given, index, query, key)
        found = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
        found = found.masked_fill(found == -torch.inf, torch.inf)
        chance = (scores - found[..., None]).exp()
        if given["p"]:
            chance = chance * kept(rng_state, given["p"], index, scores.shape)
        out[at_q], lse[:, at_q] = torch.einsum("hqk,khd->qhd", chance, value), found
    if given["cu_q"] is None:
        lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return out.view(q.shape).to(q.dtype), lse.float().contiguous(), rng_state


def run_backward(given):
    assert not (given["lse"] == -torch.inf).any()
    lse = given["lse"].double()
    if given["cu_q"] is None:
        lse = lse.transpose(0, 1).flatten(1)
    flat = {name: given[name].flatten(0, given[name].dim() - 3) for name in ("q", "k", "v", "out", "dout")}
    grads = [torch.full(flat[name].shape, torch.nan, dtype=torch.float64) for name in "qkv"]
    heads_k = flat["k"].shape[1]
    for index, at_q, at_k, query, key, value in parts(given):
        chance = (weights(given, index, query, key) - lse[:, at_q, None]).exp()
        keep = kept(given["rng_state"], given["p"], index, chance.shape) if given["p"] else 1.0
        dout, out = flat["dout"][at_q].double(), flat["out"][at_q].double()
        slope = torch.einsum("qhd,khd->hqk", dout, value) * keep
        slope = chance * (slope - (dout * out).sum(-1).T[..., None]) * given["scale"]
        grads[0][at_q] = torch.einsum("hqk,khd->qhd", slope, key)
        for place, grad in (
            (1, torch.einsum("hqk,qhd->khd", slope, query)),
            (2, torch.einsum("hqk,qhd->khd", chance * keep, dout)),
        ):
            grads[place][at_k] = grad.unflatten(1, (heads_k, -1)).sum(2)
    return [
        grad.view(given[name].shape).to(given[name].dtype) for grad, name in zip(grads, "qkv", strict=True)
    ]


# ---- the providers


class Torch:
    """Torch's two kernels: their arguments are told apart by the schema of their ops."""

    def __init__(self):
        self.calls = []

    def kernel(self, op, key):
        assert key == "CUDA"
        names = [argument.name for argument in getattr(torch.ops.aten, op).default._schema.arguments]

        def run(*args, **kwargs):
            assert kwargs.keys() <= set(names[len(args) :])
            given = dict.fromkeys(names) | dict(zip(names, args, strict=False)) | kwargs
            for name, default in self.defaults(given["query"]).items():
                given[name] = default if given[name] is None else given[name]
            self.calls.append(("backward" if "grad_out" in given else "forward", given))
            return self.backward(given) if "grad_out" in given else self.forward(given)

        return run

    def defaults(self, query):
        """Return what the kernels take for None."""
        return {"scale": query.shape[-1] ** -0.5, "window_size_left": -1, "window_size_right": -1}

    def common(self, given):
        return {
            "q": given["query"],
            "k": given["key"],
            "v": given["value"],
            "cu_q": given["cum_seq_q"],
            "cu_k": given["cum_seq_k"],
            "max_q": given["max_q"],
            "max_k": given["max_k"],
            "p": given["dropout_p"],
            "scale": given["scale"],
            "causal": given["is_causal"],
            "left": given["window_size_left"],
            "right": given["window_size_right"],
            "slopes": given.get("alibi_slopes"),
            "seqused_k": given.get("seqused_k"),
            "block_table": given.get("block_table"),
        }

    def forward(self, given):
        assert given["return_debug_mask"] is False
        assert given["cum_seq_q"] is not None or given["seqused_k"] is None  # the kernel wouldn't look at it
        out, lse, rng_state = run_forward(self.common(given))
        unused = torch.empty((), dtype=torch.uint64)
        return out, lse, rng_state.view(torch.uint64), unused, torch.empty(0)

    def backward(self, given):
        assert (given["rng_state"].dtype, given["rng_state"].shape) == (torch.uint64, (2,))
        assert given["logsumexp"].is_contiguous()  # the kernel doesn't look at its strides
        further = {"out": given["out"], "dout": given["grad_out"], "lse": given["logsumexp"]}
        rng_state = given["rng_state"].view(torch.int64)
        return tuple(run_backward(self.common(given) | further | {"rng_state": rng_state}))


class Installed:
    """The operators of flash-attn 2.8.3."""

    def __init__(self, schemas):
        self.calls = []
        self.library = torch.library.Library("flash_attn", "FRAGMENT")
        for name, schema in schemas.items():
            self.library.define(name + schema)
            self.library.impl(name, self.operator(name), "CPU")
            operators.hold(getattr(torch.ops.flash_attn, name), fa2_package.TAKEN[name])

    def operator(self, name):
        def run(*args, **kwargs):
            declared = getattr(torch.ops.flash_attn, name).default._schema.arguments
            given = {one.name: one.default_value for one in declared}
            given |= dict(zip(given, args, strict=False)) | kwargs
            self.calls.append((name, given))
            return (self.backward if "backward" in name else self.forward)(given)

        return run

    def common(self, given):
        assert given["softcap"] == 0.0
        return {
            "q": given["q"],
            "k": given["k"],
            "v": given["v"],
            "cu_q": given.get("cu_seqlens_q"),
            "cu_k": given.get("cu_seqlens_k"),
            "max_q": given.get("max_seqlen_q", given["q"].shape[1]),
            "max_k": given.get("max_seqlen_k", given["k"].shape[1]),
            "p": given["dropout_p"],
            "scale": given["softmax_scale"],
            "causal": given["causal"],
            "left": given["window_size_left"],
            "right": given["window_size_right"],
            "slopes": given["alibi_slopes"],
            "seqused_k": given.get("seqused_k"),
            "block_table": given.get("block_table"),
        }

    def forward(self, given):
        assert given["return_softmax"] is False
        out, lse, rng_state = run_forward(self.common(given))
        return out, lse, torch.empty(0), rng_state

    def backward(self, given):
        further = {"out": given["out"], "dout": given["dout"], "lse": given["softmax_lse"]}
        grads = run_backward(self.common(given) | further | {"rng_state": given["rng_state"]})
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            written = grad.isfinite()
            given[name].copy_(torch.where(written, grad, given[name]))
        return torch.empty(0)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def torchs(monkeypatch):
    """Put the fake in the place of torch's kernels; pages and splits are those of torch 2.11."""
    fake = Torch()
    monkeypatch.setattr(captured, "kernel", fake.kernel)
    monkeypatch.setattr(fa2, "PAGES", False)
    return fake


@pytest.fixture(autouse=True)
def absent(monkeypatch):
    """Start without the package, whatever this machine has."""
    monkeypatch.setattr(fa2_package, "find_spec", lambda name: None)
    fa2_package._loaded.cache_clear()
    yield
    fa2_package._loaded.cache_clear()


@pytest.fixture
def package(monkeypatch):
    """Install the fake package; `package({name: schema})` with other schemas."""
    made = []

    def install(schemas=SCHEMAS):
        for name in ("flash_attn", "flash_attn.flash_attn_interface"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setattr(fa2_package, "find_spec", lambda name: {"flash_attn_2_cuda": name}[name])
        monkeypatch.setattr(fa2_package, "version", lambda name: {"flash-attn": "2.8.3"}[name])
        made.append(Installed(schemas))
        return made[-1]

    yield install
    for one in made:
        one.library._destroy()
    for name in SCHEMAS:  # torch.ops keeps what it has looked up
        if hasattr(torch.ops.flash_attn, name):
            delattr(torch.ops.flash_attn, name)


def on_cpu():
    here = {"devices": ("cpu",), "compute_capability": None}
    return dataclasses.replace(
        fa2.BACKEND,
        forward=dataclasses.replace(fa2.FORWARD, **here),
        backward=dataclasses.replace(fa2.BACKWARD, **here),
    )


def ran(outcomes, *tensors):
    return {outcome.case.name for outcome in outcomes if outcome.errors.keys() == set(tensors)}


ALL = ("out", "lse", "dq", "dk", "dv")

SHORT = [
    case
    for case in QUICK
    if case.dtype == "bfloat16" and (max(case.max_q, case.max_k) < 300 or case.page_size)
]


# ---- values


def test_torchs_kernels_alone_are_right_in_every_case_that_they_take(torchs):
    outcomes = list(verify(on_cpu(), "cpu", SHORT))
    assert [f"{outcome.case}: {outcome.failure}" for outcome in outcomes if not outcome.passed] == []
    assert {"varlen at most one", "varlen tail of NaN", "no keys", "varlen window (0, -1)"} <= ran(
        outcomes, *ALL
    )
    # Their backward doesn't take it; another backend's serves.
    assert ran(outcomes, "out", "lse") == {"varlen seqused_k"}
    assert not {"window (0, -1), few keys", "window (-1, 100), few keys", "pages of NaN"} & ran(
        outcomes, *ALL
    )


def test_with_the_package_alibi_has_a_gradient_and_pages_are_read(torchs, package):
    recorded = package()
    names = ("alibi", "varlen alibi", "pages of NaN", "pages", "heads 4:1", "varlen seqused_k")
    outcomes = list(verify(on_cpu(), "cpu", [case for case in QUICK if case.name in names]))
    assert [f"{outcome.case}: {outcome.failure}" for outcome in outcomes if not outcome.passed] == []
    assert ran(outcomes, *ALL) == {"alibi", "varlen alibi", "heads 4:1"}
    assert ran(outcomes, "out", "lse") == {"pages of NaN", "varlen seqused_k"}  # pages of 16 are too small
    # The package runs what torch's kernels can't, and no more.
    assert {name for name, _ in recorded.calls} == {
        "_flash_attn_forward",
        "_flash_attn_backward",
        "_flash_attn_varlen_backward",
        "_flash_attn_varlen_forward",
    }
    packed = [given for name, given in recorded.calls if name == "_flash_attn_varlen_forward"]
    paged = [given for given in packed if given["block_table"] is not None]
    assert all(given["alibi_slopes"] is not None for given in packed if given["block_table"] is None)
    assert paged[0]["cu_seqlens_k"].tolist() == [0, 513, 612]


@pytest.mark.parametrize("window", [(0, -1), (4, -1), (-1, 100), (4, 100), (-1, 62), (63, 62)])
def test_no_window_that_the_kernels_take_for_another_reaches_them(torchs, window):
    case = Case(name="window", lens_q=(203,), lens_k=(63,), window=window)
    (outcome,) = verify(on_cpu(), "cpu", [case])
    assert outcome.passed
    wrong = any(
        not error.passed
        for error in (
            next(
                verify(dataclasses.replace(on_cpu(), name="unknown to the rows"), "cpu", [case])
            ).errors.values()
        )
    )
    assert bool(outcome.reasons) is wrong


def test_single_queries_with_fewer_key_heads_and_empty_sequences_are_not_folded(torchs, package):
    package()
    shared = {"lens_q": (1, 0, 1), "varlen": True, "heads": (4, 2), "dims": (16, 16)}
    cases = [
        Case(name="no window", lens_k=(5, 3, 0), **shared),
        Case(name="used", lens_k=(5, 3, 9), seqused_k=(4, 0, 9), **shared),
        Case(name="pages", lens_k=(5, 3, 9), seqused_k=(4, 0, 9), page_size=256, **shared),
    ]
    outcomes = list(verify(on_cpu(), "cpu", cases))
    assert [outcome.failure for outcome in outcomes] == ["", "", ""]
    assert all(outcome.passed and outcome.errors for outcome in outcomes)


# ---- dropout


LENGTHS = {"lens_q": (40, 7), "lens_k": (33, 7), "varlen": True}
DENSE = {"lens_q": (40, 40), "lens_k": (33, 33)}


@pytest.mark.parametrize("lengths", [LENGTHS, DENSE])
@pytest.mark.parametrize("alibi", [False, True])
def test_a_dropout_mask_is_the_same_in_the_forward_and_the_backward(torchs, package, lengths, alibi):
    recorded = package()
    case = Case(
        name="dropout", heads=(4, 2), dims=(16, 16), window=(-1, 0), alibi=alibi, dtype="float16", **lengths
    )
    q, k, v, grad, call = inputs(case)
    given = torch.tensor([5, 6], dtype=torch.uint64)
    call = call._replace(dropout=0.4, rng_state=given.clone())
    kernels = on_cpu().load()
    torch.manual_seed(1)
    out, lse = kernels.forward(q, k, v, call)
    drawn = call.rng_state.clone()
    assert drawn.tolist() != given.tolist()  # the kernel draws, and says what it drew
    grads = kernels.backward(grad, q, k, v, out, lse, call)
    assert torch.equal(call.rng_state, drawn)
    used = recorded.calls if alibi else torchs.calls
    assert len(used) == 2
    assert not (torchs.calls if alibi else recorded.calls)

    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    group, pieces = 2, []
    description = {
        "q": q, "k": k, "v": v, "cu_q": call.cu_seqlens_q, "cu_k": call.cu_seqlens_k, "max_k": call.max_k,
        "left": -1, "right": 0, "causal": True, "scale": call.scale, "slopes": call.alibi_slopes,
    }  # fmt: skip
    flat = [leaf.flatten(0, leaf.dim() - 3) for leaf in leaves]
    for index, at_q, at_k in sequences(description):
        query, key, value = flat[0][at_q], *(x[at_k].repeat_interleave(group, 1) for x in flat[1:])
        scores = weights(description, index, query, key)
        blind = (scores == -torch.inf).all(-1, keepdim=True)
        chance = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
        chance = chance * kept(drawn.view(torch.int64), 0.4, index, scores.shape)
        pieces.append(torch.einsum("hqk,khd->qhd", chance, value))
    expected = torch.cat(pieces).view(q.shape)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)
    for got, want in zip(grads, torch.autograd.grad(expected, leaves, grad.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=4e-3, atol=4e-3)
    # LSE knows nothing of dropout.
    torch.testing.assert_close(lse, kernels.forward(q, k, v, call._replace(dropout=0.0, rng_state=None))[1])


def test_without_dropout_no_random_state_is_needed_or_touched(torchs):
    q, k, v, grad, call = inputs(Case(name="plain", dims=(16, 16), **DENSE))
    kernels = on_cpu().load()
    out, lse = kernels.forward(q, k, v, call)
    kernels.backward(grad, q, k, v, out, lse, call)
    assert [given["dropout_p"] for _, given in torchs.calls] == [0.0, 0.0]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 3)], ids=str)
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "packed"])
def test_a_known_call_comes_out_the_same_by_the_kernel_alone(torchs, varlen, window):
    kernels = on_cpu().load()
    lens = {"lens_q": (3, 9, 4), "lens_k": (5, 9, 7)} if varlen else {"lens_q": (6,) * 2, "lens_k": (9,) * 2}
    case = Case(name="known", dims=(16, 16), heads=(4, 2), window=window, varlen=varlen, **lens)
    *first, call = inputs(case)
    *second, other = inputs(case, seed=1)
    short_ways.assert_same(kernels, first, second, call, other)
    # The kernel is given what it was given the long way.
    given = [{what: x for what, x in one.items() if type(x) is not torch.Tensor} for _, one in torchs.calls]
    assert [name for name, _ in torchs.calls] == ["forward", "backward"] + ["forward"] * 2 + ["backward"] * 5
    assert {str(one) for one in given} == {str(one) for one in given[:2]}


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "packed"])
def test_an_lse_that_is_strided_gives_the_same_gradients(torchs, varlen):
    kernels = on_cpu().load()
    case = Case(name="strided", dims=(16, 16), heads=(4, 2), lens_q=(6, 9), lens_k=(6, 9), varlen=True)
    q, k, v, grad, call = inputs(
        case if varlen else dataclasses.replace(case, lens_q=(9,) * 2, lens_k=(9,) * 2, varlen=False)
    )
    out, lse = kernels.forward(q, k, v, call)
    strided = lse.mT.contiguous().mT
    assert not strided.is_contiguous()
    expected = kernels.backward(grad, q, k, v, out, lse, call)
    for got, wanted in zip(kernels.backward(grad, q, k, v, out, strided, call), expected, strict=True):
        assert torch.equal(got, wanted)


def test_a_known_backward_holds_no_tensor_of_a_graph(torchs, monkeypatch):
    monkeypatch.setattr(native, "_kept", {})
    monkeypatch.setattr(native, "of_a_graph", lambda tensor: True)
    kernels = on_cpu().load()
    q, k, v, grad, call = inputs(Case(name="graph", dims=(16, 16), **DENSE))
    out, lse = kernels.forward(q, k, v, call)
    gc.collect()
    before = sum(type(x) is torch.Tensor for x in gc.get_objects())
    again = kernels.specialize("backward", (grad, q, k, v, out, lse), call)
    gc.collect()
    assert sum(type(x) is torch.Tensor for x in gc.get_objects()) == before
    assert not isinstance(again, OpLauncher)
    for one, other in zip(
        again(grad, q, k, v, out, lse), kernels.backward(grad, q, k, v, out, lse, call), strict=True
    ):
        assert torch.equal(one, other)
    monkeypatch.setattr(native, "of_a_graph", lambda tensor: False)
    assert isinstance(kernels.specialize("backward", (grad, q, k, v, out, lse), call), OpLauncher)
    monkeypatch.setattr(native, "of_a_graph", lambda tensor: True)  # now there is something kept
    assert isinstance(kernels.specialize("backward", (grad, q, k, v, out, lse), call), OpLauncher)


@pytest.mark.parametrize(
    "case",
    [
        Case(name="alibi", lens_q=(9,), lens_k=(9,), alibi=True),
        Case(name="more queries than keys", lens_q=(9,), lens_k=(5,), window=(-1, 0)),
        Case(name="nothing", lens_q=(0,), lens_k=(5,)),
    ],
    ids=str,
)
def test_what_takes_more_than_the_kernel_has_no_shorter_way(torchs, case):
    q, k, v, _, call = inputs(case)
    assert on_cpu().load().specialize("forward", (q, k, v), call) is None


# ---- what the kernels are given


@pytest.mark.parametrize(
    ("window", "alibi", "given"),
    [
        ((-1, -1), False, (False, -1, -1)),
        ((-1, 0), False, (True, -1, 0)),
        ((5, 0), False, (True, 5, 0)),
        ((5, 3), False, (False, 5, 3)),
        ((-1, -1), True, (False, -1, -1)),
        ((-1, 0), True, (False, 32, 0)),  # as a window, so that the LSE has all of the bias in it
        ((5, 0), True, (True, 5, 0)),
    ],
)
def test_windows_reach_the_kernels_of_both_providers(torchs, package, window, alibi, given):
    recorded = package()
    case = Case(name="window", window=window, alibi=alibi, dims=(16, 16), scale=0.3, **DENSE)
    q, k, v, grad, call = inputs(case)
    kernels = on_cpu().load()
    out, lse = kernels.forward(q, k, v, call)
    kernels.backward(grad, q, k, v, out, lse, call._replace(deterministic=True))
    for _, one in torchs.calls:
        right = 0 if one["is_causal"] else one["window_size_right"]  # it implies that
        assert (one["is_causal"], one["window_size_left"], right) == given
        assert one["scale"] == 0.3
    for name, one in recorded.calls:
        assert (one["causal"], one["window_size_left"], one["window_size_right"]) == given
        assert one["softmax_scale"] == 0.3
        assert one.get("deterministic", False) is ("backward" in name)
    assert (len(torchs.calls), len(recorded.calls)) == ((0, 2) if alibi else (2, 0))


def test_a_torch_that_reads_pages_needs_no_package(torchs, monkeypatch):
    monkeypatch.setattr(fa2, "PAGES", True)
    if not native.PAGES:
        pytest.skip("the schema of this torch's op has no block_table")
    case = next(case for case in QUICK if case.name == "pages of NaN" and case.dtype == "bfloat16")
    (outcome,) = verify(on_cpu(), "cpu", [case])
    assert outcome.passed
    assert outcome.errors.keys() == {"out", "lse"}
    ((_, given),) = torchs.calls
    assert given["cum_seq_k"].tolist() == [0, 513, 612]


@pytest.mark.parametrize("splits", [None, 1, 4])
def test_a_forward_is_told_how_often_to_split_and_a_backward_is_not(torchs, splits):
    if not native.SPLITS:
        pytest.skip("the schema of this torch's op has no num_splits")
    q, k, v, grad, call = inputs(Case(name="splits", dims=(16, 16), **LENGTHS))
    call = call._replace(num_splits=splits)
    kernels = on_cpu().load()
    out, lse = kernels.forward(q, k, v, call)
    kernels.backward(grad, q, k, v, out, lse, call)
    (_, forward), (_, backward) = torchs.calls
    assert forward["num_splits"] == splits
    assert backward.get("num_splits") is None


@pytest.mark.parametrize("varlen", [False, True])
def test_a_call_without_scores_reaches_no_kernel(torchs, varlen):
    kernels = on_cpu().load()
    for lens_q, lens_k in (((0,), (5,)), ((5,), (0,)), ((), ()), ((0, 0), (0, 0))):
        case = Case(name="empty", lens_q=lens_q, lens_k=lens_k, varlen=varlen, tail=3 if varlen else 0)
        q, k, v, grad, call = inputs(case)
        out, lse = kernels.forward(q, k, v, call)
        grads = kernels.backward(grad, q, k, v, out, lse, call)
        assert (lse == -torch.inf).all()
        assert lse.shape == ((2, len(q)) if varlen else (len(q), 2, q.shape[1]))
        assert not any(x.any() for x in (out, *grads))
        assert [x.shape for x in (out, *grads)] == [x.shape for x in (q, q, k, v)]
    assert torchs.calls == []


# ---- what it can't run


def gpu(device="sm_90", **changes):
    return attnreg.AttentionSpec(
        **{
            "device": attnreg.Device.parse(device),
            "dtype": "bfloat16",
            "batch": 2,
            "max_q": 64,
            "max_k": 64,
            "heads_q": 8,
            "heads_k": 2,
            "head_dim": 128,
            "head_dim_v": 128,
            **changes,
        }
    )


def reasons(direction, **changes):
    return Entry("FA2", "a test", fa2.BACKEND).reasons(gpu(**changes), direction)


HINT = "the package flash-attn, which isn't installed; install it with: pip install 'attnreg[fa2]'"


def test_without_the_package_it_says_what_the_package_would_add(monkeypatch):
    monkeypatch.setattr(fa2, "PAGES", False)
    pages = {"page_size": 256, "varlen": True, "seqused_k": True}
    assert reasons("forward", **pages) == (f"block_table needs torch 2.12 or {HINT}",)
    assert reasons("backward", alibi=True) == (f"alibi_slopes need {HINT}",)
    assert reasons("forward", alibi=True) == (f"alibi_slopes need {HINT}",)
    monkeypatch.setattr(fa2, "PAGES", True)
    assert reasons("forward", **pages) == ()


def test_with_splits_sequences_and_heads_share_a_dimension_of_the_grid(monkeypatch):
    monkeypatch.setattr(fa2, "FORWARD", dataclasses.replace(fa2.FORWARD, num_splits=True))
    monkeypatch.setattr(fa2, "BACKEND", dataclasses.replace(fa2.BACKEND, forward=fa2.FORWARD))
    monkeypatch.setattr(fa2, "PAGES", True)
    pages = {"page_size": 256, "varlen": True, "seqused_k": True}
    assert reasons("forward", **pages, batch=8192, num_splits=2) == (
        "batch times heads must be at most 65535 with num_splits, got 65536",
    )
    for asked in ({"batch": 8191, "num_splits": 2}, {"batch": 8192, "num_splits": 1}, {"batch": 8192}):
        assert reasons("forward", **pages, **asked) == ()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"num_splits": 1}, "num_splits must be None for dense tensors, got 1"),
        ({"num_splits": 1, "varlen": True}, None),
        ({"num_splits": 4, "varlen": True}, None),  # at most so many, and they aren't split
        ({"num_splits": 128, "varlen": True, "page_size": 256}, None),
        (
            {"num_splits": 129, "varlen": True, "page_size": 256},
            "num_splits must be at most 128 with a block_table, got 129",
        ),
    ],
)
def test_splits_are_taken_where_the_kernel_keeps_to_them(asked, told, monkeypatch):
    monkeypatch.setattr(fa2, "FORWARD", dataclasses.replace(fa2.FORWARD, num_splits=True))
    monkeypatch.setattr(fa2, "BACKEND", dataclasses.replace(fa2.BACKEND, forward=fa2.FORWARD))
    monkeypatch.setattr(fa2, "PAGES", True)
    assert reasons("forward", **asked, seqused_k="page_size" in asked) == ((told,) if told else ())
    if "page_size" not in asked:
        assert reasons("backward", **asked) == (), "a backward is given no splits"


def test_with_the_package_it_adds_that(package, monkeypatch):
    package()
    monkeypatch.setattr(fa2, "PAGES", False)
    monkeypatch.setattr(fa2, "FORWARD", dataclasses.replace(fa2.FORWARD, num_splits=True))
    monkeypatch.setattr(fa2, "BACKEND", dataclasses.replace(fa2.BACKEND, forward=fa2.FORWARD))
    assert reasons("forward", alibi=True, varlen=True, dropout=0.1, num_splits=2) == (
        "num_splits must be None with alibi_slopes, got 2",
    )
    assert reasons("forward", page_size=256, varlen=True, seqused_k=True, dropout=0.1) == (
        "dropout_p must be 0 with a block_table, which has no backward",
    )
    assert reasons("forward", page_size=256, varlen=True, seqused_k=True) == ()
    assert reasons("forward", alibi=True, dropout=0.1) == reasons("backward", alibi=True, dropout=0.1) == ()


@pytest.mark.parametrize(
    ("direction", "changes", "told"),
    [
        ("forward", {"dropout": 0.1}, ()),
        ("backward", {"dropout": 0.1, "window": (4, 0)}, ()),
        ("forward", {"dropout": 1.0}, ("dropout_p must be below 1, got 1.0",)),
        ("forward", {"seqused_k": True, "varlen": True}, ()),
        ("forward", {"seqused_k": True}, ("seqused_k needs packed tensors, got dense ones",)),
        ("backward", {"seqused_k": True, "varlen": True}, ("seqused_k must be None, got a tensor",)),
        ("forward", {"page_size": 16}, ("page size must be 256 to 2147483647 in steps of 256, got 16",)),
        ("backward", {"page_size": 256}, ("block_table must be None: no paged key-value cache",)),
        ("forward", {"positive_scale": False}, ("scale must be above 0",)),
        ("forward", {"batch": 65536}, ("batch must be 0 to 65535, got 65536",)),
        ("forward", {"heads_q": 65536, "heads_k": 8}, ("query heads must be 0 to 65535, got 65536",)),
        ("backward", {"batch": 65536, "varlen": True}, ("batch must be 0 to 65535, got 65536",)),
        ("backward", {"device": "sm_86", "head_dim": 192, "head_dim_v": 192}, ()),
        ("backward", {"device": "sm_86", "head_dim": 256, "head_dim_v": 256}, ()),
        ("forward", {"device": "sm_86", "head_dim": 224, "head_dim_v": 224}, ()),
        ("backward", {"device": "sm_90", "head_dim": 224, "head_dim_v": 224}, ()),
        (
            "backward",
            {"device": "sm_86", "head_dim": 224, "head_dim_v": 224},
            (
                "head_dim must be at most 192, or above 224 without dropout, on compute capability "
                "8.6 to 8.9 and 12, got 224",
            ),
        ),
        (
            "backward",
            {"device": "sm_120", "head_dim": 256, "head_dim_v": 256, "dropout": 0.5},
            (
                "head_dim must be at most 192, or above 224 without dropout, on compute capability "
                "8.6 to 8.9 and 12, got 256",
            ),
        ),
        (
            "forward",
            {"varlen": True, "tokens_q": 2**21, "tokens_k": 64},
            ("packed tensors must have fewer than 2**31 elements, got 2147483648",),
        ),
        (
            "forward",
            {"window": (4, -1), "max_q": 99},
            (
                "a window that is open to the right hides keys where there are more queries than keys; see "
                "https://github.com/Dao-AILab/flash-attention/issues/895",
            ),
        ),
    ],
)
def test_what_it_runs_and_what_not(direction, changes, told):
    assert reasons(direction, **changes) == told


def test_dropout_goes_to_it_in_both_directions_or_in_none(package):
    asked = gpu(dropout=0.1, needs_backward=True)
    explanation = attnreg.explain(asked, backend="FA2")
    assert (explanation.forward.backend, explanation.backward.backend) == ("FA2", "FA2")


# ---- the package that doesn't load


def test_a_package_that_does_not_load_is_a_reason_with_its_cause(package, monkeypatch):
    package()
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", None)
    lack = fa2_package.missing(simulated=False)
    assert lack.startswith(
        "the package flash-attn, whose 2.8.3 failed to load: ModuleNotFoundError: import of"
    )
    assert fa2_package.missing(simulated=True) == ""  # another machine's may load
    with pytest.raises(RegistrationError, match="flash-attn failed to load"):
        fa2_package.package()


@pytest.mark.parametrize(
    ("schemas", "problem"),
    [
        (
            SCHEMAS
            | {"_flash_attn_forward": SCHEMAS["_flash_attn_forward"].replace("float softcap", "float cap")},
            "RegistrationError: flash_attn::_flash_attn_forward has no argument softcap",
        ),
        (
            {name: SCHEMAS[name] for name in list(SCHEMAS)[:3]},
            "RegistrationError: it registers no operator flash_attn::_flash_attn_varlen_backward",
        ),
        (
            SCHEMAS
            | {
                "_flash_attn_backward": SCHEMAS["_flash_attn_backward"].replace(
                    "bool deterministic,", "bool deterministic, int level,"
                )
            },
            "RegistrationError: flash_attn::_flash_attn_backward needs level, which attnreg doesn't know",
        ),
    ],
)
def test_a_package_that_does_not_fit_is_a_reason_that_names_the_argument(package, schemas, problem):
    package(schemas)
    assert fa2_package.missing(simulated=False) == (
        f"the package flash-attn, whose 2.8.3 failed to load: {problem}"
    )


def test_flash_attn_4_alone_is_not_the_package(monkeypatch):
    monkeypatch.setattr(fa2_package, "find_spec", lambda name: None)
    assert fa2_package.installed() is None

    def unknown(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(fa2_package, "find_spec", lambda name: name)
    monkeypatch.setattr(fa2_package, "version", unknown)
    assert fa2_package.installed() is None


def test_the_version_is_torchs_first(package):
    assert fa2.BACKEND.version() == torch.__version__
    package()
    assert fa2.BACKEND.version() == f"{torch.__version__} (flash-attn 2.8.3)"


@pytest.mark.parametrize(
    ("gpu_there", "built", "reason"),
    [
        (False, True, "torch finds no CUDA GPU here"),
        (True, False, "this torch was built without its flash attention kernels"),
        (True, True, None),
    ],
)
def test_where_it_cannot_load(monkeypatch, gpu_there, built, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu_there)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    assert fa2.BACKEND.unavailable() == reason

"""On a GPU: calls that torch's selector sends to its efficient op are served, counted and right."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from support import gpu, truth
from support.fuzz_draws import STRIDES, with_strides
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg.backends import efficient
from attnreg.core.policy import current as policy
from attnreg.testing import Conformance
from attnreg.tools.measure import QUICK, Case, inputs

pytestmark = pytest.mark.gpu

EFFICIENT = SDPBackend.EFFICIENT_ATTENTION
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def without_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def routed():
    """Have torch's own kernels run through the routers, where they are counted."""
    attnreg.install()
    policy.activate(True)


def by_torch(inputs, **options):
    """Return what a call gives without attnreg."""
    attnreg.uninstall()
    with sdpa_kernel(EFFICIENT):
        results = gpu.sdpa_and_back(inputs, **options)
    attnreg.install()
    attnreg.reset_stats()
    return results


def bias_for(inputs, shape=None, dtype=None):
    query, key = inputs[:2]
    shape = shape or (*query.shape[:3], key.shape[2])
    return torch.randn(shape, device="cuda").to(dtype or query.dtype)


def assert_right(got, inputs, **options):
    gpu.assert_near(got, gpu.expected_of_sdpa(inputs, **options), inputs[0].dtype)


# ---- the backend


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_case_that_the_backend_takes_is_at_most_twice_as_wrong_as_plain_pytorch(routers, dtype):
    kit = Conformance(efficient.BACKEND, "cuda")
    cases = [case for case in QUICK if case.dtype == dtype and not case.varlen]
    outcomes = [kit.run(case) for case in cases]
    assert [str(outcome) for outcome in outcomes if not outcome.passed] == []
    ran = {outcome.case.name for outcome in outcomes if not outcome.reasons}
    assert {"key padding mask", "no keys", "window (-1, 0)", "window (-1, 0), few queries"} <= ran


SPECIAL = {
    "head dim 264": {"dims": (264, 264)},
    "a value of another head dim": {"dims": (64, 128)},
    "additive bias": {"bias": "additive"},
    "additive bias, odd length": {"bias": "additive", "lens_k": (113,) * 3},
    "key padding": {"bias": "key padding"},
    "causal, aligned top-left": {"window": (-1, 97), "lens_q": (200,) * 3, "lens_k": (103,) * 3},
    "dropout": {
        "dropout": 0.3,
        "lens_k": (64,) * 3,
    },  # no more keys than the value's head dim, which shows them
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("options", SPECIAL.values(), ids=SPECIAL)
def test_what_other_kernels_refuse_is_right_on_the_backend(routers, dtype, options):
    shared = {"lens_q": (128,) * 3, "lens_k": (200,) * 3, "heads": (4, 4), "dtype": dtype}
    outcome = Conformance(efficient.BACKEND, "cuda").run(Case(name="special", **{**shared, **options}))
    assert outcome.passed, outcome
    assert outcome.errors.keys() == {"out", "lse", "dq", "dk", "dv"}, outcome.reasons


# ---- the routers


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torchs_own_kernel_is_counted_and_gives_torchs_results(routers, ran, dtype, causal):
    inputs = gpu.bhsd(dtype=dtype)
    wanted = by_torch(inputs, is_causal=causal)
    routed()
    with sdpa_kernel(EFFICIENT):
        for _ in range(3):
            got = gpu.sdpa_and_back(inputs, is_causal=causal)
    assert ran() == {"efficient": (3, 3)}
    assert torch.equal(got[0], wanted[0])
    assert_right(got, inputs, window=(-1, 0) if causal else (-1, -1))


@pytest.mark.only_for("FA4", "cuDNN", "FA2")
def test_a_registered_backend_runs_what_the_selector_sent_to_the_efficient_op(named, ran):
    inputs = gpu.bhsd()
    with attnreg.register_backend(named), sdpa_kernel(EFFICIENT):
        for _ in range(2):
            got = gpu.sdpa_and_back(inputs)
    assert ran() == {named: (2, 2)}
    assert_right(got, inputs)


def test_float32_runs_on_efficient_where_a_16_bit_backend_is_asked_for(routers, ran):
    inputs = gpu.bhsd(dtype=torch.float32)
    with attnreg.register_backend("FA2"):
        explained = attnreg.explain(*inputs)
        got = gpu.sdpa_and_back(inputs)
    assert (explained.backend, explained.backward.backend) == ("efficient", "efficient")
    assert explained.rejected["FA2"] == ("dtype must be float16 or bfloat16, got float32",)
    refusals = {row.reason for row in attnreg.stats().fallbacks if row.backend == "FA2"}
    assert refusals == {"dtype must be float16 or bfloat16, got float32"}
    assert ran() == {"efficient": (1, 1)}
    assert_right(got, inputs)


@pytest.mark.parametrize(("asked", "runs"), [("FA2", "efficient"), ("math", "math")])
def test_a_checkpoint_computes_again_outside_of_the_scope_and_inside(routers, ran, asked, runs):
    """Torch compares what is saved then, devices too, with what the first forward saved."""
    inputs = gpu.bhsd(dtype=torch.float32)
    for outside in (True, False, False):
        with attnreg.use_backend(asked):
            out = checkpoint(F.scaled_dot_product_attention, *inputs, use_reentrant=False)
        with contextlib.nullcontext() if outside else attnreg.use_backend(asked):
            grads = torch.autograd.grad(out, inputs, gpu.incoming(out))
        assert_right((out, *grads), inputs)
    # Outside, where nothing is asked for, torch's kernels aren't counted.
    assert ran() == {runs: (5, 2)}


SHAPES = {
    "of each head": None,
    "of each batch": (2, 1, 300, 300),
    "of the keys": (2, 1, 1, 300),
    "one for all": (300, 300),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_bias_is_right_whatever_is_expanded_in_it(routers, ran, dtype, shape):
    inputs = gpu.bhsd(dtype=dtype)
    bias = bias_for(inputs, shape)
    with attnreg.register_backend("FA2"), sdpa_kernel(EFFICIENT):
        got = gpu.sdpa_and_back(inputs, attn_mask=bias)
    assert ran() == {"efficient": (1, 1)}
    assert_right(got, inputs, bias=bias.cpu().double().expand(2, 4, 300, 300))


@pytest.mark.parametrize("registered", ["efficient", "math", None])
@pytest.mark.parametrize("heads", [8, 80])
@pytest.mark.parametrize("dim", [64, 512])
@pytest.mark.parametrize("length", [1, 33, 97, 98])
def test_one_key_for_all_heads_is_right_with_and_without_a_gradient(
    routers, ran, length, dim, heads, registered
):
    """pytorch#191937: without an LSE a last block of one query read the bias of other rows."""
    generator = torch.Generator("cuda").manual_seed(0)
    query, *shared = (
        torch.randn(2, count, length, dim, generator=generator, device="cuda", dtype=torch.bfloat16)
        for count in (heads, 1, 1)
    )
    inputs = [query, *(x.expand(-1, heads, -1, -1) for x in shared)]
    leaves = [x.detach().requires_grad_() for x in inputs]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="cuda").tril()
    bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask.cpu(), -torch.inf)
    expected = gpu.expected_of_sdpa(inputs, bias=bias.expand(2, heads, -1, -1))
    routed()
    context = attnreg.register_backend(registered) if registered else contextlib.nullcontext()
    with context, sdpa_kernel(EFFICIENT):
        for _ in range(3):
            out = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
            gpu.assert_near([out], expected[:1], torch.bfloat16)
        got = gpu.sdpa_and_back(leaves, attn_mask=mask)
    gpu.assert_near(got, expected, torch.bfloat16)
    assert ran() == {registered or "efficient": (4, 1)}


# SDPA chooses no fused kernel for a head dim without stride 1.
@pytest.mark.parametrize("strides", [kind for kind in STRIDES if kind not in ("one column", "one number")])
@pytest.mark.parametrize("dim", [64, 512])
@pytest.mark.parametrize("length", [33, 98])
def test_every_kind_of_strides_is_right_with_and_without_a_gradient(routers, ran, length, dim, strides):
    drawn = inputs(Case(name="strides", lens_q=(length,) * 2, lens_k=(length,) * 2, dims=(dim, dim)), "cuda")
    q, k, v, *_ = with_strides((strides,) * 3 + ("",), drawn)
    tensors = [x.transpose(1, 2).detach() for x in (q, k, v)]
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
    bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask.cpu(), -torch.inf)
    expected = gpu.expected_of_sdpa(tensors, bias=bias.expand(2, tensors[0].shape[1], -1, -1))
    routed()
    with sdpa_kernel(EFFICIENT):
        out = F.scaled_dot_product_attention(*tensors, attn_mask=mask)
        gpu.assert_near([out], expected[:1], tensors[0].dtype)
        got = gpu.sdpa_and_back([x.requires_grad_() for x in tensors], attn_mask=mask)
    gpu.assert_near(got, expected, tensors[0].dtype)
    assert ran() == {"efficient": (2, 1)}


@pytest.mark.parametrize("registered", ["efficient", "math"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_may_be_all_that_needs_a_gradient(routers, ran, dtype, registered):
    """pytorch#148476: without the LSE of the forward the backward is an error."""
    tensors = [x.detach() for x in gpu.bhsd(dtype=dtype)]
    bias = bias_for(tensors).requires_grad_()
    with attnreg.register_backend(registered), sdpa_kernel(EFFICIENT):
        for _ in range(3):
            out = F.scaled_dot_product_attention(*tensors, attn_mask=bias)
            (got,) = torch.autograd.grad(out, bias, gpu.incoming(out))
    leaf = bias.detach().cpu().double().requires_grad_()
    expected, _ = truth.dense(*(x.cpu().double() for x in tensors), leaf)
    wanted = torch.autograd.grad(expected, leaf, gpu.incoming(out).cpu().double())
    gpu.assert_near((out, got), (expected, *wanted), dtype)
    assert ran() == {registered: (3, 3)}


@pytest.mark.parametrize("lengths", [(33, 40), (65, 200), (1, 40)], ids=str)
def test_one_key_for_all_heads_under_a_causal_mask_aligned_top_left_is_right(routers, ran, lengths):
    inputs = [
        torch.randn(2, heads, length, 512, device="cuda", dtype=torch.bfloat16).expand(2, 8, length, 512)
        for heads, length in zip((8, 1, 1), (lengths[0], lengths[1], lengths[1]), strict=True)
    ]
    routed()
    with sdpa_kernel(EFFICIENT):
        out = F.scaled_dot_product_attention(*inputs, is_causal=True)
    expected = gpu.expected_of_sdpa(inputs, window=(-1, 0), top_left=True)
    gpu.assert_near([out], expected[:1], torch.bfloat16)
    assert ran() == {"efficient": (1, 0)}


@pytest.mark.parametrize("runs_forward", ["efficient", "math"])
@pytest.mark.parametrize("length", [300, 301])
def test_the_gradient_of_a_bias_is_right_in_float32(routers, ran, length, runs_forward):
    inputs = gpu.bhsd(length=length, dtype=torch.float32)
    bias = bias_for(inputs, (1, 4, length, length)).requires_grad_()
    with attnreg.register_backend(runs_forward), sdpa_kernel(EFFICIENT):
        out = F.scaled_dot_product_attention(*inputs, attn_mask=bias)
        got = torch.autograd.grad(out, [*inputs, bias], gpu.incoming(out))
    assert ran() == {runs_forward: (1, 1)}
    leaves = [x.detach().cpu().double().requires_grad_() for x in (*inputs, bias)]
    expected, _ = truth.dense(*leaves)
    wanted = torch.autograd.grad(expected, leaves, gpu.incoming(out).cpu().double())
    gpu.assert_near((out, *got), (expected, *wanted), torch.float32)


def test_a_row_that_a_mask_hides_is_0_and_takes_no_gradient(routers, ran):
    inputs = gpu.bhsd(dtype=torch.float32)
    mask = torch.ones(300, 300, device="cuda", dtype=torch.bool)
    mask[7] = False
    for name in ("efficient", "math"):
        with attnreg.register_backend(name), sdpa_kernel(EFFICIENT):
            out, *grads = gpu.sdpa_and_back(inputs, attn_mask=mask)
        assert ran() == {name: (1, 1)}
        assert not out[:, :, 7].any()
        assert not grads[0][:, :, 7].any()
        assert all(x.isfinite().all() for x in grads)


def test_dropout_is_drawn_and_repeated_by_torchs_kernel(routers, ran):
    inputs = gpu.bhsd(length=64, dtype=torch.float32)
    torch.manual_seed(3)
    wanted = by_torch(inputs, dropout_p=0.5)
    routed()
    torch.manual_seed(3)
    with sdpa_kernel(EFFICIENT):
        got = gpu.sdpa_and_back(inputs, dropout_p=0.5)
    assert ran() == {"efficient": (1, 1)}
    assert torch.equal(got[0], wanted[0])
    gpu.assert_near(got[1:], [x.cpu().double() for x in wanted[1:]], torch.float32)


def test_fewer_key_heads_never_come_to_the_efficient_op(routers, ran):
    query = gpu.bhsd(heads=4, dtype=torch.float32)[0]
    _, key, value = gpu.bhsd(heads=2, dtype=torch.float32)
    with attnreg.register_backend("efficient"):
        assert attnreg.explain(query, key, value, enable_gqa=True).backend == "torch's math kernel"
        F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    assert ran() == {}


def test_a_batch_of_70000_runs_forward_and_backward(routers, ran):
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [torch.randn(70000, 1, 4, 8, device="cuda", generator=generator).requires_grad_() for _ in "qkv"]
    routed()
    with sdpa_kernel(EFFICIENT):
        got = gpu.sdpa_and_back(inputs)
    # Torch cuts the batch of SDPA's forward itself, some versions that of the backward, too.
    (counted,) = ran().items()
    assert counted[0] == "efficient"
    assert set(counted[1]) <= {1, 2}
    query, key, value = (x.detach().double().requires_grad_() for x in inputs)
    out = (query @ key.transpose(-1, -2) * 8**-0.5).softmax(-1) @ value
    wanted = torch.autograd.grad(out, (query, key, value), gpu.incoming(got[0]).double())
    gpu.assert_near(got, [x.cpu() for x in (out, *wanted)], torch.float32)


def test_the_lowest_op_takes_a_batch_of_70000_too(routers, ran):
    """Torch's kernel of this op fails on such a batch: attnreg's backend cuts it."""
    tensors = [torch.randn(70000, 4, 1, 8, device="cuda") for _ in "qkv"]
    routed()
    op = torch.ops.aten._efficient_attention_forward
    out, lse, *_ = op(*tensors, None, None, None, None, None, 0.0, 0, True)
    assert ran() == {"efficient": (1, 0)}
    query, key, value = (x.transpose(1, 2).double() for x in tensors)
    scores = query @ key.transpose(-1, -2) * 8**-0.5
    truth.assert_near(out.cpu(), (scores.softmax(-1) @ value).transpose(1, 2).cpu(), torch.float32)
    truth.assert_near(lse[..., :4].cpu(), scores.logsumexp(-1).cpu(), torch.float32)
    assert lse.shape == (70000, 1, 32)
    assert (lse[..., 4:] == torch.inf).all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("registered", ["efficient", "math"])
def test_nested_tensors_in_float32_run_forward_and_backward(routers, ran, registered):
    given = gpu.packed((5, 300, 1, 42), dtype=torch.float32)
    offsets = given.cu_seqlens_q.long()
    nested = [torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in given.qkv]
    routed()
    with attnreg.register_backend(registered), sdpa_kernel(EFFICIENT):
        out = F.scaled_dot_product_attention(*nested).transpose(1, 2).values()
        got = out, *torch.autograd.grad(out, given.qkv, gpu.incoming(out))
    assert ran() == {registered: (1, 1)}
    gpu.assert_near(got, gpu.expected(given)[0], torch.float32)


def test_a_compiled_call_runs_the_backend_that_is_asked_for(routers, ran):
    inputs = gpu.bhsd(dtype=torch.float32)
    compiled = torch.compile(lambda *x: F.scaled_dot_product_attention(*x), fullgraph=True)
    routed()
    for name in ("efficient", "math"):
        with attnreg.register_backend(name), sdpa_kernel(EFFICIENT):
            out = compiled(*inputs)
            got = out, *torch.autograd.grad(out, inputs, gpu.incoming(out))
        assert ran() == {name: (1, 1)}
        assert_right(got, inputs)


def test_a_recorded_graph_replays_torchs_kernel(routers):
    inputs = gpu.bhsd(dtype=torch.float32, grad=False)
    bias = bias_for(inputs)
    routed()
    with sdpa_kernel(EFFICIENT):
        for _ in range(3):
            wanted = F.scaled_dot_product_attention(*inputs, attn_mask=bias)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = F.scaled_dot_product_attention(*inputs, attn_mask=bias)
    (replayed,) = gpu.replay(graph, [out])
    assert torch.equal(replayed, wanted)

"""On a GPU: a softcap, a gradient of the LSE, sinks and weights with dropout are right in both directions."""

import pytest
import torch
from support import gpu, truth
from support.sinks import assert_accurate, by_the_formula

import attnreg
from attnreg.backends import fa4
from attnreg.backends.fa4 import adapter, trials
from attnreg.flash_attn import flash_attn_func
from attnreg.testing import Conformance
from attnreg.tools.measure import Case
from attnreg.tools.measure.reference import attend

pytestmark = pytest.mark.gpu

SHAPES = {
    "packed": {"lens_q": (113, 1, 64, 31, 203), "lens_k": (203, 65, 64, 33, 113), "varlen": True},
    "dense": {"lens_q": (113, 113), "lens_k": (203, 203)},
}


OPTIONS = {
    "softcap": {"softcap": 30.0, "magnitude": 3.0},
    "grad_lse": {"grad_lse": True},
    "both": {"softcap": 2.0, "grad_lse": True},
}


@pytest.mark.only_for("FA4")
@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (8, 2)], ids=str)
@pytest.mark.parametrize(("dim", "heads"), [(64, (4, 4)), (128, (6, 2))], ids=str)
def test_an_option_is_right_in_both_directions(named, option, lengths, window, dim, heads):
    kit = Conformance(fa4.BACKEND, "cuda")
    options = {"dims": (dim, dim), "heads": heads, "window": window, **option, **lengths}
    for dtype in ("bfloat16", "float16"):
        outcome = kit.run(Case(name=f"{options}", dtype=dtype, **options))
        assert outcome.passed, outcome
        assert outcome.errors.keys() == {"out", "lse", "dq", "dk", "dv"}, outcome.reasons


@pytest.mark.only_for("FA4")
def test_float16_gradients_with_a_softcap_are_those_of_a_gradient_scaled_by_1024(named, ran):
    query, key, value, *rest = gpu.packed((300, 65), dim=128, dtype=torch.float16)
    grad = torch.randn_like(query)

    def gradients(scale):
        out = attnreg.varlen_attn(query, key, value, *rest, is_causal=True, softcap=50.0, backend=named)
        return torch.autograd.grad(out, (query, key, value), grad * scale)

    usual, scaled = gradients(1.0), gradients(1024.0)
    assert ran() == {named: (2, 2)}
    for one, other in zip(usual, scaled, strict=True):
        torch.testing.assert_close(other.double() / 1024, one.double(), rtol=0.01, atol=0.002)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
def test_sinks_are_served_by_both_kernels_of_each_backend(named, ran, heads, dtype):
    """That of their LSE is in test_gpu_lse_columns.py."""
    query, key, value, *rest = gpu.packed((113, 1, 64, 31, 603), heads=heads, dtype=dtype, grad=False)
    sinks = torch.linspace(-1, 4, heads[0], device="cuda").to(dtype)

    def attend(query, key, value, sinks, *rest):
        options = {"is_causal": True, "enable_gqa": True, "return_aux": attnreg.AuxRequest(lse=True)}
        return attnreg.varlen_attn(query, key, value, *rest, sinks=sinks, backend=named, **options)

    for _ in range(3):  # by its plan, then by a launcher
        assert_accurate(attend, (query, key, value, sinks), *rest, causal=True)
        assert ran() == {named: (1, 1)}


@pytest.fixture
def sinks_of_package(monkeypatch):
    """Return a function that says which directions of FA4 were given sinks since, and if by arguments."""
    seen = []

    class Watched(adapter.PackageCall):
        def __call__(self):
            seen.append((self.direction, "learnable_sink" in self.tensors, False))
            return super().__call__()

    launcher = trials.Trials.launcher

    def watched(self, family, arguments):
        launch = launcher(self, family, arguments)

        def run(*given):
            results = launch(*given)
            if results is not None:
                seen.append((family.direction, family.sinks is not None, True))
            return results

        return run

    monkeypatch.setattr(adapter, "PackageCall", Watched)
    monkeypatch.setattr(trials.Trials, "launcher", watched)
    attnreg.core.registry.changed()  # launchers of tests before aren't watched

    def read():
        torch.cuda.synchronize()  # what the device has to report of offsets and trials arrives
        calls = seen.copy()
        seen.clear()
        return calls

    yield read
    attnreg.core.registry.changed()


HALF, BF16, WIDE = torch.float16, torch.bfloat16, torch.float32
# What the package has other code for: heads that share keys are packed into one tile, masks, dtypes of sinks.
# Many heads, as the gradient has a number for each: of a few the largest error may be small by chance.
# Heads, window, head dim, dtype of the query, dtype of sinks.
COUNTED = [
    ((16, 16), (-1, -1), 64, BF16, BF16),
    ((16, 16), (-1, 0), 64, BF16, WIDE),
    ((16, 16), (40, 0), 64, HALF, HALF),
    ((16, 4), (-1, -1), 64, BF16, WIDE),
    ((16, 4), (-1, 0), 64, BF16, BF16),
    ((16, 1), (40, 0), 64, BF16, HALF),
    ((18, 6), (-1, 0), 128, BF16, BF16),
    ((16, 1), (128, 0), 128, HALF, WIDE),
    ((16, 16), (-1, 0), 256, BF16, BF16),
]


@pytest.mark.only_for("FA4")
@pytest.mark.parametrize(("heads", "window", "dim", "dtype", "sinks_dtype"), COUNTED, ids=str)
def test_fa4_counts_sinks_itself_first_by_its_python_and_then_by_arguments(
    named, ran, sinks_of_package, heads, window, dim, dtype, sinks_dtype
):
    lengths = (113, 1, 64, 31, 603)
    *_, ends, _, longest, _ = gpu.packed(lengths)

    def attend(query, key, value, sinks, *offsets):
        options = {"window_size": window, "enable_gqa": True, "backend": named, "sinks": sinks}
        return attnreg.varlen_attn(query, key, value, *offsets, longest, longest, **options), None

    sinks_of_package()
    ways = []
    for seed in range(8):
        qkv = gpu.packed(lengths, heads=heads, dim=dim, dtype=dtype, grad=False, seed=seed).qkv
        # Scores of a row have a LSE of about log(longest): sinks below, about and above it.
        sinks = torch.linspace(-2, 9, heads[0], device="cuda").roll(seed).to(sinks_dtype)
        assert_accurate(attend, (*qkv, sinks), ends, ends, window=window)
        assert ran() == {named: (1, 1)}
        ways.append(sinks_of_package())
    assert {(direction, has) for direction, has, _ in ways[0]} == {("forward", False), ("backward", False)}
    assert {way for calls in ways for way in calls} >= {("forward", True, False), ("backward", True, False)}
    assert ways[-2:] == [[("forward", True, True), ("backward", True, True)]] * 2


@pytest.mark.only_for("FA4")
def test_fa4_with_a_sink_far_above_all_scores_gives_zeros_and_no_gradient(named, sinks_of_package):
    sinks = torch.tensor([200.0, 1e4, torch.inf, -torch.inf], device="cuda")
    given = gpu.packed((50, 70))
    for _ in range(3):
        out = attnreg.varlen_attn(*given, sinks=sinks, backend=named)
        plain = attnreg.varlen_attn(*given, backend=named)
        assert not out[:, :3].any()
        torch.testing.assert_close(out[:, 3], plain[:, 3])
        assert not any(x[:, :3].any() for x in torch.autograd.grad(out.sum(), given.qkv))
        finite = sinks[:2].repeat(2).requires_grad_()
        out = attnreg.varlen_attn(*given, sinks=finite, backend=named)
        assert not torch.autograd.grad(out.sum(), finite)[0].any()
        ways = sinks_of_package()
    # More where the launches were tried, too.
    assert sum(has for direction, has, _ in ways if direction == "forward") >= 2


@pytest.mark.only_for("FA4")
def test_fa4_records_graphs_of_calls_with_sinks_after_a_few_usual_ones(named, ran):
    """Nothing is known of offsets in a capture, so that results are rescaled there."""
    given, sinks = gpu.packed((50, 70)), torch.linspace(-1, 4, 4, device="cuda")

    def run():
        return attnreg.varlen_attn(*given, sinks=sinks, window_size=(30, 0), backend=named)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(4):
            run()
            torch.cuda.synchronize()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = run()
    graph.replay()
    expected = by_the_formula(*(x.detach() for x in given[:5]), sinks, window=(30, 0))[0]
    truth.assert_near(out, expected, torch.bfloat16)
    assert ran() == {named: (5, 0)}


@pytest.mark.only_for("FA2", "math")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "window"), [(64, (-1, 0)), (128, (40, 8)), (256, (-1, -1))], ids=str)
def test_the_weights_of_a_call_with_dropout_say_what_its_kernels_have_dropped(named, ran, dtype, dim, window):
    shapes = (2, 113, 6, dim), (2, 203, 2, dim), (2, 203, 2, dim)
    inputs = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    with attnreg.use_backend(named):
        out, _, weights = flash_attn_func(*inputs, 0.17, window_size=window, return_attn_probs=True)
    assert ran() == {named: (1 + -(-203 // dim), 0)}
    copies = [x.detach().double().requires_grad_() for x in inputs]
    kept = (weights >= 0).double() / 0.83
    expected = attend(*copies, dim**-0.5, window, kept=kept)[0]
    assert 0.15 < (weights < 0).sum() / (weights != 0).sum() < 0.19
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, grad)
    right = torch.autograd.grad(expected, copies, grad.double())
    for one, other in zip((out, *found), (expected, *right), strict=True):
        truth.assert_near(one, other, dtype)

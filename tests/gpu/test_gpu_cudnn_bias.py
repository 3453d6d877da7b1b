"""On a GPU: cuDNN adds a bias, and computes its gradient, as plain PyTorch does in float64."""

import pytest
import torch
import torch.nn.functional as F
from support import gpu, truth
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnreg
from attnreg.backends import cudnn
from attnreg.testing import Conformance
from attnreg.tools.measure import Case

pytestmark = [pytest.mark.gpu, pytest.mark.only_for("cuDNN")]

# Lengths of query and key. Keys of 64 modulo 128 are refused (pytorch#196678).
LENGTHS = [(300, 304), (77, 136), (1, 256), (1024, 1024)]
BOTH, FORWARD = {"cuDNN": (2, 2)}, {"cuDNN": (2, 0), "efficient": (0, 2)}


def inputs_of(len_q, len_k, dim=64):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (2, 4, len_q, dim), (2, 4, len_k, dim), (2, 4, len_k, dim)
    return [torch.randn(x, device="cuda", generator=generator).bfloat16().requires_grad_() for x in shapes]


def bias_of(*shape, hides=False):
    generator = torch.Generator("cuda").manual_seed(2)
    bias = torch.randn(shape, device="cuda", generator=generator).bfloat16()
    if hides:
        bias[torch.rand(shape, device="cuda", generator=generator) < 0.3] = -torch.inf
        bias[..., ::5, :] = -torch.inf
    return bias


def attend(inputs, leaves, bias, grad=None):
    """Return what SDPA gives by the op of the efficient kernel, and the gradients of leaves."""
    shape = (2, 4, inputs[0].shape[2], inputs[1].shape[2])
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = F.scaled_dot_product_attention(*inputs, attn_mask=bias.expand(shape))
        return out.detach(), *torch.autograd.grad(out, leaves, gpu.incoming(out) if grad is None else grad)


def assert_right(ran, inputs, bias, wants_bias=True, runs=BOTH):
    """Call SDPA twice with cuDNN registered; hold all results to float64. `runs` is what has to run."""
    leaves = [*inputs, bias.requires_grad_()] if wants_bias else inputs
    with attnreg.register_backend("cuDNN"):
        for _ in range(2):
            got = attend(inputs, leaves, bias)
    assert ran() == runs
    copies = [x.detach().cpu().double().requires_grad_() for x in (*inputs, bias)]
    expected, _ = truth.dense(*copies)
    right = torch.autograd.grad(expected, copies[: len(leaves)], gpu.incoming(got[0]).cpu().double())
    gpu.assert_near(got, (expected, *right), torch.bfloat16)


@pytest.mark.parametrize("shape", ["bhqk", "1hqk", "b1qk", "11qk", "b11k"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_it_is_right_for_every_shape_that_broadcasts(named, ran, lengths, shape):
    sizes = zip("bhqk", (2, 4, *lengths), strict=True)
    bias = bias_of(*(size if name in shape else 1 for name, size in sizes))
    # A backward with a bias that several queries share is left to torch's kernel.
    is_shared = "q" not in shape and lengths[0] > 1
    assert_right(ran, inputs_of(*lengths), bias, runs=FORWARD if is_shared else BOTH)


@pytest.mark.parametrize("wants_bias", [True, False])
@pytest.mark.parametrize("lengths", [(300, 304), (256, 256)], ids=str)
@pytest.mark.parametrize("heads", [4, 1])
def test_hidden_scores_and_rows_without_a_key_have_no_gradient(named, ran, heads, lengths, wants_bias):
    inputs, bias = inputs_of(*lengths), bias_of(2, heads, *lengths, hides=True)
    assert_right(ran, inputs, bias, wants_bias)
    with attnreg.register_backend("cuDNN"):
        out, grad_q, *_ = attend(inputs, inputs, bias)
    assert not out[:, :, ::5].any()
    assert not grad_q[:, :, ::5].any()


@pytest.mark.parametrize("wants_bias", [True, False])
@pytest.mark.parametrize("lengths", [(300, 300), (301, 203)], ids=str)
def test_a_gradient_with_other_rows_than_whole_eights_is_left_to_torchs_kernel(
    named, ran, lengths, wants_bias
):
    assert_right(
        ran, inputs_of(*lengths), bias_of(2, 4, *lengths), wants_bias, FORWARD if wants_bias else BOTH
    )


@pytest.mark.parametrize("dim", [128, 256, 40])
def test_it_is_right_for_other_head_dims(named, ran, dim):
    assert_right(ran, inputs_of(200, 336, dim), bias_of(1, 4, 200, 336))


SQUARE = {"lens_q": (304,) * 2, "lens_k": (304,) * 2}
WITH_GRADIENT = {"bias_gradient": True}
CASES = {
    "causal": SQUARE | {"window": (-1, 0)},
    "causal, with its gradient": SQUARE | WITH_GRADIENT | {"window": (-1, 0)},
    "causal, with its gradient, long": WITH_GRADIENT
    | {"lens_q": (1024,) * 2, "lens_k": (1024,) * 2, "window": (-1, 0)},
    "shared heads": {"heads": (6, 2)},
    "shared heads, with its gradient": WITH_GRADIENT | {"heads": (6, 2)},
    "float16": WITH_GRADIENT | {"dtype": "float16"},
    "two keys": {"lens_k": (2,) * 2},
    "33 keys": {"lens_k": (33,) * 2},
    "key padding": {"bias": "key padding"},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_calls_with_a_bias_are_at_most_twice_as_wrong_as_plain_pytorch(named, options):
    """The kit fills memory that is allocated with NaN, so that it finds results that aren't written."""
    shared = {"lens_q": (128,) * 2, "lens_k": (200,) * 2, "heads": (4, 4), "bias": "additive"}
    case = Case(name="bias", **{"dtype": "bfloat16", **shared, **options})
    outcome = Conformance(cudnn.BACKEND, "cuda").run(case)
    assert outcome.passed, outcome
    if case.bias == "key padding":
        assert outcome.errors.keys() == {"out", "lse"}
        assert "attn_bias must have a row for each query in a backward" in outcome.reasons[0]
    else:
        of_bias = {"dbias"} if case.bias_gradient else set()
        assert outcome.errors.keys() == {"out", "lse", "dq", "dk", "dv"} | of_bias, outcome.reasons


def test_its_kernels_are_cudnns_and_nothing_waits_for_the_device(named):
    inputs, bias = inputs_of(256, 256), bias_of(1, 4, 256, 256).requires_grad_()
    with attnreg.register_backend("cuDNN"):
        assert gpu.owners(gpu.kernels_of(lambda: attend(inputs, [*inputs, bias], bias))) == {"cuDNN"}
        with gpu.no_waiting():
            attend(inputs, [*inputs, bias], bias)


def test_a_cuda_graph_replays_it_with_new_values(named):
    inputs, bias = inputs_of(256, 256), bias_of(1, 4, 256, 256).requires_grad_()
    grad = gpu.incoming(inputs[0])  # a capture draws no numbers
    with attnreg.register_backend("cuDNN"):
        graph, results = gpu.capture(lambda: attend(inputs, [*inputs, bias], bias, grad))
        with torch.no_grad():
            bias.copy_(bias_of(1, 4, 256, 256, hides=True))
        got = gpu.replay(graph, results)
        expected = attend(inputs, [*inputs, bias], bias, grad)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_where_nothing_asks_for_cudnn_torchs_kernel_runs(named, ran, routers):
    inputs, bias = inputs_of(256, 256), bias_of(1, 4, 256, 256).requires_grad_()
    with attnreg.register_backend("FA2"):
        attend(inputs, [*inputs, bias], bias)
    assert ran() == {"efficient": (1, 1)}

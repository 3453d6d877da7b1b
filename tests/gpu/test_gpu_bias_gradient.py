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
LENGTHS = [(300, 304), (77, 136), (301, 200), (1, 256), (1024, 1024)]
HIDING = [(300, 304), (77, 136), (256, 256)]


def inputs_of(len_q, len_k, dim=64, heads_k=4):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (2, 4, len_q, dim), (2, heads_k, len_k, dim), (2, heads_k, len_k, dim)
    return [torch.randn(x, device="cuda", generator=generator).bfloat16().requires_grad_() for x in shapes]


def bias_of(*shape, hides=False):
    generator = torch.Generator("cuda").manual_seed(2)
    bias = torch.randn(shape, device="cuda", generator=generator).bfloat16()
    if hides:
        bias[torch.rand(shape, device="cuda", generator=generator) < 0.3] = -torch.inf
        bias[..., ::5, :] = -torch.inf
    return bias


def assert_right(ran, inputs, bias, wants_bias=True, runs=None):
    """Call SDPA twice on cuDNN; hold output and gradients to float64. `runs` is what has to run."""
    leaves = [*inputs, bias.requires_grad_()] if wants_bias else inputs
    shape = (2, 4, inputs[0].shape[2], inputs[1].shape[2])
    with attnreg.register_backend("cuDNN"), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        for _ in range(2):
            out = F.scaled_dot_product_attention(*inputs, attn_mask=bias.expand(shape))
            got = out, *torch.autograd.grad(out, leaves, gpu.incoming(out))
    assert ran() == (runs or {"cuDNN": (2, 2)})
    copies = [x.detach().cpu().double().requires_grad_() for x in (*inputs, bias)]
    expected, _ = truth.dense(*copies)
    right = torch.autograd.grad(expected, copies[: len(leaves)], gpu.incoming(out).cpu().double())
    gpu.assert_near(got, (expected, *right), torch.bfloat16)


@pytest.mark.parametrize("shape", ["bhqk", "1hqk", "b1qk", "11qk", "b11k"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_it_is_right_for_every_shape_that_broadcasts(named, ran, lengths, shape):
    sizes = zip("bhqk", (2, 4, *lengths), strict=True)
    assert_right(ran, inputs_of(*lengths), bias_of(*(size if name in shape else 1 for name, size in sizes)))


@pytest.mark.parametrize("wants_bias", [True, False])
@pytest.mark.parametrize("lengths", HIDING, ids=str)
@pytest.mark.parametrize("heads", [4, 1])
def test_hidden_scores_and_rows_without_a_key_have_no_gradient(named, ran, heads, lengths, wants_bias):
    assert_right(ran, inputs_of(*lengths), bias_of(2, heads, *lengths, hides=True), wants_bias)


@pytest.mark.parametrize("wants_bias", [True, False])
@pytest.mark.parametrize("lengths", [(300, 300), (77, 130), (301, 203)], ids=str)
def test_a_gradient_with_other_rows_than_whole_eights_is_left_to_torchs_kernel(
    named, ran, lengths, wants_bias
):
    runs = {"cuDNN": (2, 0), "efficient": (0, 2)} if wants_bias else {"cuDNN": (2, 2)}
    assert_right(ran, inputs_of(*lengths), bias_of(2, 4, *lengths), wants_bias, runs)


@pytest.mark.parametrize("dim", [128, 256, 40])
def test_it_is_right_for_other_head_dims(named, ran, dim):
    assert_right(ran, inputs_of(200, 336, dim), bias_of(1, 4, 200, 336))


CASES = {
    "causal": {"lens_q": (300,) * 2, "lens_k": (300,) * 2, "window": (-1, 0)},
    "shared heads": {"heads": (6, 2)},
    "key padding": {"bias": "key padding"},
    "key padding, causal": {
        "bias": "key padding",
        "lens_q": (300,) * 2,
        "lens_k": (300,) * 2,
        "window": (-1, 0),
    },
    "float16": {"dtype": "float16"},
    "two keys": {"lens_k": (2,) * 2},
    "33 keys": {"lens_k": (33,) * 2},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_other_calls_with_a_bias_are_at_most_twice_as_wrong_as_plain_pytorch(named, options):
    shared = {"lens_q": (128,) * 2, "lens_k": (200,) * 2, "heads": (4, 4), "bias": "additive"}
    case = Case(name="bias", **{"dtype": "bfloat16", **shared, **options})
    outcome = Conformance(cudnn.BACKEND, "cuda").run(case)
    assert outcome.passed, outcome
    assert outcome.errors.keys() == {"out", "lse", "dq", "dk", "dv"}, outcome.reasons

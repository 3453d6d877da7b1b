"""On a GPU: cuDNN drops the same weights in both directions, in dense calls of any lengths."""

import functools

import pytest
import torch
import torch.nn.functional as F
from support import gpu
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnreg
from attnreg.backends import cudnn
from attnreg.testing import Conformance
from attnreg.tools.measure import Case

pytestmark = [pytest.mark.gpu, pytest.mark.only_for("cuDNN")]

P, B = 0.3, 2
FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION

# Lengths of query and key. Torch's own selector refuses its cuDNN op for a single query.
LENGTHS = [(300, 300), (77, 1000), (2, 256), (1024, 1024), (129, 33)]

SQUARE = {"lens_q": (56,) * 2, "lens_k": (56,) * 2}
CASES = {
    "square": SQUARE,
    "causal": SQUARE | {"window": (-1, 0)},
    "window": SQUARE | {"window": (8, 0)},
    "window with both bounds": SQUARE | {"window": (8, 2)},
    "shared heads": {"heads": (6, 2)},
    "shared heads, a single one": SQUARE | {"heads": (4, 1), "window": (-1, 0)},
    "float16": {"dtype": "float16"},
    "another value's head dim": {"dims": (64, 96)},
    "head dim 128": {"dims": (128, 128)},
    "head dim 256": {"dims": (256, 256), "lens_k": (200,) * 2},
    "head dim 40, padded 60": {"dims": (60, 60)},
    "most are dropped": {"dropout": 0.9},
    "gradient of the LSE": {"grad_lse": True},
    "gradient of the LSE, causal, head dim 120": SQUARE
    | {"grad_lse": True, "dims": (120, 120), "window": (-1, 0)},
    "sinks": {"sinks": True},
    "deterministic": {"deterministic": True},
    "deterministic, causal": SQUARE | {"deterministic": True, "window": (-1, 0)},
    "two keys": {"lens_k": (2,) * 2},
    "one query": {"lens_q": (1,) * 2},
    "head dims 192 and 128": {"dims": (192, 128)},
    "a batch of 9": {"lens_q": (33,) * 9, "lens_k": (50,) * 9},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_calls_with_dropout_are_at_most_twice_as_wrong_as_plain_pytorch(named, options):
    shared = {"lens_q": (48,) * 2, "lens_k": (56,) * 2, "heads": (4, 4), "dropout": P}
    case = Case(name="dropout", **{"dtype": "bfloat16", **shared, **options})
    outcome = Conformance(cudnn.BACKEND, "cuda").run(case)
    assert outcome.passed, outcome
    assert outcome.errors.keys() == {"out", "lse", "dq", "dk", "dv"}, outcome.reasons


def inputs_of(len_q, len_k, dim=64):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (B, 4, len_q, dim), (B, 2, len_k, dim), (B, 2, len_k, dim)
    return [torch.randn(x, device="cuda", generator=generator).bfloat16().requires_grad_() for x in shapes]


def attend(query, key, value, window=(-1, -1)):
    """Return the output of a call of torch's op that draws the same dropout each time."""
    torch.manual_seed(3)
    options = {"dropout_p": P, "is_causal": window == (-1, 0), "enable_gqa": True}
    return F.scaled_dot_product_attention(query, key, value, **options)


def factors_of(query, key, value, window):
    """Return the factors of dropout (B, H, S_q, S_k): the output shows weights where the value is a unit."""
    length, dim = value.shape[2:]
    shown = []
    with torch.no_grad():
        for start in range(0, length, dim):
            unit = torch.zeros_like(value)
            places = torch.arange(start, min(start + dim, length), device="cuda")
            unit[:, :, places, places - start] = 1.0
            shown.append(attend(query, key, unit, window)[..., : len(places)] != 0.0)
    return torch.cat(shown, -1).double() / (1.0 - P)


def right_results(query, key, value, factors, window):
    """Return output and gradients in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (query, key, value)]
    keys, values = (x.repeat_interleave(2, 1) for x in leaves[1:])
    scores = leaves[0] @ keys.mT * leaves[0].shape[-1] ** -0.5
    if window == (-1, 0):
        scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), -torch.inf)
    out = scores.softmax(-1) * factors @ values
    return out, *torch.autograd.grad(out, leaves, gpu.incoming(query).double())


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)], ids=["all", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("op", [FLASH, CUDNN], ids=["flash", "cudnn"])
def test_both_directions_drop_the_same_weights_at_every_length(named, ran, op, lengths, window):
    if window == (-1, 0):
        lengths = (lengths[0],) * 2
    given = inputs_of(*lengths)
    with attnreg.use_backend("cuDNN"), sdpa_kernel(op):
        out = attend(*given, window)
        grads = torch.autograd.grad(out, given, gpu.incoming(out))
        assert ran() == {"cuDNN": (1, 1)}
        factors = factors_of(*given, window)
    visible = factors.count_nonzero() if window == (-1, -1) else factors.tril().count_nonzero()
    count = B * 4 * (lengths[0] * lengths[1] if window == (-1, -1) else lengths[0] * (lengths[0] + 1) // 2)
    assert abs(visible.item() / count - (1.0 - P)) < 6.0 * (P * (1.0 - P) / count) ** 0.5 + 1e-3
    # Of the whole tensors: with few keys the gradient of a query is a small difference of larger numbers.
    for got, right in zip((out, *grads), right_results(*given, factors, window), strict=True):
        assert gpu.relative_error(got, right) < 2e-2


def test_each_call_drops_others_and_a_seed_repeats_them(named, ran):
    given = inputs_of(128, 256)
    with attnreg.use_backend("cuDNN"), sdpa_kernel(FLASH):
        call = functools.partial(F.scaled_dot_product_attention, *given, dropout_p=P, enable_gqa=True)
        torch.manual_seed(3)
        first, second = call(), call()
        torch.manual_seed(3)
        again = call()
    assert ran() == {"cuDNN": (3, 0)}
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_its_kernels_are_cudnns_and_nothing_waits_for_the_device(named):
    given = inputs_of(256, 256)

    def step():
        out = attend(*given)
        return out, *torch.autograd.grad(out, given, torch.ones_like(out))

    with attnreg.use_backend("cuDNN"), sdpa_kernel(FLASH):
        assert gpu.owners(gpu.kernels_of(step)) == {"cuDNN"}
        with gpu.no_waiting():
            F.scaled_dot_product_attention(*given, dropout_p=P, enable_gqa=True)


def test_each_replay_of_a_cuda_graph_drops_others_in_both_directions(named):
    given = inputs_of(256, 256)
    grad = gpu.incoming(given[0])

    def step():
        out = F.scaled_dot_product_attention(*given, dropout_p=P, enable_gqa=True)
        return out.detach(), *torch.autograd.grad(out, given, grad)

    with attnreg.use_backend("cuDNN"), sdpa_kernel(FLASH):
        graph, results = gpu.capture(step)
        first, second = gpu.replay(graph, results), gpu.replay(graph, results)
    assert not torch.equal(first[0], second[0])
    for replayed in (first, second):
        # The output is linear in the value: its product with the gradient is the same from either side.
        of_out = (replayed[0].double() * grad.double()).sum()
        of_value = (replayed[3].double() * given[2].double()).sum()
        assert abs(of_out - of_value) < 1e-2 * replayed[0].double().norm() * grad.double().norm()


@pytest.mark.parametrize("lens", [(5, 300, 42), (128, 128)], ids=str)
def test_packed_calls_run_on_another_backend(named, ran, lens):
    given = gpu.packed(lens)
    with attnreg.register_backend("cuDNN"):
        out = attnreg.varlen_attn(*given, dropout_p=P)
        torch.autograd.grad(out, given.qkv, gpu.incoming(out))
    reasons = {row.reason for row in attnreg.stats().fallbacks if row.backend == "cuDNN"}
    assert "dropout_p must be 0 with packed tensors, got 0.3" in reasons
    assert ran() == {"FA2": (1, 1)}

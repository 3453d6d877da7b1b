"""On a GPU: flex, compiled by Inductor, is right, and new lengths compile nothing.

`--backends=flex` names it. It compiles a kernel for each kind of call, which takes seconds.
"""

import functools
import threading

import pytest
import torch
from support import gpu

import attnreg
from attnreg.backends.flex import adapter, programs
from attnreg.testing import Conformance
from attnreg.tools.measure import Case, inputs

pytestmark = [
    pytest.mark.gpu,
    # Inductor's own, about settings of the program.
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def flex_is_named(request):
    if "flex" not in request.config.getoption("--backends").split(","):
        pytest.skip("about flex, which this run doesn't name: --backends=flex")


RAGGED = (130, 7, 300, 64)
BOTH = {"out", "lse", "dq", "dk", "dv"}


def case(**options):
    given = {"lens_q": RAGGED, "lens_k": RAGGED, "varlen": True, "heads": (4, 2), "window": (-1, 0)}
    return Case(**{"name": "packed", "dtype": "bfloat16", **given, **options})


def dense(**options):
    return case(**{"varlen": False, "lens_q": (113,) * 3, "lens_k": (203,) * 3, **options})


CASES = {
    "packed": case(),
    "packed, float16": case(dtype="float16"),
    "packed, float32": case(dtype="float32"),
    "packed, float32, head dim 128": case(dtype="float32", dims=(128, 128)),
    "head dim 256": case(dims=(256, 256)),
    "head dim 264": case(dims=(264, 264)),
    "head dim 512": case(dims=(512, 512)),
    "head dim 512, one key head": case(dims=(512, 512), heads=(8, 1)),
    "head dim 512, float32": case(dims=(512, 512), dtype="float32"),
    "head dims 192 and 128": case(dims=(192, 128)),
    "head dim 16": case(dims=(16, 16)),
    "a window": case(window=(30, 5)),
    "no mask": case(window=(-1, -1)),
    "other lengths of keys, rows without a key": case(lens_k=(150, 7, 100, 0), tail=17, poison=True),
    "seqused_k": case(seqused_k=(100, 7, 0, 64), poison=True),
    "softcap": case(softcap=5.0),
    "alibi": case(alibi=True),
    "a gradient of the LSE": case(grad_lse=True),
    "a negative scale": case(scale=-0.1),
    "a function of scores": case(score_mod=True, tail=17, poison=True),
    "functions of scores and of the mask": case(score_mod=True, mask_mod=True, dims=(128, 128), alibi=True),
    "ranges, float32": case(key_ranges=2, dtype="float32", lens_k=(150, 7, 100, 0), tail=17, poison=True),
    "short": case(lens_q=(5, 1, 9), lens_k=(5, 1, 9)),
    "a length of 1": case(lens_q=(1,), lens_k=(70,)),
    # Whose gradients of query and key are 0.
    "a single key": case(lens_q=(64, 30), lens_k=(1, 1), window=(-1, -1)),
    "a single key, a gradient of the LSE": dense(lens_q=(64,), lens_k=(1,), window=(-1, -1), grad_lse=True),
    "dense": dense(),
    "dense, additive bias": dense(bias="additive", window=(-1, -1)),
    "dense, key padding": dense(bias="key padding", window=(-1, -1)),
    "dense, alibi": dense(alibi=True),
    "dense, more queries": dense(lens_q=(203,) * 3, lens_k=(113,) * 3),
    "dense, one sequence": dense(lens_q=(300,), lens_k=(300,), dtype="float32"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_right_in_both_directions(name):
    outcome = Conformance("flex", "cuda").run(CASES[name])
    assert outcome.passed, outcome
    assert outcome.errors.keys() == BOTH, outcome.reasons


def test_a_packed_call_with_a_head_dim_of_512_runs_on_it_where_it_is_registered(routers, ran):
    given = gpu.packed(RAGGED, heads=(4, 2), dim=512)
    with attnreg.register_backend("flex"):
        got = gpu.run(attnreg.varlen_attn, given, is_causal=True, enable_gqa=True)
    assert ran() == {"flex": (1, 1)}
    wanted, _ = gpu.expected(given, window=(-1, 0))
    gpu.assert_near(got, wanted, given.query.dtype)


def test_new_lengths_compile_nothing(monkeypatch):
    monkeypatch.setattr(programs, "_programs", {})
    for number in range(4):
        lengths = (130 + 100 * number, 7 + number, 300)
        q, k, v, grad, call = inputs(case(lens_q=lengths, lens_k=lengths), "cuda")
        out, lse = adapter.forward(q, k, v, call)
        adapter.backward(grad, q, k, v, out, lse, call)
    assert [len(compiled) for compiled in programs._programs.values()] == [1, 1]


def test_a_backward_is_repeatable_to_the_bit():
    q, k, v, grad, call = inputs(case(dims=(512, 512)), "cuda")
    out, lse = adapter.forward(q, k, v, call)
    first, *others = (adapter.backward(grad, q, k, v, out, lse, call) for _ in range(4))
    assert all(map(torch.equal, first * len(others), [x for grads in others for x in grads]))


def test_a_backward_that_autograd_calls_may_be_the_first_to_compile():
    """Tracing computes a gradient, while autograd's thread of the device waits for the trace."""
    dim = 40  # a kind that no other test compiles
    offsets = torch.tensor([0, *RAGGED], device="cuda").cumsum(0, dtype=torch.int32)
    tensors = torch.randn(4, sum(RAGGED), 2, dim, dtype=torch.bfloat16, device="cuda").unbind()

    def gradients(backend):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
        longest = max(RAGGED)
        attend = functools.partial(attnreg.varlen_attn, is_causal=True, backend=backend)
        return torch.autograd.grad(
            attend(*leaves, offsets, offsets, longest, longest), leaves, grad_outputs=tensors[3]
        )

    computed = []
    thread = threading.Thread(target=lambda: computed.extend(gradients("flex")), daemon=True)
    thread.start()
    thread.join(timeout=240)  # a run with the fault ends
    assert not thread.is_alive()
    for ours, exact in zip(computed, gradients("math"), strict=True):
        torch.testing.assert_close(ours, exact, atol=2e-2, rtol=2e-2)

"""On a GPU: calls with `key_ranges` are right on each backend whose kernels skip blocks by them.

Both compile a kernel for each kind of call, which takes half a minute. So most tests share a few kinds.
"""

import pytest
import torch
from support import gpu

import attnreg
from attnreg import Call
from attnreg.backends.fa4 import compiled_kinds
from attnreg.core import registry
from attnreg.errors import UnsupportedInputError
from attnreg.testing import Conformance
from attnreg.tools.measure import Case

pytestmark = [
    pytest.mark.gpu,
    # Inductor's own, about settings of the program.
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

ON_BOTH = pytest.mark.only_for("FA4", "flex")
RAGGED = (130, 7, 300, 64)
BOTH = {"out", "lse", "dq", "dk", "dv"}


def case(**options):
    given = {"lens_q": RAGGED, "lens_k": RAGGED, "varlen": True, "heads": (4, 2), "key_ranges": 1}
    return Case(**{"name": "packed", "dtype": "bfloat16", **given, **options})


CASES = {
    "eight ranges": case(key_ranges=8),
    "three ranges in a window, head dim 128": case(key_ranges=3, window=(90, 0), dims=(128, 128)),
    "two ranges, float16, a head for each": case(key_ranges=2, dtype="float16", heads=(3, 3)),
    "a gradient of the LSE, head dim 128": case(grad_lse=True, dims=(128, 128)),
    "causal, other lengths of keys, NaN in a tail": case(
        window=(-1, 0), lens_k=(150, 7, 100, 0), tail=17, poison=True
    ),
    "one head": case(heads=(1, 1)),
    "head dim 32": case(dims=(32, 32)),
    "head dim 96": case(dims=(96, 96)),
    "head dim 120": case(dims=(120, 120), heads=(2, 2)),
}


@ON_BOTH
@pytest.mark.parametrize("name", CASES)
def test_a_case_is_right_in_both_directions(named, name):
    outcome = Conformance(named, "cuda").run(CASES[name])
    assert outcome.passed, outcome
    assert outcome.errors.keys() == BOTH, outcome.reasons


@pytest.mark.only_for("FA4")
@pytest.mark.parametrize("dim", [16, 72, 104])
def test_a_forward_is_right_with_a_head_dim_whose_gradients_are_refused(named, dim):
    outcome = Conformance(named, "cuda").run(case(dims=(dim, dim)))
    assert outcome.passed, outcome
    assert outcome.errors.keys() == {"out", "lse"}, outcome.reasons


@ON_BOTH
def test_branches_with_a_shared_prefix_run_on_it_and_are_as_their_paths(named, routers, ran):
    lengths = [200, 70, 130]
    given = gpu.packed((400,), heads=(4, 2), dim=128, grad=False)
    ranges = attnreg.tree_ranges([-1, 0, 0], lengths, device="cuda")
    whole = attnreg.varlen_attn(*given, enable_gqa=True, key_ranges=ranges, backend=named)
    assert ran() == {named: (1, 0)}
    for begin, end in ((200, 270), (270, 400)):
        path = [torch.cat((x[:200], x[begin:end])) for x in given.qkv]
        offsets, length = gpu.offsets_of([len(path[0])]), len(path[0])
        alone = attnreg.varlen_attn(
            *path, offsets, offsets, length, length, is_causal=True, enable_gqa=True, backend="math"
        )
        gpu.assert_near((whole[begin:end],), (alone[200:].cpu().double(),), given.query.dtype)


def drawn(lengths, seed=0):
    """Return packed inputs, and a range of keys for each query.

    A long run of queries has no key, so that blocks of queries have no key, and blocks of keys no query.
    """
    given = gpu.packed(lengths, heads=(4, 2), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    ranges = torch.randint(0, 200, (sum(lengths), 1, 2), generator=generator, dtype=torch.int32)
    ranges = ranges.sort(-1).values
    ranges[130:520] = 0
    return given, ranges.cuda()


def wanted(given, ranges):
    """Return what `gpu.run` should have, by `math` in float64."""
    math, (*_, cu_q, cu_k, max_q, max_k) = registry.find("math").kernels(), given
    call = Call(given.query.shape[-1] ** -0.5, max_q, max_k, (-1, -1), cu_q, cu_k, key_ranges=ranges)
    doubles = [x.detach().double() for x in given.qkv]
    out, lse = math.forward(*doubles, call)
    grads = math.backward(gpu.incoming(given.query).double(), *doubles, out, lse, call)
    return [x.cpu() for x in (out, *grads)]


def assert_right(named, given, ranges):
    got = gpu.run(gpu.on(named, enable_gqa=True, key_ranges=ranges), given)
    gpu.assert_near(got, wanted(given, ranges))


@pytest.mark.only_for("FA4")
def test_batches_of_other_lengths_are_right_and_compile_nothing_new(named, routers, ran):
    """The shortest fit into one block: their backward is a kind of its own."""
    assert_right(named, *drawn((60,)))
    assert_right(named, *drawn((900, 3, 40)))
    kinds = set(compiled_kinds.have_run)
    for seed, lengths in enumerate(((1000,), (100, 0, 31), (7, 64), (1,), (550, 300, 2)), 1):
        assert_right(named, *drawn(lengths, seed))
    assert compiled_kinds.have_run == kinds
    assert ran() == {named: (7, 7)}


@pytest.mark.only_for("FA4")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_captured_step_follows_ranges_that_are_refilled_once_its_kind_has_run(named):
    given, ranges = drawn((300, 200, 50))
    have_run = set(compiled_kinds.have_run)
    compiled_kinds.have_run.clear()
    try:
        with (
            torch.cuda.graph(torch.cuda.CUDAGraph()),
            pytest.raises(UnsupportedInputError, match="once before"),
        ):
            gpu.on(named, enable_gqa=True, key_ranges=ranges)(*given.detached())
    finally:
        compiled_kinds.have_run.update(have_run)
    grad = gpu.incoming(given.query.detach())

    def step():
        out = attnreg.varlen_attn(*given, enable_gqa=True, key_ranges=ranges, backend=named)
        return [out.detach(), *torch.autograd.grad(out, given.qkv, grad)]

    graph, results = gpu.capture(step)
    for seed in (1, 2):
        ranges.copy_(drawn((300, 200, 50), seed)[1])
        gpu.assert_near(gpu.replay(graph, results), wanted(given, ranges))

"""On a GPU with the package flash-attn: what FA2 runs on it, where torch's own kernels can't.

`--backends=FA2,flash-attn` names the package; one that is missing then fails.
"""

import re

import pytest
import torch
from support import gpu

import attnreg
from attnreg.backends.fa2 import flash_attn_package as fa2_package
from attnreg.backends.fa2.native import PAGES
from attnreg.core import registry
from attnreg.testing import Conformance
from attnreg.tools.measure import QUICK, Case, inputs

pytestmark = pytest.mark.gpu

CAUSAL = (-1, 0)
RAGGED = {"lens_q": (113, 1, 64, 0, 31, 203), "lens_k": (203, 65, 64, 9, 33, 113), "varlen": True}
DENSE = {"lens_q": (113, 113), "lens_k": (203, 203)}
SHAPES = pytest.mark.parametrize("lengths", [RAGGED, DENSE], ids=["packed", "dense"])
OURS = re.compile(r"(?<!pytorch_)flash::flash_(fwd|bwd)")  # torch's kernels lie in a namespace of their own


@pytest.fixture(autouse=True)
def package(flash_attn):
    """Ask for the package, and for that it loads."""
    assert fa2_package.installed() is not None, "the package flash-attn was named, and isn't installed"
    return fa2_package.package()


@pytest.fixture
def fa2():
    return registry.find("FA2")


def with_alibi(**options):
    return Case(name=f"alibi {options}", alibi=True, **options)


def hold(entry, cases, *, backward=True):
    """Run cases by the rule; none may be refused."""
    outcomes = list(map(Conformance(entry.backend, "cuda").run, cases))
    results = {"out", "lse", "dq", "dk", "dv"} if backward else {"out", "lse"}
    assert cases
    assert [str(outcome) for outcome in outcomes if not outcome.passed] == []
    assert not backward or [outcome.reasons for outcome in outcomes if outcome.reasons] == []
    assert [outcome.errors.keys() for outcome in outcomes] == [results] * len(cases)


@SHAPES
@pytest.mark.parametrize("option", [{"alibi": True}, {"softcap": 2.0}], ids=str)
def test_a_gradient_of_the_lse_is_right_with_either_option(fa2, lengths, option):
    options = {"heads": (4, 2), "window": CAUSAL, "grad_lse": True, **option, **lengths}
    hold(fa2, [Case(name=f"{options}", dtype=dtype, **options) for dtype in ("bfloat16", "float16")])


@SHAPES
@pytest.mark.parametrize("window", [(-1, -1), CAUSAL, (8, 2)], ids=str)
@pytest.mark.parametrize(("dim", "heads"), [(64, (4, 4)), (128, (6, 2)), (40, (8, 1))], ids=str)
def test_alibi_is_right_in_both_directions(fa2, lengths, window, dim, heads):
    cases = [
        with_alibi(dims=(dim, dim), heads=heads, window=window, dtype=dtype, **lengths)
        for dtype in ("bfloat16", "float16")
    ]
    hold(fa2, cases)


def test_every_case_of_the_matrix_is_right_with_alibi(fa2):
    hold(fa2, [case for case in QUICK if case.alibi and case.dtype in ("bfloat16", "float16")])


@SHAPES
@pytest.mark.parametrize("window", [(-1, -1), CAUSAL, (8, 2)], ids=str)
@pytest.mark.parametrize("softcap", [1.0, 30.0])
@pytest.mark.parametrize(("dim", "heads"), [(64, (4, 4)), (128, (6, 2)), (256, (8, 1))], ids=str)
def test_a_softcap_is_right_in_both_directions(fa2, lengths, window, softcap, dim, heads):
    options = {"dims": (dim, dim), "heads": heads, "window": window, "softcap": softcap, **lengths}
    cases = [
        Case(name=f"softcap {options}", dtype=dtype, magnitude=magnitude, **options)
        for dtype in ("bfloat16", "float16")
        for magnitude in (1.0, 3.0)
    ]
    hold(fa2, cases)


@pytest.mark.skipif(PAGES, reason="torch's own kernels read pages here")
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
def test_pages_are_read(fa2, heads):
    matrix = [case for case in QUICK if case.page_size == 256 and case.dtype == "bfloat16"]
    assert matrix
    lengths = {"lens_q": (1, 0, 1), "lens_k": (5, 3, 600), "seqused_k": (4, 0, 513)}
    decode = Case(name="decode", varlen=True, heads=heads, page_size=256, poison=True, **lengths)
    hold(fa2, [*matrix, decode], backward=False)


@SHAPES
def test_its_kernels_run_and_not_those_of_torch(fa2, lengths):
    q, k, v, grad, call = inputs(with_alibi(**lengths), "cuda")
    kernels = fa2.kernels()

    def step():
        out, lse = kernels.forward(q, k, v, call)
        kernels.backward(grad, q, k, v, out, lse, call)

    flash = [name for name in gpu.kernels_of(step) if "flash" in name]
    assert len(flash) >= 2
    assert [name for name in flash if not OURS.search(name)] == []


@SHAPES
def test_deterministic_alibi_gradients_repeat_bit_for_bit(fa2, lengths):
    q, k, v, grad, call = inputs(with_alibi(heads=(8, 2), **lengths), "cuda")
    call = call._replace(deterministic=True)
    kernels = fa2.kernels()
    out, lse = kernels.forward(q, k, v, call)
    first, *others = (kernels.backward(grad, q, k, v, out, lse, call) for _ in range(5))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("alibi", [False, True])
def test_dropout_drops_the_same_in_both_directions(fa2, alibi):
    case = Case(name="dropout", lens_q=(64, 64), lens_k=(64, 64), heads=(4, 4), alibi=alibi, dtype="float16")
    q, k, v, grad, call = inputs(case, "cuda")
    v = torch.eye(64, device="cuda", dtype=v.dtype).expand(2, 4, 64, 64).transpose(1, 2).contiguous()
    state = torch.zeros(2, dtype=torch.uint64, device="cuda")
    call = call._replace(dropout=0.4, rng_state=state)
    kernels = fa2.kernels()
    # With values of a unit matrix the output is what was kept of the probabilities: dv says the same.
    out, lse = kernels.forward(q, k, v, call)
    chance = out.transpose(1, 2).double()
    share = (chance == 0).double().mean().item()
    assert 0.35 < share < 0.45
    _, _, grad_v = kernels.backward(grad, q, k, v, out, lse, call)
    wanted = chance.transpose(-1, -2) @ grad.transpose(1, 2).double()
    torch.testing.assert_close(grad_v.transpose(1, 2).double(), wanted, rtol=4e-3, atol=4e-3)


def test_a_captured_call_replays(fa2):
    q, k, v, grad, call = inputs(with_alibi(**RAGGED), "cuda")
    kernels = fa2.kernels()

    def step():
        out, lse = kernels.forward(q, k, v, call)
        return (out, *kernels.backward(grad, q, k, v, out, lse, call))

    wanted = [x.clone() for x in step()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    results = gpu.replay(graph, results)
    assert torch.equal(results[0], wanted[0])
    torch.testing.assert_close(results, wanted, rtol=2e-2, atol=2e-2)  # its sums take no fixed order


def test_through_the_aten_op_alibi_goes_to_it_with_a_count(ran):
    given = gpu.packed((113, 64, 7), (203, 64, 31), heads=(8, 2), grad=False)
    slopes = torch.tensor([2.0**-n for n in range(1, 9)], device="cuda")
    op = torch.ops.aten._flash_attention_forward
    with attnreg.register_backend("FA2"):
        names = gpu.kernels_of(lambda: op(*given, 0.0, False, False, alibi_slopes=slopes))
        out = op(*given, 0.0, False, False, alibi_slopes=slopes)[0]
    assert ran() == {"FA2": (3, 0)}
    assert any(map(OURS.search, names))
    *_, call = inputs(
        with_alibi(heads=(8, 2), lens_q=(113, 64, 7), lens_k=(203, 64, 31), varlen=True), "cuda"
    )
    call = call._replace(
        cu_seqlens_q=given.cu_seqlens_q, cu_seqlens_k=given.cu_seqlens_k, alibi_slopes=slopes
    )
    reference = registry.find("math").kernels()
    wanted, _ = reference.forward(*(x.float() for x in given.qkv), call)
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(PAGES, reason="torch's own kernels read pages here")
def test_varlen_attn_with_a_block_table_runs_on_it(ran):
    lengths, pages = (513, 99), 4
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(2, 8, 64, device="cuda", generator=generator).to(gpu.BF16)
    k, v = (torch.randn(pages, 256, 2, 64, device="cuda", generator=generator).to(gpu.BF16) for _ in "kv")
    table = torch.tensor([[2, 0, 3], [1, 0, 0]], dtype=torch.int32, device="cuda")
    used = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    options = {"seqused_k": used, "block_table": table, "enable_gqa": True}
    out = attnreg.varlen_attn(
        q, k, v, gpu.offsets_of((1, 1)), gpu.offsets_of((768, 768)), 1, 768, backend="FA2", **options
    )
    assert ran() == {"FA2": (1, 0)}
    for row, length in enumerate(lengths):
        keys, values = (x[table[row].long()].flatten(0, 1)[:length].double() for x in (k, v))
        keys, values = (x.repeat_interleave(4, 1) for x in (keys, values))
        scores = torch.einsum("hd,khd->hk", q[row].double(), keys) / 8
        wanted = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
        torch.testing.assert_close(out[row].double(), wanted, rtol=1e-2, atol=1e-2)

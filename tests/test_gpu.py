"""On a CUDA GPU: every backend that was named, and torch's own entry points through the routers.

Run as `pytest -m gpu --backends=FA2,math`; a backend that is named and doesn't load fails.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn as torch_varlen_attn

import attnreg
from attnreg import _registry
from attnreg.verification import QUICK, verify

pytestmark = pytest.mark.gpu


def pytest_generate_tests(metafunc):
    if "named" in metafunc.fixturenames:
        names = [name for name in metafunc.config.getoption("--backends").split(",") if name]
        metafunc.parametrize("named", names or ["no backend was named: pass --backends="])


def relative_error(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def heads_first(batch=2, heads=8, length=300, dim=64, dtype=torch.bfloat16, grad=True):
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, heads, length, dim)
    return [
        torch.randn(shape, device="cuda", generator=generator).to(dtype).requires_grad_(grad) for _ in "qkv"
    ]


def ragged(lengths=(5, 300, 0, 42), heads=8, dim=64, dtype=torch.bfloat16, tail=0):
    tokens = sum(lengths) + tail
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = [
        torch.randn(tokens, heads, dim, device="cuda", generator=generator).to(dtype).requires_grad_()
        for _ in "qkv"
    ]
    offsets = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    return (*qkv, offsets, offsets, max(lengths), max(lengths))


def expected_ragged(query, key, value, offsets, causal):
    """Return output and gradients of a float64 loop over the sequences, for a gradient of ones."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    pieces = []
    for start, end in zip(offsets.tolist(), offsets.tolist()[1:], strict=False):
        q, k, v = (leaf[start:end].transpose(0, 1) for leaf in leaves)
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal)
        pieces.append(out[0].transpose(0, 1))
    out = torch.cat(pieces)
    out.sum().backward()
    return (out, *(leaf.grad for leaf in leaves))


def test_every_case_of_the_matrix_is_right(named):
    entry = _registry.find(named)
    entry.kernels()
    wrong = [str(outcome) for outcome in verify(entry.backend, "cuda", QUICK) if not outcome.passed]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("torch_runs", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_runs_the_registered_backend_forward_and_backward(named, torch_runs, causal, ran):
    query, key, value = heads_first()
    with sdpa_kernel(SDPBackend.MATH):
        doubles = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
        expected = F.scaled_dot_product_attention(*doubles, is_causal=causal)
        expected.sum().backward()
    with attnreg.register_backend(named), sdpa_kernel(torch_runs):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        out.sum().backward()
    assert ran() == {_registry.find(named).name: (1, 1)}
    assert relative_error(out, expected) < 1e-2
    for got, want in zip((query, key, value), doubles, strict=True):
        # dq and dk cancel for a gradient of ones without a mask: only their size can be compared.
        assert (got.grad.double() - want.grad).abs().max() < 2e-2 * max(1.0, want.grad.abs().max().item())


@pytest.mark.parametrize("front", [torch_varlen_attn, attnreg.varlen_attn])
def test_both_varlen_fronts_run_the_registered_backend(named, front, ran):
    inputs = ragged()
    window = {"window_size": (-1, 0)}
    with attnreg.register_backend(named):
        out = front(*inputs, **window)
        out.sum().backward()
    assert ran() == {_registry.find(named).name: (1, 1)}
    expected = expected_ragged(*inputs[:4], causal=True)
    assert relative_error(out, expected[0]) < 1e-2
    for got, want in zip(inputs[:3], expected[1:], strict=True):
        assert relative_error(got.grad, want) < 2e-2


def test_rows_past_the_last_offset_are_zero_and_take_no_gradient(named):
    query, key, value, *rest = ragged(tail=7)
    with torch.no_grad():
        for tensor in (query, key, value):
            tensor[-7:] = float("nan")
    out = attnreg.varlen_attn(query, key, value, *rest, backend=named)
    out.nansum().backward()
    assert (out[-7:] == 0).all()
    for tensor in (query, key, value):
        assert (tensor.grad[-7:] == 0).all()
        assert tensor.grad.isfinite().all()


def test_a_scope_holds_for_the_backward_that_runs_outside_it(ran):
    inputs = ragged()
    with attnreg.use_backend("math"):
        out = attnreg.varlen_attn(*inputs)
    out.sum().backward()
    assert ran() == {"math": (1, 1)}


def test_what_a_backend_cant_run_goes_on_with_the_reason_on_record(ran):
    inputs = ragged(dtype=torch.float32)
    with attnreg.register_backend("FA2"):
        attnreg.varlen_attn(*inputs).sum().backward()
    rows = attnreg.stats().fallbacks
    assert ran() == {"math": (1, 1)}
    assert {(row.backend, row.reason) for row in rows} >= {
        ("FA2", "dtype must be float16 or bfloat16, got float32")
    }


def test_with_nothing_registered_torch_runs_bit_for_bit(routers):
    query, key, value = heads_first(grad=False)
    through = F.scaled_dot_product_attention(query, key, value)
    attnreg.uninstall()
    assert torch.equal(through, F.scaled_dot_product_attention(query, key, value))
    assert attnreg.stats().calls == {}


def test_compiled_calls_choose_when_they_run(named, ran):
    def step(query, key, value):
        return F.scaled_dot_product_attention(query * 1, key, value).sum()

    query, key, value = heads_first()
    attnreg.install()
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    compiled(query, key, value).backward()
    ran()
    with attnreg.register_backend(named):
        compiled(query, key, value).backward()
    assert ran() == {_registry.find(named).name: (1, 1)}


def test_varlen_attn_compiles_whole(named, ran):
    inputs = ragged()
    torch._dynamo.reset()
    eager = attnreg.varlen_attn(*inputs, backend=named)
    compiled = torch.compile(lambda *args: attnreg.varlen_attn(*args, backend=named), fullgraph=True)
    ran()
    out = compiled(*inputs)
    out.sum().backward()
    assert ran() == {_registry.find(named).name: (1, 1)}
    torch.testing.assert_close(out, eager)


def test_a_captured_graph_replays_bit_for_bit(named):
    inputs = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in ragged())
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            eager = attnreg.varlen_attn(*inputs, backend=named)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attnreg.varlen_attn(*inputs, backend=named)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert torch.equal(first, out)
    torch.testing.assert_close(out, eager)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_no_host_sync_in_forward_or_backward(named):
    inputs = ragged()
    attnreg.varlen_attn(*inputs, backend=named).sum().backward()
    try:
        torch.cuda.set_sync_debug_mode("error")
        attnreg.varlen_attn(*inputs, backend=named).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_autocast_reaches_varlen_attn(ran):
    inputs = ragged(dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16), attnreg.register_backend("FA2"):
        out = attnreg.varlen_attn(*inputs)
    assert out.dtype == torch.bfloat16
    assert ran() == {"FA2": (1, 0)}


@pytest.mark.parametrize("backend", ["math", "FA2"])
def test_dropout_repeats_its_mask_in_the_backward(backend, ran):
    query, key, value = heads_first(length=64)
    with attnreg.use_backend(backend), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.manual_seed(3)
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
        out.sum().backward()
        # grad_v of a sum is what each key's weights add up to: it has the forward's mask in it.
        torch.manual_seed(3)
        ones = F.scaled_dot_product_attention(query, key, torch.ones_like(value), dropout_p=0.5)
    assert ran() == {backend: (2, 1)}
    assert relative_error(value.grad[..., 0].sum(-1), ones[..., 0].sum(-1)) < 1e-2

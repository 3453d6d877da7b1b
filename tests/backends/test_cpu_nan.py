"""NaN, infinities and zeros without memory on a CPU: no kernel hides what a query sees."""

import functools

import pytest
import torch
import torch.nn.functional as F

import attnreg
from attnreg.backends import math
from attnreg.backends.cpu import torch_path
from attnreg.backends.cpu.flash import Flash
from attnreg.core import aten
from attnreg.core.contract.backend import Call, Kernels

HALVES = torch.bfloat16, torch.float16


@pytest.fixture
def kernels(request, cpu_kernel):
    """Return the functions of one kernel, torch's or the compiled one."""
    if request.param == "compiled":
        return cpu_kernel
    directions = torch_path.forward, torch_path.backward
    return Kernels(*(functools.partial(direction, Flash.captured()) for direction in directions))


@pytest.fixture(params=["compiled", "python"])
def installed(request):
    """Install the routers, with and without the call cache."""
    request.getfixturevalue(f"{request.param}_routers")
    aten.restore()
    aten.ensure()
    yield
    aten.restore()


ON_EACH_KERNEL = pytest.mark.parametrize("kernels", ["torch", "compiled"], indirect=True)


def with_score(what, dtype, rows=6, keys=40):
    """Return query, key, value and gradient, (1, S, H, D), and which rows (H, S) see such a score."""
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, 4), (keys, 2), (keys, 2), (rows, 4)
    q, k, v, grad = (torch.randn(1, s, h, 16, generator=generator) for s, h in shapes)
    seen = torch.ones(4, rows, dtype=torch.bool)
    if what == "key of inf":
        k[:, 1, :, 0] = torch.inf
        seen = (q[0, :, :, 0] > 0).T
    elif what == "query of inf":
        q[:, 2, :, 0] = torch.inf
        seen = torch.zeros_like(seen)
        seen[:, 2] = True
    elif what == "query of NaN":
        q[:, 2, :, 3] = torch.nan
        seen = torch.zeros_like(seen)
        seen[:, 2] = True
    else:
        k[..., 3] = torch.nan
    return *(x.to(dtype) for x in (q, k, v, grad)), seen


SCORES = "key of inf", "query of inf", "query of NaN", "keys of NaN"


@pytest.mark.pairwise("what", "keys", "dtype", "kernels")
@ON_EACH_KERNEL
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("keys", [3, 40, 600])
@pytest.mark.parametrize("what", SCORES)
def test_a_score_that_is_no_number_is_in_output_lse_and_gradients(kernels, what, keys, dtype):
    q, k, v, grad, seen = with_score(what, dtype, keys=keys)
    call = Call(0.25, q.shape[1], keys)
    out, lse = kernels.forward(q, k, v, call)
    assert torch.equal(lse[0].isnan(), seen)
    assert torch.equal(out[0].isnan(), seen.T[..., None].expand(out.shape[1:]))
    right = math.forward(q, k, v, call)
    expected = math.backward(grad, q, k, v, *right, call)
    for results in (out, lse), right:
        for got, one in zip(kernels.backward(grad, q, k, v, *results, call), expected, strict=True):
            assert torch.equal(got.isfinite(), one.isfinite())


@pytest.mark.pairwise("installed", "what", "mask", "dtype")
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "added"])
@pytest.mark.parametrize("what", SCORES)
def test_sdpa_shows_it_in_every_repeated_call(installed, what, mask, dtype):
    q, k, v, grad, seen = with_score(what, dtype, rows=5, keys=5)
    visible = torch.ones(5, 5, dtype=torch.bool)
    if mask == "causal":
        visible = visible.tril()
    elif mask != "none":
        visible = torch.rand(5, 5, generator=torch.Generator().manual_seed(1)) < 0.6
        visible[:, 1] = True
        visible |= torch.eye(5, dtype=torch.bool)
    options = {"attn_mask": visible} if mask in ("boolean", "added") else {}
    if mask == "added":
        options["attn_mask"] = torch.zeros(5, 5, dtype=dtype).masked_fill(~visible, -torch.inf)
    if what == "key of inf":
        seen = seen & visible[:, 1]
    tensors = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    with attnreg.register_backend("cpu"):
        for _ in range(3):
            out = F.scaled_dot_product_attention(
                *tensors, **options, is_causal=mask == "causal", enable_gqa=True
            )
            assert torch.equal(out[0].isnan(), seen[..., None].expand(out.shape[1:]))
            grads = torch.autograd.grad(out, tensors, grad.transpose(1, 2))
            assert all(x[:, :, :2].isnan().any() for x in grads[1:])


@ON_EACH_KERNEL
def test_a_score_of_minus_infinity_is_a_weight_of_0(kernels):
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v, *_ = with_score("", dtype)
        q, k = q.abs(), torch.randn(k.shape).to(dtype)
        k[:, 1, :, 0] = -torch.inf
        call = Call(0.25, 6, 40)
        out, lse = kernels.forward(q, k, v, call)
        others = torch.arange(40) != 1
        right = math.forward(q, k[:, others], v[:, others], call._replace(max_k=39))
        torch.testing.assert_close((out, lse), right, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_without_memory_are_zeros_in_sdpa(installed, place, dtype):
    shape = 1, 2, 64, 16
    tensors = [x.to(dtype) for x in torch.randn(3, *shape).unbind()]
    tensors[place] = torch.zeros(shape, dtype=dtype)
    lazy = list(tensors)
    lazy[place] = torch._efficientzerotensor(shape, dtype=dtype)
    with attnreg.register_backend("cpu"):
        for _ in range(3):
            expected = F.scaled_dot_product_attention(*tensors)
            got = F.scaled_dot_product_attention(*lazy)
            torch.testing.assert_close(got, expected)


@ON_EACH_KERNEL
def test_zeros_without_memory_are_zeros_to_the_kernels(kernels):
    q, k, v, grad, out = torch.randn(5, 1, 20, 2, 16).unbind()
    lse, call = torch.randn(1, 2, 20), Call(0.25, 20, 20)
    for name in ("q", "k", "v"):
        given = {"q": q, "k": k, "v": v} | {name: torch.zeros_like(q)}
        expected = kernels.forward(*given.values(), call)
        got = kernels.forward(*(given | {name: torch._efficientzerotensor(q.shape)}).values(), call)
        torch.testing.assert_close(got, expected)
    given = {"grad": grad, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    for name, x in given.items():
        expected = kernels.backward(*(given | {name: torch.zeros_like(x)}).values(), call)
        got = kernels.backward(*(given | {name: torch._efficientzerotensor(x.shape)}).values(), call)
        torch.testing.assert_close(got, expected)


def test_options_without_memory_are_zeros_to_the_kernels(cpu_kernel):
    q, k, v, grad = torch.randn(4, 1, 20, 2, 16).unbind()
    zeros = {"alibi_slopes": (2,), "grad_lse": (1, 2, 20)}
    lazy = {name: torch._efficientzerotensor(shape) for name, shape in zeros.items()}
    call = Call(0.25, 20, 20)
    without, with_zeros = call, call._replace(**lazy)
    results = cpu_kernel.forward(q, k, v, without)
    torch.testing.assert_close(cpu_kernel.forward(q, k, v, with_zeros), results)
    grads = (cpu_kernel.backward(grad, q, k, v, *results, each) for each in (without, with_zeros))
    torch.testing.assert_close(*grads)
    used = torch._efficientzerotensor((1,), dtype=torch.int32)
    assert not cpu_kernel.forward(q, k, v, call._replace(seqused_k=used))[0].any()
    bias = torch._efficientzerotensor((1, 1, 20, 20))
    torch_kernel = functools.partial(torch_path.forward, Flash.captured())
    torch.testing.assert_close(
        torch_kernel(q, k, v, call._replace(attn_bias=bias)), torch_kernel(q, k, v, call)
    )

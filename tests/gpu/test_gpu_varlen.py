"""On a GPU: `varlen_attn` of torch and of attnreg, on what callers do with it.

The first part has the ideas of torch's own test of `varlen_attn`, written anew; the second the rows
and offsets that kernels have been wrong on.
"""

import copy
import functools
import inspect

import pytest
import torch
import torch.nn.functional as F
from support import gpu, truth
from torch.library import opcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import AuxRequest
from torch.nn.attention.varlen import varlen_attn as torch_varlen_attn

import attnreg

pytestmark = pytest.mark.gpu

CAUSAL = (-1, 0)


def allowing_fewer_key_heads(front):
    """Return the option that allows it; torch 2.11 has none and does."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(front).parameters else {}


class Attention(torch.nn.Module):
    """Projections around attention, which is handed over."""

    def __init__(self, width=256, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False, device="cuda", dtype=gpu.BF16)
        self.out = torch.nn.Linear(width, width, bias=False, device="cuda", dtype=gpu.BF16)

    def forward(self, x, attend):
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return self.out(attend(query, key, value).flatten(-2))


def one_by_one(lengths, causal):
    """Return attention that runs each sequence as a batch of one."""

    def attend(*qkv):
        parts = []
        for sequence in zip(*(x.split(list(lengths)) for x in qkv), strict=True):
            with sdpa_kernel(SDPBackend.MATH):
                batch = (x.transpose(0, 1)[None] for x in sequence)
                parts.append(F.scaled_dot_product_attention(*batch, is_causal=causal)[0].transpose(0, 1))
        return torch.cat(parts)

    return attend


def results(module, x, attend):
    """Return the output, and the gradients of input and weights."""
    x = x.detach().to(module.out.weight.dtype).requires_grad_()
    out = module(x, attend)
    grad = gpu.incoming(x.to(gpu.BF16)).to(out.dtype)
    return out, *torch.autograd.grad(out, (x, *module.parameters()), grad)


def assert_at_most_twice_as_wrong(got, plain, exact):
    for one, other, right in zip(got, plain, exact, strict=True):
        rounded = right.to(one.dtype)
        rounding = 2 * (rounded + 0.3 - 0.3 - rounded).abs().max().item()
        error, allowed = ((x.double() - right).abs().max().item() for x in (one, other))
        assert error <= 2 * allowed + rounding


@gpu.FRONTS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(128, 256, 64), (5, 300, 1, 42)], ids=["even", "mixed"])
def test_packed_sequences_are_as_right_as_a_loop_over_them(named, front, causal, lengths, ran):
    torch.manual_seed(0)
    module = Attention()
    x = torch.randn(sum(lengths), 256, device="cuda").to(gpu.BF16)
    offsets = gpu.offsets_of(lengths)
    options = {"window_size": CAUSAL} if causal else {}

    def packed(query, key, value):
        return front(query, key, value, offsets, offsets, max(lengths), max(lengths), **options)

    with attnreg.register_backend(named):
        got = results(module, x, packed)
    assert ran() == {named: (1, 1)}
    loop = one_by_one(lengths, causal)
    exact = results(copy.deepcopy(module).double(), x, loop)
    assert_at_most_twice_as_wrong(got, results(module, x, loop), exact)


@gpu.FRONTS
@pytest.mark.parametrize("window", [(-1, -1), CAUSAL, (8, 2), (4, 0)], ids=str)
def test_windows_and_the_lse_follow_the_definition(named, front, window, ran):
    given = gpu.packed((113, 64, 7), (203, 64, 31))
    auxiliary = AuxRequest if front is torch_varlen_attn else attnreg.AuxRequest
    options = {"window_size": window, "return_aux": auxiliary(lse=True)}
    with attnreg.register_backend(named):
        out, lse = front(*given, **options)
        grads = torch.autograd.grad(out, given.qkv, gpu.incoming(out))
    assert ran() == {named: (1, 1)}
    wanted, wanted_lse = gpu.expected(given, window=window)
    gpu.assert_near((out, *grads), wanted)
    assert (lse.shape, lse.dtype) == ((4, 184), torch.float32)
    truth.assert_near(lse.cpu(), wanted_lse, torch.float16)


@gpu.FRONTS
def test_four_query_heads_share_a_key_head(named, front, ran):
    given = gpu.packed(heads=(8, 2))
    options = {"window_size": CAUSAL} | allowing_fewer_key_heads(front)
    with attnreg.register_backend(named):
        got = gpu.run(front, given, **options)
    assert ran() == {named: (1, 1)}
    gpu.assert_near(got, gpu.expected(given, window=CAUSAL)[0])


def test_the_op_passes_every_check_of_torch(named, ran):
    # opcheck asks for the gradient of every output, the LSE's included.
    given = gpu.packed((5, 64, 42))
    lengths, window = (*given[3:], False), [-1, -1]
    arguments = (*given[:3], *lengths, None, window, False, None, None, None, named)
    checked = opcheck(torch.ops.attnreg._varlen_attn, arguments, atol=2e-2, rtol=2e-2)
    assert set(checked.values()) == {"SUCCESS"}
    assert len(checked) == 4
    assert set(ran()) == {named}


def test_the_ops_backward_passes_the_checks_of_torch_for_ops_without_a_gradient(named, ran):
    given, window = gpu.packed((5, 64, 42), grad=False), [-1, -1]
    forward = torch.ops.attnreg._varlen_attn
    out, lse, rng = forward(*given, False, None, window, False, None, None, None, named, needs_backward=True)
    options = None, window, None, None, named
    arguments = (gpu.incoming(out), *given[:3], out, lse, *given[3:], False, rng, *options)
    checks = ("test_schema", "test_faketensor")
    backward = torch.ops.attnreg._varlen_attn_backward
    assert opcheck(backward, arguments, test_utils=checks) == dict.fromkeys(checks, "SUCCESS")
    assert ran()[named][1] > 0


# ---- rows of no sequence, sequences without keys or queries


def test_rows_past_the_last_offset_are_zero_and_take_no_gradient(named):
    given = gpu.packed(tail=7)
    with torch.no_grad():
        for tensor in given.qkv:
            tensor[-7:] = torch.nan
    out, lse = attnreg.varlen_attn(*given, backend=named, return_aux=attnreg.AuxRequest(lse=True))
    grad = gpu.incoming(out)
    grad[-7:] = torch.nan
    grads = torch.autograd.grad(out, given.qkv, grad)
    for tensor in (out, *grads):
        assert (tensor[-7:] == 0).all()
    assert (lse[:, -7:] == -torch.inf).all()
    gpu.assert_near((out, *grads), gpu.expected(given)[0])


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [((5, 7, 3), (9, 0, 4)), ((7, 5), (0, 9)), ((5, 0, 3), (9, 7, 4)), ((0, 5), (8, 9))],
    ids=["no keys between", "no keys first", "no queries between", "no queries first"],
)
def test_a_sequence_without_keys_gives_zero_and_one_without_queries_nothing(named, lengths_q, lengths_k):
    given = gpu.packed(lengths_q, lengths_k)
    out, lse = attnreg.varlen_attn(*given, backend=named, return_aux=attnreg.AuxRequest(lse=True))
    grads = torch.autograd.grad(out, given.qkv, gpu.incoming(out))
    wanted, wanted_lse = gpu.expected(given)
    gpu.assert_near((out, *grads), wanted)
    blind = wanted_lse == -torch.inf
    assert torch.equal(lse.cpu() == -torch.inf, blind)
    truth.assert_near(lse.cpu(), wanted_lse, torch.float16)
    assert (out[blind[0].cuda()] == 0).all()
    assert (grads[0][blind[0].cuda()] == 0).all()


@pytest.mark.parametrize("lengths_k", [(5, 0, 7), (5, 3, 7)], ids=["without keys", "with keys"])
def test_single_queries_that_share_key_heads_are_right_next_to_an_empty_sequence(named, lengths_k):
    given = gpu.packed((1, 0, 1), lengths_k, heads=(8, 2))
    got = gpu.run(gpu.on(named, enable_gqa=True), given)
    gpu.assert_near(got, gpu.expected(given)[0])


# ---- repeated calls


@pytest.mark.parametrize("causal", [False, True])
def test_a_repeated_call_gives_what_the_first_gave(named, causal, ran):
    given = gpu.packed()
    call = functools.partial(attnreg.varlen_attn, is_causal=causal, return_aux=attnreg.AuxRequest(lse=True))
    with attnreg.register_backend(named):
        first = gpu.run(lambda *args: call(*args)[0], given)
        lse = call(*given)[1]
        for _ in range(3):  # by the last of them the device has reported on the offsets
            torch.cuda.synchronize()
            repeated = gpu.run(lambda *args: call(*args)[0], given)
        assert torch.equal(call(*given)[1], lse)
        with pytest.raises(attnreg.InvalidInputError, match=r"torch\.int32"):
            call(*given[:3], given[3].long(), given[4].long(), *given[5:])
    assert ran()[named][1] == 4
    assert torch.equal(repeated[0], first[0])
    gpu.assert_near(repeated, gpu.expected(given, **({"window": CAUSAL} if causal else {}))[0])


def test_a_call_in_inference_mode_leaves_the_next_one_trainable(named):
    given = gpu.packed()
    with attnreg.register_backend(named):
        for _ in range(3):
            with torch.inference_mode():
                attnreg.varlen_attn(*given)
            torch.cuda.synchronize()
        gpu.assert_near(gpu.run(attnreg.varlen_attn, given), gpu.expected(given)[0])

"""On a GPU: `register_backend` changes what torch's own entry points and attnreg's run, in both directions.

Run as `pytest -m "gpu and not slow" --backends=FA2,FA4,cuDNN,math`; one that is missing fails.
"""

import contextlib
import functools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from support import gpu
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn as torch_varlen_attn

import attnreg

pytestmark = pytest.mark.gpu

FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION


# ---- entry points: the tensors that get gradients, and a function that returns the output


def of_sdpa():
    inputs = gpu.bhsd()
    return inputs, functools.partial(F.scaled_dot_product_attention, *inputs)


def of_multihead_attention():
    module = torch.nn.MultiheadAttention(256, 4, batch_first=True, device="cuda", dtype=gpu.BF16)
    x = torch.randn(2, 300, 256, device="cuda", dtype=gpu.BF16, requires_grad=True)
    return [x], lambda: module(x, x, x, need_weights=False)[0]


def of_an_encoder_layer():
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True, device="cuda", dtype=gpu.BF16)
    x = torch.randn(2, 300, 256, device="cuda", dtype=gpu.BF16)
    return [], torch.no_grad()(functools.partial(layer.eval(), x))


def of_jagged_tensors():
    given = gpu.packed((5, 300, 1, 42))
    nested = [
        torch.nested.nested_tensor_from_jagged(x, given.cu_seqlens_q.long()).transpose(1, 2)
        for x in given.qkv
    ]
    return given.qkv, lambda: F.scaled_dot_product_attention(*nested).transpose(1, 2).values()


def of_torchs_varlen_attn():
    given = gpu.packed()
    return given.qkv, functools.partial(torch_varlen_attn, *given)


def of_varlen_attn():
    given = gpu.packed()
    return given.qkv, functools.partial(attnreg.varlen_attn, *given)


# ---- what runs


def torch_chooses(backend):
    return contextlib.nullcontext() if backend is None else sdpa_kernel(backend)


@pytest.mark.parametrize("chosen", [None, FLASH, CUDNN], ids=["plain", "flash", "cudnn"])
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_runs_the_registered_backend_forward_and_backward(named, chosen, causal, ran):
    inputs = gpu.bhsd()
    with attnreg.register_backend(named), torch_chooses(chosen):
        got = gpu.sdpa_and_back(inputs, is_causal=causal)
    assert ran() == {named: (1, 1)}
    gpu.assert_near(got, gpu.expected_of_sdpa(inputs, window=(-1, 0) if causal else (-1, -1)))


PROGRAM = """
import sys, torch, attnreg
attnreg.register_backend(sys.argv[1])
q = torch.randn(2, 8, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
packed = torch.randn(256, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
offsets = torch.tensor([0, 128, 256], device="cuda", dtype=torch.int32)
attnreg.varlen_attn(packed, packed, packed, offsets, offsets, 128, 128).sum().backward()
print(attnreg.stats().calls[sys.argv[1]])
"""


def test_a_program_ends_in_silence(named):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, named], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "{'forward': 2, 'backward': 2}\n"


FORKING = """
import os, sys, torch, attnreg
attnreg.install()
assert sys.argv[1] in attnreg.list_backends()
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
packed = torch.randn(7, 4, 64, device="cuda", dtype=torch.bfloat16)
offsets = torch.tensor([0, 3, 7], device="cuda", dtype=torch.int32)
attnreg.varlen_attn(packed, packed, packed, offsets, offsets, 4, 4, backend=sys.argv[1])
torch.cuda.synchronize()
print(attnreg.stats().calls)
"""


def test_a_child_forked_after_attnreg_was_installed_can_use_the_gpu(named):
    result = subprocess.run(
        [sys.executable, "-c", FORKING, named], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{{'{named}': {{'forward': 1, 'backward': 0}}}}\n"


def test_multihead_attention_runs_it_forward_and_backward(named, ran):
    torch.manual_seed(0)
    inputs, forward = of_multihead_attention()

    def results():
        out = forward()
        return out, *torch.autograd.grad(out, inputs, gpu.incoming(out))

    with attnreg.register_backend(named):
        got = results()
    assert ran() == {named: (1, 1)}
    with sdpa_kernel(SDPBackend.MATH):
        plain = results()
    assert max(map(gpu.relative_error, got, plain)) < 3e-2


@pytest.mark.parametrize("chosen", [None, FLASH], ids=["plain", "flash"])
def test_the_fast_path_of_an_encoder_layer_runs_it(named, chosen, ran, monkeypatch):
    torch.manual_seed(0)
    _, forward = of_an_encoder_layer()
    fast, native = [], torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *given: fast.append(given) or native(*given)
    )
    with attnreg.register_backend(named), torch_chooses(chosen):
        got = forward()
    assert len(fast) == 1, "the layer didn't take its fast path"
    assert ran() == {named: (1, 0)}
    with sdpa_kernel(SDPBackend.MATH):
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            plain = forward()
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert gpu.relative_error(got, plain) < 2e-2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("causal", [False, True])
def test_jagged_nested_tensors_run_it_forward_and_backward(named, causal, ran):
    given = gpu.packed((5, 300, 1, 42))
    offsets = given.cu_seqlens_q.long()
    nested = [torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in given.qkv]
    with attnreg.register_backend(named):
        out = F.scaled_dot_product_attention(*nested, is_causal=causal).transpose(1, 2).values()
        grads = torch.autograd.grad(out, given.qkv, gpu.incoming(out))
    assert ran() == {named: (1, 1)}
    gpu.assert_near((out, *grads), gpu.expected(given, window=(-1, 0) if causal else (-1, -1))[0])


@gpu.FRONTS
def test_both_varlen_fronts_run_it_forward_and_backward(named, front, ran):
    given = gpu.packed()
    with attnreg.register_backend(named):
        got = gpu.run(front, given, window_size=(-1, 0))
    assert ran() == {named: (1, 1)}
    gpu.assert_near(got, gpu.expected(given, window=(-1, 0))[0])


def test_a_name_on_the_call_runs_it_without_any_registration(named, ran):
    given = gpu.packed()
    got = gpu.run(attnreg.varlen_attn, given, backend=named)
    assert ran() == {named: (1, 1)}
    gpu.assert_near(got, gpu.expected(given)[0])


@pytest.mark.filterwarnings("ignore:.*[Pp]rofiler")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(
    "entry_point",
    [
        of_sdpa,
        of_multihead_attention,
        of_an_encoder_layer,
        of_jagged_tensors,
        of_torchs_varlen_attn,
        of_varlen_attn,
    ],
)
def test_a_trace_shows_its_kernels_and_no_other_backends(named, entry_point):
    inputs, forward = entry_point()
    own = {named}.intersection(gpu.KERNELS)
    with attnreg.register_backend(named):
        names = gpu.kernels_of(forward)
        assert gpu.owners(names) == own, names
        if not inputs:
            return
        out = forward()
        grad = gpu.incoming(out)
        names = gpu.kernels_of(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True))
        assert gpu.owners(names) == own, names


REFUSED = {
    "float32": ({"dtype": torch.float32}, "dtype must be float16 or bfloat16, got float32"),
    "head_dim 264": ({"dim": 264}, "head_dim must be 8 to 256 in steps of 8, got 264"),
}


def passed_over(reason):
    return {row.backend for row in attnreg.stats().fallbacks if row.count and reason in row.reason}


@gpu.FRONTS
@pytest.mark.parametrize(("options", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_no_kernel_takes_runs_on_math_with_the_reason_on_record(named, front, options, reason, ran):
    given = gpu.packed(**options)
    with attnreg.register_backend(named):
        got = gpu.run(front, given)
    refusing = passed_over(reason)
    assert ran() == {"math": (1, 1)}
    assert (named in refusing) == (named != "math")
    gpu.assert_near(got, gpu.expected(given)[0])


def test_dropout_runs_on_one_that_has_it_with_the_reason_on_record(named, ran):
    inputs = gpu.bhsd()
    with attnreg.register_backend(named), sdpa_kernel(FLASH):
        results = gpu.sdpa_and_back(inputs, dropout_p=0.25)
    refusing = passed_over("dropout_p must be 0, got 0.25")
    assert ran() == {"FA2" if named == "FA4" else named: (1, 1)}
    assert refusing == {named}.intersection({"FA4"})
    assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize("chosen", [FLASH, CUDNN], ids=["flash", "cudnn"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_step_after_step_runs_the_same_backend(routers, chosen, dropout, ran):
    attnreg.core.policy.current.activate(True)  # torch's own kernels, through the routers
    inputs = gpu.bhsd(length=256)
    with torch_chooses(chosen):
        for _ in range(4):
            assert all(x.isfinite().all() for x in gpu.sdpa_and_back(inputs, dropout_p=dropout))
    assert ran() == {"FA2" if chosen is FLASH else "cuDNN": (4, 4)}


def test_a_mask_runs_on_one_that_takes_it_with_the_reason_on_record(named, ran):
    inputs = gpu.bhsd(length=256)
    mask = torch.randn(2, 4, 256, 256, device="cuda").to(gpu.BF16)
    with attnreg.register_backend(named), sdpa_kernel(CUDNN):
        got = gpu.sdpa_and_back(inputs, attn_mask=mask)
    refusing = passed_over("attn_bias must be None, got a tensor")
    assert ran() == {"math" if named == "math" else "cuDNN": (1, 1)}
    assert (named in refusing) == (named in ("FA2", "FA4"))
    gpu.assert_near(got, gpu.expected_of_sdpa(inputs, bias=mask.cpu().double()))


def test_a_scope_holds_for_the_backward_that_runs_outside_it(named, ran):
    given = gpu.packed()
    with attnreg.use_backend(named):
        out = attnreg.varlen_attn(*given)
    torch.autograd.grad(out, given.qkv, gpu.incoming(out))
    assert ran() == {named: (1, 1)}


def test_with_nothing_registered_torch_runs_bit_for_bit(routers):
    inputs = gpu.bhsd(grad=False)
    through = F.scaled_dot_product_attention(*inputs)
    attnreg.uninstall()
    assert torch.equal(through, F.scaled_dot_product_attention(*inputs))
    assert attnreg.stats().calls == {}


@pytest.mark.only_for("math", "FA2", "cuDNN")
def test_dropout_repeats_its_mask_in_the_backward(named, ran):
    query, key, value = gpu.bhsd(length=64)
    with attnreg.use_backend(named), sdpa_kernel(FLASH):
        torch.manual_seed(3)
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
        out.sum().backward()
        # grad_v of a sum is what each key's weights add up to: it has the forward's mask in it.
        torch.manual_seed(3)
        ones = F.scaled_dot_product_attention(query, key, torch.ones_like(value), dropout_p=0.5)
    assert ran() == {named: (2, 1)}
    assert gpu.relative_error(value.grad[..., 0].sum(-1), ones[..., 0].sum(-1)) < 1e-2

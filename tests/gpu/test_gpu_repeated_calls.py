"""On a GPU: repeated calls give what the first gave, and soon take no plan in Python."""

import functools
import sys

import pytest
import torch
import torch.nn.functional as F
from support import gpu, truth
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnreg
from attnreg.backends.fa4.compiled_kinds import MANY
from attnreg.core import registry
from attnreg.core.contract.backend import Call
from attnreg.errors import UnsupportedInputError

pytestmark = pytest.mark.gpu

TIMES = 8
CAUSAL = (-1, 0)
# The order in memory of the dimensions of (B, H, S, D).
BHSD, BSHD = (0, 1, 2, 3), (0, 2, 1, 3)


def drawn(shape, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(gpu.BF16)


def laid_out(x, order):
    """Return a leaf of the same values whose dimensions lie in an order that is its own inverse."""
    return x.permute(order).contiguous().permute(order).requires_grad_()


@pytest.mark.parametrize("chosen", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
@pytest.mark.parametrize(("scale", "order"), [(None, BHSD), (0.2, BSHD)])
@pytest.mark.parametrize("heads_k", [4, 2])
def test_sdpa_is_right_each_time_and_soon_kept_in_both_directions(
    named, chosen, scale, order, heads_k, ran, is_kept
):
    step = functools.partial(gpu.sdpa_and_back, is_causal=True, scale=scale, enable_gqa=heads_k < 4)
    with attnreg.register_backend(named), sdpa_kernel(chosen):
        for seed in range(TIMES):
            shapes = (2, 4, 200, 64), (2, heads_k, 200, 64), (2, heads_k, 200, 64)
            inputs = [laid_out(drawn(shape, seed + 50 * i), order) for i, shape in enumerate(shapes)]
            gpu.assert_near(step(inputs), gpu.expected_of_sdpa(inputs, window=CAUSAL, scale=scale))
            assert ran() == {named: (1, 1)}, seed
        if named == "cuDNN" and chosen == SDPBackend.CUDNN_ATTENTION and order != BHSD:
            return  # the incoming gradient isn't laid out as the output: it is copied for torch's kernel
        assert is_kept(lambda: step(inputs))
        assert ran() == {named: (3, 3)}


def python_of(package, run, *given):
    """Return the results, and the functions of a package that Python entered from outside meanwhile."""
    entered = []

    def is_inside(frame):
        return frame is not None and package in frame.f_code.co_filename

    def profile(frame, event, _):
        if event == "call" and is_inside(frame) and not is_inside(frame.f_back):
            entered.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        return run(*given), entered
    finally:
        sys.setprofile(None)


@pytest.mark.only_for("FA2")
@pytest.mark.parametrize("order", [BHSD, BSHD], ids=str)
def test_repeated_calls_of_torchs_kernel_below_cudnns_op_enter_no_python(named, compiled_cache, order, ran):
    inputs = [laid_out(drawn((2, 4, 200, 64), seed), order) for seed in (1, 2, 3)]
    attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    with attnreg.register_backend(named), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for _ in range(TIMES):
            out, entered = python_of("attnreg", attend, *inputs)
            grads = torch.autograd.grad(out, inputs, gpu.incoming(out))
        gpu.assert_near((out, *grads), gpu.expected_of_sdpa(inputs, window=CAUSAL))
        assert entered == []
    assert ran() == {named: (TIMES, TIMES)}


@pytest.mark.parametrize("options", [{}, {"window_size": CAUSAL}, {"is_causal": True, "scale": 0.2}])
def test_varlen_attn_is_right_each_time_and_soon_kept(named, options, is_kept, ran):
    truly = {"window": CAUSAL if options else (-1, -1), "scale": options.get("scale")}
    attend = functools.partial(attnreg.varlen_attn, enable_gqa=True, **options)
    with attnreg.register_backend(named):
        for seed in range(3):
            given = gpu.packed((40, 300, 7), heads=(4, 2), seed=seed)
            right, right_lse = gpu.expected(given, **truly)
            for _ in range(TIMES):
                got = gpu.run(attend, given)
                torch.cuda.synchronize()  # so that the device has reported on the offsets
                gpu.assert_near(got, right)
                assert ran() == {named: (1, 1)}, seed
            assert is_kept(functools.partial(gpu.run, attend, given))
            assert ran() == {named: (3, 3)}
            _, lse = attend(*given, return_aux=attnreg.AuxRequest(lse=True))
            truth.assert_near(lse.cpu(), right_lse.detach(), torch.float32)
            assert ran() == {named: (1, 0)}


@pytest.mark.only_for("cuDNN")
def test_exact_and_shared_plans_are_both_right_each_time(named, plans_of_either_kind, is_kept, ran):
    test_varlen_attn_is_right_each_time_and_soon_kept(named, {"window_size": CAUSAL}, is_kept, ran)


def test_a_kept_call_follows_each_change_of_the_chosen_backend(is_kept, ran):
    given = gpu.packed((40, 300, 7))
    right = gpu.expected(given)[0]

    def step(expected, **options):
        gpu.assert_near(gpu.run(attnreg.varlen_attn, given, **options), right)
        assert ran() == {expected: (1, 1)}

    with attnreg.register_backend("math"):
        for _ in range(4):
            step("math")
            torch.cuda.synchronize()
        assert is_kept(lambda: step("math"))
        for _ in range(4):
            step("FA2", backend="FA2")
            with attnreg.use_backend("FA2"):
                step("FA2")
        with attnreg.register_backend("FA2"):
            step("FA2")
        step("math")
        with torch.autocast("cuda", torch.float16):
            half = attnreg.varlen_attn(*given)
        assert half.dtype == torch.float16
        ran()
        other = gpu.packed((40, 300, 7), dtype=torch.float16)
        gpu.assert_near(gpu.run(attnreg.varlen_attn, other), gpu.expected(other)[0], torch.float16)
        assert ran() == {"math": (1, 1)}
        # The same shapes as the first, other offsets.
        longer = gpu.packed((41, 300, 6))
        gpu.assert_near(gpu.run(attnreg.varlen_attn, longer), gpu.expected(longer)[0])
        assert ran() == {"math": (1, 1)}


def test_the_backward_of_a_kept_scoped_call_gets_its_choice(is_kept, ran):
    given, dense = gpu.packed((40, 300, 7)), gpu.bhsd()

    def step():
        with attnreg.use_backend("math"):
            out, other = attnreg.varlen_attn(*given), F.scaled_dot_product_attention(*dense)
        torch.autograd.grad(out, given.qkv, gpu.incoming(out))
        torch.autograd.grad(other, dense, gpu.incoming(other))

    with attnreg.register_backend("FA2"), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for _ in range(4):
            step()
            torch.cuda.synchronize()
            assert ran() == {"math": (2, 2)}
        assert is_kept(step)
        assert ran() == {"math": (6, 6)}


@pytest.mark.only_for("cuDNN")
def test_repeated_calls_whose_plans_are_gone_are_planned_anew(named, is_kept, ran):
    given, dense = gpu.packed((40, 300, 7), heads=(4, 2)), gpu.bhsd()
    right = gpu.expected_of_sdpa(dense, window=CAUSAL)
    plans = registry.find(named).kernels().forward.args[0]

    def step():
        got = gpu.run(attnreg.varlen_attn, given, enable_gqa=True)
        sdpa = gpu.sdpa_and_back(dense, is_causal=True)
        torch.cuda.synchronize()
        return got, sdpa

    with attnreg.register_backend(named), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for _ in range(3):
            plans._plans.clear()
            before = plans.built["forward"], plans.built["backward"]
            for _ in range(TIMES):
                packed, sdpa = step()
                gpu.assert_near(packed, gpu.expected(given)[0])
                gpu.assert_near(sdpa, right)
            assert ran() == {named: (2 * TIMES, 2 * TIMES)}
            assert is_kept(step)
            ran()
            assert (plans.built["forward"], plans.built["backward"]) == (before[0] + 2, before[1] + 2)


# ---- flash-attn-4, whose launches are written down

# A launch of very many sequences has the package sum up their tiles: for queries, and in a backward for keys.
SUM_TILES = "_compute_tile_cumsum"

CALLS = {
    "dense": ((2, 200, 4, 64), (2, 200, 4, 64), None),
    "dense, shared heads": ((2, 200, 8, 128), (2, 200, 2, 128), None),
    "dense, more keys": ((2, 72, 4, 64), (2, 200, 4, 64), None),
    "packed": ((456, 4, 64), (456, 4, 64), (200, 1, 255)),
    "packed, shared heads": ((456, 8, 128), (456, 2, 128), (200, 1, 255)),
    "packed, hundreds of sequences": ((1200, 4, 64), (1200, 4, 64), (4,) * 300),
}


@pytest.mark.only_for("FA4")
@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("window", [(-1, -1), CAUSAL])
def test_repeated_calls_of_flash_attn_4_leave_its_python_out(named, case, window):
    kernels = registry.find(named).kernels()
    shape_q, shape_k, lengths = case
    offsets = None if lengths is None else gpu.offsets_of(lengths)
    longest = (shape_q[1], shape_k[1]) if lengths is None else (max(lengths), max(lengths))
    for seed in range(TIMES):
        query, grad = drawn(shape_q, seed), drawn(shape_q, seed + 100)
        key, value = drawn(shape_k, seed + 200), drawn(shape_k, seed + 300)
        call = Call(0.1 * shape_q[-1] ** -0.5, *longest, window, offsets, offsets)
        (out, lse), forward = python_of("flash_attn", kernels.forward, query, key, value, call)
        given = (grad, query, key, value, out, lse, call)
        grads, backward = python_of("flash_attn", kernels.backward, *given)
        torch.cuda.synchronize()  # so that the device has reported on offsets and comparisons
        right, right_lse, *right_grads = truth.of_call(query, key, value, grad, call)
        gpu.assert_near((out, *grads), (right, *right_grads))
        truth.assert_near(lse.cpu(), right_lse, torch.float32)
    sums = [SUM_TILES] * (lengths is not None and len(lengths) > MANY)
    assert (forward, backward) == (sums, sums * 2), "the last calls went through the package's Python"


@pytest.mark.only_for("FA4")
def test_repeated_calls_of_flash_attn_4_leave_its_python_out_in_a_capture_and_on_another_stream(
    named,
):
    kernels = registry.find(named).kernels()
    call = Call(64**-0.5, 136, 136, CAUSAL)
    query, key, value, grad = (drawn((2, 136, 4, 64), seed) for seed in range(4))

    def step():
        out, lse = kernels.forward(query, key, value, call)
        return [out, *kernels.backward(grad, query, key, value, out, lse, call)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(TIMES):
            step()
            side.synchronize()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, entered = python_of("flash_attn", step)
    assert entered == []
    for seed in (10, 20):
        for tensor in (query, key, value, grad):
            tensor.copy_(drawn(tensor.shape, seed))
            seed += 1
        right, _, *right_grads = truth.of_call(query, key, value, grad, call)
        gpu.assert_near(gpu.replay(graph, captured), (right, *right_grads))


@pytest.mark.parametrize("freed", ["query", "key", "value", "cu_seq_q", "cu_seq_k"])
def test_a_freed_storage_is_an_error_and_no_fault_of_the_device(routers, named, freed):
    """As FSDP frees parameters: a kernel that is given the address would end the CUDA context."""
    whole = torch.randn(3, 30, 2, 64, device="cuda", dtype=torch.bfloat16)
    given = dict(zip(("query", "key", "value"), (x.clone() for x in whole), strict=True))
    for name in ("cu_seq_q", "cu_seq_k"):
        given[name] = torch.tensor([0, 5, 30], dtype=torch.int32, device="cuda")

    def attend():
        return attnreg.varlen_attn(**given, max_q=25, max_k=25, backend=named)

    for _ in range(8):
        attend()
    given[freed].untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(UnsupportedInputError, match=f"^{freed}: got a tensor whose storage was freed"):
            attend()
    torch.cuda.synchronize()


@pytest.mark.parametrize("freed", [0, 1, 2])
def test_a_freed_storage_in_a_dense_call_is_an_error_forward_and_backward(routers, named, freed):
    given = [
        torch.randn(2, 30, 2, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    ]
    with attnreg.register_backend(named):

        def attend():
            return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in given)).sum()

        for _ in range(8):
            attend().backward()
        loss = attend()
        given[freed].data.untyped_storage().resize_(0)
        for call in (attend, loss.backward):
            with pytest.raises(RuntimeError, match=r"storage was freed|storage of size 0"):
                call()
    torch.cuda.synchronize()

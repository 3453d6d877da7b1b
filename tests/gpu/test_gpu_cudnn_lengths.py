"""On a GPU: cuDNN is right where each call has other lengths, in every form in which calls are run."""

import functools
import random

import pytest
import torch
import torch.nn.functional as F
from support import gpu, launchers
from test_gpu_accuracy import CAUSAL, OPEN, dense, kernels, ragged

import attnreg
from attnreg.backends.cudnn import lengths
from attnreg.backends.cudnn.problem import RaggedOffset
from attnreg.core.launching.launchers import AddressLauncher
from attnreg.tools.measure import Case, inputs
from attnreg.tools.measure.reference import attention
from attnreg.tools.measure.rule import errors_of

pytestmark = [pytest.mark.gpu, pytest.mark.only_for("cuDNN")]

# Pairs of lengths of the batches of a program. The first has as many tokens as a later one, in other places.
SAME = ([40, 300, 7], [300, 40, 7], [1], [64] * 20, [5, 0, 9], [2000, 48], [333])
PACKED = tuple([(n, n) for n in lens] for lens in SAME)
CROSS = (
    *([(40, 50), (7, 9)], [(1, 300), (200, 20)], [(5, 0), (0, 9), (30, 30)], [(64, 65)] * 9),
    *([(300, 301), (1, 1)], [(7, 7)], [(900, 1000)]),
)
DENSE = ((40, 50, 2), (41, 50, 2), (7, 300, 1), (300, 301, 3), (2, 2, 5))

KINDS = {
    "one offsets, causal": [ragged(*one, window=CAUSAL, one_cu_seqlens=True) for one in PACKED],
    "one offsets, window": [ragged(*one, window=(8, 2), one_cu_seqlens=True) for one in PACKED],
    "shared heads of 128": [ragged(*one, heads=(8, 2), dims=(128, 128), window=CAUSAL) for one in PACKED],
    "cross": [ragged(*one, window=OPEN) for one in CROSS],
    "cross, causal": [ragged(*one, window=CAUSAL, dtype="float16") for one in CROSS],
    "rows of no sequence": [ragged(*one, window=CAUSAL, tail=5, poison=True) for one in CROSS],
    "fused qkv": [
        ragged(*one, layout="fused qkv", heads=(4, 4), one_cu_seqlens=True, window=CAUSAL) for one in PACKED
    ],
    "heads before tokens": [ragged(*one, layout="bhsd") for one in PACKED],
    "dense": [dense(*shape) for shape in DENSE],
    "dense, causal": [dense(*shape, window=CAUSAL, heads=(4, 2)) for shape in DENSE],
}
# Their tensors are copied, so that no call is run on addresses.
COPIED = ("fused qkv", "heads before tokens")


def assert_right(case: Case, given, results):
    truth, plain = (attention(case, given, dtype, None) for dtype in (torch.float64, given.q.dtype))
    errors = errors_of(results, plain, truth, given.q.dtype)
    assert {name: str(error) for name, error in errors.items() if not error.passed} == {}, case
    assert errors.keys() == {"out", "lse", "dq", "dk", "dv"}


@pytest.mark.parametrize("kind", KINDS)
def test_launchers_of_the_first_call_run_all_others_as_the_functions_do(named, kind):
    used, (forward_launcher, backward_launcher) = [], (None, None)
    tested = kernels(named)
    for number, case in enumerate(KINDS[kind]):
        query, key, value, grad, call = given = inputs(case, "cuda", number)
        tensors, further = (query, key, value), launchers.packed_arguments(call)
        results = []
        if forward_launcher is not None:
            out, lse = forward_launcher(*tensors, *further)
            results.append((out, lse, *backward_launcher(grad, *tensors, out, lse, *further)))
        out, lse = tested.forward(*tensors, call)
        results.append((out, lse, *tested.backward(grad, *tensors, out, lse, call)))
        if forward_launcher is None:
            forward_launcher = tested.specialize("forward", tensors, call)
            backward_launcher = tested.specialize("backward", (grad, *tensors, out, lse), call)
        elif isinstance(forward_launcher, AddressLauncher) and isinstance(backward_launcher, AddressLauncher):
            out, lse = forward_launcher.on_addresses(*tensors, *further)
            grads = backward_launcher.on_addresses(grad, *tensors, out, lse, *further)
            results.append((out, lse, *grads))
            used.append("addresses")
        assert_right(case, given, results)
    assert len(used) == (0 if kind in COPIED else len(KINDS[kind]) - 1)


@pytest.mark.parametrize("seed", range(20))
def test_the_kernel_of_lengths_writes_what_torchs_ops_write(seed):
    draw, read = random.Random(seed), lengths.OffsetsRead()
    count = draw.randint(1, 700)
    cu_q, cu_k = (gpu.offsets_of([draw.choice((0, 1, 70)) for _ in range(count)]) for _ in "qk")
    if seed % 3 == 0:
        cu_q = torch.stack((cu_q, cu_k), 1)[:, 0]
    used = gpu.offsets_of([draw.choice((0, 1)) for _ in range(count)])[1:] if seed % 2 else None
    wanted = [RaggedOffset(draw.random() < 0.5, draw.choice((8, 64, 1024, 2**33))) for _ in range(seed)]
    read.add(type("Plan", (), {"lengths": wanted}))
    assert lengths.WRITE.available(torch.cuda.current_device())
    stream = torch.cuda.current_stream().cuda_stream
    made = lengths.BatchLengths(read, count + draw.randint(0, 50), stream, cu_q, cu_k, used)
    ((written, got),) = made._buffers
    by_ops = torch.full_like(got, -1)
    lengths._write_by_ops(by_ops, written.ragged, cu_q, cu_k, used)
    assert torch.equal(got, by_ops)


@gpu.FRONTS
def test_packed_training_is_right_where_each_step_has_other_lengths(named, front, ran):
    draw, steps = random.Random(0), 12
    attend = functools.partial(front, window_size=CAUSAL)
    with attnreg.register_backend(named):
        for seed in range(steps):
            given = gpu.packed([draw.randint(1, 300) for _ in range(draw.randint(1, 9))], seed=seed)
            gpu.assert_near(gpu.run(attend, given), gpu.expected(given, window=CAUSAL)[0])
    assert ran() == {named: (steps, steps)}


def test_new_offsets_are_written_by_the_call_cache(named, ran, request, monkeypatch, trust_offsets):
    trust_offsets(3600.0)  # a step that a busy machine interrupts is compared otherwise, by Python
    draw, steps, written, lens = random.Random(0), 24, [], [17, 300, 5, 64, 211, 90, 128]
    write = lengths.BatchLengths._write
    monkeypatch.setattr(lengths.BatchLengths, "_write", lambda *given: written.append(1) or write(*given))
    attend = functools.partial(attnreg.varlen_attn, window_size=CAUSAL)
    with attnreg.register_backend(named):
        for seed in range(steps):
            given = gpu.packed(draw.sample(lens, len(lens)), seed=seed)  # one execution plan runs all
            gpu.assert_near(gpu.run(attend, given), gpu.expected(given, window=CAUSAL)[0])
            if seed == steps // 2:
                written.clear()
    assert ran() == {named: (steps, steps)}
    if request.config.getoption("--routers") == "compiled":
        assert written == []


def test_a_cache_that_grows_is_read_right_in_each_step(named, ran):
    lengths_k = range(600, 612)
    with attnreg.register_backend(named):
        for length in lengths_k:
            query, key, value = gpu.bhsd(2, 4, length, grad=False)
            query = query[:, :, :1]
            got = F.scaled_dot_product_attention(query, key, value)
            weights = torch.softmax(query.double() @ key.double().mT / 8.0, -1)
            gpu.assert_near([got], [(weights @ value.double()).cpu()])
    assert ran() == {named: (len(lengths_k), 0)}

"""The cpu backend's compiled kernel: results against float64, launchers, threads, and what it refuses."""

import ctypes
import itertools
import math
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.cpu_calls import (
    CAUSAL,
    OPEN,
    assert_gradients_are_the_same_with_any_threads,
    assert_same,
    dense,
    ragged,
    refuse,
    solved,
)
from support.processes import forked
from support.truth import assert_accurate
from torch._subclasses import FakeTensorMode

import attnreg
from attnreg.backends.cpu import compiled
from attnreg.backends.cpu.flash import Flash
from attnreg.core.contract.backend import Call
from attnreg.errors import InvalidInputError
from attnreg.tools.measure.inputs import inputs

DTYPES = ("float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow))
HALVES = (torch.bfloat16, torch.float16)


pytestmark = pytest.mark.usefixtures("threads")  # tests about threads ask for several themselves


# ---- numbers


@pytest.mark.each_value("dims", "dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "dims", [(1, 1), (7, 7), (16, 16), (33, 33), (80, 80), (100, 36), (24, 130), (256, 256)]
)
def test_sizes_of_heads_are_accurate(kernels, dims, dtype):
    assert_accurate(kernels, ragged((40, 77, 1), dims=dims, dtype=dtype))
    assert_accurate(kernels, ragged((140, 3), dims=dims, dtype=dtype, window=CAUSAL))


def test_sharp_scores_leave_exact_zeros_and_nothing_else(kernels):
    q = torch.zeros(1, 1, 1, 2)
    q[..., 0] = 1.0
    k, v = torch.zeros(1, 3, 1, 2), torch.eye(3, 2).view(1, 3, 1, 2)
    for low in (-200.0, -80.0, -10.0):
        k[0, 1, 0, 0] = k[0, 2, 0, 0] = low
        weight = math.exp(low) if low > -87.0 else 0.0  # below, no normal float32
        out, lse = kernels.forward(q, k, v, Call(1.0, 1, 3))
        assert float(out[0, 0, 0, 1]) == pytest.approx(weight / (1 + 2 * weight), rel=1e-6, abs=0.0)
        assert float(lse) == pytest.approx(math.log1p(2 * weight), rel=1e-3, abs=1e-30)


@pytest.mark.parametrize("scale", [1e4, 1e8, 1e30])
def test_weights_of_very_large_scores_stay_weights_in_the_backward(kernels, scale):
    """The LSE has fewer digits than they need: a weight above 1 would be 2 to the power of an error."""
    q, k, v = torch.randn(3, 1, 50, 2, 16, generator=torch.Generator().manual_seed(0)).unbind()
    _, _, dq, dk, dv = solved(kernels, q, k, v, torch.ones_like(v), Call(scale, 50, 50))
    assert dq.isfinite().all() and dk.isfinite().all()
    assert dv.abs().max() <= 50.0


def test_the_tanh_of_a_softcap_is_exact_to_a_few_units_for_every_size_of_score(kernels):
    """One key: the LSE is its score. The tanh is a polynomial where it is small, and 1 from 10 on."""
    scores = torch.cat([torch.logspace(-30, 4, 1000), torch.linspace(0.3, 1.2, 1000), torch.zeros(1)])
    scores = torch.cat([scores, -scores])
    q, one = scores.view(-1, 1, 1, 1), torch.ones(len(scores), 1, 1, 1)
    for softcap in (0.5, 1.0, 30.0):
        out, lse = kernels.forward(q, one, one, Call(1.0, 1, 1, softcap=softcap))
        expected = softcap * torch.tanh(scores.double() / softcap)
        torch.testing.assert_close(lse.flatten().double(), expected, rtol=6e-7, atol=1e-36)
        assert torch.equal(out, one)


def test_a_nan_in_the_query_stays_one_with_a_softcap(kernels):
    x = torch.randn(1, 20, 1, 8)
    q = x.clone()
    q[0, 3, 0, 5] = torch.nan
    out, lse = kernels.forward(q, x, x, Call(1.0, 20, 20, softcap=2.0))
    assert lse.isnan().nonzero().tolist() == [[0, 0, 3]]
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 3, 0]]


@pytest.mark.each_value("softcap", "dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.5, 20.0, 1000.0])
def test_softcaps_of_every_size_are_accurate_where_scores_are_large(kernels, softcap, dtype):
    options = {"softcap": softcap, "dtype": dtype, "magnitude": 6.0, "window": CAUSAL}
    assert_accurate(kernels, ragged((140, 3, 70), heads=(4, 2), dims=(40, 24), **options))


# ---- what doesn't fit


def wrong_calls():
    def call(offsets, cu_seqlens_k=(0, 4, 8), used=None):
        ints = [
            None if x is None else torch.tensor(x, dtype=torch.int32) for x in (offsets, cu_seqlens_k, used)
        ]
        return Call(0.25, 8, 8, cu_seqlens_q=ints[0], cu_seqlens_k=ints[1], seqused_k=ints[2])

    good = (0, 4, 8)
    yield call((0, 4, 9000)), "4 to 9000 at index 1"
    yield call((-4000, 4, 8)), "-4000 to 4 at index 0"
    yield call((0, 5, 4)), "5 to 4 at index 1"
    yield call(good, (0, 9000, 8)), "0 to 9000 at index 0"
    yield call(good, (0, 8)), "2 of the query, 1 of the key"
    yield call((1, 4, 8)), "first offset 1, expected 0"
    yield call(good)._replace(max_q=3), "max_q: got 3, expected at least 4"
    yield call(good, used=(5, 4)), "got 5 at index 0, expected 0 to 4"
    yield call(good, used=(4, -1)), "got -1 at index 1"
    yield call(good, used=(4,)), "1 counts of keys"


@pytest.mark.parametrize(("call", "message"), [*wrong_calls()])
def test_what_lies_outside_of_the_tensors_is_never_read(kernels, call, message):
    """A direct call of aten's backward, or offsets that are written to after the forward, may ask for it."""
    x = torch.randn(8, 2, 16)
    with pytest.raises(InvalidInputError, match=message):
        kernels.forward(x, x, x, call)
    with pytest.raises(InvalidInputError, match=message):
        kernels.backward(x, x, x, x, x, torch.zeros(2, 8), call)


@pytest.mark.parametrize("which", ["grad expanded", "grad transposed", "lse strided", "lse double"])
def test_a_backward_reads_tensors_of_any_strides(kernels, which):
    q, k, v, grad, call = inputs(ragged((40, 9, 70), dtype="float32", heads=(4, 2)))
    if which == "grad expanded":
        grad = grad[:1, :1, :1].expand(grad.shape)
    out, lse = kernels.forward(q, k, v, call)
    expected = kernels.backward(grad.contiguous(), q, k, v, out, lse, call)
    if which == "grad transposed":
        grad = grad.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    elif which == "lse strided":
        lse = torch.stack((lse, lse), -1).transpose(0, 1).contiguous().transpose(0, 1)[..., 0]
    elif which == "lse double":
        lse = lse.double()
    assert_same(kernels.backward(grad, q, k, v, out, lse, call), expected)


# ---- what a dtype holds


def all_numbers(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_of_a_half_is_read_and_written_as_it_is(kernels, dtype):
    """One key: the output is its value."""
    v = all_numbers(dtype).view(256, 1, 1, 256)
    q = torch.zeros(256, 1, 1, 8, dtype=dtype)
    out, _ = kernels.forward(q, q, v, Call(1.0, 1, 1))
    assert torch.equal(out.isnan(), v.isnan())
    assert torch.equal(out[~v.isnan()].view(torch.int16) & 0x7FFF, v[~v.isnan()].view(torch.int16) & 0x7FFF)
    assert torch.equal(out[~v.isnan()], v[~v.isnan()])


@pytest.mark.parametrize("dtype", HALVES)
def test_results_are_rounded_once_to_nearest(kernels, dtype):
    """Two keys of one score: the output is the mean of their values, exact in float32."""
    numbers = all_numbers(dtype)
    numbers = numbers[numbers.isfinite()]
    numbers = numbers[: len(numbers) // 256 * 256]
    for shift in (1, 2, 3, 1000, 30000):
        pairs = torch.stack((numbers, numbers.roll(shift)), 1).view(-1, 256, 2)
        v = pairs.transpose(1, 2)[:, :, None].contiguous()
        q, k = (torch.zeros(len(v), n, 1, 8, dtype=dtype) for n in (1, 2))
        out, _ = kernels.forward(q, k, v, Call(1.0, 1, 2))
        mean = (v[:, :1].float() + v[:, 1:].float()) * 0.5
        mean = mean.where(mean.abs() > 2.0**-120, 0.0)
        got = out.float().where(mean != 0.0, 0.0)
        torch.testing.assert_close(got, mean.to(dtype).float(), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("layout", ["plain", "bhsd"])
def test_dense_results_have_the_strides_of_torchs_kernel(kernels, layout):
    """So a router needs no copy."""
    q, k, v, grad_out, call = inputs(dense(3, 40, heads=(4, 4), layout=layout))
    flash = Flash.captured()
    out, lse = flash.forward(*(x.transpose(1, 2) for x in (q, k, v)), call.scale)
    grads = flash.backward((*(x.transpose(1, 2) for x in (grad_out, q, k, v)), out, lse), call.scale)
    found = solved(kernels, q, k, v, grad_out, call)
    assert found[0].transpose(1, 2).stride() == out.stride()
    assert found[1].stride() == lse.stride()
    assert [x.transpose(1, 2).stride() for x in found[2:]] == [x.stride() for x in grads]


# ---- NaN


# Where a NaN of token 60, head 1, column 5 arrives: tokens, heads and columns of each result. The token is in
# the second of three sequences; two query heads share a key head.
SECOND, OF_KEY_HEAD_1 = slice(40, 110), slice(2, 4)
ARRIVES = {
    "q": {"out": (60, 1), "lse": (60, 1), "dq": (60, 1), "dk": (SECOND, 0), "dv": (SECOND, 0)},
    "k": {
        **dict.fromkeys(("out", "lse", "dq"), (SECOND, OF_KEY_HEAD_1)),
        **dict.fromkeys(("dk", "dv"), (SECOND, 1)),
    },
    "v": {"out": (SECOND, OF_KEY_HEAD_1, 5), "dq": (SECOND, OF_KEY_HEAD_1), "dk": (SECOND, 1)},
    "grad": {"dq": (60, 1), "dk": (SECOND, 0), "dv": (SECOND, 0, 5)},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ARRIVES)
def test_nan_stays_where_it_belongs_and_nowhere_else(kernels, which, dtype):
    """All other numbers are those that they were."""
    *tensors, call = inputs(ragged((40, 70, 33), dtype=dtype, heads=(4, 2)))
    expected = dict(zip(("out", "lse", "dq", "dk", "dv"), solved(kernels, *tensors, call), strict=True))
    for name, places in ARRIVES[which].items():
        (expected[name].mT if name == "lse" else expected[name])[places] = torch.nan
    tensors[list(ARRIVES).index(which)][60, 1, 5] = torch.nan
    assert_same(solved(kernels, *tensors, call), expected.values())


# ---- threads and memory


@pytest.mark.parametrize("threads", [pytest.param(2, marks=pytest.mark.slow), 7], indirect=True)
@pytest.mark.parametrize(
    "window", [*(pytest.param(window, marks=pytest.mark.slow) for window in (OPEN, CAUSAL)), (300, 20)]
)
def test_one_long_sequence_is_shared_out_and_is_accurate(kernels, window, threads):
    assert_accurate(kernels, ragged((1100,), heads=(1, 1), dtype="float32", window=window))
    assert_accurate(kernels, ragged((900, 20), heads=(3, 1), dtype="bfloat16", window=window))


def test_calls_of_several_threads_at_once_do_not_disturb_each_other(kernels):
    given = [inputs(ragged((100, 31, length), dtype="float32")) for length in (50, 200, 333, 90)]
    expected = [solved(kernels, *each) for each in given]

    def work(each):
        torch.set_num_threads(2)
        return [solved(kernels, *each) for _ in range(5)][-1]

    with ThreadPoolExecutor(len(given)) as pool:
        found = [*pool.map(work, given)]
    assert_same(itertools.chain(*found), itertools.chain(*expected), tolerance=1e-5)


def run(code, file):
    """Run code in a process of its own, where `kernel` is the compiled kernel."""
    prelude = """
import ctypes, resource, sys, torch
from attnreg.core.contract.backend import Call
from attnreg.backends.cpu.compiled import CompiledKernel
torch.set_num_threads(2)
kernel = CompiledKernel.of(ctypes.CDLL(sys.argv[1]))
"""
    done = forked(prelude + code, str(file))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


LONG = """
def peak(length):
    q, k, v, grad = torch.randn(4, 1, length, 1, 16).unbind()
    call = Call(0.25, length, length, window=(-1, 0))
    out, lse = kernel.forward(q, k, v, call)
    kernel.backward(grad, q, k, v, out, lse, call)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

short = peak(256)
print(peak(16384) - short)
"""


@pytest.mark.slow
def test_memory_grows_with_the_length_and_not_with_its_square(built_cpu_kernel):
    (grown,) = run(LONG, built_cpu_kernel)
    assert int(grown) < 64 * 1024  # KiB; a square of scores would be a gigabyte


MANY_THREADS = """
torch.set_num_threads(128)
def peak(length):
    q, k, v, grad = torch.randn(4, 1, length, 2, 64).unbind()
    call = Call(0.125, length, length)
    out, lse = kernel.forward(q, k, v, call)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kernel.backward(grad, q, k, v, out, lse, call)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

peak(128)
print(peak(4096))
"""


@pytest.mark.slow
def test_the_memory_of_a_backward_is_bounded_with_many_threads(built_cpu_kernel):
    (grown,) = run(MANY_THREADS, built_cpu_kernel)
    # KiB: 6 MiB of gradients, 4 MiB of sums, half a MiB for each of 36 tasks; sums of each would be 72 MiB.
    assert int(grown) < 48 * 1024


@pytest.mark.parametrize("magnitude", [1.0, 6.0])
def test_gradients_do_not_depend_on_the_number_of_threads(kernels, magnitude):
    options = {"dtype": "float32", "window": CAUSAL, "magnitude": magnitude}
    assert_gradients_are_the_same_with_any_threads(kernels, ragged((1100, 30, 600), heads=(4, 2), **options))


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_the_bits_of_a_sequence_depend_on_its_batch_unless_the_call_says_that_they_may_not(
    threads, cpu_kernel
):
    def last_forward(lengths, tensors, invariant):
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        call = Call(0.2, 300, 300, window=(50, 0), cu_seqlens_q=offsets, cu_seqlens_k=offsets)
        return cpu_kernel.forward(*tensors, call._replace(batch_invariant=invariant))[0][-300:]

    tokens = torch.randn(3, 1200, 1, 32, generator=torch.Generator().manual_seed(1))
    alone = [x[-300:].contiguous() for x in tokens]
    for invariant in (False, True):
        together = last_forward([300] * 4, tokens, invariant)
        assert torch.equal(together, last_forward([300], alone, invariant)) is invariant


SHORT_OF_MEMORY = """
def solve(x, lse=None):
    call = Call(1.0, x.size(1), x.size(1))
    out, found = kernel.forward(x, x, x, call) if lse is None else (x, lse)
    return (out, found, *kernel.backward(x, x, x, x, out, found, call))

small = torch.randn(1, 600, 2, 16)
before = solve(small)
wide, lse = torch.zeros(1, 64, 2, 2**18), torch.zeros(1, 2, 64)  # results fit, blocks of both threads don't
room = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 2**29
resource.setrlimit(resource.RLIMIT_AS, (room, room))
for given in (None, lse):
    try:
        solve(wide, given)
    except MemoryError as error:
        print(error)
print(all(map(torch.equal, before, solve(small))))
"""


def test_a_thread_without_memory_is_an_error_and_does_not_end_the_process(built_cpu_kernel):
    refused = "no memory for the blocks that attention works on"
    assert run(SHORT_OF_MEMORY, built_cpu_kernel) == [refused, refused, "True"]


RUN = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * 3, ctypes.c_void_p, ctypes.c_void_p)
BODY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


@pytest.mark.parametrize("works", [True, False])
def test_a_call_runs_in_the_threads_that_torch_starts_for_it(built_cpu_kernel, cpu_kernel, tmp_path, works):
    def count(number):
        number[0] = 3
        return 0

    def start(begin, end, grain, body, context):
        started.append((begin, end, grain))
        if works:
            for thread in range(begin, end):
                BODY(body)(thread, thread + 1, context)
        return int(not works)

    started = []
    file = shutil.copy(built_cpu_kernel, tmp_path)  # a library of its own, whose threads are these
    library = ctypes.CDLL(str(file))
    kernel = compiled.CompiledKernel.of(library)
    functions = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(ctypes.c_uint32))(count), RUN(start)
    library.attnreg_use_threads(*functions)
    q, k, v, _, call = inputs(ragged((300, 200, 100), dtype="float32"))
    if works:
        assert_same(kernel.forward(q, k, v, call), cpu_kernel.forward(q, k, v, call), tolerance=1e-5)
    else:
        with pytest.raises(RuntimeError, match="torch couldn't start its threads"):
            kernel.forward(q, k, v, call)
    assert started == [(0, 3, 1)]


def test_threads_may_change_between_forward_and_backward(kernels, threads):
    q, k, v, grad, call = inputs(ragged((700, 30), dtype="float32"))
    out, lse = kernels.forward(q, k, v, call)
    expected = kernels.backward(grad, q, k, v, out, lse, call)
    torch.set_num_threads(3 - threads)
    assert_same(kernels.backward(grad, q, k, v, out, lse, call), expected, tolerance=1e-5)


def test_tensors_without_data_never_reach_it(kernels, cpu_kernel, monkeypatch, packed):
    """Of tensors that stand for others, and where a negation waits, the kernel sees what they stand for."""
    monkeypatch.setattr(compiled, "load", lambda: cpu_kernel)
    *_, offsets, _, longest, _ = packed((3, 37))
    x = torch.complex(*torch.randn(2, 40, 4, 16).unbind()).conj().imag
    assert x.is_neg()

    def attend(x, offsets):
        return attnreg.varlen_attn(x, x, x, offsets, offsets, longest, longest, backend="cpu")

    assert_same([attend(x, offsets)], [attend(x.clone(), offsets)])
    monkeypatch.setattr(compiled, "_run", refuse)
    with pytest.raises(AssertionError, match="not to be called"):
        attend(x, offsets)
    mode = FakeTensorMode()
    fake = [mode.from_tensor(each) for each in (x.clone(), offsets)]
    with mode:
        assert attend(*fake).shape == x.shape

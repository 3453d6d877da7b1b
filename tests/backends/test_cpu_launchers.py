"""Launchers of the cpu backend's compiled kernel: one for all calls of a kind, by a C function."""

import ctypes
import gc
import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.cpu_calls import CAUSAL, OPEN, assert_same, dense, ragged, refuse, solved
from support.native_calls import launched, results_of, status_of

from attnreg.backends.cpu import choice, sequences
from attnreg.backends.cpu.problem import NativeKind
from attnreg.core.contract.backend import Kernels
from attnreg.core.launching.launchers import NativeLauncher
from attnreg.tools.measure.inputs import inputs

DTYPES = ("float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow))


@pytest.fixture
def kernels(cpu_kernel, monkeypatch):
    """Return the compiled kernel as the backend uses it; a call that would go to torch's kernel fails."""
    monkeypatch.setattr(choice, "machine", lambda: choice.CpuMachine(avx=True, amx=False, slow_mkl=False))
    return cpu_kernel.before(Kernels(refuse, refuse))


def launchers(kernels, q, k, v, grad_out, call):
    """Return the launchers of a call's kind."""
    out, lse, *_ = solved(kernels, q, k, v, grad_out, call)
    forward = kernels.specialize("forward", (q, k, v), call)
    return forward, kernels.specialize("backward", (grad_out, q, k, v, out, lse), call)


def further(call):
    """Return what follows the tensors of a packed call."""
    lengths = call.cu_seqlens_q, call.cu_seqlens_k, call.max_q, call.max_k, False
    return lengths if call.varlen else ()


def assert_launched(kernels, pair, case, seed=1):
    """Check both ways of calling both launchers against the kernels."""
    q, k, v, grad_out, call = inputs(case, seed=seed)
    out, lse, *grads = solved(kernels, q, k, v, grad_out, call)
    given = (q, k, v), (grad_out, q, k, v, out, lse)
    for launcher, tensors, expected in zip(pair, given, ((out, lse), grads), strict=True):
        status, found = launched(launcher, tensors, call)
        assert status == 0
        assert_same(found, expected)
        as_function = launcher.run(*tensors, *further(call))
        assert_same(as_function, expected)
        assert [x.stride() for x in as_function] == [x.stride() for x in expected]


LAYOUTS = (("plain", (24, 40)), *((each, (16, 16)) for each in ("bhsd", "fused qkv", "one key head")))


@pytest.mark.pairwise("layout", "dims", "window", "dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [OPEN, CAUSAL, (9, 0), (5, 3)])
@pytest.mark.parametrize(("layout", "dims"), LAYOUTS)
def test_a_dense_launcher_runs_calls_of_any_lengths(kernels, layout, dims, window, dtype):
    options = {"heads": (4, 2), "dims": dims, "dtype": dtype, "layout": layout, "window": window}
    pair = launchers(kernels, *inputs(dense(3, 40, **options)))
    assert all(isinstance(each, NativeLauncher) for each in pair)
    # Rows that see no key, and keys that no row sees, are among them.
    others = ((70, 70), (1, 1)) if layout == "fused qkv" else ((70, 9), (3, 130))
    for batch, lengths in enumerate([(40, 40), *others], 1):
        assert_launched(kernels, pair, dense(batch, *lengths, **options))


@pytest.mark.pairwise("layout", "window", "dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [OPEN, CAUSAL, (9, 0), (2**63 - 1, 3)])
@pytest.mark.parametrize("layout", ["plain", "fused qkv"])
def test_a_packed_launcher_runs_calls_of_any_lengths(kernels, layout, window, dtype):
    options = {"heads": (4, 2), "dims": (16, 16), "dtype": dtype, "layout": layout, "window": window}
    pair = launchers(kernels, *inputs(ragged((8, 30), **options)))
    draw = random.Random(0)
    batches = [[draw.randint(0, 40) for _ in range(draw.randint(1, 9))] for _ in range(5)]
    for lengths in ((8, 30), (0, 0, 7), (200,), (1,) * 20, *batches):
        assert_launched(kernels, pair, ragged(lengths, tail=3, poison=True, **options))
    if layout == "plain":
        # Sequences with more queries than keys, and without either.
        case = ragged((9, 60, 0, 5), (40, 7, 3, 0), tail=2, poison=True, **options)
        assert_launched(kernels, pair, case)


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_a_packed_call_without_tokens_or_sequences_gives_rows_of_nothing(kernels, batch):
    forward, backward = launchers(kernels, *inputs(ragged((8, 3), dtype="float32")))
    q, k, v, grad_out, call = inputs(ragged((4, 2), dtype="float32"))
    offsets = torch.zeros(batch + 1, dtype=torch.int32)
    call = call._replace(cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    for some in (slice(0), slice(None)):
        tensors = q[some], k[some], v[some]
        status, (out, lse) = launched(forward, tensors, call)
        assert status == 0
        assert_same((out, lse), (torch.zeros_like(out), torch.full_like(lse, -torch.inf)))
        status, grads = launched(backward, (grad_out[some], *tensors, out, lse), call)
        assert status == 0
        assert_same(grads, [torch.zeros_like(x) for x in grads])


def test_offsets_that_were_written_to_without_a_trace_are_read_anew(kernels):
    q, k, v, grad_out, call = inputs(ragged((20, 30, 10), dtype="float32", window=CAUSAL))
    pair = launchers(kernels, q, k, v, grad_out, call)
    call.cu_seqlens_q.data.copy_(torch.tensor([0, 3, 33, 50]))
    expected = kernels.forward(q, k, v, call)
    assert_same(launched(pair[0], (q, k, v), call)[1], expected)
    assert expected[0][50:].count_nonzero() == 0


# ---- what a launcher leaves to Python


WRONG_OFFSETS = {
    "the first": (1, 4, 8),
    "negative": (-4, 0, 4),
    "decreasing": (0, 4, 3),
    "past the tokens": (0, 6, 9),
    "far past them": (0, 4, 2**31 - 1),
    "longer than the longest": (0, 1, 8),
}


@pytest.mark.parametrize("side", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("wrong", WRONG_OFFSETS)
def test_wrong_offsets_are_left_to_python_and_nothing_is_written(kernels, wrong, side):
    q, k, v, grad_out, call = inputs(ragged((4, 4), dtype="float32"))
    forward, backward = launchers(kernels, q, k, v, grad_out, call)
    out, lse = kernels.forward(q, k, v, call)
    call = call._replace(max_q=6, max_k=6)
    wrong = call._replace(**{side: torch.tensor(WRONG_OFFSETS[wrong], dtype=torch.int32)})
    for launcher, tensors in ((forward, (q, k, v)), (backward, (grad_out, q, k, v, out, lse))):
        assert launched(launcher, tensors, call)[0] == 0
        status, results = launched(launcher, tensors, wrong)
        assert status != 0
        assert all(bool(x.isnan().all()) for x in results)
        assert launcher.run(*tensors, *further(wrong)) is None


def other_tensors(tensors):
    """Yield tensors that don't fit each other, or that the library can't read, with what is wrong."""
    for place, x in enumerate(tensors):
        if x.dim() == 4:
            yield (*tensors[:place], x.transpose(1, 3).contiguous().transpose(1, 3), *tensors[place + 1 :])
        if len(tensors) == 3 and place == 0:
            continue  # fewer queries than keys are a call of its own
        for dim in range(x.dim()):
            yield (*tensors[:place], x.narrow(dim, 0, x.size(dim) - 1), *tensors[place + 1 :])


def test_tensors_that_do_not_fit_or_cannot_be_read_are_left_to_python(kernels):
    q, k, v, grad_out, call = inputs(dense(3, 7, heads=(2, 2), dims=(8, 8), dtype="float32"))
    forward, backward = launchers(kernels, q, k, v, grad_out, call)
    out, lse = kernels.forward(q, k, v, call)
    for launcher, given in ((forward, (q, k, v)), (backward, (grad_out, q, k, v, out, lse))):
        refused = 0
        for tensors in other_tensors(given):
            results = results_of(given, False)
            fits = launcher is forward and tensors[0].shape == tensors[1].shape == tensors[2].shape
            status = status_of(launcher, (*tensors, *results), call)
            assert status != 0 or (fits and all(x.stride(-1) == 1 for x in tensors))
            refused += status != 0
            assert status == 0 or all(bool(x.isnan().all()) for x in results)
        assert refused > len(given) * 3


def test_a_launcher_without_memory_or_threads_leaves_the_call_to_python(cpu_kernel, kernels):
    q, k, v, _, call = inputs(dense(1, 9, dtype="float32"))
    for status, error in ((1, MemoryError), (2, RuntimeError)):
        entry = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)(lambda *_, s=status: s)
        broken = cpu_kernel._replace(forward_entry=entry).before(Kernels(refuse, refuse))
        assert broken.specialize("forward", (q, k, v), call).run(q, k, v) is None
        with pytest.raises(error):
            broken.forward(q, k, v, call)


@pytest.mark.parametrize(
    "case",
    [
        dense(2, 40, seqused_k=(40, 7)),
        dense(2, 40, layout="last dim strided"),
        ragged((9, 40), layout="last dim strided"),
    ],
    ids=str,
)
def test_kinds_that_need_more_than_arguments_have_no_launcher(kernels, case):
    assert launchers(kernels, *inputs(case)) == (None, None)


def test_a_forward_with_counts_of_keys_is_launched_with_whatever_counts_come(kernels):
    options = {"heads": (4, 2), "dims": (16, 16), "dtype": "float32", "window": CAUSAL}
    forward, backward = launchers(kernels, *inputs(ragged((9, 40), seqused_k=(9, 7), **options)))
    assert isinstance(forward, NativeLauncher) and backward is None
    for lengths, counts in (((40, 9), (40, 0)), ((1, 1, 12), (0, 1, 5)), ((0, 70), (0, 69))):
        case = ragged(lengths, seqused_k=counts, tail=3, poison=True, **options)
        q, k, v, _, call = inputs(case, seed=1)
        expected = kernels.forward(q, k, v, call)
        status, results = launched(forward, (q, k, v), call)
        assert status == 0
        assert_same(results, expected)
        assert_same(forward.run(q, k, v, call.seqused_k, *further(call)), expected)
    more = call._replace(seqused_k=torch.tensor([1, 71], dtype=torch.int32))
    assert launched(forward, (q, k, v), more)[0] != 0


def test_a_forward_over_pages_is_launched_with_whatever_table_comes(kernels):
    options = {"heads": (4, 2), "dims": (16, 16), "dtype": "float32", "window": CAUSAL, "page_size": 8}
    first = ragged((1, 3), (9, 40), seqused_k=(9, 40), **options)
    *tensors, _, call = inputs(first)
    forward = kernels.specialize("forward", tuple(tensors), call)
    assert forward.takes == ("seqused_k", "block_table")
    for lengths, keys in (((1, 1), (40, 3)), ((2, 0, 5), (17, 8, 5))):
        q, k, v, _, call = inputs(ragged(lengths, keys, seqused_k=keys, poison=True, **options), seed=1)
        expected = kernels.forward(q, k, v, call)
        status, results = launched(forward, (q, k, v), call)
        assert status == 0
        assert_same(results, expected)
        assert_same(forward.run(q, k, v, call.seqused_k, call.block_table, *further(call)), expected)
    wrong = call._replace(block_table=torch.full_like(call.block_table, len(k)))
    assert launched(forward, (q, k, v), wrong)[0] != 0


def test_options_have_no_launcher(kernels):
    q, k, v, grad_out, call = inputs(ragged((9, 40), dtype="float32", heads=(2, 2)))
    out, lse = kernels.forward(q, k, v, call)
    backward = grad_out, q, k, v, out, lse
    state = torch.tensor([1, 2], dtype=torch.uint64)
    for option in ({"alibi_slopes": torch.ones(2)}, {"dropout": 0.1, "rng_state": state}):
        assert kernels.specialize("forward", (q, k, v), call._replace(**option)) is None
        assert kernels.specialize("backward", backward, call._replace(**option)) is None
    assert kernels.specialize("backward", backward, call._replace(grad_lse=lse)) is None
    assert kernels.specialize("backward", (*backward[:5], lse.double()), call) is None
    assert kernels.specialize("backward", (grad_out.half(), *backward[1:]), call) is None
    assert kernels.specialize("forward", (q.double(), k.double(), v.double()), call) is None
    for launcher in (
        kernels.specialize("forward", (q, k, v), call),
        kernels.specialize("backward", backward, call),
    ):
        assert isinstance(launcher, NativeLauncher)


@pytest.mark.parametrize("tiles", [False, True])
def test_forwards_that_may_be_torchs_are_left_to_python_by_their_lengths(cpu_kernel, monkeypatch, tiles):
    """Which of them are torch's depends on how sequences of equal length lie next to each other."""
    machine = choice.CpuMachine(avx=True, amx=True, slow_mkl=False, tiles=tiles)
    monkeypatch.setattr(choice, "machine", lambda: machine)
    kernels = cpu_kernel.before(Kernels(lambda *given: "torch's", refuse))
    kind = {"heads": (1, 1), "dims": (40, 40), "dtype": "bfloat16"}  # no multiple of 32
    q, k, v, _, call = inputs(ragged((9, 4), **kind))
    launcher = kernels.specialize("forward", (q, k, v), call)
    for lengths, is_left in (((1100,), True), ((200,) * 8, False), ((300,), False), ((600, 700), True)):
        *tensors, _, call = inputs(ragged(lengths, **kind))
        assert (status_of(launcher, (*tensors, *results_of(tensors, True)), call) != 0) is is_left
        assert (launcher.run(*tensors, *further(call)) is None) is is_left
        if not is_left:
            assert kernels.forward(*tensors, call) != "torch's"
    *tensors, _, call = inputs(ragged((1100,), **kind))
    assert kernels.forward(*tensors, call) == "torch's"
    *tensors, _, call = inputs(dense(2, 300, **kind))
    launcher = kernels.specialize("forward", tuple(tensors), call)
    assert launcher.run(*tensors) is not None
    *tensors, _, call = inputs(dense(4, 300, **kind))
    assert launcher.run(*tensors) is None and kernels.forward(*tensors, call) == "torch's"
    kind["dims"] = (64, 64)
    *tensors, _, call = inputs(ragged((1100,), **kind))
    launcher = kernels.specialize("forward", tuple(tensors), call)
    assert (launcher.run(*tensors, *further(call)) is None) is not tiles
    one_alone = kernels.specialize("forward", tuple(tensors), call._replace(batch_invariant=True))
    assert one_alone.run(*tensors, *further(call)) is not None


# ---- threads and memory


def test_calls_from_several_threads_without_the_interpreters_lock_do_not_disturb_each_other(kernels):
    pair = launchers(kernels, *inputs(ragged((8, 30), dtype="float32", window=CAUSAL)))
    given = [inputs(ragged((n, 31, 7), dtype="float32", window=CAUSAL), seed=n) for n in (50, 200, 3, 90)]
    expected = [solved(kernels, *each) for each in given]

    def work(number):
        q, k, v, grad_out, call = given[number]
        for _ in range(20):
            status, (out, lse) = launched(pair[0], (q, k, v), call)
            again, grads = launched(pair[1], (grad_out, q, k, v, out, lse), call)
            assert status == again == 0
        return out, lse, *grads

    with ThreadPoolExecutor(len(given)) as pool:
        found = [*pool.map(work, range(len(given)))]
    assert_same(itertools.chain(*found), itertools.chain(*expected), tolerance=1e-5)


def test_nothing_is_kept_of_lengths(kernels):
    forward, backward = launchers(kernels, *inputs(ragged((8, 30), dtype="float32")))
    sequences._sequences.cache_clear()
    gc.collect()
    before = sum(isinstance(x, NativeKind) for x in gc.get_objects())
    for length in range(1, 60):
        q, k, v, grad_out, call = inputs(ragged((length, 5), dtype="float32"))
        out, lse = forward.run(q, k, v, *further(call))
        assert backward.run(grad_out, q, k, v, out, lse, *further(call)) is not None
        solved(kernels, q, k, v, grad_out, call)
    assert sequences._sequences.cache_info().currsize == 0
    gc.collect()
    assert sum(isinstance(x, NativeKind) for x in gc.get_objects()) == before

"""Promises of the FA4 backend: what the package is called with, and what is made of its results.

A fake package stands in for flash-attn-4 (`fake_fa4`), so that values can be compared with float64.
"""

import contextlib
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.fake_fa4 import BOTH, Package, both, call_of, dense, dense_call, entered, offered, packed
from support.packages import FEWER_OR_ALL
from support.truth import varlen as true_varlen

from attnreg import BackendUnavailableError, Call
from attnreg.backends.fa4 import BACKEND, adapter
from attnreg.backends.fa4 import package as fa4_package
from attnreg.core import launching
from attnreg.core.launching.offsets import find_unused
from attnreg.core.torchlib.layout import aligned
from attnreg.tools.measure import QUICK, measure
from attnreg.tools.measure.inputs import inputs

# Values


@pytest.mark.parametrize("cases", FEWER_OR_ALL)
def test_every_case_that_it_takes_is_right(kernels, package, cases):
    ran = {}
    for case in cases:
        if directions := offered(case):
            runnable = kernels if "backward" in directions else kernels._replace(backward=None)
            ran[case.name] = measure(runnable, case)
    wrong = [
        f"{name}: {errors}" for name, errors in ran.items() if not all(e.passed for e in errors.values())
    ]
    assert not wrong, "\n".join(wrong)
    backwards = {name for name, errors in ran.items() if "dq" in errors}
    assert ran.keys() - backwards >= {"pages", "pages of NaN", "dims 64 and 32", "dims 192 and 128"}
    assert backwards >= {
        *("packed tail", "packed tail of NaN", "packed seqused_k", "seqused_k", "heads 6:3", "no batch"),
        *("packed key_ranges 1", "packed key_ranges 3, window"),
        *("window (0, 0)", "window (-1, 4)", "window (0, -1)", "packed window (8, 2)", "no keys", "dim 256"),
    }
    # A release is refused for want of what a call passes, and of nothing else.
    for_tested = {fa4_package.SINKS, "mask_mod", "aux_tensors", "block_sparse_tensors"}
    listed = {name: {*names, *for_tested} for name, names in fa4_package.KEYWORDS.items()}
    listed["_flash_attn_fwd"].add("pack_gqa")
    assert package.keywords == listed


@pytest.mark.parametrize(("extra", "extra_backward"), [(0, 0), (2, 0), (3, 1)])
def test_results_beyond_the_first_ones_are_ignored(install, extra, extra_backward):
    package = install(Package(extra, extra_backward))
    tensors = dense(heads=4, heads_k=2)
    assert entered(BACKEND.load(), package, *tensors, call_of(*tensors[:2], window=(-1, 0))) == BOTH


def test_rows_past_the_last_offset_are_zero_in_the_results_and_unchanged_in_the_inputs(kernels):
    query, key, value, grad = (x[0] for x in dense(40, 40))
    offsets = torch.tensor([0, 13, 13, 30], dtype=torch.int32)
    for tensor in (query, key, value, grad):
        tensor[30:] = torch.nan
    before = [x.clone() for x in (query, key, value, grad)]
    call = Call(0.25, 17, 17, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    out, lse, *grads = both(kernels, query, key, value, grad, call)
    expected, _ = true_varlen(query, key, value, offsets, offsets, scale=0.25)
    torch.testing.assert_close(out.double(), expected.nan_to_num(), rtol=0.01, atol=0.01)
    assert (out[30:] == 0).all()
    assert (lse[:, 30:] == -torch.inf).all()
    assert lse[:, :30].isfinite().all()
    assert all((x[30:] == 0).all() and x.isfinite().all() and x[:30].any() for x in grads)
    for tensor, was in zip((query, key, value, grad), before, strict=True):
        torch.testing.assert_close(tensor, was, rtol=0, atol=0, equal_nan=True)


def assert_passed_as_they_are(package, query, key, value, grad):
    """Hold a forward and a backward to have copied no tensor and filled no result."""
    (_, forward), (_, backward) = package.calls
    for given in (forward, backward):
        assert all(given[name] is x for name, x in (("q", query), ("k", key), ("v", value)))
    assert backward["dout"] is grad
    assert [forward[name] for name in ("out", "lse")] == [None] * 2
    assert [backward[name] for name in ("dq", "dk", "dv")] == [None] * 3


def test_a_dense_call_copies_and_fills_nothing(package, kernels):
    tensors = dense()
    both(kernels, *tensors, call_of(*tensors[:2]))
    assert_passed_as_they_are(package, *tensors)


@pytest.mark.parametrize(
    ("lengths", "used", "unseen"),
    [
        ([3, 0, 2], None, [5, 6]),
        ([3, 0, 2], [1, 0, 2], [1, 2, 5, 6]),
        ([0, 0, 5], [0, 0, 0], [0, 1, 2, 3, 4, 5, 6]),
        ([7], [7], []),
        ([], None, [0, 1, 2, 3, 4, 5, 6]),
        ([], [], [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_rows_that_no_sequence_counts_are_found(lengths, used, unseen):
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    used = None if used is None else torch.tensor(used, dtype=torch.int32)
    call = Call(1.0, 7, 7, cu_seqlens_q=offsets, cu_seqlens_k=offsets, seqused_k=used)
    keys = torch.ones(7, 1, 8)
    queries, unseen_keys = find_unused(keys, keys, call)
    assert unseen_keys.nonzero().flatten().tolist() == unseen
    assert queries.nonzero().flatten().tolist() == list(range(sum(lengths), 7))
    (blanked,) = adapter._blanked(unseen_keys, torch.zeros(3), keys)
    assert blanked.sum(0).sum() == 8 * (7 - len(unseen))


def test_layers_that_share_their_offsets_share_what_is_derived_from_them():
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    call = Call(1.0, 4, 4, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    rows = torch.ones(5, 1, 8)
    first = find_unused(rows, rows, call)
    assert find_unused(rows.clone(), rows, call._replace(window=(-1, 0))) is first
    assert len(find_unused(rows, torch.ones(6, 1, 8), call)[1]) == 6
    offsets[1] = 3
    assert find_unused(rows, rows, call)[0].tolist() == [False] * 3 + [True] * 2


def test_a_batch_without_unused_rows_is_neither_copied_nor_filled(package, kernels, monkeypatch):
    *tensors, call = packed((13, 27))
    careful = both(kernels, *tensors, call)
    package.calls.clear()
    queried = []
    known = types.SimpleNamespace(no_unused_rows=True)
    monkeypatch.setattr(launching.offsets, "facts", lambda *arguments: queried.append(arguments) or known)
    assert all(map(torch.equal, both(kernels, *tensors, call), careful))
    assert queried == [(call, 40, 40, 0)] * 2
    assert_passed_as_they_are(package, *tensors)


# What the package is called with


@pytest.mark.each_value("copies_itself", "layout")
@pytest.mark.parametrize("layout", ["last dim strided", "offset", "odd rows", "fused qkv", "one key head"])
@pytest.mark.parametrize("copies_itself", [True, False])
def test_a_release_that_takes_aligned_tensors_only_gets_such(install, layout, copies_itself):
    package = install() if copies_itself else install(maybe_contiguous=lambda x: x)
    kernels = BACKEND.load()
    case = next(case for case in QUICK if str(case) == f"layout {layout} bfloat16")
    assert all(error.passed for error in measure(kernels, case).values())
    query, key, value, grad, call = inputs(case)
    out, lse = kernels.forward(query, key, value, call)
    unaligned = torch.cat((out.new_zeros(1), out.flatten()))[1:].view(out.shape)
    kernels.backward(grad, query, key, value, unaligned, lse, call)
    given = {(direction, name): given[name] for direction, given in package.calls for name in ("q", "k", "v")}
    given["backward", "out"] = package.calls[-1][1]["out"]
    if copies_itself:
        assert given["backward", "out"] is unaligned
        assert given["forward", "q"] is query
    else:
        assert all(map(aligned, given.values()))
        assert torch.equal(given["backward", "out"], out)
        # What needs no copy isn't copied.
        kept = layout in ("fused qkv", "one key head")
        assert (given["forward", "v"] is value) is kept


@pytest.mark.parametrize(
    ("window", "causal", "left", "right"),
    [
        ((-1, -1), False, None, None),
        ((-1, 0), True, None, None),
        ((-1, 64), False, None, 64),
        ((64, -1), False, 64, None),
        ((64, 0), False, 64, 0),
        ((0, 0), False, 0, 0),
        ((0, -1), False, 0, None),
        ((8, 2), False, 8, 2),
    ],
)
def test_an_open_side_of_a_window_is_none_and_the_rest_is_passed_on(
    package, kernels, window, causal, left, right
):
    query, key, value, grad = dense(33, 65)
    used, deterministic = torch.tensor([65, 2], dtype=torch.int32), not causal
    options = {"seqused_k": used, "deterministic": deterministic, "num_splits": 1, "window": window}
    out, lse, *_ = both(kernels, query, key, value, grad, call_of(query, key, 0.125, **options))
    (_, forward), (_, backward) = package.calls
    for given in (forward, backward):
        assert given["causal"] is causal
        assert (given["window_size_left"], given["window_size_right"]) == (left, right)
        assert given["softmax_scale"] == 0.125
        assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (33, 65)
        assert given["seqused_k"] is used
    # None is off in the forward and crashes the backward, where 0.0 is off.
    assert (forward["softcap"], backward["softcap"]) == (None, 0.0)
    assert (forward["num_splits"], forward["return_lse"]) == (1, True)
    assert backward["deterministic"] is deterministic
    assert all(backward[name] is x for name, x in (("out", out), ("lse", lse), ("dout", grad)))


def test_strided_integers_are_copied(package, kernels):
    query, key, value, grad = (x[0] for x in dense(32, 32))
    strided = torch.tensor([[0, 9], [20, 9], [32, 9]], dtype=torch.int32)[:, 0]
    used = torch.tensor([[7, 9], [12, 9]], dtype=torch.int32)[:, 0]
    call = Call(0.25, 20, 20, cu_seqlens_q=strided, cu_seqlens_k=strided, seqused_k=used)
    got = both(kernels, query, key, value, grad, call)
    closed = {
        name: getattr(call, name).contiguous() for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
    }
    assert all(map(torch.equal, got, both(kernels, query, key, value, grad, call._replace(**closed))))
    pages, wide = key.unflatten(0, (4, 8)), torch.tensor([[3, 1]], dtype=torch.int32)
    one, table = torch.tensor([0, 32], dtype=torch.int32), wide.as_strided((1, 1), (1, 2))
    paged = Call(0.25, 32, 8, cu_seqlens_q=one, seqused_k=wide.as_strided((1,), (2,), 1), block_table=table)
    out, _ = kernels.forward(query, pages, pages, paged)
    expected, _ = true_varlen(query, pages[3], pages[3], one, torch.tensor([0, 1]), scale=0.25)
    torch.testing.assert_close(out.double(), expected, rtol=0.01, atol=0.01)
    for _, given in package.calls:
        for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table"):
            assert given.get(name) is None or given[name].stride(-1) == 1


@pytest.mark.parametrize(
    ("lengths", "batch"),
    [((0, 33), 2), ((33, 0), 2), ((33, 33), 0)],
    ids=["no queries", "no keys", "no batch"],
)
@pytest.mark.parametrize("varlen", [False, True])
def test_where_there_is_nothing_to_do_nothing_is_launched(package, kernels, lengths, batch, varlen):
    query, key, value, grad = dense(*lengths, batch=batch, dim_v=24)
    call = call_of(query, key)
    if varlen:
        query, key, value, grad = (x.flatten(0, 1) for x in (query, key, value, grad))
        offsets = [torch.arange(batch + 1, dtype=torch.int32) * n for n in lengths]
        call = call._replace(cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])
    out, lse, *grads = both(kernels, query, key, value, grad, call)
    assert package.calls == []
    assert (lse.dtype, lse.shape) == (torch.float32, (4, len(query)) if varlen else (batch, 4, lengths[0]))
    assert (lse == -torch.inf).all()
    assert [x.shape for x in (out, *grads)] == [x.shape for x in (grad, query, key, value)]
    assert not any(x.any() for x in (out, *grads))


def test_calls_run_on_the_device_of_their_tensors(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    assert isinstance(adapter._current(torch.device("cpu")), contextlib.nullcontext)
    assert isinstance(adapter._current(torch.device("cuda:1")), contextlib.nullcontext)
    other = adapter._current(torch.device("cuda:0"))
    assert isinstance(other, torch.cuda.device)
    assert other.idx == 0


# Threads and compilation


def run_in_threads(kernels, package):
    """Run a forward and a backward in two threads that wait for each other inside, if they can."""
    query, key, value, grad, call = dense_call()
    out, lse = kernels.forward(query, key, value, call)
    barrier = threading.Barrier(2)

    def pause():
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait(0.2)

    package.pause = pause
    with ThreadPoolExecutor() as pool:
        pool.submit(kernels.forward, query, key, value, call)
        pool.submit(kernels.backward, grad, query, key, value, out, lse, call)
    assert [name for name, _ in package.calls].count("backward") == 1
    return package.most_inside


def test_no_two_threads_are_inside_the_package_at_once_forward_or_backward(package, kernels):
    assert run_in_threads(kernels, package) == 1


def test_without_the_lock_two_threads_are_inside_the_package_at_once(package, kernels, monkeypatch):
    monkeypatch.setattr(adapter, "_compile_lock", contextlib.nullcontext())
    assert run_in_threads(kernels, package) == 2


NOTE = "flash-attn-4 4.0.0b36 has loaded, but its first forward of this kind failed"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("CUDA error: misaligned")])
def test_an_error_of_the_device_is_raised_as_it_is_with_a_note_on_what_was_tried(package, kernels, error):
    query, key, value, _ = dense()
    package.fails = error
    for _ in range(2):  # a kind that failed has not run
        with pytest.raises(type(error)) as caught:
            kernels.forward(query, key, value, call_of(query, key))
        assert caught.value is error
    assert set(error.__notes__) == {NOTE}


@pytest.mark.parametrize("error", [RuntimeError("ptxas"), AssertionError("head dim")])
def test_what_fails_while_a_kind_is_compiled_is_a_kernel_that_cannot_be_had(package, kernels, error):
    query, key, value, _ = dense()
    package.fails = error
    with pytest.raises(BackendUnavailableError) as caught:
        kernels.forward(query, key, value, call_of(query, key))
    assert str(caught.value) == f"{NOTE}: {type(error).__name__}: {error}"
    assert caught.value.__cause__ is error
    package.fails = None
    kernels.forward(query, key, value, call_of(query, key))
    package.fails = type(error)("later")  # maybe of a launch
    with pytest.raises(type(error), match="later"):
        kernels.forward(query, key, value, call_of(query, key))

"""Promises of the FA4 backend: what the package is called with, and what is made of its results.

A fake package stands in for flash-attn-4 (`fake_fa4`), so that values can be held to float64.
"""

import contextlib
import inspect
import logging
import os
import sys
import threading
import types
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from support import fake_fa4
from support.fake_fa4 import Package, both, call_of, dense, forget
from support.truth import attention as true_attention
from support.truth import varlen as true_varlen

from attnreg import AttentionSpec, BackendUnavailableError, Call, Device, UnsupportedInputError
from attnreg.backends import fa4
from attnreg.backends.fa4 import kinds as fa4_kinds
from attnreg.backends.fa4 import package as fa4_package
from attnreg.backends.fa4 import rows as fa4_rows
from attnreg.contract.discovery import Entry
from attnreg.measure import QUICK, measure
from attnreg.measure.inputs import inputs
from attnreg.torchlib.layout import aligned

BACKEND = fa4.BACKEND
SWITCH, FOLDER = fa4_package.SWITCH, fa4_package.FOLDER


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    forget(monkeypatch)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Give the compile cache a folder of the test's own, and unset what would govern it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (SWITCH, FOLDER):
        monkeypatch.setenv(name, "")  # so that what loading sets is taken back
        monkeypatch.delenv(name)
    return tmp_path / "cache" / "attnreg" / "fa4"


@pytest.fixture
def install(monkeypatch, cache):
    """Put a fake package in place of flash-attn-4 and return it."""

    def put(package=None, version="4.0.0b36", **replaced):
        package = package or Package()
        fake_fa4.install(monkeypatch, package, version, **replaced)
        return package

    return put


@pytest.fixture
def package(install):
    return install()


@pytest.fixture
def kernels(package):
    return BACKEND.load()


def spec(**asked):
    usual = {"device": Device("cuda", (9, 0)), "dtype": "bfloat16", "batch": 2, "max_q": 64, "max_k": 64}
    return AttentionSpec(**usual | {"heads_q": 4, "heads_k": 4, "head_dim": 64, "head_dim_v": 64} | asked)


def reasons(direction, **asked):
    return Entry("FA4", "a test", BACKEND).reasons(spec(**asked), direction)


@pytest.fixture
def here(monkeypatch):
    """Have the backend available, whatever this machine has."""
    monkeypatch.setattr(Entry, "unavailable", lambda entry: "")
    monkeypatch.setattr(fa4_package, "version", lambda name: "4.0.0b36")


# Values


def offered(case):
    """Return what the backend's own limits leave of a case: nothing, the forward, or both."""
    asked = case.spec(Device("cuda", (9, 0)))
    if BACKEND.forward.unsupported(asked) or BACKEND.refuses(asked):
        return ()
    return ("forward",) if BACKEND.backward.unsupported(asked) else ("forward", "backward")


def test_every_case_that_it_takes_is_right(kernels, package):
    ran = {}
    for case in QUICK:
        directions = offered(case)
        # The stand-in computes in float64; long cases show nothing that short ones don't.
        if case.dtype == "bfloat16" and directions and (case.max_k < 300 or case.page_size):
            runnable = kernels if "backward" in directions else kernels._replace(backward=None)
            ran[case.name] = measure(runnable, case)
    wrong = [
        f"{name}: {errors}" for name, errors in ran.items() if not all(e.passed for e in errors.values())
    ]
    assert not wrong, "\n".join(wrong)
    backwards = {name for name, errors in ran.items() if "dq" in errors}
    assert ran.keys() - backwards >= {"pages", "pages of NaN", "dims 64 and 32", "dims 192 and 128"}
    assert backwards >= {
        *("varlen tail", "varlen tail of NaN", "varlen seqused_k", "seqused_k", "heads 6:3", "no batch"),
        *("window (0, 0)", "window (-1, 4)", "window (0, -1)", "varlen window (8, 2)", "no keys", "dim 256"),
    }
    # A release is refused for want of what a call passes, and of nothing else.
    assert package.keywords == {name: set(listed) for name, listed in fa4_package.TAKEN.items()}


@pytest.mark.parametrize(("extra", "extra_backward"), [(0, 0), (2, 0), (3, 1)])
def test_however_many_values_come_back_the_first_ones_count(install, extra, extra_backward):
    install(Package(extra, extra_backward))
    query, key, value, grad = dense(heads=4, heads_k=2)
    call = call_of(query, key, window=(-1, 0))
    out, lse, *grads = both(BACKEND.load(), query, key, value, grad, call)
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    for index in range(2):
        part, part_lse = true_attention(*(x[index] for x in leaves), window=(-1, 0), scale=0.25)
        torch.testing.assert_close(out[index].double(), part, rtol=0.01, atol=0.01)
        torch.testing.assert_close(lse[index].double(), part_lse, rtol=1e-5, atol=1e-5)
        part.backward(grad[index].double())
    for got, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(got.double(), leaf.grad, rtol=0.02, atol=0.03)


def test_rows_past_the_last_offset_are_empty_and_what_stands_in_them_is_left_alone(kernels):
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


def test_a_dense_call_copies_and_fills_nothing(package, kernels):
    query, key, value, grad = dense()
    both(kernels, query, key, value, grad, call_of(query, key))
    (_, forward), (_, backward) = package.calls
    assert all(forward[name] is x for name, x in (("q", query), ("k", key), ("v", value)))
    assert forward["out"] is None
    assert forward["lse"] is None
    assert all(backward[name] is x for name, x in (("q", query), ("k", key), ("v", value), ("dout", grad)))
    assert [backward[name] for name in ("dq", "dk", "dv")] == [None] * 3


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
def test_the_keys_that_no_query_may_see_are_found(lengths, used, unseen):
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    used = None if used is None else torch.tensor(used, dtype=torch.int32)
    call = Call(1.0, 7, 7, cu_seqlens_q=offsets, cu_seqlens_k=offsets, seqused_k=used)
    keys = torch.ones(7, 1, 8)
    queries, unseen_keys = fa4_rows.unseen(keys, keys, call)
    assert unseen_keys.nonzero().flatten().tolist() == unseen
    assert queries.nonzero().flatten().tolist() == list(range(sum(lengths), 7))
    (blanked,) = fa4_rows.blank(unseen_keys, torch.zeros(3), keys)
    assert blanked.sum(0).sum() == 8 * (7 - len(unseen))


def test_layers_that_share_their_offsets_share_what_is_derived_from_them():
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    call = Call(1.0, 4, 4, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    rows = torch.ones(5, 1, 8)
    first = fa4_rows.unseen(rows, rows, call)
    assert fa4_rows.unseen(rows.clone(), rows, call._replace(window=(-1, 0))) is first
    assert len(fa4_rows.unseen(rows, torch.ones(6, 1, 8), call)[1]) == 6
    offsets[1] = 3
    assert fa4_rows.unseen(rows, rows, call)[0].tolist() == [False] * 3 + [True] * 2


def test_a_batch_that_is_known_to_be_whole_is_neither_copied_nor_filled(package, kernels, monkeypatch):
    query, key, value, grad = (x[0] for x in dense(40, 40))
    offsets = torch.tensor([0, 13, 40], dtype=torch.int32)
    call = Call(0.25, 27, 27, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    careful = both(kernels, query, key, value, grad, call)
    asked = []

    def facts(*arguments):
        asked.append(arguments)
        return types.SimpleNamespace(no_unused_rows=True)

    monkeypatch.setattr(fa4_rows, "facts", facts)
    package.calls.clear()
    assert all(map(torch.equal, both(kernels, query, key, value, grad, call), careful))
    assert asked == [(call, 40, 40, 0)] * 2
    (_, forward), (_, backward) = package.calls
    assert (forward["out"], forward["lse"], forward["v"] is value) == (None, None, True)
    assert [backward[name] for name in ("dq", "dk", "dv")] == [None] * 3
    assert all(backward[name] is x for name, x in (("q", query), ("k", key), ("v", value), ("dout", grad)))


# What the package is called with


@pytest.mark.parametrize("layout", ["last dim strided", "offset", "odd rows", "packed", "one key head"])
@pytest.mark.parametrize("copies_itself", [True, False])
def test_a_release_that_takes_aligned_tensors_only_gets_such(install, layout, copies_itself):
    package = install() if copies_itself else install(maybe_contiguous=lambda x: x)
    kernels = BACKEND.load()
    case = next(case for case in QUICK if str(case) == f"layout {layout} bfloat16")
    assert all(error.passed for error in measure(kernels, case).values())
    query, key, value, grad, call = inputs(case)
    out, lse = kernels.forward(query, key, value, call)
    apart = torch.cat((out.new_zeros(1), out.flatten()))[1:].view(out.shape)
    kernels.backward(grad, query, key, value, apart, lse, call)
    given = {(direction, name): given[name] for direction, given in package.calls for name in ("q", "k", "v")}
    given["backward", "out"] = package.calls[-1][1]["out"]
    if copies_itself:
        assert given["backward", "out"] is apart
        assert given["forward", "q"] is query
    else:
        assert all(map(aligned, given.values()))
        assert torch.equal(given["backward", "out"], out)
        # What needs no copy isn't copied.
        kept = layout in ("packed", "one key head")
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
def test_an_open_side_of_a_window_is_none(package, kernels, window, causal, left, right):
    query, key, value, grad = dense()
    both(kernels, query, key, value, grad, call_of(query, key, window=window))
    for _, given in package.calls:
        assert given["causal"] is causal
        assert (given["window_size_left"], given["window_size_right"]) == (left, right)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_rest_is_passed_on_by_keyword(package, kernels, deterministic):
    query, key, value, grad = dense(33, 65)
    used = torch.tensor([65, 2], dtype=torch.int32)
    call = call_of(query, key, 0.125, seqused_k=used, deterministic=deterministic, num_splits=1)
    out, lse, *_ = both(kernels, query, key, value, grad, call)
    (_, forward), (_, backward) = package.calls
    for given in (forward, backward):
        assert given["softmax_scale"] == 0.125
        assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (33, 65)
        assert given["seqused_k"] is used
    # None is off in the forward and crashes the backward, where 0.0 is off.
    assert (forward["softcap"], backward["softcap"]) == (None, 0.0)
    assert (forward["num_splits"], forward["return_lse"]) == (1, True)
    assert backward["deterministic"] is deterministic
    assert backward["out"] is out
    assert backward["lse"] is lse
    assert backward["dout"] is grad


def test_integers_with_gaps_between_them_are_closed_up(package, kernels):
    query, key, value, grad = (x[0] for x in dense(32, 32))
    apart = torch.tensor([[0, 9], [20, 9], [32, 9]], dtype=torch.int32)[:, 0]
    used = torch.tensor([[7, 9], [12, 9]], dtype=torch.int32)[:, 0]
    call = Call(0.25, 20, 20, cu_seqlens_q=apart, cu_seqlens_k=apart, seqused_k=used)
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
    assert out.shape == grad.shape
    assert lse.shape == ((4, query.shape[0]) if varlen else (batch, 4, lengths[0]))
    assert lse.dtype == torch.float32
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert [x.shape for x in grads] == [x.shape for x in (query, key, value)]
    assert not any(x.any() for x in grads)


def test_calls_run_on_the_device_of_their_tensors(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    assert isinstance(fa4._current(torch.device("cpu")), contextlib.nullcontext)
    assert isinstance(fa4._current(torch.device("cuda:1")), contextlib.nullcontext)
    other = fa4._current(torch.device("cuda:0"))
    assert isinstance(other, torch.cuda.device)
    assert other.idx == 0


# Threads and compilation


def run_in_threads(kernels, package):
    """Run a forward and a backward in two threads that wait for each other inside, if they can."""
    query, key, value, grad = dense()
    call = call_of(query, key)
    out, lse = kernels.forward(query, key, value, call)
    meet = threading.Barrier(2)

    def pause():
        with contextlib.suppress(threading.BrokenBarrierError):
            meet.wait(0.2)

    package.pause = pause
    threads = [
        threading.Thread(target=kernels.forward, args=(query, key, value, call)),
        threading.Thread(target=kernels.backward, args=(grad, query, key, value, out, lse, call)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [name for name, _ in package.calls].count("backward") == 1
    return package.most_inside


def test_no_two_threads_are_inside_the_package_at_once_forward_or_backward(package, kernels):
    assert run_in_threads(kernels, package) == 1


def test_without_the_lock_two_threads_would_be(package, kernels, monkeypatch):
    monkeypatch.setattr(fa4, "_compiling", contextlib.nullcontext())
    assert run_in_threads(kernels, package) == 2


def test_a_kind_that_has_not_run_is_refused_in_a_cuda_graph_each_direction_for_itself(kernels, here):
    query, key, value, grad = dense(64, 64, dim=64)
    cold = ("this kind of call has to run once before it can be recorded in a CUDA graph",)
    asked = {"capturing": True}
    assert (reasons("forward"), reasons("forward", **asked), reasons("backward", **asked)) == ((), cold, cold)
    out, lse = kernels.forward(query, key, value, call_of(query, key))
    assert (reasons("forward", **asked), reasons("backward", **asked)) == ((), cold)
    kernels.backward(grad, query, key, value, out, lse, call_of(query, key))
    assert (reasons("forward", **asked), reasons("backward", **asked)) == ((), ())
    for other in (
        *({"dtype": "float16"}, {"head_dim": 72}, {"head_dim_v": 128}, {"heads_k": 2}, {"varlen": True}),
        *({"window": (-1, 0)}, {"window": (8, -1)}, {"window": (8, 8)}, {"seqused_k": True}, {"max_k": 65}),
        {"device": Device("cuda", (9, 0), index=1)},
    ):
        assert reasons("forward", **asked, **other) == cold, other
    assert reasons("forward", **asked, max_q=50, max_k=60, heads_q=12, heads_k=12, batch=7) == ()
    assert reasons("forward", **asked, deterministic=True) == ()
    assert reasons("backward", **asked, deterministic=True) == cold
    simulated = Device("cuda", (9, 0), simulated=True)
    assert reasons("forward", **asked, device=simulated, dtype="float16") == ()


def test_a_kind_that_slips_through_is_an_error_in_a_cuda_graph_and_not_compiled(
    package, kernels, monkeypatch
):
    query, key, value, grad = dense()
    kernels.forward(query, key, value, call_of(query, key))
    monkeypatch.setattr(fa4, "_capturing", lambda tensor: True)
    out, lse = kernels.forward(query, key, value, call_of(query, key))
    repeated = key[:, :, :1].expand(key.shape)
    for run, direction in (
        (lambda: kernels.forward(query, repeated, value, call_of(query, key)), "forward"),
        (lambda: kernels.backward(grad, query, key, value, out, lse, call_of(query, key)), "backward"),
    ):
        with pytest.raises(UnsupportedInputError) as error:
            run()
        assert str(error.value) == (
            f"FA4 has to run this kind of {direction} once before it can be recorded in a CUDA graph"
        )
    assert [name for name, _ in package.calls] == ["forward", "forward"]


def test_a_spec_and_its_tensors_are_of_one_kind():
    for case in QUICK:
        if case.dtype == "bfloat16" and offered(case):
            query, key, value, _, call = inputs(case)
            for direction in ("forward", "backward"):
                by_spec = fa4_kinds.kind_of_spec(direction, case.spec(Device("cuda", (9, 0))))
                assert by_spec == fa4_kinds.kind_of(direction, query, key, value, call), case


def test_lengths_make_a_bounded_number_of_kinds():
    lengths = (1, 16, 17, 48, 80, 192, 193, 256, 257, 258, 4096, 10**6)
    kinds = [fa4_kinds.kind_of_spec("forward", spec(max_q=n, max_k=n)) for n in lengths]
    assert [kinds.index(kind) for kind in kinds] == [0, 0, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8]


@pytest.mark.parametrize("error", [RuntimeError("ptxas"), torch.OutOfMemoryError("full"), AssertionError()])
def test_an_error_is_the_packages_own_with_a_word_on_what_was_tried(package, kernels, error):
    query, key, value, _ = dense()
    package.fails = error
    for _ in range(2):  # a failed kind is no known kind
        with pytest.raises(type(error)) as caught:
            kernels.forward(query, key, value, call_of(query, key))
        assert caught.value is error
    assert set(error.__notes__) == {
        "flash-attn-4 4.0.0b36 has loaded, but its first forward of this kind failed"
    }
    package.fails = None
    kernels.forward(query, key, value, call_of(query, key))
    package.fails = type(error)("later")
    with pytest.raises(type(error)) as caught:
        kernels.forward(query, key, value, call_of(query, key))
    assert not hasattr(caught.value, "__notes__")


# Releases that don't fit


@pytest.mark.parametrize("name", ["_flash_attn_fwd", "_flash_attn_bwd"])
def test_a_renamed_keyword_is_told_when_the_package_is_loaded(install, name, here):
    install(version="4.0.0b99", **{name: lambda q, k, v, scale, with_lse: None})
    entry = Entry("FA4", "a test", BACKEND)
    with pytest.raises(BackendUnavailableError) as error:
        entry.kernels()
    told = str(error.value.__cause__)
    missing = ", ".join(
        repr(keyword) for keyword in fa4_package.TAKEN[name] if keyword not in ("q", "k", "v")
    )
    assert told == (f"flash-attn-4 4.0.0b99: {name} takes no {missing}; attnreg knows 4.0.0b19 to 4.0.0b36")


@pytest.mark.parametrize("name", ["_flash_attn_fwd", "_flash_attn_bwd"])
def test_a_parameter_that_it_has_to_be_given_and_attnreg_does_not_know_is_told_then_too(install, name, here):
    package = install(version="4.0.0b99")
    as_known = inspect.signature(getattr(package.module(), name))
    layout = inspect.Parameter("layout", inspect.Parameter.KEYWORD_ONLY)

    def newer(*args, **kwargs):
        raise AssertionError("a call must not be the first to notice")

    newer.__signature__ = as_known.replace(parameters=[*as_known.parameters.values(), layout])
    install(version="4.0.0b99", **{name: newer})
    with pytest.raises(BackendUnavailableError) as error:
        Entry("FA4", "a test", BACKEND).kernels()
    assert str(error.value.__cause__) == (
        f"flash-attn-4 4.0.0b99: {name} needs 'layout', which attnreg doesn't know; it knows "
        "4.0.0b19 to 4.0.0b36"
    )


def test_a_function_that_is_gone_is_told_when_the_package_is_loaded(install):
    package = install(version="5.0")
    module = package.module()
    del module._flash_attn_bwd
    sys.modules["flash_attn.cute.interface"] = module
    with pytest.raises(BackendUnavailableError) as error:
        BACKEND.load()
    assert str(error.value) == (
        "flash-attn-4 5.0: there is no _flash_attn_bwd; attnreg knows 4.0.0b19 to 4.0.0b36"
    )


@pytest.mark.parametrize(
    ("results", "got"),
    [
        (torch.ones(1), "Tensor"),
        ((torch.ones(1),), "Tensor"),
        ((), "nothing"),
        (None, "NoneType"),
        ([torch.ones(1), torch.ones(1)], "list"),
        ((torch.ones(1), None, torch.ones(1)), "Tensor, NoneType, Tensor"),
    ],
)
def test_results_of_another_form_are_told_with_package_and_version(install, results, got):
    package = Package()
    function, *_ = package.functions()

    def other(**given):
        return results

    other.__signature__ = inspect.signature(function)
    install(package, version="4.1", _flash_attn_fwd=other)
    query, key, value, _ = dense()
    with pytest.raises(BackendUnavailableError) as error:
        BACKEND.load().forward(query, key, value, call_of(query, key))
    assert str(error.value) == (
        f"flash-attn-4 4.1: _flash_attn_fwd returned {got}, expected 2 tensors or more; "
        "attnreg knows 4.0.0b19 to 4.0.0b36"
    )


# The compile cache


def settings():
    return os.environ.get(SWITCH), os.environ.get(FOLDER)


def test_what_is_compiled_is_kept_in_the_users_cache_folder(package, cache):
    BACKEND.load()
    assert settings() == ("1", str(cache))
    assert cache.is_dir()
    assert list(cache.iterdir()) == []
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("base", ["", "not/absolute"])
def test_without_a_cache_folder_of_the_user_it_is_the_one_in_the_home(package, monkeypatch, tmp_path, base):
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    monkeypatch.setenv("HOME", str(tmp_path))
    BACKEND.load()
    assert settings() == ("1", str(tmp_path / ".cache" / "attnreg" / "fa4"))


@pytest.mark.parametrize("switch", ["0", "off"])
def test_a_user_who_has_settled_it_is_left_alone(package, monkeypatch, cache, switch):
    monkeypatch.setenv(SWITCH, switch)
    BACKEND.load()
    assert settings() == (switch, None)
    assert not cache.exists()


def test_a_folder_of_the_users_is_taken(package, monkeypatch, cache, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path / "mine"))
    BACKEND.load()
    assert settings() == ("1", str(tmp_path / "mine"))
    assert not cache.exists()


def test_a_folder_that_cannot_be_written_costs_a_warning_and_nothing_else(package, cache, caplog):
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file where the folder should be")
    query, key, value, _ = dense()
    with caplog.at_level(logging.WARNING, "attnreg"):
        kernels = BACKEND.load()
        kernels.forward(query, key, value, call_of(query, key))
    assert settings() == (None, None)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "FA4 compiles anew in each process: its cache folder can't be used: "
    )


def test_a_folder_without_locks_is_not_taken(package, cache, monkeypatch, caplog):
    def refuse(file, how):
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    BACKEND.load()
    assert settings() == (None, None)
    assert "no locks here" in caplog.text


# What is missing


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Describe a machine: what is installed, and its GPUs; without arguments it has all that is needed."""

    def describe(version="4.0.0b36", cute=True, cutlass=True, gpus=((9, 0),)):
        def of(name):
            if version is None:
                raise PackageNotFoundError(name)
            return version

        def spec_of_module(name):
            if name == "cutlass" and cutlass is None:
                raise ValueError("cutlass.__spec__ is None")
            if name == "cutlass" and not cutlass:
                return None
            found = ModuleSpec(name, None, is_package=True)
            found.submodule_search_locations = [str(tmp_path / "elsewhere"), str(tmp_path)]
            return found

        (tmp_path / "cute").mkdir()
        if cute:
            (tmp_path / "cute" / "cache_utils.py").touch()
        monkeypatch.setattr(fa4_package, "version", of)
        monkeypatch.setattr(fa4_package, "find_spec", spec_of_module)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))

    return describe


NO_CUTLASS = "flash-attn-4 4.0.0b36 needs nvidia-cutlass-dsl, and there is no module cutlass"


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ({}, None),
        ({"version": None}, "flash-attn-4 isn't installed"),
        (
            {"cute": False},
            "flash-attn-4 4.0.0b36 lacks flash_attn/cute/cache_utils.py, as when flash-attn is installed "
            "over it or removed beside it; reinstall it with: "
            "pip install --force-reinstall --no-deps flash-attn-4",
        ),
        ({"cutlass": False}, NO_CUTLASS),
        ({"cutlass": None}, NO_CUTLASS),
        ({"gpus": ()}, "torch finds no CUDA GPU here"),
    ],
)
def test_what_is_missing_is_said_in_a_sentence_and_nothing_is_imported(machine, missing, told):
    machine(**missing)
    before = set(sys.modules)
    assert BACKEND.unavailable() == told
    assert {name.partition(".")[0] for name in set(sys.modules) - before} <= set(sys.stdlib_module_names)


def test_the_version_is_that_of_the_distribution(machine):
    machine(version="4.0.0b36")
    assert BACKEND.version() == "4.0.0b36"


def test_without_the_distribution_there_is_no_version(machine):
    machine(version=None)
    assert BACKEND.version() is None


# What it can't run


@pytest.mark.parametrize(
    ("asked", "forward", "backward"),
    [
        ({}, "", ""),
        ({"num_splits": 1}, "", ""),
        ({"num_splits": 4}, "num_splits must be 1 or None, got 4", ""),
        ({"positive_scale": False}, *["scale must be above 0"] * 2),
        ({"batch": 65536}, *["batch of dense tensors must be at most 65535, got 65536"] * 2),
        ({"batch": 65537, "varlen": True}, "", ""),
        (
            {"heads_q": 65536, "heads_k": 8},
            *["query heads of dense tensors must be at most 65535, got 65536"] * 2,
        ),
        ({"heads_q": 65536, "heads_k": 8, "varlen": True}, "", ""),
        (
            {"device": Device("cuda", (8, 6))},
            *["compute capability must be 9.0 to 12.1, got 8.6 (too old)"] * 2,
        ),
        ({"head_dim": 100}, *["head_dim must be 8 to 256 in steps of 8, got 100"] * 2),
        ({"head_dim": 192, "head_dim_v": 128}, "", ""),
        (
            {"head_dim": 192, "head_dim_v": 128, "heads_k": 2},
            "",
            "head_dim of the value must be the query's where heads are shared, 192, got 128",
        ),
        (
            {"head_dim": 64, "head_dim_v": 32},
            "",
            "head dims that differ must be one of (64, 128), (96, 128), (128, 64), (192, 128), "
            "(256, 128), got (64, 32)",
        ),
        (
            {"device": Device("cuda", (10, 0)), "head_dim": 160, "head_dim_v": 160},
            *["head dims must be up to 128, (192, 128) or (256, 256) on sm_10x and sm_11x, got (160, 160)"]
            * 2,
        ),
        ({"device": Device("cuda", (10, 0)), "head_dim": 256, "head_dim_v": 256}, "", ""),
        (
            {"device": Device("cuda", (12, 0)), "head_dim": 136, "head_dim_v": 136},
            *["head dims must be up to 128 on sm_12x, got (136, 136)"] * 2,
        ),
        (
            {"device": Device("cuda", (12, 0)), "deterministic": True},
            "",
            "not deterministic on sm_12x, and deterministic algorithms are on",
        ),
        ({"deterministic": True}, "", ""),
    ],
)
def test_a_limit_is_told_for_the_direction_that_has_it(here, asked, forward, backward):
    assert reasons("forward", **asked) == ((forward,) if forward else ())
    assert reasons("backward", **asked) == ((backward,) if backward else ())


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"page_size": 16}, ""),
        ({"page_size": 128}, "page size must not be that of a key tile, got 128"),
        (
            {"page_size": 144, "head_dim": 96, "head_dim_v": 96},
            "page size must not be that of a key tile, got 144",
        ),
        ({"page_size": 128, "head_dim": 96, "head_dim_v": 96}, ""),
        (
            {"page_size": 128, "head_dim": 96, "head_dim_v": 96, "window": (-1, 0)},
            "page size must not be that of a key tile, got 128",
        ),
        (
            {"page_size": 96, "head_dim": 192, "head_dim_v": 192, "window": (5, 0)},
            "page size must not be that of a key tile, got 96",
        ),
        (
            {"page_size": 112, "head_dim": 192, "head_dim_v": 192},
            "page size must not be that of a key tile, got 112",
        ),
        (
            {"page_size": 80, "head_dim": 256, "head_dim_v": 256},
            "page size must not be that of a key tile, got 80",
        ),
        (
            {"page_size": 16, "head_dim": 72, "head_dim_v": 72},
            "head dims must be multiples of 16 with pages, got (72, 72)",
        ),
        (
            {"page_size": 16, "device": Device("cuda", (12, 0))},
            "block_table must be None on sm_12x: no paged key-value cache",
        ),
        (
            {"page_size": 128, "device": Device("cuda", (10, 0)), "head_dim": 192, "head_dim_v": 128},
            "page size must not be that of a key tile, got 128",
        ),
    ],
)
def test_pages_are_read_forward_where_nothing_unwritten_is_read_with_them(here, asked, told):
    paged = {"varlen": True, "seqused_k": True, **asked}
    assert reasons("forward", **paged) == ((told,) if told else ())
    assert reasons("backward", **paged)[0] == "block_table must be None: no paged key-value cache"

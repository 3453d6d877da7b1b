"""Promises about trials of FA4's launches: none is used before the package and the device confirm it."""

import logging
import sys
import threading
import types
from collections import UserDict

import pytest
import torch
from support import fake_fa4
from support.fake_fa4 import BOTH, NEITHER, count_tried, dense_call, entered, packed

from attnreg.backends.fa4 import BACKEND, adapter, trials, watching
from attnreg.core.torchlib.readback import PENDING, AsyncReadback

KIND = "bfloat16, head dim 16"
THROUGH = f"FA4 calls the package's Python for each {{}} of {KIND}: "
OTHER_RESULTS = "launched by arguments it gives other results"


@pytest.fixture(autouse=True)
def hopper(on_hopper):
    return


def interface():
    return sys.modules["flash_attn.cute.interface"]


def caches():
    return [x.compile_cache for x in vars(interface()).values() if hasattr(x, "compile_cache")]


@pytest.mark.parametrize("release", ["4.0.0b35", "4.0.0b37", "4.0.0b36.post1", "4.0.0"])
def test_a_release_that_is_not_listed_is_never_tried_and_says_so_once(
    monkeypatch, no_unused_rows, release, caplog
):
    package = fake_fa4.install(monkeypatch, version=release)
    with caplog.at_level(logging.DEBUG, "attnreg"):
        kernels = BACKEND.load()
        tried = count_tried(package)
        assert fake_fa4.entered_by_round(kernels, package, 4) == [BOTH] * 4
        assert [entered(kernels, package, *packed((5, 28))) for _ in range(4)] == [BOTH] * 4
    assert tried == []
    query, key, value, _, call = dense_call()
    assert kernels.specialize("forward", (query, key, value), call) is None
    assert caplog.messages == [
        f"FA4: each call goes through the Python of flash-attn-4 {release}, as launches are written down "
        "only for 4.0.0b36"
    ]


def test_on_other_gpus_than_hopper_each_call_goes_through_the_package(rounds, package, monkeypatch):
    monkeypatch.setattr("attnreg.backends.fa4.compiled_kinds.major_of", lambda device: 10)
    tried = count_tried(package)
    assert rounds(4) == [BOTH] * 4
    assert tried == []


# What refutes


@pytest.mark.parametrize("hidden", ["_bwd_preprocess", "_flash_attn_bwd", "_bwd_postprocess_convert"])
def test_a_launch_past_the_caches_is_found_out_and_such_calls_stay_with_the_package(
    rounds, package, hidden, caplog
):
    package.hidden = {hidden}
    with caplog.at_level(logging.INFO, "attnreg"):
        assert rounds(4) == [BOTH, *[["backward"]] * 3]
    (message,) = caplog.messages
    assert message.startswith(THROUGH.format("backward") + "it launches _")
    package.hidden = set()
    tried = count_tried(package)
    assert rounds(2) == [["backward"]] * 2
    assert tried == []
    assert rounds(2, window=(-1, 0)) == [BOTH, NEITHER]


def with_other(at, change):
    """Return a function that changes one of the arguments."""
    return lambda given: (*given[:at], change(given[at]), *given[at + 1 :])


@pytest.mark.parametrize(
    ("name", "changed", "what"),
    [
        ("_flash_attn_fwd", with_other(5, lambda scale: scale + 1e-9), "[(0.250000001, 0.25)]"),
        (
            "_flash_attn_fwd",
            with_other(0, lambda x: x.clone()),
            "[((3, (2, 33, 4, 16), torch.bfloat16), ",
        ),
        (
            "_flash_attn_bwd",
            with_other(5, lambda x: x.clone()),
            "[((9, (2, 4, 128), torch.float32), ",
        ),
        ("_bwd_postprocess_convert", with_other(2, lambda scale: 2.0), "[(2.0, 0.25)]"),
    ],
    ids=["a number", "another tensor", "another scratch", "another scale"],
)
def test_other_arguments_than_those_written_down_are_found_out(rounds, package, name, changed, what, caplog):
    package.given = lambda by, given: changed(given) if by == name else given
    direction = "forward" if name == "_flash_attn_fwd" else "backward"
    with caplog.at_level(logging.INFO, "attnreg"):
        assert rounds(3) == [BOTH, [direction], [direction]]
    (message,) = caplog.messages
    assert message.startswith(THROUGH.format(direction) + f"{name} is given other arguments: ")
    assert what in message


def test_functions_that_are_compiled_for_a_length_are_found_out(rounds, package, caplog):
    package.compiled_in = lambda name, given: name == "_bwd_preprocess" and given[0].shape[1] % 2
    with caplog.at_level(logging.INFO, "attnreg"):
        assert rounds(3, len_q=34) == [BOTH, ["backward"], ["backward"]]
    assert caplog.messages == [
        THROUGH.format("backward") + "_bwd_preprocess compiles other functions for other lengths"
    ]
    assert len(package.rehearsals) == 2


def test_another_function_for_another_length_is_found_out(rounds, package, caplog):
    package.compiled_in = lambda name, given: name == "_flash_attn_fwd" and given[0].shape[1] % 2
    query, key, value, _, _ = dense_call(len_q=31)
    options = {"softmax_scale": 0.25, "max_seqlen_q": 31, "max_seqlen_k": 33, "return_lse": True}
    interface()._flash_attn_fwd(q=query, k=key, v=value, **options)  # it is compiled by now
    with caplog.at_level(logging.INFO, "attnreg"):
        assert rounds(2, len_q=32) == [BOTH, ["forward"]]
    assert caplog.messages == [
        THROUGH.format("forward") + "for lengths like these it launches _flash_attn_fwd, and not with the "
        "functions that it took"
    ]


def test_what_is_done_to_results_behind_the_launches_is_found_out_by_the_device(rounds, package, caplog):
    def at_end(out):
        if not fake_fa4.rehearsed():
            out.mul_(1 + 2**-4)

    package.at_end = at_end
    query, key, value, _, call = dense_call()
    kernels = rounds.args[0]
    with caplog.at_level(logging.INFO, "attnreg"):
        for _ in range(4):
            package.calls.clear()
            kernels.forward(query, key, value, call)
            assert [name for name, _ in package.calls] == ["forward"]
    assert caplog.messages == [THROUGH.format("forward") + OTHER_RESULTS]
    assert kernels.specialize("forward", (query, key, value), call) is None


def test_a_kernel_that_writes_nothing_is_found_out_although_the_memory_has_the_right_values(monkeypatch):
    right = torch.arange(1, 4.0)
    # As a caching allocator does: memory that is freed is reused, with what was in it.
    monkeypatch.setattr(torch, "empty_strided", lambda *given, **named: right.clone())
    monkeypatch.setattr(torch, "empty_like", lambda x: right.clone())
    assert trials.SPOILT.new((3,), (1,), torch.float32, right.device).isnan().all()
    assert trials.SPOILT.like(right).isnan().all()


# When it is tried


@pytest.mark.parametrize(
    ("error", "later", "messages"),
    [
        # The first and the second call had no memory, the fourth is the next that is tried.
        (torch.OutOfMemoryError("full"), [["backward"]] * 3 + [NEITHER], []),
        (RuntimeError("lost"), [["backward"]] * 4, ["lost"]),
    ],
    ids=["no memory", "a fault"],
)
def test_a_trial_that_fails_leaves_the_call_right_and_is_repeated_only_for_want_of_memory(
    rounds, package, caplog, error, later, messages
):
    def fail(name):
        # The backward's first kernel, at its second launch of a round: the first is the package's.
        if name == "_bwd_preprocess" and name in package.launched:
            raise error

    package.on_launch = fail
    with caplog.at_level(logging.INFO, "attnreg"):
        assert rounds(1) == [BOTH]
        assert rounds(1) == [["backward"]]
        package.on_launch = lambda name: None
        assert rounds(3) == later[1:]
    assert caplog.messages == [THROUGH.format("backward") + why for why in messages]


def test_until_the_device_has_reported_calls_go_through_the_package(rounds, monkeypatch):
    reports = []

    def unreported(verdict):
        assert int(verdict) == trials.CONFIRMED
        reports.append(torch.full((), PENDING, dtype=torch.uint8))
        return AsyncReadback(reports[-1])

    monkeypatch.setattr(trials, "AsyncReadback", unreported)
    assert rounds(3) == [BOTH] * 3
    assert len(reports) == 2
    reports[0].fill_(trials.CONFIRMED)
    assert rounds(1) == [["backward"]]
    reports[1].fill_(trials.REFUTED)
    assert rounds(2) == [["backward"]] * 2


def test_results_that_are_not_finite_show_nothing(kernels, package, rounds):
    query, key, value, _, call = dense_call()
    tried = count_tried(package)
    for _ in range(3):
        out, _ = kernels.forward(query * torch.nan, key, value, call)
        assert out.isnan().all()
    assert (len(package.calls), len(tried)) == (3, 2)
    assert rounds(2) == [BOTH, NEITHER]  # the fourth call is the next that is tried


def test_in_a_graphs_capture_nothing_is_tried_and_what_is_confirmed_is_launched(rounds, monkeypatch, package):
    def captured(count, **options):
        with monkeypatch.context() as patch:
            patch.setattr(adapter, "_capturing", lambda tensor: True)
            return rounds(count, **options)

    with monkeypatch.context() as patch:
        patch.setattr(trials, "_looked_at", lambda *given: (_ for _ in ()).throw(torch.OutOfMemoryError))
        assert rounds(1) == [BOTH]
    tried = count_tried(package)
    assert captured(2) == [BOTH] * 2
    assert tried == []
    assert rounds(2) == [BOTH, NEITHER]
    assert captured(2) == [NEITHER] * 2


def test_a_first_call_that_takes_long_is_logged(kernels, package, monkeypatch, caplog, no_unused_rows):
    monkeypatch.setattr(adapter, "LONG", 0.0)
    with caplog.at_level(logging.INFO, "attnreg"):
        assert entered(kernels, package, *packed((5, 28), window=(-1, 0))) == BOTH
        assert entered(kernels, package, *packed((6, 28), window=(-1, 0))) == NEITHER
    begins = [message.split(" in ")[0] for message in caplog.messages]
    assert begins == ["FA4 compiled a forward", "FA4 compiled a backward"]
    assert all(message.endswith(f" s: {KIND}, packed, causal") for message in caplog.messages)


# The caches


def test_another_threads_launches_are_not_seen_and_run_all_the_same(kernels, package, rounds):
    ran = []

    def elsewhere():
        cache = interface()._bwd_preprocess.compile_cache
        if "elsewhere" not in cache:
            cache["elsewhere"] = lambda tensor: ran.append(tensor)
        cache["elsewhere"](torch.ones(1).mul_(2))

    def pause():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    package.pause = pause
    assert rounds(3) == [BOTH, NEITHER, NEITHER]
    assert len(ran) == 4  # both directions, and their rehearsals


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: lost"), KeyboardInterrupt()])
def test_caches_are_put_back_after_an_exception_and_the_second_call_is_tried(kernels, package, error, rounds):
    before = caches()
    query, key, value, _, call = dense_call()
    replaced = []

    def fail(name):
        replaced.append(not any(x is y for x, y in zip(caches(), before, strict=True)))
        raise error

    package.on_launch = fail
    with pytest.raises(type(error)) as caught:
        kernels.forward(query, key, value, call)
    assert caught.value is error
    assert replaced == [True]
    assert all(x is y for x, y in zip(caches(), before, strict=True))
    package.on_launch = lambda name: None
    assert rounds(2) == [BOTH, NEITHER]
    assert all(x is y for x, y in zip(caches(), before, strict=True))


def test_a_watched_cache_does_whatever_else_the_cache_does():
    cache = UserDict()
    watched = watching._WatchedCache(cache, "a function", types.SimpleNamespace(thread=None))
    watched["key"] = print
    assert cache["key"] is print
    assert watched["key"] is print
    assert "key" in watched
    assert "other" not in watched
    assert watched.data is cache.data
    with pytest.raises(KeyError):
        watched["other"]


# What the device finds


@pytest.mark.parametrize(
    ("got", "expected", "verdict"),
    [
        ([1.0, -2.0], [1.0, -2.0], trials.CONFIRMED),
        ([1.0, -2.0], [1.03, -2.0], trials.CONFIRMED),
        ([1.0, -2.0], [1.05, -2.0], trials.REFUTED),
        ([torch.nan, 1.0], [1.0, 1.0], trials.REFUTED),
        ([1.0, 1.0], [torch.nan, 1.0], trials.INCONCLUSIVE),
        ([torch.nan, 1.0], [torch.nan, 1.0], trials.INCONCLUSIVE),
        ([-torch.inf, 1.0], [-torch.inf, 1.0], trials.CONFIRMED),
        ([1.0, 1.0], [-torch.inf, 1.0], trials.REFUTED),
        ([0.0, 0.0], [0.0, 0.0], trials.CONFIRMED),
        ([1e-6, 0.0], [0.0, 0.0], trials.CONFIRMED),  # rounding, in view of the other result's ones
        ([1e-3, 0.0], [0.0, 0.0], trials.REFUTED),
    ],
)
def test_results_are_equal_as_far_as_a_gpu_repeats_itself(got, expected, verdict):
    ones, got, expected = torch.ones(3, dtype=torch.bfloat16), torch.tensor(got), torch.tensor(expected)
    assert int(trials._verdict([got, ones], [expected, ones])) == verdict
    assert int(trials._verdict([ones, got], [ones, expected])) == verdict


def test_results_in_half_precision_that_overflow_show_nothing():
    large = torch.tensor([torch.inf, 1.0], dtype=torch.float16)
    assert int(trials._verdict([large], [large])) == trials.INCONCLUSIVE

"""Promises of the counters: what really ran, exactly, and every fallback with its reason."""

import contextlib
import dataclasses
import io
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import attnreg
from attnreg.core.dispatch import call_cache, counters
from attnreg.core.dispatch.counters import Bypass, Failure, Fallback, MaskSeen, Stats
from attnreg.core.torchlib import building


@pytest.fixture(autouse=True)
def no_counters(hasty, monkeypatch):
    """Start without the counters of other tests."""
    monkeypatch.setattr(counters, "_calls", {})


def in_threads(function, count=8):
    barrier = threading.Barrier(count)

    def run():
        barrier.wait()
        function()

    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(run) for _ in range(count)]:
            future.result()


def sdpa(dtype=torch.float32, grad=False):
    out = F.scaled_dot_product_attention(
        *torch.randn(3, 1, 2, 4, 8, dtype=dtype, requires_grad=grad).unbind()
    )
    if grad:
        out.sum().backward()


def lines(caplog):
    """Return what was logged about calls: a process also logs once which libraries it has loaded."""
    return [(one.levelname, one.message) for one in caplog.records if one.module != "building"]


# Calls


def test_what_ran_is_counted_by_backend_and_direction(routers, fake, packed):
    sdpa(grad=True)  # by torch itself, as nothing is registered
    assert attnreg.stats() == Stats({}, ())
    with attnreg.register_backend("math"):
        sdpa(grad=True)
        sdpa()
        with attnreg.use_backend("cpu"):
            sdpa()
    with attnreg.register_backend(fake("mine").backend):
        attnreg.varlen_attn(*packed((3, 4))).sum().backward()
    assert attnreg.stats().calls == {
        "math": {"forward": 2, "backward": 1},
        "cpu": {"forward": 1, "backward": 0},
        "mine": {"forward": 1, "backward": 1},
    }


def test_calls_that_ran_without_a_compiled_library_name_the_slow_path_and_its_cost(routers, monkeypatch):
    monkeypatch.setattr(building, "is_loaded", lambda library: False)
    assert attnreg.stats().slow_paths == ()  # nothing ran
    with attnreg.register_backend("math"):
        sdpa()
        (path,) = attnreg.stats().slow_paths
        assert path.startswith(
            "the call cache isn't used (`attnreg info` says why), so Python runs every call: "
        )
        with attnreg.use_backend("cpu"):
            sdpa()
    counted = attnreg.stats()
    assert [line.partition(" isn't used")[0] for line in counted.slow_paths] == [
        "the call cache",
        "the CPU kernel",
    ]
    assert counted.to_dict()["slow_paths"] == list(counted.slow_paths)
    monkeypatch.setattr(building, "is_loaded", lambda library: True)
    assert attnreg.stats().slow_paths == () and attnreg.stats().to_dict()["slow_paths"] == []


def test_eight_threads_that_fall_back_are_counted_exactly_and_logged_once(routers, fake, caplog):
    mine = fake("mine", backward=False)
    with attnreg.register_backend(mine.backend):
        in_threads(lambda: [sdpa(grad=True) for _ in range(20)])
    assert len(mine.forwards) == 160
    assert attnreg.stats() == Stats(
        {"mine": {"forward": 160, "backward": 0}, "cpu": {"forward": 0, "backward": 160}},
        (Fallback("mine", "has no backward", 160),),
    )
    assert len(caplog.records) == 1


def test_eight_threads_that_add_to_one_counter_lose_nothing():
    def add():
        pair = (counters.call_counter("a", "forward"), counters.call_counter("b", "backward"))
        for _ in range(2000):
            counters.count(pair)

    in_threads(add)
    assert attnreg.stats().calls == {
        "a": {"forward": 16000, "backward": 0},
        "b": {"forward": 0, "backward": 16000},
    }


def test_a_kernel_that_fails_has_not_run(routers, fake):
    def fails(*arguments):
        raise RuntimeError("out of memory")

    broken = fake("broken", load=lambda: attnreg.Kernels(fails, fails)).backend
    with attnreg.register_backend(broken), pytest.raises(RuntimeError, match="out of memory"):
        sdpa()
    assert attnreg.stats() == Stats(
        {}, (), (Failure("broken", "forward", "RuntimeError", "out of memory", 1),)
    )


# Fallbacks


def test_a_fallback_is_counted_each_time_and_logged_once_at_warning_if_it_was_asked_for(
    routers, fake, caplog
):
    with (
        caplog.at_level(logging.DEBUG, "attnreg"),
        attnreg.register_backend(fake("mine", dtypes=("float16",)).backend),
    ):
        for _ in range(5):
            sdpa()
        for length in range(1, 4):  # other lengths are other plans, but the same reason
            F.scaled_dot_product_attention(*torch.randn(3, 1, 2, length, 8))
    assert attnreg.stats().fallbacks == (Fallback("mine", "dtype must be float16, got float32", 8),)
    assert lines(caplog) == [
        ("WARNING", "mine can't run this call, cpu runs it: dtype must be float16, got float32")
    ]


def test_a_fallback_logged_at_info_is_logged_at_warning_once_the_backend_is_preferred(fake, packed, caplog):
    attnreg.core.registry.add(fake("first", dtypes=("float16",), priority=1000).backend, "a test")
    with caplog.at_level(logging.DEBUG, "attnreg"):
        for length in (3, 4):  # in the default order
            attnreg.varlen_attn(*packed((length,), grad=False))
        with attnreg.use_backend("first"):
            attnreg.varlen_attn(*packed((3,), grad=False))
            attnreg.varlen_attn(*packed((4,), grad=False))
        attnreg.varlen_attn(*packed((4,), grad=False))
        with attnreg.use_backend("first"):
            attnreg.varlen_attn(*packed((5,), grad=False))
    assert attnreg.stats().fallbacks == (Fallback("first", "dtype must be float16, got float32", 6),)
    assert [level for level, _ in lines(caplog)] == ["INFO", "WARNING"]
    for _, line in lines(caplog):
        assert line.startswith("first can't run this call, ")
        assert line.endswith(" runs it: dtype must be float16, got float32")


def test_a_check_that_fails_is_a_reason_logged_once_and_with_strict_an_error(routers, fake, caplog):
    def fails(spec):
        raise KeyError("max_q")

    reason = "check failed: KeyError: 'max_q'"
    with attnreg.register_backend(fake("mine", refuses=fails).backend):
        for dtype in (torch.float32, torch.float64, torch.float64):
            sdpa(dtype)
        assert attnreg.stats() == Stats(
            {"cpu": {"forward": 3, "backward": 0}}, (Fallback("mine", reason, 3),)
        )
        assert lines(caplog) == [("WARNING", f"mine can't run this call, cpu runs it: {reason}")]
        attnreg.configure({"strict": True})
        with pytest.raises(attnreg.UnsupportedInputError) as error:
            sdpa()
    assert error.value.rejected["mine"] == (reason,)


def test_all_reasons_of_one_backend_are_one_row_and_each_set_of_reasons_a_row_of_its_own(
    routers, fake, caplog
):
    with attnreg.register_backend(fake("mine", dtypes=("float16",), gqa=False).backend):
        query, key = torch.randn(1, 4, 4, 8), torch.randn(1, 2, 4, 8)
        F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
        sdpa()
    assert attnreg.stats().fallbacks == (
        Fallback(
            "mine",
            "dtype must be float16, got float32; "
            "query and key must have the same number of heads, got 4 and 2",
            1,
        ),
        Fallback("mine", "dtype must be float16, got float32", 1),
    )
    assert len(caplog.records) == 2


class Raising(logging.Handler):
    def emit(self, record):
        raise OSError("disk full")


class Closed(logging.StreamHandler):
    """A handler of a closed stream, which reports that to a closed stderr."""

    def __init__(self):
        super().__init__(io.StringIO())
        self.stream.close()

    def emit(self, record):
        with contextlib.redirect_stderr(self.stream):
            super().emit(record)


@pytest.fixture(params=[Raising, Closed])
def failing_handler(request):
    """Have every line that attnreg logs go to a handler that fails."""
    handler, log = request.param(), logging.getLogger("attnreg")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield
    log.removeHandler(handler)


def test_a_logging_handler_that_fails_does_not_stop_attention(failing_handler, routers, fake):
    with attnreg.register_backend(fake("mine", dtypes=("float16",)).backend):
        sdpa()
    assert [row.count for row in attnreg.stats().fallbacks] == [1]


def test_a_logging_handler_that_fails_does_not_stop_attention_without_the_compiled_part(
    failing_handler, packed, monkeypatch
):
    for name, value in (("_module", None), ("_wanted", lambda: "")):
        monkeypatch.setattr(call_cache, name, value)
    monkeypatch.setattr(building, "built", lambda: None)
    call_cache.forget()
    for _ in range(2):
        attnreg.varlen_attn(*packed((3, 4)), backend="math").sum().backward()
    assert attnreg.stats().calls == {"math": {"forward": 2, "backward": 2}}


def test_a_logging_handler_that_fails_does_not_replace_the_error_of_a_kernel(failing_handler, routers, fake):
    def fails(*arguments):
        raise torch.OutOfMemoryError("full")

    broken = fake("broken", load=lambda: attnreg.Kernels(fails, fails)).backend
    with attnreg.register_backend(broken), pytest.raises(torch.OutOfMemoryError, match="full"):
        sdpa()


def test_a_thousand_reasons_have_rows_of_their_own_and_all_further_ones_share_one():
    first = [counters.fallback_counter("a", str(n)) for n in range(1000)]
    assert all(counters.not_yet_logged(counter, logging.INFO) for counter in first)
    further = [counters.fallback_counter(name, "new") for name in ("a", "b", "c")]
    assert [counters.not_yet_logged(counter, logging.INFO) for counter in further] == [True, False, False]
    assert counters.fallback_counter("a", "7") is first[7]  # found though the table is full
    assert not counters.not_yet_logged(first[7], logging.INFO)
    assert counters.not_yet_logged(first[7], logging.WARNING)
    for counter in (*first, *further):
        counters.count((counter,))
    rows = attnreg.stats().fallbacks
    assert rows == (
        *(Fallback("a", str(n), 1) for n in range(1000)),
        Fallback("*", "(further reasons)", 3),
    )


def test_a_thousand_classes_of_errors_have_rows_of_their_own_and_all_further_ones_share_one(caplog):
    counter = counters.call_counter("a", "forward")
    for _ in range(2):
        for n in range(1003):  # as a package may make them
            counters.failed(counter, type(f"Error{n}", (Exception,), {})("said"))
    rows = attnreg.stats().failures
    assert rows == (
        *(Failure("a", "forward", f"Error{n}", "said", 2) for n in range(1000)),
        Failure("*", "forward", "(further errors)", "said", 6),
    )
    assert len(caplog.records) == 1001


# Reset and copies


def test_resetting_starts_every_number_anew_also_of_plans_that_were_made_before_and_logs_nothing_twice(
    routers, fake, caplog
):
    with attnreg.register_backend(fake("mine", dtypes=("float16",)).backend):
        sdpa()
        sdpa()
        attnreg.reset_stats()
        assert attnreg.stats() == Stats({}, ())
        sdpa()
        assert attnreg.stats() == Stats(
            {"cpu": {"forward": 1, "backward": 0}},
            (Fallback("mine", "dtype must be float16, got float32", 1),),
        )
    assert len(caplog.records) == 1


def test_stats_are_a_copy_that_later_calls_do_not_change(routers):
    with attnreg.register_backend("math"):
        sdpa()
        before = attnreg.stats()
        sdpa()
    assert before == Stats({"math": {"forward": 1, "backward": 0}}, ())
    before.calls.clear()
    assert attnreg.stats().calls == {"math": {"forward": 2, "backward": 0}}


def test_stats_are_plain_data_for_json():
    failure = Failure("a", "backward", "RuntimeError", "no image", 2)
    stats = Stats({"a": {"forward": 1, "backward": 0}}, (Fallback("b", "too new", 3),), (failure,))
    stats = dataclasses.replace(stats, bypassed=(Bypass("torch's math kernel", "a mask", 4),))
    stats = dataclasses.replace(stats, masks=(MaskSeen("causal", 5),))
    assert json.loads(json.dumps(stats.to_dict())) == {
        "calls": {"a": {"forward": 1, "backward": 0}},
        "bypassed": [
            {
                "kernel": "torch's math kernel",
                "reason": "a mask",
                "count": 4,
                "op": "",
                "shapes": [],
                "site": "",
            },
        ],
        "masks": [{"seen": "causal", "count": 5}],
        "fallbacks": [{"backend": "b", "reason": "too new", "count": 3}],
        "failures": [
            {
                "backend": "a",
                "direction": "backward",
                "error": "RuntimeError",
                "message": "no image",
                "count": 2,
            }
        ],
        "overridden": [],
        "slow_paths": [],
    }

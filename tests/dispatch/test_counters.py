"""Promises of the counters: what really ran, exactly, and every fallback with its reason."""

import io
import json
import logging
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import attnreg
from attnreg.dispatch import counters
from attnreg.dispatch.counters import Fallback, Stats


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Switch threads as often as can be, and start without the counters of other tests."""
    monkeypatch.setattr(counters, "_calls", {})
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


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
    return [(record.levelname, record.message) for record in caplog.records]


# Calls


def test_nothing_has_run_at_first():
    assert attnreg.stats() == Stats({}, ())


def test_what_ran_is_counted_by_backend_and_direction(routers, fake, packed):
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


def test_what_torch_ran_by_itself_is_not_counted(routers):
    sdpa(grad=True)
    assert attnreg.stats() == Stats({}, ())


def test_eight_threads_are_counted_exactly(routers, fake):
    mine = fake("mine")
    with attnreg.register_backend(mine.backend):
        in_threads(lambda: [sdpa(grad=True) for _ in range(50)])
    assert (len(mine.forwards), len(mine.backwards)) == (400, 400)
    assert attnreg.stats() == Stats({"mine": {"forward": 400, "backward": 400}}, ())


def test_eight_threads_that_add_to_one_counter_lose_nothing():
    pair = (counters.call_counter("a", "forward"), counters.call_counter("b", "backward"))
    in_threads(lambda: [counters.count(pair) for _ in range(5000)])
    assert attnreg.stats().calls == {
        "a": {"forward": 40000, "backward": 0},
        "b": {"forward": 0, "backward": 40000},
    }


def test_eight_threads_get_one_counter_of_a_name():
    found = []
    in_threads(lambda: found.append(counters.call_counter("a", "forward")))
    assert len({id(counter) for counter in found}) == 1


def test_a_kernel_that_fails_has_not_run(routers, fake):
    def fails(*arguments):
        raise RuntimeError("out of memory")

    broken = fake("broken", load=lambda: attnreg.Kernels(fails, fails)).backend
    with attnreg.register_backend(broken), pytest.raises(RuntimeError, match="out of memory"):
        sdpa()
    assert attnreg.stats() == Stats({}, ())


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
        ("WARNING", "mine can't run this call and cpu does: dtype must be float16, got float32")
    ]


def test_a_fallback_of_the_default_order_is_logged_once_at_info(fake, packed, caplog, monkeypatch):
    first = fake("first", dtypes=("float16",), priority=1000).backend
    monkeypatch.setattr(attnreg._registry, "_entries", {**attnreg._registry.entries()})
    attnreg._registry.add(first, "a test")
    with caplog.at_level(logging.DEBUG, "attnreg"):
        for length in (3, 4, 5):
            attnreg.varlen_attn(*packed((length,), grad=False))
    assert attnreg.stats().fallbacks == (Fallback("first", "dtype must be float16, got float32", 3),)
    (line,) = lines(caplog)
    assert line[0] == "INFO"
    assert line[1].startswith("first can't run this call and ")
    assert line[1].endswith(" does: dtype must be float16, got float32")


def test_a_fallback_logged_at_info_is_logged_at_warning_once_the_backend_is_preferred(fake, packed, caplog):
    attnreg._registry.add(fake("first", dtypes=("float16",), priority=1000).backend, "a test")
    with caplog.at_level(logging.DEBUG, "attnreg"):
        attnreg.varlen_attn(*packed((3,), grad=False))
        with attnreg.use_backend("first"):
            attnreg.varlen_attn(*packed((3,), grad=False))
            attnreg.varlen_attn(*packed((4,), grad=False))
        attnreg.varlen_attn(*packed((4,), grad=False))
        with attnreg.use_backend("first"):
            attnreg.varlen_attn(*packed((5,), grad=False))
    assert [level for level, _ in lines(caplog)] == ["INFO", "WARNING"]
    assert [row.count for row in attnreg.stats().fallbacks] == [5]


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
            "dtype must be float16, got float32; query and key must have as many heads, got 4 and 2",
            1,
        ),
        Fallback("mine", "dtype must be float16, got float32", 1),
    )
    assert len(caplog.records) == 2


def test_each_direction_counts_its_own_fallback(routers, fake):
    with attnreg.register_backend(fake("mine", backward=False).backend):
        sdpa(grad=True)
    assert attnreg.stats() == Stats(
        {"mine": {"forward": 1, "backward": 0}, "cpu": {"forward": 0, "backward": 1}},
        (Fallback("mine", "has no backward", 1),),
    )


def test_eight_threads_that_fall_back_are_logged_once_and_counted_exactly(routers, fake, caplog):
    with attnreg.register_backend(fake("mine", dtypes=("float16",)).backend):
        in_threads(lambda: [sdpa() for _ in range(50)])
    assert attnreg.stats().fallbacks == (Fallback("mine", "dtype must be float16, got float32", 400),)
    assert len(caplog.records) == 1


class Raising(logging.Handler):
    def emit(self, record):
        raise OSError("disk full")


def closed_stream():
    stream = io.StringIO()
    stream.close()
    return logging.StreamHandler(stream)


@pytest.mark.parametrize("make", [Raising, closed_stream])
def test_a_logging_handler_that_fails_does_not_stop_attention(routers, fake, capsys, make):
    handler = make()
    logging.getLogger("attnreg").addHandler(handler)
    try:
        with attnreg.register_backend(fake("mine", dtypes=("float16",)).backend):
            sdpa()
    finally:
        logging.getLogger("attnreg").removeHandler(handler)
    assert [row.count for row in attnreg.stats().fallbacks] == [1]


def test_reasons_that_hold_ever_new_numbers_fill_a_bounded_number_of_rows(routers, fake, caplog, monkeypatch):
    monkeypatch.setattr(counters, "MOST_FALLBACKS", 20)

    def refuses(spec):
        return (f"max_q must be 0, got {spec.max_q}",)

    query = torch.randn(1, 1, 30, 8)
    with attnreg.register_backend(fake("mine", refuses=refuses).backend):
        for _ in range(2):
            for length in range(1, 31):
                F.scaled_dot_product_attention(*(query[:, :, :length],) * 3)
    rows = attnreg.stats().fallbacks
    assert rows == (
        *(Fallback("mine", f"max_q must be 0, got {n}", 2) for n in range(1, 21)),
        Fallback("*", "(further reasons)", 20),
    )
    assert len(caplog.records) == 21


def test_a_thousand_reasons_have_rows_of_their_own_which_are_found_when_the_table_is_full():
    first = [counters.fallback_counter("a", str(n)) for n in range(1000)]
    assert all(counters.not_yet_logged(counter, logging.INFO) for counter in first)
    further = [counters.fallback_counter(name, "new") for name in ("a", "b", "c")]
    assert [counters.not_yet_logged(counter, logging.INFO) for counter in further] == [True, False, False]
    assert len({id(counter) for counter in further}) == 1
    assert counters.fallback_counter("a", "7") is first[7]
    assert not counters.not_yet_logged(first[7], logging.INFO)
    assert counters.not_yet_logged(first[7], logging.WARNING)


# Reset and copies


def test_resetting_starts_every_number_anew_also_of_plans_that_were_made_before(routers, fake):
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


def test_resetting_does_not_log_a_fallback_a_second_time(routers, fake, caplog):
    with attnreg.register_backend(fake("mine", dtypes=("float16",)).backend):
        sdpa()
        attnreg.reset_stats()
        sdpa()
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
    counters.count((counters.call_counter("a", "backward"), counters.fallback_counter("b", "too new")))
    assert json.loads(json.dumps(attnreg.stats().to_dict())) == {
        "calls": {"a": {"forward": 0, "backward": 1}},
        "fallbacks": [{"backend": "b", "reason": "too new", "count": 1}],
    }


def test_stats_survive_pickling():
    stats = Stats({"a": {"forward": 1, "backward": 0}}, (Fallback("b", "too new", 3),))
    assert pickle.loads(pickle.dumps(stats)) == stats

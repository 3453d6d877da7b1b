"""Promises of `policy = "adaptive"` to the ranks of one job: one measures a kind of call, for all of them."""

import logging

import pytest
import torch.distributed as dist
from support.packed_calls import attend

import attnreg
from attnreg.core import registry
from attnreg.core.times import adaptive, job_results
from attnreg.core.torchlib import job_store

pytestmark = pytest.mark.usefixtures("routers")

ADAPTIVE = {"policy": "adaptive"}


def learned():
    (only,) = adaptive._learned.values()
    return only


class Rank:
    """One of two ranks that share a store: what is known there, and the switch to it."""

    def __init__(self, monkeypatch, store):
        self._patch, self._store, self.learned = monkeypatch, store, {}

    def __enter__(self):
        self._patch.setattr(adaptive, "_learned", self.learned)
        self._patch.setattr(job_store, "default", lambda: self._store)
        self._patch.setattr(job_store, "group_of_several", lambda: dist)
        # Nothing but this policy asks here.
        self._patch.setattr("attnreg.core.policy.ranks.agree", lambda *arguments: None)
        registry.changed()

    def __exit__(self, *error):
        self.learned = adaptive._learned


@pytest.fixture
def ranks(monkeypatch):
    store = dist.HashStore()
    return Rank(monkeypatch, store), Rank(monkeypatch, store)


def test_one_rank_measures_and_the_others_take_over_what_it_has_found(taking, runs, ranks, clock):
    taking(one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)
    with ranks[1]:
        assert runs(2) == ["one", "two"]  # the first that makes such a call
    with ranks[0]:
        assert runs(15) == ["one"] * 15
    with ranks[1]:
        assert runs(12)[10:] == ["two"] * 2
    with ranks[0]:
        clock.now += adaptive.LOOK_S
        assert runs(2) == ["two", "two"]
        assert learned().turns.popitem()[1].point.backends["one"].gpu_us == pytest.approx(2e6)


@pytest.fixture
def begun(taking, runs, ranks):
    """Return two ranks, of which the second has begun to measure and the first waits."""
    taking(one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)
    for rank in reversed(ranks):
        with rank:
            runs(1)
    return ranks


def test_if_one_rank_waits_too_long_all_choose_without_the_policy_adaptive(begun, runs, clock):
    with begun[0]:
        clock.now += adaptive.PATIENCE_S + 1
        runs(1)
    with begun[1]:
        assert runs(14)[12:] == ["one"] * 2
    with begun[0]:
        clock.now += adaptive.PATIENCE_S
        assert runs(3) == ["one"] * 3


def test_what_cannot_be_read_in_the_store_fails_no_call(begun, runs, clock, monkeypatch):
    monkeypatch.setattr(job_results, "published", lambda name: '{"of": "another version"}')
    with begun[0]:
        clock.now += adaptive.LOOK_S
        assert runs(3) == ["one"] * 3


def test_a_store_that_fails_is_used_once_and_no_turns_are_taken(taking, runs, ranks, monkeypatch, caplog):
    taking(one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)
    asked = []

    def fails(seconds, run):
        asked.append(seconds)
        raise RuntimeError("the store is gone")

    with ranks[0], caplog.at_level(logging.INFO, "attnreg"):
        monkeypatch.setattr(job_store, "within", fails)
        assert runs(14) == ["one"] * 14
        assert runs(2, lambda: attend(64)) == ["one"] * 2
    assert asked == [job_results.STORE_S]
    assert caplog.text.count("the store is gone") == 1


def test_a_store_that_fails_before_the_result_is_known_leaves_all_ranks_without_a_result(
    begun, runs, clock, monkeypatch
):
    def fails(seconds, run):
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(job_store, "within", fails)
    with begun[1]:
        assert runs(14)[12:] == ["one"] * 2
    with begun[0]:
        clock.now += adaptive.LOOK_S
        assert runs(2) == ["one"] * 2


def test_a_result_that_one_rank_has_from_before_holds_for_all_ranks_or_for_none(
    taking, runs, ranks, kept, clock
):
    taking(one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)
    runs(13)
    assert len(kept()) == 1
    with ranks[0]:
        assert runs(2) == ["two"] * 2  # the first that makes such a call tells the others
    with ranks[1]:
        assert runs(2) == ["two"] * 2


def test_a_job_measures_anew_what_was_disabled(taking, runs, ranks):
    taking(one=2.0, two=1.0, three=3.0)
    with ranks[0]:
        attnreg.configure({**ADAPTIVE, "disabled": ["two"]})
        assert "two" not in runs(14)
        attnreg.configure(ADAPTIVE)
        assert runs(3) == ["one", "two", "three"]

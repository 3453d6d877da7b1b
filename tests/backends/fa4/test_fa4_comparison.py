"""Promises about FA4's recorded launches: no recipe is used before a comparison has confirmed it."""

import logging

import pytest
import torch
from support import fake_fa4
from support.fake_fa4 import (
    BOTH,
    CONFIRMED_SOON,
    NEITHER,
    both,
    call_of,
    count_recorded,
    dense,
    dense_call,
    entered,
    entered_by_round,
    packed,
)

from attnreg.backends.fa4 import BACKEND, recording, replay
from attnreg.torchlib.readback import PENDING, AsyncReadback

# Releases


@pytest.mark.parametrize("release", ["4.0.0b35", "4.0.0b37", "4.0.0b36.post1", "4.0.0"])
def test_a_release_that_is_not_listed_is_never_replayed_and_says_so_once(
    monkeypatch, no_unused_rows, release, caplog
):
    package = fake_fa4.install(monkeypatch, version=release)
    with caplog.at_level(logging.DEBUG, "attnreg"):
        kernels = BACKEND.load()
        recorded = count_recorded(package)
        assert entered_by_round(kernels, package, 6) == [BOTH] * 6
        assert [entered(kernels, package, *packed((5, 28))) for _ in range(6)] == [BOTH] * 6
    assert recorded == []
    tensors = tuple(dense()[:3])
    assert kernels.specialize("forward", tensors, call_of(*tensors[:2])) is None
    assert caplog.messages == [
        f"FA4: each call goes through the Python of flash-attn-4 {release}, as its launches may be replayed "
        "only for 4.0.0b36"
    ]


# The comparison


def test_a_recipe_is_confirmed_at_other_addresses_with_other_values_and_lengths_before_it_is_used(
    kernels, package, no_unused_rows, monkeypatch
):
    """Also where the tensors of all calls are the very same ones."""
    replayed = []
    launch, uninitialized = recording.Recipe.launch, replay.uninitialized

    def launched(recipe, slots):
        results = launch(recipe, slots)
        replayed.append((recipe, list(slots), results))
        return results

    def allocated(size, stride, *rest):
        assert type(size) is type(stride) is tuple  # on a GPU nothing else is taken
        return uninitialized(size, stride, *rest)

    monkeypatch.setattr(replay, "uninitialized", allocated)
    monkeypatch.setattr(recording.Recipe, "launch", launched)
    given = query, key, *_ = packed((5, 28, 7), (9, 21, 30))
    for count in (0, 0, 2):
        assert entered(kernels, package, *given) == BOTH
        assert len(replayed) == count
    (_, forward, (out, _)), (_, backward, grads) = replayed
    for recipe, slots, _ in replayed:
        addresses = {slot: x.data_ptr() for slot, x in enumerate(slots) if isinstance(x, torch.Tensor)}
        assert addresses.keys() == recipe.addresses.keys()
        assert all(address != recipe.addresses[slot] for slot, address in addresses.items())
    assert [x[1:].tolist() for x in forward[3:5]] == [[3, 17, 21], [5, 16, 31]]
    assert [x[1:].tolist() for x in backward[6:8]] == [[3, 17, 21], [5, 16, 31]]
    # The last halves, heads and head dims reversed.
    rows = [2, 3, 4, *range(19, 33), *range(36, 40)]
    assert torch.equal(forward[0][:21], query[rows].flip(-2, -1))
    assert torch.equal(forward[1][5:16], key[19:30].flip(-2, -1))
    assert out[:21].isfinite().all()
    assert grads[1][:31].isfinite().all()
    assert entered(kernels, package, *given) == NEITHER


@pytest.mark.parametrize("hidden", ["_bwd_preprocess", "_flash_attn_bwd", "_bwd_postprocess_convert"])
def test_a_launch_past_the_caches_is_found_out_and_such_calls_are_never_replayed(
    rounds, package, hidden, caplog
):
    package.hidden = {hidden}
    with caplog.at_level(logging.INFO, "attnreg"):
        assert rounds(7) == [*[BOTH] * 3, *[["backward"]] * 4]
    assert caplog.messages == [
        "FA4 calls the package's Python for each backward like this one: its launches, replayed, give other "
        "results"
    ]
    package.hidden = set()
    recorded = count_recorded(package)
    assert rounds(2) == [["backward"]] * 2
    assert recorded == []
    assert rounds(4, window=(-1, 0)) == CONFIRMED_SOON


def test_lengths_that_the_host_reads_are_found_out_by_other_lengths(kernels, package, no_unused_rows, caplog):
    package.bakes_lengths = True
    with caplog.at_level(logging.INFO, "attnreg"):
        # At the recorded lengths the recipe would come out right.
        assert [entered(kernels, package, *packed((5, 28, 7), seed=n)) for n in range(6)] == [BOTH] * 6
    assert len(caplog.messages) == 2  # once each direction
    assert all("its launches, replayed, give other results" in message for message in caplog.messages)
    assert [entered(kernels, package, *packed((7, 5, 28), seed=n)) for n in range(2)] == [BOTH] * 2


@pytest.mark.parametrize("same_tensors", [True, False])
def test_addresses_that_the_host_reads_are_found_out_by_other_addresses(
    kernels, package, same_tensors, caplog
):
    package.bakes_addresses = True
    given = [dense(seed=0 if same_tensors else seed) for seed in range(6)]
    with caplog.at_level(logging.INFO, "attnreg"):
        for tensors in [given[0]] * 6 if same_tensors else given:
            assert entered(kernels, package, *tensors, call_of(*tensors[:2])) == BOTH
    assert len(caplog.messages) == 2


def test_an_allocation_of_integers_that_no_replayed_kernel_fills_is_found_out(
    kernels, package, no_unused_rows, many_are_few, caplog
):
    package.hidden = {"_compute_tile_cumsum"}
    lengths = (1,) * 19 + (3,)
    with caplog.at_level(logging.INFO, "attnreg"):
        found = [entered(kernels, package, *packed(lengths, seed=n)) for n in range(5)]
    assert found == [BOTH, BOTH, BOTH, ["forward"], ["forward"]]
    assert "each forward like this one: its launches, replayed, fail: " in caplog.text


@pytest.mark.parametrize(
    ("error", "first", "later", "messages"),
    [
        # Later calls are counted: the first and the second had no memory, the fourth is the next to be tried.
        (torch.OutOfMemoryError("full"), [BOTH, ["backward"]], [["backward"], ["backward"], NEITHER], []),
        (RuntimeError("lost"), [BOTH], [["backward"]] * 6, ["its launches, replayed, fail: lost"]),
    ],
    ids=["no memory", "a fault"],
)
def test_a_comparison_that_fails_leaves_the_call_right_and_is_repeated_only_for_want_of_memory(
    rounds, package, caplog, error, first, later, messages
):
    def fail(name):
        # The backward's first kernel, at its second launch of a round: the first is the package's.
        if name == "_bwd_preprocess" and name in package.launched:
            raise error

    assert rounds(2) == [BOTH] * 2
    package.on_launch = fail
    with caplog.at_level(logging.INFO, "attnreg"):
        assert rounds(len(first)) == first
        package.on_launch = lambda name: None
        assert rounds(len(later)) == later
    begin = "FA4 calls the package's Python for each backward like this one: "
    assert caplog.messages == [begin + why for why in messages]


def test_until_the_device_has_reported_calls_go_through_the_package(rounds, monkeypatch):
    reports = []

    def unreported(verdict):
        assert int(verdict) == replay.CONFIRMED
        reports.append(torch.full((), PENDING, dtype=torch.uint8))
        return AsyncReadback(reports[-1])

    monkeypatch.setattr(replay, "AsyncReadback", unreported)
    assert rounds(8) == [BOTH] * 8
    assert len(reports) == 2  # once each direction
    assert rounds(4, len_q=34) == [BOTH] * 4
    assert len(reports) == 4
    reports[1].fill_(replay.CONFIRMED)
    assert rounds(1) == [["forward"]]
    reports[0].fill_(replay.CONFIRMED)
    assert rounds(1) == [NEITHER]
    assert rounds(1, len_q=34) == [BOTH]
    reports[2].fill_(replay.REFUTED)
    reports[3].fill_(replay.CONFIRMED)
    assert rounds(2, len_q=34) == [["forward"]] * 2


def test_where_there_are_many_descriptions_a_comparison_waits_for_more_calls(rounds, monkeypatch):
    monkeypatch.setattr(replay, "FEW", 2)
    assert rounds(4) == CONFIRMED_SOON
    assert rounds(replay.WAIT + 3, len_q=7, len_k=5) == [*[BOTH] * (replay.WAIT + 2), NEITHER]
    assert rounds(1) == [NEITHER]


@pytest.mark.parametrize("hidden", [set(), {"_bwd_preprocess"}])
def test_a_call_of_nothing_finite_confirms_nothing_and_a_later_one_has_to(kernels, package, rounds, hidden):
    package.hidden = hidden
    query, key, value, grad, call = dense_call()
    for _ in range(4):  # two comparisons: of the first and of the second later call
        package.calls.clear()
        got = both(kernels, query, key * torch.nan, value, grad, call)
        assert all(x.isnan().all() for x in got)
        assert [name for name, _ in package.calls] == BOTH
    assert rounds(3) == [BOTH, BOTH, ["backward"] if hidden else NEITHER]


def test_sequences_of_one_token_have_no_other_lengths_and_confirm_nothing(kernels, package, no_unused_rows):
    ones = (1,) * 10
    assert [entered(kernels, package, *packed(ones, seed=n)) for n in range(6)] == [BOTH] * 6
    longer = (2, 0) * 5
    found = [entered(kernels, package, *packed(longer, seed=n)) for n in range(5)]
    assert found == [*[BOTH] * 4, NEITHER]  # the eighth later call is the next that is tried
    # Where no sequence may be longer, there are no other lengths for a later call either.
    *tensors, call = packed(ones)
    call = call._replace(max_q=1, max_k=1)
    assert [entered(kernels, package, *tensors, call) for _ in range(4)] == CONFIRMED_SOON


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_memory_that_still_holds_the_right_values_does_not_pass_for_a_launch(monkeypatch, dtype):
    right = torch.arange(1, 4).to(dtype)
    # As a caching allocator does: memory that is freed is reused, with what was in it.
    monkeypatch.setattr(torch, "empty_strided", lambda *given, **named: right.clone())
    allocations = tuple((slot, (3,), (1,), dtype) for slot in (1, 2))
    recipe = recording.Recipe(
        right.device, (None, None), allocations, (2,), (), (), recording.pick([1, 2]), {1: 0, 2: 0}
    )
    slots = replay._spoilt_slots(recipe, (right,))
    assert not (slots[1] == right).any()
    assert not slots[2].any()


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ([1.0, -2.0], [1.0, -2.0], True),
        ([1.0, -2.0], [1.03, -2.0], True),
        ([1.0, -2.0], [1.05, -2.0], False),
        ([torch.nan, 1.0], [torch.nan, 1.0], True),
        ([torch.nan, 1.0], [1.0, 1.0], False),
        ([1.0, 1.0], [torch.nan, 1.0], False),
        ([-torch.inf, 1.0], [-torch.inf, 1.0], True),
        ([-torch.inf, 1.0], [torch.inf, 1.0], False),
        ([1.0, 1.0], [-torch.inf, 1.0], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([1e-6, 0.0], [0.0, 0.0], True),  # rounding, in view of the other result's ones
        ([1e-3, 0.0], [0.0, 0.0], False),
    ],
)
def test_results_are_equal_as_far_as_a_gpu_repeats_itself(got, expected, same):
    ones, yes = torch.ones(3, dtype=torch.bfloat16), torch.tensor(True)
    got, expected = torch.tensor(got), torch.tensor(expected)
    assert int(replay._verdict([got, ones], [expected, ones], yes)) == same
    assert int(replay._verdict([ones, got], [ones, expected], yes)) == same
    assert int(replay._verdict([ones, got], [ones, expected], ~yes)) == 3 * same

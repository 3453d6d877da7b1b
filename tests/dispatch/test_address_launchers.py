"""Promises of kernels that are given addresses: what they read, and when they can't run any more."""

import gc
import re
import sys
import types

import pytest
import torch
from support.launcher_kinds import (
    PACKED,
    OnAddresses,
    Written,
    assert_equal,
    backward_tensors,
    forward_function,
    lse_of,
    tensors,
)
from test_launchers import fails

from attnreg.core.launching.launchers import AddressLauncher
from attnreg.core.torchlib.layout import GRAPH_TREES
from attnreg.errors import RegistrationError

pytestmark = pytest.mark.usefixtures("one_thread")


class Packed:
    """Calls `varlen_attn`'s front with a kernel on addresses for its forwards."""

    def __init__(self, plan, shape=PACKED, **changes):
        self.plan = plan
        self.kernel = OnAddresses("forward", shape, **changes)
        plan.forward = self.kernel.launcher
        self.tensors = tensors(shape)

    def __call__(self, pair):
        """Return whether the call was planned."""
        planned, results = self.plan.planned(*self.tensors, pair, pair)
        expected = forward_function(*self.tensors)
        if not planned:
            assert_equal(results, expected)
        return planned


@pytest.fixture
def packed(packed_plan):
    return Packed(packed_plan)


def test_a_kernel_gets_a_workspace_no_stream_on_a_cpu_and_new_results(op):
    kernel = OnAddresses()
    op.forward = kernel.launcher
    q, k, v = tensors()
    op.planned(q, k, v)
    outs = [op.planned(q, k, v)[1][0] for _ in range(2)]
    assert kernel.launched == [(True, 0)] * 2
    assert outs[0].data_ptr() != outs[1].data_ptr()
    assert_equal(outs, [q * 2] * 2)


def test_an_lse_is_copied_to_where_a_kernel_wants_it(op):
    kernel = OnAddresses("backward", lse_strides=(12, 1, 2))
    op.backward = kernel.launcher
    given = (*backward_tensors(), torch.zeros(()))
    op.planned_back(*given)
    assert not op.planned_back(*given)[0]
    assert torch.equal(kernel.lse, lse_of(given[1]).transpose(1, 2).flatten())
    strided = given[5].transpose(1, 2).contiguous().transpose(1, 2)
    for lse in (strided, strided):
        planned, _ = op.planned_back(*given[:5], lse, given[6])
    assert not planned
    assert torch.equal(kernel.lse, lse_of(given[1]).transpose(1, 2).flatten())


def test_the_lse_of_a_packed_forward_lies_as_the_kernel_writes_it(packed_plan, pair):
    for token_first, strides in ((True, (1, 2)), (False, (6, 1))):
        packed_plan.module.drop()
        kernel = OnAddresses("forward", PACKED, lse_token_first=token_first)
        packed_plan.forward = kernel.launcher
        for _ in range(2):
            planned, (_, lse) = packed_plan.planned(*tensors(PACKED), pair, pair)
        assert not planned
        assert lse.stride() == strides


def test_it_is_prepared_again_only_for_other_lengths_or_strides(op):
    kernel = OnAddresses()
    op.forward = kernel.launcher
    for shape in ((2, 6, 2, 8), (2, 6, 2, 8), (3, 9, 2, 8), (3, 9, 2, 8), (2, 6, 2, 8)):
        q, k, v = tensors(shape)
        planned, (out, *_) = op.planned(q, k, v)
        assert planned or torch.equal(out, q * 2)
    lengths = [lengths for lengths, _ in kernel.prepared]
    assert lengths == [(2, 6, 6, 12, 12), (3, 9, 9, 27, 27)]
    # The second row of each sequence is left out: the same lengths and classes of strides.
    q, k, v = (x[:, ::2] for x in tensors((2, 12, 2, 8)))
    op.planned(q, k, v)
    assert kernel.prepared[2:] == []  # it isn't contiguous, which is another kind
    op.planned(q, k, v)
    wider = [x[:, ::4] for x in tensors((2, 24, 2, 8))]
    assert not op.planned(*wider)[0]
    strides = [strides[0] for _, strides in kernel.prepared[2:]]
    assert strides == [(192, 32, 8, 1), (384, 64, 8, 1)]


def test_how_calls_of_the_newest_four_lengths_are_run_is_kept(op):
    kernel = OnAddresses()
    op.forward = kernel.launcher
    op.planned(*tensors())
    for rows in (2, 3, 4, 5, 6, 6, 5, 4, 3, 2):
        q, k, v = tensors((2, rows, 2, 8))
        planned, (out, *_) = op.planned(q, k, v)
        assert not planned
        assert torch.equal(out, q * 2)
    assert [lengths[1] for lengths, _ in kernel.prepared] == [2, 3, 4, 5, 6, 2]


def test_it_is_not_prepared_again_for_lengths_that_it_says_it_serves(packed_plan):
    most = 2**31 - 1
    kernel = OnAddresses("forward", PACKED, launch=lambda *given: kernel.launch(kernel.shape, *given))

    def prepare(*given):
        tokens = (5, 7) if given[3] >= 5 else (1, 4)
        lengths = (1, 2), (1, most), (1, most), tokens, (1, most)
        return kernel.prepare(*given)._replace(lengths=lengths)

    packed_plan.forward = AddressLauncher(forward_function, prepare)
    for number, ends in enumerate(([0, 2, 6], [0, 2, 6], [0, 1, 7], [0, 5], [0, 2, 4], [0, 5, 7], [0, 3])):
        pair = torch.tensor(ends, dtype=torch.int32)
        kernel.shape, kernel.ends = (ends[-1], 2, 8), len(ends)
        q, k, v = tensors(kernel.shape)
        planned, results = packed_plan.planned(q, k, v, pair, pair)
        assert planned is (number == 0)
        if not planned:
            assert_equal(results, forward_function(q, k, v))
            assert kernel.offsets == ends
    assert [lengths for lengths, _ in kernel.prepared] == [(2, 4, 4, 6, 6), (2, 4, 4, 4, 4)]


def test_in_python_it_runs_as_the_call_cache_runs_it(pair):
    dense, packed = OnAddresses("backward", lse_strides=(12, 1, 2)), OnAddresses("forward", PACKED)
    given = backward_tensors()
    assert_equal(dense.launcher.on_addresses(*given), dense.launcher(*given))
    assert dense.prepared == [((2, 6, 6, 12, 12), tuple(x.stride() for x in given))]
    inputs = (*tensors(PACKED), pair, pair, 4, 4, True)
    assert_equal(packed.launcher.on_addresses(*inputs), packed.launcher(*inputs))
    assert packed.offsets == [0, 2, 6]
    assert packed.prepared[0][0] == (2, 4, 4, 6, 6)
    for can in (False, None, ""):
        packed.can = can
        assert packed.launcher.on_addresses(*inputs) is None


def test_rows_that_may_see_no_key_are_cleared_in_python_unless_all_are_known_to_see_one():
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)  # of six rows
    kernel = OnAddresses("forward", PACKED)
    inputs = tensors(PACKED)
    out, lse = kernel.launcher.on_addresses(*inputs, ends, ends, 3, 3, False)
    assert_equal(out[:5], inputs[0][:5] * 2)
    assert (out[5] == 0).all()
    assert (lse[:, 5] == -torch.inf).all()
    out, _ = kernel.launcher.on_addresses(*inputs, ends, ends, 3, 3, True)
    assert_equal(out, inputs[0] * 2)


# ---- what is derived of offsets


def test_what_is_derived_of_offsets_is_kept_while_they_are_unchanged(packed, pair):
    others = torch.tensor([0, 3, 6], dtype=torch.int32)
    for given in (pair, others, pair):
        for _ in range(4):
            packed(given)
        assert packed.kernel.offsets == given.tolist()
    assert [one[0] is others for one in packed.kernel.derived] == [False, True, False]
    pair[1] = 1
    assert not packed(pair)
    assert packed.kernel.offsets == [0, 1, 6]
    for begin in (3, 2, 5):  # in memory that the one before may have left
        pair.data = torch.tensor([0, begin, 6], dtype=torch.int32)
        assert not packed(pair)
        assert packed.kernel.offsets == [0, begin, 6]


def test_what_is_derived_goes_with_the_offsets_that_it_was_derived_of(packed):
    pair = torch.tensor([0, 2, 6], dtype=torch.int32)
    for _ in range(3):
        packed(pair)
    packed.kernel.derived.clear()
    (vector,) = packed.kernel.vectors
    assert vector() is not None
    del pair
    gc.collect()
    assert vector() is None


def test_after_a_while_it_is_derived_again(packed, pair, trust_offsets):
    assert packed(pair)
    for seconds, derived in ((0.0, 3), (3600.0, 4)):
        trust_offsets(seconds)
        assert [packed(pair) for _ in range(3)] == [False] * 3
        assert len(packed.kernel.derived) == derived


def test_derived_tensors_that_were_freed_are_derived_anew(packed, pair):
    packed.kernel.keeps = False
    for _ in range(4):
        packed(pair)
    assert len(packed.kernel.derived) == 3
    assert packed.kernel.offsets == [0, 2, 6]


@pytest.fixture
def written():
    return Written()


@pytest.fixture
def by_kernel(packed_plan, written):
    return Packed(packed_plan, by_kernel=written.kernel)


def test_new_offsets_are_derived_by_the_kernel_and_python_is_not_asked(by_kernel, written):
    pairs = [torch.tensor([0, n, 6], dtype=torch.int32) for n in (1, 2, 3, 5)]
    by_kernel(pairs[0])
    for given in (*pairs, *pairs):
        assert not by_kernel(given)
        assert by_kernel.kernel.offsets == given.tolist()
    assert by_kernel.kernel.derived == []
    assert written.launched == [(77, 2, 2, None, 2, 3, 8, 9)] * 4
    pairs[0][1] = 4
    assert not by_kernel(pairs[0])
    assert by_kernel.kernel.offsets == [0, 4, 6]
    assert len(written.launched) == 5


def test_what_the_kernel_has_written_is_compared_after_a_while(by_kernel, written, pair, trust_offsets):
    trust_offsets(0.0)
    by_kernel(pair)
    for _ in range(4):
        assert not by_kernel(pair)
    first, *others = by_kernel.kernel.derived
    assert [len(given) for given in (first, *others)] == [3] * 3
    assert first[2].shape == (2, 3)
    assert all(given[2] is first[2] for given in others)
    assert len(written.launched) == 1


def test_launchers_that_read_the_same_share_what_was_written(packed_plan, written, pair):
    same, others = ({"by_kernel": written.kernel._replace(**changes)} for changes in ({}, {"words": (8, 7)}))
    for heads, changes, launched in ((2, same, 1), (4, same, 1), (6, others, 2)):
        call = Packed(packed_plan, (PACKED[0], heads, PACKED[2]), **changes)
        call(pair)
        for _ in range(2):
            assert not call(pair)
        assert (call.kernel.offsets, call.kernel.derived) == ([0, 2, 6], [])
        assert len(written.launched) == launched
    packed_plan.module.drop()
    call = Packed(packed_plan, **same)
    call(pair)
    assert not call(pair)
    assert len(written.launched) == 3


def test_many_pairs_in_turn_are_compared_each(by_kernel, written, trust_offsets):
    pairs = [torch.tensor([0, 1 + n % 5, 6], dtype=torch.int32) for n in range(60)]
    by_kernel(pairs[0])
    for given in pairs:
        assert not by_kernel(given)
    assert (by_kernel.kernel.derived, len(written.launched)) == ([], 60)
    trust_offsets(0.0)
    others = [torch.tensor([0, 1 + n, 6], dtype=torch.int32) for n in range(5)]
    for _ in range(3):
        for given in others:
            assert not by_kernel(given)
            assert by_kernel.kernel.offsets == given.tolist()
    compared = [one[0] for one in by_kernel.kernel.derived]
    assert [id(given) for given in compared] == [id(given) for given in others] * 2
    assert len(written.launched) == 65


def test_what_was_written_goes_with_its_offsets_and_after_64_others(by_kernel, written):
    pairs = [torch.tensor([0, 2, 6], dtype=torch.int32) for _ in range(66)]
    by_kernel(pairs[0])
    for given in (*pairs, *pairs[2:], pairs[0]):
        assert not by_kernel(given)
    assert len(written.launched) == 67
    del pairs[1:]
    gc.collect()
    for given in [torch.tensor([0, 2, 6], dtype=torch.int32) for _ in range(63)] + pairs:
        assert not by_kernel(given)
    assert len(written.launched) == 67 + 63


def test_what_was_written_of_offsets_that_stay_is_kept_while_others_come_and_go(by_kernel, written, pair):
    by_kernel(pair)
    for _ in range(150):
        assert not by_kernel(torch.tensor([0, 3, 6], dtype=torch.int32))
        assert not by_kernel(pair)
    assert len(written.launched) == 151


def test_the_oldest_goes_where_none_of_64_has_gone_and_the_newest_stay(by_kernel, written):
    pairs = [torch.tensor([0, 2, 6], dtype=torch.int32) for _ in range(64)]
    by_kernel(pairs[0])
    for given in pairs:
        by_kernel(given)
    del pairs[63], given  # its place is taken by the next
    gc.collect()
    others = [torch.tensor([0, 2, 6], dtype=torch.int32) for _ in range(3)]
    for given in others:
        assert not by_kernel(given)
    launched = len(written.launched)
    for given in others:
        assert not by_kernel(given)
    assert len(written.launched) == launched


def test_offsets_without_a_version_are_derived_by_the_kernel_in_each_call(by_kernel, written):
    with torch.inference_mode():
        pair = torch.tensor([0, 2, 6], dtype=torch.int32)
    by_kernel(pair)
    for _ in range(3):
        assert not by_kernel(pair)
        assert by_kernel.kernel.offsets == [0, 2, 6]
    assert len(written.launched) == 3


def test_where_inductors_graph_trees_are_in_use_nothing_is_kept(by_kernel, written, pair, monkeypatch):
    monkeypatch.setitem(sys.modules, GRAPH_TREES, types.ModuleType("trees"))
    by_kernel(pair)
    for begin in (2, 3, 4):
        pair.data[1] = begin  # a replay writes it, and torch doesn't count that
        assert not by_kernel(pair)
        assert by_kernel.kernel.offsets == [0, begin, 6]
    assert len(written.launched) == 3


def test_a_kernel_that_fails_is_an_error_with_its_number(by_kernel, written, pair):
    by_kernel(pair)
    written.error = 719
    with pytest.raises(RuntimeError, match="failed with CUDA error 719"):
        by_kernel(pair)
    written.error = 0
    assert not by_kernel(pair)


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        ([3], "Derivation.kernel: got a list, expected an OffsetsKernel or None"),
        ((1, 2, 0, 2, 3, (), ()), "Derivation.kernel: expected sizes above 0 and at most 25 words"),
        ((1, 2, 1, 2, 3, (0,) * 26, ()), "Derivation.kernel: expected sizes above 0 and at most 25 words"),
        ((1, 2, 1, 2, 3, (), (48,)), "Derivation.kernel returned the place 48 in a tensor of 48 bytes"),
    ],
    ids=["no tuple", "no threads", "words", "places"],
)
def test_a_description_of_a_kernel_that_is_wrong_is_an_error(packed_plan, pair, kernel, says):
    call = Packed(packed_plan, by_kernel=kernel)
    call(pair)
    with pytest.raises((TypeError, RuntimeError, IndexError), match=re.escape(says)):
        call(pair)


# ---- a kernel that can't run, and errors


@pytest.mark.parametrize("can", [False, None, ""], ids=["launch", "derive", "prepare"])
def test_a_kernel_that_cannot_run_any_more_leaves_the_call_to_a_new_plan(packed, pair, can):
    packed(pair)
    packed.kernel.can = can
    assert packed(pair)
    assert len(packed.kernel.launched) == (can is False)
    assert packed.plan.counted() == 0
    packed.kernel.can = True
    assert not packed(pair)


WRONG = {
    "error of launch": ({"launch": fails}, LookupError, "of a kernel"),
    "error of derive": ({"derive": fails}, LookupError, "of a kernel"),
    "operand": ({"operands": (0, 9)}, IndexError, "Prepared.operands has 9, expected less than 6"),
    "launch": (
        {"launch": lambda *_: None},
        TypeError,
        "Prepared.launch returned a NoneType, expected True or False",
    ),
    "derive": (
        {"derive": lambda *_: [3]},
        TypeError,
        "Derivation.derive returned a list, expected a tuple of a tensor and a tuple of places, or None",
    ),
    "tensor": (
        {"derive": lambda *_: (3, (0,))},
        TypeError,
        "Derivation.derive returned a tuple of a int, expected a tuple of a tensor and a tuple of places",
    ),
    "place": (
        {"derive": lambda *_: (torch.zeros(2), (0, 8))},
        IndexError,
        "Derivation.derive returned the place 8 in a tensor of 8 bytes",
    ),
    "lengths": (
        {"lengths": ((1, 1),) * 5},
        TypeError,
        "Prepared.lengths: expected a pair for each of five lengths, with those that it was asked for",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_errors_and_what_breaks_the_contract_are_the_callers_errors_and_not_counted(
    packed_plan, pair, changes, error, message
):
    packed = Packed(packed_plan, **changes)
    packed(pair)
    with pytest.raises(error, match=re.escape(message)):
        packed(pair)
    assert packed.plan.counted() == 0


@pytest.mark.parametrize(
    ("prepare", "error", "message"),
    [
        (fails, LookupError, "of a kernel"),
        (lambda *_: 3, TypeError, "AddressLauncher.prepare returned a int, expected a Prepared or None"),
    ],
)
def test_an_error_of_prepare_or_a_wrong_answer_is_the_callers_error(
    packed_plan, pair, prepare, error, message
):
    packed = Packed(packed_plan)
    packed_plan.forward = AddressLauncher(forward_function, prepare)
    packed(pair)
    with pytest.raises(error, match=re.escape(message)):
        packed(pair)
    assert packed.plan.counted() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"operands": [0, 1]}, "Prepared.operands: got [0, 1], expected a tuple"),
        ({"operands": (0, -1)}, "Prepared: got -1, expected whole numbers from 0"),
        ({"lse_strides": 0}, "Prepared.lse_strides: got 0, expected a tuple"),
        ({"lengths": [(1, 2)] * 5}, f"Prepared.lengths: got {[(1, 2)] * 5}, expected a tuple"),
        ({"lengths": ((1, None),) * 5}, "Prepared: got None, expected whole numbers from 0"),
        ({"workspace": 0.5}, "Prepared: got 0.5, expected whole numbers from 0"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, message):
    kernel = OnAddresses(**changes)
    with pytest.raises(RegistrationError) as error:
        kernel.launcher.on_addresses(*tensors())
    assert str(error.value) == message

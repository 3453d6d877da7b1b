"""Promises of programs: C++ and Python run the same, within bounds, and errors of functions are told."""

import dataclasses
import functools

import pytest
import torch
from support.launcher_kinds import PACKED, Counted, assert_equal, forward_function, tensors
from support.program_calls import InPrograms, keys_as_pages

from attnreg.core.launching import programs
from attnreg.core.launching.counts import _derived as counts_derived
from attnreg.core.launching.counts import counts_in, counts_of, derivation_for
from attnreg.core.launching.derivation import Derivation
from attnreg.core.launching.launchers import FunctionLauncher
from attnreg.core.launching.programs import ANY, BufferSize, Bundle, Computed, FunctionCall, Operand
from attnreg.errors import InvalidInputError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_program_is_asked_for_once_and_runs_all_lengths_within_its_bounds_without_python(op):
    kernel = InPrograms(bounds=((1, 3), ANY, ANY, ANY, ANY))
    op.forward = kernel.launcher
    for number, (batch, rows) in enumerate([(2, 8), (3, 12), (2, 4), (2, 512)]):
        q, k, v = tensors((batch, rows, 2, 8), number)
        planned, (out, lse, *_) = op.planned(q, k, v)
        assert planned == (number == 0)
        if not planned:
            assert_equal((out, lse), forward_function(q, k, v))
    assert (kernel.asked, kernel.ran) == ([(3, 12, 12, 36, 36)], [])
    op.planned(*tensors((7, 4, 2, 8)))
    assert kernel.asked[1:] == [(7, 4, 4, 28, 28)]


def test_without_a_program_the_function_runs(op):
    kernel = InPrograms(bounds=None)
    op.forward = kernel.launcher
    for seed in range(3):
        q, k, v = tensors(seed=seed)
        planned, (out, lse, *_) = op.planned(q, k, v)
        assert planned == (seed == 0)
        if not planned:
            assert_equal((out, lse), forward_function(q, k, v))
    assert (len(kernel.asked), kernel.ran, kernel.ffi.called) == (2, [3, 3], [])


def test_sizes_follow_from_a_packed_calls_lengths_and_arguments_are_passed_as_they_are(packed_plan, pair):
    kernel = InPrograms("forward", PACKED)
    packed_plan.forward = kernel.launcher
    for _ in range(2):
        q, k, v = tensors(PACKED)
        _, results = packed_plan.planned(q, k, v, pair, pair)
    assert_equal(results, forward_function(q, k, v))
    ((*given, scale, nothing, number, array, padded),) = kernel.ffi.called
    assert_equal(given[:3], [q, k, v])
    assert (scale, nothing, number, tuple(array)) == (2.0, None, 7, (None,))
    assert padded.shape == (16,)  # (2 sequences + 6 tokens + 3) // 4 * 8


def offsets(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def last_keys_added(q, k, begins, counts):
    """Return what `keys_as_pages` computes of three queries a sequence: q plus the last key that counts."""
    expected = q.clone()
    for begin, rows, count in zip(begins, (slice(0, 3), slice(3, 6)), counts, strict=False):
        expected[rows] += k[begin + count - 1] if count else 0
    return expected


def test_rows_are_read_as_pages_that_overlap_where_offsets_say_and_as_many_as_a_tile_are_left_to_python(
    packed_plan,
):
    kernel = InPrograms("forward", PACKED)
    kernel.program = keys_as_pages(tile=4)
    kernel.launcher = dataclasses.replace(kernel.launcher, takes=("seqused_k",))
    packed_plan.forward = kernel.launcher
    q, k, v = tensors(PACKED)  # six rows
    ends, starts = offsets(0, 3, 6), offsets(0, 2, 6)

    def planned(keys, *counts, max_k=4):
        given = {"seqused_k": offsets(*counts), "max_q": 3, "max_k": max_k}
        is_planned, (out, *_) = packed_plan.planned(q, k[:keys], v[:keys], ends, starts, **given)
        return is_planned, out

    assert planned(6, 2, 4)[0]
    for max_k, counts in ((4, (2, 4)), (4, (1, 0)), (6, (2, 4)), (900, (1, 4))):
        is_planned, out = planned(6, *counts, max_k=max_k)
        assert (is_planned, kernel.ran) == (False, [])
        assert_equal(out, last_keys_added(q, k, (0, 2), counts))
        pages, table = kernel.ffi.called[-1][2:4]
        assert pages.shape == (1, *k.shape) and table.shape == (2, 1)
    kernel.ffi.called.clear()
    planned(4, 1, 1)
    assert (len(kernel.ran), kernel.ffi.called) == (1, []), "Python ran it, and C++ has launched nothing"


@pytest.fixture(params=["kernel", "python"])
def counted(request, packed_plan):
    """Return calls on a program that takes how many keys count, and the list of derivations."""
    kernel, derived, counts = InPrograms("forward", PACKED), [], Counted()
    kernel.program = keys_as_pages(tile=4)

    def derive(queries, keys, *written):
        derived.append(written)
        return derivation_for(keys.device).derive(queries, keys, *written)

    by_kernel = counts.kernel if request.param == "kernel" else None
    derivation = Derivation(derive, by_kernel)
    kernel.launcher = dataclasses.replace(kernel.launcher, takes=("seqused_k",), counts=derivation)
    packed_plan.forward = kernel.launcher
    q, k, v = tensors(PACKED)
    ends = offsets(0, 3, 6)

    def planned(keys, of=None):
        is_planned, (out, *_) = packed_plan.planned(q, k, v, ends, keys, max_q=3, max_k=6)
        of = keys if of is None else of
        if not is_planned:
            assert_equal(out, last_keys_added(q, k, of.tolist(), of.diff().tolist()))
        return is_planned

    planned.of = packed_plan.planned
    return planned, counts.launched if by_kernel else derived, kernel, derived


def test_where_all_keys_count_the_counts_are_derived_once_for_offsets(counted):
    planned, times, kernel, _ = counted
    assert planned(offsets(0, 2, 6))
    times.clear()
    keys, others = offsets(0, 2, 6), offsets(0, 5, 6)
    for given, count in ((keys, 1), (keys, 1), (others, 2), (others, 2)):
        assert not planned(given)
        assert len(times) == count
    others[1] = 1
    assert not planned(others)
    assert (len(times), kernel.ran) == (3, [])


def test_counts_are_compared_after_a_while(counted, trust_offsets):
    planned, _, _, derived = counted
    trust_offsets(0.0)
    keys = offsets(0, 2, 6)
    assert planned(keys)
    for _ in range(3):
        assert not planned(keys)
    before = keys.clone()
    keys.data[1] = 4
    with pytest.raises(InvalidInputError, match="written to in a way that torch doesn't count"):
        for _ in range(4):
            planned(keys, of=before)  # begins as old as the counts: a kernel reads nothing but keys
    assert {len(written) for written in derived} <= {0, 1}


def test_counts_that_were_compared_are_used_for_a_while_again(counted, trust_offsets):
    planned, _, _, derived = counted
    trust_offsets(0.0)
    keys = offsets(0, 2, 6)
    assert planned(keys)
    assert not planned(keys)
    trust_offsets(60.0)
    assert not planned(keys)  # they are compared, and then used for a minute
    before = len(derived)
    for _ in range(3):
        assert not planned(keys)
    assert len(derived) == before > 0


def test_the_counts_of_other_numbers_of_sequences_are_right_as_offsets_come_and_go(counted):
    planned, _, _, _ = counted
    assert planned(offsets(0, 2, 6))
    q, k, v = tensors(PACKED)
    for keys in ((0, 6), (0, 1, 3, 6), (0, 4, 6), (0, 1, 2, 2, 3, 5, 6), (0, 5)):
        rows = 6 // (len(keys) - 1)
        ends, starts = offsets(*range(0, 7, rows)), offsets(*keys)
        for _ in range(2):  # a call of one query, or of one sequence, is planned first
            is_planned, (out, *_) = planned.of(q, k, v, ends, starts, max_q=rows, max_k=6)
        assert not is_planned
        counts = starts.diff().repeat_interleave(rows)
        last = torch.where(counts[:, None, None] > 0, k[starts[1:].repeat_interleave(rows).long() - 1], 0)
        assert_equal(out, q + last)


def test_without_sequences_or_queries_nothing_is_derived_and_python_runs_the_call(counted):
    planned, times, _, _ = counted
    assert planned(offsets(0, 2, 6))
    times.clear()
    one = offsets(0)
    for _ in range(3):
        assert planned.of(*(x[:0] for x in tensors(PACKED)), one, one, max_q=0, max_k=0)[0]
    assert times == []


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 8])
def test_offsets_begin_at_a_multiple_of_sixteen_bytes_behind_the_counts(batch):
    keys = (torch.arange(batch + 1) * 3 + 7).int()
    derived = counts_of(keys)
    counts, copied = counts_in(derived, batch)
    assert (counts.tolist(), copied.tolist()) == ([3] * batch, keys.tolist())
    assert copied.data_ptr() - counts.data_ptr() == -(-batch // 4) * 16
    memory = torch.zeros(3 * batch, dtype=torch.int64)  # as a kernel writes it
    for part, values in zip(counts_in(memory, batch), (counts, copied), strict=True):
        part.copy_(values)
    assert counts_of(keys, memory) is memory
    assert counts_of(keys) is derived


def test_begins_that_move_alone_are_a_difference():
    first, moved = (counts_derived(offsets(*ends)) for ends in ((0, 2, 6), (1, 3, 7)))
    assert first.differs(moved)
    assert not first.differs(counts_derived(offsets(0, 2, 6)))


def test_a_launcher_in_python_gets_the_counts_and_offsets_that_were_derived():
    given, derived = [], counts_of(offsets(0, 1, 5))
    answers = [(derived, (0,)), None]
    launcher = FunctionLauncher(
        lambda *arguments: given.append(arguments) or tensors(PACKED)[:1] * 2,
        takes=("seqused_k",),
        counts=Derivation(lambda *_: answers.pop(0)),
    )
    q, k, v = tensors(PACKED)
    ends, keys = offsets(0, 3, 6), offsets(0, 2, 6)
    launcher(q, k, v, ends, keys, 3, 4, True)
    *_, counts, own_ends, own_keys, max_q, max_k, known = given[0]
    assert (counts.tolist(), own_keys.tolist()) == ([1, 4], [0, 1, 5])
    assert (own_ends is ends, max_q, max_k, known) == (True, 3, 4, True)
    assert launcher(q, k, v, ends, keys, 3, 4, True) is None
    assert len(given) == 1


def test_counts_that_cannot_be_derived_any_more_leave_the_call_to_a_new_plan(packed_plan):
    kernel = InPrograms("forward", PACKED)
    kernel.program = keys_as_pages(tile=4)
    answers = {"now": derivation_for(torch.device("cpu")).derive}
    derivation = Derivation(lambda *given: answers["now"](*given))
    kernel.launcher = dataclasses.replace(kernel.launcher, takes=("seqused_k",), counts=derivation)
    packed_plan.forward = kernel.launcher
    call = functools.partial(packed_plan.planned, *tensors(PACKED), offsets(0, 3, 6), max_q=3, max_k=6)
    assert [call(offsets(0, 2, 6))[0] for _ in range(2)] == [True, False]
    answers["now"] = lambda *_: None
    assert [call(offsets(0, 2, 6))[0] for _ in range(2)] == [True, True]
    answers["now"] = lambda _, keys: (keys[:1], (0,))
    with pytest.raises(IndexError, match="returned a tensor of 4 bytes, expected 2 numbers of int32"):
        call(offsets(0, 2, 6))


def test_an_error_of_a_function_is_told_and_dropped(op):
    def fails(*_):
        raise ValueError("no such tile")

    kernel = InPrograms()
    kernel.program = kernel.program._replace(steps=(kernel.program.steps[0]._replace(function=fails),))
    op.forward = kernel.launcher
    op.planned(*tensors())
    with pytest.raises(RuntimeError, match="a compiled function failed: ValueError: no such tile"):
        op.planned(*tensors())
    assert kernel.ffi.dropped == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"buffers": (Computed(torch.clone, (0,)),)},
        {"steps": (FunctionCall(lambda *_: None, (Bundle(tuple, (0,)),)),)},
        {"steps": (FunctionCall("no function", (Operand(0),)),)},
    ],
    ids=["a computed tensor", "a bundle of tensors", "a function without a handle"],
)
def test_what_only_python_can_run_is_not_described(changes):
    kernel = InPrograms()
    interface = kernel.ffi.interface._replace(handle=lambda function: 1 if callable(function) else None)
    assert programs.described(kernel.program, kernel.bounds, interface) is not None
    assert programs.described(kernel.program._replace(**changes), kernel.bounds, interface) is None


def test_python_runs_what_c_does_and_what_it_computes_itself():
    computed = Computed(lambda x: x + 1, (0,))
    got = []
    step = FunctionCall(lambda *given: got.append(given), (Operand(1), Bundle(lambda *x: x, (0, 1)), None, 3))
    x = torch.ones(2)
    program = programs.LaunchProgram((computed,), (step,), (1,))
    (result,) = programs.run(program, (0,) * 7, [x])
    assert_equal(result, x + 1)
    assert got[0][0] is got[0][1][1] is result and got[0][1][0] is x and got[0][2:] == (None, 3)


def test_a_size_is_a_sum_in_units():
    assert BufferSize((1, 0, 0, 2, 0, 0, 3), 5, 4, 10).value((7, 100, 100, 3, 100, 100, 1)) == 50

"""Promises of programs: C++ and Python run the same, within bounds, and errors of functions are told."""

import dataclasses

import pytest
import torch
from support.launcher_kinds import PACKED, assert_equal, forward_function, tensors
from support.program_calls import InPrograms, keys_as_pages

from attnreg.core.launching import programs
from attnreg.core.launching.programs import ANY, BufferSize, Bundle, Computed, FunctionCall, Operand

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


def test_rows_are_read_as_pages_that_overlap_where_offsets_say_and_longer_pages_are_left_to_python(
    packed_plan,
):
    kernel = InPrograms("forward", PACKED)
    kernel.program = keys_as_pages(tile=4)
    kernel.launcher = dataclasses.replace(kernel.launcher, takes=("seqused_k",))
    packed_plan.forward = kernel.launcher
    q, k, v = tensors(PACKED)  # six rows

    def offsets(*numbers):
        return torch.tensor(numbers, dtype=torch.int32)

    ends, starts = offsets(0, 3, 6), offsets(0, 2, 6)

    def planned(max_k, *counts):
        used = offsets(*counts)
        given = {"seqused_k": used, "max_q": 3, "max_k": max_k}
        is_planned, (out, *_) = packed_plan.planned(q, k, v, ends, starts, **given)
        return is_planned, out

    assert planned(4, 2, 4)[0]
    for max_k, counts in ((4, (2, 4)), (4, (1, 0)), (6, (2, 4)), (5, (1, 4))):
        is_planned, out = planned(max_k, *counts)
        expected = q.clone()
        for start, rows, count in zip((0, 2), (slice(0, 3), slice(3, 6)), counts, strict=True):
            expected[rows] += k[start + count - 1] if count else 0
        assert (is_planned, kernel.ran) == (False, [])
        assert_equal(out, expected)
        pages, table = kernel.ffi.called[-1][2:4]
        size = 5 if max_k == 4 else max_k  # not that of a tile
        assert pages.shape == (6 - size + 1, size, *k.shape[1:]) and table.shape == (2, 1)
    kernel.ffi.called.clear()
    planned(7, 1, 1)
    assert (len(kernel.ran), kernel.ffi.called) == (1, []), "Python ran it, and C++ has launched nothing"


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

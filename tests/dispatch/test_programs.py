"""Promises of programs: C++ and Python run the same, within bounds, and errors of functions are told."""

import pytest
import torch
from support.launcher_kinds import PACKED, assert_equal, forward_function, tensors
from support.program_calls import InPrograms

from attnreg.core.launching import programs
from attnreg.core.launching.programs import ANY, Bundle, Computed, Operand, Size, Step

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
        {"steps": (Step(lambda *_: None, (Bundle(tuple, (0,)),)),)},
        {"steps": (Step("no function", (Operand(0),)),)},
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
    step = Step(lambda *given: got.append(given), (Operand(1), Bundle(lambda *x: x, (0, 1)), None, 3))
    x = torch.ones(2)
    program = programs.Program((computed,), (step,), (1,))
    (result,) = programs.run(program, (0,) * 7, [x])
    assert_equal(result, x + 1)
    assert got[0][0] is got[0][1][1] is result and got[0][1][0] is x and got[0][2:] == (None, 3)


def test_a_size_is_a_sum_in_units():
    assert Size((1, 0, 0, 2, 0, 0, 3), 5, 4, 10).value((7, 100, 100, 3, 100, 100, 1)) == 50

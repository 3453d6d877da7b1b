"""Promises of kernels that are given addresses: what they read, and when they can't run any more."""

import ctypes
import gc
import re

import pytest
import torch
from test_launchers import (
    PACKED,
    OnAddresses,
    assert_equal,
    backward_tensors,
    fails,
    forward_function,
    lse_of,
    tensors,
)

from attnreg.contract.launchers import AddressLauncher
from attnreg.errors import RegistrationError

pytestmark = pytest.mark.usefixtures("one_thread")


class Packed:
    """Calls `varlen_attn`'s front with a kernel on addresses for its forwards."""

    def __init__(self, plan, **changes):
        self.plan = plan
        self.kernel = OnAddresses("forward", PACKED, **changes)
        plan.forward = self.kernel.launcher
        self.tensors = tensors(PACKED)

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


def test_in_python_it_runs_as_the_call_cache_runs_it(pair):
    dense, packed = OnAddresses("backward", lse_strides=(12, 1, 2)), OnAddresses("forward", PACKED)
    given = backward_tensors()
    assert_equal(dense.launcher.on_addresses(*given), dense.launcher(*given))
    inputs = tensors(PACKED)
    assert_equal(packed.launcher.on_addresses(*inputs, pair, pair), packed.launcher(*inputs, pair, pair))
    assert packed.offsets == [0, 2, 6]
    for can in (False, None):
        packed.can = can
        assert packed.launcher.on_addresses(*inputs, pair, pair) is None


def test_a_backward_with_sinks_gets_their_address_behind_that_of_the_lse_which_is_copied_alone(
    packed_plan, pair
):
    inputs = query, key, value = tensors(PACKED)
    read = []

    def launch(addresses, workspace, stream):
        lse, sinks = (ctypes.c_void_p * 2).from_address(addresses)
        read[:] = (ctypes.c_float * 12).from_address(lse)[:], (ctypes.c_float * 2).from_address(sinks)[:]
        return True

    results = tuple((tuple(x.shape), x.stride(), x.dtype) for x in (*inputs, torch.ones(2)))
    launcher = AddressLauncher(
        run=None, launch=launch, operands=(5, 6), results=results, lse_strides=(1, 2), derive=lambda *_: []
    )
    packed_plan.options = {"counts_sinks": True}
    packed_plan.forward = lambda query, *_: (query + 1, query.sum(-1).t().contiguous())
    packed_plan.backward = launcher
    sinks = torch.tensor([0.25, -3.0], requires_grad=True)
    query.requires_grad_()
    for number in range(2):
        _, (out, lse) = packed_plan.planned(*inputs, pair, pair, sinks=sinks)
        assert packed_plan.planned_back(out, [query, sinks])[0] is (number == 0)
    wanted = [lse.T.flatten().tolist(), sinks.tolist()]
    assert read == wanted
    read.clear()
    given = out, query, key, value, out, lse, sinks, pair, pair
    gradients = launcher.on_addresses(*(x.detach() for x in given))
    assert [x.shape for x in gradients] == [x.shape for x in (*inputs, sinks)] and read == wanted


# ---- what is derived of offsets


def test_what_is_derived_of_offsets_is_kept_while_they_are_unchanged(packed, pair):
    others = torch.tensor([0, 3, 6], dtype=torch.int32)
    for given in (pair, others, pair):
        for _ in range(4):
            packed(given)
        assert packed.kernel.offsets == given.tolist()
    assert [one[0] is others for one in packed.kernel.derived] == [False, True, False]
    pair[1] = 1
    assert [packed(pair) for _ in range(2)] == [True, False]
    assert packed.kernel.offsets == [0, 1, 6]
    for begin in (3, 2, 5):  # in memory that the one before may have left
        pair.data = torch.tensor([0, begin, 6], dtype=torch.int32)
        assert [packed(pair) for _ in range(2)] == [True, False]
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


# ---- a kernel that can't run, and errors


@pytest.mark.parametrize("can", [False, None], ids=["launch", "derive"])
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
    "operand": ({"operands": (0, 9)}, IndexError, "AddressLauncher.operands has 9, expected less than 6"),
    "launch": (
        {"launch": lambda *_: None},
        TypeError,
        "AddressLauncher.launch returned a NoneType, expected True or False",
    ),
    "derive": (
        {"derive": lambda *_: (1,)},
        TypeError,
        "AddressLauncher.derive returned a tuple, expected a list of tensors or None",
    ),
    "tensors": (
        {"derive": lambda *_: [3]},
        TypeError,
        "AddressLauncher.derive returned a list with a int, expected tensors",
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
    ("changes", "message"),
    [
        ({"operands": [0, 1]}, "AddressLauncher.operands: got [0, 1], expected a tuple"),
        ({"operands": (0, -1)}, "AddressLauncher: got -1, expected whole numbers from 0"),
        ({"lse_strides": 0}, "AddressLauncher.lse_strides: got 0, expected a tuple"),
        ({"workspace": 0.5}, "AddressLauncher: got 0.5, expected whole numbers from 0"),
    ],
)
def test_a_launcher_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(RegistrationError) as error:
        AddressLauncher(**{"run": None, "launch": None, "operands": (), "results": ()} | changes)
    assert str(error.value) == message

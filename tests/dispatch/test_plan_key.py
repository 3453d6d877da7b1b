"""Promises of the key that plans are kept under: calls with other decisions have other keys."""

import pytest
import torch
from support import truth
from support.options import NUMBERS, number_of

import attnreg
from attnreg.core.contract.backend import KEYED_BY, Call
from attnreg.core.dispatch import calls, scope
from attnreg.core.dispatch.calls import plan_for
from attnreg.core.dispatch.planning import Native
from attnreg.core.dispatch.state import CallKind, state
from attnreg.core.selection.decision import Preference

PACKED = [torch.randn(6, 2, 16) for _ in "qkv"]
OFFSETS = torch.tensor([0, 2, 6], dtype=torch.int32)
CALL = Call(0.25, 4, 4, cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS)

# For each field of `Call` another value that a decision may depend on, and one that it doesn't.
OTHER = {
    "scale": (-0.25, 0.5),
    "max_q": (5, 4),
    "max_k": (5, 4),
    "window": ((1, 0), (-1, -1)),
    "cu_seqlens_q": (torch.tensor([0, 2, 4, 6]).int(), torch.tensor([0, 3, 6]).int()),
    "cu_seqlens_k": (torch.tensor([0, 6]).int(), torch.tensor([0, 3, 6]).int()),
    "seqused_k": (torch.tensor([1, 2]).int(), None),
    "block_table": (torch.zeros(2, 1).int(), None),
    "attn_bias": (torch.zeros(4, 4), None),
    "alibi_slopes": (torch.zeros(2), None),
    "rng_state": (None, torch.zeros(2, dtype=torch.uint64)),
    "deterministic": (True, False),
    "batch_invariant": (True, False),
    "grad_lse": (torch.zeros(2, 6), None),
    "sinks": (torch.zeros(2), None),
    "key_ranges": (torch.zeros(6, 1, 2).int(), None),
    "score_mod": (lambda score, *_: score, None),
    "mask_mod": (lambda batch, head, query, key: query >= key, None),
    "further": ((("made_up", 2.0),), ()),
    **{row.name: (number_of(row), row.off) for row in NUMBERS if row.name in Call._fields},
}


def test_every_field_of_a_call_is_tested_and_listed_in_keyed_by():
    assert OTHER.keys() == set(Call._fields) <= KEYED_BY.keys()


@pytest.mark.parametrize("field", Call._fields)
def test_each_field_of_a_call_changes_the_kind_as_keyed_by_declares(field):
    differs, same = OTHER[field]
    enters = KEYED_BY[field] not in ("nothing", "length", "tensor")
    if KEYED_BY[field] == "tensor":
        enters = getattr(CALL, field) is None  # the other test changes rank, dtype and device of offsets
    assert (CALL._replace(**{field: differs}).kind() != CALL.kind()) == enters
    assert CALL._replace(**{field: same}).kind() == CALL.kind()


@pytest.mark.parametrize("field", [field for field in Call._fields if KEYED_BY[field] == "tensor"])
@pytest.mark.parametrize("change", [lambda x: x[None], lambda x: x.double(), lambda x: x.to("meta")])
def test_rank_dtype_and_device_of_each_tensor_change_the_kind(field, change):
    tensor = OTHER[field][0]
    keys = {CALL._replace(**{field: one}).kind() for one in (tensor, change(tensor))}
    assert len(keys) == 2


@pytest.fixture
def plans(fake):
    """Return how many plans a function of the tests adds, all by a backend that takes everything."""
    mine = fake("mine")
    with attnreg.register_backend(mine.backend):

        def plans(*given, direction="forward", **options):
            query, key, value, call = given
            before = len(state().plans())
            plan = plan_for(direction, query, key, value, call, options.pop("choice", None), **options)
            if direction == "forward":
                plan.run(query, key, value, call)
            else:
                lse = torch.zeros(query.shape[1], query.shape[0])
                plan.run(query, query, key, value, query, lse, call)
            return len(state().plans()) - before

        yield plans


def wide(tensors):
    return [torch.cat([x, x], -1) for x in tensors]


DIFFERENT = {
    "direction": lambda plans: plans(*PACKED, CALL, direction="backward"),
    "needs_backward": lambda plans: plans(*PACKED, CALL, needs_backward=False),
    "choice": lambda plans: plans(
        *PACKED, CALL, choice=scope.make_choice(Preference("a test", ("mine", "math"), exclusive=False))
    ),
    "shape": lambda plans: plans(*wide(PACKED), CALL),
    "head dim of the value": lambda plans: plans(*PACKED[:2], wide(PACKED)[2], CALL),
    "dtype": lambda plans: plans(*[x.half() for x in PACKED], CALL),
    "another native kernel": lambda plans: plans(*PACKED, CALL, native=Native("cpu")),
}


@pytest.mark.parametrize("different", DIFFERENT.values(), ids=DIFFERENT)
def test_whatever_else_a_decision_depends_on_makes_another_plan(plans, different):
    assert plans(*PACKED, CALL) == 1
    assert plans(*PACKED, CALL) == 0
    assert different(plans) == 1
    assert different(plans) == 0


def test_how_dense_tensors_lie_makes_another_plan(plans):
    dense = [torch.randn(2, 2, 2, 16) for _ in "qkv"]
    call = Call(0.25, 2, 2)
    assert plans(*dense, call) == 1
    plan = plan_for("forward", *dense, call, None, bhsd=True)
    assert not plan.is_checked  # a new one


def test_capturing_a_graph_makes_another_plan(plans, monkeypatch):
    class OnGpu:
        """Gives what the key reads of a tensor, as one on a GPU does."""

        def __init__(self, tensor):
            self.tensor = tensor

        is_cuda = True

        def __getattr__(self, name):
            return getattr(self.tensor, name)

    keys = []
    monkeypatch.setattr(calls, "kind_of", lambda *_: CallKind())
    monkeypatch.setattr(calls, "make_plan", lambda now, *_: keys.append(tuple(now.kinds)))
    for name in ("check", "spec_of", "check_values"):
        monkeypatch.setattr(calls, name, lambda *_: None)
    query, key, value = PACKED
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        plan_for("backward", OnGpu(query), key, value, CALL, None)
    assert keys[0] != keys[1]


def test_the_values_of_tensors_and_their_strides_make_no_other_plan(plans):
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) * 2 for x in PACKED]
    assert plans(*PACKED, CALL) == 1
    assert plans(*strided, CALL._replace(cu_seqlens_q=torch.tensor([0, 3, 6]).int())) == 0


def test_one_key_serves_calls_of_different_scale_each_with_its_own(plans):
    """The sign decides, as some kernels take positive scales only; the value is the kernel's to read."""
    for scale in (0.25, 0.5, 1.0):
        call = CALL._replace(scale=scale)
        out, _ = plan_for("forward", *PACKED, call, None).run(*PACKED, call)
        truth.assert_near(out, truth.varlen(*PACKED, OFFSETS, OFFSETS, scale=scale)[0])
    assert len(state().plans()) == 1


def of_length(length):
    """Return the arguments of a packed call of one sequence."""
    tensors = [torch.randn(length, 2, 16) for _ in "qkv"]
    offsets = torch.tensor([0, length], dtype=torch.int32)
    return *tensors, Call(0.25, length, length, cu_seqlens_q=offsets, cu_seqlens_k=offsets)


def test_new_lengths_of_a_class_make_no_plan_and_others_do(plans, ran):
    assert [plans(*of_length(length)) for length in (1, 2, 3, 40, 1000, 1)] == [1, 1, 0, 0, 0, 0]
    longer_queries = CALL._replace(max_q=5)
    assert [plans(*PACKED, call) for call in (CALL, longer_queries, CALL)] == [0, 1, 0]
    assert ran() == {"mine": (9, 0)}


def reading_lengths(spec):
    """Refuse nothing, by lengths that no cut names: each length may be decided otherwise."""
    return () if spec.max_q >= 0 else ("max_q must be 0 or more",)


def test_plans_of_ever_new_lengths_are_dropped_before_there_are_too_many(fake, monkeypatch, ran):
    """Where lengths count exactly; elsewhere there is one a class."""
    monkeypatch.setattr("attnreg.core.dispatch.state.MOST_PLANS", 8)
    made = []
    with attnreg.register_backend(fake("mine", refuses=reading_lengths).backend):
        for length in range(1, 41):
            *tensors, call = of_length(length)
            plan = plan_for("forward", *tensors, call, None)
            made.append(not plan.is_checked)
            plan.run(*tensors, call)
            assert len(state().plans()) <= 8
    assert made == [True] * 40
    assert ran() == {"mine": (40, 0)}


def test_kinds_are_dropped_before_there_are_too_many(plans, monkeypatch, ran):
    monkeypatch.setattr("attnreg.core.dispatch.state.MOST_PLANS", 8)
    for dim in range(1, 41):
        plans(*[torch.randn(6, 2, dim) for _ in "qkv"], CALL)
        assert len(state().kinds) <= 8
    assert ran() == {"mine": (40, 0)}

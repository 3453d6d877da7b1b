"""Promises of the call cache for `varlen_attn`: which calls it runs, and that nothing else changes."""

import contextlib
import functools
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from support.launcher_kinds import PACKED, SEEN, forward_function, lse_of, op_launcher, tensors
from support.options import NUMBERS, number_of
from support.varlen_calls import LENGTHS, assert_right, attend
from test_call_cache import deterministic, offset_by_one, scoped
from test_launchers import fails

import attnreg
from attnreg.core import aten
from attnreg.core.contract.backend import Call
from attnreg.core.dispatch import counters
from attnreg.core.launching.launchers import MAX_K, MAX_Q, FunctionLauncher, NativeLauncher
from attnreg.core.varlen import plans
from attnreg.errors import InvalidInputError

pytestmark = pytest.mark.usefixtures("one_thread", "no_graph_trees")

# ---- repeated calls

# Options of the call, and of its inputs.
CALLS = {
    "plain": ({}, {}),
    "causal": ({"window": (-1, 0)}, {}),
    "window and scale": ({"window": (1, 0), "scale": 0.3}, {}),
    **{
        f"{dtype}, shared key heads": ({"enable_gqa": True, "dtype": dtype}, {"dtype": dtype, "heads_k": 2})
        for dtype in (torch.float16, torch.bfloat16, torch.float64)
    },
}


@pytest.mark.parametrize("name", ["cpu", "math"])
@pytest.mark.parametrize(("options", "of_inputs"), CALLS.values(), ids=CALLS)
def test_a_repeated_call_takes_no_plan_is_right_and_is_counted(
    compiled, packed, planned, ran, name, options, of_inputs
):
    counts = []
    with attnreg.register_backend(name):
        for seed in range(5):
            inputs = packed((5, 1, 8), (7, 2, 8), seed=seed, **of_inputs)
            counts.append(planned(lambda: assert_right(inputs, **options)))  # noqa: B023
            assert ran() == {name: (1, 1)}
    # The first results are checked against the contract. A launcher that a backend doesn't offer is asked for
    # again after one use and after two: the `cpu` backend's compiled kernel has none for float64.
    has_launcher = (name, of_inputs.get("dtype")) != ("cpu", torch.float64)
    assert counts[:2] + counts[4:] == [2, 2, 0]
    assert counts[2:4] == [0, 0] or (counts[2:4] == [2, 2] and not has_launcher)


@pytest.mark.parametrize("name", ["cpu", "math"])
def test_new_lengths_of_a_class_take_no_plan_and_are_right(compiled, packed, planned, ran, name):
    drawn = [
        (5, 3, 8),
        (9, 7),
        (4, 4, 4, 4),
        (1, 0, 63),
        (120, 2, 2, 2, 2),
    ]  # of 4 n tokens: see `stride_class`
    with attnreg.register_backend(name):
        for _ in range(2):
            assert_right(packed(drawn[0]), window=(-1, 0))
        for lengths in drawn:
            assert planned(lambda: assert_right(packed(lengths, seed=1), window=(-1, 0))) == 0  # noqa: B023
    assert ran() == {name: (7, 7)}


def test_a_length_across_a_cut_takes_a_plan(compiled, packed, planned, ran):
    """A single sequence is no cut; one query, more queries than keys, and a window that hides nothing are."""
    with attnreg.register_backend("math"):
        for _ in range(2):
            assert_right(packed((4, 8)), window=(6, -1))
        for lengths, is_new in {(12,): 0, (4, 4): 2, (2, 6): 0, (8,): 0, (1, 1, 1, 1): 2}.items():
            for expected in (is_new, is_new, 0):
                assert planned(lambda: assert_right(packed(lengths), window=(6, -1))) == expected  # noqa: B023
        for _ in range(2):
            assert planned(lambda: assert_right(packed((4, 8), (8, 12)), window=(6, -1))) == 2
        assert planned(lambda: assert_right(packed((4, 8), (8, 12)), window=(6, -1))) == 0
    assert set(ran()) == {"math"}


def test_several_threads_get_their_own_results(compiled, packed):
    def work(seed):
        for number in range(20):
            assert_right(packed((5, 1, 8), seed=100 * seed + number), window=(-1, 0))
        return True

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [True] * 4


# ---- what makes another call


def of(given, *tensors):
    """Return the inputs of a call with other tensors."""
    return *tensors, *given[3:]


def paged(inputs):
    pages = torch.zeros(2, 4, 4, 16)
    options = {"seqused_k": offsets(*LENGTHS), "block_table": offsets(0, 1)[:, None]}
    return attend((inputs[0], pages, pages, inputs[3], None, 4, 4), **options)


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


def whole_ranges():
    return torch.tensor([[[0, length]] for length in LENGTHS for _ in range(length)], dtype=torch.int32)


# For each field of `Call` a call that differs in it; None where `varlen_attn` has no such argument.
FIELDS = {
    "scale": lambda given: attend(given, scale=0.5),
    "max_q": lambda given: attend((*given[:5], 5, 4)),
    "max_k": lambda given: attend((*given[:5], 4, 5)),
    "window": lambda given: attend(given, window=(1, -1)),
    "cu_seqlens_q": lambda given: attend((*given[:3], *[offsets(0)] * 2, 4, 4)),
    "cu_seqlens_k": lambda given: attend((*given[:4], given[3].clone(), 4, 4)),
    "seqused_k": lambda given: attend(given, seqused_k=offsets(*LENGTHS)),
    "block_table": paged,
    "attn_bias": None,
    "alibi_slopes": lambda given: attend(given, alibi_slopes=torch.tensor([0.5, 0.1, 0.3, 0.2])),
    "rng_state": None,
    "deterministic": lambda given: deterministic(lambda: attend(given)),
    "batch_invariant": None,  # a setting: a change drops everything
    "grad_lse": None,
    "sinks": lambda given: attend(given, sinks=torch.zeros(4)),
    "key_ranges": lambda given: attend(given, key_ranges=whole_ranges()),
    "score_mod": lambda given: attend(given, score_mod=lambda score, *_: score * 2.0),
    "mask_mod": lambda given: attend(given, mask_mod=lambda batch, head, query, key: query >= key),
    **{
        row.name: functools.partial(attend, **{row.argument: number_of(row)})
        for row in NUMBERS
        if row.name in Call._fields and row.argument
    },
    "bias_gradient": None,
    "further": None,  # the call cache runs no call with a further option: `test_made_up_option.py`
}
FURTHER = {
    "causal": lambda given: attend(given, is_causal=True),
    "heads": lambda given: attend((*[x[:, :3] for x in given[:3]], *given[3:])),
    "shape": lambda given: attend((*[x[:0] for x in given[:3]], *[offsets(0, 0, 0)] * 2, 4, 4)),
    "dtype": lambda given: attend(of(given, *[x.bfloat16() for x in given[:3]])),
    "strides": lambda given: attend(
        of(given, *[x.transpose(0, 1).contiguous().transpose(0, 1) for x in given[:3]])
    ),
    "alignment": lambda given: attend(of(given, *offset_by_one(given[:3]))),
    "a gradient": lambda given: attend(of(given, *[x.clone().requires_grad_() for x in given[:3]])),
    "no grad mode": lambda given: torch.no_grad()(attend)(given),
    "enable_gqa": lambda given: attend(given, enable_gqa=True),
    "choice": lambda given: scoped(lambda: attend(given)),
    "backend": lambda given: attend(given, backend="math"),
}
DIFFERENT = {name: differs for name, differs in {**FIELDS, **FURTHER}.items() if differs is not None}


def test_each_field_of_a_call_has_a_test_here():
    assert FIELDS.keys() == set(Call._fields)
    lacking = {name for name, differs in FIELDS.items() if differs is None}
    assert not lacking & set(inspect.signature(attnreg.varlen_attn).parameters)


@pytest.mark.parametrize("differs", DIFFERENT.values(), ids=DIFFERENT)
def test_a_call_that_differs_is_planned(compiled, packed, planned, differs):
    given = packed(LENGTHS, grad=False)
    given = (*given[:4], given[3], *given[5:])  # one tensor of offsets for both
    aten.ensure()  # `use_backend` installs the routers, and everything is planned anew then
    for _ in range(3):
        attend(given)
    assert planned(lambda: attend(given)) == 0
    assert planned(lambda: differs(given)) == 1
    assert planned(lambda: attend(given)) == 0


@pytest.mark.parametrize("option", [{"key_ranges": None}, {"num_splits": 0}, {"softcap": None}], ids=str)
def test_an_option_that_is_given_as_off_keeps_the_call_in_the_cache(compiled, packed, planned, option):
    given = packed(LENGTHS, grad=False)
    for _ in range(3):
        attend(given)
    assert planned(lambda: attend(given, **option)) == 0


def test_a_scale_of_zero_is_not_no_scale(packed_plan, pair):
    inputs = tensors(PACKED)
    packed_plan.forward = forward_function
    for scale in (None, 0.0, -0.0, 1.0):
        assert packed_plan.planned(*inputs, pair, pair, scale=scale)[0]
        assert packed_plan.given[4] == scale
    assert not packed_plan.planned(*inputs, pair, pair, scale=0.0)[0]


# ---- offsets


def test_on_a_cpu_offsets_are_read_each_time(compiled, packed, planned, ran):
    memory = numpy.array([0, 2, 6], dtype=numpy.int32)
    cu_seqlens = torch.from_numpy(memory)
    query, key, value, *_ = packed(LENGTHS)
    inputs = query, key, value, cu_seqlens, cu_seqlens, 6, 6
    for name in ("cpu", "math"):
        with attnreg.register_backend(name):
            memory[1] = 2
            for _ in range(3):
                assert_right(inputs)
            memory[1] = 5  # which leaves no trace in the tensor
            assert planned(lambda: assert_right(inputs)) == 0
            memory[1] = 7
            with pytest.raises(InvalidInputError, match="no decrease"):
                attend(inputs)
    assert ran() == {"cpu": (4, 4), "math": (4, 4)}


def test_a_launcher_of_a_packed_call_on_a_cpu_is_told_that_nothing_is_known_of_rows(
    compiled, packed, planned, fake
):
    mine, given = fake("mine"), []

    def specialize(direction, tensors, call):
        kernel = getattr(mine, direction)

        def launcher(*arguments):
            *tensors, cu_seqlens_q, cu_seqlens_k, max_q, max_k, known = arguments
            given.append((direction, max_q, max_k, known))
            lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
            return kernel(*tensors, call._replace(max_q=max_q, max_k=max_k, **lengths))

        return launcher

    kernels = attnreg.Kernels(mine.forward, mine.backward, specialize)
    counts = []
    with attnreg.register_backend(fake("mine", load=lambda: kernels).backend):
        for lengths in ((2, 0, 6), (2, 0, 6), (4, 8), (0, 7, 0, 5)):
            counts.append(planned(lambda: assert_right(packed(lengths))))  # noqa: B023
    assert counts == [2, 2, 0, 0]
    both = ("forward", "backward")
    assert given == [(direction, longest, longest, False) for longest in (8, 7) for direction in both]


def test_offsets_that_were_written_to_or_replaced_take_no_plan(packed_plan, pair):
    packed_plan.forward = lambda q, k, v, cu_seqlens_q, *_: (q * cu_seqlens_q[1], lse_of(q))
    inputs = tensors(PACKED)
    assert packed_plan.planned(*inputs, pair, pair)[0]
    for begin in (2, 3, 1):
        pair[1] = begin
        planned, (out, _) = packed_plan.planned(*inputs, pair, pair)
        assert not planned
        assert torch.equal(out, inputs[0] * begin)
    pair.data = offsets(0, 5, 6)
    planned, (out, _) = packed_plan.planned(*inputs, pair, pair)
    assert not planned
    assert torch.equal(out, inputs[0] * 5)
    with torch.inference_mode():  # of which torch counts no writes
        one = offsets(0, 4, 6)
    planned, (out, _) = packed_plan.planned(*inputs, one, one)
    assert not planned
    assert torch.equal(out, inputs[0] * 4)


def test_one_tensor_of_offsets_for_both_sides_is_another_kind_than_two(packed_plan, pair):
    packed_plan.forward = forward_function
    inputs = tensors(PACKED)
    for others in (pair, pair.clone()):
        assert [packed_plan.planned(*inputs, pair, others)[0] for _ in range(2)] == [True, False]


def test_tensors_without_memory_or_of_other_lengths_than_the_offsets_have_no_key(packed_plan, pair):
    packed_plan.forward = forward_function
    query, key, value = tensors(PACKED)
    freed = value.clone()
    freed.untyped_storage().resize_(0)
    wrong = {
        "freed": (query, key, freed, pair, pair),
        "keys and values of other lengths": (query, key, value[:5], pair, pair),
        "offsets of other batches": (query, key, value, pair, offsets(0, 1, 2, 6)),
        "offsets of two dimensions": (query, key, value, pair[None], pair[None]),
    }
    for given in wrong.values():
        assert [packed_plan.planned(*given)[0] for _ in range(3)] == [True] * 3
    for longest in (-1, 2**31):
        rest = {"max_q": longest}
        assert [packed_plan.planned(query, key, value, pair, pair, **rest)[0] for _ in range(2)] == [True] * 2


@pytest.mark.parametrize("of_a_graph", [False, True])
def test_nothing_is_kept_of_offsets_in_the_memory_of_a_graph(compiled, monkeypatch, pair, of_a_graph):
    monkeypatch.setattr(plans, "needs_graph_memory", lambda _: of_a_graph)
    monkeypatch.setattr(plans, "kept_for", lambda plan, tensors, call, cuts: ("kept", cuts))
    call = Call(1.0, 4, 4, (-1, -1), pair, pair)
    found = plans._kept(plans.Ran((), "plan", call, None), (), call, ())
    assert found == (None if of_a_graph else ("kept", ()))


# ---- what drops everything


def test_a_change_drops_packed_calls(packed_plan, pair):
    query, key, value = tensors(PACKED)
    query.requires_grad_()
    packed_plan.forward, packed_plan.backward = forward_function, lambda grad, *_: (grad, grad, grad)

    def step():
        was_planned, (out, _) = packed_plan.planned(query, key, value, pair, pair)
        return was_planned, packed_plan.planned_back(out, [query])[0]

    assert [step() for _ in range(3)][-1] == (False, False)
    packed_plan.module.drop()
    assert [step() for _ in range(3)] == [(True, True), (False, False), (False, False)]
    packed_plan.meanwhile = packed_plan.module.drop
    packed_plan.module.drop()
    assert [step() for _ in range(2)] == [(True, True), (True, True)]


def test_scoped_calls_are_kept_and_their_backward_gets_the_choice(compiled, packed, planned, ran):
    aten.ensure()  # the first `use_backend` of a process installs the routers, which drops what is kept
    inputs = packed(LENGTHS)
    outs = []
    for _ in range(3):
        assert_right(inputs)
        assert_right(inputs, backend="math")
    assert ran() == {"cpu": (3, 3), "math": (3, 3)}
    with attnreg.use_backend("math"):
        for _ in range(3):
            assert_right(inputs)
        assert planned(lambda: outs.append(attend(inputs))) == 0
    (out,) = outs
    thread = threading.Thread(target=out.backward, args=(torch.ones_like(out),))
    assert planned(lambda: (thread.start(), thread.join())) == 0
    assert ran() == {"math": (4, 4)}
    assert planned(lambda: assert_right(inputs)) == 0
    assert ran() == {"cpu": (1, 1)}


@pytest.mark.parametrize("counts", [True, False])
def test_calls_with_sinks_have_entries_of_their_own_which_count_them_or_are_rescaled(
    packed_plan, pair, counts
):
    """A launcher that counts is given sinks in front of the offsets; this one returns twice the query."""
    packed_plan.options = {"counts_sinks": counts}
    given = []

    def forward(query, key, value, *rest):
        given.append(rest)
        return 2 * query, query.sum(-1).t().contiguous()

    def backward(grad, query, key, value, out, lse, *rest):
        given.append(rest)
        return grad * 1, grad * 2, grad * 3, *(5 * x for x in rest[:counts])

    packed_plan.forward, packed_plan.backward = forward, backward
    query, key, value = (leaf.requires_grad_() for leaf in tensors(PACKED))
    for number in range(3):
        sinks = torch.linspace(-1, 1 + number, query.shape[1]).requires_grad_()
        with_plan, (out, _) = packed_plan.planned(query, key, value, pair, pair, sinks=sinks)
        planned_back, grads = packed_plan.planned_back(out, [query, key, value, sinks])
        assert (with_plan, planned_back) == (number == 0, number == 0)
        first = torch.linspace(-1, 1, query.shape[1])
        assert torch.equal(packed_plan.given[-1], first), "plans are given them"
    share = (query.sum(-1).t() - sinks[:, None]).sigmoid().mT[..., None]
    torch.testing.assert_close(out, 2 * query if counts else 2 * query * share)
    # Kernels were given the gradient of the output as it came.
    assert all(
        torch.equal(grad, torch.full_like(grad, times))
        for times, grad in zip((1, 2, 3), grads[:3], strict=True)
    )
    of_sinks = 5 * sinks if counts else -((1 - share) * out.sum(-1, keepdim=True)).sum((0, 2))
    torch.testing.assert_close(grads[3], of_sinks)
    assert [len(rest) for rest in given] == [5 + counts] * 4
    for rest in given:
        assert rest[-5:] == (pair, pair, 4, 4, False)
    assert not counts or torch.equal(given[-1][0], sinks)


def test_sinks_are_part_of_the_key_unless_the_program_gets_the_lse(packed_plan, pair):
    inputs = tensors(PACKED)
    packed_plan.forward = lambda query, *_: (query + 1, query.sum(-1).t().contiguous())
    sinks = torch.ones(inputs[0].shape[1])
    strided = sinks.repeat(2)[::2]
    for is_new, rest in ((True, {"returns_lse": False}), (False, {"returns_lse": True})):
        for given in (None, sinks, sinks.double(), strided):
            assert packed_plan.planned(*inputs, pair, pair, sinks=given, **rest)[0] is is_new
            assert packed_plan.planned(*inputs, pair, pair, sinks=given, **rest)[0] is False


def test_a_launcher_that_counts_sinks_and_returns_no_gradient_of_them_is_an_error(packed_plan, pair):
    packed_plan.options = {"counts_sinks": True}
    packed_plan.forward = lambda query, *_: (query + 1, query.sum(-1).t().contiguous())
    query, key, value = (leaf.requires_grad_() for leaf in tensors(PACKED))
    sinks = torch.ones(query.shape[1], requires_grad=True)
    wrong = {
        "got 3 gradients": lambda grad, *_: (grad * 1, grad * 2, grad * 3),
        "got the gradient of sinks": lambda grad, *_: (grad * 1, grad * 2, grad * 3, grad),
    }
    for message, backward in wrong.items():
        attnreg.core.registry.changed()
        packed_plan.backward = backward
        for number in range(2):
            _, (out, _) = packed_plan.planned(query, key, value, pair, pair, sinks=sinks)
            if number == 0:
                packed_plan.planned_back(out, [query, sinks])
        with pytest.raises(RuntimeError, match=f"a launcher breaks the contract: {message}"):
            packed_plan.planned_back(out, [query, sinks])


# ---- counts of keys


def test_a_launcher_is_given_counts_of_keys_in_front_of_the_offsets_and_new_ones_take_no_plan(
    packed_plan, pair
):
    given, inputs = [], tensors(PACKED)

    def forward(query, key, value, *rest):
        given.append(rest)
        return forward_function(query, key, value)

    packed_plan.forward = forward
    every = [offsets(1, number) for number in range(4)]
    plans_made = [packed_plan.planned(*inputs, pair, pair, seqused_k=used)[0] for used in every]
    assert plans_made == [True, False, False, False]
    assert packed_plan.given[-2] is every[0], "plans are given them"
    assert [rest[0] for rest in given] == every[1:]
    assert {rest[1:] for rest in given} == {(pair, pair, 4, 4, False)}
    assert packed_plan.planned(*inputs, pair, pair)[0], "a call without counts is another kind"
    for other in (every[0].long(), offsets(1, 2, 3, 4)[::2]):
        given.clear()
        assert [packed_plan.planned(*inputs, pair, pair, seqused_k=other)[0] for _ in range(2)] == [
            True,
            False,
        ]


def test_counts_that_fit_no_call_are_left_to_the_plan(packed_plan, pair):
    packed_plan.forward, inputs = forward_function, tensors(PACKED)
    freed = offsets(1, 2)
    freed.untyped_storage().resize_(0)
    for wrong in (offsets(1), offsets(1, 2, 3), offsets(1, 2)[None], freed):
        assert [packed_plan.planned(*inputs, pair, pair, seqused_k=wrong)[0] for _ in range(2)] == [True] * 2
    assert packed_plan.planned(*inputs, pair, pair, seqused_k=[1, 2]) is None
    assert packed_plan.planned(*inputs, pair, pair, seqused_k=offsets(1, 2), sinks=torch.ones(2)) is None
    inputs[0].requires_grad_()
    assert packed_plan.planned(*inputs, pair, pair, seqused_k=offsets(1, 2)) is None


def test_one_of_torchs_kernels_is_given_counts_by_name_and_a_longest_query_of_1_only_if_that_is_known(
    packed_plan,
):
    q, k, v = tensors((2, 2, 8))
    ends, used = offsets(0, 1, 2), offsets(1, 0)
    packed_plan.forward = op_launcher(MAX_Q, MAX_K, op="attnreg_used")
    packed_plan.forward.takes, packed_plan.forward.folds = ("seqused_k",), True
    for _ in range(2):
        SEEN.clear()
        packed_plan.planned(q, k, v, ends, ends, max_q=1, seqused_k=used)
    ((lengths, options),) = SEEN
    assert (lengths, options.keys()) == ((2, 4), {"seqused_k"}) and options["seqused_k"] is used
    cache = [x[:, None] for x in (k, v)]
    step = q[:, None], *cache, None, None, used, None, False, (-1, -1), None, 0, False
    for offsets_of_step in ((ends, ends), (None, None)):  # of a cache they are known to be regular
        SEEN.clear()
        assert packed_plan.module.decode(*step, *offsets_of_step) is not None
    assert SEEN[0][0] == (1, 1)


def test_a_kernel_without_such_an_argument_offers_no_launcher(packed_plan, pair):
    packed_plan.forward = op_launcher(MAX_Q, MAX_K, op="attnreg_packed")
    packed_plan.forward.takes = ("seqused_k",)
    packed_plan.plan = packed_plan.plan._replace(counters=(counters.call_counter("tests", "forward"),))
    for _ in range(2):
        assert packed_plan.planned(*tensors(PACKED), pair, pair, seqused_k=offsets(1, 2))[0]
    (row,) = attnreg.stats().failures
    assert "attnreg_packed takes no seqused_k behind its tensors" in row.message


@pytest.mark.parametrize("form", ["a function", "FunctionLauncher", "NativeLauncher"])
def test_a_launcher_that_does_not_say_that_it_takes_counts_is_not_used_for_calls_with_them(
    compiled, packed, fake, form
):
    def launch(query, key, value, cu_seqlens_q, cu_seqlens_k, max_q, max_k, known):
        raise AssertionError

    launcher = {
        "a function": launch,
        "FunctionLauncher": FunctionLauncher(launch),
        "NativeLauncher": NativeLauncher(launch, 1),
    }[form]
    mine = fake("mine")
    kernels = attnreg.Kernels(mine.forward, mine.backward, lambda *_: launcher)
    given = packed(LENGTHS, grad=False)
    with attnreg.register_backend(fake("mine", load=lambda: kernels).backend):
        outs = [attend(given, seqused_k=offsets(2, 3)) for _ in range(4)]
    assert [call.seqused_k.tolist() for *_, call in mine.forwards] == [[2, 3]] * 4
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert not attnreg.stats().failures


# ---- errors and counts


def test_errors_are_the_callers_and_nothing_is_counted(packed_plan, pair):
    query, key, value = tensors(PACKED)
    query.requires_grad_()
    raises = functools.partial(pytest.raises, LookupError, match="of a kernel")
    packed_plan.backward = fails
    for first in (True, False):
        out = packed_plan.planned(query, key, value, pair, pair)[1][0]
        with contextlib.nullcontext() if first else raises(), ThreadPoolExecutor(1) as pool:
            pool.submit(packed_plan.planned_back, out, [query]).result()
    packed_plan.forward = fails
    packed_plan.module.drop()
    packed_plan.planned(query, key, value, pair, pair)
    with raises():
        packed_plan.planned(query, key, value, pair, pair)
    packed_plan.meanwhile = fails
    packed_plan.module.drop()
    with raises():
        packed_plan.planned(query, key, value, pair, pair)
    assert packed_plan.counted() == 0


def test_an_lse_of_any_strides_comes_out_contiguous(packed_plan, pair):
    packed_plan.forward = lambda q, *_: (q, lse_of(q).t().contiguous().t())
    inputs = tensors(PACKED)
    for _ in range(3):
        _, lse = attnreg.varlen_attn(*inputs, pair, pair, 4, 4, return_aux=attnreg.AuxRequest(lse=True))
        assert lse.is_contiguous()
        assert torch.equal(lse, lse_of(inputs[0]))


def test_only_an_lse_that_is_returned_is_a_result_of_the_node_and_its_gradient_leaves_the_cache(
    packed_plan, pair
):
    inputs = tensors(PACKED)
    leaf = inputs[0].requires_grad_()
    for _ in range(3):
        _, (out, lse) = packed_plan.planned(*inputs, pair, pair, returns_lse=False)
        assert (out.requires_grad, lse) == (True, None)
        _, (out, lse) = packed_plan.planned(*inputs, pair, pair)
        assert out.grad_fn is lse.grad_fn
        grad = torch.randn(lse.shape)
        assert packed_plan.planned_back(lse, [leaf], grad)[0]
        assert torch.equal(packed_plan.given[-2], grad)

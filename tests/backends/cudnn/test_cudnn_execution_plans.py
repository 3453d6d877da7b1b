"""Promises about cuDNN's execution plans: which batches share one, when one is built
and dropped, and the handles."""

import contextlib
import logging
import random
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from support import fake_cudnn, launchers
from support.fake_cudnn import ragged
from support.truth import assert_accurate

from attnreg import BackendUnavailableError, UnsupportedInputError
from attnreg.backends.cudnn import adapter, execution_plans, rounding
from attnreg.backends.cudnn.graph import ExecutionPlan
from attnreg.backends.cudnn.problem import PlanKind, Slot
from attnreg.backends.cudnn.rounding import exact, round_lengths, shared
from attnreg.core.launching.launchers import Prepared
from attnreg.tools.measure import Case


def capture(monkeypatch):
    """Have everything from now on captured."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


# Which calls share an execution plan


def test_batches_of_other_lengths_share_a_plan(kernels, module):
    for lens in ([3, 9], [40, 2, 77], [129] * 8, [9, 3]):
        kernels.forward(*ragged(lens))
    assert len(module.graphs) == 2, "the first has an exact one"
    assert kernels.forward.args[0].built == {"forward": 2, "backward": 0}


def test_calls_that_differ_in_what_a_plan_depends_on_have_each_their_own(kernels, module):
    *inputs, call = ragged([3, 9])
    others = [ragged([3, 9], **shape) for shape in ({"heads": (4, 4)}, {"dim": 32}, {"dtype": "float16"})]
    changes = ({}, {"scale": 0.5}, {"window": (2, 0)})
    for count, given in enumerate([*((*inputs, call._replace(**change)) for change in changes), *others], 1):
        kernels.forward(*given)
        assert len(module.graphs) == count


def run_both(kernels, lens_q, lens_k=None, **changes):
    query, key, value, call = ragged(lens_q, lens_k)
    call = call._replace(**changes)
    out, lse = kernels.forward(query, key, value, call)
    return (query, key, value, call), out, lse, kernels.backward(out, query, key, value, out, lse, call)


def planned_tokens(kernels, module, lens_q, lens_k=None, **changes):
    """Run both directions; return the tokens, of queries and keys, of all backwards that were planned."""
    run_both(kernels, lens_q, lens_k, **changes)
    totals = [tuple(graph.options.get(name) for name in fake_cudnn.TOTALS) for graph in module.graphs]
    return [planned for planned in totals if planned != (None, None)]


@pytest.mark.parametrize(("lens_q", "lens_k"), [([3, 9], [3, 300]), ([3, 300], [3, 9])])
def test_a_backward_is_planned_for_the_tokens_of_queries_and_of_keys(
    kernels, module, monkeypatch, lens_q, lens_k
):
    monkeypatch.setattr(rounding, "PER_SEQUENCE", 32)  # or few tokens are rounded up to the same
    planned_tokens(kernels, module, [1, 2], [1, 1])
    *_, planned = planned_tokens(kernels, module, lens_q, lens_k)
    assert planned == tuple(1024 if 300 in lens else 256 for lens in (lens_q, lens_k))


def test_the_first_tokens_of_a_kind_have_an_exact_plan_and_others_a_shared_one(kernels, module):
    room = 8 * 512
    assert planned_tokens(kernels, module, [100, 157]) == [(257, 257)]
    assert planned_tokens(kernels, module, [157, 50, 50])[1:] == []
    assert planned_tokens(kernels, module, [100, 158])[1:] == [(room, room)]
    assert planned_tokens(kernels, module, [3, 9])[2:] == []
    assert planned_tokens(kernels, module, [157, 100])[2:] == []
    assert planned_tokens(kernels, module, [20, 9], [20, 10], scale=0.5)[2:] == [(29, 30)]
    assert planned_tokens(kernels, module, [20, 9], [20, 11], scale=0.5)[3:] == [(room, room)]


def test_a_shared_plan_that_is_built_runs_the_first_tokens_too(kernels, module):
    """A batch of theirs may need an exact one for more sequences."""
    lens = ([5] * 8, [4, 3], [4] * 10, [2] * 20)
    for one in lens:
        run_both(kernels, one)
    built = len(module.graphs)
    run_both(kernels, [4] * 10)  # 40 tokens, as the first had
    assert len(module.graphs) == built


def test_kinds_are_forgotten_one_by_one(kernels, module, monkeypatch):
    monkeypatch.setattr(rounding, "MOST_KINDS", 4)  # of each scale there are two, one for each direction
    for scale in (0.1, 0.2, 0.3):
        assert planned_tokens(kernels, module, [3, 9], scale=scale)[-1] == (12, 12)
    assert planned_tokens(kernels, module, [3, 8], scale=0.2)[-1] == (4096, 4096), "still remembered"
    assert planned_tokens(kernels, module, [3, 8], scale=0.1)[-1] == (11, 11), "the oldest"
    built = len(module.graphs)
    planned_tokens(kernels, module, [3, 9], scale=0.1)
    assert len(module.graphs) == built, "there is a plan for these"


@pytest.mark.parametrize("exact_one", ["forward", "backward"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
def test_a_forward_and_a_backward_may_have_plans_of_either_kind(kernels, monkeypatch, window, exact_one):
    fake_cudnn.select_by(
        monkeypatch,
        kernels.forward.args[0],
        lambda problem: exact(problem) if problem.kind.direction == exact_one else shared(exact(problem)),
    )
    lens = (100, 0, 155, 1)
    case = Case(name="mixed", lens_q=lens, lens_k=(120, 3, 155, 1), varlen=True, heads=(4, 2), window=window)
    assert_accurate(kernels, case)


@pytest.mark.parametrize(
    ("lens", "is_exact"), [([3, 9], True), ([100, 28], True), ([60, 4], False), ([60, 69], False)]
)
def test_the_lse_of_an_exact_plan_is_contiguous_and_never_copied(
    kernels, module, monkeypatch, lens, is_exact
):
    monkeypatch.setattr(rounding, "BUDGET", 128)
    run_both(kernels, [3, 9])
    module.graphs.clear()
    kernels.forward.args[0]._plans.clear()
    (*inputs, call), out, lse, grads = run_both(kernels, lens)
    forward, backward = module.graphs
    heads, tokens = lse.shape
    strides = [tokens, 1, 1] if is_exact else [1, heads, 1]
    assert [graph.described(Slot.STATS).stride[1:] for graph in (forward, backward)] == [strides] * 2
    launcher = kernels.specialize("forward", tuple(inputs), call)
    got, as_written = launcher(*inputs, *launchers.packed_arguments(call))
    assert torch.equal(got, out)
    assert torch.equal(as_written, lse)
    assert as_written.is_contiguous() is is_exact
    assert all(grad.isfinite().all() for grad in grads)


# Rounding


def packed_problem(direction, lens, width=1024):
    """Return the problem of a batch before it is rounded, of heads of 64."""
    heads, tokens = width // 64, sum(lens)
    kind = PlanKind(direction, -1, torch.bfloat16, heads, heads, 64, 64, 0.125, (-1, -1), True, False)
    strides = ((width, 64, 1),) * (3 if direction == "forward" else 5)
    return kind.problem(len(lens), max(lens), max(lens), tokens, tokens, strides)


def test_a_kind_is_all_but_the_lengths():
    first = rounding.FirstTokens()
    first.remember(exact(packed_problem("backward", [3, 9])))
    for lens in ([3, 9], [9, 3], [1] * 12):
        assert first.allow_exact(packed_problem("backward", lens))
    for lens in ([3, 10], [1] * 9, [5000, 9], [2] * 100):
        assert not first.allow_exact(packed_problem("backward", lens))
    for other in (packed_problem("forward", [3, 10]), packed_problem("backward", [3, 10], width=512)):
        assert first.allow_exact(other)


@pytest.mark.each_value("width", "direction")
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("width", [8 * 64, 64 * 128])
def test_all_lengths_that_a_prepared_launch_serves_have_its_execution_plan(
    module, monkeypatch, direction, width
):
    """Budgets and the first tokens included, which have one of their own."""
    draw, plans = random.Random(width), execution_plans.ExecutionPlans(module)
    made = ExecutionPlan(None, 0, (), (), 0, (), None, prepared=Prepared(print, ()))
    monkeypatch.setattr(execution_plans, "build", lambda cudnn, problem, handle: made)
    kind, strides = packed_problem(direction, [1], width).kind, packed_problem(direction, [1], width).strides

    def number(low, high):
        return min(max(round(low * (high / low) ** draw.random()), low), high)

    for _ in range(1000):
        batch = draw.choice((number(1, 64), number(1, 200_000)))
        tokens = draw.choice((number(batch, 2**24), 2 ** draw.randint(4, 20), 512 * batch, 128 * batch - 1))
        keys = draw.choice((tokens, number(1, 2**24)))
        problem = kind.problem(batch, number(1, 2**17), number(1, 2**17), tokens, keys, strides)
        plans.get(plans.select(problem)[0])
        prepared, (chosen, _) = plans.prepare(problem), plans.select(problem)
        own = *problem[1:5], keys
        assert all(low <= one <= high for one, (low, high) in zip(own, prepared.lengths, strict=True))
        for _ in range(6):
            others = [draw.choice((low, high, number(low, high))) for low, high in prepared.lengths]
            assert plans.select(kind.problem(*others, strides))[0] == chosen, (own, others)


@pytest.mark.each_value("width", "spread", "seed")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spread", ["evenly", "by magnitude", "in steps of 64"])
@pytest.mark.parametrize("width", [16 * 64, 32 * 128, 64 * 128])
def test_a_thousand_ragged_batches_need_few_plans(module, monkeypatch, width, spread, seed):
    made = ExecutionPlan(None, 0, (), (), 0, (), None)
    monkeypatch.setattr(execution_plans, "build", lambda cudnn, problem, handle: made)
    draw, plans = random.Random(seed), execution_plans.ExecutionPlans(module)

    def up_to(number):
        return round(number ** draw.uniform(0, 1)) if spread == "by magnitude" else draw.randint(1, number)

    for _ in range(1000):
        longest = up_to(4096)
        lens = [draw.randint(1, longest) for _ in range(up_to(64))]
        if spread == "in steps of 64":
            lens = [64 * -(-length // 64) for length in lens]
        for direction in plans.built:
            problem, _ = plans.select(packed_problem(direction, lens, width))
            assert problem.batch >= len(lens)
            assert problem.max_q == problem.max_k >= max(lens)
            if direction == "backward":
                assert problem.tokens_q == problem.tokens_k >= sum(lens)
            assert problem.tokens_q == sum(lens) or not problem.exact
            plans.get(problem)
    assert 1 < plans.built["forward"] <= plans.built["backward"] <= 24


@pytest.mark.parametrize(
    ("direction", "tokens", "planned"),
    [
        ("forward", (2048, 0), (2048, 0, True)),
        ("forward", (2**20, 0), (2**20, 0, True)),
        ("forward", (2049, 0), (0, 0, False)),
        ("forward", (1024, 0), (0, 0, False)),
        ("backward", (2048, 2048), (2048, 2048, True)),
        ("backward", (2048, 100), (2048, 4096, True)),  # of keys there may be any number
        ("backward", (2049, 2048), (4096, 4096, False)),
        ("backward", (1024, 1024), (4096, 4096, False)),
    ],
)
def test_a_budget_of_tokens_has_an_exact_plan(direction, tokens, planned):
    problem = packed_problem(direction, [2049])._replace(tokens_q=tokens[0], tokens_k=tokens[1])
    found = shared(exact(problem))
    assert (found.tokens_q, found.tokens_k, found.exact) == planned


@pytest.mark.parametrize(
    ("batch", "tokens", "width", "planned"),
    [
        (2, 256, 8 * 64, 4096),  # 512 for each of 8 sequences: 8 MB
        (8, 4095, 16 * 64, 4096),
        (8, 4097, 16 * 64, 4 * 4096),
        (40, 1280, 16 * 64, 64 * 512),
        (400, 8000, 16 * 64, 2**16),  # not more than 256 MB for the sake of few execution plans
        (16, 65537, 16 * 64, 2**17),  # 256 MB, and on in steps of 2
        (16, 65537, 64 * 128, 2**17),
        (300, 300, 64 * 128, 2**14),
    ],
)
def test_a_shared_workspace_is_small_where_tokens_are_few_and_grows_with_them(batch, tokens, width, planned):
    found = shared(exact(packed_problem("backward", [1] * (batch - 1) + [tokens - batch + 1], width)))
    assert (found.tokens_q, found.tokens_k, found.exact) == (planned, planned, False)


@pytest.mark.parametrize("width", [512, 1024, 4096, 8192])
def test_a_workspace_is_at_most_four_times_too_large_and_twice_above_a_gigabyte(width):
    draw = random.Random(0)
    for _ in range(1000):
        batch, longest = draw.randint(1, 600), 2 ** draw.uniform(0, 13)
        lens = [round(draw.uniform(1, longest)) for _ in range(batch)]
        found, tokens = shared(exact(packed_problem("backward", lens, width))), sum(lens)
        least = min(512 * found.batch, max(2**14, 2**26 // width))
        total = found.tokens_q
        assert tokens <= total
        assert total == least or total < 4 * tokens
        assert total <= max(least, 2**28 // width) or total < 2 * tokens


def test_the_number_of_sequences_is_rounded_more_finely_where_they_are_short():
    fine = {round_lengths(batch, 64, 64, 32 * batch)[0] for batch in range(1, 513)}
    coarse = {round_lengths(batch, 1024, 1024, 512 * batch)[0] for batch in range(1, 513)}
    assert fine == {8, 16, 32, 64, 91, 128, 182, 256, 363, 512}
    assert coarse == {8, 32, 64, 128, 512}
    assert [round_lengths(65, 64, 64, 65 * mean)[0] for mean in (32, 2048)] == [91, 128]
    most = [round_lengths(batch, 64, 64, batch)[0] for batch in (46342, 65535)]
    assert most == [65535, 65535], "no more than kernels take"


# Building and dropping execution plans


def test_a_plan_that_takes_long_to_build_is_a_line_in_the_log(kernels, monkeypatch, caplog):
    clock = iter([10.0, 10.9, 20.0, 22.5])
    monkeypatch.setattr(execution_plans, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    caplog.set_level(logging.INFO, "attnreg")
    run_both(kernels, [3, 9], [3, 30])
    assert [record.getMessage() for record in caplog.records] == [
        "cuDNN took 2.5 s to build the execution plan of a packed backward of 8 x 4096 queries "
        "and 4096 keys, 4/2 heads of 16, bfloat16"
    ]


def test_the_oldest_plan_goes_when_there_are_too_many(kernels, monkeypatch):
    monkeypatch.setattr(execution_plans, "_KEPT", 2)
    query, key, value, call = ragged([3, 9])
    for scale in (0.1, 0.2, 0.3):
        kernels.forward(query, key, value, call._replace(scale=scale))
    assert [problem.kind.scale for problem in kernels.forward.args[0]._plans] == [0.2, 0.3]


def test_a_call_that_cudnn_has_no_kernel_for_is_declined_with_its_reason_and_planned_once(
    kernels, module, monkeypatch
):
    def declined(self):
        raise fake_cudnn.GraphNotSupportedError("no engine")

    monkeypatch.setattr(fake_cudnn.Graph, "check_support", declined)
    for lens in ([3, 9], [3, 9], [4, 7], [5, 7], [7, 7]):
        with pytest.raises(
            UnsupportedInputError, match="cuDNN has no forward execution plan for this call: no engine"
        ):
            kernels.forward(*ragged(lens))
    assert not kernels.forward.args[0]._plans
    assert len(module.graphs) == 2, "batches of one problem have been described more than once"


@pytest.mark.parametrize(
    "error",
    [
        fake_cudnn.GraphNotSupportedError("no engine: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_a_plan_for_which_there_was_no_memory_is_built_by_the_next_call(kernels, monkeypatch, error):
    with monkeypatch.context() as patched:
        patched.setattr(fake_cudnn.Graph, "build_plans", Mock(side_effect=error))
        with pytest.raises(type(error)) as caught:
            kernels.forward(*ragged([3, 9]))
        assert caught.value is error
    assert kernels.forward(*ragged([3, 9]))[0].isfinite().all()


def test_a_plan_that_fails_to_be_built_is_a_kernel_that_cannot_be_had(kernels, monkeypatch):
    monkeypatch.setattr(fake_cudnn.Graph, "validate", Mock(side_effect=TypeError("no such keyword")))
    with pytest.raises(BackendUnavailableError) as caught:
        kernels.forward(*ragged([3, 9]))
    assert str(caught.value) == "building a forward execution plan failed: TypeError: no such keyword"


def test_a_capture_builds_no_plan_and_takes_an_exact_or_a_shared_one(kernels, module, monkeypatch):
    calls = [ragged(lens) for lens in ([3, 9], [3, 10], [4, 10])]
    expected = [kernels.forward(*given)[0] for given in calls[:2]]
    built = len(module.graphs)
    capture(monkeypatch)
    for given, out in zip(calls, expected, strict=False):
        assert torch.equal(kernels.forward(*given)[0], out)
    assert kernels.forward(*calls[2])[0].isfinite().all(), "it shares a plan with the second"
    monkeypatch.setattr(kernels.forward.args[0], "_first_tokens", rounding.FirstTokens())
    assert kernels.forward(*ragged([4, 11]))[0].isfinite().all(), "the first of its kind can share one, too"
    *inputs, call = calls[0]
    with pytest.raises(UnsupportedInputError, match="run the call once before the capture"):
        kernels.forward(*inputs, call._replace(scale=0.5))
    assert len(module.graphs) == built


def test_a_call_that_a_capture_has_declined_is_not_the_first_of_its_kind(kernels, monkeypatch):
    with monkeypatch.context() as patched:
        capture(patched)
        with pytest.raises(UnsupportedInputError, match="run the call once before the capture"):
            kernels.forward(*ragged([3, 9]))
    for lens in ([3, 10], [3, 9]):
        kernels.forward(*ragged(lens))
    plans = kernels.forward.args[0]._plans
    assert [(problem.tokens_q, problem.exact) for problem in plans] == [(13, True), (0, False)]


def test_a_plan_is_built_in_a_thread_where_its_device_is_current(kernels, monkeypatch):
    entered, built = [], []

    @contextlib.contextmanager
    def device(index):
        entered.append((index, threading.get_ident()))
        yield
        entered.clear()

    def validate(graph):
        built.extend(entered)
        graph.steps.append("validate")

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(fake_cudnn.Graph, "validate", validate)
    kernels.forward(*ragged([3, 9]))
    ((index, thread),) = built
    assert index == -1  # the index of a CPU
    assert thread != threading.get_ident()


def test_the_frontends_objects_are_dropped_before_the_process_ends(module, monkeypatch):
    registered = []
    monkeypatch.setattr(execution_plans.atexit, "register", registered.append)
    plans = execution_plans.ExecutionPlans(module)
    (release,) = registered
    inputs = ragged([3, 9])
    expected = adapter.forward(plans, *inputs)[0]
    assert len(plans._plans) == 1
    release()
    assert plans._plans == {}
    assert module.handles == []
    assert torch.equal(adapter.forward(plans, *inputs)[0], expected), "calls after that are served"


# Handles


def test_each_thread_has_a_handle_that_ends_with_it(kernels, module):
    results, inputs, used = [], ragged([3, 9]), set()

    def work():
        results.extend(kernels.forward(*inputs)[0] for _ in range(3))
        used.update(module.handles)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(handle.ran for handle in used) == [3, 3]
    assert module.handles == []
    assert len(module.graphs) == 1
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_handle_whose_thread_ends_during_a_capture_is_not_destroyed(kernels, module, monkeypatch):
    """Destroying it waits for the device, which would end the capture."""
    kernels.forward(*ragged([3, 9]))
    thread = threading.Thread(target=lambda: kernels.forward(*ragged([3, 9])))
    (own,) = module.handles
    capture(monkeypatch)
    thread.start()
    thread.join()
    assert len(module.handles) == 2
    assert own in module.handles


def test_a_handle_follows_the_current_stream(kernels, module, monkeypatch):
    inputs = ragged([3, 9])
    kernels.forward(*inputs)
    kernels.forward(*inputs)
    monkeypatch.setattr(adapter, "stream_of", lambda tensor: 8)
    kernels.forward(*inputs)
    (handle,) = module.handles
    assert (handle.stream, handle.set, handle.ran) == (8, 2, 3)

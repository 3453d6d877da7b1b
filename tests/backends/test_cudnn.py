"""Promises of the cuDNN backend: what is described to cuDNN, and what is made of its results."""

import contextlib
import random
import sys
import threading
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch
from support import fake_cudnn, short_ways

from attnreg import AttentionSpec, Call, Device, UnsupportedInputError
from attnreg.backends import cudnn
from attnreg.backends.cudnn import describe, launcher, sharing
from attnreg.backends.cudnn import plans as cudnn_plans
from attnreg.backends.cudnn.problem import Problem, Slot
from attnreg.backends.cudnn.sharing import Firsts, exact, rounded, shared
from attnreg.contract import offsets
from attnreg.contract.discovery import Entry
from attnreg.contract.launchers import AddressLauncher
from attnreg.measure import QUICK, Case, measure
from attnreg.torchlib.readback import AsyncReadback

H200 = Device("cuda", (9, 0), simulated=True)


def reasons(case):
    spec = case.spec(H200)
    both = (*cudnn.FORWARD.unsupported(spec), *cudnn.BACKWARD.unsupported(spec))
    return both or cudnn._refuses(spec)


# The stand-in walks heads and sequences one by one; the kernel itself is held to the whole matrix on a GPU.
RUNS = {
    str(case): case
    for case in QUICK
    if not reasons(case) and (case.dtype == "bfloat16" or case.name == "length 33") and case.max_k < 300
}


@pytest.fixture
def module(monkeypatch):
    made = fake_cudnn.module()
    monkeypatch.setitem(sys.modules, "cudnn", made)
    monkeypatch.setattr(offsets, "_cache", {})
    for user in (describe, launcher):
        monkeypatch.setattr(user, "stream_of", lambda tensor: 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


@pytest.fixture
def kernels(module):
    return cudnn._load()


@pytest.fixture
def plans_for_others(kernels, monkeypatch):
    """Have each packed problem planned with room for others, as one of those that came later."""
    plans = kernels.forward.args[0]
    monkeypatch.setattr(plans, "planned", lambda problem: shared(problem) if problem.packed else problem)


@pytest.mark.parametrize("case", [case for case in RUNS.values() if case.varlen], ids=str)
def test_what_it_says_it_can_run_is_right_with_a_plan_for_others_too(kernels, plans_for_others, case):
    errors = measure(kernels, case)
    assert errors.keys() == {"out", "lse", "dq", "dk", "dv"}
    assert {name: str(error) for name, error in errors.items() if not error.passed} == {}


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in RUNS.items()])
def test_what_it_says_it_can_run_is_right(kernels, case):
    errors = measure(kernels, case)
    assert errors.keys() == {"out", "lse", "dq", "dk", "dv"}
    assert {name: str(error) for name, error in errors.items() if not error.passed} == {}


def test_the_matrix_meets_the_faults_of_cudnn():
    """Or the tests above would pass without what works around them."""
    runs = RUNS.values()
    assert any(case.varlen and 0 in case.lens_k and max(case.lens_q) for case in runs)
    assert any(case.varlen and case.max_q == 1 and 0 in case.lens_q for case in runs)
    assert any(case.varlen and case.layout in ("fused qkv", "bhsd") for case in runs)
    assert any(case.tail and case.poison for case in runs)


def ragged(lens_q, lens_k=None, heads=(4, 2), dim=16, tail=0):
    lens_k = lens_k or lens_q
    torch.manual_seed(0)
    query = torch.randn(sum(lens_q) + tail, heads[0], dim).bfloat16()
    key, value = (torch.randn(sum(lens_k) + tail, heads[1], dim).bfloat16() for _ in "kv")
    ends = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (lens_q, lens_k)]
    if lens_q == lens_k:
        ends[1] = ends[0]
    call = Call(0.25, max(lens_q), max(lens_k), (-1, 0), *ends)
    return query, key, value, call


# Plans


def test_batches_of_other_lengths_share_a_plan(kernels, module):
    for lens in ([3, 9], [40, 2, 77], [129] * 8, [9, 3]):
        kernels.forward(*ragged(lens))
    assert len(module.graphs) == 2, "the first has one of its own"
    assert kernels.forward.args[0].built == {"forward": 2, "backward": 0}


@pytest.mark.parametrize("difference", ["scale", "window", "heads", "dim", "dtype"])
def test_what_a_plan_depends_on_makes_another(kernels, module, difference):
    query, key, value, call = ragged([3, 9])
    kernels.forward(query, key, value, call)
    if difference in ("heads", "dim"):
        query, key, value, call = ragged([3, 9], **{difference: {"heads": (4, 4), "dim": 32}[difference]})
    elif difference == "dtype":
        query, key, value = query.half(), key.half(), value.half()
    else:
        call = call._replace(**{difference: {"scale": 0.5, "window": (2, 0)}[difference]})
    kernels.forward(query, key, value, call)
    assert len(module.graphs) == 2


@pytest.mark.parametrize(
    ("lens_q", "lens_k", "window", "aligned"),
    [
        ([3, 9], None, (-1, 0), ["BOTTOM_RIGHT", "TOP_LEFT"]),
        ([3, 9], None, (4, 0), ["BOTTOM_RIGHT", "TOP_LEFT"]),
        ([3, 9], [3, 12], (-1, 0), ["BOTTOM_RIGHT", "BOTTOM_RIGHT"]),
        ([3, 9], None, (-1, -1), ["TOP_LEFT", "TOP_LEFT"]),  # the default: there is no mask
    ],
)
def test_the_mask_of_a_backward_begins_top_left_where_that_is_the_same(
    kernels, module, lens_q, lens_k, window, aligned
):
    query, key, value, call = ragged(lens_q, lens_k)
    call = call._replace(window=window)
    out, lse = kernels.forward(query, key, value, call)
    kernels.backward(out, query, key, value, out, lse, call)
    assert [graph.options["diagonal_alignment"] for graph in module.graphs] == aligned


def test_lengths_that_are_equal_but_not_known_to_be_are_aligned_bottom_right(kernels, module):
    query, key, value, call = ragged([3, 9])
    call = call._replace(cu_seqlens_k=call.cu_seqlens_q.clone())
    out, lse = kernels.forward(query, key, value, call)
    kernels.backward(out, query, key, value, out, lse, call)
    assert module.graphs[1].options["diagonal_alignment"] == "BOTTOM_RIGHT"


def planned_tokens(kernels, module, lens_q, lens_k=None, **changes):
    """Run both directions; returns the tokens, of queries and keys, of all backwards that were planned."""
    query, key, value, call = ragged(lens_q, lens_k)
    call = call._replace(**changes)
    out, lse = kernels.forward(query, key, value, call)
    kernels.backward(out, query, key, value, out, lse, call)
    totals = [tuple(graph.options.get(name) for name in fake_cudnn.TOTALS) for graph in module.graphs]
    return [planned for planned in totals if planned != (None, None)]


@pytest.mark.parametrize(("lens_q", "lens_k"), [([3, 9], [3, 300]), ([3, 300], [3, 9])])
def test_a_backward_is_planned_for_the_tokens_of_either_side(kernels, module, monkeypatch, lens_q, lens_k):
    monkeypatch.setattr(sharing, "PER_SEQUENCE", 32)  # or few tokens are rounded up to the same
    planned_tokens(kernels, module, [1, 2], [1, 1])
    *_, planned = planned_tokens(kernels, module, lens_q, lens_k)
    assert planned == tuple(1024 if 300 in lens else 256 for lens in (lens_q, lens_k))


def test_the_first_tokens_of_a_kind_are_planned_for_as_they_are_and_others_with_room(kernels, module):
    room = 8 * 512
    assert planned_tokens(kernels, module, [100, 157]) == [(257, 257)]
    assert planned_tokens(kernels, module, [157, 50, 50])[1:] == []
    assert planned_tokens(kernels, module, [100, 158])[1:] == [(room, room)]
    assert planned_tokens(kernels, module, [3, 9])[2:] == []
    assert planned_tokens(kernels, module, [157, 100])[2:] == []
    assert planned_tokens(kernels, module, [20, 9], [20, 10], scale=0.5)[2:] == [(29, 30)]
    assert planned_tokens(kernels, module, [20, 9], [20, 11], scale=0.5)[3:] == [(room, room)]


def test_a_call_that_a_capture_refused_is_no_first(kernels, monkeypatch):
    plans = kernels.forward.args[0]
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(UnsupportedInputError, match="run the call once before the capture"):
            kernels.forward(*ragged([3, 9]))
    for lens in ([3, 10], [3, 9]):
        kernels.forward(*ragged(lens))
    assert [(problem.tokens_q, problem.own) for problem in plans._plans] == [(13, True), (0, False)]


def test_kinds_are_forgotten_one_by_one(kernels, module, monkeypatch):
    monkeypatch.setattr(sharing, "MOST", 4)  # of each scale there are two, one for each direction
    for scale in (0.1, 0.2, 0.3):
        assert planned_tokens(kernels, module, [3, 9], scale=scale)[-1] == (12, 12)
    assert planned_tokens(kernels, module, [3, 8], scale=0.2)[-1] == (4096, 4096), "still known"
    assert planned_tokens(kernels, module, [3, 8], scale=0.1)[-1] == (11, 11), "the oldest"
    built = len(module.graphs)
    planned_tokens(kernels, module, [3, 9], scale=0.1)
    assert len(module.graphs) == built, "there is a plan for these"


def test_a_call_that_is_captured_takes_whichever_plan_there_is(kernels, module, monkeypatch):
    """Its own or the one with room: both have run before."""
    calls = [ragged(lens) for lens in ([3, 9], [3, 10], [4, 10])]
    wanted = [kernels.forward(*given)[0] for given in calls[:2]]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    built = len(module.graphs)
    for given, out in zip(calls, wanted, strict=False):
        assert torch.equal(kernels.forward(*given)[0], out)
    assert kernels.forward(*calls[2])[0].isfinite().all(), "others share a plan with the second"
    monkeypatch.setattr(kernels.forward.args[0], "_firsts", Firsts())
    assert kernels.forward(*ragged([4, 11]))[0].isfinite().all(), (
        "none can be made that it could be a first by"
    )
    assert len(module.graphs) == built


@pytest.mark.parametrize("own", [(True, False), (False, True)], ids=["own forward", "own backward"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
def test_a_forward_and_a_backward_may_have_plans_of_either_kind(kernels, monkeypatch, window, own):
    monkeypatch.setattr(
        kernels.forward.args[0],
        "planned",
        lambda problem: exact(problem) if own[problem.direction == "backward"] else shared(problem),
    )
    lens = (100, 0, 155, 1)
    case = Case(name="mixed", lens_q=lens, lens_k=(120, 3, 155, 1), varlen=True, heads=(4, 2), window=window)
    errors = measure(kernels, case)
    assert {name: str(error) for name, error in errors.items() if not error.passed} == {}
    assert errors.keys() == {"out", "lse", "dq", "dk", "dv"}


def packed_problem(direction, lens, width=1024):
    """Return the problem of a batch as `described` gives it, of heads of 64."""
    tokens, heads, strides = sum(lens), width // 64, (0, 64, width)
    sizes = rounded(len(lens), max(lens), max(lens), tokens)
    return Problem(
        direction, -1, torch.bfloat16, *sizes, heads, heads, 64, 64, 0.125, (-1, -1), True,
        tokens, tokens if direction == "backward" else 0, strides, strides, strides,
    )  # fmt: skip


def test_a_kind_is_all_but_the_lengths():
    firsts = Firsts()
    firsts.met(exact(packed_problem("backward", [3, 9])))
    for lens in ([3, 9], [9, 3], [1] * 12):
        assert firsts.may_be(packed_problem("backward", lens))
    for lens in ([3, 10], [1] * 9, [5000, 9], [2] * 100):
        assert not firsts.may_be(packed_problem("backward", lens))
    for other in (packed_problem("forward", [3, 10]), packed_problem("backward", [3, 10], width=512)):
        assert firsts.may_be(other)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spread", ["evenly", "by magnitude", "in steps of 64"])
@pytest.mark.parametrize(("most", "width"), [(64, 16 * 64), (64, 32 * 128), (64, 64 * 128)])
def test_a_thousand_ragged_batches_need_few_plans(module, monkeypatch, most, width, spread, seed):
    monkeypatch.setattr(cudnn_plans, "build", lambda cudnn, problem, handle: object())
    draw, plans = random.Random(seed), cudnn_plans.Plans(module)

    def up_to(number):
        return round(number ** draw.uniform(0, 1)) if spread == "by magnitude" else draw.randint(1, number)

    for _ in range(1000):
        longest = up_to(4096)
        lens = [draw.randint(1, longest) for _ in range(up_to(most))]
        if spread == "in steps of 64":
            lens = [64 * -(-length // 64) for length in lens]
        for direction in plans.built:
            problem = packed_problem(direction, lens, width)
            assert problem.batch >= len(lens)
            assert problem.max_q == problem.max_k >= max(lens)
            found = plans.planned(problem)
            if direction == "backward":
                assert found.tokens_q == found.tokens_k >= sum(lens)
            assert found.tokens_q == sum(lens) or not found.own
            plans._plan(found)
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
def test_budgets_of_tokens_have_plans_of_their_own(direction, tokens, planned):
    problem = packed_problem(direction, [2049])._replace(tokens_q=tokens[0], tokens_k=tokens[1])
    found = shared(problem)
    assert (found.tokens_q, found.tokens_k, found.own) == planned


@pytest.mark.parametrize(
    ("lens", "in_order"), [([3, 9], True), ([100, 28], True), ([60, 4], False), ([60, 69], False)]
)
def test_tokens_with_a_plan_of_their_own_have_their_lse_in_order_and_nothing_is_turned(
    kernels, module, monkeypatch, lens, in_order
):
    monkeypatch.setattr(sharing, "BUDGET", 128)
    planned_tokens(kernels, module, [3, 9])
    module.graphs.clear()
    kernels.forward.args[0]._plans.clear()
    query, key, value, call = ragged(lens)
    out, lse = kernels.forward(query, key, value, call)
    grads = kernels.backward(out, query, key, value, out, lse, call)
    forward, backward = module.graphs
    heads, tokens = lse.shape
    wanted = [tokens, 1, 1] if in_order else [1, heads, 1]
    assert [graph.described(Slot.STATS).stride[1:] for graph in (forward, backward)] == [wanted] * 2
    again = kernels.specialize("forward", (query, key, value), call)
    got, as_written = again(query, key, value, *short_ways.ends_of(call))
    assert torch.equal(got, out)
    assert torch.equal(as_written, lse)
    assert as_written.is_contiguous() is in_order
    assert all(grad.isfinite().all() for grad in grads)


def test_no_batch_is_rounded_beyond_what_kernels_take():
    assert [rounded(batch, 64, 64, batch)[0] for batch in (46342, 65535)] == [65535, 65535]


def test_sizes_of_a_coarse_step_are_among_those_of_a_fine_one():
    fine = {rounded(batch, 64, 64, 32 * batch)[0] for batch in range(1, 513)}
    coarse = {rounded(batch, 1024, 1024, 512 * batch)[0] for batch in range(1, 513)}
    assert coarse == {8, 32, 64, 128, 512}
    assert coarse < fine
    assert fine == {8, 16, 32, 64, 91, 128, 182, 256, 363, 512}


def test_short_sequences_are_planned_with_less_to_spare():
    assert rounded(65, 64, 64, 65 * 32)[0] == 91
    assert rounded(65, 4096, 4096, 65 * 2048)[0] == 128


@pytest.mark.parametrize(
    ("batch", "tokens", "width", "planned"),
    [
        (2, 256, 8 * 64, 4096),  # 512 for each of 8 sequences: 8 MB
        (8, 4095, 16 * 64, 4096),
        (8, 4097, 16 * 64, 4 * 4096),
        (40, 1280, 16 * 64, 64 * 512),
        (400, 8000, 16 * 64, 2**16),  # not more than 256 MB for the sake of few plans
        (16, 65537, 16 * 64, 2**17),  # 256 MB, and on in steps of 2
        (16, 65537, 64 * 128, 2**17),
        (300, 300, 64 * 128, 2**14),
    ],
)
def test_a_workspace_is_small_where_tokens_are_few_and_grows_with_them(batch, tokens, width, planned):
    found = shared(packed_problem("backward", [1] * (batch - 1) + [tokens - batch + 1], width))
    assert (found.tokens_q, found.tokens_k, found.own) == (planned, planned, False)


@pytest.mark.parametrize("width", [512, 1024, 4096, 8192])
def test_a_workspace_is_at_most_four_times_too_large_and_twice_above_a_gigabyte(width):
    draw = random.Random(0)
    for _ in range(1000):
        batch, longest = draw.randint(1, 600), 2 ** draw.uniform(0, 13)
        lens = [round(draw.uniform(1, longest)) for _ in range(batch)]
        found, tokens = shared(packed_problem("backward", lens, width)), sum(lens)
        least = min(512 * found.batch, max(2**14, 2**26 // width))
        total = found.tokens_q
        assert tokens <= total
        assert total == least or total < 4 * tokens
        assert total <= max(least, 2**28 // width) or total < 2 * tokens


def test_the_oldest_plan_goes_when_there_are_too_many(kernels, monkeypatch):
    monkeypatch.setattr(cudnn_plans, "_KEPT", 2)
    query, key, value, call = ragged([3, 9])
    for scale in (0.1, 0.2, 0.3):
        kernels.forward(query, key, value, call._replace(scale=scale))
    plans = kernels.forward.args[0]
    assert [problem.scale for problem in plans._plans] == [0.2, 0.3]


def test_a_problem_that_cudnn_declines_is_told_in_its_words(kernels, module, monkeypatch):
    def declined(self):
        raise fake_cudnn.GraphNotSupportedError("no engine")

    monkeypatch.setattr(fake_cudnn.Graph, "check_support", declined)
    for lens in ([3, 9], [3, 9], [4, 7], [5, 7], [7, 7]):
        with pytest.raises(UnsupportedInputError, match="cuDNN has no forward plan for this call: no engine"):
            kernels.forward(*ragged(lens))
    assert not kernels.forward.args[0]._plans
    assert len(module.graphs) == 2, "batches of one problem have been described more than once"


def test_nothing_is_planned_while_a_graph_is_captured_and_what_is_planned_runs(kernels, monkeypatch):
    inputs = ragged([3, 9])
    out, _ = kernels.forward(*inputs)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    again, _ = kernels.forward(*inputs)
    assert torch.equal(out, again)
    with pytest.raises(UnsupportedInputError, match="run the call once before the capture"):
        kernels.forward(*inputs[:3], inputs[3]._replace(scale=0.5))


# Handles


def test_a_plan_is_built_where_the_device_of_its_problem_is_current(kernels, module, monkeypatch):
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
    assert index == -1  # as a tensor on the CPU says
    assert thread != threading.get_ident()


def test_each_thread_has_a_handle_of_its_own(kernels, module):
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
    assert module.handles == [], "a thread's handle ends with it"
    assert len(module.graphs) == 1
    assert all(torch.equal(result, results[0]) for result in results)


def test_what_is_the_packages_is_given_back_before_the_process_ends(kernels, module, monkeypatch):
    registered = []
    monkeypatch.setattr(cudnn_plans.atexit, "register", registered.append)
    plans = cudnn_plans.Plans(module)
    (let_go,) = registered
    inputs = ragged([3, 9])
    wanted = cudnn.forward(plans, *inputs)[0]
    assert len(plans._plans) == 1
    let_go()
    assert plans._plans == {}
    assert module.handles == []
    assert torch.equal(cudnn.forward(plans, *inputs)[0], wanted), "what ends later may still call"


def test_a_handle_that_ends_while_a_graph_is_captured_is_lost_and_does_no_harm(kernels, module, monkeypatch):
    """Destroying it waits for the device, which would end the capture."""
    kernels.forward(*ragged([3, 9]))
    thread = threading.Thread(target=lambda: kernels.forward(*ragged([3, 9])))
    (own,) = module.handles
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    thread.start()
    thread.join()
    assert len(module.handles) == 2
    assert own in module.handles


def test_a_handle_follows_the_current_stream(kernels, module, monkeypatch):
    inputs = ragged([3, 9])
    kernels.forward(*inputs)
    kernels.forward(*inputs)
    monkeypatch.setattr(describe, "stream_of", lambda tensor: 8)
    kernels.forward(*inputs)
    (handle,) = module.handles
    assert (handle.stream, handle.set, handle.ran) == (8, 2, 3)


# What is derived from offsets


def test_layers_share_what_is_derived_and_changed_offsets_do_not(kernels, monkeypatch):
    made = []
    original = describe.Offsets

    def counted(*args):
        made.append(args)
        return original(*args)

    monkeypatch.setattr(describe, "Offsets", counted)
    query, key, value, call = ragged([3, 9])
    out, lse = kernels.forward(query, key, value, call)
    kernels.backward(out, query, key, value, out, lse, call)
    kernels.forward(query, key, value, call)
    assert len(made) == 1
    call.cu_seqlens_q[1] = 5
    changed, _ = kernels.forward(query, key, value, call)
    assert len(made) == 2
    fresh = call._replace(cu_seqlens_q=torch.tensor([0, 5, 12]).int())
    assert torch.equal(
        changed, kernels.forward(query, key, value, fresh._replace(cu_seqlens_k=fresh.cu_seqlens_q))[0]
    )


@pytest.mark.parametrize("trace", ["inference tensors", "a capture"])
def test_nothing_is_kept_of_what_can_change_without_a_trace(kernels, monkeypatch, trace):
    query, key, value, call = ragged([3, 9])
    kernels.forward(query, key, value, call)
    if trace == "a capture":
        monkeypatch.setattr(offsets, "needs_graph_memory", lambda offsets: True)
    else:
        with torch.inference_mode():
            ends = call.cu_seqlens_q.clone()
        call = call._replace(cu_seqlens_q=ends, cu_seqlens_k=ends)
    kernels.forward(query, key, value, call)
    with torch.inference_mode():
        call.cu_seqlens_q[1] = 5
        changed, _ = kernels.forward(query, key, value, call)
        fresh = torch.tensor([0, 5, 12]).int()
        expected, _ = kernels.forward(
            query, key, value, call._replace(cu_seqlens_q=fresh, cu_seqlens_k=fresh)
        )
    assert torch.equal(changed, expected)


class Answered(offsets.Facts):
    no_unused_rows = every_row_sees_a_key = True


def test_results_start_as_zeros_until_the_device_says_that_all_is_written(kernels, monkeypatch):
    filled = []
    monkeypatch.setattr(
        torch.Tensor, "new_zeros", lambda self, *a, **k: filled.append("out") or self.new_full(*a, 0, **k)
    )
    query, key, value, call = ragged([3, 9])
    out, lse = kernels.forward(query, key, value, call)
    kernels.backward(out, query, key, value, out, lse, call)
    assert len(filled) == 4
    monkeypatch.setattr(cudnn, "facts", lambda *_: Answered())
    again, _ = kernels.forward(query, key, value, call)
    kernels.backward(out, query, key, value, out, lse, call)
    assert len(filled) == 4
    assert torch.equal(out, again)


@pytest.mark.parametrize(
    ("lens_q", "lens_k", "tokens", "said"),
    [
        ([3, 9], [4, 9], (12, 13), [True, True]),
        ([3, 9], [4, 9], (13, 13), [False, False]),
        ([3, 9], [4, 9], (12, 14), [False, False]),
        ([3, 9], [4, 8], (12, 12), [True, False]),
        ([3, 9], [12, 0], (12, 12), [False, False]),
        ([3, 0, 9], None, (12, 12), [True, True]),
        ([3, 0, 9], None, (13, 13), [False, False]),
    ],
)
def test_the_device_says_once_what_holds_of_a_batch(lens_q, lens_k, tokens, said):
    call = ragged(lens_q, lens_k)[3]
    assert AsyncReadback(offsets._properties(call.cu_seqlens_q, call.cu_seqlens_k, *tokens)).read() == said


# What it says of itself


def spec(**changes):
    given = {"device": H200, "dtype": "bfloat16", "batch": 2, "max_q": 64, "max_k": 64, "heads_q": 4}
    return AttentionSpec(**{**given, "heads_k": 2, "head_dim": 64, "head_dim_v": 64, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ()),
        ({"max_q": 65, "window": (-1, 0)}, ("a mask must not meet more queries than keys, got 65 and 64",)),
        ({"max_q": 65}, ()),
        ({"max_q": 65, "window": (-1, 0), "varlen": True}, ()),
        ({"seqused_k": True}, ("seqused_k must be None with dense tensors, got a tensor",)),
        ({"seqused_k": True, "varlen": True}, ()),
        ({"max_q": 1, "max_k": 1}, ("query and key must not both have length 1",)),
        ({"max_q": 1, "max_k": 1, "varlen": True}, ()),
        ({"head_dim": 256, "head_dim_v": 256}, ()),
        (
            {"head_dim": 136, "device": Device("cuda", (8, 6), simulated=True)},
            ("head_dim must be 8 to 128 on compute capability 8.x, got 136",),
        ),
    ],
)
def test_limits_that_no_field_can_say(changes, expected):
    assert cudnn._refuses(spec(**changes)) == expected


@pytest.mark.parametrize(
    ("changes", "direction", "expected"),
    [
        ({"dropout": 0.1}, "forward", "dropout_p must be 0, got 0.1"),
        ({"head_dim": 20, "head_dim_v": 20}, "forward", "head_dim must be 8 to 256 in steps of 8, got 20"),
        ({"dtype": "float32"}, "forward", "dtype must be float16 or bfloat16, got float32"),
        ({"deterministic": True}, "backward", "not deterministic, and deterministic algorithms are on"),
        ({"bias": True}, "forward", "attn_bias must be None, got a tensor"),
        ({"batch": 65536}, "forward", "batch must be 0 to 65535, got 65536"),
        ({"heads_q": 65536, "heads_k": 8}, "forward", "query heads must be 0 to 65535, got 65536"),
        ({"batch": 65536, "varlen": True}, "backward", "batch must be 0 to 65535, got 65536"),
    ],
)
def test_reasons_against_a_call(changes, direction, expected):
    entry = Entry("cuDNN", "a test", cudnn.BACKEND)
    assert expected in entry.reasons(spec(**changes), direction)


def test_why_it_cant_load_here(monkeypatch):
    def missing(package):
        raise PackageNotFoundError(package)

    entry = Entry("cuDNN", "a test", cudnn.BACKEND)
    assert entry.unavailable() == (
        "can't load here: nvidia-cudnn-frontend isn't installed; "
        "install it with: pip install 'attnreg[cudnn]'"
    )
    monkeypatch.setattr(cudnn, "installed", lambda package: "1.32.0")
    assert "its module cudnn is missing" in cudnn._unavailable()
    monkeypatch.setattr(cudnn, "find_spec", lambda name: object())
    entry = Entry("cuDNN", "a test", cudnn.BACKEND)
    assert entry.unavailable() == "can't load here: torch finds no CUDA GPU here"
    monkeypatch.setattr(cudnn, "installed", missing)
    assert cudnn._unavailable() == "nvidia-cudnn-frontend isn't installed"


def test_its_version_is_cudnns(monkeypatch):
    monkeypatch.setattr(cudnn, "installed", lambda package: "1.32.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert cudnn._version() == "9.19.0 (frontend 1.32.0)"
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    assert cudnn._version() is None


def test_a_missing_library_is_found_at_load(module):
    def absent():
        raise RuntimeError("libcudnn not found")

    module.backend_version = absent
    with pytest.raises(RuntimeError, match="libcudnn not found"):
        cudnn._load()


def test_calls_without_rows_or_keys_reach_no_kernel(kernels, module):
    query, key, value, call = ragged([3, 9])
    for empty in ((query[:0], key, value), (query, key[:0], value[:0])):
        out, lse = kernels.forward(*empty, call)
        assert out.shape == empty[0].shape
        assert not out.any()
        assert lse.shape == (4, len(empty[0]))
        assert (lse == -torch.inf).all()
        grads = kernels.backward(out, *empty, out, lse, call)
        assert [grad.shape for grad in grads] == [x.shape for x in empty]
        assert not any(grad.any() for grad in grads)
    assert not module.graphs


def test_strides_of_single_heads_and_tokens_that_nobody_steps_by_are_put_right(kernels):
    query, key, value, call = ragged([3, 9], heads=(1, 1))
    expected = kernels.forward(query, key, value, call)[0]
    inputs = (query, key, value)
    odd = [torch.empty_like(x).as_strided((12, 1, 16), (16, 3, 1)).copy_(x) for x in inputs]
    assert all(x.is_contiguous() and x.stride(1) == 3 for x in odd)
    assert torch.equal(kernels.forward(*odd, call)[0], expected)


# Calls that are known


def tensors(given, seed):
    """Return a call's tensors and a gradient, with other values."""
    torch.manual_seed(seed)
    query, key, value, _ = given
    return [torch.randn_like(x) for x in (query, key, value, query)]


@pytest.mark.parametrize("own", [False, True], ids=["a plan for others too", "a plan of its own"])
@pytest.mark.parametrize("lens_k", [None, [12, 9, 30]], ids=["one offsets", "two"])
def test_a_known_packed_call_comes_out_the_same_on_other_offsets(request, kernels, module, lens_k, own):
    if not own:
        request.getfixturevalue("plans_for_others")
    given = ragged([3, 9, 30], lens_k)
    other = ragged([20, 2, 20], lens_k and [20, 20, 11])[-1]._replace(max_q=30, max_k=30)
    call = given[-1]
    forward, backwards = short_ways.assert_same(
        kernels, tensors(given, 1), tensors(given, 2), call, other._replace(window=call.window)
    )
    assert len(backwards) == 2
    built = len(module.graphs)
    query, key, value, _ = tensors(given, 3)
    _, lse = forward(query, key, value, *short_ways.ends_of(call))
    assert (lse if own else lse.t()).is_contiguous()  # as cuDNN has written it: nothing was turned round
    assert len(module.graphs) == built


def test_a_known_dense_call_comes_out_the_same(kernels):
    torch.manual_seed(0)
    given = [torch.randn(2, 6, heads, 16).bfloat16() for heads in (4, 2, 2, 4)]
    short_ways.assert_same(kernels, given, [torch.randn_like(x) for x in given], Call(0.25, 6, 6))


def test_there_is_no_shorter_way_without_a_plan_or_on_what_has_to_be_copied(kernels):
    given = ragged([3, 9, 30])
    query, key, value, call = given
    inputs = query, key, value
    assert kernels.specialize("forward", inputs, call) is None
    kernels.forward(*inputs, call)
    assert kernels.specialize("forward", inputs, call) is not None
    unaligned = torch.randn(query.numel() + 1)[1:].bfloat16()[1:]
    unaligned = torch.cat((unaligned, unaligned[:2]))[1:].view(query.shape)
    assert unaligned.data_ptr() % 16
    assert kernels.specialize("forward", (unaligned, key, value), call) is None
    assert kernels.specialize("forward", (query[:0], key, value), call) is None
    used = call._replace(seqused_k=torch.tensor([3, 9, 30], dtype=torch.int32))
    assert kernels.specialize("forward", inputs, used) is None


def test_a_plan_that_was_dropped_is_not_run_again(kernels):
    given = ragged([3, 9, 30])
    query, key, value, call = given
    kernels.forward(query, key, value, call)
    again = kernels.specialize("forward", (query, key, value), call)
    plans = kernels.forward.args[0]
    plans._let_go()
    ends = short_ways.ends_of(call)
    assert again(query, key, value, *ends) is None
    assert again.launch(0, 0, 7) is False
    assert again.derive(*ends) is None


def test_a_known_call_runs_on_addresses_with_the_threads_handle(kernels, module):
    query, key, value, call = ragged([3, 9, 30])
    expected = kernels.forward(query, key, value, call)
    again = kernels.specialize("forward", (query, key, value), call)
    for times in range(1, 3):
        got = again.on_addresses(query, key, value, *short_ways.ends_of(call))
        assert all(map(torch.equal, got, expected))
        assert [(handle.by_address, handle.set) for handle in module.handles] == [(times, 2)]
    assert module.handles[0].stream == 0  # that of a CPU, which is where the tensors are


@pytest.mark.parametrize(
    "breaks",
    [
        lambda graph: delattr(graph, "_lowered_graph"),
        lambda graph: delattr(graph, "plans"),
        lambda graph: setattr(graph, "selected_engine", object()),
        lambda graph: setattr(graph._lowered_graph, "_get_variant_pack_uids_sorted", lambda: [1, 2]),
        lambda graph: setattr(graph._lowered_graph, "_execute_with_raw_ptrs", lambda *_: None),
        lambda graph: setattr(graph.handle, "backend_handle", None),
    ],
    ids=["no graph below", "no plans", "an engine of its own", "other tensors", "a signature", "a handle"],
)
def test_where_the_frontend_has_no_way_for_addresses_its_execute_is_called(
    kernels, module, monkeypatch, breaks
):
    built = fake_cudnn.Graph.build_plans
    monkeypatch.setattr(fake_cudnn.Graph, "build_plans", lambda graph: (built(graph), breaks(graph))[0])
    query, key, value, call = ragged([3, 9, 30])
    expected = kernels.forward(query, key, value, call)
    again = kernels.specialize("forward", (query, key, value), call)
    assert not isinstance(again, AddressLauncher)
    assert all(map(torch.equal, again(query, key, value, *short_ways.ends_of(call)), expected))
    assert [handle.by_address for handle in module.handles] == [0]


def test_another_current_device_is_left_to_the_long_way(kernels, monkeypatch):
    query, key, value, call = ragged([3, 9, 30])
    kernels.forward(query, key, value, call)
    again = kernels.specialize("forward", (query, key, value), call)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert again(query, key, value, *short_ways.ends_of(call)) is None

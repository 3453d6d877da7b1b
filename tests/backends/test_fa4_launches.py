"""Promises about FA4's known calls: when the package's Python is left out, and that the values stay true.

The fake package computes in its kernels only (`fake_fa4`), so a launch that is left out, or given the
wrong tensor, shows in the values.
"""

import logging
import sys
import threading
import types

import pytest
import torch
from support import fake_fa4, short_ways, truth
from support.fake_fa4 import AuxData, Package, both, call_of, dense, forget
from torch.utils._python_dispatch import _disable_current_modes

from attnreg import Call
from attnreg.backends import fa4
from attnreg.backends.fa4 import launches as fa4_launches
from attnreg.backends.fa4 import package as fa4_package
from attnreg.backends.fa4 import proof, rows, watching
from attnreg.backends.fa4.launches import Launches, known_as
from attnreg.backends.fa4.proof import Proof, proof_of
from attnreg.backends.fa4.recipe import Recipe, pick
from attnreg.backends.fa4.watching import told_apart, watched
from attnreg.torchlib.readback import PENDING, AsyncReadback

LONG_WAY, KNOWN = ["forward", "backward"], []


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    monkeypatch.setenv(fa4_package.SWITCH, "0")
    forget(monkeypatch)


@pytest.fixture
def package(monkeypatch):
    package = Package()
    fake_fa4.install(monkeypatch, package)
    return package


@pytest.fixture
def kernels(package):
    return fa4.BACKEND.load()


@pytest.fixture
def whole(monkeypatch):
    """Have it known of packed batches that every row belongs to a sequence; of a CPU's that isn't asked."""
    answer = types.SimpleNamespace(no_unused_rows=True)
    monkeypatch.setattr(rows, "facts", lambda *arguments: answer)
    return answer


def interface():
    return sys.modules["flash_attn.cute.interface"]


def packed(lengths, lengths_k=None, seed=0, **options):
    """Return query, key, value, gradient and call of a packed batch; equal offsets are one tensor."""
    lengths_k = lengths_k or lengths
    tensors = [x[0] for x in dense(sum(lengths), sum(lengths_k), batch=1, seed=seed)]
    cu_seqlens_q = torch.tensor([0, *lengths]).cumsum(0).int()
    cu_seqlens_k = cu_seqlens_q if lengths_k is lengths else torch.tensor([0, *lengths_k]).cumsum(0).int()
    longest = 64, 64
    return *tensors, Call(0.25, *longest, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)


def expected(query, key, value, grad, call):
    """Return output, LSE and gradients in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (query, key, value)]
    options = {"window": call.window, "scale": call.scale}
    if call.varlen:
        out, lse = truth.varlen(*leaves, call.cu_seqlens_q, call.cu_seqlens_k, **options)
    else:
        parts = [truth.attention(*each, **options) for each in zip(*leaves, strict=True)]
        out, lse = (torch.stack(x) for x in zip(*parts, strict=True))
    return out, lse, *torch.autograd.grad(out, leaves, grad.double())


def run(kernels, package, query, key, value, grad, call):
    """Run both directions, hold them to float64, and return which of them entered the package's Python."""
    package.calls.clear()
    package.launched.clear()
    got = both(kernels, query, key, value, grad, call)
    for one, true in zip(got, expected(query, key, value, grad, call), strict=True):
        truth.assert_near(one, true, torch.bfloat16)
    return [name for name, _ in package.calls]


def ways(kernels, package, rounds=4, **options):
    """Return the ways of equal calls with ever other tensors."""
    shape = {name: options.pop(name) for name in list(options) if name not in Call._fields}
    taken = []
    for seed in range(rounds):
        tensors = dense(**shape, seed=seed)
        taken.append(run(kernels, package, *tensors, call_of(*tensors[:2], **options)))
    return taken


# When


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads_k": 2},
        {"heads_k": 1, "deterministic": True},
        {"deterministic": True},
        {"window": (-1, 0)},
        {"window": (8, 3), "len_k": 50},
        {"dim_v": 24, "dtype": torch.float16},
    ],
    ids=str,
)
def test_the_third_equal_call_launches_what_the_first_did_and_enters_no_python(kernels, package, options):
    shape = {name: options[name] for name in options if name not in Call._fields}
    launched = []
    for seed in range(5):
        tensors = dense(**shape, seed=seed)
        call = call_of(*tensors[:2], **{name: options[name] for name in options if name in Call._fields})
        assert run(kernels, package, *tensors, call) == (LONG_WAY if seed < 2 else KNOWN)
        launched.append(package.launched.copy())
    assert launched[0]
    # The second is the one whose kind proves itself: each direction once more.
    assert len(launched[1]) == 2 * len(launched[0])
    assert launched[2:] == [launched[0]] * 3


@pytest.mark.parametrize(
    "lengths", [(5, 28, 7), (1,) * 300], ids=["few", "so many that a launch sums up their tiles"]
)
def test_packed_batches_of_equal_shape_are_known_whatever_their_offsets(kernels, package, whole, lengths):
    taken = [run(kernels, package, *packed(lengths[n:] + lengths[:n], seed=n)) for n in range(3)]
    assert taken == [LONG_WAY, LONG_WAY, KNOWN]
    assert ("_compute_tile_cumsum" in package.launched) is (len(lengths) > 256)
    # Two tensors of offsets, other ones each time: which goes where has been seen.
    apart = ((9, 21, 10), (10, 9, 21)) if len(lengths) == 3 else ((1,) * 300, (1,) * 299 + (3,))
    turned = [(apart[0][n:] + apart[0][:n], apart[1][n:] + apart[1][:n]) for n in range(3)]
    taken = [run(kernels, package, *packed(*each, seed=7)) for each in turned]
    assert taken == [LONG_WAY, LONG_WAY, KNOWN]


def test_a_known_packed_batch_whose_rows_may_belong_to_no_sequence_goes_the_long_way(kernels, package, whole):
    for _ in range(3):
        run(kernels, package, *packed((5, 28)))
    whole.no_unused_rows = False
    query, key, value, grad, call = packed((5, 28))
    call.cu_seqlens_q[-1] = 20
    package.calls.clear()
    out, lse, *grads = both(kernels, query, key, value, grad, call)
    assert [name for name, _ in package.calls] == LONG_WAY
    assert not any(x[20:].any() for x in (out, *grads))
    assert (lse[:, 20:] == -torch.inf).all()
    for _ in range(3):  # nor is it known by the time that it is whole
        run(kernels, package, *packed((6, 28)))
    whole.no_unused_rows = True
    assert [run(kernels, package, *packed((6, 28))) for _ in range(3)] == [LONG_WAY, LONG_WAY, KNOWN]


@pytest.mark.parametrize(
    "other",
    [
        *({"len_q": 34}, {"len_k": 34}, {"heads": 8, "heads_k": 4}, {"heads_k": 2}, {"dim_v": 24}),
        *({"batch": 3}, {"dtype": torch.float16}, {"scale": 0.5}, {"window": (-1, 0)}, {"window": (7, 0)}),
    ],
    ids=str,
)
def test_whatever_decides_differs_and_the_call_goes_the_long_way_first(kernels, package, other):
    assert ways(kernels, package) == [LONG_WAY, LONG_WAY, KNOWN, KNOWN]
    assert ways(kernels, package, **other) == [LONG_WAY, LONG_WAY, KNOWN, KNOWN]
    assert ways(kernels, package, rounds=1) == [KNOWN]


def test_the_determinism_strides_and_longest_lengths_decide_too(kernels, package, whole):
    assert ways(kernels, package)[-1] == KNOWN
    taken = ways(kernels, package, deterministic=True)
    assert taken[0] == LONG_WAY
    assert taken[-1] == KNOWN
    query, key, value, grad = dense()
    wide = torch.cat((query, query), dim=1)[:, :33]
    assert (wide.shape, wide.stride()) != (query.shape, query.stride())
    call = call_of(query, key)
    assert [run(kernels, package, wide, key, value, grad, call) for _ in range(3)] == [
        *([LONG_WAY] * 2),
        KNOWN,
    ]
    *tensors, call = packed((5, 28))
    for _ in range(3):
        assert run(kernels, package, *tensors, call) in (LONG_WAY, KNOWN)
    assert run(kernels, package, *tensors, call) == KNOWN
    for longer in ({"max_q": 65}, {"max_k": 65}):
        assert run(kernels, package, *tensors, call._replace(**longer)) == LONG_WAY


def moved(tensor):
    """Return an equal tensor that begins two bytes after a sixteenth one."""
    return torch.cat((tensor.new_zeros(1), tensor.flatten()))[1:].view(tensor.shape)


@pytest.mark.parametrize("index", range(4), ids=["query", "key", "value", "gradient"])
def test_what_is_not_aligned_goes_the_long_way_always(kernels, package, index):
    assert ways(kernels, package, rounds=3)[-1] == KNOWN
    tensors = dense()
    tensors[index] = moved(tensors[index])
    way = ["backward"] if index == 3 else LONG_WAY
    assert [run(kernels, package, *tensors, call_of(*tensors[:2])) for _ in range(3)] == [way] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"seqused_k": torch.ones(2, dtype=torch.int32)},
        {"block_table": torch.ones(2, 1, dtype=torch.int32)},
        {"attn_bias": torch.ones(1)},
        {"alibi_slopes": torch.ones(4)},
        {"dropout": 0.5},
        {"cu_seqlens_q": torch.ones(3, dtype=torch.int32)},
        {"cu_seqlens_q": torch.ones(3, 2, dtype=torch.int32)[:, 0], "cu_seqlens_k": torch.ones(3).int()},
        {"cu_seqlens_q": torch.ones(3).int(), "cu_seqlens_k": torch.ones(3, 2, dtype=torch.int32)[:, 0]},
        {"cu_seqlens_q": torch.ones(3).int(), "cu_seqlens_k": torch.ones(4, dtype=torch.int32)[1:]},
    ],
    ids=lambda options: "-".join(options),
)
def test_what_the_name_of_a_call_does_not_cover_has_none(options):
    query, key, value, _ = dense()
    call = call_of(query, key)
    assert known_as(call, query, key, value) is not None
    assert known_as(call._replace(**options), query, key, value) is None


def test_how_many_sequences_there_are_on_either_side_is_in_the_name():
    query, key, value, _, call = packed((5, 28), (20, 13))
    more = torch.tensor([0, 5, 20, 33], dtype=torch.int32)
    names = [
        known_as(call._replace(**ends), query, key, value)
        for ends in ({}, {"cu_seqlens_q": more}, {"cu_seqlens_k": more})
    ]
    assert len(set(names)) == 3
    assert None not in names


def test_where_there_is_nothing_to_do_nothing_is_known(kernels, package):
    query, key, value, grad = dense(len_k=0)
    for _ in range(3):
        out, *_ = both(kernels, query, key, value, grad, call_of(query, key))
        assert not out.any()
    assert package.calls == []


def test_tensors_that_are_one_are_not_taken_for_two(kernels, package):
    query, key, value, grad = dense()
    call = call_of(query, key)
    for _ in range(3):
        assert run(kernels, package, query, query, value, grad, call) == LONG_WAY
    # Not watched so far: the next one is.
    assert run(kernels, package, query, key, value, grad, call) == LONG_WAY
    assert run(kernels, package, query, key, value, grad, call) == KNOWN
    assert run(kernels, package, query, query, value, grad, call) == KNOWN
    assert told_apart((query, key, None, None, query[:1]))
    assert not told_apart((query, key, key.detach()))


def test_results_are_new_tensors_each_time(kernels):
    query, key, value, grad = dense()
    rounds = [both(kernels, query, key, value, grad, call_of(query, key)) for _ in range(5)]
    assert len({x.data_ptr() for results in rounds for x in results}) == 25
    assert not any(x.requires_grad for results in rounds for x in results)


def test_tensors_that_want_a_gradient_are_known_as_others_are(kernels, package):
    assert ways(kernels, package, rounds=3)[-1] == KNOWN
    tensors = [x.requires_grad_() for x in dense(seed=5)]
    with torch.no_grad():
        assert run_detached(kernels, package, *tensors) == KNOWN
    for seed in range(3):
        tensors = [x.requires_grad_() for x in dense(len_q=20, seed=seed)]
        with torch.no_grad():
            assert run_detached(kernels, package, *tensors) == (LONG_WAY if seed < 2 else KNOWN)


def run_detached(kernels, package, query, key, value, grad):
    package.calls.clear()
    call = call_of(query, key)
    got = both(kernels, query, key, value, grad, call)
    with torch.enable_grad():
        true = expected(query, key, value, grad, call)
    for one, of_it in zip(got, true, strict=True):
        truth.assert_near(one, of_it, torch.bfloat16)
    return [name for name, _ in package.calls]


def test_while_a_graph_is_captured_nothing_is_watched_and_known_calls_are_done_again(
    kernels, package, monkeypatch
):
    assert ways(kernels, package, rounds=1) == [LONG_WAY]
    with monkeypatch.context() as patch:
        patch.setattr(fa4, "_capturing", lambda tensor: True)
        assert ways(kernels, package, rounds=3) == [LONG_WAY] * 3
    assert ways(kernels, package, rounds=2) == [LONG_WAY, KNOWN]
    monkeypatch.setattr(fa4, "_capturing", lambda tensor: True)
    assert ways(kernels, package, rounds=2) == [KNOWN] * 2


def test_a_kind_is_not_watched_before_it_has_run(kernels, package):
    spied = count_watched(package)
    package.fails = RuntimeError("ptxas")
    query, key, value, _ = dense()
    call = call_of(query, key)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            kernels.forward(query, key, value, call)
    package.fails = None
    kernels.forward(query, key, value, call)
    assert spied == []
    kernels.forward(query, key, value, call)
    assert spied == [True]


def test_what_is_met_is_bounded(kernels, package, monkeypatch):
    monkeypatch.setattr(fa4_launches, "MOST", 3)
    launches = Launches()
    for number in range(20):
        assert not launches.meet((number,))
        assert launches.meet((number,))
        launches._recipes[(number,)] = None, Proof("forward", None)
        assert len(launches._met) <= 3
        assert len(launches._recipes) <= 3
    assert not launches.meet((0,))
    assert launches.meet((0,))
    # Two directions at a time are known all the same.
    for length in (10, 20, 30, 10):
        assert ways(kernels, package, len_q=length)[-1] == KNOWN


# Proof


@pytest.mark.parametrize("hidden", ["_bwd_preprocess", "_bwd_postprocess_convert"])
def test_a_launch_past_the_caches_is_found_out_and_the_kind_goes_the_long_way_for_ever(
    kernels, package, hidden, caplog
):
    package.hidden = {hidden}
    with caplog.at_level(logging.INFO, "attnreg"):
        assert ways(kernels, package) == [LONG_WAY, LONG_WAY, ["backward"], ["backward"]]
        # Another call of the kind isn't even watched.
        spied = count_watched(package)
        assert ways(kernels, package, len_q=34) == [LONG_WAY, LONG_WAY, ["backward"], ["backward"]]
        assert len(spied) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "FA4 goes through its package's Python for a kind of backward: launched without it, "
        "the results were others"
    ]
    package.hidden = set()
    assert ways(kernels, package, rounds=1) == [["backward"]]
    assert ways(kernels, package, window=(-1, 0))[-1] == KNOWN


def count_watched(package):
    """Return the list that grows by one with each call in which spies stand in for the caches."""
    spied = []

    def look():
        if isinstance(interface()._flash_attn_fwd.compile_cache, watching._Spy):
            spied.append(True)

    package.pause = look
    return spied


def test_an_allocation_of_integers_that_nobody_fills_is_found_out(kernels, package, whole, caplog):
    package.hidden = {"_compute_tile_cumsum"}
    with caplog.at_level(logging.INFO, "attnreg"):
        taken = [run(kernels, package, *packed((1,) * 300, seed=n)) for n in range(4)]
    assert taken == [LONG_WAY, LONG_WAY, ["forward"], ["forward"]]
    assert "a kind of forward: launched without it, it failed: " in caplog.text


def test_where_the_proof_has_no_memory_a_smaller_call_of_the_kind_may_prove_it(kernels, package):
    def fail(name):
        # The first of a round is the package's own, the second the proof's.
        if name == "_bwd_preprocess" and name in package.launched:
            raise torch.OutOfMemoryError("full")

    large, small = {"batch": 3}, {"batch": 1}
    assert ways(kernels, package, rounds=1, **large) == [LONG_WAY]
    package.each = fail
    assert ways(kernels, package, rounds=1, **large) == [LONG_WAY]
    package.each = lambda name: None
    assert ways(kernels, package, rounds=2, **large) == [["backward"]] * 2
    assert ways(kernels, package, rounds=4, **small)[2:] == [KNOWN] * 2


def test_an_exception_in_the_proof_leaves_the_call_right_and_its_kind_the_long_way(kernels, package, caplog):
    error = RuntimeError("lost")

    def fail(name):
        # The first of a round is the package's own, the second the proof's.
        if name == "_bwd_preprocess" and name in package.launched:
            raise error

    assert ways(kernels, package, rounds=1) == [LONG_WAY]
    package.each = fail
    with caplog.at_level(logging.INFO, "attnreg"):
        assert ways(kernels, package, rounds=1) == [LONG_WAY]
        package.each = lambda name: None
        assert ways(kernels, package, rounds=3) == [["backward"]] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "FA4 goes through its package's Python for a kind of backward: launched without it, "
        f"it failed: {error}"
    ]


def test_until_the_device_has_answered_calls_go_the_long_way(kernels, package, monkeypatch):
    answers = []

    def unanswered(direction, *arguments):
        answers.append(torch.full((), PENDING, dtype=torch.uint8))
        return Proof(direction, AsyncReadback(answers[-1]))

    monkeypatch.setattr(fa4_launches, "proof_of", unanswered)
    assert ways(kernels, package) == [LONG_WAY] * 4
    spied = count_watched(package)
    assert ways(kernels, package, len_q=34) == [LONG_WAY] * 4
    assert len(spied) == 2
    assert len(answers) == 2  # one for each direction, whatever the lengths
    answers[1].fill_(1)
    assert ways(kernels, package, rounds=1) == [["forward"]]
    answers[0].fill_(1)
    assert ways(kernels, package, rounds=1) == [KNOWN]
    assert ways(kernels, package, len_q=34, rounds=1) == [KNOWN]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
@pytest.mark.parametrize("written", [True, False])
def test_memory_that_still_holds_the_right_values_does_not_pass_for_a_launch(monkeypatch, dtype, written):
    right = torch.arange(1, 4).to(dtype)
    # As a caching allocator does: what is given back comes again, with what was in it.
    monkeypatch.setattr(torch, "empty_strided", lambda *given, **named: right.clone())
    launches = (((lambda out, lse: out.copy_(right) if written else None), pick([1, 2])),)
    allocations = tuple((slot, (3,), (1,), dtype) for slot in (1, 2))
    recipe = Recipe(torch.device("cpu"), (None, None), allocations, (2,), (), launches, pick([1, 2]))
    proof = proof_of("forward", recipe, (right,), (right, torch.zeros_like(right)))
    assert (proof.holds, proof.refuted) == (written, not written)


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
        ([1e-6, 0.0], [0.0, 0.0], True),  # rounding, beside the ones below
        ([1e-3, 0.0], [0.0, 0.0], False),
    ],
)
def test_results_are_the_same_as_far_as_a_gpu_repeats_itself(got, expected, same):
    beside = torch.ones(3, dtype=torch.bfloat16)
    got, expected = torch.tensor(got), torch.tensor(expected)
    assert int(proof._said([got, beside], [expected, beside])) == same
    assert int(proof._said([beside, got], [beside, expected])) == same


@pytest.mark.parametrize("hidden", [set(), {"_bwd_preprocess"}])
def test_a_call_of_nothing_finite_proves_nothing_and_the_next_one_has_to(kernels, package, hidden):
    package.hidden = hidden
    query, key, value, grad = dense()
    call = call_of(query, key)
    for _ in range(4):
        package.calls.clear()
        got = both(kernels, query, key * torch.nan, value, grad, call)
        assert all(x.isnan().all() for x in got)
        assert [name for name, _ in package.calls] == LONG_WAY
    assert ways(kernels, package, rounds=2) == [LONG_WAY, ["backward"] if hidden else KNOWN]


# Watching

KEPT, ACROSS = torch.ones(1), torch.ones(2, 6).mT
NEITHER = "a launch is given a tensor that is neither an input nor an allocation"


def launch_beside(package, *arguments, **keywords):
    """Have the forward launch one more kernel with these arguments; a callable is given the output."""

    def kernel(*given, **named):
        package.given.append(given)

    def beside(out):
        given = [x(out) if callable(x) else x for x in arguments]
        cache = interface()._flash_attn_fwd.compile_cache
        if "beside" not in cache:
            cache["beside"] = kernel
        cache["beside"](*given, **keywords)

    package.beside, package.given = beside, []


@pytest.mark.parametrize(
    ("arguments", "keywords", "told"),
    [
        ((KEPT,), {}, NEITHER),
        (((1, AuxData((KEPT,))),), {}, NEITHER),
        (([1],), {}, "a launch is given a list"),
        ((torch.Size((1,)),), {}, "a launch is given a Size"),
        ((torch.float32,), {}, "a launch is given a dtype"),
        ((1,), {"named": 1}, "a launch takes keywords"),
        ((lambda out: out.mul_(1),), {}, "aten::mul_.Tensor isn't known"),
        ((lambda out: out.view(-1),), {}, "aten::view isn't known"),
        ((lambda out: torch.empty(1, device="meta"),), {}, "it allocates a torch.strided tensor on meta"),
    ],
)
def test_what_cannot_be_done_again_is_watched_once_and_goes_the_long_way(
    kernels, package, arguments, keywords, told, caplog
):
    launch_beside(package, *arguments, **keywords)
    spied = count_watched(package)
    with caplog.at_level(logging.DEBUG, "attnreg"):
        assert ways(kernels, package) == [LONG_WAY, LONG_WAY, ["forward"], ["forward"]]
    assert len(spied) == 2  # once each direction
    assert caplog.messages == [f"FA4 goes through its package's Python for a forward: {told}"]


def test_tuples_are_given_again_as_they_were_with_the_tensors_of_the_call(kernels, package):
    launch_beside(
        package, "word", (), (1, (2.5, None)), AuxData(scalars=(True,)), lambda out: AuxData((out, (3, out)))
    )
    for seed in range(4):
        query, key, value, _ = dense(seed=seed)
        package.given.clear()
        out, _ = kernels.forward(query, key, value, call_of(query, key))
        *plain, aux = package.given[0]
        assert plain == ["word", (), (1, (2.5, None)), AuxData(scalars=(True,))]
        assert type(plain[3]) is type(aux) is AuxData
        first, (three, second) = aux.tensors
        assert first.data_ptr() == second.data_ptr() == out.data_ptr()
        assert (three, aux.scalars) == (3, None)
    assert len(package.calls) == 2


@pytest.mark.parametrize(
    ("results", "told"),
    [
        (lambda x: (x, torch.empty_like(x)), "a result isn't one of its allocations"),
        (lambda x: (torch.empty_like(x), KEPT), "a result isn't one of its allocations"),
        (lambda x: (torch.empty_like(x), None), "a result isn't one of its allocations"),
        (lambda x: (torch.empty_like(x),), "a result isn't one of its allocations"),
        (lambda x: None, "a result isn't one of its allocations"),
        (lambda x: (torch.empty_like(x), torch.zeros(3)), "no launch was seen"),
    ],
)
def test_a_call_without_results_or_launches_of_its_own_has_no_recipe(package, results, told):
    query = dense()[0]
    got, why = watched(lambda: results(query), (query, None, None), 2)
    assert type(got) is type(results(query))
    assert why == told


@pytest.mark.parametrize(
    ("allocate", "zeroed"),
    [
        (lambda x: torch.empty(3, 4, dtype=torch.int32), False),
        (lambda x: torch.empty_like(x), False),
        (lambda x: torch.empty_like(ACROSS), False),
        (lambda x: x.new_empty(5), False),
        (lambda x: torch.empty_strided((2, 3), (1, 2)), False),
        (lambda x: x.new_empty_strided((2, 3), (1, 8)), False),
        (lambda x: torch.zeros(3, dtype=torch.int64), True),
        (lambda x: torch.zeros_like(x), True),
        (lambda x: x.new_zeros(2, 2), True),
    ],
)
def test_allocations_are_made_again_as_they_were(package, allocate, zeroed):
    given, before = torch.ones(2, 6), allocate(torch.ones(2, 6))
    cache = interface()._bwd_preprocess
    cache.compile_cache[()] = lambda *tensors: None

    def call():
        made = allocate(given)
        cache.compile_cache[()](made)
        return (made,)

    (made,), recipe = watched(call, (given,), 1)
    (again,) = recipe.again(torch.zeros(2, 6))
    for one in (made, again):
        assert (one.shape, one.stride(), one.dtype) == (before.shape, before.stride(), before.dtype)
    assert again.data_ptr() != made.data_ptr()
    assert recipe.zeroed == ((recipe.allocations[0][0],) if zeroed else ())
    if zeroed:
        assert not again.any()


def test_another_threads_launches_are_not_recorded_and_run_all_the_same(kernels, package):
    ran = []

    def elsewhere():
        cache = interface()._bwd_preprocess.compile_cache
        if "elsewhere" not in cache:
            cache["elsewhere"] = lambda tensor: ran.append(tensor)
        cache["elsewhere"](torch.ones(1).mul_(2))

    def pause():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    package.pause = pause
    spied = []
    package.beside = lambda out: spied.append(type(interface()._bwd_preprocess.compile_cache).__name__)
    assert ways(kernels, package) == [LONG_WAY, LONG_WAY, KNOWN, KNOWN]
    assert spied == ["Cache", "_Spy"]
    assert len(ran) == 4


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
def test_caches_are_put_back_after_an_exception_and_the_call_is_watched_anew(kernels, package, error):
    def caches():
        return [x.compile_cache for x in vars(interface()).values() if hasattr(x, "compile_cache")]

    before = caches()
    query, key, value, _ = dense()
    call = call_of(query, key)
    kernels.forward(query, key, value, call)
    seen_inside = []

    def fail(name):
        seen_inside.append(not any(x is y for x, y in zip(caches(), before, strict=True)))
        raise error

    package.each = fail
    with pytest.raises(type(error)) as caught:
        kernels.forward(query, key, value, call)
    assert caught.value is error
    assert seen_inside == [True]
    assert all(x is y for x, y in zip(caches(), before, strict=True))
    package.each = lambda name: None
    assert ways(kernels, package) == [LONG_WAY, ["backward"], KNOWN, KNOWN]
    assert all(x is y for x, y in zip(caches(), before, strict=True))


def test_a_spy_does_whatever_else_the_cache_does(package):
    cache = fake_fa4.Cache()
    spy = watching._Spy(cache, types.SimpleNamespace(thread=None))
    spy["key"] = print
    assert cache["key"] is print
    assert spy["key"] is print
    assert "key" in spy
    assert "other" not in spy
    assert spy.compiled is cache.compiled
    with pytest.raises(KeyError):
        spy["other"]


# Threads


def test_known_calls_run_in_threads_without_waiting_for_each_other(kernels, package):
    assert ways(kernels, package, rounds=3)[-1] == KNOWN
    given = [dense(seed=seed) for seed in range(2)]
    got, meet = {}, threading.Barrier(2)

    def forward(index):
        query, key, value, _ = given[index]
        got[index] = kernels.forward(query, key, value, call_of(query, key))

    package.each = lambda name: meet.wait(10)
    threads = [threading.Thread(target=forward, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not meet.broken
    for index, tensors in enumerate(given):
        true = expected(*tensors, call_of(*tensors[:2]))
        for one, of_it in zip(got[index], true, strict=False):
            truth.assert_near(one, of_it, torch.bfloat16)


def test_the_fake_package_would_show_a_launch_left_out(kernels, package):
    """What the tests above rest on: without one of its kernels, a call isn't right."""
    query, key, value, grad = dense(heads_k=2)
    call = call_of(query, key)
    right = both(kernels, query, key, value, grad, call)
    for name in ("_bwd_preprocess", "_flash_attn_bwd", "_bwd_postprocess_convert"):
        function = getattr(interface(), name)
        (key_of,) = function.compile_cache.compiled
        kept = function.compile_cache[key_of]
        function.compile_cache[key_of] = lambda *given: None
        with _disable_current_modes():
            wrong = kernels.backward(grad, query, key, value, *right[:2], call._replace(max_q=40))
        function.compile_cache[key_of] = kept
        assert not all(torch.allclose(x, y, atol=0.05) for x, y in zip(wrong, right[2:], strict=True)), name


# The shorter way


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "packed"])
def test_a_call_done_again_comes_out_the_same(kernels, package, whole, varlen):
    def given(seed):
        if varlen:
            return packed((5, 28, 7), seed=seed)
        tensors = dense(seed=seed)
        return *tensors, call_of(*tensors[:2])

    for seed in range(2):
        run(kernels, package, *given(seed))
    *first, call = given(2)
    *second, other = given(3)
    package.calls.clear()
    _, backwards = short_ways.assert_same(kernels, first, second, call, other)
    assert len(backwards) == 2
    assert package.calls == []


def test_until_a_call_is_known_there_is_no_shorter_way(kernels, package):
    query, key, value, grad = dense()
    call = call_of(query, key)
    assert kernels.specialize("forward", (query, key, value), call) is None
    ways(kernels, package)
    assert kernels.specialize("forward", (query, key, value), call) is not None
    out, lse = kernels.forward(query, key, value, call)
    assert kernels.specialize("backward", (grad, query, key, value, out, lse), call) is not None
    strided = lse.transpose(1, 2).contiguous().transpose(1, 2)
    assert kernels.specialize("backward", (grad, query, key, value, out, strided), call) is None


def test_an_lse_that_is_strided_gives_the_same_gradients(kernels, package):
    query, key, value, grad = dense()
    call = call_of(query, key)
    out, lse = kernels.forward(query, key, value, call)
    strided = lse.transpose(1, 2).contiguous().transpose(1, 2)
    expected = kernels.backward(grad, query, key, value, out, lse, call)
    for got, wanted in zip(
        kernels.backward(grad, query, key, value, out, strided, call), expected, strict=True
    ):
        assert torch.equal(got, wanted)

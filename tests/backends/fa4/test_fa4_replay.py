"""Promises about replaying FA4's recorded launches: of which calls, and that the values stay true."""

import threading

import pytest
import torch
from support import launchers, truth
from support.fake_fa4 import (
    BOTH,
    CONFIRMED_SOON,
    NEITHER,
    both,
    call_of,
    count_recorded,
    dense,
    dense_call,
    entered,
    packed,
    true_results,
)

from attnreg import Call
from attnreg.backends.fa4 import adapter, recording, replay
from attnreg.backends.fa4.recording import describe

# Which calls are replayed


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
        {"batch": 1, "heads": 1},
    ],
    ids=str,
)
def test_from_the_fourth_call_on_the_launches_of_the_first_are_repeated_and_no_python(
    kernels, package, options
):
    launched = []
    for seed in range(6):
        given = dense_call(seed, **options)
        assert entered(kernels, package, *given) == (BOTH if seed < 3 else NEITHER)
        launched.append(package.launched.copy())
    assert launched[0]
    assert launched[1] == launched[0]
    # The third call's recipes are confirmed: each direction once more.
    assert len(launched[2]) == 2 * len(launched[0])
    assert launched[3:] == [launched[0]] * 3


@pytest.mark.parametrize(
    "lengths", [(5, 28, 7), (1,) * 19 + (3,)], ids=["few", "so many that a launch sums up their tiles"]
)
def test_packed_batches_of_one_shape_are_replayed_whatever_their_offsets(
    kernels, package, no_unused_rows, many_are_few, lengths
):
    found = [entered(kernels, package, *packed(lengths[n:] + lengths[:n], seed=n)) for n in range(4)]
    assert found == CONFIRMED_SOON
    assert ("_compute_tile_cumsum" in package.launched) is (len(lengths) > many_are_few)
    # Two tensors of offsets: the recording distinguishes them.
    lengths_k = lengths[::-1]
    shifted = [(lengths[n:] + lengths[:n], lengths_k[n:] + lengths_k[:n]) for n in range(4)]
    found = [entered(kernels, package, *packed(*each, seed=7)) for each in shifted]
    assert found == CONFIRMED_SOON


def test_a_packed_batch_that_may_have_unused_rows_is_not_replayed(kernels, package, no_unused_rows):
    for _ in range(4):
        entered(kernels, package, *packed((5, 28)))
    no_unused_rows.no_unused_rows = False
    query, key, value, grad, call = packed((5, 28))
    call.cu_seqlens_q[-1] = 20
    package.calls.clear()
    out, lse, *grads = both(kernels, query, key, value, grad, call)
    assert [name for name, _ in package.calls] == BOTH
    assert not any(x[20:].any() for x in (out, *grads))
    assert (lse[:, 20:] == -torch.inf).all()
    for _ in range(4):  # nor do such calls count towards a recipe
        entered(kernels, package, *packed((6, 28)))
    no_unused_rows.no_unused_rows = True
    assert [entered(kernels, package, *packed((6, 28))) for _ in range(4)] == CONFIRMED_SOON


def test_a_call_of_another_description_is_recorded_and_confirmed_for_itself(rounds):
    assert rounds(4) == CONFIRMED_SOON
    # A forward is the same, deterministic or not, but its description isn't.
    assert rounds(4, deterministic=True) == CONFIRMED_SOON
    assert rounds(4, len_q=34) == CONFIRMED_SOON
    assert rounds(1) == [NEITHER]


def test_expanded_tensors_that_require_a_gradient_are_replayed_too(kernels, package):
    found, results = [], []
    for seed in range(5):
        query, key, value, grad = dense(seed=seed)
        key, value = (x[:, :, :1].expand(x.shape) for x in (key.requires_grad_(), value))
        with torch.no_grad():
            found.append(entered(kernels, package, query, key, value, grad, call_of(query, key)))
            results += both(kernels, query, key, value, grad, call_of(query, key))
    assert found[2:] == [NEITHER] * 3  # with a call more in each round
    assert len({x.data_ptr() for x in results}) == 25, "results are new tensors each time"
    assert not any(x.requires_grad for x in results)


def moved(x):
    """Return a copy that isn't aligned."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


def test_tensors_that_are_not_aligned_always_go_through_the_package(kernels, package, rounds):
    assert rounds(4) == CONFIRMED_SOON
    query, key, value, grad = dense()
    for tensors in ((moved(query), key, value, grad), (query, moved(key), value, grad)):
        assert [entered(kernels, package, *tensors, call_of(query, key)) for _ in range(4)] == [BOTH] * 4
    tensors = query, key, value, moved(grad)
    assert [entered(kernels, package, *tensors, call_of(query, key)) for _ in range(4)] == [["backward"]] * 4


ENDS = torch.ones(3, dtype=torch.int32)
# For each field of `Call` a value that changes what is launched, or that no recipe can hold.
OTHER = {
    "scale": 0.5,
    "max_q": 65,
    "max_k": 65,
    "window": (-1, 0),
    "deterministic": True,
    "batch_invariant": True,
    "seqused_k": ENDS,
    "block_table": ENDS[None],
    "attn_bias": torch.ones(1),
    "alibi_slopes": torch.ones(4),
    "dropout": 0.5,
    "softcap": 20.0,
    "grad_lse": torch.ones(4, 64),
    "sinks": torch.ones(4),
    "cu_seqlens_q": ENDS,
    "cu_seqlens_k": ENDS,
}
DESCRIBED = ("scale", "max_q", "max_k", "window", "softcap", "deterministic", "batch_invariant", "sinks")


def test_a_description_holds_each_field_of_a_call_or_there_is_none():
    # A forward's number of splits is refused above 1; random state is there with dropout only.
    assert OTHER.keys() == {*Call._fields} - {"num_splits", "rng_state"}
    query, key, value, _, call = dense_call()
    usual = describe(call, query, key, value)
    for name, other in OTHER.items():
        found = describe(call._replace(**{name: other}), query, key, value)
        assert found not in (usual, None) if name in DESCRIBED else found is None, name
    longest = recording.LARGEST // query.numel()
    assert describe(call._replace(max_k=longest), query, key, value) is not None
    assert describe(call._replace(max_k=longest + 1), query, key, value) is None, "a GPU is busy for long"


def test_a_description_holds_the_layout_of_each_tensor_or_there_is_none():
    shapes = ({}, {"len_q": 34}, {"len_k": 34}, {"heads": 8}, {"heads_k": 2}, {"dim_v": 24}, {"batch": 3})
    given = [dense(**shape)[:3] for shape in (*shapes, {"dtype": torch.float16})]
    usual = given[0]
    for index, x in enumerate(usual):
        wide = torch.cat((x, x), dim=1)[:, :33]
        assert (wide.shape, wide.stride()) != (x.shape, x.stride())
        for other, described in ((wide, True), (moved(x), False)):
            changed = [*usual[:index], other, *usual[index + 1 :]]
            assert (describe(call_of(*usual[:2]), *changed) is not None) is described
            given += [changed] * described
    assert len({describe(call_of(*usual[:2]), *tensors) for tensors in given}) == len(given)


@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k"])
def test_a_description_holds_how_many_sequences_there_are_and_their_offsets_are_plain(which):
    query, key, value, _, call = packed((5, 28), (20, 13))
    more, strided = torch.tensor([0, 5, 20, 33]).int(), torch.ones(3, 2, dtype=torch.int32)[:, 0]
    usual, *others = (
        describe(call._replace(**{which: offsets}), query, key, value)
        for offsets in (getattr(call, which), more, strided, torch.ones(4, dtype=torch.int32)[1:])
    )
    assert None not in (usual, others[0])
    assert usual != others[0]
    assert others[1:] == [None, None], "strided, and not aligned"


def test_a_call_whose_query_is_its_key_is_not_recorded_but_replayed(kernels, package):
    query, key, value, grad, call = dense_call()
    for _ in range(4):
        assert entered(kernels, package, query, query, value, grad, call) == BOTH
    for through in (BOTH, BOTH, NEITHER):  # recorded, confirmed, replayed
        assert entered(kernels, package, query, key, value, grad, call) == through
    assert entered(kernels, package, query, query, value, grad, call) == NEITHER
    assert recording.distinguishable({"q": query, "k": key, "v": query[:1]})
    assert not recording.distinguishable({"q": query, "k": key, "v": key.detach()})


def test_in_a_graphs_capture_nothing_new_is_recorded_or_confirmed_and_the_rest_is_replayed(
    rounds, monkeypatch
):
    def captured(count):
        with monkeypatch.context() as patch:
            patch.setattr(adapter, "_capturing", lambda tensor: True)
            return rounds(count)

    assert rounds(1) == [BOTH]
    assert captured(3) == [BOTH] * 3
    assert rounds(1) == [BOTH]
    assert captured(3) == [BOTH] * 3  # recorded, not confirmed
    assert rounds(2) == [BOTH, NEITHER]
    assert captured(2) == [NEITHER] * 2


def test_a_kind_is_not_recorded_before_it_has_run(kernels, package):
    recorded = count_recorded(package)
    package.fails = RuntimeError("ptxas")
    query, key, value, _, call = dense_call()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            kernels.forward(query, key, value, call)
    package.fails = None
    kernels.forward(query, key, value, call)
    assert recorded == []
    kernels.forward(query, key, value, call)
    assert recorded == [True]


def test_the_number_of_descriptions_is_bounded(rounds, monkeypatch):
    monkeypatch.setattr(replay, "MOST", 3)
    replays = replay.Replays(True)
    for number in range(20):
        assert not replays.seen((number,))
        assert replays.seen((number,))
        assert len(replays._entries) <= 3
    assert not replays.seen((0,))
    # Two directions at a time are replayed all the same.
    for length in (10, 20, 30, 10):
        assert rounds(5, len_q=length)[-1] == NEITHER


# Threads


def test_replays_run_in_threads_without_waiting_for_each_other(kernels, package, rounds):
    assert rounds(4) == CONFIRMED_SOON
    given = [dense(seed=seed) for seed in range(2)]
    got, barrier = {}, threading.Barrier(2)

    def forward(index):
        query, key, value, _ = given[index]
        got[index] = kernels.forward(query, key, value, call_of(query, key))

    package.on_launch = lambda name: barrier.wait(10)
    threads = [threading.Thread(target=forward, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not barrier.broken
    for index, tensors in enumerate(given):
        true = true_results(*tensors, call_of(*tensors[:2]))
        for one, of_it in zip(got[index], true, strict=False):
            truth.assert_near(one, of_it, torch.bfloat16)


# Launchers


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "packed"])
def test_a_launcher_gives_what_the_functions_give(kernels, package, no_unused_rows, varlen):
    def given(seed):
        return packed((5, 28, 7), seed=seed) if varlen else dense_call(seed)

    for seed in range(3):
        entered(kernels, package, *given(seed))
    *first, call = given(3)
    *second, other = given(4)
    package.calls.clear()
    _, backwards = launchers.assert_same(kernels, first, second, call, other)
    assert len(backwards) == 2
    assert package.calls == []


def test_until_a_recipe_is_confirmed_there_is_no_launcher(kernels, rounds):
    query, key, value, _, call = dense_call()
    for _ in range(3):
        assert kernels.specialize("forward", (query, key, value), call) is None
        rounds(1)
    assert kernels.specialize("forward", (query, key, value), call) is not None


def test_an_lse_that_is_strided_gives_the_same_gradients_and_has_no_launcher(kernels, rounds):
    rounds(3)
    query, key, value, grad, call = dense_call()
    out, lse = kernels.forward(query, key, value, call)
    strided = lse.transpose(1, 2).contiguous().transpose(1, 2)
    expected = kernels.backward(grad, query, key, value, out, lse, call)
    got = kernels.backward(grad, query, key, value, out, strided, call)
    assert all(map(torch.equal, got, expected))
    tensors = grad, query, key, value, out
    assert kernels.specialize("backward", (*tensors, lse), call) is not None
    assert kernels.specialize("backward", (*tensors, strided), call) is None

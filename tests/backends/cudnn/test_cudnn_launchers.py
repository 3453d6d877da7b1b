"""Promises of cuDNN's launchers: they run every call of a kind, whatever its lengths, and keep no call."""

import gc
import random
import weakref

import pytest
import torch
from support import fake_cudnn, launchers
from support.fake_cudnn import ragged

from attnreg.backends.cudnn import execution_plans, rounding
from attnreg.core.contract.backend import Call
from attnreg.core.launching.launchers import AddressLauncher
from attnreg.core.torchlib import layout


def drawn(shape, seed):
    """Return query, key, value and a gradient with other values than those of a call."""
    torch.manual_seed(seed)
    query, key, value, *_ = shape
    return [torch.randn_like(x) for x in (query, key, value, query)]


def dense(batch, length_q, length_k, heads=(4, 2), dim=16):
    torch.manual_seed(length_q)
    query, key, value = (
        torch.randn(batch, length, count, dim).bfloat16()
        for length, count in ((length_q, heads[0]), (length_k, heads[1]), (length_k, heads[1]))
    )
    return query, key, value, Call(0.25, length_q, length_k)


def both(kernels, given):
    """Run both directions; return the tensors that each is given, and the call."""
    query, key, value, call = given
    out, lse = kernels.forward(query, key, value, call)
    kernels.backward(out, query, key, value, out, lse, call)
    return (query, key, value), (out, query, key, value, out, lse), call


def launchers_of(kernels, given):
    """Run both directions of a call; return the launchers that these offer."""
    forward, backward, call = both(kernels, given)
    return kernels.specialize("forward", forward, call), kernels.specialize("backward", backward, call)


def lengths_and_strides(tensors, call):
    """Return what `prepare` is given."""
    query, key = tensors[:2] if len(tensors) == 3 else tensors[1:3]
    batch = len(query) if call.cu_seqlens_q is None else len(call.cu_seqlens_q) - 1
    tokens = query.shape[:-2].numel(), key.shape[:-2].numel()
    return batch, call.max_q, call.max_k, *tokens, tuple(x.stride() for x in tensors)


# Further calls


PACKED = (
    (ragged, ([3, 9, 30],), [([4, 9, 30],), ([1],), ([20, 2, 20],), ([7] * 20,), ([300, 5],), ([3, 9, 30],)]),
    (ragged, ([3, 9], [4, 9]), [([1, 2], [5, 6]), ([9, 3, 1], [9, 9, 1]), ([3, 9], [4, 9])]),
)
DENSE = ((dense, (2, 6, 6), [(2, 7, 9), (1, 6, 6), (3, 5, 33), (2, 6, 6)]),)


@pytest.mark.parametrize(("make", "first", "others"), PACKED + DENSE, ids=["one offsets", "two", "dense"])
def test_a_launcher_runs_all_further_calls_of_its_kind(kernels, make, first, others):
    forward, backward = launchers_of(kernels, make(*first))
    for number, lengths in enumerate(others):
        query, key, value, call = make(*lengths)
        query, key, value, grad = drawn((query, key, value), number)
        given, further = (query, key, value), launchers.packed_arguments(call)
        out, lse = kernels.forward(*given, call)
        wanted = kernels.backward(grad, *given, out, lse, call)
        for run in (forward, forward.on_addresses):
            got = run(*given, *further)
            assert all(map(torch.equal, got, (out, lse)))
            for run_back in (backward, backward.on_addresses):
                assert all(map(torch.equal, run_back(grad, *given, *got, *further), wanted))


def test_a_launcher_is_the_first_to_run_a_batch(kernels, module):
    """It builds what isn't there; on addresses it leaves that to others."""
    forward, backward = launchers_of(kernels, ragged([3, 9]))
    query, key, value, call = ragged([5, 9])
    further = launchers.packed_arguments(call)
    assert forward.on_addresses(query, key, value, *further) is None
    built = len(module.graphs)
    out, lse = forward(query, key, value, *further)
    assert len(module.graphs) == built + 1
    assert backward.on_addresses(out, query, key, value, out, lse, *further) is None
    grads = backward(out, query, key, value, out, lse, *further)
    assert all(map(torch.equal, grads, kernels.backward(out, query, key, value, out, lse, call)))
    assert torch.equal(forward.on_addresses(query, key, value, *further)[0], out)


@pytest.mark.parametrize("shared", [True, False], ids=["a shared plan", "an exact plan"])
@pytest.mark.parametrize("lens_k", [None, [12, 9, 30]], ids=["one offsets tensor", "two"])
def test_a_packed_call_is_the_same_on_other_offsets(kernels, module, monkeypatch, lens_k, shared):
    if shared:
        rule = lambda problem: rounding.shared(rounding.exact(problem))  # noqa: E731
        fake_cudnn.select_by(monkeypatch, kernels.forward.args[0], rule)
    given = ragged([3, 9, 30], lens_k)
    other = ragged([20, 2, 20], lens_k and [20, 20, 11])[-1]._replace(max_q=30, max_k=30)
    call = given[-1]
    forward, backwards = launchers.assert_same(kernels, drawn(given, 1), drawn(given, 2), call, other)
    assert len(backwards) == 2
    built = len(module.graphs)
    query, key, value, _ = drawn(given, 3)
    for run in (forward, forward.on_addresses):
        _, lse = run(query, key, value, *launchers.packed_arguments(call))
        assert (lse.t() if shared else lse).is_contiguous(), "it stays as cuDNN has written it"
    assert len(module.graphs) == built


def test_a_call_without_scores_is_left_to_python(kernels, module):
    forward, backward = launchers_of(kernels, ragged([3, 9]))
    query, key, value, call = ragged([3, 9])
    built = len(module.graphs)
    for inputs in ((query[:0], key, value), (query, key[:0], value[:0])):
        out, lse = kernels.forward(*inputs, call)
        for launcher, given in ((forward, inputs), (backward, (out, *inputs, out, lse))):
            assert launcher(*given, *launchers.packed_arguments(call)) is None
            assert launcher.prepare(*lengths_and_strides(given, call)) is None
    assert len(module.graphs) == built


def test_a_launcher_of_an_empty_call_runs_others(kernels):
    query, key, value, call = ragged([3, 9])
    forward = kernels.specialize("forward", (query[:0], key, value), call)
    out, _ = forward(query, key, value, *launchers.packed_arguments(call))
    assert torch.equal(out, kernels.forward(query, key, value, call)[0])


# What is prepared


@pytest.mark.slow
def test_batches_that_share_an_execution_plan_are_launched_alike(kernels):
    forward, backward = launchers_of(kernels, ragged([3, 9]))
    both(kernels, ragged([3, 8]))
    for launcher, which in ((forward, 0), (backward, 1)):
        prepared = []
        for lens in ([3, 8], [100, 2, 8], [7] * 8, [900]):
            given = both(kernels, ragged(lens))
            prepared.append(launcher.prepare(*lengths_and_strides(given[which], given[2])))
        assert prepared[0] is not None
        assert len({one.launch for one in prepared}) == 1
        assert prepared[0].workspace == 64
        assert prepared[0].lse_token_first is (which == 0)
        assert prepared[0].lse_strides == (None if which == 0 else (1, 4))


def test_lengths_of_one_bucket_are_prepared_once_and_budgets_and_the_first_tokens_apart(kernels):
    forward, backward = launchers_of(kernels, ragged([300, 9]))
    tensors, tensors_back, _ = both(kernels, ragged([3, 8]))
    strides, strides_back = (tuple(x.stride() for x in given) for given in (tensors, tensors_back))
    batches, longest, any_keys = (1, 8), (1, 4096), (1, 2**31 - 1)
    served = forward.prepare(5, 90, 70, 280, 90, strides).lengths
    assert served == (batches, longest, longest, (1, 308), any_keys), "309 are the first tokens"
    served = backward.prepare(5, 90, 70, 400, 90, strides_back).lengths
    assert served == (batches, longest, longest, (310, 511), (1, 4096))
    served = forward.prepare(8, 900, 70, 3000, 90, strides).lengths
    assert served == ((6, 8), longest, longest, (2049, 3071), any_keys), "2048 is a budget"
    exact = forward.prepare(5, 90, 70, 309, 90, strides)
    assert exact.lengths == (batches, longest, longest, (309, 309), any_keys)
    assert not exact.lse_token_first


@pytest.mark.parametrize(("lens", "strides"), [([3, 9], (12, 1)), ([3, 9, 1], (13, 1))])
def test_an_exact_backward_wants_the_lse_in_order(kernels, lens, strides):
    given = ragged(lens)
    forward, backward = launchers_of(kernels, given)
    tensors, tensors_back, call = both(kernels, given)
    prepared = backward.prepare(*lengths_and_strides(tensors_back, call))
    assert prepared.lse_strides == strides
    assert not forward.prepare(*lengths_and_strides(tensors, call)).lse_token_first


@pytest.mark.parametrize("batch", [1, 3])
def test_a_dense_launch_is_of_its_sizes(kernels, batch):
    given = dense(batch, 6, 9)
    _, backward = launchers_of(kernels, given)
    _, tensors, call = both(kernels, given)
    prepared = backward.prepare(*lengths_and_strides(tensors, call))
    assert (prepared.lse_strides, prepared.derivation) == ((24, 6, 1), None)
    longer = both(kernels, dense(batch, 7, 9))
    assert backward.prepare(*lengths_and_strides(longer[1], call._replace(max_q=7))) is not prepared


@pytest.mark.parametrize(("length_q", "alignment"), [(9, "TOP_LEFT"), (6, "BOTTOM_RIGHT")])
def test_a_masked_dense_backward_is_aligned_by_the_lengths_of_each_call(kernels, module, length_q, alignment):
    *inputs, call = dense(2, 9, 9)
    forward, backward = launchers_of(kernels, (*inputs, call._replace(window=(-1, 0))))
    query, key, value, _ = dense(2, length_q, 9)
    out, lse = forward(query, key, value)
    backward(out, query, key, value, out, lse)
    assert module.graphs[-1].options["diagonal_alignment"] == alignment


def test_packed_queries_that_are_not_contiguous_are_copied_for_a_backward(kernels):
    forward, backward = launchers_of(kernels, ragged([3, 9]))
    query, key, value, call = ragged([3, 9])
    wide = torch.stack((query, query), 1)[:, 0]
    assert wide.stride() == (128, 16, 1)
    given = out, lse = kernels.forward(wide, key, value, call)
    wanted = kernels.backward(out, query, key, value, out, lse, call)
    tensors, further = (out, wide, key, value, *given), launchers.packed_arguments(call)
    assert forward.on_addresses(wide, key, value, *further) is not None
    assert backward.on_addresses(*tensors, *further) is None
    in_python = kernels.specialize("backward", tensors, call)
    assert not isinstance(in_python, AddressLauncher)
    for grads in (backward(*tensors, *further), in_python(*tensors, *further)):
        assert all(map(torch.equal, grads, wanted))


def test_a_single_query_whose_strides_are_those_of_a_view_is_described_as_contiguous(kernels):
    query, key, value, call = ragged([1], [9])
    expected = both(kernels, (query, key, value, call))[1]
    view = torch.stack((query, query), 1)[:, 0]
    assert view.is_contiguous()
    assert view.stride() == (128, 16, 1)
    grads = kernels.backward(expected[0], view, key, value, *expected[4:], call)
    wanted = kernels.backward(expected[0], query, key, value, *expected[4:], call)
    assert all(map(torch.equal, grads, wanted))


def heads_outside(given):
    """Return the same call with tensors whose heads lie outside of their tokens."""
    query, key, value, call = given
    return *(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key, value)), call


def test_tensors_whose_strides_follow_from_the_tokens_need_no_execution_plan_for_each_number(kernels, module):
    forward, backward = launchers_of(kernels, heads_outside(ragged([3, 9])))
    assert not isinstance(forward, AddressLauncher)
    of_others = launchers_of(kernels, ragged([3, 9]))[0]
    graphs = []
    for lens in ([3, 10], [3, 11], [20, 12]):
        query, key, value, call = heads_outside(ragged(lens))
        assert query.stride() == (16, 16 * sum(lens), 1)
        out, lse = kernels.forward(query, key, value, call)
        expected, expected_lse = kernels.forward(*ragged(lens))
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
        grads = kernels.backward(out, query, key, value, out, lse, call)
        assert [x.is_contiguous() for x in grads] == [True] * 3
        further = launchers.packed_arguments(call)
        assert of_others.on_addresses(query, key, value, *further) is None, "it would read them as contiguous"
        assert torch.equal(forward(query, key, value, *further)[0], out)
        launched = backward(out, query, key, value, out, lse, *further)
        assert all(map(torch.equal, launched, grads))
        graphs.append(len(module.graphs))
    assert len({*graphs}) == 1


# Which calls have one


def test_a_call_whose_tensors_have_to_be_copied_has_a_launcher_in_python(kernels):
    *inputs, call = ragged([3, 9, 30])
    out, lse = kernels.forward(*inputs, call)
    query, key, value = inputs
    unaligned = torch.empty(query.numel() + 1).bfloat16()[1:].view(query.shape).copy_(query)
    assert unaligned.data_ptr() % 16
    launcher = kernels.specialize("forward", (unaligned, key, value), call)
    assert not isinstance(launcher, AddressLauncher)
    results = launcher(unaligned, key, value, *launchers.packed_arguments(call))
    assert all(map(torch.equal, results, (out, lse)))


def test_there_is_no_launcher_for_keys_that_do_not_count(kernels):
    *inputs, call = ragged([3, 9, 30])
    used = call._replace(seqused_k=torch.tensor([3, 9, 30], dtype=torch.int32))
    kernels.forward(*inputs, used)
    assert kernels.specialize("forward", tuple(inputs), used) is None


def test_a_launcher_keeps_no_tensor_of_a_call(kernels):
    given = both(kernels, ragged([3, 9]))
    kept = [kernels.specialize("forward", given[0], given[2])]
    kept.append(kernels.specialize("backward", given[1], given[2]))
    alive = [weakref.ref(x) for x in (*given[1], given[2].cu_seqlens_q)]
    del given
    gc.collect()
    assert [x() for x in alive] == [None] * 7
    assert all(kept)


# Addresses


@pytest.fixture
def repeated(kernels):
    """Run a packed call; return its arguments, its results and the forward's launcher."""
    *inputs, call = ragged([3, 9, 30])
    expected = kernels.forward(*inputs, call)
    given = *inputs, *launchers.packed_arguments(call)
    return given, expected, kernels.specialize("forward", tuple(inputs), call)


def test_nothing_is_launched_once_the_execution_plan_is_dropped(kernels, module, repeated):
    given, expected, launcher = repeated
    *inputs, cu_seqlens_q, cu_seqlens_k, _, _, _ = given
    call = Call(0.25, 30, 30, (-1, 0), cu_seqlens_q, cu_seqlens_k)
    prepared = launcher.prepare(*lengths_and_strides(inputs, call))
    kernels.forward.args[0]._release()
    assert prepared.launch(0, 0, 7) is False
    assert prepared.derivation.derive(cu_seqlens_q, cu_seqlens_k) is None
    assert launcher.on_addresses(*given) is None
    built = len(module.graphs)
    assert torch.equal(launcher(*given)[0], expected[0])
    assert len(module.graphs) == built + 1


def test_a_launcher_runs_on_addresses_with_the_threads_handle(module, repeated):
    given, expected, launcher = repeated
    for times in range(2, 4):  # as the function did
        assert all(map(torch.equal, launcher.on_addresses(*given), expected))
        assert [(handle.by_address, handle.set) for handle in module.handles] == [(times, 2)]
    assert module.handles[0].stream == 0  # that of a CPU, where the tensors are


# What a release of the frontend may have changed: of what, the attribute, and what it is then.
CHANGES = {
    "no graph below": ("", "_lowered_graph", None),
    "no plans": ("", "plans", None),
    "an engine of the frontend's": ("", "selected_engine", object()),
    "other tensors": ("_lowered_graph", "_get_variant_pack_uids_sorted", lambda: [1, 2]),
    "another signature": ("_lowered_graph", "_execute_with_raw_ptrs", lambda *_: None),
    "another handle": ("handle", "backend_handle", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_frontend_that_cannot_run_on_addresses_runs_on_tensors(request, module, monkeypatch, change):
    whose, attribute, value = CHANGES[change]
    built = fake_cudnn.Graph.build_plans

    def build_plans(graph):
        built(graph)
        setattr(getattr(graph, whose) if whose else graph, attribute, value)

    monkeypatch.setattr(fake_cudnn.Graph, "build_plans", build_plans)
    given, expected, launcher = request.getfixturevalue("repeated")
    assert not isinstance(launcher, AddressLauncher)
    assert all(map(torch.equal, launcher(*given), expected))
    assert [handle.by_address for handle in module.handles] == [0]


# Memory


@pytest.mark.slow
def test_nothing_grows_with_the_lengths_that_are_asked_for(kernels):
    forward, backward = launchers_of(kernels, ragged([3, 9]))
    tensors, tensors_back, _ = both(kernels, ragged([3, 8]))
    strides, strides_back = (tuple(x.stride() for x in given) for given in (tensors, tensors_back))
    plans, draw = kernels.forward.args[0], random.Random(0)
    built, prepared = dict(plans.built), 0
    for _ in range(20_000):
        tokens, batch, longest = (round(10 ** draw.uniform(0, most)) for most in (6, 5, 5))
        lengths = batch, longest, longest, tokens, tokens
        prepared += forward.prepare(*lengths, strides) is not None
        prepared += backward.prepare(*lengths, strides_back) is not None
    assert prepared > 0
    assert plans.built == built
    assert len(plans._plans) == 4
    assert len(plans._first_tokens._tokens) == 2
    cached = rounding._round_batch, rounding._batches_like, layout._in_steps
    sizes = [one.cache_info() for one in cached]
    assert all(one.currsize <= one.maxsize for one in sizes)
    assert execution_plans._KEPT <= 512

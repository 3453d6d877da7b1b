"""Promises about what cuDNN's execution plans read of offsets, and about rows that cuDNN leaves alone."""

import random

import pytest
import torch
from support.fake_cudnn import ragged

from attnreg import InvalidInputError
from attnreg.backends.cudnn import adapter, lengths
from attnreg.backends.cudnn.graph import ExecutionPlan
from attnreg.backends.cudnn.problem import RaggedOffset, Slot
from attnreg.core.launching import offsets, rows
from attnreg.core.launching.launchers import AddressLauncher


@pytest.fixture
def written(monkeypatch):
    """Return a list that gets the number of ragged offsets each time that lengths are written."""
    counts, original = [], lengths._write_by_ops

    def write(buffer, known, *given):
        counts.append(len(known))
        original(buffer, known, *given)

    monkeypatch.setattr(lengths, "_write_by_ops", write)
    return counts


def run_both(kernels, query, key, value, call):
    out, lse = kernels.forward(query, key, value, call)
    return out, lse, *kernels.backward(out, query, key, value, out, lse, call)


# What is written


def plan_that_reads(*read):
    return ExecutionPlan(None, 0, (), read, hash(read), (), None)


@pytest.mark.parametrize("seed", range(20))
def test_an_execution_plan_reads_lengths_and_ragged_offsets_of_any_batch(seed):
    draw = random.Random(seed)
    count = draw.randint(1, 40)
    batch = count + draw.randint(0, 20)
    lens_q, lens_k = ([draw.choice((0, 1, 5, 100)) for _ in range(count)] for _ in "qk")
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (lens_q, lens_k))
    used = torch.tensor([draw.randint(0, n) for n in lens_k]).int() if seed % 2 else None
    wanted = [RaggedOffset(bool(draw.getrandbits(1)), draw.choice((1, 16, 33, 2**33))) for _ in range(9)]
    plan, read = plan_that_reads(Slot.SEQ_LEN_Q, Slot.SEQ_LEN_K, *wanted), lengths.OffsetsRead()
    if seed % 3:  # else the batch is seen before the plan is built
        read.add(plan)
    inputs = lengths.inputs_of(plan, read, batch, 7, cu_q, cu_k, used)
    queries, keys, *starts = lengths.tensors_of(plan, inputs)
    counted = lens_k if used is None else used.tolist()
    assert keys[:batch].tolist() == counted + [0] * (batch - count)
    with_keys = [n if m else 0 for n, m in zip(lens_q, counted, strict=True)]
    assert queries[:batch].tolist() == with_keys + [0] * (batch - count)
    for one, start in zip(wanted, starts, strict=True):
        begins = (cu_k if one.of_keys else cu_q).long() * one.token_stride
        assert start[: batch + 1].tolist() == begins.tolist() + [begins[-1].item()] * (batch - count)
    assert {x.dtype for x in (queries, keys)} == {torch.int32}
    assert {x.dtype for x in starts} == {torch.int64}
    assert all((x.data_ptr() - queries.data_ptr()) % 16 == 0 for x in (keys, *starts))


def test_offsets_that_are_no_contiguous_tensor_are_read_as_they_are():
    cu = torch.tensor([[0, 9], [3, 9], [12, 9]], dtype=torch.int32)[:, 0]
    assert not cu.is_contiguous()
    plan = plan_that_reads(Slot.SEQ_LEN_Q)
    inputs = lengths.inputs_of(plan, lengths.OffsetsRead(), 8, 7, cu, cu)
    (queries,) = lengths.tensors_of(plan, inputs)
    assert queries[:8].tolist() == [3, 9, *[0] * 6]


def test_only_the_newest_ragged_offsets_are_written_at_once():
    read = lengths.OffsetsRead()
    for stride in range(1, 30):
        read.add(plan_that_reads(RaggedOffset(stride % 2 == 1, stride)))
    known, (count, of_keys, *strides) = read.now.ragged, read.now.numbers
    assert count == len(known) == len(strides) == lengths.MOST
    assert strides == [*range(30 - lengths.MOST, 30)]
    assert [of_keys >> bit & 1 for bit in range(count)] == [stride % 2 for stride in strides]
    read.add(plan_that_reads(RaggedOffset(False, 28), Slot.SEQ_LEN_Q))
    assert read.now.ragged == known, "one that is known is no newer one"


def test_execution_plans_that_read_more_than_is_written_at_once_get_a_buffer_each(written):
    read, cu = lengths.OffsetsRead(), torch.tensor([0, 3, 12], dtype=torch.int32)
    plans = [
        plan_that_reads(*(RaggedOffset(False, stride) for stride in range(first, first + 8)))
        for first in (2, 6, 10)
    ]
    for plan in plans:
        read.add(plan)
    for _ in range(3):
        for plan in plans:
            inputs = lengths.inputs_of(plan, read, 8, 7, cu, cu)
            for wanted, start in zip(plan.lengths, lengths.tensors_of(plan, inputs), strict=True):
                assert start[:3].tolist() == [0, 3 * wanted.token_stride, 12 * wanted.token_stride]
    assert written == [lengths.MOST, lengths.MOST]


def test_all_that_a_step_reads_of_a_new_batch_is_written_once(kernels, written):
    run_both(kernels, *ragged([3, 9], [4, 9]))
    run_both(kernels, *ragged([3, 8], [4, 9]))  # the first of the shared execution plans
    written.clear()
    plans = kernels.forward.args[0]
    query, key, value, call = ragged([5, 6], [7, 7])
    for _ in range(3):
        run_both(kernels, query, key, value, call)
    assert written == [len(plans.read.now.ragged)]
    both = [plan for problem, plan in plans._plans.items() if not problem.exact]
    assert {len(plan.tensors) for plan in both} == {5, 9}
    offsets_read = call.cu_seqlens_q, call.cu_seqlens_k
    assert len({id(lengths.inputs_of(plan, plans.read, 8, 7, *offsets_read)[0]) for plan in both}) == 1
    assert len(written) == 1


def test_the_call_cache_is_told_what_one_execution_plan_reads(monkeypatch):
    monkeypatch.setattr(lengths.WRITE, "address", {3: 77}.get)
    monkeypatch.setattr(lengths, "launch_function", lambda: 55)
    starts = [RaggedOffset(True, 16), RaggedOffset(False, 1), RaggedOffset(False, 33)]
    plan = plan_that_reads(Slot.SEQ_LEN_K, *starts)
    rows = lengths.Rows((RaggedOffset(False, 33), RaggedOffset(True, 16)))
    (launch, function, threads, count, width, words, places) = lengths.kernel_of(plan, rows, 8, 3)
    assert (launch, function, threads, count, width) == (55, 77, 256, 5, 12)
    assert words == (0, 0, 2, 0b10, 33, 16, *[0] * 10)
    assert places == (4 * 12, 8 * 12 * 4, 8 * 12, 8 * 12 * 3)
    assert lengths.kernel_of(plan, rows, 8, 4) is None  # it can't run on that GPU
    assert lengths.kernel_of(plan, lengths.Rows(), 8, 3) is None  # that lacks ragged offsets


def test_what_the_call_cache_has_written_is_compared_and_a_change_is_an_error(trust_offsets):
    cu = torch.tensor([0, 3, 12], dtype=torch.int32)
    plan, read = plan_that_reads(Slot.SEQ_LEN_Q), lengths.OffsetsRead()
    rows = lengths.Rows()
    buffer, _ = lengths.BatchLengths(read, 8, 7, cu, cu, None).inputs_of(plan, cu, cu, None)
    for _ in range(2):
        inputs = lengths.inputs_of(plan, read, 8, 7, cu, cu, written=(rows, buffer))
        assert inputs[0] is buffer
    trust_offsets(0.0)
    cu.numpy()[1] = 4
    lengths.inputs_of(plan, read, 8, 7, cu, cu, written=(rows, buffer))  # another comparison has begun
    with pytest.raises(InvalidInputError, match="written to"):
        lengths.inputs_of(plan, read, 8, 7, cu, cu, written=(rows, buffer))


def test_a_change_before_the_first_comparison_is_an_error_too():
    cu = torch.tensor([0, 3, 12], dtype=torch.int32)
    plan, read = plan_that_reads(Slot.SEQ_LEN_Q), lengths.OffsetsRead()
    buffer, _ = lengths.BatchLengths(read, 8, 7, cu, cu, None).inputs_of(plan, cu, cu, None)
    cu.numpy()[1] = 4
    rows = lengths.Rows()
    lengths.inputs_of(plan, read, 8, 7, cu, cu, written=(rows, buffer))
    with pytest.raises(InvalidInputError, match="written to"):
        lengths.inputs_of(plan, read, 8, 7, cu, cu, written=(rows, buffer))


# For how long it is kept


def test_layers_share_what_is_derived_from_offsets_until_these_change(kernels, written):
    query, key, value, call = ragged([3, 9])
    out, lse = kernels.forward(query, key, value, call)
    kernels.backward(out, query, key, value, out, lse, call)
    kernels.forward(query, key, value, call)
    assert len(written) == 1
    call.cu_seqlens_q[1] = 5
    changed, _ = kernels.forward(query, key, value, call)
    assert len(written) == 2
    assert torch.equal(changed, kernels.forward(query, key, value, ragged([5, 7])[-1]._replace(max_q=9))[0])
    for length in (4, 6, 8):  # in memory that the offsets before may have left
        call.cu_seqlens_q.data = torch.tensor([0, length, 12], dtype=torch.int32)
        changed, _ = kernels.forward(query, key, value, call)
        fresh = ragged([length, 12 - length])[-1]._replace(max_q=9)
        assert torch.equal(changed, kernels.forward(query, key, value, fresh)[0])


@pytest.mark.parametrize("what", ["inference tensors", "a capture"])
def test_nothing_is_kept_of_offsets_whose_changes_leave_no_trace(kernels, monkeypatch, what):
    query, key, value, call = ragged([3, 9])
    kernels.forward(query, key, value, call)
    if what == "a capture":
        monkeypatch.setattr(offsets, "needs_graph_memory", lambda offsets: True)
    else:
        with torch.inference_mode():
            cu_seqlens = call.cu_seqlens_q.clone()
        call = call._replace(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    kernels.forward(query, key, value, call)
    with torch.inference_mode():
        call.cu_seqlens_q[1] = 5
        changed, _ = kernels.forward(query, key, value, call)
        expected, _ = kernels.forward(query, key, value, ragged([5, 7])[-1]._replace(max_q=9))
    assert torch.equal(changed, expected)


@pytest.mark.parametrize(
    ("changed", "differs"), [([3, 9], False), ([4, 8], True), ([3, 8, 1], True), ([3, 9, 0], False)]
)
def test_the_device_compares_what_was_read_with_what_the_offsets_say_now(changed, differs):
    read, first, second = lengths.OffsetsRead(), ragged([3, 9])[-1], ragged(changed)[-1]
    older, newer = (
        lengths.BatchLengths(read, 8, 7, call.cu_seqlens_q, call.cu_seqlens_k, None)
        for call in (first, second)
    )
    assert bool(older.differs(newer)) is differs


# Rows that cuDNN leaves alone


@pytest.fixture
def uninitialized_is_nan(monkeypatch):
    empty, strided = torch.Tensor.new_empty, torch.Tensor.new_empty_strided
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    monkeypatch.setattr(torch.Tensor, "new_empty_strided", lambda *a, **k: strided(*a, **k).fill_(torch.nan))


def forms_of(kernels, query, key, value, call, all_rows_see_keys=False):
    """Yield the results of the functions, and of launchers in every form."""
    given = query, key, value
    out, lse, *grads = run_both(kernels, *given, call)
    yield out, lse, *grads
    if call.seqused_k is not None:
        return
    further = call.cu_seqlens_q, call.cu_seqlens_k, call.max_q, call.max_k, all_rows_see_keys
    forward = kernels.specialize("forward", given, call)
    backward = kernels.specialize("backward", (out, *given, out, lse), call)
    assert {type(forward), type(backward)} == {AddressLauncher}
    yield *forward(*given, *further), *backward(out, *given, out, lse, *further)
    on_addresses = backward.on_addresses(out, *given, out, lse, *further)
    yield *forward.on_addresses(*given, *further), *on_addresses


@pytest.mark.parametrize("tokens", ["first", "other"])
@pytest.mark.parametrize(
    ("lens_q", "lens_k"), [([3, 9], [0, 9]), ([3, 9, 2], [0, 9, 0]), ([0, 9], [3, 9]), ([3, 0], [3, 0])]
)
def test_rows_of_no_sequence_and_of_one_without_keys_or_queries_are_cleared(
    kernels, uninitialized_is_nan, lens_q, lens_k, tokens
):
    """With an exact execution plan and a shared one, whose LSE has the token first."""
    if tokens == "other":
        run_both(kernels, *ragged([3, 8], [4, 8]))
    query, key, value, call = ragged(lens_q, lens_k)
    call = call._replace(window=(-1, -1))  # a row that sees a single key has a gradient of 0
    query, key, value = (torch.cat((x, x.new_ones(2, *x.shape[1:]))) for x in (query, key, value))
    used_q = [row for n, m in zip(lens_q, lens_k, strict=True) for row in [m > 0] * n] + [False] * 2
    used_k = [row for n, m in zip(lens_q, lens_k, strict=True) for row in [n > 0] * m] + [False] * 2
    for out, lse, grad_q, grad_k, grad_v in forms_of(kernels, query, key, value, call):
        for result, used in ((out, used_q), (grad_q, used_q), (grad_k, used_k), (grad_v, used_k)):
            assert result.isfinite().all()
            assert (result.flatten(1).abs().sum(1) > 0).tolist() == used
        assert (lse > -torch.inf).all(0).tolist() == used_q
        assert lse[:, ~torch.tensor(used_q)].eq(-torch.inf).all()


def test_keys_that_do_not_count_leave_rows_that_are_cleared(kernels, uninitialized_is_nan):
    query, key, value, call = ragged([3, 9])
    call = call._replace(seqused_k=torch.tensor([0, 4], dtype=torch.int32))
    out, lse, grad_q, grad_k, grad_v = run_both(kernels, query, key, value, call)
    assert all(x.isfinite().all() for x in (out, grad_q, grad_k, grad_v))
    assert (lse > -torch.inf).all(0).tolist() == [False] * (3 + 5) + [True] * 4
    assert (grad_v.flatten(1).abs().sum(1) > 0).tolist() == [False] * 3 + [True] * 4 + [False] * 5


def test_nothing_is_cleared_where_every_row_is_known_to_see_a_key(kernels, monkeypatch):
    query, key, value, call = ragged([3, 9])
    expected = run_both(kernels, query, key, value, call)
    cleared = []
    for name in ("clear_forward", "clear_backward"):
        clear = getattr(rows, name)
        monkeypatch.setattr(
            adapter.rows, name, lambda *given, clear=clear: cleared.append(1) or clear(*given)
        )
    functions, *launched = forms_of(kernels, query, key, value, call, all_rows_see_keys=True)
    assert len(cleared) == 2, "the functions don't know"
    assert len(launched) == 2
    for results in (functions, *launched):
        assert all(map(torch.equal, results, expected))


def test_a_batch_of_no_sequence_reaches_no_kernel(kernels, module):
    query, key, value, call = ragged([3, 9])
    none = torch.zeros(1, dtype=torch.int32)
    out, lse, *grads = run_both(
        kernels, query, key, value, call._replace(cu_seqlens_q=none, cu_seqlens_k=none)
    )
    assert not any(x.any() for x in (out, *grads))
    assert (lse == -torch.inf).all()
    assert not module.graphs

"""Promises about FA4's launches by arguments: of which calls, of any lengths, and that values stay true."""

import dataclasses
import threading

import pytest
import torch
from support import fake_fa4_kernels, one_sequence, truth
from support.fake_fa4 import BOTH, NEITHER, both, call_of, dense, dense_call, entered, packed

from attnreg import Call, Device
from attnreg.backends import fa4
from attnreg.backends.fa4 import adapter, compiled_kinds, launches
from attnreg.core.contract.lengths import Cut
from attnreg.core.contract.options import OPTIONS
from attnreg.core.dispatch import planning
from attnreg.core.launching import launchers as contract_launchers
from attnreg.core.torchlib.layout import uninitialized


@pytest.fixture(autouse=True)
def hopper(on_hopper):
    return


# Which calls are launched by their arguments


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads_k": 2},
        {"heads_k": 1, "deterministic": True},
        {"deterministic": True},
        {"batch_invariant": True},
        {"window": (-1, 0)},
        {"window": (8, 3)},
        {"window": (-1, 4), "dim": 96},
        {"dim": 128, "dtype": torch.float16, "heads_k": 2},
        {"dim": 192, "dim_v": 128},
        {"dim": 256, "window": (8, -1), "heads": 2},
        {"heads": 1},
    ],
    ids=str,
)
def test_from_the_second_call_on_each_is_launched_by_its_arguments_whatever_its_lengths(
    kernels, package, options
):
    launched = []
    for seed, (batch, len_q, len_k) in enumerate(((2, 33, 33), (3, 40, 21), (1, 7, 48), (2, 48, 35))):
        given = dense_call(seed, batch=batch, len_q=len_q, len_k=len_k, **options)
        assert entered(kernels, package, *given) == (NEITHER if seed else BOTH)
        launched.append(package.launched.copy())
    assert len(launched[0]) == 2 * len(launched[1])  # the trial's as well
    assert launched[2:] == [launched[1]] * 2


SHAPES = ((33, 33), (150, 33), (33, 150), (193, 150), (140, 30), (30, 140), (200, 140))


def test_lengths_that_are_compiled_otherwise_are_tried_by_themselves(kernels, package):
    def through(shape, seed):
        return entered(kernels, package, *dense_call(seed, len_q=shape[0], len_k=shape[1], batch=1, heads=1))

    found = [through(shape, seed) for seed, shape in enumerate(SHAPES)]
    # Forwards differ by whether 192 queries do, backwards by whether 128 queries do, and 128 keys.
    assert found == [BOTH, ["backward"], ["backward"], BOTH, NEITHER, NEITHER, NEITHER]
    assert [through(shape, seed) for seed, shape in enumerate(SHAPES)] == [NEITHER] * len(SHAPES)


@pytest.mark.parametrize("shared", [True, False], ids=["one tensor of offsets", "two"])
def test_packed_batches_are_launched_whatever_their_lengths_and_offsets(
    kernels, package, no_unused_rows, shared
):
    for seed, lengths in enumerate(((5, 28, 7), (3,), (31, 0, 2, 9), (12, 12))):
        given = packed(lengths, None if shared else lengths[::-1], seed=seed)
        assert entered(kernels, package, *given) == (NEITHER if seed else BOTH)


def test_many_sequences_are_tried_by_themselves_and_their_tiles_summed_up(
    kernels, package, no_unused_rows, many_are_few
):
    few, many = (3,) * 8, (1,) * 19
    assert [entered(kernels, package, *packed(few, seed=n)) for n in range(2)] == [BOTH, NEITHER]
    assert "_compute_tile_cumsum" not in package.launched
    found = []
    for seed in range(3):
        found.append(entered(kernels, package, *packed((*many, seed + 1), seed=seed)))
    assert found == [BOTH, NEITHER, NEITHER]
    # The forward's, and both sides' of the backward; nothing that no kernel reads.
    assert package.launched.count("_compute_tile_cumsum") == 3
    assert "_compute_blocks_to_batch" not in package.launched


def test_a_softcap_has_functions_by_its_own_tile(kernels, package):
    def forward(length, seed):
        package.calls.clear()
        query, key, value, _, call = dense_call(
            seed, len_q=length, len_k=20, dim=128, heads=1, batch=1, softcap=2.0, window=(-1, 0)
        )
        out, _ = kernels.forward(query, key, value, call)
        scores = fake_fa4_kernels.scores(query[0], key[0], call.scale, True, None, None, 2.0)
        expected, _ = one_sequence.forward(scores, value[0])
        truth.assert_near(out[0], expected, torch.bfloat16)
        return [given["tile_mn"] for _, given in package.calls]

    assert [forward(n, n) for n in (100, 128, 129, 192, 193)] == [[None], [], [(192, 80)], [], [(192, 80)]]
    assert [forward(n, n) for n in (64, 140, 300)] == [[], [], []]


@pytest.mark.parametrize(
    "other",
    [
        {"seqused_k": torch.full((2,), 33, dtype=torch.int32)},
        {"grad_lse": torch.zeros(2, 4, 33)},
    ],
    ids=["seqused_k", "gradient of the LSE"],
)
def test_what_is_not_written_down_goes_through_the_package(kernels, package, other, rounds):
    assert rounds(2) == [BOTH, NEITHER]
    direction = ["backward"] if "grad_lse" in other else BOTH
    for seed in range(3):
        *given, call = dense_call(seed)
        forward = call._replace(**{name: x for name, x in other.items() if name != "grad_lse"})
        package.calls.clear()
        out, lse = kernels.forward(*given[:3], forward)
        kernels.backward(given[3], *given[:3], out, lse, call._replace(**other))
        assert [name for name, _ in package.calls] == direction


def moved(x):
    """Return a copy that isn't aligned."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


def test_tensors_that_are_not_aligned_always_go_through_the_package(kernels, package, rounds):
    assert rounds(2) == [BOTH, NEITHER]
    query, key, value, grad = dense()
    for tensors in ((moved(query), key, value, grad), (query, moved(key), value, grad)):
        assert [entered(kernels, package, *tensors, call_of(query, key)) for _ in range(2)] == [BOTH] * 2
    tensors = query, key, value, moved(grad)
    assert [entered(kernels, package, *tensors, call_of(query, key)) for _ in range(2)] == [["backward"]] * 2


def test_expanded_tensors_are_a_kind_of_their_own_and_need_no_gradient(kernels, package, rounds):
    assert rounds(2) == [BOTH, NEITHER]
    found, results = [], []
    for seed in range(3):
        query, key, value, grad = dense(seed=seed)
        key, value = (x[:, :, :1].expand(x.shape) for x in (key.requires_grad_(), value))
        with torch.no_grad():
            found.append(entered(kernels, package, query, key, value, grad, call_of(query, key)))
            results += both(kernels, query, key, value, grad, call_of(query, key))
    assert found == [BOTH, NEITHER, NEITHER]
    assert len({x.data_ptr() for x in results}) == 15, "results are new tensors each time"
    assert not any(x.requires_grad for x in results)


def test_expanded_packed_tensors_go_through_the_package(kernels, package, no_unused_rows):
    """Their copies, where rows may be unused, aren't expanded: that is compiled in."""
    for seed in range(3):
        query, key, value, grad, call = packed((5, 28), seed=seed)
        key, value = (x[:, :1].expand(x.shape) for x in (key, value))
        no_unused_rows.no_unused_rows = seed == 1
        assert entered(kernels, package, query, key, value, grad, call) == BOTH
    assert kernels.specialize("forward", (query, key, value), call) is None


def test_gradients_are_laid_out_like_their_tensors(kernels, rounds):
    rounds(2)
    query, key, value, grad, call = dense_call()
    query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
    out, lse = kernels.forward(query, key, value, call)
    grads = kernels.backward(grad, query, key, value, out, lse, call)
    assert out.is_contiguous() and lse.is_contiguous()
    assert [x.stride() for x in grads] == [x.stride() for x in (query, key, value)]


# For each field of `Call` a value that changes its kind, that of no launch by arguments, or only an argument.
ENDS = torch.ones(3, dtype=torch.int32)
KINDS = {
    "window": (-1, 0),
    "deterministic": True,
    "batch_invariant": True,
    "softcap": 20.0,
    "sinks": torch.ones(4),
    "grad_lse": torch.ones(2, 4, 33),
    "seqused_k": ENDS,
    "cu_seqlens_q": ENDS,
    "block_table": ENDS[None],
}
OUTSIDE = {
    "attn_bias": torch.ones(1),
    "alibi_slopes": torch.ones(4),
    "dropout": 0.5,
    "cu_seqlens_k": ENDS,
    "key_ranges": ENDS[None, :2, None],
    "score_mod": lambda score, *_: score,
    "mask_mod": lambda batch, head, query, key: query >= key,
}
ARGUMENTS = {"scale": 0.5, "max_q": 40, "max_k": 40}


def test_a_kind_holds_each_field_of_a_call_that_is_compiled_in():
    # A forward's number of splits is refused above 1; random state is there with dropout only. No call has an
    # option that FA4 doesn't declare.
    others = {row.name for row in OPTIONS if not fa4.BACKEND.forward.runs(row)}
    others |= {"num_splits", "rng_state", "further"}
    assert {*Call._fields} - others <= {*KINDS, *OUTSIDE, *ARGUMENTS} <= {*Call._fields}
    query, key, value, grad, call = dense_call()
    inputs = grad, query, key, value, grad, grad[..., 0]

    def kind(**changes):
        changed = call._replace(**changes)
        family = compiled_kinds.family_of("backward", query, key, value, changed, grad)
        return family, family.class_of(2, changed.max_q, changed.max_k)

    assert len({kind(), *(kind(**{name: x}) for name, x in KINDS.items())}) == len(KINDS)  # both repeat
    assert kind(deterministic=True) == kind(batch_invariant=True)
    assert {kind(**{name: x}) for name, x in ARGUMENTS.items()} == {kind()}
    family = compiled_kinds.family_of("backward", query, key, value, call, grad)
    assert adapter._is_plain(family, inputs, call)
    for name, x in OUTSIDE.items():
        assert not adapter._is_plain(family, inputs, call._replace(**{name: x})), name


@pytest.mark.parametrize(
    "shape",
    [{"heads": 8}, {"heads_k": 2}, {"dim": 24}, {"dim_v": 24}, {"dtype": torch.float16}],
    ids=str,
)
def test_a_kind_holds_what_of_its_tensors_is_compiled_in(shape):
    def family(**options):
        query, key, value, _, call = dense_call(**options)
        return compiled_kinds.family_of("forward", query, key, value, call)

    assert (family() == family(**shape)) is (shape == {"heads": 8})
    assert family() == family(batch=5, len_q=3, len_k=9)


# Rows of no sequence


@pytest.mark.parametrize("two", [False, True], ids=["one tensor of offsets", "two"])
def test_rows_of_no_sequence_may_hold_nan_and_give_zeros(kernels, package, two):
    """Nothing is known of rows on a CPU."""
    for seed, lengths in enumerate(((5, 28, 7), (31, 2), (9, 0, 13))):
        query, key, value, grad, call = packed((*lengths, 6), (*lengths[::-1], 6) if two else None, seed=seed)
        ends = {name: getattr(call, name)[:-1].clone() for name in ("cu_seqlens_q", "cu_seqlens_k")}
        if not two:
            ends["cu_seqlens_k"] = ends["cu_seqlens_q"]
        call = call._replace(**ends)
        for x in (query, key, value, grad):
            x[-6:] = torch.nan
        package.calls.clear()
        out, lse, *grads = both(kernels, query, key, value, grad, call)
        assert [name for name, _ in package.calls] == (NEITHER if seed else BOTH)
        assert all(x[-6:].isnan().all() for x in (query, key, value, grad))
        assert not any(x[-6:].any() for x in (out, *grads))
        assert (lse[:, -6:] == -torch.inf).all()
        rows = [x[:-6] for x in (query, key, value, grad)]
        right = truth.of_call(*rows, call)
        for got, true in zip((out[:-6], lse[:, :-6], *(x[:-6] for x in grads)), right, strict=True):
            truth.assert_near(got, true, torch.bfloat16)


def test_where_it_is_known_that_no_row_is_unused_nothing_is_copied_or_cleared(
    kernels, package, no_unused_rows, monkeypatch
):
    ran = []
    for name in ("blanked", "clear_forward", "clear_backward"):
        function = getattr(contract_launchers, name)

        def noting(*given, name=name, function=function):
            ran.append(name)
            return function(*given)

        monkeypatch.setattr(contract_launchers, name, noting)
    found = [entered(kernels, package, *packed((5, 28), seed=seed)) for seed in range(2)]
    assert (found, ran) == ([BOTH, NEITHER], [])
    no_unused_rows.no_unused_rows = False
    assert entered(kernels, package, *packed((5, 28))) == NEITHER
    assert sorted(ran) == ["blanked"] * 5 + ["clear_backward", "clear_forward"]


# Keys of which not all count, and pages


def counted(lengths, used, seed=0, max_k=None, dim=16, room=4, **options):
    """Return a packed call of one query for each sequence, with NaN in keys and values that don't count."""
    tokens = sum(lengths) + room
    query, key, value, _ = (x[0] for x in dense(len(lengths), tokens, batch=1, seed=seed, dim=dim, heads_k=2))
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    rows = torch.arange(tokens)
    counts = [(rows >= start) & (rows < start + n) for start, n in zip(offsets.tolist(), used, strict=False)]
    for x in (key, value):
        x[~torch.stack(counts).any(0)] = torch.nan
    call = Call(
        0.25, 1, max_k or max(lengths), cu_seqlens_q=torch.arange(len(lengths) + 1, dtype=torch.int32),
        cu_seqlens_k=offsets, seqused_k=torch.tensor(used, dtype=torch.int32), **options,
    )  # fmt: skip
    return query, key, value, call


def true_of_counted(query, key, value, call):
    """Return output and LSE in float64."""
    starts, used = call.cu_seqlens_k[:-1].tolist(), call.seqused_k.tolist()
    rows = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, used, strict=True)])
    ends = torch.tensor([0, *used]).cumsum(0)
    tensors = (x.double() for x in (query, key[rows], value[rows]))
    return truth.varlen(*tensors, call.cu_seqlens_q, ends, scale=call.scale, window=call.window)


def assert_true(results, query, key, value, call):
    for got, true in zip(results, true_of_counted(query, key, value, call), strict=True):
        truth.assert_near(got, true, torch.bfloat16)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0)], ids=str)
def test_keys_of_which_not_all_count_are_read_as_pages_without_a_copy(kernels, package, window):
    for seed, (lengths, used) in enumerate(
        (((9, 20, 5), (4, 20, 1)), ((31, 2), (30, 2)), ((6, 0, 13, 8), (1, 0, 13, 3)), ((40,), (17,)))
    ):
        given = counted(lengths, used, seed, window=window)
        package.calls.clear()
        assert_true(kernels.forward(*given), *given)
        assert [name for name, _ in package.calls] == ([] if seed else ["forward"])
        for _, arguments in package.calls:
            pages, table = arguments["v"], arguments["page_table"]
            assert (pages.data_ptr(), pages.shape[:2]) == (given[2].data_ptr(), (1, len(given[2])))
            assert table.data_ptr() == given[3].cu_seqlens_k.data_ptr()


def test_a_page_has_not_the_size_of_a_tile_which_would_be_loaded_whole(kernels, package):
    for room, size in ((27, 127), (28, 129), (29, 129)):
        for seed in range(3):
            given = counted((70, 30), (70, 7), seed, room=room)
            package.calls.clear()
            assert_true(kernels.forward(*given), *given)
            for _, arguments in package.calls:
                assert arguments["k"].shape[:2] == (1, size)
        launch = kernels.specialize("forward", given[:3], given[3])
        *tensors, call = given
        further = call.seqused_k, call.cu_seqlens_q, call.cu_seqlens_k, 1, 70, False
        assert (launch(*tensors, *further) is None) is (room == 28)


def test_a_longest_key_that_is_too_long_or_too_short_changes_nothing(kernels, package):
    for seed, max_k in enumerate((20, 1000, 3)):
        given = counted((9, 20, 5), (4, 20, 1), seed, max_k=max_k)
        assert_true(kernels.forward(*given), *given)
    assert [arguments["page_table"].shape for _, arguments in package.calls] == [(3, 1)]


@pytest.mark.parametrize("options", [{"dim": 24}, {"dim": 96}], ids=str)
def test_where_pages_cannot_be_read_unused_values_are_copied(kernels, package, options):
    for seed in range(2):
        given = counted((9, 20, 5), (4, 20, 1), seed, **options)
        package.calls.clear()
        assert_true(kernels.forward(*given), *given)
        ((_, arguments),) = package.calls
        assert arguments["page_table"] is None
        assert arguments["v"].data_ptr() != given[2].data_ptr()
        assert kernels.specialize("forward", given[:3], given[3]) is None


@pytest.mark.parametrize("name", ["key", "value"])
def test_keys_that_are_not_aligned_or_are_expanded_are_not_read_as_pages(kernels, package, name):
    given = counted((9, 20, 5), (4, 20, 1))
    place = ("query", "key", "value").index(name)
    for changed in (moved, lambda x: x[:, :1].expand(x.shape)):
        tensors = [changed(x) if n == place else x for n, x in enumerate(given[:3])]
        package.calls.clear()
        assert_true(kernels.forward(*tensors, given[3]), *tensors, given[3])
        assert package.calls[0][1]["page_table"] is None


def test_a_launcher_of_counted_keys_runs_any_lengths(kernels, package):
    for seed in range(2):
        kernels.forward(*counted((9, 20, 5), (4, 20, 1), seed))
    *tensors, call = counted((9, 20, 5), (4, 20, 1), 3)
    launch = kernels.specialize("forward", tensors, call)
    assert launch.takes == ("seqused_k",)
    package.calls.clear()
    for seed, (lengths, used) in enumerate((((31, 2), (30, 0)), ((7,), (3,)))):
        *tensors, call = counted(lengths, used, seed)
        offsets = call.cu_seqlens_q, call.cu_seqlens_k
        for known in (False, True) if 0 not in used else (False,):
            results = launch(*tensors, call.seqused_k, *offsets, call.max_q, call.max_k, known)
            assert_true(results, *tensors, call)
    assert package.calls == []


def few(queries, lengths, seed=0, tail=3, dim=16, window=(-1, -1)):
    """Return a packed call with so many queries a sequence; keys end in a tail of NaN that none has."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens, rows = int(ends[-1]) + tail, queries * len(lengths)
    query, key, value, _ = (x[0] for x in dense(rows, tokens, batch=1, seed=seed, dim=dim, heads_k=2))
    for x in (key, value):
        x[len(x) - tail :] = torch.nan
    offsets = torch.arange(len(lengths) + 1, dtype=torch.int32) * queries
    call = Call(0.25, queries, max(lengths), window, cu_seqlens_q=offsets, cu_seqlens_k=ends)
    return query, key, value, call


def true_of_few(query, key, value, call):
    end, offsets = int(call.cu_seqlens_k[-1]), (call.cu_seqlens_q, call.cu_seqlens_k)
    tensors = (x.double() for x in (query, key[:end], value[:end]))
    return truth.varlen(*tensors, *offsets, scale=call.scale, window=call.window)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 0)], ids=str)
@pytest.mark.parametrize(("queries", "is_counted"), [(1, True), (16, True), (17, False)])
def test_the_keys_of_few_queries_are_counted_and_their_values_not_copied(
    kernels, package, queries, is_counted, window
):
    for seed, lengths in enumerate(((40, 20, 31), (17, 60), (30, 0, 18))):
        *tensors, call = given = few(queries, lengths, seed, window=window)
        package.calls.clear()
        results = kernels.forward(*given)
        for got, true in zip(results, true_of_few(*given), strict=True):
            truth.assert_near(got, true, torch.bfloat16)
        for _, arguments in package.calls:
            assert (arguments["v"].data_ptr() == tensors[2].data_ptr()) is is_counted
            table = arguments["page_table"]
            assert (table is not None) is is_counted
            # A copy of the offsets, which are as old as the counts.
            assert table is None or table.data_ptr() != call.cu_seqlens_k.data_ptr()
            counts = arguments["seqused_k"]
            assert (None if counts is None else counts.tolist()) == (list(lengths) if is_counted else None)
    launch = kernels.specialize("forward", tensors, call)
    assert (launch.counts is not None, "seqused_k" in launch.takes) == (is_counted, is_counted)


def test_a_launcher_counts_the_keys_of_other_offsets_and_of_offsets_that_were_written_to(kernels, package):
    for seed in range(2):
        kernels.forward(*few(1, (9, 20, 5), seed))
    *tensors, call = few(1, (9, 20, 5), 3)
    launch = kernels.specialize("forward", tensors, call)
    package.calls.clear()
    for seed, lengths in enumerate(((31, 2), (7,), (4, 0, 8))):
        *tensors, call = few(1, lengths, seed)
        for begins in (None, len(lengths) - 1):
            if begins is not None:
                call.cu_seqlens_k[begins] += begins > 0
            got = launch(*tensors, call.cu_seqlens_q, call.cu_seqlens_k, 1, call.max_k, False)
            for one, true in zip(got, true_of_few(*tensors, call), strict=True):
                truth.assert_near(one, true, torch.bfloat16)
    assert package.calls == []


@pytest.mark.parametrize(
    "changed",
    [
        lambda call: call._replace(cu_seqlens_k=call.cu_seqlens_q, max_k=1),
        lambda call: call._replace(batch_invariant=True),
        lambda call: call._replace(sinks=torch.zeros(4)),
    ],
    ids=["same offsets", "batch-invariant", "sinks"],
)
def test_keys_are_not_counted_where_nothing_would_be_copied_or_no_test_has_tried_it(
    kernels, package, changed
):
    query, key, value, call = few(1, (9, 20, 5), tail=0)
    kernels.forward(query, key, value, changed(call))
    (_, arguments), *_ = package.calls
    assert arguments["page_table"] is arguments["seqused_k"] is None


def test_a_kind_is_tried_also_where_a_key_less_would_be_a_tile(kernels, package):
    for seed in range(3):
        package.calls.clear()
        *tensors, call = few(1, (60, 66), seed)  # 129 keys with the tail
        got = kernels.forward(*tensors, call)
        for one, true in zip(got, true_of_few(*tensors, call), strict=True):
            truth.assert_near(one, true, torch.bfloat16)
    assert package.calls == []


def test_the_backward_of_few_queries_is_launched_by_its_arguments(kernels, package):
    for seed in range(3):
        package.calls.clear()
        query, key, value, call = few(2, (9, 20, 5), seed, tail=0)
        out, lse = kernels.forward(query, key, value, call)
        grads = kernels.backward(query, query, key, value, out, lse, call)
        for got, true in zip(grads, truth.of_call(query, key, value, query, call)[2:], strict=True):
            truth.assert_near(got, true, torch.bfloat16)
    assert package.calls == []
    launch = kernels.specialize("backward", (query, query, key, value, out, lse), call)
    assert launch.counts is None


def test_a_graph_may_record_a_kind_whose_keys_were_counted_once_it_has_run(kernels, monkeypatch):
    device = dataclasses.replace(Device.parse("sm_90"), simulated=False)
    monkeypatch.setattr(planning, "device_of", lambda _: device)
    query, key, value, call = few(1, (9, 20, 5))
    spec = planning.spec_of(query, key, value, call, False).but(capturing=True)
    more = spec.but(max_q=17)
    assert any("once before it can be recorded" in why for why in fa4._not_yet_compiled(spec, "forward"))
    kernels.forward(query, key, value, call)
    assert list(fa4._not_yet_compiled(spec, "forward")) == []
    assert list(fa4._not_yet_compiled(more, "forward")) != []
    assert Cut.of("max_q", at=17) in list(fa4._cuts(spec))


@pytest.mark.parametrize("change", [lambda x: x, moved, lambda x: x[:, :1].expand(x.shape)])
def test_once_a_kind_has_run_a_graph_may_record_it_whether_its_keys_are_read_as_pages_or_not(
    kernels, monkeypatch, change
):
    device = dataclasses.replace(Device.parse("sm_90"), simulated=False)
    monkeypatch.setattr(planning, "device_of", lambda _: device)
    query, key, value, call = counted((9, 20, 5), (4, 20, 1))
    key = change(key)
    spec = planning.spec_of(query, key, value, call, False).but(capturing=True)
    assert any("once before it can be recorded" in why for why in fa4._not_yet_compiled(spec, "forward"))
    kernels.forward(query, key, value, call)
    assert list(fa4._not_yet_compiled(spec, "forward")) == []


def test_pages_are_launched_by_their_arguments(kernels, package):
    for seed in range(3):
        query, key, value, _ = (x[0] for x in dense(3, 48, batch=1, seed=seed, heads_k=2))
        used = torch.tensor([9 + seed, 0, 16], dtype=torch.int32)
        table = torch.tensor([[2, 0], [1, 1], [1 - seed % 2, 2]], dtype=torch.int32)
        pages = [x.unflatten(0, (3, 16)).clone() for x in (key, value)]
        offsets = torch.arange(4, dtype=torch.int32)
        call = Call(0.25, 1, 32, cu_seqlens_q=offsets, seqused_k=used, block_table=table)
        package.calls.clear()
        results = kernels.forward(query, *pages, call)
        assert [name for name, _ in package.calls] == ([] if seed else ["forward"])
        rows = [x[table.long()].flatten(0, 2) for x in pages]
        packed_call = call._replace(cu_seqlens_k=offsets * 32, block_table=None)
        assert_true(results, query, *rows, packed_call)
    launch = kernels.specialize("forward", (query, *pages), call)
    assert launch.takes == ("seqused_k", "block_table")


# Launchers


def launchers_of(kernels, query, key, value, grad, call):
    """Run both directions and return their launchers."""
    out, lse, *_ = both(kernels, query, key, value, grad, call)
    tensors = query, key, value
    return (
        kernels.specialize("forward", tensors, call),
        kernels.specialize("backward", (grad, *tensors, out, lse), call),
    )


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("heads_k", [4, 2])
def test_launchers_of_packed_calls_run_any_lengths_of_their_class(kernels, package, heads_k, known):
    def given(lengths, seed):
        tensors = [x[0] for x in dense(sum(lengths), sum(lengths), heads_k=heads_k, batch=1, seed=seed)]
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        longest = max(lengths)
        return *tensors, Call(0.25, longest, longest, (-1, 0), cu_seqlens_q=offsets, cu_seqlens_k=offsets)

    both(kernels, *given((5, 28, 7), 0))
    forward, backward = launchers_of(kernels, *given((9, 3), 1))
    package.calls.clear()
    for seed, lengths in enumerate(((44,), (3, 0, 50, 1, 9))):
        query, key, value, grad, call = given(lengths, seed + 2)
        further = call.cu_seqlens_q, call.cu_seqlens_k, call.max_q, call.max_k, known
        out, lse = forward(query, key, value, *further)
        grads = backward(grad, query, key, value, out, lse, *further)
        for got, true in zip((out, lse, *grads), truth.of_call(query, key, value, grad, call), strict=True):
            truth.assert_near(got, true, torch.bfloat16)
    assert package.calls == []


def test_launchers_of_dense_calls_run_any_lengths_of_their_class_and_leave_others_to_python(kernels, package):
    both(kernels, *dense_call(0))
    forward, backward = launchers_of(kernels, *dense_call(1, len_q=20))
    package.calls.clear()
    for seed, (len_q, len_k, batch) in enumerate(((100, 3, 1), (1, 90, 4))):
        query, key, value, grad, call = dense_call(seed + 2, len_q=len_q, len_k=len_k, batch=batch)
        out, lse = forward(query, key, value)
        grads = backward(grad, query, key, value, out, lse)
        for got, true in zip((out, lse, *grads), truth.of_call(query, key, value, grad, call), strict=True):
            truth.assert_near(got, true, torch.bfloat16)
    query, key, value, grad, call = dense_call(9, len_q=200)
    assert forward(query, key, value) is None
    assert forward(query[:0], key[:0], value[:0]) is forward(query[:, :0], key, value) is None
    both(kernels, query, key, value, grad, call)
    both(kernels, query, key, value, grad, call)
    package.calls.clear()
    out, lse = forward(query, key, value)
    assert len(backward(grad, query, key, value, out, lse)) == 3
    assert package.calls == []


def test_an_lse_that_is_strided_gives_the_same_gradients(kernels, package, rounds):
    rounds(2)
    query, key, value, grad, call = dense_call()
    out, lse = kernels.forward(query, key, value, call)
    strided = lse.transpose(1, 2).contiguous().transpose(1, 2)
    expected = kernels.backward(grad, query, key, value, out, lse, call)
    got = kernels.backward(grad, query, key, value, out, strided, call)
    assert all(map(torch.equal, got, expected))
    launch = kernels.specialize("backward", (grad, query, key, value, out, lse), call)
    assert all(map(torch.equal, launch(grad, query, key, value, out, strided), expected))


def test_memory_is_allocated_by_tuples(monkeypatch, kernels, rounds):
    """On a GPU nothing else is taken."""
    given = []

    def allocated(size, stride, dtype, device):
        given.append((size, stride))
        return uninitialized(size, stride, dtype, device)

    monkeypatch.setattr(launches, "UNINITIALIZED", launches.Memory(allocated))
    monkeypatch.setattr(launches.launch_of, "__defaults__", (launches.UNINITIALIZED,))
    rounds(2, heads_k=2, deterministic=True)
    assert len(given) > 10
    assert {type(one) for pair in given for one in pair} == {tuple}
    assert {type(number) for pair in given for one in pair for number in one} == {int}


def test_launches_run_in_threads_without_waiting_for_each_other(kernels, package, rounds):
    assert rounds(2) == [BOTH, NEITHER]
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
        true = truth.of_call(*tensors, call_of(*tensors[:2]))
        for one, of_it in zip(got[index], true, strict=False):
            truth.assert_near(one, of_it, torch.bfloat16)

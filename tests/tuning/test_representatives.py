"""Promises of what `warmup` runs for recorded calls: one small call for each kind, which is of that kind."""

import itertools
from dataclasses import replace

import pytest
import torch
from support.tuned import spec_with

from attnreg import Device
from attnreg.backends.fa4 import compiled_kinds
from attnreg.core.times.traces import Recorded
from attnreg.tools.tuning.representatives import (
    RepresentedKind,
    recorded_kinds,
    small,
    tensors_of,
    without_lengths,
)

CPU = Device("cpu")


def kinds(*specs, forward=1, backward=0):
    return recorded_kinds([Recorded(spec, forward, backward) for spec in specs], CPU)


def lengths_of(spec):
    return spec.batch, spec.max_q, spec.max_k, spec.tokens_q, spec.tokens_k


def compiled_for(direction, spec):
    """Return what FA4 compiles for a call: its family, and the class of its lengths."""
    family = compiled_kinds.family_of_spec(direction, spec)
    return family, family.class_of(spec.batch, spec.max_q, spec.max_k)


def test_calls_that_differ_in_lengths_alone_are_one_kind_and_the_longest_stands_for_them():
    calls = [spec_with(n, batch=batch) for n in (300, 4096, 700) for batch in (8, 1)]
    (kind,) = kinds(*calls)
    assert lengths_of(kind.spec) == (2, 512, 512, 1024, 1024)
    assert kind.calls == tuple(calls) and kind.directions == ("forward",)
    (kind,) = kinds(spec_with(300, batch=1))
    assert lengths_of(kind.spec) == (1, 300, 300, 300, 300)


def test_calls_that_differ_in_anything_else_are_several_kinds():
    changes = [
        {}, {"dtype": "float16"}, {"heads_q": 8}, {"heads_k": 2}, {"head_dim": 32}, {"head_dim_v": 32},
        {"varlen": True}, {"window": (-1, 0)}, {"window": (60, 0)}, {"dropout": 0.1}, {"bias": True},
        {"alibi": True}, {"seqused_k": True}, {"page_size": 16}, {"num_splits": 2}, {"softcap": 5.0},
        {"positive_scale": False}, {"grad_lse": True}, {"deterministic": True}, {"batch_invariant": True},
    ]  # fmt: skip
    specs = [spec_with(**change) for change in changes]
    assert [kind.spec for kind in kinds(*specs)] == [small(spec) for spec in specs]
    # Kernels are compiled for powers of two of ranges.
    ranges = [spec_with(varlen=True, key_ranges=True, ranges=count) for count in (3, 4, 5, 8, 1)]
    assert [len(kind.calls) for kind in kinds(*ranges)] == [2, 2, 1]
    # How much is dropped, whether a gradient is needed or a graph was captured decides about no kernel.
    same = [{"dropout": 0.2}, {"dropout": 0.1}, {"dropout": 0.1, "needs_backward": True}]
    assert len(kinds(*(spec_with(**one) for one in (*same, {"dropout": 0.1, "capturing": True})))) == 1


def test_short_and_unequal_lengths_are_kinds_of_their_own():
    pairs = [(1, 64), (1, 5000), (4, 5000), (200, 200), (300, 300), (300, 5000), (5000, 300)]
    found = kinds(*(spec_with(max_q=q, max_k=k) for q, k in pairs), spec_with(9000))
    expected = [(1, 64), (1, 512), (4, 512), (200, 200), (512, 512), (300, 512), (512, 300)]
    assert [(kind.spec.max_q, kind.spec.max_k) for kind in found] == expected


def test_a_small_call_keeps_whether_queries_are_fewer_than_keys_and_its_window_reaches_not_all():
    for max_q, max_k in itertools.product((1, 5, 100, 300, 513, 5000), repeat=2):
        spec = small(spec_with(max_q=max_q, max_k=max_k, window=(4096, 0)))
        assert (spec.max_q > spec.max_k, spec.max_q == spec.max_k) == (max_q > max_k, max_q == max_k)
        assert max(spec.max_q, spec.max_k) <= 512
        assert 0 < spec.window[0] <= max(spec.max_k // 2, 1) and spec.window[1] == 0
    assert small(spec_with(300, window=(5, 7))).window == (5, 7)
    assert small(spec_with(300, window=(-1, -1))).window == (-1, -1)


@pytest.mark.parametrize("changes", [{}, {"window": (-1, 0)}, {"window": (4096, 0)}, {"heads_k": 1}])
def test_what_fa4_compiles_for_a_small_call_is_what_it_compiles_for_the_call(changes):
    for max_q, max_k in itertools.product((1, 300, 513, 5000), (300, 513, 5000)):
        for batch, varlen in ((1, False), (9, True), (5000, True)):
            spec = spec_with(max_q=max_q, max_k=max_k, batch=batch, varlen=varlen, **changes)
            for direction in ("forward", "backward"):
                assert compiled_for(direction, small(spec)) == compiled_for(direction, spec), spec


def test_packed_batches_of_many_sequences_are_a_kind_of_short_ones():
    few, many = (spec_with(4096, batch=batch, varlen=True) for batch in (200, 5000))
    assert [lengths_of(kind.spec) for kind in kinds(few, many)] == [
        (2, 512, 512, 512 + 16, 512 + 16),
        (257, 512, 512, 512 + 256 * 16, 512 + 256 * 16),
    ]
    assert len(kinds(replace(few, varlen=False), replace(many, varlen=False))) == 1
    call = tensors_of(small(many), torch.device("cpu")).call
    longest, *others = call.cu_seqlens_q.diff().tolist()
    assert (longest, len(others), sum(others), max(others)) == (512, 256, 256 * 16, 32)


@pytest.mark.parametrize(
    ("forward", "backward", "directions"),
    [(1, 0, ("forward",)), (3, 3, ("forward", "backward")), (0, 2, ("backward",))],
)
def test_the_directions_are_those_that_were_recorded(forward, backward, directions):
    (kind,) = kinds(spec_with(needs_backward=True), forward=forward, backward=backward)
    assert kind.directions == directions


def test_calls_without_anything_to_compute_are_left_out_and_a_large_recording_is_decided_by_some():
    assert kinds(spec_with(0), spec_with(batch=0), spec_with(head_dim_v=0)) == []
    (kind,) = kinds(*(spec_with(n) for n in range(300, 1300)))
    assert len(kind.calls) == 63 and kind.spec.max_q == 512


def test_a_kind_without_lengths_is_decided_at_usual_ones():
    fields = {"dtype": "bf16", "heads_q": 4, "head_dim": 64, "window": (1024, 0)}
    kind = without_lengths(fields, CPU)
    assert isinstance(kind, RepresentedKind) and kind.spec.window == (128, 0)
    assert lengths_of(kind.spec) == (2, 512, 512, 1024, 1024)
    assert [(call.max_q, call.max_k, call.window) for call in kind.calls] == [
        (n, n, (1024, 0)) for n in (512, 2048, 16384)
    ]
    decoding = without_lengths({**fields, "max_q": 1}, CPU)
    assert (decoding.spec.max_q, decoding.spec.max_k, decoding.spec.window) == (1, 512, (128, -1))
    assert [(call.max_q, call.max_k) for call in decoding.calls] == [(1, 512), (1, 2048), (1, 16384)]
    exact = without_lengths({**fields, "max_k": 4000}, CPU)
    assert (exact.spec.max_q, exact.spec.max_k, exact.spec.window) == (512, 4000, (1024, 0))
    assert exact.calls == (exact.spec,)
    long = without_lengths({**fields, "max_q": 20000}, CPU)
    assert (long.spec.max_k, long.calls[0].max_q) == (20000, 20000)

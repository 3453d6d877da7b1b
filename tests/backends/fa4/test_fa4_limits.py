"""Promises of the FA4 backend: which calls it refuses, and in CUDA graphs until their kind is compiled."""

import dataclasses
import types

import pytest
from support.fake_fa4 import call_of, dense, offered
from support.packages import gpu_spec

import attnreg
from attnreg import Device, UnsupportedInputError
from attnreg.backends.fa4 import BACKEND, adapter, compiled_kinds
from attnreg.core import registry
from attnreg.core.contract.lengths import Cut, Lengths
from attnreg.core.dispatch.kinds import kind_of
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.decision import Policy
from attnreg.tools.measure import QUICK
from attnreg.tools.measure.inputs import inputs

HERE = Device("cuda", (9, 0))


def reasons(direction, here=None, **fields):
    """Return the reasons against a call on a GPU that needn't be here, or on this one."""
    spec = gpu_spec(**{"heads_q": 4, "heads_k": 4, "head_dim": 64} | fields)
    spec = dataclasses.replace(spec, device=here) if here else spec
    return Entry("FA4", "a test", dataclasses.replace(BACKEND, unavailable=lambda: None)).reasons(
        spec, direction
    )


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "packed"])
def test_values_wider_than_the_keys_are_refused_on_hopper(direction, varlen):
    wide = "head_dim of the value must be at most the query's, 64, got 128"
    assert reasons(direction, varlen=varlen, head_dim_v=128) == (wide,)
    assert reasons(direction, varlen=varlen, head_dim=192, head_dim_v=128) == ()
    assert reasons(direction, varlen=varlen, head_dim_v=128, device="sm_100") == ()


# Compiled kinds


def test_a_kind_that_has_not_run_is_refused_in_a_cuda_graph_each_direction_for_itself(kernels, on_hopper):
    query, key, value, grad = dense(64, 64, dim=64)
    cold = ("this kind of call needs to run once before it can be recorded in a CUDA graph",)
    assert reasons("forward", HERE) == ()
    fields = {"here": HERE, "capturing": True}
    assert (reasons("forward", **fields), reasons("backward", **fields)) == (cold, cold)
    out, lse = kernels.forward(query, key, value, call_of(query, key))
    assert (reasons("forward", **fields), reasons("backward", **fields)) == ((), cold)
    kernels.backward(grad, query, key, value, out, lse, call_of(query, key))
    assert (reasons("forward", **fields), reasons("backward", **fields)) == ((), ())
    for other in (
        *({"dtype": "float16"}, {"head_dim": 72}, {"head_dim_v": 32}, {"heads_k": 2}, {"varlen": True}),
        *({"window": (-1, 0)}, {"window": (8, -1)}, {"window": (8, 8)}, {"seqused_k": True}, {"max_q": 193}),
        {"here": Device("cuda", (9, 0), index=1)},
    ):
        assert reasons("forward", **fields | other) == cold, other
    assert reasons("forward", **fields, max_q=192, max_k=6000, heads_q=12, heads_k=12, batch=7) == ()
    assert reasons("forward", **fields, deterministic=True) == ()
    assert reasons("backward", **fields, deterministic=True) == cold
    assert reasons("forward", capturing=True, dtype="float16") == ()  # of another machine that isn't known


def test_a_kind_that_the_limits_let_pass_is_an_error_in_a_cuda_graph_and_not_compiled(
    package, kernels, monkeypatch
):
    query, key, value, grad = dense()
    kernels.forward(query, key, value, call_of(query, key))
    monkeypatch.setattr(adapter, "_capturing", lambda tensor: True)
    out, lse = kernels.forward(query, key, value, call_of(query, key))
    repeated = key[:, :, :1].expand(key.shape)
    for run, direction in (
        (lambda: kernels.forward(query, repeated, value, call_of(query, key)), "forward"),
        (lambda: kernels.backward(grad, query, key, value, out, lse, call_of(query, key)), "backward"),
    ):
        with pytest.raises(UnsupportedInputError) as error:
            run()
        assert str(error.value) == (
            f"FA4 has to run this kind of {direction} once before it can be recorded in a CUDA graph"
        )
    assert [name for name, _ in package.calls] == ["forward", "forward"]


def test_a_spec_and_its_tensors_give_the_same_kind(on_hopper):
    for case in QUICK:
        if case.dtype == "bfloat16" and offered(case):
            query, key, value, _, call = inputs(case)
            for direction in ("forward", "backward"):
                by_spec = compiled_kinds.family_of_spec(direction, case.spec(Device("cuda", (9, 0))))
                family = compiled_kinds.family_of(direction, query, key, value, call)
                assert by_spec.as_of_spec() == family.as_of_spec(), case


LENGTHS = (1, 16, 17, 48, 80, 128, 129, 192, 193, 256, 257, 258, 4096, 10**6)


@pytest.mark.parametrize(
    ("direction", "fields", "classes"),
    [
        ("forward", {"head_dim": 64, "heads_k": 8}, [0] * 8 + [8] * 6),
        ("forward", {"heads_k": 8}, [0] * 6 + [6] * 8),
        ("forward", {}, [0] * 3 + [3] * 11),
        # A softcap has a tile of its own from 129 queries on.
        (
            "forward",
            {"heads_k": 8, "softcap": 30.0, "window": (-1, 0)},
            [0] * 6 + [6] * 2 + [8] * 6,
        ),
        ("backward", {"head_dim": 64}, [0] * 6 + [6] * 8),
        ("backward", {}, [0] * 5 + [5] + [6] * 8),
        ("backward", {"head_dim": 256}, [0] * 4 + [4] * 10),
        ("forward", {"device": "sm_100", "heads_k": 8}, [0, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10]),
    ],
)
def test_lengths_count_by_whether_they_fit_into_a_tile(direction, fields, classes):
    family = compiled_kinds.family_of_spec(direction, gpu_spec(**fields))
    found = [family.class_of(3, n, n) for n in LENGTHS]
    assert [found.index(one) for one in found] == classes


@pytest.mark.parametrize(("packed", "differ"), [(False, False), (True, True)])
def test_many_packed_sequences_are_a_class_of_their_own(packed, differ):
    family = compiled_kinds.family_of_spec("forward", gpu_spec(varlen=packed))
    assert family.class_of(255, 64, 64) == family.class_of(256, 64, 64)
    assert (family.class_of(256, 64, 64) != family.class_of(257, 64, 64)) is differ


def test_the_lengths_that_decisions_change_at_are_declared():
    assert list(BACKEND.cuts(gpu_spec())) == [Cut.of("batch", at=65536)]
    assert list(BACKEND.cuts(gpu_spec(varlen=True))) == [Cut.of("max_q", at=17)]
    for without in (
        {"head_dim": 24, "head_dim_v": 24}, {"sinks": True}, {"batch_invariant": True}, {"device": "sm_100"},
        {"seqused_k": True, "page_size": 16},
    ):  # fmt: skip
        assert Cut.of("max_q", at=17) not in BACKEND.cuts(gpu_spec(varlen=True, **without))
    spec = gpu_spec(varlen=True, seqused_k=True, heads_q=6, heads_k=2, head_dim=24, head_dim_v=24)
    assert [BACKEND.priority_for(dataclasses.replace(spec, max_q=n)) for n in (341, 342)] == [15, 30]
    spec = gpu_spec(varlen=True, seqused_k=True, heads_q=6, heads_k=2, batch=10, max_q=1, max_k=9000)
    changes = (
        ("max_q", 342, [50, 30]), ("max_q", 2, [15, 50]), ("batch", 64, [15, 50]), ("max_k", 4097, [50, 15]),
    )  # fmt: skip
    for name, at, priorities in changes:
        assert Cut.of(name, at=at) in BACKEND.cuts(spec)
        sides = [dataclasses.replace(spec, **{name: n}) for n in (at - 1, at)]
        assert [BACKEND.priority_for(each) for each in sides] == priorities


# What it can't run

SHARED = "head_dim of the value must be the query's where heads are shared, 192, got 128"
EQUAL_OR = "(192, 128), (256, 128)"
SM_100 = "head dims must be up to 128, (192, 128) or (256, 256) on sm_10x and sm_11x, got (160, 160)"
SM_120 = "head dims must be up to 128 on sm_12x, got (136, 136)"
NOT_REPEATABLE = "not deterministic on sm_12x, and deterministic algorithms are on"
RANGES = {"varlen": True, "key_ranges": True}
UP_TO = "head dims must be equal and up to 128 with key_ranges, got"
UNTRIED = "{} must be None in batch-invariant calls: no test has tried it there"
INVARIANT = {"varlen": True, "batch_invariant": True}
OLD = "compute capability must be 9.0 to 12.1, got 8.6 (too old)"


@pytest.mark.parametrize(
    ("fields", "forward", "backward"),
    [
        ({}, "", ""),
        ({"num_splits": 1}, "", ""),
        ({"num_splits": 4}, "num_splits must be 1 or None, got 4", ""),
        ({"positive_scale": False}, *["scale must be above 0"] * 2),
        ({"batch": 65536}, *["batch of dense tensors must be at most 65535, got 65536"] * 2),
        ({"batch": 65537, "varlen": True}, "", ""),
        ({"heads_q": 65536}, *["query heads of dense tensors must be at most 65535, got 65536"] * 2),
        ({"heads_q": 65536, "varlen": True}, "", ""),
        ({"device": "sm_86"}, OLD, OLD),
        ({"head_dim": 260, "head_dim_v": 64}, *["head_dim must be 8 to 256 in steps of 8, got 260"] * 2),
        ({"head_dim": 192, "head_dim_v": 128}, "", ""),
        ({"head_dim": 192, "head_dim_v": 128, "heads_k": 2}, "", SHARED),
        (
            {"head_dim": 128, "head_dim_v": 64},
            "",
            f"head dims that differ must be one of {EQUAL_OR}, got (128, 64)",
        ),
        ({"head_dim_v": 32}, "", f"head dims that differ must be one of {EQUAL_OR}, got (64, 32)"),
        ({"device": "sm_100", "head_dim": 160}, SM_100, SM_100),
        ({"device": "sm_100", "head_dim": 256}, "", ""),
        ({"device": "sm_120", "head_dim": 136}, SM_120, SM_120),
        ({"device": "sm_120", "deterministic": True}, "", NOT_REPEATABLE),
        ({"deterministic": True}, "", ""),
        (RANGES, "", ""),
        ({**RANGES, "ranges": 8}, "", ""),
        ({**RANGES, "ranges": 9}, *["key_ranges must have 0 to 8 ranges a query, got 9"] * 2),
        ({**RANGES, "window": (90, 0), "heads_k": 2, "head_dim": 128}, "", ""),
        ({**RANGES, "device": "sm_100"}, *["compute capability must be 9.0 with key_ranges, got 10.0"] * 2),
        ({**RANGES, "head_dim": 192, "head_dim_v": 128}, *[f"{UP_TO} (192, 128)"] * 2),
        ({**RANGES, "head_dim": 256}, *[f"{UP_TO} (256, 256)"] * 2),
        (
            {**RANGES, "seqused_k": True},
            *["seqused_k must be None with key_ranges, which no test has tried"] * 2,
        ),
        (
            {**RANGES, "softcap": 5.0},
            *["softcap must be 0 with key_ranges, which no test has tried, got 5.0"] * 2,
        ),
        ({**RANGES, "sinks": True}, *["sinks must be None with key_ranges: a row may see no key"] * 2),
        ({**RANGES, "heads_q": 65536}, *["query heads with key_ranges must be at most 65535, got 65536"] * 2),
        (INVARIANT, "", ""),
        ({**RANGES, **INVARIANT}, *[UNTRIED.format("key_ranges")] * 2),
        ({**INVARIANT, "seqused_k": True}, *[UNTRIED.format("seqused_k")] * 2),
        (
            {**INVARIANT, "softcap": 5.0},
            *["softcap must be 0 in batch-invariant calls, got 5.0: no test has tried it there"] * 2,
        ),
        (
            {**INVARIANT, "device": "sm_100"},
            *["compute capability must be 9.0 to be batch-invariant, got 10.0"] * 2,
        ),
        (
            {**RANGES, "deterministic": True},
            "",
            "not deterministic with key_ranges, and deterministic algorithms are on",
        ),
    ],
)
def test_a_limit_is_given_as_a_reason_in_the_directions_that_have_it(fields, forward, backward):
    assert reasons("forward", **fields) == ((forward,) if forward else ())
    assert reasons("backward", **fields) == ((backward,) if backward else ())


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_number_of_ranges_is_a_class_of_its_own_above_eight_only_in_calls_with_some(direction):
    found, plain = gpu_spec(**RANGES, heads_k=4), gpu_spec(varlen=True, heads_k=4)
    now = types.SimpleNamespace(entries=registry.entries(), policy=Policy())
    kind = kind_of(now, found, direction)
    places = [kind.key(Lengths.of(found.but(ranges=count))) for count in (1, 8, 9, 32, 33)]
    assert places[0] == places[1] != places[2] == places[3] != places[4]
    backends = [
        attnreg.explain(found.but(max_q=600, max_k=600, ranges=count)).backend for count in (8, 9, 33)
    ]
    assert backends == ["FA4", "flex", "math"]
    assert registry.find("FA4").unnamed_reads(found, direction) == frozenset()
    assert "ranges" not in {name for cut in kind_of(now, plain, direction).cuts for name in cut.names}


KEY_TILE = "page size must not be that of a key tile, got {}"
UNTRIED = "page size must be 16 to 256 in steps of 16 but for sm_9x and releases 4.0.0b36, got {}"
PAGED = "head dims above 128 must be one of (192, 128), (192, 192), (256, 128), (256, 256) with pages, got {}"


@pytest.mark.parametrize(
    ("page_size", "fields", "reason"),
    [
        (16, {}, ""),
        (1, {}, ""),
        (300, {}, ""),
        (4096, {"window": (-1, 0)}, ""),
        (128, {}, KEY_TILE),
        (16, {"device": "sm_100"}, ""),
        (300, {"device": "sm_100"}, UNTRIED),
        (8, {"device": "sm_100"}, UNTRIED),
        (16, {"head_dim": 96}, "head_dim must not be 65 to 96 with pages and an open mask, got 96"),
        (16, {"head_dim": 96, "window": (-1, 0)}, ""),
        (128, {"head_dim": 96, "window": (-1, 0)}, KEY_TILE),
        (16, {"head_dim": 112}, ""),
        (16, {"head_dim": 208}, PAGED.format((208, 208))),
        (16, {"head_dim": 256, "head_dim_v": 80}, PAGED.format((256, 80))),
        (16, {"head_dim": 256, "head_dim_v": 128}, ""),
        (96, {"head_dim": 192, "window": (5, 0)}, KEY_TILE),
        (112, {"head_dim": 192}, KEY_TILE),
        (80, {"head_dim": 256}, KEY_TILE),
        (128, {"device": "sm_100", "head_dim": 192, "head_dim_v": 128}, KEY_TILE),
        (16, {"key_ranges": True, "seqused_k": False}, "block_table must be None with key_ranges"),
        (16, {"head_dim": 72}, "head dims must be multiples of 16 with pages, got (72, 72)"),
        (16, {"device": "sm_120"}, "block_table must be None on sm_12x: no paged key-value cache"),
    ],
)
def test_pages_are_served_forward_unless_unwritten_keys_would_be_loaded_with_them(page_size, fields, reason):
    paged = {"varlen": True, "seqused_k": True, "page_size": page_size, **fields}
    assert reasons("forward", **paged) == ((reason.format(page_size),) if reason else ())
    assert reasons("backward", **paged)[0] == "block_table must be None: no paged key-value cache"

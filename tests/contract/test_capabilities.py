"""Promises of capabilities: data in, every reason out, each in one exact sentence."""

import dataclasses
import sys
import types

import pytest
from support.options import value_in_spec
from support.refusals import refusal

from attnreg import AttentionSpec, Capabilities, Device, Range, RegistrationError
from attnreg.core.contract.capabilities import ANY_SIZE
from attnreg.core.contract.options import OPTIONS

# As little as one can declare, and a call that still fits.
LEAST = {"devices": ("cpu",), "dtypes": ("float32",)}
PLAIN = {
    "device": Device("cpu"), "dtype": "float32", "batch": 2, "max_q": 16, "max_k": 16, "heads_q": 4,
    "heads_k": 4, "head_dim": 64, "head_dim_v": 64,
}  # fmt: skip


def against(limits, **call):
    return Capabilities(**LEAST | limits).unsupported(AttentionSpec(**PLAIN | call))


def on(arch):
    return {"device": Device.parse(arch)}


HOPPER = {"devices": ("cuda",), "compute_capability": ((8, 0), (9, 0))}

# What is declared, the call, the one reason, and a declaration that takes it.
REASONS = [
    ({}, on("cuda"), "device must be cpu, got cuda", {"devices": ("cpu", "cuda")}),
    ({"devices": ("cuda", "xpu")}, {}, "device must be cuda or xpu, got cpu", {"devices": ("cpu",)}),
    ({"devices": ("cuda", "xpu", "mps")}, {}, "device must be cuda, xpu or mps, got cpu",
     {"devices": ("cpu",)}),
    (HOPPER, on("sm_75"), "compute capability must be 8.0 to 9.0, got 7.5 (too old)",
     {"compute_capability": ((7, 5), (7, 5))}),
    (HOPPER, on("sm_100"), "compute capability must be 8.0 to 9.0, got 10.0 (too new)",
     {"compute_capability": None}),
    (HOPPER, on("sm_120"), "compute capability must be 8.0 to 9.0, got 12.0 (too new)",
     {"compute_capability": ((12, 0), (12, 1))}),
    ({}, {"dtype": "bf16"}, "dtype must be float32, got bfloat16", {"dtypes": ("bfloat16",)}),
    ({"dtypes": ("float16", "bfloat16")}, {}, "dtype must be float16 or bfloat16, got float32",
     {"dtypes": ("float32",)}),
    ({"head_dim": Range(8, 256, 8)}, {"head_dim": 44, "head_dim_v": 44},
     "head_dim must be 8 to 256 in steps of 8, got 44", {"head_dim": Range(8, 256, 4)}),
    ({"head_dim": Range(1, 32)}, {}, "head_dim must be 1 to 32, got 64", {"head_dim": Range(1, 64)}),
    ({}, {"head_dim_v": 32}, "head_dim of the value must be that of the query, 64, got 32",
     {"head_dim_v": Range(32, 64)}),
    ({"head_dim_v": Range(64, 128, 64)}, {"head_dim_v": 32},
     "head_dim of the value must be 64 to 128 in steps of 64, got 32", {"head_dim_v": ANY_SIZE}),
    ({}, {"page_size": 16}, "block_table must be None: no paged key-value cache",
     {"page_size": Range(16, 16)}),
    ({"page_size": Range(64, 512, 64)}, {"page_size": 16},
     "page size must be 64 to 512 in steps of 64, got 16", {"page_size": Range(16, 512, 16)}),
    ({"batch": Range(0, 1)}, {}, "batch must be 0 to 1, got 2", {"batch": Range(0, 2)}),
    ({"key_ranges": True, "ranges": Range(0, 8)}, {"key_ranges": True, "ranges": 9},
     "key_ranges must have 0 to 8 ranges a query, got 9", {"ranges": Range(0, 9)}),
    ({"heads": Range(0, 3)}, {}, "query heads must be 0 to 3, got 4", {"heads": Range(0, 4)}),
    ({}, {"varlen": True}, "input must be dense, got packed", {"varlen": True}),
    ({"dense": False, "varlen": True}, {}, "input must be packed, got dense", {"dense": True}),
    ({}, {"heads_k": 2}, "query and key must have the same number of heads, got 4 and 2", {"gqa": True}),
    ({}, {"window": (-1, 0)}, "is_causal must be False, got True", {"causal": True}),
    ({}, {"window": (-1, 4)}, "window_size must be (-1, -1) or causal, got (-1, 4)", {"window": True}),
    ({"causal": True}, {"window": (4, 0)}, "window_size must be (-1, -1) or causal, got (4, 0)",
     {"causal": True, "window": True}),
    ({}, {"positive_scale": False}, "scale must be above 0", {"any_scale": True}),
    ({}, {"deterministic": True}, "not deterministic, and deterministic algorithms are on",
     {"deterministic": True}),
    ({}, {"batch_invariant": True}, "not batch-invariant, and policy is batch_invariant",
     {"batch_invariant": True}),
    ({}, {"capturing": True}, "can't be recorded in a CUDA graph", {"capture": True}),
]  # fmt: skip
# The rows have the texts; another test here has them as they are.
REASONS += [
    ({}, {row.field: (value := value_in_spec(row))}, row.reason.format(value), {row.field: True})
    for row in OPTIONS
    if row.reason and row.field in Capabilities.__dataclass_fields__
]


@pytest.mark.parametrize(("limits", "call", "reason", "wider"), REASONS, ids=[row[2] for row in REASONS])
def test_a_limit_refuses_what_is_beyond_it_in_one_sentence_and_nothing_else(limits, call, reason, wider):
    assert against(limits, **call) == (reason,)
    assert against(limits | wider, **call) == ()
    assert reason[0].islower() and not reason.endswith(".") and not set("{}") & set(reason)


def test_every_field_is_behind_some_reason():
    behind = {name for *_, wider in REASONS for name in wider}
    # By itself it refuses nothing: it says how a backward is given what it doesn't take (`lse_columns`).
    # Options that have no field are in a test of their own: `test_made_up_option.py`.
    assert behind | {"delta_from_out", "options", "refuses"} == {
        field.name for field in dataclasses.fields(Capabilities)
    }


def test_all_reasons_are_listed_at_once_in_a_fixed_order():
    assert against(
        {"devices": ("cuda",), "compute_capability": ((8, 0), (9, 0)), "head_dim": Range(8, 32)},
        device=Device("cuda", (7, 5)), dtype="float64", head_dim_v=8, page_size=16, varlen=True, heads_k=1,
        window=(4, 0), dropout=0.5, bias=True, alibi=True, positive_scale=False, softcap=5.0, grad_lse=True,
        seqused_k=True, num_splits=2, key_ranges=True, sinks=True, deterministic=True, batch_invariant=True,
        capturing=True,
    ) == (
        "compute capability must be 8.0 to 9.0, got 7.5 (too old)",
        "dtype must be float32, got float64",
        "head_dim must be 8 to 32, got 64",
        "head_dim of the value must be that of the query, 64, got 8",
        "block_table must be None: no paged key-value cache",
        "input must be dense, got packed",
        "query and key must have the same number of heads, got 4 and 1",
        "is_causal must be False, got True",
        "window_size must be (-1, -1) or causal, got (4, 0)",
        "scale must be above 0",
        "dropout_p must be 0, got 0.5",
        "attn_bias must be None, got a tensor",
        "alibi_slopes must be None, got a tensor",
        "seqused_k must be None, got a tensor",
        "key_ranges must be None, got a tensor",
        "num_splits must be None, got 2",
        "softcap must be 0, got 5.0",
        "grad_lse must be None, got a tensor: no gradient of the LSE",
        "sinks must be None, got a tensor: they are counted after the kernel",
        "not deterministic, and deterministic algorithms are on",
        "not batch-invariant, and policy is batch_invariant",
        "dropout_p must be 0 where policy is batch_invariant, got 0.5",
        "can't be recorded in a CUDA graph",
    )  # fmt: skip


def test_a_function_of_a_direction_is_asked_about_calls_that_the_fields_accept():
    limits = {"head_dim": Range(8, 64), "refuses": lambda spec: iter((f"batch must be 1, got {spec.batch}",))}
    assert against(limits) == ("batch must be 1, got 2",)
    assert against(limits, head_dim=72, head_dim_v=72) == ("head_dim must be 8 to 64, got 72",)
    with pytest.raises(TypeError, match="expected a tuple of reasons"):
        against({"refuses": lambda _: "too long"})


def test_a_device_that_is_not_served_is_the_only_reason():
    call = {"dtype": "float64", "heads_k": 1, "dropout": 0.5}
    assert against({}, **on("sm_90"), **call) == ("device must be cpu, got cuda",)


@pytest.mark.parametrize(
    ("device", "fits"), [("sm_80", True), ("sm_90", True), ("sm_79", False), ("sm_91", False), ("cuda", True)]
)
def test_both_ends_of_a_range_of_compute_capabilities_are_in_it_and_an_unknown_one_is(device, fits):
    assert (against(HOPPER, **on(device)) == ()) is fits


def test_no_option_of_a_call_is_taken_unless_it_is_declared():
    switches = [field.name for field in dataclasses.fields(Capabilities) if field.type == "bool"]
    least = Capabilities(**LEAST)
    assert [name for name in switches if getattr(least, name)] == ["dense"]
    assert (least.compute_capability, least.head_dim_v, least.page_size) == (None, None, None)


@pytest.mark.parametrize(
    ("numbers", "inside", "outside", "text"),
    [
        (Range(8, 32, 8), (8, 16, 32), (0, 7, 12, 33, 40), "8 to 32 in steps of 8"),
        (Range(1, 3), (1, 2, 3), (0, 4), "1 to 3"),
        (Range(0, 0), (0,), (1, -1), "0 to 0"),
        (Range(1), (1, 2**31 - 1), (0, 2**31), "1 or more"),
        (Range(0, step=3), (0, 3, 99), (-3, 1, 100), "a multiple of 3"),
        (Range(300, step=100), (300, 1000), (200, 350), "a multiple of 100 from 300"),
        (Range(1, 3), (), (1.0, "1", None), "1 to 3"),
    ],
)
def test_a_range_holds_both_ends_and_multiples_of_its_step_only(numbers, inside, outside, text):
    assert [number for number in (*inside, *outside) if number in numbers] == list(inside)
    assert str(numbers) == text


NAMES, VERSIONS, RANGE = (
    "a non-empty tuple of names",
    "((major, minor), (major, minor)), the lowest first, or None",
    "a Range of whole numbers from low to high, its step 1 or more",
)
DEVICES = "torch's own names: cpu, cuda, mps, xpu, hpu, mtia, npu, xla, maia, vulkan, privateuseone, meta"
DTYPES = (
    "torch's own names: float16, bfloat16, float32, float64, "
    "float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz"
)
OPTION_NAMES = "a tuple of options without a field: there are none"
BAD = [
    *(("devices", value, NAMES) for value in ("cpu", (), ["cpu"])),
    *(("devices", value, DEVICES) for value in (("gpu",), ("cpu", "cuda:0"), ("CUDA",), ("sm_90",))),
    *(("dtypes", value, NAMES) for value in (("float32", 16), None)),
    *(("dtypes", value, DTYPES) for value in (("bf16",), ("float16", "half"), ("torch.float32",), ("int8",))),
    *(
        ("compute_capability", value, VERSIONS)
        for value in ((8, 0), ((8, 0), "9.0"), ((8, 0), (9,)), "8.0", ((9, 0), (8, 0)))
    ),
    *(("head_dim", value, RANGE) for value in (None, (8, 256), Range("8", 256), Range(256, 8))),
    ("head_dim_v", Range(8, 256, 0), RANGE),
    ("batch", None, RANGE),
    ("heads", (0, 1), RANGE),
    ("ranges", 8, RANGE),
    *(("options", value, OPTION_NAMES) for value in (["softcap"], "softcap", ("no_such_option",))),
    ("options", ("softcap",), "softcap=True in place of 'softcap', which has a field"),
    ("options", ("block_table",), "page_size=Range(...) in place of 'block_table', which has a field"),
    *(("page_size", value, RANGE) for value in (16, Range(16, None))),
    ("refuses", "never", "a function or None"),
] + [
    (field.name, value, "True or False")
    for field in dataclasses.fields(Capabilities)
    if field.type == "bool"
    for value in (1, None, "yes")
]


@pytest.mark.parametrize(("field", "value", "expected"), BAD)
def test_a_badly_typed_field_is_refused_by_name_with_what_was_got_and_expected(field, value, expected):
    message = f"Capabilities.{field}: got {value!r}, expected {expected}"
    assert refusal(lambda: Capabilities(**LEAST | {field: value}), kind=RegistrationError) == message


def test_a_device_type_that_a_package_has_added_to_torch_can_be_declared(monkeypatch):
    added = types.SimpleNamespace(device=lambda name: types.SimpleNamespace(type=name))
    monkeypatch.setitem(sys.modules, "torch", added)
    assert Capabilities(**LEAST | {"devices": ("musa",)}).devices == ("musa",)


def test_every_field_is_checked():
    assert {field for field, *_ in BAD} == {field.name for field in dataclasses.fields(Capabilities)}

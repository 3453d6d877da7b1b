"""Promises of the spec: what one call asks, without its tensors."""

import dataclasses
import json

import pytest
import torch
from support.refusals import refusal

from attnreg import AttentionSpec, Device, InvalidInputError
from attnreg.core.contract.spec import canonical_dtype

DENSE = {
    "device": Device("cpu"), "dtype": "float32", "batch": 2, "max_q": 16, "max_k": 32, "heads_q": 4,
    "heads_k": 2, "head_dim": 64, "head_dim_v": 48,
}  # fmt: skip
SHAPES = "query (2, 16, 4, 64) · key (2, 32, 2, 64) · value (2, 32, 2, 48) · float32"


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu", Device("cpu")),
        (" CUDA ", Device("cuda")),
        ("cuda:0", Device("cuda", index=0)),
        ("cuda:11", Device("cuda", index=11)),
        ("privateuseone", Device("privateuseone")),
        ("sm_90", Device("cuda", (9, 0), simulated=True)),
        ("SM90a", Device("cuda", (9, 0), simulated=True)),
        ("sm_100", Device("cuda", (10, 0), simulated=True)),
        ("sm_103f", Device("cuda", (10, 3), simulated=True)),
        ("sm_120", Device("cuda", (12, 0), simulated=True)),
    ],
)
def test_a_device_is_read_from_its_usual_names(text, device):
    assert Device.parse(text) == device


@pytest.mark.parametrize(
    "text", ["", "sm_9", "sm_", "cuda:", "cuda:x", "cuda 0", "cuda:-1", "9.0", "sm_90x", None, 90]
)
def test_what_names_no_device_is_refused_with_the_names_that_do(text):
    message = f"device: got {text!r}, expected 'cpu', 'cuda', 'cuda:N' or 'sm_NN'"
    assert refusal(Device.parse, text, kind=InvalidInputError) == message


@pytest.mark.parametrize(
    ("device", "arch", "keys", "text"),
    [
        (Device("cpu"), "", ("cpu",), "cpu"),
        (Device("cuda"), "", ("cuda",), "cuda"),
        (Device("cuda", index=1), "", ("cuda",), "cuda:1"),
        (Device("cuda", (9, 0)), "sm_90", ("sm_90", "cuda"), "cuda (sm_90)"),
        (Device("cuda", (9, 0), 1, "H200"), "sm_90", ("sm_90", "cuda"), "cuda:1 (H200, sm_90)"),
        (Device.parse("sm_100"), "sm_100", ("sm_100", "cuda"), "cuda (simulated sm_100)"),
    ],
)
def test_a_device_has_its_architecture_its_settings_keys_and_its_name(device, arch, keys, text):
    assert (device.arch, device.keys, str(device)) == (arch, keys, text)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "bfloat16"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        ("bf16", "bfloat16"),
        ("BFloat16", "bfloat16"),
        ("torch.float16", "float16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("fp32", "float32"),
        ("float", "float32"),
        ("fp64", "float64"),
        ("double", "float64"),
    ],
)
def test_a_dtype_has_one_name_however_it_is_given(dtype, name):
    assert canonical_dtype(dtype) == name
    assert AttentionSpec(**DENSE | {"dtype": dtype}).dtype == name


def test_packed_totals_are_batch_times_the_longest_unless_given():
    spec = AttentionSpec(**DENSE)
    assert (spec.tokens_q, spec.tokens_k) == (32, 64)
    given = AttentionSpec(**DENSE, tokens_q=20, tokens_k=0)
    assert (given.tokens_q, given.tokens_k) == (20, 0)


@pytest.mark.parametrize(
    ("window", "causal", "windowed"),
    [
        ((-1, -1), False, False),
        ((-1, 0), True, False),
        ((4, 0), True, True),
        ((0, 0), True, True),
        ((4, -1), False, True),
        ((-1, 4), False, True),
        ((4, 4), False, True),
    ],
)
def test_a_window_is_causal_if_it_ends_at_the_diagonal_and_a_window_if_causal_does_not_cover_it(
    window, causal, windowed
):
    spec = AttentionSpec(**DENSE, window=window)
    assert (spec.causal, spec.windowed) == (causal, windowed)


NO_PAIR = "expected (left, right), integers of -1 or more"
NO_MULTIPLE = "expected the first to be a multiple of the second"
SIZES = ("batch", "max_q", "max_k", "heads_q", "head_dim", "head_dim_v")
REFUSED = [
    *(({field: -3}, f"{field}: got -3, expected an integer of 0 or more") for field in SIZES),
    *(({field: None}, f"{field}: got None, expected an integer of 0 or more") for field in SIZES),
    *(
        ({"heads_q": q, "heads_k": k}, f"heads: got {q} for the query and {k} for the key, {NO_MULTIPLE}")
        for q, k in ((4, 3), (2, 4), (4, 0), (0, 0))
    ),
    *(
        ({"window": window}, f"window: got {window}, {NO_PAIR}")
        for window in ((-2, 0), (0, -5), (1,), (1, 2, 3), ())
    ),
    *(
        ({"device": device}, f"device: got {device!r}, expected a Device, as Device.parse({text!r}) gives")
        for device, text in (("sm_90", "sm_90"), (torch.device("cpu"), "cpu"))
    ),
    *(
        ({"dropout": dropout}, f"dropout_p: got {dropout}, expected 0 to 1")
        for dropout in (-0.1, 1.5, float("nan"), float("inf"))
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_values_that_no_call_can_have_are_refused_with_what_was_got_and_expected(fields, message):
    assert refusal(lambda: AttentionSpec(**DENSE | fields), kind=InvalidInputError) == message


def test_zero_is_a_size_like_any_other_and_so_are_both_ends_of_a_probability():
    for field in SIZES:
        assert getattr(AttentionSpec(**DENSE | {field: 0}), field) == 0
    assert [AttentionSpec(**DENSE, dropout=number).dropout for number in (0.0, 0.5, 1.0)] == [0.0, 0.5, 1.0]


# What the input line says of each option, in its order.
OPTIONS = [
    ({"window": (-1, 0)}, "causal"),
    ({"window": (4, 0)}, "window (4, 0)"),
    ({"window": (-1, 4)}, "window (-1, 4)"),
    ({"dropout": 0.1}, "dropout 0.1"),
    ({"bias": True}, "attn_bias"),
    ({"alibi": True}, "alibi"),
    ({"seqused_k": True}, "seqused_k"),
    ({"page_size": 16}, "pages of 16"),
    ({"num_splits": 3}, "num_splits 3"),
    ({"softcap": 30.0}, "softcap 30.0"),
    ({"grad_lse": True}, "gradient of the LSE"),
    ({"positive_scale": False}, "scale 0 or below"),
    ({"needs_backward": True}, "needs grad"),
    ({"deterministic": True}, "deterministic"),
    ({"batch_invariant": True}, "batch-invariant"),
    ({"capturing": True}, "in a CUDA graph"),
]


@pytest.mark.parametrize(("fields", "said"), OPTIONS)
def test_the_input_line_has_the_shapes_the_dtype_and_the_options(fields, said):
    assert str(AttentionSpec(**DENSE)) == SHAPES
    assert str(AttentionSpec(**DENSE, **fields)) == f"{SHAPES} · {said}"


def test_the_input_line_of_a_packed_call_has_its_totals_and_leaves_no_option_out():
    fields = {key: value for options, _ in OPTIONS for key, value in options.items()}
    assert str(AttentionSpec(**DENSE, **fields, varlen=True, tokens_q=20, tokens_k=40)) == " · ".join(
        [
            "query (20, 4, 64) · key (40, 2, 64) · value (40, 2, 48) · float32",
            "packed, 2 sequences up to 16 x 32",
            *(said for _, said in OPTIONS[2:]),
        ]
    )


@pytest.mark.parametrize(
    ("options", "gives", "of_forward", "of_backward"),
    [
        ({}, True, True, True),
        ({"sinks": False}, False, False, False),
        ({"varlen": False}, False, True, True),
        ({"capturing": True}, True, False, False),
        ({"grad_lse": True}, False, False, False),  # the LSE is the program's, too
        ({"deterministic": True}, False, True, True),
        ({"batch_invariant": True}, False, True, True),
        ({"dropout": 0.5}, False, True, True),
    ],
    ids=str,
)
def test_a_spec_says_whether_a_kernel_may_be_given_sinks(options, gives, of_forward, of_backward):
    spec = AttentionSpec(**DENSE, **{"varlen": True, "sinks": True, "num_splits": 2} | options)
    forward, backward = spec.of("forward"), spec.of("backward")
    assert (spec.gives_sinks, forward.sinks, backward.sinks) == (gives, of_forward, of_backward)
    assert (forward.grad_lse, backward.num_splits) == (False, None)
    assert (forward.num_splits, backward.grad_lse) == (2, spec.grad_lse)


def test_specs_with_equal_fields_are_equal_and_hash_alike():
    fields = {"dtype": "fp32", "window": [4, 0]}, {"dtype": torch.float32, "window": (4, 0)}
    first, second = (AttentionSpec(**DENSE | options) for options in fields)
    assert first == second
    assert len({first, second, AttentionSpec(**DENSE, dropout=0.5)}) == 2


@pytest.mark.parametrize("value", [AttentionSpec(**DENSE), Device("cpu")], ids=["spec", "device"])
def test_neither_a_spec_nor_a_device_can_be_changed_or_given_new_fields(value):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, None)
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        value.unheard_of = 1


def test_a_spec_is_plain_data():
    spec = AttentionSpec(**DENSE | {"device": Device.parse("sm_90"), "dtype": torch.float16})
    document = json.loads(json.dumps(dataclasses.asdict(spec)))
    assert (document["device"]["capability"], document["dtype"]) == ([9, 0], "float16")

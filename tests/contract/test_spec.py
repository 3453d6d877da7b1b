"""Promises of the spec: what one call asks, without its tensors."""

import copy
import dataclasses
import json
import pickle

import pytest
import torch

from attnreg import AttentionSpec, Device, InvalidInputError
from attnreg.contract.spec import canonical_dtype

DENSE = {
    "device": Device("cpu"),
    "dtype": "float32",
    "batch": 2,
    "max_q": 16,
    "max_k": 32,
    "heads_q": 4,
    "heads_k": 2,
    "head_dim": 64,
    "head_dim_v": 48,
}
SHAPES = "query (2, 16, 4, 64) · key (2, 32, 2, 64) · value (2, 32, 2, 48) · float32"

copies = pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)


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


@pytest.mark.parametrize("text", ["", "sm_9", "sm_", "cuda:", "cuda:x", "cuda 0", "cuda:-1", "9.0", "sm_90x"])
def test_what_names_no_device_is_refused_with_the_names_that_do(text):
    with pytest.raises(InvalidInputError) as error:
        Device.parse(text)
    assert str(error.value) == f"device: got {text!r}, expected 'cpu', 'cuda', 'cuda:N' or 'sm_NN'"


@pytest.mark.parametrize(
    ("device", "arch", "keys", "text"),
    [
        (Device("cpu"), "", ("cpu",), "cpu"),
        (Device("cuda"), "", ("cuda",), "cuda"),
        (Device("cuda", index=1), "", ("cuda",), "cuda:1"),
        (Device("cuda", (9, 0)), "sm_90", ("sm_90", "cuda"), "cuda (sm_90)"),
        (
            Device("cuda", (9, 0), 1, "NVIDIA H200"),
            "sm_90",
            ("sm_90", "cuda"),
            "cuda:1 (NVIDIA H200, sm_90)",
        ),
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


@pytest.mark.parametrize("field", ["batch", "max_q", "max_k", "heads_q", "head_dim", "head_dim_v"])
def test_a_negative_number_is_refused_with_the_field_it_is_in(field):
    with pytest.raises(InvalidInputError) as error:
        AttentionSpec(**DENSE | {field: -3})
    assert str(error.value) == f"{field}: got -3, expected 0 or more"


@pytest.mark.parametrize("field", ["batch", "max_q", "max_k", "heads_q", "head_dim", "head_dim_v"])
def test_zero_is_a_size_like_any_other(field):
    assert getattr(AttentionSpec(**DENSE | {field: 0}), field) == 0


@pytest.mark.parametrize(("heads_q", "heads_k"), [(4, 3), (2, 4), (4, 0), (0, 0)])
def test_query_heads_that_are_no_multiple_of_the_key_heads_are_refused_with_both_numbers(heads_q, heads_k):
    with pytest.raises(InvalidInputError) as error:
        AttentionSpec(**DENSE | {"heads_q": heads_q, "heads_k": heads_k})
    assert str(error.value) == (
        f"heads: got {heads_q} for the query and {heads_k} for the key, "
        "expected the first to be a multiple of the second"
    )


@pytest.mark.parametrize("window", [(-2, 0), (0, -5), (1,), (1, 2, 3), ()])
def test_a_window_that_is_no_pair_of_bounds_is_refused(window):
    with pytest.raises(InvalidInputError) as error:
        AttentionSpec(**DENSE, window=window)
    assert str(error.value) == f"window: got {window}, expected (left, right), each -1 or more"


def test_a_window_given_as_a_list_leaves_the_spec_hashable():
    assert hash(AttentionSpec(**DENSE, window=[4, 0])) == hash(AttentionSpec(**DENSE, window=(4, 0)))


@pytest.mark.parametrize("device", ["sm_90", torch.device("cpu")])
def test_what_is_no_device_is_refused_with_how_to_get_one(device):
    with pytest.raises(InvalidInputError) as error:
        AttentionSpec(**DENSE | {"device": device})
    assert str(error.value) == (
        f"device: got {device!r}, expected a Device, as Device.parse({str(device)!r}) gives"
    )


@pytest.mark.parametrize("dropout", [-0.1, 1.5, float("nan"), float("inf")])
def test_a_dropout_that_is_no_probability_is_refused(dropout):
    with pytest.raises(InvalidInputError) as error:
        AttentionSpec(**DENSE, dropout=dropout)
    assert str(error.value) == f"dropout_p: got {dropout}, expected 0 to 1"


@pytest.mark.parametrize("dropout", [0.0, 0.5, 1.0])
def test_any_probability_is_a_dropout(dropout):
    assert AttentionSpec(**DENSE, dropout=dropout).dropout == dropout


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({}, SHAPES),
        ({"window": (-1, 0)}, f"{SHAPES} · causal"),
        ({"window": (4, 0)}, f"{SHAPES} · window (4, 0)"),
        ({"window": (-1, 4)}, f"{SHAPES} · window (-1, 4)"),
        ({"dropout": 0.1}, f"{SHAPES} · dropout 0.1"),
        ({"bias": True}, f"{SHAPES} · attn_bias"),
        ({"alibi": True}, f"{SHAPES} · alibi"),
        ({"seqused_k": True}, f"{SHAPES} · seqused_k"),
        ({"page_size": 16}, f"{SHAPES} · pages of 16"),
        ({"num_splits": 3}, f"{SHAPES} · num_splits 3"),
        ({"positive_scale": False}, f"{SHAPES} · scale 0 or below"),
        ({"needs_backward": True}, f"{SHAPES} · needs grad"),
        ({"deterministic": True}, f"{SHAPES} · deterministic"),
        ({"capturing": True}, f"{SHAPES} · in a CUDA graph"),
        (
            {"varlen": True, "tokens_q": 20, "tokens_k": 40, "window": (-1, 0), "needs_backward": True},
            "query (20, 4, 64) · key (40, 2, 64) · value (40, 2, 48) · float32 · "
            "varlen, 2 sequences up to 16 x 32 · causal · needs grad",
        ),
    ],
)
def test_the_input_line_has_the_shapes_the_dtype_and_the_options(asked, line):
    assert str(AttentionSpec(**DENSE, **asked)) == line


def test_the_input_line_leaves_no_field_out():
    shown = str(
        AttentionSpec(
            **DENSE, varlen=True, window=(5, 0), dropout=0.25, bias=True, alibi=True, seqused_k=True,
            page_size=128, num_splits=7, positive_scale=False, needs_backward=True, deterministic=True,
            capturing=True,
        )
    )  # fmt: skip
    assert shown.split(" · ")[3:] == [
        "float32", "varlen, 2 sequences up to 16 x 32", "window (5, 0)", "dropout 0.25", "attn_bias", "alibi",
        "seqused_k", "pages of 128", "num_splits 7", "scale 0 or below", "needs grad", "deterministic",
        "in a CUDA graph",
    ]  # fmt: skip


def test_specs_that_ask_the_same_are_equal_and_hash_alike():
    first, second = (AttentionSpec(**DENSE | {"dtype": dtype}) for dtype in ("fp32", torch.float32))
    assert first == second
    assert len({first, second, AttentionSpec(**DENSE, dropout=0.5)}) == 2


@pytest.mark.parametrize("value", [AttentionSpec(**DENSE), Device("cpu")], ids=["spec", "device"])
def test_neither_a_spec_nor_a_device_can_be_changed_or_given_new_fields(value):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, None)
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        value.unheard_of = 1


@copies
@pytest.mark.parametrize("device", [Device("cpu"), Device("cuda", (9, 0), 1, "NVIDIA H200")])
def test_a_spec_survives_copying_and_pickling(copied, device):
    spec = AttentionSpec(**DENSE | {"device": device}, window=(4, 0), page_size=16)
    assert copied(spec) == spec
    assert str(copied(spec)) == str(spec)


def test_a_spec_is_plain_data():
    spec = AttentionSpec(**DENSE | {"device": Device.parse("sm_90"), "dtype": torch.float16})
    document = json.loads(json.dumps(dataclasses.asdict(spec)))
    assert (document["device"]["capability"], document["dtype"]) == ([9, 0], "float16")

"""An error about an argument says the name that the function called has for it."""

import math

import pytest
import torch
from support.packed_calls import offsets

from attnreg import InvalidInputError, flash_attn
from attnreg.flash_attn import attention, directions, rotary
from attnreg.integrations import behind_flash

DENSE, PACKED = torch.randn(2, 5, 4, 16), torch.randn(10, 4, 16)
LENGTHS = (offsets(5, 5), offsets(5, 5), 5, 5)
OF_VARLEN = {
    "cu_seqlens_q: got torch.int64, expected torch.int32": (0, LENGTHS[0].long()),
    "cu_seqlens_k: got torch.int64, expected torch.int32": (1, LENGTHS[0].long()),
    "cu_seqlens_k: got length 2, expected 3, as cu_seqlens_q has length 3": (1, offsets(10)),
    "cu_seqlens_q: got first offset 1, expected 0": (0, LENGTHS[0] + 1),
    "max_seqlen_q: got 4, expected at least 5, the longest sequence": (2, 4),
    "max_seqlen_k: got 4, expected at least 5, the longest sequence": (3, 4),
    "max_seqlen_k: got None, expected an integer": (3, None),
}


def refusal(function, *arguments, **options):
    with pytest.raises(InvalidInputError) as error:
        function(*arguments, **options)
    return str(error.value)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("message", OF_VARLEN)
def test_offsets_and_longest_sequences(message, deterministic):
    at, wrong = OF_VARLEN[message]
    lengths = [wrong if place == at else right for place, right in enumerate(LENGTHS)]
    options = {"deterministic": deterministic}
    found = refusal(flash_attn.flash_attn_varlen_func, PACKED, PACKED, PACKED, *lengths, **options)
    assert found == message
    both = torch.stack([PACKED, PACKED], 1)
    assert refusal(flash_attn.flash_attn_varlen_kvpacked_func, PACKED, both, *lengths, **options) == message


@pytest.mark.parametrize(
    ("cu_seqlens", "max_seqlen", "message"),
    [
        (LENGTHS[0].long(), 5, "cu_seqlens: got torch.int64, expected torch.int32"),
        (LENGTHS[0], 4, "max_seqlen: got 4, expected at least 5, the longest sequence"),
    ],
)
def test_offsets_of_one_packed_tensor(cu_seqlens, max_seqlen, message):
    qkv = torch.stack([PACKED] * 3, 1)
    assert refusal(flash_attn.flash_attn_varlen_qkvpacked_func, qkv, cu_seqlens, max_seqlen) == message


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda q: q[..., :3, :], "heads: got 3 for NAMES, expected a multiple of KEY's"),
        (lambda q: q[..., :8], "head_dim: got 8 for NAMES, expected equal ones"),
    ],
    ids=["heads", "head dim"],
)
def test_queries_keys_and_values(wrong, message):
    def expected(key):
        count = 4 if "heads" in message else 16
        return message.replace("NAMES", f"q and {count} for {key}").replace("KEY", key)

    dense, packed = wrong(DENSE), wrong(PACKED)
    assert refusal(flash_attn.flash_attn_func, dense, DENSE, DENSE) == expected("k")
    kv = torch.stack([DENSE, DENSE], 2)
    assert refusal(flash_attn.flash_attn_kvpacked_func, dense, kv) == expected("kv")
    assert refusal(flash_attn.flash_attn_varlen_func, packed, PACKED, PACKED, *LENGTHS) == expected("k")
    kv = torch.stack([PACKED, PACKED], 1)
    assert refusal(flash_attn.flash_attn_varlen_kvpacked_func, packed, kv, *LENGTHS) == expected("kv")
    assert refusal(behind_flash.flash_attn_varlen_func, packed, PACKED, PACKED, *LENGTHS) == expected("k")
    assert refusal(behind_flash.flash_attn_func, dense, DENSE, DENSE) == expected("k")


def test_one_tensor_of_all_three():
    dtype = "dtype: got torch.int64, expected a floating-point dtype"
    sparse = torch.stack([DENSE] * 3, 2).to_sparse()
    assert refusal(flash_attn.flash_attn_qkvpacked_func, torch.ones(2, 5, 3, 4, 16).long()) == dtype
    assert refusal(flash_attn.flash_attn_qkvpacked_func, sparse).startswith("qkv: got torch.sparse")


def test_options():
    assert refusal(flash_attn.flash_attn_func, DENSE, DENSE, DENSE, softmax_scale=math.nan) == (
        "softmax_scale: got nan, expected a finite number"
    )
    qkv = torch.stack([DENSE] * 3, 2)
    assert refusal(flash_attn.flash_attn_qkvpacked_func, qkv, causal="no") == (
        "causal: got 'no', expected True or False"
    )


MISSPELT = [
    (flash_attn.flash_attn_with_kvcache, "cache_seqlen", "cache_seqlens"),
    (flash_attn.flash_attn_with_kvcache, "softmax_scal", "softmax_scale"),
    (flash_attn.flash_attn_with_kvcache, "seqused_k", "cache_seqlens"),
    (flash_attn.flash_attn_func, "dropout", "dropout_p"),
    (flash_attn.flash_attn_func, "is_causal", "causal"),
    (flash_attn.flash_attn_func, "scale", "softmax_scale"),
    (flash_attn.flash_attn_qkvpacked_func, "window", "window_size"),
    (flash_attn.flash_attn_kvpacked_func, "k", "kv"),
    (flash_attn.flash_attn_varlen_func, "cu_seq_q", "cu_seqlens_q"),
    (flash_attn.flash_attn_varlen_qkvpacked_func, "max_seqlen_q", "max_seqlen"),
    (flash_attn.flash_attn_varlen_kvpacked_func, "Causal", "causal"),
    (behind_flash.flash_attn_varlen_func, "sinks", "s_aux"),
    (directions.flash_attn_forward, "return_softmaxx", "return_softmax"),
    (directions.flash_attn_varlen_backward, "lse", "softmax_lse"),
    (rotary.apply_rotary_emb, "seqlen_offset", "seqlen_offsets"),
    (rotary.apply_rotary, "conjugated", "conjugate"),
]


@pytest.mark.parametrize(("function", "name", "meant"), MISSPELT)
def test_a_misspelt_argument_is_an_error_with_the_name_that_was_meant(function, name, meant):
    with pytest.raises(TypeError) as error:
        function(DENSE, **{name: None})
    found = f"{function.__name__}() got an unexpected keyword argument {name!r}"
    assert str(error.value) == f"{found}; did you mean {meant!r}?"


def test_other_errors_of_a_call_are_pythons_own():
    with pytest.raises(TypeError, match=r"^flash_attn_func\(\) missing 1 required positional argument: 'v'$"):
        flash_attn.flash_attn_func(DENSE, k=DENSE)
    with pytest.raises(TypeError, match=r"^flash_attn_func\(\) got an unexpected keyword argument 'xyz'$"):
        flash_attn.flash_attn_func(DENSE, DENSE, DENSE, xyz=1)

    @attention.naming({"key": "k"})
    def layer(k, **others):
        raise TypeError(f"of the layer: {sorted(others)}")

    with pytest.raises(TypeError, match=r"^of the layer: \['key'\]$"):
        layer(DENSE, key=1)


def test_compiled_a_misspelt_argument_is_named_as_well():
    torch._dynamo.reset()
    step = torch.compile(flash_attn.flash_attn_func, backend="eager")
    with pytest.raises(
        TypeError, match="unexpected keyword argument 'softmax_scal'; did you mean 'softmax_sca"
    ):
        step(DENSE, DENSE, DENSE, softmax_scal=1.0)
    torch._dynamo.reset()

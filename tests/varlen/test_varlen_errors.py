"""Promises of `attnreg.varlen_attn` about wrong input: an error that says what was got and expected."""

import warnings

import pytest
import torch
from support import truth
from support.packed_calls import integers, offsets

import attnreg
from attnreg.errors import InvalidInputError


def meta(tensor):
    return tensor.to("meta")


Q, K = torch.randn(7, 4, 16), torch.randn(7, 4, 16)
CU = offsets(3, 4)
GOOD = {"query": Q, "key": K, "value": K, "cu_seq_q": CU, "cu_seq_k": CU, "max_q": 4, "max_k": 4}
POOL, TABLE, USED = torch.randn(4, 4, 4, 16), integers(0, 1, 2, 3).view(2, 2), integers(5, 7)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's, that the interface may change
    NESTED = torch.nested.nested_tensor([torch.randn(3, 4, 16)])
PAGED = {
    "key": POOL, "value": POOL, "cu_seq_k": None, "max_k": 8, "block_table": TABLE, "seqused_k": USED,
}  # fmt: skip


def keys(x, **options):
    return {"key": x, "value": x, **options}


def cast(dtype):
    return {"query": Q.to(dtype), **keys(K.to(dtype))}


RANK = "3 dimensions (tokens, heads, head_dim)"
ROWS = "as cu_seq_q has length 3"
TOKENS = "expected at most 7, the number of tokens"
HERE = "expected cpu, where the query is"
SLOPES = "expected (4,) or (2, 4), torch.float32"
WINDOW = "(left, right), integers of -1 or more"
# What is wrong, and what is said about it.
BAD = [
    ({"query": Q[0]}, f"query: got shape (4, 16), expected {RANK}"),
    ({"query": Q[None]}, f"query: got shape (1, 7, 4, 16), expected {RANK}"),
    ({"query": Q[0, 0]}, f"query: got shape (16,), expected {RANK}"),
    ({"key": K[None]}, f"key: got shape (1, 7, 4, 16), expected {RANK}"),
    ({"value": K[None]}, f"value: got shape (1, 7, 4, 16), expected {RANK}"),
    ({"key": K[..., :8]}, "head_dim: got 16 for query and 8 for key, expected equal ones"),
    (
        {"value": K[:5]},
        "key and value: got shapes (7, 4, 16) and (5, 4, 16), expected equal ones except for head_dim",
    ),
    (
        {"value": K[:, :2]},
        "key and value: got shapes (7, 4, 16) and (7, 2, 16), expected equal ones except for head_dim",
    ),
    (keys(K[:, :2]), "heads: got 4 for query and 2 for key, expected equal numbers (or enable_gqa=True)"),
    (
        keys(K[:, :3], enable_gqa=True),
        "heads: got 4 for query and 3 for key, expected a multiple of the key's",
    ),
    (
        keys(K[:, :0], enable_gqa=True),
        "heads: got 4 for query and 0 for key, expected a multiple of the key's",
    ),
    (
        {"key": K.half()},
        "dtype: got query torch.float32, key torch.float16, value torch.float32, expected one dtype",
    ),
    (cast(torch.int32), "dtype: got torch.int32, expected a floating-point dtype"),
    (cast(torch.complex64), "dtype: got torch.complex64, expected a floating-point dtype"),
    ({"key": meta(K)}, "device: got query cpu, key meta, value cpu, expected one device"),
    ({"value": meta(K)}, "device: got query cpu, key cpu, value meta, expected one device"),
    ({"cu_seq_q": meta(CU)}, f"cu_seq_q: got a tensor on meta, {HERE}"),
    ({"cu_seq_k": meta(CU)}, f"cu_seq_k: got a tensor on meta, {HERE}"),
    ({"seqused_k": meta(integers(3, 4))}, f"seqused_k: got a tensor on meta, {HERE}"),
    ({"is_causal": "yes"}, "is_causal: got 'yes', expected True or False"),
    ({"is_causal": None}, "is_causal: got None, expected True or False"),
    ({"cu_seq_q": CU.long()}, "cu_seq_q: got torch.int64, expected torch.int32"),
    ({"cu_seq_k": CU.long()}, "cu_seq_k: got torch.int64, expected torch.int32"),
    ({"seqused_k": torch.ones(2)}, "seqused_k: got torch.float32, expected torch.int32"),
    ({"cu_seq_q": CU[None]}, "cu_seq_q: got shape (1, 3), expected 1 dimension"),
    ({"cu_seq_k": CU[0]}, "cu_seq_k: got shape (), expected 1 dimension"),
    ({"cu_seq_q": CU[:0]}, "cu_seq_q: got no element, expected batch + 1 offsets, the first of them 0"),
    ({"cu_seq_k": None}, "cu_seq_k: got None, expected a tensor (None goes with a block_table)"),
    ({"cu_seq_k": offsets(7)}, f"cu_seq_k: got length 2, expected 3, {ROWS}"),
    ({"seqused_k": integers(3, 4, 5)}, f"seqused_k: got length 3, expected 2, {ROWS}"),
    ({"max_q": -1}, "max_q: got -1, expected 0 or more"),
    ({"max_k": -1}, "max_k: got -1, expected 0 or more"),
    ({"max_k": 2**31}, "max_k: got 2147483648, expected less than 2**31"),
    ({"max_q": 3}, "max_q: got 3, expected at least 4, the longest sequence"),
    ({"max_k": 3}, "max_k: got 3, expected at least 4, the longest sequence"),
    ({"max_q": 4.0}, "max_q: got 4.0, expected an integer"),
    ({"max_k": "4"}, "max_k: got '4', expected an integer"),
    ({"cu_seq_q": integers(1, 3, 7)}, "cu_seq_q: got first offset 1, expected 0"),
    ({"cu_seq_k": integers(-1, 3, 7)}, "cu_seq_k: got first offset -1, expected 0"),
    ({"cu_seq_q": integers(0, 4, 3)}, "cu_seq_q: got 3 after 4 at index 2, expected no decrease"),
    ({"cu_seq_k": integers(0, 8, 7), "max_k": 8}, "cu_seq_k: got 7 after 8 at index 2, expected no decrease"),
    ({"cu_seq_q": integers(0, 4, 8)}, f"cu_seq_q: got last offset 8, {TOKENS}"),
    ({"cu_seq_k": integers(0, 4, 8)}, f"cu_seq_k: got last offset 8, {TOKENS}"),
    ({"scale": float("nan")}, "scale: got nan, expected a finite number"),
    ({"scale": float("inf")}, "scale: got inf, expected a finite number"),
    ({"window_size": 4}, f"window_size: got 4, expected {WINDOW}"),
    ({"cu_seq_q": [0, 3, 7]}, "cu_seq_q: got [0, 3, 7], expected a tensor"),
    ({"cu_seq_k": [0, 3, 7]}, "cu_seq_k: got [0, 3, 7], expected a tensor"),
    ({"seqused_k": [3, 4]}, "seqused_k: got [3, 4], expected a tensor"),
    ({"window_size": (-2, 0)}, f"window_size: got (-2, 0), expected {WINDOW}"),
    ({"window_size": (1, 2, 3)}, f"window_size: got (1, 2, 3), expected {WINDOW}"),
    ({"window_size": (1.0, 0)}, f"window_size: got (1.0, 0), expected {WINDOW}"),
    ({"window_size": 1.5}, f"window_size: got 1.5, expected {WINDOW}"),
    ({"window_size": "ab"}, f"window_size: got 'ab', expected {WINDOW}"),
    ({"window_size": (None, 1)}, f"window_size: got (None, 1), expected {WINDOW}"),
    ({"window_size": torch.tensor(4)}, f"window_size: got tensor(4), expected {WINDOW}"),
    *(
        (
            {"softcap": x},
            f"softcap: got {x!r}, expected 0 for none, or a number above 0 that float32 can hold",
        )
        for x in (-1.0, float("nan"), float("inf"), 1e-40, "x", "3", [1.0])
    ),
    ({"alibi_slopes": [1.0]}, "alibi_slopes: got [1.0], expected a tensor"),
    ({"alibi_slopes": torch.ones(3)}, f"alibi_slopes: got shape (3,), torch.float32, {SLOPES}"),
    ({"alibi_slopes": torch.ones(3, 4)}, f"alibi_slopes: got shape (3, 4), torch.float32, {SLOPES}"),
    ({"alibi_slopes": torch.ones(4).double()}, f"alibi_slopes: got shape (4,), torch.float64, {SLOPES}"),
    ({"alibi_slopes": meta(torch.ones(4))}, f"alibi_slopes: got a tensor on meta, {HERE}"),
    (
        {"alibi_slopes": torch.ones(4, requires_grad=True)},
        "alibi_slopes: got a tensor that needs a gradient, expected none: it has none",
    ),
    ({"scale": "x"}, "scale: got 'x', expected a finite number"),
    ({"scale": [1.0]}, "scale: got [1.0], expected a finite number"),
    ({"scale": torch.ones(2)}, "scale: got tensor([1., 1.]), expected a finite number"),
    (
        {"scale": torch.ones((), requires_grad=True)},
        "scale: got a tensor that needs a gradient, expected a number, as it gets none",
    ),
    ({"query": torch.randn(1, 1, 1).to_sparse()}, "query: got torch.sparse_coo, expected torch.strided"),
    ({"query": NESTED}, "query: got a nested tensor, expected torch.strided"),
    (
        PAGED | {"key": K},
        "key: got shape (7, 4, 16), expected 4 dimensions (pages, page size, heads, head_dim)",
    ),
    (PAGED | {"block_table": TABLE[0]}, "block_table: got shape (2,), expected 2 dimensions"),
    (PAGED | {"block_table": TABLE.long()}, "block_table: got torch.int64, expected torch.int32"),
    (PAGED | {"block_table": TABLE.view(4, 1)}, f"block_table: got length 4, expected 2, {ROWS}"),
    (PAGED | {"block_table": meta(TABLE)}, f"block_table: got a tensor on meta, {HERE}"),
]


@pytest.fixture(params=["call cache", "autograd function"])
def front(request, no_graph_trees):
    """Leave the custom op out: torch checks its arguments by their schema first."""
    request.getfixturevalue("compiled_routers" if request.param == "call cache" else "python_routers")


@pytest.mark.parametrize(("wrong", "message"), BAD, ids=[message.partition(",")[0] for _, message in BAD])
def test_bad_input_is_an_error_and_changes_nothing(front, ran, wrong, message):
    for grad in (False, True):
        arguments = GOOD | wrong
        if grad and arguments["query"].is_floating_point():
            arguments |= {"query": arguments["query"].clone().requires_grad_()}
        with pytest.raises(InvalidInputError) as error:
            attnreg.varlen_attn(**arguments)
        assert str(error.value) == message
        assert ran() == {}
    truth.assert_near(attnreg.varlen_attn(**GOOD), truth.varlen(Q, K, K, CU, CU)[0])


@pytest.mark.parametrize("name", ["query", "key", "value", "cu_seq_q", "cu_seq_k"])
def test_a_sparse_tensor_is_an_error_also_after_a_call_of_its_shape_has_run(front, ran, name):
    for _ in range(3):
        attnreg.varlen_attn(**GOOD)
    ran()
    given, message = GOOD | {name: GOOD[name].to_sparse()}, f"^{name}: got torch.sparse_coo, expected torch"
    for call in (attnreg.varlen_attn, torch.ops.attnreg._varlen_attn):
        with pytest.raises(InvalidInputError, match=message):
            call(**given)
    assert ran() == {}
    assert attnreg.stats().failures == ()


def test_slopes_that_need_a_gradient_are_taken_where_none_is_recorded(front):
    slopes = torch.linspace(0.1, 0.4, 4)
    expected = attnreg.varlen_attn(**GOOD, alibi_slopes=slopes)
    assert not torch.equal(expected, attnreg.varlen_attn(**GOOD))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = attnreg.varlen_attn(**GOOD, alibi_slopes=torch.nn.Parameter(slopes))
        assert torch.equal(got, expected)


def test_lists_of_numbers_are_not_shown_in_full():
    with pytest.raises(InvalidInputError, match=r"^query: got \[\[\.\.\.\]\], expected a tensor$"):
        attnreg.varlen_attn([[[1.0] * 99] * 99], K, K, CU, CU, 4, 4)


# Values that only a CPU can check for nothing: a kernel would read past the end, or another sequence.
BAD_VALUES = [
    ({"seqused_k": integers(-1, 2)}, "seqused_k: got -1 at index 0, expected 0 to 3, the number of keys"),
    ({"seqused_k": integers(3, 5)}, "seqused_k: got 5 at index 1, expected 0 to 4, the number of keys"),
    (
        PAGED | {"seqused_k": integers(5, 9)},
        "seqused_k: got 9 at index 1, expected 0 to 8, the number of keys",
    ),
    (PAGED | {"max_k": 6}, "max_k: got 6, expected at least 7, the longest sequence"),
    (
        PAGED | {"block_table": integers(0, 1, 2, 4).view(2, 2)},
        "block_table: got page 4 in row 1, expected 0 to 3",
    ),
    (
        PAGED | {"block_table": integers(0, 1, 2, -1).view(2, 2)},
        "block_table: got page -1 in row 1, expected 0 to 3",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), BAD_VALUES, ids=[message for _, message in BAD_VALUES])
def test_bad_numbers_of_keys_and_pages_are_an_error(ran, wrong, message):
    with pytest.raises(InvalidInputError) as error:
        attnreg.varlen_attn(**GOOD | wrong)
    assert str(error.value) == message
    assert ran() == {}


# ---- offsets of earlier calls

WRITES = {
    "in place": lambda cu, values: cu.copy_(values),
    "by NumPy": lambda cu, values: cu.numpy().__setitem__(slice(None), values.numpy()),
    "by .data": lambda cu, values: cu.data.copy_(values),  # neither of these two raises its version
}


@pytest.mark.parametrize("name", ["cu_seq_q", "cu_seq_k"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_offsets_that_were_written_to_are_checked_again(front, name, write):
    cu = CU.clone()
    arguments = GOOD | {name: cu}
    for _ in range(3):
        attnreg.varlen_attn(**arguments)
    write(cu, integers(0, 3, 9))
    with pytest.raises(InvalidInputError, match=f"{name}: got last offset 9, expected at most 7"):
        attnreg.varlen_attn(**arguments)
    write(cu, integers(0, 4, 7))
    expected = truth.varlen(Q, K, K, arguments["cu_seq_q"], arguments["cu_seq_k"])[0]
    truth.assert_near(attnreg.varlen_attn(**arguments), expected)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"query": Q[:6]}, "cu_seq_q: got last offset 7, expected at most 6"),
        ({"key": K[:6], "value": K[:6]}, "cu_seq_k: got last offset 7, expected at most 6"),
        ({"max_k": 3}, "max_k: got 3, expected at least 4"),
        ({"max_q": 3}, "max_q: got 3, expected at least 4"),
    ],
)
def test_offsets_that_fitted_a_call_are_checked_for_another(front, other, message):
    for _ in range(3):
        attnreg.varlen_attn(**GOOD)
    with pytest.raises(InvalidInputError, match=message):
        attnreg.varlen_attn(**GOOD | other)


# ---- varlen_attn_out

NO_GRADIENT = "varlen_attn_out: got tensors that need a gradient, expected none (use varlen_attn)"
OUT_ERRORS = [
    (Q.new_empty(8, 4, 16), "out: got shape (8, 4, 16), expected (7, 4, 16)"),
    (Q.double(), "out: got dtype torch.float64, expected torch.float32"),
    (meta(Q), "out: got device meta, expected cpu"),
    (Q.clone().requires_grad_(), NO_GRADIENT),
    ([1], "out: got [1], expected a tensor"),
]


@pytest.mark.parametrize(("out", "message"), OUT_ERRORS, ids=["shape", "dtype", "device", "gradient", "list"])
def test_varlen_attn_out_refuses_a_tensor_that_does_not_fit(out, message):
    with pytest.raises(InvalidInputError) as error:
        attnreg.varlen_attn_out(out, **GOOD)
    assert str(error.value) == message


def test_varlen_attn_out_refuses_inputs_that_need_a_gradient(packed):
    given = packed((3, 4))
    with pytest.raises(InvalidInputError) as error:
        attnreg.varlen_attn_out(torch.empty(7, 4, 16), *given)
    assert str(error.value) == NO_GRADIENT
    with torch.no_grad():
        out = attnreg.varlen_attn_out(torch.empty(7, 4, 16), *given)
    truth.assert_near(out, truth.varlen(*given[:5])[0])

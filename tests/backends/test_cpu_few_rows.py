"""The cpu backend's compiled kernel where few rows see a key head, as in decoding: keys are read unpacked."""

import pytest
import torch
from support.cpu_calls import CAUSAL, OPEN, assert_same, dense, ragged, solved
from support.truth import assert_accurate

from attnreg.core.contract.backend import Call
from attnreg.tools.measure.inputs import inputs

DTYPES = ("float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow))
# Keys of one block and of several, and what a vector of keys is short of.
KEYS = (1, 15, 128, 130, 391)

pytestmark = pytest.mark.usefixtures("threads")


def decoding(queries=1, keys=KEYS, **options):
    return ragged((queries,) * len(keys), keys, **options)


@pytest.mark.each_value("rows", "dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 16, 17])
def test_every_number_of_rows_is_accurate(kernels, rows, dtype):
    assert_accurate(kernels, decoding(heads=(2 * rows, 2), dtype=dtype))
    assert_accurate(kernels, decoding(rows, heads=(2, 2), window=CAUSAL, dtype=dtype))


@pytest.mark.each_value("dims", "dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "dims",
    [
        (16, 16),
        (32, 64),
        (80, 48),
        (96, 112),
        (128, 128),
        (256, 256),
        (17, 31),
        (40, 72),
        (100, 130),
        (64, 7),
    ],
)
def test_sizes_of_heads_of_few_rows_are_accurate(kernels, dims, dtype):
    for rows in (1, 8):
        assert_accurate(kernels, decoding(heads=(rows, 1), dims=dims, dtype=dtype))


@pytest.mark.each_value("options", "window", "dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [OPEN, CAUSAL, (150, 0), (3, 2)])
@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 20.0}, {"alibi": True}, {"alibi": True, "softcap": 5.0}, {"grad_lse": True}],
    ids=str,
)
def test_options_of_few_rows_are_accurate(kernels, options, window, dtype):
    """What no row may see is NaN."""
    seen = {"seqused_k": (1, 12, 128, 77, 300), "poison": True}
    for magnitude in (1.0, 6.0):
        given = {"window": window, "dtype": dtype, "magnitude": magnitude} | options
        assert_accurate(kernels, decoding(3, heads=(4, 2), **seen, **given))
    assert_accurate(kernels, decoding(2, heads=(2, 2), **given))


@pytest.mark.parametrize("size", [1, 16, 100])
def test_few_rows_read_pages(kernels, size):
    options = {"seqused_k": (1, 12, 128, 77, 300), "page_size": size, "poison": True}
    for dtype in ("float32", "bfloat16"):
        assert_accurate(kernels, decoding(2, heads=(4, 2), window=(100, 0), dtype=dtype, **options))


@pytest.mark.parametrize("layout", ["bhsd", "last dim strided", "one key head", "offset", "odd rows"])
def test_keys_and_values_of_any_strides_are_read(kernels, layout):
    q, k, v, grad, call = inputs(dense(2, 2, 200, dtype="float32", heads=(4, 4), layout=layout))
    expected = solved(kernels, *(x.contiguous() for x in (q, k, v)), grad, call)
    assert_same(solved(kernels, q, k, v, grad, call), expected)


def last_bits_lost(rows):
    """Return a query, a key and a value whose score is 1, or 0 where the 1 is added to a large number."""
    key = torch.zeros(1, 1, 1, 64)
    key[..., 0], key[..., 1], key[..., 16] = 2.0**24, 1.0, -(2.0**24)
    return torch.ones(1, rows, 1, 64), key, torch.ones(1, 1, 1, 16)


def test_a_backward_rounds_the_scores_of_few_rows_as_their_forward_does(kernels):
    """A weight is exp(score - LSE): of one key 1, however much the score was rounded by."""
    for rows, score in ((1, 1.0), (4, 1.0), (48, 0.0)):
        q, k, v = last_bits_lost(rows)
        out, lse, _, _, grad_v = solved(kernels, q, k, v, torch.ones(1, rows, 1, 16), Call(1.0, rows, 1))
        assert lse.unique().tolist() == [score] and out.unique().tolist() == [1.0]
        assert grad_v.unique().tolist() == [rows]


def test_gradients_of_one_seen_key_are_as_exact_as_its_weight(kernels):
    """Its score is below those that are summed in float64, and has lost several bits."""
    case = decoding(keys=(3, 128), heads=(1, 1), dims=(80, 16), dtype="float32", magnitude=12.0)
    assert_accurate(kernels, case, seed=1922)


@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bits_of_few_rows_do_not_depend_on_the_batch(kernels, threads, dtype):
    q, k, v, _, call = inputs(decoding(2, heads=(4, 2), window=(200, 0), dtype=dtype))
    out, lse = kernels.forward(q, k, v, call)
    offsets = [torch.tensor([0, n], dtype=torch.int32) for n in (2, KEYS[-1])]
    alone = call._replace(max_k=KEYS[-1], cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])
    found = kernels.forward(q[-2:], k[-KEYS[-1] :], v[-KEYS[-1] :], alone)
    assert_same(found, (out[-2:], lse[:, -2:]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_reaches_the_rows_that_see_it_and_no_others(kernels, dtype):
    q, k, v, _, call = inputs(decoding(heads=(4, 2), keys=(40, 300), dtype=dtype))
    expected = kernels.forward(q, k, v, call)
    for tensor in (k, v):
        tensor[100, 1, 3] = torch.nan
    out, lse = kernels.forward(q, k, v, call)
    assert out[1, 2:].isnan().all() and lse[2:, 1].isnan().all()
    assert_same((out[0], out[1, :2], lse[:2]), (expected[0][0], expected[0][1, :2], expected[1][:2]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [17, 20, 24, 40])
def test_an_infinite_score_is_no_nan_where_vectors_overlap(kernels, dim, dtype):
    """The last vector of a row has numbers of the one before it: 0 times infinity isn't 0."""
    q, k, v, _, call = inputs(decoding(heads=(2, 2), keys=(40,), dims=(dim, dim), dtype=dtype))
    for column in range(dim):
        q[..., column], k[3] = -1.0, 0.0
        infinite, hidden = k.clone(), k.clone()
        infinite[3, :, column] = torch.inf  # the score is -inf
        hidden[3, :, column] = 3e4  # of no weight either
        assert_same(kernels.forward(q, infinite, v, call), kernels.forward(q, hidden, v, call))

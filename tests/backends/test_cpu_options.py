"""The cpu backend's compiled kernel with pages, ALiBi slopes and dropout; pages by torch's kernel, too."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from support import truth
from support.cpu_calls import CAUSAL, OPEN, assert_same, dense, ragged, solved
from support.truth import assert_accurate

from attnreg.backends import cpu as cpu_backend
from attnreg.backends import math as math_backend
from attnreg.backends.cpu import compiled, torch_path
from attnreg.backends.cpu.flash import Flash
from attnreg.core.contract.backend import Call, Kernels
from attnreg.core.contract.spec import Device
from attnreg.errors import InvalidInputError, UnsupportedInputError
from attnreg.tools.measure.inputs import inputs

DTYPES = ("float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow))
STATE = torch.tensor([2**63 + 2**40 + 7, 2**35 + 3], dtype=torch.uint64)

pytestmark = pytest.mark.usefixtures("threads")  # tests about threads ask for several themselves


@pytest.fixture
def by_torch():
    """Return torch's kernel as the backend uses it where there is no compiled one."""
    flash = Flash.captured()
    return Kernels(
        functools.partial(torch_path.forward, flash), functools.partial(torch_path.backward, flash)
    )


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


# ---- pages


USED = (37, 0, 130, 64)
PAGED = ragged((20, 5, 130, 1), (40, 9, 130, 90), seqused_k=USED, heads=(4, 2), poison=True)


def paged(case, size):
    """Return the inputs of a case, its keys once in pages and once in one piece without those not counted."""
    q, k, v, grad, call = inputs(case)
    seen = torch.cat([torch.arange(n) + start for n, start in zip(USED, offsets(case.lens_k), strict=False)])
    whole = k[seen], v[seen], call._replace(seqused_k=None, cu_seqlens_k=offsets(USED))
    counts = [-(-n // size) for n in USED]
    # Pages in no order, those that aren't used NaN, and in the table what no call may read.
    order = iter(torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(size)).tolist())
    table = torch.full((len(USED), max(counts) + 1), -7, dtype=torch.int32)
    pools = [x.new_full((sum(counts) + 3, size, *x.shape[1:]), torch.nan) for x in (k, v)]
    rows = []
    for number, (used, count) in enumerate(zip(USED, counts, strict=True)):
        table[number, :count] = torch.tensor([next(order) for _ in range(count)])
        places = torch.arange(used)
        rows.append(table[number, places // size].long() * size + places % size)
    rows = torch.cat(rows)
    for pool, x in zip(pools, whole, strict=False):
        pool.view(-1, *x.shape[1:])[rows] = x
    in_pages = *pools, call._replace(cu_seqlens_k=None, block_table=table)
    return q, grad, whole, in_pages, rows


@pytest.mark.each_value("size", "window", "dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [OPEN, CAUSAL, (20, 3)])
@pytest.mark.parametrize("size", [1, 5, 16, 256])
def test_keys_in_pages_give_the_bits_of_the_same_keys_in_one_piece(kernels, size, window, dtype):
    case = replace(PAGED, dtype=dtype, window=window)
    q, grad, (k, v, call), (k_pages, v_pages, paged_call), rows = paged(case, size)
    expected = solved(kernels, q, k, v, grad, call)
    out, lse, grad_q, *grads = solved(kernels, q, k_pages, v_pages, grad, paged_call)
    assert_same((out, lse, grad_q), expected[:3])
    for found, exact, pages in zip(grads, expected[3:], (k_pages, v_pages), strict=True):
        assert found.shape == pages.shape
        found = found.flatten(0, 1)
        assert torch.equal(found[rows], exact)
        found[rows] = 0.0
        assert not found.any()


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("size", [1, 16])
def test_torchs_kernel_is_given_the_keys_of_pages_in_one_piece(by_torch, size, dtype):
    case = ragged((20, 5, 70), (40, 9, 70), seqused_k=(33, 0, 70), heads=(4, 2), page_size=size, dtype=dtype)
    assert_accurate(by_torch, case)


def test_queries_of_a_dense_call_read_pages_too(kernels, by_torch):
    q, k, v, grad, call = inputs(dense(2, 6, 12, dtype="float32", heads=(4, 2), window=CAUSAL))
    table = torch.tensor([[4, 1, 2], [0, 3, 5]], dtype=torch.int32)
    pools = [x.new_empty(6, 4, *x.shape[2:]) for x in (k, v)]
    for pool, x in zip(pools, (k, v), strict=True):
        pool[table.long()] = x.unflatten(1, (3, 4))
    for some in (kernels, by_torch):
        out, lse, grad_q, *grads = solved(some, q, *pools, grad, call._replace(block_table=table))
        grads = [x[table.long()].flatten(1, 2) for x in grads]
        assert_same((out, lse, grad_q, *grads), solved(some, q, k, v, grad, call))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradients_of_a_page_are_the_sum_over_the_sequences_that_share_it(kernels, by_torch, dtype):
    q, k, v, grad, call = inputs(ragged((3,) * 8, (4,) * 8, dtype=dtype))
    table = torch.tensor([[0, 1]] * 4 + [[2, 0]] * 4, dtype=torch.int32)
    pools = [x[:6].reshape(3, 2, *x.shape[1:]) for x in (k, v)]
    call = call._replace(cu_seqlens_k=None, block_table=table, seqused_k=torch.tensor([4] * 8).int())
    reference = math_backend.BACKEND.load()
    exact = solved(reference, *(x.double() for x in (q, *pools, grad)), call)
    for some in (kernels, by_torch):
        for found, right in zip(solved(some, q, *pools, grad, call), exact, strict=True):
            truth.assert_near(found, right)


@pytest.mark.parametrize("page", [-1, 5])
def test_a_page_that_is_not_there_is_never_read(kernels, by_torch, page):
    q, pages = torch.randn(4, 2, 16), torch.randn(5, 3, 2, 16)
    table = torch.tensor([[0, 4], [page, 0]], dtype=torch.int32)
    call = Call(1.0, 2, 6, cu_seqlens_q=offsets((2, 2)), seqused_k=torch.tensor([6, 3]), block_table=table)
    for some in (kernels, by_torch):
        for work in (
            lambda some=some: some.forward(q, pages, pages, call),
            lambda some=some: some.backward(q, q, pages, pages, q, torch.zeros(2, 4), call),
        ):
            with pytest.raises(InvalidInputError, match=f"block_table: got page {page}, expected 0 to 4"):
                work()
    nothing_of_it = call._replace(seqused_k=torch.tensor([6, 0]))
    assert not kernels.forward(q, pages, pages, nothing_of_it)[0][2:].any()


@pytest.mark.parametrize("used", [(7, 3), (-1, 3)])
def test_more_keys_than_the_pages_of_a_sequence_have_are_an_error(kernels, by_torch, used):
    q, pages = torch.randn(4, 2, 16), torch.randn(5, 3, 2, 16)
    table = torch.zeros(2, 2, dtype=torch.int32)
    call = Call(1.0, 2, 6, cu_seqlens_q=offsets((2, 2)), seqused_k=torch.tensor(used), block_table=table)
    for some in (kernels, by_torch):
        with pytest.raises(InvalidInputError, match=f"seqused_k: got {used[0]} at index 0, expected 0 to 6"):
            some.forward(q, pages, pages, call)


# ---- ALiBi


@pytest.mark.each_value("options", "window", "dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [OPEN, CAUSAL, (30, 10)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": (6, 2), "dims": (40, 40)},
        {"softcap": 2.0},
        {"scale": -0.2},
        {"scale": 0.0},
        {"scale": 1e-33},
        {"magnitude": 6.0},  # scores so large that they are computed once more
        {"grad_lse": True, "seqused_k": (150, 3, 60)},
    ],
    ids=str,
)
def test_slopes_are_accurate(kernels, options, window, dtype):
    lengths = (150, 33, 7), (150, 3, 90)
    assert_accurate(kernels, ragged(*lengths, alibi=True, **options, window=window, dtype=dtype))


@pytest.mark.parametrize("dims", [(64, 64), (80, 80)])
def test_slopes_are_accurate_where_rows_see_distant_keys_alone(kernels, dims):
    assert_accurate(kernels, dense(1, 700, 3, alibi=True, heads=(4, 2), dims=dims, dtype="float32"))
    assert_accurate(kernels, dense(1, 700, 90, alibi=True, heads=(2, 2), dims=dims, dtype="float32"))


def test_a_sequence_has_its_own_slopes_or_those_of_all_in_any_strides(kernels):
    q, k, v, grad, call = inputs(ragged((40, 9, 70), dtype="float32", heads=(4, 2), window=(20, 3)))
    slopes = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) - 0.2  # some below 0
    found = solved(kernels, q, k, v, grad, call._replace(alibi_slopes=slopes.T.contiguous().T))
    for number, (begin, end) in enumerate(((0, 40), (40, 49), (49, 119))):
        alone = call._replace(cu_seqlens_q=offsets((end - begin,)), cu_seqlens_k=offsets((end - begin,)))
        given = [x[begin:end] for x in (q, k, v, grad)]
        expected = solved(kernels, *given, alone._replace(alibi_slopes=slopes[number]))
        part = [x[:, begin:end] if x.dim() == 2 else x[begin:end] for x in found]
        assert_same(part, expected, tolerance=1e-6)
        # Rows see up to 24 keys, of distances that differ: no two heads or sequences give the same.
        assert not torch.equal(expected[0], solved(kernels, *given, alone)[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_weight_whose_products_would_be_subnormal_is_0_and_those_above_are_not(kernels, dtype):
    """With subnormal numbers an instruction takes far longer. The values of three keys show their weights."""
    q = torch.zeros(1, 1, 1, 8, dtype=getattr(torch, dtype))
    k, v = q.expand(1, 3, 1, 8), 2.0**10 * torch.eye(3, 8, dtype=q.dtype)[None, :, None]
    for power, low in ((-49.5, -99.0), (-50.5, -101.0)):
        call = Call(1.0, 1, 3, alibi_slopes=torch.tensor([-power * math.log(2.0)]))
        weights = kernels.forward(q, k, v, call)[0].flatten()[:3].log2() - 10.0
        expected = torch.tensor([low if low > -100.0 else -torch.inf, power, 0.0])
        torch.testing.assert_close(weights.float(), expected, rtol=0.0, atol=0.01)


def test_slopes_that_are_not_of_the_call_are_an_error(kernels):
    q, k, v, _, call = inputs(ragged((4, 5), heads=(4, 2)))
    for shape in ((3,), (3, 4), (2, 3)):
        with pytest.raises(InvalidInputError, match="alibi_slopes: got shape"):
            kernels.forward(q, k, v, call._replace(alibi_slopes=torch.ones(shape)))


# ---- dropout


def weights_kept(some, case, p=0.3, state=STATE, **options):
    """Return which weights of a dense call are kept, (B, H, S_q, S_k): a value of ones shows them."""
    q, k, _, _, call = inputs(case)
    identity = torch.eye(k.size(1), q.size(-1)).to(q.dtype)[None, :, None].expand(k.shape)
    call = call._replace(dropout=p, rng_state=state, **options)
    return some.forward(q, k, identity.contiguous(), call)[0].transpose(1, 2)[..., : k.size(1)] != 0


def of_mask(rows=300, keys=200, dtype="float32", **options):
    return dense(2, rows, keys, heads=(4, 2), dims=(keys, keys), magnitude=0.3, dtype=dtype, **options)


@pytest.mark.each_value("window", "dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [OPEN, CAUSAL, (70, 5)])
def test_the_weights_that_dropout_drops_are_those_that_math_drops(kernels, window, dtype):
    """So the tests of its mask, that it is random and of what it depends, are about this one as well."""
    case, p = of_mask(dtype=dtype, window=window), 0.3
    found = weights_kept(kernels, case, p)
    assert torch.equal(found, weights_kept(math_backend.BACKEND.load(), of_mask(window=window), p))
    seen = weights_kept(kernels, case, 0.0)
    assert abs(found.sum() / seen.sum() - (1 - p)) < 6 * (p * (1 - p) / seen.sum()) ** 0.5


def test_the_mask_of_dropout_does_not_depend_on_threads(kernels):
    """A forward is cut into other tasks then, and a backward into other chunks."""
    case, masks = of_mask(1500, 260, window=(100, 50)), []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        masks.append(weights_kept(kernels, case))
    assert masks[0].any() and torch.equal(masks[1], masks[0]) and torch.equal(masks[2], masks[0])


def test_the_mask_of_a_sequence_depends_on_its_number_and_not_on_other_sequences(kernels):
    q, k, _, _, call = inputs(ragged((90, 33, 90), heads=(2, 2), dims=(90, 90), dtype="float32"))
    identity = torch.cat([torch.eye(n, 90) for n in (90, 33, 90)])[:, None].expand(k.shape)
    call = call._replace(dropout=0.4, rng_state=STATE)
    kept = kernels.forward(q, k, identity, call)[0] != 0
    assert not torch.equal(kept[:90], kept[-90:])
    alone = call._replace(cu_seqlens_q=offsets((90, 0, 0)), cu_seqlens_k=offsets((90, 0, 0)))
    assert torch.equal(
        kernels.forward(*(x[:90].contiguous() for x in (q, k, identity)), alone)[0] != 0, kept[:90]
    )


GRADIENTS = [
    {},
    {"window": (40, 10)},
    {"softcap": 1.0},
    {"grad_lse": True},
    {"alibi": True},
    {"magnitude": 5.0},  # statistics of rows are computed once more
    {"rows": 3},
]


@pytest.mark.each_value("options", "dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", GRADIENTS, ids=str)
def test_results_and_gradients_are_those_of_the_weights_that_are_kept(kernels, options, dtype):
    options = dict(options)
    rows, window = options.pop("rows", 130), options.pop("window", CAUSAL)
    case, p = of_mask(rows, 90, window=window, dtype=dtype), 0.3
    kept = weights_kept(kernels, case, p, window=OPEN)
    given = inputs(dense(2, rows, 90, heads=(4, 2), dims=(90, 90), dtype=dtype, window=window, **options))
    call = given.call._replace(dropout=p, rng_state=STATE)
    found = solved(kernels, *given[:4], call)

    def attended(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in given[:3]]
        rest = {"bias": None, "softcap": call.softcap, "alibi_slopes": call.alibi_slopes}
        factors = kept.to(dtype) / (1 - p)
        with torch.enable_grad():
            out, lse = truth.attend(*leaves, call.scale, call.window, kept=factors, **rest)
            # A row without a key has an LSE of -inf, which has no gradient.
            of_lse = None if call.grad_lse is None else call.grad_lse.to(dtype).where(lse.isfinite(), 0.0)
            total = (out * given.grad_out.to(dtype)).sum()
            if of_lse is not None:
                total = total + (lse.masked_fill(lse.isinf(), 0.0) * of_lse).sum()
            grads = torch.autograd.grad(total, leaves)
        return out.detach(), lse.detach(), *grads

    exact, plain = attended(torch.float64), attended(given.q.dtype)
    for one, right, usual in zip(found, exact, plain, strict=True):
        finite = right.isfinite()
        assert torch.equal(one.isfinite(), finite)
        error, allowed = ((x.double() - right)[finite].abs().max() for x in (one, usual))
        rounding = torch.finfo(one.dtype).eps * right[finite].abs().max()
        assert error <= 2 * allowed + rounding, (float(error), float(allowed))


@pytest.mark.parametrize("window", [OPEN, (0, 0)])
def test_with_one_key_the_scores_have_no_gradient_whatever_is_dropped(kernels, window):
    """Plain PyTorch operations give exactly 0, and a delta of the rounded output would not."""
    rows = 300 if window == (0, 0) else 1
    q, k, v, grad, call = inputs(ragged((rows, 70), (rows, 1), dtype="float32", window=window))
    call = call._replace(dropout=0.3, rng_state=STATE)
    out, _, grad_q, grad_k, grad_v = solved(kernels, q, k, v, grad, call)
    assert (out != 0).any() and (grad_v != 0).any()
    assert max(float(x.abs().max()) for x in (grad_q, grad_k)) < 1e-8


def test_a_row_with_little_weight_in_another_block_of_keys_keeps_what_that_adds(kernels):
    """Gradients of scores add up to 0 over all keys, not over those of a block with nearly all the weight."""
    k, v, p = torch.zeros(1, 65, 1, 16), torch.zeros(1, 65, 1, 16), 2.0**-24
    k[0, 0, 0, 0], k[0, 64, 0, 1], v[0, 64, 0, 0] = 14.0, 3.0, 1000.0  # the last key is in the second block
    q, grad = torch.zeros(1, 1, 1, 16), torch.ones(1, 1, 1, 16)
    q[..., 0] = 1.0
    call = Call(1.0, 1, 65, dropout=p, rng_state=STATE)  # nothing is dropped
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        right = torch.autograd.grad(truth.attend(*exact, 1.0)[0].sum(), exact)
    for found, one in zip(solved(kernels, q, k, v, grad, call)[2:], right, strict=True):
        torch.testing.assert_close(found.double(), one, rtol=1e-3, atol=1e-6)


def test_the_lse_is_that_of_all_weights_and_dropping_all_gives_zeros(kernels):
    q, k, v, grad, call = inputs(ragged((40, 70), dtype="float32"))
    plain = kernels.forward(q, k, v, call)
    for p in (0.5, 1.0 - 2.0**-40, 1.0):
        out, lse, *grads = solved(kernels, q, k, v, grad, call._replace(dropout=p, rng_state=STATE))
        assert torch.equal(lse, plain[1])
        assert not torch.equal(out, plain[0])
        assert any(x.any() for x in (out, *grads)) is (p == 0.5)


def test_dropout_needs_a_random_state(kernels):
    q, k, v, _, call = inputs(ragged((4, 5)))
    for state, message in ((None, "got None with dropout_p 0.1"), (STATE[:1], "expected a seed and an")):
        with pytest.raises(InvalidInputError, match=f"rng_state: .*{message}"):
            kernels.forward(q, k, v, call._replace(dropout=0.1, rng_state=state))


def test_gradients_with_all_options_do_not_depend_on_the_number_of_threads(kernels):
    q, k, v, grad, call = inputs(ragged((900, 30), (600, 70), dtype="float32", alibi=True, softcap=3.0))
    call = call._replace(dropout=0.3, rng_state=STATE)
    out, lse = kernels.forward(q, k, v, call)
    found = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        found.append(kernels.backward(grad, q, k, v, out, lse, call))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


# ---- what is refused


def reasons(monkeypatch, library, **options):
    monkeypatch.setattr(compiled, "load", lambda: library)
    case = dense(1, 8, dtype=options.pop("dtype", "float32"), **options)
    return cpu_backend.BACKEND.refuses(case.spec(Device("cpu")))


@pytest.mark.parametrize(
    ("option", "name"), [({"alibi": True}, "alibi_slopes"), ({"dropout": 0.1}, "dropout_p")]
)
def test_without_the_compiled_kernel_the_reason_says_what_to_do(monkeypatch, cpu_kernel, option, name):
    assert reasons(monkeypatch, cpu_kernel, **option) == ()
    needs = f"{name} needs the compiled kernel, which `attnreg build` makes"
    assert reasons(monkeypatch, None, **option) == (needs,)
    (wrong,) = reasons(monkeypatch, cpu_kernel, dtype="float64", **option)
    assert wrong == f"dtype must be float32, bfloat16 or float16 with {name}, got float64"
    (bias,) = reasons(monkeypatch, cpu_kernel, bias="additive", **option)
    assert bias == f"attn_bias must be None with {name}, got a tensor"


def test_a_softcap_that_slopes_can_not_be_divided_by_is_refused(monkeypatch, cpu_kernel):
    (wrong,) = reasons(monkeypatch, cpu_kernel, alibi=True, softcap=2e-29)
    assert wrong == "softcap must be 2**-64 or more with alibi_slopes, got 2e-29"
    assert reasons(monkeypatch, cpu_kernel, alibi=True, softcap=2.0**-64) == ()


@pytest.mark.parametrize("option", [{"alibi_slopes": torch.ones(2)}, {"dropout": 0.1, "rng_state": STATE}])
def test_torchs_kernel_declines_what_it_has_no_argument_for(by_torch, option):
    q, k, v, grad, call = inputs(dense(1, 8, dtype="float32", heads=(2, 2)))
    out, lse = by_torch.forward(q, k, v, call)
    with pytest.raises(UnsupportedInputError, match="for torch's kernel, got"):
        by_torch.forward(q, k, v, call._replace(**option))
    with pytest.raises(UnsupportedInputError, match="for torch's kernel, got"):
        by_torch.backward(grad, q, k, v, out, lse, call._replace(**option))

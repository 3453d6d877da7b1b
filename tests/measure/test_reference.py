"""Promises of the float64 reference: it is attention as its formula says, number by number."""

import math

import pytest
import torch

from attnreg.tools.measure import Case, inputs
from attnreg.tools.measure.cases import DTYPES
from attnreg.tools.measure.reference import attend, attention


def by_the_formula(q, k, v, scale, window, bias=None, slopes=None):
    """Return output and LSE of one head, (S, D), by loops over Python's own floats."""
    rows, lse, shift = [], [], len(k) - len(q)
    for i, query in enumerate(q.tolist()):
        scores = {}
        for j, key in enumerate(k.tolist()):
            distance = j - i - shift
            if (window[0] >= 0 and distance < -window[0]) or (window[1] >= 0 and distance > window[1]):
                continue
            added = 0.0 if bias is None else float(bias[i, j])
            if added > -math.inf:
                score = scale * math.fsum(a * b for a, b in zip(query, key, strict=True))
                scores[j] = score + added - (slopes or 0.0) * abs(distance)
        total = math.fsum(map(math.exp, scores.values()))
        lse.append(math.log(total) if total else -math.inf)
        weights = {j: math.exp(score) / total for j, score in scores.items()}
        columns = v.T.tolist()
        rows.append([math.fsum(w * column[j] for j, w in weights.items()) for column in columns])
    return torch.tensor(rows, dtype=torch.float64), torch.tensor(lse, dtype=torch.float64)


@pytest.mark.pairwise("options", "lens", "window")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 1), (0, 0)], ids=str)
@pytest.mark.parametrize("lens", [(5, 5), (3, 8), (8, 3)], ids=str)
@pytest.mark.parametrize("options", ["plain", "bias", "mask", "alibi"])
def test_output_and_lse_are_those_of_the_formula(window, lens, options):
    generator = torch.Generator().manual_seed(1)
    draw = {"generator": generator, "dtype": torch.float64}
    q, k, v = torch.randn(2, lens[0], 4, 3, **draw), *(torch.randn(2, lens[1], 2, d, **draw) for d in (3, 2))
    bias = torch.randn(2, 4, *lens, **draw) if options == "bias" else None
    if bias is not None:
        bias[0, :, 1] = -torch.inf
    mask = torch.rand(2, 4, *lens, generator=generator) > 0.3 if options == "mask" else None
    slopes = torch.tensor([0.5, 0.25, 0.1, 1.0]) if options == "alibi" else None
    out, lse = attend(q, k, v, 0.7, window, bias=mask if bias is None else bias, alibi_slopes=slopes)
    added = torch.where(mask, 0.0, -torch.inf) if mask is not None else bias
    for batch in range(2):
        for head in range(4):
            expected = by_the_formula(
                *(q[batch, :, head], k[batch, :, head // 2], v[batch, :, head // 2], 0.7, window),
                None if added is None else added[batch, head],
                None if slopes is None else float(slopes[head]),
            )
            torch.testing.assert_close(out[batch, :, head], expected[0])
            torch.testing.assert_close(lse[batch, head], expected[1])


def test_a_softcap_bounds_scaled_scores_before_the_bias():
    q, k, v = torch.randn(3, 1, 6, 2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bias = torch.linspace(-9, 9, 6, dtype=torch.float64).expand(6, 6)
    scores = 1.5 * torch.tanh(torch.einsum("bqhd,bkhd->bhqk", q, k) * 3.0 / 1.5)
    out, lse = attend(q, k, v, 3.0, bias=bias, softcap=1.5)
    torch.testing.assert_close(lse, (scores + bias).logsumexp(-1))
    torch.testing.assert_close(out, torch.einsum("bhqk,bkhd->bqhd", (scores + bias).softmax(-1), v))


def test_gradients_are_those_of_finite_differences():
    draw = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    q, k, v = (torch.randn(1, n, 2, 3, **draw).requires_grad_() for n in (4, 3, 3))
    assert torch.autograd.gradcheck(lambda *x: attend(*x, 0.5, (-1, 0))[0], (q, k, v))


def test_some_rows_are_those_of_all_rows():
    draw = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    q, k = torch.randn(1, 9, 2, 3, **draw), torch.randn(1, 7, 2, 3, **draw)
    out, lse = attend(q, k, k, 0.5, (2, 1))
    some, some_lse = attend(q[:, 4:7], k, k, 0.5, (2, 1), first_row=4, len_q=9)
    torch.testing.assert_close(some, out[:, 4:7])
    torch.testing.assert_close(some_lse, lse[..., 4:7])


def test_of_packed_sequences_each_is_attended_alone_and_unused_rows_are_zero():
    case = Case(
        name="any", lens_q=(3, 0, 5, 3), lens_k=(4, 2, 5, 4), varlen=True, tail=2, poison=True,
        window=(-1, 0), heads=(4, 2), dims=(8, 8), dtype="float32",
    )  # fmt: skip
    given = inputs(case)
    found = attention(case, given, torch.float64)
    for q0, q1, k0, k1 in ((0, 3, 0, 4), (3, 8, 6, 11), (8, 11, 11, 15)):
        parts = (given.q[q0:q1], given.k[k0:k1], given.v[k0:k1])
        q, k, v = (x[None].double().requires_grad_() for x in parts)
        out, lse = attend(q, k, v, given.call.scale, (-1, 0))
        torch.testing.assert_close(found.out[q0:q1], out[0].detach())
        torch.testing.assert_close(found.lse[:, q0:q1], lse[0].detach())
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), given.grad_out[None, q0:q1].double())
        for got, wanted, rows in (
            (found.dq, dq, (q0, q1)),
            (found.dk, dk, (k0, k1)),
            (found.dv, dv, (k0, k1)),
        ):
            torch.testing.assert_close(got[slice(*rows)], wanted[0])
    assert not found.out[11:].any() and not found.dq[11:].any() and not found.dk[15:].any()
    assert not found.dk[4:6].any() and bool((found.lse[:, 11:] == -torch.inf).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_depend_on_the_seed_alone(dtype):
    case = Case(name="any", lens_q=(3, 5), lens_k=(4, 5), varlen=True, heads=(4, 2), dtype=dtype)
    one, same, other = inputs(case), inputs(case), inputs(case, seed=1)
    for x, y, z in zip(one[:4], same[:4], other[:4], strict=True):
        assert torch.equal(x, y) and not torch.equal(x, z)
        assert str(x.dtype) == f"torch.{dtype}"
    assert one.call.cu_seqlens_q.tolist() == [0, 3, 8] and one.call.cu_seqlens_k.tolist() == [0, 4, 9]


def test_offsets_are_one_tensor_where_the_case_says_so():
    lens = {"lens_q": (3, 5), "lens_k": (3, 5), "varlen": True}
    one, two = inputs(Case(name="a", **lens, one_cu_seqlens=True)).call, inputs(Case(name="a", **lens)).call
    assert one.cu_seqlens_q is one.cu_seqlens_k
    assert two.cu_seqlens_q is not two.cu_seqlens_k and torch.equal(two.cu_seqlens_q, two.cu_seqlens_k)

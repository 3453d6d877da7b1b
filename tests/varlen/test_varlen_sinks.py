"""Promises of `attnreg.varlen_attn` about sinks: one more score for each head, without a value."""

import dataclasses

import pytest
import torch
from support import truth
from support.packed_calls import (
    CAUSAL,
    LENGTHS_K,
    LENGTHS_Q,
    LSE,
    WITHOUT_AN_OP,
    integers,
    random_like,
    total,
)
from support.sinks import assert_accurate, by_the_formula
from torch._dynamo import compiled_autograd

import attnreg
from attnreg.backends.cpu import compiled
from attnreg.errors import InvalidInputError, UnsupportedInputError

HEADS = 4
SINKS = torch.tensor([0.25, -1.0, 4.0, 0.0])


def assert_right(given, sinks, attend=attnreg.varlen_attn, precision=None, **options):
    """Call with sinks and compare output, LSE and all gradients with the formula, by both results."""
    meant = {"causal": options.get("window_size") == CAUSAL, "softcap": options.get("softcap", 0.0)}
    precision = precision or given[0].dtype
    results = attend(*given, sinks=sinks, return_aux=LSE, **options)
    expected = by_the_formula(*given[:5], sinks, **meant)
    for got, wanted in zip(results, expected, strict=True):
        truth.assert_near(got, wanted, precision)
    inputs = [*given[:3], sinks]
    for of in ((0,), (1,), (0, 1)):
        grads = [random_like(results[n]) for n in of]
        finite = [torch.where(expected[n].isfinite(), expected[n], 0.0) for n in of]
        found, right = (
            torch.autograd.grad(
                chosen,
                inputs,
                [g.to(x.dtype) for g, x in zip(grads, chosen, strict=True)],
                retain_graph=True,
                materialize_grads=True,
            )
            for chosen in ([results[n] for n in of], finite)
        )
        for one, other in zip(found, right, strict=True):
            truth.assert_near(one, other.double(), precision)
    return results


def drawn(dtype=torch.float32):
    return SINKS.to(dtype, copy=True).requires_grad_()


@pytest.mark.each_value("front", "options")
@pytest.mark.parametrize("options", [{}, {"window_size": CAUSAL}, {"softcap": 0.8}], ids=str)
def test_output_lse_and_all_gradients_are_right_at_every_repeated_call(front, packed, options):
    for _ in range(3):
        assert_right(packed(LENGTHS_Q, LENGTHS_K), drawn(), **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype_is_right_and_sinks_may_have_another(front, packed, dtype):
    given = packed(LENGTHS_Q, LENGTHS_K, dtype=dtype)
    # The op returns the LSE in float32, as torch's own does.
    precision = torch.float32 if (front, dtype) == ("custom op", torch.float64) else dtype
    out, _ = assert_right(given, drawn(dtype), precision=precision)
    sinks = drawn()
    other = attnreg.varlen_attn(*given, sinks=sinks)
    assert other.dtype == dtype and torch.equal(out, other)
    (grad,) = torch.autograd.grad(other.sum(), sinks)
    assert grad.dtype == torch.float32 and grad.all()


@pytest.mark.each_value("lengths", "kernel", "dtype", "backend")
@pytest.mark.parametrize("backend", ["math", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 12.0], ids=["small scores", "large scores"])
@pytest.mark.parametrize("kernel", ["compiled", "torch's"])
@pytest.mark.parametrize("lengths", [(5, 1, 8, 3), (150, 70)], ids=["few keys", "many keys"])
def test_every_backend_that_runs_here_serves_them_by_its_own_backward(
    packed, ran, backend, dtype, scale, kernel, lengths, cpu_kernel, monkeypatch
):
    """Also where a backward of the cpu backend computes LSE and output anew, as they are rounded too much."""
    monkeypatch.setattr(compiled, "load", lambda: cpu_kernel if kernel == "compiled" else None)
    query, key, value, *rest = packed(lengths, lengths, dtype=dtype)
    inputs = query.detach() * scale, key, value, (SINKS * scale).to(dtype)

    def attend(query, key, value, sinks, *rest):
        options = {"window_size": CAUSAL, "backend": backend, "return_aux": LSE}
        return attnreg.varlen_attn(query, key, value, *rest, sinks=sinks, **options)

    assert_accurate(attend, inputs, *rest, causal=True)
    assert ran() == {backend: (1, 1)}


def test_shared_heads_and_a_paged_cache_have_them(packed):
    query, _, _, cu_q, _, max_q, _ = packed((5, 1), grad=False)
    pools = torch.randn(2, 4, 4, 2, 16, generator=torch.Generator().manual_seed(3))
    table, used = integers(2, 0, 1, 3).view(2, 2), (7, 4)
    options = {"seqused_k": integers(*used), "block_table": table, "enable_gqa": True, "sinks": SINKS}
    out, lse = attnreg.varlen_attn(query, *pools, cu_q, None, max_q, 8, return_aux=LSE, **options)
    flat = [torch.cat([x[row].flatten(0, 1)[:n] for row, n in zip(table, used, strict=True)]) for x in pools]
    flat = [x.repeat_interleave(2, dim=1) for x in flat]
    expected = by_the_formula(query, *flat, cu_q, integers(0, *used).cumsum(0), SINKS)
    truth.assert_near(out, expected[0])
    truth.assert_near(lse, expected[1])


@pytest.mark.parametrize("of_row", [torch.nan, torch.inf, 1.0])
def test_rows_that_see_no_key_stay_as_they_are_and_give_sinks_no_gradient(front, packed, of_row):
    given, sinks = packed((6, 3), (2, 0)), drawn()
    out, lse = attnreg.varlen_attn(*given, window_size=CAUSAL, sinks=sinks, return_aux=LSE)
    unseeing = lse == -torch.inf
    assert unseeing[0].tolist() == [True] * 4 + [False] * 2 + [True] * 3
    assert not out[unseeing[0]].any()
    grads = []
    for value in (of_row, 0.0):
        of_out = random_like(out).masked_fill(unseeing.mT[..., None], value)
        of_lse = random_like(lse).masked_fill(unseeing, value)
        grads.append(
            torch.autograd.grad((out, lse), (*given[:3], sinks), (of_out, of_lse), retain_graph=True)
        )
    assert all(map(torch.equal, *grads))


def test_sinks_of_minus_infinity_are_none(front, packed):
    given = packed((6, 3), (2, 0))
    sinks = torch.full((HEADS,), -torch.inf, requires_grad=True)
    plain = attnreg.varlen_attn(*given, window_size=CAUSAL, return_aux=LSE)
    results = attnreg.varlen_attn(*given, window_size=CAUSAL, sinks=sinks, return_aux=LSE)
    assert all(map(torch.equal, plain, results))
    of_both = [random_like(x).where(x.isfinite(), 0.0) for x in plain]
    grads = torch.autograd.grad(results, (*given[:3], sinks), of_both)
    wanted = torch.autograd.grad(plain, given[:3], of_both)
    torch.testing.assert_close(grads, (*wanted, torch.zeros(HEADS)))


@pytest.mark.parametrize("backend", ["math", "cpu"])
@pytest.mark.parametrize("sink", [torch.inf, 1e7, 1e6])
def test_a_sink_that_takes_all_of_the_weight_leaves_no_gradient(packed, backend, sink):
    """Where rounding of such an LSE is more than 1, a share of 0 isn't taken for all of the weight."""
    query, key, value, *rest = packed((3, 5), (4, 9))
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    out = attnreg.varlen_attn(*leaves, *rest, backend=backend, sinks=torch.full(query.shape[1:2], sink))
    assert not out.any()
    for grad in torch.autograd.grad(out, leaves, torch.ones_like(out)):
        assert not grad.any()


def test_only_sinks_that_need_a_gradient_take_no_backward_of_a_kernel(front, packed, ran):
    given, sinks = packed(LENGTHS_Q, LENGTHS_K, grad=False), drawn()
    out = attnreg.varlen_attn(*given, sinks=sinks)
    grad = random_like(out)
    (found,) = torch.autograd.grad(out, sinks, grad)
    (wanted,) = torch.autograd.grad(by_the_formula(*given[:5], sinks)[0], sinks, grad.double())
    truth.assert_near(found, wanted.double(), torch.float32)
    assert total(ran()) == (1, 0)


def test_a_compiled_function_gives_the_same(packed):
    torch._dynamo.reset()
    assert_right(
        packed(LENGTHS_Q, LENGTHS_K),
        drawn(),
        attend=torch.compile(attnreg.varlen_attn, backend="aot_eager", fullgraph=True),
    )
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@WITHOUT_AN_OP
def test_compiled_autograd_gives_the_same(front, packed):
    torch._dynamo.reset()
    given, sinks = packed((100, 60)), drawn()  # more rows than are computed at a time
    inputs = (*given[:3], sinks)
    out = attnreg.varlen_attn(*given, sinks=sinks)
    grad = random_like(out)
    wanted = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        torch.autograd.backward(out, grad)
    torch._dynamo.reset()
    for leaf, other in zip(inputs, wanted, strict=True):
        truth.assert_near(leaf.grad, other.double(), torch.float32)


@pytest.mark.parametrize("loss", [torch.square, torch.clone], ids=["square", "linear"])
def test_gradients_of_gradients_are_an_error(front, packed, loss):
    given, sinks = packed(LENGTHS_Q, LENGTHS_K), drawn()
    out = attnreg.varlen_attn(*given, sinks=sinks)
    if front == "custom op":
        pytest.skip("of the sinks alone there it is PyTorch's own operations, which have them")
    (grad,) = torch.autograd.grad(loss(out).sum(), sinks, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiate twice|not implemented"):
        torch.autograd.grad(grad.sum(), sinks)


def test_a_backend_without_a_gradient_of_the_lse_runs_the_backward_too(front, packed, fake, ran):
    mine = fake("mine", grad_lse=False)
    with attnreg.register_backend(mine.backend):
        given, sinks = packed(LENGTHS_Q, LENGTHS_K), drawn()
        for _ in range(3):
            out, lse = attnreg.varlen_attn(*given, sinks=sinks, return_aux=LSE)
            expected = by_the_formula(*given[:5], sinks)
            grad, inputs = random_like(out), (*given[:3], sinks)
            found = torch.autograd.grad(out, inputs, grad, retain_graph=True)
            for one, other in zip(
                found, torch.autograd.grad(expected[0], inputs, grad.double()), strict=True
            ):
                truth.assert_near(one, other.double(), torch.float32)
            assert ran() == {"mine": (1, 1)}
            truth.assert_near(lse, expected[1])
        with (
            pytest.raises(UnsupportedInputError, match="no gradient of the LSE"),
            attnreg.use_backend("mine"),
        ):
            lse = attnreg.varlen_attn(*given, sinks=sinks, return_aux=LSE, backend="mine")[1]
            lse.sum().backward()


def test_dropout_and_sinks_go_together(packed, python_routers):
    """The sink takes its share of the weights before some of them are dropped."""
    given, sinks = packed(LENGTHS_Q, LENGTHS_K), drawn()
    results = []
    for options in ({}, {"sinks": sinks}):
        torch.manual_seed(5)
        results.append(attnreg.varlen_attn(*given, dropout_p=0.4, backend="math", return_aux=LSE, **options))
    (plain, lse), (out, _) = results
    share = (lse - sinks[:, None]).sigmoid()
    truth.assert_near(out, (plain * share.mT[..., None]).double())
    grad, inputs = random_like(out), (*given[:3], sinks)
    wanted = torch.autograd.grad((plain * share.mT[..., None]), inputs, grad)
    for one, other in zip(torch.autograd.grad(out, inputs, grad), wanted, strict=True):
        truth.assert_near(one, other.double(), torch.float32)


@pytest.mark.parametrize("counts", [True, False])
def test_explain_decides_as_without_them_and_says_what_counts_them(packed, fake, counts):
    mine = fake("mine", grad_lse=False, sinks=counts, backward=False).backend
    with attnreg.register_backend(fake("other").backend), attnreg.register_backend(mine):
        given = packed(LENGTHS_Q, LENGTHS_K, grad=False)
        found, plain = (attnreg.explain(*given, sinks=sinks) for sinks in (SINKS, None))
        both = attnreg.explain(dataclasses.replace(plain.spec, sinks=True, needs_backward=True))
    assert found.backend == plain.backend == "mine"
    assert (both.backend, both.backward.backend) == ("mine", "other")
    assert " · sinks" in str(found) and "sinks" not in str(plain)
    by_kernel = "forward on mine: sinks counted by the kernel, "
    by_kernel += "where every row is known to see a key and the program doesn't get the LSE"
    rescaled = "forward on mine: results are rescaled for the sinks"
    said = [note for note in found.notes if "sinks" in note]
    assert said == [by_kernel if counts else rescaled]
    said.append("backward on other: results are rescaled for the sinks")
    assert [note for note in both.notes if "sinks" in note] == said


@pytest.mark.parametrize(
    ("sinks", "got"),
    [
        (torch.zeros(3), "shape (3,), torch.float32 on cpu"),
        (torch.zeros(HEADS, 1), "shape (4, 1), torch.float32 on cpu"),
        (torch.zeros(HEADS).int(), "shape (4,), torch.int32 on cpu"),
        (torch.zeros(HEADS, device="meta"), "shape (4,), torch.float32 on meta"),
    ],
    ids=str,
)
def test_sinks_that_do_not_fit_are_an_error(packed, ran, sinks, got):
    with pytest.raises(InvalidInputError) as error:
        attnreg.varlen_attn(*packed(LENGTHS_Q, LENGTHS_K), sinks=sinks)
    assert str(error.value) == (
        f"sinks: got {got}, expected (4,), floating-point, on cpu: one for each head of the query"
    )
    with pytest.raises(InvalidInputError, match=r"sinks: got \[1.0\], expected a tensor"):
        attnreg.varlen_attn(*packed(LENGTHS_Q, LENGTHS_K), sinks=[1.0])
    assert ran() == {}


@pytest.mark.parametrize("backend", ["cpu", "math"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_16_bit_output_is_rounded_once_more_where_the_kernel_does_not_count_the_sinks(backend, dtype):
    tokens, half_step = 120, torch.finfo(dtype).eps / 2
    query, key, value = (torch.randn(tokens, HEADS, 32).to(dtype) for _ in range(3))
    offsets = integers(0, 50, tokens)
    call = query, key, value, offsets, offsets, 70, 70
    options = {"window_size": CAUSAL, "backend": backend}
    plain, lse = attnreg.varlen_attn(*call, return_aux=LSE, **options)
    out = attnreg.varlen_attn(*call, sinks=SINKS, **options)
    share = (lse - SINKS[:, None]).sigmoid().mT[..., None]
    assert torch.equal(out, (plain.float() * share).to(dtype))
    wide = [x.double() for x in (query, key, value)]
    none = torch.full((HEADS,), -torch.inf)
    errors = [
        (results.double() - by_the_formula(*wide, offsets, offsets, sinks, causal=True)[0]).abs()
        for results, sinks in ((plain, none), (out, SINKS))
    ]
    # One rounding more; the rest is for the LSE's own.
    assert (errors[1] <= share * errors[0] + half_step * out.double().abs() * 1.01 + 1e-6).all()
    assert errors[1].square().mean() > 1.5 * (share * errors[0]).square().mean()

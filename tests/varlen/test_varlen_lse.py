"""Promises of `attnreg.varlen_attn` about the LSE as a result that has a gradient."""

import pytest
import torch
from support import flash, truth
from support.packed_calls import CAUSAL, LENGTHS_K, LENGTHS_Q, LSE, WITHOUT_AN_OP, offsets, random_like, total
from torch._dynamo import compiled_autograd

import attnreg
from attnreg.backends.cpu import compiled
from attnreg.errors import InvalidInputError, UnsupportedInputError

# Which results a loss is made of.
LOSSES = {"both": (0, 1), "the LSE alone": (1,), "the output alone": (0,)}


def gradients(results, inputs, of, grads=None):
    """Return the gradients of the inputs by some of the results."""
    chosen = [results[n] for n in of]
    grads = [random_like(x).to(x.dtype) for x in chosen] if grads is None else grads
    return torch.autograd.grad(chosen, inputs, grads, materialize_grads=True, retain_graph=True)


def without_unseen(lse):
    """Return an LSE whose rows that see no key give no gradient, not NaN, in the reference."""
    return torch.where(lse.isfinite(), lse, 0.0)


def assert_right(given, of, attend=attnreg.varlen_attn, dtype=None, **options):
    """Call, compare the gradients by some of the results with float64, and return them."""
    results = attend(*given, return_aux=LSE, **options)
    options = {
        {"window_size": "window"}.get(name, name): x for name, x in options.items() if name != "backend"
    }
    out, lse = truth.varlen(*given[:5], **options)
    wanted = gradients((out, without_unseen(lse)), given[:3], of)
    found = gradients(results, given[:3], of)
    for one, other in zip(found, wanted, strict=True):
        truth.assert_near(one, other.double(), dtype)
    return found


@pytest.fixture
def refusing(fake):
    """Register a backend "mine" that can't be told a gradient of the LSE, and return what it is given."""
    recorder = fake("mine", grad_lse=False)
    with attnreg.register_backend(recorder.backend):
        yield recorder


@pytest.fixture
def in_columns(fake):
    """Register a backend "mine" that is given that gradient in columns; return what its backward is given."""
    seen, limits = [], {"grad_lse": False, "delta_from_out": True}
    with attnreg.register_backend(fake("mine", load=lambda: flash.kernels(seen), **limits).backend):
        yield seen


@pytest.mark.pairwise("front", "options", "of")
@pytest.mark.parametrize("of", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("options", [{}, {"window_size": CAUSAL}, {"softcap": 0.8}], ids=str)
def test_the_lse_has_a_gradient_at_every_repeated_call(front, packed, options, of):
    for _ in range(3):
        assert_right(packed(LENGTHS_Q, LENGTHS_K), of, **options)


@pytest.mark.parametrize("backend", ["math", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_backend_that_runs_here_gives_it(front, packed, ran, dtype, backend):
    if backend == "cpu" and compiled.load() is None:
        with pytest.raises(UnsupportedInputError, match="grad_lse needs the compiled kernel"):
            assert_right(packed(LENGTHS_Q, LENGTHS_K, dtype=dtype), (0, 1), backend=backend)
        return
    assert_right(packed(LENGTHS_Q, LENGTHS_K, dtype=dtype), (0, 1), backend=backend)
    assert ran() == {backend: (1, 1)}


def test_rows_that_see_no_key_take_no_gradient_of_their_lse(front, packed):
    given = packed((6, 3), (2, 0))
    _, lse = attnreg.varlen_attn(*given, window_size=CAUSAL, return_aux=LSE)
    unseeing = lse == -torch.inf
    assert 0 < unseeing.sum() < unseeing.numel()
    grad = random_like(lse)
    wanted = torch.autograd.grad(lse, given[:3], grad.masked_fill(unseeing, 0.0), retain_graph=True)
    found = torch.autograd.grad(lse, given[:3], grad.masked_fill(unseeing, torch.nan))
    assert all(map(torch.equal, found, wanted))


def test_a_gradient_that_is_no_plain_memory_is_read_as_its_values(front, packed):
    given = packed(LENGTHS_Q, LENGTHS_K)
    results = attnreg.varlen_attn(*given, return_aux=LSE)
    ones = torch.ones_like(results[1])
    negative = torch.complex(torch.zeros_like(ones), ones).conj().imag
    assert negative.is_neg()
    for lazy, plain in ((negative, -ones), (torch._efficientzerotensor(ones.shape), 0 * ones)):
        found = gradients(results, given[:3], (1,), [lazy])
        assert all(map(torch.equal, found, gradients(results, given[:3], (1,), [plain])))


@pytest.mark.pairwise("front", "options", "of")
@pytest.mark.parametrize("of", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize(
    "options", [{}, {"window_size": CAUSAL}, {"softcap": 0.8}, {"backend": "mine"}], ids=str
)
def test_a_backend_that_is_given_it_in_columns_runs_such_a_backward(
    front, packed, in_columns, ran, options, of
):
    ran()
    for _ in range(3):
        assert_right(packed(LENGTHS_Q, LENGTHS_K), of, **options)
        assert not attnreg.stats().fallbacks
        assert ran() == {"mine": (1, 1)}
    dims = {x.shape[-1] for given in in_columns for x in given[:5]}
    assert dims == ({16} if of == (0,) else {24})


def test_rows_that_see_no_key_take_no_gradient_in_columns_either(front, packed, in_columns, ran):
    given = packed((6, 3), (2, 0))
    _, lse = attnreg.varlen_attn(*given, window_size=CAUSAL, return_aux=LSE)
    unseeing = lse == -torch.inf
    assert 0 < unseeing.sum() < unseeing.numel()
    grad = random_like(lse)
    found = torch.autograd.grad(lse, given[:3], grad.masked_fill(unseeing, torch.nan))
    _, expected = truth.varlen(*given[:5], window=CAUSAL)
    wanted = gradients((without_unseen(expected),), given[:3], (0,), [grad.masked_fill(unseeing, 0.0)])
    for one, other in zip(found, wanted, strict=True):
        truth.assert_near(one, other.double())
    assert ran() == {"mine": (1, 1)}


def test_a_backward_without_that_gradient_stays_with_a_backend_that_can_not_be_told_it(
    front, packed, refusing, ran
):
    given = packed(LENGTHS_Q, LENGTHS_K)
    assert_right(given, (0,))
    assert ran() == {"mine": (1, 1)}


def test_a_backend_that_can_not_be_told_it_is_passed_over_with_the_reason_counted(
    front, packed, refusing, ran
):
    given = packed(LENGTHS_Q, LENGTHS_K)
    ran()
    assert_right(given, (0, 1))
    reasons = {row.reason for row in attnreg.stats().fallbacks if (row.backend, row.count) == ("mine", 1)}
    assert reasons == {"grad_lse must be None, got a tensor: no gradient of the LSE"}
    calls = ran()
    assert (calls.pop("mine"), total(calls)) == ((1, 0), (0, 1))
    assert refusing.backwards == []


def test_a_backend_that_was_insisted_on_and_can_not_be_told_it_is_an_error(front, packed, refusing):
    given = packed(LENGTHS_Q, LENGTHS_K)
    out, lse = attnreg.varlen_attn(*given, backend="mine", return_aux=LSE)
    with pytest.raises(UnsupportedInputError, match="no gradient of the LSE"):
        lse.sum().backward(retain_graph=True)
    out.sum().backward()
    assert given[0].grad is not None


def test_a_loss_of_both_pieces_of_a_split_sequence_is_that_of_the_whole(front, packed):
    """As rings of GPUs merge partial outputs: by their LSEs, whose gradients count."""
    query, key, value, *_ = given = packed((6,), (8,))
    half = offsets(4)
    parts = [
        attnreg.varlen_attn(query, *(x[rows] for x in (key, value)), given[3], half, 6, 4, return_aux=LSE)
        for rows in (slice(0, 4), slice(4, 8))
    ]
    merged = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(part * (lse - merged).exp().mT[..., None] for part, lse in parts)
    whole, wanted_lse = truth.varlen(*given[:5])
    truth.assert_near(out, whole)
    truth.assert_near(merged, wanted_lse)
    for one, other in zip(
        gradients((out,), given[:3], (0,)), gradients((whole,), given[:3], (0,)), strict=True
    ):
        truth.assert_near(one, other.double())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "of", [(0, 1), pytest.param((1,), marks=pytest.mark.slow)], ids=["both", "the LSE alone"]
)
@WITHOUT_AN_OP
def test_compiled_autograd_gives_the_same(front, packed, of):
    given = packed(LENGTHS_Q, LENGTHS_K)
    results = attnreg.varlen_attn(*given, return_aux=LSE)
    wanted = gradients(results, given[:3], of)
    chosen = [results[n] for n in of]
    with compiled_autograd._enable(torch.compile(backend="eager")):
        torch.autograd.backward(chosen, [random_like(x) for x in chosen])
    for leaf, other in zip(given[:3], wanted, strict=True):
        torch.testing.assert_close(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, other)


@pytest.mark.parametrize("backend", ["mine", pytest.param("math", marks=pytest.mark.slow)])
def test_a_compiled_function_gives_it(packed, in_columns, ran, backend):
    torch._dynamo.reset()
    given = packed(LENGTHS_Q, LENGTHS_K)
    ran()
    attend = torch.compile(attnreg.varlen_attn, backend="aot_eager", fullgraph=True)
    for of in LOSSES.values():
        assert_right(given, of, attend=attend, backend=backend)
    assert ran() == {backend: (3, 3)}
    torch._dynamo.reset()


def test_a_compiled_function_that_keeps_the_lse_to_itself_asks_for_no_gradient_of_it(packed, refusing, ran):
    torch._dynamo.reset()
    given = packed(LENGTHS_Q, LENGTHS_K)

    def attend(*given):
        out, lse = attnreg.varlen_attn(*given, return_aux=LSE)
        return out, lse.detach()

    out, _ = torch.compile(attend, backend="aot_eager", fullgraph=True)(*given)
    out.sum().backward()
    assert ran() == {"mine": (1, 1)}
    torch._dynamo.reset()


def test_the_gradient_of_that_gradient_is_an_error(packed, front):
    given = packed(LENGTHS_Q, LENGTHS_K)
    _, lse = attnreg.varlen_attn(*given, return_aux=LSE)
    scale = torch.ones_like(lse, requires_grad=True)
    (grad,) = torch.autograd.grad(lse, given[:1], scale, create_graph=True)
    with pytest.raises(RuntimeError, match=r"not implemented|differentiate twice|no autograd formula"):
        grad.sum().backward()


def test_explain_says_what_runs_the_backward_of_output_and_lse(packed, refusing):
    """`refusing` takes no gradient of the LSE; attnreg.explain takes the arguments of the call."""
    given, other = packed(LENGTHS_Q, LENGTHS_K), "math" if compiled.load() is None else "cpu"
    for aux, expected in ((None, "mine"), (attnreg.AuxRequest(), "mine"), (LSE, other)):
        said = attnreg.explain(*given, False, aux)
        assert (said.forward.backend, said.backward.backend) == ("mine", expected)
    without = attnreg.explain(*(x.detach() for x in given[:3]), *given[3:], return_aux=LSE)
    assert (without.forward.backend, without.backward) == ("mine", None)


def test_explain_refuses_another_request_and_one_of_a_dense_call(packed):
    given = packed(LENGTHS_Q, LENGTHS_K)
    with pytest.raises(InvalidInputError, match="return_aux: got True, expected an AuxRequest or None"):
        attnreg.explain(*given, return_aux=True)
    with pytest.raises(InvalidInputError, match="explain: got return_aux without cu_seq_q"):
        attnreg.explain(*(x[None] for x in given[:3]), return_aux=LSE)

"""Promises of `varlen_attn` about backends that count sinks: when they are given them, and the values."""

import logging

import pytest
import torch
from support import truth
from support.packed_calls import CAUSAL, LSE, random_like
from support.sinks import Counting, by_the_formula

import attnreg
from attnreg.core.registry.entry import Entry
from attnreg.errors import BackendUnavailableError, RegistrationError, UnsupportedInputError

HEADS, LENGTHS = 4, (5, 1, 8, 3)
RESCALED, GIVEN = "rescaled", "given"


@pytest.fixture(params=["call cache", "autograd function"])
def routed(request, no_graph_trees):
    request.getfixturevalue("compiled_routers" if request.param == "call cache" else "python_routers")
    return request.param


@pytest.fixture
def counting(fake):
    """Register a backend whose kernels count sinks."""
    kernels = Counting()
    with attnreg.register_backend(kernels.backend(fake)):
        yield kernels


def drawn(seed=0, dtype=torch.float32, grad=True):
    sinks = torch.randn(HEADS, generator=torch.Generator().manual_seed(seed))
    return sinks.to(dtype).requires_grad_(grad)


def assert_right(given, sinks, dtype=torch.float32, **options):
    """Compare the output, the LSE where there is one, and the gradients of a call with the formula."""
    results = attnreg.varlen_attn(*given, sinks=sinks, **options)
    out, *lse = results if isinstance(results, tuple) else (results,)
    expected = by_the_formula(*given[:5], sinks, options.get("window_size") == CAUSAL)
    for one, wanted in zip((out, *lse), expected, strict=False):
        truth.assert_near(one, wanted, dtype)
    inputs = [x for x in (*given[:3], sinks) if x.requires_grad]
    if not inputs:
        return
    grad = random_like(out)
    found = torch.autograd.grad(out, inputs, grad)
    wanted = torch.autograd.grad(expected[0], inputs, grad.double())
    for one, other, leaf in zip(found, wanted, inputs, strict=True):
        assert (one.dtype, one.shape) == (leaf.dtype, leaf.shape)
        truth.assert_near(one, other.double(), dtype)


@pytest.mark.pairwise("routed", "options", "dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("options", "heads_k"), [({}, 4), ({"window_size": CAUSAL}, 4), ({"enable_gqa": True}, 2)], ids=str
)
def test_from_the_second_call_on_kernels_are_given_sinks_of_whatever_values(
    routed, packed, counting, ran, options, heads_k, dtype
):
    for seed in range(3):
        given = packed(LENGTHS, heads_k=heads_k, dtype=dtype, seed=seed)
        assert_right(given, drawn(seed, dtype), dtype, **options)
        assert ran() == {"counting": (1, 1)}
        assert counting.seen() == [GIVEN if seed else RESCALED] * 2


def test_sinks_may_have_another_dtype_than_the_query(routed, packed, counting):
    for seed in range(3):
        assert_right(packed(LENGTHS, dtype=torch.bfloat16, seed=seed), drawn(seed), torch.bfloat16)
        assert counting.seen() == [GIVEN if seed else RESCALED] * 2


def test_calls_of_one_shape_are_kept_apart_by_their_sinks(routed, packed, counting):
    """With sinks and without, of another dtype, and of other strides, which kernels aren't given."""
    for seed in range(4):
        given = packed(LENGTHS, seed=seed)
        assert_right(given, drawn(seed))
        assert counting.seen() == [GIVEN if seed else RESCALED] * 2
        out = attnreg.varlen_attn(*given)
        truth.assert_near(out, truth.varlen(*given[:5])[0], torch.float32)
        out.sum().backward()
        assert counting.seen() == [RESCALED] * 2
        assert_right(given, drawn(seed, torch.float16), torch.float16)
        assert counting.seen() == [GIVEN] * 2
        strided = drawn(seed, grad=False).repeat_interleave(2)[::2].requires_grad_()
        assert_right(given, strided)
        assert counting.seen() == [RESCALED] * 2


@pytest.mark.parametrize(
    ("inputs_need", "sinks_need", "wanted"),
    [(True, False, [GIVEN, RESCALED]), (False, True, [GIVEN]), (False, False, [GIVEN])],
)
def test_a_backward_is_given_sinks_only_if_they_need_a_gradient_and_runs_only_for_inputs_that_do(
    routed, packed, counting, inputs_need, sinks_need, wanted
):
    for seed in range(4):
        assert_right(packed(LENGTHS, seed=seed, grad=inputs_need), drawn(seed, grad=sinks_need))
        assert counting.seen() == (wanted if seed else [RESCALED] * len(wanted))


def test_where_a_row_may_see_no_key_results_are_rescaled_in_repeated_calls_too(routed, packed, counting):
    lengths_k = (5, 3), (3, 5), (6, 2), (5, 3)
    for seed, lengths in enumerate(lengths_k * 3):
        given = packed((5, 3), lengths, seed=seed)
        assert_right((*given[:5], 8, 8), drawn(seed), window_size=CAUSAL)
        sees = lengths == (5, 3)
        seen = counting.seen()
        # The call cache keeps the second call, whose results are rescaled, and rescales those of later ones.
        is_given = seed > 0 and sees and routed == "autograd function"
        assert seen == [GIVEN if is_given else RESCALED] * 2
    for seed in range(3):  # other shapes: these have seen nothing else
        assert_right(packed((5, 4), (6, 4), seed=seed), drawn(seed))
    assert counting.seen() == [RESCALED] * 2 + [GIVEN] * 4


def test_offsets_that_are_written_to_behind_torchs_back_are_looked_at(routed, packed, counting):
    query, key, value, cu_q, cu_k, *longest = packed((5, 3))
    for seed in range(3):
        assert_right((query, key, value, cu_q, cu_k, *longest), drawn(seed), window_size=CAUSAL)
    assert counting.seen()[-2:] == [GIVEN] * 2
    cu_k.numpy()[:] = [0, 3, 8]
    assert_right((query, key, value, cu_q, cu_k, *longest), drawn(), window_size=CAUSAL)
    assert counting.seen() == [RESCALED] * 2


def test_a_program_that_gets_the_lse_gets_ours_and_the_backward_counts(routed, packed, counting):
    for seed in range(4):
        assert_right(packed(LENGTHS, seed=seed), drawn(seed), return_aux=LSE)
        assert counting.seen() == [RESCALED, GIVEN if seed else RESCALED]
    given, sinks = packed(LENGTHS), drawn()
    out, lse = attnreg.varlen_attn(*given, sinks=sinks, return_aux=LSE)
    (out.sum() + lse.sum()).backward()
    assert counting.seen() == [RESCALED] * 2
    wanted = by_the_formula(*given[:5], sinks)
    (grad,) = torch.autograd.grad(wanted[0].sum() + wanted[1].sum(), sinks)
    truth.assert_near(sinks.grad, grad.double(), torch.float32)


def test_what_kernels_are_not_told_of_is_rescaled(routed, packed, counting):
    """Sinks in float64, deterministic calls, dropout."""
    for seed in range(3):
        given = packed(LENGTHS, dtype=torch.float64, seed=seed)
        assert_right(given, drawn(seed, torch.float64), torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        for seed in range(3):
            assert_right(packed(LENGTHS, seed=seed), drawn(seed))
    finally:
        torch.use_deterministic_algorithms(False)
    for _ in range(3):
        attnreg.varlen_attn(*packed(LENGTHS), sinks=drawn(), dropout_p=0.5).sum().backward()
    assert set(counting.seen()) == {RESCALED}


@pytest.mark.parametrize("needs", [True, False])
def test_a_scoped_choice_is_given_sinks_too(routed, packed, counting, fake, needs):
    with attnreg.register_backend(fake("other").backend):  # comes first, and knows of no sinks
        for seed in range(4):
            given, sinks = packed(LENGTHS, seed=seed, grad=needs), drawn(seed, grad=needs)
            assert_right(given, sinks)
            assert counting.seen() == []
            for options in ({"backend": "counting"}, {}):
                with attnreg.use_backend("counting"):
                    assert_right(given, sinks, **options)
                assert counting.seen() == [GIVEN if seed else RESCALED] * (1 + needs)


def test_forward_and_backward_may_be_of_two_backends_of_which_one_counts(routed, packed, fake):
    kernels, other = Counting(), fake("other", backward=False)
    first = kernels.backend(fake)
    with attnreg.register_backend(first), attnreg.register_backend(other.backend):
        for seed in range(4):
            assert_right(packed(LENGTHS, seed=seed), drawn(seed))
            assert kernels.seen() == [GIVEN if seed else RESCALED]
    assert len(other.forwards) == 4 and all(one[3].sinks is None for one in other.forwards)


def test_whether_a_backend_counts_is_asked_once_and_only_for_calls_with_sinks(
    routed, packed, counting, monkeypatch
):
    asked, ask = [], Entry.counts_sinks

    def counts_sinks(entry, spec, direction):
        asked.append(direction)
        return ask(entry, spec, direction)

    monkeypatch.setattr(Entry, "counts_sinks", counts_sinks)
    for seed in range(3):
        attnreg.varlen_attn(*packed(LENGTHS, seed=seed)).sum().backward()
    assert asked == []
    for seed in range(5):
        assert_right(packed(LENGTHS, seed=seed), drawn(seed))
    assert asked == ["forward", "backward"]
    # The first call of a shape with sinks is rescaled, also where one without has been before.
    assert counting.seen()[6:] == [RESCALED] * 2 + [GIVEN] * 8


@pytest.mark.parametrize("error", [UnsupportedInputError, BackendUnavailableError])
def test_a_kernel_that_cannot_run_with_sinks_goes_on_without_and_says_so_once(
    routed, packed, counting, ran, error, caplog
):
    counting.problem = error("ptxas has failed")
    failed = []
    with caplog.at_level(logging.INFO, "attnreg"):
        for seed in range(4):
            assert_right(packed(LENGTHS, seed=seed), drawn(seed))
            failed += [(row.direction, row.count) for row in attnreg.stats().failures]
            assert ran() == {"counting": (1, 1)}
        assert counting.seen() == [RESCALED] * 8
        said = [one for one in caplog.messages if "sinks" in one]
        assert said == ["counting doesn't count sinks, its results are rescaled: ptxas has failed"] * 2
        # What can't be compiled can't be for other lengths; an input that it can't take may have had others.
        for seed in range(4):
            assert_right(packed((*LENGTHS, seed + 1), seed=seed), drawn(seed))
    assert not attnreg.stats().failures
    said = [one for one in caplog.messages if "sinks" in one]
    if error is BackendUnavailableError:
        assert (len(said), sorted(failed)) == (2, [("backward", 1), ("forward", 1)])
        notes = attnreg.explain(*packed(LENGTHS), sinks=drawn()).notes
        assert "forward on counting: results are rescaled for the sinks" in notes
    else:
        assert failed == []
    assert set(counting.seen()) == {RESCALED}


@pytest.mark.parametrize("error", [UnsupportedInputError, BackendUnavailableError])
def test_a_kernel_that_no_longer_runs_with_sinks_is_not_set_aside(routed, packed, counting, ran, error):
    for seed in range(4):
        assert_right(packed(LENGTHS, seed=seed), drawn(seed))
    counting.problem = error("gone")
    for seed in range(4):
        assert_right(packed(LENGTHS, seed=seed), drawn(seed))
        attnreg.varlen_attn(*packed(LENGTHS))
        assert ran() == {"counting": (6 if seed == 0 else 2, 5 if seed == 0 else 1)}
    assert set(counting.seen()[8:]) == {RESCALED}


def test_any_other_error_is_the_callers(routed, packed, counting):
    assert_right(packed(LENGTHS), drawn())
    counting.problem = RuntimeError("lost")
    with pytest.raises(RuntimeError, match="lost"):
        attnreg.varlen_attn(*packed(LENGTHS), sinks=drawn())
    assert [(row.backend, row.direction) for row in attnreg.stats().failures] == [("counting", "forward")]
    counting.problem = None
    assert_right(packed(LENGTHS), drawn())
    assert counting.seen()[-2:] == [GIVEN] * 2


# What is made of the results of a kernel that was given sinks, by direction.
BROKEN = {
    "no gradient of sinks": ("backward", lambda *grads: grads[:3]),
    "no gradient of the key": ("backward", lambda grad_q, grad_k, *rest: (grad_q, None, *rest)),
    "no LSE": ("forward", lambda out, lse: (out, None)),
    "more": ("forward", lambda out, lse: (out, lse, lse)),
    "float64": ("forward", lambda out, lse: (out.double(), lse)),
}


@pytest.mark.parametrize(("direction", "broken"), BROKEN.values(), ids=BROKEN)
def test_a_kernel_that_breaks_the_contract_where_it_is_given_sinks_is_an_error(
    routed, packed, fake, direction, broken
):
    class Broken(Counting):
        def forward(self, *given):
            return self.made("forward", super().forward(*given), given[-1])

        def backward(self, *given):
            return self.made("backward", super().backward(*given), given[-1])

        def made(self, ran, results, call):
            return broken(*results) if ran == direction and call.sinks is not None else results

    with attnreg.register_backend(Broken().backend(fake)):
        assert_right(packed(LENGTHS), drawn())
        for _ in range(2):
            with pytest.raises(RegistrationError, match=f"counting breaks the contract in its {direction}: "):
                assert_right(packed(LENGTHS), drawn())
    assert [(row.direction, row.count) for row in attnreg.stats().failures] == [(direction, 2)]


@pytest.mark.parametrize("count", [2, 4, 9])
def test_a_kernel_that_returns_another_number_of_gradients_later_is_an_error(routed, packed, fake, count):
    class Changing(Counting):
        def backward(self, *given):
            return (super().backward(*given)[:3] * 3)[: self.count]

    kernels = Changing()
    kernels.count = 3
    with attnreg.register_backend(kernels.backend(fake)):
        given = packed(LENGTHS)
        out = [attnreg.varlen_attn(*given) for _ in range(2)]
        out[0].sum().backward()
        kernels.count = count
        if routed == "call cache":
            with pytest.raises(RuntimeError, match=f"got {count} gradients, expected 3"):
                out[1].sum().backward()

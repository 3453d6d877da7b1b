"""`score_mod` and `mask_mod`: functions of single scores, as torch's `flex_attention` has them."""

import gc
import weakref

import pytest
import torch
from support import flex_graphs, truth
from support.three_sequences import OFFSETS, attend, tensors
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

import attnreg
from attnreg.core.dispatch.state import state
from attnreg.core.varlen import traced_functions
from attnreg.errors import InvalidInputError, UnsupportedInputError
from attnreg.tools.measure import reference

pytestmark = [
    # Torch's function computes all scores at once, and says so.
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    # Torch warns of what it has deprecated and its own export still uses.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]

TABLE = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def curved(score, batch, head, query, key):
    return torch.sin(score) + TABLE[batch, head, (query - key).abs() % 9]


def every_third(batch, head, query, key):
    return (query + 2 * key + head + batch) % 3 != 0


def every_pair(query, key):
    return query == query


@torch.no_grad()
def by_flex(given, offsets, score_mod=None, mask_mod=None, seen=every_pair, **options):
    """Return output and LSE by torch's own function, for which a batch is one sequence, and the mask tells.

    So it has the places in all packed tokens.
    """
    query, key, value = (x.detach().transpose(0, 1)[None] for x in given)
    document = torch.searchsorted(offsets, torch.arange(len(given[0]), dtype=torch.int32), right=True) - 1

    def both(score, batch, head, query, key):
        number, together = document[query], document[query] == document[key]
        query, key = query - offsets[number], key - offsets[number]
        score = score if score_mod is None else score_mod(score, number, head, query, key)
        shown = together & seen(query, key)
        # Where documents differ a place may be negative, which is a place from the end: hidden anyway.
        shown = shown if mask_mod is None else shown & mask_mod(number, head, query, key)
        return torch.where(shown, score, -torch.inf)

    out, aux = flex_attention(
        query, key, value, both, return_aux=AuxRequest(lse=True), enable_gqa=True, **options
    )
    return out[0].transpose(0, 1), aux.lse[0]


def by_autograd(given, offsets, window, **options):
    """Return output and LSE by plain operations, which autograd differentiates."""
    outs, lses = [], []
    for number, (begin, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
        if begin < end:
            sequence = (x[None, begin:end] for x in given)
            out, lse = reference.attend(*sequence, 0.4, window, numbers=torch.tensor([number]), **options)
            outs.append(out[0])
            lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, -1)


OPTIONS = {
    "a score_mod": {"score_mod": curved},
    "a mask_mod": {"mask_mod": every_third},
    "both": {"score_mod": curved, "mask_mod": every_third},
}


@pytest.fixture(autouse=True)
def flex_uncompiled(monkeypatch):
    """Have torch's function run without Dynamo, for which it takes seconds."""
    name = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    monkeypatch.setattr(name, True, raising=False)


@pytest.mark.parametrize(
    ("options", "causal"),
    [(OPTIONS["a score_mod"], False), (OPTIONS["a mask_mod"], True), (OPTIONS["both"], True)],
    ids=OPTIONS,
)
def test_each_sequence_is_what_torchs_flex_attention_makes_of_it(options, causal):
    given = tensors()
    out, lse = attend(given, is_causal=causal, scale=0.4, **options)
    seen = (lambda query, key: query >= key) if causal else every_pair
    by_torch = by_flex(given, OFFSETS, seen=seen, scale=0.4, **options)
    truth.assert_near(out, by_torch[0])
    truth.assert_near(lse, by_torch[1], torch.float32)
    # Torch's has no backward on a CPU.
    wanted = by_autograd(given, OFFSETS, (-1, 0) if causal else (-1, -1), **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
    of_lse = torch.linspace(-1.0, 1.0, lse.numel(), dtype=torch.float64).view(lse.shape)
    finite = by_torch[1].isfinite()
    got = torch.autograd.grad((out, lse[finite]), given, (grad, of_lse[finite].float()))
    expected = torch.autograd.grad((wanted[0], wanted[1][finite]), given, (grad, of_lse[finite]))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert attnreg.stats().calls == {"math": {"forward": 1, "backward": 1}}


def test_places_count_from_the_first_token_of_the_sequence_whatever_the_lengths():
    """A causal mask is aligned bottom-right; places aren't, as in torch's function."""
    query, key, value = (x.detach() for x in tensors())
    cu_q, cu_k = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([0, 40, 65], dtype=torch.int32)
    document = torch.arange(2).repeat_interleave(cu_q.diff())
    seen = []

    def watched(score, batch, head, query, key):
        # Of packed tokens a place in all of them is the offset of the sequence and its own place.
        seen.append(document[cu_q[batch] + query] == batch)
        return torch.where((query == 2) & (key == 24), score + 100.0, score)

    out = attnreg.varlen_attn(query[:5], key, value, cu_q, cu_k, 3, 40, enable_gqa=True, score_mod=watched)
    # Only the first sequence has a third query, whose weight is on the 25th key.
    expected = value[24].repeat_interleave(2, 0)
    torch.testing.assert_close(out[2], expected)
    assert not torch.isclose(out[4], value[64].repeat_interleave(2, 0)).any()
    assert seen


def test_functions_read_only_places_that_exist_next_to_empty_sequences_and_padding():
    tokens = torch.arange(65.0, dtype=torch.float64)
    offsets = torch.tensor([0, 0, 3, 3, 40, 65, 65], dtype=torch.int32)
    given = [x.detach() for x in tensors()]

    def by_token(score, batch, head, query, key):
        return score + tokens[offsets[batch] + query] * 0.1 - tokens[offsets[batch] + key] * 0.1

    def distance(score, batch, head, query, key):
        return score + (query - key) * 0.1

    results = [attend(given, offsets, score_mod=function) for function in (by_token, distance)]
    torch.testing.assert_close(*results)


ORDERS = {
    "softcap, then the function": {"softcap": 1.5},
    "the function, then slopes": {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
    "the function, then ranges and a window": {
        "window_size": (12, 3),
        "key_ranges": torch.tensor([[[0, 9], [20, 30]]], dtype=torch.int32).expand(65, 2, 2),
    },
}


@pytest.mark.parametrize("options", ORDERS.values(), ids=ORDERS)
def test_a_function_comes_behind_the_softcap_and_before_all_that_follows(options):
    given = tensors()
    out, lse = attend(given, score_mod=curved, mask_mod=every_third, **options)
    softcap = options.get("softcap")
    slopes, window = options.get("alibi_slopes"), options.get("window_size")

    def in_order(score, batch, head, query, key):
        score = torch.tanh(score / softcap) * softcap if softcap else score
        score = curved(score, batch, head, query, key)
        return score - slopes[head] * (query - key).abs() if slopes is not None else score

    def seen(query, key):
        if window is None:
            return every_pair(query, key)
        inside = ((key >= 0) & (key < 9)) | ((key >= 20) & (key < 30))
        return inside & (key >= query - window[0]) & (key <= query + window[1])

    wanted, wanted_lse = by_flex(given, OFFSETS, in_order, every_third, seen)
    truth.assert_near(out, wanted, torch.float32)
    truth.assert_near(lse, wanted_lse, torch.float32)


def test_sinks_are_counted_after_the_function():
    given, sinks = tensors(), torch.randn(4, dtype=torch.float64)
    plain, lse = attend(given, score_mod=curved)
    out, _ = attend(given, score_mod=curved, sinks=sinks)
    share = torch.sigmoid(lse.double() - sinks[:, None])
    torch.testing.assert_close(out, plain * share.T[..., None], rtol=1e-6, atol=1e-6)


def test_dropout_drops_the_weights_of_changed_scores():
    given = [x.detach() for x in tensors()]
    torch.manual_seed(0)
    dropped, _ = attend(given, score_mod=lambda score, *_: score * 0.0, dropout_p=0.5)
    torch.manual_seed(0)
    expected, _ = attend([given[0] * 0.0, *given[1:]], dropout_p=0.5)
    torch.testing.assert_close(dropped, expected)


def test_a_function_that_returns_one_number_for_all_scores_leaves_it_as_it_is():
    number = torch.zeros((), dtype=torch.float64)
    given = [x.detach()[:1] for x in tensors(heads=(1, 1))]
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    out, _ = attend(given, offsets, score_mod=lambda *_: number, alibi_slopes=torch.ones(1))
    torch.testing.assert_close(out, given[2])
    query, key, value = tensors()
    out, _ = attend((query, key, value), score_mod=lambda *_: number)
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    assert number == 0.0
    assert not (grads[0].any() or grads[1].any()) and grads[2].any()


def test_hidden_keys_may_be_nan_and_a_row_without_a_key_is_zero():
    given = [x.detach().clone() for x in tensors()]
    given[1][7], given[2][7] = torch.nan, torch.nan
    leaves = [x.requires_grad_() for x in given]
    out, lse = attend(leaves, mask_mod=lambda batch, head, query, key: (key != 7) & (query != 3))
    assert out.isfinite().all() and not out[3].any() and not out[43].any()
    assert (lse[:, [3, 43]] == -torch.inf).all()
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[1][7].any() and not grads[0][3].any()


# Captured tensors, identity


def test_a_function_reads_what_it_captured_in_each_call():
    given = [x.detach() for x in tensors()]
    bias, factor = torch.zeros(4, dtype=torch.float64), 1.0

    def changing(score, batch, head, query, key):
        return score * factor + bias[head] * key

    first = attend(given, score_mod=changing)
    bias += 0.5
    second = attend(given, score_mod=changing)
    factor = 2.0
    third = attend(given, score_mod=changing)
    for got, times, slope in ((first, 1.0, 0.0), (second, 1.0, 0.5), (third, 2.0, 0.5)):
        wanted = attend(
            given, score_mod=lambda s, b, h, q, k, times=times, slope=slope: s * times + slope * k
        )
        torch.testing.assert_close(got, wanted)
    assert not torch.allclose(first[0], second[0]) and not torch.allclose(second[0], third[0])


def test_functions_made_anew_for_each_call_share_a_plan_and_none_stays_alive():
    given = tensors()
    kept = []
    for number in range(10):
        weights = torch.full((4,), float(number), dtype=torch.float64)

        def score_mod(score, batch, head, query, key, weights=weights):
            return score + weights[head] * (query - key)

        def mask_mod(batch, head, query, key, number=number):
            return query - key <= number

        out, _ = attend(given, score_mod=score_mod, mask_mod=mask_mod)
        # The same addresses may be used again by the next functions.
        expected, _ = attend(
            given, score_mod=lambda s, b, h, q, k, number=number: torch.where(
                q - k <= number, s + float(number) * (q - k), -torch.inf
            ),
        )  # fmt: skip
        torch.testing.assert_close(out, expected)
        torch.autograd.grad(out.sum(), given)
        kept += [weakref.ref(score_mod), weakref.ref(mask_mod), weakref.ref(weights)]
    del score_mod, mask_mod, weights, out, expected
    gc.collect()
    assert not any(reference() is not None for reference in kept)
    assert len(state().kinds) <= 6  # forward and backward, with and without a mask, and with or without


def test_a_callable_object_and_a_method_are_functions():
    given = [x.detach() for x in tensors()]

    class Bias:
        slope = 0.25

        def __call__(self, score, batch, head, query, key):
            return score - self.slope * (query - key).abs()

        def shown(self, batch, head, query, key):
            return query >= key

    bias = Bias()
    got = attend(given, score_mod=bias, mask_mod=bias.shown)
    wanted = attend(given, is_causal=True, alibi_slopes=torch.full((4,), 0.25))
    torch.testing.assert_close(got, wanted)


# Errors


def test_where_no_backend_has_it_each_says_so():
    given = tensors(dtype=torch.float32)
    for name, function in (("score_mod", curved), ("mask_mod", every_third)):
        with pytest.raises(UnsupportedInputError, match=f"{name} must be None, got a function"):
            attend(given, backend="cpu", **{name: function})
        explanation = attnreg.explain(*given, OFFSETS, OFFSETS, 40, 40, enable_gqa=True, **{name: function})
        assert (explanation.backend, explanation.backward.backend) == ("math", "math")
        assert explanation.rejected["cpu"] == (f"{name} must be None, got a function",)
        assert name in str(explanation)


learned = torch.ones(4, dtype=torch.float64, requires_grad=True)
WRONG = {
    "a number": ({"score_mod": 3}, r"score_mod: got 3, expected a function of \(score, batch, head, query"),
    "a tensor": (
        {"mask_mod": torch.ones(2)},
        r"mask_mod: got tensor.*, expected a function of \(batch, head",
    ),
    "no tensor": (
        {"mask_mod": lambda *_: True},
        r"mask_mod: got a function that returns True, expected a boolean tensor \(\)",
    ),
    "a mask of numbers": (
        {"mask_mod": lambda batch, head, query, key: query - key},
        r"mask_mod: got a function that returns shape \(\), torch.int32, expected a boolean tensor \(\)",
    ),
    "booleans as scores": (
        {"score_mod": lambda score, batch, head, query, key: query >= key},
        r"score_mod: got a function that returns shape \(\), torch.bool, expected a floating-point tensor",
    ),
    "several numbers": (
        {"score_mod": lambda score, *_: score + torch.zeros(2, dtype=torch.float64)},
        r"score_mod: got a function that returns shape \(2,\), torch.float64, expected a floating-point",
    ),
    "a learned tensor": (
        {"score_mod": lambda score, batch, head, *_: score * learned[head]},
        "score_mod: got a function that reads a tensor which needs a gradient, expected none",
    ),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_wrong_functions_are_errors_in_every_call(options, message):
    for given in (tensors(), [x.detach() for x in tensors()]):
        with pytest.raises(InvalidInputError, match=message):
            attend(given, **options)
    with pytest.raises(InvalidInputError, match=message):
        attnreg.explain(*tensors(), OFFSETS, OFFSETS, 40, 40, enable_gqa=True, **options)


def test_a_function_that_branches_on_a_value_is_refused_with_what_torch_says():
    def branching(score, batch, head, query, key):
        return score if query >= key else -score

    for _ in range(2):
        with pytest.raises(
            UnsupportedInputError, match="score_mod can't be called for all scores at once: vmap"
        ):
            attend(tensors(), score_mod=branching)


def test_without_gradients_a_function_may_read_learned_tensors():
    given = tensors()
    with torch.no_grad():
        got = attend(given, score_mod=lambda score, batch, head, *_: score * learned[head])
        torch.testing.assert_close(got, attend(given))


def test_a_batch_without_tokens_calls_no_function():
    empty = [x.detach()[:0] for x in tensors()]
    out, lse = attend(
        empty, torch.tensor([0, 0], dtype=torch.int32), score_mod=lambda *_: 1 / 0, mask_mod=lambda *_: 1 / 0
    )
    assert (out.shape, lse.shape) == ((0, 4, 16), (4, 0))


def test_tokens_of_no_sequence_call_no_function_that_fails(monkeypatch):
    flex_graphs.run_uncompiled(monkeypatch)
    given, offsets = [x.detach().float() for x in tensors()], torch.tensor([0], dtype=torch.int32)
    nothing = torch.zeros(0)

    def score_mod(score, batch, head, query, key):
        return score + nothing[batch]

    call = given[0], *given[1:], offsets, offsets, 0, 0
    assert not attnreg.varlen_attn(*call, enable_gqa=True, score_mod=score_mod).any()
    with attnreg.register_backend(flex_graphs.backend()):
        out = attnreg.varlen_attn(*call, enable_gqa=True, score_mod=lambda score, *_: score * 2.0)
    assert not out.any()


def test_transforms_refuse_functions():
    query, key, value = (x.detach() for x in tensors())
    with pytest.raises(UnsupportedInputError, match="score_mod must be None in dispatch modes, in function"):
        torch.vmap(lambda query: attend((query, key, value), score_mod=curved)[0])(query[None])


# Compiled programs


def layer(query, key, value, offsets, slopes, tokens):
    width = 9

    def score_mod(score, batch, head, query, key):
        return torch.sin(score) * slopes[head] + tokens[offsets[batch] + key]

    def mask_mod(batch, head, query, key):
        return (query - key < width) & every_third(batch, head, query, key)

    return attnreg.varlen_attn(
        query, key, value, offsets, offsets, 40, 40, enable_gqa=True, score_mod=score_mod, mask_mod=mask_mod,
        return_aux=attnreg.AuxRequest(lse=True),
    )  # fmt: skip


def test_one_graph_has_the_functions_and_what_they_capture_are_its_arguments(nothing_compiled):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for number, lengths in enumerate(((40, 0, 25), (7, 30), (20, 20, 5, 33, 3))):
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        given = tensors(sum(lengths), heads=(6, 2))
        captured = torch.linspace(0.5, 1.5 + number, 6), torch.linspace(-1.0, 1.0, sum(lengths))
        results = [function(*given, offsets, *captured) for function in (layer, compiled)]
        grads = [torch.autograd.grad(out.sin().sum() + lse.sum(), given) for out, lse in results]
        torch.testing.assert_close(results[0], results[1])
        torch.testing.assert_close(*grads)
        assert all(grad.any() for grad in grads[0])
    assert counter.frame_count == 1
    assert attnreg.stats().calls["math"] == {"forward": 6, "backward": 6}


@pytest.mark.slow
def test_functions_of_other_code_are_other_programs_and_a_method_is_a_function(nothing_compiled):
    given = [x.detach() for x in tensors()]

    class Layer(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor
            self.register_buffer("bias", torch.full((4,), float(factor), dtype=torch.float64))

        def score(self, score, batch, head, query, key):
            return score * self.factor - self.bias[head] * key

        def forward(self, *given):
            options = {"enable_gqa": True, "score_mod": self.score}
            return attnreg.varlen_attn(*given, OFFSETS, OFFSETS, 40, 40, **options)

    for factor in (1, 2):
        layer = Layer(factor)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*given), layer(*given))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_query_key_and_value_may_be_parts_of_one_tensor(nothing_compiled, backend):
    fused = torch.randn(65, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    captured = torch.linspace(0.5, 1.5, 4), torch.linspace(-1.0, 1.0, 65)

    def call(fused):
        return layer(*fused.unbind(1), OFFSETS, *captured)[0]

    out = torch.compile(call, backend=backend, fullgraph=True)(fused)
    torch.testing.assert_close(out, call(fused))
    torch.testing.assert_close(*(torch.autograd.grad(x.sin().sum(), fused) for x in (out, call(fused))))


OF_SIZES = {
    "indices, a part and the length": lambda x: (
        lambda score, batch, head, query, key: (
            score + x[None].flatten()[query] + x.tensor_split(2)[0].sum() + x[x.shape[0] - 1 - key]
        )
    ),
    "the sizes of a row": lambda x: (
        lambda score, batch, head, query, key: score / x.numel() + (x[:, None] * query).reshape(-1)[key]
    ),
    "its own tensor": lambda x: (
        lambda score, batch, head, *_: score * torch.tensor([1.0, 0.5, 2.0, 3.0])[head] + x.mean()
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", OF_SIZES.values(), ids=OF_SIZES)
def test_a_compiled_program_follows_the_sizes_of_what_functions_capture(nothing_compiled, make):
    given = [x.detach() for x in tensors()]

    def call(*given):
        options = {"enable_gqa": True, "score_mod": make(given[-1])}
        return attnreg.varlen_attn(*given[:3], OFFSETS, OFFSETS, 40, 40, **options)

    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
    for size in (65, 80, 100):
        captured = torch.linspace(-1.0, 1.0, size)
        torch.testing.assert_close(compiled(*given, captured), call(*given, captured))


class Exported(torch.nn.Module):
    def forward(self, *given):
        return layer(*given)


def test_an_exported_program_holds_the_functions_as_text():
    given = [x.detach() for x in tensors()]
    captured = torch.linspace(0.5, 1.5, 4), torch.linspace(-1.0, 1.0, 65)
    module = Exported()
    with pytest.raises(UnsupportedInputError, match=r"use torch\.export\.export"):
        torch.export.export(module, (*given, OFFSETS, *captured), strict=False)
    program = torch.export.export(module, (*given, OFFSETS, *captured), strict=True)
    assert not any("grad" in str(node.target) for node in program.graph.nodes)  # of tracing the functions
    program = program.run_decompositions()
    (node,) = (x for x in program.graph.nodes if x.target is torch.ops.attnreg._varlen_attn.default)
    assert any("aten.sin" in text for text in node.args if isinstance(text, str))
    for factor in (1.0, 3.0):
        arguments = *given, OFFSETS, captured[0] * factor, captured[1]
        torch.testing.assert_close(program.module()(*arguments), layer(*arguments))


@pytest.mark.slow
def test_an_exported_program_takes_any_length_and_sizes_of_what_its_functions_capture():
    class Program(torch.nn.Module):
        def forward(self, fused, offsets, table):
            def score_mod(score, batch, head, query, key):
                return score + table.flatten()[(query - key).abs().clamp(max=table.shape[1] - 1)]

            longest = fused.shape[0]
            return attnreg.varlen_attn(
                *fused.unbind(1), offsets, offsets, longest, longest, score_mod=score_mod
            )

    def given(*lengths):
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        return torch.randn(sum(lengths), 3, 2, 8), offsets, torch.randn(1, sum(lengths) + 2)

    dynamic = {0: torch.export.Dim.DYNAMIC}, {0: torch.export.Dim.DYNAMIC}, {1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(Program(), given(5, 9, 3), dynamic_shapes=dynamic, strict=True)
    for run in (program.module(), program.run_decompositions().module()):
        for lengths in ((4, 7), (20, 1, 6)):
            arguments = given(*lengths)
            torch.testing.assert_close(run(*arguments), Program()(*arguments))


def test_where_torch_has_no_such_operator_a_program_breaks_its_graph_and_is_right(
    nothing_compiled, monkeypatch
):
    monkeypatch.setattr(traced_functions, "OPERATOR", None)
    given = [x.detach() for x in tensors()]
    arguments = *given, OFFSETS, torch.linspace(0.5, 1.5, 4), torch.linspace(-1.0, 1.0, 65)
    torch.testing.assert_close(torch.compile(layer, backend="eager")(*arguments), layer(*arguments))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"marked as skipped|disable"):
        torch.compile(layer, backend="eager", fullgraph=True)(*arguments)


def nine_tensors():
    several = [torch.ones(4) for _ in range(9)]
    return lambda score, batch, head, *_: score + sum(x[head] for x in several)


IN_PROGRAMS = {
    "too many tensors": (nine_tensors(), "must have captured at most 8 tensors in a compiled program, got 9"),
    "a learned tensor": (lambda score, batch, head, *_: score * learned[head], "needs a gradient"),
    "a condition": (lambda score, batch, head, query, key: score if query > key else -score, "branching"),
}


@pytest.mark.parametrize(("function", "message"), IN_PROGRAMS.values(), ids=IN_PROGRAMS)
def test_functions_that_a_graph_cannot_have_are_errors(nothing_compiled, function, message):
    given = tensors()

    def call(*given):
        return attnreg.varlen_attn(*given, OFFSETS, OFFSETS, 40, 40, enable_gqa=True, score_mod=function)

    with pytest.raises(Exception, match=message):
        torch.compile(call, backend="aot_eager", fullgraph=True)(*given)


@pytest.mark.slow
def test_flex_runs_the_functions_of_a_compiled_program(nothing_compiled, monkeypatch):
    flex_graphs.run_uncompiled(monkeypatch)
    given = [x.detach().float().requires_grad_() for x in tensors()]
    arguments = *given, OFFSETS, torch.linspace(0.5, 1.5, 4), torch.linspace(-1.0, 1.0, 65)
    wanted = torch.autograd.grad(layer(*arguments)[0].sum(), given)
    attnreg.reset_stats()
    with attnreg.register_backend(flex_graphs.backend()):
        out, _ = torch.compile(layer, backend="eager", fullgraph=True)(*arguments)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), given), wanted, rtol=1e-4, atol=1e-5)
    assert attnreg.stats().calls == {"flex by graphs": {"forward": 1, "backward": 1}}

"""`key_ranges`: each query sees ranges of keys; and the ranges of a tree."""

import pytest
import torch
from support import flex_graphs, truth
from support.three_sequences import OFFSETS, attend, tensors
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import attnreg
from attnreg.errors import InvalidInputError, UnsupportedInputError
from attnreg.tools.measure import Case, inputs
from attnreg.tools.measure.reference import attention
from attnreg.tools.measure.rule import errors_of


def dense(given, seen, scale=None):
    """Return output and LSE (H, T) by a mask of all pairs of tokens, (T, T)."""
    query, key, value = (x.transpose(0, 1) for x in given)
    key, value = (x.repeat_interleave(query.shape[0] // x.shape[0], 0) for x in (key, value))
    scores = (query @ key.mT * 16**-0.5).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    blind = ~seen.any(-1)
    weights = scores.masked_fill(blind[:, None], 0.0).softmax(-1).masked_fill(blind[:, None], 0.0)
    return (weights @ value).transpose(0, 1), lse


def mask_of(ranges, offsets, causal=False):
    tokens = len(ranges)
    document = torch.searchsorted(offsets, torch.arange(tokens, dtype=torch.int32), right=True) - 1
    place = torch.arange(tokens) - offsets[document]
    low, high = ranges[:, None, :, 0], ranges[:, None, :, 1]
    seen = ((place[None, :, None] >= low) & (place[None, :, None] < high)).any(-1)
    seen &= document[:, None] == document
    return seen & (place[:, None] >= place) if causal else seen


def drawn(count, tokens=65):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-5, 45, (tokens, count, 2), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_a_query_sees_the_keys_of_its_ranges_forward_and_backward(count, causal):
    given, ranges = tensors(), drawn(count)
    grads = torch.randn_like(given[0]), torch.randn(4, 65)
    seen = mask_of(ranges, OFFSETS, causal)
    assert not seen.any(-1).all()
    out, lse = attend(given, key_ranges=ranges, is_causal=causal)
    wanted = dense(given, seen)
    truth.assert_near(out.detach(), wanted[0].detach(), torch.float32)
    truth.assert_near(lse.detach(), wanted[1].detach(), torch.float32)
    finite = wanted[1].isfinite()
    got = torch.autograd.grad((out, lse[finite]), given, (grads[0], grads[1][finite].float()))
    expected = torch.autograd.grad(
        (wanted[0], wanted[1][finite]), given, (grads[0], grads[1][finite].double())
    )
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_ranges_of_sequences_are_concatenated_as_their_tokens_are():
    given, ranges = [x.detach() for x in tensors()], drawn(2)
    whole, _ = attend(given, key_ranges=ranges)
    for begin, end in ((0, 40), (40, 65)):
        offsets = torch.tensor([0, end - begin], dtype=torch.int32)
        alone, _ = attend([x[begin:end] for x in given], offsets, key_ranges=ranges[begin:end])
        torch.testing.assert_close(whole[begin:end], alone)


def test_sinks_and_the_gradient_of_ranges_that_leave_rows_blind_are_right():
    given = tensors()
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    out, _ = attend(given, key_ranges=drawn(1), sinks=sinks)
    plain, lse = dense(given, mask_of(drawn(1), OFFSETS))
    share = (lse - torch.logaddexp(lse, sinks[:, None])).exp().nan_to_num(0.0)
    wanted = plain * share.T[..., None]
    torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)


def test_where_no_backend_has_it_each_says_so():
    with pytest.raises(UnsupportedInputError, match="key_ranges must be None, got a tensor") as error:
        attend(tensors(dtype=torch.float32), key_ranges=drawn(1), backend="cpu")
    assert str(error.value).startswith("no attention backend can run this forward on cpu: ")
    explanation = attnreg.explain(
        *tensors(dtype=torch.float32), OFFSETS, OFFSETS, 40, 40, enable_gqa=True, key_ranges=drawn(1)
    )
    assert (explanation.backend, explanation.backward.backend) == ("math", "math")
    assert explanation.rejected["cpu"] == ("key_ranges must be None, got a tensor",)
    assert "key_ranges" in str(explanation)


WRONG = {
    "dtype": (drawn(1).long(), r"key_ranges: got torch.int64, expected torch.int32"),
    "tokens": (drawn(1)[:60], r"key_ranges: got shape \(60, 1, 2\), expected \(65, ranges, 2\)"),
    "pairs": (drawn(1)[..., :1], r"key_ranges: got shape \(65, 1, 1\), expected \(65, ranges, 2\)"),
    "rank": (drawn(1)[:, 0], r"key_ranges: got shape \(65, 2\), expected 3 dimensions"),
    "list": ([[0, 1]], r"key_ranges: got \[\[\.\.\.\]\], expected a tensor"),
}


@pytest.mark.parametrize(("ranges", "message"), WRONG.values(), ids=WRONG)
def test_wrong_ranges_are_errors_in_every_call(ranges, message):
    given = tensors()
    attend(given, key_ranges=drawn(1))
    for _ in range(2):
        with pytest.raises(InvalidInputError, match=message):
            attend(given, key_ranges=ranges)


def test_no_range_at_all_leaves_every_query_without_a_key():
    out, lse = attend(tensors(), key_ranges=torch.zeros(65, 0, 2, dtype=torch.int32))
    assert not out.any()
    assert (lse == -torch.inf).all()


# Compiled programs, modes and transforms


def errors_of_case(case, call):
    """Return the errors of `varlen_attn` on a case, by the accuracy rule."""
    given = inputs(case)
    leaves = [x.requires_grad_() for x in (given.q, given.k, given.v)]
    offsets = given.call.cu_seqlens_q, given.call.cu_seqlens_k, case.max_q, case.max_k
    out, lse = call(*leaves, *offsets, given.call.key_ranges)
    grads = torch.autograd.grad(out, leaves, given.grad_out)
    dtype = given.q.dtype
    plain, right = (attention(case, given, of) for of in (dtype, torch.float64))
    return errors_of([(out.detach(), lse.detach(), *grads)], plain, right, dtype)


def layer(query, key, value, cu_q, cu_k, max_q, max_k, ranges):
    return attnreg.varlen_attn(
        query, key, value, cu_q, cu_k, max_q, max_k, enable_gqa=True, window_size=(20, 4),
        return_aux=attnreg.AuxRequest(lse=True), key_ranges=ranges,
    )  # fmt: skip


def ragged(*lengths, dtype="float32"):
    lens_q, lens_k = zip(*lengths, strict=True)
    return Case(
        name="ranges", lens_q=lens_q, lens_k=lens_k, varlen=True, heads=(6, 3), dims=(16, 16),
        window=(20, 4), dtype=dtype, key_ranges=2,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_graph_serves_every_batch_and_is_as_right_as_eager(dtype):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for lengths in (((40, 40), (0, 0), (25, 33)), ((7, 3), (50, 61)), ((33, 20), (12, 12), (2, 9), (5, 5))):
        for call in (layer, compiled):
            errors = errors_of_case(ragged(*lengths, dtype=dtype), call)
            assert errors.keys() == {"out", "lse", "dq", "dk", "dv"}
            assert {name: str(error) for name, error in errors.items() if not error.passed} == {}
    assert counter.frame_count == 1
    assert attnreg.stats().calls["math"] == {"forward": 6, "backward": 6}


def test_an_exported_program_has_ranges_as_an_argument():
    case = inputs(ragged((40, 40), (25, 33)))
    arguments = case.q, case.k, case.v, case.call.cu_seqlens_q, case.call.cu_seqlens_k
    module = torch.nn.Module()
    module.forward = lambda *given: layer(*given[:5], 40, 40, given[5])
    exported = torch.export.export(module, (*arguments, case.call.key_ranges)).module()
    for ranges in (case.call.key_ranges, case.call.key_ranges + 3):
        torch.testing.assert_close(exported(*arguments, ranges), layer(*arguments, 40, 40, ranges))


def test_function_transforms_and_modes_take_ranges():
    query, key, value = (x.detach() for x in tensors())

    def call(query, ranges):
        return attend((query, key, value), key_ranges=ranges)[0]

    ranges = torch.stack((drawn(2), drawn(2) + 3))
    each = torch.vmap(call, (None, 0))(query, ranges)
    torch.testing.assert_close(each, torch.stack([call(query, one) for one in ranges]))
    gradient = torch.func.grad(lambda query: call(query, ranges[0]).sin().sum())(query)
    leaf = query.clone().requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(call(leaf, ranges[0]).sin().sum(), leaf)[0])
    with FlopCounterMode(display=False) as flops:
        inside = call(query, ranges[0])
    torch.testing.assert_close(inside, call(query, ranges[0]))
    # Of each sequence the most keys count, whatever a mask hides.
    assert flops.get_total_flops() == 4 * (40 * 40 + 25 * 25) * 4 * 16


def test_new_ranges_that_a_compiled_program_puts_in_the_same_tensor_are_used(monkeypatch):
    """Inductor's code writes to tensors that it no longer needs, and torch doesn't count that."""
    flex_graphs.run_uncompiled(monkeypatch)
    query, key, value = (x.detach().float() for x in tensors())
    ranges = drawn(2).clone()
    with attnreg.register_backend(flex_graphs.backend()):
        for _ in range(3):
            out = torch.ops.attnreg._varlen_attn(
                query, key, value, OFFSETS, OFFSETS, 40, 40, enable_gqa=True, key_ranges=ranges
            )[0]
            wanted, _ = dense((query, key, value), mask_of(ranges, OFFSETS))
            torch.testing.assert_close(out, wanted.nan_to_num())
            ranges.numpy()[:] = ranges.numpy()[::-1].copy()
    assert attnreg.stats().calls == {"flex by graphs": {"forward": 3, "backward": 0}}


# Trees


def seen_by_parents(parents, lengths):
    """Return which tokens see which by the definition of a tree."""
    segment = torch.repeat_interleave(torch.arange(len(parents)), torch.tensor(lengths))
    above = torch.eye(len(parents), dtype=torch.bool)
    for number, parent in enumerate(parents):
        if parent >= 0:
            above[number] |= above[parent]
    tokens = torch.arange(len(segment))
    return above[segment][:, segment] & (tokens[:, None] >= tokens)


TREES = {
    "a shared prefix": ([-1, 0, 0, 0], [10, 7, 5, 9], 2),
    "deeper": ([-1, 0, 1, 0, 3, 3, 1], [4, 3, 2, 5, 1, 6, 2], 3),
    "tokens of a draft": ([-1, 0, 1, 0, 3, 1, 5, -1], None, 2),
    "two trees": ([-1, 0, -1, 2, 2], [3, 4, 5, 2, 3], 2),
    "empty segments": ([-1, 0, 0, 1], [4, 0, 3, 2], 2),
    "a chain": ([-1, 0, 1, 2], [2, 3, 4, 5], 1),
}


@pytest.mark.parametrize(("parents", "lengths", "width"), TREES.values(), ids=TREES)
def test_a_token_of_a_tree_sees_its_segment_up_to_itself_and_its_ancestors(parents, lengths, width):
    ranges = attnreg.tree_ranges(parents, lengths)
    lengths = lengths or [1] * len(parents)
    tokens = sum(lengths)
    assert (ranges.shape, ranges.dtype) == ((tokens, width, 2), torch.int32)
    offsets = torch.tensor([0, tokens], dtype=torch.int32)
    assert torch.equal(mask_of(ranges, offsets), seen_by_parents(parents, lengths))
    assert torch.equal(ranges, attnreg.tree_ranges(torch.tensor(parents), torch.tensor(lengths)))


def test_a_call_with_the_ranges_of_a_tree_is_the_calls_of_its_paths():
    parents, lengths = [-1, 0, 0], [10, 7, 5]
    given = [x.detach() for x in tensors(22)]
    whole, _ = attend(
        given, torch.tensor([0, 22], dtype=torch.int32), key_ranges=attnreg.tree_ranges(parents, lengths)
    )
    for begin, end in ((10, 17), (17, 22)):
        path = [torch.cat((x[:10], x[begin:end])) for x in given]
        offsets = torch.tensor([0, len(path[0])], dtype=torch.int32)
        alone, _ = attend(path, offsets, is_causal=True)
        torch.testing.assert_close(whole[begin:end], alone[10:])


def test_a_compiled_program_that_makes_the_ranges_of_a_tree_keeps_one_graph():
    given, offsets = [x.detach() for x in tensors(22)], torch.tensor([0, 22], dtype=torch.int32)

    def branches(*given):
        ranges = attnreg.tree_ranges([-1, 0, 0], [10, 7, 5])
        return attnreg.varlen_attn(*given, offsets, offsets, 22, 22, enable_gqa=True, key_ranges=ranges)

    compiled = torch.compile(branches, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), branches(*given))


def test_no_segment_is_no_token():
    assert attnreg.tree_ranges([]).shape == (0, 1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0],), r"parents\[0\]: got 0, expected -1: it has none before it"),
        (([-1, 2, 0],), r"parents\[1\]: got 2, expected -1 or a segment before it, 0 to 0"),
        (([-2],), r"parents\[0\]: got -2, expected -1"),
        (([-1, 0], [3]), r"lengths: got 1 of them, expected one for each parent, 2"),
        (([-1], [-3]), r"lengths\[0\]: got -3, expected 0 or more"),
        (([0.5],), r"parents: got \[0.5\], expected integers"),
        ((torch.zeros(2, 2),), r"parents: got shape \(2, 2\), torch.float32, expected one dimension of int"),
    ],
)
def test_wrong_trees_are_errors(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        attnreg.tree_ranges(*arguments)

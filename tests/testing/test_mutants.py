"""The test of the conformance kit: kernels that are wrong in one thing, each of which it has to find."""

import dataclasses
import itertools
import math
import os

import pytest
import torch
from support.sinks import Counting

from attnreg.backends import math as math_backend
from attnreg.core.contract.backend import KEYED_BY, Backend
from attnreg.core.contract.options import OPTIONS
from attnreg.testing import Conformance
from attnreg.testing.cases import selected

pytestmark = pytest.mark.usefixtures("no_other_lengths", "references_once")

# Both count sinks, which those of math itself don't.
MATH = math_backend.BACKEND.load()._replace(forward=Counting().forward, backward=Counting().backward)
EVERYTHING = dataclasses.replace(math_backend.EVERYTHING, sinks=True)


def called_with(**changes):
    """Return kernels that run another call than they are given, in both directions."""

    def changed(call):
        return call._replace(**{name: change(call) for name, change in changes.items()})

    return {
        "forward": lambda *given: MATH.forward(*given[:-1], changed(given[-1])),
        "backward": lambda *given: MATH.backward(*given[:-1], changed(given[-1])),
    }


def only(direction, kernels):
    return {direction: kernels[direction]}


def without(field):
    """Return kernels that ignore an option."""
    off = next(row.off for row in OPTIONS if row.name == field)
    return called_with(**{field: lambda call: off})


def ignoring_scale(field="scale"):
    # As a kernel does that was written for one head dim.
    return called_with(scale=lambda call: 64**-0.5)


def other_place(function, at):
    """Return a function of scores that always gets the first sequence, head, query or key."""
    if function is None:
        return None
    return lambda *given: function(*given[:at], torch.zeros_like(given[at]), *given[at + 1 :])


def with_slope_1(call):
    """Return a function with the values of a call's, but the derivative of the score itself."""
    function = call.score_mod
    if function is None:
        return None
    return lambda score, *places: score + (function(score, *places) - score).detach()


def capped_after(call):
    """Return a function that bounds what a call's function has made of a score."""
    function, softcap = call.score_mod, call.softcap
    if function is None or not softcap:
        return function
    return lambda *given: torch.tanh(function(*given) / softcap) * softcap


def first_keys(count):
    """Return kernels that see so many keys of each sequence at most."""

    def used(call):
        return call.cu_seqlens_k.diff().clamp(max=count(call))

    return called_with(seqused_k=used)


def first_queries(q, k, v, call):
    """Compute 64 rows of each sequence, whatever `max_q` says."""
    out, lse = MATH.forward(q, k, v, call)
    ends = call.cu_seqlens_q.tolist()
    for start, end in itertools.pairwise(ends):
        out[start + 64 : end] = 0.0
    return out, lse


def results(direction, change):
    """Return kernels of which one direction's results are changed."""
    run = getattr(MATH, direction)
    return {direction: lambda *given: change(*run(*given))}


def inputs(direction, change):
    """Return kernels of which one direction's tensors are changed before it runs; the call stays."""
    run = getattr(MATH, direction)
    return {direction: lambda *given: run(*change(*given[:-1]), given[-1])}


def with_own(choose):
    """Return a backward that computes the forward anew, in place of what it is given."""

    def backward(grad_out, q, k, v, out, lse, call):
        own = MATH.forward(q, k, v, call)
        return MATH.backward(grad_out, q, k, v, *choose(own, (out, lse)), call)

    return backward


def with_gradient_of_bias(change):
    """Return a backward with another gradient of the bias: `change` gets a function of some sequences."""

    def backward(grad_out, *given):
        def of_bias(sequences):
            some = torch.zeros_like(grad_out)
            some[sequences] = grad_out[sequences]
            return MATH.backward(some, *given)[3]

        results = MATH.backward(grad_out, *given)
        return (*results[:3], change(of_bias, given[-1])) if given[-1].bias_gradient else results

    return backward


def with_noise(*gradients):
    """Return gradients of other bits each time, as those of atomic additions are."""
    return tuple(x + torch.randn_like(x) * 1e-3 * x.abs() for x in gradients)


def off_by_a_bit(first, *others):
    """Return results of which the first has the next larger numbers: as right, with other bits."""
    return torch.nextafter(first, torch.full_like(first, torch.inf)), *others


def off_by_a_bit_if(condition):
    """Return a kernel whose bits depend on its batch."""

    def run(*given):
        results = (MATH.forward if len(given) == 4 else MATH.backward)(*given)
        return off_by_a_bit(*results) if condition(given[-1]) else results

    return run


def beside_others(call):
    return call.cu_seqlens_q is not None and len(call.cu_seqlens_q) > 2


def other_bits_first(q, k, v, call):
    out, lse = MATH.forward(q, k, v, call)
    out[:1] = off_by_a_bit(out[:1])[0]
    return out, lse


def off_by_a_bit_again(direction, tensors, call):
    run = getattr(MATH, direction)
    return lambda *given: off_by_a_bit(*run(*given[: len(tensors)], call))


def no_window_with_dropout():
    return called_with(window=lambda call: (-1, -1) if call.dropout else call.window)


def wrong_if(condition):
    """Return kernels whose output is wrong for some calls."""

    def forward(q, k, v, call):
        out, lse = MATH.forward(q, k, v, call)
        return (out * 1.5 if condition(q, call) else out), lse

    return {"forward": forward}


def half_dropped(call):
    return call.dropout / 2


def as_if_contiguous(x):
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())


def other_heads(q, k, v):
    """Return key heads in the order of `repeat`, where `repeat_interleave` is right."""
    group = q.shape[-2] // k.shape[-2]
    return q, *(torch.cat([x] * group, dim=-2) for x in (k, v))


def reading_past(q, k, v):
    """Return keys that are off by what lies behind them, at a weight of zero."""
    behind = v.as_strided((1,), (1,), v.storage_offset() + v.numel())
    return q, k, v + 0.0 * behind


def write_around(q, k, v, call):
    q.as_strided((1,), (1,), q.storage_offset() - 1).zero_()
    return MATH.forward(q, k, v, call)


def into_the_query(q, k, v, call):
    out, lse = MATH.forward(q, k, v, call)
    return q.copy_(out), lse


def into_the_gradient(grad_out, *given):
    dq, dk, dv = MATH.backward(grad_out, *given)
    grad_out.copy_(dq)
    return dq, dk, dv


def unwritten_tail(q, k, v, call):
    """Leave the rows past the last offset as torch.empty made them."""
    out, lse = MATH.forward(q, k, v, call)
    found = torch.empty_like(out)
    last = len(out) if call.cu_seqlens_q is None else int(call.cu_seqlens_q[-1])
    found[:last] = out[:last]
    return found, lse


def nan_for_unseeing_rows(q, k, v, call):
    out, lse = MATH.forward(q, k, v, call)
    unseeing = (lse == -torch.inf).transpose(-1, -2)[..., None]
    return out.masked_fill(unseeing, torch.nan), lse


class KeepingResults:
    """A `specialize` whose launchers return what the first call gave."""

    def __call__(self, direction, tensors, call):
        kept = getattr(MATH, direction)(*tensors, call)
        return lambda *given: kept


class KeepingOffsets:
    """A `specialize` whose launchers keep the offsets of the first call."""

    def __call__(self, direction, tensors, call):
        run = getattr(MATH, direction)
        return lambda *given: run(*given[: len(tensors)], call)


def keeping_dense_lengths(direction, tensors, call):
    """Return launchers that compute as many rows of a dense query as the first call had."""
    run = getattr(MATH, direction)

    def launch(*given):
        results = run(*given, call)
        results[0][:, tensors[0].shape[1] :] = 0.0
        return results

    return None if call.varlen else launch


class KeepingLongest:
    """A `specialize` whose launchers keep the longest query or key of the first call."""

    def __init__(self, name):
        self.name = name

    def __call__(self, direction, tensors, call):
        run, longest = getattr(MATH, direction), getattr(call, self.name)
        of_keys = self.name == "max_k"

        def launch(*given):
            *tensors, cu_seqlens_q, cu_seqlens_k, max_q, max_k, _ = given
            now = call._replace(
                cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_q=max_q, max_k=max_k
            )
            results = run(*tensors, now)
            first = results[-1 if of_keys else 0]  # the output, or the gradient of query or value
            if of_keys == (direction == "backward"):
                for start, end in itertools.pairwise((cu_seqlens_k if of_keys else cu_seqlens_q).tolist()):
                    first[start + longest : end] = 0.0
            return results

        return launch if call.varlen else None


class KeepingSinks:
    """A `specialize` whose launchers keep the sinks of the first call."""

    def __call__(self, direction, tensors, call):
        run = getattr(MATH, direction)

        def launch(*given):
            now = (
                dict(zip(("cu_seqlens_q", "cu_seqlens_k"), given[-5:-3], strict=True)) if call.varlen else {}
            )
            return run(*given[: len(tensors)], call._replace(**now))

        return launch


def of_sinks(change):
    return called_with(sinks=lambda call: None if call.sinks is None else change(call))


def into_buffers(direction):
    """Return kernels of which one direction writes its results to the same memory in all calls of a shape."""
    buffers = {}

    def run(*given):
        results = getattr(MATH, direction)(*given)
        kept = buffers.setdefault(tuple((x.shape, x.dtype) for x in results), results)
        return tuple(buffer.copy_(x) for buffer, x in zip(kept, results, strict=True))

    return {direction: run}


# What is wrong: the field of `Call` or the rule that a kernel breaks, the kernels, a case that shows it.
FIELDS = {
    "scale": ("scale", ignoring_scale(), "scale 0.3"),
    "scale of the backward": ("scale", only("backward", ignoring_scale()), "scale 0.3"),
    "scale of packed tensors": ("scale", only("forward", ignoring_scale()), "packed scale 0.3"),
    "sign of the scale": ("scale", called_with(scale=lambda call: abs(call.scale)), "scale below 0"),
    "longest query": ("max_q", {"forward": first_queries}, "packed window (-1, -1)"),
    "longest key": ("max_k", first_keys(lambda call: 64), "packed window (-1, -1)"),
    "no mask": ("window", called_with(window=lambda call: (-1, -1)), "length 15 "),
    "top-left mask": (
        "window",
        called_with(window=lambda call: (-1, call.max_q - call.max_k)),
        "causal lengths 64 and 32",
    ),
    "one key more": ("window", called_with(window=lambda call: (call.window[0] + 1, 0)), "window (4, 0)"),
    "left bound": ("window", called_with(window=lambda call: (-1, call.window[1])), "window (4, 4)"),
    "right bound": ("window", called_with(window=lambda call: (call.window[0], -1)), "window (4, 4)"),
    "offsets of the query": (
        "cu_seqlens_q",
        called_with(cu_seqlens_q=lambda call: call.cu_seqlens_k),
        "packed window (-1, 0)",
    ),
    "offsets of the key": (
        "cu_seqlens_k",
        called_with(cu_seqlens_k=lambda call: call.cu_seqlens_q),
        "packed window (-1, 0)",
    ),
    "keys used": ("seqused_k", without("seqused_k"), "packed seqused_k"),
    "keys used, dense": ("seqused_k", without("seqused_k"), "seqused_k"),
    "order of pages": (
        "block_table",
        called_with(block_table=lambda call: call.block_table.sort().values),
        "pages",
    ),
    "bias": ("attn_bias", without("attn_bias"), "additive bias"),
    "boolean mask": ("attn_bias", without("attn_bias"), "key padding mask"),
    "no gradient of the bias": (
        "bias_gradient",
        only("backward", called_with(bias_gradient=lambda call: False)),
        "gradient of a bias ",
    ),
    "gradient of the bias by the scale": (
        "bias_gradient",
        {"backward": with_gradient_of_bias(lambda of_bias, call: of_bias(slice(None)) * call.scale)},
        "gradient of a bias ",
    ),
    "gradient of the bias of one sequence": (
        "bias_gradient",
        {"backward": with_gradient_of_bias(lambda of_bias, call: of_bias(slice(1)))},
        "gradient of a bias ",
    ),
    "slopes": ("alibi_slopes", without("alibi_slopes"), "alibi"),
    "slopes of one sequence": (
        "alibi_slopes",
        called_with(alibi_slopes=lambda call: call.alibi_slopes[0].expand_as(call.alibi_slopes)),
        "packed alibi",
    ),
    "ranges of keys": ("key_ranges", without("key_ranges"), "packed key_ranges 1"),
    "all ranges of keys but the first": (
        "key_ranges",
        called_with(key_ranges=lambda call: call.key_ranges[:, :1]),
        "packed key_ranges 3, window",
    ),
    "ranges of keys, their ends included": (
        "key_ranges",
        called_with(key_ranges=lambda call: call.key_ranges + torch.tensor([0, 1], dtype=torch.int32)),
        "packed key_ranges 2, seqused_k",
    ),
    "ranges of keys in the backward": (
        "key_ranges",
        only("backward", without("key_ranges")),
        "packed key_ranges 1",
    ),
    "a function of scores": ("score_mod", without("score_mod"), "packed score_mod"),
    "a function of scores in the backward": (
        "score_mod",
        only("backward", without("score_mod")),
        "packed score_mod",
    ),
    "the derivative of a function of scores": (
        "score_mod",
        only("backward", called_with(score_mod=with_slope_1)),
        "packed score_mod",
    ),
    **{
        f"{name} of a function of scores": (
            "score_mod",
            called_with(score_mod=lambda call, at=at: other_place(call.score_mod, at)),
            "packed score_mod",
        )
        for at, name in enumerate(("sequence", "head", "query", "key"), 1)
    },
    "a function of scores before the softcap": (
        "score_mod",
        called_with(score_mod=capped_after, softcap=lambda call: 0.0),
        "packed score_mod and mask_mod, softcap",
    ),
    "a function that hides scores": ("mask_mod", without("mask_mod"), "packed mask_mod"),
    "a function that hides scores in the backward": (
        "mask_mod",
        only("backward", without("mask_mod")),
        "packed mask_mod",
    ),
    "the head of a function that hides scores": (
        "mask_mod",
        called_with(mask_mod=lambda call: other_place(call.mask_mod, 1)),
        "packed mask_mod",
    ),
    "softcap": ("softcap", called_with(softcap=lambda call: 0.0), "softcap 2"),
    "half the softcap": ("softcap", called_with(softcap=lambda call: call.softcap / 2), "packed softcap 1.5"),
    "softcap of the backward": (
        "softcap",
        only("backward", called_with(softcap=lambda call: 0.0)),
        "softcap 30, values x5",
    ),
    "gradient of the LSE": (
        "grad_lse",
        called_with(grad_lse=lambda call: None),
        "packed gradient of the LSE",
    ),
    "sign of the gradient of the LSE": (
        "grad_lse",
        called_with(grad_lse=lambda call: None if call.grad_lse is None else -call.grad_lse),
        "gradient of the LSE",
    ),
    "sinks": ("sinks", only("forward", without("sinks")), "packed counted sinks"),
    "no gradient of sinks": ("sinks", only("backward", without("sinks")), "packed counted sinks"),
    "zeros for the gradient of sinks": (
        "sinks",
        results("backward", lambda dq, dk, dv, *rest: (dq, dk, dv, *(x * 0 for x in rest))),
        "packed counted sinks",
    ),
    "sinks times the scale": (
        "sinks",
        of_sinks(lambda call: call.sinks * call.scale),
        "packed counted sinks, scale 0.3",
    ),
    "sinks of other heads": ("sinks", of_sinks(lambda call: call.sinks.flip(0)), "packed counted sinks"),
    "sinks in the output alone": (
        "sinks",
        {"forward": lambda *given: (MATH.forward(*given)[0], without("sinks")["forward"](*given)[1])},
        "packed counted sinks",
    ),
    "sinks of an earlier call": ("sinks", {"specialize": KeepingSinks()}, "packed counted sinks, window"),
    "no dropout": ("dropout", called_with(dropout=lambda call: 0.0), "dropout"),
    "half the dropout": ("dropout", called_with(dropout=half_dropped), "dropout"),
    "no window with dropout": ("window", no_window_with_dropout(), "dropout, window"),
    "no mask with dropout in a packed call": ("window", no_window_with_dropout(), "packed dropout, causal"),
    "dropout of the backward": ("dropout", only("backward", called_with(dropout=half_dropped)), "dropout"),
    "random state": (
        "rng_state",
        called_with(rng_state=lambda call: torch.ones_like(call.rng_state)),
        "packed dropout",
    ),
    "random state of the backward": (
        "rng_state",
        only("backward", called_with(rng_state=lambda call: torch.ones_like(call.rng_state))),
        "dropout",
    ),
    "pieces that aren't merged": (
        "num_splits",
        only("forward", first_keys(lambda call: call.max_k // call.num_splits)),
        "packed num_splits",
    ),
    "other bits beside others": (
        "batch_invariant",
        {"forward": off_by_a_bit_if(beside_others)},
        "packed batch-invariant",
    ),
    "other bits by the longest length": (
        "batch_invariant",
        {"backward": off_by_a_bit_if(lambda call: call.max_k > 500)},
        "packed batch-invariant",
    ),
    "other bits in the first place": ("batch_invariant", {"forward": other_bits_first}, "packed batch-inv"),
    "other bits in a repeated call": (
        "batch_invariant",
        {"specialize": off_by_a_bit_again},
        "batch-invariant",
    ),
    "other bits each time": ("deterministic", results("backward", with_noise), "deterministic"),
}

RESULTS = {
    "base of the LSE": (results("forward", lambda out, lse: (out, lse / math.log(2))), "length 15 "),
    "dtype of the output": (results("forward", lambda out, lse: (out.float(), lse)), "length 15 "),
    "dtype of the LSE": (results("forward", lambda out, lse: (out, lse.bfloat16())), "length 15 "),
    "dtype of a gradient": (results("backward", lambda dq, dk, dv: (dq, dk.float(), dv)), "length 15 "),
    "layout of the output": (results("forward", lambda out, lse: (out.transpose(1, 2), lse)), "length 15 "),
    "layout of the LSE": (results("forward", lambda out, lse: (out, lse.mT)), "length 15 "),
    "no gradient of the value": (results("backward", lambda dq, dk, dv: (dq, dk)), "length 15 "),
    "None for a gradient": (results("backward", lambda dq, dk, dv: (dq, dk, None)), "length 15 "),
    "0 for NaN": (inputs("forward", lambda *qkv: map(torch.nan_to_num, qkv)), "heads 8:1"),
    "0 for NaN in the output": (
        results("forward", lambda out, lse: (out.nan_to_num(), lse)),
        "packed heads 8",
    ),
    "0 for NaN in a gradient": (
        results("backward", lambda dq, dk, dv: (dq.nan_to_num(), dk, dv)),
        "heads 8:1",
    ),
    "zeros for a gradient": (results("backward", lambda dq, dk, dv: (dq, dk, dv * 0)), "length 15 "),
    "its own forward's output": (
        {"backward": with_own(lambda own, given: (own[0], given[1]))},
        "packed sinks",
    ),
    "its own forward's LSE": ({"backward": with_own(lambda own, given: (given[0], own[1]))}, "packed sinks"),
    "output of an earlier call": (into_buffers("forward"), "length 15 "),
    "gradients of an earlier call": (into_buffers("backward"), "length 15 "),
    "a list": (results("forward", lambda *both: list(both)), "length 15 "),
    "half the heads": (
        results("forward", lambda out, lse: (out[..., :1, :].expand_as(out), lse)),
        "heads 12:4",
    ),
    "more than 4 in a batch": (wrong_if(lambda q, call: not call.varlen and q.shape[0] > 4), "batch of 9"),
    "more than 130 sequences": (
        wrong_if(lambda q, call: call.varlen and len(call.cu_seqlens_q) > 131),
        "packed 300 sequences",
    ),
    "mapping of heads": (inputs("forward", other_heads), "heads 12:4"),
    "strides": (inputs("forward", lambda *qkv: map(as_if_contiguous, qkv)), "layout bhsd"),
    "gaps between rows": (inputs("forward", lambda *qkv: map(as_if_contiguous, qkv)), "layout odd rows"),
    "rows without a key": ({"forward": nan_for_unseeing_rows}, "causal lengths 256 and 8"),
    "rows of no sequence": ({"forward": unwritten_tail}, "packed tail"),
    "reading past the end": (inputs("forward", reading_past), "length 15 "),
    "writing before the start": ({"forward": write_around}, "length 15 "),
    "the output in the query": ({"forward": into_the_query}, "length 15 "),
    "the gradient overwritten": ({"backward": into_the_gradient}, "length 15 "),
    "a launcher that keeps results": ({"specialize": KeepingResults()}, "length 15 "),
    "a launcher that keeps the longest query": ({"specialize": KeepingLongest("max_q")}, "packed heads 6:3"),
    "a launcher that keeps the longest key": ({"specialize": KeepingLongest("max_k")}, "packed heads 6:3"),
    "a launcher that keeps dense lengths": ({"specialize": keeping_dense_lengths}, "heads 12:4"),
    "a launcher that keeps offsets": ({"specialize": KeepingOffsets()}, "packed heads 6:3"),
}


def outcomes(kernels, texts, seed=0):
    """Yield what came of the checks with these texts in their names; most kernels are those of `math`."""
    backend = Backend(
        name="mutant",
        forward=EVERYTHING,
        backward=EVERYTHING,
        load=lambda: MATH._replace(**kernels),
        version=lambda: "1.0",
    )
    kit = Conformance(backend, "cpu", dtypes=["bfloat16"], seed=seed)
    return map(kit.run, selected(kit.checks, texts))


def test_every_field_of_a_call_has_a_mutant():
    # The kit has no case of an option that has no field of its own.
    assert {field for field, *_ in FIELDS.values()} == KEYED_BY.keys() - {"further"}


# What others of these have as well, or almost.
ALIKE = (
    *("sinks of an earlier call", "other bits by the longest length"),
    *("a launcher that keeps the longest query", "a launcher that keeps the longest key"),
)


@pytest.mark.parametrize(
    ("kernels", "text"),
    [
        pytest.param(*row[-2:], id=name, marks=[pytest.mark.slow] * (name in ALIKE))
        for name, row in (FIELDS | RESULTS).items()
    ],
)
def test_a_kernel_that_is_wrong_in_one_thing_is_found(kernels, text):
    found = next(outcomes(kernels, [text]))
    assert not found.passed
    assert found.failure.startswith(
        ("RegistrationError: ", "")[not found.failure]
    )  # not a fault of the mutant's


@pytest.mark.slow
def test_a_right_kernel_passes_all_of_these():
    texts = {row[-1] for row in (*FIELDS.values(), *RESULTS.values())}
    found = [next(outcomes({}, [text])) for text in texts]
    assert [str(outcome) for outcome in found if not outcome.passed] == []
    assert not any(outcome.refused for outcome in found)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "field",
    [
        *("scale", "window", "attn_bias"),
        *(pytest.param(field, marks=pytest.mark.slow) for field in ("seqused_k", "alibi_slopes")),
    ],
)
def test_drawn_cases_find_what_is_ignored_by_themselves(field, seed):
    kernels = {"scale": ignoring_scale(), "window": called_with(window=lambda call: (-1, -1))}
    assert any(not one.passed for one in outcomes(kernels.get(field) or without(field), ["drawn"], seed))


def repeatable_if(condition):
    """Return a backward whose results have other bits each time unless a condition holds as it runs."""

    def backward(*given):
        gradients = MATH.backward(*given)
        return gradients if condition() else with_noise(*gradients)

    return {"backward": backward}


def test_a_kernel_may_obey_torchs_deterministic_mode_alone(monkeypatch):
    variable = "CUBLAS_WORKSPACE_CONFIG"  # without it torch refuses matrix products on a GPU in that mode
    monkeypatch.delenv(variable, raising=False)
    for condition, is_right in (
        (lambda: torch.get_deterministic_debug_mode() == 2 and variable in os.environ, True),
        (lambda: torch.get_deterministic_debug_mode() != 2, False),
        (lambda: False, False),
    ):
        found = list(outcomes(repeatable_if(condition), ["deterministic"]))
        assert found and [outcome.passed for outcome in found] == [is_right] * len(found)
        assert is_right or all("other bits for the same deterministic call" in one.failure for one in found)
        assert torch.get_deterministic_debug_mode() == 0 and variable not in os.environ


class RememberingOffsets:
    """A forward that keeps the offsets of the first call of each shape: right when it is called once."""

    def __init__(self):
        self.calls = {}

    def __call__(self, q, k, v, call):
        first = self.calls.setdefault((q.shape, call.max_q, call.dropout), call)
        return MATH.forward(q, k, v, first if call.varlen else call)


class RememberingResults(RememberingOffsets):
    """A forward that keeps the results of the first call of each shape, and returns copies."""

    def __call__(self, q, k, v, call):
        kept = self.calls.setdefault((q.shape, call.max_q), MATH.forward(q, k, v, call))
        return tuple(x.clone() for x in kept)


@pytest.mark.slow
def test_what_a_kernel_keeps_of_earlier_calls_is_found_through_every_front():
    for kept, fronts in ((RememberingOffsets(), 3), (RememberingResults(), 5)):
        found = list(outcomes({"forward": kept}, ["repeated"]))
        assert [outcome.failure for outcome in found] == [""] * 5
        assert sum(not outcome.errors["out"].passed for outcome in found) == fronts

"""Promises of the check at a call's own size: right results pass, and one that is wrong there doesn't."""

import dataclasses
import itertools

import pytest
import torch

from attnreg.core import registry
from attnreg.core.contract.backend import Kernels
from attnreg.core.contract.options import OPTIONS
from attnreg.errors import InvalidInputError
from attnreg.tools.measure import Case, Sample, copies
from attnreg.tools.measure.inputs import inputs
from attnreg.tools.tuning.checks import with_rescaling

CPU = torch.device("cpu")
NAMES = ("out", "lse", "dq", "dk", "dv")


def dense(len_q, len_k=None, batch=2, **options):
    lens = {"lens_q": (len_q,) * batch, "lens_k": (len_q if len_k is None else len_k,) * batch}
    return Case(**({"name": "any", "heads": (4, 4), "dims": (16, 16)} | lens | options))


CASES = {
    "dense": dense(70),
    "causal": dense(70, window=(-1, 0)),
    "fewer key heads": dense(40, heads=(4, 2)),
    "window": dense(90, window=(5, 3)),
    "more queries than keys": dense(60, 20, window=(-1, 0)),
    "packed": dense(1, lens_q=(80, 7, 0, 33, 80), lens_k=(80, 7, 5, 33, 80), varlen=True),
    "one query": dense(1, 99),
    "float32": dense(64, dtype="float32"),
    "long and causal": dense(1500, batch=1, window=(-1, 0)),
    "one key": dense(8, 1),
    "one key, float32": dense(8, 1, dtype="float32"),
    "itself alone": dense(40, window=(0, 0)),
    "large values": dense(64, magnitude=3.0, window=(-1, 0)),
    "deterministic": dense(33, deterministic=True),
    "gradient of the LSE": dense(70, 40, grad_lse=True, window=(-1, 0)),
    "packed gradient of the LSE": dense(1, lens_q=(80, 7), lens_k=(90, 9), varlen=True, grad_lse=True),
    "softcap": dense(70, softcap=1.0, window=(-1, 0)),
    "slopes": dense(70, alibi=True, window=(-1, 0)),
    "ranges of keys": dense(1, lens_q=(80, 7, 33), lens_k=(80, 9, 33), varlen=True, key_ranges=2),
    "sinks": dense(1, lens_q=(80, 7, 33), lens_k=(80, 9, 33), varlen=True, counts_sinks=True, heads=(4, 2)),
    "sinks, many keys": dense(1, lens_q=(3,), lens_k=(5000,), varlen=True, counts_sinks=True),
}


def results_of(case):
    given = copies(case, CPU, 1)[0]
    kernels = registry.find("math").kernels()
    if case.counts_sinks:
        kernels = Kernels(
            *(with_rescaling(kernels[n], name) for n, name in enumerate(("forward", "backward")))
        )
    out, lse = kernels.forward(*given[:3], given.call)
    grads = kernels.backward(given.grad_out, *given[:3], out, lse, given.call)[:3]
    return given, dict(zip(NAMES, (out, lse, *grads), strict=True))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=name, marks=[pytest.mark.slow] * (name == "long and causal"))
        for name, case in CASES.items()
    ],
)
def results(request):
    given, found = results_of(request.param)
    return Sample(request.param, given), found


def test_right_results_pass_the_comparison_with_float64(results):
    sample, found = results
    error, wrong = sample.verdict(found)
    assert 0.0 < error <= 1.0 and wrong == ""


FAULTS = {
    "not finite": lambda x: x.clone().index_fill_(0, torch.tensor(0), torch.nan),
    "another sequence's": lambda x: torch.flip(x, (0,)) + 1,
    "scaled": lambda x: x * 3,
}


def test_wrong_results_fail_the_comparison_with_float64(results):
    sample, found = results
    for fault, name in itertools.product(FAULTS, NAMES):
        right = found[name]
        # Where little is left of the terms that a gradient is the sum of, its own size is too little to see.
        if (name == "lse" and fault == "not finite") or (fault == "scaled" and right.abs().max() < 0.01):
            continue
        error, wrong = sample.verdict({**found, name: FAULTS[fault](right)})
        said = f"{name} has values" if fault == "not finite" else f"{name} of sequence "
        assert wrong.startswith(said), fault
        assert not error <= 1.0, (fault, name)


@pytest.mark.slow
def test_the_far_end_of_a_long_causal_call_counts_as_much_as_its_beginning():
    case = CASES["long and causal"]
    given, found = results_of(case)
    sample = Sample(case, given)
    for name in ("out", "dq", "dk", "dv"):
        cut = found[name].clone()
        cut[:, 600:] = 0
        assert sample.verdict({**found, name: cut}).wrong.startswith(f"{name} of sequence 0, key head ")


def test_results_computed_some_rows_at_a_time_are_those_of_all_rows(monkeypatch):
    case = dataclasses.replace(CASES["long and causal"].scaled(0.4, 0.4), dtype="float32", heads=(4, 2))
    given, found = results_of(case)
    at_once = Sample(case, given).errors(found)
    monkeypatch.setattr("attnreg.tools.measure.sample.SCORES", 600 * 97)
    for part, errors in Sample(case, given).errors(found).items():
        for name, error in errors.items():
            assert error.kernel == pytest.approx(at_once[part][name].kernel, rel=1e-6)


@pytest.mark.parametrize("name", ["softcap", "slopes", "ranges of keys", "sinks", "sinks, many keys"])
def test_the_options_of_the_call_count(name):
    case = CASES[name]
    given, found = results_of(case)
    without = given._replace(call=given.call.with_options({row.name: row.off for row in OPTIONS}))
    assert Sample(case, given).verdict(found).wrong == ""
    assert Sample(case, without).verdict(found).wrong.startswith(("out of sequence ", "lse of sequence "))


@pytest.mark.parametrize("option", [{"dropout": 0.5}, {"seqused_k": torch.ones(2).int()}], ids=str)
def test_a_call_whose_right_results_a_sample_does_not_know_is_refused(option):
    case = CASES["dense"]
    given = inputs(case)
    with pytest.raises(InvalidInputError, match=f"^Sample: got a call with {next(iter(option))}, expected"):
        Sample(case, given._replace(call=given.call._replace(**option)))


@pytest.mark.parametrize("bias", ["key padding", "additive"])
def test_a_mask_of_the_call_counts(bias):
    case = dense(70, batch=3, heads=(4, 2), bias=bias)
    given, found = results_of(case)
    assert Sample(case, given).verdict(found).wrong == ""
    unmasked = given._replace(call=given.call._replace(attn_bias=None))
    assert Sample(case, unmasked).verdict(found).wrong.startswith("out of sequence ")


def test_a_forward_alone_is_compared_without_gradients():
    case = dense(40)
    given, found = results_of(case)
    sample = Sample(case, given, backward=False)
    forward = {"out": found["out"], "lse": found["lse"]}
    assert sample.verdict(forward).wrong == "" and sample.verdict({"out": found["out"] * 2}).wrong


def flash_attention_in_bfloat16(given):
    """Compute a causal sequence as flash kernels do: in float32, the backward from the rounded `out`."""
    q, k, v, grad = (x[0].transpose(0, 1).float() for x in (given.q, given.k, given.v, given.grad_out))
    scale = q.shape[-1] ** -0.5
    scores = (q @ k.mT * scale).masked_fill(torch.ones(q.shape[1], k.shape[1]).triu(1).bool(), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    out = (weights.bfloat16().float() @ v).bfloat16()
    delta = (grad * out.float()).sum(-1, keepdim=True)
    of_scores = (weights * (grad @ v.mT - delta)).bfloat16().float()
    dq, dk, dv = of_scores @ k * scale, of_scores.mT @ q * scale, weights.mT @ grad
    results = {"out": out, "dq": dq, "dk": dk, "dv": dv}
    return {name: x.transpose(0, 1)[None].bfloat16() for name, x in results.items()} | {"lse": lse[None]}


@pytest.mark.parametrize("length", [7, 9, 23])
def test_a_right_backward_of_few_rows_passes_whatever_its_values(length):
    case = dense(length, batch=1, dims=(64, 64), window=(-1, 0), dtype="bfloat16")
    for seed in range(30):
        given = inputs(case, CPU, seed)
        assert Sample(case, given).verdict(flash_attention_in_bfloat16(given)).wrong == ""

"""Promises about sinks that FA4's package counts: what it is given, in which calls, and what launches it."""

import functools

import pytest
import torch
from support import fake_fa4, truth
from support.fake_fa4 import BOTH, NEITHER, both
from support.sinks import by_the_formula

from attnreg import AttentionSpec, Device
from attnreg.backends.fa4 import BACKEND, adapter, compiled_kinds
from attnreg.core.registry.entry import Entry
from attnreg.errors import UnsupportedInputError

LENGTHS = (5, 28, 7)


def packed(seed=0, lengths=LENGTHS, dtype=torch.float32, sinks=None, **options):
    """Return query, key, value, gradient and a call with sinks."""
    *tensors, call = fake_fa4.packed(lengths, seed=seed, **options)
    if sinks is None:
        sinks = torch.randn(tensors[0].shape[1], generator=torch.Generator().manual_seed(seed))
    return *tensors, call._replace(sinks=sinks.to(dtype))


def true_results(query, key, value, grad, call):
    """Return output, LSE and the four gradients by the formula, in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (query, key, value, call.sinks)]
    with torch.enable_grad():
        offsets = call.cu_seqlens_q, call.cu_seqlens_k
        out, lse = by_the_formula(*leaves[:3], *offsets, leaves[3], window=call.window)
        return out, lse, *torch.autograd.grad(out, leaves, grad.double())


def entered(kernels, package, *given):
    """Run both directions, compare with float64, and return which of them entered the package's Python."""
    package.calls.clear()
    got = both(kernels, *given)
    for one, true in zip(got, true_results(*given), strict=True):
        truth.assert_near(one, true, torch.bfloat16)
    assert got[5].dtype == given[4].sinks.dtype
    return list(dict.fromkeys(name for name, _ in package.calls))


@pytest.fixture
def calls(kernels, package, no_unused_rows, on_hopper):
    return functools.partial(entered, kernels, package)


@pytest.mark.each_value("window", "dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (8, 0)], ids=str)
def test_calls_with_sinks_are_launched_with_those_of_each_call(calls, package, dtype, window):
    found = [calls(*packed(seed, LENGTHS[seed % 3 :], dtype, window=window)) for seed in range(5)]
    assert found == [BOTH, *[NEITHER] * 4]


def test_calls_with_and_without_sinks_or_of_another_dtype_are_tried_by_themselves(calls, kernels, package):
    assert [calls(*packed(seed)) for seed in range(2)] == [BOTH, NEITHER]
    assert [calls(*packed(seed, dtype=torch.bfloat16)) for seed in range(2)] == [BOTH, NEITHER]
    *given, call = packed()
    plain = call._replace(sinks=None)
    assert [fake_fa4.entered(kernels, package, *given, plain) for _ in range(2)] == [BOTH, NEITHER]
    assert calls(*packed(7)) == NEITHER


def test_the_package_is_given_the_very_sinks_in_both_directions_and_none_where_there_are_none(
    kernels, package
):
    *given, call = packed()
    both(kernels, *given, call)
    both(kernels, *given, call._replace(sinks=None))
    assert [arguments["learnable_sink"] is call.sinks for _, arguments in package.calls] == [True] * 2 + [
        False
    ] * 2
    assert [arguments["learnable_sink"] for _, arguments in package.calls[2:]] == [None] * 2


def test_sinks_that_are_not_those_of_the_call_are_found_out(calls, package):
    """Also if they have the same values, as in the call that is tried."""

    def given(name, arguments):
        return tuple(x.clone() if x is sinks else x for x in arguments)

    package.given = given
    for seed in range(3):
        *tensors, call = packed(seed)
        sinks = call.sinks
        assert calls(*tensors, call) == [["forward"], BOTH][seed == 0]


def test_without_the_kernel_that_writes_the_gradient_of_sinks_nothing_is_launched(calls, package):
    package.hidden = {"_bwd_postprocess_convert"}
    assert [calls(*packed(seed)) for seed in range(3)] == [BOTH, ["backward"], ["backward"]]


def test_sinks_that_are_not_aligned_are_right_and_go_through_the_package(calls, kernels):
    def moved(sinks):
        return torch.cat((sinks.new_zeros(1), sinks))[1:]

    for seed in range(4):
        *given, call = packed(seed)
        call = call._replace(sinks=moved(call.sinks))
        assert calls(*given, call) == BOTH
        assert kernels.specialize("forward", tuple(given[:3]), call) is None


def test_a_launcher_is_given_sinks_in_front_of_the_offsets(calls, kernels, package):
    for seed in range(2):
        calls(*packed(seed))
    query, key, value, _, call = packed(3)
    launch = kernels.specialize("forward", (query, key, value), call)
    other = packed(4, (9, 3, 20, 6))
    *tensors, grad, later = other
    further = later.sinks, later.cu_seqlens_q, later.cu_seqlens_k, later.max_q, later.max_k
    results = launch(*tensors, *further, True)
    launch = kernels.specialize("backward", (grad, *tensors, *results), later)
    results += launch(grad, *tensors, *results, *further, True)
    for got, true in zip(results, true_results(*other), strict=True):
        truth.assert_near(got, true, torch.bfloat16)


def test_without_a_token_all_gradients_are_zeros(kernels, package):
    *given, call = packed(lengths=(0, 0))
    *results, of_sinks = both(kernels, *given, call)
    assert len(results) == 5 and torch.equal(of_sinks, torch.zeros(4))
    assert package.calls == []


def spec(capability=(9, 0), **options):
    sizes = {
        "batch": 3,
        "max_q": 64,
        "max_k": 64,
        "heads_q": 4,
        "heads_k": 4,
        "head_dim": 64,
        "head_dim_v": 64,
    }
    given = {"dtype": "bfloat16", "varlen": True, "sinks": True, **sizes, **options}
    return AttentionSpec(device=Device("cuda", capability), **given)


REFUSED = {
    "sinks must be None on sm_12x: no gradient of them": {"capability": (12, 0)},
    "sinks must be None with head_dim 256 on sm_10x and sm_11x: no gradient of them": {
        "capability": (10, 0), "head_dim": 256, "head_dim_v": 256,
    },
    "sinks must be None with a softcap, which no test has tried, got 30.0": {"softcap": 30.0},
}  # fmt: skip


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("reason", "options"), REFUSED.items(), ids=REFUSED)
def test_of_which_calls_the_package_counts_no_sinks(package, direction, reason, options):
    entry = Entry("FA4", "tests", BACKEND)
    entry.unavailable = lambda: ""
    found = spec(**options)
    assert entry.reasons(found, direction) == (reason,)
    assert not entry.counts_sinks(found, direction)
    for capability in ((9, 0), (10, 0)):
        assert entry.counts_sinks(spec(capability), direction)


def test_of_which_releases_sinks_are_counted_by_the_package(install):
    for version, counts in (("4.0.0b36", True), ("4.0.0b19", False), ("4.0.0b37", False)):
        install(version=version)
        reasons = () if counts else (f"sinks must be None but for releases 4.0.0b36, got {version}",)
        assert tuple(BACKEND.refuses(spec())) == reasons


def test_a_kind_with_sinks_has_to_run_before_it_is_captured(kernels, package, monkeypatch):
    *given, call = packed()
    kernels.forward(*given[:3], call._replace(sinks=None))
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "_capturing", lambda tensor: True)
        with pytest.raises(UnsupportedInputError, match="has to run this kind of forward once"):
            kernels.forward(*given[:3], call)
        kernels.forward(*given[:3], call._replace(sinks=None))
    kernels.forward(*given[:3], call)
    families = [family for family, _ in compiled_kinds.have_run]
    assert len(families) == 4 and sum(family == family.as_of_spec() for family in families) == 2
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "_capturing", lambda tensor: True)
        kernels.forward(*given[:3], call)

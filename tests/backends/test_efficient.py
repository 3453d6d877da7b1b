"""Promises of the efficient backend, on fakes of torch's kernels that keep the rules of the real ones."""

import dataclasses

import pytest
import torch
from support import efficient_ops
from support.chosen_cases import for_fakes
from support.packages import gpu_spec, on_cpu, verified

import attnreg
from attnreg.backends import efficient
from attnreg.core.dispatch.planning import Native, decide, entries_with_native
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.decision import Policy
from attnreg.core.torchlib import captured, versions
from attnreg.errors import UnsupportedInputError
from attnreg.tools.measure import QUICK, inputs
from attnreg.tools.measure.cases import Case


@pytest.fixture
def kernels(monkeypatch):
    """Put the fakes in the place of torch's kernels; returns them by op."""
    fakes = efficient_ops.native_kernels()
    monkeypatch.setattr(captured, "kernel", lambda op, key: fakes[op])
    return fakes


def dense(**options):
    shared = {"name": "dense", "lens_q": (40, 40, 40), "lens_k": (33, 33, 33), "dtype": "float32"}
    return Case(**{**shared, **options})


SHORT = for_fakes(case for case in QUICK if not case.dropout)


def sharing(shares):
    """Return the backend as it is where torch's kernels take fewer key heads than query heads, or don't."""
    limits = {
        name: dataclasses.replace(getattr(efficient.BACKEND, name), gqa=shares)
        for name in ("forward", "backward")
    }
    return dataclasses.replace(efficient.BACKEND, **limits)


# Values


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_every_case_that_the_kernels_take_is_right(kernels, monkeypatch, dtype):
    monkeypatch.setattr(versions, "EFFICIENT_SHARES_HEADS", True)
    both, forwards = verified(sharing(True), [case for case in SHORT if case.dtype == dtype])
    assert {"key padding mask", "no keys", "window (-1, 0)", "window (-1, 0), few queries"} <= both
    assert not [name for name in both | forwards if "varlen" in name or name.startswith("window (0")]
    assert "gradient of the LSE, few keys" in both
    assert forwards == set()


@pytest.mark.each_value("dtype", "len_k", "bias")
@pytest.mark.parametrize("bias", ["key padding", "additive"])
@pytest.mark.parametrize("len_k", [33, 40, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bias_that_the_kernels_cannot_read_is_copied_to_where_they_can(kernels, bias, len_k, dtype):
    case = dense(bias=bias, lens_k=(len_k,) * 3, dtype=dtype)
    assert verified(efficient.BACKEND, [case]) == ({"dense"}, set())


def test_a_bias_that_they_can_read_is_passed_where_it_lies(kernels):
    q, k, v, _, call = inputs(dense(lens_k=(40, 40, 40)))
    bias = torch.randn(1, 1, 40, 40)
    on_cpu(efficient.BACKEND).load().forward(q, k, v, call._replace(attn_bias=bias))
    ((args, _),) = kernels[efficient_ops.FORWARD].calls
    assert args[3].data_ptr() == bias.data_ptr()
    assert args[3].shape == (3, q.shape[2], 40, 40)


def test_a_bias_of_another_dtype_is_left_to_a_backend_that_reads_it(kernels):
    q, k, v, _, call = inputs(dense(lens_k=(40, 40, 40)))
    call = call._replace(attn_bias=torch.zeros(40, 40, dtype=torch.float64))
    with pytest.raises(UnsupportedInputError, match=r"attn_bias must be boolean or torch.float32, got"):
        on_cpu(efficient.BACKEND).load().forward(q, k, v, call)
    assert kernels[efficient_ops.FORWARD].calls == []


@pytest.mark.parametrize("bias", ["none", "additive", "key padding"])
def test_one_key_and_value_for_all_heads_are_right_where_they_lie(kernels, bias):
    q, k, v, grad, call = inputs(dense(lens_q=(33,) * 3, bias=bias))
    shared = [x[:, :, :1].expand(-1, -1, q.shape[2], -1) for x in (k, v)]
    loaded, got = on_cpu(efficient.BACKEND).load(), []
    for key, value in (shared, [x.contiguous() for x in shared]):
        out, lse = loaded.forward(q, key, value, call)
        got.append((out, lse, *loaded.backward(grad, q, key, value, out, lse, call)))
    torch.testing.assert_close(*got)
    for fake, place in zip(kernels.values(), (1, 2), strict=True):
        assert fake.calls[0][0][place].stride(2) == 0


@pytest.mark.parametrize("bias", ["none", "additive", "key padding"])
def test_a_batch_that_a_grid_cannot_hold_is_cut(kernels, monkeypatch, bias):
    monkeypatch.setattr(efficient, "GRID", 2)
    case = dense(lens_q=(7,) * 5, lens_k=(9,) * 5, bias=bias)
    assert verified(efficient.BACKEND, [case]) == ({"dense"}, set())
    for fake in kernels.values():
        assert {args[0].shape[0] for args, _ in fake.calls} == {2, 1}


def test_whether_heads_share_keys_is_declared_by_torchs_version():
    assert efficient.FORWARD.gqa is efficient.BACKWARD.gqa is versions.EFFICIENT_SHARES_HEADS


@pytest.mark.each_value("heads", "dims", "bias")
@pytest.mark.parametrize("bias", ["none", "additive", "key padding"])
@pytest.mark.parametrize("dims", [(64, 64), (512, 256)], ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=str)
def test_from_torch_2_14_on_the_kernels_get_shared_heads_as_they_are(kernels, monkeypatch, heads, dims, bias):
    monkeypatch.setattr(versions, "EFFICIENT_SHARES_HEADS", True)
    case = dense(heads=heads, dims=dims, bias=bias, lens_q=(9,) * 2, lens_k=(7,) * 2)
    assert verified(sharing(True), [case]) == ({"dense"}, set())
    for fake, place in zip(kernels.values(), (0, 1), strict=True):
        assert {tuple(x.shape[2] for x in args[place:][:2]) for args, _ in fake.calls} == {heads}


CAUSAL = {
    "as many queries as keys": ((5, 5), (-1, 0), 2),
    "fewer queries, bottom-right": ((5, 9), (-1, 0), 2),
    "more queries, top-left": ((9, 5), (-1, 4), 1),
}


@pytest.mark.parametrize(("lengths", "window", "mask"), CAUSAL.values(), ids=CAUSAL)
def test_both_alignments_of_a_causal_mask_reach_the_kernels(kernels, lengths, window, mask):
    case = dense(lens_q=(lengths[0],) * 2, lens_k=(lengths[1],) * 2, window=window)
    assert verified(efficient.BACKEND, [case]) == ({"dense"}, set())
    assert {args[9] for args, _ in kernels[efficient_ops.FORWARD].calls} == {mask}


def test_the_random_state_is_the_kernels_and_goes_back_to_it_on_the_host(kernels):
    q, k, v, grad, call = inputs(dense())
    call = call._replace(dropout=0.2, rng_state=torch.zeros(2, dtype=torch.uint64))
    loaded = on_cpu(efficient.BACKEND).load()
    out, lse = loaded.forward(q, k, v, call)
    assert call.rng_state.tolist() == [efficient_ops.SEED, efficient_ops.OFFSET]
    loaded.backward(grad, q, k, v, out, lse, call)
    args, _ = kernels[efficient_ops.BACKWARD].calls[0]
    assert [int(x) for x in args[12:14]] == [efficient_ops.SEED, efficient_ops.OFFSET]


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_a_call_without_scores_reaches_no_kernel(kernels, lengths):
    case = dense(lens_q=(lengths[0],) * 2, lens_k=(lengths[1],) * 2)
    assert verified(efficient.BACKEND, [case]) == ({"dense"}, set())
    assert not any(fake.calls for fake in kernels.values())


# Limits


FLOAT32 = {"dtype": "float32", "heads_q": 2, "heads_k": 2}
REFUSED = {
    "head dims must be multiples of 8 in bfloat16, got 12 and 12": {"head_dim": 12, "dtype": "bfloat16"},
    "head_dim must be 4 to 65536 in steps of 4, got 65540": {"head_dim": 65540, "head_dim_v": 8},
    "query and key must have the same number of heads, got 4 and 2": {"heads_q": 4},
    "input must be dense, got packed": {"varlen": True},
    "window_size must be (-1, -1) or causal, got (3, 0)": {"window": (3, 0)},
    "a causal call must have no more queries than keys, got 65 and 64": {"window": (-1, 0), "max_q": 65},
    "attn_bias must be None with a causal mask, got a tensor": {"window": (-1, 0), "bias": True},
    "max_k must be above 1 in float32, got 1: gradients that are 0 would be rounding errors": {
        "max_k": 1, "needs_backward": True
    },
    "dropout_p must be below 1, got 1.0": {"dropout": 1.0},
    "batch must be at most 65535 with dropout, got 70000": {"dropout": 0.1, "batch": 70000},
    "compute capability must be 8.0 or above for bfloat16, got 7.5": {
        "device": "sm_75", "dtype": "bfloat16"
    },
    "dropout_p must be 0 in a CUDA graph: the random state is read on the host": {
        "dropout": 0.1, "capturing": True
    },
}  # fmt: skip


def test_a_forward_of_one_key_is_taken_where_no_gradient_is_needed():
    entry = Entry("efficient", "a test", dataclasses.replace(efficient.BACKEND, unavailable=lambda: None))
    assert entry.reasons(gpu_spec(**FLOAT32, max_k=1, needs_backward=False), "forward") == ()


@pytest.mark.parametrize(("reason", "changes"), REFUSED.items())
def test_what_the_kernels_do_not_take_is_refused(reason, changes):
    spec = gpu_spec(**{**FLOAT32, **changes})
    entry = Entry("efficient", "a test", dataclasses.replace(sharing(False), unavailable=lambda: None))
    assert entry.reasons(spec, "forward") == entry.reasons(spec, "backward") == (reason,)


ONLY_HERE = {
    "float32": {},
    **({"shared heads": {"heads_k": 1}} if versions.EFFICIENT_SHARES_HEADS else {}),
    "a bias": {"dtype": "bfloat16", "bias": True, "device": "sm_80"},
    "head dim 264": {"dtype": "bfloat16", "head_dim": 264},
    "a batch above 65535": {"batch": 70000},
}


@pytest.mark.parametrize("changes", ONLY_HERE.values(), ids=ONLY_HERE)
def test_on_a_gpu_it_serves_what_the_other_kernels_refuse(changes):
    explanation = attnreg.explain(gpu_spec(**{**FLOAT32, **changes}, needs_backward=True))
    assert (explanation.backend, explanation.backward.backend) == ("efficient", "efficient")
    assert explanation.rejected.keys() >= {"FA2", "FA3", "FA4", "cuDNN"}


def test_other_kernels_that_can_run_a_call_come_before_it():
    order = attnreg.explain(gpu_spec(heads_q=2, heads_k=2)).forward.order
    names = ["FA4", "cuDNN", "FA2", "FA3", "efficient", "math"]
    assert [name for name in order if name in names] == names


def test_of_torchs_own_calls_only_too_large_a_batch_is_taken_from_its_kernel(kernels):
    loaded = on_cpu(efficient.BACKEND).load()
    for batch in (1, 65535, 65536):
        for direction in ("forward", "backward"):
            spec = gpu_spec(**FLOAT32, batch=batch)
            assert loaded.replaces_native(direction, spec) is (batch == 65536)


def test_torchs_own_kernel_comes_first_for_calls_that_its_selector_sent_there():
    entry = Entry("fa4", "a test", dataclasses.replace(efficient.BACKEND, name="fa4", priority=30))
    entries = entries_with_native(Native("efficient"), {"fa4": entry})
    decision = decide(gpu_spec(**FLOAT32, head_dim=3), "forward", entries, Policy(), "efficient")
    assert (decision.backend, decision.order) == ("efficient", ("efficient", "fa4"))

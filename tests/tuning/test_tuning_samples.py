"""Promises of the look at a call's own size: right results pass, and one that is astray there doesn't."""

import dataclasses

import pytest
import torch
from support.tuned import asked

from attnreg import _registry
from attnreg.tuning.samples import astray
from attnreg.tuning.workload import copies

CPU = torch.device("cpu")

SPECS = {
    "dense": asked(70, head_dim=16, head_dim_v=16),
    "causal": asked(70, head_dim=16, head_dim_v=16, window=(-1, 0)),
    "fewer key heads": asked(40, heads_k=2, head_dim=16, head_dim_v=16),
    "window": asked(90, head_dim=16, head_dim_v=16, window=(5, 3)),
    "more queries than keys": asked(max_q=60, max_k=20, head_dim=16, head_dim_v=16, window=(-1, 0)),
    "packed": asked(80, varlen=True, batch=5, tokens_q=200, tokens_k=200, head_dim=16, head_dim_v=16),
    "one query": asked(max_q=1, max_k=99, head_dim=16, head_dim_v=16),
    "float32": asked(64, dtype="float32", head_dim=16, head_dim_v=16),
    "long and causal": asked(1500, batch=1, head_dim=16, head_dim_v=16, window=(-1, 0)),
    "one key": asked(max_q=8, max_k=1, head_dim=16, head_dim_v=16),
    "one key, float32": asked(max_q=8, max_k=1, head_dim=16, head_dim_v=16, dtype="float32"),
    "one of each": asked(1, head_dim=16, head_dim_v=16),
    "itself alone": asked(40, head_dim=16, head_dim_v=16, window=(0, 0)),
    "large values": asked(64, head_dim=16, head_dim_v=16, window=(-1, 0)),
}


@pytest.fixture(params=SPECS.values(), ids=SPECS)
def results(request):
    spec = dataclasses.replace(request.param, needs_backward=True)
    copy = copies(spec, CPU)[0]
    if request.param is SPECS["large values"]:
        copy = copy._replace(q=copy.q * 5, k=copy.k * 5)
    kernels = _registry.find("math").kernels()
    forward = kernels.forward(*copy[:3], copy.call)
    backward = kernels.backward(copy.grad_out, *copy[:3], *forward, copy.call)
    return copy, forward, backward


def test_what_is_right_passes(results):
    copy, forward, backward = results
    assert astray("forward", copy, forward) == ""
    assert astray("backward", copy, backward, forward) == ""


@pytest.mark.parametrize("place", range(5), ids=["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("fault", ["not finite", "another sequence's", "scaled"])
def test_what_is_astray_does_not(results, place, fault):
    copy, forward, backward = results
    direction, given = ("forward", forward) if place < 2 else ("backward", backward)
    name, number = ("out", "lse", "dq", "dk", "dv")[place], place if place < 2 else place - 2
    if (name == "lse" and fault == "not finite") or not given[number].any():
        return
    # Where little is left of the terms that a gradient is the sum of, its own size is too little to see.
    cancels = given[number].norm() < 0.2 * backward[2].norm() or copy.q.abs().max() > 10
    if fault == "scaled" and name in ("dq", "dk") and cancels:
        return
    changed = list(given)
    changed[number] = {
        "not finite": lambda x: x.clone().index_fill_(0, torch.tensor(0), torch.nan),
        "another sequence's": lambda x: torch.flip(x, (0,)) + 1,
        "scaled": lambda x: x * 3,
    }[fault](given[number])
    told = astray(direction, copy, changed, forward)
    assert told.startswith(f"{name} has values" if fault == "not finite" else f"{name} of a sampled row is")


@pytest.mark.parametrize("place", range(4), ids=["out", "dq", "dk", "dv"])
def test_the_far_end_of_a_long_causal_call_counts_as_much_as_its_beginning(place):
    spec = dataclasses.replace(SPECS["long and causal"], needs_backward=True)
    copy = copies(spec, CPU)[0]
    kernels = _registry.find("math").kernels()
    forward = kernels.forward(*copy[:3], copy.call)
    backward = kernels.backward(copy.grad_out, *copy[:3], *forward, copy.call)
    given = [x.clone() for x in (forward if place == 0 else backward)]
    given[max(place - 1, 0)][:, 600:] = 0
    assert astray("forward" if place == 0 else "backward", copy, given, forward) != ""

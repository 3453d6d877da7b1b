"""Promises of the look at a call's own size: right results pass, and one that is astray there doesn't."""

import dataclasses

import pytest
import torch
from tuned import asked

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
}


@pytest.fixture(params=SPECS.values(), ids=SPECS)
def results(request):
    spec = dataclasses.replace(request.param, needs_backward=True)
    copy = copies(spec, CPU)[0]
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
    changed = list(given)
    changed[number] = {
        "not finite": lambda x: x.clone().index_fill_(0, torch.tensor(0), torch.nan),
        "another sequence's": lambda x: torch.flip(x, (0,)) + 1,
        "scaled": lambda x: x * 1.2,
    }[fault](given[number])
    told = astray(direction, copy, changed, forward)
    assert told.startswith(f"{name} has values" if fault == "not finite" else f"{name} of sampled rows")

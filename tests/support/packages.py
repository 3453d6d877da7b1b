"""Kernel packages that register ops with torch, faked on the CPU, and what tests ask of their backends."""

import dataclasses

import pytest
import torch
from support.chosen_cases import ALIKE, for_fakes

from attnreg import AttentionSpec, Device
from attnreg.testing import Conformance
from attnreg.tools.measure import QUICK

# Fakes drop nothing. Only real kernels say what becomes of a NaN: fakes refuse it, as no adapter may pass on
# what isn't seen.
_TAKEN = [case for case in QUICK if case.dtype == "bfloat16" and not case.dropout]
SHORT = [
    dataclasses.replace(case, seen_nan=False)
    for case in for_fakes(_TAKEN) + [case for case in _TAKEN if case.page_size and case.max_k >= 300]
]
# What a test is given that holds a backend to all of these: in the fast tier a part stands for the rest.
FEWER_OR_ALL = [
    pytest.param([case for case in SHORT if not ALIKE.search(case.name)], id="fewer"),
    pytest.param(SHORT, id="all", marks=pytest.mark.slow),
]


def on_cpu(backend):
    """Return a backend that declares to run on the CPU, where its kernels are faked, and that it can load."""
    here = {"devices": ("cpu",), "compute_capability": None}
    limits = {name: dataclasses.replace(getattr(backend, name), **here) for name in ("forward", "backward")}
    return dataclasses.replace(backend, **limits, unavailable=lambda: None)


def gpu_spec(device="sm_90", **changes):
    """Return the spec of a call on a GPU that needn't be here."""
    given = {"dtype": "bfloat16", "batch": 2, "max_q": 64, "max_k": 64, "heads_q": 8, "heads_k": 2}
    given |= {"device": Device.parse(device), "head_dim": 128, "head_dim_v": changes.get("head_dim", 128)}
    return AttentionSpec(**{**given, **changes})


def verified(backend, cases):
    """Hold a backend to cases; return the names of those that ran in both directions, and forward only."""
    outcomes = list(map(Conformance(on_cpu(backend), "cpu").run, cases))
    assert [str(outcome) for outcome in outcomes if not outcome.passed] == []
    forward = {"out", "lse"}
    return tuple(
        {outcome.case.name for outcome in outcomes if outcome.errors.keys() == tensors}
        for tensors in (forward | {"dq", "dk", "dv"}, forward)
    )


class Package:
    """A package's ops; keeps the arguments of each call by name.

    Args:
        namespace: of the ops.
        ops: schema and function of each op; the function is given a dict of all arguments.
        passed: the keywords that an adapter checks each op for. Calls by others are refused, which the op
            can't do itself: torch doesn't hand on arguments that equal their defaults.
    """

    def __init__(self, namespace, ops, passed):
        self.calls, self.ops = [], getattr(torch.ops, namespace)
        self.library = torch.library.Library(namespace, "FRAGMENT")
        for schema, function in ops:
            name = self.library.define(schema)
            self.library.impl(name, self._by_name(name, function), "CPU")
            self._restrict(getattr(self.ops, name), passed[name])

    def _by_name(self, name, function):
        def run(*args, **kwargs):
            declared = getattr(self.ops, name).default._schema.arguments
            given = {one.name: one.default_value for one in declared}
            given |= dict(zip(given, args, strict=False)) | kwargs
            self.calls.append((name, given))
            return function(given)

        return run

    def _restrict(self, packet, passed):
        op = packet.default
        needed = {one.name for one in op._schema.arguments if not one.has_default_value()}

        def run(**given):
            assert given.keys() == needed.union(passed), (
                f"{packet} isn't checked for the keywords it is given"
            )
            return op(**given)

        run._schema = op._schema
        packet.default = run

    def unregister(self):
        """Undo all of it, also in torch.ops, which keeps what it has looked up."""
        self.library._destroy()
        for name in list(vars(self.ops)):
            if isinstance(vars(self.ops)[name], torch._ops.OpOverloadPacket):
                delattr(self.ops, name)

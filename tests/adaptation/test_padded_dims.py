"""Promises of `adaptation.padded_dims`: a kernel gets head dims that it takes, and the call's scale."""

import dataclasses

import pytest
import torch
from support import flash

import attnreg
from attnreg.core import registry
from attnreg.core.adaptation.padded_dims import PaddedDims
from attnreg.core.contract.backend import Call
from attnreg.core.contract.capabilities import Range
from attnreg.core.contract.spec import AttentionSpec, Device
from attnreg.core.registry.entry import Entry
from attnreg.testing import Conformance
from attnreg.tools.explanation.call_spec import ODD_DIMS
from attnreg.tools.measure import Case

pytestmark = pytest.mark.usefixtures("no_other_lengths")

STEPS = {"head_dim": Range(8, 256, 8), "head_dim_v": Range(8, 256, 8)}
TENSORS = {"out", "lse", "dq", "dk", "dv"}

LENGTHS = {"lens_q": (33, 7, 0, 20), "lens_k": (40, 3, 5, 0), "varlen": True}
OPTIONS = {
    "packed": LENGTHS,
    "window, shared heads": LENGTHS | {"window": (4, 1), "heads": (6, 2)},
    "rows of no sequence": LENGTHS | {"tail": 5, "poison": True, "window": (-1, 0)},
    "seqused_k": LENGTHS | {"seqused_k": (17, 0, 5, 0), "heads": (4, 1)},
    "sinks": LENGTHS | {"sinks": True, "window": (-1, 0)},
    "softcap": LENGTHS | {"softcap": 2.0},
    "ALiBi": LENGTHS | {"alibi": True},
    "dropout": LENGTHS | {"dropout": 0.3},
    "scale": LENGTHS | {"scale": 0.4},
    "gradient of the LSE": LENGTHS | {"grad_lse": True},
    "strided": LENGTHS | {"layout": "last dim strided"},
    "dense": {"lens_q": (33, 33), "lens_k": (20, 20), "window": (-1, 0), "heads": (4, 2)},
    "dense, bias": {"lens_q": (33, 33), "lens_k": (20, 20), "bias": "additive"},
}


@pytest.mark.each_value("options", "dims")
@pytest.mark.parametrize("dims", [(59, 59), (64, 59), (43, 48)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_is_right(fake, options, dims):
    recorder = fake("mine", **STEPS)
    kit = Conformance(recorder.backend, "cpu")
    for dtype in ("float32", "bfloat16"):
        outcome = kit.run(Case(name="mine", dims=dims, dtype=dtype, **options))
        assert outcome.passed, outcome
        assert (outcome.errors.keys(), outcome.reasons) == (TENSORS, ())
    wide = [-(-dim // 8) * 8 for dim in dims]
    for given in (*(x[:3] for x in recorder.forwards), *(x[1:4] for x in recorder.backwards)):
        assert [x.shape[-1] for x in given] == [wide[0], *wide]
    assert recorder.forwards and recorder.backwards


@pytest.mark.parametrize("dims", [(1, 1), (5, 3), (7, 16), (250, 250)], ids=str)
def test_every_head_dim_is_right_beside_columns_of_the_gradient_of_the_lse(fake, dims):
    seen, limits = [], {"grad_lse": False, "delta_from_out": True, "dropout": False, "bias": False}
    wider = {"head_dim": Range(8, 264, 8), "head_dim_v": Range(8, 264, 8)}
    backend = fake("mine", load=lambda: flash.kernels(seen), **limits, **wider).backend
    outcome = Conformance(backend, "cpu").run(Case(name="mine", dims=dims, grad_lse=True, **LENGTHS))
    assert outcome.passed, outcome
    assert outcome.errors.keys() == TENSORS
    wide = [-(-dim // 8) * 8 + 8 for dim in dims]
    assert {(given[1].shape[-1], given[3].shape[-1]) for given in seen} == {tuple(wide)}


def test_results_are_contiguous_and_only_what_needs_it_is_copied():
    given = []

    def kernel(*arguments):
        given.append(arguments)
        call = arguments[-1]
        return (arguments[2], arguments[0]) if call.max_q else (*arguments[1:4], call)

    query, key = torch.randn(2, 7, 2, 16).unbind()
    value, call = torch.randn(7, 2, 13), Call(0.3, 7, 7)
    out, _ = PaddedDims().wrap(kernel, "forward")(query, key, value, call)
    assert torch.equal(out, value) and out.is_contiguous()
    assert given[0][0] is query and given[0][1] is key
    assert given[0][2].shape == (7, 2, 16) and given[0][2][..., 13:].eq(0).all()
    last = call._replace(max_q=0)
    results = PaddedDims().wrap(kernel, "backward")(value, query, key, value, value, query, last)
    # What follows the three gradients, as that of sinks does, is left alone.
    assert results[:2] == (query, key) and results[3] is last
    assert torch.equal(results[2], value) and results[2].is_contiguous()
    grad_out, q, k, v, out, lse, _ = given[1]
    assert q is query and k is key and lse is query
    assert all(x.shape == (7, 2, 16) and x[..., 13:].eq(0).all() for x in (grad_out, v, out))


# ---- which calls


def spec(**changes):
    given = AttentionSpec(
        device=Device("cpu"), dtype="bfloat16", batch=2, max_q=8, max_k=8, heads_q=4, heads_k=4, head_dim=59,
        head_dim_v=59, needs_backward=True,
    )  # fmt: skip
    return dataclasses.replace(given, **changes)


def test_a_spec_without_anything_to_pad_is_the_same_object():
    for one in (spec(head_dim=64, head_dim_v=8), spec(varlen=True, seqused_k=True, page_size=16)):
        assert PaddedDims().adapted(one) is one
    assert PaddedDims().adapted(spec(head_dim_v=111)) == spec(head_dim=64, head_dim_v=112)


def test_only_a_direction_that_does_not_take_the_head_dims_gets_others(fake):
    steps, every = fake("mine", **STEPS).backend, fake("mine").backend
    for backend, pads in (
        (steps, (True, True)),
        (every, (False, False)),
        (dataclasses.replace(steps, forward=every.forward), (False, True)),
        (dataclasses.replace(steps, backward=every.backward), (True, False)),
    ):
        entry = Entry("mine", "a test", backend)
        own, fit = entry.kernels(), entry.kernels(spec())
        assert (fit.forward is not own.forward, fit.backward is not own.backward) == pads
        assert entry.kernels(spec(head_dim=64, head_dim_v=64)) is own
        assert (entry.adapted(spec(), "forward"), entry.adapted(spec(), "backward")) == tuple(
            PaddedDims().adapted(spec()) if pad else spec() for pad in pads
        )
        for direction in ("forward", "backward"):
            assert entry.reasons(spec(), direction) == ()


def test_launchers_of_the_backend_which_take_other_head_dims_are_left_out(fake):
    kernels = flash.kernels()._replace(specialize=lambda *_: pytest.fail("specialize was called"))
    entry = Entry("mine", "a test", fake("mine", load=lambda: kernels, **STEPS).backend)
    assert entry.kernels(spec()).specialize is None
    assert entry.kernels(spec(head_dim=64, head_dim_v=64)).specialize is kernels.specialize


def test_the_reasons_are_those_of_the_padded_head_dims(fake):
    def refuses(spec):
        return (f"head_dim must not be 72, got {spec.head_dim}",) if spec.head_dim == 72 else ()

    entry = Entry("mine", "a test", fake("mine", refuses=refuses, bias=False, **STEPS).backend)
    pages = {"varlen": True, "seqused_k": True, "page_size": 16, "head_dim_v": 64}
    bias = "attn_bias must be None, got a tensor"
    for changes, reasons in (
        ({"head_dim": 67}, ("head dims padded from (67, 59) to (72, 64): head_dim must not be 72, got 72",)),
        ({"head_dim": 72}, ("head dims padded from (72, 59) to (72, 64): head_dim must not be 72, got 72",)),
        ({"head_dim": 72, "head_dim_v": 64}, ("head_dim must not be 72, got 72",)),
        # What is against the call either way says nothing of the padding.
        ({"bias": True}, (bias,)),
        # Beyond the limits nothing is padded, and with pages neither.
        ({"head_dim": 257}, ("head_dim must be 8 to 256 in steps of 8, got 257",)),
        (pages, ("head_dim must be 8 to 256 in steps of 8, got 59",)),
    ):
        found = entry.reasons(spec(**changes), "forward")
        assert found[:1] == reasons, changes


def test_a_value_may_get_the_head_dim_of_the_query_where_it_has_to_have_that(fake):
    entry = Entry("mine", "a test", fake("mine", head_dim=Range(8, 256, 8), head_dim_v=None).backend)
    assert entry.reasons(spec(head_dim_v=57), "forward") == ()
    assert entry.reasons(spec(head_dim_v=64), "backward") == ()
    assert entry.reasons(spec(head_dim_v=65), "forward") == (
        "head_dim must be 8 to 256 in steps of 8, got 59",
        "head_dim of the value must be that of the query, 59, got 65",
    )


H100, A100 = Device("cuda", (9, 0), simulated=True), Device("cuda", (8, 0), simulated=True)
SERVED = [
    ("FA2", A100, {}),
    ("FA2", H100, {"head_dim": 111, "head_dim_v": 111, "varlen": True, "dropout": 0.1}),
    ("FA4", H100, {"varlen": True, "window": (-1, 0), "softcap": 5.0, "grad_lse": True}),
    ("cuDNN", H100, {"head_dim": 111, "head_dim_v": 111, "varlen": True, "seqused_k": True}),
    ("cuDNN", A100, {"head_dim": 111, "head_dim_v": 59}),
    ("efficient", A100, {"dtype": "float32", "bias": True}),
]


@pytest.mark.parametrize(("name", "device", "changes"), SERVED)
def test_gpu_kernels_take_any_head_dims_in_both_directions_and_explain_says_so(name, device, changes):
    call = spec(device=device, **changes)
    found = attnreg.explain(call, backend=name)
    assert (found.forward.backend, found.backward.backend) == (name, name)
    before, after = (
        (call.head_dim, {59: 64, 111: 112}[call.head_dim])
        if call.head_dim == call.head_dim_v
        else ("(111, 59)", "(112, 64)")
    )
    for direction in ("forward", "backward"):
        note = f"{direction} on {name}: head dims padded from {before} to {after}"
        assert note in found.notes and f"note: {note}" in str(found)


def test_explain_says_how_many_columns_padded_head_dims_have_with_a_gradient_of_the_lse():
    found = attnreg.explain(spec(device=A100, varlen=True, grad_lse=True), backend="FA2")
    given = "given the gradient of the LSE in 8 more columns of the head dim, 72 for 64"
    assert [note for note in found.notes if note.startswith(("forward on", "backward on"))] == [
        "forward on FA2: head dims padded from 59 to 64",
        "backward on FA2: head dims padded from 59 to 64",
        f"backward on FA2: {given}",
    ]
    wide = spec(device=H100, head_dim=251, head_dim_v=251, grad_lse=True)
    (reason,) = registry.find("FA2").reasons(wide, "backward")
    assert reason == (
        "head dims padded from 251 to 256: grad_lse takes 8 more columns of the head dim: "
        "head_dim must be 8 to 256 in steps of 8, got 264"
    )


@pytest.mark.parametrize(
    ("changes", "noted"),
    [
        ({}, False),  # torch pads for its flash kernel
        ({"bias": True}, True),
        ({"head_dim_v": 64}, True),
        ({"head_dim": 264, "head_dim_v": 259}, True),
        ({"head_dim": 264, "head_dim_v": 264, "bias": True}, False),
        ({"dtype": "float32"}, True),
        ({"dtype": "float32", "head_dim": 60, "head_dim_v": 60}, False),
        ({"varlen": True, "head_dim_v": 64}, False),
        ({"softcap": 1.0, "dtype": "float32"}, False),  # which SDPA doesn't have
        ({"device": Device("cpu"), "head_dim_v": 64}, False),
    ],
)
def test_that_torch_keeps_calls_of_odd_head_dims_to_its_math_kernel_has_a_note(changes, noted):
    found = attnreg.explain(spec(**{"device": H100, "needs_backward": False} | changes))
    assert (ODD_DIMS in found.notes) is noted


def test_fa4s_wrong_gradients_are_refused_of_padded_head_dims_too():
    call = spec(device=H100, head_dim=111, head_dim_v=111, varlen=True)
    assert registry.find("FA4").reasons(call, "forward") == ()
    (reason,) = registry.find("FA4").reasons(call, "backward")
    assert reason.startswith("head dims padded from 111 to 112: head_dim must not be 8, 16, ")


def test_by_default_math_runs_no_16_bit_call_of_such_head_dims_on_a_gpu():
    for device in (A100, H100):
        for dim in (59, 111):
            for varlen in (False, True):
                call = spec(device=device, head_dim=dim, head_dim_v=dim, varlen=varlen, window=(-1, 0))
                found = attnreg.explain(call)
                assert "math" not in (found.forward.backend, found.backward.backend)


def test_cpu_and_math_get_the_head_dims_of_the_call():
    for name in ("cpu", "math"):
        entry = registry.find(name)
        # The second has a value that `cpu` takes, but not beside this query.
        for call in (spec(), spec(head_dim=64)):
            assert all(entry.adapted(call, direction) is call for direction in ("forward", "backward"))
            assert entry.kernels(call) is entry.kernels()
    assert not [note for note in attnreg.explain(spec(varlen=True)).notes if "padded" in note]

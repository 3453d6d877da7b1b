"""Promises of `adaptation.lse_columns`: a kernel without a gradient of the LSE is given it in columns."""

import dataclasses

import pytest
import torch
from support import flash
from support.lse_gradients import beyond_the_rule, drawn

import attnreg
from attnreg.core import registry
from attnreg.core.adaptation.lse_columns import LseColumns
from attnreg.core.contract.backend import Call, Kernels
from attnreg.core.contract.capabilities import Range
from attnreg.core.contract.spec import AttentionSpec, Device
from attnreg.core.registry.entry import Entry
from attnreg.testing import Conformance
from attnreg.tools.measure import Case
from attnreg.tools.measure.reference import attention

pytestmark = pytest.mark.usefixtures("no_other_lengths")

FORWARD, BACKWARD = (
    getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{end}") for end in ("", "_backward")
)
HALVES = [torch.bfloat16, torch.float16]


def cpu_flash():
    """Return torch's CPU flash kernel for dense calls without a mask."""

    def forward(query, key, value, call):
        out, lse = FORWARD(*(x.transpose(1, 2) for x in (query, key, value)), scale=call.scale)
        return out.transpose(1, 2), lse

    def backward(*given):
        *tensors, lse, call = given
        dense = (x.transpose(1, 2) for x in tensors)
        return tuple(x.transpose(1, 2) for x in BACKWARD(*dense, lse, 0.0, False, scale=call.scale))

    return Kernels(forward, backward)


def spec(**changes):
    given = AttentionSpec(
        device=Device("cpu"), dtype="bfloat16", batch=2, max_q=8, max_k=8, heads_q=4, heads_k=4, head_dim=16,
        head_dim_v=16, needs_backward=True, grad_lse=True,
    )  # fmt: skip
    return dataclasses.replace(given, **changes)


@pytest.fixture
def flash_like(fake):
    """Make a backend whose backward takes no gradient of the LSE."""

    def make(kernels, **limits):
        off = {"grad_lse": False, **dict.fromkeys(("dropout", "bias", "alibi"), False)}
        options = {**off, "page_size": None, "delta_from_out": True, **limits}
        return fake("flash-like", load=lambda: kernels, **options).backend

    return make


def gradients(kernels, given):
    """Return the gradients of query, key and value."""
    *inputs, grad_out, call = given
    return kernels.backward(grad_out, *inputs, *kernels.forward(*inputs, call), call)


@pytest.mark.each_value("dtype", "size", "of_out")
@pytest.mark.parametrize("of_out", [1.0, 0.0], ids=["both", "of the LSE alone"])
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0, 1e2, 1e4], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_torchs_cpu_kernel_is_right_by_the_accuracy_rule(flash_like, dtype, size, of_out):
    entry = Entry("flash-like", "a test", flash_like(cpu_flash(), varlen=False, gqa=False, causal=False))
    case = Case(name="mine", lens_q=(65,) * 2, lens_k=(129,) * 2, dims=(32, 32), dtype=dtype, grad_lse=True)
    given = drawn(case, size, of_out)
    grads = gradients(entry.kernels(case.spec(Device("cpu"))), given)
    assert beyond_the_rule(case, given, grads) == {}
    assert all(grad.any() for grad in grads[:2])


def test_a_gradient_beyond_float16_is_right_where_the_weights_bring_it_down_again():
    """Plain PyTorch in float16 has infinity for it, so the accuracy rule would admit anything."""
    case = Case(name="mine", lens_q=(9,), lens_k=(600,), dims=(32, 32), dtype="float16", grad_lse=True)
    kernels, given = cpu_flash(), drawn(case, 1.5e5)
    assert given.call.grad_lse.abs().max() > 3 * torch.finfo(torch.float16).max
    truth = attention(case, given, torch.float64)[2:5]
    grads = gradients(kernels._replace(backward=LseColumns().wrap(kernels.backward, "backward")), given)
    for got, wanted in zip(grads, truth, strict=True):
        atol = 4e-3 * float(wanted.abs().max())
        torch.testing.assert_close(got.double(), wanted, rtol=2e-2, atol=atol)


# Relative to the gradient, and absolute: of float16 that is where its numbers end.
PRECISE_TO = {
    torch.bfloat16: (2.0**-16, 0.0),
    torch.float16: (2.0**-22, 2.0**-31),
    torch.float32: (2.0**-24, 0.0),
    torch.float64: (0.0, 0.0),
}


@pytest.mark.parametrize("dtype", PRECISE_TO, ids=str)
def test_delta_has_the_gradient_of_every_size(dtype):
    sizes = 10.0 ** torch.arange(-12, 7, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(2, len(sizes), generator=generator, dtype=torch.float64) - 0.5
    grad_lse = (2 * drawn * sizes).to(torch.promote_types(dtype, torch.float32))
    shape = (len(sizes), 2, 8)  # (T, H, D)
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    given = []

    def backward(*arguments):
        given.extend(arguments)
        return arguments[1:4]

    zeros = torch.zeros_like(query)
    offsets = torch.tensor([0, len(sizes)], dtype=torch.int32)
    call = Call(0.3, len(sizes), len(sizes), (-1, 0), offsets, offsets, grad_lse=grad_lse)
    results = LseColumns().wrap(backward, "backward")(
        zeros, query, key, value, query, torch.zeros_like(grad_lse), call
    )
    assert all(map(torch.equal, results, (query, key, value)))
    assert all(x.is_contiguous() for x in results)
    grad_out, *wide, out, _lse, narrow = given
    assert narrow == call._replace(grad_lse=None)
    for x in wide:
        assert x.shape == (*shape[:2], 16)
        assert x[..., 8:].count_nonzero() == 0
    found = -(grad_out.double() * out.double()).sum(-1).mT
    relative, absolute = PRECISE_TO[dtype]
    error, wanted = (found - grad_lse).abs(), grad_lse.double().abs()
    assert (error <= (relative * wanted).clamp(min=absolute)).all()
    # In one column alone, as a rounding to the dtype would leave it, it would be less precise.
    if dtype in HALVES:
        assert ((grad_lse - grad_lse.to(dtype)).abs() > relative * wanted).any()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_row_that_sees_no_key_has_no_gradient_in_the_columns(dtype):
    x, given = torch.ones(2, 3, 1, 8, dtype=dtype), []

    def backward(*arguments):
        given.extend(arguments)
        return arguments[1:4]

    lse = torch.tensor([0.0, -torch.inf, 1.0]).expand(2, 1, 3)
    grad_lse = torch.tensor([2.0, torch.nan, 3.0]).expand(2, 1, 3)
    LseColumns().wrap(backward, "backward")(x, x, x, x, x, lse, Call(1.0, 3, 3, grad_lse=grad_lse))
    columns = (given[0] * given[4])[..., 8:].sum(-1)
    assert columns[..., 0].tolist() == [[-2.0, 0.0, -3.0]] * 2


LENGTHS = {"lens_q": (33, 7, 0, 20), "lens_k": (40, 3, 5, 0), "varlen": True}
OPTIONS = {
    "packed": LENGTHS,
    "causal": LENGTHS | {"window": (-1, 0)},
    "window, shared heads": LENGTHS | {"window": (4, 1), "heads": (6, 2)},
    "rows of no sequence": LENGTHS | {"tail": 5, "poison": True},
    "seqused_k": LENGTHS | {"seqused_k": (17, 0, 5, 0), "heads": (4, 1)},
    "sinks": LENGTHS | {"sinks": True, "window": (-1, 0)},
    "dense": {"lens_q": (33, 33), "lens_k": (20, 20), "window": (-1, 0), "heads": (4, 2)},
    "scale": LENGTHS | {"scale": 0.4},
    "softcap": LENGTHS | {"softcap": 2.0, "heads": (4, 2)},
}


@pytest.mark.each_value("options", "dtype")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_layout_and_mask_is_right(flash_like, options, dtype):
    seen = []
    kit = Conformance(flash_like(flash.kernels(seen)), "cpu")
    outcome = kit.run(Case(name="mine", dims=(16, 16), dtype=dtype, grad_lse=True, **options))
    assert outcome.passed, outcome
    assert outcome.errors.keys() == {"out", "lse", "dq", "dk", "dv"}
    assert {x.shape[-1] for given in seen for x in given[:5]} == {24}


def test_a_kernel_that_computes_an_output_of_its_own_is_found_if_it_declares_delta_from_out(fake):
    """As `math` does in 16 bits, which takes a gradient of the LSE itself: a column would be lost there."""
    backend = fake("mine", grad_lse=False, delta_from_out=True).backend
    case = Case(name="mine", lens_q=(33,), lens_k=(40,), dtype="bfloat16", grad_lse=True)
    outcome = Conformance(backend, "cpu").run(case)
    assert not outcome.errors["dq"].passed
    assert outcome.errors["dv"].passed


# ---- which calls it may run


def reasons(backend, **changes):
    return Entry("mine", "a test", backend).reasons(spec(**changes), "backward")


def test_only_a_backward_that_declares_it_is_given_columns(fake):
    declared = fake("mine", grad_lse=False, delta_from_out=True).backend
    undeclared = fake("mine", grad_lse=False).backend
    native = fake("mine", grad_lse=True, delta_from_out=True).backend
    assert reasons(declared) == reasons(native) == ()
    assert reasons(undeclared) == ("grad_lse must be None, got a tensor: no gradient of the LSE",)
    for backend, adds in ((declared, True), (undeclared, False), (native, False)):
        entry = Entry("mine", "a test", backend)
        names = [type(one).__name__ for one, _ in entry.adaptations(spec(), "backward")]
        assert names == ["LseColumns"] * adds
        assert not entry.adaptations(spec(), "forward")
        assert not entry.adaptations(spec(grad_lse=False), "backward")
        own = entry.kernels()
        assert (entry.kernel("backward", spec()) is own.backward) is not adds
        assert entry.kernels(spec(grad_lse=False)) is own
        assert entry.kernels(spec()).forward is own.forward


def test_launchers_of_the_backend_which_know_of_no_columns_are_left_out(fake):
    kernels = flash.kernels()._replace(specialize=lambda *_: pytest.fail("specialize was called"))
    backend = fake("mine", grad_lse=False, delta_from_out=True, load=lambda: kernels).backend
    assert Entry("mine", "a test", backend).kernels(spec()).specialize is None


def test_the_limits_have_to_admit_the_columns_as_well(fake):
    def refuses(spec):
        return (f"head_dim_v must not be 40, got {spec.head_dim_v}",) if spec.head_dim_v == 40 else ()

    limits = {"head_dim": Range(8, 64, 8), "refuses": refuses}
    backend = fake("mine", grad_lse=False, delta_from_out=True, **limits).backend
    beyond = "grad_lse takes 8 more columns of the head dim: "
    assert reasons(backend, head_dim=56) == ()
    assert reasons(backend, head_dim=64) == (f"{beyond}head_dim must be 8 to 64 in steps of 8, got 72",)
    assert reasons(backend, head_dim_v=32) == (f"{beyond}head_dim_v must not be 40, got 40",)
    # What is against the call either way says nothing of columns.
    assert reasons(backend, head_dim=72) == ("head_dim must be 8 to 64 in steps of 8, got 72",)
    assert reasons(backend, head_dim=64, grad_lse=False) == ()


H100, A100 = Device("cuda", (9, 0), simulated=True), Device("cuda", (8, 0), simulated=True)
A10 = Device("cuda", (8, 6), simulated=True)
SERVED = [
    ("FA2", A100, {"head_dim": 64, "head_dim_v": 64}, ""),
    ("FA2", H100, {"head_dim": 248, "head_dim_v": 248}, ""),
    ("FA2", H100, {"head_dim": 256, "head_dim_v": 256}, "head_dim must be 8 to 256 in steps of 8, got 264"),
    ("FA2", A10, {"head_dim": 192, "head_dim_v": 192}, "head_dim must be at most 192, or above 224"),
    ("FA2", H100, {"dropout": 0.1}, ""),
    ("FA2", H100, {"deterministic": True, "varlen": True, "window": (4, 0), "heads_k": 2}, ""),
    ("cuDNN", H100, {"head_dim": 128, "head_dim_v": 64, "varlen": True, "seqused_k": True}, ""),
    ("cuDNN", A100, {"head_dim": 120, "head_dim_v": 120}, ""),
    ("cuDNN", A100, {"head_dim": 128, "head_dim_v": 128}, "head_dim must be 8 to 128 on compute capability"),
    ("cuDNN", H100, {"head_dim": 192, "head_dim_v": 128}, "head_dim above 192 must be the value's too"),
    ("efficient", A100, {"dtype": "float32"}, ""),
]


@pytest.mark.parametrize(("name", "device", "changes", "reason"), SERVED)
def test_which_gpu_kernels_are_given_columns(name, device, changes, reason):
    found = registry.find(name).reasons(spec(device=device, **changes), "backward")
    if not reason:
        assert found == ()
    else:
        (one,) = found
        assert one.startswith(f"grad_lse takes 8 more columns of the head dim: {reason}")


@pytest.mark.parametrize("name", ["FA2", "cuDNN"])
def test_explain_says_that_a_kernel_is_given_it_in_columns(name):
    call = spec(device=A100, varlen=True, window=(-1, 0), head_dim=64, head_dim_v=64)
    note = f"backward on {name}: given the gradient of the LSE in 8 more columns of the head dim, 72 for 64"
    explanation = attnreg.explain(call, backend=name)
    assert explanation.backward.backend == name
    assert note in explanation.notes
    assert f"note: {note}" in str(explanation)
    assert not [one for one in explanation.notes if one.startswith("forward on")]
    without = attnreg.explain(dataclasses.replace(call, grad_lse=False), backend=name)
    assert not [one for one in without.notes if "columns" in one]


@pytest.mark.parametrize("device", [A100, H100], ids=str)
def test_math_runs_no_such_backward_on_a_gpu_by_default(device, monkeypatch):
    monkeypatch.setenv("ATTNREG_DISABLE", "FA4")
    attnreg.reload()
    found = attnreg.explain(spec(device=device, varlen=True, window=(-1, 0), head_dim=64, head_dim_v=64))
    assert found.backward.backend == "cuDNN"
    # A head dim that leaves no room for columns.
    wide = attnreg.explain(spec(device=device, varlen=True, head_dim=256, head_dim_v=256)).backward
    assert wide.backend == "math"
    assert wide.rejected["FA2"] == (
        "grad_lse takes 8 more columns of the head dim: head_dim must be 8 to 256 in steps of 8, got 264",
    )

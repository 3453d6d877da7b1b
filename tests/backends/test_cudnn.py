"""Promises of the cuDNN backend: right values, what it refuses, what it derives from offsets, its launchers.

Which execution plans it builds and keeps is in test_cudnn_execution_plans.py.
"""

import dataclasses
from importlib.metadata import PackageNotFoundError
from unittest.mock import Mock

import pytest
import torch
from support import fake_cudnn, launchers
from support.chosen_cases import is_for_fakes
from support.fake_cudnn import ragged
from support.packages import gpu_spec
from support.sinks import assert_kernels_are_accurate
from support.truth import assert_accurate

from attnreg import Device
from attnreg.backends import cudnn
from attnreg.backends.cudnn import adapter, execution_plans, rounding
from attnreg.contract import offsets, rows
from attnreg.contract.backend import Call
from attnreg.contract.discovery import Entry
from attnreg.contract.launchers import AddressLauncher
from attnreg.measure import QUICK
from attnreg.torchlib.readback import AsyncReadback

H200 = Device("cuda", (9, 0), simulated=True)
ENTRY = Entry("cuDNN", "a test", cudnn.BACKEND)


def runs(case):
    return not any(ENTRY.reasons(case.spec(H200), direction) for direction in ("forward", "backward"))


# The fake computes heads and sequences one by one; the kernels run the whole matrix on a GPU.
CASES = [
    case
    for case in QUICK
    if runs(case)
    and (case.dtype == "bfloat16" or case.name == "length 33")
    and case.max_k < 300
    and is_for_fakes(case)
]


@pytest.fixture
def module(monkeypatch):
    return fake_cudnn.install(monkeypatch)


@pytest.fixture
def kernels(module):
    return cudnn._load()


@pytest.fixture
def shared_plans(kernels, monkeypatch):
    """Have each packed call run by an execution plan that has room for others, as later batches are."""
    monkeypatch.setattr(
        kernels.forward.args[0],
        "select",
        lambda problem: rounding.shared(rounding.exact(problem)) if problem.kind.packed else problem,
    )


# Values


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_that_it_takes_is_right_packed_ones_by_a_shared_plan_too(kernels, case, request):
    here = dataclasses.replace(cudnn.BACKEND, load=lambda: kernels, unavailable=lambda: None)
    kernels = Entry("cuDNN", "a test", here).kernels(
        case.spec(H200)
    )  # with columns for a gradient of the LSE
    assert_accurate(kernels, case)
    if case.varlen:
        request.getfixturevalue("shared_plans")
        assert_accurate(kernels, case)


def test_sinks_are_served_by_both_of_its_kernels(kernels):
    assert_kernels_are_accurate(kernels)


def test_the_cases_above_include_those_that_cudnn_gets_wrong():
    """Or the tests above would pass without the workarounds."""
    assert any(case.varlen and 0 in case.lens_k and max(case.lens_q) for case in CASES)
    assert any(case.varlen and case.max_q == 1 and 0 in case.lens_q for case in CASES)
    assert any(case.varlen and case.layout in ("fused qkv", "bhsd") for case in CASES)
    assert any(case.tail and case.poison for case in CASES)


def test_calls_without_queries_or_keys_reach_no_kernel(kernels, module):
    query, key, value, call = ragged([3, 9])
    for inputs in ((query[:0], key, value), (query, key[:0], value[:0])):
        out, lse = kernels.forward(*inputs, call)
        assert lse.shape == (4, len(inputs[0]))
        assert (lse == -torch.inf).all()
        grads = kernels.backward(out, *inputs, out, lse, call)
        assert [x.shape for x in (out, *grads)] == [x.shape for x in (inputs[0], *inputs)]
        assert not any(x.any() for x in (out, *grads))
    assert not module.graphs


def test_odd_strides_of_a_dimension_of_one_element_are_copied(kernels):
    query, key, value, call = ragged([3, 9], heads=(1, 1))
    expected = kernels.forward(query, key, value, call)[0]
    odd = [torch.empty_like(x).as_strided((12, 1, 16), (16, 3, 1)).copy_(x) for x in (query, key, value)]
    assert all(x.is_contiguous() and x.stride(1) == 3 for x in odd)
    assert torch.equal(kernels.forward(*odd, call)[0], expected)


@pytest.mark.parametrize(
    ("lens_k", "window", "alignments"),
    [
        (None, (-1, 0), ["BOTTOM_RIGHT", "TOP_LEFT"]),
        (None, (4, 0), ["BOTTOM_RIGHT", "TOP_LEFT"]),
        ([3, 12], (-1, 0), ["BOTTOM_RIGHT", "BOTTOM_RIGHT"]),
        ("equal, but another tensor", (-1, 0), ["BOTTOM_RIGHT", "BOTTOM_RIGHT"]),
        (None, (-1, -1), ["TOP_LEFT", "TOP_LEFT"]),  # the default: there is no mask
    ],
)
def test_a_masked_backward_is_aligned_top_left_where_lengths_are_known_to_agree(
    kernels, module, lens_k, window, alignments
):
    query, key, value, call = ragged([3, 9], lens_k if isinstance(lens_k, list) else None)
    if isinstance(lens_k, str):
        call = call._replace(cu_seqlens_k=call.cu_seqlens_q.clone())
    call = call._replace(window=window)
    out, lse = kernels.forward(query, key, value, call)
    kernels.backward(out, query, key, value, out, lse, call)
    assert [graph.options["diagonal_alignment"] for graph in module.graphs] == alignments


# What is derived from offsets


def test_layers_share_what_is_derived_from_offsets_until_these_change(kernels, monkeypatch):
    made, original = [], execution_plans.Lengths
    monkeypatch.setattr(execution_plans, "Lengths", lambda *args: made.append(args) or original(*args))
    query, key, value, call = ragged([3, 9])
    out, lse = kernels.forward(query, key, value, call)
    kernels.backward(out, query, key, value, out, lse, call)
    kernels.forward(query, key, value, call)
    assert len(made) == 1
    call.cu_seqlens_q[1] = 5
    changed, _ = kernels.forward(query, key, value, call)
    assert len(made) == 2
    assert torch.equal(changed, kernels.forward(query, key, value, ragged([5, 7])[-1]._replace(max_q=9))[0])
    for length in (4, 6, 8):  # in memory that the offsets before may have left
        call.cu_seqlens_q.data = torch.tensor([0, length, 12], dtype=torch.int32)
        changed, _ = kernels.forward(query, key, value, call)
        fresh = ragged([length, 12 - length])[-1]._replace(max_q=9)
        assert torch.equal(changed, kernels.forward(query, key, value, fresh)[0])


@pytest.mark.parametrize("what", ["inference tensors", "a capture"])
def test_nothing_is_kept_of_offsets_whose_changes_leave_no_trace(kernels, monkeypatch, what):
    query, key, value, call = ragged([3, 9])
    kernels.forward(query, key, value, call)
    if what == "a capture":
        monkeypatch.setattr(offsets, "needs_graph_memory", lambda offsets: True)
    else:
        with torch.inference_mode():
            cu_seqlens = call.cu_seqlens_q.clone()
        call = call._replace(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    kernels.forward(query, key, value, call)
    with torch.inference_mode():
        call.cu_seqlens_q[1] = 5
        changed, _ = kernels.forward(query, key, value, call)
        expected, _ = kernels.forward(query, key, value, ragged([5, 7])[-1]._replace(max_q=9))
    assert torch.equal(changed, expected)


class Known(offsets.Facts):
    no_unused_rows = every_row_sees_a_key = True


def test_results_start_as_zeros_until_it_is_known_that_every_row_is_written(kernels, monkeypatch):
    zeros = []
    monkeypatch.setattr(
        torch.Tensor, "new_zeros", lambda self, *a, **k: zeros.append("out") or self.new_full(*a, 0, **k)
    )
    query, key, value, call = ragged([3, 9])
    out, lse = kernels.forward(query, key, value, call)
    kernels.backward(out, query, key, value, out, lse, call)
    assert len(zeros) == 4
    monkeypatch.setattr(adapter, "facts", lambda *_: Known())
    assert torch.equal(kernels.forward(query, key, value, call)[0], out)
    kernels.backward(out, query, key, value, out, lse, call)
    assert len(zeros) == 4


@pytest.mark.parametrize(
    ("lens_q", "lens_k", "tokens", "facts"),
    [
        ([3, 9], [4, 9], (12, 13), [True, True]),
        ([3, 9], [4, 9], (13, 13), [False, False]),
        ([3, 9], [4, 9], (12, 14), [False, False]),
        ([3, 9], [4, 8], (12, 12), [True, False]),
        ([3, 9], [12, 0], (12, 12), [False, False]),
        ([3, 0, 9], None, (12, 12), [True, True]),
        ([3, 0, 9], None, (13, 13), [False, False]),
    ],
)
def test_the_device_reports_the_facts_of_a_batch_once(lens_q, lens_k, tokens, facts):
    call = ragged(lens_q, lens_k)[3]
    assert AsyncReadback(rows.facts(call.cu_seqlens_q, call.cu_seqlens_k, *tokens)).read() == facts


# What it refuses

MASKED = "a masked dense call must have no more queries than keys, got 65 and 64"
SMALL = "head_dim must be 8 to 128 on compute capability 8.x, got 136"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"max_q": 65, "window": (-1, 0)}, MASKED),
        ({"max_q": 65}, ""),
        ({"max_q": 65, "window": (-1, 0), "varlen": True}, ""),
        ({"seqused_k": True}, "seqused_k must be None with dense tensors, got a tensor"),
        ({"seqused_k": True, "varlen": True}, ""),
        ({"max_q": 1, "max_k": 1}, "query and key must not both have length 1, got 1 and 1"),
        ({"max_q": 1, "max_k": 1, "varlen": True}, ""),
        ({"head_dim": 256}, ""),
        ({"head_dim": 136, "device": "sm_86"}, SMALL),
        ({"head_dim": 256, "head_dim_v": 128}, "head_dim above 192 must be the value's too, got 256 and 128"),
        ({"head_dim": 192, "head_dim_v": 128}, ""),
        ({"dropout": 0.1}, "dropout_p must be 0, got 0.1"),
        ({"head_dim": 20, "head_dim_v": 64}, ""),
        ({"head_dim": 260, "head_dim_v": 64}, "head_dim must be 8 to 256 in steps of 8, got 260"),
        ({"dtype": "float32"}, "dtype must be float16 or bfloat16, got float32"),
        ({"bias": True}, "attn_bias must be None, got a tensor"),
        ({"batch": 65536}, "batch must be 0 to 65535, got 65536"),
        ({"batch": 65536, "varlen": True}, "batch must be 0 to 65535, got 65536"),
        ({"heads_q": 65536, "heads_k": 8}, "query heads must be 0 to 65535, got 65536"),
    ],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_it_refuses_and_why(changes, reason, direction):
    assert ENTRY.reasons(gpu_spec(**changes), direction) == ((reason,) if reason else ())


def test_only_a_backward_is_not_deterministic():
    spec = gpu_spec(deterministic=True)
    assert ENTRY.reasons(spec, "forward") == ()
    assert ENTRY.reasons(spec, "backward") == ("not deterministic, and deterministic algorithms are on",)


@pytest.mark.parametrize(
    ("installed", "found", "reason"),
    [
        (PackageNotFoundError("none"), None, "nvidia-cudnn-frontend isn't installed"),
        ("1.32.0", None, "nvidia-cudnn-frontend is installed, but its module cudnn is missing"),
        ("1.32.0", object(), "torch finds no CUDA GPU here"),
    ],
)
def test_why_it_cannot_load_is_one_sentence(monkeypatch, installed, found, reason):
    monkeypatch.setattr(cudnn, "installed", Mock(side_effect=[installed]))
    monkeypatch.setattr(cudnn, "find_spec", lambda name: found)
    assert cudnn.BACKEND.unavailable() == reason


def test_its_version_is_cudnns(monkeypatch):
    monkeypatch.setattr(cudnn, "installed", lambda package: "1.32.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert cudnn._version() == "9.19.0 (frontend 1.32.0)"
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    assert cudnn._version() is None


def test_a_missing_library_is_found_at_load(module):
    def absent():
        raise RuntimeError("libcudnn not found")

    module.backend_version = absent
    with pytest.raises(RuntimeError, match="libcudnn not found"):
        cudnn._load()


# Launchers


def tensors(given, seed):
    """Return a call's tensors and a gradient, with other values."""
    torch.manual_seed(seed)
    query, key, value, _ = given
    return [torch.randn_like(x) for x in (query, key, value, query)]


@pytest.fixture
def repeated(kernels):
    """Run a packed call; return its arguments, its results and the forward's launcher."""
    *inputs, call = ragged([3, 9, 30])
    expected = kernels.forward(*inputs, call)
    given = *inputs, *launchers.packed_arguments(call)
    return given, expected, kernels.specialize("forward", tuple(inputs), call)


@pytest.mark.parametrize("shared", [True, False], ids=["a shared plan", "an exact plan"])
@pytest.mark.parametrize("lens_k", [None, [12, 9, 30]], ids=["one offsets tensor", "two"])
def test_a_repeated_packed_call_is_the_same_on_other_offsets(request, kernels, module, lens_k, shared):
    if shared:
        request.getfixturevalue("shared_plans")
    given = ragged([3, 9, 30], lens_k)
    other = ragged([20, 2, 20], lens_k and [20, 20, 11])[-1]._replace(max_q=30, max_k=30)
    call = given[-1]
    forward, backwards = launchers.assert_same(kernels, tensors(given, 1), tensors(given, 2), call, other)
    assert len(backwards) == 2
    built = len(module.graphs)
    query, key, value, _ = tensors(given, 3)
    _, lse = forward(query, key, value, *launchers.packed_arguments(call))
    assert (lse.t() if shared else lse).is_contiguous(), "it stays as cuDNN has written it"
    assert len(module.graphs) == built


def test_a_repeated_dense_call_is_the_same(kernels):
    torch.manual_seed(0)
    given = [torch.randn(2, 6, heads, 16).bfloat16() for heads in (4, 2, 2, 4)]
    launchers.assert_same(kernels, given, [torch.randn_like(x) for x in given], Call(0.25, 6, 6))


def test_there_is_no_launcher_without_a_plan_or_for_what_has_to_be_copied(kernels):
    query, key, value, call = ragged([3, 9, 30])
    inputs = query, key, value
    assert kernels.specialize("forward", inputs, call) is None
    kernels.forward(*inputs, call)
    assert kernels.specialize("forward", inputs, call) is not None
    unaligned = torch.empty(query.numel() + 1).bfloat16()[1:].view(query.shape)
    assert unaligned.data_ptr() % 16
    assert kernels.specialize("forward", (unaligned, key, value), call) is None
    assert kernels.specialize("forward", (query[:0], key, value), call) is None
    used = call._replace(seqused_k=torch.tensor([3, 9, 30], dtype=torch.int32))
    assert kernels.specialize("forward", inputs, used) is None


def test_a_launcher_does_nothing_once_its_plan_is_dropped(kernels, repeated):
    given, _, launcher = repeated
    kernels.forward.args[0]._release()
    assert launcher(*given) is None
    assert launcher.launch(0, 0, 7) is False
    assert launcher.derive(*given[3:]) is None


def test_a_launcher_runs_on_addresses_with_the_threads_handle(module, repeated):
    given, expected, launcher = repeated
    for times in range(1, 3):
        assert all(map(torch.equal, launcher.on_addresses(*given), expected))
        assert [(handle.by_address, handle.set) for handle in module.handles] == [(times, 2)]
    assert module.handles[0].stream == 0  # that of a CPU, where the tensors are


# What a release of the frontend may have changed: of what, the attribute, and what it is then.
CHANGES = {
    "no graph below": ("", "_lowered_graph", None),
    "no plans": ("", "plans", None),
    "an engine of the frontend's": ("", "selected_engine", object()),
    "other tensors": ("_lowered_graph", "_get_variant_pack_uids_sorted", lambda: [1, 2]),
    "another signature": ("_lowered_graph", "_execute_with_raw_ptrs", lambda *_: None),
    "another handle": ("handle", "backend_handle", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_frontend_that_cannot_run_on_addresses_runs_on_tensors(request, module, monkeypatch, change):
    whose, attribute, value = CHANGES[change]
    built = fake_cudnn.Graph.build_plans

    def build_plans(graph):
        built(graph)
        setattr(getattr(graph, whose) if whose else graph, attribute, value)

    monkeypatch.setattr(fake_cudnn.Graph, "build_plans", build_plans)
    given, expected, launcher = request.getfixturevalue("repeated")
    assert not isinstance(launcher, AddressLauncher)
    assert all(map(torch.equal, launcher(*given), expected))
    assert [handle.by_address for handle in module.handles] == [0]

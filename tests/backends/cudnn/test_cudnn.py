"""Promises of the cuDNN backend: right values, what it refuses, how it is loaded.

Which execution plans it builds and keeps is in test_cudnn_execution_plans.py, what it runs further calls of a
kind by in test_cudnn_launchers.py, what it reads of offsets in test_cudnn_lengths.py, how it adds a bias in
test_cudnn_bias.py.
"""

import dataclasses
import itertools
import math
import re
from importlib.metadata import PackageNotFoundError
from unittest.mock import Mock

import pytest
import torch
from support import fake_cudnn
from support.chosen_cases import ALIKE, for_fakes
from support.fake_cudnn import ragged
from support.packages import gpu_spec
from support.sinks import assert_kernels_are_accurate
from support.truth import assert_accurate

from attnreg import Device
from attnreg.backends import cudnn
from attnreg.backends.cudnn import rounding
from attnreg.core.launching import rows
from attnreg.core.registry.entry import Entry
from attnreg.core.torchlib.readback import AsyncReadback
from attnreg.tools import measure
from attnreg.tools.measure import QUICK, Case

H200 = Device("cuda", (9, 0), simulated=True)
ENTRY = Entry("cuDNN", "a test", cudnn.BACKEND)


def runs(case):
    return not any(ENTRY.reasons(case.spec(H200), direction) for direction in ("forward", "backward"))


# The fake computes heads and sequences one by one; the kernels run the whole matrix on a GPU.
# The backward of a key padding mask is declined at the call.
CASES = for_fakes(
    case
    for case in QUICK
    if (case.dtype == "bfloat16" or case.name == "length 33") and runs(case) and case.bias != "key padding"
)


@pytest.fixture
def shared_plans(kernels, monkeypatch):
    """Have each packed call run by an execution plan that has room for others, as later batches are."""
    fake_cudnn.select_by(
        monkeypatch, kernels.forward.args[0], lambda problem: rounding.shared(rounding.exact(problem))
    )


# Values


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * bool(ALIKE.search(case.name))) for case in CASES],
    ids=str,
)
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
SQUARE = "query and key must have the same length with attn_bias and a causal mask, got 64 and 65"
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
        ({"head_dim": 20, "head_dim_v": 64}, ""),
        ({"head_dim": 260, "head_dim_v": 64}, "head_dim must be 8 to 256 in steps of 8, got 260"),
        ({"dtype": "float32"}, "dtype must be float16 or bfloat16, got float32"),
        ({"bias": True, "max_k": 66}, ""),
        (
            {"bias": True, "varlen": True, "max_k": 65},
            "attn_bias must be None with packed tensors, got a tensor",
        ),
        ({"bias": True, "window": (-1, 0), "max_q": 65, "max_k": 65}, ""),
        ({"bias": True, "window": (-1, 0), "max_k": 65}, SQUARE),
        (
            {"bias": True, "window": (4, 0), "max_k": 65},
            "window_size must be (-1, -1) or causal with attn_bias, got (4, 0)",
        ),
        (
            {"bias": True, "device": "sm_100", "max_k": 65},
            "compute capability must be 9.x with attn_bias, got 10.0",
        ),
        (
            {"bias": True, "head_dim_v": 64, "max_k": 65},
            "head_dim of query and value must be the same with attn_bias, got 128 and 64",
        ),
        ({"batch": 65536}, "batch must be 0 to 65535, got 65536"),
        ({"batch": 65536, "varlen": True}, "batch must be 0 to 65535, got 65536"),
        ({"heads_q": 65536, "heads_k": 8}, "query heads must be 0 to 65535, got 65536"),
    ],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_it_refuses_and_why(changes, reason, direction):
    assert ENTRY.reasons(gpu_spec(**changes), direction) == ((reason,) if reason else ())


def is_reached(cut, lengths):
    return sum(count * math.prod(lengths[name] for name in names) for count, names in cut.terms) >= cut.at


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 2)])
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"deterministic": True}], ids=str)
def test_lengths_that_no_cut_parts_are_refused_alike(monkeypatch, window, varlen, options):
    monkeypatch.setattr(cudnn, "MOST_BYTES", 2 * 2 * 8 * 64 * 64)
    refusals = {}
    for max_q, max_k in itertools.product((1, 2, 3, 64, 65), repeat=2):
        spec = gpu_spec(window=window, varlen=varlen, max_q=max_q, max_k=max_k, **options)
        lengths = {"batch": 2, "max_q": max_q, "max_k": max_k}
        reached = tuple(is_reached(cut, lengths) for cut in cudnn.BACKEND.cuts(spec))
        found = *cudnn._refuses(spec), *cudnn._against_deterministic(spec)
        reasons = [re.sub(r"(got|allocate) \d+( and \d+)?", "", reason) for reason in found]
        assert refusals.setdefault(reached, reasons) == reasons, lengths
    assert (len(refusals) > 1) is not varlen


def test_the_cuts_of_a_kind_are_the_same_whatever_the_lengths():
    specs = [gpu_spec(window=(-1, 0), max_q=max_q, max_k=9) for max_q in (1, 9, 10)]
    assert len({tuple(cudnn.BACKEND.cuts(spec)) for spec in specs}) == 1


def test_only_dense_calls_build_an_execution_plan_for_each_shape():
    assert cudnn.BACKEND.builds(gpu_spec())
    assert not cudnn.BACKEND.builds(gpu_spec(varlen=True))


PACKED = (
    "input must be dense to be deterministic, got packed: it would allocate batch * heads * 4096^2 * 2 bytes"
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"max_q": 8192, "max_k": 4096}, ""),
        (
            {"max_q": 8192, "max_k": 4097},
            "to be deterministic it may allocate 1073741824 bytes, and would allocate 1074003968",
        ),
        ({"varlen": True}, PACKED),
        ({"device": "sm_80"}, "compute capability must be 9.x to be deterministic, got 8.0"),
        (
            {"bias": True, "max_k": 65},
            "attn_bias must be None where deterministic algorithms are on, got a tensor",
        ),
    ],
)
def test_a_backward_is_deterministic_where_a_number_for_each_score_fits(changes, reason):
    spec = gpu_spec(deterministic=True, **changes)
    assert ENTRY.reasons(spec, "forward") == ()
    assert ENTRY.reasons(spec, "backward") == ((reason,) if reason else ())


def test_a_deterministic_call_has_the_algorithm_that_is(kernels, module):
    q, k, v, grad, call = measure.inputs(Case(name="dense", lens_q=(9, 9), lens_k=(9, 9), dtype="bfloat16"))
    for deterministic in (False, True):
        given = call._replace(deterministic=deterministic)
        out, lse = kernels.forward(q, k, v, given)
        kernels.backward(grad, q, k, v, out, lse, given)
    chosen = [graph.options["use_deterministic_algorithm"] for graph in module.graphs]
    assert chosen == [False, False, True]  # both forwards have the same execution plan


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


def test_the_version_of_the_frontend_is_read_once(monkeypatch):
    read = Mock(side_effect=["1.32.0"])
    monkeypatch.setattr(cudnn, "installed", read)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert {cudnn.BACKEND.version() for _ in range(3)} == {"9.19.0 (frontend 1.32.0)"}
    read.assert_called_once_with("nvidia-cudnn-frontend")


def test_that_the_frontend_is_missing_is_found_once(monkeypatch):
    read = Mock(side_effect=PackageNotFoundError)
    monkeypatch.setattr(cudnn, "installed", read)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert {cudnn.BACKEND.version() for _ in range(3)} == {None}
    assert read.call_count == 1


def test_a_missing_library_is_found_at_load(module):
    def absent():
        raise RuntimeError("libcudnn not found")

    module.backend_version = absent
    with pytest.raises(RuntimeError, match="libcudnn not found"):
        cudnn._load()

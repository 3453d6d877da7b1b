"""Promises of the FA2 adapter, on fakes of its two providers that keep the rules of the real kernels."""

import dataclasses
import gc
import sys
from importlib.metadata import PackageNotFoundError
from unittest.mock import Mock

import pytest
import torch
from support import fake_fa2, launchers
from support.fake_fa2 import SCHEMAS
from support.packages import FEWER_OR_ALL, gpu_spec, on_cpu, verified
from support.sinks import assert_kernels_are_accurate

import attnreg
from attnreg.backends import fa2
from attnreg.backends.fa2 import flash_attn_package, native
from attnreg.core.launching.launchers import OpLauncher
from attnreg.core.launching.regular import regular_offsets
from attnreg.core.registry.entry import Entry
from attnreg.core.torchlib import captured
from attnreg.errors import RegistrationError
from attnreg.testing import Conformance
from attnreg.tools.measure import QUICK, Case, inputs


@pytest.fixture
def torchs(monkeypatch):
    """Put the fake in the place of torch's kernels; without pages, as torch 2.11 is."""
    fake = fake_fa2.Torch()
    monkeypatch.setattr(captured, "kernel", fake.kernel)
    monkeypatch.setattr(fa2, "PAGES", False)
    return fake


@pytest.fixture(autouse=True)
def absent(monkeypatch):
    """Start without the package, whatever this machine has."""
    monkeypatch.setattr(flash_attn_package, "find_spec", lambda name: None)
    flash_attn_package._loaded.cache_clear()
    yield
    flash_attn_package._loaded.cache_clear()


@pytest.fixture
def package(monkeypatch, request):
    """Install the fake package; `package({name: schema})` with other schemas."""

    def install(schemas=SCHEMAS):
        made = fake_fa2.install_package(monkeypatch, schemas)
        request.addfinalizer(made.unregister)
        return made

    return install


@pytest.fixture
def torch_212(monkeypatch):
    """Have torch's kernels read pages and split keys, whichever torch this is."""
    monkeypatch.setattr(fa2, "PAGES", True)
    forward = dataclasses.replace(fa2.BACKEND.forward, num_splits=True)
    monkeypatch.setattr(fa2, "BACKEND", dataclasses.replace(fa2.BACKEND, forward=forward))


def run_both(case, **changes):
    """Run a case in both directions; return the kernels, the backward's tensors, the call and its results."""
    q, k, v, grad, call = inputs(case)
    call, kernels = call._replace(**changes), on_cpu(fa2.BACKEND).load()
    out, lse = kernels.forward(q, k, v, call)
    tensors = (grad, q, k, v, out, lse)
    return kernels, tensors, call, kernels.backward(*tensors, call)


LENGTHS = {"lens_q": (40, 7), "lens_k": (33, 7), "varlen": True}
DENSE = {"lens_q": (40, 40), "lens_k": (33, 33)}


# Values


@pytest.mark.parametrize("cases", FEWER_OR_ALL)
def test_every_case_that_torchs_kernels_take_is_right(torchs, cases):
    both, forwards = verified(fa2.BACKEND, cases)
    assert {"packed at most one", "packed tail of NaN", "no keys", "packed window (0, -1)"} <= both
    assert not {"window (0, -1), few keys", "window (-1, 100), few keys", "pages of NaN"} & both
    # Given in columns of the head dim.
    assert {"gradient of the LSE", "gradient of the LSE, few keys", "packed gradient of the LSE"} <= both
    # Their backward doesn't take these; another backend's serves.
    assert forwards == {"packed seqused_k"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinks_are_served_by_both_of_its_kernels(torchs, dtype):
    kernels = on_cpu(fa2.BACKEND).load()
    assert_kernels_are_accurate(kernels, dtype)
    assert_kernels_are_accurate(kernels, dtype, lens_q=(12, 5), lens_k=(4, 0))


@pytest.mark.slow
def test_the_package_runs_alibi_softcap_and_pages_and_nothing_else(torchs, package):
    recorded = package()
    options = {"alibi", "packed alibi", "softcap 2", "packed softcap 1.5"}
    names = (*options, "pages of NaN", "pages", "heads 4:1", "packed seqused_k")
    both, forwards = verified(fa2.BACKEND, [case for case in QUICK if case.name in names])
    assert both == options | {"heads 4:1"}
    assert forwards == {"pages of NaN", "packed seqused_k"}  # pages of 16 are too small
    assert {name for name, _ in recorded.calls} == set(SCHEMAS)
    packed = [given for name, given in recorded.calls if name == "_flash_attn_varlen_forward"]
    paged = [given for given in packed if given["block_table"] is not None]
    others = [given for given in packed if given["block_table"] is None]
    assert all(given["softcap"] or given["alibi_slopes"] is not None for given in others)
    assert paged[0]["cu_seqlens_k"].tolist() == [0, 513, 612]


def test_a_torch_that_reads_pages_needs_no_package(torchs, monkeypatch):
    monkeypatch.setattr(fa2, "PAGES", True)
    if not native.PAGES:
        pytest.skip("the schema of this torch's op has no block_table")
    case = next(case for case in QUICK if case.name == "pages of NaN" and case.dtype == "bfloat16")
    assert verified(fa2.BACKEND, [case]) == (set(), {"pages of NaN"})
    ((_, given),) = torchs.calls
    assert given["cum_seq_k"].tolist() == [0, 513, 612]


@pytest.mark.parametrize("window", [(0, -1), (4, -1), (-1, 100), (4, 100), (-1, 62), (63, 62)])
def test_a_window_that_the_kernels_misread_is_a_known_issue_and_no_other_is(torchs, window):
    case = Case(name="window", lens_q=(203,), lens_k=(63,), window=window)
    outcome = Conformance(on_cpu(fa2.BACKEND), "cpu").run(case)
    assert outcome.passed
    without_issues = dataclasses.replace(on_cpu(fa2.BACKEND), name="without known issues")
    unguarded = Conformance(without_issues, "cpu").run(case)
    assert bool(outcome.reasons) is any(not error.passed for error in unguarded.errors.values())


def test_single_queries_with_fewer_key_heads_and_empty_sequences_are_not_folded(torchs, package):
    package()
    shared = {"lens_q": (1, 0, 1), "varlen": True, "heads": (4, 2), "dims": (16, 16)}
    cases = [
        Case(name="no window", lens_k=(5, 3, 0), **shared),
        Case(name="used", lens_k=(5, 3, 9), seqused_k=(4, 0, 9), **shared),
        Case(name="pages", lens_k=(5, 3, 9), seqused_k=(4, 0, 9), page_size=256, **shared),
    ]
    assert verified(fa2.BACKEND, cases) == ({"no window"}, {"used", "pages"})


@pytest.mark.parametrize("used", [(4, 0, 9), (4, 1, 9)], ids=["one sees no key", "all see keys"])
def test_a_query_of_each_sequence_is_folded_where_the_host_knows_of_it(torchs, used):
    """As of flash_attn_with_kvcache; of other offsets on a CPU nothing is known."""
    case = Case(
        name="decoding", lens_q=(1, 1, 1), lens_k=(9, 9, 9), seqused_k=used, varlen=True, heads=(4, 2),
        dims=(16, 16), poison=True,
    )  # fmt: skip
    q, k, v, _, call = inputs(case)
    forward = on_cpu(fa2.BACKEND).load().forward
    expected = forward(q, k, v, call)
    for known, found in (
        (call, expected),
        (call._replace(cu_seqlens_q=regular_offsets(3, 1, q)), None),
    ):
        out, lse = found or forward(q, k, v, known)
        assert torchs.calls[-1][1]["max_q"] == (2 if known is call else 1)
        torch.testing.assert_close(out, expected[0], rtol=0, atol=0)
        torch.testing.assert_close(lse, expected[1], rtol=0, atol=0)
    assert out[1].any().item() is lse[:, 1].isfinite().all().item() is bool(used[1])


@pytest.mark.parametrize("varlen", [False, True])
def test_a_call_without_scores_reaches_no_kernel(torchs, varlen):
    for lens_q, lens_k in (((0,), (5,)), ((5,), (0,)), ((), ()), ((0, 0), (0, 0))):
        case = Case(name="empty", lens_q=lens_q, lens_k=lens_k, varlen=varlen, tail=3 if varlen else 0)
        _, (_, q, k, v, out, lse), _, grads = run_both(case)
        assert (lse == -torch.inf).all()
        assert lse.shape == ((2, len(q)) if varlen else (len(q), 2, q.shape[1]))
        assert not any(x.any() for x in (out, *grads))
        assert [x.shape for x in (out, *grads)] == [x.shape for x in (q, q, k, v)]
    assert torchs.calls == []


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "packed"])
def test_a_strided_lse_gives_the_same_gradients(torchs, varlen):
    lens = (6, 9) if varlen else (9, 9)
    case = Case(name="strided", dims=(16, 16), heads=(4, 2), lens_q=lens, lens_k=lens, varlen=varlen)
    kernels, (*tensors, lse), call, expected = run_both(case)
    strided = lse.mT.contiguous().mT
    assert not strided.is_contiguous()
    for got, wanted in zip(kernels.backward(*tensors, strided, call), expected, strict=True):
        assert torch.equal(got, wanted)


# Dropout


@pytest.mark.parametrize("lengths", [LENGTHS, DENSE])
@pytest.mark.parametrize("alibi", [False, True])
def test_a_dropout_mask_is_the_same_in_the_forward_and_the_backward(torchs, package, lengths, alibi):
    recorded = package()
    case = Case(
        name="dropout", heads=(4, 2), dims=(16, 16), window=(-1, 0), alibi=alibi, dtype="float16", **lengths
    )
    given = torch.tensor([5, 6], dtype=torch.uint64)
    torch.manual_seed(1)
    kernels, tensors, call, grads = run_both(case, dropout=0.4, rng_state=given.clone())
    drawn = call.rng_state.tolist()
    assert drawn != given.tolist(), "the kernel draws, and its seed and offset are returned"
    assert torch.equal(kernels.backward(*tensors, call)[0], grads[0])
    assert call.rng_state.tolist() == drawn
    used, unused = (recorded, torchs) if alibi else (torchs, recorded)
    assert (len(used.calls), len(unused.calls)) == (3, 0)
    assert [one["dropout_p"] for _, one in used.calls] == [0.4] * 3
    assert [one["rng_state"].tolist() for _, one in used.calls[1:]] == [drawn] * 2


def test_dropout_goes_to_it_in_both_directions_or_in_none(package):
    explanation = attnreg.explain(gpu_spec(dropout=0.1, needs_backward=True), backend="FA2")
    assert (explanation.forward.backend, explanation.backward.backend) == ("FA2", "FA2")


# Launchers


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 3)], ids=str)
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "packed"])
def test_a_repeated_call_is_the_same_by_the_kernel_alone(torchs, varlen, window):
    lens = {"lens_q": (3, 9, 4), "lens_k": (3, 9, 4)} if varlen else {"lens_q": (6,) * 2, "lens_k": (9,) * 2}
    case = Case(name="repeated", dims=(16, 16), heads=(4, 2), window=window, varlen=varlen, **lens)
    *first, call = inputs(case)
    *second, other = inputs(case, seed=1)
    # With two tensors of offsets a backward has to be told of rows without a key, and has no launcher.
    call, other = (one._replace(cu_seqlens_k=one.cu_seqlens_q) for one in (call, other))
    launchers.assert_same(on_cpu(fa2.BACKEND).load(), first, second, call, other)
    # The launcher gives the kernel what the adapter has given it.
    given = [{what: x for what, x in one.items() if type(x) is not torch.Tensor} for _, one in torchs.calls]
    assert [name for name, _ in torchs.calls] == ["forward", "backward"] + ["forward"] * 2 + ["backward"] * 5
    assert {str(one) for one in given} == {str(one) for one in given[:2]}


DECODING = {"lens_q": (1, 1, 1), "lens_k": (3, 9, 4), "varlen": True, "dims": (16, 16), "heads": (4, 2)}


@pytest.mark.parametrize("seqused_k", [None, (3, 0, 4)], ids=["all keys", "some keys"])
def test_a_repeated_step_of_decoding_makes_rows_of_heads_once_each_sequence_is_known_to_have_a_query(
    torchs, seqused_k
):
    case = Case(name="decoding", seqused_k=seqused_k, window=(-1, 0), **DECODING)
    *tensors, _, call = inputs(case)
    kernels = on_cpu(fa2.BACKEND).load()
    launcher = kernels.specialize("forward", tuple(tensors), call)
    assert (launcher.folds, launcher.takes) == (True, ("seqused_k",) if seqused_k else ())
    assert kernels.specialize("backward", (tensors[0], *tensors, tensors[0], tensors[0]), call) is None
    option = () if seqused_k is None else (call.seqused_k,)
    lengths = call.cu_seqlens_k, call.max_q, call.max_k
    expected = kernels.forward(*tensors, call)
    for offsets in (call.cu_seqlens_q, regular_offsets(3, 1, tensors[0])):
        found = launcher(*tensors, *option, offsets, *lengths, False)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    # A longest query of 2 keeps the kernel from it: a sequence might have no query.
    assert [given["max_q"] for _, given in torchs.calls[1:]] == [2, 1]


def test_a_launcher_of_a_backward_holds_no_tensor_of_a_graph(torchs, monkeypatch):
    captured_now = [True]
    monkeypatch.setattr(native, "_rng_states", {})
    monkeypatch.setattr(native, "needs_graph_memory", lambda tensor: captured_now[0])
    kernels, tensors, call, _ = run_both(Case(name="graph", dims=(16, 16), **DENSE))

    def tensors_alive():
        gc.collect()
        return sum(type(x) is torch.Tensor for x in gc.get_objects())

    before = tensors_alive()
    assert kernels.specialize("backward", tensors, call) is None
    assert tensors_alive() == before
    for captured_now[0] in (False, True):  # after the first there is a random state that no graph owns
        assert isinstance(kernels.specialize("backward", tensors, call), OpLauncher)


@pytest.mark.parametrize(
    "case",
    [
        Case(name="alibi", lens_q=(9,), lens_k=(9,), alibi=True),
        Case(name="more queries than keys", lens_q=(9,), lens_k=(5,), window=(-1, 0)),
        Case(name="nothing", lens_q=(0,), lens_k=(5,)),
    ],
    ids=str,
)
def test_a_call_that_takes_more_than_the_kernel_has_no_launcher(torchs, case):
    q, k, v, _, call = inputs(case)
    assert on_cpu(fa2.BACKEND).load().specialize("forward", (q, k, v), call) is None


# What the kernels are given


@pytest.mark.parametrize(
    ("window", "alibi", "expected"),
    [
        ((-1, -1), False, (False, -1, -1)),
        ((-1, 0), False, (True, -1, 0)),
        ((5, 0), False, (True, 5, 0)),
        ((5, 3), False, (False, 5, 3)),
        ((-1, -1), True, (False, -1, -1)),
        ((-1, 0), True, (False, 32, 0)),  # as a window, so that the LSE has all of the bias in it
        ((5, 0), True, (True, 5, 0)),
    ],
)
def test_window_scale_and_determinism_reach_the_kernels_of_both_providers(
    torchs, package, window, alibi, expected
):
    recorded = package()
    case = Case(name="window", window=window, alibi=alibi, dims=(16, 16), scale=0.3, **DENSE)
    run_both(case, deterministic=True)
    for _, given in torchs.calls:
        right = 0 if given["is_causal"] else given["window_size_right"]  # it implies that
        assert (given["is_causal"], given["window_size_left"], right) == expected
        assert given["scale"] == 0.3
    for name, given in recorded.calls:
        assert (given["causal"], given["window_size_left"], given["window_size_right"]) == expected
        assert given["softmax_scale"] == 0.3
        assert given.get("deterministic", False) is ("backward" in name)
    assert (len(torchs.calls), len(recorded.calls)) == ((0, 2) if alibi else (2, 0))


@pytest.mark.parametrize("splits", [None, 1, 4])
def test_only_a_forward_is_given_a_number_of_splits(torchs, splits):
    if not native.SPLITS:
        pytest.skip("the schema of this torch's op has no num_splits")
    run_both(Case(name="splits", dims=(16, 16), **LENGTHS), num_splits=splits)
    (_, forward), (_, backward) = torchs.calls
    assert forward["num_splits"] == splits
    assert backward.get("num_splits") is None
    assert forward["dropout_p"] == backward["dropout_p"] == 0.0


# What it refuses


def reasons(direction, **changes):
    return Entry("FA2", "a test", fa2.BACKEND).reasons(gpu_spec(**changes), direction)


PAGED = {"page_size": 256, "varlen": True, "seqused_k": True}
HINT = (
    "the package flash-attn, which isn't installed; install it with: pip install --no-build-isolation "
    "'flash-attn>=2.8,<3' (a build, which takes nvcc, setuptools, ninja, packaging and psutil)"
)


def test_without_the_package_a_refusal_names_it(monkeypatch):
    monkeypatch.setattr(fa2, "PAGES", False)
    assert reasons("forward", **PAGED) == (f"block_table needs torch 2.12 or {HINT}",)
    assert reasons("backward", alibi=True) == (f"alibi_slopes need {HINT}",)
    assert reasons("forward", alibi=True) == (f"alibi_slopes need {HINT}",)
    assert reasons("forward", softcap=9.0) == reasons("backward", softcap=9.0) == (f"softcap needs {HINT}",)
    monkeypatch.setattr(fa2, "PAGES", True)
    assert reasons("forward", **PAGED) == ()


def test_with_the_package_alibi_softcap_and_pages_are_taken(package, torch_212, monkeypatch):
    package()
    monkeypatch.setattr(fa2, "PAGES", False)
    assert reasons("forward", alibi=True, varlen=True, dropout=0.1, num_splits=2) == (
        "num_splits must be None with alibi_slopes, got 2",
    )
    for direction in ("forward", "backward"):
        assert reasons(direction, softcap=9.0) == ()
        assert reasons(direction, softcap=9.0, dropout=0.1) == ("dropout_p must be 0 with softcap, got 0.1",)
    assert reasons("forward", **PAGED, dropout=0.1) == (
        "dropout_p must be 0 with a block_table, which has no backward",
    )
    assert reasons("forward", **PAGED) == ()
    assert reasons("forward", alibi=True, dropout=0.1) == reasons("backward", alibi=True, dropout=0.1) == ()


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"num_splits": 1}, "num_splits must be None for dense tensors, got 1"),
        ({"num_splits": 1, "varlen": True}, ""),
        ({"num_splits": 4, "varlen": True}, ""),  # at most so many, and there is one
        ({"num_splits": 128, **PAGED}, ""),
        ({"num_splits": 129, **PAGED}, "num_splits must be at most 128 where keys are split, got 129"),
        (
            {"num_splits": 2, "batch": 8192, **PAGED},
            "batch times heads must be at most 65535 with num_splits, got 65536",
        ),
        ({"num_splits": 2, "batch": 8191, **PAGED}, ""),
        ({"num_splits": 1, "batch": 8192, **PAGED}, ""),
        ({"batch": 8192, **PAGED}, ""),
    ],
)
def test_splits_are_taken_where_the_kernel_keeps_to_them(asked, reason, torch_212):
    assert reasons("forward", **asked) == ((reason,) if reason else ())
    if "page_size" not in asked:
        assert reasons("backward", **asked) == (), "a backward is given no splits"


SMALL = (
    "head_dim must be at most 192, or above 224 without dropout, on compute capability "
    "8.6 to 8.9 and 12, got {}"
)
LARGE = "packed tensors must have fewer than 2**31 elements, got 2147483648"
SUMS = (
    "(tokens + 128 * sequences) * heads * head dim rounded up to {} must be below 2**31 for a packed "
    "backward with softcap, got {}"
)
# With the tokens 2**31 sums of 32 heads of 104, which are 128.
MANY_SHORT = {"batch": 4064, "tokens_q": 4096, "tokens_k": 4096} | dict.fromkeys(("heads_q", "heads_k"), 32)
MANY_SHORT["head_dim"] = 104
KNOWN_ISSUE = (
    "a window that is open to the right hides keys where there are more queries than keys; see "
    "https://github.com/Dao-AILab/flash-attention/issues/895"
)


@pytest.mark.parametrize(
    ("direction", "changes", "reason"),
    [
        ("forward", {"dropout": 0.1}, ""),
        ("backward", {"dropout": 0.1, "window": (4, 0)}, ""),
        ("forward", {"dropout": 1.0}, "dropout_p must be below 1, got 1.0"),
        ("forward", {"seqused_k": True, "varlen": True}, ""),
        ("forward", {"seqused_k": True}, "seqused_k needs packed tensors, got dense ones"),
        ("backward", {"seqused_k": True, "varlen": True}, "seqused_k must be None, got a tensor"),
        ("forward", {"page_size": 16}, "page size must be a multiple of 256, got 16"),
        ("backward", {"page_size": 256}, "block_table must be None: no paged key-value cache"),
        ("forward", {"positive_scale": False}, "scale must be above 0"),
        ("forward", {"batch": 65536}, "batch must be 0 to 65535, got 65536"),
        ("forward", {"heads_q": 65536, "heads_k": 8}, "query heads must be 0 to 65535, got 65536"),
        ("backward", {"batch": 65536, "varlen": True}, "batch must be 0 to 65535, got 65536"),
        ("backward", {"device": "sm_86", "head_dim": 192}, ""),
        ("backward", {"device": "sm_86", "head_dim": 256}, ""),
        ("forward", {"device": "sm_86", "head_dim": 224}, ""),
        ("backward", {"device": "sm_90", "head_dim": 224}, ""),
        ("backward", {"device": "sm_86", "head_dim": 224}, SMALL.format(224)),
        ("backward", {"device": "sm_120", "head_dim": 256, "dropout": 0.5}, SMALL.format(256)),
        ("forward", {"varlen": True, "tokens_q": 2**21, "tokens_k": 64}, LARGE),
        ("forward", {"varlen": True, **MANY_SHORT}, ""),
        ("backward", {"varlen": True, **MANY_SHORT}, ""),
        ("forward", {"window": (4, -1), "max_q": 99}, KNOWN_ISSUE),
    ],
)
def test_what_it_refuses_and_why(direction, changes, reason):
    assert reasons(direction, **changes) == ((reason,) if reason else ())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"varlen": True}, SUMS.format(32, 2**31)),
        ({"varlen": True, "batch": 2699, "head_dim": 160}, SUMS.format(64, 2147745792)),
        ({"varlen": True, "batch": 4063}, ""),
        ({}, ""),
    ],
)
def test_the_package_is_not_given_more_sums_than_it_can_count(package, changes, reason):
    package()
    found = reasons("backward", **MANY_SHORT | {"softcap": 30.0} | changes)
    assert found == ((reason,) if reason else ())


# Loading


def test_a_package_that_does_not_load_is_a_reason_with_its_cause(package, monkeypatch):
    package()
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", None)
    lack = flash_attn_package.missing(simulated=False)
    assert lack.startswith(
        "the package flash-attn, whose 2.8.3 failed to load: ModuleNotFoundError: import of"
    )
    assert flash_attn_package.missing(simulated=True) == ""  # another machine's may load
    with pytest.raises(RegistrationError, match="flash-attn failed to load"):
        flash_attn_package.package()


@pytest.mark.parametrize(
    ("op", "text", "other", "problem"),
    [
        ("forward", "float softcap", "float cap", "flash_attn::_flash_attn_forward has no argument softcap"),
        ("backward", "", "", "it registers no operator flash_attn::_flash_attn_backward"),
        (
            *("backward", "deterministic,", "deterministic, int level,"),
            "flash_attn::_flash_attn_backward needs level, which attnreg doesn't know",
        ),
    ],
)
def test_a_package_with_other_arguments_is_a_reason_that_names_them(package, op, text, other, problem):
    name = f"_flash_attn_{op}"
    schemas = {kept: SCHEMAS[kept] for kept in SCHEMAS if kept != name}
    package(schemas | {name: SCHEMAS[name].replace(text, other)} if text else schemas)
    assert flash_attn_package.missing(simulated=False) == (
        f"the package flash-attn, whose 2.8.3 failed to load: RegistrationError: {problem}"
    )


def test_flash_attn_4_alone_is_not_the_package(monkeypatch):
    assert flash_attn_package.installed() is None
    monkeypatch.setattr(flash_attn_package, "find_spec", lambda name: name)
    monkeypatch.setattr(flash_attn_package, "version", Mock(side_effect=PackageNotFoundError))
    assert flash_attn_package.installed() is None


def test_the_version_is_torchs_and_then_the_packages_which_is_read_once(package, monkeypatch):
    assert fa2.BACKEND.version() == torch.__version__
    package()
    monkeypatch.setattr(flash_attn_package, "version", read := Mock(side_effect=["2.8.3"]))
    assert {fa2.BACKEND.version() for _ in range(3)} == {f"{torch.__version__} (flash-attn 2.8.3)"}
    read.assert_called_once_with("flash-attn")


@pytest.mark.parametrize(
    ("gpu_there", "built", "reason"),
    [
        (False, True, "torch finds no CUDA GPU here"),
        (True, False, "this torch was built without its flash attention kernels"),
        (True, True, None),
    ],
)
def test_why_it_cannot_load_is_one_sentence(monkeypatch, gpu_there, built, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu_there)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    assert fa2.BACKEND.unavailable() == reason

"""Promises of the FA3 adapter, on a fake of its package: operators of the same schema, on the CPU."""

import dataclasses
import sys
import types
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from support import packages, truth
from support.packages import gpu_spec, on_cpu

import attnreg
from attnreg import _registry
from attnreg.backends import fa3
from attnreg.cli.info import inventory
from attnreg.contract.discovery import Entry
from attnreg.errors import BackendUnavailableError
from attnreg.measure import QUICK, Case, inputs, verify

FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, "
    "Tensor? q_v = None, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = None, "
    "int? max_seqlen_q = None, int? max_seqlen_k = None, Tensor? page_table = None, "
    "Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, Tensor? rotary_cos = None, "
    "Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, "
    "Tensor? k_descale = None, Tensor? v_descale = None, float? softmax_scale = None, "
    "bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False, "
    "Tensor? scheduler_metadata = None, int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
BWD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None, "
    "Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, "
    "Tensor? cu_seqlens_k = None, Tensor? seqused_q = None, Tensor? seqused_k = None, "
    "int? max_seqlen_q = None, int? max_seqlen_k = None, float? softmax_scale = None, "
    "bool is_causal = False, int window_size_left = -1, int window_size_right = -1, float softcap = 0.0, "
    "bool deterministic = False, int sm_margin = 0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
BWD_OLDER = BWD.replace("(Tensor, Tensor, Tensor, Tensor, Tensor)", "(" + ", ".join(["Tensor"] * 8) + ")")
# Before the first argument that has one, older versions declare no defaults.
_TENSORS, _, _NUMBERS = FWD.partition("float? softmax_scale = None")
FWD_OLDER = (
    _TENSORS.replace(" = None", "")
    + "float softmax_scale"
    + _NUMBERS.replace("is_causal = False", "is_causal")
)


class Package(packages.Package):
    """What flash_attn_3 registers, computed with plain PyTorch."""

    def __init__(self, fwd=FWD, bwd=BWD):
        ops = [(schema, function) for schema, function in ((fwd, self.fwd), (bwd, self.bwd)) if schema]
        super().__init__("flash_attn_3", ops, fa3.PASSED)
        self.returns = 8 if bwd == BWD_OLDER else 5

    def fwd(self, given):
        assert given["num_splits"] == 1
        out, lse = self.attention(given, given["q"], given["k"], given["v"])
        if given["k"].shape[0 if given.get("cu_seqlens_k") is not None else 1] == 0:
            lse = lse.fill_(torch.inf)
        tail = self.tail(given)
        if tail is not None:  # never written
            out[tail], lse[..., tail] = torch.nan, torch.nan
        nothing = torch.empty(0)
        return out.to(given["q"].dtype), lse.float(), nothing, nothing.clone()

    def bwd(self, given):
        lse = given["softmax_lse"]
        assert lse.dtype == torch.float32
        assert not (lse == torch.inf).any()
        leaves = [given[name].double().requires_grad_() for name in "qkv"]
        with torch.enable_grad():
            out, _ = self.attention(given, *leaves)
            grads = torch.autograd.grad(out, leaves, given["dout"].double(), materialize_grads=True)
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            given[name].copy_(grad)
        return tuple(torch.empty(0) for _ in range(self.returns))

    def tail(self, given):
        if given.get("cu_seqlens_q") is None:
            return None
        return torch.arange(given["q"].shape[0]) >= given["cu_seqlens_q"][-1]

    def attention(self, given, q, k, v):
        """Return output and LSE; NaN in any row that is loaded spreads, as in the kernels' tiles."""
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        left, right = given["window_size_left"], 0 if given["is_causal"] else given["window_size_right"]
        options = {"window": (left, right), "scale": given["softmax_scale"]}
        used, table = given.get("seqused_k"), given.get("page_table")
        if table is not None:
            assert given.get("cu_seqlens_k") is None
            assert given.get("max_seqlen_k") is None
            k, v = (x[table.long()].flatten(1, 2) for x in (k, v))
            offsets = torch.arange(len(table) + 1) * k.shape[1]
            k, v = k.flatten(0, 1), v.flatten(0, 1)
            return truth.varlen(q, k, v, given["cu_seqlens_q"], offsets, used=used, **options)
        assert k.isfinite().all()
        assert v.isfinite().all()
        if given.get("cu_seqlens_q") is not None:
            assert given["max_seqlen_q"] is not None
            assert given["max_seqlen_k"] is not None
            return truth.varlen(q, k, v, given["cu_seqlens_q"], given["cu_seqlens_k"], used=used, **options)
        if used is not None:
            offsets = [torch.arange(len(x) + 1) * x.shape[1] for x in (q, k)]
            out, lse = truth.varlen(*(x.flatten(0, 1) for x in (q, k, v)), *offsets, used=used, **options)
            return out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
        out, lse = truth.dense(*(x.transpose(1, 2) for x in (q, k, v)), **options)
        return out.transpose(1, 2), lse


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def package(monkeypatch):
    """Install the fake package: `package(fwd=schema, bwd=schema)`; returns what it recorded."""
    made = []

    def install(**schemas):
        monkeypatch.setitem(sys.modules, "flash_attn_3", types.ModuleType("flash_attn_3"))
        monkeypatch.setitem(sys.modules, "flash_attn_3._C", types.ModuleType("flash_attn_3._C"))
        made.append(Package(**schemas))
        return made[-1]

    yield install
    for one in made:
        one.unregister()


SHORT = [
    case
    for case in QUICK
    if case.dtype == "bfloat16" and (max(case.max_q, case.max_k) < 300 or case.page_size)
]


# Values


def test_every_case_of_the_matrix_that_it_takes_is_right(package):
    package()
    outcomes = list(verify(on_cpu(fa3.BACKEND), "cpu", SHORT))
    assert [str(outcome.case) for outcome in outcomes if not outcome.passed] == []
    ran = {
        outcome.case.name for outcome in outcomes if outcome.errors.keys() == {"out", "lse", "dq", "dk", "dv"}
    }
    assert {"seqused_k", "varlen seqused_k", "varlen tail of NaN", "no keys", "varlen empty between"} <= ran
    assert {
        "window (0, -1), few keys",
        "varlen window (4, 4)",
        "heads 4:1",
        "dim 256",
        "layout odd rows",
    } <= ran
    pages = [outcome for outcome in outcomes if outcome.case.name == "pages" and outcome.errors]
    assert pages
    assert all(outcome.errors.keys() == {"out", "lse"} for outcome in pages)


@pytest.mark.parametrize("schemas", [{"bwd": BWD_OLDER}, {"fwd": FWD_OLDER}])
def test_older_forms_of_the_operators_serve_as_well(package, schemas):
    package(**schemas)
    wanted = ("heads 4:2", "varlen seqused_k", "causal lengths 799 and 3")
    outcomes = list(verify(on_cpu(fa3.BACKEND), "cpu", [case for case in QUICK if case.name in wanted]))
    assert all(outcome.passed for outcome in outcomes)
    assert sum(bool(outcome.errors) for outcome in outcomes) >= len(wanted)


def test_rows_without_a_key_have_an_lse_of_minus_infinity_and_none_of_plus(package):
    package()
    for name in ("no keys", "varlen no keys", "causal lengths 7 and 8", "causal lengths 799 and 3"):
        for case in (case for case in QUICK if case.name == name and case.dtype == "bfloat16"):
            q, k, v, _, call = inputs(case)
            _, lse = on_cpu(fa3.BACKEND).load().forward(q, k, v, call)
            assert not (lse == torch.inf).any()
            assert lse.dtype == torch.float32


# What the operators are given


CASE = Case(name="one", lens_q=(7, 5), lens_k=(9, 5), varlen=True, heads=(4, 2), dims=(16, 16))


@pytest.mark.parametrize(
    ("window", "given"),
    [
        ((-1, -1), (False, -1, -1)),
        ((-1, 0), (True, -1, 0)),
        ((3, 0), (True, 3, 0)),
        ((3, 2), (False, 3, 2)),
        ((3, -1), (False, 3, -1)),
    ],
)
def test_window_scale_and_determinism_reach_both_operators(package, window, given):
    recorded = package()
    kernels = on_cpu(fa3.BACKEND).load()
    q, k, v, grad, call = inputs(dataclasses.replace(CASE, window=window, scale=0.3))
    call = call._replace(deterministic=True)
    out, lse = kernels.forward(q, k, v, call)
    kernels.backward(grad, q, k, v, out, lse, call)
    (_, fwd), (_, bwd) = recorded.calls
    for one in (fwd, bwd):
        assert (one["is_causal"], one["window_size_left"], one["window_size_right"]) == given
        assert one["softmax_scale"] == 0.3
        assert (one["max_seqlen_q"], one["max_seqlen_k"]) == (7, 9)
        assert one["cu_seqlens_q"].tolist() == [0, 7, 12]
    assert bwd["deterministic"] is True
    assert fwd["num_splits"] == 1


def test_a_dense_call_is_given_no_offsets_and_no_lengths(package):
    recorded = package()
    q, k, v, _, call = inputs(Case(name="dense", lens_q=(7, 7), lens_k=(9, 9), dims=(16, 16)))
    on_cpu(fa3.BACKEND).load().forward(q, k, v, call)
    ((_, given),) = recorded.calls
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k", "page_table")
    assert [given.get(name) for name in names] == [None] * 6


# What it can't run


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "sm_80"}, "compute capability must be 9.0 to 9.0, got 8.0 (too old)"),
        ({"device": "sm_100"}, "compute capability must be 9.0 to 9.0, got 10.0 (too new)"),
        ({"dropout": 0.1}, "dropout_p must be 0, got 0.1"),
        ({"alibi": True}, "alibi_slopes must be None, got a tensor"),
        ({"dtype": "float32"}, "dtype must be float16 or bfloat16, got float32"),
        ({"head_dim_v": 64}, "head_dim of the value must be that of the query, 128, got 64"),
        ({"positive_scale": False}, "scale must be above 0"),
        ({"heads_q": 65536, "heads_k": 8}, "query heads must be 0 to 65535, got 65536"),
        ({"batch": 65536}, "batch must be 0 to 65535, got 65536"),
    ],
)
def test_what_neither_direction_runs(changes, reason):
    entry = Entry("FA3", "a test", fa3.BACKEND)
    asked = gpu_spec(**changes)
    assert entry.reasons(asked, "forward") == entry.reasons(asked, "backward") == (reason,)


def test_keys_are_never_split():
    entry = Entry("FA3", "a test", fa3.BACKEND)
    assert entry.reasons(gpu_spec(num_splits=1), "forward") == ()
    assert entry.reasons(gpu_spec(num_splits=2), "forward") == ("num_splits must be 1 or None, got 2",)
    assert entry.reasons(gpu_spec(num_splits=2), "backward") == (), "which is given none"


def test_what_only_the_backward_does_not_run():
    entry = Entry("FA3", "a test", fa3.BACKEND)
    paged, wide = gpu_spec(page_size=16, varlen=True), gpu_spec(head_dim=256, deterministic=True)
    assert entry.reasons(paged, "forward") == entry.reasons(wide, "forward") == ()
    assert entry.reasons(paged, "backward") == ("block_table must be None: no paged key-value cache",)
    assert entry.reasons(wide, "backward") == (
        "head_dim must be at most 192 with deterministic algorithms, got 256",
    )
    assert entry.reasons(gpu_spec(head_dim=192, deterministic=True), "backward") == ()


def test_it_comes_after_the_kernels_that_are_tested():
    assert fa3.BACKEND.experimental
    order = attnreg.explain(gpu_spec()).forward.order
    assert order.index("FA2") < order.index("FA3") < order.index("math")


# Where it can't load


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(fa3, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError) as error:
        Entry("FA3", "a test", fa3.BACKEND).kernels()
    assert str(error.value) == (
        "FA3 can't load here: flash_attn_3 isn't installed; install it with: "
        "pip install ./hopper (in a clone of Dao-AILab/flash-attention)"
    )


def test_a_module_without_a_spec_is_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_3", types.ModuleType("flash_attn_3"))  # its spec is None
    assert fa3.BACKEND.unavailable() == "flash_attn_3 isn't installed"


@pytest.mark.parametrize(("cuda", "reason"), [(True, None), (False, "torch finds no CUDA GPU here")])
def test_with_the_package_it_needs_a_gpu_spec(monkeypatch, cuda, reason):
    monkeypatch.setattr(fa3, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert fa3.BACKEND.unavailable() == reason


def test_the_version_is_that_of_the_package(monkeypatch):
    monkeypatch.setattr(fa3, "version", lambda name: {"flash_attn_3": "3.0.0b1"}[name])
    assert fa3.BACKEND.version() == "3.0.0b1"

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(fa3, "version", missing)
    assert fa3.BACKEND.version() is None


@pytest.mark.parametrize(
    ("schemas", "message"),
    [
        (
            {"fwd": FWD.replace("Tensor? page_table = None, ", "")},
            "flash_attn_3::fwd of flash_attn_3 3.0 has no argument page_table: flash_attn_3::fwd(Tensor q, ",
        ),
        (
            {"bwd": BWD.replace("bool is_causal", "bool causal")},
            "flash_attn_3::bwd of flash_attn_3 3.0 has no argument is_causal: ",
        ),
        (
            {"fwd": FWD.replace("Tensor v,", "Tensor v, int tiles,")},
            "flash_attn_3::fwd of flash_attn_3 3.0 needs tiles, which attnreg doesn't know",
        ),
        ({"bwd": ""}, "flash_attn_3 3.0 registers no operator flash_attn_3::bwd"),
    ],
)
def test_operators_that_do_not_fit_are_refused_when_they_are_loaded(package, monkeypatch, schemas, message):
    monkeypatch.setattr(fa3, "version", lambda name: "3.0")
    package(**schemas)
    entry = Entry("FA3", "a test", dataclasses.replace(on_cpu(fa3.BACKEND), unavailable=lambda: None))
    with pytest.raises(BackendUnavailableError) as error:
        entry.kernels()
    assert str(error.value).startswith(f"FA3 failed to load: RegistrationError: {message}")


def test_a_package_that_does_not_import_is_an_error_with_its_cause(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_3._C", None)
    entry = Entry("FA3", "a test", dataclasses.replace(on_cpu(fa3.BACKEND), unavailable=lambda: None))
    with pytest.raises(BackendUnavailableError) as error:
        entry.kernels()
    assert isinstance(error.value.__cause__, ImportError)


def test_info_marks_it_as_experimental(package, monkeypatch):
    package()
    entry = Entry("FA3", "a test", dataclasses.replace(fa3.BACKEND, unavailable=lambda: None))
    monkeypatch.setattr(_registry, "_entries", {"fa3": entry})
    _registry.changed()
    (listed,) = inventory()["backends"]
    assert (listed["name"], listed["state"]) == ("FA3", "experimental")

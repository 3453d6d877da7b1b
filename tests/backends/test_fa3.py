"""Promises of the FA3 adapter, on a fake of its package: operators of the same schema, on the CPU."""

import dataclasses
import sys
import types
from importlib.metadata import PackageNotFoundError
from unittest.mock import Mock

import pytest
import torch
from support import packages, truth
from support.packages import FEWER_OR_ALL, gpu_spec, on_cpu, verified

import attnreg
from attnreg.backends import fa3
from attnreg.core import launching, registry
from attnreg.core.registry.entry import Entry
from attnreg.errors import BackendUnavailableError
from attnreg.tools.cli.info import collected
from attnreg.tools.measure import QUICK, Case, inputs

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
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
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
        if given["page_table"] is None:
            assert given["leftpad_k"] is None
        else:
            assert not given["leftpad_k"].any()  # without it, values past the last key are multiplied by 0
        # Scores are masked, so that only what is in the values spreads.
        keys = given["k"] if given["page_table"] is not None else given["k"].nan_to_num()
        out, lse = self.attention(given, given["q"], keys, given["v"])
        if given["cu_seqlens_q"] is not None:  # what comes after the last sequence is never written
            tail = torch.arange(len(out)) >= given["cu_seqlens_q"][-1]
            out[tail], lse[..., tail] = torch.nan, torch.nan
        return out.to(given["q"].dtype), lse.float(), torch.empty(0), torch.empty(0)

    def bwd(self, given):
        lse = given["softmax_lse"]
        assert lse.dtype == torch.float32
        if given["cu_seqlens_q"] is None and given["cu_seqlens_k"] is None:
            given = given | {"seqused_k": None}  # as the kernels do
        leaves = [given[name].double().requires_grad_() for name in "qkv"]
        with torch.enable_grad():
            out, own = self.attention(given, *leaves)
            # The weights are exp(score - LSE), and the sum over grad_out * out is that of the output given.
            own = own.masked_fill(own == -torch.inf, 0.0)
            grad_out = (
                given["dout"].double() * (own.detach() - lse).exp().nan_to_num(posinf=0.0).mT[..., None]
            )
            grad_lse = ((out.detach() - given["out"].double()) * grad_out).nan_to_num().sum(-1).mT
            grads = torch.autograd.grad((out, own), leaves, (grad_out, grad_lse), materialize_grads=True)
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            given[name].copy_(grad)
        return tuple(torch.empty(0) for _ in range(self.returns))

    def attention(self, given, q, k, v):
        """Return output and LSE; NaN in any row that is loaded spreads, as in the kernels' tiles."""
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        integers = [given.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "page_table", "seqused_k")]
        assert all(x.is_contiguous() for x in integers if x is not None)
        cu_q, cu_k, table, _ = integers
        assert 0 not in (given["max_seqlen_q"], given["max_seqlen_k"])  # a grid of no blocks is an error
        assert (given["max_seqlen_q"] is None) is (cu_q is None)
        assert (given["max_seqlen_k"] is None) is (cu_k is None)
        if table is not None:
            k, v = (x[table.long()].flatten(1, 2) for x in (k, v))
        else:
            assert k.isfinite().all()
            assert v.isfinite().all()
        if cu_k is None:
            cu_k, k, v = torch.arange(len(k) + 1) * k.shape[1], k.flatten(0, 1), v.flatten(0, 1)
        shape, dense = q.shape[:2], cu_q is None
        if dense:
            cu_q, q = torch.arange(len(q) + 1) * q.shape[1], q.flatten(0, 1)
        window = given["window_size_left"], 0 if given["is_causal"] else given["window_size_right"]
        options = {"window": window, "scale": given["softmax_scale"], "used": given.get("seqused_k")}
        out, lse = truth.varlen(q, k, v, cu_q, cu_k, **options)
        return (out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1)) if dense else (out, lse)


@pytest.fixture
def package(monkeypatch, request):
    """Install the fake package: `package(fwd=schema, bwd=schema)`; returns what it recorded."""

    def install(**schemas):
        for name in ("flash_attn_3", "flash_attn_3._C"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        made = Package(**schemas)
        request.addfinalizer(made.unregister)
        return made

    return install


# Values


@pytest.mark.parametrize("cases", FEWER_OR_ALL)
def test_every_case_of_the_matrix_that_it_takes_is_right(package, cases):
    package()
    both, forwards = verified(fa3.BACKEND, cases)
    assert "pages" in forwards
    assert both >= {
        *("seqused_k", "packed seqused_k", "packed tail of NaN", "no keys", "packed empty between"),
        *("window (0, -1), few keys", "packed window (8, 2)", "heads 6:3", "layout odd rows", "dim 256"),
        "packed no keys",
    }


@pytest.mark.parametrize("schemas", [{"bwd": BWD_OLDER}, {"fwd": FWD_OLDER}])
def test_older_forms_of_the_operators_serve_as_well(package, schemas):
    package(**schemas)
    wanted = {"heads 4:2", "packed seqused_k", "causal lengths 799 and 3"}
    both, _ = verified(fa3.BACKEND, [case for case in QUICK if case.name in wanted])
    assert both == wanted


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


def strided(integers):
    return torch.stack([integers, integers], dim=1)[:, 0]


def test_integers_of_any_strides_are_given_without(package):
    recorded = package()
    kernels = on_cpu(fa3.BACKEND).load()
    q, k, v, grad, call = inputs(dataclasses.replace(CASE, seqused_k=(9, 2)))
    names = "cu_seqlens_q", "cu_seqlens_k", "seqused_k"
    call = call._replace(**{name: strided(getattr(call, name)) for name in names})
    kernels.backward(grad, q, k, v, *kernels.forward(q, k, v, call), call)
    for _, given in recorded.calls:
        assert [given[name].tolist() for name in names] == [[0, 7, 12], [0, 9, 14], [9, 2]]
        assert all(given[name].is_contiguous() for name in names)


def test_a_dense_backward_that_leaves_out_keys_is_given_packed_ones(package):
    recorded = package()
    lens = {"lens_q": (7, 7), "lens_k": (9, 9), "seqused_k": (9, 2)}
    q, k, v, grad, call = inputs(Case(name="dense", **lens, heads=(4, 2), dims=(16, 16)))
    kernels = on_cpu(fa3.BACKEND).load()
    _, grad_k, grad_v = kernels.backward(grad, q, k, v, *kernels.forward(q, k, v, call), call)
    (_, fwd), (_, bwd) = recorded.calls
    assert (fwd["k"].shape, fwd["cu_seqlens_k"]) == ((2, 9, 2, 16), None)
    assert (bwd["k"].shape, bwd["cu_seqlens_k"].tolist()) == ((18, 2, 16), [0, 9, 18])
    assert (bwd["q"].shape, bwd["cu_seqlens_q"], bwd["max_seqlen_k"]) == ((2, 7, 4, 16), None, 9)
    assert grad_k.shape == grad_v.shape == k.shape
    assert not grad_k[1, 2:].any()
    assert grad_k[1, :2].any(-1).all()


def test_rows_of_no_sequence_alone_reach_no_operator(package):
    recorded = package()
    kernels = on_cpu(fa3.BACKEND).load()
    q = torch.ones(3, 2, 8, dtype=torch.bfloat16)
    offsets = torch.zeros(3, dtype=torch.int32)
    call = attnreg.Call(1.0, 0, 0, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    out, lse = kernels.forward(q, q, q, call)
    assert not out.any()
    assert lse.tolist() == [[-torch.inf] * 3] * 2
    assert not any(grad.any() for grad in kernels.backward(q, q, q, q, out, lse, call))
    assert recorded.calls == []


def test_a_batch_without_unused_rows_is_not_copied(package, monkeypatch):
    recorded = package()
    monkeypatch.setattr(launching.offsets, "facts", lambda *_: types.SimpleNamespace(no_unused_rows=True))
    kernels = on_cpu(fa3.BACKEND).load()
    q, k, v, grad, call = inputs(CASE)
    out, lse = kernels.forward(q, k, v, call)
    kernels.backward(grad, q, k, v, out, lse, call)
    for _, given in recorded.calls:
        assert [given[name].data_ptr() for name in "qkv"] == [x.data_ptr() for x in (q, k, v)]
    assert given["dout"].data_ptr() == grad.data_ptr()


# What it can't run

NEEDED = "head_dim must be at most 192 with deterministic algorithms, got 256"


@pytest.mark.parametrize(
    ("changes", "forward", "backward"),
    [
        ({"device": "sm_80"}, *["compute capability must be 9.0, got 8.0 (too old)"] * 2),
        ({"device": "sm_100"}, *["compute capability must be 9.0, got 10.0 (too new)"] * 2),
        ({"dropout": 0.1}, *["dropout_p must be 0, got 0.1"] * 2),
        ({"alibi": True}, *["alibi_slopes must be None, got a tensor"] * 2),
        ({"dtype": "float32"}, *["dtype must be float16 or bfloat16, got float32"] * 2),
        ({"head_dim_v": 64}, *["head_dim of the value must be that of the query, 128, got 64"] * 2),
        ({"positive_scale": False}, *["scale must be above 0"] * 2),
        ({"heads_q": 65536, "heads_k": 8}, *["query heads must be 0 to 65535, got 65536"] * 2),
        ({"batch": 65536}, *["batch must be 0 to 65535, got 65536"] * 2),
        ({"num_splits": 1}, "", ""),
        ({"num_splits": 2}, "num_splits must be 1 or None, got 2", ""),  # a backward is given none
        ({"page_size": 16, "varlen": True}, "", "block_table must be None: no paged key-value cache"),
        ({"head_dim": 256, "deterministic": True}, "", NEEDED),
        ({"head_dim": 192, "deterministic": True}, "", ""),
    ],
)
def test_what_it_does_not_run_and_why(changes, forward, backward):
    entry, spec = Entry("FA3", "a test", fa3.BACKEND), gpu_spec(**changes)
    assert entry.reasons(spec, "forward") == ((forward,) if forward else ())
    assert entry.reasons(spec, "backward") == ((backward,) if backward else ())


@pytest.fixture
def built_without(monkeypatch):
    """Install the record of a build that lacks features; no record at all if it lacks none."""

    def install(*features):
        config = types.ModuleType("flash_attn_config")
        known = ("BACKWARD", "FP16", "LOCAL", "VARLEN", "PAGEDKV", "HDIM64", "HDIM192", "HDIM256")
        config.CONFIG = {
            "build_flags": {
                **{f"FLASHATTENTION_DISABLE_{feature}": feature in features for feature in known},
                "FLASHATTENTION_ENABLE_VCOLMAJOR": True,
            }
        }
        monkeypatch.setitem(sys.modules, "flash_attn_config", config if features else None)
        fa3._left_out.cache_clear()

    yield install
    fa3._left_out.cache_clear()


SMALL = "HDIM64", "HDIM192", "HDIM256"
TOO_LARGE = "head_dim must be at most 128, got 136: flash_attn_3 is built without HDIM192 and HDIM256"


@pytest.mark.parametrize(
    ("features", "changes", "forward", "backward"),
    [
        (["FP16"], {"dtype": "float16"}, *["dtype must be bfloat16, got float16: {} FP16"] * 2),
        (["FP16"], {}, "", ""),
        (
            ["LOCAL"],
            {"window": (3, 0)},
            *["window_size must be (-1, -1) or causal, got (3, 0): {} LOCAL"] * 2,
        ),
        (["LOCAL"], {"window": (-1, 0)}, "", ""),
        (["VARLEN"], {"varlen": True}, *["input must be dense, got packed: {} VARLEN"] * 2),
        (["VARLEN"], {"seqused_k": True}, *["seqused_k must be None, got a tensor: {} VARLEN"] * 2),
        (["BACKWARD"], {}, "", "{} BACKWARD"),
        (SMALL, {"head_dim": 8}, "", ""),
        (SMALL, {"head_dim": 128, "deterministic": True}, "", ""),
        (SMALL, {"head_dim": 136}, TOO_LARGE, TOO_LARGE),
        (
            ["HDIM192"],
            {"head_dim": 136, "deterministic": True},
            "",
            "head_dim must be at most 128 with deterministic algorithms, got 136",
        ),
        ([], {"dtype": "float16", "head_dim": 256}, "", ""),
    ],
)
def test_what_its_build_lacks_is_a_reason(built_without, features, changes, forward, backward):
    built_without(*features)
    spec = gpu_spec(**changes)
    here = spec.but(device=dataclasses.replace(spec.device, simulated=False))
    entry = Entry("FA3", "a test", dataclasses.replace(fa3.BACKEND, unavailable=lambda: None))
    built = "flash_attn_3 is built without"
    for direction, reason in (("forward", forward), ("backward", backward)):
        assert entry.reasons(here, direction) == ((reason.format(built),) if reason else ())
        assert entry.reasons(spec, direction) == ()  # a simulated machine may have another build


def test_pages_need_a_build_with_them(built_without):
    built_without("PAGEDKV")
    spec = gpu_spec(page_size=16, varlen=True, seqused_k=True)
    assert tuple(fa3.BACKEND.refuses(spec)) == ()
    here = spec.but(device=dataclasses.replace(spec.device, simulated=False))
    expected = "block_table must be None, got a tensor: flash_attn_3 is built without PAGEDKV"
    assert tuple(fa3.BACKEND.refuses(here)) == (expected,)


def test_it_comes_after_the_kernels_that_are_tested():
    assert fa3.BACKEND.experimental
    order = attnreg.explain(gpu_spec()).forward.order
    assert order.index("FA2") < order.index("FA3") < order.index("math")


# Where it can't load


def load_error(backend):
    with pytest.raises(BackendUnavailableError) as error:
        Entry("FA3", "a test", backend).kernels()
    return error.value


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(fa3, "find_spec", lambda name: None)
    assert str(load_error(fa3.BACKEND)) == (
        "FA3 can't load here: flash_attn_3 isn't installed; install it with: "
        "pip install ./hopper (in a clone of Dao-AILab/flash-attention)"
    )


@pytest.mark.parametrize(
    ("found", "cuda", "reason"),
    [
        (ValueError("__spec__ is None"), True, "flash_attn_3 isn't installed"),
        (object(), False, "torch finds no CUDA GPU here"),
        (object(), True, None),
    ],
)
def test_why_it_cannot_load_is_one_sentence(monkeypatch, found, cuda, reason):
    monkeypatch.setattr(fa3, "find_spec", Mock(side_effect=[found]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert fa3.BACKEND.unavailable() == reason


def test_the_version_is_that_of_the_package(monkeypatch):
    for answer, shown in (["3.0.0b1"], "3.0.0b1"), (PackageNotFoundError("flash_attn_3"), None):
        version = Mock(side_effect=answer)
        monkeypatch.setattr(fa3, "version", version)
        assert [fa3.BACKEND.version() for _ in range(3)] == [shown] * 3
        version.assert_called_once_with("flash_attn_3")  # it is read from disk


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
    assert str(load_error(on_cpu(fa3.BACKEND))).startswith(
        f"FA3 failed to load: RegistrationError: {message}"
    )


def test_a_package_that_does_not_import_is_an_error_with_its_cause(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_3._C", None)
    assert isinstance(load_error(on_cpu(fa3.BACKEND)).__cause__, ImportError)


def test_info_marks_it_as_experimental(package, monkeypatch):
    package()
    entry = Entry("FA3", "a test", dataclasses.replace(fa3.BACKEND, unavailable=lambda: None))
    monkeypatch.setattr(registry, "_entries", {"fa3": entry})
    registry.changed()
    (listed,) = collected()["backends"]
    assert (listed["name"], listed["state"]) == ("FA3", "experimental")

"""Promises about calls that torch sends past the routers: seen where somebody asks, and only there."""

import collections
import json

import pytest
import torch
import torch.nn.functional as F
from support import truth
from support.command_line import invoke
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode

import attnreg
from attnreg.core.aten import bypassed, cpu, efficient
from attnreg.core.aten.bypassed import Bypassed
from attnreg.core.torchlib import versions
from attnreg.errors import InvalidInputError, UnsupportedInputError

pytestmark = pytest.mark.usefixtures("routers")

MATH = "torch's math kernel"
SDPA = F.scaled_dot_product_attention


def tensors(*shape, count=3):
    return torch.randn(count, *(shape or (2, 4, 8, 16))).unbind()


def encoder_layer(training):
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).train(training)
    with torch.set_grad_enabled(training):
        layer(torch.randn(2, 5, 8))


def nested():
    parts = [torch.randn(length, 4, 12) for length in (5, 3)]
    one = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    F.scaled_dot_product_attention(one, one, one)


def with_mask_gradient():
    mask = torch.zeros(8, 8, requires_grad=True)
    F.scaled_dot_product_attention(*tensors(), attn_mask=mask)


def with_narrow_value():
    query, key, value = tensors()
    F.scaled_dot_product_attention(query, key, value[..., :8])


def with_flash_disabled():
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(*tensors())


def with_default_device():
    with torch.device("cpu"):
        F.scaled_dot_product_attention(*tensors(), dropout_p=0.1)


def under_autocast():
    query, key, value = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        F.scaled_dot_product_attention(query, key, value.bfloat16())


CALLS = {
    "dropout": (
        lambda: F.scaled_dot_product_attention(*tensors(), dropout_p=0.1),
        (MATH, "dropout_p must be 0 on a CPU, got 0.1"),
    ),
    "dropout, with a default device": (
        with_default_device,
        (MATH, "dropout_p must be 0 on a CPU, got 0.1"),
    ),
    "two dimensions": (
        lambda: F.scaled_dot_product_attention(*tensors(8, 16)),
        (MATH, "tensors must have 4 dimensions, got 2"),
    ),
    "another head dim of the value": (
        with_narrow_value,
        (MATH, "head_dim of the value must be that of the query, 16, got 8"),
    ),
    "a strided last dim": (
        lambda: F.scaled_dot_product_attention(*(x.mT for x in tensors(2, 4, 16, 8))),
        (MATH, "; ".join(f"the last stride of {one} must be 1, got 8" for one in ("query", "key", "value"))),
    ),
    "a mask of three dimensions": (
        lambda: F.scaled_dot_product_attention(*tensors(), attn_mask=torch.ones(4, 8, 8).bool()),
        (MATH, "attn_mask must have 2 or 4 dimensions, got 3"),
    ),
    "heads that are expanded": (
        lambda: F.scaled_dot_product_attention(
            *tensors(2, 4, 8, 16, count=1), *tensors(2, 1, 8, 16, count=2)
        ),
        (MATH, "without enable_gqa query, key and value must have as many heads, got [4, 1, 1]"),
    ),
    "batches that are expanded": (
        lambda: F.scaled_dot_product_attention(
            *tensors(2, 4, 8, 16, count=1), *tensors(1, 4, 8, 16, count=2)
        ),
        (MATH, "query, key and value must have one batch size, got [2, 1, 1]"),
    ),
    "no queries": (
        lambda: F.scaled_dot_product_attention(
            *tensors(2, 4, 0, 16, count=1), *tensors(2, 4, 8, 16, count=2)
        ),
        (MATH, "there must be queries and keys"),
    ),
    "a mask that needs a gradient": (with_mask_gradient, (MATH, "attn_mask must need no gradient")),
    "flash disabled": (
        with_flash_disabled,
        (MATH, "the flash kernel is disabled (torch.nn.attention.sdpa_kernel)"),
    ),
    "nested tensors of a head dim that the flash op doesn't take": (
        nested, ("torch's kernels for nested tensors", "head_dim must be one multiple of 8, got 12")
    ),
    "an encoder layer in training": (
        lambda: encoder_layer(True), (MATH, "dropout_p must be 0 on a CPU, got 0.1")
    ),
    "an encoder layer's fast path": (
        lambda: encoder_layer(False),
        (
            "torch's fast path of encoder layers and MultiheadAttention",
            "it has kernels of its own on a CPU; torch.backends.mha.set_fastpath_enabled(False) switches it "
            "off",
        ),
    ),
}  # fmt: skip
SERVED = {
    "two dtypes under autocast": under_autocast,
    "plain": lambda: F.scaled_dot_product_attention(*tensors()),
    "a mask": lambda: F.scaled_dot_product_attention(*tensors(), attn_mask=torch.ones(8, 8).bool()),
    "causal, shared heads": lambda: F.scaled_dot_product_attention(
        *tensors(2, 4, 8, 16, count=1), *tensors(2, 2, 8, 16, count=2), is_causal=True, enable_gqa=True
    ),
}
# From torch 2.14 on its CPU kernel takes one key head for all query heads without enable_gqa.
if versions.SELECTOR_BROADCASTS:
    CALLS.pop("heads that are expanded")
    SERVED["heads that are expanded"] = lambda: F.scaled_dot_product_attention(
        *tensors(2, 4, 8, 16, count=1), *tensors(2, 1, 8, 16, count=2)
    )


def three_dimensions():
    return F.scaled_dot_product_attention(*tensors(4, 8, 16))


if versions.SELECTOR_BROADCASTS:
    SERVED["three dimensions"] = three_dimensions
else:
    CALLS["three dimensions"] = three_dimensions, (MATH, "tensors must have 4 dimensions, got 3")


@pytest.fixture
def strict(monkeypatch):
    monkeypatch.setenv("ATTNREG_STRICT", "1")
    monkeypatch.setenv("ATTNREG_BACKEND", "math")
    attnreg.reload()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("call", "expected"), CALLS.values(), ids=CALLS)
def test_a_recording_counts_each_with_torchs_kernel_and_the_reason(call, expected, tmp_path):
    attnreg.register_backend("math", devices="cpu")
    with attnreg.record(tmp_path / "trace.jsonl"):
        call()
        call()
    (row,) = attnreg.stats().bypassed
    assert (row.kernel, row.reason, row.count) == (*expected, 2)
    attnreg.reset_stats()
    assert attnreg.stats().bypassed == ()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("call", "expected"), CALLS.values(), ids=CALLS)
def test_where_a_backend_is_asked_for_strictly_each_is_an_error(call, expected, strict):
    if expected == CALLS["no queries"][1]:
        assert call().numel() == 0  # nothing is computed
        return
    with pytest.raises(UnsupportedInputError) as error:
        call()
    function = "F.scaled_dot_product_attention"
    if "fast path" in expected[0]:
        function = "nn.MultiheadAttention or nn.TransformerEncoderLayer"
    assert str(error.value) == (
        f"{function} sends this call to {expected[0]}, so that no backend of "
        f"ATTNREG_BACKEND sees it, and strict (ATTNREG_STRICT) makes that an error: {expected[1]}"
    )


def of_shapes(*shapes, dtype=torch.float32):
    return [torch.randn(shape).to(dtype) for shape in shapes]


QKV = of_shapes(*[(2, 4, 7, 8)] * 3)
REFUSED = {
    "fewer heads without enable_gqa": (of_shapes((2, 4, 7, 8), *[(2, 2, 7, 8)] * 2), {}),
    "a mask of another size": (QKV, {"attn_mask": torch.ones(3, 3, dtype=torch.bool)}),
    "a mask of integers": (QKV, {"attn_mask": torch.ones(7, 7, dtype=torch.int32)}),
}
BROADCAST = {
    "one key for all of the batch": of_shapes((2, 4, 7, 8), *[(1, 4, 7, 8)] * 2),
    "five dims": of_shapes(*[(2, 3, 4, 7, 8)] * 3),
}
ONE_KEY_HEAD = of_shapes((2, 4, 7, 8), *[(2, 1, 7, 8)] * 2)
OF_HEADS = "query and key must have the same number of heads, got 4 and 1"
if not versions.SELECTOR_BROADCASTS:
    BROADCAST["one key head"] = ONE_KEY_HEAD


@pytest.mark.parametrize(("inputs", "options"), REFUSED.values(), ids=REFUSED)
def test_explain_refuses_what_torch_refuses(inputs, options):
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(*inputs, **options)
    with pytest.raises(InvalidInputError):
        attnreg.explain(*inputs, **options)


@pytest.mark.parametrize("inputs", BROADCAST.values(), ids=BROADCAST)
def test_explain_says_that_torchs_math_kernel_takes_what_it_broadcasts(inputs, ran):
    with attnreg.register_backend("cpu"):
        explained = attnreg.explain(*inputs)
        F.scaled_dot_product_attention(*inputs)
        assert ran() == {}
    assert explained.runs
    assert str(explained).startswith("torch's math kernel forward, by torch's own selector\n")


@pytest.mark.parametrize("batched", [True, False], ids=["of a batch", "without a batch"])
def test_one_key_head_is_explained_as_it_runs(fake, ran, batched):
    inputs = ONE_KEY_HEAD if batched else [x[0] for x in ONE_KEY_HEAD]
    with attnreg.register_backend(fake("equal", gqa=False).backend):
        explained = attnreg.explain(*inputs)
        F.scaled_dot_product_attention(*inputs)
    if not versions.SELECTOR_BROADCASTS:
        assert (explained.backend, ran()) == (MATH, {})
        return
    assert explained.rejected["equal"] == (OF_HEADS,)
    (row,) = attnreg.stats().fallbacks
    assert (row.backend, row.reason, explained.spec.heads_k) == ("equal", OF_HEADS, 1)
    assert ran() == {explained.backend: (1, 0)}


@pytest.mark.parametrize("choice", ["cpu", "efficient", "math"])
def test_the_heads_that_are_explained_are_those_of_torchs_choice(fake, monkeypatch, choice):
    natives = {"cpu": cpu.CPU, "efficient": efficient.EFFICIENT, "math": Bypassed(MATH, "a test")}
    monkeypatch.setattr("attnreg.tools.explanation.call_spec.selected", lambda *_: natives[choice])
    with attnreg.register_backend(fake("equal", gqa=False).backend):
        explained = [attnreg.explain(*inputs) for inputs in (ONE_KEY_HEAD, [x[0] for x in ONE_KEY_HEAD])]
    for one, batch in zip(explained, (2, 1), strict=True):
        assert (one.spec.batch, one.spec.heads_k) == (batch, 1 if choice == "cpu" else 4)
        assert one.backend == (MATH if choice == "math" else choice if choice == "cpu" else "equal")
        assert choice != "cpu" or one.rejected["equal"] == (OF_HEADS,)


@pytest.mark.parametrize("broadcasts", [True, False], ids=["as from torch 2.14 on", "as before"])
def test_one_key_head_is_a_reason_where_torchs_flash_kernel_refuses_it(monkeypatch, broadcasts):
    monkeypatch.setattr(versions, "SELECTOR_BROADCASTS", broadcasts)
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: SDPBackend.MATH.value)
    query, key, value = ONE_KEY_HEAD
    heads = "without enable_gqa query, key and value must have as many heads, got [4, {}, {}]"
    narrow = "head_dim of the value must be that of the query, 8, got 4"
    of_mask = "attn_mask must have 2 or 4 dimensions, got 3"
    dropout, mask = "dropout_p must be 0 on a CPU, got 0.5", torch.ones(4, 7, 7, dtype=torch.bool)
    one, two, dims = heads.format(1, 1), heads.format(2, 2), "tensors must have 4 dimensions, got 3"
    for given, options, as_before, now in (
        ((query, key, value[..., :4]), {}, f"{one}; {narrow}", narrow),
        ((query, key, value), {"attn_mask": mask}, f"{one}; {of_mask}", of_mask),
        ((query[0], key[0], value[0, ..., :4]), {}, f"{dims}; {narrow}", narrow),
        ((query[0],) * 3, {"attn_mask": mask, "dropout_p": 0.5}, f"{dims}; {of_mask}; {dropout}", dropout),
        ((query, query[:, :2], query[:, :2]), {}, two, two),
    ):
        call = bypassed.SdpaCall(*given, **options)
        assert bypassed.selected(*call).reason == (now if broadcasts else as_before)


def test_the_selector_is_asked_about_a_call_without_a_batch_as_sdpa_asks_it(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *given, **_: asked.append(given[:4]) or 0)
    query, mask = torch.randn(4, 7, 8), torch.zeros(7, 7, requires_grad=True)
    for broadcasts in (False, True):
        monkeypatch.setattr(versions, "SELECTOR_BROADCASTS", broadcasts)
        bypassed.selected(*bypassed.SdpaCall(query, query[:1], query[:1], mask))
    assert [[x.dim() for x in given] for given in asked] == [[3, 3, 3, 2], [4, 4, 4, 4]]
    assert all(given[3].requires_grad for given in asked)


@pytest.mark.parametrize("call", SERVED.values(), ids=SERVED)
def test_a_call_that_is_served_is_no_such_call(call, strict, ran):
    call()
    assert ran() == {"math": (1, 0)}
    assert attnreg.stats().bypassed == ()


def test_torchs_functions_are_looked_at_only_while_somebody_asks(tmp_path, monkeypatch):
    attnreg.register_backend("math")
    assert F.scaled_dot_product_attention is SDPA
    with attnreg.record(tmp_path / "a.jsonl"):
        assert F.scaled_dot_product_attention is not SDPA
        with attnreg.record(tmp_path / "b.jsonl"):
            pass
        assert F.scaled_dot_product_attention is not SDPA
    assert F.scaled_dot_product_attention is SDPA
    attnreg.configure({"strict": True})
    assert F.scaled_dot_product_attention is not SDPA
    attnreg.configure({})
    assert F.scaled_dot_product_attention is SDPA
    monkeypatch.setenv("ATTNREG_RECORD", str(tmp_path / "c.jsonl"))
    attnreg.reload()
    assert F.scaled_dot_product_attention is not SDPA
    monkeypatch.delenv("ATTNREG_RECORD")
    attnreg.reload()
    assert F.scaled_dot_product_attention is SDPA


@pytest.mark.parametrize("strided", [True, False])
def test_of_lazily_negated_tensors_the_selector_is_asked_as_torch_asks_it(ran, strided):
    """Torch's function asks past the dispatcher, which would copy them, so that their last stride were 1."""
    numbers = torch.randn(3, 1, 2, 8, 32)
    query, key, value = (torch._neg_view(x[..., ::2] if strided else x) for x in numbers)
    found = attnreg.explain(query, key, value, backend="math")
    with attnreg.use_backend("math"):
        out = F.scaled_dot_product_attention(query, key, value)
    assert ran() == ({} if strided else {"math": (1, 0)})
    assert ("the last stride of query must be 1, got 2" in str(found)) == strided
    right = F.scaled_dot_product_attention(*(x.double().resolve_neg() for x in (query, key, value)))
    torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-5)


def test_where_a_backend_is_asked_for_ops_count_and_the_selector_is_not_asked(tmp_path, monkeypatch, ran):
    asked = []
    selected = bypassed.selected
    monkeypatch.setattr(bypassed, "selected", lambda *given: asked.append(given) or selected(*given))
    query = torch.randn(1, 2, 8, 16)
    empty = query[:, :, :0]
    with attnreg.record(tmp_path / "recorded.json"), attnreg.register_backend("math"):
        for _ in range(3):
            F.scaled_dot_product_attention(query, query, query)
            F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
        is_left = bypassed.ops_are_observed
        assert len(asked) == (0 if is_left else 6)
        F.scaled_dot_product_attention(empty, empty, empty)  # which no op shows
        with torch.inference_mode():
            F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
        rows = attnreg.stats().bypassed
    assert len(asked) == (2 if is_left else 8)
    assert ran() == {"math": (3, 0)}
    counted = collections.Counter(row.reason for row in rows for _ in range(row.count))
    assert counted == {"dropout_p must be 0 on a CPU, got 0.5": 4, bypassed.NOTHING_TO_DO: 1}


class OnlySdpa(torch.Tensor):
    """A subclass that knows SDPA and nothing else."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not torch._C._nn.scaled_dot_product_attention:
            raise NotImplementedError(function)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*(x.as_subclass(torch.Tensor) for x in args))


def test_a_subclass_that_knows_nothing_but_sdpa_runs_while_calls_are_recorded(tmp_path, ran):
    query = torch.randn(1, 2, 8, 16)
    expected, mine = F.scaled_dot_product_attention(query, query, query), query.as_subclass(OnlySdpa)
    with attnreg.record(tmp_path / "recorded.json"), attnreg.use_backend("math"):
        torch.testing.assert_close(F.scaled_dot_product_attention(mine, mine, mine), expected)
    assert ran() == {"math": (1, 0)}


class SkipsScores(TorchFunctionMode):
    """Returns the value of a call, as a mode of diffusers does for the guidance by perturbed attention."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return args[2] if function is F.scaled_dot_product_attention else function(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", [{}, {"strict": True}, {"masks": "recognise"}], ids=str)
def test_a_mode_knows_the_call_by_its_name_in_f_whatever_looks_at_it(settings, ran):
    attnreg.register_backend("math")
    attnreg.configure(settings)
    assert (F.scaled_dot_product_attention is SDPA) == (not settings)
    query, key, value = tensors()
    with SkipsScores():
        assert F.scaled_dot_product_attention(query, key, value) is value
        mask = torch.ones(8, 8, dtype=torch.bool)
        assert F.scaled_dot_product_attention(query, key, value, attn_mask=mask) is value
    assert ran() == {}
    with BaseTorchFunctionMode():
        out = F.scaled_dot_product_attention(query, key, value)
    assert ran() == {"math": (1, 0)}
    truth.assert_near(out, truth.dense(query, key, value)[0])


def test_what_other_code_has_put_there_stays(tmp_path, monkeypatch):
    def others(*arguments, **options):
        return SDPA(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", others)
    with attnreg.record(tmp_path / "trace.jsonl"):
        assert F.scaled_dot_product_attention is others
    assert F.scaled_dot_product_attention is others


def attend(query, key, value):
    return F.scaled_dot_product_attention(query, key, value)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_compiled_scripted_traced_and_wrong_calls_are_as_without(tmp_path):
    given = tensors()
    expected = SDPA(*given)
    with attnreg.record(tmp_path / "trace.jsonl"):
        torch._dynamo.reset()
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)(*given)
        scripted = torch.jit.script(attend)(*given)
        graph = torch.fx.symbolic_trace(attend)
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(given[0], given[1][..., :3], given[2])
        with pytest.raises(TypeError):
            F.scaled_dot_product_attention(given[0])
    for found in (compiled, scripted, graph(*given)):
        torch.testing.assert_close(found, expected)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [SDPA]
    assert attnreg.stats().bypassed == ()


def test_explain_says_the_same_of_tensors_and_of_a_description(monkeypatch):
    monkeypatch.setenv("ATTNREG_BACKEND", "math")
    attnreg.reload()
    query, key, value = tensors()
    for options, description in (
        ({"dropout_p": 0.1}, ("--dropout", "0.1")),
        ({"value": value[..., :8]}, ("--head-dim-v", "8")),
        ({"query": query[:, :, :0]}, ("--q", "2,0,4,16", "--kv", "2,8,4,16")),
    ):
        found = attnreg.explain(**({"query": query, "key": key, "value": value} | options))
        shown = ["explain", "--q", "2,8,4,16", "--dtype", "float32", "--device", "cpu", "--json"]
        described = json.loads(invoke(*shown, *description).stdout)
        assert (found.backend, found.source) == (MATH, "torch's own selector")
        assert (described["backend"], described["source"]) == (found.backend, found.source)
        assert described["forward"]["rejected"]["math"] == list(found.rejected["math"])


def test_explain_says_the_error_of_a_call_under_strict(monkeypatch):
    monkeypatch.setenv("ATTNREG_BACKEND", "math")
    monkeypatch.setenv("ATTNREG_STRICT", "1")
    attnreg.reload()
    given = tensors()
    found = attnreg.explain(*given, dropout_p=0.1)
    with pytest.raises(UnsupportedInputError) as raised:
        F.scaled_dot_product_attention(*given, dropout_p=0.1)
    assert (found.runs, found.backend) == (False, None)
    assert str(raised.value) in str(found)
    shown = "explain", "--q", "2,8,4,16", "--dtype", "float32", "--device", "cpu", "--dropout", "0.1"
    described = invoke(*shown)
    assert described.exit_code == 1
    assert str(raised.value) in described.stdout
    assert attnreg.explain(*given).runs


@pytest.mark.parametrize("shape", [(8, 16), (4, 8, 16)], ids=["two dimensions", "three dimensions"])
def test_explain_says_what_runs_tensors_of_fewer_dimensions(shape, tmp_path):
    attnreg.register_backend("math")
    found = attnreg.explain(*tensors(*shape))
    with attnreg.record(tmp_path / "trace.jsonl"):
        F.scaled_dot_product_attention(*tensors(*shape))
    (bypassed, *_) = *attnreg.stats().bypassed, None
    assert found.backend == (bypassed.kernel if bypassed else "math")
    assert bypassed is None or found.rejected["cpu"][0].endswith(bypassed.reason)
    assert (found.spec.max_q, found.spec.head_dim) == (8, 16)


def test_where_nothing_is_asked_for_the_headline_says_that_torchs_own_kernel_runs():
    query, key, value = tensors()
    assert str(attnreg.explain(query, key, value)).startswith(
        "torch's flash_attention kernel, because nothing asks for a backend; attnreg itself would choose: "
        "cpu forward, by"
    )
    attnreg.register_backend("math")
    assert str(attnreg.explain(query, key, value)).startswith("math forward, by ")


FLEX = {
    "plain": dict,
    "a score_mod": lambda: {"score_mod": lambda score, batch, head, query, key: score - (query - key).abs()},
    "a block mask and shared heads": lambda: {
        "block_mask": create_block_mask(
            lambda batch, head, query, key: query >= key, None, None, 8, 8, device="cpu"
        ),
        "enable_gqa": True,
    },
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("options", FLEX.values(), ids=FLEX)
def test_flex_attention_is_counted_and_not_replaced(options, ran, tmp_path):
    given = options()
    heads = 2 if "enable_gqa" in given else 4
    query, key, value = *tensors(2, 4, 8, 16, count=1), *tensors(2, heads, 8, 16, count=2)
    with torch.no_grad():
        expected = flex_attention(query, key, value, **given)
        with attnreg.register_backend("math"), attnreg.record(tmp_path / "trace.jsonl"):
            got = flex_attention(query, key, value, **given)
            (row,) = attnreg.stats().bypassed
            assert (row.op, row.kernel, row.count) == ("flex_attention", "torch's flex_attention", 1)
            assert row.shapes == (tuple(query.shape), tuple(key.shape), tuple(value.shape))
            assert ran() == {}
            SDPA(query, key, value, enable_gqa=True)
            assert ran() == {"math": (1, 0)}  # as the registration holds
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout_p": 0.1}, "dropout_p must be 0 on a CPU, got 0.1"),
        ({"attn_mask": torch.zeros(8, 8, requires_grad=True)}, "attn_mask must need no gradient"),
    ],
    ids=["dropout", "a mask that needs a gradient"],
)
def test_explain_with_one_backend_alone_refuses_a_call_that_none_sees(options, reason):
    query = torch.randn(2, 4, 8, 16)
    explained = attnreg.explain(query, query, query, **options, backend="math")
    assert not explained.runs
    assert explained.forward.refusal == (
        "F.scaled_dot_product_attention sends this call to torch's math kernel, and backend='math' allows no "
        f"other than that backend: {reason}"
    )
    free = attnreg.explain(query, query, query, **options)
    assert (free.runs, free.backend, free.backward is not None) == (True, MATH, "attn_mask" in options)


def test_explain_refuses_a_mask_beside_is_causal_as_torch_does_where_it_goes_to_the_math_kernel():
    query, value = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 4)
    given = {"attn_mask": torch.ones(8, 8, dtype=torch.bool), "is_causal": True}
    with pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal=True"):
        F.scaled_dot_product_attention(query, query, value, **given)
    with pytest.raises(InvalidInputError, match="attn_mask: got a tensor with is_causal=True"):
        attnreg.explain(query, query, value, **given)

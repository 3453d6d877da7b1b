"""Promises of `explain`: it says what would run, who decided and why not the others, and it is right."""

import dataclasses
import io
import json
import sys

import pytest
import torch
import torch.nn.functional as F
from support.known import know
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attnreg
from attnreg import errors, explain, flash_attn
from attnreg.core import aten
from attnreg.core.aten import efficient, flash
from attnreg.core.aten.bypassed import ROUTED
from attnreg.core.registry.entry import Entry
from attnreg.core.torchlib import building, captured, versions
from attnreg.tools.explanation import call_spec
from attnreg.tools.lines import fitted

NOTHING_ASKS = "nothing asks for a backend: torch's functions run torch's own kernels"
NOT_SERVED = NOTHING_ASKS.replace("torch's f", "attnreg.varlen_attn runs as explained, torch's f")


@pytest.fixture(autouse=True)
def known(monkeypatch, fake):
    """Know these backends only, as on a machine with a GPU's packages and no GPU."""
    gpu = {"devices": ("cuda",), "dtypes": ("float16", "bfloat16"), "unavailable": lambda: "no GPU here"}
    backends = [
        fake(
            "FA4", **gpu, compute_capability=((9, 0), (10, 3)), priority=20, window=False, install="make fa4"
        ),
        fake("FA2", **gpu, compute_capability=((8, 0), (9, 0)), priority=10, head_dim_v=None),
        fake("cpu", backward=False, priority=5, bias=False),
        fake("math", devices=("cpu", "cuda"), priority=-100),
    ]
    return know(monkeypatch, *(one.backend for one in backends))


def spec(device="cpu", dtype="float32", **changes):
    sizes = {"batch": 2, "max_q": 4096, "max_k": 4096, "heads_q": 32, "heads_k": 8}
    dims = {"head_dim": 128, "head_dim_v": 128}
    return attnreg.AttentionSpec(
        device=attnreg.Device.parse(device), dtype=dtype, **{**sizes, **dims, **changes}
    )


def bhsd(*shape, **options):
    """Return query, key and value for `F.scaled_dot_product_attention`."""
    return torch.randn(3, *shape, **options).unbind()


# A call for a machine that needn't be there


def test_a_call_for_another_machine_has_the_answer_first_and_a_line_for_each_backend():
    answer = "FA4 forward and backward, by default order for sm_90"
    assert str(explain(spec("sm_90", "bf16", window=(-1, 0), needs_backward=True))) == (
        f"torch's own kernel, because nothing asks for a backend; attnreg itself would choose: {answer}\n"
        "  on cuda (simulated sm_90): query (2, 4096, 32, 128), key and value (2, 4096, 8, 128) as"
        " (B, S, H, D) · bfloat16 · causal · needs grad\n"
        "  FA4   runs it\n"
        "  FA2   could run it\n"
        "  math  could run it\n"
        "  for other devices: cpu\n"
        "note: assumes that the backends load on that device, with the packages that they need"
    )
    with attnreg.use_backend("math"):
        explanation = explain(spec(needs_backward=True, heads_k=32), backend="math")
    assert explanation.answer == "math forward and backward, by backend='math'"
    assert explain(spec(needs_backward=True, varlen=True)).answer == (
        "cpu forward and math backward, by default order for cpu"
    )


def test_shapes_are_those_of_the_call_in_its_own_layout(packed):
    query, key = torch.randn(2, 4, 16, 8), torch.randn(2, 4, 24, 8)
    assert "query (2, 4, 16, 8), key and value (2, 4, 24, 8) as (B, H, S, D)" in str(explain(query, key, key))
    assert "query (2, 4, 16, 8), key and value (2, 4, 24, 8)" in str(explain(query, key, key, is_causal=True))
    assert "query, key and value (8, 2, 8) as (T, H, D)" in str(explain(*packed((3, 5), heads=2, dim=8)))


def test_directions_that_differ_are_named_in_the_line_of_a_backend():
    explanation = explain(spec(needs_backward=True, varlen=True))
    lines = str(explanation).splitlines()
    assert "  cpu   forward: runs it; backward: has no backward" in lines
    assert "  math  forward: could run it; backward: runs it" in lines
    assert "  for other devices: FA4, FA2" in lines


def test_lines_fit_the_terminal_and_a_pipe_gets_whole_ones(known, fake, monkeypatch):
    absent = fake(
        "absent", unavailable=lambda: "its package isn't installed", install="pip install 'its[own]'"
    )
    known["absent"] = Entry("absent", "a test", absent.backend)
    explanation = explain(spec(needs_backward=True))
    reason = "can't load here: its package isn't installed; install it with: pip install 'its[own]'"
    whole = str(explanation)
    assert f"  absent  {reason}" in whole.splitlines()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for columns in (40, 60, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = str(explanation)
        assert max(map(len, text.splitlines())) <= columns
        assert text.split() == whole.split()
        for kept in ("pip install 'its[own]'", "(2, 4096, 32, 128)", "(B, S, H, D)"):
            assert kept in text
        verbose = explanation.text(verbose=True, width=columns)
        assert "pip install 'its[own]'" in verbose and max(map(len, verbose.splitlines())) <= columns
    first, second, *_ = text.splitlines()
    assert first.startswith("torch's own kernel, ") and second.startswith("  choose: cpu forward")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_an_explanation_can_be_printed_in_the_encoding_of_stdout(monkeypatch, encoding):
    explanation = explain(spec(), backend="math")
    bytes_ = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_, encoding=encoding))
    sys.stdout.write(f"{explanation}\n")
    sys.stdout.flush()
    printed = bytes_.getvalue().decode(encoding)
    assert printed == f"{explanation.text()}\n".replace("·", "." if encoding == "ascii" else "·")
    assert "as (B, S, H, D) . float32\n" in printed or encoding != "ascii"


@pytest.mark.parametrize("stdout", [None, io.StringIO()], ids=["none", "without an encoding"])
def test_without_an_encoding_of_stdout_the_text_is_whole(monkeypatch, stdout):
    monkeypatch.setattr(sys, "stdout", stdout)
    assert "as (B, S, H, D) · float32\n" in str(explain(spec(), backend="math"))


def test_a_wrapped_line_begins_at_its_own_indentation_and_goes_on_two_columns_behind():
    assert fitted("one two three four\n    five six seven", 12) == (
        "one two\n  three four\n    five\n      six\n      seven"
    )


def test_a_wrapped_row_keeps_its_columns_and_goes_on_behind_the_first():
    rows = "  ab    one two three four five six seven eight\n  abcd  nine"
    assert fitted(rows, 40) == ("  ab    one two three four five six\n          seven eight\n  abcd  nine")
    assert fitted(rows, 20) == ("  ab one two three\n    four five six\n    seven eight\n  abcd  nine"), (
        "without room for the second column"
    )


def test_without_the_compiled_part_the_slow_path_and_its_cost_are_named(monkeypatch):
    monkeypatch.setattr(building, "may_be_loaded", lambda library: False)
    text = str(explain(spec()))
    assert "note: the call cache isn't used (`attnreg info` says why), so Python runs every call: " in text
    assert "note: the CPU kernel isn't used" in text and "docs/benchmarks.md" in text
    assert "isn't used" not in str(explain(spec("sm_90", "bf16")))
    assert "the CPU kernel" not in str(explain(spec(), backend="math"))
    monkeypatch.setattr(building, "may_be_loaded", lambda library: True)
    assert "isn't used" not in str(explain(spec()))


def test_all_of_a_call_for_another_machine_is_behind_verbose():
    forward, backward = (
        f"{direction} on cuda (simulated sm_90): FA4, by default order for sm_90\n"
        "  query (2, 4096, 32, 128) · key (2, 4096, 8, 128) · value (2, 4096, 8, 128) · bfloat16 · causal"
        " · needs grad\n"
        "  FA4   runs it, by default order for sm_90\n"
        "  FA2   could run it\n"
        f"  cpu   {reason}\n"
        "  math  could run it\n"
        "\n"
        for direction, reason in (
            ("forward", "device must be cpu, got cuda"),
            ("backward", "has no backward"),
        )
    )
    text = explain(spec("sm_90", "bf16", window=(-1, 0), needs_backward=True)).text(verbose=True)
    assert text.partition("\n\n")[2] == (
        f"{forward}{backward}"
        f"note: {NOTHING_ASKS}\n"
        "\n"
        "note: assumes that FA4 loads there (can't load here: no GPU here; "
        "install it with: make fa4)\n"
        "\n"
        "note: assumes that FA2 loads there (can't load here: no GPU here)"
    )


def test_an_experimental_backend_has_one_note_where_it_would_run(known, fake):
    new = fake("new", experimental=True, head_dim=attnreg.Range(64, 64), priority=50).backend
    known["new"] = Entry("new", "a test", new)
    note = "new is experimental: it isn't proven on the hardware that it is written for"
    explanation = explain(spec(head_dim=64, head_dim_v=64, needs_backward=True))
    assert (explanation.backend, explanation.backward.backend) == ("new", "new")
    assert [one for one in explanation.notes if "experimental" in one] == [note]
    elsewhere = explain(spec(needs_backward=True))
    assert (elsewhere.backend, elsewhere.backward.backend) == ("cpu", "math")
    assert not any("experimental" in one for one in elsewhere.notes)


@pytest.mark.parametrize(
    ("device", "backend", "rejected"),
    [
        ("sm_90", "FA4", {"cpu"}),
        ("sm_100", "FA4", {"FA2", "cpu"}),
        ("sm_120", "math", {"FA4", "FA2", "cpu"}),
        ("sm_80", "FA2", {"FA4", "cpu"}),
        ("sm_75", "math", {"FA4", "FA2", "cpu"}),
    ],
)
def test_every_gpu_can_be_asked_about_without_one(device, backend, rejected):
    explanation = explain(spec(device, "bf16"))
    assert explanation.backend == backend
    assert explanation.source == f"default order for {device}"
    assert set(explanation.rejected) == rejected
    assert (explanation.runs, explanation.backward) == (True, None)


def test_for_the_device_of_this_machine_a_missing_package_is_a_reason():
    assert explain(spec("cuda", "bf16")).rejected == {
        "FA4": ("can't load here: no GPU here; install it with: make fa4",),
        "FA2": ("can't load here: no GPU here",),
        "cpu": ("device must be cpu, got cuda",),
    }


# Both directions


def test_with_dropout_the_backward_is_explained_as_its_forwards(known, fake):
    del known["cpu"]
    known["half"] = Entry("half", "a test", fake("half", priority=9, dropout=False).backend)
    known["other"] = Entry("other", "a test", fake("other", priority=1).backend)
    also = fake("half", priority=9).backend
    known["half"].backend = dataclasses.replace(known["half"].backend, backward=also.forward)
    explanation = explain(spec(needs_backward=True, dropout=0.5, varlen=True))
    assert (explanation.backend, explanation.source) == ("other", "default order for cpu")
    # "half" would come first and could run the backward, but doesn't know the mask.
    assert "half" not in explanation.backward.rejected
    backward = explanation.backward
    assert (backward.backend, backward.source) == ("other", "the forward's dropout mask")


def test_a_call_runs_if_both_directions_that_it_needs_do(known):
    del known["math"]
    assert explain(spec()).runs
    training = explain(spec(needs_backward=True))
    assert (training.backend, training.backward.backend, training.runs) == ("cpu", None, False)
    assert not explain(spec(bias=True)).runs


# The call itself


def test_the_arguments_of_scaled_dot_product_attention_are_understood():
    query, key, value = bhsd(2, 4, 16, 8, requires_grad=True)
    explanation = explain(query, key, value, is_causal=True)
    assert explanation.spec == attnreg.AttentionSpec(
        device=attnreg.Device("cpu"), dtype="float32", batch=2, max_q=16, max_k=16, heads_q=4, heads_k=4,
        head_dim=8, head_dim_v=8, window=(-1, 0), needs_backward=True,
    )  # fmt: skip
    with torch.no_grad():
        assert explain(query, key, value).backward is None
    # torch aligns its causal mask at the top left, the contract at the bottom right.
    for length_q, length_k, expected in ((8, 4, ((-1, 4), 8, 4)), (4, 8, ((-1, 0), 4, 4))):
        query, key = torch.randn(1, 2, length_q, 8), torch.randn(1, 2, length_k, 8)
        found = explain(query, key, key, is_causal=True).spec
        assert (found.window, found.max_q, found.max_k) == expected


def test_the_arguments_of_varlen_attn_are_understood(packed):
    inputs = packed((3, 5), (4, 4), heads=4, heads_k=2, dim=8)
    explanation = explain(
        *inputs,
        True,
        window_size=(2, -1),
        enable_gqa=True,
        num_splits=2,
        softcap=9,
        sinks=torch.ones(4),
        alibi_slopes=torch.ones(4),
    )
    assert explanation.spec == attnreg.AttentionSpec(
        device=attnreg.Device("cpu"), dtype="float32", batch=2, max_q=5, max_k=4, heads_q=4, heads_k=2,
        head_dim=8, head_dim_v=8, tokens_q=8, tokens_k=8, varlen=True, window=(2, 0), num_splits=2,
        softcap=9.0, sinks=True, alibi=True, needs_backward=True,
    )  # fmt: skip
    assert explain(*inputs, window_size=None, enable_gqa=True).spec.window == (-1, -1)


def test_a_paged_cache_and_its_lengths_are_understood():
    query, cache = torch.randn(3, 2, 8), torch.randn(4, 16, 2, 8)
    offsets, used = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    pages = torch.tensor([[0, 2]], dtype=torch.int32)
    found = explain(query, cache, cache, offsets, None, 3, 32, seqused_k=used, block_table=pages).spec
    assert (found.page_size, found.seqused_k, found.tokens_k) == (16, True, 32)


@pytest.mark.parametrize(
    ("make", "grad"),
    [
        (lambda: (bhsd(2, 4, 16, 8), {}), False),
        (lambda: (bhsd(2, 4, 16, 8, requires_grad=True), {"is_causal": True}), True),
        (lambda: (bhsd(2, 4, 16, 8), {"attn_mask": torch.zeros(16, 16)}), False),
        (lambda: (bhsd(1, 2, 8, 8, dtype=torch.float16), {}), False),
        (lambda: ((torch.randn(1, 2, 8, 8), *bhsd(1, 2, 4, 8)[:2]), {"is_causal": True}), False),
    ],
    ids=["plain", "causal with grad", "mask", "half", "causal and longer query"],
)
@pytest.mark.parametrize("how", ["install", "math", "cpu", "narrow"])
def test_what_is_explained_is_what_runs(routers, ran, fake, make, grad, how):
    tensors, options = make()
    if how == "install":
        attnreg.install()
    elif how == "narrow":
        attnreg.register_backend(fake("narrow", window=False, dtypes=("float32",)).backend)
    else:
        attnreg.register_backend(how)
    explanation = explain(*tensors, **options)
    assert ran() == {}
    out = F.scaled_dot_product_attention(*tensors, **options)
    backward = None
    if grad:
        out.sum().backward()
        backward = explanation.backward.backend
    names = {explanation.backend, backward} - {None}
    assert ran() == {name: (int(name == explanation.backend), int(name == backward)) for name in names}
    is_longer = tensors[0].shape[2] > tensors[1].shape[2]
    assert explanation.notes == ((call_spec.TOP_LEFT.format((-1, 4)),) if is_longer else ())


@pytest.mark.parametrize(
    ("make", "queries", "window", "noted"),
    [
        (causal_lower_right, 64, (-1, 0), "as one with is_causal=True"),
        (causal_upper_left, 64, (-1, 0), "as one with is_causal=True"),
        (causal_upper_left, 32, (-1, 0), "as one with is_causal=True"),
        (causal_lower_right, 32, (-1, -1), "makes a boolean attn_mask"),
    ],
)
def test_a_causal_bias_is_explained_as_the_call_that_its_class_makes(
    routers, ran, make, queries, window, noted
):
    query, key = torch.randn(2, 8, queries, 64), torch.randn(2, 8, 64, 64)
    bias = make(queries, 64)
    with attnreg.use_backend("math"):
        explanation = explain(query, key, key, attn_mask=bias)
        F.scaled_dot_product_attention(query, key, key, bias)
    assert explanation.backend == "math"
    assert ran() == {"math": (1, 0)}
    assert (explanation.spec.window, explanation.spec.bias) == (window, window == (-1, -1))
    assert any(noted in note for note in explanation.notes)
    with pytest.raises(errors.InvalidInputError, match="got a CausalBias with is_causal=True, expected one"):
        explain(query, key, key, attn_mask=bias, is_causal=True)


@pytest.mark.parametrize(("kernel", "dim", "name"), [("flash", 64, "FA2"), ("efficient", 60, "efficient")])
def test_a_causal_bias_that_torch_gives_to_an_op_of_a_gpu_is_explained_as_causal(
    monkeypatch, kernel, dim, name
):
    monkeypatch.setattr(torch.backends.cuda, f"can_use_{kernel}_attention", lambda parameters: True)
    query, key = torch.randn(2, 8, 32, 60), torch.randn(2, 8, 64, 60)
    explanation = explain(query, key, key, attn_mask=causal_lower_right(32, 64))
    spec = explanation.spec
    assert (spec.window, spec.bias, spec.head_dim, spec.head_dim_v) == ((-1, 0), False, dim, dim)
    assert f"torch gives a call with this CausalBias to the op of {name}" in explanation.notes


def test_the_gradient_of_a_mask_is_explained_as_of_a_backend_that_declares_it(monkeypatch, fake):
    monkeypatch.setattr(call_spec, "selected", lambda *_: efficient.EFFICIENT)
    attnreg.register_backend(fake("plain", bias=True).backend)
    inputs, mask = bhsd(1, 2, 8, 8, requires_grad=True), torch.zeros(8, 8)
    explanation = explain(*inputs, attn_mask=mask)
    assert (explanation.backend, explanation.backward.backend) == ("plain", "plain")
    explanation = explain(*inputs, attn_mask=mask.requires_grad_())
    assert (explanation.backend, explanation.backward.backend) == ("plain", "efficient")
    assert explanation.backward.rejected["plain"] == ("attn_bias must need no gradient",)


def test_what_is_explained_of_a_varlen_call_is_what_runs(packed, ran):
    inputs = packed((3, 5))
    explanation = explain(*inputs)
    attnreg.varlen_attn(*inputs).sum().backward()
    assert ran() == {explanation.backend: (1, 0), explanation.backward.backend: (0, 1)}
    assert (explanation.backend, explanation.backward.backend) == ("cpu", "math")


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"softcap": 3.0}, "softcap"),
        ({"alibi": True}, "alibi_slopes"),
        ({"window": (4, 0)}, "window_size"),
        ({"dropout": 0.1, "softcap": 3.0}, "softcap"),
    ],
)
def test_a_dense_call_with_an_option_that_sdpa_lacks_is_explained_as_the_one_of_flash_attn_func(
    facts, named, ran
):
    tokens = dict.fromkeys(("tokens_q", "tokens_k"), 16)
    sizes = dict.fromkeys(("max_q", "max_k", "head_dim", "head_dim_v"), 8) | {"heads_q": 2, "heads_k": 2}
    explanation = explain(spec(**(sizes | tokens | facts)))
    assert explanation.unasked == ""
    flash = "attnreg.flash_attn.flash_attn_func"
    assert explanation.notes == (
        NOT_SERVED.replace("attnreg.varlen_attn", flash),
        f"F.scaled_dot_product_attention has no {named}: explained is a dense call of {flash}",
    )
    options = {"softcap": facts.get("softcap", 0.0), "window_size": facts.get("window", (-1, -1))}
    options |= {"alibi_slopes": torch.ones(2) if "alibi" in facts else None}
    flash_attn.flash_attn_func(*bhsd(2, 8, 2, 8), dropout_p=facts.get("dropout", 0.0), **options)
    assert ran() == {explanation.backend: (1, 0)}


def test_a_dense_call_with_an_option_of_packed_ones_has_a_note_that_says_so():
    explanation = explain(spec(num_splits=2))
    assert explanation.unasked == ""
    assert explanation.notes[1] == (
        "F.scaled_dot_product_attention has no num_splits: an option of attnreg.varlen_attn, which takes "
        "packed calls (--varlen, or an AttentionSpec with varlen=True)"
    )


@pytest.mark.parametrize(
    ("device", "facts", "noted"),
    [
        ("sm_90", {"bias": True}, True),
        ("sm_90", {"bias": True, "heads_k": 32}, False),
        ("sm_90", {}, False),
        ("cpu", {"bias": True}, False),
    ],
)
def test_that_torch_keeps_a_mask_with_shared_heads_to_its_math_kernel_has_a_note(
    monkeypatch, device, facts, noted
):
    monkeypatch.setattr(versions, "EFFICIENT_SHARES_HEADS", True)
    assert call_spec.SHARED_HEADS not in explain(spec(device, **facts)).notes
    monkeypatch.setattr(versions, "EFFICIENT_SHARES_HEADS", False)
    assert (call_spec.SHARED_HEADS in explain(spec(device, **facts)).notes) is noted


def test_where_torchs_selector_decides_no_note_says_that_a_function_of_attnreg_runs_as_explained():
    assert explain(spec(dropout=0.1)).notes == (
        "nothing asks for a backend: torch's functions run torch's own kernels",
    )


def test_the_kernel_that_torchs_selector_chose_leads_the_default_order(known, fake):
    known["faster"] = Entry("faster", "a test", fake("faster", priority=1000).backend)
    explanation = explain(*bhsd(1, 2, 8, 8))
    assert explanation.forward.order == ("cpu", "faster", "FA4", "FA2", "math")
    assert explain(spec()).forward.order == ("faster", "FA4", "FA2", "cpu", "math")


@pytest.mark.parametrize("counts_on_fa4", [True, False])
def test_what_the_selector_sends_to_the_flash_op_for_fa4_is_judged_by_fa2s_limits(monkeypatch, counts_on_fa4):
    monkeypatch.setattr(call_spec, "selected", lambda *_: flash.DENSE)
    monkeypatch.setattr(versions, "selector_counts_on_fa4", lambda: counts_on_fa4)
    query, value = torch.randn(1, 2, 8, 24), torch.randn(1, 2, 8, 16)
    assert explain(query, query, value).backend == ("cpu" if counts_on_fa4 else "FA2")


def test_explain_knows_every_kernel_that_torchs_selector_chooses_among():
    keys = {key.lower() for route in aten.ROUTES for key in route.keys}
    assert {device for device, _ in ROUTED} == keys == {"cpu", "cuda"}
    assert [native.name for native in ROUTED.values()] == ["cpu", "FA2", "cuDNN", "efficient"]
    assert set(SDPBackend.__members__) >= {choice.name for _, choice in ROUTED}


# Who chose


def test_a_backend_of_the_call_is_obeyed_or_refused():
    obeyed = explain(spec(), backend="MATH")
    assert (obeyed.backend, obeyed.source) == ("math", "backend='math'")
    refused = explain(spec(needs_backward=True), backend="cpu")
    assert not refused.runs
    assert refused.forward.refusal == "backend='cpu' allows no other backend"
    assert refused.rejected["cpu"] == ("backward: has no backward",)
    with pytest.raises(errors.UnknownBackendError) as error:
        explain(spec(), backend="FA5")
    assert str(error.value) == (
        "no backend is named 'FA5'; did you mean 'FA4'? known backends: FA4, FA2, cpu, math"
    )


def test_who_asks_for_a_backend_that_cannot_run_the_call_is_named_below_the_answer(routers, fake):
    narrow = fake("narrow", window=False, dtypes=("float32",), backward=False).backend
    attnreg.register_backend(narrow)
    query, *_ = inputs = bhsd(2, 4, 16, 8, requires_grad=True)
    answer, overruled, *_ = str(explain(*inputs)).splitlines()
    assert answer == "narrow forward, by register_backend('narrow'); cpu backward, by default order for cpu"
    assert (
        overruled == "  register_backend('narrow') can't be obeyed in the backward: narrow: has no backward"
    )
    with torch.no_grad():
        assert explain(*inputs).overruled == ()
    with attnreg.use_backend("narrow"):
        explanation = explain(*(x.detach() for x in inputs), scale=0.0)
        assert explanation.overruled == ()
        longer = explain(query.detach(), *[query.detach()[:, :, :5]] * 2, is_causal=True)
    reason = "window_size must be (-1, -1) or causal, got (-1, 11)"
    assert longer.overruled == (f"  use_backend('narrow') can't be obeyed in the forward: narrow: {reason}",)
    assert longer.overruled[0] in longer.text(verbose=True).splitlines()
    assert "overruled" not in longer.to_dict()
    with attnreg.use_backend("narrow", "math"):
        (line,) = explain(*inputs, dropout_p=0.5).overruled
    assert "can't be obeyed in the forward and backward: narrow, math: never sees this call: " in line


def test_a_backend_of_the_call_that_cannot_load_here_is_a_refusal_and_no_error():
    explanation = explain(spec("cuda", "bf16"), backend="fa4")
    assert explanation.backend is None
    assert explanation.forward.refusal == (
        "backend='FA4': FA4 can't load here: no GPU here; install it with: make fa4"
    )
    there = explain(spec("sm_90", "bf16"), backend="fa2")
    assert (there.backend, there.source) == ("FA2", "backend='FA2'")


# Notes


def test_sinks_are_an_option_of_varlen_attn_alone():
    assert any(
        "has no sinks: an option of attnreg.varlen_attn" in one for one in explain(spec(sinks=True)).notes
    )


def test_where_nothing_is_registered_a_note_says_that_torchs_entry_points_are_not_served(routers):
    assert explain(spec()).notes == (NOTHING_ASKS,)
    assert explain(spec(varlen=True)).notes == (NOT_SERVED,)
    with attnreg.register_backend("math"):
        assert explain(spec()).notes == ()
    attnreg.install()
    assert explain(spec()).notes == ()


@pytest.mark.parametrize(
    "make",
    [
        lambda: (bhsd(1, 2, 8, 8), {"dropout_p": 0.5}, "dropout_p must be 0 on a CPU, got 0.5"),
        lambda: (bhsd(1, 2, 8, 8, device="meta"), {}, "torch's selector chose it"),
        lambda: (
            (*bhsd(1, 2, 8, 8)[:2], torch.randn(1, 2, 8, 4)),
            {},
            "head_dim of the value must be that of the query, 8, got 4",
        ),
    ],
    ids=["dropout", "meta", "another value head dim"],
)
def test_a_call_that_torchs_selector_keeps_from_attnreg_is_explained_as_its_decision(routers, ran, make):
    attnreg.install()
    tensors, options, why = make()
    explanation = explain(*tensors, **options)
    assert (explanation.backend, explanation.source) == ("torch's math kernel", "torch's own selector")
    assert set(explanation.rejected) == set(attnreg.list_backends())
    assert set(explanation.rejected.values()) == {
        (f"never sees this call: F.scaled_dot_product_attention sends it to torch's math kernel: {why}",)
    }
    F.scaled_dot_product_attention(*tensors, **options)
    assert ran() == {}


def test_an_implementation_activated_in_torch_above_the_routers_has_a_note(routers, monkeypatch):
    attnreg.install()
    monkeypatch.setattr(captured, "shadowed_by", lambda: "FA4")
    assert explain(spec()).notes == (
        "torch.nn.attention has 'FA4' active above attnreg's routers: the flash ops on CUDA go there; "
        "restore_flash_attention_impl() gives them back",
    )


def test_that_varlen_attn_obeys_no_sdpa_kernel_has_a_note(routers, packed, ran):
    attnreg.install()
    given = packed([3, 4], grad=False)
    note = (
        "sdpa_kernel has no effect on attnreg.varlen_attn (torch's own obeys it from torch 2.15 on): choose "
        "by backend= or use_backend"
    )
    assert note not in explain(*given).notes
    with sdpa_kernel(SDPBackend.MATH), attnreg.use_backend("cpu"):
        assert note in explain(*given).notes
        attnreg.varlen_attn(*given)
    assert ran() == {"cpu": (1, 0)}


# Wrong input


THREE = "expected query, key and value, or an AttentionSpec"
SHAPES = "expected (batch, heads, length, head_dim), or (tokens, heads, head_dim) with cu_seq_q"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k, v: explain(q), f"explain: got query alone, {THREE}"),
        (lambda q, k, v: explain(q, k), f"explain: got query, key alone, {THREE}"),
        (lambda q, k, v: explain(None, None, None), f"explain: got None, {THREE}"),
        (lambda q, k, v: explain(None, k, v), f"explain: got key, value alone, {THREE}"),
        (lambda q, k, v: explain([1], k, v), "query: got [1], expected a tensor"),
        (lambda q, k, v: explain(3, k, v), "query: got 3, expected a tensor"),
        (lambda q, k, v: explain(q, k, v, attn_mask=3), "attn_mask: got 3, expected a tensor"),
        (lambda q, k, v: explain(q[0], k[0], v[0], [0, 2]), "cu_seq_q: got [0, 2], expected a tensor"),
        (lambda q, k, v: explain(q[0, 0, 0], k, v), f"query: got shape (8,), {SHAPES}"),
        (lambda q, k, v: explain(q, k, v[0, 0, 0]), f"value: got shape (8,), {SHAPES}"),
        (
            lambda q, k, v: explain(q, k.double(), v),
            "dtype: got query torch.float32, key torch.float64, value torch.float32, expected one dtype",
        ),
        (lambda q, k, v: explain(q, k, v, dropout_p=1.5), "dropout_p: got 1.5, expected 0 to 1"),
        (lambda q, k, v: explain(q, k, v, scale=float("nan")), "scale: got nan, expected a finite number"),
        (
            lambda q, k, v: explain(q, k, v, window_size=(4, 0), num_splits=2, softcap=9.0),
            "explain: got window_size, num_splits, softcap without cu_seq_q, expected none: "
            "F.scaled_dot_product_attention has none (of a dense call of "
            "attnreg.flash_attn.flash_attn_func give an AttentionSpec)",
        ),
        (
            lambda q, k, v: explain(q[0], k[0], v[0], torch.tensor([0, 2]), torch.tensor([0, 2]), 2, 2),
            "cu_seq_q: got torch.int64, expected torch.int32",
        ),
    ],
)
def test_arguments_that_contradict_each_other_are_refused_as_the_call_itself_would_be(call, message):
    with pytest.raises(errors.InvalidInputError) as error:
        call(*bhsd(1, 2, 8, 8))
    assert str(error.value) == message


# The explanation as data


def test_the_explanation_is_plain_data_for_json():
    explanation = explain(spec("sm_90", "bf16", window=(-1, 0), needs_backward=True))
    document = json.loads(json.dumps(explanation.to_dict()))
    assert list(document) == [
        "runs",
        "backend",
        "source",
        *("spec", "forward", "backward", "notes", "unasked"),
    ]
    chosen = {"backend": "FA4", "source": "default order for sm_90"}
    assert document.items() >= {"runs": True, **chosen}.items()
    assert document["spec"]["device"] == {
        "type": "cuda", "capability": [9, 0], "index": None, "name": "", "simulated": True,
    }  # fmt: skip
    assert document["spec"]["window"] == [-1, 0]
    for direction, reason in (("forward", "device must be cpu, got cuda"), ("backward", "has no backward")):
        assert document[direction] == {
            **chosen, "direction": direction, "rejected": {"cpu": [reason]}, "passed_over": [],
            "order": ["FA4", "FA2", "cpu", "math"], "asked_for": [], "refusal": "", "predicted": None,
        }  # fmt: skip
    assert document["notes"] == list(explanation.notes)
    assert json.loads(json.dumps(explain(spec()).to_dict()))["backward"] is None


def test_the_error_of_a_refused_call_says_what_explain_says(known, fake, packed):
    known["narrow"] = Entry("narrow", "a test", fake("narrow", causal=False, gqa=False).backend)
    inputs = packed((3, 4), heads=4, heads_k=2, grad=False)
    options = {"backend": "narrow", "enable_gqa": True}
    with pytest.raises(errors.UnsupportedInputError) as error:
        attnreg.varlen_attn(*inputs, True, **options)
    explanation = explain(*inputs, True, **options)
    assert explanation.rejected["narrow"] == (
        "query and key must have the same number of heads, got 4 and 2",
        "is_causal must be False, got True",
    )
    assert error.value.rejected == explanation.rejected
    headline, *rows = str(error.value).splitlines()
    assert explanation.answer == headline
    assert "\n".join(rows) in explanation.text(verbose=True)


def test_explaining_runs_nothing_and_logs_no_fallback(routers, fake, ran, caplog):
    narrow = fake("narrow", dtypes=("float16",))
    with attnreg.register_backend(narrow.backend), caplog.at_level("DEBUG", "attnreg"):
        assert explain(*bhsd(1, 2, 8, 8)).rejected["narrow"] == ("dtype must be float16, got float32",)
        explain(spec(needs_backward=True))
    assert attnreg.stats() == attnreg.Stats({}, ())
    assert (narrow.forwards, caplog.records) == ([], [])


GROUPED = [
    (((2, 3, 4, 8, 16), (2, 3, 2, 8, 16)), (6, 4, 2)),
    (((2, 3, 4, 8, 16), (1, 3, 2, 8, 16)), (6, 4, 2)),
    (((4, 8, 16), (2, 8, 16)), (1, 4, 2)),
    (((1, 2, 3, 4, 8, 16), (1, 2, 3, 1, 8, 16)), (6, 4, 1)),
]


@pytest.mark.parametrize(("shapes", "expected"), GROUPED, ids=str)
def test_grouped_heads_of_any_number_of_dims_are_explained_as_torch_runs_them(routers, ran, shapes, expected):
    query, key = map(torch.randn, shapes)
    explanation = attnreg.explain(query, key, key, enable_gqa=True)
    spec = explanation.spec
    assert (spec.batch, spec.heads_q, spec.heads_k) == expected
    takes_it = versions.SELECTOR_BROADCASTS and query.dim() == 3
    assert explanation.forward.backend == ("cpu" if takes_it else "torch's math kernel")
    with attnreg.use_backend("cpu"):
        F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    assert ran() == ({"cpu": (1, 0)} if takes_it else {})


def test_grouped_heads_that_torch_refuses_are_refused():
    query, key = torch.randn(8, 16), torch.randn(2, 3, 3, 8, 16)
    with pytest.raises(
        errors.InvalidInputError, match=r"got shape \(8, 16\) with enable_gqa=True, expected heads"
    ):
        attnreg.explain(query, query, query, enable_gqa=True)
    with pytest.raises(errors.InvalidInputError, match="heads: got 4 for query and 3 for key"):
        attnreg.explain(torch.randn(2, 3, 4, 8, 16), key, key, enable_gqa=True)


@pytest.mark.parametrize("shape", [(0, 4, 8, 16), (2, 4, 0, 16), (2, 4, 8, 0), (0, 3, 4, 8, 16)], ids=str)
@pytest.mark.parametrize("enable_gqa", [False, True])
def test_a_call_of_nothing_is_explained_as_one_that_no_backend_sees(routers, ran, shape, enable_gqa):
    query = torch.randn(shape, requires_grad=True)
    runs = 0 not in shape[-2:-1] and len(shape) == 4 and not versions.SDPA_SKIPS_EMPTY
    with attnreg.use_backend("math"):
        explanation = attnreg.explain(query, query, query, enable_gqa=enable_gqa)
        out = F.scaled_dot_product_attention(query, query, query, enable_gqa=enable_gqa)
        out.sum().backward()
    assert explanation.forward.backend == ("math" if runs else "torch's math kernel")
    assert runs or "there must be queries and keys" in str(explanation) or len(shape) == 5
    assert out.shape == shape and ran() == ({"math": (1, 1)} if runs else {})


def test_packed_calls_of_nothing_run_on_the_backend_that_is_explained(routers, ran):
    query, offsets = torch.randn(0, 4, 16), torch.zeros(1, dtype=torch.int32)
    call = query, query, query, offsets, offsets, 0, 0
    with attnreg.use_backend("math"):
        assert attnreg.explain(*call).forward.backend == "math"
        attnreg.varlen_attn(*call)
    assert ran() == {"math": (1, 0)}

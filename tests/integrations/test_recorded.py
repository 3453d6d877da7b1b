"""Promises of attn_implementation="attnreg" where a forward is recorded, or is for several inputs at once.

Nothing of the masks is read back then: what torch.jit.trace records is right for other masks and documents.
"""

import inspect
import io
import itertools

import pytest
import torch
from support import transformers_models as models
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.masking_utils import sdpa_mask

import attnreg
from attnreg import flash_attn
from attnreg.errors import UnsupportedInputError
from attnreg.integrations import behind_flash, transformers

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning"),  # torch's own, from 2.15 on
]

NAMES = ("Llama", "Qwen2", "Gemma2", "Gemma3", "Bert")
FULL, SHORT, SHORTER = (11, 11), (7, 11), (4, 10)


def documents(lengths):
    """Return documents of these lengths, each with other tokens than those of other lengths."""
    return models.documents(seed=sum(lengths), lengths=lengths)


def padded(lengths, side):
    batch = models.padded(documents(lengths), side, length=11)
    return batch["input_ids"], batch["attention_mask"]


def packed(lengths):
    batch = models.packed(documents(lengths), False)
    return batch["input_ids"], batch["position_ids"]


def forward_of(name, second):
    one = models.model(name, "attnreg").requires_grad_(False)
    options = {} if name in models.ENCODERS else {"use_cache": False}
    return lambda ids, other: models.results(one, {"input_ids": ids, second: other} | options)


def assert_right(name, run, given, lengths, second):
    """Compare what a recorded forward gives with eager attention over each document by itself."""
    eager = models.model(name, "eager")
    docs = documents(lengths)
    expected = [models.results(eager, {"input_ids": doc})[0] for doc in docs]
    for got, other in zip(models.by_document(run(*given), {second: given[1]}, docs), expected, strict=True):
        torch.testing.assert_close(got, other, rtol=0, atol=2e-6 * max(1.0, other.abs().max().item()))


def traced(forward, given):
    # It takes the lengths, which are tensors in a trace, for something else.
    if "isinstance(q_length" in inspect.getsource(sdpa_mask):
        pytest.skip("this transformers makes no mask in a trace, with its own sdpa either")

    class Traced(torch.nn.Module):
        def forward(self, *inputs):
            return forward(*inputs)

    return torch.jit.trace(Traced(), given, check_trace=False)


def graph(forward, given):
    return make_fx(forward)(*given)


def functionalized(forward, given):
    return torch.func.functionalize(forward)


RECORDED = {"torch.jit.trace": traced, "make_fx": graph, "functionalize": functionalized}


# Each way of recording with a decoder that has windows and a softcap; the masks of the other models in one.
WAYS = [
    *(("Gemma2", SHORT, way) for way in RECORDED if way != "make_fx"),
    ("Bert", SHORT, "torch.jit.trace"),
    *(
        pytest.param(*way, marks=pytest.mark.slow)
        for way in (
            ("Gemma2", SHORT, "make_fx"),  # test_recorded_calls.py records a model's masks so
            *itertools.product(("Gemma2", "Bert"), (FULL,), RECORDED),
            *(("Bert", SHORT, way) for way in RECORDED if way != "torch.jit.trace"),
            ("Llama", FULL, "torch.jit.trace"),  # has full layers, as Gemma 3 has beside windows
        )
    ),
    *((name, FULL, "torch.jit.trace") for name in NAMES if name not in ("Gemma2", "Bert", "Llama")),
]


@pytest.mark.parametrize(("name", "first", "way"), WAYS, ids=str)
@torch.no_grad()
def test_what_is_recorded_is_right_for_other_masks(name, first, way, read_backs):
    side = "right" if name in models.ENCODERS else "left"
    run = RECORDED[way](forward_of(name, "attention_mask"), padded(first, side))
    for lengths in (FULL, SHORT, SHORTER):
        assert_right(name, run, padded(lengths, side), lengths, "attention_mask")
    assert read_backs == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("Gemma2", "Qwen2")))
        for name in NAMES
        if name not in models.ENCODERS
    ],
)
@torch.no_grad()
def test_a_trace_is_right_for_other_documents_in_a_row(name, read_backs):
    run = traced(forward_of(name, "position_ids"), packed((15,)))
    for lengths in ((15,), (6, 9), (1, 2, 12)):
        assert_right(name, run, packed(lengths), lengths, "position_ids")
    assert read_backs == []


@torch.no_grad()
def test_documents_in_padded_rows_are_apart_in_a_trace_as_without(read_backs):
    one, options = models.model("Qwen2", "attnreg").requires_grad_(False), {"use_cache": False}

    def run(ids, mask, positions):
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return models.results(one, given | options)

    docs = documents((7, 5))
    batch = models.packed_and_padded(docs)
    whole = torch.ones_like(batch["attention_mask"])
    row = torch.arange(whole.shape[1])[None]
    recorded = traced(run, (batch["input_ids"], whole, row))
    expected = run(*batch.values())
    assert len(read_backs) == 1
    counted = batch["attention_mask"].bool()
    torch.testing.assert_close(recorded(*batch.values())[counted], expected[counted])


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's: it has no batching rule
@torch.no_grad()
def test_vmap_over_rows_is_right():
    forward = forward_of("Qwen2", "attention_mask")
    rows = torch.vmap(lambda ids, mask: forward(ids[None], mask[None])[0])
    for lengths in (FULL, SHORT):
        assert_right("Qwen2", rows, padded(lengths, "left"), lengths, "attention_mask")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["Qwen2", "Bert"])
def test_gradients_by_sample_are_those_of_each_document_alone(name, read_backs):
    one, eager, docs = models.model(name, "attnreg"), models.model(name, "eager"), documents(SHORT)
    options = {} if name in models.ENCODERS else {"use_cache": False}
    given = padded(SHORT, "right" if name in models.ENCODERS else "left")

    def loss(weights, ids, mask):
        batch = {"input_ids": ids[None], "attention_mask": mask[None]} | options
        out = torch.func.functional_call(one, weights, (), batch)[0]
        return (out * mask[:, None]).square().sum()

    weights = {name: weight.detach() for name, weight in one.named_parameters()}
    got = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, *given)
    for row, doc in enumerate(docs):
        eager.zero_grad()
        models.results(eager, {"input_ids": doc}).square().sum().backward()
        for name, weight in eager.named_parameters():
            if weight.grad is not None:
                atol = 2e-6 * max(1.0, weight.grad.abs().max().item())
                torch.testing.assert_close(got[name][row], weight.grad, rtol=0, atol=atol)
    assert read_backs == []


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@torch.no_grad()
def test_an_ensemble_is_right():
    one, given = models.model("Qwen2", "attnreg"), padded(SHORT, "left")
    scaled = [{name: x * scale for name, x in one.named_parameters()} for scale in (1.0, 1.1)]
    together = {name: torch.stack([weights[name] for weights in scaled]) for name in scaled[0]}
    batch = dict(zip(("input_ids", "attention_mask"), given, strict=True)) | {"use_cache": False}
    outs = torch.vmap(lambda weights: torch.func.functional_call(one, weights, (), batch)[0])(together)
    for got, weights in zip(outs, scaled, strict=True):
        expected = torch.func.functional_call(one, weights, (), batch)[0]
        counted = given[1].bool()
        torch.testing.assert_close(got[counted], expected[counted])


LACKING = ("aten::cummax", "aten::diff")  # of ONNX


@torch.no_grad()
def test_a_trace_of_a_padded_model_has_no_operation_that_onnx_lacks():
    """torch.onnx.export(dynamo=False) starts from such a trace."""
    run = traced(forward_of("Qwen2", "attention_mask"), padded(SHORT, "left"))
    assert [name for name in LACKING if name in str(run.inlined_graph)] == []


@pytest.mark.filterwarnings("ignore")  # the exporter warns of itself and of constants
@torch.no_grad()
def test_a_padded_model_is_exported_to_onnx():
    pytest.importorskip("onnx")
    forward = forward_of("Qwen2", "attention_mask")

    class Padded(torch.nn.Module):
        def forward(self, *inputs):
            return forward(*inputs)

    saved = io.BytesIO()
    torch.onnx.export(Padded(), padded(SHORT, "left"), saved, dynamo=False, opset_version=18)
    assert saved.tell() > 0


class Layer(torch.nn.Module):
    is_causal = True


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("sliding_window", [None, 3])
@pytest.mark.parametrize("further", [0, 4])
def test_a_layer_without_a_mask_is_recorded_for_other_lengths(further, sliding_window, is_causal):
    def attend(query, key, positions):
        options = {"position_ids": positions, "sliding_window": sliding_window, "is_causal": is_causal}
        return transformers.attention(Layer(), query, key, key, None, **options)[0]

    def given(batch, length):
        shapes = (batch, 4, length, 8), (batch, 2, length + further, 8)
        query, key = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
        positions = torch.arange(length).expand(batch, -1).clone()
        positions[:, length // 2 :] -= length // 2
        return query, key, positions

    run = traced(attend, given(2, 9))
    for sizes in ((2, 9), (3, 12), (1, 1)):
        inputs = given(*sizes)
        torch.testing.assert_close(run(*inputs), attend(*inputs))


def tokens(length):
    return torch.randn(length, 2, 8)


def with_offsets(query, offsets):
    whole = query.transpose(0, 1)[None]
    options = {"cu_seq_lens_q": offsets, "max_length_q": 9}
    return transformers.attention(Layer(), whole, whole, whole, None, **options)[0]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}], ids=["full", "window"])
def test_a_layer_is_refused_by_fx_which_has_no_sizes(options):
    class Attends(Layer):
        def forward(self, query):
            return transformers.attention(self, query, query, query, None, **options)[0]

    with pytest.raises(torch.fx.proxy.TraceError, match="control flow"):
        torch.fx.symbolic_trace(Attends())


REFUSED = {
    "offsets of documents": with_offsets,
    # A trace has sizes as tensors.
    "sizes as max_q and max_k": lambda x, cu: attnreg.varlen_attn(x, x, x, cu, cu, x.shape[0], x.shape[0]),
    "sizes in flash_attn_varlen_func": lambda x, cu: flash_attn.flash_attn_varlen_func(
        x, x, x, cu, cu, x.shape[0], x.shape[0]
    ),
    "flash_attention_2": lambda x, cu: behind_flash.flash_attn_varlen_func(x, x, x, cu, cu, 9, 9),
    "flash_attn_func": lambda x, cu: flash_attn.flash_attn_func(x[None], x[None], x[None]),
    "flash_attn_with_kvcache": lambda x, cu: flash_attn.flash_attn_with_kvcache(x[None], x[None], x[None]),
    "deterministic=True": lambda x, cu: flash_attn.flash_attn_varlen_func(
        x, x, x, cu, cu, 9, 9, deterministic=True
    ),
}


@pytest.mark.parametrize("attend", REFUSED.values(), ids=REFUSED)
def test_what_would_keep_the_lengths_of_the_example_is_refused(attend):
    given = tokens(9), torch.tensor([0, 4, 9], dtype=torch.int32)
    attend(*given)
    with pytest.raises(UnsupportedInputError, match=r"torch.jit.trace.*, expected .*torch\.export$"):
        traced(attend, given)


def test_a_trace_of_a_packed_call_is_right_for_other_documents():
    run = traced(lambda x, cu: attnreg.varlen_attn(x, x, x, cu, cu, 9, 9), (tokens(9), offsets(4, 5)))
    for lengths in ((4, 5), (2, 7), (3, 8, 9)):
        given = tokens(sum(lengths)), offsets(*lengths)
        torch.testing.assert_close(run(*given), attnreg.varlen_attn(*[given[0]] * 3, *[given[1]] * 2, 9, 9))


def offsets(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()

"""Promises of attn_implementation="attnreg": each document of a batch in any form as if it were alone."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from support import transformers_models as models
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import attnreg
from attnreg.core.torchlib import versions
from attnreg.errors import InvalidInputError
from attnreg.integrations import masked, packing
from attnreg.integrations.packing import LayerOptions
from attnreg.integrations.transformers import attention

# transformers' eager attention rounds its weights to float32, and its norms their input. Another mask changes
# the results by a thousand times as much.
TOLERANCE = 2e-6

FORMS = {
    "packed, offsets by the collator": (lambda docs: models.packed(docs, True), 0),
    "packed, positions that start anew": (lambda docs: models.packed(docs, False), 1),
    "padded on the right": (lambda docs: models.padded(docs, "right"), 1),
    "padded on the left": (lambda docs: models.padded(docs, "left"), 1),
}


def assert_close(got, expected):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE * max(1.0, other.abs().max().item()))


def alone(name, docs):
    """Return what eager attention makes of each document by itself, and the gradients of all together."""
    eager = models.model(name, "eager")
    outs = [models.results(eager, models.given(eager, doc))[0] for doc in docs]
    return outs, models.gradients(eager, outs)


@pytest.mark.parametrize("name", models.CONFIGS)
def test_each_document_of_a_batch_is_computed_as_by_itself_with_its_gradients(name, read_backs):
    docs = models.documents_of(name)
    expected, expected_grads = alone(name, docs)
    one = models.model(name, "attnreg")
    layers = one.config.get_text_config().num_hidden_layers
    for form, (batch_of, reads) in FORMS.items():
        if not models.takes(name, form):
            continue
        batch = models.given_together(one, batch_of(docs), docs)
        attnreg.reset_stats()
        read_backs.clear()
        outs = models.by_document(models.results(one, batch), batch, docs)
        assert len(read_backs) == reads, form
        assert_close(outs, expected)
        grads = models.gradients(one, outs)
        assert grads.keys() == expected_grads.keys()
        assert_close(grads.values(), expected_grads.values())
        ran = {"forward": layers, "backward": layers}
        calls = {"math" if name == "Gemma2" else "cpu": ran}
        assert attnreg.stats().calls == calls, form


def test_sinks_count_in_every_form(read_backs):
    docs = models.documents()
    one = models.model("GptOss", "attnreg")
    with torch.no_grad():
        eager = models.model("GptOss", "eager")
        expected = [models.results(eager, {"input_ids": doc})[0] for doc in docs]
        for batch_of, _ in FORMS.values():
            batch = batch_of(docs)
            attnreg.reset_stats()
            assert_close(models.by_document(models.results(one, batch), batch, docs), expected)
            assert attnreg.stats().calls == {"cpu": {"forward": 2, "backward": 0}}


PLACES = {
    # (tokens of padding in front, document, tokens of padding behind) of each row
    "at the end": (((0, 0, 0), (0, 1, 1)), ((0, 2, 17),)),
    "behind each document": (((0, 0, 1), (0, 1, 4)), ((0, 2, 21),)),
    "in front of each document": (((5, 0, 0), (2, 1, 0)), ((23, 2, 0),)),
    "in a row of its own": (((0, 0, 0), (0, 1, 0), (0, 2, 0)), ((22, None, 0),)),
}


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_documents_whose_positions_start_anew_are_apart_in_padded_rows_too(places, read_backs):
    name = "GptOss"  # with layers that have a window, and others
    docs = models.documents_of(name)
    expected, expected_grads = alone(name, docs)
    one = models.model(name, "attnreg")
    rows, order = [], []
    for row in places:
        parts = []
        for front, number, behind in row:
            ids = docs[number][0] if number is not None else torch.zeros(0, dtype=torch.long)
            order += [] if number is None else [number]
            counts = torch.cat([torch.zeros(front), torch.ones(len(ids)), torch.zeros(behind)]).long()
            padded = torch.nn.functional.pad(ids, (front, behind))
            parts.append(torch.stack([padded, counts, torch.arange(len(counts)) - front]))
        rows.append(torch.cat(parts, -1))
    ids, mask, positions = torch.stack(rows, 1)
    assert order == [0, 1, 2]
    for given in (positions.clamp(min=0), positions.clamp(min=0) * mask):
        read_backs.clear()
        out = models.results(one, {"input_ids": ids, "attention_mask": mask, "position_ids": given})
        outs = out[mask.bool()].split([doc.shape[1] for doc in docs])
        assert len(read_backs) == 1
        assert_close(outs, expected)
        grads = models.gradients(one, outs)
        assert_close(grads.values(), expected_grads.values())


@pytest.mark.parametrize("counts_padding", [False, True])
def test_padding_inside_of_a_document_starts_no_other_whether_positions_count_it_or_not(counts_padding):
    doc = models.documents(lengths=(9,))[0]
    expected, _ = alone("Llama", [doc])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1]])
    ids, positions = torch.zeros_like(mask), torch.arange(11)[None]
    ids[mask.bool()] = doc[0]
    one, eager = models.model("Llama", "attnreg"), models.model("Llama", "eager")
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    if not counts_padding:
        batch["position_ids"] = mask.cumsum(-1) - 1
    out = models.results(one, batch)[mask.bool()]
    assert_close([out], [models.results(eager, batch)[mask.bool()]])
    if not counts_padding:
        assert_close([out], [expected[0]])


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_padding_inside_of_one_of_several_documents_leaves_them_apart(name):
    eager, one = models.model(name, "eager"), models.model(name, "attnreg")
    ids = models.documents(lengths=(12,))[0]
    mask, positions = torch.ones_like(ids), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    mask[0, 2] = 0
    rows = slice(0, 5), slice(5, 12)
    each = [
        {"input_ids": ids[:, row], "attention_mask": mask[:, row], "position_ids": positions[:, row]}
        for row in rows
    ]
    expected = torch.cat([models.results(eager, batch) for batch in each], 1)
    out = models.results(one, {"input_ids": ids, "attention_mask": mask, "position_ids": positions})
    assert_close([out[mask.bool()]], [expected[mask.bool()]])


@pytest.mark.parametrize("real", [6, 8], ids=["padded", "without a mask"])
@pytest.mark.parametrize(
    "positions",
    [
        [0, 1, 2, 3, 20, 21, 22, 23],
        [0, 1, 2, 2, 2, 2, 3, 4],
        [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
        [0] * 8,
    ],
    ids=["a jump", "repeated", "halves", "0"],
)
def test_positions_that_do_not_start_anew_are_of_one_document(positions, real):
    """Without a mask the model makes a cache, and transformers looks for documents where there is none."""
    ids, mask = models.documents(lengths=(8,))[0], (torch.arange(8) < real)[None]
    batch = {"input_ids": ids, "position_ids": torch.tensor([positions])}
    batch |= {"attention_mask": mask.long()} if real < 8 else {}
    outs = [models.results(models.model("Llama", name), batch) for name in ("attnreg", "eager")]
    assert_close([outs[0][mask]], [outs[1][mask]])


@pytest.mark.parametrize("padded", [True, False])
def test_a_model_of_fake_tensors_runs_as_for_counting_memory(padded):
    with FakeTensorMode():
        one = models.built("Llama")
        one.set_attn_implementation("attnreg")
        ids = torch.ones(2, 8, dtype=torch.long)
        out = one(ids, attention_mask=torch.ones_like(ids) if padded else None).logits
    assert isinstance(out, FakeTensor)
    assert out.shape == (2, 8, one.config.vocab_size)


@pytest.mark.parametrize("padded", [True, False])
def test_a_model_on_the_meta_device_runs(padded):
    with torch.device("meta"):
        one = models.built("Llama")
        one.set_attn_implementation("attnreg")
        ids = torch.ones(2, 8, dtype=torch.long)
        out = one(ids, attention_mask=torch.ones_like(ids) if padded else None).logits
    assert out.is_meta
    assert out.shape == (2, 8, one.config.vocab_size)


@pytest.mark.parametrize("recording", [True, False], ids=["gradients on", "gradients off"])
@pytest.mark.parametrize("padded", [True, False])
def test_a_layer_may_view_its_output_and_write_to_it(padded, recording):
    """Transformers' own functions return contiguous outputs. Queries by head are what `torch.cat` returns."""
    query, key, value = torch.randn(3, 2, 4, 6, 8)
    mask = (torch.arange(6) < torch.tensor([4, 6])[:, None])[:, None, None].expand(2, 1, 6, 6)
    layer = torch.nn.Module()
    layer.is_causal = False
    attnreg.reset_stats()
    with torch.set_grad_enabled(recording), attnreg.use_backend("cpu"):
        out, _ = attention(layer, query, key, value, mask if padded else None)
    assert attnreg.stats().calls == {"cpu": {"forward": 1, "backward": 0}}
    expected = F.scaled_dot_product_attention(query, key, value, mask if padded else None).transpose(1, 2)
    number = torch.ones(1, requires_grad=True)
    out += number
    assert_close([out.view(2, 6, 32) - 1], [expected.flatten(2)])
    assert torch.autograd.grad(out.sum(), number)[0] == out.numel()


def test_after_install_alone_a_batch_without_padding_runs_on_attnreg_and_after_uninstall_on_pytorchs():
    attnreg.integrations.transformers.install()
    one, (doc,) = models.model("Llama", "attnreg"), models.documents(lengths=(9,))
    attnreg.reset_stats()
    out = models.results(one, {"input_ids": doc})
    assert attnreg.stats().calls == {"cpu": {"forward": 2, "backward": 0}}
    attnreg.uninstall()
    assert_close([models.results(one, {"input_ids": doc})], [out])
    assert attnreg.stats().calls == {"cpu": {"forward": 2, "backward": 0}}


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_a_batch_without_padding_runs_by_pytorchs_own_function_or_as_packed_where_that_lacks_an_option(
    name, read_backs
):
    docs = models.documents(lengths=(9, 9))
    expected, _ = alone(name, docs)
    one = models.model(name, "attnreg")
    attnreg.reset_stats()
    with attnreg.use_backend("math"):
        out = models.results(one, {"input_ids": torch.cat(docs), "attention_mask": torch.ones(2, 9)})
    assert_close(out, expected)
    # SDPA's calls run on `math` too while it is asked for.
    assert attnreg.stats().calls == {"math": {"forward": 2, "backward": 0}}
    assert read_backs == [2 * (3 * 2 + 2 * 9) if name == "Gemma2" else 3 * 2 + 2 * 9]


@pytest.mark.each_value("name", "cache")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss", "Qwen2VL"])
def test_generation_from_prompts_padded_on_the_left_is_that_from_each_prompt_alone(name, cache, read_backs):
    docs, new = models.documents_of(name), 8
    one = models.model(name, "eager")
    options = {
        "max_new_tokens": new,
        "min_new_tokens": new,
        "do_sample": False,
        "return_dict_in_generate": True,
    }
    options |= {"output_logits": True, "use_cache": True, "disable_compile": True}
    expected = [
        one.generate(**models.given(one, doc), attention_mask=torch.ones_like(doc), **options) for doc in docs
    ]
    one.set_attn_implementation("attnreg")
    batch = models.padded(docs, "left")
    batch |= models.given(one, batch["input_ids"])
    del batch["position_ids"]
    got = one.generate(
        **batch, **options, **({"cache_implementation": "static"} if cache == "static" else {})
    )
    for row, alone in enumerate(expected):
        assert got.sequences[row, -new:].tolist() == alone.sequences[0, -new:].tolist()
        assert_close([logits[row] for logits in got.logits], [logits[0] for logits in alone.logits])
    # One for each forward; with a static cache the masks of decoding are tensors.
    assert len(read_backs) == (new if cache == "dynamic" else 1)


def test_the_keys_of_an_encoder_are_padded_and_the_queries_of_its_decoder_are_not_though_both_are_as_long():
    sizes = {
        "d_model": 32,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "encoder_layers": 1,
        "decoder_layers": 1,
    }
    heads = {
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    config = transformers.BartConfig(**sizes, **heads, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    one = transformers.BartModel._from_config(config, attn_implementation="eager").double().eval()
    batch = models.padded(models.documents(), "right")
    del batch["position_ids"]
    targets = torch.cat(models.documents(1, (12, 12, 12)))
    outs = []
    for implementation in ("eager", "attnreg"):
        one.set_attn_implementation(implementation)
        outs.append(one(**batch, decoder_input_ids=targets, use_cache=False).last_hidden_state)
    assert_close(outs[1], outs[0])


def test_each_image_of_a_vision_tower_is_computed_as_by_itself():
    tower, patches, grids, expected = models.vision_tower()
    tower.set_attn_implementation("attnreg")
    attnreg.reset_stats()
    with attnreg.use_backend("math"):
        out = tower(patches, grid_thw=grids).last_hidden_state
    assert_close([out], [torch.cat(expected)])
    assert attnreg.stats().calls == {"math": {"forward": 4, "backward": 0}}  # one for each image and layer


def test_offsets_of_a_text_are_refused_in_its_vision_tower():
    tower, patches, grids, _ = models.vision_tower()
    tower.set_attn_implementation("attnreg")
    offsets = {"cu_seq_lens_q": torch.tensor([0, 3, 7]), "max_length_q": 4}
    with pytest.raises(InvalidInputError, match=r"^cu_seq_lens_q: got offsets of a text in its vision tower"):
        tower(patches, grid_thw=grids, **offsets)


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seq_len"])
def test_offsets_under_another_name_are_refused_as_documents_would_see_each_other(name):
    docs = models.documents()
    batch = models.packed(docs, True)
    one = models.model("Llama", "attnreg")
    with torch.no_grad():
        out = models.results(one, batch | {"use_cache": False})
    assert_close(models.by_document(out, batch, docs), alone("Llama", docs)[0])
    before = attnreg.stats().calls
    renamed = {key.replace("cu_seq_lens", name): value for key, value in batch.items()}
    assert {f"{name}_q", f"{name}_k"} <= renamed.keys()
    with pytest.raises(InvalidInputError) as error:
        models.results(one, renamed | {"use_cache": False})
    assert str(error.value) == f"{name}_q: got offsets under this name, expected cu_seq_lens_q"
    assert attnreg.stats().calls == before == {"cpu": {"forward": 2, "backward": 0}}


def test_layers_that_run_again_for_checkpoints_read_nothing_back(read_backs):
    docs = models.documents()
    _, expected = alone("Llama", docs)
    one = models.model("Llama", "attnreg")
    # Renamed by a transformers after 5.12.
    getattr(one, "activation_checkpointing_enable", one.gradient_checkpointing_enable)()
    one.train()
    batch = models.padded(docs, "right")
    outs = models.by_document(models.results(one, batch | {"use_cache": False}), batch, docs)
    grads = models.gradients(one, outs)
    assert_close(grads.values(), expected.values())
    assert len(read_backs) == 1


# Of a padded batch it isn't known then whether a window would reach over a hole: that takes a mask.
@pytest.mark.parametrize(
    "varlen_layers",
    [{"packed": 2}, pytest.param({"packed": 2, "padded": 1}, marks=pytest.mark.slow)],
    ids=" and ".join,
)
def test_a_compiled_model_has_no_graph_break_and_reads_nothing_back(read_backs, varlen_layers):
    docs = models.documents()
    expected, _ = alone("Gemma2", docs)
    compiled = torch.compile(models.model("Gemma2", "attnreg"), backend="eager", fullgraph=True)
    batches = {"packed": models.packed(docs, True), "padded": models.padded(docs, "left")}
    for form, layers in varlen_layers.items():
        attnreg.reset_stats()
        with torch.no_grad():
            out = models.results(compiled, batches[form] | {"use_cache": False})
        assert_close(models.by_document(out, batches[form], docs), expected)
        assert attnreg.stats().calls == {"math": {"forward": layers, "backward": 0}}
    assert read_backs == []


def compiled_one_by_one(name, **sizes):
    """Return a model whose mask is made in eager and whose layers are compiled."""
    one = models.model(name, "attnreg", **sizes)
    for layer in one.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    return one


# Dynamo looks at that of what the layer before has returned.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_documents_whose_positions_start_anew_are_apart_in_layers_compiled_one_by_one(name, read_backs):
    docs = models.documents()
    expected, expected_grads = alone(name, docs)
    one, batch = compiled_one_by_one(name), models.packed(docs, False) | {"use_cache": False}
    outs = models.by_document(models.results(one, batch), batch, docs)
    assert_close(outs, expected)
    assert_close(models.gradients(one, outs).values(), expected_grads.values())
    assert read_backs == []


def test_documents_whose_positions_start_anew_are_apart_where_a_capture_forbids_to_read_back(
    monkeypatch, read_backs
):
    docs = models.documents()
    expected, _ = alone("Gemma2", docs)
    one, batch = models.model("Gemma2", "attnreg"), models.packed(docs, False) | {"use_cache": False}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    outs = models.by_document(models.results(one, batch), batch, docs)
    assert_close(outs, expected)
    assert read_backs == []


@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "not captured"])
def test_only_a_capture_of_masked_calls_that_were_packed_before_leaves_cudnn_out(monkeypatch, is_captured):
    """Its first call in a process can't be captured, and packed calls before don't make it."""
    of_calls, sdpa = [], F.scaled_dot_product_attention

    def watched(*args, **options):
        of_calls.append(torch.backends.cuda.cudnn_sdp_enabled())
        return sdpa(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(masked, "is_captured", lambda: is_captured)
    query, mask = torch.randn(1, 2, 5, 8), torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    for has_run in (True, False):
        out = masked.masked(query, query, query, mask, LayerOptions(0.0, None, 0.0, None), has_run=has_run)
        expected = sdpa(query, query, query, is_causal=True).transpose(1, 2)
        torch.testing.assert_close(out, expected)
    assert of_calls == [True, not is_captured]


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_with_a_mask_keys_are_repeated_only_where_torch_has_no_kernel_for_shared_heads(
    monkeypatch, shares, softcap
):
    monkeypatch.setattr(versions, "EFFICIENT_SHARES_HEADS", shares)
    given, sdpa = [], F.scaled_dot_product_attention

    def watched(query, key, value, *args, **options):
        given.append((key.shape[1], options["enable_gqa"]))
        return sdpa(query, key, value, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    query, key, value = torch.randn(1, 4, 5, 8), *torch.randn(2, 1, 2, 5, 8)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    out = masked.masked(query, key, value, mask, LayerOptions(0.0, None, softcap, None))
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * 8**-0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    expected = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value
    torch.testing.assert_close(out, expected.transpose(1, 2))
    assert given == ([] if softcap else [(2, True) if shares else (4, False)])


# Of Llama 4 the layer with chunks has run with its mask before; documents in the other were packed.
MAY_BE_CUDNN = {
    "documents": {False},
    "padding in a window": {False},
    "a mask of the caller": {True},
    "chunks, documents": {True, False},
}


@pytest.mark.parametrize(("form", "may_be_cudnn"), MAY_BE_CUDNN.items())
def test_in_a_capture_cudnn_is_left_out_where_the_calls_before_it_were_packed(
    monkeypatch, form, may_be_cudnn
):
    one, docs, of_calls = models.model("Llama", "attnreg"), models.documents(), []
    sdpa, batch = F.scaled_dot_product_attention, models.packed(docs, False)
    if form == "padding in a window":
        one, batch = models.model("Qwen2", "attnreg"), models.padded(docs, "left")
    elif form == "chunks, documents":
        one, batch = llama4(), {"input_ids": torch.cat(docs, 1)}
        one.set_attn_implementation("attnreg")
    elif form == "a mask of the caller":
        length = batch["input_ids"].shape[1]
        batch["attention_mask"] = torch.ones(1, 1, length, length, dtype=torch.bool).tril()

    def watched(*args, **options):
        of_calls.append(torch.backends.cuda.cudnn_sdp_enabled())
        return sdpa(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    one(**batch, use_cache=False)
    assert set(of_calls) == may_be_cudnn


@pytest.mark.slow
def test_layers_compiled_one_by_one_take_batches_of_other_lengths_without_a_graph_break():
    layer = {"num_hidden_layers": 1}  # all are alike
    one, eager = compiled_one_by_one("Llama", **layer), models.model("Llama", "eager", **layer)
    for rows, length in ((3, 12), (2, 7), (5, 4)):
        ids = torch.randint(3, 64, (rows, length))
        with torch.no_grad():
            assert_close([one(ids, use_cache=False).logits], [eager(ids, use_cache=False).logits])


@pytest.mark.slow
def test_a_model_is_exported_for_any_batch():
    one, eager = (models.model("Bert", name, num_hidden_layers=1) for name in ("attnreg", "eager"))
    sizes = {0: torch.export.Dim("rows", min=2, max=16), 1: torch.export.Dim("length", min=2, max=64)}

    def drawn(rows, length):
        counts = torch.arange(1, rows + 1).mul(length).floor_divide(rows)[:, None]
        mask = (torch.arange(length) < counts).long()
        return {"input_ids": torch.randint(3, 64, (rows, length)) * mask, "attention_mask": mask}

    given = drawn(4, 12)
    program = torch.export.export(one, (), given, dynamic_shapes=dict.fromkeys(given, sizes)).module()
    for rows, length in ((4, 12), (2, 7), (9, 30)):
        batch = drawn(rows, length)
        counted = batch["attention_mask"].bool()
        with torch.no_grad():
            outs = [run(**batch)[0][counted] for run in (program, eager)]
        assert_close(outs[:1], outs[1:])


def llama4():
    """Return a Llama 4 whose first layer sees chunks of 8 tokens."""
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        **models.DECODER, head_dim=8, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=8,
        interleave_moe_layer_step=1, no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"],
    )  # fmt: skip
    eager = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return eager.double().eval()


@pytest.mark.parametrize(
    ("with_offsets", "compiled"),
    [
        (False, False),
        (True, False),
        *(pytest.param(with_offsets, True, marks=pytest.mark.slow) for with_offsets in (False, True)),
    ],
)
def test_chunks_of_a_packed_batch_hold_though_its_offsets_do_not_say_them(with_offsets, compiled):
    docs, one = models.documents(), llama4()
    expected = [models.results(one, {"input_ids": doc}) for doc in docs]
    one.set_attn_implementation("attnreg")
    batch = models.packed(docs, with_offsets) | {"use_cache": False}
    # Without this function the chunks of a document begin with the row, not with the document.
    if not hasattr(transformers.masking_utils, "remap_positions_for_packed_sequence"):
        pytest.skip("this transformers lays chunks of packed batches by the row, with any implementation")
    run = torch.compile(one, backend="eager") if compiled else one
    with torch.no_grad():
        assert_close(models.by_document(models.results(run, batch), batch, docs), [x[0] for x in expected])


@pytest.mark.parametrize("form", ["a mask of ones", "a cache", "padding on the left", "a trace"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@torch.no_grad()
def test_each_document_by_positions_has_chunks_of_its_own(form):
    docs, one = models.documents(), llama4().requires_grad_(False)
    expected = torch.cat([models.results(one, {"input_ids": doc})[0] for doc in docs])
    one.set_attn_implementation("attnreg")
    batch = models.packed(docs, False)
    front = 3 if form == "padding on the left" else 0
    batch = {name: torch.nn.functional.pad(x, (front, 0)) for name, x in batch.items()}
    if form != "a cache":
        batch |= {"attention_mask": (torch.arange(front + len(expected)) >= front).long()[None]}
        batch["use_cache"] = False
    run = one
    if form == "a trace":
        del batch["use_cache"]

        def run(**given):
            forward = lambda *x: one(**dict(zip(given, x, strict=True)), use_cache=False).logits  # noqa: E731
            row = torch.arange(len(expected))[None]
            example = tuple((given | {"position_ids": row}).values())
            return {"logits": torch.jit.trace(forward, example, check_trace=False)(*given.values())}

    assert_close([run(**batch)["logits"][0, front:]], [expected])


@pytest.mark.parametrize(
    ("name", "offsets", "got"),
    [
        ("cu_seq_lens_q", [0, 5, 9], "from 0 to 9"),
        ("cu_seq_lens_q", [3, 12], "from 3 to 12"),
        ("cu_seq_lens_q", [0, 5, 14], "from 0 to 14"),
        ("cu_seq_lens_k", [0, 5, 9], "from 0 to 9"),
    ],
)
def test_offsets_that_leave_tokens_out_are_an_error(name, offsets, got):
    one = models.model("Llama", "attnreg")
    batch = models.packed(models.documents(lengths=(5, 7)), True)
    batch[name] = torch.tensor(offsets, dtype=torch.int32)
    with pytest.raises(InvalidInputError, match=rf"^{name}: got offsets {got}, expected 0 to 12"):
        one(**batch)


OFFSETS = torch.tensor([0, 5, 12], dtype=torch.int32)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cu_seq_lens_k": OFFSETS[[0, 2]]}, "cu_seq_lens_k: got length 2, expected 3, as cu_seq_lens_q has"),
        ({"cu_seq_lens_q": OFFSETS[[0, 2, 1, 2]], "cu_seq_lens_k": None}, "cu_seq_lens_q: got 5 after 12"),
        ({"cu_seq_lens_q": OFFSETS[None]}, "cu_seq_lens_q: got shape (1, 3), torch.int32, expected integers"),
        ({"cu_seq_lens_k": OFFSETS / 2}, "cu_seq_lens_k: got shape (3,), torch.float32, expected integers"),
        ({"cu_seq_lens_q": [0, 5, 12]}, "cu_seq_lens_q: got [0, 5, 12], expected a tensor"),
        ({"cu_seq_lens_q": None}, "cu_seq_lens_q: got None with cu_seq_lens_k, expected offsets of both"),
        ({"max_length_q": 6}, "max_length_q: got 6, expected at least 7, the longest sequence"),
        ({"max_length_k": 2**31}, "max_length_k: got 2147483648, expected less than 2**31"),
        ({"dropout": 1.5}, "dropout: got 1.5, expected 0 to 1"),
        ({"scaling": torch.nan}, "scaling: got nan, expected a finite number"),
        ({"sliding_window": -3}, "sliding_window: got -3, expected a number of tokens or None"),
        ({"s_aux": torch.ones(3)}, "s_aux: got shape (3,), torch.float32 on cpu, expected (2,), floating"),
    ],
)
def test_an_error_names_the_arguments_of_a_layer_as_transformers_does(wrong, message):
    layer, tensors = torch.nn.Module(), torch.randn(3, 1, 2, 12, 8)
    right = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), OFFSETS) | {
        "max_length_q": 7,
        "max_length_k": 7,
    }
    assert attention(layer, *tensors, None, **right)[0].shape == (1, 12, 2, 8)
    with pytest.raises(InvalidInputError) as error:
        attention(layer, *tensors, None, **(right | wrong))
    assert str(error.value).startswith(message)


def test_on_a_gpu_offsets_that_leave_tokens_out_are_an_error_once_they_are_known(monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    seen, known = [], SimpleNamespace(leaves_rows_out=False)

    def facts_of(*arguments):
        seen.append(arguments)
        return known

    monkeypatch.setattr(packing, "facts_of", facts_of)
    monkeypatch.setattr(packing, "stream_of", lambda tensor: 7)
    offsets = torch.tensor([0, 5, 9], dtype=torch.int32).as_subclass(OnGpu)
    passed = packing.Packing(None, None, offsets, offsets, 5, 5)
    packing.check_all_tokens_count(passed, (2, 6, 6))
    known.leaves_rows_out = True
    with pytest.raises(
        InvalidInputError,
        match="cu_seq_lens_q: got offsets that leave tokens out, expected 0 to 12",
    ):
        packing.check_all_tokens_count(passed, (2, 6, 6))
    assert [arguments[2:] for arguments in seen] == [(12, 12, 7)] * 3
    assert all(x is offsets for arguments in seen for x in arguments[:2])


def test_offsets_with_a_mask_that_has_chunks_and_no_documents_are_refused():
    one = llama4()
    one.set_attn_implementation("attnreg")
    # With a cache transformers doesn't look for documents.
    batch = models.packed(models.documents(), True) | {"use_cache": True}
    with pytest.raises(InvalidInputError, match=r"^cu_seq_lens_q: got several documents in a row"):
        one(**batch)
    single = models.packed(models.documents(lengths=(12,)), True)
    torch.testing.assert_close(one(**single).logits, one(single["input_ids"]).logits)

"""Promises of attn_implementation="attnreg" where queries aren't the keys' tokens, or padding is read.

Images, audio, prefixes, decoders with an encoder: results that count are those of transformers' own sdpa, or
of eager where a model has no other, whatever lies beside them.
"""

import pytest
import torch
import transformers
from support.transformers_models import CACHE

import attnreg
from attnreg.errors import InvalidInputError, UnsupportedInputError
from attnreg.integrations.transformers import attention, install

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
BERT = {name: size for name, size in TEXT.items() if name not in ("num_key_value_heads", "head_dim")}
IMAGES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
IMAGE = 63


def built(model, config, dtype=torch.float64):
    """Return a model with weights that are large enough for attention to matter."""
    torch.manual_seed(0)
    one = model(config).to(dtype).eval()
    for parameter in one.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return one


def tokens(rows=2, length=12):
    return torch.randint(5, 60, (rows, length), generator=torch.Generator().manual_seed(1))


def padded(side):
    """Return (2, 12) with four tokens of the first row that don't count."""
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, slice(4) if side == "left" else slice(8, 12)] = 0
    return mask


def idefics2():
    """The latents of its resampler attend to patches and latents, with a mask of both."""
    resampler = {
        "hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 2, "resampler_n_heads": 4,
        "resampler_head_dim": 8, "num_key_value_heads": 2,
    }  # fmt: skip
    config = transformers.Idefics2Config(
        text_config=TEXT | {"model_type": "mistral"}, vision_config=IMAGES, perceiver_config=resampler,
        image_token_id=IMAGE,
    )  # fmt: skip
    return _with_images(built(transformers.Idefics2ForConditionalGeneration, config))


def idefics3():
    """Its connector puts patches together, those that are padding among them."""
    config = transformers.Idefics3Config(
        text_config=TEXT | {"model_type": "llama"}, vision_config=IMAGES, image_token_id=IMAGE,
        scale_factor=2, pad_token_id=0,
    )  # fmt: skip
    return _with_images(built(transformers.Idefics3ForConditionalGeneration, config))


def _with_images(one):
    images, counts = torch.randn(2, 1, 3, 32, 32).double(), torch.ones(2, 1, 32, 32, dtype=torch.bool)
    counts[1, ..., 24:] = False  # the second image is narrower
    ids = tokens()
    ids[:, 2:6] = IMAGE
    given = {"input_ids": ids, "pixel_values": images * counts[:, :, None], "pixel_attention_mask": counts}
    return lambda: one(**given).logits, one


def wav2vec2():
    """Convolutions behind its layers reach over the end of what was said."""
    config = transformers.Wav2Vec2Config(
        **{name: BERT[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
        num_attention_heads=4, conv_dim=[8] * 3, conv_kernel=[5, 3, 3], conv_stride=[3, 2, 2],
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, add_adapter=True, output_hidden_size=32,
        num_adapter_layers=2,
    )  # fmt: skip
    one, counts = built(transformers.Wav2Vec2Model, config), torch.ones(2, 1600, dtype=torch.long)
    counts[1, 900:] = 0
    sound = torch.randn(2, 1600).double()

    def results():
        out = one(sound, attention_mask=counts).last_hidden_state
        mask = one._get_feature_vector_attention_mask(out.shape[1], counts, add_adapter=True)
        return out[mask.bool()]

    return results, one


def bert_with_a_prefix():
    """As prefix tuning has it: keys that no query comes from, in front of those that are padded."""
    one, mask = built(transformers.BertModel, transformers.BertConfig(**BERT)), padded("left")
    prefix = torch.randn(2, 2, 2, 4, 3, 8).double()

    def results():
        cache = transformers.DynamicCache()
        for layer, (key, value) in enumerate(prefix):
            cache.update(key, value, layer)
        whole = torch.cat([torch.ones_like(mask[:, :3]), mask], 1)
        return one(tokens(), attention_mask=whole, **{CACHE: cache}).last_hidden_state[mask.bool()]

    return results, one


def bert_with_an_encoder():
    """The decoder's positions begin anew behind its padding; the encoder's states are as many, all count."""
    config = transformers.BertConfig(**BERT, is_decoder=True, add_cross_attention=True)
    one, mask = built(transformers.BertLMHeadModel, config), padded("left")
    given = {
        "input_ids": tokens(), "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "encoder_hidden_states": torch.randn(2, 12, 32).double(),
    }  # fmt: skip
    return lambda: one(**given).logits[mask.bool()], one


def t5gemma():
    """As before; the mask of its cross attention is made beside that of the decoder itself."""
    part = TEXT | {"query_pre_attn_scalar": 8, "sliding_window": 4}
    config = transformers.T5GemmaConfig(encoder=part, decoder=part | {"cross_attention_hidden_size": 32})
    one, mask = built(transformers.T5GemmaModel, config, torch.float32), padded("left")
    given = {
        "input_ids": tokens(), "decoder_input_ids": tokens(), "decoder_attention_mask": mask,
        "decoder_position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }  # fmt: skip
    return lambda: one(**given).last_hidden_state[mask.bool()], one


def paligemma():
    """It makes its text model's mask of the mask that it has made."""
    vision = IMAGES | {"model_type": "siglip_vision_model", "image_size": 16, "vision_use_head": False}
    config = transformers.PaliGemmaConfig(
        text_config=TEXT | {"model_type": "gemma"}, vision_config=vision, image_token_index=IMAGE,
        projection_dim=32,
    )  # fmt: skip
    one = built(transformers.PaliGemmaForConditionalGeneration, config)
    ids, mask = tokens(), padded("right")
    ids[:, :4] = IMAGE
    kinds = torch.zeros_like(ids).index_fill_(1, torch.arange(6, 12), 1)
    given = {
        "input_ids": ids, "attention_mask": mask, "token_type_ids": kinds, "use_cache": False,
        "pixel_values": torch.randn(2, 3, 16, 16).double(),
    }  # fmt: skip
    return lambda: one(**given).logits[mask.bool()], one


def siglip_text():
    """It pools the last token, which is padding."""
    config = transformers.SiglipTextConfig(**BERT, max_position_embeddings=64)
    one, mask = built(transformers.SiglipTextModel, config), padded("right")
    return lambda: one(tokens(), attention_mask=mask).pooler_output, one


def bert_padded_on_the_left():
    """It pools the first token, which is padding."""
    one, mask = built(transformers.BertModel, transformers.BertConfig(**BERT)), padded("left")
    return lambda: one(tokens(), attention_mask=mask).pooler_output, one


def gemma4():
    """Its last layers share keys, and compute the last queries alone, with their part of the mask."""
    config = transformers.Gemma4TextConfig(
        **TEXT, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64, num_kv_shared_layers=1,
        layer_types=["full_attention"] * 2, sliding_window=4,
    )  # fmt: skip
    one, mask = built(transformers.Gemma4ForCausalLM, config, torch.float32), padded("left")

    def results():
        given = {"attention_mask": mask, "use_cache": False}
        return torch.cat(
            [
                one(tokens(), **given).logits[mask.bool()],
                one(tokens(), **given, logits_to_keep=2).logits.flatten(0, 1),
            ]
        )

    return results, one


MODELS = (
    siglip_text,
    bert_padded_on_the_left,
    gemma4,
    idefics2,
    idefics3,
    wav2vec2,
    bert_with_a_prefix,
    bert_with_an_encoder,
    t5gemma,
    paligemma,
)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_what_counts_is_as_with_transformers_own(model):
    install()
    results, one = model()
    found = {}
    for name in ("attnreg", "eager" if model is t5gemma else "sdpa"):
        one.set_attn_implementation(name)
        attnreg.reset_stats()
        with torch.no_grad():
            found[name] = results()
        assert name != "attnreg" or attnreg.stats().calls
    got, expected = found.values()
    # transformers' eager attention, and the norms of Gemmas, round to float32.
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9 if got.dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("offsets", [None, torch.tensor([0, 12, 24], dtype=torch.int32)], ids=["", "offsets"])
def test_a_layer_with_more_keys_than_its_mask_is_for_is_refused(offsets):
    """DeepSeek-V4 appends compressed keys, for which it extends a tensor."""
    install()
    one = built(transformers.LlamaModel, transformers.LlamaConfig(**TEXT))
    one.set_attn_implementation("attnreg")
    usual = attention

    def with_more_keys(module, query, key, value, *rest, **others):
        more = [torch.cat([x, x[:, :, :3]], 2) for x in (key, value)]
        return usual(module, query, *more, *rest, **others)

    transformers.modeling_utils.AttentionInterface.register("attnreg", with_more_keys)
    try:
        with pytest.raises(InvalidInputError) as error:
            one(tokens(), cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=12, max_length_k=12)
    finally:
        transformers.modeling_utils.AttentionInterface.register("attnreg", usual)
    assert str(error.value) == (
        "attention_mask: got one for (batch, queries, keys) (2, 12, 12), expected one for (2, 12, 15), the "
        "sizes of the layer's query and key; 'eager' may serve a model that extends its mask"
    )


def test_what_a_layer_hands_on_that_changes_its_result_is_refused():
    query = torch.randn(1, 2, 5, 8)
    with pytest.raises(UnsupportedInputError, match=r"attnreg: got sinks, expected no such argument; "):
        attention(torch.nn.Module(), query, query, query, None, sinks=torch.zeros(1))


@pytest.mark.parametrize("side", ["left", "right", "none"])
@pytest.mark.parametrize("name", ["attnreg", "flash_attention_2"])
def test_the_mask_says_whether_attention_is_causal_whatever_its_layer_says(name, side):
    """Those of PaliGemma and Pegasus-X say of themselves that they aren't; sdpa's answer hangs on padding."""
    install(behind="flash_attention_2")
    mask = torch.ones(2, 12, dtype=torch.long) if side == "none" else padded(side)
    for is_causal in (True, False):
        config = transformers.LlamaConfig(**TEXT, **({} if is_causal else {"is_causal": False}))
        one = built(transformers.LlamaModel, config, torch.float32)
        results = []
        for implementation in ("eager", name):
            one.set_attn_implementation(implementation)
            for layer in one.layers:
                layer.self_attn.is_causal = False
            results.append(one(tokens(), attention_mask=mask).last_hidden_state[mask.bool()])
        torch.testing.assert_close(*results, rtol=0, atol=2e-5)

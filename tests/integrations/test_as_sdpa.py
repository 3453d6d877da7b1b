"""Promise: what transformers' `sdpa` runs has the same results, or a list says why it doesn't.

The slow run goes through every model of the installed transformers.
"""

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers
from support.causal_models import enlarge
from support.sdpa_models import (
    AS_EAGER,
    LENGTH,
    NAMED,
    NAMES,
    PADDED,
    build_model,
    class_of,
    forms_of,
    results,
)
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging

from attnreg.integrations.transformers import attention, install

ROOT = Path(__file__).parents[2]
TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
T5 = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "dropout_rate": 0.0,
}  # fmt: skip


@pytest.fixture
def layers(monkeypatch):
    """Return a list that grows with each layer's call of attnreg."""
    install()
    done = []

    def counted(*tensors, **options):
        done.append(tensors[0])
        return attention(*tensors, **options)

    AttentionInterface.register("attnreg", counted)
    yield done
    AttentionInterface.register("attnreg", attention)


def theirs(name):
    """Return a class of transformers, or skip the test, as some versions haven't got all models."""
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    return getattr(transformers, name)


def built(model, config, dtype=torch.float64):
    torch.manual_seed(0)
    return enlarge(model(config).to(dtype).eval())


def tokens():
    return torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def padded():
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, LENGTH - PADDED :] = 0
    return mask


def t5(mask):
    one = built(transformers.T5Model, transformers.T5Config(**T5))
    given = {"input_ids": tokens(), "decoder_input_ids": tokens().flip(1), "attention_mask": mask}
    return one, lambda: one(**given, decoder_attention_mask=mask).last_hidden_state


def t5gemma2(mask):
    part = GROUPED | {"query_pre_attn_scalar": 8, "sliding_window": 4, "pad_token_id": 0}
    part["layer_types"] = ["sliding_attention", "full_attention"]
    sizes = {name: size for name, size in TEXT.items() if name != "vocab_size"}
    vision = sizes | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 8}
    encoder = {"text_config": part, "vision_config": vision, "mm_tokens_per_image": 1}
    config = transformers.T5Gemma2Config(encoder=encoder, decoder=part, image_token_index=63)
    one = built(transformers.T5Gemma2Model, config, torch.float32)
    ids = tokens() % 60
    given = {"input_ids": ids, "decoder_input_ids": ids.flip(1), "attention_mask": mask}
    return one, lambda: one(**given, decoder_attention_mask=mask).last_hidden_state


def doge(mask):
    """It adds to its mask, and hides all but a few keys."""
    one = built(transformers.DogeModel, transformers.DogeConfig(**GROUPED, keep_window_size=5), torch.float32)
    return one, lambda: one(tokens(), attention_mask=mask).last_hidden_state


def deepseek_v32(mask):
    """Its layers pass on the indices of the keys that they choose."""
    config = theirs("DeepseekV32Config")(
        **TEXT, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=16, index_topk=4, index_head_dim=16, index_n_heads=2,
        first_k_dense_replace=2, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        n_group=1, topk_group=1,
    )  # fmt: skip
    one = built(transformers.DeepseekV32Model, config, torch.float32)
    return one, lambda: one(tokens(), attention_mask=mask).last_hidden_state


def minimax_m3_vl_text(mask):
    """Its layers pass on the indices of the blocks of keys that they choose, which differ by head."""
    config = theirs("MiniMaxM3VLTextConfig")(
        **GROUPED, dense_intermediate_size=48, shared_intermediate_size=48, num_local_experts=4,
        num_experts_per_tok=2, layer_types=["minimax_m3_sparse"] * 2, index_n_heads=2, index_head_dim=8,
        index_block_size=3, index_topk_blocks=2,
    )  # fmt: skip
    one = built(transformers.MiniMaxM3VLTextModel, config, torch.float32)
    return one, lambda: one(tokens(), attention_mask=mask).last_hidden_state


def layoutlm(mask):
    """It makes a mask (B, 1, 1, S) of numbers itself."""
    one = built(
        transformers.LayoutLMModel, transformers.LayoutLMConfig(**TEXT, max_2d_position_embeddings=16)
    )
    boxes = torch.randint(0, 8, (2, LENGTH, 4), generator=torch.Generator().manual_seed(1)).sort(-1).values
    return one, lambda: one(tokens(), bbox=boxes, attention_mask=mask).last_hidden_state


def decision_transformer(mask):
    """All positions that it passes to its layers are 0; each step is three tokens."""
    config = transformers.DecisionTransformerConfig(
        hidden_size=32, n_layer=2, n_head=4, state_dim=5, act_dim=3, max_ep_len=32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    one, generator = built(transformers.DecisionTransformerModel, config), torch.Generator().manual_seed(1)
    given = {
        name: torch.randn(2, LENGTH, size, generator=generator).double()
        for name, size in {"states": 5, "actions": 3, "rewards": 1, "returns_to_go": 1}.items()
    }
    given["timesteps"] = torch.arange(LENGTH).expand(2, -1)
    return one, lambda: one(**given, attention_mask=mask).action_preds


def siglip2(mask):
    """Its pooler makes numbers of its mask, for torch's own layer."""
    config = transformers.Siglip2VisionConfig(**TEXT | {"patch_size": 4, "num_patches": 16})
    one = built(transformers.Siglip2VisionModel, config)
    patches = torch.randn(2, LENGTH, 48, generator=torch.Generator().manual_seed(1)).double()
    given = {"pixel_attention_mask": mask, "spatial_shapes": torch.tensor([[3, 4], [3, 3]])}
    return one, lambda: one(patches, **given).pooler_output[:, None]


def lightglue(mask):
    """Its mask is of one query for all, and turned round for the other image of a pair."""
    detector = {
        "model_type": "superpoint", "encoder_hidden_sizes": [8] * 4, "decoder_hidden_size": 16,
        "descriptor_decoder_dim": 32,
    }  # fmt: skip
    config = transformers.LightGlueConfig(
        keypoint_detector_config=detector, descriptor_dim=32, num_hidden_layers=2, num_attention_heads=4,
        depth_confidence=-1.0, width_confidence=-1.0,
    )  # fmt: skip
    one = built(transformers.LightGlueForKeypointMatching, config)
    generator = torch.Generator().manual_seed(1)
    points = torch.rand(1, 2, LENGTH, 2, generator=generator).double() * 30
    descriptors = torch.randn(1, 2, LENGTH, 32, generator=generator).double()

    def pairs():
        given = {"mask": mask[None], "output_hidden_states": True}
        return one._match_image_pair(points, descriptors, 32, 32, **given)[3][-1]

    return one, pairs


MODELS = (
    t5,
    t5gemma2,
    doge,
    deepseek_v32,
    minimax_m3_vl_text,
    decision_transformer,
    layoutlm,
    siglip2,
    lightglue,
)


def gradients(one, out):
    one.zero_grad()
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (out * weights.to(out)).sum().backward()
    return {name: x.grad for name, x in one.named_parameters() if x.grad is not None}


def set_implementation(one, name):
    """Set the attention of all parts of a model; transformers refuses `sdpa` if one of them hasn't got it."""
    for part in one.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = name


@pytest.mark.each_value("make", "form")
@pytest.mark.parametrize("form", ["whole", "padded"])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_what_sdpa_runs_has_its_results_and_gradients(layers, make, form):
    mask = padded() if form == "padded" else torch.ones_like(padded())
    one, run = make(mask)
    if not one._supports_sdpa:
        pytest.skip("this transformers' model has no sdpa")
    got = {}
    # With 5.8 the `sdpa` of Doge sees tokens ahead where there is no padding.
    for name in ("eager" if make is doge else "sdpa", "attnreg"):
        set_implementation(one, name)
        out = run()
        out = out[mask.bool()] if out.shape[1] == LENGTH else out
        got[name] = out, gradients(one, out)
        assert bool(layers) == (name == "attnreg")
    tolerance = 1e-9 if out.dtype == torch.float64 else 2e-5
    for y, x in zip(*got.values(), strict=True):
        scale = 1.0 if isinstance(y, torch.Tensor) else max(float(g.abs().max()) for g in y.values())
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * max(scale, 1.0))


def test_the_list_is_in_the_docs():
    page = (ROOT / "docs" / "transformers.md").read_text()
    listed = AS_EAGER | NAMED
    for reason in dict.fromkeys(listed.values()):
        names = ", ".join(f"`{name}`" for name, of_name in listed.items() if of_name == reason)
        assert f"| {names} | {reason}" in page


@pytest.mark.parametrize(
    "name", [name if name in NAMED else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_can_be_made_with_sdpa_can_be_with_attnreg_unless_it_is_listed(name):
    install()
    kind = class_of(name)
    if not getattr(kind, "_supports_sdpa", False):
        pytest.skip("it has no sdpa")
    with torch.device("meta"):
        try:
            kind._from_config(transformers.CONFIG_MAPPING[name](), attn_implementation="sdpa")
        except Exception as error:  # of a package that is missing, or of a configuration that isn't whole
            pytest.skip(str(error))
        expects = pytest.raises(KeyError, match="attnreg") if name in NAMED else nullcontext()
        with expects:
            kind._from_config(transformers.CONFIG_MAPPING[name](), attn_implementation="attnreg")


def in_double(one, given):
    """Return results in float64, of the inputs in float64, or None if a model computes some in float32."""
    double = copy.deepcopy(one).double()
    given = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
    try:
        found = results(double, given)
    except RuntimeError:
        return None
    return found if all(x.dtype == torch.float64 for x in found.values()) else None


def distance(got, expected):
    return float((got.double() - expected).abs().max()) if got.numel() else 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")  # of models that are made too small
@torch.no_grad()
def test_every_model_that_has_sdpa_is_as_right_as_with_it(layers, name):
    logging.set_verbosity_error()
    one = build_model(name)
    if isinstance(one, str):
        pytest.skip(one)
    if name in NAMED:
        return
    for form, given in forms_of(one).items():
        set_implementation(one, "eager" if name in AS_EAGER else "sdpa")
        expected = results(one, given)
        truth = in_double(one, given) or expected
        set_implementation(one, "attnreg")
        got = results(one, given)
        assert got.keys() == expected.keys()
        for key, x in truth.items():
            allowed = 2 * distance(expected[key], x) + 1e-5 * distance(x, 0 * x)
            assert distance(got[key], x) <= allowed, (form, key)

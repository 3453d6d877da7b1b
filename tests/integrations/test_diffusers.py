"""Promises to programs with diffusers: its models and pipelines run by PyTorch's function on any backend."""

import pytest
import torch
from support.processes import forked

import attnreg

pytestmark = pytest.mark.usefixtures("routers", "one_thread")


# Importing diffusers takes seconds, which only the process that runs these tests is to spend.
def unet():
    import diffusers

    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), norm_num_groups=4,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=8, attention_head_dim=4,
    )  # fmt: skip


def dit(num_embeds_ada_norm=10):
    import diffusers

    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2,
        sample_size=8, patch_size=2, num_embeds_ada_norm=num_embeds_ada_norm, norm_num_groups=4,
    )  # fmt: skip


def flux():
    import diffusers

    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def vae():
    """Return the model between images and latents, whose decoder has one layer of attention."""
    import diffusers

    return diffusers.AutoencoderKL(
        latent_channels=4, sample_size=16, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def scheduler():
    import diffusers

    # Clipped, most of the large samples that a random model leads to would be alike.
    return diffusers.DDIMScheduler(clip_sample=False, steps_offset=1)


def text_encoder():
    """Return a random text encoder of two layers, and a tokenizer of single letters, made without files."""
    import transformers

    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=16)
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokens), hidden_size=8, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, bos_token_id=len(tokens) - 2,
        eos_token_id=len(tokens) - 1, pad_token_id=len(tokens) - 1,
    )  # fmt: skip
    return transformers.CLIPTextModel(config).eval(), tokenizer


def dit_pipeline():
    import diffusers

    transformer = dit(num_embeds_ada_norm=1000).double().eval()  # 1000 is the pipeline's label for no class
    return diffusers.DiTPipeline(transformer, vae().double().eval(), scheduler())


def stable_diffusion():
    import diffusers

    encoder, tokenizer = text_encoder()
    return diffusers.StableDiffusionPipeline(
        vae().double().eval(), encoder.double(), tokenizer, unet().double().eval(), scheduler(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def image(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()


TIMES = torch.tensor([1, 2])
# The model, what it is called with, and how many calls of attention it makes.
MODELS = {
    "unet": (
        unet, lambda: {
            "sample": image(2, 4, 8, 8), "timestep": TIMES, "encoder_hidden_states": image(2, 5, 8)
        }, 8,
    ),
    "dit": (
        dit, lambda: {
            "hidden_states": image(2, 4, 8, 8), "timestep": TIMES, "class_labels": torch.tensor([1, 2])
        }, 2,
    ),
    "flux": (
        flux, lambda: {
            "hidden_states": image(2, 16, 4), "timestep": TIMES.double(), "pooled_projections": image(2, 32),
            "encoder_hidden_states": image(2, 6, 32),
            "txt_ids": torch.zeros(6, 3), "img_ids": torch.zeros(16, 3),
        }, 2,
    ),
}  # fmt: skip


def solved(model, given):
    out = model(**given).sample
    return out.detach(), torch.autograd.grad(out.square().sum(), list(model.parameters()), allow_unused=True)


@pytest.mark.parametrize(
    ("make", "given", "calls"),
    [
        pytest.param(*model, id=name, marks=[pytest.mark.slow] * (name == "unet"))
        for name, model in MODELS.items()
    ],
)
def test_a_model_runs_on_the_registered_backend_with_the_results_of_torchs_own_kernel(
    make, given, calls, ran
):
    torch.manual_seed(0)
    model = make().double().eval()
    model.set_attention_backend("native")
    expected, expected_grads = solved(model, given())
    assert ran() == {}
    with attnreg.register_backend("math"):
        out, grads = solved(model, given())
    assert ran() == {"math": (calls, calls)}
    torch.testing.assert_close(out, expected)
    for got, right in zip(grads, expected_grads, strict=True):
        assert (got is None) == (right is None)
        if got is not None:
            torch.testing.assert_close(got, right)


STEPS = 3
# The pipeline, what it is called with, and how many calls of attention it makes: with guidance as many in
# each step, for a batch twice as large, but those of the text encoder twice. The last call is the VAE's.
PIPELINES = {
    "dit": (dit_pipeline, {"class_labels": [1, 2], "guidance_scale": 4.0}, 2 * STEPS + 1),
    "dit without guidance": (dit_pipeline, {"class_labels": [1, 2], "guidance_scale": 1.0}, 2 * STEPS + 1),
    "stable diffusion": (
        stable_diffusion,
        {"prompt": ["a cat", "two dogs at sea"], "negative_prompt": ["rain", "snow"], "guidance_scale": 5.0},
        2 * 2 + 8 * STEPS + 1,
    ),
    "stable diffusion without guidance": (
        stable_diffusion, {"prompt": ["a cat", "two dogs at sea"], "guidance_scale": 1.0}, 2 + 8 * STEPS + 1
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "given", "calls"),
    [
        pytest.param(*given, id=name, marks=[pytest.mark.slow] * ("without guidance" in name))
        for name, given in PIPELINES.items()
    ],
)
def test_a_pipeline_makes_the_images_of_torchs_own_kernel_on_the_registered_backend(make, given, calls, ran):
    torch.manual_seed(0)
    pipeline = make()
    pipeline.set_progress_bar_config(disable=True)

    def images():
        generator = torch.Generator().manual_seed(1)
        return pipeline(**given, num_inference_steps=STEPS, generator=generator, output_type="pt").images

    expected = images()
    assert expected.shape == (2, 3, 16, 16)
    assert ran() == {}
    with attnreg.register_backend("math"):
        got = images()
    assert ran() == {"math": (calls, 0)}
    torch.testing.assert_close(got, expected)


# diffusers looks for flash-attn when it is imported. What the backends "flash" and "flash_varlen" call, and
# what they call where a sequence is spread over ranks, is compared with PyTorch's function.
WITH_FLASH_ATTN = """
import torch, torch.nn.functional as F, attnreg
from diffusers.models import attention_dispatch as dispatch
q, k, v = torch.randn(3, 2, 10, 4, 16, requires_grad=True)
grad = torch.randn(2, 10, 4, 16)
for causal in (False, True):
    heads = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2)
    expected = out, *torch.autograd.grad(out, (q, k, v), grad)
    attnreg.reset_stats()
    for name in ("flash", "flash_varlen"):
        with dispatch.attention_backend(name):
            out = dispatch.dispatch_attention_fn(q, k, v, is_causal=causal)
        found = out, *torch.autograd.grad(out, (q, k, v), grad)
        torch.testing.assert_close(found, expected)
    ctx = torch.autograd.function.FunctionCtx()
    out, lse = dispatch._flash_attention_forward_op(ctx, q, k, v, is_causal=causal, return_lse=True)
    assert not out.requires_grad and lse.shape == (2, 10, 4), lse.shape
    ctx.saved_tensors = ctx.to_save
    found = out, *dispatch._flash_attention_backward_op(ctx, grad)
    torch.testing.assert_close(found, expected)
    print(sorted(attnreg.stats().calls.values(), key=str))
"""


@pytest.mark.slow
def test_its_flash_backends_run_on_what_stands_in_for_flash_attn():
    run = forked(WITH_FLASH_ATTN, ATTNREG_AS_FLASH_ATTN="1")
    assert run.stdout == "[{'forward': 3, 'backward': 3}]\n" * 2, run.stderr

"""Promises to programs with diffusers: its models call PyTorch's function, so they run on any backend."""

import pytest
import torch

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


def dit():
    import diffusers

    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2,
        sample_size=8, patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip


def flux():
    import diffusers

    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
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


@pytest.mark.parametrize(("make", "given", "calls"), MODELS.values(), ids=MODELS)
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

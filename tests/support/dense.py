"""What tests of dense calls share: tensors (B, H, S, D) in many layouts, and how to check results."""

import torch
from support import truth

import attnreg
from attnreg.backends import math

CAUSAL, OPEN = (-1, 0), (-1, -1)


def qkv(len_q=6, len_k=6, heads=4, heads_k=None, dim=8, dtype=torch.float32, batch=2, seed=0):
    """Draw query, key and value, which need gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, len_q), (heads_k or heads, len_k), (heads_k or heads, len_k)]
    return [
        torch.randn(batch, *shape, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def random_like(tensor):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)


class WithoutGradient(torch.autograd.Function):
    """Returns what it is given, which gets no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, _):
        return None


def with_gradients(out, inputs):
    """Return an output and the gradients of its inputs."""
    return [out, *torch.autograd.grad(out, inputs, random_like(out))]


def assert_near(results, inputs, expected, dtype=None):
    """Check an output and its gradients against an output in float64, at the precision of a dtype."""
    grad = random_like(results[0]).double()
    right = torch.autograd.grad(expected, inputs, grad, materialize_grads=True)
    for one, other in zip(results[1:], right, strict=True):
        assert one.dtype == other.dtype
    for one, other in zip(results, (expected, *right), strict=True):
        truth.assert_near(one, other.double(), dtype)


def assert_right(results, inputs, **meant):
    """Check an output and its gradients against the reference."""
    assert_near(results, inputs, truth.dense(*inputs, **meant)[0])


def transposed(*tensors):
    """Exchange heads and lengths."""
    return tuple(x.transpose(1, 2) for x in tensors)


ADDED = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(6))

LAYOUTS = {
    "contiguous": lambda x: x,
    "bshd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a fused projection": lambda x: torch.stack((x, x, x), 3)[:, :, :, 1],
    "one for all heads": lambda x: x[:, :1].expand_as(x),
    "batch last": lambda x: x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
}


def _scattered(x):
    return torch.stack((x, x), -1)[..., 0]


# A backend may lay out its results as it likes.
SCATTERING = attnreg.Kernels(
    lambda *arguments: tuple(map(_scattered, math.forward(*arguments))),
    lambda *arguments: tuple(map(_scattered, math.backward(*arguments))),
)

"""A backend of one's own: two functions (docs/adding-a-backend.md), and what they can run, as data."""

import torch
import torch.nn.functional as F
from torch import Tensor

import attnreg


def forward(q: Tensor, k: Tensor, v: Tensor, call: attnreg.Call) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # the contract's (B, S, H, D) to (B, H, S, D)
    scores = call.scale * q @ k.mT
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v).transpose(1, 2), lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: attnreg.Call
) -> tuple[Tensor, ...]:
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    weights = (call.scale * q @ k.mT - lse[..., None]).exp()
    slope = call.scale * weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True))
    return tuple(x.transpose(1, 2) for x in (slope @ k, slope.mT @ q, weights.mT @ grad))


CAN = attnreg.Capabilities(devices=("cpu",), dtypes=("float32",))  # no mask, no dropout, nothing packed
MINE = attnreg.Backend(
    name="mine", forward=CAN, backward=CAN, load=lambda: attnreg.Kernels(forward, backward)
)

query, key, value = (torch.randn(2, 4, 32, 16, requires_grad=True) for _ in range(3))
expected = F.scaled_dot_product_attention(query, key, value)
with attnreg.register_backend(MINE):
    out = F.scaled_dot_product_attention(query, key, value)
    out.sum().backward()
    F.scaled_dot_product_attention(query, key, value, is_causal=True)  # refused; the next backend runs it
print(f"off by {(out - expected).abs().max().item():.0e}", attnreg.stats().calls["mine"])
print(*attnreg.stats().fallbacks, sep="\n")

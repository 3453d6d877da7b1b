"""What the tests of settings and preferences share: a call, and what is decided about it."""

import dataclasses

import torch
import torch.nn.functional as F

import attnreg

SPEC = attnreg.AttentionSpec(
    device=attnreg.Device("cpu"), dtype="float32", batch=1, max_q=8, max_k=8, heads_q=2, heads_k=2,
    head_dim=16, head_dim_v=16,
)  # fmt: skip
ON_HOPPER = dataclasses.replace(SPEC, device=attnreg.Device.parse("sm_90"))


def decided(spec=SPEC):
    """Return the backend that a call would get, and who decided."""
    explanation = attnreg.explain(spec)
    return explanation.backend, explanation.source


def sdpa():
    return F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 8, 16))


def put_in_force(lock, monkeypatch):
    monkeypatch.setenv("ATTNREG_LOCK", str(lock))
    attnreg.reload()

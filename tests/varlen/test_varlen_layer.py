"""A layer of attention as models have it, on ragged sequences in 16 bits: by the accuracy rule, not by eye.

PyTorch's own first test of `varlen_attn` compares the largest gradients of two ways in 16 bits to 1e-6, so
that one rounding decides. Here both ways are compared with float64, as `attnreg verify` compares kernels.
"""

import functools

import pytest
import torch
from support.packed_calls import offsets

import attnreg
from attnreg.tools.measure import rule

LENGTHS, WIDTH, HEADS = (2048, 64, 192, 448, 960, 640, 320, 512), 1024, 16


def layer(tokens, project, back, attend):
    """Return (T, WIDTH) of tokens (T, WIDTH)."""
    query, key, value = (tokens @ project).view(len(tokens), 3, HEADS, -1).unbind(1)
    return attend(query, key, value).flatten(1) @ back


def attend_plainly(query, key, value, causal):
    """Return the attention (S, H, D) of one sequence by PyTorch's operations, in the dtype of its tensors."""
    scores = query.transpose(0, 1) @ key.permute(1, 2, 0) * query.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1) @ value.transpose(0, 1)).transpose(0, 1)


def with_gradient(tokens, grad, weights, attend):
    """Return the layer's output and the gradient of the tokens."""
    leaf = tokens.clone().requires_grad_()
    out = layer(leaf, *weights, attend)
    return out.detach(), *torch.autograd.grad(out, leaf, grad)


def one_by_one(tokens, grad, weights, causal, dtype):
    """Return output and gradient of each sequence, computed plainly in a dtype."""
    weights, attend = [one.to(dtype) for one in weights], functools.partial(attend_plainly, causal=causal)
    pairs = zip(tokens.to(dtype).split(LENGTHS), grad.to(dtype).split(LENGTHS), strict=True)
    return [with_gradient(*pair, weights, attend) for pair in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_layer_is_as_near_to_float64_as_plain_pytorch_in_each_sequence(dtype, causal, ran):
    torch.manual_seed(42)
    tokens, grad = torch.randn(2, sum(LENGTHS), WIDTH).to(dtype)
    weights = [torch.empty(WIDTH, n * WIDTH).uniform_(-(WIDTH**-0.5), WIDTH**-0.5).to(dtype) for n in (3, 1)]
    right = one_by_one(tokens, grad, weights, causal, torch.float64)
    plain = one_by_one(tokens, grad, weights, causal, dtype)
    rows, most = offsets(*LENGTHS), max(LENGTHS)

    def attend(query, key, value):
        return attnreg.varlen_attn(query, key, value, rows, rows, most, most, causal)

    for backend in ("cpu", "math"):
        with attnreg.use_backend(backend):
            found = with_gradient(tokens, grad, weights, attend)
        assert ran() == {backend: (1, 1)}
        parts = zip(*(x.split(LENGTHS) for x in found), strict=True)
        errors = {
            (backend, number, name): rule.compare([got], of_plain, truth, dtype)
            for number, sequence in enumerate(zip(parts, plain, right, strict=True))
            for name, got, of_plain, truth in zip(("output", "gradient"), *sequence, strict=True)
        }
        assert {where: error for where, error in errors.items() if not error.passed} == {}

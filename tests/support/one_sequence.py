"""Attention of one sequence in float64 as fakes of kernels compute it, from the LSE that they are given.

Tensors are (S, H, D), scores (H, S_q, S_k), LSE and delta (H, S_q). A key head may serve several query heads.
`kept` are the factors of dropout, shaped as the scores.
"""

import torch


def visible(len_q, len_k, left=None, right=None, top_left=False):
    """Return the mask of a window, aligned bottom-right unless `top_left`; None leaves a side open."""
    distance = torch.arange(len_k) - torch.arange(len_q)[:, None] - (0 if top_left else len_k - len_q)
    mask = torch.ones(len_q, len_k, dtype=torch.bool)
    if left is not None:
        mask &= distance >= -left
    if right is not None:
        mask &= distance <= right
    return mask


def scores(query, key, scale, mask, softcap=0.0):
    found = torch.einsum("qhd,khd->hqk", query.double(), _for_each_head(key, query.shape[1])) * scale
    found = softcap * torch.tanh(found / softcap) if softcap else found
    return found.masked_fill(~mask, -torch.inf)


def forward(scores, value, kept=1.0):
    """Return output and LSE: 0 and -inf for a row without a key."""
    lse = scores.logsumexp(-1)
    weights = _weights(scores, lse) * kept
    return torch.einsum("hqk,khd->qhd", weights, _for_each_head(value, len(scores))), lse


def backward(scores, lse, delta, query, key, value, grad, scale, softcap=0.0, kept=1.0):
    """Return the gradients of query, key and value; `delta` is the sum of output times gradient."""
    weights = _weights(scores, lse.double()) * kept
    slopes = of_scores(scores, lse, delta, value, grad, kept) * scale
    if softcap:
        slopes = slopes * (1 - (scores / softcap).clamp(-1, 1).square())
    grad_q = torch.einsum("hqk,khd->qhd", slopes, _for_each_head(key, len(scores)))
    of_keys = ((slopes, query.double()), (weights, grad.double()))
    grad_k, grad_v = (torch.einsum("hqk,qhd->khd", *each) for each in of_keys)
    return grad_q, *(x.unflatten(1, (key.shape[1], -1)).sum(2) for x in (grad_k, grad_v))


def of_scores(scores, lse, delta, value, grad, kept=1.0):
    """Return the gradient of what is added to the scores, (H, S_q, S_k)."""
    slopes = torch.einsum("qhd,khd->hqk", grad.double(), _for_each_head(value, len(scores))) * kept
    return (slopes - delta[..., None]) * _weights(scores, lse.double())


def _weights(scores, lse):
    return torch.exp(scores - lse.where(lse > -torch.inf, 0.0)[..., None])


def _for_each_head(keys, heads):
    return keys.double().repeat_interleave(heads // keys.shape[1], dim=1)

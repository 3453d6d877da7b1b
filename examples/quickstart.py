"""attnreg in ten lines: ask for a backend, call PyTorch as always, and see what ran and why."""

import torch
import torch.nn.functional as F

import attnreg

attnreg.register_backend("math")  # on a GPU "FA2"; attnreg.list_backends() returns all

query, key, value = (torch.randn(2, 8, 128, 64, requires_grad=True) for _ in range(3))
out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
out.sum().backward()

print(attnreg.stats().calls)
print(attnreg.explain(query, key, value, is_causal=True))

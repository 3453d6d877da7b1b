"""Packed sequences of 40, 0 and 25 tokens, of float64 tensors of 4 and 2 heads."""

import torch

import attnreg

LENGTHS = (40, 0, 25)
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0).int()


def tensors(tokens=65, heads=(4, 2), dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(tokens, count, 16, generator=generator, dtype=dtype, requires_grad=True)
        for count in (heads[0], heads[1], heads[1])
    ]


def attend(given, offsets=OFFSETS, **options):
    longest = int(offsets.diff().max())
    return attnreg.varlen_attn(
        *given, offsets, offsets, longest, longest, enable_gqa=True,
        return_aux=attnreg.AuxRequest(lse=True), **options,
    )  # fmt: skip

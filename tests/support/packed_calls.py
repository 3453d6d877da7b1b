"""Packed calls that the tests of both `varlen_attn` share, and comparing their results with float64."""

import pytest
import torch
from support import dense, truth
from support.dense import random_like as random_like

import attnreg

LENGTHS_Q, LENGTHS_K = (5, 1, 8, 3), (7, 4, 8, 1)
CAUSAL, UNBOUNDED = (-1, 0), (-1, -1)
LSE = attnreg.AuxRequest(lse=True)

# What compiled autograd traces in another way than any op; tests/dispatch/test_varlen_autograd.py has both.
WITHOUT_AN_OP = pytest.mark.parametrize(
    "front", ["call cache", pytest.param("autograd function", marks=pytest.mark.slow)], indirect=True
)


def integers(*values):
    return torch.tensor(values, dtype=torch.int32)


def offsets(*lengths):
    return integers(0, *lengths).cumsum(0).int()


def assert_right(inputs, results, expected, dtype=None):
    """Compare the output, the LSE if there is one, and the gradients of `inputs` with float64.

    They are as precise as `dtype`, or as their own.
    """
    out, *lse = results if isinstance(results, tuple) else (results,)
    dense.assert_near(dense.with_gradients(out, inputs), inputs, expected[0], dtype)
    for one in lse:
        assert (one.dtype, one.is_contiguous()) == (torch.float32, True)
        truth.assert_near(one, expected[1], dtype, truth.FAST_EXP if inputs[0].dtype.itemsize == 2 else 0.0)


def run_and_compare(given, meant=None, attend=attnreg.varlen_attn, **options):
    """Run packed inputs forward and backward, compare with float64, and return output and LSE.

    Args:
        given: query, key, value, both offsets and both lengths.
        meant: the options in the reference's words.
        attend: `varlen_attn`, or what stands for it.
        options: those of `attend`.
    """
    results = attend(*given, **{"return_aux": LSE, **options})
    assert_right(given[:3], results, truth.varlen(*given[:5], **(meant or {})))
    return results


def total(calls):
    """Return the forwards and the backwards of all backends together."""
    return tuple(map(sum, zip(*calls.values(), strict=True)))


def with_gradients(function, inputs, *rest):
    """Return the first result of a function and the gradients of its inputs."""
    result = function(*inputs, *rest)
    return dense.with_gradients(result[0] if isinstance(result, tuple) else result, inputs)


def attend(length=8, dtype=torch.float64, grad=False, **options):
    """Return what a packed call of one sequence gives, and its reference; with gradients if asked for."""
    generator = torch.Generator().manual_seed(length)
    inputs = torch.randn(3, length, 2, 16, generator=generator, dtype=torch.float64).to(dtype)
    leaves = [one.requires_grad_(grad) for one in inputs.unbind()]
    offsets = torch.tensor([0, length], dtype=torch.int32)
    out = attnreg.varlen_attn(*leaves, offsets, offsets, length, length, **options)
    # The op itself: from torch 2.14 on SDPA of three dimensions is a call that attnreg runs and counts.
    expected, _ = torch.ops.aten._scaled_dot_product_attention_math(
        *(one.detach().transpose(0, 1) for one in leaves)
    )
    torch.testing.assert_close(out, expected.transpose(0, 1))
    if grad:
        torch.autograd.grad(out.sum(), leaves)
    return out

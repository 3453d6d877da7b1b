"""What tests ask of a backend's shorter way: the values of the long one, whatever the tensors hold."""

import torch

from attnreg.contract.launchers import AddressLauncher


def ends_of(call):
    return () if call.cu_seqlens_q is None else (call.cu_seqlens_q, call.cu_seqlens_k)


def assert_same(kernels, first, second, call, second_call=None):
    """Run both directions on the first tensors (query, key, value, gradient), then do it again with others.

    Returns what was done again. The backward is done with the LSE of either way.
    """
    second_call = second_call or call
    q, k, v, grad = first
    out, lse = kernels.forward(q, k, v, call)
    kernels.backward(grad, q, k, v, out, lse, call)
    forward = kernels.specialize("forward", (q, k, v), call)
    q, k, v, grad = second
    expected = kernels.forward(q, k, v, second_call)
    got = forward(q, k, v, *ends_of(second_call))
    _compare(got, expected)
    if isinstance(forward, AddressLauncher):
        _compare(forward.on_addresses(q, k, v, *ends_of(second_call)), expected)
    wanted = kernels.backward(grad, q, k, v, *expected, second_call)
    ways = []
    for out, lse in (expected, got):
        kernels.backward(grad, q, k, v, out, lse, second_call)
        backward = kernels.specialize("backward", (grad, q, k, v, out, lse), second_call)
        if backward is None:
            continue
        ways.append(backward)
        given = grad, q, k, v, out, lse, *ends_of(second_call)
        _compare(backward(*given), wanted)
        if isinstance(backward, AddressLauncher):
            _compare(backward.on_addresses(*given), wanted)
    assert ways
    return forward, ways


def _compare(results, expected):
    for one, other in zip(results, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0)

"""What tests ask of a backend's shorter way: the values of the long one, whatever the tensors hold."""

import torch


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
    forward = kernels.again("forward", (q, k, v), call)
    q, k, v, grad = second
    expected = kernels.forward(q, k, v, second_call)
    got = forward(q, k, v, *ends_of(second_call))
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    wanted = kernels.backward(grad, q, k, v, *expected, second_call)
    ways = []
    for out, lse in (expected, got):
        kernels.backward(grad, q, k, v, out, lse, second_call)
        backward = kernels.again("backward", (grad, q, k, v, out, lse), second_call)
        if backward is None:
            continue
        ways.append(backward)
        grads = backward(grad, q, k, v, out, lse, *ends_of(second_call))
        assert [x.shape for x in grads] == [x.shape for x in wanted]
        for one, other in zip(grads, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert ways
    return forward, ways

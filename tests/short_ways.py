"""What tests ask of a backend's shorter way: the values of the long one, whatever the tensors hold."""

import ctypes

import torch

from attnreg.addresses import AddressCall


def ends_of(call):
    return () if call.cu_seqlens_q is None else (call.cu_seqlens_q, call.cu_seqlens_k)


def run_on_addresses(again, *given):
    """Do what compiled routers do with a kernel that is run on addresses."""
    assert isinstance(again, AddressCall)
    tensors = list(given[:-2] if again.derive else given)
    if again.lse_strides is not None:
        lse = tensors[-1]
        tensors[-1] = torch.empty_strided(lse.shape, again.lse_strides, dtype=lse.dtype).copy_(lse)
    results = [torch.empty_strided(size, stride, dtype=dtype) for size, stride, dtype in again.results]
    derived, _ = again.derive(*given[-2:]) if again.derive else ([], True)
    operands = [*tensors, *results, *derived]
    pointers = (ctypes.c_void_p * len(again.operands))(*(operands[n].data_ptr() for n in again.operands))
    workspace = torch.empty(again.workspace, dtype=torch.uint8)
    assert again.launch(ctypes.addressof(pointers), workspace.data_ptr(), 7) is True
    return tuple(results)


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
    _compare(got, expected)
    if isinstance(forward, AddressCall):
        _compare(run_on_addresses(forward, q, k, v, *ends_of(second_call)), expected)
    wanted = kernels.backward(grad, q, k, v, *expected, second_call)
    ways = []
    for out, lse in (expected, got):
        kernels.backward(grad, q, k, v, out, lse, second_call)
        backward = kernels.again("backward", (grad, q, k, v, out, lse), second_call)
        if backward is None:
            continue
        ways.append(backward)
        given = grad, q, k, v, out, lse, *ends_of(second_call)
        _compare(backward(*given), wanted)
        if isinstance(backward, AddressCall):
            _compare(run_on_addresses(backward, *given), wanted)
    assert ways
    return forward, ways


def _compare(results, expected):
    for one, other in zip(results, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0)

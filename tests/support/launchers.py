"""What tests hold launchers to: the values of the kernel they stand in for, whatever the tensors hold."""

import torch

from attnreg.core.launching.launchers import AddressLauncher


def packed_arguments(call, all_rows_see_keys=False):
    """Return what a launcher is called with after the tensors."""
    if call.cu_seqlens_q is None:
        return ()
    return call.cu_seqlens_q, call.cu_seqlens_k, call.max_q, call.max_k, all_rows_see_keys


def assert_same(kernels, first, second, call, second_call=None):
    """Run both directions on the first tensors (query, key, value, gradient), and launchers on the second.

    The backward's launcher is given the LSE of the kernel, and that of the forward's launcher. Returns the
    launcher of the forward and those of the backward.
    """
    second_call = second_call or call
    q, k, v, grad = first
    out, lse = kernels.forward(q, k, v, call)
    kernels.backward(grad, q, k, v, out, lse, call)
    forward = kernels.specialize("forward", (q, k, v), call)
    q, k, v, grad = second
    expected = kernels.forward(q, k, v, second_call)
    got = _compare(forward, (q, k, v, *packed_arguments(second_call)), expected)
    wanted = kernels.backward(grad, q, k, v, *expected, second_call)
    backwards = []
    for out, lse in (expected, got):
        kernels.backward(grad, q, k, v, out, lse, second_call)
        backward = kernels.specialize("backward", (grad, q, k, v, out, lse), second_call)
        if backward is not None:
            backwards.append(backward)
            _compare(backward, (grad, q, k, v, out, lse, *packed_arguments(second_call)), wanted)
    assert backwards
    return forward, backwards


def _compare(launcher, tensors, expected):
    """Hold a launcher to expected results, in Python and, if it can, on addresses; returns its results."""
    calls = [launcher, launcher.on_addresses] if isinstance(launcher, AddressLauncher) else [launcher]
    found = [run(*tensors) for run in calls]
    for results in found:
        for one, other in zip(results, expected, strict=True):
            assert one.shape == other.shape
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    return found[0]

"""The attention ops that torch has for CUDA alone: how tests call them, and stand-ins for their kernels.

The stand-ins keep the conventions of torch's own kernels: the LSE of a row without keys is +inf, a causal
mask of cuDNN's ops is aligned top-left.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from support import truth
from support.dense import CAUSAL, OPEN, assert_near, transposed, with_gradients

SDPA = {"flash": "_scaled_dot_product_flash_attention", "cudnn": "_scaled_dot_product_cudnn_attention"}
FORWARD = {"flash": "_flash_attention_forward", "cudnn": "_cudnn_attention_forward"}
BACKWARD = {"flash": "_flash_attention_backward", "cudnn": "_cudnn_attention_backward"}
NATIVE = {"flash": "FA2", "cudnn": "cuDNN"}  # the backends that torch's own kernels belong to

# The arguments by name of this torch's flash op: torch 2.11 lacks block_table and num_splits.
FLASH_SCHEMA = torch.ops.aten._flash_attention_forward.default._schema
FLASH_OPTIONS = {argument.name for argument in FLASH_SCHEMA.arguments if argument.kwarg_only}

LENGTHS_Q, LENGTHS_K = (5, 1, 8, 3), (7, 4, 8, 1)


# ---- calls


def call(kind, inputs, dropout=0.0, causal=False, debug=False, bias=None, scale=None):
    """Call an op below scaled_dot_product_attention; returns all that it returns."""
    op = getattr(torch.ops.aten, SDPA[kind])
    if kind == "flash":
        return op(*inputs, dropout, causal, debug, scale=scale)
    return op(*inputs, bias, True, dropout, causal, debug, scale=scale)


def backward(kind, inputs, result, grad, dropout=0.0):
    """Call the backward of such an op as torch's derivative formula does."""
    out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = result
    op = getattr(torch.ops.aten, SDPA[kind] + "_backward")
    lengths = (cu_q, cu_k, max_q, max_k)
    if kind == "flash":
        return op(grad, *inputs, out, lse, *lengths, dropout, False, seed, offset)
    return op(grad, *inputs, out, lse, seed, offset, None, *lengths, dropout, False)


def flash_varlen(inputs, *lengths, p=0.0, causal=False, debug=False, **options):
    return torch.ops.aten._flash_attention_forward(*inputs, *lengths, p, causal, debug, **options)


def cudnn_varlen(inputs, *lengths, bias=None, p=0.0, causal=False, debug=False, **options):
    return torch.ops.aten._cudnn_attention_forward(*inputs, bias, *lengths, True, p, causal, debug, **options)


def assert_call_right(kind, result, inputs, gradients=None, **meant):
    """Check output, LSE and gradients of a dense call against the reference."""
    gradients = with_gradients(result[0], inputs)[1:] if gradients is None else gradients
    expected, expected_lse = truth.dense(*inputs, **meant)
    truth.assert_near(result[1].squeeze(-1) if kind == "cudnn" else result[1], expected_lse, torch.float32)
    assert_near([result[0], *gradients], inputs, expected)


def described(result):
    """Return what a compiler asserts of a result of an op."""
    return [
        (tuple(x.shape), x.dtype, x.stride()) if isinstance(x, torch.Tensor) and x.numel() else None
        for x in result
    ]


# ---- stand-ins for torch's kernels


class NativeKernel:
    """A stand-in for torch's own kernel of an op: keeps what it is called with."""

    def __init__(self, function):
        self.function = function
        self.calls = []

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self.function(*args, **kwargs)


def random_state():
    return torch.tensor([3, 4], dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)


def as_native_lse(lse):
    return lse.masked_fill(lse == -torch.inf, torch.inf).float()


def differentiated(grad, inputs, attend, of_lse=None):
    """Return the gradients of `attend` in float64, from a thread: a kernel runs where nothing is recorded.

    They are those by its output, and by its LSE if that has a gradient.
    """

    def run():
        leaves = [x.detach().double().requires_grad_() for x in inputs]
        results, grads = attend(*leaves), (grad.double(), of_lse)
        count = 1 if of_lse is None else 2
        return torch.autograd.grad(results[:count], leaves, grads[:count])

    with ThreadPoolExecutor(1) as thread:
        grads = thread.submit(run).result()
    return tuple(grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True))


def _attend_flash(query, key, value, cu_q, cu_k, window, scale):
    """Return output and LSE of a dense or packed call of the flash op."""
    if cu_q is not None:
        return truth.varlen(query, key, value, cu_q, cu_k, window=window, scale=scale)
    out, lse = truth.dense(*transposed(query, key, value), window=window, scale=scale)
    return out.transpose(1, 2), lse


def _flash(query, key, value, cu_q, cu_k, max_q, max_k, p, causal, debug, *, scale=None, **options):
    left, right = options.get("window_size_left"), 0 if causal else options.get("window_size_right")
    window = (-1 if left is None else left, -1 if right is None else right)
    out, lse = _attend_flash(query, key, value, cu_q, cu_k, window, scale)
    return out.to(query.dtype), as_native_lse(lse), *random_state(), query.new_empty(int(debug))


def _flash_backward(
    grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, p, causal, *rest, scale=None, **options
):
    assert not (lse == -torch.inf).any(), "torch's own kernel has +inf for a row without keys"
    window = CAUSAL if causal else OPEN
    return differentiated(grad, (query, key, value), lambda *x: _attend_flash(*x, cu_q, cu_k, window, scale))


def _attend_cudnn(query, key, value, bias, causal, scale):
    window = CAUSAL if causal else OPEN
    return truth.dense(query, key, value, bias, window=window, top_left=True, scale=scale)


def _cudnn(
    query, key, value, bias, cu_q, cu_k, max_q, max_k, lse, p=0.0, causal=False, debug=False, *, scale=None
):
    out, lse = _attend_cudnn(query, key, value, bias, causal, scale)
    seed, offset = torch.tensor(3), torch.tensor(4)
    return out.to(query.dtype), lse.float()[..., None], None, None, max_q, max_k, seed, offset, None


def _cudnn_backward(
    grad, query, key, value, out, lse, seed, offset, bias, cu_q, cu_k, max_q, max_k, p, causal, *, scale=None
):
    return differentiated(grad, (query, key, value), lambda *x: _attend_cudnn(*x, bias, causal, scale))


def native_kernels():
    """Return stand-ins for torch's own kernels: the flash op's for any call, cuDNN's for dense ones."""
    return {
        FORWARD["flash"]: NativeKernel(_flash),
        BACKWARD["flash"]: NativeKernel(_flash_backward),
        FORWARD["cudnn"]: NativeKernel(_cudnn),
        BACKWARD["cudnn"]: NativeKernel(_cudnn_backward),
    }


def sdpa_kernels():
    """Return kernels of the ops below scaled_dot_product_attention; as torch's, they call the routed ops."""
    ops = torch.ops.aten

    def flash(query, key, value, p=0.0, causal=False, debug=False, *, scale=None):
        lengths = query.shape[2], key.shape[2]
        out, lse, *rest = ops._flash_attention_forward(
            *transposed(query, key, value), None, None, *lengths, p, causal, debug, scale=scale
        )
        return out.transpose(1, 2), lse, None, None, *lengths, *rest

    def flash_backward(grad, query, key, value, out, *rest, scale=None):
        tensors = transposed(grad, query, key, value, out)
        return transposed(*ops._flash_attention_backward(*tensors, *rest, scale=scale))

    def cudnn(query, key, value, bias, *rest, scale=None):
        lengths = None, None, query.shape[2], key.shape[2]
        return ops._cudnn_attention_forward(query, key, value, bias, *lengths, *rest, scale=scale)

    return {
        SDPA["flash"]: flash,
        SDPA["flash"] + "_backward": flash_backward,
        SDPA["cudnn"]: cudnn,
        SDPA["cudnn"] + "_backward": ops._cudnn_attention_backward,
    }

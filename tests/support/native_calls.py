"""Calls of the C function of a `NativeLauncher`, as the compiled call cache makes them."""

import ctypes

import torch


class NativeOperand(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("sizes", ctypes.c_int64 * 4), ("strides", ctypes.c_int64 * 4))


class NativeCall(ctypes.Structure):
    _fields_ = (
        ("operand_count", ctypes.c_int64),
        ("operands", ctypes.POINTER(NativeOperand)),
        ("cu_seqlens_q", ctypes.c_void_p),
        ("cu_seqlens_k", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("max_q", ctypes.c_int64),
        ("max_k", ctypes.c_int64),
        ("used", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("table_width", ctypes.c_int64),
    )


def launched(launcher, tensors, call):
    """Return the status and the results, which are NaN where the function has written nothing."""
    results = results_of(tensors, call.varlen)
    return status_of(launcher, (*tensors, *results), call), results


def results_of(tensors, is_packed):
    """Return contiguous results of a forward, of three tensors, or of a backward."""
    if len(tensors) == 3:
        q, _, v = tensors
        *rows, heads, _ = q.shape
        shapes = (*rows, heads, v.size(-1)), (heads, *rows) if is_packed else (rows[0], heads, rows[1])
        dtypes = q.dtype, torch.float32
    else:
        shapes, dtypes = [x.shape for x in tensors[1:4]], [x.dtype for x in tensors[1:4]]
    return tuple(
        torch.full(shape, torch.nan, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
    )


def status_of(launcher, operands, call):
    """Return what the function returns."""
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)(launcher.function)
    each = (NativeOperand * len(operands))(*map(_operand, operands))
    offsets = [None if x is None else x.data_ptr() for x in (call.cu_seqlens_q, call.cu_seqlens_k)]
    batch = len(call.cu_seqlens_q) - 1 if call.varlen else operands[0].size(0)
    options = [None if x is None else x.data_ptr() for x in (call.seqused_k, call.block_table)]
    width = 0 if call.block_table is None else call.block_table.size(1)
    native = NativeCall(len(operands), each, *offsets, batch, call.max_q, call.max_k, *options, width)
    return function(launcher.context, ctypes.byref(native))


def _operand(x):
    rest = (0,) * (4 - x.dim())
    return NativeOperand(x.data_ptr(), (*x.shape, *rest), (*x.stride(), *rest))

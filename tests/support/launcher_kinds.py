"""Launchers of each kind that tests make: functions, torch's kernels, C functions, kernels on addresses."""

import ctypes
import functools
import math
import weakref
from typing import NamedTuple

import pytest
import torch
from support.native_calls import NativeCall
from support.program_calls import InPrograms

from attnreg.core.launching import offsets
from attnreg.core.launching.counts import counts_in
from attnreg.core.launching.derivation import Derivation, OffsetsKernel
from attnreg.core.launching.launchers import (
    MAX_K,
    MAX_Q,
    AddressLauncher,
    NativeLauncher,
    OpLauncher,
    Prepared,
)
from attnreg.core.torchlib import captured

SHAPE = (2, 6, 2, 8)  # (B, S, H, D); the LSE is (B, H, S)
PACKED = (6, 2, 8)  # (T, H, D); the LSE is (H, T)


def tensors(shape=SHAPE, seed=0, count=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def backward_tensors(shape=SHAPE, seed=0):
    """Return a gradient, query, key, value, output and LSE."""
    grad, q, k, v, out = tensors(shape, seed, 5)
    return [grad, q, k, v, out, lse_of(q)]


def lse_of(query):
    return query.sum(-1).transpose(-1, -2).contiguous()


def forward_function(q, k, v, *_):
    return q * 2, lse_of(q)


def backward_function(grad, q, k, v, out, lse, *_):
    return grad * 2, grad * 3, grad * 4


SEEN = []  # the arguments behind the tensors that a kernel of "torch's" was given


@functools.cache
def define_kernels():
    """Define ops with kernels for a CPU and no router."""
    defined = torch.library.Library("aten", "FRAGMENT")
    rest = "float scale, bool is_causal=False, *, int? window=7, float? cap=None"
    defined.define(f"attnreg_kernel(Tensor q, Tensor k, Tensor v, {rest}) -> (Tensor, Tensor, Tensor)")
    defined.define(
        "attnreg_kernel_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, float scale) "
        "-> (Tensor, Tensor, Tensor)"
    )
    lengths = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_q, int max_k"
    defined.define(f"attnreg_packed(Tensor q, Tensor k, Tensor v, {lengths}) -> (Tensor, Tensor)")
    defined.define(
        "attnreg_packed_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
        f"{lengths}) -> (Tensor, Tensor, Tensor)"
    )
    defined.define(
        f"attnreg_used(Tensor q, Tensor k, Tensor v, {lengths}, *, float? scale=None, "
        "Tensor? seqused_k=None) -> (Tensor, Tensor)"
    )
    kernels = torch.library.Library("aten", "IMPL")

    def packed(q, k, v, *rest):
        SEEN.append((rest[2:], {}))
        return forward_function(q, k, v)

    def forward(q, k, v, *rest, **options):
        SEEN.append((rest, options))
        return *forward_function(q, k, v), q.new_zeros(2)

    kernels.impl("attnreg_kernel", forward, "CPU")

    def with_used(q, k, v, *rest, **options):
        SEEN.append((rest[2:], options))
        return forward_function(q, k, v)

    kernels.impl("attnreg_packed", packed, "CPU")
    kernels.impl("attnreg_used", with_used, "CPU")
    for op in ("attnreg_kernel_backward", "attnreg_packed_backward"):
        kernels.impl(op, lambda *given: backward_function(*given[:6]), "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "check_not_overridden", lambda *_: None)
        for op in ("attnreg_kernel", "attnreg_packed"):
            captured.capture(op, "CPU")
            captured.capture(f"{op}_backward", "CPU")
        captured.capture("attnreg_used", "CPU")
    return defined, kernels


def op_launcher(*rest, op="attnreg_kernel", results=2, **options):
    define_kernels()
    return OpLauncher(op, "CPU", rest or (0.5,), options, results)


def floats(address, count):
    """Return the memory at an address as a tensor."""
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)


class Vector(NamedTuple):
    tensor: torch.Tensor

    def differs(self, newer):
        return (self.tensor != newer.tensor).any()


class OnAddresses:
    """A kernel on addresses with the values of the functions above; of packed calls it reads offsets, too.

    Attributes:
        prepared: the lengths and strides that it was asked about.
        launched: for each launch whether there was a workspace, and the stream.
        derived, vectors: the offsets that something was derived of, and weak references to that. What the
            call cache has derived itself and has compared comes behind the offsets.
        can: False where it can't launch any more, None where nothing can be derived, "" where nothing can
            be prepared.
        by_kernel: what derives the same on the GPU.
        keeps: whether what was derived is kept with the offsets.
        ends: how many offsets a launch reads.
        offsets, lse: what the last launch has read of them.
    """

    def __init__(self, direction="forward", shape=SHAPE, by_kernel=None, derive=None, **changes):
        self.by_kernel, self.derive = by_kernel, derive or self.derive
        self.is_backward, self.is_packed, self.changes = direction == "backward", len(shape) == 3, changes
        self.heads, self.dim = shape[-2:]
        self.prepared, self.launched, self.derived, self.vectors = [], [], [], []
        self.can, self.keeps = True, True
        self.offsets = self.lse = None
        self.ends = 3
        function = backward_function if self.is_backward else forward_function
        self.launcher = AddressLauncher(function, self.prepare)

    def prepare(self, *given):
        *lengths, strides = given
        self.prepared.append((tuple(lengths), strides))
        if self.can == "":
            return None
        batch, max_q, _, tokens_q, _ = lengths
        rows = (tokens_q,) if self.is_packed else (batch, max_q)
        shape = *rows, self.heads, self.dim
        tensors, results = (6, 3) if self.is_backward else (3, 2)
        read = (0, 5) if self.is_backward else (0,)
        further = (tensors + results,) if self.is_packed else ()
        how = Prepared(
            functools.partial(self.launch, shape),
            (*read, *range(tensors, tensors + results), *further),
            workspace=48,
            lse_token_first=self.is_packed and not self.is_backward,
            derivation=Derivation(self.derive, self.by_kernel) if self.is_packed else None,
        )
        return how._replace(**self.changes)

    def derive(self, *pair):
        self.derived.append(pair)
        if self.can is None:
            return None
        if len(pair) > 2:
            return pair[2], (4,)
        vector = torch.cat((torch.zeros(1), pair[0].float()))
        if self.keeps:
            vector = offsets.derived_from(pair, 0, (id(self),), lambda *_: Vector(vector)).tensor
        self.vectors.append(weakref.ref(vector))
        return vector, (4,)

    def launch(self, shape, addresses, workspace, stream):
        count = 6 if self.is_backward else 4
        pointers = list((ctypes.c_void_p * (count - (not self.is_packed))).from_address(addresses))
        ctypes.memset(workspace, 1, 48)
        self.launched.append((workspace != 0, stream))
        if not self.can:
            return False
        source = floats(pointers.pop(0), math.prod(shape)).clone().view(shape)
        if self.is_backward:
            self.lse = floats(pointers.pop(0), math.prod(shape[:-1])).clone()
            for factor in (2, 3, 4):
                floats(pointers.pop(0), math.prod(shape)).view(shape).copy_(source * factor)
        else:
            floats(pointers.pop(0), math.prod(shape)).view(shape).copy_(source * 2)
            lse = source.sum(-1) if self.is_packed else lse_of(source)
            floats(pointers.pop(0), lse.numel()).copy_(lse.flatten())
        if self.is_packed:
            self.offsets = floats(pointers.pop(0), self.ends).tolist()
        return True


class Written:
    """A function in the place of cuLaunchKernel: it writes offsets as floats, from the fourth byte on.

    Attributes:
        kernel: what describes it to the call cache.
        launched: of each launch function, blocks, threads and stream, then the number of sequences, the width
            and the further words.
    """

    def __init__(self, rows=2, width=3, words=(8, 9), places=(4,)):
        self.launched, self.error, self.count = [], 0, 7 + len(words)
        as_c = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3)
        self._kept = as_c(self._launch)
        address = ctypes.cast(self._kept, ctypes.c_void_p).value
        self.kernel = OffsetsKernel(address, 77, 2, rows, width, words, places)

    def _launch(self, function, blocks, _y, _z, threads, *rest):
        stream, pointers = rest[-3], rest[-2]
        places = (ctypes.POINTER(ctypes.c_int64) * self.count).from_address(pointers)
        buffer, *pair, step_q, step_k, batch, width = (place[0] for place in places[:7])
        words = (place[0] for place in places[7:])
        self.launched.append((function, blocks, threads, stream, batch, width, *words))
        offsets = (
            torch.tensor((ctypes.c_int32 * (batch * step + 1)).from_address(address)[::step])
            for address, step in zip(pair, (step_q, step_k), strict=True)
        )
        self.write(buffer, *offsets)
        return self.error

    def write(self, buffer, queries, keys):
        """Write what is read of offsets, (B + 1,), to an address."""
        floats(buffer + 4, len(queries)).copy_(queries)


class Counted(Written):
    """The same, which writes what `counts_in` reads."""

    def __init__(self):
        super().__init__(3, 0, (), (0,))

    def write(self, buffer, queries, keys):
        """Write how many keys each sequence has, and the offsets of keys."""
        numbers = torch.frombuffer(
            (ctypes.c_int64 * (3 * len(keys) - 3)).from_address(buffer), dtype=torch.int64
        )
        counts, offsets = counts_in(numbers, len(keys) - 1)
        counts.copy_(keys.diff())
        offsets.copy_(keys)


class InC:
    """A C function with the values of the functions above, and what it was given.

    Attributes:
        calls: `(batch, max_q, max_k, offsets, context)` of each call, offsets as lists or None.
        status: what it returns.
    """

    def __init__(self, direction="forward"):
        self.is_backward, self.calls, self.status = direction == "backward", [], 0
        self.function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)(self.run)
        self.launcher = NativeLauncher(
            backward_function if self.is_backward else forward_function,
            ctypes.cast(self.function, ctypes.c_void_p).value,
            context=7,
            keep=self.function,
        )

    def run(self, context, address):
        call = NativeCall.from_address(address)
        operands = [operand_of(call.operands[n]) for n in range(call.operand_count)]
        pairs = [
            (ctypes.c_int32 * (call.batch + 1)).from_address(at)[:] if at else None
            for at in (call.cu_seqlens_q, call.cu_seqlens_k)
        ]
        self.calls.append((call.batch, call.max_q, call.max_k, *pairs, context))
        if self.status == 0:
            count = 6 if self.is_backward else 3
            values = (backward_function if self.is_backward else forward_function)(*operands[:count])
            for result, value in zip(operands[count:], values, strict=True):
                result.copy_(value)
        return self.status


def operand_of(operand):
    """Return the tensor that a `NativeOperand` describes."""
    rank = sum(size > 0 for size in operand.sizes)
    sizes, strides = operand.sizes[:rank], operand.strides[:rank]
    reach = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return floats(operand.data, reach).as_strided(sizes, strides)


def of_torchs(is_packed):
    if not is_packed:
        return op_launcher(), op_launcher(op="attnreg_kernel_backward", results=3)
    lengths = MAX_Q, MAX_K
    return op_launcher(*lengths, op="attnreg_packed"), op_launcher(
        *lengths, op="attnreg_packed_backward", results=3
    )


KINDS = {
    "function": lambda shape: (forward_function, backward_function),
    "torch's kernel": lambda shape: of_torchs(len(shape) == 3),
    "C function": lambda shape: (InC("forward").launcher, InC("backward").launcher),
    "addresses": lambda shape: (
        OnAddresses("forward", shape).launcher,
        OnAddresses("backward", shape).launcher,
    ),
    "program": lambda shape: (InPrograms("forward", shape).launcher, InPrograms("backward", shape).launcher),
}


assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)

"""The compiled kernel (`kernel/module.cpp`), where `attnreg build` has made it.

A call of it is a whole batch, whatever its lengths: it gets the addresses of the tensors and a description of
everything else, a `Problem`, and shares the work out among torch's threads. The description is the same for
all calls alike, so it is kept, and a launcher has nothing to do but to pass addresses on.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.backends.cpu import choice, torch_path
from attnreg.backends.cpu.paged import check_pages, gathered_backward
from attnreg.backends.cpu.problem import DTYPES, addresses_of, option_tensors, problem_of
from attnreg.backends.cpu.sequences import Sequences, sequences_of
from attnreg.contract.backend import Call, Kernels
from attnreg.contract.launchers import AddressLauncher
from attnreg.contract.spec import Direction
from attnreg.errors import BuildError
from attnreg.torchlib import building

log = logging.getLogger("attnreg")

# The library's operands by their places among a call's tensors and then its results: q, k, v, out, lse, and
# in the backward grad_out, grad_q, grad_k, grad_v. A gradient of the LSE comes last; calls with one have no
# launcher.
_FORWARD, _BACKWARD = (0, 1, 2, 3, 4), (1, 2, 3, 4, 5, 0, 6, 7, 8)


class Compiled(NamedTuple):
    """The two functions of the library."""

    forward_entry: Any
    backward_entry: Any

    @classmethod
    def of(cls, library: ctypes.CDLL) -> Compiled:
        """Return the functions of a library."""
        entries = library.attnreg_forward, library.attnreg_backward
        for entry in entries:
            entry.argtypes, entry.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int64
        return cls(*entries)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return the output and the LSE."""
        sequences = sequences_of(q, k, call)
        q, k, v = _readable(q), _readable(k), _readable(v)
        out, lse = _forward_results(q, v)
        if not sequences.of_every_row:
            out.zero_()
            lse.fill_(-torch.inf)
        _run(self.forward_entry, (q, k, v, out, lse), sequences, call)
        return out, lse

    @gathered_backward
    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""
        sequences = sequences_of(q, k, call)
        if lse.dtype != torch.float32:
            out, lse = torch_path.of_all_keys(self.forward(q, k, v, call), out, lse)
        grad_q, grad_k, grad_v = _backward_results(q, k, v)
        if not sequences.of_every_row:
            grad_q.zero_()
        if not sequences.of_every_key:
            grad_k.zero_()
            grad_v.zero_()
        q, k, v, out, grad_out = (_readable(x) for x in (q, k, v, out, grad_out))
        operands = [q, k, v, out, lse, grad_out, grad_q, grad_k, grad_v]
        if call.grad_lse is not None:
            operands.append(call.grad_lse.float())
        _run(self.backward_entry, operands, sequences, call)
        return grad_q, grad_k, grad_v

    def specialize(
        self, direction: Direction, tensors: tuple[Tensor, ...], call: Call
    ) -> AddressLauncher | None:
        """Return a launcher for further calls, or None where one needs more than addresses.

        That is where tensors are copied or results filled first, and where calls are packed: their
        offsets are read and checked each time.
        """
        if call.varlen or call.seqused_k is not None:
            return None
        is_forward = direction == "forward"
        q, k, v = tensors[:3] if is_forward else tensors[1:4]
        sequences = sequences_of(q, k, call)
        read, lse = tensors[:5], tensors[5:]  # of a forward there is none
        if not (sequences.of_every_row and sequences.of_every_key and all(x.stride(-1) == 1 for x in read)):
            return None
        if any(x.dtype != torch.float32 for x in lse):
            return None
        entry = self.forward_entry if is_forward else self.backward_entry
        made = _forward_results(q, v) if is_forward else _backward_results(q, k, v)
        return _launcher(entry, tensors, made, sequences, call)

    def before(self, kernels: Kernels) -> Kernels:
        """Return kernels that use the library where it is the faster one, else those given."""
        rest = kernels.backward
        assert rest is not None

        def forward(*given: Any) -> tuple[Tensor, Tensor]:
            return (self.forward if _takes_forward(*given) else kernels.forward)(*given)

        def backward(*given: Any) -> tuple[Tensor, ...]:
            return (self.backward if _takes_backward(*given) else rest)(*given)

        def specialize(
            direction: Direction, tensors: tuple[Tensor, ...], call: Call
        ) -> AddressLauncher | None:
            takes: Callable[..., bool] = _takes_forward if direction == "forward" else _takes_backward
            return self.specialize(direction, tensors, call) if takes(*tensors, call) else None

        return Kernels(forward, backward, specialize, choice.replaces_torch)


@functools.cache
def load() -> Compiled | None:
    """Return the library, or None where it isn't built or can't be loaded."""
    try:
        return Compiled.of(building.loaded_cpu_kernel())
    except BuildError as error:
        # `ensure_built` logs what isn't built or used.
        level = logging.WARNING if building.may_be_loaded(building.CPU_KERNEL) else logging.DEBUG
        log.log(level, "the cpu backend uses torch's kernel alone: %s", error)
        return None


def _takes(q: Tensor, k: Tensor, v: Tensor, call: Call) -> bool:
    return q.dtype in DTYPES and call.attn_bias is None and q.numel() > 0 and k.numel() > 0 and v.numel() > 0


def _takes_forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> bool:
    if not _takes(q, k, v, call):
        return False
    is_only_here = call.softcap or call.dropout or call.alibi_slopes is not None
    return bool(is_only_here) or call.block_table is not None or not choice.leaves_to_torch(q, k, call)


def _takes_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> bool:
    """Return whether it is given what a forward returns, too: the library trusts shapes and dtypes."""
    return (
        _takes(q, k, v, call)
        and grad_out.shape == out.shape == (*q.shape[:-1], v.size(-1))
        and lse.shape == (*q.shape[:-3], q.size(-2), q.size(-3))
        and grad_out.dtype == out.dtype == q.dtype
        and (call.grad_lse is None or call.grad_lse.shape == lse.shape)
    )


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _forward_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return an output and an LSE to write to, for a query that is readable.

    Those of dense calls are laid out as torch's kernel does it, so that a router needs no copy: the output as
    the query, the LSE as (B, S, H).
    """
    *outer, heads, size = q.shape
    if len(outer) == 1:
        out = torch.empty(*outer, heads, v.size(-1), dtype=q.dtype, device="cpu")
        return out, torch.empty(heads, *outer, dtype=torch.float32, device="cpu")
    out = torch.empty_like(q) if v.size(-1) == size else q
    if out is q or out.stride(-1) != 1:
        out = torch.empty(*outer, heads, v.size(-1), dtype=q.dtype, device="cpu")
    shape, strides = (outer[0], heads, outer[1]), (heads * outer[1], 1, heads)
    return out, torch.empty_strided(shape, strides, dtype=torch.float32, device="cpu")


def _backward_results(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return gradients to write to, contiguous as those of torch's kernel."""
    return tuple(torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in tensors)


def _run(entry: Any, operands: Sequence[Tensor], sequences: Sequences, call: Call) -> None:
    options = option_tensors(call)
    problem = problem_of(operands, sequences, call, options)
    status = entry(ctypes.byref(problem), addresses_of((*operands, *options)))
    if status == 3 and call.block_table is not None:
        check_pages(operands[1], call.block_table, call)
    _raise_for(status)


def _launcher(
    entry: Any, tensors: tuple[Tensor, ...], made: tuple[Tensor, ...], sequences: Sequences, call: Call
) -> AddressLauncher:
    """Return a launcher for calls with tensors like these; `made` are results like those to allocate."""
    order = _FORWARD if len(made) == 2 else _BACKWARD
    results = tuple((tuple(x.shape), x.stride(), x.dtype) for x in made)
    both = (*tensors, *made)
    problem = ctypes.pointer(problem_of([both[number] for number in order], sequences, call))

    def launch(addresses: int, workspace: int, stream: int) -> bool:
        _raise_for(entry(problem, addresses))
        return True

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        made = tuple(
            [torch.empty_strided(size, step, dtype=dtype, device="cpu") for size, step, dtype in results]
        )
        both = tensors + made
        _raise_for(entry(problem, addresses_of([both[number] for number in order])))
        return made

    strides = None if order is _FORWARD else tensors[-1].stride()
    return AddressLauncher(run, launch, order, results, lse_strides=strides)


def _raise_for(status: int) -> None:
    if status == 1:
        raise MemoryError("no memory for the blocks that attention works on")
    if status:
        raise RuntimeError("torch couldn't start its threads for attention on the CPU")

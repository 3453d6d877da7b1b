"""A stand-in for flash-attn-4 on a CPU: the parameters that are passed, compile caches, and float64.

As in 4.0.0b36, its functions allocate what they aren't given and launch compiled functions, which they
keep in caches; memory that no kernel writes holds arbitrary values. Only the kernels compute, so a launch
that is left out, or given the wrong tensor, shows in the values. attnreg confirms a recipe at the third call
of its description.
"""

import ctypes
import functools
import inspect
import sys
import types
from collections import UserDict
from typing import NamedTuple

import torch
from support import one_sequence, truth
from torch.utils._python_dispatch import _disable_current_modes

from attnreg import Call, Device
from attnreg.backends.fa4 import BACKEND, compiled_kinds
from attnreg.backends.fa4 import package as fa4_package

# Above so many sequences a launch of its own sums up their tiles.
MANY, TILE = 256, 128


# Values


def scores(query, key, scale, causal, left, right, softcap):
    """Return masked scores as the package reads its arguments: a bound counts unless it is None."""
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    mask = one_sequence.visible(len(query), len(key), left, 0 if causal else right)
    return one_sequence.scores(query, key, scale, mask, softcap or 0.0)


def softcap_of(score_mod, score_mod_bwd=None):
    """Return the softcap of functions of scores, and how many times their scores are to be multiplied."""

    def at(function, *values):
        names = "q_idx", "kv_idx", "seqlen_info", "aux_tensors"
        return function(*(torch.tensor(x).double() for x in values), 0, 0, **dict.fromkeys(names))

    softcap, factor = float(at(score_mod, torch.inf)), float(at(score_mod, 1e-9) / 1e-9)
    if score_mod_bwd is not None:
        x = (
            torch.tensor([-3.0, -0.1, 0.0, 0.7, 2.0], dtype=torch.float64)
            .mul_(softcap / factor)
            .requires_grad_()
        )
        (slope,) = torch.autograd.grad(at(score_mod, 0.0) + softcap * (x * factor / softcap).tanh().sum(), x)
        torch.testing.assert_close(at(score_mod_bwd, 3.0, x.tolist()), 3.0 * slope)
    return softcap, round(factor, 6)


def parts(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table=None):
    """Yield each sequence: where its queries are and its keys, and how many of these it counts."""
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    for index in range(batch):
        rows_q = rows_k = (index, slice(None))
        if cu_seqlens_q is not None:
            rows_q = slice(int(cu_seqlens_q[index]), int(cu_seqlens_q[index + 1]))
        if page_table is not None:
            rows_k = (page_table[index].long()[:, None], torch.arange(k.shape[1]))
        elif cu_seqlens_q is not None:
            rows_k = slice(int(cu_seqlens_k[index]), int(cu_seqlens_k[index + 1]))
        yield rows_q, rows_k, k[rows_k].shape[0] if seqused_k is None else int(seqused_k[index])


def loaded(x, rows, length):
    """Return the keys of a sequence and the rest of the tile behind them, which must be finite."""
    if isinstance(rows, slice):
        tile = x[rows.start : rows.start + length + 8]
    else:
        tile = x[rows].flatten(0, -3)[: length + (8 if isinstance(rows[0], int) else 0)]
    assert tile[length:].isfinite().all(), "NaN in the rows behind a sequence spreads"
    return tile[:length]


def unwritten(tensor):
    """Return a tensor with arbitrary values, as new memory has them; written without an op of torch's."""
    ctypes.memset(tensor.data_ptr(), 0x40, tensor.nbytes)
    return tensor


# Kernels: what a compiled function writes into the tensors that it is given


class AuxData(NamedTuple):
    """What the package passes to every kernel and attnreg leaves empty."""

    tensors: tuple | None = None
    scalars: tuple | None = None


class SinkTensors(NamedTuple):
    """What the last kernel of a backward computes the gradient of sinks from, and that."""

    dpsum: torch.Tensor
    lse: torch.Tensor
    sinks: torch.Tensor
    gradient: torch.Tensor


class Baked(NamedTuple):
    """What the host has read of a tensor: its address, or what it holds."""

    address: int = 0
    numbers: tuple = ()


# The tensors whose addresses kernels were given.
by_address = {}


def read(argument):
    """Return the tensor that a kernel reads, given itself or as numbers."""
    if type(argument) is not Baked:
        return argument
    return by_address[argument.address] if argument.address else torch.tensor(argument.numbers)


def tile_cumsum(total, cu_seqlens):
    tiles = (cu_seqlens.diff() + TILE - 1) // TILE
    total[0] = 0
    total[1:] = tiles.cumsum(0)


def forward_kernel(causal, softcap):
    def run(q, k, v, out, lse, scale, cu_q, cu_k, used, pages, left, right, sinks, aux, tiles):
        assert aux == AuxData() and type(aux) is AuxData
        if tiles is not None:
            expected = torch.empty_like(tiles)
            tile_cumsum(expected, cu_q)
            assert torch.equal(tiles, expected)
        v, cu_q, cu_k = read(v), read(cu_q), read(cu_k)
        for rows_q, rows_k, length in parts(q, k, cu_q, cu_k, used, pages):
            query, value = q[rows_q], loaded(v, rows_k, length)
            key = (k[rows_k] if isinstance(rows_k, slice) else k[rows_k].flatten(0, -3))[:length]
            part, part_lse = one_sequence.forward(
                scores(query, key, scale, causal, left, right, softcap), value
            )
            if sinks is not None:  # of a row without a key it is all of the LSE
                total = torch.logaddexp(part_lse, read(sinks).to(part_lse)[:, None])
                part, part_lse = part * (part_lse - total).exp().mT[..., None], total
            out[rows_q] = part.to(out.dtype)
            if cu_q is None:
                lse[rows_q[0]] = part_lse.float()
            else:
                lse[:, rows_q] = part_lse.float()

    return run


def preprocess_kernel(out, dout, dpsum, lse, lse_copy, dq_accum, dlse):
    assert out.shape == dout.shape and dout.isfinite().all()
    dpsum.copy_((out.double() * dout.double()).sum(-1))
    if dlse is not None:
        dpsum.sub_(dlse.mT)
    lse_copy.copy_(lse)
    dq_accum.zero_()


def backward_kernel(causal, shared, softcap):
    def run(q, k, v, dout, lse, dpsum, dq_accum, dk, dv, scale, cu_q, cu_k, used, left, right, turns, aux):
        assert aux == AuxData() and type(aux) is AuxData and q.isfinite().all()
        assert turns is None or not turns.any()
        v, cu_q, cu_k = read(v), read(cu_q), read(cu_k)
        for rows_q, rows_k, length in parts(q, k, cu_q, cu_k, used):
            query, grad, delta = q[rows_q], dout[rows_q], dpsum[rows_q].double().mT
            key, value = (loaded(x, rows_k, length) for x in (k, v))
            found = scores(query, key, scale, causal, left, right, softcap)
            part_lse = lse[rows_q[0]] if cu_q is None else lse[:, rows_q]
            grad_q, *grads = one_sequence.backward(
                found, part_lse, delta, query, key, value, grad, scale, softcap
            )
            dq_accum[rows_q] += grad_q.float()
            for result, part in zip((dk, dv), grads, strict=True):
                if shared:
                    result[rows_k][:length] += part.to(result.dtype)
                else:
                    result[rows_k][:length] = part.to(result.dtype)
        if turns is not None:
            turns += 1

    return run


def convert_kernel(accum, result, cu_seqlens, used, of_sinks=None):
    for rows, _, length in parts(result, result, cu_seqlens, cu_seqlens, used):
        result[rows][:length] = accum[rows][:length].to(result.dtype)
    if of_sinks is not None:
        assert type(of_sinks) is SinkTensors
        weights = (read(of_sinks.sinks).double()[:, None] - of_sinks.lse.double()).exp()
        of_sinks.gradient.copy_(-(weights * of_sinks.dpsum.double().mT).sum(-1))


# The package


class Package:
    """A fake `flash_attn.cute.interface`.

    `calls` keeps what its functions were called with, `keywords` under which names they were given it, and
    `launched` the name of every kernel that ran.
    `pause` is called inside the package, `at_end` at the end of a forward with its output, and `on_launch` at
    every launch with the kernel's name. Kernels of the functions in `hidden` aren't launched through caches.
    With `bakes_lengths` the kernels are given the offsets as numbers, with `bakes_sinks` the sinks, with
    `bakes_addresses` the address of the value.
    """

    def __init__(self, extra=3, extra_backward=0):
        self.calls = []
        self.keywords = {name: set() for name in fa4_package.KEYWORDS}
        self.launched = []
        self.inside = 0
        self.most_inside = 0
        self.pause = lambda: None
        self.at_end = lambda out: None
        self.on_launch = lambda name: None
        self.extra = (None,) * extra
        self.extra_backward = (None,) * extra_backward
        self.fails = None
        self.hidden = set()
        self.bakes_lengths = self.bakes_addresses = self.bakes_sinks = False

    def module(self, **replaced):
        module = types.ModuleType("flash_attn.cute.interface")
        for function in self.functions():
            function.compile_cache = UserDict()
            setattr(module, function.__name__, function)
        module.flash_attn_fwd = module._flash_attn_fwd  # under a second name
        module.maybe_contiguous = lambda tensor, align_bytes=16: tensor
        for name, function in replaced.items():
            setattr(module, name, function)
        return module

    def called(self, direction):
        """Return a decorator that keeps what a function of the package is called with."""

        def decorate(function):
            signature = inspect.signature(function)

            @functools.wraps(function)
            def run(**given):
                bound = signature.bind(**given)
                bound.apply_defaults()
                self.keywords[function.__name__].update(given)
                self.calls.append((direction, dict(bound.arguments)))
                self.inside += 1
                self.most_inside = max(self.most_inside, self.inside)
                try:
                    self.pause()
                    if self.fails is not None:
                        raise self.fails
                    return function(**given)
                finally:
                    self.inside -= 1

            return run

        return decorate

    def offsets(self, tensor):
        return self.numbers(tensor, self.bakes_lengths)

    def sinks(self, tensor):
        return self.numbers(tensor, self.bakes_sinks)

    def numbers(self, tensor, baked):
        if tensor is None or not baked:
            return tensor
        with _disable_current_modes():
            return Baked(numbers=tuple(tensor.tolist()))

    def value(self, tensor):
        if not self.bakes_addresses:
            return tensor.detach()
        with _disable_current_modes():
            by_address[tensor.data_ptr()] = tensor.detach()
        return Baked(address=tensor.data_ptr())

    def launch(self, function, key, compiled, *arguments):
        """Launch a kernel as the package does: through the cache, compiled where it isn't there."""

        def run(*given):
            self.on_launch(function.__name__)
            self.launched.append(function.__name__)
            compiled(*given)

        if function.__name__ in self.hidden:
            with _disable_current_modes():
                return run(*arguments)
        if key not in function.compile_cache:
            function.compile_cache[key] = run
        function.compile_cache[key](*arguments)

    def functions(self):
        # fmt: off
        @self.called("forward")
        def _flash_attn_fwd(
            q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None, max_seqlen_q=None,
            max_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
            window_size_left=None, window_size_right=None, num_splits=1, return_lse=False, out=None, lse=None,
            learnable_sink=None, score_mod=None, tile_mn=None,
        ):
            # 0.0 would divide by it.
            assert softcap != 0.0 and num_splits == 1 and return_lse
            if score_mod is not None:
                assert softcap is None  # as a function or as a number, not both
                softcap, factor = softcap_of(score_mod)
                softmax_scale *= factor
            varlen = cu_seqlens_q is not None
            shape = (q.shape[1], q.shape[0]) if varlen else (q.shape[0], q.shape[2], q.shape[1])
            if out is None:
                out = unwritten(torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype))
            if lse is None:
                lse = unwritten(torch.empty(shape, dtype=torch.float32))
            assert lse.shape == shape and lse.dtype == torch.float32
            many = varlen and len(cu_seqlens_q) > MANY + 1
            tiles = _compute_tile_cumsum(cu_seqlens_q) if many else None
            self.launch(
                _flash_attn_fwd, (q.dtype, causal, varlen, softcap), forward_kernel(causal, softcap),
                q.detach(), k.detach(), self.value(v), out.detach(), lse, softmax_scale,
                self.offsets(cu_seqlens_q), self.offsets(cu_seqlens_k), seqused_k, page_table,
                window_size_left, window_size_right, self.sinks(learnable_sink), AuxData(), tiles,
            )
            self.at_end(out)
            return (out, lse, *self.extra)

        @self.called("backward")
        def _flash_attn_bwd(
            q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
            window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None, max_seqlen_q=None,
            max_seqlen_k=None, deterministic=False, dlse=None, dq=None, dk=None, dv=None, learnable_sink=None,
            score_mod=None, score_mod_bwd=None,
        ):
            assert softcap is not None  # None crashes
            assert (score_mod is None) is (score_mod_bwd is None)
            if score_mod is not None:
                assert softcap == 0.0
                softcap, factor = softcap_of(score_mod, score_mod_bwd)
                softmax_scale *= factor
            dq, dk, dv = (
                unwritten(torch.empty_like(x)) if given is None else given
                for x, given in ((q, dq), (k, dk), (v, dv))
            )
            dq_accum, dpsum = (
                unwritten(torch.empty(shape, dtype=torch.float32)) for shape in (q.shape, q.shape[:-1])
            )
            lse_copy = unwritten(torch.empty(lse.shape, dtype=torch.float32))
            shared = q.shape[-2] > k.shape[-2]
            sums = [torch.zeros(x.shape, dtype=torch.float32) if shared else None for x in (k, v)]
            turns = torch.zeros(q.shape[-2], dtype=torch.int32) if deterministic else None
            _bwd_preprocess(out, dout, dpsum, lse, lse_copy, dq_accum, dlse)
            self.launch(
                _flash_attn_bwd, (q.dtype, causal, shared, softcap), backward_kernel(causal, shared, softcap),
                q.detach(), k.detach(), self.value(v), dout, lse_copy, dpsum, dq_accum,
                sums[0] if shared else dk, sums[1] if shared else dv, softmax_scale,
                self.offsets(cu_seqlens_q), self.offsets(cu_seqlens_k), seqused_k, window_size_left,
                window_size_right, turns, AuxData(),
            )
            of_sinks = None
            if learnable_sink is not None:
                dsink = unwritten(torch.empty_like(learnable_sink))
                of_sinks = SinkTensors(dpsum, lse, self.sinks(learnable_sink), dsink)
            _bwd_postprocess_convert(dq_accum, dq, cu_seqlens_q, None, of_sinks)
            for total, result in zip(sums, (dk, dv), strict=True):
                if shared:
                    _bwd_postprocess_convert(total, result, cu_seqlens_k, seqused_k)
            if learnable_sink is not None:
                return dq, dk, dv, dsink
            return (dq, dk, dv, *self.extra_backward)
        # fmt: on

        def _bwd_preprocess(*tensors):
            self.launch(_bwd_preprocess, (), preprocess_kernel, *tensors)

        def _bwd_postprocess_convert(*tensors):
            self.launch(_bwd_postprocess_convert, (), convert_kernel, *tensors)

        def _compute_tile_cumsum(cu_seqlens):
            total = torch.empty(len(cu_seqlens), dtype=torch.int32)
            self.launch(_compute_tile_cumsum, (), tile_cumsum, unwritten(total), cu_seqlens)
            return total

        return (
            *(_flash_attn_fwd, _flash_attn_bwd),
            *(_bwd_preprocess, _bwd_postprocess_convert, _compute_tile_cumsum),
        )


def install(monkeypatch, package=None, version="4.0.0b36", **replaced):
    """Put a fake package in place of flash-attn-4 and return it."""
    package = package or Package()
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", package.module(**replaced))
    monkeypatch.setattr(fa4_package, "version", lambda name: version)
    return package


def forget(monkeypatch):
    """Have no kind run so far, and no CUDA graph captured, which a torch without CUDA can't say."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(compiled_kinds, "have_run", set())


def count_recorded(package):
    """Return a list that grows by one with each call that is recorded."""
    recorded = []

    def look():
        cache = sys.modules["flash_attn.cute.interface"]._flash_attn_fwd.compile_cache
        if type(cache).__name__ == "_RecordingCache":
            recorded.append(True)

    package.pause = look
    return recorded


# Which directions enter the package's Python.
BOTH, NEITHER = ["forward", "backward"], []
CONFIRMED_SOON = [BOTH, BOTH, BOTH, NEITHER]


def offered(case):
    """Return what the backend's own limits leave of a case: nothing, the forward, or both."""
    spec = case.spec(Device("cuda", (9, 0)))
    if BACKEND.forward.unsupported(spec) or BACKEND.refuses(spec):
        return ()
    return ("forward",) if BACKEND.backward.unsupported(spec) else ("forward", "backward")


def dense(
    len_q=33, len_k=33, heads=4, heads_k=None, dim=16, dim_v=None, batch=2, dtype=torch.bfloat16, seed=0
):
    """Return query, key, value and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    heads_k, dim_v = heads_k or heads, dim_v or dim
    shapes = ((len_q, heads, dim), (len_k, heads_k, dim), (len_k, heads_k, dim_v), (len_q, heads, dim_v))
    return [torch.randn(batch, *shape, generator=generator).to(dtype) for shape in shapes]


def call_of(query, key, scale=0.25, **options):
    return Call(scale, query.shape[1], key.shape[1], **options)


def dense_call(seed=0, **options):
    """Return query, key, value, gradient and call; what isn't an option of the call is of `dense`."""
    of_call = {name: options.pop(name) for name in Call._fields if name in options}
    tensors = dense(**options, seed=seed)
    return *tensors, call_of(*tensors[:2], **of_call)


def packed(lengths, lengths_k=None, seed=0, **options):
    """Return query, key, value, gradient and call of a packed batch; equal lengths share their offsets."""
    lengths_k = lengths_k or lengths
    tensors = [x[0] for x in dense(sum(lengths), sum(lengths_k), batch=1, seed=seed)]
    cu_seqlens_q = torch.tensor([0, *lengths]).cumsum(0).int()
    cu_seqlens_k = cu_seqlens_q if lengths_k is lengths else torch.tensor([0, *lengths_k]).cumsum(0).int()
    return *tensors, Call(0.25, 64, 64, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)


def both(kernels, query, key, value, grad, call):
    """Run forward and backward; return output, LSE and the three gradients."""
    out, lse = kernels.forward(query, key, value, call)
    return out, lse, *kernels.backward(grad, query, key, value, out, lse, call)


def true_results(query, key, value, grad, call):
    """Return output, LSE and the three gradients in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (query, key, value)]
    options = {"window": call.window, "scale": call.scale}
    with torch.enable_grad():
        if call.varlen:
            out, lse = truth.varlen(*leaves, call.cu_seqlens_q, call.cu_seqlens_k, **options)
        else:
            parts = [truth.attention(*each, **options) for each in zip(*leaves, strict=True)]
            out, lse = (torch.stack(x) for x in zip(*parts, strict=True))
        return out, lse, *torch.autograd.grad(out, leaves, grad.double())


def entered(kernels, package, query, key, value, grad, call):
    """Run both directions, compare with float64, and return which of them entered the package's Python."""
    package.calls.clear()
    package.launched.clear()
    got = both(kernels, query, key, value, grad, call)
    for one, true in zip(got, true_results(query, key, value, grad, call), strict=True):
        truth.assert_near(one, true, torch.bfloat16)
    return list(dict.fromkeys(name for name, _ in package.calls))


def entered_by_round(kernels, package, rounds, **options):
    """Return `entered` of calls of one description, each with other tensors."""
    return [entered(kernels, package, *dense_call(seed, **options)) for seed in range(rounds)]

"""A stand-in for flash-attn-4 on a CPU: the parameters that are passed, compile caches, and float64.

As in 4.0.0b36 on Hopper, its functions allocate what they aren't given and launch compiled functions, which
they keep in caches by keys that hold no length, but whether it fits into a tile; memory that no kernel writes
holds arbitrary values. Only the kernels compute, so a launch that is left out, or given the wrong tensor,
shows in the values. attnreg tries its own launches at the first call of a kind, and takes them later.
"""

import functools
import inspect
import sys
import types
from collections import UserDict

import torch
from support import fake_fa4_kernels, fake_fa4_masks, truth
from support.fake_fa4_kernels import (
    AuxData,
    SinkTensors,
    backward_kernel,
    convert_kernel,
    forward_kernel,
    preprocess_kernel,
    softcap_of,
    tile_cumsum,
    unwritten,
)

from attnreg import Call, Device
from attnreg.backends.fa4 import BACKEND, compiled_kinds, ranges
from attnreg.backends.fa4 import package as fa4_package

# The package


def watcher():
    """Return what watches the package's caches, None while nothing does."""
    cache = sys.modules["flash_attn.cute.interface"]._flash_attn_fwd.compile_cache
    return cache._watcher if type(cache).__name__ == "_WatchedCache" else None


def rehearsed():
    """Whether a call of the package launches nothing."""
    return watcher() is not None and not watcher().launches


class Package:
    """A fake `flash_attn.cute.interface`.

    `calls` keeps what its functions were called with, `rehearsals` that of calls that launch nothing,
    `keywords` under which names they were given it, and `launched` the name of every kernel that ran.
    `pause` is called inside the package, `at_end` at the end of a forward with its output, and `on_launch` at
    every launch with the kernel's name. Kernels of the functions in `hidden` aren't launched through caches.
    What `compiled_in` returns of a kernel's name and its arguments is one more part of its key, and what
    `given` returns of these is what it is given.
    """

    def __init__(self, extra=3, extra_backward=0):
        self.calls, self.rehearsals = [], []
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
        self.compiled_in = lambda name, tensors: None
        self.given = lambda name, arguments: arguments

    def module(self, **replaced):
        module = types.ModuleType("flash_attn.cute.interface")
        for function in self.functions():
            function.compile_cache = UserDict()
            setattr(module, function.__name__, function)
        module.flash_attn_fwd = module._flash_attn_fwd  # under a second name
        module.AuxData, module.LearnableSinkBwdTensors = AuxData, SinkTensors
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
                calls = self.rehearsals if rehearsed() else self.calls
                calls.append((direction, dict(bound.arguments)))
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

    def launch(self, function, key, compiled, *arguments):
        """Launch a kernel as the package does: through the cache, compiled where it isn't there."""

        def run(*given):
            self.on_launch(function.__name__)
            self.launched.append(function.__name__)
            compiled(*given)

        arguments = self.given(function.__name__, arguments)
        if function.__name__ in self.hidden:
            return run(*arguments)
        key = *key, self.compiled_in(function.__name__, arguments)
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
            learnable_sink=None, score_mod=None, tile_mn=None, mask_mod=None, aux_tensors=None,
            block_sparse_tensors=None, pack_gqa=None,
        ):
            # 0.0 would divide by it.
            assert softcap != 0.0 and num_splits == 1 and return_lse
            factor = 1.0
            if score_mod is not None:
                assert softcap is None  # as a function or as a number, not both
                softcap, factor = softcap_of(score_mod)
            varlen = cu_seqlens_q is not None
            shape = (q.shape[1], q.shape[0]) if varlen else (q.shape[0], q.shape[2], q.shape[1])
            if out is None:
                out = unwritten(torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype))
            if lse is None:
                lse = unwritten(torch.empty(shape, dtype=torch.float32))
            assert lse.shape == shape and lse.dtype == torch.float32
            if page_table is not None:
                assert cu_seqlens_k is None and page_table.dtype == torch.int32
                assert page_table.shape[0] == len(cu_seqlens_q) - 1 and page_table.stride(-1) == 1
                assert k.shape[:3] == v.shape[:3]
            batch, group = len(cu_seqlens_q) - 1 if varlen else 0, q.shape[-2] // k.shape[-2]
            bounded = causal or not window_size_left is window_size_right is None
            others = cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, bounded, learnable_sink, pack_gqa
            table = fake_fa4_masks.checked(mask_mod, aux_tensors, block_sparse_tensors, q, k, others)
            tile = tile_mn[0] if tile_mn else 192 if q.shape[-1] <= 96 and table is None else 128
            fits = table is not None or max_seqlen_q * group <= tile
            tiles = None
            if batch > fake_fa4_kernels.MANY:
                tiles, _ = _compute_tile_cumsum(
                    cu_seqlens=cu_seqlens_q, tile_size=tile, qhead_per_kvhead=group, pack_gqa=group > 1
                )
                _compute_blocks_to_batch(tiles)
            key = q.dtype, q.shape[-1], v.shape[-1], group, causal, bounded, varlen, softcap, factor, fits
            key = *key, tiles is None, table and (len(aux_tensors[0]), q.shape[-2] == 1)
            key = *key, seqused_k is None, page_table is None
            self.launch(
                _flash_attn_fwd, (*key, strides_of(q, k, v)),
                forward_kernel(causal, softcap, factor, tile, mask_mod),
                q.detach(), k.detach(), v.detach(), out.detach(), lse, softmax_scale, cu_seqlens_q,
                cu_seqlens_k, None, seqused_k, page_table, window_size_left, window_size_right,
                learnable_sink, table, AuxData(aux_tensors), tiles, None,
            )
            self.at_end(out)
            return (out, lse, *self.extra)

        @self.called("backward")
        def _flash_attn_bwd(
            q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
            window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None, max_seqlen_q=None,
            max_seqlen_k=None, deterministic=False, dlse=None, dq=None, dk=None, dv=None, learnable_sink=None,
            score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, block_sparse_tensors=None,
        ):
            assert softcap is not None  # None crashes
            factor = 1.0
            assert (score_mod is None) is (score_mod_bwd is None)
            if score_mod is not None:
                assert softcap == 0.0
                softcap, factor = softcap_of(score_mod, score_mod_bwd)
            dq, dk, dv = (
                unwritten(torch.empty_like(x)) if given is None else given
                for x, given in ((q, dq), (k, dk), (v, dv))
            )
            heads, heads_k, dim = q.shape[-2], k.shape[-2], q.shape[-1]
            shared, bounded = heads > heads_k, causal or not window_size_left is window_size_right is None
            others = cu_seqlens_q, cu_seqlens_k, seqused_k, bounded, deterministic, learnable_sink
            table = fake_fa4_masks.checked(mask_mod, aux_tensors, block_sparse_tensors, q, k, others)
            if table is not None:
                max_seqlen_q, max_seqlen_k = q.shape[1], k.shape[1]
            rows = 128 if dim <= 64 else 64 if dim <= 96 or bounded or table is not None else 80
            columns = 128
            if dim > 128:
                rows, columns = 64, 96 if dim <= 192 else 48
            if cu_seqlens_q is None:
                batch, padded, padded_k = len(q), *((n + t - 1) // t * t for n, t in (
                    (q.shape[1], rows), (k.shape[1], columns)))
                lead, lead_k, turning = (batch, heads), (batch, heads_k), batch
            else:
                batch, lead, lead_k = 0, (heads,), (heads_k,)
                padded, padded_k = ((len(x) + len(ends) * t - 1) // t * t for x, ends, t in (
                    (q, cu_seqlens_q, rows), (k, cu_seqlens_k, columns)))
                turning = len(cu_seqlens_q) - 1
            many = cu_seqlens_q is not None and turning > fake_fa4_kernels.MANY
            step = 64 if dim > 128 else 32
            widths = [-(-x.shape[-1] // step) * step for x in (q, v)]
            dq_sums, dpsum, lse_log2 = (
                unwritten(torch.empty(*lead, n, dtype=torch.float32))
                for n in (padded * widths[0], padded, padded)
            )
            sums = [
                torch.zeros(*lead_k, padded_k * width, dtype=torch.float32) if shared else None
                for width in widths
            ]
            turns = [None] * 3
            if deterministic:
                tiles = -(-max_seqlen_q // rows), -(-max_seqlen_k // columns)
                sizes = (heads, tiles[0], 1), (heads_k, tiles[1], 2), (heads_k, tiles[1], 2)
                turns = [
                    torch.zeros(turning, *size, dtype=torch.int32) if shared or not n else None
                    for n, size in enumerate(sizes)
                ]
            tiles_q = tiles_k = None
            if many:
                tiles_q, _ = _compute_tile_cumsum(cu_seqlens=cu_seqlens_q, tile_size=rows)
                tiles_k, _ = _compute_tile_cumsum(cu_seqlens=cu_seqlens_k, tile_size=columns)
            _bwd_preprocess(
                out, dout, dpsum, lse, lse_log2, dq_sums, cu_seqlens_q, None, dlse, rows, tiles_q
            )
            key = q.dtype, dim, shared, causal, bounded, softcap, factor, deterministic, many
            key = *key, cu_seqlens_q is None, table and (len(aux_tensors[0]), q.shape[-2] == 1)
            fits = max_seqlen_q <= rows, max_seqlen_k <= columns
            self.launch(
                _flash_attn_bwd, (*key, fits, strides_of(q, k, v, dout)),
                backward_kernel(causal, shared, softcap, factor, deterministic, (rows, columns), mask_mod),
                q.detach(), k.detach(), v.detach(), dout, lse_log2, dpsum, dq_sums,
                sums[0] if shared else dk, sums[1] if shared else dv, softmax_scale, cu_seqlens_q,
                cu_seqlens_k, None, seqused_k, window_size_left, window_size_right, *turns,
                AuxData(aux_tensors), table, tiles_k,
            )
            of_sinks = None
            if learnable_sink is not None:
                dsink = unwritten(torch.empty_like(learnable_sink))
                of_sinks = SinkTensors(dpsum, lse, learnable_sink, dsink)
            scale = softmax_scale
            _bwd_postprocess_convert(dq_sums, dq, scale, cu_seqlens_q, None, of_sinks, rows, tiles_q, dim)
            if shared:
                for total, result, factor in zip(sums, (dk, dv), (scale, 1.0), strict=True):
                    _bwd_postprocess_convert(
                        total, result, factor, cu_seqlens_k, seqused_k, None, columns, tiles_k, dim
                    )
            if learnable_sink is not None:
                return dq, dk, dv, dsink
            return (dq, dk, dv, *self.extra_backward)
        # fmt: on

        def _bwd_preprocess(out, dout, dpsum, lse, lse_log2, dq_sums, cu_seqlens, used, dlse, tile, tiles):
            key = out.dtype, out.shape[-1], tile, cu_seqlens is None, dlse is None, tiles is None
            tensors = out, dout, dpsum, lse, lse_log2, dq_sums, cu_seqlens, used, dlse
            kernel = preprocess_kernel(tile)
            self.launch(_bwd_preprocess, key, kernel, *tensors, None, None, 1.0, tiles, None)

        def _bwd_postprocess_convert(sums, result, scale, cu_seqlens, used, of_sinks, tile, tiles, dim):
            key = result.dtype, result.shape[-1], dim, tile, cu_seqlens is None, tiles is None
            key = *key, of_sinks and of_sinks.sinks.dtype
            given = sums, result, scale, cu_seqlens, used, of_sinks, tiles
            self.launch(_bwd_postprocess_convert, key, convert_kernel(tile, dim), *given)

        def _compute_tile_cumsum(*, cu_seqlens, tile_size, qhead_per_kvhead=1, pack_gqa=False):
            total, factor = (
                torch.empty(len(cu_seqlens), dtype=torch.int32),
                qhead_per_kvhead if pack_gqa else 1,
            )
            key, kernel = (tile_size, factor), tile_cumsum(tile_size, factor)
            given = unwritten(total), None, cu_seqlens, None, None, None
            self.launch(_compute_tile_cumsum, key, kernel, *given)
            return total, None

        def _compute_blocks_to_batch(tiles):
            self.launch(_compute_blocks_to_batch, (), lambda *given: None, tiles, torch.empty(1))

        return (
            *(_flash_attn_fwd, _flash_attn_bwd, _bwd_preprocess, _bwd_postprocess_convert),
            *(_compute_tile_cumsum, _compute_blocks_to_batch),
        )


def strides_of(*tensors):
    """Return which dimensions of tensors have stride 0: that is compiled in."""
    return tuple(tuple(step == 0 for step in x.stride()) for x in tensors)


def install(monkeypatch, package=None, version="4.0.0b36", **replaced):
    """Put a fake package in place of flash-attn-4 and return it."""
    package = package or Package()
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", package.module(**replaced))
    for name, module in fake_fa4_masks.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    ranges._in_ranges.cache_clear()
    monkeypatch.setattr(fa4_package, "version", lambda name: version)
    return package


def forget(monkeypatch):
    """Have no kind run so far, and no CUDA graph captured, which a torch without CUDA can't say."""
    compiled_kinds.cuts.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(compiled_kinds, "have_run", set())


def count_tried(package):
    """Return a list that grows by one with each call of the package whose kind is tried."""
    tried = []

    def look():
        if watcher() is not None and watcher().launches:
            tried.append(True)

    package.pause = look
    return tried


# Which directions enter the package's Python.
BOTH, NEITHER = ["forward", "backward"], []


def offered(case):
    """Return what the backend's own limits leave of a case: nothing, the forward, or both."""
    spec = case.spec(Device("cuda", (9, 0)))
    if BACKEND.forward.unsupported(spec) or tuple(BACKEND.refuses(spec)):
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


def entered(kernels, package, query, key, value, grad, call):
    """Run both directions, compare with float64, and return which of them entered the package's Python."""
    package.calls.clear()
    package.launched.clear()
    got = both(kernels, query, key, value, grad, call)
    for one, true in zip(got, truth.of_call(query, key, value, grad, call), strict=True):
        truth.assert_near(one, true, torch.bfloat16)
    return list(dict.fromkeys(name for name, _ in package.calls))


def entered_by_round(kernels, package, rounds, **options):
    """Return `entered` of calls of one kind, each with other tensors."""
    return [entered(kernels, package, *dense_call(seed, **options)) for seed in range(rounds)]

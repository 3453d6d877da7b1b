"""FA4: FlashAttention 4, the CuTe kernels of the package flash-attn-4 for Hopper and Blackwell.

This module declares what FA4 can run. Read `adapter` next: it maps the contract's calls to the package's.
`package` has the import and the releases, `launches` the launches that skip the package's Python. README.md
has the reasons. The package is imported when the backend loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnreg.backends.fa4 import compiled_kinds
from attnreg.backends.fa4.adapter import load
from attnreg.backends.fa4.package import TESTED_RELEASES, installed, unavailable
from attnreg.core.contract.backend import Backend
from attnreg.core.contract.capabilities import GRID, Capabilities, Range
from attnreg.core.contract.lengths import Cut, cut_of_decoding
from attnreg.core.contract.spec import AttentionSpec

# Unequal head dims of query and value whose backward compiles for Hopper and is right. With (128, 64) some
# packed gradients of 4.0.0b36 on an H200 differ from run to run.
UNEQUAL = ((192, 128), (256, 128))

# In decoding FA2 splits the keys of a lone query whose key head is shared, FA4 doesn't. That pays for long
# caches and few parts: sequences times key heads. With fewer parts than the first number FA4 is faster for
# caches up to the second number of tokens, in a CUDA graph up to the third (`docs/results/decoding.md`).
LONGEST_CACHES = ((32, 4096, 0), (64, 4096, 1024), (128, 8192, 4096))

# Head dims of 8 or 16 modulo 32 below 128, whose gradients 4.0.0b36 gets wrong on an H200.
WRONG_GRADIENTS = (8, 16, 40, 48, 72, 80, 104, 112)

# From flash_attn/cute/interface.py of 4.0.0b36: `_validate_head_dims` and the assertions of both
# functions. It has no backward for compute capability 8.x, where FA2's forward is faster.
_BOTH: dict[str, Any] = {
    "devices": ("cuda",),
    "dtypes": ("float16", "bfloat16"),
    "compute_capability": ((9, 0), (12, 1)),
    "head_dim": Range(8, 256, 8),
    "head_dim_v": Range(8, 256, 8),
    **dict.fromkeys(("varlen", "gqa", "causal", "window", "seqused_k", "num_splits"), True),
    **dict.fromkeys(("softcap", "grad_lse", "sinks", "deterministic", "batch_invariant", "capture"), True),
    "key_ranges": True,
    "ranges": Range(0, 8),  # with which kernels compare each key: more take longer to compile
}


def _refuses(spec: AttentionSpec) -> Iterator[str]:
    major = _major(spec)
    dims = (spec.head_dim, spec.head_dim_v)
    if spec.num_splits not in (None, 1):  # a backward's spec has None
        yield f"num_splits must be 1 or None, got {spec.num_splits}"
    if not spec.varlen and spec.batch > GRID:
        yield f"batch of dense tensors must be at most {GRID}, got {spec.batch}"
    if not spec.varlen and spec.heads_q > GRID:
        yield f"query heads of dense tensors must be at most {GRID}, got {spec.heads_q}"
    if major in (10, 11) and max(dims) > 128 and dims not in ((192, 128), (256, 256)):
        yield f"head dims must be up to 128, (192, 128) or (256, 256) on sm_10x and sm_11x, got {dims}"
    if major == 12 and max(dims) > 128:
        yield f"head dims must be up to 128 on sm_12x, got {dims}"
    # 4.0.0b36 on an H200: an illegal memory access, with (8, 96), (40, 128), (64, 192) and others.
    if major == 9 and dims[1] > dims[0]:
        yield f"head_dim of the value must be at most the query's, {dims[0]}, got {dims[1]}"

    if spec.sinks:
        yield from _with_sinks(spec)
    if spec.key_ranges:
        yield from _with_ranges(spec)

    # tests/gpu/test_gpu_batch_invariant.py got equal bits from these calls with 4.0.0b36 on an H200, and
    # tries no others.
    if spec.batch_invariant:
        yield from _untried_batch_invariant(spec)


def _untried_batch_invariant(spec: AttentionSpec) -> Iterator[str]:
    if _major(spec) != 9:
        yield f"compute capability must be 9.0 to be batch-invariant, {_got(spec)}"
    options = {
        "seqused_k": spec.seqused_k,
        "block_table": spec.page_size is not None,
        "key_ranges": spec.key_ranges,
    }
    for name in (name for name, is_on in options.items() if is_on):
        yield f"{name} must be None in batch-invariant calls: no test has tried it there"
    if spec.softcap:
        yield f"softcap must be 0 in batch-invariant calls, got {spec.softcap}: no test has tried it there"


def _with_sinks(spec: AttentionSpec) -> Iterator[str]:
    """Yield why the package doesn't count the sinks of a call; attnreg then rescales the kernel's results."""
    if not _has_tested_release(spec):
        yield f"sinks must be None but for releases {', '.join(TESTED_RELEASES)}, got {installed()}"
    if _major(spec) == 12:
        yield "sinks must be None on sm_12x: no gradient of them"
    if _major(spec) in (10, 11) and spec.head_dim == 256:
        yield "sinks must be None with head_dim 256 on sm_10x and sm_11x: no gradient of them"
    if spec.softcap:
        yield f"sinks must be None with a softcap, which no test has tried, got {spec.softcap}"
    if spec.key_ranges:
        yield "sinks must be None with key_ranges: a row may see no key"


def _with_ranges(spec: AttentionSpec) -> Iterator[str]:
    """Yield why the package can't run a call with `key_ranges`; README.md has the reasons."""
    dims = spec.head_dim, spec.head_dim_v
    if _major(spec) != 9:
        yield f"compute capability must be 9.0 with key_ranges, {_got(spec)}"
    elif not _has_tested_release(spec):
        yield f"key_ranges must be None but for releases {', '.join(TESTED_RELEASES)}, got {installed()}"
    if dims[0] != dims[1] or dims[0] > 128:
        yield f"head dims must be equal and up to 128 with key_ranges, got {dims}"
    if spec.heads_q > GRID:
        yield f"query heads with key_ranges must be at most {GRID}, got {spec.heads_q}"
    if spec.seqused_k:
        yield "seqused_k must be None with key_ranges, which no test has tried"
    if spec.page_size is not None:
        yield "block_table must be None with key_ranges"
    if spec.softcap:
        yield f"softcap must be 0 with key_ranges, which no test has tried, got {spec.softcap}"


def _refuses_forward(spec: AttentionSpec) -> Iterator[str]:
    yield from _pages(spec)
    yield from _not_yet_compiled(spec, "forward")


def _refuses_backward(spec: AttentionSpec) -> Iterator[str]:
    yield from _gradients(spec)
    yield from _not_yet_compiled(spec, "backward")


def _pages(spec: AttentionSpec) -> Iterator[str]:
    if spec.page_size is None:
        return
    if _major(spec) == 12:
        yield "block_table must be None on sm_12x: no paged key-value cache"
    if reason := compiled_kinds.why_no_pages(_major(spec), (spec.head_dim, spec.head_dim_v), _key_tile(spec)):
        yield reason
    # Other sizes were tried on Hopper, with these releases.
    elif spec.page_size not in range(16, 257, 16) and not (_major(spec) == 9 and _has_tested_release(spec)):
        but_for = f"but for sm_9x and releases {', '.join(TESTED_RELEASES)}"
        yield f"page size must be 16 to 256 in steps of 16 {but_for}, got {spec.page_size}"
    # Pages of a tile's size are loaded whole, unwritten keys included. A NaN in these would spread, and a
    # pool of pages can't be copied at each call.
    elif spec.page_size == _key_tile(spec):
        yield f"page size must not be that of a key tile, got {spec.page_size}"


def _gradients(spec: AttentionSpec) -> Iterator[str]:
    major, dims = _major(spec), (spec.head_dim, spec.head_dim_v)
    if major == 9 and dims[0] in WRONG_GRADIENTS:
        wrong = ", ".join(map(str, WRONG_GRADIENTS))
        yield f"head_dim must not be {wrong}, whose gradients are wrong, got {dims[0]}"
    if major == 12 and spec.deterministic:
        yield "not deterministic on sm_12x, and deterministic algorithms are on"
    if spec.key_ranges and spec.deterministic:
        yield "not deterministic with key_ranges, and deterministic algorithms are on"
    if major == 9 and dims[0] > dims[1] and spec.heads_q != spec.heads_k:
        yield f"head_dim of the value must be the query's where heads are shared, {dims[0]}, got {dims[1]}"
    elif major == 9 and dims[0] > dims[1] and dims not in UNEQUAL:
        yield f"head dims that differ must be one of {', '.join(map(str, UNEQUAL))}, got {dims}"


def _not_yet_compiled(spec: AttentionSpec, direction: str) -> Iterator[str]:
    # A simulated GPU has no record of kinds that have run.
    if not spec.capturing or spec.device.simulated:
        return
    family = compiled_kinds.family_of_spec(direction, spec)
    of_lengths = family.class_of(*compiled_kinds.lengths_of_spec(spec))
    # A spec doesn't say whether tensors are aligned, without which keys aren't read as pages.
    kinds = {(each, of_lengths) for each in (family, family._replace(as_pages=False))}
    is_few = spec.max_q <= compiled_kinds.FEW_QUERIES
    if direction == "forward" and is_few and compiled_kinds.may_count_keys(spec):
        kinds.add((compiled_kinds.family_of_spec(direction, spec.but(seqused_k=True)), of_lengths))
    if kinds.isdisjoint(compiled_kinds.have_run):
        yield "this kind of call needs to run once before it can be recorded in a CUDA graph"


def _has_tested_release(spec: AttentionSpec) -> bool:
    """Whether the release there is tested; of a simulated device none is known."""
    return spec.device.simulated or installed() in TESTED_RELEASES


def _got(spec: AttentionSpec) -> str:
    return f"got {'.'.join(map(str, spec.device.capability or ('none',)))}"


def _major(spec: AttentionSpec) -> int:
    return spec.device.capability[0] if spec.device.capability else 0


def _key_tile(spec: AttentionSpec) -> int:
    """Return the number of keys that the forward loads at once; 128 except on Hopper."""
    if _major(spec) != 9:
        return 128
    return compiled_kinds.key_tile_of(spec.head_dim, spec.head_dim_v, spec.window)


def _priority(spec: AttentionSpec) -> int:
    """Return the priority: for decoding before FA2, unless values are copied first or splitting pays."""
    if spec.page_size is not None and _splitting_pays(spec):
        return 8  # behind FA2, which splits keys, where it takes such pages
    if not spec.decodes:
        return 30
    return 50 if compiled_kinds.spec_reads_as_pages(spec) and not _splitting_pays(spec) else 15


def _splitting_pays(spec: AttentionSpec) -> bool:
    """Whether a call decodes faster on FA2, which splits the keys."""
    if spec.max_q > 1 or spec.heads_q == spec.heads_k:
        return False
    for parts, longest, longest_in_graph in LONGEST_CACHES:
        if spec.batch * spec.heads_k < parts:
            return spec.max_k > (longest_in_graph if spec.capturing else longest)
    return False


def _cuts(spec: AttentionSpec) -> Iterator[Cut]:
    """Yield the lengths at which this module's reasons or priority change for calls of the spec's kind."""
    if not spec.varlen:
        yield Cut.of("batch", at=GRID + 1)
    if compiled_kinds.may_count_keys(spec):
        yield Cut.of("max_q", at=compiled_kinds.FEW_QUERIES + 1)
    if spec.seqused_k:
        yield from (Cut.of("max_q", at=length) for length in (2, cut_of_decoding(spec)))
        for parts, *longest in LONGEST_CACHES:
            yield Cut.of("batch", at=-(-parts // max(spec.heads_k, 1)))
            yield from (Cut.of("max_k", at=length + 1) for length in longest)


BACKEND = Backend(
    name="FA4",
    forward=Capabilities(**_BOTH, page_size=Range(1), refuses=_refuses_forward),
    backward=Capabilities(**_BOTH, refuses=_refuses_backward),
    load=load,
    unavailable=unavailable,
    version=installed,
    refuses=_refuses,
    install="pip install 'attnreg[fa4]'",
    # The fastest of packed batches on an H200, forward and backward (docs/benchmarks.md).
    priority=_priority,
    cuts=_cuts,
    compiles=True,
)

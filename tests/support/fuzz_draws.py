"""The random calls of `fuzz.py`: what is drawn from a seed and a number, and what follows at each repeat."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.tools.measure.cases import LAYOUTS, Case
from attnreg.tools.measure.inputs import Inputs

THREADS = 4
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 97, 127, 128, 129, 193, 255, 257, 320)
DIMS = (8, 16, 32, 40, 64, 64, 64, 72, 80, 96, 128, 128, 192, 256)
DENSE_DIMS = (*DIMS, 4, 20, 288, 512)  # torch's efficient op takes them
GROUPS = ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (6, 3), (8, 8))
# How the backend is asked for, and how the call is made, as often as they are listed.
REQUESTS = ("registered", "registered", "scoped", "keyword", "nothing")
MODES = ("plain",) * 8 + ("no_grad", "inference", "autocast", "checkpoint", "capture")
WITHOUT_GRADIENT = ("no_grad", "inference", "capture")
COMPILED_SHARE = 0.005  # it takes a second
# The lengths of a call's repeats: the same in another order, others, or keys that grow by one.
REORDERED, OTHERS, GROWING = "reordered", "others", "growing"
CHANGES = (REORDERED, REORDERED, OTHERS, OTHERS, GROWING)
# The strides of query, key, value and the incoming gradient beyond the layouts of a `Case`: one number or row
# for all of a dimension (stride 0), tokens that overlap in memory, and lazily negated views.
STRIDES = ("one token", "one head", "one of the batch", "one column", "one number", "overlapping", "negated")
# What several threads may do at once: all else changes what is the process's.
MODES_OF_THREADS = ("plain", "no_grad", "inference", "autocast", "checkpoint")


class Drawn(NamedTuple):
    """A call and how it is made, and what a `Case` lacks: sinks, a bias with a gradient, dropout, strides.

    `change` says what the lengths of its repeats are, `in_place` whether they go to the same offsets, `flash`
    whether a dense call is one of `flash_attn_func`.
    """

    case: Case
    backend: str
    request: str
    mode: str
    sinks: bool = False
    bias_grad: bool = False
    dropout: float = 0.0
    change: str = REORDERED
    in_place: bool = True
    strides: tuple[str, ...] = ()
    flash: bool = False

    def __str__(self) -> str:
        shown = {name: getattr(self.case, name) for name in self.case.__slots__ if name != "name"}
        default = Case(name="", lens_q=(), lens_k=())
        given = ", ".join(f"{k}={v!r}" for k, v in shown.items() if v != getattr(default, k))
        usual = self._field_defaults
        further = "".join(f", {k}={getattr(self, k)}" for k in usual if getattr(self, k) != usual[k])
        return f"{self.backend} ({self.request}, {self.mode}): {given}{further}"


def draw(seed: int, number: int | str, backends: list[str], device: str) -> Drawn:
    """Draw a call; one seed and number are always the same call."""
    rng = random.Random(f"{seed}/{number}")
    varlen, dtype = rng.random() < 0.6, rng.choice(("float16", "bfloat16", "bfloat16", "float32"))
    case, change = _packed(rng) if varlen else _dense(rng), rng.choice(CHANGES)
    if change == GROWING:
        case = _decoding(rng, case)
    # Scores of float32 calls may be large. With large 16-bit ones the softmax saturates: the gradient of a
    # flash kernel then has the rounding of its output, where that of plain PyTorch cancels.
    exact, dims = dtype == "float32", DIMS if varlen else DENSE_DIMS
    dim = rng.choice(dims)
    # With a scale of 0 results may be exact, and then a rule about rounding leaves torch's own SDPA none.
    zero = 0.0 if varlen else None
    case = replace(
        case,
        dtype=dtype,
        heads=rng.choice(GROUPS),
        dims=(dim, rng.choice(dims) if rng.random() < 0.1 else dim),
        scale=rng.choice(
            (None, None, None, dim**-0.5 * 2, dim**-0.5 / 3, zero, -0.125, 1.0 if exact else None)
        ),
        layout=rng.choice(("plain",) * 6 + LAYOUTS),
        grad_layout=rng.choice(("plain", "plain", "bhsd", "expanded")),
        deterministic=rng.random() < 0.08,
    )
    if varlen:
        case = _with_options(rng, case)
    # Lengths of query and key that are equal by chance differ in a later repeat.
    are_one = case.lens_q == case.lens_k and (case.one_cu_seqlens or not varlen)
    if case.layout == "fused qkv" and not (are_one and case.dims[0] == case.dims[1]):
        case = replace(case, layout="bhsd")
    mode = rng.choice([mode for mode in MODES if mode != "capture" or device == "cuda"])
    request = rng.choice([how for how in REQUESTS if varlen or how != "keyword"])
    if rng.random() < COMPILED_SHARE:
        mode = "compile"
    if mode == "autocast":
        case = replace(case, dtype="bfloat16")
    if device == "cuda" and not varlen and request == "nothing":
        # Where torch's own SDPA runs alone, it gives NaN for these, or ends the CUDA context.
        layout = "plain" if case.layout in ("offset", "odd rows") else case.layout
        scale = None if case.scale is not None and case.scale < 0 else case.scale
        case = replace(case, layout=layout, scale=scale)
    drawn = Drawn(case, rng.choice(backends), request, mode, change=change, in_place=rng.random() < 0.7)
    drawn = drawn._replace(sinks=varlen and rng.random() < 0.1)
    drawn = drawn._replace(bias_grad=case.bias == "additive" and rng.random() < 0.5)
    if mode not in ("capture", "compile") and not drawn.bias_grad and rng.random() < 0.06:
        drawn = drawn._replace(dropout=rng.choice((0.1, 0.5, 0.9)))
    if varlen and mode != "capture" and rng.random() < 0.08:
        drawn = drawn._replace(case=replace(case, key_ranges=rng.randint(1, 3)))
    has_function = varlen and mode not in ("capture", "compile") and rng.random() < 0.08
    if has_function:
        names = rng.choice((("score_mod",), ("mask_mod",), ("score_mod", "mask_mod")))
        drawn = drawn._replace(case=replace(drawn.case, **dict.fromkeys(names, True)))
    if rng.random() < 0.3 and not case.poison:
        drawn = drawn._replace(
            strides=_strides(rng, has_function or drawn.dropout > 0.0, mode not in WITHOUT_GRADIENT)
        )
    # Its causal mask is aligned bottom-right, SDPA's top-left.
    is_aligned = case.window == (-1, -1) or case.lens_q == case.lens_k
    if not varlen and is_aligned and case.bias == "none" and not drawn.dropout:
        drawn = drawn._replace(flash=rng.random() < 0.4)
    return drawn


def _strides(rng: random.Random, not_in_op: bool, needs_gradient: bool) -> tuple[str, ...]:
    """Draw the strides of query, key, value and gradient: often those of key and value are alike.

    Packed calls with an option that the custom op doesn't have take no lazily negated views. Of equal keys
    or values the gradients of the scores add up to 0: plain PyTorch is exact then, and the rule leaves a
    kernel no rounding.
    """
    kinds = ["", *(each for each in STRIDES if each != "negated" or not not_in_op)]
    of_keys = [each for each in kinds if not needs_gradient or each not in ("one token", "one number")]
    of_each = [rng.choice(of) for of in (kinds, of_keys, of_keys, kinds)]
    if rng.random() < 0.5:
        of_each[1:] = of_each[1], of_each[1], ""
    return tuple(of_each)


def with_strides(strides: tuple[str, ...], given: Inputs) -> Inputs:
    """Return the tensors of a call with the strides that were drawn, which change their numbers, too."""
    if not strides:
        return given
    tensors = map(_with_strides, (given.q, given.k, given.v, given.grad_out), strides)
    return Inputs(*tensors, given.call)


def _with_strides(x: Tensor, strides: str) -> Tensor:
    if not (strides and x.numel()) or (strides == "one of the batch" and x.dim() == 3):
        return x
    if strides == "negated":
        return torch._neg_view(x)
    if strides == "overlapping":
        steps = list(x.contiguous().stride())
        steps[-3] = max(steps[-3] // 2, 1)
        return x.contiguous().as_strided(x.shape, steps)
    if strides == "one number":
        return x[(slice(1),) * x.dim()].expand(x.shape)
    dim = {"one token": -3, "one head": -2, "one of the batch": 0, "one column": -1}[strides]
    return x.narrow(dim, 0, 1).expand(x.shape)


def _with_options(rng: random.Random, case: Case) -> Case:
    """Return a packed call with some of the options that SDPA doesn't have."""
    case = replace(
        case,
        softcap=rng.choice((0.0,) * 8 + (2.0, 30.0)),
        alibi=rng.random() < 0.08,
        # With a scale of 0 plain PyTorch's LSE may be exact; that of torch's own 16-bit kernel isn't.
        grad_lse=rng.random() < 0.15 and case.scale != 0.0,
        num_splits=rng.choice((None,) * 14 + (1, 3)),
    )
    if rng.random() > 0.05:
        return case
    used = case.seqused_k or tuple(rng.randint(0, n) for n in case.lens_k)
    return replace(
        case, page_size=rng.choice((16, 256)), seqused_k=used, layout="plain", one_cu_seqlens=False
    )


def _dense(rng: random.Random) -> Case:
    batch, len_q = rng.choice((1, 1, 2, 3, 5)), rng.choice(LENGTHS)
    len_k = len_q if rng.random() < 0.6 else rng.choice(LENGTHS)
    # SDPA aligns causal masks top-left, the reference bottom-right: the same for equal lengths.
    window = (-1, 0) if len_q == len_k and rng.random() < 0.5 else (-1, -1)
    bias = rng.choice(("none",) * 4 + ("key padding", "additive")) if window == (-1, -1) else "none"
    if bias == "key padding":
        batch = min(batch, 3)  # so many lengths the mask has
    return Case(name="fuzz", lens_q=(len_q,) * batch, lens_k=(len_k,) * batch, window=window, bias=bias)


def _packed(rng: random.Random) -> Case:
    count = rng.choice((1, 2, 3, 5, 9))
    lens_q = tuple(0 if rng.random() < 0.1 else rng.choice(LENGTHS) for _ in range(count))
    lens_k, window = lens_q, (-1, -1)
    if other := rng.random() < 0.5:
        lens_k = tuple(0 if rng.random() < 0.1 else rng.choice(LENGTHS) for _ in range(count))
    if rng.random() < 0.6:
        window = (rng.choice((-1, -1, 0, 1, 31, 64, 400)), rng.choice((0, 0, 0, -1, 5)))
    used = tuple(rng.randint(0, n) for n in lens_k) if rng.random() < 0.1 else None
    tail = rng.choice((0, 0, 0, 5, 64))
    return Case(
        name="fuzz", lens_q=lens_q, lens_k=lens_k, varlen=True, window=window, seqused_k=used, tail=tail,
        poison=bool(tail) and rng.random() < 0.5, one_cu_seqlens=not other,
    )  # fmt: skip


def draw_for_threads(seed: int, number: int, backends: list[str], device: str) -> list[Drawn]:
    """Draw calls that several threads can make at once: what they ask for holds for one thread alone."""
    found = []
    for place in range(THREADS):
        drawn = draw(seed, f"{number}/{place}", backends, device)
        mode = drawn.mode if drawn.mode in MODES_OF_THREADS else "plain"
        request = "keyword" if drawn.case.varlen and place % 2 else "scoped"
        case = replace(drawn.case, deterministic=False)
        found.append(drawn._replace(case=case, mode=mode, request=request, dropout=0.0))
    return found


def repeated(rng: random.Random, drawn: Drawn, before: Case | None) -> Case:
    """Return the call of the next repeat, of the same kind as the one before."""
    case = drawn.case
    if before is None:
        return case
    if drawn.change == GROWING:
        used = before.seqused_k and tuple(n + 1 for n in before.seqused_k)
        # Query and key of other lengths are no parts of one tensor.
        layout = "bhsd" if before.layout == "fused qkv" else before.layout
        return replace(before, lens_k=tuple(n + 1 for n in before.lens_k), seqused_k=used, layout=layout)
    if drawn.change == REORDERED:
        return _in_another_order(rng, case)
    if not case.varlen:
        len_q = rng.randint(1, LENGTHS[-1])
        len_k = len_q if case.lens_q == case.lens_k else rng.randint(1, LENGTHS[-1])
        count = len(case.lens_q)
        return replace(case, lens_q=(len_q,) * count, lens_k=(len_k,) * count)
    lens_q = lens_k = _lengths(rng, len(case.lens_q))
    if not case.one_cu_seqlens:
        lens_k = _lengths(rng, len(case.lens_q))
    used = case.seqused_k and tuple(rng.randint(0, n) for n in lens_k)
    return replace(case, lens_q=lens_q, lens_k=lens_k, seqused_k=used)


def _decoding(rng: random.Random, case: Case) -> Case:
    """Return a call with few queries, whose keys can grow."""
    lens_q, window = (rng.choice((1, 1, 2, 5)),) * len(case.lens_q), case.window if case.varlen else (-1, -1)
    return replace(case, lens_q=lens_q, window=window, one_cu_seqlens=False)


def _lengths(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(0 if rng.random() < 0.1 else rng.randint(1, LENGTHS[-1]) for _ in range(count))


def _in_another_order(rng: random.Random, case: Case) -> Case:
    if not case.varlen:
        return case
    order = rng.sample(range(len(case.lens_q)), len(case.lens_q))
    used = case.seqused_k and tuple(case.seqused_k[i] for i in order)
    lens_q, lens_k = (tuple(lens[i] for i in order) for lens in (case.lens_q, case.lens_k))
    return replace(case, lens_q=lens_q, lens_k=lens_k, seqused_k=used)

"""Kinds of calls drawn at random, and made-up backends whose limits lie at lengths of any kind."""

import attnreg
from attnreg.core.contract.lengths import Cut, Lengths
from attnreg.core.contract.spec import AttentionSpec, Device

DEVICES = tuple(map(Device.parse, ("sm_80", "sm_90", "sm_100", "cpu")))
DTYPES = ("bfloat16", "float16", "float32", "float64")
NAMES = Lengths._fields


def draw_kind(draw):
    """Return a call of a kind that is drawn, of some lengths."""

    def maybe(value, otherwise, chance=0.15):
        return value if draw.random() < chance else otherwise

    varlen = draw.random() < 0.5
    heads_k, dim = draw.choice((1, 2, 8, 16)), draw.choice((8, 32, 64, 80, 128, 192, 256))
    paged = varlen and draw.random() < 0.15
    return AttentionSpec(
        device=draw.choice(DEVICES),
        dtype=draw.choices(DTYPES, (4, 2, 2, 1))[0],
        batch=2, max_q=8, max_k=8,
        heads_q=heads_k * draw.choice((1, 1, 4, 8)), heads_k=heads_k,
        head_dim=dim, head_dim_v=maybe(draw.choice((64, 128)), dim),
        varlen=varlen,
        window=draw.choice(((-1, -1), (-1, 0), (-1, 0), (128, 0), (16, 16))),
        dropout=maybe(0.1, 0.0),
        bias=not varlen and maybe(True, False),
        alibi=varlen and maybe(True, False),
        seqused_k=varlen and (paged or maybe(True, False, 0.3)),
        page_size=draw.choice((16, 64, 128, 256)) if paged else None,
        num_splits=maybe(4, None, 0.05),
        positive_scale=maybe(False, True, 0.05),
        softcap=maybe(20.0, 0.0),
        grad_lse=maybe(True, False),
        needs_backward=maybe(True, False, 0.5),
        deterministic=maybe(True, False),
    )  # fmt: skip


def draw_cut(draw, most=2**40):
    """Return a cut at a product, a sum or a difference of lengths."""
    form = draw.choice(("one", "product", "sum", "difference"))
    one, other = draw.sample(NAMES, 2)
    if form == "one":
        return Cut.of(one, at=_place(draw, min(most, 2**17)))
    if form == "product":
        return Cut.of(one, other, at=_place(draw, most))
    if form == "sum":
        return Cut(((1, (one,)), (draw.choice((1, 64, 128)), (other,))), _place(draw, min(most, 2**20)))
    return Cut.beyond(one, other, at=draw.choice((-128, 0, 1, 1000)))


def _place(draw, most):
    return int(2 ** draw.uniform(0.0, most.bit_length() - 1))


UNDECLARED = (
    lambda spec, number: getattr(spec, NAMES[number % len(NAMES)]) % 8 == 3,
    lambda spec, number: spec.tokens_q * spec.max_k > 2 ** (10 + number % 30),
    lambda spec, number: bool(spec.max_k & spec.max_q & 1),
    lambda spec, number: spec.batch >= 2 ** (number % 17),
)


def draw_backend(draw, name):
    """Return a backend that refuses calls beyond cuts of its own, and its rank, too, may change at one.

    One in five looks at lengths in ways that it doesn't declare.
    """
    cuts, undeclared = [draw_cut(draw) for _ in range(draw.randint(0, 4))], draw.random() < 0.2
    declared, odd = (() if undeclared else tuple(cuts)), draw.randint(0, 100)
    below = [draw.random() < 0.5 for _ in cuts]

    def refuses(spec):
        # A cut reads of a spec, too, what it names and nothing else.
        beyond = [cut.is_reached(spec) is not is_below for cut, is_below in zip(cuts, below, strict=True)]
        if any(beyond[1:]) or (undeclared and UNDECLARED[odd % 4](spec, odd)):
            return ("lengths must be on the other side of a cut, got these",)
        return ()

    def rank(spec):
        return 25 + (bool(cuts) and cuts[0].is_reached(spec))

    limits = attnreg.Capabilities(
        devices=("cpu", "cuda"), dtypes=DTYPES, varlen=True, causal=True, gqa=True, window=True,
        batch=draw.choice((attnreg.Range(0, 2**31 - 1), attnreg.Range(1, 1000), attnreg.Range(2, 64, 2))),
    )  # fmt: skip
    return attnreg.Backend(
        name=name,
        forward=limits,
        backward=limits,
        load=lambda: attnreg.Kernels(None),
        refuses=refuses,
        priority=rank,
        cuts=lambda spec: declared,
    )

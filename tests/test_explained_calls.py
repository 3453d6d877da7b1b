"""What `explain` names is what runs, for every kind of call that torch's SDPA takes on this version."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

import attnreg
from attnreg.core.aten.bypassed import MATH
from attnreg.errors import AttnregError

# Shapes of query and key, and whether enable_gqa is given. The value has the key's shape.
SHAPES = {
    "a batch": ((2, 4, 8, 16), (2, 4, 8, 16), False),
    "fewer queries": ((2, 4, 3, 16), (2, 4, 8, 16), False),
    "shared heads": ((2, 4, 8, 16), (2, 2, 8, 16), True),
    "shared heads without enable_gqa": ((2, 4, 8, 16), (2, 2, 8, 16), False),
    "one key head": ((2, 4, 8, 16), (2, 1, 8, 16), True),
    "one key head without enable_gqa": ((2, 4, 8, 16), (2, 1, 8, 16), False),
    "no batch": ((4, 8, 16), (4, 8, 16), False),
    "no batch, shared heads": ((4, 8, 16), (2, 8, 16), True),
    "no batch, one key head": ((4, 8, 16), (1, 8, 16), True),
    "no batch, one key head without enable_gqa": ((4, 8, 16), (1, 8, 16), False),
    "neither batch nor heads": ((8, 16), (8, 16), False),
    "five dims": ((2, 3, 4, 8, 16), (2, 3, 4, 8, 16), False),
    "five dims, shared heads": ((2, 3, 4, 8, 16), (2, 3, 2, 8, 16), True),
    "five dims, one key head": ((2, 3, 4, 8, 16), (2, 3, 1, 8, 16), False),
    "one key for all of the batch": ((2, 4, 8, 16), (1, 4, 8, 16), False),
    "queries without a batch": ((4, 8, 16), (2, 4, 8, 16), False),
    "keys without a batch": ((2, 4, 8, 16), (4, 8, 16), False),
    "keys without a batch, shared heads": ((2, 4, 8, 16), (2, 8, 16), True),
    "an empty batch": ((0, 4, 8, 16), (0, 4, 8, 16), False),
    "no queries": ((2, 4, 0, 16), (2, 4, 8, 16), False),
    "no keys": ((2, 4, 8, 16), (2, 4, 0, 16), False),
}


def masks(query, key, dtype):
    """Return each kind of mask as options of SDPA."""
    lengths = query[-2], key[-2]
    return (
        {},
        {"is_causal": True},
        {"attn_mask": torch.ones(lengths).bool()},
        {"attn_mask": torch.zeros(lengths, dtype=dtype)},
        {"attn_mask": torch.zeros(1, *lengths, dtype=dtype)},
        {"attn_mask": torch.zeros(*query[:-1], key[-2], dtype=dtype)},
        {"attn_mask": torch.zeros(lengths, dtype=dtype, requires_grad=True)},
    )


def explained(inputs, options, grad):
    """Return the kernels of forward and backward that `explain` names, "" for none; None if it refuses."""
    with contextlib.suppress(AttnregError), torch.set_grad_enabled(grad):
        explanation = attnreg.explain(*inputs, **options)
        if explanation.runs:
            return explanation.backend, explanation.backward.backend if grad else ""
    return None


def run(inputs, options, grad):
    """Return the kernels that ran forward and backward, or None if the call is refused.

    Torch's math kernel runs backward by operations, and nobody counts that; nor are calls without queries or
    keys.
    """
    attnreg.reset_stats()
    try:
        with torch.set_grad_enabled(grad):
            out = F.scaled_dot_product_attention(*inputs, **options)
        if grad:
            out.sum().backward()
    except RuntimeError:
        return None
    stats = attnreg.stats()
    forward, backward = (
        [name for name, n in stats.calls.items() if n[way]] for way in ("forward", "backward")
    )
    (kernel,) = forward or [row.kernel for row in stats.bypassed] or [MATH]
    return kernel, backward[0] if backward else kernel if grad else ""


def assert_explained_as_run(shapes, enable_gqa, dtype, options, grad):
    inputs = [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]
    options = options | {"enable_gqa": enable_gqa}
    assert explained(inputs, options, grad) == run(inputs, options, grad), (shapes, options, grad)


@pytest.fixture
def first(fake, routers):
    """Register a backend that runs some of the calls; `cpu` runs others, and some never reach attnreg."""
    backend = fake("first", gqa=False, bias=False, dtypes=("float32", "float64")).backend
    with attnreg.register_backend(backend):
        yield


@pytest.mark.parametrize(("query", "key", "enable_gqa"), SHAPES.values(), ids=SHAPES)
def test_what_is_explained_is_what_runs_or_both_refuse(first, query, key, enable_gqa):
    for place, options in enumerate(masks(query, key, torch.float32)):
        assert_explained_as_run((query, key, key), enable_gqa, torch.float32, options, grad=place % 2 == 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_what_is_explained_is_what_runs_in_every_dtype(first, dtype):
    for name in ("a batch", "one key head without enable_gqa", "no batch, shared heads"):
        query, key, enable_gqa = SHAPES[name]
        assert_explained_as_run((query, key, key), enable_gqa, dtype, {}, grad=True)


@pytest.mark.slow
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dim_v", [16, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("query", "key", "enable_gqa"), SHAPES.values(), ids=SHAPES)
def test_what_is_explained_is_what_runs_of_every_kind(first, query, key, enable_gqa, dtype, dim_v, grad):
    for options in (*masks(query, key, dtype), {"scale": 0.3}, {"dropout_p": 0.2}):
        assert_explained_as_run((query, key, (*key[:-1], dim_v)), enable_gqa, dtype, options, grad)

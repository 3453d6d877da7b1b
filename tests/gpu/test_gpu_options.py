"""On a GPU: a softcap and a gradient of the LSE, alone and together, are right in both directions."""

import pytest

from attnreg.backends import fa4
from attnreg.measure import Case
from attnreg.testing import Conformance

pytestmark = pytest.mark.gpu

SHAPES = {
    "packed": {"lens_q": (113, 1, 64, 31, 203), "lens_k": (203, 65, 64, 33, 113), "varlen": True},
    "dense": {"lens_q": (113, 113), "lens_k": (203, 203)},
}


OPTIONS = {
    "softcap": {"softcap": 30.0, "magnitude": 3.0},
    "grad_lse": {"grad_lse": True},
    "both": {"softcap": 2.0, "grad_lse": True},
}


@pytest.mark.only_for("FA4")
@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (8, 2)], ids=str)
@pytest.mark.parametrize(("dim", "heads"), [(64, (4, 4)), (128, (6, 2))], ids=str)
def test_an_option_is_right_in_both_directions(named, option, lengths, window, dim, heads):
    kit = Conformance(fa4.BACKEND, "cuda")
    options = {"dims": (dim, dim), "heads": heads, "window": window, **option, **lengths}
    for dtype in ("bfloat16", "float16"):
        outcome = kit.run(Case(name=f"{options}", dtype=dtype, **options))
        assert outcome.passed, outcome
        assert outcome.errors.keys() == {"out", "lse", "dq", "dk", "dv"}, outcome.reasons

"""On a GPU: options that an adapter maps and whose limits are off until these tests have passed."""

import dataclasses

import pytest

from attnreg.backends import fa4
from attnreg.measure import Case
from attnreg.testing import Conformance

pytestmark = pytest.mark.gpu

SHAPES = {
    "packed": {"lens_q": (113, 1, 64, 31, 203), "lens_k": (203, 65, 64, 33, 113), "varlen": True},
    "dense": {"lens_q": (113, 113), "lens_k": (203, 203)},
}


@pytest.mark.only_for("FA4")
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (8, 2)], ids=str)
@pytest.mark.parametrize(("dim", "heads"), [(64, (4, 4)), (128, (6, 2))], ids=str)
def test_a_softcap_is_right_in_both_directions(named, lengths, window, dim, heads):
    limits = {
        name: dataclasses.replace(getattr(fa4, name.upper()), softcap=True)
        for name in ("forward", "backward")
    }
    backend = dataclasses.replace(fa4.BACKEND, name="with a softcap", **limits)
    options = {"dims": (dim, dim), "heads": heads, "window": window, "softcap": 30.0, **lengths}
    for dtype in ("bfloat16", "float16"):
        case = Case(name=f"softcap {options}", dtype=dtype, magnitude=3.0, **options)
        outcome = Conformance(backend, "cuda").run(case)
        assert outcome.passed, outcome
        assert outcome.errors.keys() == {"out", "lse", "dq", "dk", "dv"}, outcome.reasons

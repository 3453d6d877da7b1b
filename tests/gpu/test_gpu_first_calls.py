"""On a GPU: `attnreg.warmup` runs kinds of calls, and leaves nothing of them to be compiled."""

from dataclasses import replace

import pytest

import attnreg
from attnreg.backends.fa4 import compiled_kinds
from attnreg.core import registry

pytestmark = pytest.mark.gpu

KIND = {
    "dtype": "bf16", "heads_q": 4, "heads_k": 2, "head_dim": 64, "window": (-1, 0), "needs_backward": True,
}  # fmt: skip


@pytest.mark.parametrize("varlen", [False, True])
def test_both_directions_run_on_the_backend_that_is_named(named, varlen):
    name = registry.find(named).name
    results = attnreg.warmup({**KIND, "varlen": varlen}, backend=named)
    assert [(one.backend, one.direction, one.error) for one in results] == [
        (name, "forward", None),
        (name, "backward", None),
    ]


@pytest.mark.only_for("FA4")
def test_longer_calls_of_a_kind_need_nothing_compiled(named):
    for one in attnreg.warmup({**KIND, "varlen": True}, backend=named):
        longer = replace(one.kind, batch=5, max_q=4000, max_k=4000, tokens_q=9000, tokens_k=9000)
        family = compiled_kinds.family_of_spec(one.direction, longer)
        assert (family, family.class_of(5, 4000, 4000)) in compiled_kinds.have_run
        captured = replace(longer, capturing=True)
        assert registry.find(named).reasons(captured, one.direction) == ()

"""Promises of the call cache for dense calls: which calls it runs, and that it changes nothing about them."""

import gc
import json
import weakref

import pytest
import torch
import torch.nn.functional as F
from support import dense, truth
from support.dense import assert_right, with_gradients
from support.known import know

import attnreg
from attnreg.backends import math as math_backend
from attnreg.core import aten
from attnreg.core.aten import routing
from attnreg.core.dispatch import call_cache, counters, scope
from attnreg.core.torchlib import captured

pytestmark = pytest.mark.usefixtures("one_thread")


def qkv(length=8, grad=False, **options):
    return [x.detach().requires_grad_(grad) for x in dense.qkv(length, length, **options)]


def attend(inputs, **options):
    return F.scaled_dot_product_attention(*inputs, **options)


def attend_and_back(inputs, **options):
    return with_gradients(attend(inputs, **options), inputs)


def repeat(call, times=3):
    for _ in range(times):
        call()


# ---- calls below torch's own entry points


@pytest.mark.parametrize("name", ["cpu", "math"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_repeated_call_takes_no_python_is_right_and_is_counted(installed, planned, ran, name, causal):
    attnreg.register_backend(name)
    counts = []
    for seed in range(4):
        inputs = qkv(grad=True, seed=seed)
        results = []
        counts.append(planned(lambda: results.extend(attend_and_back(inputs, is_causal=causal))))  # noqa: B023
        assert_right(results, inputs, window=(-1, 0) if causal else (-1, -1))
        assert ran() == {name: (1, 1)}
    assert counts[0] == 2
    assert counts[-1] == 0


def offset_by_one(inputs):
    """Return the same tensors at addresses that sixteen bytes can't be read from."""
    return [torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x) for x in inputs]


def in_bshd_memory(inputs):
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]


def in_rows_of_nine(inputs):
    """Return the same tensors with rows that don't all begin where sixteen bytes can be read at a time."""
    return [x.new_empty(*x.shape[:-1], 9)[..., :8].copy_(x) for x in inputs]


def deterministic(call, warn_only=False):
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)


def scoped(call):
    with attnreg.use_backend("math", "cpu"):
        return call()


DIFFERENT = {
    "one query": lambda: attend([qkv(length=1)[0], *qkv()[1:]]),
    "more keys than queries": lambda: attend([qkv()[0], *qkv(length=9)[1:]]),
    "more queries than keys": lambda: attend([qkv(length=9)[0], *qkv()[1:]]),
    "heads": lambda: attend(qkv(heads=2)),
    "dtype": lambda: attend(qkv(dtype=torch.bfloat16)),
    "contiguity": lambda: attend(in_bshd_memory(qkv())),
    "strides of other classes": lambda: attend(in_rows_of_nine(qkv())),
    "a stride of 0": lambda: attend([x[:1].expand(2, -1, -1, -1) for x in qkv()]),
    "alignment": lambda: attend(offset_by_one(qkv())),
    "causal": lambda: attend(qkv(), is_causal=True),
    "scale": lambda: attend(qkv(), scale=0.5),
    "a mask": lambda: attend(qkv(), attn_mask=torch.zeros(8, 8)),
    "a gradient": lambda: attend(qkv(grad=True)),
    "no grad mode": lambda: torch.no_grad()(attend)(qkv()),
    "deterministic": lambda: deterministic(lambda: attend(qkv())),
    "deterministic, warnings only": lambda: deterministic(lambda: attend(qkv()), warn_only=True),
    "choice": lambda: scoped(lambda: attend(qkv())),
}


@pytest.mark.parametrize("different", DIFFERENT.values(), ids=DIFFERENT)
def test_a_call_that_differs_is_planned(installed, planned, different):
    attnreg.register_backend("math")
    repeat(lambda: attend(qkv()))
    assert planned(lambda: attend(qkv(seed=1))) == 0
    assert planned(different) == 1
    assert planned(lambda: attend(qkv(seed=2))) == 0


@pytest.fixture
def only_math(monkeypatch):
    """Have plain math known alone, and serve: no other backend's cuts divide lengths into classes."""
    know(monkeypatch, math_backend.BACKEND)
    attnreg.register_backend("math")


@pytest.mark.usefixtures("only_math")
def test_new_lengths_of_a_class_take_no_plan_and_are_right(installed, planned, ran):
    repeat(lambda: attend_and_back(qkv(grad=True)))
    assert ran() == {"math": (3, 3)}
    for length in (12, 4, 100, 16):
        inputs, results = qkv(length=length, batch=length // 4, grad=True, seed=length), []
        is_new = length == 4  # a batch of one, whose stride says nothing
        assert (planned(lambda: results.extend(attend_and_back(inputs))) > 0) == is_new  # noqa: B023
        assert_right(results, inputs)
    assert ran() == {"math": (4, 4)}


@pytest.mark.usefixtures("only_math")
def test_other_strides_of_the_same_classes_take_no_plan(installed, planned):
    def every(step):
        return [x[:, :, ::step] for x in qkv(length=8 * step, seed=step)]

    repeat(lambda: attend(every(2)))
    for step in (3, 5):
        inputs, outs = every(step), []
        assert planned(lambda: outs.append(attend(inputs))) == 0  # noqa: B023
        truth.assert_near(outs[0], truth.dense(*inputs)[0])
    assert planned(lambda: attend(every(1))) == 1  # contiguous ones


def test_a_mask_of_another_shape_is_planned(op):
    inputs = [torch.randn(2, 6, 2, 8) for _ in "qkv"]
    masks = [torch.zeros(6, 6), torch.zeros(1, 6), torch.zeros(6, 6).bool(), None]
    for mask in masks:
        assert op.planned(*inputs, 1.0, False, mask)[0]
    for mask in masks:
        assert not op.planned(*inputs, 1.0, False, mask)[0]


def test_nothing_is_kept_of_dropout_or_of_a_mask_that_a_launcher_is_not_given(installed, planned):
    with attnreg.register_backend("math"):
        for _ in range(4):
            assert planned(lambda: attend(qkv(), attn_mask=torch.zeros(8, 8))) == 1


# ---- what drops everything


# What changes, and what runs a call from then on.
CHANGES = {
    "register": (lambda _: attnreg.register_backend("math"), "math"),
    "remove": (lambda handle: handle.remove(), "math"),
    "configure": (lambda _: attnreg.configure({"disabled": ["cpu"]}), "math"),
    "reload": (lambda _: attnreg.reload(), "cpu"),
    "policy": (lambda _: attnreg.configure({"policy": "batch_invariant"}), "cpu"),
}


@pytest.mark.parametrize(("change", "name"), CHANGES.values(), ids=CHANGES)
def test_a_change_drops_everything_and_holds_at_once(installed, planned, ran, change, name):
    attnreg.register_backend("math")
    handle = attnreg.register_backend("cpu")
    repeat(lambda: attend_and_back(qkv(grad=True)))
    assert planned(lambda: attend_and_back(qkv(grad=True))) == 0
    assert ran() == {"cpu": (4, 4)}
    change(handle)
    assert planned(lambda: attend_and_back(qkv(grad=True))) == 2
    assert ran() == {name: (1, 1)}


@pytest.mark.parametrize("keeps", [True, False], ids=["a launcher", "that nothing is registered"])
def test_what_a_plan_returns_while_something_changed_is_not_kept(op, keeps):
    inputs = [torch.randn(2, 6, 2, 8) for _ in "qkv"]
    if not keeps:
        op.kept = lambda *_, **__: op.meanwhile() or True
    op.meanwhile = op.module.drop
    assert [op.planned(*inputs)[0] for _ in range(3)] == [True] * 3
    op.meanwhile = lambda: None
    assert [op.planned(*inputs)[0] for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize("full", [False, True], ids=["a change", "more calls than are kept"])
def test_what_a_dropped_entry_held_is_released(op, full):
    ended = []

    class Launcher:
        def __call__(self, q, k, v):
            return q * 2, q.sum(-1).transpose(1, 2)

        def __del__(self):
            op.module.drop()  # what is released may do anything: no lock is held
            ended.append(1)

    inputs = [torch.randn(1, 2, 1, 8) for _ in "qkv"]
    op.forward = Launcher()
    op.planned(*inputs)
    op.forward = None
    assert ended == []
    if full:
        for number in range(4096):
            op.planned(*inputs, float(number + 2))
    else:
        op.module.drop()
    assert ended == [1]
    assert op.planned(*inputs)[0]


def test_tensors_of_a_call_are_not_held(installed):
    attnreg.register_backend("cpu")
    inputs = qkv(grad=True)
    repeat(lambda: attend_and_back(inputs))
    held = [weakref.ref(inputs.pop()) for _ in "qkv"]
    gc.collect()
    assert [one() for one in held] == [None] * 3


# ---- where nothing is registered


def test_while_nothing_is_registered_calls_pass_uncounted(installed, monkeypatch, ran):
    attend_and_back(qkv(grad=True))  # which finds it out, forward and backward
    with monkeypatch.context() as patch:
        patch.setattr(routing, "state", lambda: pytest.fail("asked in Python"))
        attend_and_back(qkv(grad=True))
        attend(qkv(length=5))
    assert ran() == {}
    attnreg.register_backend("math")
    attend(qkv())
    assert ran() == {"math": (1, 0)}


def test_a_scope_serves_where_nothing_is_registered_and_ends_with_its_block(installed, ran):
    inputs = qkv(grad=True)
    attend_and_back(inputs)
    for _ in range(3):
        with attnreg.use_backend("math"):
            out = attend(inputs)
        torch.autograd.grad(out.sum(), inputs)
        attend_and_back(inputs)
    assert ran() == {"math": (3, 3)}


# ---- what is counted


def test_repeated_calls_are_counted_for_a_recording_whose_counters_are_released_with_it(installed, tmp_path):
    attnreg.register_backend("cpu")

    def record(number):
        file = tmp_path / f"{number}.jsonl"
        with attnreg.record(file):
            repeat(lambda: attend(qkv()), 4)
        assert json.loads(file.read_text())["forward"] == 4

    def alive():
        attnreg.stats()
        gc.collect()
        return sum(type(x) is counters.Counter for x in gc.get_objects())

    record(0)
    before = alive()
    for number in range(1, 4):
        record(number)
    assert alive() == before


# ---- paused


@pytest.mark.parametrize("put_in", ["before", "during"])
def test_while_paused_every_call_is_planned_also_by_routers_that_are_put_in_meanwhile(
    installed, planned, put_in
):
    attnreg.register_backend("cpu")
    repeat(lambda: attend(qkv()))
    with call_cache.paused():
        with call_cache.paused():
            pass
        if put_in == "during":
            assert not captured.call_cache_in_use
            aten.restore()
            assert captured.call_cache_in_use is None
            aten.ensure()
        assert captured.call_cache_in_use is False
        assert planned(lambda: repeat(lambda: attend(qkv()))) == 3
    assert captured.call_cache_in_use
    repeat(lambda: attend(qkv()), 2)  # the first one's results are checked against the contract
    assert planned(lambda: attend(qkv())) == 0


def test_a_pause_leaves_routers_in_python_what_they_are(installed, planned, monkeypatch):
    aten.restore()
    monkeypatch.setattr(call_cache, "_wanted", lambda: "python")
    aten.ensure()
    with call_cache.paused():
        pass
    assert captured.call_cache_in_use is False
    with attnreg.register_backend("cpu"):
        assert planned(lambda: repeat(lambda: attend(qkv()))) == 3


# ---- modes in which torch calls an op


def test_inference_mode_and_autocast_give_the_same_from_the_call_cache(installed, planned):
    inputs = qkv(dtype=torch.bfloat16)
    attnreg.register_backend("math")
    wanted = attend(inputs)

    def call():
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            return attend(inputs)

    repeat(call)
    assert planned(call) == 0
    out = call()
    assert out.is_inference()
    assert torch.equal(out, wanted)


# ---- results that aren't the usual ones


def test_a_value_of_another_head_dim_gives_the_same_each_time(installed):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 6, 3, 16, generator=generator) for _ in "qk")
    v = torch.randn(2, 6, 3, 24, generator=generator)
    wanted, _ = truth.dense(*(x.transpose(1, 2) for x in (q, k, v)))
    with attnreg.register_backend("math"):
        for _ in range(4):
            out, *_ = torch.ops.aten._flash_attention_forward(q, k, v, None, None, 6, 6, 0.0, False, False)
            truth.assert_near(out.transpose(1, 2), wanted)


def test_auxiliary_outputs_are_new_tensors_each_time(installed):
    q, k, v = (torch.randn(2, 6, 3, 16) for _ in "qkv")

    def call():
        return torch.ops.aten._flash_attention_forward(q, k, v, None, None, 6, 6, 0.0, False, False)

    with attnreg.register_backend("math"):
        first = call()
        repeat(call)
        results = [call(), call()]
    for place in range(5):
        assert len({one[place].data_ptr() for one in results if one[place].numel()}) in (0, 2)
        for one in results:
            assert (one[place].shape, one[place].dtype) == (first[place].shape, first[place].dtype)
    results[0][2].fill_(7)
    assert scope.read_token(results[1][3]) is None

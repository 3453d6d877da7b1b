"""On a GPU: what a backend does for a call that it knows is as right as what it did the first time."""

import dataclasses
import functools
import sys

import pytest
import torch
from support import gpu, truth
from test_gpu_accuracy import CAUSAL, LAYOUTS, OPEN, dense, ragged

import attnreg
from attnreg import _registry, aten
from attnreg.aten import express
from attnreg.contract.backend import Call, Kernels
from attnreg.contract.launchers import AddressLauncher
from attnreg.contract.offsets import GRAPH_TREES, facts
from attnreg.measure import measure
from attnreg.torchlib import captured
from attnreg.torchlib.layout import stream_of

pytestmark = pytest.mark.gpu

# In each of them every row sees a key: that is promised to a shorter way.
SAME = [(n, n) for n in (113, 1, 33, 203)]
LONGER = ((113, 203), (1, 65), (31, 33))
CASES = (
    *(dense(113, 203, window=window) for window in (OPEN, CAUSAL, (8, 2), (100, -1))),
    *(ragged(*SAME, window=window) for window in (OPEN, CAUSAL, (8, 2))),
    *(ragged(*LONGER, window=window) for window in (OPEN, CAUSAL)),
    dense(65, 65, heads=(8, 2), dims=(128, 128)),
    ragged(*SAME, heads=(8, 2), dims=(128, 128), window=CAUSAL),
    ragged(*SAME, dtype="float16", scale=0.2),
    *(ragged(*SAME, (162, 162), window=window) for window in (OPEN, CAUSAL)),  # 512 tokens: an LSE in order
    *(ragged(*SAME, layout=layout, heads=(4, 4)) for layout in LAYOUTS),
)
# So often an adapter may want to see a call before it knows it.
SEEN = 4


@pytest.fixture(autouse=True)
def no_graph_trees(monkeypatch):
    """Forget that a test before has compiled for CUDA graphs, beside which nothing is kept of offsets."""
    monkeypatch.delitem(sys.modules, GRAPH_TREES, raising=False)


@functools.cache
def kernels(name):
    return _registry.find(name).kernels()


def shortened(forward, backward, used):
    """Return kernels that go the shorter way of a backend wherever there is one; `used` tells which did."""

    def done(direction, long, again, tensors, call):
        for _ in range(SEEN):
            results = long(*tensors, call)
            torch.cuda.synchronize()  # what was asked of the device is known
        query, key = tensors[:2] if direction == "forward" else tensors[1:3]
        ends = (call.cu_seqlens_q, call.cu_seqlens_k) if call.varlen else ()
        if ends:
            found = facts(call, len(query), len(key), stream_of(query))
            torch.cuda.synchronize()  # `math` asks for nothing by itself
            assert found.covered
        short = again(direction, tensors, call) if again is not None else None
        if short is None:
            return results
        used.append(direction)
        if isinstance(short, AddressLauncher):  # what compiled routers do is as right as what Python does
            for one, other in zip(short(*tensors, *ends), results, strict=True):
                assert torch.allclose(one.float(), other.float(), rtol=0.02, atol=0.02)
            return short.on_addresses(*tensors, *ends)
        return short(*tensors, *ends)

    return Kernels(
        lambda q, k, v, call: done("forward", forward.forward, forward.specialize, (q, k, v), call),
        lambda *given: done("backward", backward.backward, backward.specialize, given[:6], given[6]),
    )


def short_way(named, given):
    """Return the shorter way of a forward."""
    inputs = [x.detach() for x in given.qkv]
    call = Call(64**-0.5, given.max_q, given.max_k, (-1, -1), given.offsets_q, given.offsets_k)
    return kernels(named).specialize("forward", tuple(inputs), call)


def assert_right(short, case):
    errors = measure(short, case, "cuda")
    assert {name: str(error) for name, error in errors.items() if not error.passed} == {}
    assert errors.keys() == {"out", "lse", "dq", "dk", "dv"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_shorter_way_keeps_the_rule(named, case):
    used = []
    assert_right(shortened(kernels(named), kernels(named), used), case)
    # Tensors that have to be copied first take the long way; `math` has no other.
    may_lack = named == "math" or "layout" in str(case)
    assert used == ["forward", "backward"] or may_lack


def test_any_shorter_forward_pairs_with_any_shorter_backward(named, other):
    for case in (dense(113, 203, window=CAUSAL), ragged(*SAME, window=CAUSAL), ragged(*LONGER)):
        used = []
        assert_right(shortened(kernels(named), kernels(other), used), case)
        # A backward may want the LSE as the long way gives it.
        wanted = [
            direction for direction, name in (("forward", named), ("backward", other)) if name != "math"
        ]
        assert used in (wanted, wanted[:1])


def test_layers_whose_tensors_lie_differently_are_told_apart(named, ran):
    """Calls of one shape, with query, key and value apart or as views of one tensor, in turn."""
    offsets = gpu.offsets_of((40, 300, 7))
    with attnreg.register_backend(named):
        for seed in range(6):
            apart = gpu.packed((40, 300, 7), seed=seed)._replace(offsets_q=offsets, offsets_k=offsets)
            query, key, value = torch.stack([x.detach() for x in apart.qkv], 1).requires_grad_().unbind(1)
            views = apart._replace(query=query, key=key, value=value)
            assert not query.is_contiguous()
            right = gpu.expected(apart, window=CAUSAL)[0]
            for given in (apart, views):
                got = gpu.run(attnreg.varlen_attn, given, window_size=CAUSAL)
                torch.cuda.synchronize()
                gpu.assert_near(got, right)
                assert ran() == {named: (1, 1)}, seed


@pytest.mark.only_for("FA4", "cuDNN")  # of packed calls FA2's kernel is torch's own, given the op's arguments
def test_compiled_routers_take_the_shorter_way(named, compiled_routers, monkeypatch):
    aten.restore()
    aten._kept_out = False
    entry = _registry.find(named)
    taken, whole = [], entry.kernels()

    def again(direction, tensors, call):
        short = whole.specialize(direction, tensors, call)
        if not isinstance(short, AddressLauncher):
            return short and (lambda *given: taken.append(direction) or short(*given))
        launch = short.launch
        return dataclasses.replace(
            short, run=None, launch=lambda *numbers: taken.append(direction) or launch(*numbers)
        )

    monkeypatch.setattr(entry, "_kernels", whole._replace(specialize=again))
    given = gpu.packed((40, 300, 7), heads=(4, 2))
    right = gpu.expected(given)[0]
    with attnreg.register_backend(named):
        assert captured.compiled
        for _ in range(12):
            got = gpu.run(attnreg.varlen_attn, given, enable_gqa=True)
            torch.cuda.synchronize()
            gpu.assert_near(got, right)
    assert taken[-2:] == ["forward", "backward"]
    assert taken.count("forward") >= 4
    assert isinstance(short_way(named, given), AddressLauncher) is (named == "cuDNN")


def test_compiled_routers_send_what_is_known_without_taking_it_apart(
    named, compiled_routers, monkeypatch, ran
):
    aten.restore()
    aten._kept_out = False
    given = gpu.packed((40, 300, 7), heads=(4, 2))
    right, right_lse = gpu.expected(given)

    def call(**options):
        got = gpu.run(attnreg.varlen_attn, given, enable_gqa=True, **options)
        torch.cuda.synchronize()
        gpu.assert_near(got, right)

    with attnreg.register_backend(named):
        for _ in range(4):
            call()
        with monkeypatch.context() as patch:
            patch.setattr(express, "known_as", None)
            call()
            out, lse = attnreg.varlen_attn(*given, enable_gqa=True, return_aux=attnreg.AuxRequest(lse=True))
            truth.assert_near(out.detach().cpu(), right[0], torch.bfloat16)
            truth.assert_near(lse.cpu(), right_lse.detach(), torch.float32)
            assert lse.is_contiguous()
            with pytest.raises(TypeError, match="NoneType"):  # so that is what it doesn't come to
                attnreg.varlen_attn(*given, scale=0.5, enable_gqa=True)
            call(backend="math")
        assert ran() == {named: (6, 5), "math": (1, 1)} or named == "math"
        with attnreg.use_backend("math"):
            call()
        call()
        with torch.autocast("cuda", torch.bfloat16):
            call()
        given.offsets_q[1] += 1  # in place: other sequences now
        right, right_lse = gpu.expected(given)
        call()


@pytest.mark.only_for("FA2")
def test_below_sdpa_nothing_is_allocated_that_the_kernel_doesnt_allocate(named, compiled_routers):
    aten.restore()
    aten._kept_out = False
    heads_first = [
        torch.randn(2, 128, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in "qkv"
    ]
    op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    kernel = captured.kernel("_flash_attention_forward", "CUDA")

    def allocated(run):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        kept = run()
        return torch.cuda.memory_stats()["allocation.all.allocated"] - before, kept

    by_hand, _ = allocated(
        lambda: kernel(*(x.transpose(1, 2) for x in heads_first), None, None, 128, 128, 0.0, False, False)
    )
    with attnreg.register_backend(named):
        for _ in range(4):
            op(*heads_first, None, True)
        known, (*_, seed, offset, _) = allocated(lambda: op(*heads_first, None, True))
    assert known == by_hand
    assert (seed.dtype, offset.dtype, seed.shape, offset.shape) == (torch.int64, torch.int64, (), ())
    seed.fill_(1)
    offset.fill_(2)
    assert (seed.item(), offset.item()) == (1, 2)

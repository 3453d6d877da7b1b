"""On a GPU: dense calls of `flash_attn_func` run in C++ once a call of the kind has run, and are right."""

import functools

import pytest
import torch
from support import gpu

import attnreg
from attnreg.core.dispatch import call_cache
from attnreg.flash_attn import flash_attn_func

pytestmark = pytest.mark.gpu

# Batch, queries and keys, never twice the same; a masked call of cuDNN has no more queries than keys. The
# first and the last are of two classes: with as many keys as queries, and with more.
NEW_LENGTHS = [(2, 130, 200), (3, 77, 400), (2, 200, 203), (4, 64, 301), (5, 33, 120), (2, 190, 190)]
OPTIONS = {"plain": {}, "causal": {"causal": True}, "scale": {"softmax_scale": 0.3}}


def drawn(batch, length_q, length_k, heads_k=4, seed=0):
    """Return query, key and value, (B, S, H, D), that need a gradient."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = (batch, length_q, 4, 64), (batch, length_k, heads_k, 64), (batch, length_k, heads_k, 64)
    return [
        torch.randn(shape, device="cuda", generator=generator).to(gpu.BF16).requires_grad_()
        for shape in shapes
    ]


def step(inputs, incoming=None, **options):
    """Return the output and the three gradients of a call."""
    out = flash_attn_func(*inputs, **options)
    return out, *torch.autograd.grad(out, inputs, gpu.incoming(out) if incoming is None else incoming)


def expected(inputs, *, causal=False, softmax_scale=None):
    """Return the same in float64."""
    by_head = [x.detach().transpose(1, 2).requires_grad_() for x in inputs]
    leaves = [x.detach().cpu().double().requires_grad_() for x in by_head]
    group = inputs[0].shape[2] // inputs[1].shape[2]
    q, k, v = leaves[0], *(x.repeat_interleave(group, dim=1) for x in leaves[1:])
    out, _ = gpu.truth.dense(q, k, v, window=(-1, 0 if causal else -1), scale=softmax_scale)
    incoming = gpu.incoming(inputs[0]).cpu().double().transpose(1, 2)
    return tuple(x.transpose(1, 2) for x in (out, *torch.autograd.grad(out, leaves, incoming)))


@pytest.mark.parametrize("heads_k", [4, 2])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_new_lengths_are_right_and_take_no_plan(named, ran, planned, options, heads_k):
    with attnreg.register_backend(named):
        for seed in range(12):
            inputs = drawn(*NEW_LENGTHS[-(seed % 2)], heads_k=heads_k, seed=seed)
            gpu.assert_near(step(inputs, **options), expected(inputs, **options))
            torch.cuda.synchronize()
        ran()
        counts = []
        for _ in range(5):  # cuDNN plans each shape once, and FA4 tries each class of lengths
            for seed, lengths in enumerate(NEW_LENGTHS):
                inputs = drawn(*lengths, heads_k=heads_k, seed=seed)
                results = []
                counts.append(planned(lambda: results.extend(step(inputs, **options))))  # noqa: B023
                gpu.assert_near(results, expected(inputs, **options))
                assert ran() == {named: (1, 1)}
        if call_cache.load() is not None:
            assert counts[-len(NEW_LENGTHS) :] == [0] * len(NEW_LENGTHS)
            assert named != "FA2" or not any(counts)


def test_a_graph_replays_what_a_call_computes(named):
    inputs = drawn(2, 130, 200)
    wanted, incoming = expected(inputs, causal=True), gpu.incoming(inputs[0])
    with attnreg.register_backend(named):
        for _ in range(4):
            step(inputs, causal=True)
            torch.cuda.synchronize()
        graph, results = gpu.capture(functools.partial(step, inputs, incoming, causal=True))
    gpu.assert_near(gpu.replay(graph, results), wanted)


def test_a_call_waits_for_nothing(named):
    inputs = [drawn(*lengths) for lengths in NEW_LENGTHS]
    with attnreg.register_backend(named):
        for _ in range(2):
            for given in inputs:
                step(given)
                torch.cuda.synchronize()
        with gpu.no_waiting():
            for given in inputs:
                step(given)


def test_streams_get_their_own_results(named):
    side = torch.cuda.Stream()
    with attnreg.register_backend(named):
        for seed in range(6):
            inputs = drawn(2, 130, 200, seed=seed)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                results = step(inputs)
            side.synchronize()
            gpu.assert_near(results, expected(inputs))

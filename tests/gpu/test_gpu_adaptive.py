"""On a GPU: `policy = "adaptive"` times kernels on the program's own calls, which stay right."""

import pytest
import torch
import torch.nn.functional as F
from support import gpu

import attnreg
from attnreg.core import registry
from attnreg.core.selection.predictions import MOST_MARGIN
from attnreg.core.times import adaptive
from attnreg.core.times.turns import MOST_TURNS

pytestmark = pytest.mark.gpu

LENGTHS = (5, 300, 0, 42)


@pytest.fixture(params=["packed", "dense"])
def step(request):
    """Return a function that runs a call forward and backward.

    And what it should return, who can run it, and the arguments that `explain` takes.
    """
    if request.param == "packed":
        given = gpu.packed(LENGTHS)
        inputs, front, expected = given.qkv, lambda: attnreg.varlen_attn(*given), gpu.expected(given)[0]
    else:
        inputs = given = gpu.bhsd()
        front, expected = lambda: F.scaled_dot_product_attention(*inputs), gpu.expected_of_sdpa(inputs)
    grad = gpu.incoming(inputs[0])  # here, as a capture can make no generator

    def run():
        out = front()
        return out.detach(), *torch.autograd.grad(out, inputs, grad)

    # Those that load, but for the reference, which takes no turn.
    names = ("FA2", "FA4", "cuDNN", *["efficient"] * (request.param == "dense"))
    return run, expected, {name for name in names if not registry.find(name).unavailable()}, given


def test_each_kernel_has_its_turns_all_are_right_and_the_fastest_stays(step, ran):
    run, expected, able, given = step
    attnreg.configure({"policy": "adaptive"})
    ran()
    for _ in range(MOST_TURNS):
        gpu.assert_near(run(), expected)
    torch.cuda.synchronize()
    took = ran()
    gpu.assert_near(run(), expected)
    (learned,) = adaptive._learned.values()
    points = {one.kind.direction: one.point for one in learned.turns.values()}
    for place, direction in enumerate(("forward", "backward")):
        assert {name for name, counts in took.items() if counts[place]} == able
        assert points[direction].backends.keys() == able
        assert all(1.0 < one.gpu_us < 1e4 for one in points[direction].backends.values())
    ran()
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    after, explained = ran(), attnreg.explain(*given)
    for place, direction in enumerate(("forward", "backward")):
        predicted = getattr(explained, direction).predicted
        ranks = {one.backend: one.rank_us for one in predicted.candidates}
        measured = points[direction].backends
        assert {one.backend: one.gpu_us for one in predicted.candidates} == pytest.approx(
            {name: one.gpu_us for name, one in measured.items()}
        )
        (chosen,) = (name for name, counts in after.items() if counts[place])
        assert ranks[chosen] <= (1 + MOST_MARGIN) * min(ranks.values())


def test_a_capture_takes_no_turn_and_replays_right(step, ran):
    run, expected, *_ = step
    attnreg.configure({"policy": "adaptive"})
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    (learned,) = adaptive._learned.values()
    before = {name: dict(one.counts) for name, one in learned.turns.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = run()
    assert {name: dict(one.counts) for name, one in learned.turns.items()} == before
    gpu.assert_near(gpu.replay(graph, [one.detach() for one in results]), expected)

"""On a GPU: masks that are recognised run on attnreg's backends, are read back once, and never in a graph."""

import pytest
import torch
import torch.nn.functional as F
from support import gpu

import attnreg
from attnreg.core.dispatch.state import FEW_SHAPES
from attnreg.core.launching import offsets
from attnreg.errors import InvalidInputError
from attnreg.masks.serving import LEFT

pytestmark = pytest.mark.gpu

LENGTH = 300
PLACES = torch.arange(LENGTH)
CAUSAL = PLACES[:, None] >= PLACES
IS_TOKEN = torch.tensor([100, LENGTH])[:, None] > PLACES
KEYS = IS_TOKEN[:, None, None]
DOCUMENT = (PLACES >= 70).int() + (PLACES >= 200)
MASKS = {
    "padded keys": KEYS,
    "padded keys, causal": KEYS & CAUSAL,
    "padded queries, padded keys": KEYS & IS_TOKEN[:, None, :, None],
    "causal, a window": CAUSAL & (PLACES[:, None] - PLACES <= 50),
    "causal, documents": CAUSAL & (DOCUMENT[:, None] == DOCUMENT),
    "causal": CAUSAL,
}


@pytest.fixture
def recognise():
    offsets._cache.clear()
    attnreg.configure({"masks": "recognise"})
    attnreg.reset_stats()


@pytest.mark.usefixtures("recognise")
@pytest.mark.parametrize(("seen", "mask"), MASKS.items(), ids=MASKS)
def test_masked_calls_are_right_and_run_on_the_first_backend(seen, mask, ran):
    inputs = gpu.bhsd(length=LENGTH)
    results = gpu.sdpa_and_back(inputs, attn_mask=mask.cuda())
    assert [(row.seen, row.count) for row in attnreg.stats().masks] == [(seen, 1)]
    calls = ran()
    assert calls
    assert "math" not in calls
    whole = mask.expand(2, 1, LENGTH, LENGTH)
    bias = torch.zeros(whole.shape, dtype=torch.float64).masked_fill(~whole, -torch.inf)
    gpu.assert_near(results, gpu.expected_of_sdpa(inputs, bias=bias))


@pytest.mark.usefixtures("recognise")
def test_layers_after_the_first_wait_for_nothing():
    inputs, mask = gpu.bhsd(length=LENGTH), (KEYS & CAUSAL).cuda()
    right = gpu.sdpa_and_back(inputs, attn_mask=mask)
    gpu.sdpa_and_back(inputs, attn_mask=mask)
    with gpu.no_waiting():
        results = [gpu.sdpa_and_back(inputs, attn_mask=mask) for _ in range(3)]
    for one in results:
        gpu.assert_near(one, [x.cpu().double() for x in right])


@pytest.mark.usefixtures("recognise")
def test_in_a_capture_the_mask_is_torchs_and_a_replay_sees_what_was_written_to_it():
    inputs, mask = gpu.bhsd(length=LENGTH, grad=False), KEYS.cuda()
    F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    torch._C._nn.scaled_dot_product_attention(*inputs, mask)  # cuDNN can't be set up in a capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    seen = {row.seen: row.count for row in attnreg.stats().masks}
    assert seen == {"padded keys": 1, f"{LEFT}it is in a CUDA graph, or may be": 1}
    mask.copy_(KEYS.flip(0))
    (replayed,) = gpu.replay(graph, [out])
    bias = torch.zeros(2, 1, LENGTH, LENGTH, dtype=torch.float64).masked_fill(~KEYS.flip(0), -torch.inf)
    gpu.assert_near([replayed], gpu.expected_of_sdpa([x.requires_grad_() for x in inputs], bias=bias)[:1])


@pytest.mark.usefixtures("recognise")
def test_each_stream_looks_at_a_mask_itself():
    inputs, mask = gpu.bhsd(length=LENGTH, grad=False), KEYS.cuda()
    first = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        second = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    torch.cuda.synchronize()
    assert torch.equal(first, second)
    assert sum(key[1][0] == "mask" for key in offsets._cache) == 2


@pytest.mark.usefixtures("recognise")
def test_dropout_of_a_masked_call_runs_as_dropout_of_the_packed_one(ran):
    inputs, mask = gpu.bhsd(length=LENGTH), KEYS.cuda()
    ones = [inputs[0], inputs[1], torch.ones_like(inputs[2]).requires_grad_()]
    out = F.scaled_dot_product_attention(*ones, attn_mask=mask, dropout_p=0.25)
    assert ran()
    # Each weight is kept with probability 0.75 and divided by it.
    assert abs(out.float().mean().item() - 1.0) < 0.02
    assert out.float().std().item() > 0.01


def assert_right(mask):
    """Assert that SDPA and its gradients are right under a mask, bool (S, S); return the inputs."""
    inputs = gpu.bhsd(batch=1, heads=2, length=len(mask))
    results = gpu.sdpa_and_back(inputs, attn_mask=mask.cuda()[None, None])
    bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    gpu.assert_near(results, gpu.expected_of_sdpa(inputs, bias=bias[None, None]))
    return inputs


def test_a_measured_policy_has_large_masks_recognised_and_no_others(ran):
    """As transformers passes packed documents to SDPA: 4,096 tokens are 16,777,216 pairs."""
    attnreg.configure({"policy": "measured"})
    ends = torch.tensor([300, 1400, 2000, 4096])
    document = torch.searchsorted(ends, torch.arange(4096), right=True)
    places = torch.arange(4096)
    mask = (document[:, None] == document) & (places[:, None] >= places)
    inputs = assert_right(mask)
    assert [(row.seen, row.count) for row in attnreg.stats().masks] == [("causal, documents", 1)]
    assert set(ran()) <= {"FA2", "FA4", "cuDNN"}
    attnreg.reset_stats()
    short = [x[:, :, :4000].contiguous().detach().requires_grad_() for x in inputs]
    gpu.sdpa_and_back(short, attn_mask=mask.cuda()[None, None, :4000, :4000])
    assert attnreg.stats().masks == ()


def test_a_measured_policy_has_smaller_masks_recognised_once_a_program_has_brought_many_shapes():
    attnreg.configure({"policy": "measured"})
    for count in range(1, FEW_SHAPES + 3):
        length = 1449 + 8 * count  # 2**21 pairs and more
        places = torch.arange(length)
        mask = (places[:, None] >= places) & (places[:, None] // 700 == places // 700)
        inputs = assert_right(mask)
        seen = [(row.seen, row.count) for row in attnreg.stats().masks]
        assert seen == ([("causal, documents", count - FEW_SHAPES)] if count > FEW_SHAPES else [])
    attnreg.reset_stats()
    short = [x[:, :, :1400].contiguous().detach().requires_grad_() for x in inputs]
    gpu.sdpa_and_back(short, attn_mask=mask.cuda()[None, None, :1400, :1400])
    assert attnreg.stats().masks == ()


@pytest.mark.usefixtures("recognise")
def test_a_write_that_torch_does_not_count_is_an_error_after_a_while(trust_offsets):
    trust_offsets(0.0)
    inputs, mask = gpu.bhsd(length=LENGTH, grad=False), KEYS.cuda()
    for _ in range(3):
        F.scaled_dot_product_attention(*inputs, attn_mask=mask)
        torch.cuda.synchronize()
    mask.data[0] = True
    with pytest.raises(InvalidInputError, match="attn_mask was written to"):
        for _ in range(3):
            F.scaled_dot_product_attention(*inputs, attn_mask=mask)
            torch.cuda.synchronize()
    out = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    whole = mask.cpu().expand(2, 1, LENGTH, LENGTH)
    bias = torch.zeros(whole.shape, dtype=torch.float64).masked_fill(~whole, -torch.inf)
    gpu.assert_near([out], gpu.expected_of_sdpa([x.requires_grad_() for x in inputs], bias=bias)[:1])

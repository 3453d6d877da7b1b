"""Promises about calls whose mask is recognised: right, on a backend, and torch's own where it isn't."""

import contextlib
import random

import pytest
import torch
import torch.nn.functional as F
from support import dense, truth
from support.known import know
from support.masks import drawn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attnreg
from attnreg.masks.serving import LEFT

PLACES = torch.arange(6)
CAUSAL = PLACES[:, None] >= PLACES
COUNTS = torch.tensor([4, 6])[:, None] > PLACES
PADDED = COUNTS[:, None, None]
GAP = torch.ones(6, 6, dtype=torch.bool).tril()
GAP[4, 2] = False
GAPS = f"{LEFT}some query sees keys with gaps between them"


def attend(inputs, mask, **options):
    """Return the output of a call and its gradients."""
    return dense.with_gradients(F.scaled_dot_product_attention(*inputs, attn_mask=mask, **options), inputs)


def added(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)


def assert_right(results, inputs, mask):
    while mask.dim() < 4:
        mask = mask[None]
    dense.assert_right(results, inputs, bias=added(mask))


@pytest.mark.each_value("in_place", "seed", "dtype")
@pytest.mark.usefixtures("recognise", "in_place")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_calls_with_masks_of_every_structure_are_right_in_both_directions(seed, dtype, seen, ran):
    draw = random.Random(seed)
    for number in range(8):
        mask = drawn(draw)
        batch, _, len_q, len_k = mask.shape
        heads_k = draw.choice((1, 2, 4))
        inputs = dense.qkv(len_q, len_k, heads_k=heads_k, batch=batch, dtype=dtype, seed=number)
        results = attend(inputs, mask, enable_gqa=True)
        assert_right(results, inputs, mask)
        (what, count), backends = seen().popitem(), ran()
        assert count == 1
        if mask.any():
            assert not what.startswith(LEFT), what
        else:
            assert what == f"{LEFT}no query sees a key"
        assert backends.keys() <= {"cpu"}


FORMS = {
    "2-D": CAUSAL,
    "3-D": CAUSAL[None],
    "3-D, expanded": CAUSAL[None].expand(4, 6, 6),
    "4-D": (CAUSAL & PADDED),
    "4-D, expanded to the heads": (CAUSAL & PADDED).expand(2, 4, 6, 6),
    "of keys alone": PADDED,
    "of keys alone, expanded": PADDED.expand(2, 4, 6, 6),
    "of queries alone": COUNTS[:, None, :, None],
    "a transposed view": (CAUSAL.T & PADDED).contiguous().transpose(-1, -2),
    "a view of every second element": (CAUSAL & PADDED).repeat_interleave(2, -1)[..., ::2],
    "a view of a larger one": F.pad(CAUSAL & PADDED, (1, 3, 2, 1))[..., 2:-1, 1:-3],
    "one row of the batch for all": (CAUSAL & PADDED)[:1],
}


@pytest.mark.usefixtures("recognise")
@pytest.mark.parametrize("mask", FORMS.values(), ids=FORMS)
def test_a_mask_of_any_shape_and_layout_that_torch_takes_is_recognised(mask, seen, ran):
    inputs = dense.qkv()
    assert_right(attend(inputs, mask), inputs, mask)
    assert [what.startswith(LEFT) for what in seen()] == [False]
    attend(inputs, mask)
    assert ran().keys() == {"cpu"}


@pytest.mark.usefixtures("recognise")
@pytest.mark.parametrize("layout", dense.LAYOUTS.values(), ids=dense.LAYOUTS)
def test_tensors_of_any_layout_keep_their_results(layout):
    leaves = dense.qkv()
    inputs = [layout(x) for x in leaves]
    out = F.scaled_dot_product_attention(*inputs, attn_mask=PADDED & CAUSAL)
    results = dense.with_gradients(out, leaves)
    dense.assert_near(results, leaves, truth.dense(*inputs, bias=added(PADDED & CAUSAL))[0])


@pytest.mark.usefixtures("recognise")
@pytest.mark.parametrize("scale", [None, 0.5, 0.0])
def test_the_scale_of_a_call_is_kept(scale, seen):
    inputs = dense.qkv()
    given = attend(inputs, PADDED, scale=scale)
    assert seen() == {"padded keys": 1}
    attnreg.configure({"masks": "as_given"})
    for got, expected in zip(given, attend(inputs, PADDED, scale=scale), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("routers")
def test_masks_without_structure_go_on_as_given_bit_for_bit(seen):
    generator = torch.Generator().manual_seed(0)
    inputs = dense.qkv(dtype=torch.bfloat16)
    masks = [torch.rand(2, 1, 6, 6, generator=generator) < 0.6 for _ in range(10)]
    attnreg.configure({"policy": "order", "masks": "as_given"})
    expected = [attend(inputs, mask) for mask in masks]
    assert seen() == {}
    attnreg.configure({"policy": "order", "masks": "recognise"})
    for mask, right in zip(masks, expected, strict=True):
        assert all(map(torch.equal, attend(inputs, mask), right))
    assert seen() == {GAPS: 10}


@pytest.mark.usefixtures("recognise")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_query_that_sees_no_key_gets_what_torch_gives_it(dtype, seen):
    mask = PADDED & CAUSAL & COUNTS[:, None, :, None]
    inputs = dense.qkv(dtype=dtype)
    ours = attend(inputs, mask)
    assert seen() == {"padded queries, padded keys, causal": 1}
    attnreg.configure({"masks": "as_given"})
    torchs = attend(inputs, mask)
    for results in (ours, torchs):
        assert results[0][0, :, 4:].eq(0).all()
        assert results[1][0, :, 4:].eq(0).all()  # nor does the query get a gradient
        assert results[2][0, :, 4:].eq(0).all()
        assert all(x.isfinite().all() for x in results)


@pytest.mark.usefixtures("recognise")
def test_what_the_padding_holds_counts_for_nothing():
    inputs = dense.qkv()
    with torch.no_grad():
        inputs[1][0, :, 4:], inputs[2][0, :, 4:] = torch.nan, torch.inf
    results = attend(inputs, PADDED)
    assert all(x.isfinite().all() for x in results)


@pytest.mark.usefixtures("recognise")
def test_a_mask_that_is_all_true_or_causal_runs_as_a_call_without_one(seen):
    inputs = dense.qkv()
    for mask, is_causal, what in (
        (torch.ones(6, 6).bool(), False, "nothing hidden"),
        (CAUSAL, True, "causal"),
    ):
        ours = attend(inputs, mask)
        assert seen() == {what: 1}
        without = F.scaled_dot_product_attention(*inputs, is_causal=is_causal)
        assert all(map(torch.equal, ours, dense.with_gradients(without, inputs)))


@pytest.mark.usefixtures("recognise")
def test_one_new_token_after_a_padded_cache_is_recognised(seen, ran):
    inputs = dense.qkv(1, 6)
    assert_right(attend(inputs, PADDED), inputs, PADDED)
    assert seen() == {"padded keys": 1}


@pytest.mark.usefixtures("recognise")
def test_masks_that_are_added_are_no_matter(seen):
    inputs = dense.qkv()
    bias = torch.zeros(6, 6).masked_fill(~CAUSAL, -torch.inf)
    attend(inputs, bias)
    attend(inputs, None)
    assert seen() == {}


@pytest.mark.usefixtures("recognise")
def test_a_mask_for_each_head_is_torchs(seen):
    inputs = dense.qkv()
    mask = torch.stack([CAUSAL] * 4)[None]
    assert_right(attend(inputs, mask), inputs, mask)
    assert seen() == {f"{LEFT}heads have masks of their own": 1}


@pytest.mark.usefixtures("recognise")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_with_a_mask_are_torchs_error():
    nested = torch.nested.nested_tensor([torch.randn(4, 6, 8), torch.randn(4, 6, 8)])
    with pytest.raises(RuntimeError, match="Nested tensors for query / key are not supported"):
        F.scaled_dot_product_attention(nested, nested, nested, attn_mask=PADDED)


@pytest.mark.usefixtures("recognise")
@pytest.mark.parametrize(
    "arguments",
    [
        {"attn_mask": torch.ones(5, 6).bool()},
        {"attn_mask": torch.ones(3, 1, 6, 6).bool()},
        {"attn_mask": CAUSAL, "dropout": 0.5},
        {"attn_mask": "causal"},
    ],
    ids=["queries", "batch", "an unknown argument", "no tensor"],
)
def test_a_wrong_call_is_torchs_error(arguments):
    inputs = dense.qkv()

    def error():
        with pytest.raises((RuntimeError, TypeError)) as raised:
            F.scaled_dot_product_attention(*inputs, **arguments)
        return type(raised.value), str(raised.value)

    ours = error()
    attnreg.configure({"masks": "as_given"})
    assert ours == error()


@pytest.mark.usefixtures("recognise")
def test_calls_that_need_torchs_own_rules_are_torchs(seen):
    attend([x[0] for x in dense.qkv()], CAUSAL)  # three dimensions
    with contextlib.suppress(RuntimeError):  # torch's CPU kernel takes both up to 2.14
        attend(dense.qkv(), PADDED, is_causal=True)
    with sdpa_kernel(SDPBackend.MATH):
        attend(dense.qkv(), CAUSAL)
    assert seen() == {
        f"{LEFT}packed calls can't take its shapes, devices or arguments": 2,
        f"{LEFT}sdpa_kernel forbids the flash kernels": 1,
    }


@pytest.mark.usefixtures("recognise")
def test_only_who_asks_for_it_runs_packed_calls_on_the_reference(seen, ran):
    attnreg.configure({"masks": "recognise", "disabled": ["cpu"]})
    inputs = dense.qkv()
    attend(inputs, PADDED)
    assert seen() == {f"{LEFT}no backend but math can run its packed forward": 1}
    with attnreg.use_backend("math"):
        results = attend(inputs, PADDED)
    assert ran() == {"math": (1, 1)}
    assert_right(results, inputs, PADDED)


@pytest.mark.usefixtures("recognise")
def test_no_mask_is_recognised_for_what_stands_in_for_the_reference(seen, monkeypatch, fake):
    know(monkeypatch, fake("slow", stands_in=True).backend)
    attend(dense.qkv(), PADDED)
    assert seen() == {f"{LEFT}no backend but slow can run its packed forward": 1}


@pytest.mark.usefixtures("recognise")
def test_masks_of_ever_new_lengths_are_decided_about_once(ran, decided_alone):
    for length in range(40, 60):
        mask = (torch.arange(length) < length - 8).expand(1, 1, 1, -1)
        attend(dense.qkv(length, length, batch=1), mask)
    assert ran() == {"cpu": (20, 20)}
    assert [spec.max_q for spec in decided_alone] == [40]


@pytest.mark.usefixtures("recognise")
def test_a_scoped_choice_and_a_registered_backend_get_the_packed_calls(fake, ran):
    recorder, inputs = fake("registered"), dense.qkv()
    with attnreg.register_backend(recorder.backend):
        attend(inputs, PADDED)
        assert ran() == {"registered": (1, 1)}
        with attnreg.use_backend("math"):
            attend(inputs, PADDED)
        assert ran() == {"math": (1, 1)}
    [(query, key, _, call)] = recorder.forwards
    assert call.cu_seqlens_q.tolist() == [0, 6, 6, 12]
    assert call.cu_seqlens_k.tolist() == [0, 4, 6, 12]
    assert (query.shape[0], key.shape[0]) == (12, 12)


@pytest.mark.usefixtures("recognise")
@pytest.mark.parametrize("mask", [PADDED, PADDED.flip(-1), PADDED & CAUSAL], ids=["right", "left", "causal"])
def test_padding_at_an_end_copies_neither_queries_nor_keys(fake, mask):
    recorder = fake("registered")
    inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in dense.qkv()]  # as projections
    with attnreg.register_backend(recorder.backend):
        F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    assert recorder.forwards
    for query, key, value, _ in recorder.forwards:
        given = [x.data_ptr() for x in inputs]
        assert [x.data_ptr() for x in (query, key, value)] == given


@pytest.mark.usefixtures("recognise")
def test_under_autocast_calls_run_in_its_dtype():
    inputs = dense.qkv()
    with torch.autocast("cpu", torch.bfloat16):
        out = F.scaled_dot_product_attention(*inputs, attn_mask=PADDED)
    assert out.dtype == torch.bfloat16
    results = dense.with_gradients(out, inputs)
    dense.assert_near(
        results, inputs, truth.dense(*inputs, bias=added(PADDED.expand(2, 1, 6, 6)))[0], torch.bfloat16
    )


@pytest.mark.usefixtures("recognise", "in_place")
@pytest.mark.parametrize(
    "mask", [CAUSAL & PADDED, PADDED, CAUSAL[None]], ids=["causal, padded", "padded", "causal"]
)
def test_a_default_device_hides_no_mask(mask, seen):
    inputs = dense.qkv()
    mask = mask.clone()
    with torch.device("meta"):  # where no mask can be read
        results = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    ((what, count),) = seen().items()
    assert (what.startswith(LEFT), count) == (False, 1)
    with torch.no_grad():
        expected = F.scaled_dot_product_attention(*inputs, attn_mask=added(mask).float())
    torch.testing.assert_close(results.detach(), expected)


@pytest.mark.usefixtures("recognise")
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("named", [False, True], ids=["by position", "by name"])
def test_a_causal_bias_is_run_by_its_class_and_not_read_as_a_mask(make, named):
    query, key = torch.randn(2, 2, 4, 8), torch.randn(2, 2, 6, 8)
    bias, mask = make(4, 6), torch.ones(4, 6, dtype=torch.bool).tril(0 if make is causal_upper_left else 2)
    how = {"attn_mask": bias} if named else {}
    out = F.scaled_dot_product_attention(query, key, key, *(() if named else (bias,)), **how)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, key, mask))


WRONG = {
    "gqa": {"enable_gqa": 1}, "dropout": {"dropout_p": None}, "much dropout": {"dropout_p": 2.0},
    "causal": {"is_causal": torch.tensor(False)}, "scale": {"scale": "x"},
}  # fmt: skip


@pytest.mark.usefixtures("recognise")
@pytest.mark.parametrize("options", WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_torchs_error(options):
    mask, said = (torch.arange(6) < 4).expand(6, 6), []
    for function in (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention):
        with pytest.raises((TypeError, RuntimeError)) as error:
            function(*dense.qkv(), attn_mask=mask, **options)
        said.append((type(error.value), str(error.value)))
    assert said[0] == said[1]


@pytest.mark.usefixtures("recognise")
@pytest.mark.parametrize("part", [False, True], ids=["whole", "a part"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["by head", "by token"])
def test_the_output_lies_in_memory_as_the_query(seen, order, part):
    # Parts are as `chunk` returns them.
    given = [x.detach().repeat(1, 1, 1, 1 + part) for x in dense.qkv()]
    inputs = [x.permute(order).contiguous().permute(order).chunk(1 + part, -1)[0] for x in given]
    mask = (torch.arange(6) < torch.tensor([4, 6])[:, None])[:, None, None]
    out = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    assert attnreg.stats().calls == {"cpu": {"forward": 1, "backward": 0}}
    assert seen() == {"padded keys": 1}
    truth.assert_near(out, truth.dense(*inputs, bias=added(mask))[0])
    assert out.stride() == torch.empty_like(inputs[0]).stride()


@pytest.mark.usefixtures("recognise")
def test_a_program_may_write_to_an_output_that_was_made_while_gradients_were_off(seen):
    inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in dense.qkv()]
    with torch.no_grad():
        out = F.scaled_dot_product_attention(*inputs, attn_mask=PADDED)
    assert attnreg.stats().calls == {"cpu": {"forward": 1, "backward": 0}}
    assert seen() == {"padded keys": 1}
    number = torch.ones(1, requires_grad=True)
    out += number
    truth.assert_near(out - 1, truth.dense(*inputs, bias=added(PADDED))[0], inputs[0].dtype)
    assert torch.autograd.grad(out.sum(), number)[0] == out.numel()

"""Both kernels of the cpu backend: accuracy, and how torch's is called, which is what its calls cost."""

import dataclasses
import functools
import itertools
import random

import pytest
import torch
from support.cpu_calls import CAUSAL, OPEN, assert_same, contiguous, dense, ragged, refuse, solved
from support.truth import assert_accurate
from torch.utils._python_dispatch import TorchDispatchMode

from attnreg.backends.cpu import choice, torch_path
from attnreg.backends.cpu.flash import Flash
from attnreg.core.contract.backend import Call, Kernels
from attnreg.tools.measure.inputs import inputs


@pytest.fixture
def kernels(request, monkeypatch):
    """Return the functions of one kernel, torch's or the compiled one."""
    if request.param == "compiled":
        monkeypatch.setattr(choice, "leaves_to_torch", lambda *call: False)
        return request.getfixturevalue("cpu_kernel").before(Kernels(refuse, refuse))
    directions = torch_path.forward, torch_path.backward
    return Kernels(*(functools.partial(direction, Flash.captured()) for direction in directions))


# Both kernels' tests of a dtype next to each other: see support/references.py.
MAIN = [(kernel, dtype) for dtype in ("bfloat16", "float32") for kernel in ("torch", "compiled")]
FURTHER = [("torch", "float16"), ("torch", "float64")]


def on_kernels(quick, slow):
    slow = [pytest.param(*given, marks=pytest.mark.slow) for given in (*slow, ("compiled", "float16"))]
    return pytest.mark.parametrize(("kernels", "dtype"), [*quick, *slow], indirect=["kernels"])


ON_EACH_KERNEL = on_kernels([*MAIN, *FURTHER], [])
# Where the further dtypes take the ways of these two, and `test_conformance` has a case of it in them; they
# run in the slow tier.
IN_TWO_DTYPES = on_kernels(MAIN, FURTHER)

GROUPINGS = {
    "neighbours of equal length": (48,) * 5,
    "neighbours of equal length, separated": (48, 48, 17, 48, 48),
    "near lengths": (33, 34, 47, 48, 49),
    "one long among short": (3, 5, 400, 2, 4),
    "longest first": (300, 200, 100, 1),
    "empty first, between and last": (0, 40, 0, 0, 41, 0),
    "single tokens": (1,) * 9,
    "one sequence": (129,),
    "powers of two and their neighbours": (15, 16, 17, 127, 128, 129, 255, 257),
}


@pytest.mark.each_value("grouping", "window", "kernels", "dtype")
@IN_TWO_DTYPES
@pytest.mark.parametrize("window", [OPEN, CAUSAL, (20, 5)])
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_packed_sequences_are_accurate(kernels, grouping, window, dtype):
    assert_accurate(kernels, ragged(GROUPINGS[grouping], window=window, dtype=dtype, tail=3, poison=True))


@pytest.mark.each_value("window", "kernels", "dtype")
@IN_TWO_DTYPES
@pytest.mark.parametrize("window", [(0, 0), (-1, 40), (130, -1)])
def test_windows_with_one_bound_or_one_key_are_accurate(kernels, window, dtype):
    for lengths in ((127, 0, 129, 1), (200, 341), (3, 5, 300, 2)):
        assert_accurate(kernels, ragged(lengths, window=window, dtype=dtype, tail=3, poison=True))


@ON_EACH_KERNEL
def test_more_keys_than_a_block_has_are_accurate(kernels, dtype):
    assert_accurate(kernels, ragged((1025,), heads=(1, 1), dims=(16, 16), dtype=dtype))


@pytest.mark.each_value("seed", "kernels", "dtype")
@IN_TWO_DTYPES
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 10))]
)
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_random_batches_are_accurate(kernels, seed, dtype, threads):
    torch.set_num_threads(threads)
    draw = random.Random(seed)
    lengths, lengths_k = ([draw.randint(0, 150) for _ in range(6)] for _ in "qk")
    heads = draw.choice([(2, 2), (4, 2), (6, 1), (9, 3), (20, 1)])
    options = {"heads": heads, "dtype": dtype, "magnitude": draw.choice([0.1, 1.0, 5.0])}
    assert_accurate(kernels, ragged(lengths, window=draw.choice([OPEN, CAUSAL]), **options), seed)
    windows = [OPEN, CAUSAL, (40, 9), (draw.randint(0, 99), draw.randint(0, 99))]
    assert_accurate(kernels, ragged(lengths, lengths_k, window=draw.choice(windows), **options), seed)


@ON_EACH_KERNEL
def test_rounded_exponents_do_not_add_up_where_attention_is_even(kernels, dtype):
    """All exponents are the same then, and so is what rounding them loses: nothing averages out."""
    for length in (100, 700, 900, 981):
        case = ragged((length,), magnitude=0.01, grad_layout="expanded", dtype=dtype)
        grad_value = solved(kernels, *inputs(case))[-1]
        torch.testing.assert_close(grad_value, torch.full_like(grad_value, 0.5), rtol=2**-7, atol=0.0)


@pytest.mark.pairwise("scale", "kernels", "dtype")
@IN_TWO_DTYPES
@pytest.mark.parametrize("scale", [-0.5, -1e-3, 1e-3, 2.0, 0.0, -0.0])
def test_any_scale_is_accurate(kernels, scale, dtype):
    """Torch's kernel multiplies the -inf of its causal mask by the scale."""
    for window, lengths in itertools.product((OPEN, CAUSAL, (20, 5)), ((1, 16, 30, 70), (1, 1))):
        assert_accurate(kernels, ragged(lengths, scale=scale, window=window, dtype=dtype))
    options = {"heads": (4, 2), "scale": scale, "dtype": dtype}
    assert_accurate(kernels, dense(2, 70, window=CAUSAL, **options))
    assert_accurate(kernels, dense(2, 40, 24, window=(-1, 16), **options))  # causal, aligned top-left


LARGE_SCORES = {
    "head dim 256": dense(2, 65, dims=(256, 256), scale=1.0),
    "values x5": dense(2, 33, dims=(40, 40), scale=1.0, magnitude=5.0),
    "values x5, scale below 0": ragged((0, 9, 17), heads=(4, 2), dims=(256, 256), scale=-2.0, magnitude=5.0),
    "one key for each row": ragged((31, 200), dims=(96, 96), window=(0, 0), scale=1.0, magnitude=5.0),
}


@pytest.mark.each_value("case", "kernels", "dtype")
@IN_TWO_DTYPES
@pytest.mark.parametrize("case", LARGE_SCORES)
def test_large_scores_are_as_exact_as_plain_operations(kernels, case, dtype):
    """Rounding an LSE or an output to float32 costs more than all that plain operations round."""
    for seed in range(2):
        assert_accurate(kernels, dataclasses.replace(LARGE_SCORES[case], dtype=dtype), seed)


@ON_EACH_KERNEL
def test_gradients_of_two_keys_are_accurate(kernels, dtype):
    """Rounding the output is then most of what a gradient is off by, unless a kernel makes up for it."""
    options = {"heads": (1, 1), "dims": (256, 256), "scale": -0.125, "dtype": dtype}
    for seed in range(4):
        assert_accurate(kernels, ragged((2,), window=CAUSAL, **options), seed)
        assert_accurate(kernels, ragged((4, 2), window=(1, 0), **options), seed)
        assert_accurate(kernels, dense(1, 3, 2, **options), seed)


@ON_EACH_KERNEL
@pytest.mark.parametrize("window", [OPEN, CAUSAL, (1, 0)])
def test_gradients_of_scores_add_up_to_zero_where_keys_are_few(kernels, window, dtype):
    """So a query has no gradient where its keys are equal, however the output was rounded."""
    case = ragged((2, 9, 16), dims=(96, 96), window=window, dtype=dtype, grad_layout="expanded")
    q, k, v, grad_out, call = inputs(case)
    grad_q = solved(kernels, q, k[:1].expand_as(k), v, grad_out, call)[2]
    torch.testing.assert_close(grad_q, torch.zeros_like(grad_q), rtol=0.0, atol=1e-4)


@pytest.mark.pairwise("scale", "kernels", "dtype")
@IN_TWO_DTYPES
@pytest.mark.parametrize("scale", [1e-30, 1e-40, -1e-40, 1e-46, -1e-46])
def test_scales_too_small_for_float32_leave_masks_as_they_are(kernels, scale, dtype):
    for window in (CAUSAL, (20, 5)):
        assert_accurate(kernels, ragged((1, 16, 200), scale=scale, window=window, dtype=dtype))


@pytest.mark.each_value("far", "kernels", "dtype")
@IN_TWO_DTYPES
@pytest.mark.parametrize("far", [2**31 - 1, 2**31, 2**63 - 1])
def test_windows_as_wide_as_integers_go_hide_nothing(kernels, far, dtype):
    for wide, window in (((far, far), OPEN), ((far, 0), CAUSAL), ((5, far), (5, -1))):
        found, expected = (
            solved(kernels, *inputs(ragged((40, 1, 33), (20, 9, 130), dtype=dtype, window=each)))
            for each in (wide, window)
        )
        assert_same(found, expected)


@pytest.mark.each_value("layout", "kernels", "dtype")
@IN_TWO_DTYPES
@pytest.mark.parametrize(
    "layout", ["plain", "bhsd", "fused qkv", "last dim strided", "one key head", "offset", "odd rows"]
)
def test_layouts_give_the_numbers_of_contiguous_tensors(kernels, layout, dtype):
    options = {"dtype": dtype, "layout": layout, "window": CAUSAL}
    for case in (ragged((70,) * 3, **options), dense(3, 70, **options), ragged((30, 1, 64, 200), **options)):
        *tensors, call = inputs(case)
        assert layout == "plain" or any(not x.is_contiguous() or x.data_ptr() % 64 for x in tensors)
        found, plain = solved(kernels, *tensors, call), solved(kernels, *contiguous(tensors), call)
        # Torch's kernel multiplies by MKL, which sums in another order.
        assert_same(found, plain, tolerance=1e-5 if kernels.specialize is None else 0.0)
    assert_accurate(kernels, case)


@pytest.mark.each_value("window", "kernels", "dtype")
@IN_TWO_DTYPES
@pytest.mark.parametrize("window", [OPEN, CAUSAL, (30, 4)])
def test_counted_keys_are_accurate_in_packed_and_dense_tensors(kernels, window, dtype):
    options = {"window": window, "dtype": dtype, "poison": True}
    assert_accurate(kernels, ragged((9, 60, 5), (40, 90, 7), seqused_k=(13, 90, 0), **options))
    assert_accurate(kernels, dense(3, 50, 80, seqused_k=(80, 31, 0), **options))


@pytest.mark.pairwise("threads", "kernels", "dtype")
@IN_TWO_DTYPES
@pytest.mark.parametrize("threads", [1, 2])
def test_results_are_bitwise_repeatable(kernels, dtype, threads):
    torch.set_num_threads(threads)
    for lengths in ((200, 3, 64, 64, 1, 300), (600,)):
        given = inputs(ragged(lengths, dtype=dtype, heads=(4, 2), window=CAUSAL))
        first = solved(kernels, *given)
        for _ in range(2):
            assert_same(solved(kernels, *given), first)


@pytest.mark.parametrize("kernels", ["torch", "compiled"], indirect=True)
def test_offsets_beyond_32_bits_are_read_right(kernels):
    memory = torch.empty(2**31 + 128, dtype=torch.bfloat16)  # of which few pages are touched
    far = memory.as_strided((9, 2, 64), (2**28, 64, 1))
    *near, call = inputs(ragged((9,)))
    for place in range(3):
        given = [*near]
        given[place] = far.copy_(near[place])
        assert_same(solved(kernels, *given, call), solved(kernels, *near, call))


# ---- what torch's kernel is called with


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_cost_of_a_window_grows_with_its_width_and_not_with_the_square(dtype):
    scores = {
        (length, left): Observed(dtype, length, (left, 0)).scores
        for length, left in ((2048, 64), (4096, 64), (4096, 512))
    }
    for of_direction in range(2):
        short, long, wide = (found[of_direction] for found in scores.values())
        assert 0 < short < 2048 * 2048 / 8
        assert long == pytest.approx(2 * short, rel=0.05)
        assert wide < 4096 * 4096 / 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_causal_computes_little_more_than_half_and_has_no_mask_of_all_scores(dtype):
    length = 2560
    causal, full = Observed(dtype, length, CAUSAL), Observed(dtype, length, OPEN)
    assert full.scores[1] == length * length
    # What the flash kernel skips in its own causal mode can't be counted from here.
    assert causal.largest_mask < length * length / 16
    assert causal.largest < length * length / 4


def test_memory_is_bounded_for_a_long_sequence():
    assert Observed("bfloat16", 3072, OPEN).largest < 2**21


class Observed(TorchDispatchMode):
    """One head of one sequence: scores computed forward and backward, the largest mask and tensor."""

    def __init__(self, dtype, length, window):
        super().__init__()
        self.scores, self.largest_mask, self.largest = [0, 0], 0, 0
        captured = Flash.captured()
        flash = Flash(
            self._counting(0, captured.forward_kernel, 0), self._counting(1, captured.backward_kernel, 1)
        )
        q, k, v, grad = torch.randn(4, length, 1, 16, dtype=getattr(torch, dtype))
        offsets = torch.tensor([0, length], dtype=torch.int32)
        call = Call(0.25, length, length, window=window, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
        with self:
            out, lse = torch_path.forward(flash, q, k, v, call)
            torch_path.backward(flash, grad, q, k, v, out, lse, call)

    def _counting(self, direction, kernel, first):
        def count(*arguments, attn_mask=None, **options):
            q, k = arguments[first : first + 2]
            self.scores[direction] += q.size(0) * q.size(2) * k.size(2)
            if attn_mask is not None:
                self.largest_mask = max(self.largest_mask, attn_mask.untyped_storage().nbytes() // 4)
            return kernel(*arguments, attn_mask=attn_mask, **options)

        return count

    def __torch_dispatch__(self, op, types, arguments=(), options=None):
        found = op(*arguments, **(options or {}))
        if isinstance(found, torch.Tensor):
            self.largest = max(self.largest, found.numel())
        return found


def test_a_mask_that_is_expanded_stays_so_where_each_sequence_is_computed_by_itself():
    q = torch.randn(2, 30, 4, 16)
    mask = torch.randn(2, 1, 1, 30).expand(2, 4, 30, 30)
    call = Call(0.25, 30, 30, attn_bias=mask, batch_invariant=True)
    masks = [alone.attn_bias for *_, alone in torch_path._each(q, q, call)]
    assert [torch.equal(one, mask[n : n + 1]) for n, one in enumerate(masks)] == [True, True]
    assert {one.untyped_storage().nbytes() for one in masks} == {30 * 4}

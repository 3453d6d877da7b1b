"""Promises of `key_ranges` on FA4: the whole batch is one sequence, and bounds and a table hide the rest.

The stand-in for the package reads both as its kernels do (`fake_fa4_masks`).
"""

import logging
import sys

import pytest
import torch
from support import truth
from support.fake_fa4 import both, dense

from attnreg import Call
from attnreg.backends.fa4 import adapter, compiled_kinds
from attnreg.core import registry
from attnreg.core.launching import visible
from attnreg.errors import UnsupportedInputError

# Three blocks of 128 queries; a sequence that begins and ends within a block; an empty one; a tail.
LENGTHS, TAIL = (150, 7, 0, 140), 23


def packed(lengths=LENGTHS, tail=TAIL, count=2, seed=0, window=(-1, -1), **options):
    """Return query, key, value, gradient and a call in which each query sees `count` ranges of keys."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths) + tail
    tensors = [x[0] for x in dense(tokens, tokens, batch=1, seed=seed, **options)]
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    ranges = torch.randint(-10, 150, (tokens, count, 2), generator=generator, dtype=torch.int32)
    ranges[::5] = 0
    longest = max(lengths)
    call = Call(0.25, longest, longest, window, offsets, offsets, key_ranges=ranges.sort(-1).values)
    return *tensors, call


def true_results(query, key, value, grad, call):
    """Return output, LSE and the three gradients by `math`, in float64."""
    math = registry.find("math").kernels()
    return both(math, *(x.double() for x in (query, key, value, grad)), call)


def assert_right(kernels, given):
    got = both(kernels, *given)
    for ours, true in zip(got, true_results(*given), strict=True):
        truth.assert_near(ours, true, torch.bfloat16)
    return got


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"count": 1, "window": (-1, 0)},
        {"count": 3, "window": (60, 5), "heads_k": 2},
        {"dim": 128, "heads": 1},
        {"lengths": (1,), "tail": 0, "count": 1},
        {"count": 0},
    ],
    ids=str,
)
def test_results_are_right(kernels, package, options):
    assert_right(kernels, packed(**options))
    assert [name for name, _ in package.calls] == ["forward", "backward"]


def test_the_gradient_of_the_lse_counts(kernels):
    query, key, value, grad, call = packed()
    out, lse = kernels.forward(query, key, value, call)
    with_lse = call._replace(grad_lse=torch.randn(lse.shape, generator=torch.Generator().manual_seed(1)))
    got = kernels.backward(grad, query, key, value, out, lse, with_lse)
    math = registry.find("math").kernels()
    doubles = [x.double() for x in (grad, query, key, value)]
    exact = math.forward(*doubles[1:], call)
    wanted = math.backward(*doubles, *exact, with_lse._replace(grad_lse=with_lse.grad_lse.double()))
    without = kernels.backward(grad, query, key, value, out, lse, call)
    for ours, true, other in zip(got[:2], wanted[:2], without[:2], strict=True):
        truth.assert_near(ours, true, torch.bfloat16)
        assert not torch.equal(ours, other)


def test_the_package_gets_one_sequence_and_no_bound_but_the_mask(kernels, package):
    *tensors, call = packed(count=3, window=(60, 0))
    both(kernels, *tensors, call)
    (_, forward), (_, backward) = package.calls
    for given in (forward, backward):
        assert given["q"].shape == (1, *tensors[0].shape)
        assert not given["causal"] and given["window_size_left"] is given["window_size_right"] is None
        assert given["cu_seqlens_q"] is given["cu_seqlens_k"] is given["seqused_k"] is None
        assert [x.shape for x in given["aux_tensors"]] == [(4, len(tensors[0]))] * 2
    assert forward["mask_mod"] is backward["mask_mod"]


# Rows that see no key, and rows of no sequence


def test_nan_in_what_no_query_sees_reaches_nothing(kernels):
    *tensors, call = packed()
    blind = (true_results(*tensors, call)[1] == -torch.inf).all(0)
    assert blind[:-TAIL].any() and blind[-TAIL:].all() and not blind.all()
    query, key, value, grad = tensors
    for x in (query, grad):
        x[blind] = torch.nan
    for x in (key, value):
        x[-TAIL:] = torch.nan
    grad_lse = torch.where(blind, torch.nan, torch.ones(query.shape[1], len(query)))
    for changed in (call, call._replace(grad_lse=grad_lse)):
        out, lse, grad_q, grad_k, grad_v = both(kernels, query, key, value, grad, changed)
        assert not out[blind].any() and not grad_q[blind].any()
        assert not grad_k[-TAIL:].any() and not grad_v[-TAIL:].any()
        assert (lse[:, blind] == -torch.inf).all() and lse[:, ~blind].isfinite().all()
        assert all(x.isfinite().all() for x in (out, grad_q, grad_k, grad_v))
    assert all(x[blind].isnan().all() for x in (query, grad)), "an input was written to"


# The table


def all_whole(seen, whole):
    return seen, seen


def one_left_out(seen, whole):
    seen = seen.clone()
    seen[0, 0, 0] = False
    return seen, whole & seen


def shifted(seen, whole):
    return seen.roll(1, -1), whole.roll(1, -1)


@pytest.mark.parametrize("spoilt", [all_whole, one_left_out, shifted])
def test_a_wrong_table_is_a_wrong_result_on_the_stand_in(kernels, monkeypatch, spoilt):
    given = packed()
    assert_right(kernels, given)
    of_bounds = visible._blocks
    monkeypatch.setattr(visible, "_blocks", lambda *bounds: spoilt(*of_bounds(*bounds)))
    offsets = given[4].cu_seqlens_q.clone()
    call = given[4]._replace(cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    with pytest.raises(AssertionError):
        assert_right(kernels, (*given[:4], call))


def test_layers_share_what_is_derived_from_their_ranges(kernels, monkeypatch):
    made, of_packed = [], visible.of_packed
    monkeypatch.setattr(visible, "of_packed", lambda *given: made.append(1) or of_packed(*given))
    *tensors, call = packed(seed=1)
    for _ in range(3):
        both(kernels, *tensors, call)
    assert len(made) == 1


def test_longer_tables_than_the_kernels_have_are_left_to_others(kernels, package, monkeypatch):
    *tensors, call = packed()
    monkeypatch.setattr(visible, "MOST_BLOCKS", 3)
    with pytest.raises(UnsupportedInputError) as error:
        kernels.forward(*tensors[:3], call)
    assert str(error.value) == (
        "packed tokens must be at most 3 blocks of 128 queries and 128 keys with key_ranges, "
        "got 320 queries and 320 keys"
    )
    assert package.calls == []


# First calls


def test_new_ranges_and_lengths_compile_nothing_but_other_numbers_of_ranges_do(kernels, package):
    both(kernels, *packed(count=3))
    interface = sys.modules["flash_attn.cute.interface"]
    forward, backward = interface._flash_attn_fwd.compile_cache, interface._flash_attn_bwd.compile_cache
    kinds = len(compiled_kinds.have_run)
    for seed, lengths in enumerate(((300, 9), (50, 50, 50, 50, 50), (129,)), 1):
        both(kernels, *packed(lengths, count=4, seed=seed))
    assert (len(forward), len(backward), len(compiled_kinds.have_run)) == (1, 1, kinds)
    both(kernels, *packed(count=5))
    assert (len(forward), len(backward)) == (2, 2) and len(compiled_kinds.have_run) > kinds


def test_a_first_call_says_what_it_compiled(kernels, monkeypatch, caplog):
    monkeypatch.setattr(adapter, "LONG", -1.0)
    caplog.set_level(logging.INFO, "attnreg")
    kernels.forward(*packed(dim=64)[:3], packed(dim=64)[4])
    assert [record.getMessage().partition(" s: ")[2] for record in caplog.records] == [
        "bfloat16, head dim 64, packed, key_ranges"
    ]


def test_a_kind_is_recorded_in_a_cuda_graph_only_after_it_ran(kernels, package, monkeypatch):
    query, key, value, _, call = packed(count=2)
    more = packed(count=3)[4]
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "_capturing", lambda tensor: True)
        with pytest.raises(UnsupportedInputError, match="FA4 has to run this kind of forward once before it"):
            kernels.forward(query, key, value, call)
    kernels.forward(query, key, value, call)
    monkeypatch.setattr(adapter, "_capturing", lambda tensor: True)
    kernels.forward(query, key, value, call)
    with pytest.raises(UnsupportedInputError, match="FA4 has to run this kind of forward once before it"):
        kernels.forward(query, key, value, more)
    assert len(package.calls) == 2

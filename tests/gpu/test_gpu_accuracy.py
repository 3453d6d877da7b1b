"""On a GPU: every backend is at most twice as wrong as plain PyTorch, for out, LSE, dq, dk and dv.

FA4 compiles and cuDNN plans each kind of call, so by default they are held to few kinds and many
values; `pytest -m "gpu and slow"` holds them to all.
"""

import functools

import pytest
import torch
from support import gpu

from attnreg.backends import fa4
from attnreg.core import registry
from attnreg.core.contract.backend import Kernels
from attnreg.core.dispatch.planning import device_of
from attnreg.errors import UnsupportedInputError
from attnreg.testing import Conformance
from attnreg.tools.measure import CASES, QUICK, Case, measure

pytestmark = pytest.mark.gpu

OPEN, CAUSAL = (-1, -1), (-1, 0)

# flash-attention's own list of lengths, but for 4224 and 4224: "long", of the cases that take gigabytes.
SHAPES = (
    *((1, 1), (3, 3), (64, 32), (64, 1), (239, 1), (799, 3)),
    *((113, 203), (113, 211), (1023, 1024), (1024, 1023)),
)
RAGGED = ((113, 203), (1, 65), (64, 1), (0, 9), (31, 33), (7, 0), (203, 113))
RATIOS = {1: (4, 4), 2: (4, 2), 3: (6, 2), 4: (8, 2), 7: (14, 2), 8: (16, 2)}
WINDOWS = ((8, 2), (4, 0), (0, 0), (0, 1), (-1, 4), (100, -1), (1025, 1025))
# The parts that a long test is split into: FA4 compiles for minutes, and several processes share them.
PARTS = 8
LAYOUTS = ("fused qkv", "bhsd", "last dim strided", "offset", "odd rows")


def dense(len_q, len_k, batch=2, **options):
    return Case(
        name=f"{len_q}x{len_k} {options}", lens_q=(len_q,) * batch, lens_k=(len_k,) * batch, **options
    )


def ragged(*lengths, **options):
    lens_q, lens_k = zip(*lengths, strict=True)
    return Case(name=f"ragged {options}", lens_q=lens_q, lens_k=lens_k, varlen=True, **options)


def from_matrix(*starts):
    return [case for case in QUICK if case.dtype == "bfloat16" and case.name.startswith(starts)]


def declared_of(named, case):
    """Return the reasons that a backend's limits have against a case."""
    place = device_of(torch.device("cuda", torch.cuda.current_device()))
    entry, spec = registry.find(named), case.spec(place)
    return entry.reasons(spec, "forward") or entry.reasons(spec, "backward")


def run(named, cases):
    """Run cases by the conformance kit, where refusals are what the backend's limits say, in known words."""
    kit = Conformance(named, "cuda")
    outcomes = list(map(kit.run, cases))
    assert outcomes
    wrong = [str(outcome) for outcome in outcomes if not outcome.passed]
    assert not wrong, f"{len(wrong)} of {len(outcomes)} wrong:\n" + "\n".join(wrong)
    for outcome in outcomes:
        declared = declared_of(named, outcome.case)
        is_declined = outcome.case.bias == "key padding" and named == "cuDNN" and not declared
        assert outcome.reasons == declared or (is_declined and gpu.SHARED_BIAS in outcome.reasons[0])
        assert all(map(gpu.REFUSAL.match, outcome.reasons)), outcome.reasons
        further = {"dsinks"} if outcome.case.counts_sinks else set()
        further |= {"dbias"} if outcome.case.bias_gradient else set()
        assert outcome.reasons or outcome.errors.keys() == {"out", "lse", "dq", "dk", "dv"} | further
    return outcomes


def hold(named, cases, refused=None):
    """Run cases; `refused` says how many of them each backend refuses, none where it isn't named."""
    counted = [
        outcome
        for outcome in run(named, cases)
        if not all(gpu.NOT_BUILT in reason for reason in outcome.reasons)
    ]
    assert len(counted) == (refused or {}).get(named, 0)


@pytest.mark.parametrize("window", [OPEN, CAUSAL], ids=["open", "causal"])
def test_dense_calls_of_many_lengths_are_right(named, window):
    # Of these cuDNN leaves out a single query with a single key, and masks over more queries than keys.
    left_out = sum(q == k == 1 or (window == CAUSAL and q > k) for q, k in SHAPES)
    hold(named, [dense(*shape, window=window) for shape in SHAPES], {"cuDNN": left_out})


@pytest.mark.only_for("cuDNN")
@pytest.mark.parametrize(
    "options", [{}, {"heads": (8, 2), "dims": (128, 128)}, {"dtype": "float16"}], ids=str
)
@pytest.mark.parametrize("window", [OPEN, CAUSAL, (8, 2)], ids=str)
def test_packed_calls_of_many_lengths_are_right_by_exact_and_shared_plans(
    named, plans_of_either_kind, window, options
):
    """The LSE of an exact plan lies in another order, and its rows begin anywhere, 512 to 516 apart."""
    assert sum(rows for rows, _ in RAGGED) == 419
    hold(named, [ragged(*RAGGED, (more, 93), window=window, **options) for more in (93, 94, 95, 97)])


@pytest.mark.parametrize("window", [OPEN, CAUSAL, (8, 2), (4, 0)], ids=str)
def test_packed_calls_of_many_lengths_are_right(named, window):
    hold(named, [ragged(*SHAPES, window=window), ragged(*RAGGED, window=window)])


def test_empty_sequences_and_rows_without_a_key_are_right(named):
    hold(
        named, from_matrix("packed empty", "packed all empty", "packed no ", "packed at most", "packed tail")
    )
    hold(named, from_matrix("no queries", "no keys", "no batch"))


def test_odd_lengths_are_right(named):
    hold(named, from_matrix("length 15", "length 33", "length 65", "length 127", "length 143", "length 257"))
    hold(named, [dense(length, length) for length in (191, 193, 255)])


def test_strided_and_unaligned_inputs_are_right(named):
    lengths = [(n, n) for n, _ in RAGGED]  # views of one tensor are as long
    hold(named, [ragged(*lengths, layout=layout, heads=(4, 4)) for layout in LAYOUTS])
    hold(named, [dense(113, 113, layout=layout, heads=(4, 4)) for layout in LAYOUTS])


def test_large_values_and_float16_are_right(named):
    hold(named, [dense(113, 203, magnitude=5.0), dense(113, 203, dtype="float16")])


def test_seqused_k_with_offsets_is_right(named):
    hold(named, from_matrix("packed seqused_k"), {"FA2": 1})


@pytest.mark.slow_for("FA4")
@pytest.mark.parametrize("ratio", RATIOS)
def test_query_heads_that_share_a_key_head_are_right(named, ratio):
    heads = RATIOS[ratio]
    hold(named, [ragged(*RAGGED, heads=heads, window=CAUSAL), dense(113, 203, heads=heads, window=CAUSAL)])


@pytest.mark.only_for("FA4")
def test_four_query_heads_to_a_key_head_are_right(named):
    hold(named, [ragged(*RAGGED, heads=RATIOS[4], window=CAUSAL)])


@pytest.mark.slow_for("FA4", "cuDNN")
@pytest.mark.parametrize("dim", range(32, 257, 8))
def test_head_dims_in_steps_of_8_are_right_or_refused(named, dim):
    options = {"dims": (dim, dim), "window": CAUSAL}
    cases = [
        ragged(*RAGGED, **options),
        dense(113, 203, **options),
        ragged(*RAGGED, dims=(dim, dim), dtype="float16"),
    ]
    hold(named, cases, {"FA4": 3 * (dim in fa4.WRONG_GRADIENTS)})


@pytest.mark.only_for("FA4", "cuDNN")
def test_a_head_dim_of_128_is_right(named):
    hold(named, [ragged(*RAGGED, dims=(128, 128), window=CAUSAL)])


@pytest.mark.only_for("cuDNN")
@pytest.mark.parametrize("dim", [40, 96, 192, 256])
def test_further_head_dims_are_right(named, dim):
    hold(named, [ragged(*RAGGED, dims=(dim, dim), window=CAUSAL)])


@pytest.mark.slow_for("FA4", "cuDNN")
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows_are_right_or_refused(named, window):
    # cuDNN takes no mask over more queries than keys. There FA2 changes a window that is open to a side.
    refused = {"cuDNN": 1, "FA2": int(window == (100, -1))}
    hold(named, [dense(q, k, window=window) for q, k in ((63, 203), (113, 113), (203, 63))], refused)
    hold(named, [ragged(*RAGGED, window=window)])


@pytest.mark.slow_for("FA4", "cuDNN")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_case_of_the_matrix_is_right_or_refused(named, part):
    run(named, QUICK[part::PARTS])


def test_limits_admit_as_many_cases_of_the_matrix_as_are_known_to_run(named):
    assert sum(gpu.admitted(declared_of(named, case)) for case in QUICK) == gpu.ADMITTED[named]


@pytest.mark.slow
def test_the_cases_that_take_gigabytes_are_right_or_refused(named):
    outcomes = run(named, [case for case in CASES if case.heavy])
    assert sum(gpu.admitted(outcome.reasons) for outcome in outcomes) == gpu.HEAVY_ADMITTED[named]


@pytest.mark.slow_for("FA4", "cuDNN")
@pytest.mark.parametrize("part", range(PARTS))
def test_drawn_cases_are_right_through_every_front(named, part):
    kit = Conformance(named, "cuda")
    further = [check for check in kit.checks if check.front or check.case.name.startswith("drawn")]
    assert len(further) > PARTS
    outcomes = list(map(kit.run, further[part::PARTS]))
    assert [str(outcome) for outcome in outcomes if not outcome.passed] == []
    assert [str(outcome.check) for outcome in outcomes if outcome.check.front and outcome.refused] == []


@pytest.mark.slow
def test_tensors_of_more_than_2_to_31_elements_are_right_at_both_ends_or_refused(named, ran):
    one = gpu.packed((512,), heads=(8, 8), dim=128)
    count = 2**31 // one.query.numel() + 2
    offsets = gpu.offsets_of((512,) * count)
    query, key, value = (x.detach().repeat(count, 1, 1).requires_grad_() for x in one.qkv)
    attend = functools.partial(gpu.on(named), query, key, value, offsets, offsets, 512, 512)
    if named == "FA2":
        with pytest.raises(
            UnsupportedInputError, match=r"packed tensors must have fewer than 2\*\*31 elements"
        ):
            attend()
        return
    out = attend()
    grads = torch.autograd.grad(out, (query, key, value), gpu.incoming(one.query).repeat(count, 1, 1))
    assert ran() == {named: (1, 1)}
    right, _ = gpu.expected(one)
    for end in (slice(512), slice(-512, None)):
        gpu.assert_near([x[end] for x in (out, *grads)], right)


def test_many_short_sequences_of_many_heads_give_what_few_give(named, ran):
    """A place among the sums of FA2's backward has more than 32 bits; its package, up to 2.8.3, overflows."""
    lengths, few = (3, 1, 2, 2) * 1100, 400
    given = gpu.packed(lengths, heads=(32, 32), dim=128)
    rows = sum(lengths[:few])
    out = gpu.on(named)(*given.qkv, given.cu_seqlens_q, given.cu_seqlens_q, 3, 3)
    incoming = gpu.incoming(out)
    whole = out, *torch.autograd.grad(out, given.qkv, incoming)
    assert ran() == {named: (1, 1)}
    offsets = given.cu_seqlens_q[: few + 1]
    for part in (slice(rows), slice(-rows, None)):  # both ends have the same lengths
        leaves = [x.detach()[part].requires_grad_() for x in given.qkv]
        right = gpu.on(named)(*leaves, offsets, offsets, 3, 3)
        grads = torch.autograd.grad(right, leaves, incoming[part])
        for one, other in zip(whole, (right, *grads), strict=True):
            torch.testing.assert_close(one[part], other)


PAGED = [(16, 16), (48, 48), (64, 16), (112, 112), (128, 80), (192, 128), (192, 192), (256, 128), (256, 256)]


@pytest.mark.only_for("FA4")
@pytest.mark.parametrize(
    ("dims", "window"),
    [*((dims, OPEN) for dims in PAGED), ((80, 80), CAUSAL), ((96, 96), (31, 0)), ((256, 256), CAUSAL)],
    ids=str,
)
def test_a_forward_with_pages_is_right_and_the_same_each_time(named, dims, window):
    """With other head dims it is neither, or ends the context: FA4 refuses them."""
    lengths, used = (127, 31, 63, 255, 33), (15, 23, 38, 137, 4)
    options = {"varlen": True, "heads": (8, 2), "window": window, "page_size": 16, "seqused_k": used}
    case = Case(name="pages", lens_q=lengths, lens_k=lengths, dims=dims, deterministic=True, **options)
    spec = case.spec(device_of(torch.device("cuda")), needs_backward=False)
    assert registry.find(named).reasons(spec, "forward") == ()
    errors = measure(Kernels(kernels(named).forward, None), case, "cuda")
    assert {name: str(error) for name, error in errors.items() if not error.passed} == {}


@functools.cache
def kernels(name):
    return registry.find(name).kernels()


PAIRED = (
    dense(113, 203, window=CAUSAL),
    ragged(*RAGGED, window=CAUSAL),
    ragged(*RAGGED),
    ragged(*RAGGED, window=CAUSAL, heads=(8, 2), dims=(128, 128)),
)


def test_any_forward_pairs_with_any_backward(named, other):
    pair = Kernels(kernels(named).forward, kernels(other).backward)
    for case in PAIRED:
        errors = measure(pair, case, "cuda")
        assert {name: str(error) for name, error in errors.items() if not error.passed} == {}
        assert errors.keys() == {"out", "lse", "dq", "dk", "dv"}

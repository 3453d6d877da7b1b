"""The cpu backend's bfloat16 products by AMX, emulated: accuracy, and what stays without it."""

import ctypes
import random
from pathlib import Path

import pytest
import torch
from support.cpu_calls import (
    CAUSAL,
    OPEN,
    assert_gradients_are_the_same_with_any_threads,
    assert_same,
    dense,
    ragged,
    refuse,
    solved,
)
from support.truth import assert_accurate

from attnreg.backends.cpu import choice, compiled
from attnreg.core.contract.backend import Kernels
from attnreg.core.torchlib import building
from attnreg.tools.measure.inputs import inputs

EMULATED = building.CPU_KERNEL._replace(flags=(*building.CPU_KERNEL.flags, "-DATTNREG_EMULATED_TILES"))


pytestmark = pytest.mark.usefixtures("threads")


def kernels_of(library, monkeypatch):
    monkeypatch.setattr(choice, "leaves_to_torch", lambda *call: False)
    return compiled.CompiledKernel.of(library).before(Kernels(refuse, refuse))


@pytest.fixture
def tiles(compiled_libraries, monkeypatch):
    """Return the kernel as it is with AMX, emulated; a call that would go to torch's kernel fails."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):  # or it compiles for nothing
        pytest.skip("tiles need AVX512")
    library = ctypes.CDLL(str(compiled_libraries((EMULATED,))[EMULATED]))
    if not library.attnreg_has_tiles():
        pytest.skip("tiles need GCC 11 or Clang 12")
    return kernels_of(library, monkeypatch)


@pytest.fixture
def no_tiles(built_cpu_kernel, monkeypatch):
    """Return the kernel as it is here, which has to be without AMX."""
    library = ctypes.CDLL(str(built_cpu_kernel))
    if library.attnreg_has_tiles():
        pytest.skip("this machine has AMX")
    return kernels_of(library, monkeypatch)


def test_a_machine_without_amx_never_uses_it(built_cpu_kernel):
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    if not {"amx_tile", "amx_bf16"}.issubset(flags):
        assert not ctypes.CDLL(str(built_cpu_kernel)).attnreg_has_tiles()


# ---- numbers


@pytest.mark.each_value("dims", "window")
@pytest.mark.parametrize("window", [OPEN, CAUSAL, (50, 10)])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (32, 96), (256, 32)])
def test_sizes_of_heads_are_accurate(tiles, dims, window):
    assert_accurate(tiles, ragged((140, 33, 77), dims=dims, window=window))


@pytest.mark.each_value("window", "lengths")
@pytest.mark.parametrize(
    "lengths", [(32, 32), (33, 700), (700, 33), (513, 513), (64, 1100), (1, 90), (90, 1)]
)
@pytest.mark.parametrize("window", [OPEN, CAUSAL, (0, 0)])
def test_lengths_that_fill_no_tile_or_block_are_accurate(tiles, lengths, window):
    assert_accurate(tiles, dense(1, *lengths, heads=(2, 1), dims=(64, 64), window=window))


@pytest.mark.parametrize("size", [1, 48])
def test_keys_in_pages_give_the_bits_of_the_same_keys_in_one_piece(tiles, no_tiles, size):
    q, k, v, _, call = inputs(ragged((144, 96), heads=(4, 2), dims=(64, 64), window=CAUSAL))
    expected = tiles.forward(q, k, v, call)
    order = torch.randperm(240 // size, generator=torch.Generator().manual_seed(1))
    pages = [x.view(-1, size, *x.shape[1:])[order.argsort()] for x in (k, v)]
    table = torch.zeros(2, 144 // size, dtype=torch.int32)
    table[0], table[1, : 96 // size] = order[: 144 // size], order[144 // size :]
    call = call._replace(cu_seqlens_k=None, block_table=table, seqused_k=torch.tensor([144, 96]).int())
    assert_same(tiles.forward(q, *pages, call), expected)
    assert not torch.equal(no_tiles.forward(q, *pages, call)[0], expected[0])


@pytest.mark.parametrize("seed", range(8))
def test_random_batches_are_accurate(tiles, seed):
    draw = random.Random(seed)
    count, longest = draw.randint(1, 4), draw.choice((70, 200, 600))
    lens_q, lens_k = ([draw.randint(1, longest) for _ in range(count)] for _ in range(2))
    case = ragged(
        *(lens_q, lens_k if draw.random() < 0.5 else lens_q),
        heads=draw.choice(((2, 2), (4, 2), (4, 1))),
        dims=draw.choice(((64, 64), (64, 128), (96, 96))),
        window=draw.choice((OPEN, CAUSAL, (draw.randint(0, 90), draw.randint(0, 90)))),
        magnitude=draw.choice((0.3, 1.0, 3.0)),
        grad_lse=draw.random() < 0.3,
    )
    assert_accurate(tiles, case, seed)


@pytest.mark.parametrize("highest", ["first", "last", "rising"])
def test_scores_that_rise_from_block_to_block_are_rescaled(tiles, highest):
    """Weights are relative to a score that stays until a higher one is 2^8 times as heavy."""
    q, k, v, _, call = inputs(dense(1, 40, 900, heads=(1, 1), dims=(64, 64)))
    order = torch.linspace(0.0, 1.0, 900)[None, :, None, None]
    by = {"first": 1.0 - order, "last": order, "rising": order * 8.0}[highest]
    q, k = q.abs(), (k.abs() * by).bfloat16()
    out, lse = tiles.forward(q, k, v, call)
    scores = q[0, :, 0].double() @ k[0, :, 0].double().T * call.scale
    torch.testing.assert_close(lse[0, 0].double(), scores.logsumexp(-1), rtol=2e-6, atol=1e-5)
    expected = scores.softmax(-1) @ v[0, :, 0].double()
    torch.testing.assert_close(out[0, :, 0].double(), expected, rtol=8e-3, atol=4e-3)


def test_gradients_do_not_depend_on_the_number_of_threads(tiles):
    case = ragged((1100, 30, 600), heads=(4, 2), dims=(64, 64), window=CAUSAL)
    assert_gradients_are_the_same_with_any_threads(tiles, case)


def test_a_nan_stays_in_its_row_or_its_sequence(tiles):
    *tensors, call = inputs(ragged((40, 70, 33), dims=(64, 64), heads=(4, 2)))
    expected = solved(tiles, *tensors, call)
    tensors[0][60, 1, 5] = torch.nan
    found = solved(tiles, *tensors, call)
    for number, places in enumerate([(60, 1), (1, 60), (60, 1), (slice(40, 110), 0), (slice(40, 110), 0)]):
        expected[number][places] = torch.nan
        assert_same([found[number]], [expected[number]])


# ---- what is multiplied without AMX


def case_of(options):
    return dense(1, *options.pop("lengths", (130, 130)), **{"dims": (64, 64), "heads": (2, 2), **options})


def test_calls_that_tiles_suit_are_multiplied_by_them(tiles, no_tiles):
    given = inputs(case_of({}))
    for one, other in zip(solved(tiles, *given), solved(no_tiles, *given), strict=True):
        assert not torch.equal(one, other)


@pytest.mark.parametrize(
    "options",
    [
        {"dims": (40, 64)},
        {"dims": (64, 40)},
        {"softcap": 3.0},
        {"alibi": True},
        {"dropout": 0.3, "lengths": (64, 64)},
        {"scale": -0.1},
        {"lengths": (31, 130)},
        {"lengths": (130, 31)},
        {"dtype": "float32"},
        {"dtype": "float16"},
    ],
    ids=str,
)
def test_other_calls_are_computed_as_without_amx(tiles, no_tiles, options):
    given = inputs(case_of(options))
    assert_same(solved(tiles, *given), solved(no_tiles, *given))


def test_gradients_of_very_large_scores_are_computed_as_without_amx(tiles, no_tiles):
    given = inputs(case_of({"magnitude": 30.0}))
    out, lse = no_tiles.forward(*given[:3], given.call)
    assert float(lse.max()) > 256.0
    arguments = (given.grad_out, *given[:3], out, lse, given.call)
    assert_same(tiles.backward(*arguments), no_tiles.backward(*arguments))

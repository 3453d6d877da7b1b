"""A softcap is given to FA4 as functions of scores, on Hopper and of releases that were tried."""

import pytest
import torch
from support.fake_fa4 import both, dense, dense_call

from attnreg import Call
from attnreg.backends.fa4 import BACKEND, compiled_kinds


@pytest.mark.pairwise("version", "is_hopper", "dtype")
@pytest.mark.parametrize("version", ["4.0.0b36", "4.0.0b35"])
@pytest.mark.parametrize("is_hopper", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_functions_of_scores_have_the_results_of_the_number(
    install, on_hopper, monkeypatch, is_hopper, version, dtype
):
    package = install(version=version)
    if not is_hopper:
        monkeypatch.setattr(compiled_kinds, "major_of", lambda device: 10)
    query, key, value, grad, call = dense_call(softcap=2.0, dtype=dtype)
    results = both(BACKEND.load(), query, key, value, grad, call)
    (_, forward), (_, backward) = package.calls
    if is_hopper and version == "4.0.0b36":
        assert (forward["softcap"], backward["softcap"]) == (None, 0.0)
        assert forward["softmax_scale"] == call.scale / 2.0
        # A gradient that is larger by the softcap would overflow.
        assert backward["softmax_scale"] == (call.scale if dtype == torch.float16 else call.scale / 2.0)
    else:
        assert forward["softcap"] == backward["softcap"] == 2.0
        assert forward["score_mod"] is backward["score_mod"] is backward["score_mod_bwd"] is None
        assert forward["softmax_scale"] == backward["softmax_scale"] == call.scale
    monkeypatch.setattr(compiled_kinds, "major_of", lambda device: 10)
    as_number = both(BACKEND.load(), query, key, value, grad, call)
    without = both(BACKEND.load(), query, key, value, grad, call._replace(softcap=0.0))
    assert all(map(torch.equal, results, as_number))
    assert not any(map(torch.equal, results, without))


@pytest.mark.parametrize(
    ("dim", "length", "window", "tile"),
    [
        (128, 129, (-1, 0), (192, 80)),
        (104, 129, (64, 2), (192, 80)),
        (128, 129, (64, -1), (192, 80)),
        (128, 128, (-1, 0), None),
        (128, 129, (-1, -1), None),
        (96, 129, (-1, 0), None),
        (192, 129, (-1, 0), None),
    ],
)
def test_long_bounded_forwards_have_a_tile_of_their_own(
    package, kernels, on_hopper, dim, length, window, tile
):
    query, key, value, _, call = dense_call(len_q=length, dim=dim, softcap=2.0, window=window)
    kernels.forward(query, key, value, call)
    kernels.forward(query, key, value, call._replace(softcap=0.0))
    assert [given["tile_mn"] for _, given in package.calls] == [tile, None]


@pytest.mark.parametrize(("length", "tile"), [(129, (192, 80)), (128, None)])
def test_the_longest_of_packed_sequences_decides_about_the_tile(package, kernels, on_hopper, length, tile):
    query, key, value, _ = (x[0] for x in dense(length + 3, length + 3, dim=128, batch=1))
    offsets = torch.tensor([0, length, length + 3], dtype=torch.int32)
    given = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "window": (-1, 0), "softcap": 2.0}
    kernels.forward(query, key, value, Call(0.25, length, length, **given))
    assert [given["tile_mn"] for _, given in package.calls] == [tile]


def test_a_cache_in_pages_has_the_tile_of_which_pages_of_its_size_are_refused(package, kernels, on_hopper):
    query, key, value, _ = dense(256, 256, dim=128, batch=1)
    offsets, table = torch.tensor([0, 256], dtype=torch.int32), torch.tensor([[1, 0]], dtype=torch.int32)
    used = torch.tensor([256], dtype=torch.int32)
    call = Call(0.25, 256, 256, cu_seqlens_q=offsets, seqused_k=used, block_table=table, window=(-1, 0))
    pages = [x[0].unflatten(0, (2, 128)) for x in (key, value)]
    kernels.forward(query[0], *pages, call._replace(softcap=2.0))
    assert [given["tile_mn"] for _, given in package.calls] == [None]

"""The default order of the GPU's backends for a cache of keys of which not all count."""

import pytest
from support.packages import gpu_spec

from attnreg.backends import cudnn, fa2, fa4

FA4_FIRST, FA2_FIRST = ["FA4", "FA2", "cuDNN"], ["FA2", "cuDNN", "FA4"]


@pytest.mark.parametrize(
    ("changes", "order"),
    [
        ({}, FA4_FIRST),  # 64 parts
        ({"max_k": 8193}, FA2_FIRST),
        ({"max_k": 8193, "batch": 32}, FA4_FIRST),
        ({"max_k": 8193, "batch": 31}, FA2_FIRST),
        ({"batch": 15}, FA2_FIRST),
        ({"batch": 15, "max_k": 4096}, FA4_FIRST),
        ({"batch": 1, "max_k": 4096}, FA4_FIRST),
        ({"capturing": True}, FA2_FIRST),
        ({"capturing": True, "max_k": 4096}, FA4_FIRST),
        ({"capturing": True, "max_k": 4096, "batch": 15}, FA2_FIRST),
        ({"capturing": True, "max_k": 1024, "batch": 15}, FA4_FIRST),
        ({"capturing": True, "max_k": 200, "batch": 7}, FA2_FIRST),
        ({"capturing": True, "max_k": 100_000, "batch": 32}, FA4_FIRST),
        ({"max_q": 4, "tokens_q": 64}, FA4_FIRST),
        ({"max_q": 4, "tokens_q": 64, "capturing": True}, ["FA4", "cuDNN", "FA2"]),
        ({"heads_k": 16, "capturing": True}, ["FA4", "cuDNN", "FA2"]),
        ({"max_q": 255, "tokens_q": 4080}, FA4_FIRST),
        ({"max_q": 256, "tokens_q": 4096}, ["FA4", "cuDNN", "FA2"]),
        ({"max_k": 4096, "tokens_k": 4095}, FA4_FIRST),  # fewer keys than a sequence may have
        # Values are copied, by the head dims or the GPU.
        ({"max_k": 4096, "head_dim": 24, "head_dim_v": 24}, FA2_FIRST),
        ({"max_k": 4096, "device": "sm_100"}, FA2_FIRST),
        ({"seqused_k": False}, ["FA4", "cuDNN", "FA2"]),
        ({"page_size": 256}, ["FA4", "cuDNN", "FA2"]),
    ],
    ids=str,
)
def test_decoding_goes_to_fa4_first_but_where_it_copies_values_or_fa2_splits_keys(changes, order):
    usual = {"batch": 16, "max_q": 1, "max_k": 8192, "heads_q": 16, "heads_k": 4, "varlen": True}
    spec = gpu_spec(**usual | {"seqused_k": True} | changes)
    known = (fa2.BACKEND, cudnn.BACKEND, fa4.BACKEND)
    assert [one.name for one in sorted(known, key=lambda one: -one.priority_for(spec))] == order

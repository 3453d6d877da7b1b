"""What is said of the versions of torch holds for the one that is installed."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.export import Dim, export

from attnreg.core.torchlib import versions

HEADERS = Path(torch.__file__).parent / "include" / "ATen" / "native" / "transformers"
FACTS = {
    "SELECTOR_BROADCASTS": ("sdp_utils_cpp.h", "normalize_unbatched_input"),
    "EFFICIENT_SHARES_HEADS": ("cuda/mem_eff_attention/kernel_forward.h", "q_heads_per_kv"),
}


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_about_torchs_kernels_is_one_of_its_headers(fact):
    header, name = FACTS[fact]
    assert getattr(versions, fact) is (name in (HEADERS / header).read_text())


def test_the_selector_takes_tensors_without_a_batch_where_it_is_said_to():
    query, one = torch.randn(4, 8, 16), torch.randn(1, 8, 16)
    choices = [torch._fused_sdp_choice(query, key, key) for key in (query, one)]
    flash, math = torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.MATH
    assert choices == [(flash if versions.SELECTOR_BROADCASTS else math).value] * 2


def test_repeated_heads_are_exported_for_any_length_where_they_are_said_to_be():
    class Repeat(torch.nn.Module):
        def forward(self, x):
            return x.repeat_interleave(2, 1)

    lengths = {"x": {2: Dim("length", min=2, max=64)}}
    refused = pytest.raises(torch._dynamo.exc.UserError, match="Constraints violated")
    with nullcontext() if versions.EXPORTS_REPEATED_HEADS else refused:
        export(Repeat(), (torch.randn(2, 2, 6, 8),), dynamic_shapes=lengths)


def test_whether_the_selector_goes_by_fa4_is_asked_where_torch_knows_it(monkeypatch):
    assert not versions.selector_counts_on_fa4()
    assert hasattr(torch._C, "_get_fa4_sdp_enabled") is (versions.TORCH_VERSION >= (2, 15))
    for told in (True, False):
        monkeypatch.setattr(torch._C, "_get_fa4_sdp_enabled", lambda told=told: told, raising=False)
        assert versions.selector_counts_on_fa4() is told
    monkeypatch.delattr(torch._C, "_get_fa4_sdp_enabled")
    assert not versions.selector_counts_on_fa4()

"""On a GPU: a kernel of the hub's form, in a folder, is verified in a process of its own, and serves."""

import sys
from pathlib import Path

import pytest
import torch
from support import hub

import attnreg
from attnreg.core import registry

pytestmark = pytest.mark.gpu

HERE = Path(hub.__path__[0])


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """Return the name of a kernel for this GPU, for which the stand-in for `kernels` is there."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    variant = tmp_path / "kernel" / "build" / "torch-cuda"
    variant.mkdir(parents=True)
    (variant / "__init__.py").write_text((HERE / "cuda_kernel.py").read_text())
    yield f"hub:{tmp_path / 'kernel'}"
    sys.modules.pop("kernels", None)


def test_a_kernel_serves_packed_and_dense_calls_after_its_verification(kernel):
    offsets = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    packed = [torch.randn(300, 4, 64, dtype=torch.bfloat16, device="cuda").requires_grad_() for _ in range(3)]
    results = {}
    for name in (kernel, "FA2"):
        out = attnreg.varlen_attn(*packed, offsets, offsets, 200, 200, window_size=(-1, 0), backend=name)
        results[name] = out, *torch.autograd.grad(out.float().square().sum(), packed)
    assert attnreg.stats().calls[kernel] == {"forward": 1, "backward": 1}
    torch.testing.assert_close(results[kernel], results["FA2"])
    assert registry.find(kernel).open().devices == ("cuda",)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attnreg.varlen_attn(*packed, offsets, offsets, 200, 200, window_size=(-1, 0), backend=kernel)
    graph.replay()
    torch.testing.assert_close(out, results[kernel][0])

"""Promises of the call cache in processes that fork, that end, and where a setting excludes it."""

from support.processes import forked

BEGIN = """
import os, sys, torch, warnings
warnings.simplefilter("error")
import attnreg
import torch.nn.functional as F
from pathlib import Path
from attnreg.core.aten import routing
from attnreg.core.dispatch.declined import retry_on_decline
from attnreg.core.torchlib import building, captured
from attnreg.core.varlen import plans
building.built = lambda: Path(sys.argv[1])
torch.set_num_threads(1)
q = torch.randn(1, 2, 8, 16, requires_grad=True)
packed, offsets = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)

def attend():
    F.scaled_dot_product_attention(q, q, q).sum().backward()

def attend_packed():
    return attnreg.varlen_attn(packed, packed, packed, offsets, offsets, 4, 4)

def both(times=3):
    for _ in range(times):
        attend()
        attend_packed()
"""

FORKED = """
attnreg.register_backend("cpu")
both()
assert captured.call_cache_in_use
planned = []

def counted(run):
    planned.append(run)
    return retry_on_decline(run)

routing.retry_on_decline = plans.retry_on_decline = counted
both(1)
assert len(planned) == 0, "calls that are kept are planned"
child = os.fork()
both(2)
assert len(planned) == (0 if child else 3), "the child takes over what another thread may have been changing"
assert attnreg.stats().calls["cpu"] == {"forward": 12, "backward": 6}, attnreg.stats()
with attnreg.register_backend("math"):
    both(2)
assert attnreg.stats().calls["math"] == {"forward": 4, "backward": 2}, attnreg.stats()
with attnreg.use_backend("math"):
    both()
if not child:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("both")
"""

# What is registered first runs last.
LAST = """
import atexit

def last():
    ones = torch.ones(1, 1, 3, 8)
    print(F.scaled_dot_product_attention(ones, ones, ones).sum(), attend_packed().isfinite().all())

atexit.register(last)
"""
AT_THE_END = """
attnreg.register_backend("cpu")
both()
with attnreg.use_backend("math"):
    both()
leaf = packed.requires_grad_()
kept = attend_packed()  # a node of autograd's that outlives everything
print(captured.call_cache_in_use)
"""


def test_a_forked_process_keeps_the_call_cache_and_each_process_counts_its_own_calls(built_routers):
    result = forked(BEGIN + FORKED, str(built_routers))
    assert (result.stdout, result.returncode) == ("both\n", 0), result.stderr


def test_calls_at_the_very_end_of_the_process_still_run(built_routers):
    result = forked(BEGIN + LAST + AT_THE_END, str(built_routers))
    assert result.stdout.splitlines() == ["True", "tensor(24.) tensor(True)"], result.stderr
    assert (result.returncode, result.stderr) == (0, "")

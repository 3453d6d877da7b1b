"""On a GPU: a training that is killed and resumed goes on as if nothing had happened."""

import json

import pytest
from support.processes import python

pytestmark = pytest.mark.gpu

STEPS, KILLED_AT = 12, 7

# Trains from the last checkpoint on, or from the beginning, and prints the losses of its steps.
TRAINING = """
import json, os, signal, sys
from pathlib import Path

import torch
import attnreg

checkpoint, steps, killed_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)


class Block(torch.nn.Module):
    def __init__(self, width=256, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x, offsets, longest):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        out = attnreg.varlen_attn(q, k, v, offsets, offsets, longest, longest, is_causal=True)
        return x + self.out(out.flatten(-2))


layers = torch.nn.ModuleList([Block(), Block()]).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
first, losses = 0, []
if checkpoint.exists():
    saved = torch.load(checkpoint)
    layers.load_state_dict(saved["layers"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["rng"])
    first, losses = saved["step"], saved["losses"]
for step in range(first, steps):
    lengths = torch.randint(1, 200, (4,))
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().cuda()
    x = target = torch.randn(int(lengths.sum()), 256).to("cuda", torch.bfloat16)
    for layer in layers:
        x = layer(x, offsets, int(lengths.max()))
    loss = (x + target).float().square().mean()
    loss.backward()
    if step == killed_at:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    new = {"layers": layers.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    torch.save(new | {"step": step + 1, "losses": losses}, f"{checkpoint}.new")
    os.replace(f"{checkpoint}.new", checkpoint)
print(json.dumps([losses, list(attnreg.stats().calls)]))
"""


@pytest.mark.slow
def test_a_training_that_is_killed_and_resumed_has_the_same_losses(named, tmp_path):
    def train(checkpoint, killed_at):
        given = tmp_path / checkpoint, STEPS, killed_at
        settings = {"ATTNREG_BACKEND": named, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        return python("-c", TRAINING, *map(str, given), **settings)

    killed, resumed, whole = train("one", KILLED_AT), train("one", -1), train("other", -1)
    assert killed.returncode == -9, killed.stderr
    (losses, ran), (expected, _) = (json.loads(done.stdout) for done in (resumed, whole))
    assert named in ran  # another one may have run a backward that has to be repeatable
    assert len(losses) == STEPS
    assert losses == expected
    assert len(set(losses)) == STEPS

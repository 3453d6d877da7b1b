"""Which GPU backends give a sequence the same bits in every batch; those that declare it have to.

With `-n 0` it prints a line for each call and direction, of backends that don't declare it as well.
"""

import sys
from dataclasses import replace

import pytest
import torch

from attnreg.core import registry
from attnreg.core.dispatch.planning import device_of
from attnreg.errors import UnsupportedInputError
from attnreg.tools.measure import CASES, inputs
from attnreg.tools.measure.invariance import dependent

pytestmark = pytest.mark.gpu

GRADIENTS = {"dq", "dk", "dv"}
MIXED, DENSE = (
    next(case for case in CASES if case.name == name and case.dtype == "bfloat16")
    for name in ("packed batch-invariant", "batch-invariant")
)
# Lengths at which kernels split the keys where they may, and rows of few tasks.
LENGTHS = {"lens_q": (2048, 1, 64, 7, 1, 2048, 130), "lens_k": (2048, 8192, 64, 3000, 1, 2048, 4100)}
LONG = replace(MIXED, name="long", heads=(8, 2), dims=(128, 128), **LENGTHS)
CALLS = (
    DENSE,
    replace(DENSE, name="dense, long", lens_q=(1024,) * 5, lens_k=(1024,) * 5, window=(-1, 0)),
    replace(DENSE, name="dense, decoding", lens_q=(1,) * 5, lens_k=(8192,) * 5),
    MIXED,
    LONG,
    replace(LONG, name="decoding", lens_q=(1,) * 7),
    replace(LONG, name="window", window=(300, 0)),
)
OPTIONS = ({}, {"num_splits": 1}, {"deterministic": True})


def varying(entry, case, device):
    """Return the results whose bits depend on the batch, by direction; none for one that isn't run."""
    # Whether it is declared doesn't matter here: the kernels are told in any case.
    spec = replace(case, batch_invariant=False).spec(device_of(device))
    if entry.reasons(spec, "forward"):
        return {}
    kernels, directions = entry.kernels(), ["forward", "backward"]
    if entry.reasons(spec, "backward"):
        kernels, directions = kernels._replace(backward=None), ["forward"]
    try:
        found = dependent(kernels, inputs(case, device))
    except UnsupportedInputError:
        return {}
    parts = {"forward": found - GRADIENTS, "backward": found & GRADIENTS}
    return {direction: sorted(parts[direction]) for direction in directions}


def test_a_backend_that_declares_it_gives_a_sequence_the_same_bits_in_every_batch(named, capsys):
    device, entry = torch.device("cuda", torch.cuda.current_device()), registry.find(named)
    broken, ran = [], 0
    for case in CALLS:
        for options in OPTIONS:
            asked = replace(case, batch_invariant=True, **options)
            for direction, names in varying(entry, asked, device).items():
                ran += 1
                declared = not entry.reasons(asked.spec(device_of(device)), direction)
                line = f"{named} {direction}, {case.name} {options or ''}: {', '.join(names) or 'same bits'}"
                with capsys.disabled():
                    sys.stdout.write(f"\n{line}{' (declared)' if declared else ''}")
                broken += [line] if names and declared else []
    assert ran
    assert broken == []

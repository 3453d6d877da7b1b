"""What tests of the installation share: where an op's kernel was registered, and other people's overrides."""

import warnings

import torch
import torch.nn.functional as F
from support.dense import with_gradients

from attnreg.core import aten

CPU_OP = "_scaled_dot_product_flash_attention_for_cpu"
FLASH_OP = "_flash_attention_forward"
# Of the ops that this torch has.
PLACES = [(route.op, key) for route in aten.ROUTES if aten._is_present(route) for key in route.keys]


def table(op, key):
    """Return where the kernel of an op and key was registered; empty if there is none."""
    lines = torch._C._dispatch_dump_table(f"aten::{op}").splitlines()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith(f"{key}:")), "")


def tables():
    return {place: table(*place) for place in PLACES}


def is_ours(place):
    files = ("attnreg/core/aten/__init__.py", "attnreg/core/dispatch/csrc/module.cpp")
    return any(file in table(*place) for file in files)


def attend(inputs):
    """Return output and gradients of `F.scaled_dot_product_attention`."""
    return with_gradients(F.scaled_dot_product_attention(*inputs, is_causal=True), inputs)


def same(results, others):
    return all(map(torch.equal, results, others))


class Override:
    """Somebody else's kernel of an op."""

    def __init__(self, op=CPU_OP, key="CPU"):
        self.calls = 0
        self.library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            self.library.impl(op, self.run, key, allow_override=True)  # the default from torch 2.13 on

    def run(self, query, *args, **kwargs):
        self.calls += 1
        return torch.zeros_like(query), query.new_zeros(query.shape[:3])

    def remove(self):
        self.library._destroy()

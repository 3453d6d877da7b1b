"""The backend on a CPU: torch's own CPU flash kernel, and attnreg's own if `attnreg build` has compiled it.

`torch_path.py` runs any call by torch's kernel, `compiled.py` calls the kernel in `kernel/`, and `choice.py`
decides which is faster. Imports from `contract`, `torchlib` and `settings`. Start with README.md.
"""

from __future__ import annotations

import functools

import torch

from attnreg.backends.cpu import choice, compiled, torch_path
from attnreg.backends.cpu.flash import Flash
from attnreg.core.contract.backend import COMPILED_KERNEL, Backend, Kernels
from attnreg.core.contract.capabilities import ANY_SIZE, Capabilities, Range, one_of
from attnreg.core.contract.spec import AttentionSpec

CAPABILITIES = Capabilities(
    devices=("cpu",),
    dtypes=("float16", "bfloat16", "float32", "float64"),
    head_dim=Range(1),
    page_size=ANY_SIZE,
    varlen=True,
    gqa=True,
    causal=True,
    window=True,
    bias=True,
    dropout=True,
    alibi=True,
    seqused_k=True,
    num_splits=True,
    any_scale=True,
    softcap=True,
    grad_lse=True,
    deterministic=True,
    batch_invariant=True,
)

# The least softcap with slopes, which are divided by it.
_LEAST_SOFTCAP = 2.0**-64


def load() -> Kernels:
    """Capture torch's kernels, and load the compiled kernel if it exists."""
    flash = Flash.captured()
    kernels = Kernels(
        functools.partial(torch_path.forward, flash),
        functools.partial(torch_path.backward, flash),
        replaces_native=choice.corrects_torch,
    )
    library = compiled.load()
    return kernels if library is None else library.before(kernels)


def version() -> str:
    """Return torch's version, and whether the compiled kernel is loaded: times and numbers depend on both."""
    return f"{torch.__version__}{'' if compiled.load() is None else COMPILED_KERNEL}"


def _refuses(spec: AttentionSpec) -> tuple[str, ...]:
    """Return reasons against calls whose options only the compiled kernel has, where it can't run them."""
    on = {"softcap": spec.softcap, "grad_lse": spec.grad_lse, "alibi_slopes": spec.alibi}
    option = next((name for name, is_on in {**on, "dropout_p": spec.dropout}.items() if is_on), "")
    if option and spec.dtype not in choice.DTYPES:
        return (f"dtype must be {one_of(choice.DTYPES)} with {option}, got {spec.dtype}",)
    if spec.bias and (option or spec.page_size is not None):
        return (f"attn_bias must be None with {option or 'block_table'}, got a tensor",)
    if spec.alibi and 0.0 < spec.softcap < _LEAST_SOFTCAP:
        return (f"softcap must be 2**-64 or more with alibi_slopes, got {spec.softcap}",)
    if option and compiled.load() is None:
        return (f"{option} needs the compiled kernel, which `attnreg build` makes",)
    return ()


BACKEND = Backend(
    name="cpu",
    priority=100,
    forward=CAPABILITIES,
    backward=CAPABILITIES,
    load=load,
    version=version,
    refuses=_refuses,
    cuts=choice.cuts,
)

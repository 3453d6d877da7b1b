"""What differs between the versions of torch that attnreg supports, by name; the versions of other packages.

Each name says what torch does, so that a reader of the code that asks needs no version. Facts about CUDA were
read in torch's headers and libraries of 2.11, 2.14.1 and 2.15.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch

TORCH_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

# Whether torch has `varlen_attn_out`.
HAS_OUT = TORCH_VERSION >= (2, 12)

# Whether the packed LSE of `_cudnn_attention_forward` is token-major, (T, H, 1), not (H, T).
CUDNN_LSE_IS_TOKEN_MAJOR = TORCH_VERSION < (2, 14)

# Whether the kernels that torch's selector chooses among take tensors (H, S, D), and one key head for all
# query heads without enable_gqa.
SELECTOR_BROADCASTS = TORCH_VERSION >= (2, 14)

# Whether SDPA runs no kernel for a batch, heads or a head dim of 0. Torch 2.11 runs the kernel that its
# selector chooses.
SDPA_SKIPS_EMPTY = TORCH_VERSION >= (2, 12)

# Whether the efficient kernels take fewer key heads than query heads. The backward's op adds the gradients of
# the query heads that share one. Otherwise the selector takes the math kernel for a mask with enable_gqa.
EFFICIENT_SHARES_HEADS = TORCH_VERSION >= (2, 14) and torch.version.hip is None

# Whether torch.export with a dynamic length takes repeated heads of (B, H, S, D). Torch 2.12 compares their
# strides, which depend on the length, and refuses the program: "Constraints violated".
EXPORTS_REPEATED_HEADS = TORCH_VERSION >= (2, 13)


# Cached: reading a version takes a millisecond, and each decision may need it.
@functools.cache
def version_of(package: str, ask: Callable[[str], str] = version) -> str | None:
    """Return the version of an installed package, as `ask` gives it; None where it isn't installed."""
    try:
        return ask(package)
    except PackageNotFoundError:
        return None


def selector_counts_on_fa4() -> bool:
    """Return whether torch's selector was told to choose the flash op by FA4's limits (from torch 2.15 on).

    Torch's FA4 sets that while it is active. The op then also gets head dims that FA2 can't run, such as 192
    with values of 128.
    """
    is_told = getattr(torch._C, "_get_fa4_sdp_enabled", None)
    return is_told is not None and bool(is_told())

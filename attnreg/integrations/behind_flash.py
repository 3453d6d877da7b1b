"""attnreg behind transformers' name `flash_attention_2`, for programs and libraries with a list of names.

It changes private objects of transformers (as of 5.23): `_lazy_imports` and the table of flash-attn's
requirements, both in `modeling_flash_attention_utils`, and `is_flash_attn_2_available`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.replacing import Replacement
from attnreg.core.varlen.plans import check_untraced
from attnreg.errors import UnsupportedInputError
from attnreg.flash_attn import attention as flash
from attnreg.integrations.packing import LayerOptions, Packing, attend, of_equal_lengths

NAME = "flash_attention_2"


def stand_behind_flash() -> None:
    """Make transformers use the functions below as the package flash-attn's, and find the package usable."""
    from transformers import modeling_flash_attention_utils as theirs

    usual = theirs._lazy_imports
    if not isinstance(usual, Replacement):

        def lazy_imports(implementation: str | None, *rest: Any, **options: Any) -> tuple[Any, ...]:
            if implementation not in (None, NAME):
                return usual(implementation, *rest, **options)  # type: ignore[no-any-return]
            # Without a function for pages, continuous batching runs without pages.
            return flash_attn_func, flash_attn_varlen_func, None, theirs._pad_input, theirs._unpad_input

        theirs._lazy_imports = Replacement(usual, f"{theirs.__name__}:_lazy_imports", lazy_imports)
        theirs._loaded_implementation = None
    needs = theirs.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    devices = (*needs["supported_devices"], (lambda: True, "cpu"))
    needs.update(general_availability_check=say_available(), pkg_availability_check=lambda *_, **__: True)
    needs["supported_devices"] = devices


def say_available() -> Replacement:
    """Make transformers report flash-attn as available; return what it then asks."""
    from transformers.utils import import_utils

    ours: Any = import_utils.is_flash_attn_2_available
    if not isinstance(ours, Replacement):
        ours = Replacement(ours, f"{import_utils.__name__}:{ours.__name__}", is_flash_attn_2_available)
    # Loaded modules have the function under its name; modules loaded later import it from these.
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "transformers" and "is_flash_attn_2_available" in vars(module):
            module.is_flash_attn_2_available = ours  # type: ignore[attr-defined]
    return ours  # type: ignore[no-any-return]


def is_flash_attn_2_available(kernels_fallback_ok: bool = False) -> bool:
    """Return True: attnreg's functions are available."""
    return True


# The mark of transformers' own function: torch.compile treats the result as a constant.
is_flash_attn_2_available._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Names of functions and arguments are the package flash-attn's. `s_aux` is transformers' name of sinks;
# transformers silently drops sinks if a function has no such argument.
@flash.naming(flash.OF_PACKED | {"sinks": "s_aux"})
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Compute attention over packed sequences.

    Args:
        q: (T_q, H, D), floating point.
        k, v: (T_k, H_k, D) and (T_k, H_k, D_v), of the same dtype.
        cu_seqlens_q, cu_seqlens_k: integers (B + 1,), offsets of the sequences.
        max_seqlen_q, max_seqlen_k: the longest sequence, in tokens.
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic: as for
            `attnreg.flash_attn.flash_attn_varlen_func`.
        s_aux: (H,), the sinks.

    Returns:
        The output (T_q, H, D_v).

    Raises:
        InvalidInputError: the arguments contradict each other.
        UnsupportedInputError: no backend can run the call, or it has `deterministic=True` and sinks.
    """
    check_untraced("attn_implementation='attnreg' or 'sdpa'")
    lengths = cu_seqlens_q.int(), cu_seqlens_k.int(), int(max_seqlen_q), int(max_seqlen_k)
    left, right = window_size
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        if s_aux is not None:
            raise UnsupportedInputError(
                "attnreg: got deterministic=True for a call with sinks, expected "
                "torch.use_deterministic_algorithms(True), which all backends follow"
            )
        alone = flash.Options(dropout_p, softmax_scale, causal, (left, right), softcap, None, deterministic)
        return flash.attend_packed(q, k, v, lengths, alone, with_lse=False)[0]
    options = LayerOptions(dropout_p, softmax_scale, softcap, s_aux)
    return attend(q, k, v, Packing(None, None, *lengths), (left, 0 if causal else right), options)


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Compute attention over sequences of equal length, (B, S, H, D); options and errors are those above."""
    batch, length_q, length_k = q.shape[0], q.shape[1], k.shape[1]
    packing = of_equal_lengths(batch, length_q, length_k, q.device)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    lengths = packing.cu_seq_q, packing.cu_seq_k, length_q, length_k
    out = flash_attn_varlen_func(q, k, v, *lengths, *rest, **options)
    return out.view(batch, length_q, *out.shape[1:])


leave_module_uncompiled(__name__)

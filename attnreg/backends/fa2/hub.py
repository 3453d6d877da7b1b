"""Kernels from the hub that have flash-attn's functions, as backends named `hub:owner/repository@revision`.

What such a kernel can run is what its functions have arguments for, within the limits of flash-attn's
kernels. attnreg's conformance kit verifies it before it serves: see `registry.sourced`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from attnreg.backends.fa2 import hub_package
from attnreg.backends.fa2.conventions import adapt, against_card, against_size, against_sums, cuts_of_size
from attnreg.backends.fa2.hub_functions import ARGUMENTS, FlashFunctions, Function
from attnreg.core.contract.backend import Backend, Call, Kernels
from attnreg.core.contract.capabilities import GRID, Capabilities, Range
from attnreg.core.contract.lengths import Cut
from attnreg.core.contract.spec import AttentionSpec
from attnreg.core.settings.hub_names import HubName
from attnreg.core.torchlib.isolation import raise_if_of_program


def backend_of(source: HubName) -> Backend:
    """Load a kernel and declare what it can run.

    Raises RegistrationError, which says what to do, if it can't be loaded or lacks flash-attn's functions.
    """
    loaded = hub_package.load(source)
    functions, device = FlashFunctions(loaded.module, str(source)), _device_of(loaded.variant)
    of_forward, of_backward = _declared(functions.forwards), _declared(functions.backwards, all)
    forward, backward = adapt(lambda _: functions)
    with_float32 = device == "cpu" and _runs_float32(forward, of_forward["dense"])
    limits: dict[str, Any] = {
        "devices": (device,),
        "dtypes": ("float16", "bfloat16", *["float32"] * with_float32),
        "head_dim": Range(8, 256, 8),
        **dict.fromkeys(("batch", "heads"), Range(0, GRID)),
        "gqa": True,
        "capture": device == "cuda",
    }
    backward_limits = None
    if of_backward:
        refuses = partial(_refuses_gradients, functions)
        backward_limits = Capabilities(**limits | of_backward, delta_from_out=True, refuses=refuses)
    version = ", ".join(filter(None, (f"kernels {loaded.version}", loaded.variant)))
    return Backend(
        name=str(source),
        forward=Capabilities(**limits | of_forward | {"deterministic": True}),
        backward=backward_limits,
        load=lambda: Kernels(forward, backward if of_backward else None),
        unavailable=partial(_unavailable, device),
        version=lambda: f"{loaded.revision} ({version})",
        refuses=partial(_refuses, functions),
        cuts=_cuts,
    )


def _device_of(variant: str) -> str:
    """Return the type of device that a build variant is for; one for any is for GPUs if there are some."""
    for part in variant.split("-"):
        if re.match(r"cu\d|cuda|rocm", part):
            return "cuda"
        if part in ("cpu", "xpu"):
            return part
    return "cuda" if torch.cuda.is_available() else "cpu"


def _declared(
    functions: tuple[Function | None, ...], combine: Callable[[list[bool]], bool] = any
) -> dict[str, bool]:
    """Return the fields of `Capabilities` that a direction's functions have; none without functions.

    `combine` is `any` if an option of one layout's function counts, or `all` if both have to have it.
    """
    if not any(functions):
        return {}
    layouts = {"dense": functions[0] is not None, "varlen": functions[1] is not None}
    declared = {}
    for option in ARGUMENTS:
        # Dense calls have no seqused_k.
        takes = [f.takes(option) for f in functions[option == "seqused_k" :] if f]
        declared[option] = bool(takes) and combine(takes)
    return layouts | declared


def _runs_float32(forward: Callable[..., object], is_dense: bool) -> bool:
    """Whether the forward of a kernel for CPUs computes float32: it may be one of torch's operations."""
    row, call = torch.zeros(1, 1, 1, 8), Call(scale=1.0, max_q=1, max_k=1)
    if not is_dense:
        offsets = torch.tensor([0, 1], dtype=torch.int32)
        row, call = row[0], call._replace(cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    try:
        forward(row, row, row, call)
    except BaseException as error:  # noqa: BLE001 - whatever it is, that dtype doesn't run
        raise_if_of_program(error)
        return False
    return True


def _unavailable(device: str) -> str | None:
    return "torch finds no CUDA GPU here" if device == "cuda" and not torch.cuda.is_available() else None


def _refuses(functions: FlashFunctions, spec: AttentionSpec) -> tuple[str, ...]:
    reasons = []
    got, other = ("packed", "dense") if spec.varlen else ("dense", "packed")
    function = functions.forwards[spec.varlen]
    asked = {
        "causal": spec.causal, "window": spec.windowed, "softcap": spec.softcap > 0.0, "alibi": spec.alibi,
        "seqused_k": spec.seqused_k,
    }  # fmt: skip
    for option in (option for option, is_on in asked.items() if is_on):
        if function is not None and not function.takes(option):
            reasons.append(f"{option} needs {other} tensors, got {got} ones")
    # A bound that reaches beyond max_k is taken for none: see FA2's rows of known_issues.toml.
    if spec.windowed and spec.window[1] != 0 and spec.max_q > spec.max_k:
        reasons.append(
            "a window that isn't causal needs at least as many keys as queries, got "
            f"{spec.max_k} for {spec.max_q}"
        )
    return (*reasons, *against_size(spec))


def _refuses_gradients(functions: FlashFunctions, spec: AttentionSpec) -> Iterator[str]:
    yield from against_card(spec)
    yield from against_sums(spec, "a kernel from the hub")
    # A backward for both layouts is flash-attn 3's, with the limits of its kernels.
    if functions.has_one_backward and spec.deterministic and spec.head_dim > 192:
        yield f"head_dim must be at most 192 with deterministic algorithms, got {spec.head_dim}"


def _cuts(spec: AttentionSpec) -> Iterator[Cut]:
    """Yield the lengths at which this module's reasons change for calls of the spec's kind."""
    yield from cuts_of_size(spec)
    yield Cut.beyond("max_q", "max_k")

"""FA2's kernels in the package flash-attn, for calls that torch's kernels can't run.

They are the same kernels with more arguments: ALiBi slopes, a softcap, and pages on a torch without them. The
package registers them as torch ops, which are called by keyword.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from attnreg.backends.fa2.native import kernel_lengths, kernel_mask
from attnreg.core.contract.backend import Call
from attnreg.core.torchlib.isolation import strip_tracebacks
from attnreg.core.torchlib.layout import readable
from attnreg.errors import RegistrationError

NAME = "flash-attn"
INSTALL = (
    "pip install --no-build-isolation 'flash-attn>=2.8,<3' "
    "(a build, which takes nvcc, setuptools, ninja, packaging and psutil)"
)

_MASK = (
    *("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right"),
    *("softcap", "alibi_slopes"),
)
_PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_GRADS = ("dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic", "rng_state")

_PAGED = ("return_softmax", "block_table", "seqused_k")

# What the adapter passes to each op; the other arguments keep their defaults.
PASSED = {
    "_flash_attn_forward": ("q", "k", "v", *_MASK, "return_softmax"),
    "_flash_attn_varlen_forward": ("q", "k", "v", *_MASK, *_PACKED, *_PAGED),
    "_flash_attn_backward": ("q", "k", "v", *_MASK, *_GRADS),
    "_flash_attn_varlen_backward": ("q", "k", "v", *_MASK, *_PACKED, *_GRADS),
}


def installed() -> str | None:
    """Return the version of the package; None where it isn't installed. Imports nothing."""
    return _version_by(version, find_spec)


# Cached: reading the version takes a millisecond, and each decision may need it.
@functools.cache
def _version_by(ask: Callable[[str], str], find: Callable[[str], object]) -> str | None:
    try:
        # flash-attn-4 shares the namespace; only this package has the extension.
        return ask(NAME) if find("flash_attn_2_cuda") else None
    except (PackageNotFoundError, ValueError):
        return None


def missing(simulated: bool) -> str:
    """Return why the package can't be used, or an empty string.

    The package is loaded to find out, unless the device is simulated. Its extension fits one version of torch
    only, and once a call runs it is too late for another backend.
    """
    release = installed()
    if release is None:
        return f"the package {NAME}, which isn't installed; install it with: {INSTALL}"
    if simulated:
        return ""
    loaded = _loaded()
    if isinstance(loaded, Package):
        return ""
    return f"the package {NAME}, whose {release} failed to load: {type(loaded).__name__}: {loaded}"


def package() -> Package:
    """Return the loaded package.

    Raises:
        RegistrationError: the package can't be loaded, which `missing` reports, too; with the cause.
    """
    loaded = _loaded()
    if isinstance(loaded, Package):
        return loaded
    raise RegistrationError(f"{NAME} failed to load: {loaded}") from loaded


@functools.cache
def _loaded() -> Package | Exception:
    """Load the package, once per process, or return the error."""
    try:
        import_module("flash_attn.flash_attn_interface")  # registers its ops
        return Package()
    except Exception as error:  # noqa: BLE001 - the cause becomes a reason
        return strip_tracebacks(error)


class Package:
    """The package's four ops, checked to take what the adapter passes."""

    def __init__(self) -> None:
        self._ops = {name: _checked(name) for name in PASSED}

    def forward(self, tensors: tuple[Tensor, ...], call: Call) -> tuple[Tensor, Tensor]:
        """Return output and LSE of (query, key, value) in the kernel's conventions.

        Tensors are (B, S, H, D) or (T, H, D), float16 or bfloat16; the LSE is (B, H, S) or (H, T), float32.
        """
        arguments = shared_arguments(call, *tensors) | {"return_softmax": False}
        name = "_flash_attn_forward"
        if call.varlen:
            name = "_flash_attn_varlen_forward"
            arguments |= {"block_table": call.block_table, "seqused_k": call.seqused_k}
        out, lse, _, rng_state = self._ops[name](**arguments)
        if call.rng_state is not None:
            call.rng_state.view(torch.int64).copy_(rng_state)
        return out, lse

    def backward(self, tensors: tuple[Tensor, ...], call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value, in their shapes and dtype.

        `tensors` are (grad_out, query, key, value, out, lse), in the layouts of `forward`.
        """
        grad_out, *inputs, out, lse = tensors
        # The op writes the gradients into its arguments and returns none of them.
        grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in inputs)
        self._ops["_flash_attn_varlen_backward" if call.varlen else "_flash_attn_backward"](
            dout=readable(grad_out), out=readable(out), softmax_lse=lse.contiguous(),
            dq=grad_q, dk=grad_k, dv=grad_v, deterministic=call.repeatable,
            rng_state=None if call.rng_state is None else call.rng_state.view(torch.int64),
            **shared_arguments(call, *inputs),
        )  # fmt: skip
        return grad_q, grad_k, grad_v


def shared_arguments(call: Call, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
    """Return the arguments of all four ops, with offsets and lengths for packed calls.

    Query, key and value are (B, S, H, D) or (T, H, D), in any dtype.
    """
    causal, left, right = kernel_mask(call)
    packed = zip(_PACKED, kernel_lengths(query, key, call), strict=True) if call.varlen else ()
    return {
        "q": readable(query),
        "k": readable(key),
        "v": readable(value),
        "dropout_p": call.dropout,
        "softmax_scale": call.scale,
        "causal": causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": call.softcap,
        "alibi_slopes": call.alibi_slopes,
        **dict(packed),
    }


def _checked(name: str) -> Any:
    op = getattr(torch.ops.flash_attn, name, None)
    if op is None:
        raise RegistrationError(f"it registers no operator flash_attn::{name}")
    arguments = op.default._schema.arguments
    if lacking := [
        passed for passed in PASSED[name] if passed not in {argument.name for argument in arguments}
    ]:
        raise RegistrationError(f"flash_attn::{name} has no argument {', '.join(lacking)}")
    needed = [argument.name for argument in arguments if not argument.has_default_value()]
    if unknown := [required for required in needed if required not in PASSED[name]]:
        raise RegistrationError(f"flash_attn::{name} needs {', '.join(unknown)}, which attnreg doesn't know")
    return op.default

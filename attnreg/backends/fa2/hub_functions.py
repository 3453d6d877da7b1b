"""Calls of a kernel's functions, which are flash-attn's by name: each gets those arguments that it takes.

A forward is `flash_attn_func` or `flash_attn_varlen_func`. A backward is a function below them. Theirs is
autograd's: it would compute the forward once more, and take neither output nor LSE.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.backends.fa2.flash_attn_package import shared_arguments
from attnreg.backends.fa2.native import kernel_mask
from attnreg.core.contract.backend import Call
from attnreg.core.launching.offsets import find_unused, zeroed
from attnreg.core.torchlib.layout import readable
from attnreg.core.torchlib.modes import autocasts
from attnreg.errors import RegistrationError, did_you_mean

DENSE, PACKED = "flash_attn_func", "flash_attn_varlen_func"
# The modules of a kernel that has its backward elsewhere than at the top.
INNER = ("flash_attn_interface", "interface")

# By which argument a forward returns its LSE. Where it has none, it returns the LSE anyway.
RETURNS_LSE = ("return_attn_probs", "return_softmax_lse", "return_lse")
# How the arguments of an option are called.
ARGUMENTS = {
    "causal": ("causal", "is_causal"),
    "window": ("window_size", "window_size_left"),
    "softcap": ("softcap",),
    "alibi": ("alibi_slopes",),
    "seqused_k": ("seqused_k",),
    "deterministic": ("deterministic",),
}
_SHARED = {
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p"),
    *("softmax_scale", "causal", "is_causal", "window_size", "window_size_left", "window_size_right"),
    *("softcap", "alibi_slopes", "seqused_q", "seqused_k", "sequed_q", "sequed_k", "deterministic"),
}
REQUIRED = ("q", "k", "v", "softmax_scale")
PASSED_FORWARD = _SHARED | {*RETURNS_LSE}
PASSED_BACKWARD = _SHARED | {"dout", "out", "softmax_lse", "dq", "dk", "dv", "rng_state"}


class Function(NamedTuple):
    """A function of a kernel, with the names of those of its arguments that attnreg passes."""

    run: Callable[..., Any]
    names: frozenset[str]

    def takes(self, option: str) -> bool:
        """Whether it has an argument for an option."""
        return not self.names.isdisjoint(ARGUMENTS[option])

    def __call__(self, known: dict[str, Any]) -> Any:
        """Call it with those of the known arguments that it takes."""
        return self.run(**{name: value for name, value in known.items() if name in self.names})


class FlashFunctions:
    """A kernel's functions, as a provider of flash-attn's kernels.

    Attributes:
        forwards, backwards: the function for dense and that for packed calls; None where there is none.
        has_one_backward: whether one function runs both, as in flash-attn 3. Its kernels read the rows that
            no sequence counts.

    Raises:
        RegistrationError: the kernel has no forward, or a function needs what attnreg doesn't know.
    """

    def __init__(self, module: Any, name: str) -> None:
        self.name = name
        self.forwards = tuple(self._find(module, forward, PASSED_FORWARD) for forward in (DENSE, PACKED))
        if not any(self.forwards):
            public = sorted(each for each in vars(module) if not each.startswith("_"))
            raise RegistrationError(
                f"{name} has neither {DENSE} nor {PACKED}, expected one of them; it has "
                f"{', '.join(public[:20]) or 'nothing'}{did_you_mean(DENSE, public)}"
            )
        dense = self._find(module, "_flash_attn_backward", PASSED_BACKWARD)
        packed = self._find(module, "_flash_attn_varlen_backward", PASSED_BACKWARD)
        self._reads_unused = packed is None  # or may do so: without a backward nothing is known
        self.has_one_backward = packed is None and dense is not None and "cu_seqlens_q" in dense.names
        packed = dense if self.has_one_backward else packed
        self.backwards = dense if self.forwards[0] else None, packed if self.forwards[1] else None

    def _find(self, module: Any, name: str, known: set[str]) -> Function | None:
        """Return the function of a kernel by that name; None if there is none."""
        places = (module, *(getattr(module, inner, None) for inner in INNER))
        run = next((getattr(place, name) for place in places if callable(getattr(place, name, None))), None)
        if run is None:
            return None
        parameters = dict(_parameters(run))
        needed = [each for each, is_needed in parameters.items() if is_needed and each not in known]
        if needed:
            raise RegistrationError(
                f"{name} of {self.name} needs {', '.join(needed)}, which attnreg doesn't know"
            )
        # Each call has a scale of its own. A backward that writes its gradients elsewhere would be wrong.
        required = (*REQUIRED, *(("dout", "dq", "dk", "dv") if known is PASSED_BACKWARD else ()))
        if lacking := [each for each in required if each not in parameters]:
            raise RegistrationError(
                f"{name} of {self.name} has no argument {', '.join(lacking)}, expected all of them"
            )
        return Function(run, frozenset(parameters) & known)

    def forward(self, tensors: tuple[Tensor, ...], call: Call) -> tuple[Tensor, Tensor]:
        """Return output and LSE of (query, key, value) in the kernel's conventions.

        Tensors are (B, S, H, D) or (T, H, D); the LSE is float32, (B, H, S) or (H, T).
        """
        query, key, value = tensors
        if self._reads_unused:
            _, keys = find_unused(query, key, call)
            key, value = zeroed(keys, key, value)
        known = _arguments(call, query, key, value) | dict.fromkeys(RETURNS_LSE, True)
        result = self._run(self.forwards[call.varlen], known, query.device.type)
        if not isinstance(result, tuple | list) or len(result) < 2:
            got = type(result).__name__ if not isinstance(result, tuple | list) else f"{len(result)} results"
            raise RegistrationError(f"{self.name} returned {got}, expected output and LSE")
        return result[0], result[1]

    def backward(self, tensors: tuple[Tensor, ...], call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value, in their shapes and dtype.

        `tensors` are (grad_out, query, key, value, out, lse), in the layouts of `forward`.
        """
        grad_out, query, key, value, out, lse = tensors
        if self._reads_unused:
            queries, keys = find_unused(query, key, call)
            query, grad_out, out = zeroed(queries, query, grad_out, out)
            key, value = zeroed(keys, key, value)
        # Passed to the function, which may or may not return them, too.
        grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in (query, key, value))
        known = _arguments(call, query, key, value) | {
            "dout": readable(grad_out), "out": readable(out), "softmax_lse": lse.contiguous(),
            "dq": grad_q, "dk": grad_k, "dv": grad_v, "rng_state": None,
        }  # fmt: skip
        self._run(self.backwards[call.varlen], known, query.device.type)
        return grad_q, grad_k, grad_v

    @staticmethod
    def _run(function: Function | None, known: dict[str, Any], device: str) -> Any:
        """Call a function without a graph, which the function would record for autograd's."""
        if function is None:  # a layout that no direction declares
            raise RegistrationError("got a call of a layout that the kernel has no function for")
        with torch.no_grad():
            if not autocasts(device):
                return function(known)
            with torch.autocast(device, enabled=False):
                return function(known)


def _arguments(call: Call, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
    """Return the arguments of both directions, by all names that they have in flash-attn's versions."""
    causal, left, right = kernel_mask(call)
    # A function for both layouts knows dense calls by these.
    packed = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return (
        dict.fromkeys(packed)
        | shared_arguments(call, query, key, value)
        | {
            "is_causal": causal,
            "window_size": (left, right),
            "deterministic": call.repeatable,
            "seqused_k": call.seqused_k,
            **dict.fromkeys(("seqused_q", "sequed_q", "sequed_k")),
        }
    )


def _parameters(function: Any) -> Iterator[tuple[str, bool]]:
    """Yield the names of a function's arguments, and whether they must be given."""
    op = getattr(function, "_opoverload", None) or getattr(function, "default", None) or function
    if (schema := getattr(op, "_schema", None)) is not None:
        for argument in schema.arguments:
            yield argument.name, not argument.has_default_value()
        return
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            yield name, parameter.default is parameter.empty

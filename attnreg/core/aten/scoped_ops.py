"""`use_backend` in compiled code: calls of torch's functions with the choice as an argument of attnreg's ops.

While torch.compile or torch.export traces a `use_backend` block, a `TracedScope` replaces each call of
`F.scaled_dot_product_attention` by `attnreg::_sdpa`, which has the names of the backends as an argument. When
autograd is traced, `attnreg::_sdpa` becomes torch's own ops, but each routed op of aten is replaced by
attnreg's op of the same name. That op has the names as a further argument, in forward and backward alike. So
the choice is part of the graph: no compiler pass can move a call out of its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnreg.core.dispatch import scope
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.modes import is_plain

_library = torch.library.Library("attnreg", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "_sdpa(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
    "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, str[] backends) -> Tensor"
)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, backends: Sequence[str], **options: Any
) -> Tensor:
    arguments = query, key, value, *args
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    if is_plain(*tensors):
        return scope.run_with(backends, scope._SDPA, arguments, options)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _Traced.apply(list(backends), options, *arguments)
    with _Replacing(backends):
        return scope._SDPA(*arguments, **options)


_library.impl("_sdpa", _sdpa, "CompositeImplicitAutograd")


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backends: list[str], options: dict[str, Any], *arguments: Any) -> Tensor:
        with torch.enable_grad(), _Replacing(backends):
            inner = [
                x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in arguments
            ]
            out = scope._SDPA(*inner, **options)
        ctx.backends, ctx.inner, ctx.out = backends, inner, out
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        wanted = [isinstance(x, Tensor) and x.requires_grad for x in ctx.inner]
        inputs = [x for x, w in zip(ctx.inner, wanted, strict=True) if w]
        with _Replacing(ctx.backends):
            grads = iter(torch.autograd.grad(ctx.out, inputs, grad))
        return None, None, *(next(grads) if w else None for w in wanted)


class _Replacing(TorchDispatchMode):
    def __init__(self, backends: Sequence[str]) -> None:
        super().__init__()
        self.backends = list(backends)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name in OPS:
            return getattr(torch.ops.attnreg, OPS[name])(*args, **(kwargs or {}), backends=self.backends)
        return func(*args, **(kwargs or {}))


OPS: dict[str, str] = {}


def _define(op: str) -> None:
    original = getattr(torch.ops.aten, op).default
    schema = str(original._schema).removeprefix("aten::")
    arguments, _, results = schema.rpartition(" -> ")
    star = "" if any(a.kwarg_only for a in original._schema.arguments) else "*, "
    _library.define(
        f"{arguments[:-1]}, {star}str[] backends) -> {results}", tags=[torch.Tag.needs_fixed_stride_order]
    )

    def run(*args: Any, backends: Sequence[str], **kwargs: Any) -> Any:
        return scope.run_with(backends, original, args, kwargs)

    def fake(*args: Any, backends: Sequence[str], **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    _library.impl(op, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attnreg::{op}", fake, lib=_library)
    OPS[f"aten::{op}"] = op


for _name in (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
):
    _define(_name)
    _define(_name + "_backward")

leave_module_uncompiled(__name__)

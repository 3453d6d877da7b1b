"""Ops that have the backends of a `use_backend` block as an argument, for graphs.

`scope.ScopeInGraph` replaces calls of `F.scaled_dot_product_attention` in a traced block by `attnreg::_sdpa`.
When autograd is traced, torch's code decomposes that op to ops of aten. Here each op of `REPLACED` becomes
attnreg's op of the same name, which has the backends as a further argument. This holds for the forward and
for its backward. So the choice is part of the graph, and no pass of a compiler can move a call out of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from attnreg.core.dispatch import scope
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.modes import is_plain, is_transformed
from attnreg.errors import RegistrationError

# The ops of aten below SDPA, on a GPU and on a CPU; each has a backward.
REPLACED = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip

if torch._C._jit_get_schemas_for_operator("attnreg::_sdpa"):
    raise RegistrationError(
        "attnreg was imported before in this process, and its modules were removed from sys.modules or "
        "reloaded: torch keeps its ops and routers, so that they can't be registered again; expected the "
        "same modules: leave them there, or start another process"
    )
_library = torch.library.Library("attnreg", "FRAGMENT")  # type: ignore[no-untyped-call]
_names: dict[str, str] = {}  # of attnreg's op, by that of aten's


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, backends: Sequence[str], **options: Any
) -> Tensor:
    """Run `F.scaled_dot_product_attention` by a choice; while it is traced, have the choice traced.

    Args:
        query: (B, H, S_q, D), and so on: the arguments of `F.scaled_dot_product_attention`.
        backends: the backends that the block puts first.
    """
    arguments = query, key, value, *args
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    if is_plain(*tensors) or (is_transformed() and detect_fake_mode(tensors) is None):
        return scope.run_with(backends, scope.SDPA, arguments, options)  # type: ignore[no-any-return]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors) and not is_transformed():
        return _Traced.apply(backends, options, *arguments)  # type: ignore[no-untyped-call, no-any-return]
    with _Replacement(backends):
        return scope.SDPA(*arguments, **options)


class _Traced(torch.autograd.Function):
    """SDPA with a graph of its own, whose backward runs where ops are replaced as well."""

    @staticmethod
    def forward(ctx: Any, backends: Sequence[str], options: dict[str, Any], *arguments: Any) -> Tensor:
        with torch.enable_grad(), _Replacement(backends):
            inner = [x.detach().requires_grad_(x.requires_grad) if _is_tensor(x) else x for x in arguments]
            out = scope.SDPA(*inner, **options)
        ctx.backends, ctx.inner, ctx.out = backends, inner, out
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [_is_tensor(x) and x.requires_grad for x in ctx.inner]
        inputs = [x for x, is_wanted in zip(ctx.inner, wanted, strict=True) if is_wanted]
        with _Replacement(ctx.backends):
            grads = iter(torch.autograd.grad(ctx.out, inputs, grad))
        return None, None, *(next(grads) if is_wanted else None for is_wanted in wanted)


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument, Tensor)


class _Replacement(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls attnreg's ops in the place of aten's."""

    def __init__(self, backends: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._backends = list(backends)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _names.get(func._schema.name)
        if name is None:
            return func(*args, **(kwargs or {}))
        return getattr(torch.ops.attnreg, name)(*args, **(kwargs or {}), backends=self._backends)


def _run(op: Callable[..., Any], *args: Any, backends: Sequence[str], **kwargs: Any) -> Any:
    return scope.run_with(backends, op, args, kwargs)


def _fake(op: Callable[..., Any], *args: Any, backends: Sequence[str], **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _define(name: str) -> None:
    """Define attnreg's op for an op of aten, if this torch has that."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return
    op = packet.default
    arguments, _, results = str(op._schema).removeprefix("aten::").rpartition(") -> ")
    has_options = any(argument.kwarg_only for argument in op._schema.arguments)
    schema = f"{arguments}, {'' if has_options else '*, '}str[] backends) -> {results}"
    # Ops with aten's tag for random numbers draw the same dropout when a checkpoint repeats the forward.
    tags = (*op.tags, torch.Tag.needs_fixed_stride_order)
    _library.define(schema, tags=tags)  # type: ignore[no-untyped-call]
    _library.impl(name, functools.partial(_run, op), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"attnreg::{name}", functools.partial(_fake, op), lib=_library)
    if packet in flop_registry:
        flop_registry[getattr(torch.ops.attnreg, name)] = flop_registry[packet]
    _names[op._schema.name] = name


_library.define(  # type: ignore[no-untyped-call]
    "_sdpa(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
    "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, str[] backends) -> Tensor"
)
_library.impl("_sdpa", sdpa, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
for _name in REPLACED:
    _define(_name)
    _define(f"{_name}_backward")

leave_module_uncompiled(__name__)

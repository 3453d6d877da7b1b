"""`attnreg::_varlen_attn`: `varlen_attn` as one opaque op with a fake, a backward and FLOP formulas.

torch.compile keeps it in the graph, where the backend is chosen when it runs; unlike aten's own ops
Inductor's C++ wrapper and AOTInductor can't pass it by. `_autoload` imports this module when
`torch.ops.attnreg` is asked for an op, as it is by a program that `torch.export` has saved.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attnreg.core.adaptation.sinks import grad_of_sinks
from attnreg.core.contract.backend import Call
from attnreg.core.contract.options import OPTIONS, Option, options_on
from attnreg.core.contract.spec import UNBOUNDED, Direction
from attnreg.core.dispatch import scope
from attnreg.core.dispatch.calls import with_aliased_offsets
from attnreg.core.dispatch.scope import ScopedChoice
from attnreg.core.launching.lifted import Lifted, function_of
from attnreg.core.launching.validation import check
from attnreg.core.torchlib import functionalize
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.varlen.plans import call_of, check_heads, check_tensors, run, window

# An op's arguments behind the arguments of every call: by name, the text of the schema and the default.
Tail = dict[str, tuple[str, Any]]

_TYPES = {"number": "float", "integer": "SymInt?", "tensor": "Tensor?", "pages": "Tensor?"}
_FUNCTIONS = tuple(row.name for row in OPTIONS if row.in_op and row.values == "function")
# What the functions of a call have captured, in their order. An op has no list of tensors by default.
CAPTURED = tuple(f"captured_{number}" for number in range(8))
_OF_TORCH = 3  # options of torch's own ops, which come first in these


def _options(direction: Direction) -> list[Option]:
    """Return the options of an op. Those that results are rescaled for are in the results of a forward."""
    rows = [row for row in OPTIONS if row.in_op and direction in row.directions]
    rows = [row for row in rows if direction == "forward" or not row.rescales]
    return sorted(rows, key=operator.attrgetter("in_op"))


def _tail(direction: Direction, between: Tail) -> Tail:
    """Return the options of an op, with its other arguments between torch's options and attnreg's own."""
    rows = _options(direction)
    texts = [
        (row.name, (f'str {row.name}=""', ""))
        if row.values == "function"
        else (row.name, (f"{_TYPES[row.values]} {row.name}={row.off}", row.off))
        for row in rows
    ]
    captured = [(name, (f"Tensor? {name}=None", None)) for name in CAPTURED]
    count = sum(row.in_op <= _OF_TORCH for row in rows)
    return dict((*texts[:count], *between.items(), *texts[count:], *captured))


def _schema(head: str, tail: Tail) -> str:
    return f"({', '.join((head, *(text for text, _ in tail.values())))}) -> (Tensor, Tensor, Tensor)"


def _by_name(tail: Tail, values: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments of a tail by their names; defaults at the end may be missing."""
    return {name: default for name, (_, default) in tail.items()} | dict(zip(tail, values, strict=False))


_BACKEND = ('str backend=""', "")
_FORWARD = _tail("forward", {"backend": _BACKEND, "needs_backward": ("bool needs_backward=False", False)})
_BACKWARD = _tail("backward", {"backend": _BACKEND, "choice": ("SymInt choice=0", 0)})
_BEFORE_TAIL = 11  # arguments of the forward's op


def tail_of(options: Mapping[str, Any], backend: str, needs_backward: bool) -> list[Any]:
    """Return the arguments of the forward's op behind `enable_gqa`.

    `options` are a call's options, by the arguments of `varlen_attn`.
    """
    arguments: dict[str, Any] = {"backend": backend, "needs_backward": needs_backward}
    arguments |= dict.fromkeys(CAPTURED) | dict.fromkeys(_FUNCTIONS, "")
    for row in [row for row in _options("forward") if row.values != "function"]:
        value = options.get(row.argument or row.name, row.off)
        if row.values == "number":
            # The op checks the range when it runs. Dynamo makes symbols of a row's bounds in dynamic graphs.
            value = row.number(value) if row.is_on(value) else row.off
        arguments[row.name] = value
    return [arguments[name] for name in _FORWARD]


def _with_functions(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return an op's options with functions in the place of their texts and of what they have captured."""
    captured = [x for x in (arguments.pop(name) for name in CAPTURED) if x is not None]
    for name in _FUNCTIONS:
        text = arguments[name]
        # Besides the score and the four places its arguments are what it has captured.
        count = function_of(text).__code__.co_argcount - (5 if name == "score_mod" else 4) if text else 0
        arguments[name] = Lifted(text, tuple(captured[:count])) if text else None
        captured = captured[count:]
    return arguments


def with_options(arguments: list[Any], options: Mapping[str, Any]) -> list[Any]:
    """Return all arguments of the forward's op with some of its options changed, by their names there."""
    tail = _by_name(_FORWARD, tuple(arguments[_BEFORE_TAIL:])) | dict(options)
    return [*arguments[:_BEFORE_TAIL], *(tail[name] for name in _FORWARD)]


# As torch's own `torch_attn::_varlen_attn`, up to the options that it has.
SCHEMA = _schema(
    "Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor? cu_seq_k, SymInt max_q, "
    "SymInt max_k, bool is_causal=False, float? scale=None, SymInt[]? window_size=None, "
    "bool enable_gqa=False",
    _FORWARD,
)


@torch.library.custom_op("attnreg::_varlen_attn", mutates_args=(), schema=SCHEMA)
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    *tail: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output (T_q, H, D_v), the LSE (H, T_q) float32, and what the backward has to know."""
    lengths, arguments = (cu_seq_q, cu_seq_k, max_q, max_k), _by_name(_FORWARD, tail)
    backend, needs_backward = arguments.pop("backend"), arguments.pop("needs_backward")
    tensors = {row.name: arguments[row.name] for row in _options("forward") if row.is_tensor}
    check_tensors(query=query, key=key, value=value, cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k, **tensors)
    arguments = _with_functions(arguments)
    if not enable_gqa:
        check_heads(query, key, value, lengths)
    bound = window(window_size, is_causal)
    call = with_aliased_offsets(call_of(query, lengths, scale, bound, **arguments))
    choice = scope.from_text(backend) or scope.current()
    ran = run("forward", (query, key, value), call, choice, needs_backward, returns_lse=True)
    out, lse = ran.results
    # The backward gets `backend` as an argument of its own, the choice of a scope by a token. Its dtype is
    # one that the torch.export.save of torch 2.11 can write, which knows no uint64.
    token = scope.choice_token(None if backend else choice, query).view(torch.int64).zero_()
    return out.contiguous(), lse.float().contiguous(), token


# Fakes are given the arguments without those at the end that are as by default.
@forward.register_fake
def fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    _is_causal: bool = False,
    _scale: float | None = None,
    _window_size: list[int] | None = None,
    enable_gqa: bool = False,
    *tail: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the forward returns, without values: output (T_q, H, D_v), LSE (H, T_q) and a token."""
    if not enable_gqa:
        check_heads(query, key, value, (cu_seq_q, cu_seq_k, max_q, max_k))
    arguments = _by_name(_FORWARD, tail)
    call = Call(1.0, max_q, max_k, UNBOUNDED, cu_seq_q, cu_seq_k)
    tensors = {row.name: arguments[row.name] for row in _options("forward") if row.is_tensor}
    check(query, key, value, call.with_options(tensors))
    tokens, heads, _dim = query.shape
    out = query.new_empty((tokens, heads, value.shape[-1]))
    return out, query.new_empty((heads, tokens), dtype=torch.float32), query.new_empty((), dtype=torch.int64)


# As torch's own `torch_attn::_varlen_attn_backward`, up to the options that it has.
@torch.library.custom_op(
    "attnreg::_varlen_attn_backward",
    mutates_args=(),
    schema=_schema(
        "Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor cu_seq_q, "
        "Tensor? cu_seq_k, SymInt max_q, SymInt max_k, bool is_causal, Tensor? rng_state, float? scale=None, "
        "SymInt[]? window_size=None",
        _BACKWARD,
    ),
)
def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor | None,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *tail: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, contiguous and in their shapes.

    The choice that the forward ran by is `backend`, or comes by its number, or with the forward's token,
    its third result: that is `rng_state`, as there is no dropout.
    """
    lengths, bound = (cu_seq_q, cu_seq_k, max_q, max_k), window(window_size, is_causal)
    arguments = _by_name(_BACKWARD, tail)
    backend, choice = arguments.pop("backend"), arguments.pop("choice")
    arguments = _with_functions(arguments)
    call = with_aliased_offsets(call_of(query, lengths, scale, bound, **arguments))
    scoped = scope.by_number(choice) if rng_state is None else scope.read_token(rng_state)
    chosen = scope.from_text(backend) or scoped
    grads = run("backward", (grad_out, query, key, value, out, lse), call, chosen).results
    return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous()


def takes(call: Call) -> bool:
    """Whether the ops have all options of a packed call as arguments; functions only as text."""
    return call.varlen and all(row.in_op and row.values != "function" for row in options_on(call))


def backward_of(
    grad_out: Tensor,
    tensors: tuple[Tensor, ...],
    call: Call,
    choice: ScopedChoice | None,
    grad_lse: Tensor | None,
    rng_state: Tensor | None,
    saved: dict[str, Tensor],
) -> tuple[Tensor, ...]:
    """Call the backward's op for a forward that ran past its op.

    Args:
        grad_out: (T_q, H, D_v), in the dtype of the output.
        tensors: query, key and value, the output and the LSE.
        call: the forward's, without its tensors: these are `saved`.
        choice: what the forward ran by.
        grad_lse: (H, T_q) float32, or None.
        rng_state: None, as there is no dropout.
        saved: by the fields and options of the call.
    """
    arguments = saved | {
        "choice": 0 if choice is None else choice.number,
        "grad_lse": grad_lse,
        "backend": "",
    }
    arguments |= dict.fromkeys(CAPTURED) | dict.fromkeys(_FUNCTIONS, "")
    tail = [arguments[name] if name in arguments else getattr(call, name) for name in _BACKWARD]
    return backward(  # type: ignore[no-any-return]
        grad_out, *tensors, saved["cu_seqlens_q"], saved.get("cu_seqlens_k"), call.max_q, call.max_k, False,
        rng_state, call.scale, list(call.window), *tail,
    )  # fmt: skip


@backward.register_fake
def _backward_fake(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, cu_seq_q, cu_seq_k, *longest, is_causal, scale, window_size, _gqa = inputs[
        :_BEFORE_TAIL
    ]
    arguments = _by_name(_FORWARD, inputs[_BEFORE_TAIL:])
    names = *(row.name for row in _options("forward") if row.is_tensor), *CAPTURED
    tensors = {name: arguments[name] for name in names}
    ctx.save_for_backward(query, key, value, *output, cu_seq_q, cu_seq_k, *tensors.values())
    ctx.numbers, ctx.names = (longest, is_causal, scale, window_size), tuple(tensors)
    ctx.others = {name: x for name, x in arguments.items() if name not in tensors}
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)  # without a gradient of the LSE more backends can run the backward


def _gradients(
    op: Any, ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return (None,) * (_BEFORE_TAIL + len(_FORWARD))
    kept = ctx.saved_tensors  # a checkpoint lets them be read once
    *tensors, token, cu_seq_q, cu_seq_k = kept[:8]
    arguments = ctx.others | dict(zip(ctx.names, kept[8:], strict=True))
    needs = dict(zip(_FORWARD, ctx.needs_input_grad[_BEFORE_TAIL:], strict=False))  # without defaults
    of_options = {
        row.name: grad_of_sinks(grad_out, tensors[3:], arguments[row.name], grad_lse)
        for row in _options("forward")
        if row.rescales and needs.get(row.name)
    }
    grads: tuple[Tensor | None, ...] = (None,) * 3
    if any(ctx.needs_input_grad[:3]):
        longest, is_causal, scale, window_size = ctx.numbers
        grad_out = torch.zeros_like(tensors[3]) if grad_out is None else grad_out
        arguments |= {"choice": 0, "grad_lse": grad_lse}
        grads = op(
            grad_out, *tensors, cu_seq_q, cu_seq_k, *longest, is_causal, token, scale, window_size,
            *(arguments[name] for name in _BACKWARD),
        )  # fmt: skip
    return *grads, *(None,) * (_BEFORE_TAIL - 3), *(of_options.get(name) for name in _FORWARD)


forward.register_autograd(functools.partial(_gradients, backward), setup_context=_save)


def _each(
    function: type[torch.autograd.Function], info: Any, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]
) -> list[tuple[Tensor, ...]]:
    """Return the results of a vmap's calls, one by one: torch's own rule can't be above functionalize."""
    pairs = tuple(zip(inputs, in_dims, strict=True))
    return [
        function.apply(*(x.select(dim, n) if isinstance(dim, int) else x for x, dim in pairs))  # type: ignore[no-untyped-call]
        for n in range(info.batch_size)
    ]


@functionalize.allow
class Transformable(torch.autograd.Function):
    """The op under function transforms (`torch.func`), which can't differentiate custom ops.

    Forward-mode AD isn't supported, and says so here; the op itself would drop the tangents.
    """

    setup_context = staticmethod(_save)

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        return forward(*inputs)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return a gradient for each argument of the op, None for arguments without a gradient.

        `grads` are the gradients of the output (T_q, H, D_v), of the LSE (H, T_q), in their dtypes, and of
        the forward's third result, or None.
        """
        return _gradients(_TransformableBackward.apply, ctx, *grads)

    @staticmethod
    def jvp(ctx: Any, *_tangents: Any) -> Any:
        raise NotImplementedError(
            "attnreg.varlen_attn is not differentiable in forward mode (jvp, jacfwd, hessian)"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, ...]:
        outs, lses, tokens = zip(*_each(Transformable, info, in_dims, inputs), strict=True)
        # All calls have one choice: a stack of tokens would be none.
        return (torch.stack(outs), torch.stack(lses), tokens[0]), (0, 0, None)


@functionalize.allow
class _TransformableBackward(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        return backward(*inputs)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError("the backward of attnreg.varlen_attn is not differentiable")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, ...]:
        grads = zip(*_each(_TransformableBackward, info, in_dims, inputs), strict=True)
        return tuple(map(torch.stack, grads)), (0, 0, 0)


# These, too, are given the arguments without those at the end that are as by default.
@register_flop_formula(torch.ops.attnreg._varlen_attn, get_raw=True)
def _forward_flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any) -> int:
    lengths, seqused_k = rest[:4], rest[8] if len(rest) > 8 else None
    return 2 * _scores(query, lengths, seqused_k) * (query.shape[-1] + value.shape[-1])


@register_flop_formula(torch.ops.attnreg._varlen_attn_backward, get_raw=True)
def _backward_flops(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any) -> int:
    lengths, seqused_k = rest[2:6], rest[10] if len(rest) > 10 else None
    # The scores once more and the gradients of query and key; the gradients of the weights and of the value.
    return 2 * _scores(query, lengths, seqused_k) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _scores(query: Tensor, lengths: tuple[Any, ...], seqused_k: Tensor | None) -> int:
    """Count the scores of all heads; like torch's own formulas it doesn't take off what a mask hides."""
    cu_seq_q, cu_seq_k, max_q, max_k = lengths
    known = [x for x in (cu_seq_q, cu_seq_k, seqused_k) if x is not None]
    batch = len(cu_seq_q) - 1
    lengths_q, lengths_k = [max_q] * batch, [max_k] * batch
    # While something traces, lengths are unknown and each sequence counts as the longest.
    if all(type(x) is Tensor and not x.is_meta for x in known):
        lengths_q = cu_seq_q.diff().tolist()
        if seqused_k is not None:
            lengths_k = seqused_k.tolist()
        elif cu_seq_k is not None:
            lengths_k = cu_seq_k.diff().tolist()
    per_head: int = sum(map(operator.mul, lengths_q, lengths_k))
    return query.shape[1] * per_head


leave_module_uncompiled(__name__)

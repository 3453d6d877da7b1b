"""Front 2: `varlen_attn`, attention over packed sequences without padding, on any device.

In eager a call goes to the compiled call cache, which has an autograd node of its own in C++ and leaves
what it doesn't keep to Python (`plans.py`). Calls with options that it leaves out, and all where there is no
compiled part, go through a `torch.autograd.Function` (`autograd.py`). Under torch.compile, export and
AOTInductor, and wherever modes, subclasses or function transforms are to see an op, the call is
`attnreg::_varlen_attn` (`custom_op.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from attnreg.core.contract.options import OPTIONS, Option, options_of
from attnreg.core.dispatch import call_cache, scope
from attnreg.core.dispatch.calls import wants_gradient
from attnreg.core.launching.elementwise import check_functions
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.layout import GRAPH_TREES
from attnreg.core.torchlib.modes import autocast, is_differentiated, is_plain, is_transformed
from attnreg.core.varlen import custom_op, spread
from attnreg.core.varlen.autograd import attend
from attnreg.core.varlen.plans import (
    Lengths,
    call_of,
    check_heads,
    check_sinks,
    check_tensors,
    check_untraced,
    window,
)
from attnreg.errors import InvalidInputError, UnsupportedInputError

__all__ = ["AuxRequest", "varlen_attn", "varlen_attn_out"]


# `is_causal`, `window_size`, `scale` and `enable_gqa`.
Mask = tuple[bool, Sequence[int] | None, float | None, bool]


ROWS = {row.argument: row for row in OPTIONS}
TENSORS = [row.argument for row in OPTIONS if row.argument is not None and row.is_tensor]
# The options that the custom op has no argument for.
NOT_IN_OP = {row.argument: row for row in OPTIONS if row.argument and not row.in_op}
# The op has functions as text, which only compiled programs make of them.
FUNCTIONS = {row.name: row for row in OPTIONS if row.in_op and row.values == "function"}


class AuxRequest(NamedTuple):
    """What `varlen_attn` returns with its output.

    Attributes:
        lse: the log-sum-exp of the scaled scores, (H, T_q) float32, natural log; differentiable.
    """

    lse: bool = False


def asks_for_lse(return_aux: AuxRequest | None) -> bool:
    """Check what `return_aux=` asks for, attnreg's `AuxRequest` or torch's."""
    asked = getattr(return_aux, "lse", None)
    if asked is None and return_aux is not None:
        raise InvalidInputError(f"return_aux: got {return_aux!r}, expected an AuxRequest or None")
    return bool(asked)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    return_aux: AuxRequest | None = None,
    *,
    scale: float | None = None,
    window_size: Sequence[int] | None = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    softcap: float = 0,  # 0.0 would be a symbol in dynamic graphs, which are then compiled twice
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0,  # as softcap
    backend: str | None = None,
    group: Any = None,
    mesh: None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention over packed sequences of different lengths.

    Takes what every version of `torch.nn.attention.varlen.varlen_attn` takes, on every device.
    `torch.nn.attention.sdpa_kernel` has no effect, as it has on torch's own from 2.15 on: use `backend` or
    `attnreg.use_backend`.
    Differentiable in query, key, value and sinks, once. Rows past the last offset give output 0 and gradient
    0; so does a row that sees no key.

    Args:
        query: (T_q, H, D), the sequences concatenated.
        key: (T_k, H_k, D), or (pages, page size, H_k, D) with a `block_table`.
        value: as key, with any head dim D_v that the backend takes.
        cu_seq_q: int32 (B + 1,), where each sequence of the query begins, and the end of the last.
        cu_seq_k: the same for key and value; None with a `block_table`.
        max_q: the longest sequence of the query, in tokens (larger is allowed). A tensor () is read: under
            torch.compile a graph break.
        max_k: the same for the key.
        is_causal: whether to hide later keys, aligned bottom-right; the same as `window_size=(-1, 0)`.
        return_aux: `AuxRequest(lse=True)` to have the LSE returned, too.
        scale: factor on the scores; one over the root of D unless given. A tensor () is read: under
            torch.compile a graph break.
        window_size: (left, right), how many keys each row sees on either side; -1 for all.
        enable_gqa: allow H to be a multiple of H_k.
        seqused_k: int32 (B,), how many keys of each sequence count.
        block_table: int32 (B, pages per sequence), the pages of a paged key-value cache.
        num_splits: into how many pieces to split the keys at most (1: not at all); the kernel chooses
            unless given.
        softcap: bound on the scores: `softcap * tanh(score / softcap)` takes the place of each scaled score
            before any mask, as in the package flash-attn and in Gemma 2; 0 for none.
        sinks: (H,), for each head the score of an additional key without a value, as in GPT-OSS. So the
            weights of a row's keys add up to less than 1. The LSE includes the sink, in rows that see a key.
            Any backend runs such a call, and its backward. If its kernel doesn't count sinks, a 16-bit output
            is rounded twice: by the kernel, and after it was multiplied by what the sink leaves.
        alibi_slopes: float32 (H,) or (B, H): each score is reduced by `slope` times the distance of query and
            key, aligned bottom-right (ALiBi). Slopes have no gradient.
        dropout_p: probability of dropping an attention weight; kept weights are multiplied by 1 / (1 -
            dropout_p). Torch's default generator of the device (`torch.manual_seed`) decides which weights
            are dropped. Backends drop different weights, so the forward's backend also runs the backward. A
            gradient of the LSE that this backend can't compute is an error (FA2 with head dims above 248).
            Under torch.compile dropout is a graph break.
        backend: run on this backend or not at all.
        group: what `attnreg.context_parallel` returned. The tokens of query, key and value are spread over
            its ranks. Offsets and longest lengths describe the whole batch. Inside its `with` block every
            call is spread.
        mesh: refused: a `DeviceMesh` is for `attnreg.context_parallel`.
        **options: options without an argument of their own, by their names: rows of `contract.options`.
            `key_ranges`, int32 (T_q, R, 2), has up to R ranges of keys for each query, as first key and end
            (exclusive). Keys are counted from the first key of the sequence. A query sees the keys of its
            window that lie in any of its ranges. `tree_ranges` makes the ranges of a tree.
            `score_mod(score, batch, head, query, key)` returns what takes the place of a score, after scale
            and softcap. `mask_mod(batch, head, query, key)` returns whether it counts. Arguments are tensors
            () as in `flex_attention`: the number of the sequence, the query head, and the places of query and
            key in their sequence, from 0. Captured tensors have no gradient.

    Returns:
        The output, (T_q, H, D_v) in the query's dtype; with the LSE if that was asked for.

    Raises:
        InvalidInputError: the arguments contradict each other; says what was got and expected. Or offsets on
            a GPU were written to where torch doesn't count it, and earlier calls may have used the old ones.
        UnsupportedInputError: no backend can run the call, or `backend` can't; with every reason.
        UnknownBackendError: there is no such `backend`.
        BackendUnavailableError: that `backend` can't load here.
        TypeError: there is no such option.
    """
    if options:
        options_of(options)  # checks the names
        options = {name: value for name, value in options.items() if ROWS[name].is_on(value)}
    compiling = torch.compiler.is_compiling()
    returns_lse = asks_for_lse(return_aux)
    is_spread = spread.is_on or group is not None or mesh is not None
    if sinks is not None and not is_spread:
        check_sinks(query, sinks)
    if not (compiling or is_spread):
        choice = scope.current() if backend is None else scope.exclusive(backend)
        cache = call_cache.active if call_cache.is_loaded else call_cache.load()
        # With graph trees nothing that is known of offsets may be used: see `layout.needs_graph_memory`.
        if (
            cache is not None
            and block_table is None
            and not num_splits
            and not softcap
            and alibi_slopes is None
            and not dropout_p
            and not options
            and GRAPH_TREES not in sys.modules
        ):
            results = cache.varlen(
                query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, window_size, scale,
                enable_gqa, 0 if choice is None else choice.number, returns_lse, sinks, seqused_k,
            )  # fmt: skip
            if results is not None:
                return (results[0], results[1].float().contiguous()) if returns_lse else results[0]
    lengths = cu_seq_q, cu_seq_k, max_q, max_k
    options |= {
        "seqused_k": seqused_k, "block_table": block_table, "num_splits": num_splits, "softcap": softcap,
        "sinks": sinks, "alibi_slopes": alibi_slopes, "dropout_p": dropout_p,
    }  # fmt: skip
    mask = is_causal, window_size, scale, enable_gqa
    call = query, key, value, lengths, mask, options, backend, returns_lse
    if is_spread:
        results = (spread.attend_uncompiled if compiling else spread.attend)(group, mesh, *call)
    else:
        results = _attend_unspread(*call)
    return (results[0], results[1].float().contiguous()) if returns_lse else results[0]


def _attend_unspread(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Lengths,
    mask: Mask,
    options: dict[str, Any],
    backend: str | None,
    returns_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Return output and LSE of a call that the call cache doesn't run: by its plan, or as an op."""
    compiling = torch.compiler.is_compiling()
    if not compiling:
        spread.check_is_whole(lengths[0], query)
        if any(isinstance(longest, Tensor) for longest in lengths[2:]):
            check_untraced("bounds on the lengths as integers for max_q and max_k")
    if compiling and backend == "":
        scope.exclusive(backend)  # an error: inside the op an empty name means none
    if compiling and is_differentiated():
        # A graph can't have it: transforms can't differentiate custom ops. Without one it is `Transformable`.
        torch._dynamo.graph_break(msg="a function transform differentiates attnreg.varlen_attn")
    tensors = {"cu_seq_q": lengths[0], "cu_seq_k": lengths[1]}
    tensors |= {name: options[name] for name in TENSORS if name in options}
    check_tensors(query=query, key=key, value=value, **tensors)
    is_causal, window_size, scale, enable_gqa = mask
    if not enable_gqa:
        check_heads(query, key, value, lengths)
    bound = window(window_size, is_causal)
    query, key, value = autocast(query, key, value)
    plain = not compiling and is_plain(query, key, value, *tensors.values())
    functions, others = _on(FUNCTIONS, options), _on(NOT_IN_OP, options)
    if functions and not (compiling and _traced_functions().OPERATOR):
        others, functions = others + functions, []
    if others and not (plain or compiling):
        _refuse(others[0], options)
    # The op has numbers for these. Another graph for each number that is read would be compiled in vain.
    is_read = scale is not None and not isinstance(scale, (int, float))
    is_read = compiling and (is_read or any(isinstance(longest, Tensor) for longest in lengths[2:]))
    if others or plain or is_read:
        attend = _attend_uncompiled if compiling else _attend
        return attend(query, key, value, lengths, scale, bound, options, backend, returns_lse or compiling)
    op: Any = custom_op.forward if compiling or not is_transformed() else custom_op.Transformable.apply
    backend = backend or scope.text_of(scope.backends_in_graph())
    tail = custom_op.tail_of(options, backend, wants_gradient(query, key, value))
    arguments = query, key, value, *lengths, bool(is_causal), scale, list(bound), enable_gqa, *tail
    if functions:
        op, arguments = _traced_functions().attend, (arguments, *map(options.get, FUNCTIONS))
    out, lse, _ = op(*arguments)
    return out, lse


def _traced_functions() -> Any:
    """Return the module that has functions traced: a compiled program imports it for its first function."""
    from attnreg.core.varlen import traced_functions

    return traced_functions


def _on(rows: dict[str, Option], options: dict[str, Any]) -> list[str]:
    """Return the names of options of some rows that a call has."""
    return [name for name, row in rows.items() if name in options and row.is_on(options[name])]


def _refuse(name: str, options: dict[str, Any]) -> NoReturn:
    """Raise the error of an option that only plain tensors have."""
    row = (NOT_IN_OP | FUNCTIONS)[name]
    expected, got = row.off if row.off is None else f"{row.off:g}", row.got(options[name])
    raise UnsupportedInputError(
        f"{name} must be {expected} in dispatch modes, in function transforms and for tensor subclasses, "
        f"got {got}"
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Lengths,
    scale: float | None,
    bound: tuple[int, int],
    options: dict[str, Any],
    backend: str | None,
    returns_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Return output and LSE of a call that its plan runs in Python."""
    choice = scope.current() if backend is None else scope.exclusive(backend)
    call = call_of(query, lengths, scale, bound, **options_of(options))
    check_functions(call, query)
    return attend(query, key, value, call, choice, returns_lse)


# In a compiled program between two of its graphs: Dynamo of torch 2.11 breaks a `Call`. Torch's own lazy
# `torch.compiler.disable`: that imports all of Dynamo at once.
_attend_uncompiled = _disable_dynamo(_attend)


def varlen_attn_out(out: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `varlen_attn` into `out`, (T_q, H, D_v), for inference; returns what that returns.

    Raises:
        InvalidInputError: `out` is no tensor, has another shape, dtype or device than the result, or
            autograd would have to record the call.
    """
    check_tensors(out=out)
    result = varlen_attn(*args, **kwargs)  # type: ignore[arg-type]
    computed = result[0] if isinstance(result, tuple) else result
    if computed.requires_grad or (out.requires_grad and torch.is_grad_enabled()):
        raise InvalidInputError(
            "varlen_attn_out: got tensors that need a gradient, expected none (use varlen_attn)"
        )
    of_out, of_result = ((tuple(x.shape), x.dtype, x.device) for x in (out, computed))
    for what, got, expected in zip(("shape", "dtype", "device"), of_out, of_result, strict=True):
        if got != expected:
            raise InvalidInputError(f"out: got {what} {got}, expected {expected}")
    with torch.no_grad():
        out.copy_(computed)
    return (out, result[1]) if isinstance(result, tuple) else out


leave_module_uncompiled(__name__)

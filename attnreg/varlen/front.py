"""Front 2: `varlen_attn`, attention over packed sequences without padding, on any device.

In eager it goes through `aten::_flash_attention_forward`, whose autograd is C++ and costs a fifth of
a Python custom op's; under torch.compile, export and AOTInductor, and for what aten's op or its
backward can't be told, through `attnreg::_varlen_attn`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnreg import aten
from attnreg.aten import compiled, express
from attnreg.contract.backend import Call
from attnreg.contract.offsets import GRAPH_TREES
from attnreg.contract.spec import UNBOUNDED
from attnreg.contract.validation import check
from attnreg.dispatch import scope
from attnreg.dispatch.calls import wants_gradient
from attnreg.dispatch.state import state
from attnreg.errors import InvalidInputError
from attnreg.varlen import custom_op as op
from attnreg.varlen.arguments import autocast, heads_differ, window

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["AuxRequest", "varlen_attn", "varlen_attn_out"]


class AuxRequest(NamedTuple):
    """What `varlen_attn` returns beside its output.

    Attributes:
        lse: the log-sum-exp of the scaled scores, (H, T_q) float32, natural log; not differentiable.
    """

    lse: bool = False


_flash_forward = torch.ops.aten._flash_attention_forward.default
_FLASH_ARGUMENTS = frozenset(argument.name for argument in _flash_forward._schema.arguments)


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
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention over packed sequences of different lengths.

    Takes what every version of `torch.nn.attention.varlen.varlen_attn` takes, on every device.
    Differentiable in query, key and value. Rows past the last offset give output 0 and gradient 0;
    so does a row that sees no key.

    Args:
        query: (T_q, H, D), the sequences one after the other.
        key: (T_k, H_k, D), or (pages, page size, H_k, D) with a `block_table`.
        value: as key, with any head dim D_v that the backend takes.
        cu_seq_q: int32 (B + 1,), where each sequence of the query begins, and the end of the last.
        cu_seq_k: the same for key and value; None with a `block_table`.
        max_q: the longest sequence of the query, in tokens (larger is allowed).
        max_k: the same for the key.
        is_causal: whether to hide later keys, aligned bottom-right; the same as `window_size=(-1, 0)`.
        return_aux: `AuxRequest(lse=True)` to have the LSE returned, too.
        scale: factor on the scores; one over the root of D unless given.
        window_size: (left, right), how many keys each row sees on either side; -1 for all.
        enable_gqa: allow H to be a multiple of H_k.
        seqused_k: int32 (B,), how many keys of each sequence count.
        block_table: int32 (B, pages per sequence), the pages of a paged key-value cache.
        num_splits: into how many pieces to split the keys at most (1: not at all); the kernel chooses
            unless given.
        backend: run on this backend or not at all.

    Returns:
        The output, (T_q, H, D_v) in the query's dtype; with the LSE if that was asked for.

    Raises:
        InvalidInputError: the arguments contradict each other; says what was got and expected.
        UnsupportedInputError: no backend can run the call, or `backend` can't; with every reason.
        UnknownBackendError: there is no such `backend`.
        BackendUnavailableError: that `backend` can't load here.
    """
    own = None
    if (
        not torch.compiler.is_compiling()
        and seqused_k is None
        and block_table is None
        and num_splits is None
        and backend is None
        and type(query) is Tensor
        and (query.is_cuda or query.is_cpu)
    ):
        # Most calls came before, and all that follows came out the same.
        tensors = query, key, value, cu_seq_q, cu_seq_k
        rest = max_q, max_k, is_causal, window_size, scale, enable_gqa
        sent = _sent(*tensors, *rest) if query.is_cuda else None
        if type(sent) is tuple:
            return _returned(*sent, return_aux)
        if (
            type(key) is type(value) is type(cu_seq_q) is type(cu_seq_k) is Tensor
            and type(max_q) is type(max_k) is int
            and (scale is None or type(scale) is float)
            and type(window_size) is tuple
            and scope.current() is None
            and not torch.is_autocast_enabled("cuda" if query.is_cuda else "cpu")
        ):
            known_as = express.known_as(*tensors, *rest)
            own = state().express.get(known_as)
            if own is not None and aten.usable() and not (query.is_cuda and aten.shadowed_by()):
                return _returned(*_known(own, sent, *tensors), return_aux)
            own = scope.Own(known_as)
    if not enable_gqa and query.shape[1:2] != key.shape[-2:-1]:
        check(query, key, value, Call(1.0, max_q, max_k, UNBOUNDED, cu_seq_q, cu_seq_k))
        raise heads_differ(query, key)
    if backend == "":
        scope.exclusive(backend)  # an error: inside the op an empty name means none
    bound = window(window_size, is_causal)
    query, key, value = autocast(query, key, value)
    out: Tensor
    lse: Tensor
    arguments = (query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    if torch.compiler.is_compiling() or _beyond_aten(query, key, value, seqused_k, block_table, num_splits):
        out, lse, _ = op.forward(
            *arguments, scale, list(bound), seqused_k, block_table, num_splits, backend or "",
            wants_gradient(query, key, value),
        )  # fmt: skip
    else:
        optional = {} if seqused_k is None else {"seqused_k": seqused_k}
        if block_table is not None:
            optional["block_table"] = block_table
        if num_splits is not None:
            optional["num_splits"] = num_splits  # type: ignore[assignment]
        out, lse = _eager(arguments, scale, bound, optional, backend, own)
    return _returned(out, lse, return_aux)


def _sent(*arguments: Any) -> tuple[Tensor, Tensor] | bytes | None:
    """Return output and LSE of a call that compiled routers know; else what they know it by, if they can."""
    # What is known of offsets isn't to be relied on beside such graphs: see `packed.of_a_graph`.
    if compiled.extension is None or GRAPH_TREES in sys.modules or aten.shadowed_by():
        return None
    return compiled.extension.varlen(*arguments)  # type: ignore[no-any-return]


def _known(
    own: scope.Own, known_by: tuple[Tensor, Tensor] | bytes | None, query: Tensor, *others: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run a call that came before; the router takes from the scope what it came down to.

    `known_by` is what compiled routers know it by, to be sent without all this from now on.
    """
    with_compiled = compiled.extension
    token = scope.enter(own)
    try:
        if with_compiled is not None:
            # Of offsets on a CPU they keep nothing either.
            keep = query.is_cuda and GRAPH_TREES not in sys.modules
            with_compiled.announce(scope.KNOWN if keep else scope.UNKNOWN)
        out, lse, *_ = _flash_forward(query, *others, *own.rest, **own.options)
    finally:
        scope.leave(token)
        if with_compiled is not None:
            with_compiled.announce(scope.NOTHING)  # in case something kept the call from the routers
    if with_compiled is not None and type(known_by) is bytes:
        with_compiled.accept_sending(known_by, own, own.rest, own.options)
    return out, lse


def _returned(out: Tensor, lse: Tensor, return_aux: AuxRequest | None) -> Tensor | tuple[Tensor, Tensor]:
    if return_aux is None or not return_aux.lse:
        return out
    # Aten's op gives a row without a key the LSE of torch's own kernel, +inf.
    lse = lse.detach()
    return out, torch.where(lse == torch.inf, -torch.inf, lse).contiguous()


def varlen_attn_out(out: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `varlen_attn` into `out`, (T_q, H, D_v), for inference; returns what that returns.

    Raises:
        InvalidInputError: `out` has another shape, dtype or device than the result, or autograd
            would have to record the call.
    """
    result = varlen_attn(*args, **kwargs)  # type: ignore[arg-type]
    computed = result[0] if isinstance(result, tuple) else result
    if computed.requires_grad or (out.requires_grad and torch.is_grad_enabled()):
        raise InvalidInputError(
            "varlen_attn_out: got tensors that need a gradient, expected none (use varlen_attn)"
        )
    for what in ("shape", "dtype", "device"):
        got, expected = getattr(out, what), getattr(computed, what)
        if got != expected:
            raise InvalidInputError(f"out: got {what} {got}, expected {expected}")
    with torch.no_grad():
        out.copy_(computed)
    return (out, result[1]) if isinstance(result, tuple) else out


def _beyond_aten(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    num_splits: int | None,
) -> bool:
    """Whether aten's op can't take the call, so that it costs the custom op's Python autograd."""
    if (seqused_k is not None or block_table is not None) and wants_gradient(query, key, value):
        return True  # aten's backward receives neither
    if (block_table is not None or num_splits is not None) and "block_table" not in _FLASH_ARGUMENTS:
        return True  # torch 2.11
    if value.shape[-1] != query.shape[-1] and (query.is_meta or type(query) is not Tensor):
        return True  # nothing will run, and up to torch 2.14 aten says that the output is like the query
    return not aten.usable() or (query.is_cuda and bool(aten.shadowed_by()))


def _eager(
    arguments: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, int, int],
    scale: float | None,
    window: tuple[int, int],
    optional: dict[str, Any],
    backend: str | None,
    own: scope.Own | None,
) -> tuple[Tensor, Tensor]:
    token = None
    if backend is not None:
        token = scope.enter(scope.exclusive(backend))
    elif scope.current() is None and (arguments[0].is_cuda or own is not None or not state().active):
        token = scope.enter(own or scope.OWN)
    # What is as it would be anyway isn't named: taking a keyword apart costs torch a microsecond.
    if scale is not None:
        optional["scale"] = scale
    causal = window == (-1, 0)
    if not causal and window != (-1, -1):
        optional["window_size_left"], optional["window_size_right"] = window
    if own is not None:
        own.rest, own.options = (*arguments[5:], 0.0, causal, False), optional
    with_compiled = compiled.extension if token is not None else None
    try:
        if with_compiled is not None:
            with_compiled.announce(scope.UNKNOWN)
        result = _flash_forward(*arguments, 0.0, causal, False, **optional)
    finally:
        if token is not None:
            scope.leave(token)
        if with_compiled is not None:
            with_compiled.announce(scope.NOTHING)
    out, lse, rng_state, *_ = result
    if rng_state.is_meta and type(rng_state) is Tensor and not arguments[0].is_meta:
        # One tensor on "meta" has sent the call to torch's kernel that computes nothing.
        max_q, max_k = arguments[5:]
        more = optional.get("seqused_k"), optional.get("block_table")
        check(*arguments[:3], Call(1.0, max_q, max_k, UNBOUNDED, *arguments[3:5], *more))
    return out, lse

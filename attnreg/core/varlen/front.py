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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from attnreg.core.contract.validation import checked_dropout, checked_softcap
from attnreg.core.dispatch import call_cache, scope
from attnreg.core.dispatch.calls import wants_gradient
from attnreg.core.dispatch.scope import ScopedChoice
from attnreg.core.torchlib.layout import GRAPH_TREES
from attnreg.core.torchlib.modes import autocast, is_plain, is_transformed
from attnreg.core.varlen import custom_op, spread
from attnreg.core.varlen.autograd import attend
from attnreg.core.varlen.plans import Lengths, call_of, check_heads, check_sinks, check_tensors, window
from attnreg.errors import InvalidInputError, UnsupportedInputError

__all__ = ["AuxRequest", "varlen_attn", "varlen_attn_out"]


class AuxRequest(NamedTuple):
    """What `varlen_attn` returns with its output.

    Attributes:
        lse: the log-sum-exp of the scaled scores, (H, T_q) float32, natural log; differentiable.
    """

    lse: bool = False


def asks_for_lse(return_aux: AuxRequest | None) -> bool:
    """Check what `return_aux=` asks for, attnreg's `AuxRequest` or torch's."""
    found = getattr(return_aux, "lse", None)
    if found is None and return_aux is not None:
        raise InvalidInputError(f"return_aux: got {return_aux!r}, expected an AuxRequest or None")
    return bool(found)


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention over packed sequences of different lengths.

    Takes what every version of `torch.nn.attention.varlen.varlen_attn` takes, on every device.
    `torch.nn.attention.sdpa_kernel` has no effect, as it has on torch's own from 2.15 on: use `backend` or
    `attnreg.use_backend`.
    Differentiable in query, key, value and sinks, once. Rows past the last offset give output 0 and gradient
    0; so does a row that sees no key.

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
        softcap: bound on the scores: `softcap * tanh(score / softcap)` takes the place of each scaled score
            before any mask, as in the package flash-attn and in Gemma 2; 0 for none.
        sinks: (H,), for each head the score of one more key, without a value: the weights of a row's keys add
            up to less than 1, as in GPT-OSS. The LSE includes it, in rows that see a key. Any backend runs
            such a call, and its backward.
        alibi_slopes: float32 (H,) or (B, H): from each score `slope` times the distance of query and key is
            taken, aligned bottom-right (ALiBi). It has no gradient.
        dropout_p: probability of dropping an attention weight, the others grow by 1 / (1 - dropout_p). Which
            are dropped follows from torch's default generator of the device (`torch.manual_seed`); another
            backend drops others, so the forward's runs the backward, which is an error if that can't take a
            gradient of the LSE (FA2 with head dims above 248). Under torch.compile such a call is a graph
            break.
        backend: run on this backend or not at all.
        group: what `attnreg.context_parallel` returned: the tokens of query, key and value are spread over
            its ranks, offsets and longest lengths are those of the whole batch. Inside a `with` block of it
            every call is spread.
        mesh: refused: a `DeviceMesh` is for `attnreg.context_parallel`.

    Returns:
        The output, (T_q, H, D_v) in the query's dtype; with the LSE if that was asked for.

    Raises:
        InvalidInputError: the arguments contradict each other; says what was got and expected. Or offsets on
            a GPU were written to where torch doesn't count it, and earlier calls may have used the old ones.
        UnsupportedInputError: no backend can run the call, or `backend` can't; with every reason.
        UnknownBackendError: there is no such `backend`.
        BackendUnavailableError: that `backend` can't load here.
    """
    compiling = torch.compiler.is_compiling()
    choice, returns_lse = None, asks_for_lse(return_aux)
    if spread.is_on or group is not None or mesh is not None:
        given = {
            "is_causal": is_causal, "window_size": window_size, "scale": scale, "enable_gqa": enable_gqa,
            "softcap": softcap, "sinks": sinks, "with_lse": returns_lse, "backend": backend,
        }  # fmt: skip
        refused = {
            "seqused_k": seqused_k, "block_table": block_table, "num_splits": num_splits,
            "alibi_slopes": alibi_slopes, "dropout_p": dropout_p,
        }  # fmt: skip
        offsets = {"cu_seq_q": cu_seq_q, "cu_seq_k": cu_seq_k}
        longest = {"max_q": max_q, "max_k": max_k}
        attend_spread = spread.attend_uncompiled if compiling else spread.attend
        results = attend_spread(group, mesh, query, key, value, offsets, longest, given, refused)
        return (results[0], results[1].float().contiguous()) if returns_lse else results[0]
    if sinks is not None:
        check_sinks(query, sinks)
    if not compiling:
        choice = scope.current() if backend is None else scope.exclusive(backend)
        cache = call_cache.active if call_cache.is_loaded else call_cache.load()
        # With graph trees nothing that is known of offsets may be used: see `layout.needs_graph_memory`.
        if (
            cache is not None
            and seqused_k is None
            and block_table is None
            and num_splits is None
            and not softcap
            and alibi_slopes is None
            and not dropout_p
            and GRAPH_TREES not in sys.modules
        ):
            results = cache.varlen(
                query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, window_size, scale,
                enable_gqa, 0 if choice is None else choice.number, returns_lse, sinks,
            )  # fmt: skip
            if results is not None:
                return (results[0], results[1].float().contiguous()) if returns_lse else results[0]
    elif backend == "":
        scope.exclusive(backend)  # an error: inside the op an empty name means none
    if not compiling:
        spread.check_is_whole(cu_seq_q, query)
    check_tensors(
        query=query, key=key, value=value, cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k, seqused_k=seqused_k,
        block_table=block_table, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    lengths = cu_seq_q, cu_seq_k, max_q, max_k
    if not enable_gqa:
        check_heads(query, key, value, lengths)
    bound = window(window_size, is_causal)
    query, key, value = autocast(query, key, value)
    out: Tensor
    lse: Tensor
    plain = not compiling and is_plain(
        query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table, alibi_slopes, sinks
    )  # fmt: skip
    if dropout_p and not (plain or compiling):
        raise UnsupportedInputError(
            "dropout_p must be 0 in dispatch modes, in function transforms and for tensor subclasses, "
            f"got {dropout_p}"
        )
    if dropout_p or plain:
        options = scale, bound, seqused_k, block_table, num_splits, softcap, alibi_slopes
        if compiling:
            out, lse = _attend_uncompiled(query, key, value, lengths, options, sinks, dropout_p, backend)
        else:
            out, lse = _attend(query, key, value, lengths, options, sinks, dropout_p, choice, returns_lse)
    else:
        op: Any = custom_op.forward if compiling or not is_transformed() else custom_op.Transformable.apply
        out, lse, _ = op(
            query, key, value, *lengths, bool(is_causal), scale, list(bound), enable_gqa, seqused_k,
            block_table, num_splits, backend or "", wants_gradient(query, key, value),
            checked_softcap(softcap or 0.0), alibi_slopes, sinks,
        )  # fmt: skip
    return (out, lse.float().contiguous()) if returns_lse else out


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Lengths,
    options: tuple[Any, ...],
    sinks: Tensor | None,
    dropout_p: float,
    choice: ScopedChoice | None,
    returns_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return output and LSE of a call with the further arguments of `call_of`."""
    call = call_of(query, lengths, *options)._replace(dropout=checked_dropout(dropout_p or 0.0))
    return attend(query, key, value, call, choice, sinks, returns_lse)


# Torch's own lazy `torch.compiler.disable`: that imports all of Dynamo at once.
@_disable_dynamo
def _attend_uncompiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Lengths,
    options: tuple[Any, ...],
    sinks: Tensor | None,
    dropout_p: float,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Do the same in a compiled program, between two of its graphs. Dynamo of torch 2.11 breaks a `Call`."""
    choice = scope.current() if backend is None else scope.exclusive(backend)
    return _attend(query, key, value, lengths, options, sinks, dropout_p, choice)


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
    given, returned = ((tuple(x.shape), x.dtype, x.device) for x in (out, computed))
    for what, got, expected in zip(("shape", "dtype", "device"), given, returned, strict=True):
        if got != expected:
            raise InvalidInputError(f"out: got {what} {got}, expected {expected}")
    with torch.no_grad():
        out.copy_(computed)
    return (out, result[1]) if isinstance(result, tuple) else out

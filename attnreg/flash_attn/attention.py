"""The common part of flash-attn's functions: their options, and calls that `varlen_attn` doesn't support.

A packed call goes to `varlen_attn` unless it has `deterministic=True`. A dense call goes to backends in its
layout, because flattening a transposed tensor would copy it, and by the call cache unless it has options that
the cache leaves out. Under torch.compile, and for modes, subclasses and function transforms, which have to
see an op, a dense call becomes a packed call of equal lengths.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from attnreg.core.contract.backend import Call
from attnreg.core.dispatch import call_cache, scope
from attnreg.core.dispatch.calls import plan_for, wants_deterministic
from attnreg.core.dispatch.state import Plan
from attnreg.core.launching.memory import check_in_memory
from attnreg.core.launching.regular import regular_offsets
from attnreg.core.launching.validation import check_layouts, checked_number
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.modes import autocast, in_memory, is_plain
from attnreg.core.varlen import autograd, spread
from attnreg.core.varlen.front import AuxRequest, varlen_attn
from attnreg.core.varlen.plans import call_of, check_tensors, check_untraced, window
from attnreg.errors import InvalidInputError, UnsupportedInputError, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")

# flash-attn's names of arguments, by their names in `varlen_attn` and the contract's checks.
OF_DENSE = {"query": "q", "key": "k", "value": "v", "scale": "softmax_scale", "is_causal": "causal"}
OF_PACKED = OF_DENSE | {
    "cu_seq_q": "cu_seqlens_q", "cu_seq_k": "cu_seqlens_k", "max_q": "max_seqlen_q", "max_k": "max_seqlen_k",
}  # fmt: skip

Inputs = tuple[Tensor, Tensor, Tensor]

# Output and LSE; where a function is told that nobody reads the LSE, it may be None.
Results = tuple[Tensor, Any]

# Offsets of queries and of keys, int32 (B + 1,), and the longest sequences; dense calls have no offsets.
Lengths = tuple[Any, Tensor | None, int, int]


class Planned(NamedTuple):
    """A checked call, with the plan to run it."""

    call: Call
    plan: Plan


def naming(names: dict[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that replaces inner names of arguments by `names` in a function's errors.

    An argument that the function doesn't have is a TypeError with the name that was probably meant.

    Two kinds of errors keep the contract's names: the refusal of a call that no backend can run, as in
    `explain`, and errors of the op that compiled code calls.
    """
    # "The key's heads" are "k's heads".
    word = re.compile(rf"\b(?:the )?({'|'.join(names) or '(?!)'})\b")

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())

        @functools.wraps(function)
        def named(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except InvalidInputError as error:
                error.args = (word.sub(lambda match: names[match[1]], str(error)),)
                raise
            except TypeError:
                # Looked at only now, so that calls don't pay for it.
                unknown = [] if takes_any else [name for name in kwargs if name not in signature.parameters]
                if not unknown:
                    raise
                known = list(signature.parameters)
                raise _unknown_argument(function.__name__, unknown[0], known, names) from None

        # For what doesn't follow `__wrapped__`: programs ask inspect.getfullargspec for the parameters.
        vars(named)["__signature__"] = signature
        return named

    return decorated


def _unknown_argument(function: str, name: str, known: list[str], names: dict[str, str]) -> TypeError:
    """Return the error of a keyword argument that a function doesn't have; `names` are as in `naming`."""
    meant = names.get(name)
    hint = f"; did you mean {meant!r}?" if meant in known else did_you_mean(name, known)
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


class Options(NamedTuple):
    """The options of all of flash-attn's functions, in their order."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False

    @property
    def bound_on_scores(self) -> float:
        """The softcap; like flash-attn, numbers below 0 mean none."""
        try:
            return 0.0 if self.softcap < 0.0 else self.softcap
        except TypeError:
            return float(checked_number("softcap", self.softcap))  # raises

    def call(
        self,
        query: Tensor,
        lengths: Lengths,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> Call:
        """Return the contract's `Call`; for a dense call both offsets are None.

        `query` is (T_q, H, D), or (B, S_q, H, D) of a dense call. `seqused_k` is int32 (B,), `block_table`
        int32 (B, pages of a sequence).

        Raises:
            InvalidInputError: an option has a wrong type or value.
        """
        bound = window(self.window_size, self.causal)
        options = {
            "seqused_k": seqused_k, "block_table": block_table, "num_splits": num_splits,
            "softcap": self.bound_on_scores, "alibi_slopes": self.alibi_slopes, "dropout": self.dropout_p,
        }  # fmt: skip
        call = call_of(query, lengths, self.softmax_scale, bound, **options)
        return call._replace(deterministic=self.deterministic or call.deterministic)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    options: Options,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    planned: Planned | None = None,
    with_lse: bool = True,
) -> Results:
    """Return the output (T_q, H, D_v) and the LSE, float32 (H, T_q), of packed sequences.

    Args:
        q: (T_q, H, D), in half precision or float32.
        k: (T_k, H_k, D), or pages (pages, page size, H_k, D).
        v: (T_k, H_k, D_v), or pages (pages, page size, H_k, D_v).
        lengths: offsets and longest sequences.
        options: the options of flash-attn's functions.
        seqused_k: int32 (B,), the number of each sequence's keys that count.
        block_table: int32 (B, pages of a sequence).
        num_splits: the number of pieces that the keys are split into.
        planned: the result of `checked_call` for the same arguments, which then aren't checked again.
        with_lse: whether the LSE is read.

    Raises:
        InvalidInputError: the arguments contradict each other.
        UnsupportedInputError: no backend can run the call.
    """
    if planned is not None:
        return _attend_call(q, k, v, *planned)
    if options.deterministic and not wants_deterministic():
        check_untraced("deterministic=False")
        spread.check_is_off("deterministic=False, or torch.use_deterministic_algorithms(True)")
        check_tensors(
            query=q, key=k, value=v, cu_seq_q=lengths[0], cu_seq_k=lengths[1], seqused_k=seqused_k,
            block_table=block_table, alibi_slopes=options.alibi_slopes,
        )  # fmt: skip
        attend = _attend_uncompiled if torch.compiler.is_compiling() else _attend_deterministic
        return attend(q, k, v, options, lengths, seqused_k, block_table, num_splits)
    results = varlen_attn(
        q, k, v, *lengths, options.causal, AuxRequest(lse=with_lse), scale=options.softmax_scale,
        window_size=options.window_size, enable_gqa=True, seqused_k=seqused_k, block_table=block_table,
        num_splits=num_splits, softcap=options.bound_on_scores, alibi_slopes=options.alibi_slopes,
        dropout_p=options.dropout_p,
    )  # fmt: skip
    return (results[0], results[1]) if with_lse else (cast("Tensor", results), None)


def checked_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    options: Options,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    num_splits: int | None,
) -> Planned | None:
    """Return the `Call` and the plan of `attend_packed` without a gradient; raise that function's errors.

    The arguments are as for `attend_packed`, in the same shapes and dtypes: `q` is (T_q, H, D). The caller
    has to run this plan: with the policy "adaptive" the next plan may be another backend's turn. Returns None
    for a call that is traced, or seen by modes or subclasses: its op raises the remaining errors.
    """
    check_tensors(alibi_slopes=options.alibi_slopes)
    tensors = q, k, v, *lengths[:2], seqused_k, block_table, options.alibi_slopes
    if torch.compiler.is_compiling() or not is_plain(*tensors):
        window(options.window_size, options.causal)
        checked_number("softcap", options.bound_on_scores)
        return None
    # A plan depends only on dtypes and shapes, so autocast needn't copy a cache for it.
    if torch.is_autocast_enabled(q.device.type):
        numbers = autocast(*(x.new_empty(()) for x in (q, k, v)))
        q, k, v = (
            x if x.dtype == number.dtype else number.expand(x.shape)
            for x, number in zip((q, k, v), numbers, strict=True)
        )
    call = options.call(q, lengths, seqused_k, block_table, num_splits)
    return Planned(call, plan_for("forward", q, k, v, call, scope.current(), needs_backward=False))


def check_dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that each is a batch of the same size, (B, S, H, D), and that calls aren't spread over ranks."""
    check_layouts(q=q, k=k, v=v)
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            shown = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidInputError(
                f"{name}: got {shown}, expected 4 dimensions (batch, length, heads, head_dim)"
            )
    check_in_memory(q=q, k=k, v=v)
    check_untraced("flash_attn_varlen_func, or PyTorch's scaled_dot_product_attention")
    spread.check_is_off("packed sequences: flash_attn_varlen_func with the offsets of the whole batch")
    for name, tensor in {"k": k, "v": v}.items():
        if len(tensor) != len(q):
            raise InvalidInputError(
                f"batch: got {len(q)} for q and {len(tensor)} for {name}, expected equal ones"
            )


def attend_dense(q: Tensor, k: Tensor, v: Tensor, options: Options, with_lse: bool = True) -> Results:
    """Return the output (B, S_q, H, D_v) and the LSE, float32 (B, H, S_q), of a dense batch.

    Raises:
        InvalidInputError: the arguments contradict each other.
        UnsupportedInputError: no backend can run the call.
    """
    if (results := _attend_kept(q, k, v, options, with_lse)) is not None:
        return results
    check_dense(q, k, v)
    check_tensors(alibi_slopes=options.alibi_slopes)
    check_layouts(alibi_slopes=options.alibi_slopes)
    (batch, length_q), length_k = q.shape[:2], k.shape[1]
    lengths = None, None, length_q, length_k
    if not torch.compiler.is_compiling() and is_plain(q, k, v, options.alibi_slopes):
        return _attend(q, k, v, options, lengths)
    packed, of_packed = as_packed((q, k, v), lengths)
    return unpacked(*attend_packed(*packed, of_packed, options), batch, length_q)


def as_packed(inputs: Inputs, lengths: Lengths) -> tuple[Inputs, Lengths]:
    """Return a dense batch, (B, S, H, D), as packed sequences of equal lengths; packed ones as they are."""
    if lengths[0] is not None:
        return inputs, lengths
    q, k, v = inputs
    (batch, length_q), length_k = q.shape[:2], k.shape[1]
    offsets = regular_offsets(batch, length_q, q), regular_offsets(batch, length_k, k)
    return (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)), (*offsets, length_q, length_k)


def _attend_kept(q: Tensor, k: Tensor, v: Tensor, options: Options, with_lse: bool) -> Results | None:
    """Return the results of a dense call as most are, by the call cache.

    None for other calls, and for arguments that contradict each other.
    """
    if torch.compiler.is_compiling() or spread.is_on:
        return None
    cache = call_cache.active if call_cache.is_loaded else call_cache.load()
    dropout, scale, causal, window_size, softcap, slopes, deterministic = options
    is_left_out = dropout != 0 or softcap != 0 or slopes is not None or deterministic
    if cache is None or is_left_out:
        return None
    choice = scope.current()
    number = 0 if choice is None else choice.number
    results = cache.dense(q, k, v, causal, window_size, scale, number, with_lse)
    if results is None or not with_lse:
        return results  # type: ignore[no-any-return]
    return results[0], results[1].float().contiguous()


def unpacked(out: Tensor, lse: Tensor, batch: int, length: int) -> Results:
    """Return packed results of `batch` equally long sequences, (T, H, D_v) and (H, T), as dense results."""
    out = out.view(batch, length, *out.shape[1:])
    lse = lse.view(lse.shape[0], batch, length).transpose(0, 1).contiguous()
    # Autograd refuses some writes to views that were made while gradients were off; `detach` returns none.
    return (out, lse) if torch.is_grad_enabled() else (out.detach(), lse.detach())


def _attend_deterministic(q: Tensor, k: Tensor, v: Tensor, options: Options, *arguments: Any) -> Results:
    """Return `_attend` of tensors in memory; other tensors need the op, which can't be `deterministic`."""
    tensors = [x for x in (q, k, v, options.alibi_slopes) if x is not None]
    plain = [x for x in map(in_memory, tensors) if x is not None]
    unpack: Any = forward_ad.unpack_dual
    if forward_ad._current_level >= 0 and any(unpack(x).tangent is not None for x in plain):
        raise UnsupportedInputError("deterministic must be False in forward-mode AD, got True")
    # The kernel writes past the mode of make_fx, which records operations.
    is_recorded = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if len(plain) < len(tensors) or is_transformed or is_recorded:
        raise UnsupportedInputError(
            "deterministic must be False in function transforms, in make_fx and for tensor subclasses with "
            "__torch_dispatch__, got True; torch.use_deterministic_algorithms(True) has the same effect there"
        )
    if options.alibi_slopes is not None:
        options = options._replace(alibi_slopes=plain[3])
    return _attend(plain[0], plain[1], plain[2], options, *arguments)


def _attend(q: Tensor, k: Tensor, v: Tensor, options: Options, *arguments: Any) -> Results:
    """Return output and LSE of a call with the further arguments of `Options.call`."""
    return _attend_call(q, k, v, options.call(q, *arguments))


def _attend_call(q: Tensor, k: Tensor, v: Tensor, call: Call, plan: Plan | None = None) -> Results:
    out, lse = autograd.attend(*autocast(q, k, v), call, scope.current(), plan=plan)
    return out, lse.float().contiguous()


# A compiled program calls this between two of its graphs.
_attend_uncompiled = _disable_dynamo(_attend_deterministic)


def returned(results: Results, with_weights: bool) -> Any:
    """Return the output; with weights flash-attn's triple, whose weights are empty without dropout."""
    out, lse = results
    return (out, lse, out.new_empty(0)) if with_weights else out


leave_module_uncompiled(__name__)

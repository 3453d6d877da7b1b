"""`explain`: which backend would run a call, who decided, and why not the others.

Takes a spec, for hardware that needn't be there, or the arguments of the call itself.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch.nn.attention import SDPBackend

from attnreg import aten, scope
from attnreg.backend import Call
from attnreg.discovery import Direction
from attnreg.dispatch import bounds, scale_of, wants_deterministic, wants_gradient
from attnreg.errors import BackendUnavailableError, InvalidInputError
from attnreg.planning import decide, spec_of
from attnreg.render import decision_table
from attnreg.selection import Decision, select
from attnreg.spec import AttentionSpec
from attnreg.state import state
from attnreg.validation import check

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from attnreg.discovery import Entry
    from attnreg.selection import Policy

__all__ = ["Explanation", "explain"]

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would happen to a call.

    Attributes:
        spec: what was asked.
        forward: the decision about its forward.
        backward: the decision about its backward; None where none is needed.
        notes: what else decides whether attnreg sees the call at all.
    """

    spec: AttentionSpec
    forward: Decision
    backward: Decision | None = None
    notes: tuple[str, ...] = ()

    @property
    def backend(self) -> str | None:
        """The backend of the forward; None if none can run it."""
        return self.forward.backend

    @property
    def source(self) -> str:
        """Who decided about the forward."""
        return self.forward.source

    @property
    def rejected(self) -> dict[str, tuple[str, ...]]:
        """Why each of the others can't run the forward."""
        return self.forward.rejected

    @property
    def runs(self) -> bool:
        """Whether every direction that is needed has a backend."""
        return self.backend is not None and (self.backward is None or self.backward.backend is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        decisions = (self.forward,) if self.backward is None else (self.forward, self.backward)
        tables = [decision_table(self.spec, decision) for decision in decisions]
        return "\n\n".join([*tables, *(f"note: {note}" for note in self.notes)])


def explain(
    query: AttentionSpec | Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    cu_seq_q: Tensor | None = None,
    cu_seq_k: Tensor | None = None,
    max_q: int = 0,
    max_k: int = 0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    window_size: Sequence[int] = (-1, -1),
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    enable_gqa: bool = False,
    backend: str | None = None,
) -> Explanation:
    """Say which backend would run a call, who decided, and every reason against every other.

    Takes an `AttentionSpec`; or the arguments of `varlen_attn`, query (T, H, D) with offsets; or
    those of `F.scaled_dot_product_attention`, query (B, H, S, D). Runs no kernel.

    Raises:
        InvalidInputError: the arguments contradict each other.
        ConfigError: the environment or a settings file can't be read.
    """
    pin = scope.exclusive(backend) if backend is not None else scope.current()
    if isinstance(query, AttentionSpec):
        return _explained(query, pin, ())
    if key is None or value is None:
        raise InvalidInputError(
            "explain: got a query alone, expected query, key and value, or an AttentionSpec"
        )
    if cu_seq_q is None and query.dim() != 4:
        raise InvalidInputError(
            f"query: got shape {tuple(query.shape)}, expected (batch, heads, length, head_dim), "
            "or (tokens, heads, head_dim) with cu_seq_q"
        )
    notes: tuple[str, ...] = ()
    grad = wants_gradient(query, key, value)
    if cu_seq_q is None:
        notes = _selector_notes((query, key, value, attn_mask, dropout_p, is_causal), scale, enable_gqa)
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        max_q, max_k = query.shape[1], key.shape[1]
    left, right = window_size
    call = Call(
        scale_of(query, scale), max_q, max_k, bounds((left, right), is_causal, max_q, max_k),
        cu_seq_q, cu_seq_k, seqused_k, block_table, attn_mask, None, dropout_p, None, num_splits,
        wants_deterministic(),
    )  # fmt: skip
    check(query, key, value, call)
    return _explained(spec_of(query, key, value, call, grad), pin, notes)


def _explained(spec: AttentionSpec, pin: scope.Pin | None, notes: tuple[str, ...]) -> Explanation:
    now = state()
    policy = now.policy.led_by(pin.preference if pin is not None else None)
    forward, backward = (_decision(spec, direction, now.entries, policy) for direction in DIRECTIONS)
    notes = (*notes, *_front_notes(), *_assumptions(spec, forward, now.entries))
    return Explanation(spec, forward, backward if spec.needs_backward else None, notes)


def _assumptions(spec: AttentionSpec, decision: Decision, entries: Mapping[str, Entry]) -> Iterator[str]:
    """Yield what an answer about another machine takes for granted of it."""
    if spec.device.simulated:
        for entry in (entries[name.casefold()] for name in decision.order if name not in decision.rejected):
            if entry.unavailable():
                yield f"takes for granted that {entry.name} loads there; here it {entry.unavailable()}"


def _decision(
    spec: AttentionSpec, direction: Direction, entries: Mapping[str, Entry], policy: Policy
) -> Decision:
    try:
        return decide(spec, direction, entries, policy)
    except BackendUnavailableError as error:
        return replace(select(spec, direction, entries, policy), backend=None, refusal=str(error))


def _front_notes() -> tuple[str, ...]:
    notes = []
    if not state().active:
        notes.append("nothing is registered: attnreg.varlen_attn is served, torch's own entry points are not")
    if aten.shadowed_by():
        notes.append(
            f"torch.nn.attention has {aten.shadowed_by()!r} active above attnreg's routers: the flash ops "
            "on CUDA go there; restore_flash_attention_impl() gives them back"
        )
    return tuple(notes)


def _selector_notes(arguments: tuple[Any, ...], scale: float | None, enable_gqa: bool) -> tuple[str, ...]:
    """Say if torch's own selector sends a call elsewhere than to the ops that attnreg routes."""
    choice = SDPBackend(torch._fused_sdp_choice(*arguments, scale=scale, enable_gqa=enable_gqa))
    if choice in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        return ()
    return (
        f"F.scaled_dot_product_attention sends this call to torch's {choice.name.lower()} kernel before "
        "attnreg sees it",
    )

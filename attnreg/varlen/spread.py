"""Which calls of `varlen_attn` are spread over ranks: those with `group=`, and all in a `with` block."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._compile import _disable_dynamo

from attnreg.errors import InvalidInputError

# What calls are spread by while its `with` block lasts. It is one for all threads, as an activation that is
# checkpointed is computed once more on a thread of autograd's. Compiled code looks at `is_on` alone, as it is
# compiled once more for each new object that it looks at.
_over: Any = None
is_on = False


def spread_over(context: Any) -> Any:
    """Have calls spread by a `ContextParallel`, or by None; returns what they were spread by before."""
    global _over, is_on
    before, _over, is_on = _over, context, context is not None
    return before


def check_is_off(instead: str) -> None:
    """Refuse a call that isn't spread in a `with` block: queries would see keys of this rank alone."""
    if is_on:
        raise InvalidInputError(
            "context parallel: got a call on this rank's own tokens inside of the `with` block, expected "
            f"{instead}; what isn't spread belongs outside of the block"
        )


def attend(group: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the results of a call that is spread."""
    over = _over if group is None else group
    if not hasattr(over, "attend"):
        raise InvalidInputError(
            f"group: got {over!r}, expected what attnreg.context_parallel(group, cu_seq) returns, as it says "
            "which rank has which tokens"
        )
    return over.attend(*arguments)  # type: ignore[no-any-return]


# A compiled program breaks its graph there: what ranks exchange is in the order of Python's calls.
attend_uncompiled = _disable_dynamo(attend)

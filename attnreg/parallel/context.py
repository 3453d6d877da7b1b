"""`ContextParallel`: made by a program once for each packed batch, it spreads calls over ranks."""

from __future__ import annotations

import functools
import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from attnreg.core.contract.lengths import bounds
from attnreg.core.dispatch import scope
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.modes import autocast, is_transformed
from attnreg.core.varlen.spread import spread_over
from attnreg.errors import InvalidInputError, UnsupportedInputError
from attnreg.parallel.agreement import refuse
from attnreg.parallel.batch import SpreadBatch
from attnreg.parallel.by_heads import AttentionByHeads, WholeBatch, WorkByHeads
from attnreg.parallel.calls import (
    Arguments,
    SpreadKind,
    check_longest,
    check_refused,
    check_tensors,
    kind_of,
    problem_of,
    texts,
)
from attnreg.parallel.estimates import ALL_GATHER, ALL_TO_ALL, RING, Rates, gathered_groups
from attnreg.parallel.layout import Layout
from attnreg.parallel.machine import Machine, learn, machine_of
from attnreg.parallel.methods import Choice, check_possible, choose, explain_context_parallel
from attnreg.parallel.needs import Needs
from attnreg.parallel.parts import prepared
from attnreg.parallel.steps import gathering, rotating
from attnreg.parallel.stepwise import KernelOptions, StepwiseAttention, Work

__all__ = ["ContextParallel"]

log = logging.getLogger("attnreg")


class ContextParallel(SpreadBatch):
    """A packed batch that is spread over the ranks of a group.

    Inside its `with` block every call of `attnreg.varlen_attn` in the process has this rank's rows and the
    offsets of the whole batch, and sees the keys of all ranks. Activation checkpointing repeats forwards in
    the backward, so the block has to last until the backward is done.

    Attributes:
        group: the process group.
        rank: this process's rank in it.
        layout: which rank has which tokens.
        method: the requested method, or "auto".
        taken: the number of calls (forwards) by method.
    """

    def __init__(
        self,
        group: Any,
        layout: Layout,
        method: str,
        rates: Rates | None,
        memory: int | None,
        balanced_for: tuple[int, int] | None,
    ) -> None:
        super().__init__(group, layout)
        self.method, self.taken = method, Counter[str]()
        self._rates, self._memory = rates, memory
        self._agreed: dict[SpreadKind, str] = {}  # the method of each kind
        self._before: list[Any] = []
        self._balanced_for = balanced_for  # the window that the layout was made for

    def __enter__(self) -> Self:
        self._before.append(spread_over(self))
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._before:
            raise InvalidInputError("context: got the end of a `with` block, expected its begin before")
        spread_over(self._before.pop())

    def explain(
        self,
        *,
        heads: int,
        heads_k: int | None = None,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: torch.dtype | str = "bfloat16",
        is_causal: bool = True,
        window_size: Sequence[int] | None = (-1, -1),
        needs_backward: bool = True,
        device: torch.device | str | None = None,
    ) -> Choice:
        """Return the choice of a method for a call, as `explain_context_parallel`; no rank waits for others.

        Args:
            heads, heads_k, head_dim, head_dim_v: of the call, as for `explain_context_parallel`.
            dtype, is_causal, window_size, needs_backward: of the call, too.
            device: where the tensors are; by default the group's. On GPUs, "auto" chooses by this rank's
                memory and the default `rates` before the group's first call, afterwards by those of all
                ranks.

        Raises:
            InvalidInputError: an argument isn't what is expected, or `device` isn't of this machine.
        """
        if device is None:
            is_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend_config(self.group)
            device = "cuda" if is_gpu else "cpu"
        try:
            here = self._machine(torch.device(device))
        except (AssertionError, RuntimeError, TypeError) as error:
            raise InvalidInputError(
                f"device: got {device!r}, expected one of this machine ({error})"
            ) from error
        return explain_context_parallel(
            self.layout,
            heads=heads,
            heads_k=heads_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
            is_causal=is_causal,
            window_size=window_size,
            needs_backward=needs_backward,
            method=self.method,
            rates=here.rates,
            memory=here.memory,
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        offsets: dict[str, Tensor | None],
        lengths: dict[str, int],
        arguments: dict[str, Any],
        refused: dict[str, object],
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and, if wanted, LSE of this rank's rows; `varlen_attn` calls this.

        Args:
            query: (T, H, D), this rank's T tokens, floating point.
            key: (T, H_k, D), of the same dtype.
            value: (T, H_k, D_v), of the same dtype.
            offsets: of the whole batch by name, int32 (documents + 1,).
            lengths: `max_q` and `max_k` of the whole batch.
            arguments: the fields of `Arguments`.
            refused: arguments of `varlen_attn` that no method supports, by name.

        Returns:
            The output (T, H, D_v) in the query's dtype, and the LSE (H, T), at least float32, or None.

        Raises:
            RanksDifferError: on every rank, if ranks make different calls.
            InvalidInputError, UnsupportedInputError: on every rank, if all make the same wrong call; on this
                rank alone, if the other ranks' call isn't compared.
        """
        kind, rest = None, Arguments(**arguments)
        try:
            if is_transformed():
                raise UnsupportedInputError(
                    "group: got a call in a function transform or in forward-mode AD, expected one outside: "
                    "calls spread over ranks have a backward alone"
                )
            check_tensors(query, key, value, rest, self.layout.rows[self.rank])
            query, key, value = autocast(query, key, value)
            kind = kind_of(query, key, value, rest, self.longest)
            check_refused(refused)
            check_longest(lengths, self.longest)
            for name, tensor in offsets.items():
                self._check_offsets(name, tensor)
        except Exception as error:
            # If the other ranks' call isn't compared, they don't wait for this rank in `agree`.
            if self._agreement.holds and (kind in self._agreed or (kind is None and self._agreed)):
                raise
            refuse(self.group, error)
        if kind in self._agreed and self._agreement.holds:
            work = self._work(self._agreed[kind], kind, rest, query.device)
        else:
            work = self._compared(kind, rest, (query, key, value))
        method = self._agreed[kind]
        self.taken[method] += 1
        function: Any = AttentionByHeads if method == ALL_TO_ALL else StepwiseAttention
        out, lse = function.apply(query, key, value, rest.sinks, work)
        return out, lse if rest.with_lse else None

    def _compared(
        self, kind: SpreadKind, rest: Arguments, tensors: tuple[Tensor, Tensor, Tensor]
    ) -> Work | WorkByHeads:
        """Return the work of a call that the ranks compare before it runs.

        "auto" tries its methods in order, and chooses the first whose calls kernels can run on all ranks.
        """
        device = tensors[0].device
        requested = {"method that is asked for": self.method, "memory": "of no use", "rates": "of no use"}
        if self.method == "auto":
            requested |= self._compared_of_machine(device)
            if kind not in self._agreed and (self._memory is None or self._rates is None):
                tell = functools.partial(self._compare, "forward", requested)
                learn(self.group, device, self._rates is None, tell)
        for number in itertools.count():
            try:
                methods = [self._agreed[kind]] if kind in self._agreed else self._methods(kind, device)
                work = self._work(methods[number], kind, rest, device)
                problem = None if kind in self._agreed else problem_of(work.calls(*tensors), work.options)
                if problem is not None and number + 1 == len(methods):
                    raise problem
                mine = requested | texts(kind, device, methods[number])
            except Exception as error:  # noqa: BLE001 - the other ranks wait for this one, whatever it raises
                refuse(self.group, error)
            if all(self._compare("forward", mine, problem is None)):
                break
        self._agreed[kind] = methods[number]
        if self._balanced_for is not None and self.rank == 0:
            balanced_for = bounds(self._balanced_for, False, self.longest, self.longest)
            if balanced_for != kind.window:
                _warn_of_another_window(balanced_for, kind.window)
        return work

    def _methods(self, kind: SpreadKind, device: torch.device) -> list[str]:
        """Return the methods to try for a call, in order; a single one unless the method is "auto"."""
        if self.method != "auto":  # no estimate is needed
            check_possible(self.method, kind.shape, self.layout.ranks)
            return [self.method]
        here = self._machine(device)
        choice = choose(self._needs(kind.window), kind.shape, self.method, here.rates, here.memory)
        return [choice.method, *choice.others]

    def _work(
        self, method: str, kind: SpreadKind, rest: Arguments, device: torch.device
    ) -> Work | WorkByHeads:
        choice = scope.current() if rest.backend is None else scope.exclusive(rest.backend)
        needs_backward = kind.shape.needs_backward
        options = KernelOptions(kind.scale, kind.softcap, choice, needs_backward, self._before_backward)
        plan = self._plan(method, kind.window, device)
        if method != ALL_TO_ALL:
            groups = 1 if method == RING else self._gathered_groups(kind, device)
            return Work(plan, self.group, options, groups)
        return WorkByHeads(plan, kind.window, self.group, options, rest.with_lse)

    def _gathered_groups(self, kind: SpreadKind, device: torch.device) -> int:
        def count_groups() -> int:
            # Only with "auto" do ranks measure rates, and compare rates that a program passed.
            rates = self._machine(device).rates if self.method == "auto" else Rates()
            return gathered_groups(self._needs(kind.window), kind.shape, rates)

        groups: int = self._once(("groups", kind.shape, *kind.window), count_groups)
        return groups

    def _before_backward(self) -> None:
        if not self._agreement.holds:
            self._compare("backward", {})

    def _machine(self, device: torch.device) -> Machine:
        """Return the memory and the rates by which "auto" chooses."""
        memory, rates = machine_of(self.group, device)
        memory = memory if self._memory is None else self._memory
        return Machine(memory, rates if self._rates is None else self._rates)

    def _compared_of_machine(self, device: torch.device) -> dict[str, str]:
        """Return the text of the machine that ranks compare."""
        is_gpu = machine_of(self.group, device).memory is not None
        memory, rates = ("an eighth of the GPU's", "measured") if is_gpu else ("any", "the defaults")
        return {
            "memory": memory if self._memory is None else f"{self._memory} bytes",
            "rates": rates if self._rates is None else str(self._rates),
        }

    def _needs(self, bound: tuple[int, int]) -> Needs:
        needs: Needs = self._once(("needs", *bound), lambda: Needs(self.layout, *bound))
        return needs

    def _plan(self, method: str, bound: tuple[int, int], device: torch.device) -> Any:
        if method == ALL_TO_ALL:
            return self._once((method, device), lambda: WholeBatch.of(self.layout, self.rank, device))
        steps = gathering if method == ALL_GATHER else rotating
        of_rank = functools.partial(steps, self._needs(bound), self.rank)
        place = self.layout, self.rank, device, method == ALL_GATHER
        return self._once((method, *bound, device), lambda: prepared(of_rank(), *place))


@functools.lru_cache(maxsize=64)
def _warn_of_another_window(balanced_for: tuple[int, int], got: tuple[int, int]) -> None:
    """Log this once a process, because programs make a context for each batch."""
    log.warning(
        "context parallel: got a call with the window %s, but its batch is balanced for %s: the call is "
        "computed by its own window, and ranks may have unequal work",
        got,
        balanced_for,
    )


leave_module_uncompiled(__name__)

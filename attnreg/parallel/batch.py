"""A rank's share of a packed batch: parts of tensors, positions and offsets, made once for each device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from attnreg.core.varlen import plans
from attnreg.core.varlen.spread import note_whole_batch
from attnreg.errors import InvalidInputError
from attnreg.parallel.agreement import BatchAgreement, refuse
from attnreg.parallel.calls import check_offsets, check_tokens, texts_of_layout
from attnreg.parallel.layout import Layout
from attnreg.parallel.parts import on_device

# How many tensors of offsets are remembered as checked. A program that makes new offsets for each call gains
# nothing from more.
MOST_OFFSETS = 16


class SpreadBatch:
    """A packed batch that is spread over the ranks of a group, without attention.

    Attributes:
        group: the process group.
        rank: this process's rank in it.
        layout: which rank has which tokens.
    """

    def __init__(self, group: Any, layout: Layout) -> None:
        self.group, self.layout, self.rank = group, layout, dist.get_rank(group)
        self._agreement = BatchAgreement(group)
        self._gathered: set[tuple[object, ...]] = set()  # row shapes, dtypes, devices
        self._made: dict[tuple[object, ...], Any] = {}
        self._known_offsets: list[tuple[Tensor, int]] = []

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} can't be pickled or copied: its group is a connection of this process; "
            "pickle its `layout`, and call attnreg.context_parallel(group, layout) with the other's group"
        )

    def shard(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return a copy of this rank's part of a tensor, of any dtype, with the whole batch along `dim`.

        Args:
            tensor: (..., T, ...), T tokens of the whole batch at `dim`. The result has this rank's tokens
                there.
            dim: the dimension of the tokens.

        Raises:
            InvalidInputError: no such dimension, or another number of tokens.
        """
        check_tokens(tensor, dim, self.layout.tokens, "of the whole batch")
        return tensor.index_select(dim, self._rows(self.rank, tensor.device))

    def gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return the whole batch's tensor from the parts of all ranks, which all call this; no gradient.

        Args:
            tensor: (..., this rank's tokens, ...), of any dtype. The result has the whole batch's tokens
                there.
            dim: the dimension of the tokens.

        Raises:
            RanksDifferError: on every rank, if ranks differ in layout, shape or dtype.
            InvalidInputError: on every rank, if all pass a wrong `dim`, a wrong number of tokens, or a tensor
                that needs a gradient; on this rank alone, if the others' gather isn't compared.
        """
        here, most, kind = self.layout.rows[self.rank], max(self.layout.rows), None
        try:
            check_tokens(tensor, dim, here, "of this rank")
            rows = tensor.movedim(dim, 0)
            kind = tuple(rows.shape[1:]), str(rows.dtype), rows.device.type
            if tensor.requires_grad and torch.is_grad_enabled():
                raise InvalidInputError(
                    "tensor: got one that needs a gradient, expected none: pass tensor.detach()"
                )
        except Exception as error:
            # As in a call: ranks that gather what was agreed on before don't wait for this rank.
            if self._agreement.holds and (kind in self._gathered or (kind is None and self._gathered)):
                raise
            refuse(self.group, error)
        if kind not in self._gathered or not self._agreement.holds:
            names = "shape of a row", "dtype", "device"
            self._compare("gather", dict(zip(names, map(str, kind), strict=True)))
            self._gathered.add(kind)
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[:here] = rows
        parts = [torch.empty_like(padded) for _ in range(self.layout.ranks)]
        # As bytes, because gloo and NCCL don't support every dtype.
        dist.all_gather([x.view(torch.uint8) for x in parts], padded.view(torch.uint8), group=self.group)
        whole = rows.new_empty((self.layout.tokens, *rows.shape[1:]))
        for rank, count in enumerate(self.layout.rows):
            whole[self._rows(rank, whole.device)] = parts[rank][:count]
        return whole.movedim(0, dim)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """Return this rank's tokens' positions in their documents, for rotary embeddings: int64 (T,)."""
        # A copy, because programs write to it, for instance to add an offset to all positions.
        return self._on("positions", device, lambda: self.layout.positions(self.rank)).clone()

    def cu_seq(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the offsets of the whole batch, for `varlen_attn`: int32 (documents + 1,)."""
        made = self._on("cu_seq", device, lambda: torch.tensor(self.layout.cu_seq).int())
        if all(tensor is not made for tensor, _ in self._known_offsets):
            self._known_offsets.append((made, made._version))
            note_whole_batch(made, self.layout.tokens)
        return made

    @functools.cached_property
    def longest(self) -> int:
        """The longest document, in tokens: `max_q` and `max_k` of `varlen_attn`."""
        return max((end - begin for begin, end in itertools.pairwise(self.layout.cu_seq)), default=0)

    def _compare(self, call: str, mine: dict[str, str], extra: Any = None) -> list[Any]:
        """Compare layout and call over all ranks, which all call this; return each rank's `extra`."""
        return self._agreement.compare(texts_of_layout(self.layout) | {"call": call} | mine, extra)

    def _rows(self, rank: int, device: torch.device) -> Tensor:
        return self._on(f"rows of {rank}", device, lambda: self.layout.index(rank))

    def _on(self, what: str, device: torch.device | str, make: Callable[[], Tensor]) -> Tensor:
        device = torch.device(device)
        tensor: Tensor = self._once((what, device), lambda: on_device(make(), device))
        return tensor

    def _once(self, what: tuple[object, ...], make: Callable[[], Any]) -> Any:
        if what not in self._made:
            # A result made in inference mode couldn't serve later calls with gradients. It is made on the
            # CPU, whatever the program's default device is, and copied to where it is used.
            with torch.inference_mode(False), torch.device("cpu"):
                self._made[what] = make()
        return self._made[what]

    def _check_offsets(self, name: str, offsets: Tensor | None) -> None:
        plans.check_tensors(**{name: offsets})
        version = None if offsets is None or offsets.is_inference() else offsets._version
        if not any(known is offsets and checked == version for known, checked in self._known_offsets):
            check_offsets(name, offsets, self.layout)
            if offsets is not None and version is not None:
                self._known_offsets.append((offsets, version))
                del self._known_offsets[:-MOST_OFFSETS]

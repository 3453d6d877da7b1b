"""Results of a rank's rows. Results of several calls for one row are added, or merged by their LSE."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnreg.core.torchlib.layout import in_large_elements
from attnreg.parallel.parts import Put

ALL = slice(None)  # all heads


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which many results of a row are summed: at least float32."""
    return torch.promote_types(dtype, torch.float32)


class Sums:
    """Results of rows: a row's first result is written, later results are added to it."""

    def __init__(
        self, like: Tensor, dtype: torch.dtype, fills_all_rows: bool = False, value: Tensor | None = None
    ) -> None:
        self._like, self._dtype, self._fills_all_rows, self._value = like, dtype, fills_all_rows, value

    @property
    def value(self) -> Tensor:
        """All rows; rows without a result are 0, or uninitialised if every row will be written."""
        if self._value is None:
            made = torch.empty_like if self._fills_all_rows else torch.zeros_like
            self._value = made(self._like, dtype=self._dtype)
        return self._value

    def put(self, puts: Sequence[Put], new: Tensor, heads: slice = ALL) -> None:
        """Write or add results of a call, (rows, heads, ...), in any dtype.

        `heads` says which heads of the sums these are.
        """
        if self._value is None and self._is_all(puts) and new.shape[:2] == self._like.shape[:2]:
            self._value = new.to(self._dtype)
            return
        value = self.value[:, heads]
        to, source = in_large_elements(value, new) if new.dtype == self._dtype else (value, new)
        for (_, begin, end), at, is_first in puts:
            if is_first:
                to[begin:end].copy_(source[at : at + end - begin])
            else:
                value[begin:end].add_(new[at : at + end - begin])

    def _is_all(self, puts: Sequence[Put]) -> bool:
        """Whether the first results of all rows are put at once."""
        return len(puts) == 1 and puts[0].is_first and puts[0].run.end - puts[0].run.begin == len(self._like)

    def merge(self, put: Put, kept: Tensor, new: Tensor, share: Tensor, heads: slice) -> None:
        """Replace the present rows by their sum with new rows, each times a factor: `kept` and `share`.

        `new` is (rows, heads, D), in any dtype. The factors are of the rows of `put`, (rows, heads).
        """
        (_, begin, end), at, _ = put
        old = self.value[begin:end, heads]
        torch.add(old * kept[..., None], new[at : at + end - begin] * share[..., None], out=old)


def put_or_merge(outs: Sums, lses: Sums, puts: Sequence[Put], out: Tensor, lse: Tensor, heads: slice) -> None:
    """Write results of a call, or merge them with results of the same queries for other keys.

    Args:
        outs, lses: the results so far, (T, H, D_v) and (T, H).
        puts: where the call's rows go.
        out: the call's output, (rows, heads, D_v).
        lse: the call's LSE, (rows, heads), in the dtype of `lses`.
        heads: the heads that the call computed.
    """
    if firsts := [put for put in puts if put.is_first]:
        outs.put(firsts, out, heads)
        lses.put(firsts, lse, heads)
    for put in puts:
        if not put.is_first:
            (_, begin, end), at, _ = put
            before, new = lses.value[begin:end, heads], lse[at : at + end - begin]
            total = torch.logaddexp(before, new)
            outs.merge(put, (before - total).exp_(), out, (new - total).exp_(), heads)
            before.copy_(total)

"""Launchers: what runs further calls of a kind that a kernel has run, for the call cache.

`Kernels.specialize` is called after a call has run, with the tensors that it ran on. It returns a launcher
for every further call of that kind and class of lengths, whatever its lengths, values and addresses. All of
`Call` but lengths and tensors is the same then. Tensors have the same dtype, device, heads and head dims. It
is the same whether their addresses are multiples of sixteen bytes, and whether each stride is 0, 1 or a
multiple of sixteen bytes. The call cache ensures that in every call

- there are queries and keys, and lengths fit each other,
- each row of a dense call sees a key,
- the tensors' device is the current one.

Thread and stream may be others, and a CUDA graph may be captured. Whatever else a launcher depends on it
looks at itself, and returns None where that has changed: Python then looks up the call's plan. What it raises
means what it means of a kernel: after a BackendUnavailableError the next backend runs such calls.

A launcher's arguments are the tensors of the backend's function. In a packed call further arguments follow:
the tensors of options that the kernel itself counts, or what a forward's launcher `takes`; both
offsets (the same tensor twice if the first call's were; with pages None for the key's); `max_q` and
`max_k`; whether every row is known to belong to a sequence and to see a key. If that isn't known, the
launcher itself keeps the contract for rows of no sequence and without a key (`rows`). It returns what the
function does, save that a forward's LSE may have any strides, and it calls no op of aten's that attnreg
routes. Any function will do; the classes below spare the call cache every Python object of a tensor. C++
tells them apart by `form` and reads their attributes by name (`csrc/described.h`).
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from attnreg.core.contract.backend import Call
from attnreg.core.contract.backend import Launcher as Launcher
from attnreg.core.launching.counts import counts_in
from attnreg.core.launching.derivation import Derivation
from attnreg.core.launching.memory import address_of, inputs_of
from attnreg.core.launching.regular import fills
from attnreg.core.launching.rows import blanked, clear_backward, clear_forward
from attnreg.core.torchlib import captured
from attnreg.core.torchlib.layout import contiguous_strides, stream_of, uninitialized, with_strides
from attnreg.errors import RegistrationError

FORWARD, LSE = 3, 5  # how many tensors a forward is given; the place of the LSE among those of a backward

Strides = tuple[tuple[int, ...], ...]


class Length(enum.IntEnum):
    """A length of the call, among arguments of an op or its auxiliary outputs."""

    MAX_Q = 0
    MAX_K = 1


MAX_Q, MAX_K = Length.MAX_Q, Length.MAX_K


def with_lengths(values: tuple[Any, ...], max_q: int, max_k: int) -> list[Any]:
    """Return values with a call's lengths in the places of `MAX_Q` and `MAX_K`."""
    return [(max_q, max_k)[x] if isinstance(x, Length) else x for x in values]


def places_of(values: tuple[Any, ...]) -> tuple[tuple[int, int], ...]:
    """Return where `MAX_Q` and `MAX_K` are, each place with 0 or 1."""
    return tuple((place, int(x)) for place, x in enumerate(values) if isinstance(x, Length))


@dataclass(eq=False)
class OpLauncher:
    """One of torch's own kernels, with all its arguments but the tensors.

    If rows of a packed call aren't known to see keys, the call cache clears the rows that see none.

    Attributes:
        op, key: the aten op, without "aten::", and the dispatch key of the kernel (see `torchlib.captured`).
        rest, options: the op's arguments behind the tensors, with `MAX_Q` and `MAX_K` for lengths, and those
            by keyword.
        results: how many of the op's results are returned.
        window: of a packed call, (left, right) as in `Call`: rows that see no key are cleared by it.
        takes: ("seqused_k",) if the op takes that by keyword.
        folds: whether the op takes a longest query of 1 to mean that each sequence has a query. Where that
            isn't known, it gets 2.
        zeroes_rows: whether a forward writes 0 to output rows of a sequence without keys. If nobody reads the
            LSE and all rows belong to a sequence, nothing is cleared then.
    """

    form: ClassVar = "op"
    op: str
    key: str
    rest: tuple[Any, ...]
    options: dict[str, Any]
    results: int
    window: tuple[int, int] = (-1, -1)
    _: KW_ONLY
    takes: tuple[str, ...] = ()
    folds: bool = False
    zeroes_rows: bool = False

    def __post_init__(self) -> None:
        self._run = captured.kernel(self.op, self.key)

    @property
    def takes_used(self) -> bool:
        """Whether it is given `seqused_k`."""
        return "seqused_k" in self.takes

    @property
    def length_places(self) -> tuple[tuple[int, int], ...]:
        """Where lengths are among `rest`, as `places_of` returns it."""
        return places_of(self.rest)

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Return the results for the arguments of a launcher."""
        tensors, call = split(arguments)
        used, options = None, self.options
        if self.takes_used:
            tensors, used = tensors[:-1], tensors[-1]
            options = options | {"seqused_k": used}
        query, key, _ = inputs_of(tensors)
        max_q, max_k = (query.shape[1], key.shape[1]) if call is None else call.longest
        if self.folds and max_q == 1 and call is not None and not call.has_lone_queries(query):
            max_q = 2
        rest = with_lengths(self.rest, max_q, max_k)
        offsets = () if call is None else call.offsets
        results = tuple(self._run(*tensors, *offsets, *rest, **options)[: self.results])
        return results if call is None else call.cleared(results, self.window, used)


def takes_options(launcher: Launcher | None, call: Call) -> bool:
    """Whether a launcher is given all options that it has to say of itself that it `takes`."""
    options = {"seqused_k": call.seqused_k, "block_table": call.block_table}
    taken = getattr(launcher, "takes", ())
    return all(name in taken for name, tensor in options.items() if tensor is not None)


class PackedCall(NamedTuple):
    """What a launcher is given of a packed call behind its tensors."""

    offsets: tuple[Tensor, Tensor]
    longest: tuple[int, int]
    all_rows_see_keys: bool

    def has_lone_queries(self, query: Tensor) -> bool:
        """Whether each sequence is known to have one row of the query, (T_q, H, D), if none has more."""
        is_filled = self.all_rows_see_keys or fills(self.offsets[0], len(query))
        return is_filled and len(query) == len(self.offsets[0]) - 1

    def cleared(
        self, results: tuple[Tensor, ...], window: tuple[int, int], used: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return a forward's or a backward's results after clearing rows that a kernel left as they were.

        Results are changed in place. A forward's are the output (T_q, H, D_v) and the LSE (H, T_q) in
        float32. A backward's are the gradients of query, key and value, (T, H, D) each. Dtypes have 16 or 32
        bits. `window` is (left, right) as in `Call`, `used` int32 (B,) how many keys of a sequence count.
        """
        if self.all_rows_see_keys:
            return results
        if len(results) == FORWARD - 1:
            clear_forward(results[0], results[1], *self.offsets, window, used)
        else:
            clear_backward(results[0], results[1], results[2], *self.offsets)
        return results


def split(arguments: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], PackedCall | None]:
    """Return a launcher's tensors, options' tensors included, and what follows; None for a dense call."""
    if not isinstance(arguments[-1], bool):
        return arguments, None
    *tensors, cu_seqlens_q, cu_seqlens_k, max_q, max_k, known = arguments
    if cu_seqlens_k is None:  # of pages, for which any will do
        cu_seqlens_k = cu_seqlens_q
    return tuple(tensors), PackedCall((cu_seqlens_q, cu_seqlens_k), (max_q, max_k), known)


@dataclass(frozen=True, slots=True)
class NativeLauncher:
    """A C function that takes whatever lengths come; it is called without the interpreter's lock.

    Attributes:
        run: the launcher as a function of Python's, for callers that have tensors.
        function: the address of `int64_t f(const void *context, const NativeCall *call)`; see
            `dispatch/csrc/native.h`. It returns 0, or anything else having done nothing: Python then runs
            the call.
        context: the address of what the function has to know of the kind of call.
        keep: what owns the memory there.
        takes: which of `seqused_k` and `block_table` the function reads, for a kind of calls with these.
    """

    form: ClassVar = "native"
    run: Callable[..., tuple[Tensor, ...] | None]
    function: int
    context: int = 0
    keep: object = None
    takes: tuple[str, ...] = ()

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...] | None:
        """Return the results for the arguments of a launcher."""
        return self.run(*arguments)


@dataclass(frozen=True, slots=True)
class FunctionLauncher:
    """A function of Python's, which leaves rows of packed calls to the call cache.

    Where rows aren't known to belong to sequences with queries and keys, the call cache clears the results'
    other rows. The function is then called as if that were known.

    Attributes:
        run: the function.
        window: (left, right) as in `Call`: rows that see no key are cleared by it.
        finite: pairs of a tensor's place and 1 if its rows belong to keys, else 0. In a copy of such a
            tensor, rows past the last offset are zeros: the function reads them, and a NaN would spread.
        programs: `programs(batch, max_q, max_k, tokens_q, tokens_k)` returns what C++ runs in place of the
            function, as `programs.described` does, for calls of these lengths; None where the function has
            to run. C++ keeps what it returns.
        takes: which of `seqused_k` and `block_table` the function reads, for a kind of calls with these.
        zeroes_rows: as in `OpLauncher`.
        counts: for calls in which all keys count, if the function takes `seqused_k` all the same. It derives
            the number of keys of each sequence, and a copy of the key's offsets, as `counts.counts_in` reads.
    """

    form: ClassVar = "function"
    run: Callable[..., tuple[Tensor, ...] | None]
    window: tuple[int, int] = (-1, -1)
    finite: tuple[tuple[int, int], ...] = ()
    programs: Callable[..., tuple[Any, ...] | None] | None = None
    takes: tuple[str, ...] = ()
    zeroes_rows: bool = False
    counts: Derivation | None = None

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...] | None:
        """Return the results for the arguments of a launcher."""
        tensors, call = split(arguments)
        if call is None:
            return self.run(*tensors)
        if self.counts is not None:
            if (derived := self.counts.derive(*call.offsets)) is None:
                return None
            used, cu_seqlens_k = counts_in(derived[0], len(call.offsets[0]) - 1)
            tensors, call = (*tensors, used), call._replace(offsets=(call.offsets[0], cu_seqlens_k))
        if not call.all_rows_see_keys:
            of_keys = dict(self.finite)
            tensors = tuple(
                blanked(x, call.offsets[of_keys[place]]) if place in of_keys else x
                for place, x in enumerate(tensors)
            )
        results = self.run(*tensors, *call.offsets, *call.longest, True)
        count = tensors[FORWARD] if "seqused_k" in self.takes else None
        return None if results is None else call.cleared(results, self.window, count)


class Prepared(NamedTuple):
    """How a kernel on addresses runs calls of some lengths.

    Tensors are numbered. The call's tensors come first, without offsets; then the results; then what is
    derived from the offsets.

    Attributes:
        launch: `launch(addresses, workspace, stream)` runs the kernel. `addresses` points to an array of
            pointers, `workspace` to the workspace (0 if there is none). `stream` is a CUDA stream of the
            tensors' device, which is the current device. If it can't run any more, it does nothing and
            returns False.
        operands: the numbers of the tensors whose addresses the kernel is given, in order.
        workspace: how many more bytes the kernel needs.
        lse_token_first: whether a packed forward's LSE, (H, T), has the strides (1, H).
        lse_strides: the strides that a backward's LSE has to have, which is copied otherwise; None if any
            will do.
        derivation: what derives all that the kernel reads of packed calls' offsets. Its places belong to the
            numbers in `operands`. None for dense calls.
        lengths: for which other lengths, with the same strides, all of this is the same: of batch, max_q,
            max_k, tokens_q and tokens_k the least and the most. The call cache then doesn't ask again. None
            if it is for just the lengths that were asked for.
    """

    launch: Callable[[int, int, int], bool]
    operands: tuple[int, ...]
    workspace: int = 0
    lse_token_first: bool = False
    lse_strides: tuple[int, ...] | None = None
    derivation: Derivation | None = None
    lengths: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class AddressLauncher:
    """A kernel that is given the addresses of its tensors.

    The call cache allocates results, contiguous but for a forward's LSE, and the workspace, and clears the
    rows of packed results that aren't known to see a key.

    Attributes:
        run: the launcher as a function of Python's, for callers that have tensors.
        prepare: `prepare(batch, max_q, max_k, tokens_q, tokens_k, strides)` returns how a call of these
            lengths is run. The strides are of each tensor of the call. None if Python has to run it.
        window: of a packed call, (left, right) as in `Call`: rows that see no key are cleared by it.
    """

    form: ClassVar = "addresses"
    run: Callable[..., tuple[Tensor, ...] | None]
    prepare: Callable[..., Prepared | None]
    window: tuple[int, int] = (-1, -1)

    def on_addresses(self, *arguments: Any) -> tuple[Tensor, ...] | None:
        """Return the results as the compiled call cache has them, by addresses; None if it can't."""
        if arguments[0].is_cuda:
            with torch.cuda.device(arguments[0].device):
                return self._launched(*arguments)
        return self._launched(*arguments)

    def _launched(self, *arguments: Any) -> tuple[Tensor, ...] | None:
        tensors, call = split(arguments)
        is_forward = len(tensors) == FORWARD
        query, key, value = tensors[:3] if is_forward else tensors[1:4]
        rows_q, rows_k = query.shape[1], key.shape[1]
        lengths = (len(query), rows_q, rows_k, len(query) * rows_q, len(query) * rows_k)
        if call is not None:
            lengths = (len(call.offsets[0]) - 1, *call.longest, len(query), len(key))
        how = self.prepare(*lengths, tuple(x.stride() for x in tensors))
        if how is None:
            return None
        check_prepared(how)
        if how.lse_strides is not None:
            tensors = (*tensors[:LSE], with_strides(tensors[LSE], how.lse_strides), *tensors[LSE + 1 :])
        device = query.device
        if is_forward:
            *rows, heads, _ = query.shape
            shape = (heads, *rows) if call is not None else (rows[0], heads, rows[1])
            strides = (1, heads) if how.lse_token_first else contiguous_strides(shape)
            out = (*query.shape[:-1], value.shape[-1])
            results: tuple[Tensor, ...] = (
                uninitialized(out, contiguous_strides(out), query.dtype, device),
                uninitialized(shape, strides, torch.float32, device),
            )
        else:
            results = tuple(
                uninitialized(tuple(x.shape), contiguous_strides(x.shape), x.dtype, device)
                for x in tensors[1:4]
            )
        read: tuple[Tensor, tuple[int, ...]] | None = None
        if how.derivation is not None and call is not None:
            read = how.derivation.derive(*call.offsets)
            if read is None:
                return None
        addresses = _addresses(how, (*tensors, *results), read)
        workspace = uninitialized((how.workspace,), (1,), torch.uint8, device)
        stream = stream_of(query) if device.type == "cuda" else 0
        if not how.launch(ctypes.addressof(addresses), address_of(workspace), stream):
            return None
        return results if call is None else call.cleared(results, self.window)

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...] | None:
        """Return the results for the arguments of a launcher."""
        return self.run(*arguments)


def _addresses(
    how: Prepared, tensors: tuple[Tensor, ...], read: tuple[Tensor, tuple[int, ...]] | None
) -> ctypes.Array[ctypes.c_void_p]:
    """Return the addresses of a kernel's operands, of any shape: tensors, and places in what was read."""
    count, places = len(tensors), () if read is None else read[1]
    first = 0 if read is None else address_of(read[0])
    addresses = [address_of(tensors[n]) if n < count else first + places[n - count] for n in how.operands]
    return (ctypes.c_void_p * len(addresses))(*addresses)


def check_prepared(how: Prepared) -> None:
    """Check what `prepare` has returned; raises RegistrationError where it isn't as `Prepared` says."""
    strides = () if how.lse_strides is None else how.lse_strides
    lengths = () if how.lengths is None else how.lengths
    for name, value in {"operands": how.operands, "lse_strides": strides, "lengths": lengths}.items():
        if not isinstance(value, tuple):
            raise RegistrationError(f"Prepared.{name}: got {value!r}, expected a tuple")
    for number in (*how.operands, *strides, how.workspace, *(bound for pair in lengths for bound in pair)):
        if not isinstance(number, int) or number < 0:
            raise RegistrationError(f"Prepared: got {number!r}, expected whole numbers from 0")

"""The contract between attnreg and a kernel provider.

A backend is one file that fills in a `Backend`. Its kernels see one convention, whatever the front that the
call came through; where a provider differs, its file adapts the call:

- Dense tensors are (B, S, H, D). Packed tensors are (T, H, D), with int32 `cu_seqlens`.
- LSE is float32 (float64 for float64 inputs), natural log, (B, H, S) dense and (H, T) packed.
- The mask is a window (left, right), -1 unbounded, aligned bottom-right: query i of S_q sees key j
  of S_k if `i + S_k - S_q - left <= j <= i + S_k - S_q + right`. Causal is `(-1, 0)`.
- A row that sees no key has output 0 and LSE -inf, and neither receives nor passes on a gradient. Rows past
  the last offset of a packed batch are 0 in the output and in every gradient.
- Kernels run below autograd. Inputs may have any strides; outputs are new tensors.
- A kernel that can't run a call raises UnsupportedInputError before it writes anything. The call goes to the
  next backend. A kernel that can't be loaded, compiled or built raises BackendUnavailableError. Calls like
  this one go to the next backend from then on.

Because all backends keep the contract, any forward pairs with any backward. With dropout the random state
ties both to the same backend.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Self, SupportsIndex

from attnreg.core.contract.capabilities import Capabilities
from attnreg.core.contract.lengths import Cut
from attnreg.core.contract.options import LEAST_SCALE, OPTIONS, further_value
from attnreg.errors import RegistrationError

# What `Kernels.specialize` returns: see `launching.launchers`.
Launcher = Callable[..., "tuple[Tensor, ...] | None"]

if TYPE_CHECKING:  # limits are looked up without torch
    from torch import Tensor

    from attnreg.core.contract.spec import AttentionSpec, Direction

    Specialize = Callable[[Direction, tuple[Tensor, ...], "Call"], Launcher | None]
    _Forward = Callable[[Tensor, Tensor, Tensor, "Call"], tuple[Tensor, Tensor]]
    _Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "Call"], tuple[Tensor, ...]]
    _ReplacesNative = Callable[[Direction, AttentionSpec], bool]

__all__ = ["UNTRIED", "Backend", "Call", "Kernels", "Launcher"]

# What messages say of an experimental backend: it ...
UNTRIED = "isn't proven on the hardware that it is written for"

# At the end of the version of a backend that has loaded a kernel in C++ of attnreg's.
COMPILED_KERNEL = " (compiled kernel)"


class Call(NamedTuple):
    """The arguments of one call, except query, key and value.

    Attributes:
        scale: factor on the scores before the softmax.
        max_q, max_k: S_q and S_k of a dense call; of a packed one no sequence is longer, in tokens, and all
            may be shorter.
        window: (left, right) in tokens, -1 unbounded, bottom-right; `(-1, 0)` is causal.
        cu_seqlens_q, cu_seqlens_k: int32 offsets (B + 1,), None for a dense call.
        seqused_k: int32 (B,), how many keys of each sequence count; None for all.
        block_table: int32 (B, pages), pages of a paged key-value cache (pages, page size, H, D).
            With one, `cu_seqlens_k` is None and `seqused_k` gives the lengths.
        attn_bias: added to the scaled scores, or boolean (True: visible); broadcasts to
            (B, H, S_q, S_k); dense calls only.
        alibi_slopes: float32 (H,) or (B, H); adds `-slope * |i + S_k - S_q - j|`.
        dropout: probability of dropping an attention weight.
        rng_state: uint64 (2,), seed and offset of the dropout mask: the forward's to read or to
            overwrite, the backward's to read; None without dropout.
        num_splits: how many pieces the keys may be split into at most; None lets the kernel choose. Only a
            forward has it. A kernel that never splits may decline numbers above 1.
        deterministic: whether the gradients have to be bitwise repeatable. Torch's deterministic mode is on
            then, in the form that raises errors. A kernel may rely on the mode and ignore this field.
        batch_invariant: whether the bits of a sequence's results may depend on nothing but the sequence. They
            then depend neither on further sequences, nor on the longest lengths, nor on the place in the
            batch. The kernel splits no keys.
        softcap: bound on the scores, `softcap * tanh(scaled score / softcap)`; 0 for none. It applies before
            anything is added to the scores or hidden.
        grad_lse: the gradient of the LSE, in its shape and dtype, None for none. Only a backward that
            declares it gets it. Multiplied by the weight of a score, it is added to the score's gradient.
        sinks: (H,) float16, bfloat16 or float32, contiguous: for each head the score of an additional key
            without a value, which every row sees; packed calls only. A kernel gets sinks only if the
            direction declares `sinks` and every row is known to see a real key. The forward counts sinks in
            output and LSE. The backward gets this LSE, and returns the gradient of the sinks as its fourth
            result.
        key_ranges: int32 (T_q, R, 2), for each query up to R ranges of keys; packed calls only. A range is
            the first key and the end (exclusive), counted from the first key of the sequence. A query sees
            the keys of its window that lie in any of its ranges.
        score_mod: `score_mod(score, batch, head, query, key)` returns what takes the place of a score that
            was scaled and bounded by the softcap, before slopes and masks; packed calls only. All five are
            tensors (): the score is float32 (float64 for float64 inputs), the others are int32. They are the
            number of the sequence, the query head, and the places of query and key in their sequence, from 0.
            It is called for hidden scores, too, always with places that exist. The backward gets the same
            function, and multiplies gradients of scores by its derivative.
        mask_mod: `mask_mod(batch, head, query, key)` returns a boolean (): whether a score counts that is in
            the window and in the `key_ranges`.
        bias_gradient: whether the backward returns the gradient of `attn_bias`, in its shape and dtype, as
            its fourth result. A forward has it only with dropout, as one backend then runs both directions.
        further: options without a field of their own, sorted by name. Each is read as an attribute. Without
            the option the attribute is `Option.off`.
    """

    scale: float
    max_q: int
    max_k: int
    window: tuple[int, int] = (-1, -1)
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    block_table: Tensor | None = None
    attn_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    dropout: float = 0.0
    rng_state: Tensor | None = None
    num_splits: int | None = None
    deterministic: bool = False
    batch_invariant: bool = False
    softcap: float = 0.0
    grad_lse: Tensor | None = None
    sinks: Tensor | None = None
    key_ranges: Tensor | None = None
    score_mod: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] | None = None
    bias_gradient: bool = False
    further: tuple[tuple[str, Any], ...] = ()

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key."""
        return self.window[1] == 0

    @property
    def varlen(self) -> bool:
        """Whether the tensors are packed."""
        return self.cu_seqlens_q is not None

    @property
    def repeatable(self) -> bool:
        """Whether the same call has to give the same bits again: what depends on a race is no invariant."""
        return self.deterministic or self.batch_invariant

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """Return the call with options set, by their names, wherever a call has them.

        Raises:
            TypeError: there is no such field or option.
        """
        if unknown := options.keys() - KEYED_BY.keys():
            raise TypeError(f"Call has no option {', '.join(sorted(unknown))}")
        own = {name: value for name, value in options.items() if name in self._fields}
        if len(own) == len(options):
            return self._replace(**own)
        others = dict(self.further) | {name: options[name] for name in options.keys() - own.keys()}
        on = {row.name for row in OPTIONS if row.is_on(others.get(row.name))}
        return self._replace(**own, further=tuple(pair for pair in sorted(others.items()) if pair[0] in on))

    def of(self, direction: Direction) -> Self:
        """Return the call of one direction, without options that only the opposite direction has."""
        others = (row for row in OPTIONS if not row.reaches(direction, self.dropout))
        return self.with_options({row.name: row.off for row in others})

    def kind(self) -> tuple[object, ...]:
        """Return what a decision about this call may depend on, but for lengths; see `KEYED_BY`."""
        tensors = [None if x is None else (x.dim(), x.dtype, x.device) for x in _tensors_of(self)]
        further = tuple((name, _alike(value)) for name, value in self.further) if self.further else ()
        present = [x is not None for x in _present_of(self)]
        return self.scale >= LEAST_SCALE, *present, *_values_of(self), further, *tensors


def _alike(value: Any) -> object:
    """Return what a decision may depend on of an option: of a tensor rank, dtype and device."""
    if hasattr(value, "dtype"):
        return value.dim(), value.dtype, value.device
    return callable(value) or value


def _option(call: Call, name: str) -> Any:
    """Return the value of an option that has no field."""
    try:
        return further_value(name, call.further)
    except AttributeError:
        raise AttributeError(f"Call has no attribute {name!r}") from None


# Not in the class, where a type checker would take any name for an attribute.
Call.__getattr__ = _option  # type: ignore[attr-defined]

# How each field of `Call` enters `Call.kind`, under which a plan is kept. "value": by its value. "sign": by
# its sign. "tensor": by rank, dtype and device. "presence": by whether there is a tensor or function, as only
# times depend on sinks, and nothing on which function it is. "length": by its class. "nothing": not at all,
# as a random state is drawn after the decision. A field that is missing here is an error at import: calls
# that differ in it would share a plan.
KEYED_BY = {
    "scale": "sign",
    "rng_state": "nothing",
    "further": "value",
    **dict.fromkeys(("max_q", "max_k"), "length"),
    **dict.fromkeys(("window", "deterministic", "batch_invariant"), "value"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "tensor"),
    **{row.name: row.keyed for row in OPTIONS},
}
_of_values = [n for n, name in enumerate(Call._fields) if KEYED_BY[name] == "value" and name != "further"]
_values_of = itemgetter(*_of_values)
_present_of = itemgetter(*(n for n, name in enumerate(Call._fields) if KEYED_BY[name] == "presence"))
_tensors_of = itemgetter(*(n for n, name in enumerate(Call._fields) if KEYED_BY[name] == "tensor"))


class _Kernels(NamedTuple):
    forward: _Forward
    backward: _Backward | None = None
    specialize: Specialize | None = None
    replaces_native: _ReplacesNative | None = None


# Modules that pickle functions by their code. They call `__reduce_ex__`, too.
_BY_CODE = ("cloudpickle", "dill")


class _Functions:
    """What consists of functions: a copy is itself, and pickles have the functions' names."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        names = getattr(self, "_fields", None) or [field.name for field in fields(self)]  # type: ignore[arg-type]
        if not any(module.rpartition(".")[2] in _BY_CODE for module in list(sys.modules)):
            for name in names:
                _check_pickles(f"{type(self).__name__}.{name}", getattr(self, name))
        return super().__reduce_ex__(protocol)


def _check_pickles(what: str, value: object) -> None:
    if not callable(value):
        return
    try:
        pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"{what} can't be pickled: got {value!r}, expected a function at the top level of a module; or "
            "register the backend in the other process"
        ) from error


class Kernels(_Functions, _Kernels):
    """The functions of a loaded backend.

    Attributes:
        forward: `forward(q, k, v, call)` returns `(out, lse)`.
        backward: `backward(grad_out, q, k, v, out, lse, call)` returns `(grad_q, grad_k, grad_v)`, followed
            by the gradient of sinks if the call has some, or of the bias if it is wanted. None if the backend
            has none; another backend's then serves.
        specialize: `specialize(direction, tensors, call)` is called after `forward` or `backward` has run
            `call` with `tensors`. It returns a launcher for all further calls of the same kind and class of
            lengths. It returns None if it has none yet, or none at all. See `launching.launchers`.
        replaces_native: `replaces_native(direction, spec)` is for dense calls that torch's own selector has
            sent to torch's kernel of this backend's name. It returns whether the backend's function is
            faster. Without it torch's kernel runs.

    Raises:
        RegistrationError: a field is no function; the message names it.
    """

    __slots__ = ()

    def __new__(  # which a NamedTuple itself can't have
        cls,
        forward: _Forward,
        backward: _Backward | None = None,
        specialize: Specialize | None = None,
        replaces_native: _ReplacesNative | None = None,
    ) -> Self:
        """Refuse what is no function."""
        kernels = super().__new__(cls, forward, backward, specialize, replaces_native)
        for name, function in kernels._asdict().items():
            if not callable(function) and (name == "forward" or function is not None):
                expected = "a function" if name == "forward" else "a function or None"
                raise RegistrationError(f"Kernels.{name}: got {function!r}, expected {expected}")
        return kernels


def _nothing_missing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend(_Functions):
    """A named provider of attention kernels.

    Attributes:
        name: how users ask for it, printable, without commas and outer spaces; compared without regard to
            case.
        forward, backward: what each direction can run; `backward=None` if it has none.
        load: imports the provider and returns its kernels; called once, when first needed.
        unavailable: returns why the provider can't load here, or None; cheap, imports nothing; called once.
        version: returns the provider's version, or None if it has none. Further information follows the
            version, as in `"9.19.0 (frontend 1.32.0)"`. Known issues compare the first word.
        refuses: returns further reasons against a spec, in the manner of `Capabilities`.
        install: the command that installs what is missing; appended where the backend can't load, unless the
            reason is torch's own ("torch finds no CUDA GPU here").
        priority: rank in the default order, the highest first. Or a function that returns the rank for a
            spec, where further backends are known to be faster at some calls. attnreg's own: `cpu` 100; `FA2`
            40 where it decodes fastest, else 10; `FA4` 30, 15 where it decodes; `cuDNN` 20, -10 with a
            bias; `FA3` 5; `efficient` 0; `flex` -50 for long sequences, else -200; `math` -100. Backends that
            entry points bring are all behind these, and their priorities rank them among each other.
        cuts: `cuts(spec)` returns where the reasons of `refuses`, the rank of `priority`, and
            `Kernels.replaces_native` change with lengths, for calls of the spec's kind. It reads no length
            itself. Without `cuts`, calls whose length a function reads are decided one by one. That is right,
            but costs a decision for each new length.
        builds: whether it builds something for each new shape of such calls that takes tens of milliseconds.
            Where times decide, that counts for programs that bring ever new shapes.
        experimental: whether it isn't proven on the hardware that it is written for.
        stands_in: whether it runs, unless asked for, only what no other kernel can, as the reference does. It
            takes no turns of `policy = "adaptive"`, is measured only if named, and no mask is recognised for
            its sake.
        compiles: whether it compiles each kind of call for seconds and keeps the kernels on disk. `attnreg
            tune` has several processes do so before it measures.

    Raises:
        RegistrationError: a field has the wrong type; the message names it.
    """

    name: str
    forward: Capabilities
    load: Callable[[], Kernels]
    backward: Capabilities | None = None
    unavailable: Callable[[], str | None] = _nothing_missing
    version: Callable[[], str | None] = _nothing_missing
    refuses: Callable[[AttentionSpec], Iterable[str]] | None = None
    install: str = ""
    priority: int | Callable[[AttentionSpec], int] = 0
    cuts: Callable[[AttentionSpec], Iterable[Cut]] | None = None
    builds: Callable[[AttentionSpec], bool] | None = None
    experimental: bool = False
    stands_in: bool = False
    compiles: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if problem := _badly_typed(field.name, value):
                raise RegistrationError(f"Backend.{field.name}: got {value!r}, expected {problem}")

    def priority_for(self, spec: AttentionSpec) -> int:
        """Return its rank in the default order for a call; raises what its function raises."""
        rank = self.priority if isinstance(self.priority, int) else self.priority(spec)
        if not isinstance(rank, int):
            raise TypeError(f"priority() returned {rank!r}, expected a whole number")
        return rank

    @property
    def devices(self) -> tuple[str, ...]:
        """The device types that it serves in either direction."""
        both = self.forward.devices + (self.backward.devices if self.backward else ())
        return tuple(dict.fromkeys(both))


def _badly_typed(name: str, value: object) -> str:
    """Return what the field should have been, or an empty string."""
    if name == "name":
        named = isinstance(value, str) and value and value == value.strip() and "," not in value
        if named and not str(value).isprintable():  # it is part of lines in logs
            return "a name without line ends and control characters"
        return "" if named else "a name without commas and outer spaces"
    if value is None and name in ("backward", "refuses", "cuts", "builds"):
        return ""
    if name in ("load", "unavailable", "version", "refuses", "cuts", "builds"):
        return "" if callable(value) else "a function"
    if name == "priority" and callable(value):
        return ""
    kind, expected = {
        "forward": (Capabilities, "Capabilities"),
        "backward": (Capabilities, "Capabilities or None"),
        "install": (str, "a string"),
        "priority": (int, "a whole number or a function"),
        "experimental": (bool, "True or False"),
        "compiles": (bool, "True or False"),
        "stands_in": (bool, "True or False"),
    }[name]
    return "" if isinstance(value, kind) else expected

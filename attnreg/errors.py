"""The errors attnreg raises.

    AttnregError
    ├── UnknownBackendError      (LookupError)   no backend has that name
    ├── BackendUnavailableError  (RuntimeError)  known, but it, or a kernel of it, can't be loaded here
    ├── UnsupportedInputError    (RuntimeError)  no backend, or not the requested one, can run the call
    ├── InvalidInputError        (ValueError)    the arguments of a call contradict each other
    ├── ConfigError              (ValueError)    a settings file or environment variable is wrong
    ├── RegistrationError        (RuntimeError)  a backend or a router can't be registered
    ├── BuildError               (RuntimeError)  the C++ libraries can't be compiled here
    └── RanksDifferError         (RuntimeError)  ranks of one job choose kernels from different inputs

Each also derives from the built-in exception that a caller would expect, so code written for
PyTorch's own errors keeps working. All of them can be pickled.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

T = TypeVar("T")

# So many entries of a list are shown in a message, and so many names of known backends.
MOST_LISTED, MOST_KNOWN = 10, 50

__all__ = [
    "AttnregError", "BackendUnavailableError", "BuildError", "ConfigError", "InvalidInputError",
    "RanksDifferError", "RegistrationError", "UnknownBackendError", "UnsupportedInputError", "did_you_mean",
    "file_errors", "first_ten", "is_of_device", "nearest", "short_repr",
]  # fmt: skip


class AttnregError(Exception):
    """Base of every error that attnreg raises on purpose."""


class UnknownBackendError(AttnregError, LookupError):
    """No backend has the name that was asked for."""


class BackendUnavailableError(AttnregError, RuntimeError):
    """The backend is known, but it can't load on this machine.

    A kernel raises it where it can't be loaded, compiled or built for a call.
    """


class UnsupportedInputError(AttnregError, RuntimeError):
    """No backend, or not the requested one, can run the call.

    Attributes:
        rejected: the reasons of each backend by its name, as in `Decision.rejected`.
    """

    def __init__(self, message: str, rejected: dict[str, tuple[str, ...]] | None = None) -> None:
        super().__init__(message)
        self.rejected = dict(rejected or {})


class InvalidInputError(AttnregError, ValueError):
    """The arguments of a call contradict each other or the contract."""


class ConfigError(AttnregError, ValueError):
    """A settings file, an environment variable or a `Settings` value is wrong."""


class RegistrationError(AttnregError, RuntimeError):
    """A backend or a router can't be registered; nothing was changed."""


class BuildError(AttnregError, RuntimeError):
    """A C++ library can't be compiled here, or the compiled file can't be loaded."""


class RanksDifferError(AttnregError, RuntimeError):
    """Ranks of one job would choose different kernels for the same call."""


def is_of_device(error: BaseException | None) -> bool:
    """Whether memory ran out or CUDA failed, by an error or its causes; packages have classes of their own.

    What is wrong then isn't the kernel: memory may be there later, and a CUDA error often ends the context.
    Where CUDA only can't load the kernel's code, nothing was launched, and it is the kernel.
    """
    chain: dict[int, BaseException] = {}
    while error is not None and id(error) not in chain:  # errors may be each other's causes
        chain[id(error)] = error
        error = error.__cause__
    said = "\n".join(map(str, chain.values()))
    classes = {base.__name__ for cause in chain.values() for base in type(cause).__mro__}
    of_device = bool(classes & _OF_DEVICE or re.search(_SAYS_DEVICE, said))
    return of_device and not re.search(_SAYS_UNLOADABLE, said)


_OF_DEVICE = {"MemoryError", "OutOfMemoryError", "AcceleratorError"}
_SAYS_DEVICE = r"(?i)out[ _]of[ _]memory|allocate memory|alloc\w*_failed|cuda[ _]?error"
# For another architecture, or from a compiler that is newer than the driver.
_SAYS_UNLOADABLE = (
    r"(?i)no_?binary_?for_?gpu|no[ _]?kernel[ _]?image|(invalid|unsupported)_?(kernel_?image|image|ptx)"
    r"|kernel image is invalid|ptx jit compilation failed|ptx was compiled with an unsupported toolchain"
)


@contextmanager
def file_errors(file: object, done: str = "written") -> Iterator[None]:
    """Raise a `ConfigError` where the block can't write (or read) a file; it has the file and the cause."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(f"{file}: can't be {done}: {cause}") from error


def first_ten(values: Sequence[T], text: Callable[[T], str] = str, most: int = MOST_LISTED) -> list[str]:
    """Return the texts of the first values of a list, and behind them how many more there are.

    Only the texts that are returned are made.
    """
    texts = list(map(text, values[:most]))
    more = len(values) - len(texts)
    return [*texts, f"and {more} more ({len(values)} in all)"] if more else texts


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 300, 300, 300
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = MOST_LISTED


def short_repr(value: object) -> str:
    """Return the `repr` of a value, shortened, for messages: it may be of any length and depth."""
    return _SHORT.repr(value)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest of `known`, or an empty string."""
    near = nearest(word, known)
    return f"; did you mean '{near}'?" if near else ""


def nearest(word: str, known: Iterable[str], likeness: float = 0.5) -> str:
    """Return the nearest of `known`, whatever its case; an empty string if none is near.

    `likeness` is what makes a name near, from 0 to 1.
    """
    by_key = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(word[:100].casefold(), by_key, n=1, cutoff=likeness)
    return by_key[near[0]] if near else ""


# As `torch.compiler.assume_constant_result` marks a function. Dynamo can't trace difflib, and would say so in
# place of the message.
nearest._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Tracebacks and messages show the public name of each class, not this module.
for _error in (AttnregError, *AttnregError.__subclasses__()):
    _error.__module__ = "attnreg"

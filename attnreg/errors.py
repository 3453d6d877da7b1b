"""The errors attnreg raises.

    AttnregError
    ├── UnknownBackendError      (LookupError)   no backend has that name
    ├── BackendUnavailableError  (RuntimeError)  known, but it can't load on this machine
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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "AttnregError", "BackendUnavailableError", "BuildError", "ConfigError", "InvalidInputError",
    "RanksDifferError", "RegistrationError", "UnknownBackendError", "UnsupportedInputError", "did_you_mean",
]  # fmt: skip


class AttnregError(Exception):
    """Base of every error that attnreg raises on purpose."""


class UnknownBackendError(AttnregError, LookupError):
    """No backend has the name that was asked for."""


class BackendUnavailableError(AttnregError, RuntimeError):
    """The backend is known, but it can't load on this machine."""


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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest of `known`, or an empty string."""
    by_key = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(word.casefold(), by_key, n=1, cutoff=0.5)
    return f"; did you mean '{by_key[near[0]]}'?" if near else ""


# Tracebacks and messages show the public name of each class, not this module.
for _error in (AttnregError, *AttnregError.__subclasses__()):
    _error.__module__ = "attnreg"

"""A function of attnreg's in the place of another library's function."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from types import MethodType
from typing import Any, Self

from attnreg.core.torchlib.frames import leave_module_uncompiled


class Replacement:
    """What attnreg puts in the place of a function: to programs it is that function, except for calls.

    It equals, prints, copies and pickles as the function. A program may keep it in a module, and save that,
    also after attnreg has put the function back. Like a function of torch's C++ it isn't bound as a method.

    Attributes:
        __wrapped__: the function.
    """

    __wrapped__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any], place: str, run: Callable[..., Any]) -> None:
        """Make a replacement.

        Args:
            function: the function to replace.
            place: where programs find it, as "module:name". What is unpickled is looked up there.
            run: called instead of it, with the same arguments.
        """
        self._place, self._run = place, run
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "__wrapped__"), name)

    def __eq__(self, other: object) -> bool:
        return self is other or self.__wrapped__ == other

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        # By Python's own function: the process that reads it may not have attnreg.
        return pkgutil.resolve_name, (self._place,)


class MethodReplacement(Replacement):
    """A replacement of a class's function, which is bound as its method."""

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)


leave_module_uncompiled(__name__)

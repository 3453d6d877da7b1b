"""Keeps Dynamo, which traces Python for torch.compile, away from attnreg's own Python.

Dynamo compiles each Python function that runs between two graphs of a compiled program, for example after a
graph break. attnreg's functions run there too: programs, torch's dispatcher and autograd call them. Dynamo
would compile them again for new lengths. So their code is marked. Dynamo runs marked code as it is, with all
that it calls, and a mark costs a call nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NoReturn, TypeVar

import torch

T = TypeVar("T")

FRAMES: Any = torch._C._dynamo.eval_frame  # here, and not in `torch._dynamo`, whose import takes long


# How Dynamo runs a frame: as it is, and what the frame calls as it is, too, or as ever.
_ACTIONS = FRAMES._FrameAction
_SKIP = FRAMES._FrameExecStrategy(_ACTIONS.SKIP, _ACTIONS.SKIP)
_SKIP_WRAPPER = FRAMES._FrameExecStrategy(_ACTIONS.SKIP, _ACTIONS.DEFAULT)
_PACKAGE = str(Path(__file__).parents[2]) + os.sep


def leave_uncompiled(function: T, with_inner: bool = True) -> T:
    """Mark a function's code so that Dynamo runs it as it is, with all that it calls; returns the function.

    Dynamo can still trace calls of the function into a graph: only frames are marked. `torch.compile` of the
    function itself compiles a copy without a mark.

    Args:
        function: a Python function, a method or a partial of a function; anything else is left alone.
        with_inner: whether to mark the functions that are defined inside it, too.
    """
    python: Any = getattr(function, "func", function)  # of a partial
    python = getattr(python, "__func__", python)  # of a method
    _mark_function(python, _SKIP, with_inner)
    return function


def leave_wrapper_uncompiled(function: T) -> T:
    """Mark the code of a wrapper around a program's function, which Dynamo compiles as ever; returns it."""
    _mark_function(function, _SKIP_WRAPPER, with_inner=False)
    return function


def raise_between_graphs(error: Exception) -> NoReturn:
    """Raise an error that exists already; in traced code the graph ends here, and its call raises the error.

    Dynamo can trace `raise error` only if it has traced how the error was made. For others torch 2.11 raises
    an AssertionError of its own.
    """
    raise error


# As `torch.compiler.disable` marks a function, which imports all of Dynamo.
raise_between_graphs._torchdynamo_disable = True  # type: ignore[attr-defined]
raise_between_graphs._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "it raises an error: run the program without torch.compile to see which"
)


def _mark_function(python: Any, strategy: Any, with_inner: bool) -> None:
    if isinstance(python, FunctionType) and "_torchdynamo_orig_callable" not in python.__dict__:
        _mark(python.__code__, strategy, with_inner)
        # `torch.compile` looks here for what is behind a function that it has compiled before.
        python.__dict__["_torchdynamo_orig_callable"] = _copy_of(python)
        python.__dict__["_torchdynamo_wrapper_id"] = id(python)


def leave_module_uncompiled(name: str) -> None:
    """Mark all functions and methods of a module; the module calls this at its end.

    Functions inside module-level functions are marked, too, but those inside methods aren't: `use_backend`
    wraps functions of programs, which Dynamo has to see.
    """
    for value in tuple(vars(sys.modules[name]).values()):
        is_class = isinstance(value, type) and value.__module__ == name
        for member in tuple(vars(value).values()) if is_class else (value,):
            for function in _functions_behind(member):
                if function.__code__.co_filename.startswith(_PACKAGE):
                    leave_uncompiled(function, with_inner=not is_class)


def _mark(code: CodeType, strategy: Any, with_inner: bool) -> None:
    FRAMES.set_code_exec_strategy(code, strategy)
    for constant in code.co_consts if with_inner else ():
        if isinstance(constant, CodeType):
            _mark(constant, strategy, with_inner)


def _copy_of(function: FunctionType) -> FunctionType:
    code, names = function.__code__.replace(), function.__globals__
    copy = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    for name in ("__doc__", "__module__", "__qualname__", "__annotations__"):
        setattr(copy, name, getattr(function, name))
    return copy


def _functions_behind(member: Any) -> Iterator[FunctionType]:
    """Yield the Python functions behind a function, method, property, custom op or wrapper."""
    if isinstance(member, property):
        yield from _functions_behind(member.fget)
    while member is not None and not isinstance(member, type):
        member = getattr(member, "__func__", member)  # of a class method or static method
        if isinstance(member, FunctionType):
            yield member
        member = getattr(member, "__wrapped__", None)

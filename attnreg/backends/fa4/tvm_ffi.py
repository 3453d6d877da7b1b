"""TVM-FFI's C interface, by which the package's compiled functions are called.

The call cache uses it to call them from C++: converting a tensor for Python's way takes longer than a launch.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from importlib import import_module
from typing import Any

from attnreg.core.launching.programs import Interface

log = logging.getLogger("attnreg")


@functools.cache
def interface_of_package() -> Interface | None:
    """Return the interface; None if TVM-FFI isn't there, or isn't as expected."""
    try:
        tvm_ffi = import_module("tvm_ffi")
        library = ctypes.CDLL(import_module("tvm_ffi.libinfo").find_libtvm_ffi())
        names = "FunctionCall", "EnvSetStream", "ErrorMoveFromRaised", "ObjectDecRef"
        functions = [ctypes.cast(getattr(library, f"TVMFFI{name}"), ctypes.c_void_p) for name in names]
        if tvm_ffi.convert((None,)).__chandle__() == 0:
            raise TypeError("a converted object has no handle")
    except Exception as problem:  # noqa: BLE001 - the functions are called by Python as well
        log.debug("FA4's launches run in Python: %s: %s", type(problem).__name__, problem)
        return None
    call, set_stream, take_error, drop = (function.value or 0 for function in functions)
    return Interface((call, set_stream, take_error, drop), _handle, functools.partial(_convert, tvm_ffi))


def _handle(function: Any) -> int | None:
    """Return the handle of a function of TVM-FFI's; None for any other function.

    A function that takes addresses of Python's converts its arguments before the call, so it has none.
    """
    arguments = getattr(function, "execution_args", None)
    if arguments is None or arguments.has_pointer_address_arg_specs:
        return None
    # A function with defaults wraps a function of TVM-FFI's; the launches pass all arguments.
    unwrap = getattr(function, "__tvm_ffi_object__", None)
    function = function if unwrap is None else unwrap()
    handle = getattr(function, "__chandle__", None)
    return handle() or None if handle else None


def _convert(tvm_ffi: Any, value: Any) -> Any:
    """Return a tuple as an object of TVM-FFI's; None for any other value."""
    return tvm_ffi.convert(value) if isinstance(value, tuple) else None

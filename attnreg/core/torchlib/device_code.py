"""Small CUDA kernels of attnreg's own, compiled on the machine where they run, without a C++ compiler.

NVRTC compiles CUDA C to machine code for one GPU, and the driver loads and launches it. Every machine with a
CUDA build of torch has both libraries. Where they can't be used, the owner of a kernel runs torch's ops.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnreg.core.torchlib.locks import open_after_fork

log = logging.getLogger("attnreg")

# The driver's error where a thread has no current context, because torch has run nothing on a GPU there yet.
INVALID_CONTEXT = 201
# The capture mode of a thread that loads code: a graph that another thread is capturing stays valid.
_RELAXED = 2

_lock = open_after_fork(threading.RLock())
# Loaded modules by (source, index of the GPU); all kernels of a source are compiled together.
_modules: dict[tuple[str | Path, int], ctypes.c_void_p] = {}


class DeviceCodeError(RuntimeError):
    """NVRTC or the driver is missing, or has returned an error."""


class DeviceKernel:
    """A kernel in CUDA C, compiled for each GPU when it is first needed there.

    `source` is the code, or the path of a file with it. It includes no header, and defines `extern "C"
    __global__ void name(...)`. Each parameter has eight bytes: an address, a `long long` or a `double`.
    """

    def __init__(self, name: str, source: str | Path) -> None:
        self.name, self.source = name, source
        # By the GPU's index; None where the kernel can't run.
        self._functions: dict[int, ctypes.c_void_p | None] = {}
        # Memory for arguments that no launch uses now: a thread removes a frame while it launches.
        self._frames: list[_Frame] = []

    def available(self, device: torch.device | int) -> bool:
        """Return whether the kernel can run on a device, which may be the index of a GPU.

        The first call compiles the kernel; while a graph is captured it returns False instead. A debug line
        says why a kernel can't run.
        """
        return self._function(_find_index(device)) is not None

    def address(self, device: torch.device | int) -> int | None:
        """Return the function's handle for cuLaunchKernel; None where the kernel isn't available."""
        function = self._function(_find_index(device))
        return None if function is None else function.value

    def __call__(
        self, grid: int, block: int, *arguments: Tensor | int | float, stream: int | None = None
    ) -> None:
        """Launch `grid` blocks of `block` threads on a stream; by default on the current stream.

        The first argument is a tensor of any shape and dtype on the GPU that runs the kernel. A tensor is
        passed as its address, an int as a `long long`, a float as a `double`.

        Raises:
            DeviceCodeError: the kernel isn't available on that GPU, or the driver refuses the launch.
        """
        index = arguments[0].get_device()  # type: ignore[union-attr]
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self(grid, block, *arguments, stream=stream)
        function = self._function(index)
        if function is None:
            raise DeviceCodeError(f"kernel {self.name} isn't available on cuda:{index}")
        if stream is None:
            stream = torch._C._cuda_getCurrentRawStream(index)
        words = [x if type(x) is int else _to_word(x) for x in arguments]
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = _Frame(len(words))
        frame.pack(*words)
        launch, on = _launch(), ctypes.c_void_p(stream)
        error = launch(function, grid, 1, 1, block, 1, 1, 0, on, frame.pointers, None)
        if error == INVALID_CONTEXT:
            _raise_for(_driver().cuCtxSetCurrent(_context(index)))
            error = launch(function, grid, 1, 1, block, 1, 1, 0, on, frame.pointers, None)
        self._frames.append(frame)
        if error:
            raise DeviceCodeError(f"kernel {self.name} on cuda:{index}: {_describe_error(error)}")

    def _function(self, index: int) -> ctypes.c_void_p | None:
        try:
            return self._functions[index]
        except KeyError:
            return self._load(index)

    def _load(self, index: int) -> ctypes.c_void_p | None:
        """Load the kernel on a GPU and cache it, None if that fails; during a capture do nothing."""
        if index < 0 or torch.version.cuda is None or torch.cuda.is_current_stream_capturing():
            return None
        with _lock:
            if index not in self._functions:
                try:
                    self._functions[index] = _load_function(self.name, self.source, index)
                # A library or a symbol may be missing.
                except (DeviceCodeError, OSError, AttributeError) as error:
                    log.debug("torch's ops replace kernel %s on cuda:%d: %s", self.name, index, error)
                    self._functions[index] = None
            return self._functions[index]


class _Frame:
    """Memory for the arguments of a launch."""

    def __init__(self, count: int) -> None:
        words = (ctypes.c_int64 * count)()
        first = ctypes.addressof(words)
        self.pack = functools.partial(struct.Struct(f"{count}q").pack_into, words, 0)
        self.pointers = (ctypes.c_void_p * count)(*(first + 8 * n for n in range(count)))


def launch_function() -> int:
    """Return the address of the driver's cuLaunchKernel.

    Raises:
        OSError: the machine has no driver.
    """
    return ctypes.cast(_launch(), ctypes.c_void_p).value or 0


def compile_source(source: str | Path, architecture: str) -> bytes:
    """Compile CUDA C to machine code for an architecture such as `sm_90`; needs no GPU.

    Raises:
        DeviceCodeError: NVRTC reports an error, which is the message.
        OSError: NVRTC or the source file is missing.
    """
    text = source if isinstance(source, str) else source.read_text(encoding="utf-8")
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()

    def check(error: int) -> None:
        if error:
            raise DeviceCodeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(error).decode()}")

    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"attnreg.cu", 0, None, None))
    try:
        option = ctypes.c_char_p(f"--gpu-architecture={architecture}".encode())
        if nvrtc.nvrtcCompileProgram(program, 1, ctypes.byref(option)):
            check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            lines = ctypes.create_string_buffer(size.value)
            check(nvrtc.nvrtcGetProgramLog(program, lines))
            raise DeviceCodeError(f"NVRTC: {lines.value.decode(errors='replace').strip()}")
        check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        check(nvrtc.nvrtcGetCUBIN(program, code))
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _find_index(device: torch.device | int) -> int:
    if isinstance(device, int):
        return device
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def _to_word(argument: Tensor | int | float) -> int:
    """Return the eight bytes of an argument as an integer."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(argument, float):
        return struct.unpack("q", struct.pack("d", argument))[0]  # type: ignore[no-any-return]
    return int(argument)


def _load_function(name: str, source: str | Path, index: int) -> ctypes.c_void_p:
    """Load a kernel on a GPU; the caller holds `_lock`."""
    driver, function, before = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    mode = ctypes.c_int(_RELAXED)
    _raise_for(driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    try:
        _raise_for(driver.cuCtxPushCurrent_v2(_context(index)))
        try:
            module = _modules.get((source, index)) or _load_module(source, index)
            _raise_for(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(before))
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return function


def _load_module(source: str | Path, index: int) -> ctypes.c_void_p:
    major, minor = torch.cuda.get_device_capability(index)
    module, code = ctypes.c_void_p(), compile_source(source, f"sm_{major}{minor}")
    _raise_for(_driver().cuModuleLoadData(ctypes.byref(module), code))
    _modules[source, index] = module
    return module


@functools.cache
def _context(index: int) -> ctypes.c_void_p:
    """Return a GPU's primary context, which torch uses as well, and keep it alive."""
    driver, device, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    _raise_for(driver.cuDeviceGet(ctypes.byref(device), index))
    _raise_for(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    return context


@functools.cache
def _launch() -> Any:
    return _driver().cuLaunchKernel


@functools.cache
def _driver() -> ctypes.CDLL:
    return _open_library("cuLaunchKernel", "libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "").partition(".")[0]
    nvrtc = _open_library("nvrtcCompileProgram", f"libnvrtc.so.{major}")
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    return nvrtc


def _open_library(symbol: str, name: str) -> ctypes.CDLL:
    """Open torch's library that links NVRTC and the driver, and so provides their symbols.

    If it is missing or lacks the symbol, open the library called `name`.
    """
    with suppress(OSError):
        both = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libcaffe2_nvrtc.so"))
        if hasattr(both, symbol):
            return both
    return ctypes.CDLL(name)


def _raise_for(error: int) -> None:
    if error:
        raise DeviceCodeError(_describe_error(error))


def _describe_error(number: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(number, ctypes.byref(text))
    return f"CUDA error {number}: {(text.value or b'unknown').decode()}"

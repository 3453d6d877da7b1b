"""Small CUDA kernels of attnreg's own, compiled where they run, without a compiler on the machine.

NVRTC compiles CUDA C to machine code for one GPU, and the driver loads and launches it. Both libraries are
there wherever a CUDA build of torch is. Where they can't be used, whoever has a kernel runs torch's ops.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnreg.torchlib.locks import open_after_fork

log = logging.getLogger("attnreg")

# What the driver returns where no context is current in a thread: torch has run nothing on a GPU there yet.
_INVALID_CONTEXT = 201
# A capture in another thread fails if this one meanwhile does what a capture may not, unless it is RELAXED.
_RELAXED = 2

_lock = open_after_fork(threading.Lock())


class DeviceCodeError(RuntimeError):
    """NVRTC or the driver has refused something, or isn't there."""


class DeviceKernel:
    """One kernel in CUDA C, compiled for each GPU when it is first needed there.

    `source` has one function `extern "C" __global__ void name(...)` and includes no header. Each of its
    parameters has eight bytes: an address, a `long long` or a `double`.
    """

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source
        # By the GPU's index; None where the kernel can't run there.
        self._functions: dict[int, ctypes.c_void_p | None] = {}
        # Memory for the arguments of a launch, one for each thread that is launching right now.
        self._frames: list[_Frame] = []

    def available(self, device: torch.device | int) -> bool:
        """Return whether the kernel runs on a device, given itself or as the index of a GPU.

        The first time compiles the kernel, outside of a graph's capture only. A debug line says why it
        doesn't run.
        """
        return self._function(_index(device)) is not None

    def address(self, device: torch.device | int) -> int | None:
        """Return the driver's handle of the function, as cuLaunchKernel takes it; None if it can't run."""
        function = self._function(_index(device))
        return None if function is None else function.value

    def __call__(
        self, grid: int, block: int, *arguments: Tensor | int | float, stream: int | None = None
    ) -> None:
        """Launch `grid` blocks of `block` threads on the stream, which is the current one unless given.

        The first argument is a tensor on the GPU where the kernel runs. A tensor stands for its address, an
        int for a `long long`, a float for a `double`.

        Raises:
            DeviceCodeError: the kernel isn't available there, or the driver refuses the launch.
        """
        index = arguments[0].get_device()  # type: ignore[union-attr]
        if torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                return self(grid, block, *arguments, stream=stream)
        function = self._function(index)
        if function is None:
            raise DeviceCodeError(f"kernel {self.name} can't run on cuda:{index}")
        words = [x if type(x) is int else _word(x) for x in arguments]
        stream = torch._C._cuda_getCurrentRawStream(index) if stream is None else stream
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = _Frame(len(words))
        frame.pack(*words)
        launch = functools.partial(_launcher(), function, grid, 1, 1, block, 1, 1, 0, ctypes.c_void_p(stream))
        failed = launch(frame.pointers, None)
        if failed == _INVALID_CONTEXT:
            _enter_context(index)
            failed = launch(frame.pointers, None)
        self._frames.append(frame)
        if failed:
            raise DeviceCodeError(f"kernel {self.name} on cuda:{index}: {_driver_error(failed)}")

    def _function(self, index: int) -> ctypes.c_void_p | None:
        try:
            return self._functions[index]
        except KeyError:
            return self._load(index)

    def _load(self, index: int) -> ctypes.c_void_p | None:
        """Compile and load the kernel, and keep that; None, without trying, in a capture."""
        if index < 0 or torch.version.cuda is None:
            return None
        if torch.cuda.is_current_stream_capturing():
            return None
        with _lock:
            if index not in self._functions:
                try:
                    self._functions[index] = _loaded(self.name, self.source, index)
                except (
                    DeviceCodeError,
                    OSError,
                    AttributeError,
                ) as error:  # a library or a symbol is missing
                    log.debug(
                        "kernel %s: torch's ops run in its place on cuda:%d: %s", self.name, index, error
                    )
                    self._functions[index] = None
            return self._functions[index]


class _Frame:
    """Memory for the arguments of one launch."""

    def __init__(self, count: int) -> None:
        memory = (ctypes.c_int64 * count)()
        self.pack = functools.partial(struct.Struct(f"@{count}q").pack_into, memory, 0)
        first = ctypes.addressof(memory)
        self.pointers = (ctypes.c_void_p * count)(*(first + 8 * n for n in range(count)))


def launch_function() -> int:
    """Return the address of the driver's cuLaunchKernel.

    Raises:
        OSError: there is no driver.
    """
    return ctypes.cast(_launcher(), ctypes.c_void_p).value or 0


def _index(device: torch.device | int) -> int:
    if isinstance(device, int):
        return device
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def _word(argument: Tensor | int | float) -> int:
    """Return an argument's eight bytes as an integer."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(argument, float):
        return struct.unpack("q", struct.pack("d", argument))[0]  # type: ignore[no-any-return]
    return int(argument)


def _loaded(name: str, source: str, index: int) -> ctypes.c_void_p:
    """Compile a kernel for a GPU and load it there. With the lock."""
    major, minor = torch.cuda.get_device_capability(index)
    code = compile_source(name, source, f"sm_{major}{minor}")
    driver = _driver()
    before, context, module, function = (ctypes.c_void_p() for _ in range(4))
    mode = ctypes.c_int(_RELAXED)
    _check(driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    try:
        context.value = _context(index)
        _check(driver.cuCtxPushCurrent_v2(context))
        try:
            _check(driver.cuModuleLoadData(ctypes.byref(module), code))
            _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(before))
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return function


def compile_source(name: str, source: str, architecture: str) -> bytes:
    """Return CUDA C as machine code for one architecture, such as `sm_90`; needs no GPU.

    Raises:
        DeviceCodeError: NVRTC refuses it; the message has its log.
        OSError: there is no NVRTC.
    """
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()

    def check(failed: int) -> None:
        if failed:
            raise DeviceCodeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(failed).decode()}")

    check(
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None)
    )
    try:
        options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
        if nvrtc.nvrtcCompileProgram(program, len(options), options):
            check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            text = ctypes.create_string_buffer(size.value)
            check(nvrtc.nvrtcGetProgramLog(program, text))
            raise DeviceCodeError(f"NVRTC: {text.value.decode(errors='replace').strip()}")
        check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        check(nvrtc.nvrtcGetCUBIN(program, code))
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _context(index: int) -> int:
    """Return a GPU's primary context, which is torch's, and keep it alive."""
    driver, device, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    _check(driver.cuDeviceGet(ctypes.byref(device), index))
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    return context.value or 0


def _enter_context(index: int) -> None:
    _check(_driver().cuCtxSetCurrent(ctypes.c_void_p(_context(index))))


@functools.cache
def _launcher() -> Any:
    return _driver().cuLaunchKernel


def _driver() -> ctypes.CDLL:
    return _library("cuLaunchKernel", "libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "").partition(".")[0]
    nvrtc = _library("nvrtcCompileProgram", f"libnvrtc.so.{major}")
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    return nvrtc


@functools.cache
def _library(symbol: str, name: str) -> ctypes.CDLL:
    """Return a library that has a symbol: torch's library that needs both, else the one of this name."""
    try:
        both = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libcaffe2_nvrtc.so"))
        getattr(both, symbol)  # a symbol is looked for in what a library needs, too
        return both
    except (OSError, AttributeError):
        return ctypes.CDLL(name)


def _check(failed: int) -> None:
    if failed:
        raise DeviceCodeError(_driver_error(failed))


def _driver_error(number: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(number, ctypes.byref(text))
    return f"CUDA error {number}: {(text.value or b'unknown').decode()}"

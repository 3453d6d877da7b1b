"""Promises of kernels that NVRTC compiles; here NVRTC and the driver are stand-ins that note what they do."""

# ruff: noqa: N802 - the names are those of NVRTC and the driver

import ctypes
import logging
import struct

import pytest
import torch

from attnreg.core.torchlib import device_code
from attnreg.core.torchlib.device_code import DeviceCodeError, DeviceKernel

STREAM = 0x7F0123456789
FUNCTIONS = {"one": 0x7F1000000001, "other": 0x7F2000000002}


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    index = 0

    def get_device(self):
        return self.index


class Driver:
    """The driver: launches note the arguments that they find, unless they are to fail."""

    def __init__(self):
        self.launches, self.errors, self.loaded, self.current = [], [], [], None
        self.during_launch = None

    def cuLaunchKernel(self, function, *rest):
        *shape, stream, pointers, extra = rest
        if self.errors:
            return self.errors.pop(0)
        if self.during_launch is not None:
            during, self.during_launch = self.during_launch, None
            during()
        words = [ctypes.c_int64.from_address(pointer).value for pointer in pointers]
        assert extra is None
        self.launches.append((function.value, shape, stream.value, words))
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 0x1000 + device.value
        return 0

    def cuCtxSetCurrent(self, context):
        self.current = context.value
        return 0

    def cuCtxPushCurrent_v2(self, context):
        self.pushed = context.value
        return 0

    def cuCtxPopCurrent_v2(self, context):
        self.pushed = None
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode):
        mode._obj.value = {2: 0, 0: 2}[mode._obj.value]
        return 0

    def cuModuleLoadData(self, module, code):
        self.loaded.append((code, self.pushed))
        module._obj.value = 0x2000
        return 0

    def cuModuleGetFunction(self, function, module, name):
        assert module.value == 0x2000
        if name.decode() not in FUNCTIONS:
            return 500
        function._obj.value = FUNCTIONS[name.decode()]
        return 0

    def cuGetErrorString(self, number, text):
        text._obj.value = f"error {number} of the driver".encode()
        return 0


class Nvrtc:
    """NVRTC: code is the source and its option, unless the source is wrong."""

    def __init__(self):
        self.compiled = []

    def nvrtcCreateProgram(self, program, text, name, headers, *none):
        self.text = text
        return 0

    def nvrtcCompileProgram(self, program, count, options):
        self.compiled.append(self.text)
        self.code = self.text + b" for " + options._obj.value
        return int(b"wrong" in self.text)

    def nvrtcGetCUBINSize(self, program, size):
        size._obj.value = len(self.code)
        return 0

    def nvrtcGetCUBIN(self, program, code):
        ctypes.memmove(code, self.code, len(self.code))
        return 0

    def nvrtcGetProgramLogSize(self, program, size):
        size._obj.value = 40
        return 0

    def nvrtcGetProgramLog(self, program, lines):
        lines.value = b"attnreg.cu(1): error: a wrong word"
        return 0

    def nvrtcDestroyProgram(self, program):
        return 0


@pytest.fixture
def nvrtc(monkeypatch):
    library = Nvrtc()
    monkeypatch.setattr(device_code, "_nvrtc", lambda: library)
    return library


@pytest.fixture
def driver(monkeypatch, nvrtc):
    """Return the driver of a machine with GPUs, of which the first is the current one."""
    library = Driver()
    monkeypatch.setattr(device_code, "_driver", lambda: library)
    monkeypatch.setattr(device_code, "_modules", {})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    for kept in (device_code._context, device_code._launch):
        kept.cache_clear()
    yield library
    for kept in (device_code._context, device_code._launch):
        kept.cache_clear()


def on_gpu():
    return torch.zeros(3).as_subclass(OnGpu)


def test_a_launch_passes_addresses_integers_and_doubles_on_the_current_stream(driver):
    x, y = on_gpu(), torch.zeros(1)
    DeviceKernel("one", "source")(7, 128, x, -5, 0.25, y, 2**40)
    words = [x.data_ptr(), -5, struct.unpack("q", struct.pack("d", 0.25))[0], y.data_ptr(), 2**40]
    assert driver.launches == [(FUNCTIONS["one"], [7, 1, 1, 128, 1, 1, 0], STREAM, words)]


def test_a_launch_on_a_stream_goes_there(driver):
    DeviceKernel("one", "source")(1, 32, on_gpu(), stream=2**40 + 1)
    assert driver.launches[0][2] == 2**40 + 1


def test_a_launch_during_another_has_its_own_arguments(driver):
    kernel, x = DeviceKernel("one", "source"), on_gpu()
    driver.during_launch = lambda: kernel(1, 32, x, 2)
    kernel(1, 32, x, 1)
    kernel(1, 32, x, 3)
    assert [words[1] for *_, words in driver.launches] == [2, 1, 3]


def test_the_kernels_of_a_source_are_compiled_once_for_each_gpu(driver, nvrtc):
    one, other = DeviceKernel("one", "source"), DeviceKernel("other", "source")
    for _ in range(2):
        assert one.address(0) == one.address(torch.device("cuda", 0)) == FUNCTIONS["one"]
        assert other.address(0) == FUNCTIONS["other"]
    assert nvrtc.compiled == [b"source"]
    assert one.available(1)
    code = [f"source for --gpu-architecture=sm_9{index}".encode() for index in (0, 1)]
    assert driver.loaded == [(code[0], 0x1000), (code[1], 0x1001)]


def test_a_source_may_be_a_file(driver, nvrtc, tmp_path):
    file = tmp_path / "kernels.cu"
    file.write_text("source of a file")
    assert DeviceKernel("one", file).available(0)
    assert nvrtc.compiled == [b"source of a file"]


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("one", "wrong", "NVRTC: attnreg.cu(1): error: a wrong word"),
        ("missing", "source", "CUDA error 500: error 500 of the driver"),
    ],
)
def test_a_kernel_that_cannot_be_loaded_is_unavailable_and_one_line_says_why(
    driver, nvrtc, caplog, name, source, reason
):
    kernel = DeviceKernel(name, source)
    with caplog.at_level(logging.DEBUG, "attnreg"):
        assert [kernel.available(0), kernel.address(0), kernel.available(0)] == [False, None, False]
    assert [record.getMessage() for record in caplog.records] == [
        f"torch's ops replace kernel {name} on cuda:0: {reason}"
    ]
    assert len(nvrtc.compiled) == 1
    with pytest.raises(DeviceCodeError, match=f"kernel {name} isn't available on cuda:0"):
        kernel(1, 32, on_gpu())
    assert driver.launches == []


def test_a_missing_library_makes_kernels_unavailable(driver, monkeypatch, caplog):
    def missing():
        raise OSError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(device_code, "_nvrtc", missing)
    with caplog.at_level(logging.DEBUG, "attnreg"):
        assert not DeviceKernel("one", "source").available(0)
    assert "libnvrtc.so.13: cannot open" in caplog.text


def test_nothing_is_compiled_in_a_capture_and_a_kernel_is_available_after_it(driver, nvrtc, monkeypatch):
    kernel = DeviceKernel("one", "source")
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert not kernel.available(0)
        assert nvrtc.compiled == []
    assert kernel.available(0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert kernel.available(0), "what is loaded can be launched in a capture"


def test_a_thread_that_has_no_context_yet_gets_torchs(driver):
    driver.errors = [device_code.INVALID_CONTEXT]
    DeviceKernel("one", "source")(1, 32, on_gpu(), 4)
    assert driver.current == 0x1000
    assert [words[1] for *_, words in driver.launches] == [4]


def test_what_the_driver_refuses_is_an_error(driver):
    driver.errors = [719]
    with pytest.raises(
        DeviceCodeError, match="kernel one on cuda:0: CUDA error 719: error 719 of the driver"
    ):
        DeviceKernel("one", "source")(1, 32, on_gpu())


def test_without_cuda_no_library_is_opened(driver, monkeypatch):
    monkeypatch.setattr(device_code, "_driver", lambda: pytest.fail("opened"))
    kernel = DeviceKernel("one", "source")
    assert [kernel.available(torch.device("cpu")), kernel.available(-1)] == [False, False]
    monkeypatch.setattr(torch.version, "cuda", None)  # as a build for ROCm has it
    assert not kernel.available(0)


def test_the_address_of_the_launch_is_that_of_the_drivers_function(driver):
    driver.cuLaunchKernel = ctypes.CDLL(None).getpid
    get_pid = ctypes.CFUNCTYPE(ctypes.c_int)(device_code.launch_function())
    assert get_pid() == ctypes.CDLL(None).getpid()

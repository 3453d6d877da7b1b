"""CUDA kernels of attnreg compiled for the CPU: their arithmetic is tested without a GPU."""

import contextlib
import ctypes
import subprocess
from pathlib import Path

from torch import Tensor

from attnreg.core.torchlib import libraries
from attnreg.core.torchlib.device_code import DeviceKernel


def compiled(source, folder):
    """Compile a CUDA file of attnreg for this machine, and return the library."""
    main, library = folder / "kernels.cpp", folder / "kernels.so"
    main.write_text(f'#include "{Path(__file__).with_name("host_cuda.h")}"\n#include "{source}"\n')
    flags = "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread"
    subprocess.run([*libraries.find(), *flags, str(main), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def launch(library, name, grid, block, *arguments):
    """Run a kernel's blocks in turns, tensors passed as addresses; return whether no thread trapped."""
    words = [x.data_ptr() if isinstance(x, Tensor) else int(x) for x in arguments]
    kernel = ctypes.cast(getattr(library, name), ctypes.c_void_p)
    memory = (ctypes.c_int64 * len(words))(*words)
    library.run_on_host.restype = ctypes.c_bool
    return library.run_on_host(
        kernel, *map(ctypes.c_int64, (grid, block)), memory, ctypes.c_int64(len(words))
    )


@contextlib.contextmanager
def kernels_on_host(library, module, monkeypatch):
    """Have a module's kernels of a file run on the host, for tensors of the CPU."""
    ran = []

    def run(kernel, grid, block, *arguments, stream=None):
        ran.append(kernel.name)
        assert launch(library, kernel.name, grid, block, *arguments)

    monkeypatch.setattr(DeviceKernel, "__call__", run)
    monkeypatch.setattr(module, "_runs", lambda *_: True)
    yield ran

"""When the cpu backend uses its compiled kernel: where it can run a call, is faster, and can be loaded."""

import ctypes
import dataclasses
import importlib.util
import itertools

import pytest
import torch
from support.cpu_calls import CAUSAL, OPEN, assert_accurate, dense, ragged, refuse

from attnreg.backends import cpu
from attnreg.backends.cpu import choice, compiled, torch_path
from attnreg.contract.backend import Call, Kernels
from attnreg.errors import BuildError
from attnreg.measure.inputs import inputs
from attnreg.torchlib import building
from attnreg.tuning.matching import matched
from attnreg.tuning.table import Environment

DTYPES = ("float32", "bfloat16", "float16")

pytestmark = pytest.mark.usefixtures("one_thread")


class Recorder:
    """Kernels in place of torch's that remember which direction they were called for."""

    def __init__(self):
        self.found = []

    def kernels(self):
        return Kernels(
            lambda *arguments: self.found.append("forward"), lambda *arguments: self.found.append("backward")
        )


def left_to_torch(cpu_kernel, case):
    recorder = Recorder()
    kernels = cpu_kernel.before(recorder.kernels())
    q, k, v, grad, call = inputs(case)
    kernels.forward(q, k, v, call)
    out, lse = cpu.BACKEND.load().forward(q, k, v, call)
    kernels.backward(grad, q, k, v, out, lse, call)
    return recorder.found


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_takes_the_dtypes_and_options_that_it_has_and_leaves_the_rest(cpu_kernel, monkeypatch, dtype):
    monkeypatch.setattr(choice, "_has_amx", lambda: False)
    both = ["forward", "backward"]
    assert left_to_torch(cpu_kernel, ragged((700, 3), dtype=dtype)) == []
    assert left_to_torch(cpu_kernel, ragged((7, 3), dtype="float64")) == both
    assert left_to_torch(cpu_kernel, dense(1, 9, dtype=dtype, bias="additive")) == both
    assert left_to_torch(cpu_kernel, ragged((0, 0), dtype=dtype)) == both


def test_long_bfloat16_forwards_are_left_to_torch_where_it_has_amx(cpu_kernel, monkeypatch):
    monkeypatch.setattr(choice, "_has_amx", lambda: True)
    assert left_to_torch(cpu_kernel, ragged((1100, 1000))) == ["forward"]
    assert left_to_torch(cpu_kernel, ragged((300,) * 4)) == ["forward"]  # in one call of torch's kernel
    assert left_to_torch(cpu_kernel, ragged((300, 301, 302, 303))) == []
    assert left_to_torch(cpu_kernel, ragged((200,) * 8)) == []
    assert left_to_torch(cpu_kernel, ragged((1100, 1000), dtype="float32")) == []
    assert left_to_torch(cpu_kernel, ragged((1100, 1000), dtype="float16")) == []


def test_few_queries_and_many_float32_keys_are_left_to_torch(cpu_kernel):
    one = ragged((1, 1), (300, 200), dtype="float32")
    assert left_to_torch(cpu_kernel, one) == ["forward"]
    assert left_to_torch(cpu_kernel, dataclasses.replace(one, heads=(16, 1))) == []
    assert left_to_torch(cpu_kernel, dataclasses.replace(one, dtype="float16")) == []
    assert left_to_torch(cpu_kernel, ragged((4, 1, 3), dtype="float32")) == []


def test_a_backward_whose_tensors_do_not_fit_is_left_to_torch(cpu_kernel):
    recorder = Recorder()
    kernels = cpu_kernel.before(recorder.kernels())
    x, lse, call = torch.randn(2, 9, 2, 16), torch.zeros(2, 2, 9), Call(0.25, 9, 9)
    kernels.backward(x[:, :8], x, x, x, x, lse, call)
    kernels.backward(x.half(), x, x, x, x, lse, call)
    kernels.backward(x, x, x, x, x[..., :8], lse, call)
    kernels.backward(x, x, x, x, x.double(), lse, call)
    kernels.backward(x, x, x, x, x, lse.mT, call)
    assert recorder.found == ["backward"] * 5


@pytest.fixture
def unbuilt(monkeypatch, tmp_path):
    monkeypatch.setattr(building.caches, "folder", lambda purpose: tmp_path / purpose)
    building.target.cache_clear()
    yield tmp_path / "cpu_kernel"
    building.target.cache_clear()


def test_without_it_the_backend_has_torchs_kernel(unbuilt, loads, monkeypatch):
    monkeypatch.setattr(compiled, "load", loads)
    with pytest.raises(BuildError, match="`attnreg build` does it"):
        building.loaded_cpu_kernel()
    assert cpu.BACKEND.load().forward.func is torch_path.forward


def test_with_it_the_backend_calls_it(cpu_kernel, monkeypatch):
    monkeypatch.setattr(compiled, "load", lambda: cpu_kernel._replace(forward_entry=lambda *arguments: 1))
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(MemoryError):
        cpu.BACKEND.load().forward(q, q, q, Call(1.0, 4, 4))


def test_a_file_that_others_can_write_to_or_that_does_not_load_is_not_used(unbuilt):
    unbuilt.mkdir(mode=0o700)
    file = building.target(building.CPU_KERNEL)
    file.write_bytes(b"no library")
    with pytest.raises(BuildError, match="can't be loaded"):
        building.loaded_cpu_kernel()
    file.chmod(0o722)
    with pytest.raises(BuildError, match="others may write to it"):
        building.loaded_cpu_kernel()


def test_one_that_is_there_and_does_not_load_is_a_warning(unbuilt, loads, caplog):
    assert loads() is None and caplog.messages == []
    unbuilt.mkdir(mode=0o700)
    building.target(building.CPU_KERNEL).write_bytes(b"no library")
    assert loads() is None
    assert len(caplog.messages) == 1 and "can't be loaded" in caplog.messages[0]


@pytest.fixture
def loads(monkeypatch):
    """Return what loads the library as in a fresh process, in a run where none is loaded, too."""
    here = importlib.util.find_spec(compiled.__name__)
    fresh = importlib.util.module_from_spec(here)
    here.loader.exec_module(fresh)
    return fresh.load.__wrapped__


@pytest.fixture
def installed(unbuilt, built_cpu_kernel, monkeypatch):
    """Have the kernel lie where `attnreg build` puts it, and the backend look there."""
    unbuilt.mkdir(mode=0o700)
    file = building.target(building.CPU_KERNEL)
    file.write_bytes(built_cpu_kernel.read_bytes())
    file.chmod(0o700)
    monkeypatch.setattr(compiled, "is_there", building.has_cpu_kernel)
    return file


def test_the_version_says_whether_there_is_one_to_load(installed, monkeypatch):
    without, found = torch.__version__, f"{torch.__version__} (compiled kernel)"
    monkeypatch.setattr(building.ctypes, "CDLL", refuse)
    assert cpu.BACKEND.version() == found
    installed.chmod(0o702)
    assert cpu.BACKEND.version() == without
    installed.chmod(0o700)
    installed.parent.chmod(0o720)
    assert cpu.BACKEND.version() == without
    installed.parent.chmod(0o700)
    monkeypatch.setenv("ATTNREG_ROUTERS", "python")
    assert cpu.BACKEND.version() == without
    monkeypatch.setenv("ATTNREG_ROUTERS", "compiled")
    assert cpu.BACKEND.version() == found
    monkeypatch.setenv("ATTNREG_ROUTERS", "wrong")  # an error of the calls, not of this
    assert cpu.BACKEND.version() == found
    installed.unlink()
    assert cpu.BACKEND.version() == without


def test_the_variable_leaves_it_out(installed, loads, monkeypatch, caplog):
    assert loads() is not None
    monkeypatch.setenv("ATTNREG_ROUTERS", "Python")
    assert loads() is None and caplog.messages == []
    with pytest.raises(BuildError, match="ATTNREG_ROUTERS=python leaves it out"):
        building.loaded_cpu_kernel()


def test_a_table_measured_without_it_is_not_one_measured_with_it(installed):
    def here():
        return Environment(
            device="a CPU", torch=torch.__version__, backends={"cpu": cpu.BACKEND.version()}, threads="2"
        )

    with_it = here()
    installed.unlink()
    for measured, now in ((with_it, here()), (here(), with_it)):
        assert len(matched(measured, now).refused) == 1
    assert not matched(with_it, with_it).refused
    # Tables from before cpu had a version were measured without.
    older = dataclasses.replace(here(), backends={"cpu": ""})
    assert not matched(older, here()).refused and matched(older, with_it).refused


@pytest.mark.parametrize(
    ("known", "flag"),
    [("AVX512", "-march=x86-64-v4"), ("AVX2", "-march=x86-64-v3"), ("DEFAULT", None), ("SVE256", None)],
)
def test_each_instruction_set_has_a_file_of_its_own(unbuilt, monkeypatch, known, flag):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: known)
    flags = building.CPU_KERNEL.all_flags()
    assert [each for each in flags if each.startswith("-march")] == ([flag] if flag else [])
    here = building.target(building.CPU_KERNEL)
    monkeypatch.setattr(
        torch.backends.cpu, "get_cpu_capability", lambda: "AVX2" if flag != "-march=x86-64-v3" else ""
    )
    building.target.cache_clear()
    assert building.target(building.CPU_KERNEL) != here


@pytest.mark.slow
@pytest.mark.parametrize("known", ["AVX2", "DEFAULT"])
def test_narrower_vectors_are_accurate(unbuilt, monkeypatch, known):
    machine = torch.backends.cpu.get_cpu_capability()
    if known == "AVX2" and not machine.startswith("AVX"):
        pytest.skip("about machines with AVX2")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: known)
    monkeypatch.setattr(choice, "leaves_to_torch", lambda *call: False)
    library = ctypes.CDLL(str(building.build(building.CPU_KERNEL)))
    kernels = compiled.Compiled.of(library).before(Kernels(refuse, refuse))
    for dtype, window in itertools.product(("float32", "bfloat16", "float16"), (OPEN, CAUSAL, (20, 5))):
        assert_accurate(
            kernels, ragged((1, 17, 300, 64), heads=(4, 2), dims=(40, 24), dtype=dtype, window=window)
        )

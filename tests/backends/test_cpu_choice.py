"""When the cpu backend uses its compiled kernel: where it can run a call, is faster, and can be loaded."""

import ctypes
import dataclasses
import importlib.util
import itertools
import math
import random

import pytest
import torch
from support.compiled_files import stand_in
from support.cpu_calls import CAUSAL, OPEN, dense, ragged, refuse
from support.sdpa import attend
from support.truth import assert_accurate

import attnreg
from attnreg.backends import cpu
from attnreg.backends.cpu import choice, compiled, torch_path
from attnreg.core import registry
from attnreg.core.contract.backend import Call, Kernels
from attnreg.core.contract.spec import AttentionSpec, Device
from attnreg.core.policy.lockfile import Lockfile, LockfileRow
from attnreg.core.times import traces
from attnreg.core.times.environments import _environment, environment, matched
from attnreg.core.times.table import Environment
from attnreg.core.torchlib import building, caches, libraries
from attnreg.errors import BuildError, UnsupportedInputError
from attnreg.tools.measure.inputs import inputs

DTYPES = ("float32", "bfloat16", "float16")
BOTH = ["forward", "backward"]


def on(monkeypatch, **facts):
    """Have the rules see another machine."""
    machine = choice.CpuMachine(**{"avx": True, "amx": False, "slow_mkl": False} | facts)
    monkeypatch.setattr(choice, "machine", lambda: machine)


@pytest.fixture
def recorded(cpu_kernel):
    """Return the backend's kernels, and a list of the directions that they leave to torch's."""
    found = []
    torchs = Kernels(lambda *given: found.append("forward"), lambda *given: found.append("backward"))
    return cpu_kernel.before(torchs), found


@pytest.fixture
def left_to_torch(recorded):
    """Return a function that says which directions of a case are left to torch's kernel."""
    kernels, found = recorded

    def directions(case):
        found.clear()
        q, k, v, grad, call = inputs(case)
        kernels.forward(q, k, v, call)
        out, lse = cpu.BACKEND.load().forward(q, k, v, call)
        kernels.backward(grad, q, k, v, out, lse, call)
        return list(found)

    return directions


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_compiled_kernel_takes_its_dtypes_and_options_and_leaves_the_rest(
    left_to_torch, monkeypatch, dtype
):
    on(monkeypatch, amx=False)
    assert left_to_torch(ragged((700, 3), dtype=dtype)) == []
    assert left_to_torch(ragged((7, 3), dtype="float64")) == BOTH
    assert left_to_torch(dense(1, 9, dtype=dtype, bias="additive")) == BOTH
    assert left_to_torch(ragged((0, 0), dtype=dtype)) == BOTH


def test_long_bfloat16_forwards_are_left_to_torch_where_it_has_amx(left_to_torch, monkeypatch):
    on(monkeypatch, amx=True)
    assert left_to_torch(ragged((1100, 1000))) == ["forward"]
    assert left_to_torch(ragged((300,) * 4)) == ["forward"]  # in one call of torch's kernel
    assert left_to_torch(ragged((300, 301, 302, 303))) == []
    assert left_to_torch(ragged((200,) * 8)) == []
    assert left_to_torch(ragged((1100, 1000), dtype="float32")) == []
    assert left_to_torch(ragged((1100, 1000), dtype="float16")) == []


def test_bfloat16_stays_with_the_compiled_kernel_where_it_has_amx_itself(left_to_torch, monkeypatch):
    on(monkeypatch, amx=True, tiles=True)
    assert left_to_torch(ragged((1100, 1000))) == []
    assert left_to_torch(ragged((1100, 1000), dims=(40, 40))) == ["forward"]  # no multiple of 32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 2), (16, 1)])
def test_few_queries_of_many_keys_stay_with_the_compiled_kernel(left_to_torch, monkeypatch, heads, dtype):
    on(monkeypatch, amx=True)
    assert left_to_torch(ragged((1, 1), (9000, 8000), heads=heads, dtype=dtype)) == []


def test_a_backward_whose_tensors_do_not_fit_is_left_to_torch(recorded):
    kernels, found = recorded
    x, lse, call = torch.randn(2, 9, 2, 16), torch.zeros(2, 2, 9), Call(0.25, 9, 9)
    kernels.backward(x[:, :8], x, x, x, x, lse, call)
    kernels.backward(x.half(), x, x, x, x, lse, call)
    kernels.backward(x, x, x, x, x[..., :8], lse, call)
    kernels.backward(x, x, x, x, x.double(), lse, call)
    kernels.backward(x, x, x, x, x, lse.mT, call)
    assert found == ["backward"] * 5


# ---- dense calls that torch's selector has sent to torch's kernel


def spec(length, length_k=None, dtype="float32", heads=(4, 4), dim=64, **options):
    length_k = length if length_k is None else length_k
    sizes = {"batch": 2, "max_q": length, "max_k": length_k, "head_dim": dim, "head_dim_v": dim}
    heads_q, heads_k = heads
    return AttentionSpec(
        device=Device("cpu"), dtype=dtype, heads_q=heads_q, heads_k=heads_k, **sizes, **options
    )


def replaced(spec):
    """Return the directions that the backend is to run in place of torch's kernel."""
    return [each for each in BOTH if choice.replaces_torch(each, spec)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_mkl_is_slow_all_but_few_rows_goes_to_the_compiled_kernel(monkeypatch, dtype):
    on(monkeypatch, slow_mkl=True)
    for length in (16, 300, 4096):
        assert replaced(spec(length, dtype=dtype)) == BOTH
    assert replaced(spec(9, 300, dtype=dtype)) == ([] if dtype == "float32" else ["backward"])
    assert replaced(spec(4, 300, dtype=dtype, heads=(16, 4))) == BOTH  # as many rows of a key head


def test_where_mkl_is_fast_float32_goes_there_with_a_causal_mask_or_shared_key_heads(monkeypatch):
    on(monkeypatch, amx=True)
    assert replaced(spec(300)) == []
    assert replaced(spec(300, window=CAUSAL)) == BOTH
    assert replaced(spec(90, window=CAUSAL)) == []
    assert replaced(spec(100, heads=(8, 2))) == ["forward"]
    assert replaced(spec(100, heads=(8, 2), needs_backward=True)) == []  # one kernel runs both
    assert replaced(spec(300, heads=(8, 2))) == []


def test_bfloat16_forwards_go_there_up_to_a_length_where_torch_has_amx_and_float16_at_any(monkeypatch):
    on(monkeypatch, amx=True)
    for dtype, expected in (("bfloat16", [BOTH, ["backward"]]), ("float16", [BOTH] * 2)):
        assert [replaced(spec(length, dtype=dtype)) for length in (100, 300)] == expected
    on(monkeypatch)
    assert replaced(spec(400, dtype="bfloat16")) == BOTH
    on(monkeypatch, amx=True, tiles=True)
    assert replaced(spec(400, dtype="bfloat16")) == BOTH
    assert replaced(spec(400, dtype="bfloat16", dim=40)) == ["backward"]  # no multiple of 32


MACHINES = [{}, {"slow_mkl": True, "lanes": 16}, {"amx": True}, {"amx": True, "tiles": True}]
KINDS = [
    {"dtype": dtype, "heads": heads, "dim": dim, "window": window, **options}
    for dtype in ("float32", "bfloat16", "float16", "float64")
    for heads in ((2, 2), (8, 1))
    for dim in (8, 32, 40, 512)
    for window in (OPEN, CAUSAL)
    for options in ({}, {"positive_scale": False}, {"needs_backward": True}, {"bias": True})
]


@pytest.mark.parametrize("facts", MACHINES)
def test_lengths_that_no_cut_separates_are_decided_alike(monkeypatch, facts):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    on(monkeypatch, **facts)
    draw, classes = random.Random(0), 0
    for kind in KINDS:
        decided, cuts = {}, [*choice.cuts(spec(7, 9, **kind))]
        assert cuts == [*choice.cuts(spec(300, 4000, **kind))]  # no length is read
        for _ in range(15):
            ranges = (0, 2), (0, 2), (1, 64), (127, 129), (1, 300), (4096, 4096)
            lengths = [draw.randint(*draw.choice(ranges)) for _ in "qk"]
            one = dataclasses.replace(spec(*lengths, **kind), batch=draw.choice((1, 2, 3, 4, 9)))
            key = tuple(
                sum(n * math.prod(getattr(one, name) for name in names) for n, names in terms) >= at
                for terms, at in cuts
            )
            found = replaced(one)
            assert decided.setdefault(key, found) == found, (one, cuts)
        classes += len({*map(tuple, decided.values())}) > 1
    assert classes > 20  # of so many kinds the decision does depend on lengths


SLOW_OR_AMX = pytest.mark.parametrize("facts", [{"slow_mkl": True}, {"amx": True}])


@SLOW_OR_AMX
def test_more_rows_than_fill_a_vector_but_few_go_there_only_backward_in_16_bits(monkeypatch, facts):
    on(monkeypatch, **facts)
    for dtype in DTYPES:
        expected = [] if dtype == "float32" else ["backward"]
        assert replaced(spec(15, 200, dtype=dtype, window=CAUSAL)) == expected
    assert replaced(spec(15, 100, heads=(16, 2)))[:1] == ["forward"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("facts", [{}, {"slow_mkl": True, "lanes": 16}])
def test_forwards_of_rows_that_fill_no_more_than_a_vector_go_there(monkeypatch, dtype, facts):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    on(monkeypatch, **facts)
    lanes, backward = facts.get("lanes", 8), ["backward"] if dtype != "float32" else []
    for length, heads, dim in ((1, (lanes - 1, 1), 64), (lanes - 1, (2, 2), 16), (1, (4, 4), 72)):
        one = {"dtype": dtype, "heads": heads, "dim": dim}
        assert replaced(spec(length, 300, **one)) == ["forward", *backward]
        # A float32 gradient takes the LSE of the kernel that computes it.
        assert replaced(spec(length, 300, needs_backward=True, **one)) == (BOTH if backward else [])
    assert replaced(spec(1, 300, dtype=dtype, dim=lanes - 1)) == backward
    assert replaced(spec(lanes, 300)) == (BOTH if "slow_mkl" in facts else ["forward"])
    assert replaced(spec(lanes, 300, needs_backward=True)) == (BOTH if "slow_mkl" in facts else [])
    with monkeypatch.context() as many:  # threads, of which each computes a key head of a sequence
        many.setattr(torch, "get_num_threads", lambda: 4)
        assert replaced(spec(1, 300, dtype=dtype, heads=(4, 2))) == ["forward", *backward]
        assert replaced(spec(1, 300, dtype=dtype, heads=(4, 1))) == backward
    on(monkeypatch, amx=True, **facts)
    assert ("forward" in replaced(spec(1, 300, dtype=dtype))) is (dtype != "bfloat16")


@SLOW_OR_AMX
def test_what_the_compiled_kernel_does_not_take_stays_with_torchs(monkeypatch, facts):
    on(monkeypatch, **facts)
    assert replaced(spec(300, dtype="float64", window=CAUSAL)) == []
    on(monkeypatch, avx=False, **facts)
    for dtype, bias in itertools.product(("bfloat16", "float16"), (False, True)):
        # Torch's kernel sums these gradients in the dtype of the query.
        assert replaced(spec(300, dtype=dtype, bias=bias)) == ["backward"]


@pytest.mark.parametrize("facts", [{}, {"slow_mkl": True}, {"amx": True}])
def test_a_call_that_replaces_torchs_kernel_is_run_by_the_compiled_one(cpu_kernel, monkeypatch, facts):
    on(monkeypatch, **facts)
    kernels = cpu_kernel.before(Kernels(refuse, refuse))
    assert kernels.replaces_native is choice.replaces_torch
    moved = 0
    for length, dim, heads, window, dtype in itertools.product(
        (17, 256, 640), (8, 32), ((2, 2), (4, 1)), (OPEN, CAUSAL), DTYPES
    ):
        q, k, v, _, call = inputs(dense(1, length, dims=(dim, dim), heads=heads, window=window, dtype=dtype))
        if choice.replaces_torch("forward", spec(length, dtype=dtype, heads=heads, dim=dim, window=window)):
            kernels.forward(q, k, v, call)
            moved += 1
    assert moved


@pytest.mark.parametrize("is_built", [True, False])
def test_causal_calls_that_torchs_kernel_computes_wrong_are_replaced(cpu_kernel, monkeypatch, is_built):
    monkeypatch.setattr(compiled, "load", lambda: cpu_kernel if is_built else None)
    on(monkeypatch, amx=True)
    replaces = cpu.BACKEND.load().replaces_native
    wrong = {"positive_scale": False, "dtype": "float64"}
    for direction in BOTH:
        assert replaces(direction, spec(40, bias=True, dtype="float64"))  # whose mask may be float32
        assert not replaces(direction, spec(40, bias=True, dtype="float32")) or is_built
        for window in (CAUSAL, (-1, 30)):  # aligned top-left, with more queries than keys
            assert replaces(direction, spec(40, window=window, **wrong))
        assert replaces(direction, spec(40, window=CAUSAL, bias=True, **wrong))
        assert replaces(direction, spec(1, **wrong))  # one query with a causal mask and any number of keys
        assert not replaces(direction, spec(40, **wrong))
        assert not replaces(direction, spec(40, window=CAUSAL, dtype="float64"))


# ---- whether it can be loaded


@pytest.fixture
def unbuilt(monkeypatch, tmp_path):
    monkeypatch.setattr(caches, "folder", lambda purpose: tmp_path / purpose)
    building.target.cache_clear()
    yield tmp_path / "cpu_kernel"
    building.target.cache_clear()


def test_without_the_compiled_kernel_the_backend_calls_torchs(unbuilt, loads, monkeypatch):
    monkeypatch.setattr(compiled, "load", loads)
    with pytest.raises(BuildError, match="`attnreg build` does it"):
        building.loaded_cpu_kernel()
    assert cpu.BACKEND.load().forward.func is torch_path.forward


def test_with_the_compiled_kernel_the_backend_calls_it(cpu_kernel, monkeypatch):
    monkeypatch.setattr(compiled, "load", lambda: cpu_kernel._replace(forward_entry=lambda *arguments: 1))
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(MemoryError):
        cpu.BACKEND.load().forward(q, q, q, Call(1.0, 4, 4))


def test_a_compiled_kernel_that_does_not_load_is_a_warning(unbuilt, loads, caplog):
    assert loads() is None and caplog.messages == []
    stand_in(building.CPU_KERNEL)
    assert loads() is None
    assert len(caplog.messages) == 1 and "can't be loaded" in caplog.messages[0]


@pytest.fixture
def loads(monkeypatch):
    """Return the function that loads the library, from a new copy of its module, as fixtures replace it."""
    here = importlib.util.find_spec(compiled.__name__)
    copy = importlib.util.module_from_spec(here)
    here.loader.exec_module(copy)
    return copy.load.__wrapped__


@pytest.fixture
def installed(unbuilt, built_cpu_kernel, loads, monkeypatch):
    """Put the kernel where `attnreg build` does, and have the backend look there each time."""
    unbuilt.mkdir(mode=0o700)
    file = building.target(building.CPU_KERNEL)
    file.write_bytes(built_cpu_kernel.read_bytes())
    file.chmod(0o700)
    monkeypatch.setattr(compiled, "load", loads)
    return file


def test_the_version_says_which_kernel_is_loaded(installed, monkeypatch):
    def is_said():
        assert cpu.BACKEND.version() in (torch.__version__, f"{torch.__version__} (compiled kernel)")
        return cpu.BACKEND.version() != torch.__version__

    made = installed.read_bytes()
    stand_in(building.CPU_KERNEL)  # it is there, isn't damaged, and doesn't load
    assert not is_said()
    installed.write_bytes(made)
    assert is_said()
    for place, mode in ((installed, 0o702), (installed.parent, 0o702)):
        place.chmod(mode)
        assert not is_said()
        place.chmod(0o700)
    # A wrong value is an error of the calls, not of this.
    for value, expected in (("python", False), ("compiled", True), ("wrong", True)):
        monkeypatch.setenv("ATTNREG_ROUTERS", value)
        assert is_said() == expected
    monkeypatch.delenv("ATTNREG_ROUTERS")
    installed.unlink()
    assert not is_said()


def test_a_lock_of_the_compiled_kernel_is_refused_where_torchs_kernel_runs(
    installed, tmp_path, monkeypatch, ran
):
    with attnreg.record(tmp_path / "trace.jsonl"):
        attend(8)
    assert ran() == {"torch's flash_attention kernel": (1, 0)}  # nothing asks for a backend
    (one,) = traces.read(tmp_path / "trace.jsonl")
    here = environment(one.spec.device, registry.entries())
    assert here.backends["cpu"] == f"{torch.__version__} (compiled kernel)"
    rows = (LockfileRow(one.spec, "forward", "cpu", "a test"),)
    Lockfile(tmp_path / "lock.json", "cpu", here, rows).save()
    monkeypatch.setenv("ATTNREG_LOCK", str(tmp_path / "lock.json"))
    attnreg.reload()
    attend(8)
    assert ran() == {"cpu": (1, 0)}
    damaged = installed.read_bytes()[:8192]
    installed.unlink()  # the file that is loaded stays whole
    installed.write_bytes(damaged)
    _environment.cache_clear()  # as in the next process
    monkeypatch.setattr(registry.entries()["cpu"], "_version", None)
    attnreg.reload()
    with pytest.raises(UnsupportedInputError, match=r"locked with cpu .* \(compiled kernel\), here it is "):
        attend(8)
    assert ran() == {}
    _environment.cache_clear()


def test_attnreg_routers_python_leaves_the_compiled_kernel_out(installed, loads, monkeypatch, caplog):
    assert loads() is not None
    monkeypatch.setenv("ATTNREG_ROUTERS", "Python")
    assert loads() is None and caplog.messages == []
    with pytest.raises(BuildError, match="ATTNREG_ROUTERS=python leaves compiled libraries out"):
        building.loaded_cpu_kernel()


def test_a_table_measured_without_the_compiled_kernel_is_not_used_with_it(installed):
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
    ("limit", "flag"), [("", "-march=x86-64-v4"), ("avx2", "-march=x86-64-v3"), ("default", None)]
)
def test_each_instruction_set_has_a_file_of_its_own(unbuilt, monkeypatch, limit, flag):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", limit)
    monkeypatch.setattr(libraries, "cpu_flags", lambda: libraries.LEVELS[0].instructions)
    flags = building.CPU_KERNEL.all_flags()
    assert [each for each in flags if each.startswith("-march")] == ([flag] if flag else [])
    here = building.target(building.CPU_KERNEL)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2" if limit != "avx2" else "default")
    building.target.cache_clear()
    assert building.target(building.CPU_KERNEL) != here


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["avx2", "default"])
def test_narrower_vectors_are_accurate(unbuilt, monkeypatch, limit):
    if limit == "avx2" and not libraries.machine_level():
        pytest.skip("about machines with AVX2")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", limit)
    monkeypatch.setattr(choice, "leaves_to_torch", lambda *call: False)
    library = ctypes.CDLL(str(building.build(building.CPU_KERNEL)))
    kernels = compiled.CompiledKernel.of(library).before(Kernels(refuse, refuse))
    for dtype, window in itertools.product(("float32", "bfloat16", "float16"), (OPEN, CAUSAL, (20, 5))):
        assert_accurate(
            kernels, ragged((1, 17, 300, 64), heads=(4, 2), dims=(40, 24), dtype=dtype, window=window)
        )

"""Fixtures that every test shares: a registry as it is in a new process, and fake backends."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import gc
import hashlib
import itertools
import logging
import os
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from support import lock_order, references
from support.chosen_cases import are_pairwise, have_each_value
from support.fake_cudnn import select_by
from support.options import NUMBERS

import attnreg
from attnreg import _autoload
from attnreg.backends import cudnn as cudnn_backend
from attnreg.backends import math as math_backend
from attnreg.backends.cpu import compiled as cpu_compiled
from attnreg.backends.cudnn import rounding
from attnreg.core import aten, registry
from attnreg.core.aten import bypassed
from attnreg.core.dispatch import call_cache, calls, counters, scope, trace
from attnreg.core.launching import offsets
from attnreg.core.policy import current as policy
from attnreg.core.registry import discovery
from attnreg.core.times import adaptive, tables
from attnreg.core.torchlib import background, building, caches, layout, libraries, locks
from attnreg.core.varlen import front
from attnreg.errors import BuildError
from attnreg.flash_attn import kvcache
from attnreg.testing import classes, kit
from attnreg.tools.measure import rule


def pytest_addoption(parser):
    parser.addoption(
        "--backends", default="", help="comma list of backends that must be there: a missing one fails"
    )
    parser.addoption(
        "--routers", choices=("python", "compiled"), default="python", help="which lie over torch's kernels"
    )
    # How long a test takes decides nothing, and with 0 no test may find that its offsets have changed.
    parser.addoption("--trust-offsets", type=float, default=3600.0, help="offsets.TRUSTED, in seconds")


def pytest_configure(config):
    gc.disable()  # until the tests are collected, of which it would take a quarter of the time
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So a shell starts what runs in the background. A process that a test interrupts would go on.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    offsets.TRUSTED = config.getoption("--trust-offsets")
    time_no_guards()
    # The first use of a name of attnreg would obey the variables of the test that it is in.
    _autoload.variables_are_set = True


def time_no_guards():
    """Keep Dynamo from timing the guards of each graph for its log, for which it empties the CPU's caches.

    That takes 0.03 s of each compilation, and slows down what runs beside it.
    """
    for module in (torch._C._dynamo.guards, sys.modules.get("torch._dynamo.guards")):
        if hasattr(module, "profile_guard_manager"):  # torch's own, so another version may have none
            module.profile_guard_manager = lambda *_: 0.0


@functools.cache
def let_propagate(count):
    """Have torch's loggers propagate, once for each count of loggers: imports add some.

    On each that doesn't, which are some 50, pytest hangs its handlers, six times a test.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True


def keep_out_of_collections():
    """Take all that is alive out of garbage collections: each would go through it, for up to a second."""
    gc.collect()
    gc.freeze()


started = itertools.count(1)


def pytest_runtest_logstart():
    """Look for new loggers before each test, and after every 60 keep what they left out of collections."""
    let_propagate(len(logging.root.manager.loggerDict))
    if next(started) % 60 == 0:
        keep_out_of_collections()


# As the backends spell themselves, whatever the command line does.
SPELLED = {name.casefold(): name for name in ("FA2", "FA3", "FA4", "cuDNN", "flex", "math", "cpu")}


# Not a backend of its own: FA2's second provider, which is source only and takes minutes to build.
FLASH_ATTN = "flash-attn"


def backends_of(config):
    """Return what `--backends` names, as it is written there."""
    return [name.strip() for name in config.getoption("--backends").split(",") if name.strip()]


@pytest.fixture
def flash_attn(request):
    """Leave a test of the package flash-attn to the runs that name it."""
    if FLASH_ATTN not in map(str.casefold, backends_of(request.config)):
        pytest.skip("about the package flash-attn, which this run doesn't name: --backends=FA2,flash-attn")


def pytest_generate_tests(metafunc):
    """Give `named` and `other` of GPU tests each backend of `--backends` that their markers leave in."""
    if metafunc.definition.get_closest_marker("gpu") is None:
        return
    given = [name for name in backends_of(metafunc.config) if name.casefold() != FLASH_ATTN]
    names = [SPELLED.get(name.casefold(), name) for name in given] or ["none"]
    slow, only = (metafunc.definition.get_closest_marker(name) for name in ("slow_for", "only_for"))
    for argument in {"named", "other"}.intersection(metafunc.fixturenames):
        values = [
            pytest.param(name, marks=[pytest.mark.slow] if slow and name in slow.args else [])
            for name in names
            if not given or only is None or name in only.args
        ]
        metafunc.parametrize(argument, values)


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(items):
    """Make combinations slow that `pairwise` or `each_value` doesn't leave to the fast tier.

    Each test marked gpu, and no other, begins with `gpu_is_there`: a fixture more takes time in every test.
    """
    groups = {}
    for item in items:
        if item.get_closest_marker("gpu"):
            item.fixturenames.insert(0, "gpu_is_there")
        for name, stay in (("pairwise", are_pairwise), ("each_value", have_each_value)):
            marker = item.get_closest_marker(name)
            if marker and item.get_closest_marker("slow") is None:
                groups.setdefault((item.nodeid.partition("[")[0], marker.args, stay), []).append(item)
    for (test, names, stay), group in groups.items():
        rows = [[item.callspec.params[name] for name in names] for item in group]
        for item, stays in zip(group, stay(rows, test), strict=True):
            if not stays:
                item.add_marker(pytest.mark.slow)


@pytest.fixture
def no_graph_trees(monkeypatch):
    """Hide that a test before has loaded CUDA-graph trees: where they are in use little is kept.

    Their module stays in sys.modules. torch 2.11 keeps objects of it without a reference of its own, which a
    second import lets go: freed memory, and a crash in a later test (pytorch/pytorch#173568).
    """
    for module in (layout, front, kvcache):
        monkeypatch.setattr(module, "GRAPH_TREES", "hidden by a test")


@pytest.fixture
def trust_offsets(monkeypatch):
    """Return a function that sets for how many seconds what is known of offsets is used."""
    module, before = call_cache.load(), offsets.TRUSTED

    def trust(seconds):
        monkeypatch.setattr(offsets, "TRUSTED", seconds)
        if module is not None:
            module.trust_offsets(seconds)

    yield trust
    trust(before)


# A registry of each test's own would build every plan anew; plans take cuDNN up to a second each.
plans_of_this_run = functools.cache(cudnn_backend.ExecutionPlans)


@pytest.fixture(
    params=[rounding.exact, lambda problem: rounding.shared(rounding.exact(problem))],
    ids=["exact plans", "shared plans"],
)
def plans_of_either_kind(request, gpu_is_there, monkeypatch):
    """Have cuDNN's packed calls run by exact plans, or by shared ones, whatever batch came first."""
    select_by(monkeypatch, registry.find("cuDNN").kernels().forward.args[0], request.param)


@pytest.fixture
def gpu_is_there(request, fresh_registry, wanted_routers, monkeypatch):
    """Fail a GPU test that can't mean anything here: it was asked for, so it isn't skipped."""
    if not torch.cuda.is_available():
        pytest.fail("a test marked gpu needs a CUDA GPU, and torch finds none here", pytrace=False)
    if {"named", "other"}.intersection(request.fixturenames) and not request.config.getoption("--backends"):
        pytest.fail("name the backends: pytest -m gpu --backends=FA2,FA4,cuDNN,math", pytrace=False)
    aten.ensure()  # alike for all: a test before may have taken the routers out
    monkeypatch.setattr(cudnn_backend, "ExecutionPlans", plans_of_this_run)


def pytest_collection_finish():
    """Take torch's modules and the tests out of garbage collections, and the tests' folders off the path.

    Each new registry would look for packages in all of these.
    """
    here = Path(__file__).parent
    sys.path[:] = [place for place in sys.path if here not in Path(place).parents]
    keep_out_of_collections()
    gc.enable()
    gc.set_threshold(50_000, 20, 20)  # tests that are about garbage collect it


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    """Stop at the first CUDA error: after one that lasts every test would fail for its sake."""
    if not (report.failed and "gpu" in report.keywords and torch.cuda.is_initialized()):
        return
    errors = [line.strip() for line in report.longreprtext.splitlines() if "CUDA error: " in line]
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        errors.insert(0, str(error).splitlines()[0])
    if errors:
        pytest.exit(f"{report.nodeid} ended in a CUDA error, and the run with it: {errors[0]}", 1)


@pytest.fixture(autouse=True, scope="session")
def locks_in_one_order():
    """Hold all tests to the one order of locks, whatever threads they start."""
    with pytest.MonkeyPatch.context() as patch:
        taken = lock_order.watch(patch)
        yield
    assert taken.against(locks.ORDER) == []


@functools.cache
def points_on(path, group):
    """Read the entry points below a path once: each new registry would read all installed packages."""
    return entry_points(group=group)


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch):
    """Give each test a new registry, and hold it to leaving the routers as they were."""
    for name in [name for name in os.environ if name.upper().startswith("ATTNREG_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ATTNREG_BUILD", "off")  # nor does a process that a test starts compile anything
    for name, value in (("_sources", None), ("_unreadable", None), ("_left_out", "")):
        monkeypatch.setattr(policy, name, value)
    monkeypatch.setattr(background, "_setting", ("", ""))
    for name, value in (("_active", False), ("_watchers", 0)):
        monkeypatch.setattr(policy, name, value)
    for name, value in (("_recordings", ()), ("_followed", None)):
        monkeypatch.setattr(trace, name, value)
    monkeypatch.setattr(registry, "_entries", None)
    monkeypatch.setattr(discovery, "entry_points", lambda group: points_on(tuple(sys.path), group))
    monkeypatch.setattr(registry, "_registrations", ())
    for name, value in (("_learned", {}), ("_keeps", False)):
        monkeypatch.setattr(adaptive, name, value)
    monkeypatch.setattr(counters, "_fallbacks", {})
    monkeypatch.setattr(counters, "_failures", {})
    # A table that comes with attnreg would order the backends of a GPU that it was measured on.
    monkeypatch.setattr(tables, "SHIPPED", tables.SHIPPED / "none")
    tables._read.cache_clear()
    registry.changed()
    bypassed.follow()  # as nothing asks for it, torch's functions are its own
    attnreg.reset_stats()
    log = logging.getLogger("attnreg")
    level = log.level
    yield
    if log.level != level:  # to set it empties the caches of all loggers
        log.setLevel(level)
    assert scope.current() is None, "the test left a use_backend scope open"
    tables._read.cache_clear()
    registry.changed()


# Compiled once for all processes of a run, and for those to come; `make clean` takes it away. What another
# compiler makes, or one with other flags, lies beside it.
BUILT = Path(__file__).parent.parent / ".pytest_cache" / "compiled"
if os.environ.get("CXX"):
    BUILT = BUILT.with_name(f"compiled-{hashlib.sha256(os.environ['CXX'].encode()).hexdigest()[:8]}")


@pytest.fixture(scope="session")
def compiled_libraries():
    """Return a function that compiles libraries, all at once on as many cores, unless they lie there."""
    try:
        libraries.find()
    except BuildError as error:
        pytest.skip(f"nothing can be compiled: {error}")

    def files_of(wanted):
        BUILT.mkdir(parents=True, exist_ok=True)
        BUILT.chmod(0o700)
        with (BUILT / "lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
            fcntl.flock(lock, fcntl.LOCK_EX)
            patch.setattr(caches, "folder", lambda purpose: BUILT)
            building.target.cache_clear()
            files = {library: building.target(library) for library in wanted}
            missing = [library for library, file in files.items() if not file.is_file()]
            with ThreadPoolExecutor() as threads:
                list(threads.map(libraries.compile_library, missing))  # raises what one of them does
            building.target.cache_clear()
            return files

    return files_of


@pytest.fixture(scope="session")
def built_files(compiled_libraries):
    """Compile what attnreg compiles."""
    return compiled_libraries(building.LIBRARIES)


@pytest.fixture(scope="session")
def built_routers(built_files):
    """Compile the routers, and return the file."""
    return built_files[building.CALL_CACHE]


@pytest.fixture(scope="session")
def built_cpu_kernel(built_files):
    """Compile the kernel of the cpu backend, and return the file."""
    return built_files[building.CPU_KERNEL]


@pytest.fixture(scope="session")
def cpu_kernel(built_cpu_kernel):
    """Return the compiled kernel of the cpu backend."""
    return cpu_compiled.CompiledKernel.of(ctypes.CDLL(str(built_cpu_kernel)))


@pytest.fixture(scope="session", autouse=True)
def wanted_cpu_kernel(request):
    """Have the cpu backend use its compiled kernel only in runs about what is compiled."""
    compiled = request.config.getoption("--routers") == "compiled"
    found = request.getfixturevalue("cpu_kernel") if compiled else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_compiled, "load", lambda: found)
        yield


def others_are_installed(kind):
    """Return whether a test before has left routers of the other kind: `ensure` keeps what is installed."""
    return aten.installed() and call_cache._has_routers != (kind == "compiled")


@pytest.fixture
def compiled_routers(built_routers, monkeypatch):
    """Have the routers that are installed in a test use the compiled call cache."""
    monkeypatch.setattr(building, "built", lambda: built_routers)
    monkeypatch.setattr(call_cache, "_wanted", lambda: "compiled")
    call_cache.forget()
    if others_are_installed("compiled"):
        aten.restore()
        aten.ensure()
    yield call_cache
    call_cache.forget()


@pytest.fixture(autouse=True)
def wanted_routers(request, monkeypatch):
    """Have routers be the ones that the command line names, whatever was built on this machine."""
    if {"compiled_routers", "unbuilt"}.intersection(request.fixturenames):
        return
    if request.config.getoption("--routers") == "compiled" and "python_routers" not in request.fixturenames:
        request.getfixturevalue("compiled_routers")
    else:
        monkeypatch.setattr(call_cache, "_wanted", lambda: "python")
        monkeypatch.setattr(building, "built", lambda: None)
        call_cache.forget()
        if others_are_installed("python"):
            aten.restore()


@pytest.fixture
def python_routers(monkeypatch):
    """Have every call of a test planned in Python, whatever the command line says."""
    aten.restore()
    monkeypatch.setattr(call_cache, "_wanted", lambda: "python")
    call_cache.forget()
    yield
    aten.restore()
    call_cache.forget()


@pytest.fixture
def one_thread():
    """Leave the other cores alone: threads that wait for each other take longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def references_once(monkeypatch):
    """Have tests of the same values share their references."""
    monkeypatch.setattr(rule, "attention", references.attention)


@pytest.fixture
def few_lengths(monkeypatch):
    """Have each check of the kit draw two other lengths: test_length_classes.py draws thousands."""
    monkeypatch.setattr(kit, "difference", functools.partial(classes.difference, count=2))


@pytest.fixture
def no_other_lengths(monkeypatch):
    """Have the kit compare no lengths: test_length_classes.py does that for attnreg's own backends."""
    monkeypatch.setattr(kit, "difference", functools.partial(classes.difference, count=0))


@pytest.fixture
def hasty():
    """Switch threads as often as can be, so that a race shows itself."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def routers():
    """Install the routers for a test, and restore torch's ops after it."""
    was_installed = aten.installed()
    aten.ensure()
    yield
    if not was_installed:
        aten.restore()


@pytest.fixture
def cpu_where_compiled(routers):
    """Have the cpu backend run what nothing else is asked for, and Dynamo begin and end without graphs."""
    torch._dynamo.reset()
    with attnreg.register_backend("cpu"):
        yield
    torch._dynamo.reset()


@dataclass
class Recorder:
    """A backend that runs the reference and keeps what it was called with."""

    backend: attnreg.Backend | None = None
    forwards: list = field(default_factory=list)
    backwards: list = field(default_factory=list)

    def forward(self, q, k, v, call):
        self.forwards.append((q, k, v, call))
        return math_backend.BACKEND.load().forward(q, k, v, call)

    def backward(self, *arguments):
        self.backwards.append(arguments)
        return math_backend.BACKEND.load().backward(*arguments)


SWITCHES = (
    "varlen", "gqa", "causal", "window", "bias", "alibi", "seqused_k", "any_scale", "grad_lse",
    "deterministic", "capture",
    *(row.field for row in NUMBERS if row.argument and hasattr(attnreg.Capabilities, row.field)),
)  # fmt: skip
EVERYTHING = {
    "devices": ("cpu",),
    "dtypes": ("float16", "bfloat16", "float32", "float64"),
    "head_dim_v": attnreg.Range(0, 4096),
    "page_size": attnreg.Range(1, 4096),
    **dict.fromkeys(SWITCHES, True),
}
# What `fake` takes for the backend itself, besides limits.
OPTIONS = {
    *("unavailable", "version", "refuses", "cuts", "install", "priority"),
    *("experimental", "stands_in", "compiles"),
}


@pytest.fixture
def fake():
    """Make a fake backend: `fake("name", causal=False, ...)`; runs the reference, records its calls."""

    def make(name="fake", *, backward=True, load=None, **limits):
        recorder = Recorder()
        # Known issues of a backend of that name are taken for its own while its version is unknown.
        options = {"version": lambda: "1.0"}
        options |= {key: limits.pop(key) for key in OPTIONS & limits.keys()}
        capabilities = attnreg.Capabilities(**{**EVERYTHING, **limits})
        kernels = attnreg.Kernels(recorder.forward, recorder.backward if backward else None)
        recorder.backend = attnreg.Backend(
            name=name,
            forward=capabilities,
            backward=capabilities if backward else None,
            load=load or (lambda: kernels),
            **options,
        )
        return recorder

    return make


@pytest.fixture
def decided_alone(monkeypatch):
    """Return the specs that are decided about in full without a plan, as they come."""
    specs, decisions = [], calls.decisions
    monkeypatch.setattr(calls, "decisions", lambda spec, way: specs.append(spec) or decisions(spec, way))
    return specs


@pytest.fixture
def ran():
    """Return what ran since the last call: backend name to (forward, backward) counts."""

    def read():
        calls = counters.call_counts()
        attnreg.reset_stats()
        return {name: (n["forward"], n["backward"]) for name, n in calls.items()}

    return read


@pytest.fixture
def packed():
    """Make packed inputs: query, key, value that need gradients, and int32 offsets."""

    def make(
        lengths_q, lengths_k=None, heads=4, heads_k=None, dim=16, dtype=torch.float32, grad=True, seed=0
    ):
        lengths_k = lengths_q if lengths_k is None else lengths_k
        generator = torch.Generator().manual_seed(seed)

        def tokens(lengths, count):
            return torch.randn(sum(lengths), count, dim, generator=generator, dtype=torch.float64).to(dtype)

        counts = heads, heads_k or heads, heads_k or heads
        inputs = [tokens(*side) for side in zip((lengths_q, lengths_k, lengths_k), counts, strict=True)]
        offsets = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k)]
        return (
            *(x.requires_grad_(grad) for x in inputs),
            *offsets,
            max(lengths_q, default=0),
            max(lengths_k, default=0),
        )

    return make


@pytest.fixture(scope="session")
def inductor():
    """Name the compiler that torch.compile is tested with: Inductor, where what it writes can be built.

    For a CPU that takes a C++ compiler, and no space in the path of the torch that it links.
    """
    buildable = shutil.which(os.environ.get("CXX", "g++")) and " " not in torch.__file__
    return "inductor" if buildable else "aot_eager"

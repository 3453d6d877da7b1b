"""Promises of `locks.ORDER`: no two threads wait for each other, whatever they do."""

import builtins
import contextlib
import functools
import importlib
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.lock_order import Taken, Watched, watch
from support.processes import forked

import attnreg
from attnreg import flash_attn
from attnreg.backends import math
from attnreg.core import registry
from attnreg.core.policy import current as policy
from attnreg.core.registry.entry import Entry
from attnreg.core.registry.loading import PAUSE
from attnreg.core.torchlib import locks
from attnreg.errors import RegistrationError

ROOT = Path(attnreg.__file__).parent
LOADING = "core.registry.loading.alone"  # a block, of each backend
OFFSETS = torch.tensor([0, 3, 8], dtype=torch.int32)


def places():
    """Return the modules and names of all locks, as the source has them."""
    for file in ROOT.rglob("*.py"):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for name in re.findall(r"(\w+) = (?:locks\.)?open_after_fork\(", file.read_text()):
            yield f"{module}.{name}"


def test_every_lock_has_its_place_in_the_order():
    assert sorted([*places(), LOADING]) == sorted(locks.ORDER)


@pytest.fixture
def taken(monkeypatch):
    """Watch all locks; returns what is seen."""
    return watch(monkeypatch)


def test_two_locks_that_are_acquired_in_both_orders_are_seen():
    taken = Taken()
    first, second = (Watched(name, threading.RLock(), taken) for name in ("first", "second"))
    with first, second, first:
        pass
    with contextlib.suppress(ZeroDivisionError), second:
        raise ZeroDivisionError
    assert taken.pairs == {("first", "second"), ("second", "first")}
    taken.pairs.clear()
    with first, second:
        pass
    assert taken.against(("first", "second")) == []
    assert taken.against(("second", "first")) == [("first", "second")]


class Waiting:
    """A backend whose loading calls attention."""

    def __init__(self):
        self.loads = 0
        self.backend = attnreg.Backend(
            name="waiting", forward=math.EVERYTHING, backward=math.EVERYTHING, load=self.load
        )

    def load(self):
        self.loads += 1
        with attnreg.use_backend("math"):
            attend()
        return math.BACKEND.load()


def attend(length=8):
    inputs = [torch.randn(length, 2, 16, requires_grad=True) for _ in range(3)]
    dense = [x[None].transpose(1, 2) for x in inputs]
    F.scaled_dot_product_attention(*dense).sum().backward()
    offsets = torch.tensor([0, 3, length], dtype=torch.int32)
    lengths = offsets, offsets, length, length
    attnreg.varlen_attn(*inputs, *lengths).sum().backward()
    flash_attn.flash_attn_varlen_func(*inputs, *lengths, deterministic=True).sum().backward()


def test_whatever_a_program_does_it_takes_locks_in_one_order(taken, routers, tmp_path, monkeypatch):
    waiting = Waiting()
    with attnreg.register_backend("math"), attnreg.use_backend("math"):
        attend()
        attnreg.configure({"policy": "order"})
        attnreg.reload()
        attend(9)
    with attnreg.record(tmp_path / "calls.jsonl"), attnreg.register_backend(waiting.backend):
        attend(10)
        assert attnreg.explain(*torch.randn(3, 1, 2, 8, 16)).backend == "waiting"
    assert waiting.loads == 1
    monkeypatch.setenv("ATTNREG_RECORD", str(tmp_path / "others.jsonl"))
    attnreg.reload()
    attend(11)
    attnreg.configure({"policy": "adaptive"})
    attend(12)
    with attnreg.register_backend(Waiting().backend):
        attend(13)
    monkeypatch.delenv("ATTNREG_RECORD")
    attnreg.reload()
    attend(14)
    attnreg.uninstall()
    attnreg.install()
    assert attnreg.stats().calls
    assert (LOADING, "core.registry.lock") in taken.pairs
    assert ("core.dispatch.trace._writing", "core.dispatch.trace._lock") in taken.pairs
    assert taken.against(locks.ORDER) == []


def in_thread(run):
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def ended(thread):
    thread.join(20)
    return not thread.is_alive()


def test_a_signal_handler_may_use_attnreg_whatever_lock_its_thread_holds():
    """A lock that isn't an RLock would be waited for by the thread that holds it."""
    kinds = {}
    for file in ROOT.rglob("*.py"):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for name, kind in re.findall(r"(\w+) = (?:locks\.)?open_after_fork\((.*)\)", file.read_text()):
            kinds[f"{module}.{name}"] = kind
    assert {*kinds} >= {
        "core.registry.lock",
        "core.dispatch.counters._lock",
        "core.registry.loading._changed",
    }
    assert {name for name, kind in kinds.items() if "RLock()" not in kind} == set()


def test_while_a_backend_loads_other_threads_call_the_others():
    """It may import a module that another thread is importing, whose body calls attention."""
    loading, over, found = threading.Event(), threading.Event(), []

    def load():
        loading.set()
        found.append(over.wait(20))
        return math.BACKEND.load()

    def other():
        loading.wait(20)
        attend(15)  # nothing of that length was decided before
        over.set()

    slow = attnreg.Backend(name="slow", forward=math.EVERYTHING, backward=math.EVERYTHING, load=load)
    with attnreg.register_backend("math"):
        attend()
        thread = in_thread(other)
        attnreg.register_backend(slow).remove()
        assert ended(thread)
    assert found == [True]


def backend_of(name, load):
    return attnreg.Backend(name=name, forward=math.EVERYTHING, backward=math.EVERYTHING, load=load)


def test_while_a_backend_loads_others_are_looked_for_and_loaded():
    loading, over, waited = threading.Event(), threading.Event(), []

    def load():
        loading.set()
        waited.append(over.wait(20))
        return math.BACKEND.load()

    slow = Entry("slow", "a test", backend_of("slow", load))
    thread = in_thread(slow.kernels)
    loading.wait(20)
    other = Entry("other", "a test", backend_of("other", math.BACKEND.load))
    assert other.unavailable() == ""
    assert other.kernels() == math.BACKEND.load()
    over.set()
    assert ended(thread)
    assert waited == [True]


def outcomes(*functions):
    """Return what functions return or raise, each in a thread of its own."""
    with ThreadPoolExecutor(len(functions)) as pool:
        running = [pool.submit(function) for function in functions]
        return [future.exception(20) or future.result() for future in running]


def test_backends_that_wait_for_each_other_are_an_error_that_says_so():
    barrier = threading.Barrier(2)

    def load(other):
        barrier.wait(20)
        entries[other].kernels()
        return math.BACKEND.load()

    entries = {
        name: Entry(name, "a test", backend_of(name, functools.partial(load, other)))
        for name, other in (("one", "two"), ("two", "one"))
    }
    errors = outcomes(*(entry.kernels for entry in entries.values()))
    (error,) = [error for error in errors if isinstance(error.__cause__, RegistrationError)]
    first = str(error).split()[0]
    second = "two" if first == "one" else "one"
    assert str(error) == (
        f"{first} failed to load: RegistrationError: {second} is needed here, and would never be loaded: "
        f"this thread waits for {second}, which another thread loads; that thread waits for {first}, which "
        "this thread loads; expected that a module calls no attention while it is imported, nor load() on a "
        "backend that another thread loads"
    )


@pytest.mark.parametrize("first", ["the import", "the load"])
def test_a_module_that_waits_for_a_backend_whose_load_imports_it_is_an_error(tmp_path, monkeypatch, first):
    """Python finds circles of modules alone."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"waits_for_a_backend_{first[4:]}"
    (tmp_path / f"{name}.py").write_text("import builtins\nbuiltins.needs_a_backend()\n")
    loading, importing = threading.Event(), threading.Event()

    def load():
        loading.set()
        importing.wait(20)
        if first == "the import":  # which waits for the backend by now
            time.sleep(2 * PAUSE)
        importlib.import_module(name)
        return math.BACKEND.load()

    def need():
        if threading.get_ident() != loader:
            importing.set()
            if first == "the load":
                time.sleep(2 * PAUSE)
            entry.kernels()

    def run():
        nonlocal loader
        loader = threading.get_ident()
        return entry.kernels()

    loader = 0
    monkeypatch.setattr(builtins, "needs_a_backend", need, raising=False)
    entry = Entry("mine", "a test", backend_of("mine", load))
    kernels, error = outcomes(run, lambda: loading.wait(20) and importlib.import_module(name))
    assert kernels == math.BACKEND.load()
    assert isinstance(error, RegistrationError)
    assert str(error).startswith(
        "mine is needed here, and would never be loaded: this thread waits for mine, which another thread "
        f"loads; that thread waits for the module {name}, which this thread loads; expected that a "
        "module calls no attention while it is imported"
    )


def test_backends_whose_packages_import_each_other_load_in_two_threads(tmp_path, monkeypatch):
    """Python gives one of the threads half a module."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, other in (("half_a", "half_b"), ("half_b", "half_a")):
        code = f"import builtins\nbuiltins.pass_once()\nimport {other}\nvalue = 1\n{other}.value\n"
        (tmp_path / f"{name}.py").write_text(
            code if name == "half_a" else code.replace(f"{other}.value\n", "")
        )
    barrier = threading.Barrier(2)

    def pass_once():
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait(5)
            barrier.abort()

    monkeypatch.setattr(builtins, "pass_once", pass_once, raising=False)

    def load(name):
        importlib.import_module(name).value  # noqa: B018
        return math.BACKEND.load()

    entries = [
        Entry(name, "a test", backend_of(name, functools.partial(load, name)))
        for name in ("half_a", "half_b")
    ]
    assert outcomes(*(entry.kernels for entry in entries)) == [math.BACKEND.load()] * 2


@pytest.mark.parametrize("verb", ["a first call", "configure", "reload"])
def test_no_module_of_a_backend_is_imported_behind_the_registrys_lock(monkeypatch, verb):
    """Another thread may be importing it, and waits for that lock to register a backend."""
    monkeypatch.setenv("ATTNREG_BACKEND", "math")
    monkeypatch.setattr(registry, "_entries", None)
    real, found = registry.discover, []

    def discover():
        thread = in_thread(lambda: registry.lock.acquire() and registry.lock.release())
        found.append(ended(thread))
        return real()

    monkeypatch.setattr(registry, "discover", discover)
    verbs = {"a first call": policy.sources, "configure": lambda: attnreg.configure({})}
    verbs.get(verb, attnreg.reload)()
    assert found == [True]


THREADS = """
import contextlib, faulthandler, random, sys, threading, time
from pathlib import Path
import torch, torch.nn.functional as F
import attnreg
from attnreg.backends import math
from attnreg.flash_attn import flash_attn_varlen_func
from attnreg.core.torchlib import building, captured

built, routers, seconds, folder = sys.argv[1:]
building.built = lambda: Path(built)
attnreg.install()
assert captured.call_cache_in_use is (routers == "compiled")
faulthandler.dump_traceback_later(60 + 2 * float(seconds), exit=True)
errors, end = [], time.monotonic() + float(seconds)
kernels, own = math.BACKEND.load(), threading.local()

def noting(name, kernel):
    def run(*arguments):
        own.ran = (*getattr(own, "ran", ()), name)
        return kernel(*arguments)
    return run

def backend(name):
    forward, backward = (noting(f"{name} {kind}", getattr(kernels, kind)) for kind in ("forward", "backward"))
    return attnreg.Backend(
        name=name, forward=math.EVERYTHING, backward=math.EVERYTHING,
        load=lambda: attnreg.Kernels(forward, backward),
    )

mine = [attnreg.register_backend(backend(name)).backend for name in ("mine", "yours")]

class Calls:
    # Torch can't remove a kernel that another thread runs: `uninstall` waits for all calls, and they for it.
    def __init__(self):
        self.running, self.changed = 0, threading.Condition()

    def __enter__(self):
        with self.changed:
            self.running += 1

    def __exit__(self, *_):
        with self.changed:
            self.running -= 1
            self.changed.notify_all()

    @contextlib.contextmanager
    def none(self):
        with self.changed:
            self.changed.wait_for(lambda: not self.running)
            yield

calls = Calls()

def dense(inputs):
    return F.scaled_dot_product_attention(*(x[None].transpose(1, 2) for x in inputs))

def packed(inputs, attend=attnreg.varlen_attn, **options):
    length = len(inputs[0])
    offsets = torch.tensor([0, 1, length], dtype=torch.int32)
    return attend(*inputs, offsets, offsets, length, length, **options)

def qkv(length):
    return [torch.randn(length, 2, 8, requires_grad=True) for _ in range(3)]

def attend():
    inputs = qkv(3 + random.randrange(40))
    with calls:
        out = packed(inputs)
        dense(inputs).sum().backward()
        out.sum().backward()
        packed(inputs, flash_attn_varlen_func, deterministic=True).sum().backward()

def choose():
    name, inputs = random.choice(mine), qkv(3 + random.randrange(9))
    for front, options in ((dense, {}), (packed, {}), (packed, {"backend": name})):
        with calls:
            own.ran = ()
            with attnreg.use_backend(random.choice(mine) if options else name):
                out = front(inputs, **options)
            out.sum().backward()
            assert own.ran == (f"{name} forward", f"{name} backward"), (name, front, options, own.ran)

def reinstall():
    with calls.none():
        attnreg.uninstall()
        attnreg.install()

def record():
    with attnreg.record(Path(folder, f"{threading.get_ident()}.jsonl")):
        time.sleep(0.01)

def build():  # the compiler is a program that fails
    try:
        building.build(building.CALL_CACHE)
    except attnreg.BuildError:
        building.status(building.CPU_KERNEL)
    else:
        raise AssertionError("it was compiled")

verbs = {
    "call": attend, "choose": choose, "choose, too": choose,
    "configure": lambda: attnreg.configure({"policy": random.choice(["order", "adaptive"])}),
    "reload": attnreg.reload,
    "register": lambda: attnreg.register_backend("math").remove(),
    "register one's own": lambda: attnreg.register_backend(backend("another")).remove(),
    "explain": lambda: (attnreg.stats(), attnreg.explain(*torch.randn(3, 1, 2, 8, 16))),
    "reset": attnreg.reset_stats, "install": reinstall, "record": record, "build": build,
}
rounds = dict.fromkeys(verbs, 0)

def run(name):
    try:
        while not errors and (time.monotonic() < end or not rounds[name]):
            verbs[name]()
            rounds[name] += 1
    except BaseException as error:
        errors.append(f"{name}: {error!r}")

threads = [threading.Thread(target=run, args=(name,)) for name in verbs]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not torch.are_deterministic_algorithms_enabled()
print(errors)
"""


@pytest.mark.parametrize("seconds", [0.5, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("routers", [pytest.param("python", marks=pytest.mark.slow), "compiled"])
def test_threads_that_set_and_call_everything_wait_for_none_for_ever(routers, seconds, request, tmp_path):
    """And each backward runs on the backend of its forward's block."""
    built = request.getfixturevalue("built_routers") if routers == "compiled" else ""
    variables = {} if built else {"ATTNREG_ROUTERS": "python"}
    variables |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": "/bin/false"}
    run = forked(THREADS, str(built), routers, seconds, tmp_path, **variables)
    assert (run.returncode, run.stdout, run.stderr[-4000:]) == (0, "[]\n", "")

"""Promises across threads, forks, new processes and pickles."""

import asyncio
import contextlib
import copy
import dataclasses
import functools
import gc
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from support.processes import forked, python

import attnreg
from attnreg import errors
from attnreg.core import registry
from attnreg.core.dispatch import scope
from attnreg.core.dispatch.counters import Fallback
from attnreg.core.selection.decision import Policy, Preference
from attnreg.core.settings.config import LoadedSettings, Settings, load
from attnreg.integrations.shared_mask import shared_mask
from attnreg.parallel.estimates import Rates

SPEC = attnreg.AttentionSpec(
    device=attnreg.Device("cuda", (9, 0), 1, "NVIDIA H200"), dtype="bf16", batch=2, max_q=16, max_k=16,
    heads_q=4, heads_k=2, head_dim=64, head_dim_v=64, window=(-1, 0), needs_backward=True,
)  # fmt: skip


LAYOUT = attnreg.spread_documents([0, 4, 10], 2)

# Threads


def test_calls_are_right_whatever_another_thread_registers_and_removes(routers, fake, hasty, ran):
    mine = fake("mine")
    inputs = torch.randn(3, 1, 2, 16, 8, requires_grad=True).unbind()
    expected = F.scaled_dot_product_attention(*inputs).detach()
    expected_grads = torch.autograd.grad(F.scaled_dot_product_attention(*inputs).sum(), inputs)
    over = threading.Event()

    def call():
        calls = 0
        while not over.is_set() or not calls:
            out = F.scaled_dot_product_attention(*inputs)
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(torch.autograd.grad(out.sum(), inputs), expected_grads)
            calls += 1
        return calls

    def register():
        try:
            for turn in range(300):
                attnreg.register_backend(mine.backend if turn % 2 else "math").remove()
        finally:
            over.set()

    ran()
    with attnreg.register_backend("cpu"), ThreadPoolExecutor(4) as pool:
        callers = [pool.submit(call) for _ in range(3)]
        pool.submit(register).result()
        calls = sum(caller.result() for caller in callers)
    assert attnreg.list_backends().count("mine") == 0
    counted = ran()
    assert [sum(counts) for counts in zip(*counted.values(), strict=True)] == [calls, calls]
    assert set(counted) <= {"mine", "math", "cpu"}


def test_one_scope_may_be_open_in_many_threads_and_inside_itself(hasty):
    opened = attnreg.use_backend("math")
    barrier = threading.Barrier(8)

    @opened
    def nested():
        with opened:
            assert scope.current().preference.source == "use_backend('math')"
        assert scope.current().preference.source == "use_backend('math')"

    def run(_):
        barrier.wait()
        for _ in range(200):
            assert scope.current() is None
            nested()
        return scope.current()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(8))) == [None] * 8


def test_a_scope_holds_in_its_own_task_only():
    async def inside(name):
        with attnreg.use_backend(name):
            for _ in range(5):
                await asyncio.sleep(0)
                assert scope.current().preference.names == (name,)
        return scope.current()

    async def both():
        return await asyncio.gather(inside("math"), inside("cpu"))

    assert asyncio.run(both()) == [None, None]


def test_a_scope_decorates_only_what_runs_while_it_is_open():
    @attnreg.use_backend("math")
    def inside():
        return scope.current().preference.names

    async def later():
        pytest.fail("it runs when it is awaited, after the scope")

    def generator():
        yield scope.current()

    async def generator_of_tasks():
        yield scope.current()

    assert (inside(), scope.current()) == (("math",), None)
    for function in (later, generator, generator_of_tasks, functools.partial(generator)):
        name = getattr(function, "__name__", "partial")
        with pytest.raises(
            errors.InvalidInputError, match=rf"got .*{name}.*, whose body runs after the call"
        ):
            attnreg.use_backend("math")(function)


class Names:
    """Callables of every sort, each of which returns the names of the choice in force."""

    def __call__(self):
        return scope.current().preference.names

    def method(self, *_):
        return self()

    @attnreg.use_backend("math")
    @staticmethod
    def by_static_method():
        return Names()()

    @attnreg.use_backend("math")
    @classmethod
    def by_class_method(cls):
        return cls()()

    @property
    @attnreg.use_backend("math")
    def by_property(self):
        return self()


@pytest.mark.parametrize(
    "function",
    [Names(), Names().method, functools.partial(Names.method, Names()), lambda: Names()()],
    ids=["object", "method", "partial", "lambda"],
)
def test_a_scope_decorates_whatever_runs_at_once(function):
    assert attnreg.use_backend("math")(function)() == ("math",)
    assert scope.current() is None


def test_a_scope_decorates_methods_of_a_class_of_every_sort():
    assert Names().by_static_method() == Names.by_static_method() == ("math",)
    assert Names().by_class_method() == Names.by_class_method() == Names().by_property == ("math",)


class Awaited:
    async def __call__(self):
        pytest.fail("it runs when it is awaited, after the scope")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Names, "got the class Names, whose methods run after it is called, expected a function"),
        (property(Names()), "got <property object at .*> to decorate, expected a function: write @.* below"),
        (functools.partialmethod(Names.method), "got functools.partialmethod.* to decorate, expected a func"),
        (None, "got None to decorate, expected a function"),
        (Awaited(), "got <.*Awaited object at .*>, whose body runs after the call"),
    ],
    ids=["class", "property", "partialmethod", "nothing", "object to await"],
)
@pytest.mark.parametrize("block", [lambda: attnreg.use_backend("math"), lambda: attnreg.record("x")])
def test_a_block_refuses_to_decorate_what_would_run_outside_of_it(value, said, block):
    with pytest.raises(errors.InvalidInputError, match=rf"^(use_backend|record): {said}"):
        block()(value)


@pytest.mark.parametrize(
    ("function", "returned"),
    [
        (lambda: Awaited()(), "<coroutine object"),
        (lambda: (one for one in ()), "<generator object"),
        (contextlib.contextmanager(lambda: iter(())), "<.*_GeneratorContextManager object"),
        (contextlib.asynccontextmanager(lambda: None), "<.*_AsyncGeneratorContextManager object"),
    ],
    ids=["coroutine", "generator", "context manager", "asynchronous context manager"],
)
def test_a_decorated_function_whose_body_runs_later_is_an_error_when_it_is_called(
    function, returned, recwarn
):
    decorated = attnreg.use_backend("math")(function)
    with pytest.raises(errors.InvalidInputError, match=rf"returned {returned}.*>, whose body runs after"):
        decorated()
    gc.collect()
    assert scope.current() is None and not [str(one.message) for one in recwarn]


# A thread imports the registry, whose code waits until another thread has imported a module of it.
TWO_IMPORTERS = """
import sys, threading
from importlib import import_module
from importlib.machinery import PathFinder
PACKAGE = "attnreg.core.registry"
begun, done = threading.Event(), threading.Event()

class Holding:
    def find_spec(self, name, path, target=None):
        if name != PACKAGE:
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def wait_and_execute(module):
            begun.set()
            done.wait(2)
            execute(module)
        spec.loader.exec_module = wait_and_execute
        return spec

sys.meta_path.insert(0, Holding())
first = threading.Thread(target=import_module, args=(PACKAGE,))
first.start()
assert begun.wait(30)
import_module(PACKAGE + ".entry")
done.set()
first.join()
import torch, torch.nn.functional as F, attnreg
attnreg.register_backend("math")
F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 8, 16))
print(attnreg.stats().calls)
"""


def test_threads_may_import_the_registry_and_a_module_of_it_at_the_same_time():
    run = forked(TWO_IMPORTERS)
    assert (run.stdout, run.stderr) == ("{'math': {'forward': 1, 'backward': 0}}\n", "")


# Forks

FORK = """
import os, signal, sys, threading, warnings
import torch, torch.nn.functional as F
import attnreg
from attnreg.core import registry
from attnreg.core.dispatch import counters, scope
from attnreg.core.registry import loading
from attnreg.core.torchlib import captured

names = ("registry.lock", "counters._lock", "loading._changed", "captured._lock", "scope._lock")
locks = [registry.lock, counters._lock, loading._changed, captured._lock, scope._lock]
attnreg.install()
inputs = torch.randn(3, 1, 2, 8, 16)
expected = F.scaled_dot_product_attention(*inputs)
attnreg.reset_stats()
held, over = threading.Event(), threading.Event()
loads = registry.find("cpu")

def hold():
    loading._loaders[loads], loads._kernels = threading.get_ident(), None
    for lock in locks:
        lock.acquire()
    held.set()
    over.wait()
    for lock in locks:
        lock.release()

thread = threading.Thread(target=hold, daemon=True)
thread.start()
held.wait()
# Python 3.12 and later warn of any fork beside a thread, which is what this is about.
warnings.filterwarnings("ignore", "This process", DeprecationWarning)
child = os.fork()
if not child:
    signal.alarm(60)  # ends a child that waits for ever
    assert [name for name, lock in zip(names, locks) if not lock.acquire(blocking=False)] == []
    for lock in locks:
        lock.release()
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    packed = inputs[:, 0].transpose(1, 2)
    with attnreg.register_backend("math"):
        torch.testing.assert_close(F.scaled_dot_product_attention(*inputs), expected)
        attnreg.varlen_attn(*packed, offsets, offsets, 8, 8)
    with attnreg.use_backend("math"):
        F.scaled_dot_product_attention(*inputs)
    loads.kernels()
    print(attnreg.stats().calls, flush=True)
    os._exit(0)
status = os.waitpid(child, 0)[1]
over.set()
thread.join()
print(os.waitstatus_to_exitcode(status), attnreg.stats().calls)
"""


def test_a_child_forked_while_another_thread_holds_every_lock_can_call_attention():
    run = forked(FORK)
    assert run.stderr == ""
    assert run.stdout.splitlines() == ["{'math': {'forward': 3, 'backward': 0}}", "0 {}"]


OPENMP = """
import os, signal, sys, torch, torch.nn.functional as F, attnreg
torch.set_num_threads(2)
inputs = torch.randn(3, 1, 4, 512, 32)
attnreg.register_backend(sys.argv[1])
expected = F.scaled_dot_product_attention(*inputs)
if not (child := os.fork()):
    signal.alarm(60)  # ends a child that waits for ever
    torch.set_num_threads(1)
    torch.testing.assert_close(F.scaled_dot_product_attention(*inputs), expected)
    print(attnreg.stats().calls[sys.argv[1]]["forward"], flush=True)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_of_a_process_with_openmp_threads_can_call_attention_with_one():
    """With several it would hang, as it does with torch alone."""
    run = forked(OPENMP, "cpu")
    assert (run.stdout, run.stderr) == ("2\n0\n", "")  # with its parent's


# New processes

WORKER = """
import multiprocessing
import torch, torch.nn.functional as F

def work(results):
    F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 8, 16))
    import attnreg
    results.put(attnreg.stats().calls)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    worker = context.Process(target=work, args=(results,))
    worker.start()
    print(results.get())
    worker.join()
    work(results)
    print(results.get())
"""


@pytest.mark.slow
def test_a_spawned_worker_runs_the_backend_that_the_environment_asks_for_as_its_parent_does(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(WORKER)
    code = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    run = forked(code, ATTNREG_BACKEND="math")
    assert run.stderr == ""
    assert run.stdout.splitlines() == ["{'math': {'forward': 1, 'backward': 0}}"] * 2


def test_a_process_may_end_with_everything_registered_and_says_nothing():
    """Also while a thread is in a module that has a backend."""
    run = python(
        "-X", "dev", "-c",
        "import threading, time, torch, attnreg, torch.nn.functional as F\n"
        "class Module(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        time.sleep(0.001)\n"
        "        return x\n"
        "model = torch.nn.Sequential(Module())\n"
        "attnreg.assign(model, {'0': 'math'})\n"
        "def work():\n"
        "    while True:\n"
        "        model[0](None)\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "handle = attnreg.register_backend('math')\n"
        "scope = attnreg.use_backend('math')\n"
        "scope.__enter__()\n"
        "inputs = torch.randn(3, 1, 2, 8, 16, requires_grad=True).unbind()\n"
        "out = F.scaled_dot_product_attention(*inputs)\n"
        "out.sum().backward()\n"
        "out = F.scaled_dot_product_attention(*inputs)\n"
        "threading.Thread(target=F.scaled_dot_product_attention, args=inputs).start()\n"
        "attnreg.configure({'log_level': 'debug'})\n",
    )  # fmt: skip
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


LAST_OF_ALL = """
import atexit

@atexit.register
def show():
    F.scaled_dot_product_attention(x, x, x)
    print(attnreg.stats().calls, attnreg.stats().overridden)

import torch
import torch.nn.functional as F
import attnreg

attnreg.register_backend("math")
x = torch.randn(1, 2, 8, 16)
F.scaled_dot_product_attention(x, x, x)
atexit.register(show)
"""


# Most machines have built nothing, so that these are the same.
@pytest.mark.parametrize(
    "routers", ["", pytest.param("python", marks=pytest.mark.slow)], ids=["whatever is built", "python"]
)
def test_at_the_end_of_a_process_torchs_kernels_are_no_overrides(routers):
    """Functions that run after the routers were removed, as of a program that registers them first."""
    run = forked(LAST_OF_ALL, ATTNREG_ROUTERS=routers)
    assert run.stderr == ""
    assert {line.partition("}} ")[2] for line in run.stdout.splitlines()} == {"()"}
    assert run.stdout.count("'math': {'forward':") == 2


# Pickles

# Each error, and the built-in that a caller would expect it to be.
ERRORS = [
    (errors.UnknownBackendError("no backend is named 'FA5'"), LookupError),
    (errors.BackendUnavailableError("FA4 can't load here"), RuntimeError),
    (errors.UnsupportedInputError("no attention backend", {"FA4": ("too old", "dtype")}), RuntimeError),
    (errors.InvalidInputError("heads: got 3"), ValueError),
    (errors.ConfigError("a.toml:1: strict: got 2"), ValueError),
    (errors.RegistrationError("routers can't be installed"), RuntimeError),
    (errors.BuildError("the routers can't be compiled"), RuntimeError),
    (errors.RanksDifferError("rank 1 on a chooses kernels by policy"), RuntimeError),
]
ids = [type(error).__name__ for error, _ in ERRORS]

roundtrip = pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, lambda value: pickle.loads(pickle.dumps(value))],
    ids=["deep", "copy", "pickle"],
)


@roundtrip
@pytest.mark.parametrize("error", [error for error, _ in ERRORS], ids=ids)
def test_an_error_survives_copying_and_pickling_with_all_it_says(error, copied):
    other = copied(error)
    assert type(other) is type(error)
    assert (other.args, str(other), vars(other)) == (error.args, str(error), vars(error))


def test_every_error_is_among_those_and_keeps_its_reasons():
    public = {
        error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, Exception)
    }
    assert {type(error) for error, _ in ERRORS} == public - {errors.AttnregError}
    assert vars(ERRORS[2][0]) == {"rejected": {"FA4": ("too old", "dtype")}}


@pytest.mark.parametrize(("error", "expected"), ERRORS, ids=ids)
def test_an_error_is_also_the_built_in_that_a_caller_would_expect_and_shows_its_public_name(error, expected):
    name = type(error).__name__
    assert isinstance(error, attnreg.AttnregError) and isinstance(error, expected)
    assert f"{type(error).__module__}.{type(error).__qualname__}" == f"attnreg.{name}"
    assert getattr(attnreg, name) is type(error)


def test_an_error_can_be_read_by_a_process_that_has_not_imported_attnreg():
    pickled = pickle.dumps(ERRORS[0][0])
    run = forked(f"import pickle; print(repr(pickle.loads({pickled})))")
    assert (run.stderr, run.stdout.strip()) == ("", """UnknownBackendError("no backend is named 'FA5'")""")


def values(tmp_path):
    file = tmp_path / "attnreg.toml"
    file.write_text('strict = true\n[devices.cpu]\norder = ["math"]\n')
    here = dataclasses.replace(SPEC, device=attnreg.Device("cpu"))
    explanation = attnreg.explain(here)
    return {
        "spec": SPEC,
        "device": SPEC.device,
        "decision": explanation.forward,
        "explanation": explanation,
        "policy": Policy((Preference("x", ("a",), ("cpu",), exclusive=True),), {"b": "y"}, "z"),
        "settings": Settings(strict=True, disabled=("FA2",)),
        "loaded settings": load(file),
        "given settings": LoadedSettings(Settings(log_level="debug")),
        "capabilities": attnreg.Capabilities(
            devices=("cpu",), dtypes=("float32",), head_dim=attnreg.Range(8, 64)
        ),
        "call": attnreg.Call(0.5, 4, 8, (3, 0), deterministic=True),
        "kernels": attnreg.Kernels(print, None),
        "stats": attnreg.Stats({"math": {"forward": 1, "backward": 0}}, (Fallback("FA2", "too new", 3),)),
        "aux": attnreg.AuxRequest(lse=True),
        "piece": attnreg.Piece(0, 0, 4),
        "cut": attnreg.Cut.of("max_q", at=5),
        "first call": attnreg.FirstCall(SPEC, "forward", "cpu", 1.5),
        "rates": Rates(),
        "method": attnreg.explain_context_parallel(LAYOUT, heads=2, head_dim=8),
        **{name: entry.backend for name, entry in registry.entries().items()},
    }


@roundtrip
def test_values_survive_copying_and_pickling(tmp_path, copied):
    for name, value in values(tmp_path).items():
        other = copied(value)
        assert type(other) is type(value), name
        assert other == value, name
        assert str(other) == str(value), name


@roundtrip
def test_a_layout_survives_copying_and_pickling(copied):
    other = copied(LAYOUT)
    assert (other.cu_seq, other.pieces, other.rows) == (LAYOUT.cu_seq, LAYOUT.pieces, LAYOUT.rows)


@roundtrip
def test_a_scope_that_is_copied_or_pickled_chooses_the_same_backends(copied):
    opened = attnreg.use_backend("math", "cpu")
    with opened, copied(opened):
        assert scope.current().preference == Preference("use_backend('math', 'cpu')", ("math", "cpu"))
    assert scope.current() is None


def test_a_pickled_scope_has_no_number_of_this_process():
    attnreg.use_backend("cpu")
    pickled = pickle.dumps(attnreg.use_backend("math"))
    run = forked(
        f"import pickle; opened = pickle.loads({pickled})\n"
        "from attnreg.core.dispatch import scope\n"
        "opened.__enter__(); print(scope.current().number, scope.current().preference.names)"
    )
    assert (run.stderr, run.stdout.strip()) == ("", "1 ('math',)")


def refusing(tmp_path):
    return {
        "record": (
            attnreg.record(tmp_path / "calls.jsonl"),
            "records the calls of this process; make one by",
        ),
        "context parallel": (
            attnreg.ContextParallel.__new__(attnreg.ContextParallel),
            "its group is a connection of this process; pickle its `layout`, and call",
        ),
    }


@roundtrip
def test_what_belongs_to_its_process_is_not_copied_or_pickled_and_says_why(tmp_path, copied):
    for name, (value, why) in refusing(tmp_path).items():
        with pytest.raises(TypeError) as error:
            copied(value)
        said = str(error.value)
        assert f"a {type(value).__name__} can't be pickled or copied: " in said and why in said, name


def test_a_mask_of_all_layers_is_its_own_copy_and_says_what_to_pickle():
    mask = shared_mask(2, 4, 4, attention_mask=torch.ones(2, 4).bool())
    assert copy.copy(mask) is copy.deepcopy({"mask": mask})["mask"] is mask
    with pytest.raises(TypeError, match=r"a SharedMask can't be pickled: .*; pickle `mask.dense\(\)`"):
        pickle.dumps(mask)


def test_a_backend_of_local_functions_is_its_own_copy_and_says_what_cannot_be_pickled(fake, monkeypatch):
    mine = fake("mine").backend
    assert copy.copy(mine) is copy.deepcopy([mine])[0] is mine
    with pytest.raises(TypeError) as error:
        pickle.dumps(mine)
    assert str(error.value) == (
        f"Backend.load can't be pickled: got {mine.load!r}, expected a function at the top level of a "
        "module; or register the backend in the other process"
    )
    with pytest.raises(TypeError, match=r"Kernels\.forward can't be pickled: got <function"):
        pickle.dumps(attnreg.Kernels(lambda *_: None))
    monkeypatch.setitem(sys.modules, "ray.cloudpickle", sys)  # pickles functions by their code
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        pickle.dumps(mine)


IMPORTED_TWICE = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "attnreg"]:
    del sys.modules[name]
import attnreg, torch
for _ in range(2):
    try:
        attnreg.register_backend("math")
    except attnreg.RegistrationError as error:
        print(error)
x = torch.ones(1, 2, 3, 8)
print(torch.equal(torch.nn.functional.scaled_dot_product_attention(x, x, x), x))
"""


def test_modules_that_were_removed_and_imported_again_say_so():
    """A tool that restores `sys.modules` after a test does that; torch can't give an op back."""
    once = 'import attnreg\nattnreg.register_backend("math")\n'
    done = forked(once + IMPORTED_TWICE)
    *said, right = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert len(said) == 2 and len(set(said)) == 1 and right == "True"
    assert said[0].startswith("attnreg was imported before in this process, and its modules were removed")
    assert said[0].endswith("expected the same modules: leave them there, or start another process")

"""Promises of compiling by itself: once, in the background, and never an error of the program."""

import contextlib
import errno
import fcntl
import functools
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.compiled_files import stand_in
from support.processes import Forked, forked
from typer.testing import CliRunner

import attnreg
from attnreg.core.torchlib import background, building, libraries, locks, slow
from attnreg.errors import BuildError, ConfigError
from attnreg.tools.cli import app

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="attnreg compiles on Linux only")

LIBRARIES = building.LIBRARIES


@pytest.fixture(autouse=True)
def in_background(monkeypatch):
    """Have each program compile in the background, as it does unless a variable says otherwise."""
    monkeypatch.delenv("ATTNREG_BUILD")


@pytest.fixture
def log(monkeypatch):
    """Return the list that messages of the logger attnreg get into, from level info on.

    No step takes any time, so that no line depends on how long the machine takes.
    """
    monkeypatch.setattr(slow, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("attnreg")
    monkeypatch.setattr(logger, "handlers", [handler])
    logger.setLevel(logging.INFO)  # set back by the fixture for every test
    return messages


@pytest.fixture
def working(compiler, copying):
    """Return a compiler that takes a fifth of a second and makes what was compiled before."""
    compiler.does("sleep 0.2", copying)
    return compiler


def until(condition, seconds=200):  # a process of low priority waits for all others
    """Wait for a condition, and fail if it doesn't come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def is_idle():
    return not locks.holder(background.lock_path())


def is_built():
    return is_idle() and all(building.target(library).is_file() for library in LIBRARIES)


@pytest.fixture
def start(monkeypatch):
    """Return what `ensure_built` does in its thread, but for the other process: it compiles in this one."""
    monkeypatch.setattr(background, "_detach", lambda found: background.build_missing())
    background.lock_path().parent.mkdir(parents=True)
    return background._start


# In the background

PROGRAM = """
import logging, os, sys, torch
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from attnreg.core.torchlib import building
building.ensure_built()
print("session", os.getsid(0), flush=True)
"""


AT_ONCE = f"""
import sys
sys.path.remove("")  # as `python -P` does
{PROGRAM}
os._exit(0)  # no thread gets to do anything
"""


@pytest.mark.slow
def test_a_program_that_ends_at_once_starts_a_process_that_outlives_it_and_the_next_program_uses_what_it_made(
    cache, working, tmp_path
):
    # Modules of these names in the program's folder must not get into the process that compiles.
    for name in ("torch", "attnreg", "subprocess", "tempfile"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    began = time.monotonic()

    first = Forked(AT_ONCE, cwd=tmp_path, ATTNREG_BUILD="", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    # The pipe ends with the program: no other process holds it.
    said, session = first.stdout.read().splitlines()
    assert not is_built(), f"the program waited {time.monotonic() - began} s"
    assert first.kill() == ""
    assert said.startswith("compiling the call cache and the CPU kernel in the background, at low priority: ")
    until(is_built)
    assert len(working.runs()) == 2
    assert {(nice, stdin) for _, _, nice, stdin in working.runs()} == {(19, "/dev/null")}
    assert f"session {working.runs()[0][1]}" != session
    assert not any(cache.rglob(f"{libraries.SCRATCH}*")) and not any(cache.rglob("*.failed"))
    second = forked(PROGRAM + "building.loaded(), building.loaded_cpu_kernel()", ATTNREG_BUILD="")
    _, cached, kernel = second.stdout.splitlines()
    assert cached == f"repeated calls use the compiled call cache, {building.target()}"
    assert kernel == f"the cpu backend uses the compiled kernel, {building.target(building.CPU_KERNEL)}"
    assert len(working.runs()) == 2


SEVERAL = """
import os, torch
from attnreg.core.torchlib import background, building
parent, children = os.getpid(), []
for _ in range(6):
    if os.getpid() == parent and (child := os.fork()):
        children.append(child)
if os.getpid() != parent:
    building.ensure_built()
    background._start()
    os._exit(0)
print([os.waitpid(child, 0)[1] for child in children])
"""


@pytest.mark.slow
def test_several_processes_that_start_together_compile_once(cache, compiler, usual_priority):
    compiler.does("sleep 0.1", "exit 1")
    done = forked(usual_priority + SEVERAL, ATTNREG_BUILD="background")
    assert (done.stdout, done.stderr) == (f"{[0] * 6}\n", "")
    # The one that compiles may not have begun when they have ended.
    until(lambda: building.status(building.CPU_KERNEL).state == "failed")
    until(is_idle)
    assert sorted(name for name, *_ in compiler.runs()) == sorted(
        building.target(library).name for library in LIBRARIES
    )


def test_the_process_has_no_parent_and_holds_the_lock_until_it_ends(
    cache, compiler, usual_priority, monkeypatch, log
):
    compiler.does("sleep 0.2", "exit 1")
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", Inline)
        background._start()
    assert len(log) == 1 and log[0].startswith(
        "compiling the call cache and the CPU kernel in the background"
    )
    process = locks.holder(background.lock_path())
    parent = int(Path(f"/proc/{process}/stat").read_text().split()[3])
    assert parent not in (os.getpid(), 0)
    assert building.status(building.CALL_CACHE) == (
        "building", None, f"process {process} is compiling now",
    )  # fmt: skip
    background._start()  # does nothing
    until(is_idle)
    assert len(compiler.runs()) == 2


def test_only_the_first_call_of_a_process_looks(cache, monkeypatch):
    started = []
    monkeypatch.setattr(background, "_start", lambda: started.append(True))
    building.ensure_built()
    assert started
    monkeypatch.setattr(background, "_start", lambda: pytest.fail("it looks a second time"))
    monkeypatch.setattr(background, "_missing", lambda: pytest.fail("it looks a second time"))
    building.ensure_built()


@pytest.mark.parametrize(
    "variables", [{"ATTNREG_BUILD": "Off"}, {"ATTNREG_ROUTERS": "python"}, {"ATTNREG_BUILD": "of"}]
)
@pytest.mark.parametrize("function", [building.ensure_built, background.wait_built])
def test_nothing_is_compiled_where_a_variable_forbids_it_or_is_wrong(
    cache, compiler, monkeypatch, variables, function
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(threading, "Thread", lambda **_: pytest.fail("a thread was started"))
    function()
    assert compiler.runs() == [] and not cache.exists()


def test_nothing_is_started_where_everything_is_compiled(cache, monkeypatch):
    for library in LIBRARIES:
        stand_in(library)
    monkeypatch.setattr(threading, "Thread", lambda **_: pytest.fail("a thread was started"))
    building.ensure_built()


def test_a_settings_file_says_how_to_compile_unless_the_variable_does(cache, monkeypatch, tmp_path, routers):
    (tmp_path / "site.toml").write_text('build = "off"\n')
    attnreg.configure(tmp_path / "site.toml")
    assert background.build_mode() == "off"
    reason = 'build = "off" (site.toml:1) forbids it; `attnreg build` does it'
    assert building.status(building.CPU_KERNEL)[::2] == ("off", reason)
    monkeypatch.setenv("ATTNREG_BUILD", "now")
    assert (background.build_mode(), background.asked_by()) == ("now", "ATTNREG_BUILD=now")
    monkeypatch.delenv("ATTNREG_BUILD")
    attnreg.configure({"build": "background"})
    assert background.build_mode() == "background"


def test_a_call_cache_that_has_to_be_there_is_compiled_as_the_settings_file_says(
    cache, monkeypatch, tmp_path, routers
):
    def loaded():
        modes.append(background.build_mode())
        raise BuildError("it isn't compiled")

    modes = []
    monkeypatch.setenv("ATTNREG_ROUTERS", "compiled")
    monkeypatch.setattr(building, "loaded", loaded)
    (tmp_path / "site.toml").write_text('build = "now"\n')
    monkeypatch.setenv("ATTNREG_CONFIG", str(tmp_path / "site.toml"))
    with pytest.raises(ConfigError, match="ATTNREG_ROUTERS=compiled: it isn't compiled"):
        attnreg.reload()
    assert (modes, background.build_mode()) == (["now"], "background")


# With ATTNREG_BUILD=now


def test_now_compiles_before_the_libraries_are_loaded(cache, working, untried, monkeypatch, log):
    monkeypatch.setenv("ATTNREG_BUILD", "now")
    together = [threading.Thread(target=building.loaded) for _ in range(3)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()
    assert building.loaded().__file__ == str(building.target())
    assert building.loaded_cpu_kernel()
    assert len(working.runs()) == 2
    assert log[0] == "compiling before the first call, as ATTNREG_BUILD=now asks"


def test_a_signal_handler_that_calls_attention_while_its_thread_compiles_waits_for_nothing(
    cache, working, untried, monkeypatch
):
    monkeypatch.setenv("ATTNREG_BUILD", "now")
    real, errors = background.build_missing, []

    def build_missing():
        with pytest.raises(BuildError) as raised:
            building.loaded()
        errors.append(str(raised.value))
        return real()

    monkeypatch.setattr(background, "build_missing", build_missing)
    assert building.loaded().__file__ == str(building.target())
    assert len(errors) == 1 and "isn't compiled for this torch" in errors[0]


def test_now_says_what_the_first_call_waited_for_and_how_long(cache, working, untried, monkeypatch, log):
    monkeypatch.setenv("ATTNREG_BUILD", "now")
    times = [10.0, 71.5]
    monkeypatch.setattr(slow, "time", SimpleNamespace(perf_counter=lambda: times.pop(0)))
    building.ensure_built()
    assert log[1:] == ["the first call waited: compiling the call cache and the CPU kernel took 61.5 s"]
    assert len(working.runs()) == 2


def test_now_waits_for_another_process_that_compiles(cache, compiler, monkeypatch):
    monkeypatch.setenv("ATTNREG_BUILD", "now")
    background.lock_path().parent.mkdir(parents=True)
    held = locks.lock_file(background.lock_path())

    def finish():
        for library in LIBRARIES:
            stand_in(library)
        locks.release(held)

    for library in LIBRARIES:
        building.target(library).parent.mkdir(mode=0o700)
    other = threading.Timer(0.3, finish)
    other.start()
    building.ensure_built()
    other.join()
    assert is_built() and compiler.runs() == []


def test_now_logs_a_failure_and_does_not_retry(cache, compiler, monkeypatch, log):
    monkeypatch.setenv("ATTNREG_BUILD", "now")
    for _ in range(2):
        with pytest.raises(BuildError, match="the call cache isn't compiled"):
            building.loaded()
    assert len(compiler.runs()) == 2
    runs_without = "attnreg runs without its compiled part: the call cache can't be compiled: "
    assert log[1:] == [f"{runs_without}{compiler.script} says no such header"]
    monkeypatch.setattr(background, "_waited", False)  # as in the next process
    background.wait_built()
    assert len(compiler.runs()) == 2
    (line,) = log[2:]  # nothing is said to be compiled
    assert line.startswith(f"{runs_without}{compiler.script} says no such header (tried at 2")


def test_a_kernel_that_a_lockfile_is_for_is_compiled_before_it_is_loaded_unless_nothing_may_be(
    cache, working, untried, monkeypatch, log
):
    monkeypatch.setenv("ATTNREG_BUILD", "off")
    building.require_kernel(True)
    building.wait_built()
    assert working.runs() == []
    monkeypatch.delenv("ATTNREG_BUILD")
    assert building.loaded_cpu_kernel()
    assert len(working.runs()) == 2
    assert log[0] == "compiling before the first call, as a lockfile is for what lasts"


def test_now_names_the_library_where_one_alone_fails(cache, compiler, copying, untried, monkeypatch, log):
    monkeypatch.setenv("ATTNREG_BUILD", "now")
    compiler.does('case "$2" in *attnreg_cpu*) echo no such header >&2; exit 1;; esac', copying)
    building.ensure_built()
    assert log[1:] == [f"the CPU kernel can't be compiled: {compiler.script} says no such header"]
    assert building.loaded()


# What goes wrong


def test_a_failure_is_remembered_until_the_compiler_or_torch_changes(
    cache, compiler, start, monkeypatch, log
):
    compiler.does("for line in 1 2 3; do echo error $line >&2; done", "exit 1")
    start()
    assert len(compiler.runs()) == 2
    found = building.status(building.CPU_KERNEL)
    assert found.state == "failed"
    said = f"the CPU kernel can't be compiled: {compiler.script} says error 1 (tried at 2"
    assert found.reason.startswith(said) and found.reason.endswith("; `attnreg build` tries again)")
    records = [json.loads(record.read_text()) for record in cache.rglob("*.failed")]
    assert len(records) == 2
    for record in records:
        assert record["compiler"].startswith(f"{compiler.script} --an-option ")
        assert "error 3" in record["message"]
    log.clear()
    start()
    assert len(compiler.runs()) == 2
    (line,) = log
    assert line.startswith("attnreg runs without its compiled part: the call cache can't be compiled: ")
    os.utime(compiler.script, ns=(0, 0))
    start()
    assert len(compiler.runs()) == 4
    monkeypatch.setattr(libraries, "_versions", lambda: ("9.0",))
    building.target.cache_clear()
    # The kernel is the same for every torch.
    states = [building.status(library).state for library in (building.CALL_CACHE, building.CPU_KERNEL)]
    assert states == ["not built", "failed"]


def test_what_did_not_fail_is_compiled_though_the_other_did(cache, compiler, start, monkeypatch):
    with pytest.raises(BuildError, match="no such header"):
        building.build(building.CPU_KERNEL)
    start()
    names = [building.target(library).name for library in (building.CPU_KERNEL, building.CALL_CACHE)]
    assert [name for name, *_ in compiler.runs()] == names


def test_a_full_disk_is_not_remembered(cache, compiler):
    compiler.does("echo cannot write: No space left on device >&2", "exit 1")
    with pytest.raises(BuildError):
        building.build(building.CPU_KERNEL)
    assert building.status(building.CPU_KERNEL).state == "not built"


def test_a_record_of_a_failure_that_cannot_be_read_counts_as_none(cache, compiler, start):
    start()
    for record in cache.rglob("*.failed"):
        record.write_text("[1]")
    assert building.status(building.CPU_KERNEL).state == "not built"


def refuse(error):
    raise error


def let_others_write(patch, cache):
    (cache / "call_cache").mkdir(parents=True)
    (cache / "call_cache").chmod(0o707)


def let_the_compiler_fail(patch, _):
    patch.setenv("CXX", "false")
    if os.environ["ATTNREG_BUILD"] == "background":  # what fails there is said by the next program
        for library in LIBRARIES:
            with pytest.raises(BuildError):
                building.build(library)


def write_protect(patch, cache):
    # For root as well, who may write anywhere.
    make = Path.mkdir
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(cache / "build"))
    patch.setattr(
        Path,
        "mkdir",
        lambda self, *a, **b: refuse(denied) if self == cache / "build" else make(self, *a, **b),
    )


def set_home(home):
    def cause(patch, cache):
        patch.delenv("XDG_CACHE_HOME")
        patch.setenv("HOME", home)
        patch.chdir(cache.parent.parent)

    return cause


def without_home(patch, _):
    patch.delenv("XDG_CACHE_HOME")
    patch.setattr(Path, "home", lambda: refuse(RuntimeError("no home.")))  # as Python does


# What the line says, and what brings it about.
PROBLEMS = {
    "there is no C++ compiler, looked for CXX=none": lambda patch, _: patch.setenv("CXX", "none"),
    "/build can't be written to, and compiled libraries go there": lambda patch, _: patch.setattr(
        os, "access", lambda _, mode: not mode & os.W_OK
    ),
    "others may write to ": let_others_write,
    "Not a directory": lambda patch, _: patch.setenv("XDG_CACHE_HOME", "/dev/null"),
    "/cache/attnreg/build can't be written: Permission denied": write_protect,
    "HOME must be an absolute path, got ''": set_home(""),
    "HOME must be an absolute path, got 'relative'": set_home("relative"),
    "false says exit status 1": let_the_compiler_fail,
    "no home: set XDG_CACHE_HOME, or HOME": without_home,
    "is no Python to compile with; `attnreg build` does it": lambda patch, _: patch.setattr(
        sys, "executable", "/opt/application"
    ),
    "the process that compiles ended with status 3": lambda patch, _: patch.setattr(
        libraries, "python", lambda *_: ["sh", "-c", "exit 3"]
    ),
    "No locks available": lambda patch, _: patch.setattr(
        locks, "lock_file", lambda path, wait=False: refuse(OSError("No locks available"))
    ),
}


@pytest.mark.parametrize(("problem", "cause"), PROBLEMS.items(), ids=PROBLEMS)
@pytest.mark.parametrize("mode", ["background", "now"])
def test_a_problem_changes_nothing_and_is_one_line(
    cache, compiler, monkeypatch, tmp_path, log, problem, cause, mode
):
    if mode == "now" and ("no Python" in problem or "ended with" in problem):
        pytest.skip("no other process is started")
    monkeypatch.setenv("ATTNREG_BUILD", mode)
    cause(monkeypatch, cache)
    there = set(tmp_path.rglob("*"))
    monkeypatch.setattr(threading, "Thread", Inline)
    building.ensure_built()
    assert compiler.runs() == [] and not any(cache.rglob("*.so"))
    if "HOME" in problem:
        assert set(tmp_path.rglob("*")) == there
    (line,) = [message for message in log if not message.startswith("compiling ")]
    assert line.startswith("attnreg runs without its compiled part: ") and problem in line
    assert "\n" not in line and "[Errno" not in line


def test_the_command_says_the_same_of_a_folder_that_cannot_be_written(cache, compiler, monkeypatch):
    write_protect(monkeypatch, cache)
    done = CliRunner().invoke(app, ["build"])
    said = f"{cache}/build can't be written: Permission denied"
    lines = [f"attnreg: {library.title} can't be compiled: {said}" for library in LIBRARIES]
    assert (done.exit_code, done.stderr.splitlines()) == (1, lines)


class Inline:
    """A thread that runs where it is started."""

    def __init__(self, target, args=(), **_):
        self.start = functools.partial(target, *args)


def test_an_unexpected_error_is_no_error_of_the_call(cache, monkeypatch, log):
    monkeypatch.setattr(background, "_missing", lambda: refuse(ZeroDivisionError("unexpected")))
    building.ensure_built()
    assert log == ["attnreg runs without its compiled part: unexpected"]


# Locks, and what a killed process leaves

HOLD = """
import sys, time
from pathlib import Path
from attnreg.core.torchlib import locks
locks.lock_file(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_killed_process_leaves_no_lock_and_its_files_are_removed(cache, compiler):
    path = background.lock_path()
    path.parent.mkdir(parents=True)
    other = Forked(HOLD, path)
    assert other.stdout.readline() == "held\n"
    assert locks.holder(path) == str(other.pid)
    assert locks.lock_file(path) is None
    other.kill()
    until(lambda: not locks.holder(path))
    left = [building.target(library).parent / f"{libraries.SCRATCH}left" for library in LIBRARIES]
    for folder in left:
        folder.mkdir(parents=True)
        (folder / "half.so").touch()
    with pytest.raises(BuildError):
        building.build(building.CPU_KERNEL)
    assert compiler.runs() and not any(folder.exists() for folder in left)


# It compiles in the main thread, as `attnreg build` does.
COMPILE = """
from attnreg.core.torchlib import building
building.build(building.CPU_KERNEL)
"""


def processes_with(text):
    """Return the processes whose command contains a text."""
    commands = Path("/proc").glob("[0-9]*/cmdline")
    found = []
    for command in commands:
        with contextlib.suppress(OSError):
            found += [command.parent.name] if text in command.read_text() else []
    return found


def test_a_build_that_is_interrupted_takes_its_compiler_and_its_folder_along(cache, compiler, tmp_path):
    waits = tmp_path / "waits"  # a child of the compiler's, as a real one has
    waits.symlink_to("/bin/sleep")
    compiler.does(f"{waits} 60 &", f"touch {tmp_path}/started", "wait")
    variables = {key: os.environ[key] for key in ("XDG_CACHE_HOME", "CXX")}
    building_process = Forked(COMPILE, **variables)
    until((tmp_path / "started").exists)
    assert len(processes_with(str(waits))) == 1
    assert list(cache.rglob(f"{libraries.SCRATCH}*"))
    building_process.send_signal(signal.SIGINT)
    assert building_process.stdout.read() == ""  # it has ended
    until(lambda: not processes_with(str(waits)))
    assert not list(cache.rglob(f"{libraries.SCRATCH}*"))
    assert not locks.holder(background.lock_path())
    building_process.kill()


def test_temporary_files_of_a_compiler_lie_where_the_next_build_removes_them(cache, compiler, tmp_path):
    compiler.does(f'echo "$TMPDIR" > {tmp_path}/tmpdir', "exit 1")
    with pytest.raises(BuildError):
        building.build(building.CPU_KERNEL)
    folder = Path((tmp_path / "tmpdir").read_text().strip())
    assert folder.parent == building.target(building.CPU_KERNEL).parent
    assert folder.name.startswith(libraries.SCRATCH)


def test_a_fork_does_not_hold_the_lock_of_a_file(tmp_path):
    held = locks.lock_file(tmp_path / "lock")
    assert locks.lock_file(tmp_path / "lock") is None
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(os.getpid)  # it is there
        locks.release(held)
        assert locks.holder(tmp_path / "lock") == ""


def test_a_fork_while_a_lock_is_waited_for_does_not_keep_it(tmp_path, monkeypatch):
    with contextlib.ExitStack() as ends:
        real, fork = fcntl.flock, multiprocessing.get_context("fork").Pool

        def fork_and_lock(descriptor, operation):
            ends.enter_context(fork(1)).apply(os.getpid)  # it is there
            real(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", fork_and_lock)
        held = locks.lock_file(tmp_path / "lock", wait=True)
        monkeypatch.setattr(fcntl, "flock", real)
        assert locks.lock_file(tmp_path / "lock") is None
        os.close(held)  # as the end of this process does
        locks._open.discard(held)
        assert locks.holder(tmp_path / "lock") == ""


def test_a_release_counts_for_a_fork_that_has_a_copy_of_the_descriptor(tmp_path):
    held = locks.lock_file(tmp_path / "lock")
    copy = os.dup(held)
    try:
        locks.release(held)
        assert locks.holder(tmp_path / "lock") == ""
    finally:
        os.close(copy)


WITHOUT_STREAMS = """
import os, sys
from pathlib import Path
from attnreg.core.torchlib import locks
for stream in (0, 1, 2):
    os.close(stream)
sys.exit(int(locks.lock_file(Path(sys.argv[1])) < 3))
"""


def test_a_program_without_standard_streams_hands_its_lock_to_the_process_that_compiles(tmp_path):
    """A child has streams of its own in the places of those."""
    assert forked(WITHOUT_STREAMS, tmp_path / "lock").returncode == 0


def test_a_lock_that_cannot_be_opened_counts_as_free(tmp_path):
    assert locks.holder(tmp_path / "none") == ""
    assert locks.holder(Path(os.devnull) / "none") == ""

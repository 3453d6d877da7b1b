"""Compiles the C++ libraries unasked: in a background process of low priority, or before the first call.

The process that compiles holds the lock on one file in the cache folder, so ranks that start together compile
once. A failure is stored in the same folder. It counts until the source, torch or the compiler changes. A
program that only runs attention gets no error from this module: errors are logged.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from attnreg.core.settings import environment
from attnreg.core.torchlib import caches, libraries, locks
from attnreg.core.torchlib.libraries import CPU_KERNEL, LIBRARIES, Library, find_file, target
from attnreg.core.torchlib.slow import log_if_slow
from attnreg.errors import AttnregError, BuildError

log = logging.getLogger("attnreg")

# The script forks, and the parent ends at once: the program keeps no child that it would have to wait for.
# The parent inherits the lock, so it may write the child's process id into the lock file.
DETACHED = """
import importlib.util, os, signal
lock, package = int(arguments[0]), arguments[1]
if child := os.fork():
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(child).encode(), 0)
    os._exit(0)
os.nice(19)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited SIG_IGN would hide the compiler's exit status
# The folder of the package isn't on the path: it may contain modules of any name.
spec = importlib.util.spec_from_file_location("attnreg", package)
sys.modules["attnreg"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["attnreg"])
from attnreg.core.torchlib import background
background.build_missing()
"""
# Failures that aren't stored: the disk may have room when the next program starts.
DISK_FULL = ("No space left on device", "Disk quota exceeded")

_considered = _waited = _builds = _kernel_is_required = False
# The setting `build` in force, and its source: ATTNREG_BUILD is stronger.
_setting = ("", "")
_waiting = locks.open_after_fork(threading.RLock())


def ensure_built() -> None:
    """Start to compile the missing libraries in the background, at the first call of a program.

    Does so once in a process, and only if no other process compiles. Returns as soon as the process has
    started and a line is logged, because the program may end with this call. Never raises. If a compiled
    library isn't used, the line says why and is a warning.

    With ATTNREG_BUILD=now, and for the kernel of a lockfile, it waits, as `wait_built` does; with `off` it
    compiles nothing.
    """
    global _considered
    if _considered:
        return
    _considered = True
    with _log_errors(logging.INFO):
        mode = build_mode()
        if _waits():
            wait_built()
        elif mode == "background" and _missing():
            _start()
        elif mode == "off":
            for library in LIBRARIES:
                if unused := libraries.why_not_used(library):  # raises where the folder can't be looked into
                    raise BuildError(unused)  # `_log_errors` adds the other reasons


def require_kernel(is_required: bool) -> None:
    """Set whether `wait_built` compiles a missing CPU kernel unless ATTNREG_BUILD is "off".

    A lockfile does, because decisions with the kernel differ from those without it.
    """
    global _kernel_is_required
    _kernel_is_required = is_required


def _waits() -> bool:
    mode = build_mode()
    return mode == "now" or (mode == "background" and _kernel_is_required and find_file(CPU_KERNEL) is None)


def wait_built() -> None:
    """Compile the missing libraries in this process if ATTNREG_BUILD is "now". Never raises.

    So it does where a lockfile is for a CPU kernel that is missing: see `require_kernel`.
    Compiles once in a process. Other threads wait meanwhile, and so do processes that share the cache folder.
    """
    global _waited, _builds
    if _waited or not _waits():
        return
    with _waiting:
        if _waited or _builds:  # by this thread: a signal handler calls attention while it compiles
            return
        _builds = True
        try:
            with _log_errors(logging.WARNING):
                _build_now()
        finally:
            _builds = False
        _waited = True


def _build_now() -> None:
    """Compile the missing libraries before the first call; raises BuildError if none can be."""
    if not (missing := _missing()):
        return
    libraries.find()
    _make_folders()
    if not all(map(earlier_failure, missing)):
        asks = f"{asked_by()} asks" if build_mode() == "now" else "a lockfile is for what lasts"
        log.info("compiling before the first call, as %s", asks)
    what = " and ".join(library.title for library in missing)
    with log_if_slow(f"the first call waited: compiling {what}"), _hold_lock():
        failures = build_missing()
    if len(failures) == len(LIBRARIES):
        raise BuildError(failures[0])
    for failure in failures:
        log.warning("%s", failure)


@contextlib.contextmanager
def _log_errors(level: int) -> Iterator[None]:
    """Log an error of the block instead of raising it: calls run without the libraries that are missing.

    The line has each reason once. If a compiled library isn't used, it is a warning.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the program goes on in any case
        unused = _list_unused()
        reasons = "; ".join(dict.fromkeys([*unused, str(error)]))
        missing = [library.title for library in LIBRARIES if find_file(library) is None]
        what = missing[0] if len(missing) == 1 else "its compiled part"
        log.log(logging.WARNING if unused else level, "attnreg runs without %s: %s", what, reasons)


def _list_unused() -> list[str]:
    """Return why compiled libraries aren't used, each reason once."""
    reasons = {}
    for library in LIBRARIES:
        with contextlib.suppress(BuildError, OSError):  # nobody knows whether it is compiled
            reasons[libraries.why_not_used(library)] = True
    return [reason for reason in reasons if reason]


def build(library: Library, only_missing: bool = False) -> Path:
    """Compile a library now and return its file, even if compiling it has failed before.

    With `only_missing` an existing file is returned as it is, at once. Otherwise waits for other processes
    that compile. Raises BuildError with the reason if compiling fails.
    """
    # No lock yet: another process may hold it for a minute.
    if only_missing and (file := find_file(library)):
        return file
    try:
        _make_folders()
        with _hold_lock():
            return (find_file(library) if only_missing else None) or _build_library(library)
    except BuildError:
        raise
    except OSError as error:
        raise BuildError(f"{library.title} can't be compiled: {error}") from error


def build_missing() -> list[str]:
    """Compile missing libraries without a stored failure; the caller holds the lock.

    Returns one line for each library that can't be compiled.
    """
    failures = []
    for library in _missing():
        try:
            if failure := earlier_failure(library):
                raise BuildError(failure)
            _build_library(library)
        except BuildError as error:
            failures.append(libraries.in_one_line(str(error)))
    return failures


def follow_setting(mode: str, source: str) -> tuple[str, str]:
    """Compile as the setting `build` says, unless ATTNREG_BUILD is set; an empty mode is no setting.

    Returns the setting before.
    """
    global _setting
    before, _setting = _setting, (mode, source)
    return before


def asked_by() -> str:
    """Return what the mode of `build_mode` comes from, for messages."""
    with contextlib.suppress(AttnregError):
        if not environment.read().build and _setting[0]:
            return f'build = "{_setting[0]}" ({_setting[1]})'
    return f"ATTNREG_BUILD={build_mode()}"


def is_left_out() -> bool:
    """Return whether ATTNREG_ROUTERS=python excludes compiled libraries."""
    return build_mode() == "left out"


def build_mode() -> str:
    """Return the value of ATTNREG_BUILD or of the setting `build`: "background", "now" or "off".

    Returns "left out" with ATTNREG_ROUTERS=python, and "off" if a variable can't be read.
    """
    try:
        variables = environment.read()
    except AttnregError:
        return "off"  # the error is raised by the calls that the variables apply to
    mode = variables.build or _setting[0] or "background"
    return "left out" if variables.routers == "python" else mode


def _missing() -> list[Library]:
    return [library for library in LIBRARIES if find_file(library) is None]


def _start() -> None:
    """Start the process that compiles, unless another process compiles or the build would fail.

    A missing compiler is a warning: whoever runs the program can install one, and calls cost more until then.
    """
    compiler: list[str] = []
    on_linux = sys.platform == "linux"
    with _log_errors(logging.WARNING if on_linux else logging.INFO):
        try:
            compiler = libraries.find()
        except BuildError as error:
            silence = ", or set ATTNREG_BUILD=off to silence this" if on_linux else ""
            raise BuildError(f"{error}{silence}") from error
    if not compiler:
        return
    with _log_errors(logging.INFO):
        failures = [earlier_failure(library) for library in _missing()]
        if failures and all(failures):
            raise BuildError(failures[0])
        _make_folders()
        _detach(compiler)


def _make_folders() -> None:
    """Create the folders of the libraries and of the lock; raises OSError as `caches.check_writable` does."""
    for folder in (lock_path().parent, *(target(library).parent for library in LIBRARIES)):
        caches.make(folder)
        caches.check_writable(folder)


def _detach(compiler: list[str]) -> None:
    """Start the process that compiles as a grandchild; a thread waits some 0.01 s for the child."""
    # In a program that embeds Python, `sys.executable` is that program: it would be started a second time.
    if getattr(sys, "frozen", False) or not Path(sys.executable or "").name.startswith("python"):
        raise BuildError(f"{sys.executable!r} is no Python to compile with; `attnreg build` does it")
    with caches.readable_errors():
        lock = locks.lock_file(lock_path())
    if lock is None:
        log.debug("another process compiles already")
        return
    try:
        if not (missing := _missing()):
            return  # another process has just compiled them
        process = subprocess.Popen(
            libraries.python(DETACHED, str(lock), str(libraries.ROOT / "__init__.py")),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            cwd=lock_path().parent, pass_fds=(lock,), start_new_session=True,
            env=libraries.child_environment() | {"CXX": shlex.join(compiler)},
        )  # fmt: skip
    finally:
        locks.hand_over(lock)
    unused = _list_unused()
    log.log(
        logging.WARNING if unused else logging.INFO,
        "compiling %s in the background, at low priority: programs that start after it use them; "
        "ATTNREG_BUILD=off forbids it%s",
        " and ".join(library.title for library in missing),
        "".join(f"; {reason}" for reason in unused),
    )
    # A daemon thread: a program that ends doesn't wait for it.
    threading.Thread(target=_await_start, args=(process,), name="attnreg-build", daemon=True).start()


def _await_start(process: subprocess.Popen[bytes]) -> None:
    """Wait for the child that starts the compiling process, and log a failure of it."""
    with _log_errors(logging.INFO):
        if process.wait():
            raise BuildError(f"the process that compiles ended with status {process.returncode}")


def lock_path() -> Path:
    return caches.folder("build") / "build.lock"


@contextlib.contextmanager
def _hold_lock() -> Iterator[None]:
    with caches.readable_errors():
        lock = locks.lock_file(lock_path(), wait=True)
    try:
        yield
    finally:
        if lock is not None:
            locks.release(lock)


def _build_library(library: Library) -> Path:
    for other in LIBRARIES:
        for leftover in target(other).parent.glob(f"{libraries.SCRATCH}*"):
            shutil.rmtree(leftover, ignore_errors=True)  # of a killed process: this one holds the lock
    record = _failure_file(library)
    try:
        file = libraries.compile_library(library)
    except BuildError as error:
        with contextlib.suppress(BuildError, OSError):
            if not any(text in str(error) for text in DISK_FULL):
                _write_failure(record, str(error))
        raise
    record.unlink(missing_ok=True)
    return file


def _failure_file(library: Library) -> Path:
    return caches.folder("build") / f"{target(library).stem}.failed"


def _write_failure(record: Path, message: str) -> None:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    text = json.dumps(
        {"compiler": libraries.identify_compiler(libraries.find()), "when": now, "message": message}
    )
    caches.write_whole(record, text)


def earlier_failure(library: Library) -> str:
    """Return the stored failure of a library with the present compiler; empty if there is none."""
    try:
        record = json.loads(_failure_file(library).read_text(encoding="utf-8"))
        if record["compiler"] != libraries.identify_compiler(libraries.find()):
            return ""
        message = libraries.in_one_line(str(record["message"]))
        return f"{message} (tried at {record['when']}; `attnreg build` tries again)"
    except (BuildError, OSError, ValueError, KeyError, TypeError):
        return ""

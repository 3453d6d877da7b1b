"""Automatic compilation: in a process of low priority, once per cache folder, or before the first call.

The compiling process owns a lock file, so ranks that start together compile once. A failure is recorded
beside the lock, until the source, torch or the compiler changes. A program that only runs attention gets no
error from this module: every failure is logged.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from attnreg.core.settings import environment
from attnreg.core.torchlib import caches, libraries, locks
from attnreg.core.torchlib.libraries import LIBRARIES, Library, existing, target
from attnreg.core.torchlib.slow import says_if_slow
from attnreg.errors import AttnregError, BuildError

log = logging.getLogger("attnreg")

# The first of two processes ends at once, so that the program has no child to wait for. The second process
# inherits the lock. Its id is written to the lock file, which names the holder.
DETACHED = """
import importlib.util, os, signal
lock, package = int(arguments[0]), arguments[1]
if child := os.fork():
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(child).encode(), 0)
    os._exit(0)
os.nice(19)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as by some programs, it hides the compiler's status
# The folder that contains attnreg isn't on the path: it may have modules of any name.
spec = importlib.util.spec_from_file_location("attnreg", package)
sys.modules["attnreg"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["attnreg"])
from attnreg.core.torchlib import background
background.build_missing()
"""
# The next program may have more room; everything else fails again.
DISK_FULL = ("No space left on device", "Disk quota exceeded")

_considered = _waited = False
_waiting = locks.open_after_fork(threading.Lock())


def ensure_built() -> None:
    """Start to compile missing libraries in the background; for the first call of a program.

    Only the first time in a process, and only if no other process compiles. Returns once the process has been
    started and a line logged, because the program may end after this call. Never raises. If compiled
    libraries aren't used, the line is a warning and names the reasons.
    With ATTNREG_BUILD=now the function waits, as `wait_built` does; with `off` nothing is compiled.
    """
    global _considered
    if _considered:
        return
    _considered = True
    with _logged(logging.INFO):
        mode = build_mode()
        if mode == "now":
            wait_built()
        elif mode == "background" and _missing():
            _start()
        elif mode == "off" and (unused := _reasons()):
            raise BuildError(unused[0])  # the logged line has all reasons


def wait_built() -> None:
    """Compile missing libraries in this process if ATTNREG_BUILD=now, and never raise.

    Only the first time in a process. Other threads wait meanwhile, and so do processes that share the cache.
    """
    global _waited
    if _waited or build_mode() != "now":
        return
    with _waiting:
        if _waited:
            return
        with _logged(logging.WARNING):
            if missing := _missing():
                libraries.find()
                _check_places()
                if not all(map(earlier_failure, missing)):
                    log.info("compiling before the first call, as ATTNREG_BUILD=now asks")
                what = " and ".join(library.title for library in missing)
                with says_if_slow(f"the first call waited: compiling {what}"), _locked():
                    failures = build_missing()
                if len(failures) == len(LIBRARIES):
                    raise BuildError(failures[0])
                for failure in failures:
                    log.warning("%s", failure)
        _waited = True


@contextlib.contextmanager
def _logged(level: int) -> Iterator[None]:
    """Log an error instead of raising it: calls run without the libraries that aren't compiled or used.

    The line has every reason once. It is a warning if a compiled library isn't used.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the program goes on in any case
        unused = _reasons()
        reasons = "; ".join(dict.fromkeys([*unused, str(error)]))
        missing = [library.title for library in LIBRARIES if existing(library) is None]
        what = missing[0] if len(missing) == 1 else "its compiled part"
        log.log(logging.WARNING if unused else level, "attnreg runs without %s: %s", what, reasons)


def _reasons() -> list[str]:
    """Return why libraries that are compiled aren't used, each reason once."""
    reasons = {}
    for library in LIBRARIES:
        with contextlib.suppress(BuildError, OSError):  # whether the library is compiled is unknown
            reasons[libraries.why_not_used(library)] = True
    return [reason for reason in reasons if reason]


def build(library: Library, only_missing: bool = False) -> Path:
    """Compile a library now and return its file, even after an earlier failure; waits for other processes.

    With `only_missing` an existing library is returned as it is. Raises BuildError with the reason if
    compiling fails.
    """
    try:
        _check_places()
        with _locked():
            return (existing(library) if only_missing else None) or _build(library)
    except BuildError:
        raise
    except (OSError, RuntimeError) as error:
        raise BuildError(f"{library.title} can't be compiled: {error}") from error


def build_missing() -> list[str]:
    """Compile missing libraries without an earlier failure; return a line for each one that isn't compiled.

    The caller owns the lock.
    """
    failures = []
    for library in _missing():
        try:
            if failure := earlier_failure(library):
                raise BuildError(failure)
            _build(library)
        except BuildError as error:
            failures.append(libraries.in_one_line(str(error)))
    return failures


def is_left_out() -> bool:
    """Return whether ATTNREG_ROUTERS=python excludes compiled libraries."""
    return build_mode() == "left out"


def build_mode() -> str:
    """Return ATTNREG_BUILD, "background", "now" or "off"; "left out" with ATTNREG_ROUTERS=python."""
    try:
        settings = environment.read()
    except AttnregError:
        return "off"  # the calls that the settings apply to raise the error
    return "left out" if settings.routers == "python" else settings.build or "background"


def _missing() -> list[Library]:
    return [library for library in LIBRARIES if existing(library) is None]


def _start() -> None:
    """Start the process that compiles, unless another process compiles or compiling would fail."""
    with _logged(logging.INFO):
        failures = [earlier_failure(library) for library in _missing()]
        if failures and all(failures):
            raise BuildError(failures[0])
        compiler = libraries.find()
        _check_places()
        _detach(compiler)


def _check_places() -> None:
    """Make the folders for the libraries; raises OSError as `caches.check_writable` does."""
    for folder in (lock_path().parent, *(target(library).parent for library in LIBRARIES)):
        caches.make(folder)
        caches.check_writable(folder)


def _detach(compiler: list[str]) -> None:
    """Start the compiling process through a process that ends at once.

    A thread waits for the latter, some hundredths of a second.
    """
    # In a frozen or embedded Python the executable is the program itself, which would start a second time.
    if getattr(sys, "frozen", False) or not Path(sys.executable or "").name.startswith("python"):
        raise BuildError(f"{sys.executable!r} is no Python to compile with; `attnreg build` does it")
    with caches.readable_errors():
        lock = locks.lock_file(lock_path())
    if lock is None:
        log.debug("another process compiles already")
        return
    try:
        if not (missing := _missing()):
            return  # another process has just ended
        process = subprocess.Popen(
            libraries.python(DETACHED, str(lock), str(libraries.ROOT / "__init__.py")),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            cwd=lock_path().parent, pass_fds=(lock,), start_new_session=True,
            env=libraries.child_environment() | {"CXX": shlex.join(compiler)},
        )  # fmt: skip
    finally:
        locks.release(lock)
    unused = _reasons()
    log.log(
        logging.WARNING if unused else logging.INFO,
        "compiling %s in the background, at low priority: programs that start after it use them; "
        "ATTNREG_BUILD=off forbids it%s",
        " and ".join(library.title for library in missing),
        "".join(f"; {reason}" for reason in unused),
    )
    # A daemon thread, so that a program that ends doesn't wait.
    threading.Thread(target=_wait_for, args=(process,), name="attnreg-build", daemon=True).start()


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    """Wait for the process that starts the compiling process, and log a failure."""
    with _logged(logging.INFO):
        if process.wait():
            raise BuildError(f"the process that compiles ended with status {process.returncode}")


def lock_path() -> Path:
    return caches.folder("build") / "build.lock"


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    with caches.readable_errors():
        lock = locks.lock_file(lock_path(), wait=True)
    try:
        yield
    finally:
        if lock is not None:
            locks.release(lock)


def _build(library: Library) -> Path:
    for each in LIBRARIES:
        for scratch in target(each).parent.glob(f"{libraries.SCRATCH}*"):
            shutil.rmtree(scratch, ignore_errors=True)  # a killed process left it: this process has the lock
    record = _record(library)
    try:
        file = libraries.compile_library(library)
    except BuildError as error:
        with contextlib.suppress(BuildError, OSError):
            if not any(text in str(error) for text in DISK_FULL):
                _remember(record, str(error))
        raise
    record.unlink(missing_ok=True)
    return file


def _record(library: Library) -> Path:
    return caches.folder("build") / f"{target(library).stem}.failed"


def _remember(record: Path, message: str) -> None:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    text = json.dumps({"compiler": libraries.identity(libraries.find()), "when": now, "message": message})
    temporary = record.with_suffix(f".{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(record)


def earlier_failure(library: Library) -> str:
    """Return how this machine's compiler has failed to compile a library; empty if it hasn't."""
    try:
        record = json.loads(_record(library).read_text(encoding="utf-8"))
        if record["compiler"] != libraries.identity(libraries.find()):
            return ""
        message = libraries.in_one_line(str(record["message"]))
        return f"{message} (tried at {record['when']}; `attnreg build` tries again)"
    except (BuildError, OSError, RuntimeError, ValueError, KeyError, TypeError):
        return ""

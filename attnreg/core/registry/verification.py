"""Verifying a kernel before it serves: once for its revision, a device and torch's version.

`attnreg verify` checks it, in a process of its own: a kernel that is wrong may end its process, or write
into memory that isn't its own. What came of that is a file in attnreg's cache folder, which all later
processes read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from attnreg.core.contract.spec import Device
from attnreg.core.torchlib import caches, children
from attnreg.core.torchlib.locks import rewriting
from attnreg.errors import AttnregError

log = logging.getLogger("attnreg")

LIMIT = 1800.0  # seconds for all checks: a slow machine takes minutes
RECENT = 60.0  # seconds in which a failed attempt counts for the other ranks of a job, which waited for it

# What verifying needs of a program's settings; its requests for backends are about other calls.
_KEPT = ("ATTNREG_BUILD", "ATTNREG_ROUTERS")


def verdict(name: str, revision: str, device: Device) -> str:
    """Return why a kernel must not serve on a device, or an empty string; verifies it if nobody has.

    `name` is the backend's, and `revision` says which kernel that is.
    """
    by_hand = f"`attnreg verify --backend {shlex.quote(name)} --device {device.place}`"
    try:
        file = file_of(revision, device)
        record = _read(file)
        if record is None:
            caches.make(file.parent)
            with rewriting(file, LIMIT):  # of all ranks of a job, one verifies
                record = _read(file)
                problem = "" if record is not None else _recent_problem(file)
                if record is None and not problem:
                    log.warning("%s is verified before it serves, once: this may take minutes", name)
                    problem = _run(name, device)
                    record = _read(file)
                    if record is None and problem:
                        _write(_of_attempt(file), {"wrong": problem})
            if record is None:
                return f"isn't verified: {problem or 'its verification left no result'}; {by_hand} says more"
    except OSError as error:
        return f"isn't verified, and nothing could be noted: {error}"
    if not record["wrong"]:
        return ""
    return f"its verification failed: {record['wrong']}; {by_hand} shows all"


def _of_attempt(file: Path) -> Path:
    """Return the file for what kept a verification from the end."""
    return file.with_suffix(".failed")


def _recent_problem(file: Path) -> str:
    """Return what has just kept another process from the end, or an empty string."""
    attempt = _of_attempt(file)
    try:
        is_recent = abs(time.time() - attempt.stat().st_mtime) < RECENT
    except OSError:
        return ""
    return str((_read(attempt) or {"wrong": ""})["wrong"]) if is_recent else ""


def file_of(revision: str, device: Device) -> Path:
    """Return the file for what came of a verification."""
    key = "\n".join((revision, device.type, device.name, device.arch, _torch_version(), _attnreg_version()))
    return caches.folder("verified") / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def remember(name: str, revision: str, device: Device, checks: int, wrong: str) -> None:
    """Write down what came of a verification; raises OSError if that can't be written."""
    file = file_of(revision, device)
    record = {
        "backend": name, "revision": revision, "device": str(device), "torch": _torch_version(),
        "by": f"attnreg {_attnreg_version()}", "checks": checks, "wrong": wrong,
    }  # fmt: skip
    _write(file, record)


def _write(file: Path, record: dict[str, Any]) -> None:
    caches.make(file.parent)
    caches.write_whole(file, json.dumps(record, indent=1))


def _attnreg_version() -> str:
    return str(sys.modules["attnreg"].__version__)


def _torch_version() -> str:
    import torch  # here: decisions about recorded calls need none

    return str(torch.__version__)


def _read(file: Path) -> dict[str, Any] | None:
    """Return what came of a verification; None if there is nothing, or nothing that can be read."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return record if isinstance(record["wrong"], str) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _run(name: str, device: Device) -> str:
    """Have `attnreg verify` check a kernel; return what kept it from the end, or an empty string."""
    if not sys.executable:
        return "this program has no Python to start for it"
    command = [sys.executable, "-P", "-m", "attnreg", "verify", "--quiet", "--backend", name]
    try:
        done = children.run([*command, "--device", device.place], LIMIT, _environment(), str(Path.cwd()))
    except subprocess.TimeoutExpired:
        return f"its checks didn't end within {LIMIT:.0f} s"
    except (OSError, AttnregError) as error:
        return f"its checks couldn't be started: {error}"
    if done.returncode < 0:
        return f"its checks ended by signal {-done.returncode}"
    return " ".join((done.stdout.strip() or done.stderr.strip()).split())[-400:]


def _environment() -> dict[str, str]:
    """Return the variables of the process that verifies: with the same packages, but no network."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("ATTNREG_") or name in _KEPT
    }
    folders = dict.fromkeys(str(Path(folder).absolute()) for folder in sys.path)
    return kept | {"PYTHONPATH": os.pathsep.join(folders), "HF_HUB_OFFLINE": "1"}

"""Processes that tests start: what their environment is, and what they print."""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import attnreg


def environment(**variables):
    """Return the variables of a process: of attnreg's own only these, and nothing is compiled."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("ATTNREG_")}
    return others | {"ATTNREG_BUILD": "off"} | variables


def python(*arguments, cwd=None, **variables):
    """Run Python in a process of its own, on one core, so that a fork finds no OpenMP threads."""
    return subprocess.run(
        [sys.executable, *arguments], env=environment(**{"OMP_NUM_THREADS": "1"} | variables), cwd=cwd,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


# Has imported torch, which takes seconds, but nothing of attnreg, and forks for each program it is sent.
FORKING = """
import gc, json, os, sys, torch
gc.freeze()
for line in sys.stdin:
    if not (child := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
code, arguments, environ, folder, outputs = json.loads(line)
for number, file in enumerate((os.devnull, *outputs)):
    os.dup2(os.open(file, os.O_RDWR), number)
os.chdir(folder)
os.environ.clear()
os.environ.update(environ)
sys.argv[1:] = arguments
if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
    torch._import_device_backends()  # the last thing that `import torch` does
exec(code)
"""


@functools.cache
def forking():
    root = str(Path(attnreg.__file__).parents[1])
    variables = {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": root}
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    started = subprocess.Popen(
        [sys.executable, "-c", FORKING], env=environment(**variables), text=True, **pipes
    )
    atexit.register(started.communicate)
    return started


def forked(code, *arguments, cwd=None, **variables):
    """Run code as `python("-c", ...)` does, for tests that aren't about the import of torch itself."""
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as errors:
        environ, outputs = environment(**{"OMP_NUM_THREADS": "1"} | variables), (out.name, errors.name)
        given = code, list(map(str, arguments)), environ, str(cwd or Path.cwd()), outputs
        print(json.dumps(given), file=forking().stdin, flush=True)
        status = int(forking().stdout.readline())
        read = (Path(file).read_text() for file in outputs)
        return subprocess.CompletedProcess((code, *arguments), status, *read)

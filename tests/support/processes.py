"""Processes that tests start: what their environment is, and what they print."""

import atexit
import functools
import json
import os
import signal
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


# Has imported torch and Dynamo, which attnreg needs and which take seconds, and the packages that commands
# and settings need, but nothing of attnreg. It forks for each program that it is sent.
# A fork ends as Python does, but for taking torch's modules apart, which would take as long as most programs.
FORKING = """
import gc, json, os, sys, torch, torch._dynamo, weakref
import packaging.version, pydantic, rich.panel, rich.progress, rich.table, tomllib, zoneinfo
import typer.rich_utils

for finalizer in weakref.finalize._registry:
    finalizer.atexit = False  # of torch's libraries of ops; those of a fork's own are finalized

def run(code):
    import atexit, os, sys, threading
    status = 0
    try:
        exec(code, globals())
    except SystemExit as ended:
        status = ended.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except KeyboardInterrupt:
        raise  # Python itself ends by the signal, unless what runs at the end makes it forget that
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

gc.freeze()
gc.set_threshold(50_000, 20, 20)
for line in sys.stdin:
    waits, code, arguments, environ, folder, files = json.loads(line)
    if not (child := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if waits else child, flush=True)
else:
    sys.exit()
for number, file in enumerate(files):
    os.dup2(os.open(file, os.O_RDWR), number)
os.chdir(folder)
os.environ.clear()
os.environ.update(environ)
sys.argv[1:] = arguments
if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
    torch._import_device_backends()  # the last thing that `import torch` does
run(code)
"""


# Has a program find the packages that the forking process has ready not imported, for tests about imports.
WITHOUT_PACKAGES = """
for name in [*__import__("sys").modules]:
    if name.partition(".")[0] in ("pydantic", "rich", "typer"):
        del __import__("sys").modules[name]
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


def fork(files, code, *arguments, waits, cwd=None, **variables):
    """Fork for code with these files for stdin, stdout and stderr; returns its status, or its process id."""
    environ = environment(**{"OMP_NUM_THREADS": "1"} | variables)
    given = waits, code, list(map(str, arguments)), environ, str(cwd or Path.cwd()), list(map(str, files))
    print(json.dumps(given), file=forking().stdin, flush=True)
    return int(forking().stdout.readline())


def forked(code, *arguments, **options):
    """Run code as `python("-c", ...)` does, for tests that aren't about the import of torch itself."""
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as errors:
        status = fork((os.devnull, out.name, errors.name), code, *arguments, waits=True, **options)
        read = (Path(file.name).read_text() for file in (out, errors))
        return subprocess.CompletedProcess((code, *arguments), status, *read)


# The code of `python -m attnreg`.
COMMAND = "import runpy; runpy.run_module('attnreg', run_name='__main__', alter_sys=True)"


class Forked:
    """A forked process that runs beside the test, which writes to its stdin and reads its stdout."""

    def __init__(self, code, *arguments, **options):
        self.folder = tempfile.TemporaryDirectory()
        stdin, stdout, self.stderr = (Path(self.folder.name, name) for name in ("stdin", "stdout", "stderr"))
        for pipe in (stdin, stdout):
            os.mkfifo(pipe)
        self.stderr.touch()
        self.pid = fork((stdin, stdout, self.stderr), code, *arguments, waits=False, **options)
        self.stdin, self.stdout = stdin.open("w"), stdout.open()  # once it has opened them

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        """Kill it, wait until it is gone, and return what it wrote to stderr and nobody has read before."""
        if self.stdin.closed:
            return ""
        self.send_signal(signal.SIGKILL)
        self.stdout.read()  # ends with the process
        self.stdin.close()
        self.stdout.close()
        said = self.stderr.read_text()
        self.folder.cleanup()
        return said

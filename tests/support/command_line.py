"""What tests of the command line share: reading its output, and running it in a process of its own."""

import functools
import json
import subprocess
import sys

from typer import testing
from typer.testing import CliRunner

from attnreg.tools import cli

# Typer makes all commands of the app anew at each run of one, which takes longer than most of them run. It is
# typer's own helper, so another version may have none: then it only takes longer.
if hasattr(testing, "_get_command"):
    testing._get_command = functools.cache(testing._get_command)


def invoke(*arguments):
    """Run a command in this process; raises what would be a traceback in one of its own."""
    result = CliRunner().invoke(cli.app, list(map(str, arguments)), obj=[])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def words(result):
    """Return the output without its line breaks."""
    return " ".join(result.output.split())


def rows(result):
    """Return the backends of the JSON output by name."""
    return {row["name"]: row for row in json.loads(result.stdout)["backends"]}


def in_a_process(*arguments, **options):
    """Run Python with the arguments; returns the completed process."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


NO_SYMBOL = "libcuda.so: undefined symbol [abi]"


def broken_loader():
    """Fail as the loader of a backend does whose package was built for another CUDA."""
    raise ImportError(NO_SYMBOL)

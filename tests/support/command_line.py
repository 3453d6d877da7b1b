"""What tests of the command line share: reading its output, and running it in a process of its own."""

import json
import subprocess
import sys


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


def broken_loader():
    """Fail as the loader of a backend does whose package was built for another CUDA."""
    raise ImportError("libcuda.so: undefined symbol [abi]")

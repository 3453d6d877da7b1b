"""Runs flash-attention's own tests of its functions, from a checkout of its repository, through attnreg's.

    python tests/flash_attention.py CHECKOUT [--backends FA2,math,chosen] [--each 150]
        [--processes 4] [--minutes 8] [--out FILE]

CHECKOUT/tests/test_flash_attn.py imports `flash_attn` and finds attnreg's functions. These tests need a GPU
and einops. A backend runs alone: a call that it can't run is refused, with its reason, and counts as that;
`chosen` is what attnreg chooses, `math` included. Of each test function a sample of its parameters runs, the
same each time; how many of it time has left out is said. What flash-attention's tests skip is skipped.

The table is Markdown, for docs/flash-attn.md: a row for each function and each option, for all its tests.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import heapq
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Not this folder itself: its `flash_attn` would be found in the place of an installed one.
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[1]
sys.path[:] = [str(ROOT), *(one for one in sys.path if Path(one or ".").resolve() != HERE.resolve())]

import pytest  # noqa: E402
import torch  # noqa: E402

import attnreg  # noqa: E402
from attnreg.core import registry  # noqa: E402
from attnreg.errors import UnsupportedInputError  # noqa: E402
from attnreg.flash_attn import activation  # noqa: E402
from attnreg.tools.bench.report import machine_line, save  # noqa: E402

TESTS = "tests/test_flash_attn.py"
CHOSEN = "chosen"
OUTCOMES = ("passed", "failed", "refused", "skipped")
MOST_FAILURES = 40  # that are listed of each backend
# Each repeats a call 250 times: they come last, so that time leaves them out before others.
SLOW = "test_flash_attn_race_condition"
GRACE = 40.0  # seconds that the tests of a process have to end after the last may begin
CUDA_ERROR = 17  # what a process ends with after one: no later call on its GPU would work

# What a test asks for, by the arguments that flash-attention's tests have.
OPTIONS = {
    "dropout": lambda given: given.get("dropout_p", 0.0) > 0.0,
    "softcap": lambda given: given.get("softcap", 0.0) > 0.0,
    "ALiBi": lambda given: given.get("alibi", False),
    "causal": lambda given: given.get("causal", False),
    "window": lambda given: given.get("local", False),
    "deterministic": lambda given: given.get("deterministic", False),
    "fewer key heads": lambda given: given.get("mha_type", "mha") != "mha",
    "pages": lambda given: given.get("paged_kv_block_size") is not None,
    "new keys": lambda given: given.get("new_kv", False),
    "rotary": lambda given: given.get("new_kv", False) and given.get("rotary_fraction", 0.0) > 0.0,
    "left padding": lambda given: given.get("has_leftpad", False),
}


def stand_in() -> None:
    """Put attnreg's functions under the name `flash_attn`, beside whatever is installed.

    `activate` refuses where flash-attn-4 is installed, whose modules it would hide from a program. Here they
    stay: the stand-in's `__path__` is that of the installed package, so that backends find theirs.
    """
    spec = find_spec(activation.NAME)
    folders = [] if spec is None else [*(spec.submodule_search_locations or ())]
    if spec is not None and spec.origin:  # flash-attn itself, whose kernels FA2 may use
        importlib.import_module(f"{activation.NAME}.flash_attn_interface")
    modules = activation._modules()
    modules[activation.NAME].__path__ = folders
    sys.modules.update(modules)


def drawn(text: str) -> str:
    """Return a number for a text, the same in each process and run."""
    return hashlib.sha256(text.encode()).hexdigest()


def combinations(marks: list[pytest.Mark]) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """Return the arguments that a test is parametrized with, and all their values."""
    names, axes = [], []
    for mark in marks:
        own, values = mark.args[:2]
        own = own.replace(" ", "").split(",") if isinstance(own, str) else [*own]
        names += own
        axes.append([value if len(own) > 1 else (value,) for value in values])
    return names, (tuple(itertools.chain(*one)) for one in itertools.product(*axes))


class Runner:
    """A plugin of pytest that picks a sample of a file's tests and records what came of each.

    Args:
        backend: whose refusals count; an empty name where attnreg chooses.
        each: how many tests of each function at most; those of a smaller number are among those of a larger.
        part: number of this process, and how many there are.
        until: when to begin no other test, by `time.time()`.
        record: the file to write to.
    """

    def __init__(self, backend: str, each: int, part: tuple[int, int], until: float, record: Path) -> None:
        self.backend, self.each, self.part, self.until, self.record = backend, each, part, until, record
        self.known = {line["id"] for line in read(record) if "id" in line}
        self.about: dict[str, Any] = {}
        self.result = "passed", ""

    def write(self, **line: Any) -> None:
        with self.record.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize with a sample: to collect all of flash-attention's 508,777 tests takes minutes."""
        definition = metafunc.definition
        marks = [mark for mark in definition.own_markers if mark.name == "parametrize"]
        if not marks:
            return
        names, values = combinations(marks)
        texts = ((f"{definition.name} {value}", value) for value in values)
        chosen = heapq.nsmallest(self.each, texts, key=lambda pair: drawn(pair[0]))
        # Else pytest would parametrize again, by what it has read from the function.
        definition.own_markers[:] = [mark for mark in definition.own_markers if mark not in marks]
        ids = ["-".join(str(one).removeprefix("torch.") for one in value) for _, value in chosen]
        metafunc.parametrize(
            ",".join(names), [value if len(names) > 1 else value[0] for _, value in chosen], ids=ids
        )

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave the tests of this process, in an order in which any first part is a sample."""
        number, parts = self.part
        own = [item for item in items if int(drawn(item.name), 16) % parts == number]
        self.write(selected=len(own))
        left = [item for item in own if item.name not in self.known]
        items[:] = sorted(left, key=lambda item: (item.name.startswith(SLOW), drawn(item.name)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(error=last_line(report.longreprtext))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if time.time() > self.until:
            item.session.shouldstop = "time is over"
            return True
        given = item.callspec.params if hasattr(item, "callspec") else {}
        options = [name for name, asks in OPTIONS.items() if asks(given)]
        self.about = {"id": item.name, "test": item.name.partition("[")[0], "options": options}
        self.result = "passed", ""
        self.write(
            **self.about, outcome="failed", why="the process ended"
        )  # unless a later line says otherwise
        attnreg.reset_stats()
        return None

    def pytest_runtest_logfinish(self) -> None:
        ran = {name: [n["forward"], n["backward"]] for name, n in attnreg.stats().calls.items()}
        self.write(**self.about, outcome=self.result[0], why=self.result[1], ran=ran)
        if not torch.cuda.is_initialized():
            return
        if self.result[0] == "failed":
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                os._exit(CUDA_ERROR)
        torch.cuda.empty_cache()  # the other processes use the same GPU

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        if call.excinfo is not None:
            self.result = self.outcome(call.excinfo.value)
        return report

    def outcome(self, error: BaseException) -> tuple[str, str]:
        """Return what an error of a test counts as, and why."""
        if isinstance(error, pytest.skip.Exception):
            return "skipped", str(error)
        if isinstance(error, UnsupportedInputError):
            reasons = error.rejected.get(self.backend) or (str(error).splitlines()[0],)
            return "refused", reasons[0]
        if isinstance(error, ImportError) and activation.NAME in str(error):
            return "refused", str(error).partition(" (")[0]
        return "failed", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def last_line(text: str) -> str:
    """Return an error without its traceback, whose paths are those of one machine."""
    return text.strip().rpartition("\n")[2][-500:]


def read(record: Path) -> list[dict[str, Any]]:
    """Return the lines of a record; the last may be half of one where the process was ended."""
    lines = []
    for line in record.read_text().splitlines() if record.exists() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def run(file: Path, runner: Runner) -> int:
    """Run a file's tests in this process, through attnreg."""
    for name in attnreg.list_backends():  # FA4 looks for its package below the name that the stand-in takes
        with contextlib.suppress(attnreg.BackendUnavailableError):
            registry.find(name).kernels()
    stand_in()
    attnreg.configure({"strict": bool(runner.backend), "log_level": "error"})
    if runner.backend:
        attnreg.register_backend(runner.backend)
    # Nothing of that repository's settings, or of attnreg's tests: some of both are for other tests.
    options = ["-q", "--noconftest", "-c", os.devnull, f"--rootdir={file.parent}", "-p", "no:cacheprovider"]
    code = int(pytest.main([str(file), *options, "--tb=line", "--show-capture=no"], plugins=[runner]))
    runner.write(ended=code)
    return code


def main() -> int:
    """Run the tests, or as one of the processes a part of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--backends", default=CHOSEN)
    parser.add_argument("--each", type=int, default=150, help="tests of each function")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="in which all tests begin, of all backends"
    )
    parser.add_argument("--grace", type=float, default=GRACE, help="seconds until what has begun is ended")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    file = given.checkout / TESTS
    if not file.is_file():
        parser.error(f"{file}: no such file, expected a checkout of flash-attention")
    if given.part:
        number, parts = map(int, given.part.split("/"))
        backend = "" if given.backends == CHOSEN else given.backends
        sample = given.each, (number, parts), given.until, given.record
        return run(file, Runner(backend, *sample))

    print(f"{machine_line()}\n")
    names = [name.strip() for name in given.backends.split(",") if name.strip()]
    started, seconds, results = time.time(), 60.0 * given.minutes, {}
    for at, name in enumerate(names, 1):
        until = started + seconds * at / len(names)
        results[name] = summary(*records(given, name, until))
        print("\n" + "\n".join(table(name, results[name])), flush=True)
    about = {"tests": hashlib.sha256(file.read_bytes()).hexdigest(), "each": given.each}
    save(given.out, {"sample": about, **results})
    return 1 if any(result["errors"] for result in results.values()) else 0


def records(given: argparse.Namespace, backend: str, until: float) -> tuple[list[list[Any]], list[str]]:
    """Return the lines that each process of a backend has written, and what ended one that ran no test."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.processes) as threads:
        files = [Path(folder, f"{number}.jsonl") for number in range(given.processes)]
        parts = [f"{number}/{given.processes}" for number in range(given.processes)]
        errors = [*threads.map(lambda *of: part_of(given, backend, until, *of), parts, files)]
        return [read(file) for file in files], [one for one in errors if one]


def part_of(given: argparse.Namespace, backend: str, until: float, part: str, record: Path) -> str:
    """Run a part of the tests, in another process where one dies; returns what ended one that ran no test."""
    options = {"backends": backend, "each": given.each, "part": part, "until": until}
    arguments = [f"--{name}={value}" for name, value in (options | {"record": record}).items()]
    command = [sys.executable, __file__, str(given.checkout), *arguments]
    variables = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    while True:
        before = len(read(record))
        try:
            left = max(until - time.time(), 0.0) + given.grace
            run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            begun = [line for line in read(record) if "id" in line][-1:]
            for line in begun:
                with record.open("a") as file:
                    file.write("\n" + json.dumps(line | {"outcome": "left out"}) + "\n")
            return "" if begun else f"no test began in {left:.0f} seconds"
        lines = read(record)[before:]
        if errors := [line["error"] for line in lines if "error" in line]:
            return errors[0]
        if any("ended" in line for line in lines):
            return ""
        if not any("id" in line for line in lines):
            return last_line(run.stdout + run.stderr)


def summary(parts: list[list[dict[str, Any]]], errors: list[str]) -> dict[str, Any]:
    """Return what came of the tests: by function and option, with reasons, and how many time has left out."""
    # The last line of a test says what came of it.
    last = {line["id"]: line for lines in parts for line in lines if "id" in line}
    tests = {name: line for name, line in last.items() if line["outcome"] in OUTCOMES}
    selected = sum(next((line["selected"] for line in lines if "selected" in line), 0) for lines in parts)
    rows: dict[tuple[str, str], Counter[str]] = {}
    for line in tests.values():
        for option in ("all", *line["options"]):
            for test in (line["test"], "all"):
                counts = rows.setdefault((test, option), Counter())
                counts[line["outcome"]] += 1
                counts.update(line.get("ran", {}).keys() if line["outcome"] == "passed" else ())
    refused = Counter(line["why"] for line in tests.values() if line["outcome"] == "refused")
    failed = [
        {"id": line["id"], "why": line["why"]} for line in tests.values() if line["outcome"] == "failed"
    ]
    return {
        "rows": [
            {
                "test": test,
                "option": option,
                **{name: counts.pop(name, 0) for name in OUTCOMES},
                "by": dict(counts),
            }
            for (test, option), counts in sorted(rows.items())
        ],
        "refused": [{"why": why, "tests": count} for why, count in refused.most_common()],
        "failed": failed[:MOST_FAILURES],
        "left_out": selected - len(tests),
        "errors": [*dict.fromkeys(errors)],  # mostly the same in each process
    }


def table(backend: str, result: dict[str, Any]) -> list[str]:
    """Return the Markdown table of a backend."""
    lines = [f"| {backend} | passed | failed | refused | skipped |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        if "all" in (row["test"], row["option"]):
            name = row["option"] if row["test"] == "all" else f"`{row['test']}`"
            lines.append(f"| {name} | " + " | ".join(str(row[one]) for one in OUTCOMES) + " |")
    reasons = [f"refused {row['tests']}: {row['why']}" for row in result["refused"]]
    failures = [f"failed {row['id']}: {row['why']}" for row in result["failed"]]
    left_out = f"time has left out {result['left_out']} of the sample"
    return [*lines, "", *reasons, *failures, left_out, *result["errors"]]


if __name__ == "__main__":
    sys.exit(main())

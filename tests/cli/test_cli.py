"""Promises of the command line as a whole: help, errors, exit codes, and output that fits."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.command_line import in_a_process, rows
from support.processes import COMMAND, environment, forked
from typer.main import get_command

import attnreg
from attnreg.core.settings.config import Settings
from attnreg.tools import cli, lines
from attnreg.tools.cli.options import OF_PACKAGES

CALL = ("--q", "2,64,4,32", "--kv", "2,48,2,32", "--device", "cpu")


APP = get_command(cli.app).commands
BENCH = APP["bench"].commands
COMMANDS = [(name,) for name in APP] + [("bench", name) for name in BENCH]


# With -P Python itself leaves the folder out; --help imports no torch.
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("-m", "attnreg", "explain", *CALL), id="-m, explain", marks=pytest.mark.slow),
        pytest.param(("-m", "attnreg", "--help"), id="-m"),
        pytest.param(("-P", "-m", "attnreg", "--help"), id="-P -m"),
    ],
)
def test_a_command_runs_no_module_of_the_current_folder(tmp_path, words):
    for name in ("torch", "typer", "numpy", "subprocess", "logging"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    installed = os.pathsep.join((str(Path(attnreg.__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    environ = os.environ | {"PYTHONPATH": installed.rstrip(os.pathsep)}
    done = in_a_process(*words, cwd=tmp_path, env=environ)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_output_that_an_encoding_lacks_is_replaced(tmp_path):
    in_ascii = f"import sys; sys.stdout.reconfigure(encoding='ascii'); {COMMAND}"
    done = forked(in_ascii, "warmup", "--q", "1,16,2,16", "--dtype", "fp32")
    assert (done.returncode, done.stderr) == (0, "")
    assert "query (1, 16, 2, 16) . key (1, 16, 2, 16)" in done.stdout
    code = "import sys; print(sys.stdout.errors); print('\\N{MICRO SIGN}')"
    (tmp_path / "program.py").write_text(code)
    done = forked(in_ascii, "run", tmp_path / "program.py")
    assert done.stdout == "strict\n" and "UnicodeEncodeError" in done.stderr  # a program's output is its own


def test_help_imports_neither_torch_nor_anything_else_that_is_slow():
    code = """
import sys
from attnreg.tools.cli import main
sys.argv = ["attnreg", "--help"]
try:
    main()
except SystemExit as done:
    heavy = {"torch", "pydantic", "rich.progress", "matplotlib"} & set(sys.modules)
    sys.exit(f"imported {heavy}" if heavy else done.code)
"""
    done = in_a_process("-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in cli.COMMANDS)
    # Typer's runner of tests has wider lines than a process.
    assert "..." not in done.stdout.partition("Commands:")[2]


@pytest.mark.parametrize("words", [(), ("bench",)], ids=["attnreg", "bench"])
def test_the_list_of_commands_fits_80_columns_and_cuts_no_sentence_short(call, words):
    listed = call(*words, "--help").output
    assert max(map(len, listed.splitlines())) <= 80
    assert "..." not in listed.partition("Commands:")[2]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_help_fits_80_columns_and_has_an_example_that_the_command_accepts(call, words):
    result = call(*words, "--help")
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    assert "can't be loaded" not in result.output.lower()
    (example,) = (line for line in result.output.splitlines() if "Example: " in line)
    example = shlex.split(example.partition(" > ")[0])
    assert example[: 2 + len(words)] == ["Example:", "attnreg", *words]
    name, *options = example[2:]
    command = APP[name] if name != "bench" else BENCH[options.pop(0)]
    command.make_context(name, options, obj=[])  # raises where an option is unknown or has a wrong value


def test_version_is_printed(call):
    assert call("--version").output == f"attnreg {attnreg.__version__}\n"


@pytest.mark.parametrize("arguments", [(), ("inof",), ("info", "--jsn"), ("explain",)])
def test_wrong_usage_is_exit_code_2(call, arguments):
    assert call(*arguments).exit_code == 2


def test_a_command_whose_file_cannot_be_imported_breaks_no_other():
    broken = cli._function("no-such-command")
    assert "No module named 'attnreg.tools.cli.no_such_command'" in broken.__doc__
    with pytest.raises(attnreg.AttnregError, match="no-such-command can't be loaded: No module named"):
        broken()


def test_a_command_needs_no_entry_point_that_torch_runs():
    done = forked(COMMAND, "info", "--json", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["versions"]["torch"] == torch.__version__


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="pipes break otherwise here")
@pytest.mark.parametrize("arguments", [("--help",), ("config-schema",)])
def test_a_closed_pipe_ends_a_command_quietly(arguments):
    command = [sys.executable, "-m", "attnreg", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == -signal.SIGPIPE  # what a shell calls 141


@pytest.mark.skipif(os.name != "posix", reason="shells close streams otherwise here")
def test_a_command_without_stdout_ends_as_with_one():
    command = ["/bin/sh", "-c", 'exec "$0" -m attnreg --help >&-', sys.executable]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, ""),
        (attnreg.UnsupportedInputError("no backend runs it"), 1, "attnreg: no backend runs it\n"),
        (attnreg.BackendUnavailableError("FA9 can't load here"), 1, "attnreg: FA9 can't load here\n"),
        (attnreg.ConfigError("site.toml:1: wrong"), 2, "attnreg: site.toml:1: wrong\n"),
        (attnreg.UnknownBackendError("none is named 'FA9'"), 2, "attnreg: none is named 'FA9'\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_attnreg_and_ctrl_c_end_without_a_traceback(call, monkeypatch, error, code, message):
    def fail():
        raise error

    monkeypatch.setattr(Settings, "model_json_schema", fail)
    result = call("config-schema")
    assert (result.exit_code, result.stderr, result.stdout) == (code, message, "")


@pytest.mark.parametrize("command", ["verify --case heads", "warmup --q 2,9,4,32 --q 2,8,4,32 --no-backward"])
def test_what_was_done_before_ctrl_c_is_printed_as_json(call, fake, plugins, kernels, command):
    calls = []

    def forward(*arguments):
        calls.append(arguments)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return kernels.forward(*arguments)

    plugins(slow=fake("slow", load=lambda: kernels._replace(forward=forward)).backend)
    result = call(*command.split(), "--device", "cpu", "--backend", "slow", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["finished"]) == (130, False)
    done = found["calls"] if "calls" in found else found["backends"][0]["rows"]
    assert len(done) == 1


def test_config_schema_is_that_of_the_settings(call):
    assert json.loads(call("config-schema").stdout).items() >= Settings.model_json_schema().items()


SHAPE = "expected four whole numbers: batch,length,heads,head_dim"


EVERYWHERE = {
    "--backend maht": "no backend is named 'maht'; did you mean 'math'? known backends:",
    "--dtype bf17": "--dtype: got 'bf17', expected a floating-point dtype",
    "--device banana": "--device: got 'banana', expected 'cpu', 'cuda', 'cuda:N' or another",
}
DEVICES, OF_TORCH = "expected 'cpu', 'cuda', 'cuda:N'", "or another device that torch knows"
WINDOW = {
    "--window 5": "--window: got '5', expected two whole numbers: left,right",
    "--window 3,-5": "--window: got '3,-5', expected numbers of keys, -1 for all",
}


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        *((name, *bad) for name in ("explain", "verify", "warmup") for bad in EVERYWHERE.items()),
        *((name, *bad) for name in ("explain", "warmup") for bad in WINDOW.items()),
        *((name, "--device sm_90", "--device: got 'sm_90'") for name in ("verify", "warmup")),
        ("explain", "--q 2,64", f"--q: got '2,64', {SHAPE}"),
        ("explain", "--q 2,64,x,32", f"--q: got '2,64,x,32', {SHAPE}"),
        ("explain", "--kv 3,64,2,32", "--kv: got batch 3 and head dim 32, expected those of --q, 2 and 32"),
        ("explain", "--kv 2,64,3,32", "heads: got 4 for the query and 3 for the key"),
        ("explain", "--dtype int32", "--dtype: got 'int32', expected a floating-point dtype"),
        ("explain", "--dtype nn", "--dtype: got 'nn', expected a floating-point dtype"),
        ("explain", "--device sm90x!", "--device: got 'sm90x!', expected 'cpu', 'cuda', 'cuda:N' or 'sm_NN'"),
        ("explain", "--device H100", f"--device: got 'H100', {DEVICES} or 'sm_NN'; did you mean 'sm_90'?"),
        ("verify", "--device gpu", f"--device: got 'gpu', {DEVICES} {OF_TORCH}; did you mean 'cuda'?"),
        ("explain", "--dropout 1.5", "dropout_p: got 1.5, expected 0 to 1"),
        ("explain", "--prefer math,,cpu", "--prefer: got 'math,,cpu', expected names separated by commas"),
        ("explain", "--tokens-q 5", "--tokens-q: got no --varlen, expected it as well"),
        ("explain", "--tokens-k 0", "--tokens-k: got no --varlen, expected it as well"),
        ("explain", "--prefer math --backend cpu", "--prefer: got --backend as well, expected one of them"),
        ("explain", "--prefer math,nothing", "no backend is named 'nothing'"),
        ("verify", "--dtype float8_e5m2", "--dtype: got 'float8_e5m2', expected one of"),
        ("verify", "--case nonesuch", "--case: got 'nonesuch', expected a part of a case's name, such as"),
        ("verify", "--device meta", "--device: got 'meta', expected a device that computes"),
        ("warmup", "--kv 1,8,4,32", "--kv: got 2, expected one for each --q, 1, or none"),
        ("warmup", "--q 1,8", "--kv: got 1, expected one for each --q, 2, or none"),
    ],
)
def test_a_bad_value_is_one_line_on_stderr_and_exit_code_2(call, command, options, message):
    usual = ("--device", "cpu") if command == "verify" else CALL
    for extra in ((), ("--json",)):
        result = call(command, *usual, *options.split(), *extra)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"attnreg: {message}")
        assert result.stderr.count("\n") == 1
        printed = json.loads(result.stdout)["error"]["message"] if extra else result.stdout
        assert printed == (result.stderr.removeprefix("attnreg: ").strip() if extra else "")


def test_what_a_backend_prints_while_it_loads_stays_out_of_the_json(call, fake, plugins, kernels):
    def load():
        sys.stdout.write("Thank you for choosing chatty!")
        return kernels

    plugins(chatty=fake("chatty", load=load).backend)
    result = call("info", "--json")
    assert rows(result)["chatty"]["state"] == "ready"
    assert "Thank you" in result.stderr


def too_long(output, width):
    """Return the lines that don't fit, but for those that end with the path of a file."""
    words = {line: line.split() for line in output.splitlines() if len(line) > width}
    return [line for line, found in words.items() if not Path(found[-1]).is_absolute()]


def test_lines_of_a_pipe_are_whole_and_those_of_a_terminal_fit_but_for_what_stays_whole(
    call, fake, plugins, monkeypatch
):
    path = "/a/very/long/path" * 12
    command = "pip install 'a-package[with-extras]'"
    plugins(long=fake("long", unavailable=lambda: f"no CUDA driver: {path}", install=command).backend)
    assert f"no CUDA driver: {path}; install it with: {command}; from entry point " in call("info").output
    monkeypatch.setattr(lines, "width_of", lambda stream: 60)
    output = call("info", "--verbose").output
    assert [line.strip() for line in too_long(output, 60)] == [f"{command};"]
    assert f" {path};\n" in output


def test_tables_fit_80_columns_and_have_no_colours_on_a_pipe(call, fake, plugins, monkeypatch):
    reason = "no CUDA driver: not one of all the files that it is looked for in is there" * 3
    plugins(long=fake("long", unavailable=lambda: reason).backend)
    monkeypatch.setattr(lines, "width_of", lambda stream: 80)
    for arguments in (("info",), ("verify", "--case", "heads 4:2", "--device", "cpu")):
        output = call(*arguments).output
        assert too_long(output, 80) == []
        assert "\x1b" not in output
        assert all(line == line.rstrip() for line in output.splitlines())


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = sys.modules["matplotlib"] = None
from attnreg.tools import cli
for line in sys.stdin:
    sys.argv = ["attnreg", *line.split()]
    try:
        cli.main()
    except SystemExit as ended:
        print("exit", ended.code)
"""
QUICK = """info --json
explain --device cpu --q 1,64,4,32 --dtype fp32
"""
SLOW = """demo --steps 2 --device cpu --json
verify --backend math --device cpu --case odd --json
tune --q 1,8,2,16 --backend math --device cpu --dtype fp32 --no-backward --json
bench sdpa --quick --rounds 1 --device cpu --backend cpu --budget 1s --json
"""


@pytest.mark.slow
@pytest.mark.parametrize("lines", [QUICK, SLOW], ids=["quick", "slow"])
def test_commands_work_without_numpy_and_say_nothing_of_it(tmp_path, lines):
    done = in_a_process("-c", WITHOUT_NUMPY, input=lines, cwd=tmp_path, env=environment(OMP_NUM_THREADS="1"))
    exits = [line for line in done.stdout.splitlines() if line.startswith("exit")]
    assert exits == ["exit 0"] * len(lines.splitlines()), done.stderr
    assert "NumPy" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["verify", "tune"])
def test_a_backend_that_no_installed_package_has_is_an_error_with_a_next_step(call, command):
    result = call(command, "--backend", "zzz", "--device", "cpu")
    assert result.exit_code == 2
    assert result.stderr.startswith("attnreg: no backend is named 'zzz'; known backends: ")
    assert result.stderr.endswith(f"; {OF_PACKAGES}\n")

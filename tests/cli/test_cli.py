"""Promises of the command line: what it shows, what it answers to bad input, and its exit codes."""

import json
import math
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import attnreg
from attnreg import aten, cli
from attnreg.backends import math as math_backend
from attnreg.contract import discovery
from attnreg.dispatch import planning
from attnreg.settings import config

CALL = ("--q", "2,64,4,32", "--kv", "2,48,2,32", "--device", "cpu")


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Print for 80 columns, whatever terminal runs the tests."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def call():
    """Run a command in this process."""

    def run(*arguments):
        result = CliRunner().invoke(cli.app, list(arguments), obj=[])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def plugins(monkeypatch):
    """Install entry points; each is given as name to what its loading returns or raises."""

    def install(**points):
        class Point(EntryPoint):
            def load(self):
                found = points[self.name]
                if isinstance(found, BaseException):
                    raise found
                return found

        made = [Point(name, f"{name}_package:BACKEND", discovery.GROUP) for name in points]
        monkeypatch.setattr(discovery, "entry_points", lambda group: made)

    return install


def words(result):
    """Return the output without its line breaks."""
    return " ".join(result.output.split())


def rows(result):
    return {row["name"]: row for row in json.loads(result.stdout)["backends"]}


def in_a_process(*arguments, **options):
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


# ── the program as a whole ──────────────────────────────────────────────────────────────────────────


def test_help_answers_without_importing_torch_or_anything_else_that_is_slow():
    code = """
import sys
from attnreg.cli import main
sys.argv = ["attnreg", "--help"]
try:
    main()
except SystemExit as done:
    heavy = {"torch", "pydantic", "rich.progress", "matplotlib"} & set(sys.modules)
    sys.exit(f"imported {heavy}" if heavy else done.code)
"""
    done = in_a_process("-c", code)
    assert done.returncode == 0, done.stderr
    for command in cli.COMMANDS:
        assert command in done.stdout


@pytest.mark.parametrize(
    "command", [(), *((name,) for name in cli.COMMANDS)], ids=lambda c: " ".join(c) or "-"
)
def test_every_command_has_a_help_that_fits_80_columns(call, command):
    result = call(*command, "--help")
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    assert "can't be loaded" not in result.output.lower()


def test_version_is_printed(call):
    assert call("--version").output == f"attnreg {attnreg.__version__}\n"


@pytest.mark.parametrize("arguments", [(), ("inof",), ("info", "--jsn"), ("explain",)])
def test_wrong_usage_is_exit_code_2(call, arguments):
    assert call(*arguments).exit_code == 2


def test_a_command_whose_file_cannot_be_imported_breaks_no_other():
    broken = cli._function("no-such-command")
    assert "No module named 'attnreg.cli.no_such_command'" in broken.__doc__
    with pytest.raises(attnreg.AttnregError, match="no-such-command can't be loaded: No module named"):
        broken()


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="pipes break otherwise here")
@pytest.mark.parametrize("arguments", [("--help",), ("config-schema",)])
def test_a_closed_pipe_ends_a_command_quietly(arguments):
    command = [sys.executable, "-m", "attnreg", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == -signal.SIGPIPE  # what a shell calls 141


def test_ctrl_c_is_exit_code_130_without_a_traceback(call, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(config, "schema", interrupted)
    result = call("config-schema")
    assert (result.exit_code, result.output) == (130, "")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (attnreg.UnsupportedInputError("no backend runs it"), 1),
        (attnreg.BackendUnavailableError("FA9 can't load here"), 1),
        (attnreg.ConfigError("site.toml:1: wrong"), 2),
        (attnreg.UnknownBackendError("no backend is named 'FA9'"), 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_attnreg_is_a_message_and_not_a_traceback(call, monkeypatch, error, code):
    def refuse():
        raise error

    monkeypatch.setattr(config, "schema", refuse)
    result = call("config-schema")
    assert (result.exit_code, result.stderr, result.stdout) == (code, f"attnreg: {error}\n", "")


def test_config_schema_is_that_of_the_settings(call):
    result = call("config-schema")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == config.schema()


# ── info ────────────────────────────────────────────────────────────────────────────────────────────


def broken_loader():
    raise ImportError("libcuda.so: undefined symbol [abi]")


def test_info_has_a_row_for_every_state_of_a_backend(call, fake, plugins, monkeypatch):
    monkeypatch.setenv("ATTNREG_DISABLE", "unwanted")
    plugins(
        good=fake("good", version=lambda: "1.2").backend,
        new=fake("new", experimental=True).backend,
        absent=fake("absent", unavailable=lambda: "no 'absent' package", install="pip install x[y]").backend,
        untried=fake("untried", experimental=True, unavailable=lambda: "no GPU").backend,
        crashes=fake("crashes", load=broken_loader).backend,
        plugin=RuntimeError("built for another torch"),
        alien=SimpleNamespace(),
        unwanted=fake("unwanted").backend,
    )
    result = call("info", "--json")
    assert result.exit_code == 0
    states = {name: (row["state"], row["reason"]) for name, row in rows(result).items()}
    assert states["good"] == ("ready", "")
    assert states["new"] == ("experimental", "hasn't run on the hardware that it is written for")
    assert states["absent"] == ("can't load", "no 'absent' package; install it with: pip install x[y]")
    assert states["untried"] == (
        "can't load",
        "no GPU; experimental: it hasn't run on the hardware that it is written for",
    )
    assert states["crashes"] == ("broken", "ImportError: libcuda.so: undefined symbol [abi]")
    assert states["plugin"] == ("broken", "RuntimeError: built for another torch")
    assert states["alien"][0] == "broken"
    assert states["unwanted"] == ("disabled", "by ATTNREG_DISABLE")
    assert rows(result)["good"]["version"] == "1.2"
    assert rows(result)["good"]["origin"] == "entry point good_package:BACKEND"
    table = call("info")
    assert table.exit_code == 0
    section = table.output.partition("Backends\n")[2].partition("\n\n")[0]
    for name, (state, reason) in states.items():
        (line,) = (line for line in section.splitlines() if line.startswith(f"  {name} "))
        assert state in line
        assert reason in words(table)


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("ATTNREG_BACKEND", "maht", "no backend is named 'maht'; did you mean 'math'?"),
        ("ATTNREG_STRICT", "perhaps", "ATTNREG_STRICT: got 'perhaps', expected one of 1, true"),
        ("ATTNREG_CONFG", "x", "ATTNREG_CONFG: unknown variable, expected one of ATTNREG_BACKEND"),
        ("ATTNREG_CONFIG", "no-such.toml", "no-such.toml: can't be read"),
    ],
)
def test_info_shows_an_unreadable_environment_as_a_row(call, monkeypatch, variable, value, problem):
    monkeypatch.setenv(variable, value)
    result = call("info")
    assert result.exit_code == 0
    assert problem in words(result)
    assert f"{variable} {value!r}" in words(result)
    assert "calls refused: see the problems above" in words(result)
    assert problem in json.loads(call("info", "--json").stdout)["settings"]["problem"]


def test_info_shows_each_setting_with_its_source(call, fake, plugins, monkeypatch, tmp_path):
    plugins(one=fake("one").backend, two=fake("two").backend, three=fake("three").backend)
    file = tmp_path / "site.toml"
    file.write_text('log_level = "info"\ndisabled = ["three"]\n[devices.cpu]\norder = ["two"]\n')
    monkeypatch.setenv("ATTNREG_CONFIG", str(file))
    monkeypatch.setenv("ATTNREG_BACKEND", "one")
    monkeypatch.setenv("ATTNREG_STRICT", "yes")
    result = call("info")
    assert result.exit_code == 0
    for setting in (
        "prefer one, by ATTNREG_BACKEND",
        "prefer on cpu two, by site.toml:4",
        "disabled three, by site.toml:2",
        "strict true, by ATTNREG_STRICT",
        "log_level info, by site.toml:1",
        "1. one, by ATTNREG_BACKEND 2. two, by site.toml:4",
        "math, by default order for cpu",
        "ATTNREG_STRICT 'yes'",
        "ATTNREG_DISABLE not set",
    ):
        assert setting in words(result)
    in_force = json.loads(call("info", "--json").stdout)["settings"]["in_force"]
    assert in_force[-1] == {"setting": "settings file", "value": str(file), "source": "ATTNREG_CONFIG"}


def test_info_says_where_a_backend_that_was_asked_for_keeps_calls_from_running(
    call, fake, plugins, monkeypatch
):
    plugins(absent=fake("absent", unavailable=lambda: "not installed").backend)
    monkeypatch.setenv("ATTNREG_BACKEND", "absent")
    problem = json.loads(call("info", "--json").stdout)["devices"][0]["problem"]
    assert problem.startswith("ATTNREG_BACKEND: absent can't load here: not installed")
    assert "problem ATTNREG_BACKEND: absent can't load here" in words(call("info"))


def test_info_shows_what_the_program_registered(call, fake, routers):
    before = json.loads(call("info", "--json").stdout)["routers"]
    with attnreg.register_backend(fake("mine").backend):
        result = call("info")
    assert (before["installed"], before["serving"]) == (True, False)
    assert "1. mine, by register_backend('mine')" in words(result)
    assert "routers installed" in words(result)
    assert "calls go to the backends" in words(result)
    assert "registered at" in words(result)


def test_info_shows_every_gpu_even_one_that_fails(call, monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    planning.device_of.cache_clear()
    try:
        result = call("info", "--json")
    finally:
        planning.device_of.cache_clear()
    found = json.loads(result.stdout)
    assert [device["device"] for device in found["devices"]] == ["cpu", "cuda:0", "cuda:1"]
    assert found["devices"][2]["name"] == "NVIDIA H200, 141 GiB"
    assert found["devices"][2]["compute_capability"] == "9.0"
    assert {"backend": "math", "source": "default order for sm_90"} in found["devices"][2]["order"]
    assert found["torch"]["chooses"]["cpu"] == "flash"
    assert "Error" in found["torch"]["chooses"]["cuda:1"]  # this torch can't really reach one


def test_info_says_what_torch_would_do(call):
    found = json.loads(call("info", "--json").stdout)["torch"]
    assert found["chooses"] == {"cpu": "flash"}
    assert set(found["priority"]) >= {"flash", "efficient", "math", "cudnn"}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = json.loads(call("info", "--json").stdout)["torch"]
    assert found["chooses"] == {"cpu": "math"}
    assert found["enabled"] == {"flash": False, "efficient": False, "cudnn": False, "math": True}


def test_info_says_when_torch_has_another_implementation_above_the_routers(call, monkeypatch):
    monkeypatch.setattr(aten, "shadowed_by", lambda: "FA4")
    assert "torch.nn.attention has 'FA4' active above the routers" in words(call("info"))


@pytest.mark.parametrize(("value", "served"), [(None, True), ("1", True), ("0", False)])
def test_info_says_whether_torch_loads_attnreg_by_itself(call, monkeypatch, value, served):
    if value is not None:
        monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", value)
    missed = json.loads(call("info", "--json").stdout)["routers"]["untouched_programs"]
    assert missed == ("" if served else "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading it")


def test_what_a_provider_prints_stays_out_of_the_json(call, fake, plugins):
    def load():
        sys.stdout.write("Thank you for choosing chatty!")
        return attnreg.Kernels(*math_backend.BACKEND.load())

    plugins(chatty=fake("chatty", load=load).backend)
    result = call("info", "--json")
    assert rows(result)["chatty"]["state"] == "ready"
    assert "Thank you" in result.stderr


def test_tables_fit_80_columns_and_have_no_colours_on_a_pipe(call, fake, plugins):
    reason = "no CUDA driver: " + "/a/very/long/path" * 12
    plugins(long=fake("long", unavailable=lambda: reason).backend)
    for arguments in (("info",), ("verify", "--case", "heads 4:2", "--device", "cpu")):
        output = call(*arguments).output
        assert max(map(len, output.splitlines())) <= 80
        assert "\x1b" not in output
        assert all(line == line.rstrip() for line in output.splitlines())


# ── explain ─────────────────────────────────────────────────────────────────────────────────────────


def spec(**options):
    usual = {
        "device": attnreg.Device("cpu"), "dtype": "bf16", "batch": 2, "max_q": 64, "max_k": 48,
        "heads_q": 4, "heads_k": 2, "head_dim": 32, "head_dim_v": 32,
    }  # fmt: skip
    return attnreg.AttentionSpec(**{**usual, **options})


def test_explain_prints_what_attnreg_explain_returns(call):
    result = call("explain", *CALL, "--causal", "--backward")
    assert result.exit_code == 0
    expected = attnreg.explain(spec(window=(-1, 0), needs_backward=True))
    assert result.output == f"{expected}\n"
    found = json.loads(call("explain", *CALL, "--causal", "--backward", "--json").stdout)
    assert found["runs"] is True
    assert found["backend"] == found["forward"]["backend"] == expected.backend
    assert found["backward"]["rejected"].keys() == expected.backward.rejected.keys()


def test_explain_needs_no_gpu(call):
    arguments = "--device sm_90 --dtype bf16 --q 2,4096,32,128 --kv 2,4096,8,128 --causal --backward"
    result = call("explain", *arguments.split())
    assert result.exit_code == 0
    assert "simulated sm_90" in result.output
    assert "query (2, 4096, 32, 128) · key (2, 4096, 8, 128)" in result.output
    listed = [line.split()[0] for line in result.output.splitlines() if line.startswith("  ")]
    assert set(attnreg.list_backends()) <= set(listed)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--window 7,3", {"window": [7, 3]}),
        ("--window 7,3 --causal", {"window": [7, 0]}),
        ("--window 900,900", {"window": [-1, -1]}),
        ("--varlen", {"varlen": True, "tokens_q": 128}),
        ("--varlen --tokens-q 100 --tokens-k 90", {"tokens_q": 100, "tokens_k": 90}),
        ("--scale 0.5", {"positive_scale": True}),
        ("--scale -1", {"positive_scale": False}),
        ("--dropout 0.1", {"dropout": 0.1}),
        ("--bias", {"bias": True}),
        ("--alibi", {"alibi": True}),
        ("--paged 16", {"page_size": 16}),
        ("--seqused-k", {"seqused_k": True}),
        ("--head-dim-v 64", {"head_dim": 32, "head_dim_v": 64}),
        ("--num-splits 4", {"num_splits": 4}),
        ("--deterministic", {"deterministic": True}),
        ("--capture", {"capturing": True}),
        ("--backward", {"needs_backward": True}),
        ("--dtype half", {"dtype": "float16"}),
        ("--dtype float64", {"dtype": "float64"}),
        ("--device sm_100", {"device": {**dict.fromkeys(("index",)), "type": "cuda"}}),
    ],
)
def test_every_option_of_explain_reaches_the_spec(call, options, expected):
    found = json.loads(call("explain", *CALL, *options.split(), "--json").stdout)["spec"]
    for field, value in expected.items():
        assert found[field] == value if not isinstance(value, dict) else found[field].items() >= value.items()


def test_every_field_of_a_spec_has_an_option(call):
    plain = json.loads(call("explain", *CALL, "--json").stdout)["spec"]
    everything = (
        "--q 3,65,8,40 --kv 3,49,4,40 --device sm_90 --dtype fp32 --window 7,3 --varlen --tokens-q 100"
        " --tokens-k 90 --dropout 0.1 --bias --alibi --paged 16 --seqused-k --head-dim-v 64 --num-splits 4"
        " --deterministic --capture --backward --scale 0 --json"
    )
    found = json.loads(call("explain", *everything.split()).stdout)["spec"]
    assert {field for field in plain if plain[field] == found[field]} == set()


def test_explain_without_a_device_is_about_this_machine(call):
    result = call("explain", "--q", "1,8,2,64")
    assert f"forward on {'cuda' if torch.cuda.is_available() else 'cpu'}" in result.output


def test_a_gpu_that_is_not_there_is_wrong_usage(call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    result = call("explain", "--q", "1,8,2,64", "--device", "cuda:7")
    assert result.exit_code == 2
    assert "--device: got 'cuda:7', expected cuda:0 or cuda:1" in result.stderr


@pytest.fixture
def picky(fake, plugins):
    """Install a backend that refuses everything but float16, and one that never loads."""
    plugins(
        picky=fake("picky", dtypes=("float16",), gqa=False).backend,
        absent=fake("absent", unavailable=lambda: "not installed", install="pip install it").backend,
        ruined=ImportError("no such symbol"),
    )


@pytest.mark.usefixtures("picky")
def test_explain_lists_every_reason_of_every_backend_each_on_one_line(call):
    lines = [line.strip() for line in call("explain", *CALL).output.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("picky"))
    assert lines[start].split(maxsplit=1)[1] == "dtype must be float16, got bfloat16"
    assert lines[start + 1] == "query and key must have as many heads, got 4 and 2"
    assert "absent  can't load here: not installed; install it with: pip install it" in lines
    assert "ruined  failed to load: ImportError: no such symbol" in lines


@pytest.mark.usefixtures("picky")
def test_explain_obeys_or_refuses_a_backend_as_a_call_would(call):
    refused = call("explain", *CALL, "--backend", "PICKY")
    assert refused.exit_code == 1
    assert refused.output.startswith("no attention backend can run this forward on cpu: --backend picky is")
    obeyed = call("explain", *CALL, "--backend", "math", "--json")
    assert obeyed.exit_code == 0
    assert json.loads(obeyed.stdout)["source"] == "--backend math"
    missing = call("explain", *CALL, "--backend", "absent")
    assert missing.exit_code == 1
    assert "--backend absent: absent can't load here: not installed" in missing.output


@pytest.mark.usefixtures("picky")
@pytest.mark.parametrize("options", ["--prefer picky,math", "--prefer picky --prefer Math"])
def test_explain_prefers_as_use_backend_does(call, options):
    result = call("explain", *CALL, *options.split())
    assert result.exit_code == 0
    assert result.output.startswith("forward on cpu: math, by --prefer picky,math")


def test_explain_is_1_when_nothing_can_run_the_call(call, monkeypatch, fake, plugins):
    plugins(picky=fake("picky", dtypes=("float16",)).backend)
    monkeypatch.setenv("ATTNREG_BACKEND", "picky")
    monkeypatch.setenv("ATTNREG_STRICT", "1")
    result = call("explain", *CALL, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["runs"], found["backend"]) == (False, None)
    assert "ATTNREG_STRICT makes that an error" in found["forward"]["refusal"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--q 2,64", "--q: got '2,64', expected whole numbers: batch,length,heads,head_dim"),
        ("--q 2,64,x,32", "--q: got '2,64,x,32', expected whole numbers"),
        ("--kv 3,64,2,32", "--kv: got batch 3 and head dim 32, expected those of --q, 2 and 32"),
        ("--kv 2,64,3,32", "heads: got 4 for the query and 3 for the key"),
        ("--window 5", "--window: got '5', expected whole numbers: left,right"),
        ("--window 3,-5", "--window: got '3,-5', expected numbers of keys, or -1 for all"),
        ("--dtype bf17", "--dtype: got 'bf17', expected a floating-point dtype"),
        ("--dtype int32", "--dtype: got 'int32', expected a floating-point dtype"),
        ("--dtype nn", "--dtype: got 'nn', expected a floating-point dtype"),
        ("--device banana", "--device: got 'banana', expected 'cpu', 'cuda', 'cuda:N' or another"),
        ("--device sm90x!", "device: got 'sm90x!', expected 'cpu', 'cuda', 'cuda:N' or 'sm_NN'"),
        ("--dropout 1.5", "dropout_p: got 1.5, expected 0 to 1"),
        ("--backend maht", "no backend is named 'maht'; did you mean 'math'? known backends:"),
        ("--prefer math,,cpu", "--prefer: got 'math,,cpu', expected names separated by commas"),
        ("--prefer math,nothing", "no backend is named 'nothing'"),
    ],
)
def test_a_bad_value_is_one_line_on_stderr_and_exit_code_2(call, options, message):
    for extra in ((), ("--json",)):
        result = call("explain", *CALL, *options.split(), *extra)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"attnreg: {message}")
        assert result.stderr.count("\n") == 1
        told = json.loads(result.stdout)["error"]["message"] if extra else result.stdout
        assert told == (result.stderr.removeprefix("attnreg: ").strip() if extra else "")


def test_an_unreadable_config_is_exit_code_2_with_file_and_line(call, monkeypatch, tmp_path):
    file = tmp_path / "site.toml"
    file.write_text("\nstricct = true\n")
    monkeypatch.setenv("ATTNREG_CONFIG", str(file))
    for arguments in (("explain", *CALL), ("verify", "--device", "cpu")):
        result = call(*arguments)
        assert result.exit_code == 2
        assert f"{file}:2:1: stricct: unknown key" in result.stderr
        assert "Traceback" not in result.output


# ── verify ──────────────────────────────────────────────────────────────────────────────────────────

QUICK = ("verify", "--device", "cpu", "--case", "heads 4:")  # two dense cases and two packed ones


@pytest.fixture
def kernels():
    return math_backend.BACKEND.load()


def test_verify_passes_the_backends_of_this_machine(call):
    assert list(rows(call(*QUICK, "--json"))) == attnreg.list_backends()
    result = call(*QUICK, "--backend", "math")
    assert result.exit_code == 0
    assert "math on cpu, bfloat16" in result.output
    (line,) = (line for line in result.output.splitlines() if line.startswith("  heads 4:2 "))
    *numbers, state = line.split()[2:]
    assert state == "right"
    assert all(0 <= float(number) < 2 for number in numbers)
    assert len(numbers) == 5


def test_verify_marks_what_is_wrong_and_finishes_the_others(call, fake, plugins, kernels):
    def double(*arguments):
        out, lse = kernels.forward(*arguments)
        return out * 2, lse

    def nan_gradient(*arguments):
        return tuple(grad * math.nan for grad in kernels.backward(*arguments))

    def crash(*arguments):
        raise RuntimeError("CUDA error: an illegal memory access\nCompile with TORCH_USE_CUDA_DSA")

    plugins(
        doubled=fake("doubled", load=lambda: kernels._replace(forward=double)).backend,
        nan=fake("nan", load=lambda: kernels._replace(backward=nan_gradient)).backend,
        crashes=fake("crashes", load=lambda: kernels._replace(forward=crash)).backend,
        sound=fake("sound").backend,
    )
    result = call(*QUICK, "--json")
    assert result.exit_code == 1
    found = rows(result)
    for name in ("doubled", "nan", "crashes"):
        assert (found[name]["right"], found[name]["wrong"]) == (0, 4)
    assert (found["sound"]["right"], found["sound"]["wrong"]) == (4, 0)
    assert found["doubled"]["worst"]["ratio"] > 2
    assert not found["doubled"]["rows"][0]["errors"]["out"]["passed"]
    assert found["doubled"]["rows"][0]["errors"]["lse"]["passed"]
    assert found["nan"]["rows"][0]["errors"]["dq"] == {
        **found["nan"]["rows"][0]["errors"]["dq"], "passed": False, "error": None, "ratio": None
    }  # fmt: skip
    assert found["crashes"]["rows"][0]["failure"].startswith("RuntimeError: CUDA error: an illegal")
    table = call(*QUICK)
    assert table.exit_code == 1
    assert "NaN" in table.output
    assert sum(line.endswith("WRONG") for line in table.output.splitlines()) == 12
    assert "TORCH_USE_CUDA_DSA" not in table.output  # the rest of a message is for the JSON


def test_verify_counts_what_a_backend_refuses_and_gives_its_reasons(call, fake, plugins):
    plugins(
        dense=fake("dense", varlen=False).backend, forward_only=fake("forward_only", backward=False).backend
    )
    found = rows(call(*QUICK, "--json"))
    assert (found["dense"]["right"], found["dense"]["skipped"]) == (2, 2)
    skipped = [row for row in found["dense"]["rows"] if row["state"] == "skipped"]
    assert skipped[0]["reasons"] == ["input must be dense, got varlen"]
    assert skipped[0]["errors"] == {}
    assert found["forward_only"]["rows"][0]["errors"].keys() == {"out", "lse"}
    assert found["forward_only"]["rows"][0]["reasons"] == ["has no backward"]
    (line,) = (line for line in call(*QUICK).output.splitlines() if line.startswith("  dense  "))
    assert line.split()[:4] == ["dense", "2", "0", "2"]


def test_verify_goes_on_past_backends_that_cannot_be_held_to_anything(call, fake, plugins, monkeypatch):
    monkeypatch.setenv("ATTNREG_DISABLE", "unwanted")
    plugins(
        absent=fake("absent", unavailable=lambda: "not installed").backend,
        crashes=fake("crashes", load=broken_loader).backend,
        plugin=ImportError("no such symbol"),
        unwanted=fake("unwanted").backend,
        elsewhere=fake("elsewhere", devices=("cuda",)).backend,
    )
    result = call(*QUICK, "--json")
    assert result.exit_code == 0
    reasons = {name: row["reason"] for name, row in rows(result).items()}
    assert reasons["absent"] == "can't load here: not installed"
    assert reasons["crashes"].startswith("failed to load: ImportError: libcuda.so")
    assert reasons["plugin"] == "failed to load: ImportError: no such symbol"
    assert reasons["unwanted"] == "disabled by ATTNREG_DISABLE"
    assert reasons["elsewhere"] == "serves cuda"
    assert "absent not run: can't load here: not installed" in words(call(*QUICK))


def test_verify_fails_if_a_backend_that_was_named_cannot_be_held_to_anything(call, fake, plugins):
    plugins(absent=fake("absent", unavailable=lambda: "not installed").backend)
    assert call(*QUICK, "--backend", "absent,math").exit_code == 1
    assert call(*QUICK, "--backend", "absent").exit_code == 1


def test_verify_takes_the_backends_dtypes_and_cases_that_are_named(call):
    result = call(*QUICK, "--backend", "MATH", "--backend", "math", "--dtype", "fp32,fp64", "--json")
    assert list(rows(result)) == ["math"]
    dtypes = [row["dtype"] for row in rows(result)["math"]["rows"]]
    assert dtypes == ["float32"] * 4 + ["float64"] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--backend maht", "no backend is named 'maht'; did you mean 'math'?"),
        ("--dtype bf17", "--dtype: got 'bf17'"),
        ("--case nonesuch", "--case: got 'nonesuch', expected a part of the name of one of"),
        ("--device banana", "--device: got 'banana'"),
        ("--device sm_90", "--device: got 'sm_90'"),
    ],
)
def test_verify_refuses_a_bad_value_before_it_runs_anything(call, options, message):
    result = call("verify", *options.split())
    assert result.exit_code == 2
    assert result.stderr.startswith(f"attnreg: {message}")


def test_verify_keeps_its_rows_when_it_is_interrupted(call, fake, plugins, kernels):
    done = []

    def forward(*arguments):
        done.append(arguments)
        if len(done) > 2:
            raise KeyboardInterrupt
        return kernels.forward(*arguments)

    plugins(slow=fake("slow", load=lambda: kernels._replace(forward=forward)).backend)
    result = call(*QUICK, "--backend", "slow", "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["finished"] is False
    assert len(rows(result)["slow"]["rows"]) == 2


# ── warmup ──────────────────────────────────────────────────────────────────────────────────────────

WARMUP = ("warmup", "--device", "cpu", "--q", "2,64,4,32")


def calls_of(result):
    return json.loads(result.stdout)["calls"]


def test_warmup_runs_both_directions_of_all_that_run_here_once_each(call, ran):
    result = call(*WARMUP, "--json")
    assert result.exit_code == 0
    found = calls_of(result)
    assert {(row["backend"], row["direction"]) for row in found} == {
        (name, direction) for name in ("cpu", "math") for direction in ("forward", "backward")
    }
    assert all(row["state"] == "ran" and 0 <= row["seconds"] < 60 and not row["reason"] for row in found)
    assert ran() == {}  # what it runs is no call of the program's


@pytest.mark.parametrize("varlen", [(), ("--varlen",)])
@pytest.mark.parametrize("dtype", ["bf16", "float64"])
def test_warmup_calls_the_kernels_with_what_the_options_say(call, fake, plugins, varlen, dtype):
    mine = fake("mine")
    plugins(mine=mine.backend)
    result = call(
        *(*WARMUP, "--kv", "2,48,2,32", "--backend", "mine", "--head-dim-v", "16", "--window", "8,-1"),
        *("--causal", "--deterministic", "--dtype", dtype, *varlen),
    )
    assert result.exit_code == 0, result.output
    ((query, key, value, asked),) = mine.forwards
    ((grad, *again, out, lse, asked_again),) = mine.backwards
    rows_q, rows_k = ((128,), (96,)) if varlen else ((2, 64), (2, 48))
    assert (query.shape, key.shape, value.shape) == ((*rows_q, 4, 32), (*rows_k, 2, 32), (*rows_k, 2, 16))
    assert [x.shape for x in again] == [x.shape for x in (query, key, value)]
    assert grad.shape == out.shape == (*rows_q, 4, 16)
    assert lse.shape == ((4, 128) if varlen else (2, 4, 64))
    assert (query.dtype, lse.dtype) == (
        (torch.float64, torch.float64) if dtype == "float64" else (torch.bfloat16, torch.float32)
    )
    assert (asked.max_q, asked.max_k, asked.window, asked.deterministic) == (64, 48, (8, 0), True)
    assert asked.scale == 32**-0.5
    assert asked_again.window == asked.window
    if varlen:
        assert asked.cu_seqlens_q.tolist() == [0, 64, 128]
        assert asked.cu_seqlens_k.tolist() == [0, 48, 96]
        assert asked.cu_seqlens_q.dtype == torch.int32
    else:
        assert asked.cu_seqlens_q is None


def test_warmup_takes_several_calls_and_dtypes(call):
    options = ("--q", "1,8,4,32", "--kv", "2,64,4,32", "--kv", "1,16,2,32", "--dtype", "fp32,bf16")
    result = call(*WARMUP, *options, "--backend", "MATH", "--no-backward", "--json")
    assert result.exit_code == 0
    assert [(row["backend"], row["direction"]) for row in calls_of(result)] == [("math", "forward")] * 4
    assert [row["call"].split(" · ")[::3] for row in calls_of(result)] == [
        ["query (2, 64, 4, 32)", "float32"],
        ["query (2, 64, 4, 32)", "bfloat16"],
        ["query (1, 8, 4, 32)", "float32"],
        ["query (1, 8, 4, 32)", "bfloat16"],
    ]


def test_warmup_prints_a_table_for_each_call_and_says_what_was_not_run(call, fake, plugins):
    def crash(*arguments):
        raise RuntimeError("ptxas fatal\nmore about it")

    kernels = math_backend.BACKEND.load()
    plugins(
        crashes=fake("crashes", load=lambda: kernels._replace(backward=crash)).backend,
        absent=fake("absent", unavailable=lambda: "not installed").backend,
        picky=fake("picky", dtypes=("float16",)).backend,
        elsewhere=fake("elsewhere", devices=("cuda",)).backend,
    )
    result = call(*WARMUP)
    assert result.exit_code == 1  # one failed
    assert words(result).startswith("query (2, 64, 4, 32) · key (2, 64, 4, 32)")
    assert "on cpu" in words(result)
    lines = [line.split(maxsplit=3) for line in result.output.splitlines()]
    assert ["backend", "direction", "seconds"] in lines
    assert ["crashes", "backward", "-", "RuntimeError: ptxas fatal"] in lines
    assert ["picky", "forward", "-", "not run: dtype must be float16, got bfloat16"] in lines
    assert any(
        line[:2] == ["absent", "forward"] and line[3].startswith("not run: can't load") for line in lines
    )
    assert any(line[:2] == ["math", "backward"] and float(line[2]) >= 0 for line in lines)
    assert "elsewhere" not in result.output
    states = {(row["backend"], row["direction"]): row["state"] for row in calls_of(call(*WARMUP, "--json"))}
    assert states["crashes", "forward"] == "ran"
    assert states["crashes", "backward"] == "failed"
    assert states["absent", "forward"] == "refused"


def test_warmup_is_1_when_nothing_could_be_run_or_a_backend_that_was_named(call, fake, plugins):
    plugins(picky=fake("picky", dtypes=("float16",)).backend)
    assert call(*WARMUP, "--backend", "picky").exit_code == 1
    assert call(*WARMUP, "--backend", "math,picky").exit_code == 1
    assert call(*WARMUP, "--backend", "FA2").exit_code == 1
    assert call(*WARMUP).exit_code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--q 2,64", "--q: got '2,64', expected whole numbers: batch,length,heads,head_dim"),
        ("--q 1,8,4,32 --kv 1,8,4,32", "--kv: got 1, expected none or one for each --q, 2"),
        ("--backend maht", "no backend is named 'maht'; did you mean 'math'?"),
        ("--dtype bf17", "--dtype: got 'bf17'"),
        ("--device sm_90", "--device: got 'sm_90'"),
        ("--window 5", "--window: got '5', expected whole numbers: left,right"),
        ("--window 3,-5", "--window: got '3,-5', expected numbers of keys, or -1 for all"),
    ],
)
def test_warmup_refuses_a_bad_value_before_it_runs_anything(call, options, message):
    result = call(*WARMUP, *options.split())
    assert result.exit_code == 2
    assert result.stderr.startswith(f"attnreg: {message}")


def test_warmup_keeps_what_it_has_when_it_is_interrupted(call, fake, plugins):
    def forward(*arguments):
        raise KeyboardInterrupt

    kernels = math_backend.BACKEND.load()
    plugins(slow=fake("slow", load=lambda: kernels._replace(forward=forward)).backend)
    result = call(*WARMUP, "--backend", "math,slow", "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["finished"] is False
    assert [row["backend"] for row in calls_of(result)] == ["math", "math"]

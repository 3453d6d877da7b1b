"""Promises of `attnreg run`: the program's attention changes, and nothing else about the program."""

import json
import os
import signal
import sys
import textwrap
import zipfile

import pytest
import torch
from support.command_line import in_a_process
from support.processes import COMMAND, forked

import attnreg
from attnreg.core import registry
from attnreg.tools import cli
from attnreg.tools.cli.run import _print_stats


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Write programs to a folder of their own and work there."""
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return file

    return write


@pytest.fixture
def run(monkeypatch, routers):
    """Run a command line in this process, as its own would, and put back what that changes."""

    def run(*arguments):
        variables = dict(os.environ)
        with monkeypatch.context() as changed:
            changed.setattr(sys, "argv", ["attnreg", "run", *arguments])
            changed.setattr(sys, "path", [*sys.path])
            changed.setitem(sys.modules, "__main__", sys.modules["__main__"])
            try:
                cli.main()
            finally:
                os.environ.clear()
                os.environ.update(variables)

    return run


def python(*arguments, **variables):
    return in_a_process(*arguments, env={**os.environ, **variables})


IMPORTS_ONLY_TORCH = """
    import sys
    import torch
    import torch.nn.functional as F

    query = torch.randn(1, 2, 8, 16, requires_grad=True)
    F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
"""


def test_a_program_that_imports_only_torch_runs_on_the_backend(here):
    here("train.py", IMPORTS_ONLY_TORCH + "    import attnreg\n    print(attnreg.stats().calls)\n")
    errors = "import warnings; warnings.simplefilter('error')\n"
    done = forked(errors + COMMAND, "run", "--backend", "Math", "train.py")
    found = (done.returncode, done.stdout, done.stderr)
    assert found == (0, "{'math': {'forward': 1, 'backward': 1}}\n", "")


def test_faulty_settings_that_are_left_out_do_not_keep_the_program_from_running(here, run, capsys, caplog):
    here("train.py", "print('trained')\n")
    here("site.toml", 'on_error = "native"\nstrct = true\n')
    run("--config", "site.toml", "train.py")
    assert capsys.readouterr().out == "trained\n"
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "torch's own kernels run" in line and "strct" in line


PICKY = """
    from attnreg import Backend, Capabilities
    from attnreg.backends.math import BACKEND as reference

    BACKEND = Backend(
        name="picky", forward=Capabilities(devices=("cpu",), dtypes=("float16",)), load=reference.load
    )
"""


def test_stats_say_at_the_end_what_ran_and_what_could_not(here):
    file = here("train.py", IMPORTS_ONLY_TORCH + "    sys.exit(7)\n")
    here("picky.py", PICKY)
    here("picky-1.0.dist-info/entry_points.txt", "[attnreg.backends]\npicky = picky:BACKEND\n")
    here("picky-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: picky\nVersion: 1.0\n")
    options = ("--stats", "--backend", "picky,math", str(file))
    done = forked(f"import sys; sys.path.insert(0, {str(file.parent)!r})\n{COMMAND}", "run", *options)
    assert (done.returncode, done.stdout) == (7, ""), done.stderr
    printed = " ".join(done.stderr.split())
    assert "What ran backend forward backward math 1 1" in printed
    assert "What could not run, and why backend calls reason picky 1 dtype must be float16, got" in printed


def test_stats_say_what_failed(fake, capsys):
    failing = fake("failing", load=lambda: attnreg.Kernels(lambda *given: 1 / 0, lambda *given: 1 / 0))
    with attnreg.register_backend(failing.backend), pytest.raises(ZeroDivisionError):
        torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8))
    _print_stats()
    said = "failing failed once in a forward of this process: ZeroDivisionError: division by zero"
    assert " ".join(capsys.readouterr().err.split()) == f"What failed backend error {said}"


def test_stats_of_a_program_without_attention_say_so(here):
    here("nothing.py", "")
    done = forked(COMMAND, "run", "--stats", "--backend", "math", "nothing.py")
    assert (done.returncode, done.stderr) == (0, "No attention call went through attnreg\n")


def test_stats_of_a_program_that_asks_for_nothing_name_torchs_kernels(here, tmp_path):
    here(
        "plain.py",
        "import torch\nq = torch.ones(1, 2, 8, 16)\n"
        + 2 * ("torch.nn.functional.scaled_dot_product_attention(q, q, q)\n"),
    )
    done = forked(COMMAND, "run", "--stats", "plain.py")
    said = "torch's flash_attention kernel 2 nothing asks for a backend"
    assert (done.returncode, done.stdout) == (0, "")
    printed = " ".join(done.stderr.split())
    assert f"and why kernel calls reason {said} " in printed
    assert printed.endswith(f"first call of torch's flash_attention kernel: {tmp_path / 'plain.py'}:3")


PASSES_BY = """
    import subprocess, sys
    import torch
    import torch.nn.functional as F

    query = torch.randn(1, 2, 8, 16)
    for _ in range(int(sys.argv[1])):
        F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    if sys.argv[1] == "2":
        subprocess.run([sys.executable, __file__, "3"], check=True)
        with torch.multiprocessing.get_context("fork").Pool(1) as pool:
            pool.apply(F.scaled_dot_product_attention, (query, query, query, None, 0.5))
            pool.close()
            pool.join()
"""


@pytest.mark.slow
def test_stats_of_all_processes_are_added_to_a_file(here, tmp_path):
    file = here("program.py", PASSES_BY)
    arguments = "run", "--stats-to", "stats.jsonl", "--json", "program.py", "2"
    # The compiled part, which may be there or not, counts such calls at the op below the function.
    done = forked(COMMAND, *arguments, ATTNREG_ROUTERS="python")
    assert done.returncode == 0, done.stderr
    here_alone = json.loads(done.stderr)
    assert here_alone["calls"] == {} and here_alone["fallbacks"] == []
    rows = [json.loads(line) for line in (tmp_path / "stats.jsonl").read_text().splitlines()]
    passed = {
        "kernel": "torch's math kernel",
        "reason": "dropout_p must be 0 on a CPU, got 0.5",
        "op": "F.scaled_dot_product_attention",
        "shapes": [[1, 2, 8, 16]] * 3,
    }
    counted = {row["bypassed"][0].pop("count"): row["bypassed"] for row in rows}
    sites = [bypassed[0].pop("site") for bypassed in counted.values()]
    assert counted == {1: [passed], 2: [passed], 3: [passed]}  # of the fork, of the program and of its child
    assert sites.count(f"{file}:8") == 2
    assert len({row["pid"] for row in rows}) == 3
    site = here_alone["bypassed"][0].pop("site")
    assert (here_alone["bypassed"], site) == ([{**passed, "count": 2}], f"{file}:8")


def test_a_file_for_stats_that_cannot_be_written_is_an_error_before_the_program(here, run, tmp_path, capsys):
    here("program.py", "open('started', 'w').close()")
    with pytest.raises(SystemExit) as ended:
        run("--stats-to", "no/stats.jsonl", "program.py")
    assert ended.value.code == 2
    assert "ATTNREG_STATS: " in (said := capsys.readouterr().err) and "can't be written" in said
    assert not (tmp_path / "started").exists()


# Saves what a program can see of how it was started.
MIRROR = """
    import json, sys

    with open("seen.json", "w") as file:
        main = sys.modules["__main__"]
        same = vars(main) is globals()
        json.dump([__name__, __file__, __package__, sys.argv, sys.path, same, main.__file__], file)
"""


@pytest.mark.parametrize(
    "program",
    [
        ("mirror.py", "--backend", "x", "-m", "--", "--help"),
        ("package/../mirror.py",),
        ("link.py",),
        ("package", "a"),
        ("archive.zip", "a"),
        ("-m", "mirror", "--json", "-x"),
        ("-m", "package", "a"),
        ("-m", "package.inner"),
    ],
    ids=lambda program: " ".join(program),
)
def test_a_program_sees_what_python_would_have_shown_it(here, run, program, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "package", raising=False)  # of the same test, elsewhere
    file = here("mirror.py", MIRROR)
    for name in ("package/__init__.py", "package/__main__.py", "package/inner.py"):
        here(name, "" if "init" in name else MIRROR)
    (tmp_path / "real").mkdir()
    (tmp_path / "link.py").symlink_to(here("real/target.py", MIRROR))
    with zipfile.ZipFile("archive.zip", "w") as archive:
        archive.write(file, "__main__.py")

    assert python(*program).returncode == 0
    seen = json.loads((tmp_path / "seen.json").read_text())
    (tmp_path / "seen.json").unlink()
    run("--backend", "math", *program)
    seen_here = json.loads((tmp_path / "seen.json").read_text())
    paths, paths_here = seen.pop(4), seen_here.pop(4)
    if program[0] in ("package", "archive.zip"):  # the one difference: their path is made absolute
        seen[3][0] = str(tmp_path / seen[3][0])
    assert seen_here == seen
    assert paths_here[0] == paths[0]


def test_the_variables_are_set_for_the_program_and_for_its_children(here, run, fake, tmp_path, monkeypatch):
    registry.add(fake("other").backend, "here")
    here("site.toml", "strict = false\n")
    here(
        "parent.py",
        """
        import subprocess, sys
        code = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if 'ATTNREG' in k}))"
        with open("seen.json", "w") as file:
            subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
        """,
    )
    monkeypatch.delenv("ATTNREG_BUILD")
    for options, expected in (
        (
            "--backend math --backend other --config site.toml --strict",
            {"BACKEND": "math,other", "CONFIG": str(tmp_path / "site.toml"), "STRICT": "1"},
        ),
        ("--disable other --no-strict", {"DISABLE": "other", "STRICT": "0"}),
    ):
        run(*options.split(), "parent.py")
        seen = json.loads((tmp_path / "seen.json").read_text())
        assert seen == {f"ATTNREG_{name}": value for name, value in expected.items()}


@pytest.mark.slow
def test_a_process_that_the_program_spawns_finds_its_functions(here, tmp_path):
    here(
        "parent.py",
        """
        import multiprocessing, os

        def backend(_):
            return os.environ["ATTNREG_BACKEND"]

        if __name__ == "__main__":
            os.chdir("/")
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(backend, [0]))
        """,
    )
    done = forked(COMMAND, "run", "--backend", "math", "parent.py")
    assert done.stdout == "['math']\n", done.stderr


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(7),
        SystemExit(),
        SystemExit("sorry"),
        SystemExit(0),
        KeyboardInterrupt(),
        BrokenPipeError(32, "gone"),
        EOFError(),
        RuntimeError(),
    ],
    ids=repr,
)
def test_the_exit_code_and_the_exceptions_of_the_program_are_its_own(here, run, error):
    here("program.py", f"raise {error!r}")
    with pytest.raises(type(error)) as raised:
        run("program.py")
    assert repr(raised.value) == repr(error)
    assert raised.traceback[-1].path.name == "program.py"


@pytest.mark.parametrize(
    "options",
    ["--json", *(pytest.param(one, marks=pytest.mark.slow) for one in ("--stats", "--report page.html"))],
)
def test_ctrl_c_in_the_program_is_exit_code_130_whatever_is_printed_at_the_end(here, options):
    here(
        "program.py",
        """
        import torch

        query = torch.randn(1, 2, 4, 8)
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
        raise KeyboardInterrupt
        """,
    )
    command = ("run", "--backend", "math", *options.split(), "program.py")
    # Once by Python itself, where a warning of the command would be an error; `forked` ends as Python does.
    anew = options == "--stats"
    done = python("-W", "error", "-m", "attnreg", *command) if anew else forked(COMMAND, *command)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert ("page.html" if "--report" in options else "math") in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--backend maht", "ATTNREG_BACKEND: no backend is named 'maht'; did you mean 'math'?"),
        ("--backend math,,cpu", "ATTNREG_BACKEND: got 'math,,cpu', expected a name before and after"),
        ("--disable maht", "ATTNREG_DISABLE: no backend is named 'maht'; did you mean 'math'?"),
        ("--backend math --disable math", "ATTNREG_BACKEND and ATTNREG_DISABLE: both name math"),
        ("--config no-such.toml", "can't be read (no such file or directory), expected a settings file"),
        ("no-such.py", "got 'no-such.py', expected a program: there is no such file"),
        ("-m .x", "-m: got '.x', expected a module"),
        ("-m no_such_module", "-m: got 'no_such_module', expected a module"),
        ("--", "Missing argument 'PROGRAM'"),
    ],
)
def test_wrong_usage_fails_before_the_program_starts(here, run, tmp_path, capsys, arguments, message):
    here("program.py", "open('started', 'w').close()")
    program = () if "--" in arguments.split() else ("program.py",)
    with pytest.raises(SystemExit) as ended:
        run(*arguments.split(), *program)
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert message in printed.err
    assert printed.err.startswith("attnreg: " if program else "Usage: ")
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("by", ["an option", "a variable"])
def test_a_wrong_name_is_said_once(here, by):
    here("program.py", "")
    options, variables = (["--backend", "mth"], {}) if by == "an option" else ([], {"ATTNREG_BACKEND": "mth"})
    variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # the command imports torch, and not somebody before it
    done = forked(COMMAND, "run", *options, "program.py", **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1, done.stderr
    line = done.stderr
    assert line.startswith("attnreg: ATTNREG_BACKEND: no backend is named 'mth'; did you mean 'math'?")

"""Promises of the environment variables."""

import ast
import copy
import os
import pickle
from pathlib import Path

import pytest
from support.refusals import refusal

import attnreg
from attnreg.core.settings import environment
from attnreg.core.settings.environment import VARIABLES, EnvironmentSettings, read


def test_every_variable_is_read(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    environ = {
        "BACKEND": " fa4 , CuDNN,my kernel ", "DISABLE": "FA2", "CONFIG": "~/attnreg.toml", "STRICT": "1",
        "POLICY": "order", "RECORD": "trace.jsonl", "LOCK": "lock.json", "ROUTERS": "Compiled",
        "BUILD": "Now", "MASKS": "Recognise",
    }  # fmt: skip
    assert read({f"ATTNREG_{name}": value for name, value in environ.items()}) == EnvironmentSettings(
        backend=("fa4", "CuDNN", "my kernel"),
        disable=("FA2",),
        config=tmp_path / "attnreg.toml",
        strict=True,
        policy="order",
        masks="recognise",
        record=Path.cwd() / "trace.jsonl",
        lock=Path.cwd() / "lock.json",
        routers="compiled",
        build="now",
    )


def test_a_relative_path_is_one_of_the_folder_that_the_program_started_in(tmp_path, monkeypatch):
    """Programs change their folder, and what they record would lie elsewhere than what was checked."""
    monkeypatch.chdir(tmp_path)
    names = [name for name, variable in VARIABLES.items() if variable.parse is environment._path]
    before = read(dict.fromkeys(names, "a/file"))
    monkeypatch.chdir("/")
    paths = [getattr(before, name.removeprefix("ATTNREG_").lower()) for name in names]
    assert len(paths) == 5 and set(paths) == {tmp_path / "a/file"}


@pytest.mark.skipif(os.name != "posix", reason="the current folder can't be removed here")
def test_a_relative_path_of_a_folder_that_is_gone_is_said_to_be_that(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    gone = "expected an absolute path: the current folder has been removed"
    assert refusal(read, {"ATTNREG_STATS": "a"}) == f"ATTNREG_STATS: got 'a', {gone}"
    assert refusal(attnreg.record("a").__enter__) == f"record: got 'a', {gone}"
    with pytest.raises(attnreg.UnknownBackendError, match=f"^got 'hub:./a', {gone}$"):
        attnreg.register_backend("hub:./a")


def test_a_variable_in_lower_case_is_none_of_attnregs():
    assert read({"attnreg_backend": "no such backend", "attnreg_home": "/opt"}) == EnvironmentSettings()


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("blank", ["", "  ", "\t"])
def test_a_blank_variable_is_unset(name, blank):
    assert read({name: blank}) == EnvironmentSettings()


@pytest.mark.parametrize(
    ("text", "expected"),
    [(text, True) for text in ("1", "true", "YES", "On", " 1 ")]
    + [(text, False) for text in ("0", "False", "no", "OFF", "\toff")],
)
def test_booleans_are_read_in_any_case(text, expected):
    assert read({"ATTNREG_STRICT": text}).strict is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("true", "1"),
        (" On", "1"),
        ("1", "1"),
        ("No", "0"),
        ("0", "0"),
        ("Flash_Attention_2", "flash_attention_2"),
    ],
)
def test_transformers_take_a_boolean_or_a_name(text, expected):
    assert read({"ATTNREG_TRANSFORMERS": text}).transformers == expected


BOOLEANS = "expected one of 1, true, yes, on, 0, false, no, off"
MASKS = "expected as_given, large or recognise"
POLICIES = "expected measured, order, adaptive or batch_invariant"
ROUTERS, BUILDS = "expected compiled or python", "expected background, now or off"
PATH = "expected a path (there is no home folder for its ~)"
UNKNOWN = f"unknown variable, expected one of {', '.join(VARIABLES)}; did you mean"


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("ATTNREG_STRICT", "yes please", f"got 'yes please', {BOOLEANS}"),
        ("ATTNREG_STRICT", "2", f"got '2', {BOOLEANS}"),
        ("ATTNREG_BACKEND", "FA4,,FA2", "got 'FA4,,FA2', expected a name before and after a comma"),
        ("ATTNREG_DISABLE", "FA4, ", "got 'FA4,', expected a name before and after a comma"),
        ("ATTNREG_DISABLE", ",", "got ',', expected a name before and after a comma"),
        ("ATTNREG_BACKEND", "FA4,FA2,fa4", "got 'fa4' twice, expected each name once"),
        ("ATTNREG_CONFIG", "~no-one/a", f"got '~no-one/a', {PATH}"),
        ("ATTNREG_BACKENDS", "FA4", f"{UNKNOWN} 'ATTNREG_BACKEND'?"),
        ("ATTNREG_strict", "1", f"{UNKNOWN} 'ATTNREG_STRICT'?"),
        ("ATTNREG_ROUTERS", "compile", f"got 'compile', {ROUTERS}; did you mean 'compiled'?"),
        ("ATTNREG_POLICY", "measurd", f"got 'measurd', {POLICIES}; did you mean 'measured'?"),
        ("ATTNREG_MASKS", "recognize", f"got 'recognize', {MASKS}; did you mean 'recognise'?"),
        ("ATTNREG_AS_FLASH_ATTN", "2", f"got '2', {BOOLEANS}"),
        ("ATTNREG_TRANSFORMERS", "flash", f"got 'flash', {BOOLEANS} or flash_attention_2"),
        ("ATTNREG_BUILD", "backgroud", f"got 'backgroud', {BUILDS}; did you mean 'background'?"),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_got_and_what_was_expected(name, value, problem):
    assert refusal(read, {name: value}) == f"{name}: {problem}"


def test_all_problems_are_listed_one_on_each_line():
    both = {"ATTNREG_BACKEND": "cuDNN,FA4", "ATTNREG_DISABLE": "fa2,fa4"}
    *lines, last = refusal(read, {"ATTNREG_STRICT": "2", "ATTNREG_CONFG": "x.toml", **both}).splitlines()
    assert [line.split(":")[0] for line in lines] == ["ATTNREG_CONFG", "ATTNREG_STRICT"]
    assert last == "ATTNREG_BACKEND and ATTNREG_DISABLE: both name FA4, expected it in one of them only"


@pytest.mark.parametrize("name", ["ATTNREG", "MY_ATTNREG_BACKEND", "BACKEND"])
def test_variables_of_others_are_left_alone_and_give_the_defaults(name):
    assert (
        read({name: "x"})
        == EnvironmentSettings()
        == ((), (), None, None, "", "", None, None, None, None, "", "", "", None, "")
    )


def test_the_environment_of_the_process_is_read_at_the_call_not_at_import(monkeypatch):
    monkeypatch.setenv("ATTNREG_BACKEND", "FA2")
    assert read().backend == ("FA2",)
    monkeypatch.setenv("ATTNREG_BACKEND", "FA4")
    assert read().backend == ("FA4",)


def test_the_table_of_variables_fills_every_field_and_describes_each_in_one_line():
    assert {name.removeprefix("ATTNREG_").lower() for name in VARIABLES} == set(EnvironmentSettings._fields)
    assert all(variable.description and "\n" not in variable.description for variable in VARIABLES.values())


def test_an_environment_survives_pickle_and_deepcopy():
    before = read({"ATTNREG_BACKEND": "FA4", "ATTNREG_CONFIG": "x.toml", "ATTNREG_STRICT": "off"})
    assert pickle.loads(pickle.dumps(before)) == before
    assert copy.deepcopy(before) == before


def test_the_module_stays_cheap_to_import():
    tree = ast.parse(Path(environment.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names}
    assert imported == {"__future__", "os", "pathlib", "typing", "attnreg.errors"}

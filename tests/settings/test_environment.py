"""Promises of the environment variables."""

import ast
import copy
import pickle
from pathlib import Path

import pytest

from attnreg.errors import ConfigError
from attnreg.settings import environment
from attnreg.settings.environment import VARIABLES, Environment, read


def refusal(environ):
    with pytest.raises(ConfigError) as caught:
        read(environ)
    return str(caught.value)


def test_every_variable_is_read():
    environ = {
        "ATTNREG_BACKEND": "FA4",
        "ATTNREG_DISABLE": "cuDNN",
        "ATTNREG_CONFIG": "settings/attnreg.toml",
        "ATTNREG_STRICT": "1",
        "ATTNREG_POLICY": "order",
        "ATTNREG_RECORD": "trace.jsonl",
        "ATTNREG_LOCK": "lock.json",
        "ATTNREG_ROUTERS": "Compiled",
        "ATTNREG_BUILD": "Now",
        "PATH": "/bin",
    }
    assert read(environ) == Environment(
        ("FA4",),
        ("cuDNN",),
        Path("settings/attnreg.toml"),
        True,
        "order",
        Path("trace.jsonl"),
        Path("lock.json"),
        "compiled",
        "now",
    )


def test_nothing_set_gives_the_defaults():
    assert read({"PATH": "/bin"}) == Environment((), (), None, None)


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("blank", ["", "  ", "\t"])
def test_a_blank_variable_is_unset(name, blank):
    assert read({name: blank}) == Environment()


def test_names_keep_their_spelling_and_order_and_lose_the_spaces_around_them():
    assert read({"ATTNREG_BACKEND": " fa4 , CuDNN,my kernel "}).backend == ("fa4", "CuDNN", "my kernel")


def test_a_tilde_in_the_config_path_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read({"ATTNREG_CONFIG": "~/attnreg.toml"}).config == tmp_path / "attnreg.toml"


@pytest.mark.parametrize(
    ("text", "expected"),
    [(text, True) for text in ("1", "true", "YES", "On", " 1 ")]
    + [(text, False) for text in ("0", "False", "no", "OFF", "\toff")],
)
def test_booleans_are_read_in_any_case(text, expected):
    assert read({"ATTNREG_STRICT": text}).strict is expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"ATTNREG_STRICT": "yes please"},
            "ATTNREG_STRICT: got 'yes please', expected one of 1, true, yes, on, 0, false, no, off",
        ),
        (
            {"ATTNREG_STRICT": "2"},
            "ATTNREG_STRICT: got '2', expected one of 1, true, yes, on, 0, false, no, off",
        ),
        (
            {"ATTNREG_BACKEND": "FA4,,FA2"},
            "ATTNREG_BACKEND: got 'FA4,,FA2', expected a name before and after a comma",
        ),
        (
            {"ATTNREG_DISABLE": "FA4, "},
            "ATTNREG_DISABLE: got 'FA4,', expected a name before and after a comma",
        ),
        ({"ATTNREG_DISABLE": ","}, "ATTNREG_DISABLE: got ',', expected a name before and after a comma"),
        ({"ATTNREG_BACKEND": "FA4,FA2,fa4"}, "ATTNREG_BACKEND: got 'fa4' twice, expected each name once"),
        (
            {"ATTNREG_CONFIG": "~no-such-user/attnreg.toml"},
            "ATTNREG_CONFIG: got '~no-such-user/attnreg.toml', expected a path "
            "(there is no home folder for its ~)",
        ),
        (
            {"ATTNREG_BACKENDS": "FA4"},
            "ATTNREG_BACKENDS: unknown variable, expected one of ATTNREG_BACKEND, ATTNREG_DISABLE, "
            "ATTNREG_CONFIG, ATTNREG_STRICT, ATTNREG_POLICY, ATTNREG_RECORD, ATTNREG_LOCK, ATTNREG_ROUTERS, "
            "ATTNREG_BUILD; did you mean 'ATTNREG_BACKEND'?",
        ),
        (
            {"attnreg_strict": "1"},
            "attnreg_strict: unknown variable, expected one of ATTNREG_BACKEND, ATTNREG_DISABLE, "
            "ATTNREG_CONFIG, ATTNREG_STRICT, ATTNREG_POLICY, ATTNREG_RECORD, ATTNREG_LOCK, ATTNREG_ROUTERS, "
            "ATTNREG_BUILD; did you mean 'ATTNREG_STRICT'?",
        ),
        (
            {"ATTNREG_BACKEND": "cuDNN,FA4", "ATTNREG_DISABLE": "fa2,fa4"},
            "ATTNREG_BACKEND and ATTNREG_DISABLE: both name FA4, expected it in one of them only",
        ),
        (
            {"ATTNREG_ROUTERS": "compile"},
            "ATTNREG_ROUTERS: got 'compile', expected compiled or python; did you mean 'compiled'?",
        ),
        (
            {"ATTNREG_BUILD": "backgroud"},
            "ATTNREG_BUILD: got 'backgroud', expected background, now or off; did you mean 'background'?",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_got_and_what_was_expected(environ, message):
    assert refusal(environ) == message


def test_all_problems_are_listed_one_on_each_line():
    lines = refusal(
        {
            "ATTNREG_STRICT": "2",
            "ATTNREG_BACKEND": "FA4",
            "ATTNREG_DISABLE": "FA4",
            "ATTNREG_CONFG": "x.toml",
        }
    ).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "ATTNREG_CONFG",
        "ATTNREG_STRICT",
        "ATTNREG_BACKEND and ATTNREG_DISABLE",
    ]


@pytest.mark.parametrize("name", ["ATTNREG", "MY_ATTNREG_BACKEND", "BACKEND"])
def test_variables_of_others_are_left_alone(name):
    assert read({name: "x"}) == Environment()


def test_the_environment_of_the_process_is_read_at_the_call_not_at_import(monkeypatch):
    monkeypatch.setenv("ATTNREG_BACKEND", "FA2")
    assert read().backend == ("FA2",)
    monkeypatch.setenv("ATTNREG_BACKEND", "FA4")
    assert read().backend == ("FA4",)


def test_the_table_of_variables_fills_every_field_and_describes_each_in_one_line():
    assert {name.removeprefix("ATTNREG_").lower() for name in VARIABLES} == set(Environment._fields)
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

"""Promises of the settings."""

import json
import re
import tomllib
from pathlib import Path
from types import MappingProxyType

import pydantic
import pytest
import torch
import torch.nn.functional as F
from support.refusals import refusal
from torch.testing import assert_close

import attnreg
from attnreg.core.settings.config import (
    DEVICE_KEY,
    DEVICE_TYPES,
    DeviceSettings,
    LoadedSettings,
    Settings,
    check_backends,
    load,
    settings_from,
)
from attnreg.errors import ConfigError
from attnreg.tools.cli.config_schema import config_schema

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
DEFAULT = next(file for file in CONFIGS if file.name == "default.toml")

GOOD = """\
strict = true
disabled = ["math"]
log_level = "debug"
tuned = "tuned/table.json"

[devices]
cpu = { order = ["cpu"] }
cuda.order = ["FA4", " cuDNN "]

[devices."sm_90"]
order = [
  "FA4",  # the first
  "FA2",
]
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        file = tmp_path / "attnreg.toml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


def test_every_setting_is_read(write):
    assert load(write(GOOD)).settings == Settings(
        strict=True,
        disabled=("math",),
        log_level="debug",
        tuned=write(GOOD).parent / "tuned/table.json",
        devices={
            "cpu": DeviceSettings(order=("cpu",)),
            "cuda": DeviceSettings(order=("FA4", "cuDNN")),
            "sm_90": DeviceSettings(order=("FA4", "FA2")),
        },
    )


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "\ufeff", "[devices]\n"])
def test_an_empty_file_gives_the_defaults(write, text):
    settings = load(write(text)).settings
    assert settings == Settings() == settings_from({})
    assert settings.model_dump() == {
        "strict": False, "disabled": (), "log_level": "warning", "policy": "measured",
        "masks": "as_given", "on_error": "raise", "tuned": None, "devices": {}, "modules": {},
            "lock": None, "build": "background", "transformers": "off",
    }  # fmt: skip


ASKING_NOTHING = {
    "empty": "",
    "comments": '# [devices.cpu]\n# order = ["math"]\n',
    "what else a rollout sets": 'on_error = "native"\nstrict = false\nlog_level = "info"\nbuild = "off"\n',
    "modules that nothing assigns": '[modules]\n"*.attention" = "math"\n',
}


@pytest.mark.parametrize("text", ASKING_NOTHING.values(), ids=ASKING_NOTHING)
@pytest.mark.parametrize("way", ["the variable", "configure"])
def test_a_file_that_asks_for_no_backend_leaves_torchs_kernels(write, monkeypatch, ran, text, way):
    query = torch.randn(1, 2, 4, 8)
    torchs_own = F.scaled_dot_product_attention(query, query, query)
    if way == "configure":
        attnreg.configure(write(text))
    else:
        monkeypatch.setenv("ATTNREG_CONFIG", str(write(text)))
        attnreg.reload()
    assert F.scaled_dot_product_attention(query, query, query).equal(torchs_own)
    assert ran() == {}
    attnreg.configure(write('[devices.cpu]\norder = ["math"]\n'))
    assert_close(F.scaled_dot_product_attention(query, query, query), torchs_own)
    assert ran() == {"math": (1, 0)}


KEYS = "unknown key, expected one of strict, disabled, log_level, policy, masks, on_error, tuned, lock, build"
KEYS += ", transformers, devices, modules"
KINDS = "expected 'cpu', 'cuda', another device type of torch or 'sm_NN'"
LEVELS = "expected 'debug', 'info', 'warning' or 'error'"
ONCE = "expected each name once: [0] is the same name, as case doesn't matter"
ORDER = "order: missing, expected a list of at least one name"
REFERENCE = "another backend, or strict = true: the reference runs what no other can"

WRONG = [
    ('strict = "yes"', "1: strict: got 'yes', expected true or false"),
    ("strict = 1", "1: strict: got 1, expected true or false"),
    ('disabled = "FA2"', "1: disabled: got 'FA2', expected a list of names"),
    ('disabled = ["FA2", true]', "1: disabled[1]: got True, expected a string"),
    ('disabled = [" "]', "1: disabled[0]: got ' ', expected a name"),
    ('disabled = ["FA2", "FA4", "fa2"]', f"1: disabled[2]: got 'fa2', {ONCE}"),
    ('disabled = ["FA2", "Math"]', f"1: disabled[1]: got 'Math', expected {REFERENCE}"),
    ('log_level = "WARNING"', f"1: log_level: got 'WARNING', {LEVELS}; did you mean 'warning'?"),
    ("log_level = 20", f"1: log_level: got 20, {LEVELS}"),
    ('tuned = ""', "1: tuned: got '', expected the path of a file"),
    ("tuned = ['a.json']", "1: tuned: got ['a.json'], expected the path of a file"),
    (
        'tuned = "~no-one/a.json"',
        "1: tuned: got '~no-one/a.json', expected the path of a file (there is no home folder for its ~)",
    ),
    ("devices = 3", "1: devices: got 3, expected a table"),
    ("[[devices]]\ncuda = 1", "1: devices: got [{'cuda': 1}], expected a table"),
    ('[devices]\ncuda = ["FA4"]', "2: devices.cuda: got ['FA4'], expected a table"),
    (
        '[devices]\norder = ["FA4"]',
        f"2: devices.order: got 'order', {KINDS}; 'order' belongs to a device, such as [devices.cuda]\n"
        "2: devices.order: got ['FA4'], expected a table",
    ),
    ("[modules]\nself_attn = 3", "2: modules.self_attn: got 3, expected a name or a list of names"),
    (
        '[modules]\nvision.self_attn = "FA4"',
        "2: modules.vision: got {'self_attn': 'FA4'}, expected a name or a list of names; a pattern with "
        "dots needs quotes",
    ),
    ("[devices]\n\n[devices.cuda]", f"3: devices.cuda.{ORDER}"),
    ("devices.cuda.order = []", "1: devices.cuda.order: got [], expected at least one name"),
    (
        '[devices.sm_90]\norder = [\n  "FA4",\n  "FA2", "cuDNN",\n  "fa4",\n]',
        f"5: devices.\"sm_90\".order[3]: got 'fa4', {ONCE}",
    ),
    (
        'disabled = ["fa2"]\n[devices.cuda]\norder = ["FA4", "FA2"]',
        "3: devices.cuda.order[1]: got 'FA2', expected a backend that isn't disabled: "
        "disabled[0] names it too",
    ),
    (
        'stricct = true\n"log level" = "info"',
        f"1: stricct: {KEYS}; did you mean 'strict'?\n2: \"log level\": {KEYS}; did you mean 'log_level'?",
    ),
    ("strict.x = true\n[zzz]", f"1: strict: got {{'x': True}}, expected true or false\n2: zzz: {KEYS}"),
    (
        '[devices.cuda]\nodrer = ["FA4"]',
        "2: devices.cuda.odrer: unknown key, expected order; did you mean 'order'?",
    ),
    (
        'ordr = ["FA4"]\n[devices.cuda]\nbackends = ["FA4"]\n[devices.cpu]\nstrct = true',
        f"1: ordr: {KEYS}; did you mean 'order'? It belongs to a device, such as [devices.cuda]\n"
        "3: devices.cuda.backends: unknown key, expected order; did you mean 'order'?\n"
        f"4: devices.cpu.{ORDER}\n"
        "5: devices.cpu.strct: unknown key, expected order; did you mean 'strict'? It belongs above the "
        "first [table]",
    ),
    (
        '[devices.cuda]\norder = ["FA4"]\nstrict = true',
        "3: devices.cuda.strict: unknown key, expected order; 'strict' belongs above the first [table]",
    ),
    ('devices.cudaa.order = ["FA4"]', f"1: devices.cudaa: got 'cudaa', {KINDS}; did you mean 'cuda'?"),
    (
        '[devices.SM90a]\norder = ["a"]',
        f"1: devices.\"SM90a\": got 'SM90a', {KINDS}; did you mean 'sm_90'?",
    ),
    ('[devices."9.0"]\norder = ["FA4"]', f"1: devices.\"9.0\": got '9.0', {KINDS}"),
]


@pytest.mark.parametrize(("text", "problems"), WRONG)
def test_what_is_wrong_is_refused_with_its_place_in_a_file_and_in_the_same_words_from_python(
    write, text, problems
):
    file, problems = write(text), problems.splitlines()
    assert refusal(load, file) == "\n".join(f"{file}:{problem}" for problem in problems)
    refused = refusal(settings_from, tomllib.loads(text)).splitlines()
    assert sorted(refused) == sorted(f"configure(...): {problem.split(': ', 1)[1]}" for problem in problems)


def test_every_problem_of_a_file_is_listed_in_the_order_of_its_lines(write):
    file = write(
        'log_level = 1\nstricct = true\nstrict = 2\n[devices]\ngpu = {}\ncpu.order = ["cpu", 3, "CPU"]\n'
    )
    assert [line.split(": ")[:2] for line in refusal(load, file).splitlines()] == [
        [f"{file}:1", "log_level"],
        [f"{file}:2", "stricct"],
        [f"{file}:3", "strict"],
        [f"{file}:5", "devices.gpu"],
        [f"{file}:5", "devices.gpu.order"],
        [f"{file}:6", "devices.cpu.order[1]"],
    ]


GIVEN = "expected the path of a settings file, Settings, or a mapping such as {'policy': 'adaptive'}"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (42, f"configure(...): got 42, {GIVEN}"),
        (None, f"configure(...): got None, {GIVEN}"),
        (b"adaptive", f"configure(...): got b'adaptive', {GIVEN}"),
        ({1: 2}, "configure(...): [1]: got 1, expected the name of a setting"),
        ({"disabled": {"FA2"}}, "configure(...): disabled: got {'FA2'}, expected a list of names"),
        ({"disabled": [b"FA2"]}, "configure(...): disabled[0]: got b'FA2', expected a string"),
        ({"devices": {3: {"order": ["a"]}}}, "configure(...): devices[3]: got 3, expected a string"),
    ],
)
def test_what_only_python_can_get_wrong_is_refused_too(value, message):
    assert refusal(settings_from, value) == message


def test_settings_that_went_round_the_checks_are_checked_when_given():
    changed = Settings().model_copy(update={"log_level": "loud"})
    assert refusal(settings_from, changed).startswith("configure(...): log_level: got 'loud'")
    built = Settings(devices={"cpu": DeviceSettings(order=("cpu",))})
    built.devices["cpu"] = DeviceSettings.model_construct(order=())
    expected = "configure(...): devices.cpu.order: got (), expected at least one name"
    assert refusal(settings_from, built) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Settings(polcy="order"),
            f"Settings(...): polcy: {KEYS}; did you mean 'policy'?",
        ),
        (
            lambda: Settings(policy="ordr", strict=1),
            "Settings(...): strict: got 1, expected true or false\nSettings(...): policy: got 'ordr', "
            "expected 'measured', 'order', 'adaptive' or 'batch_invariant'; did you mean 'order'?",
        ),
        (
            lambda: Settings(devices={"cpu": {"order": ["cpu", "CPU"]}}),
            "Settings(...): devices.cpu.order[1]: got 'CPU', expected each name once: [0] is the same name, "
            "as case doesn't matter",
        ),
        (
            lambda: DeviceSettings(oder=["cpu"]),
            "DeviceSettings(...): oder: unknown key, expected order; did you mean 'order'?",
        ),
        (
            lambda: DeviceSettings(strict=True),
            f"DeviceSettings(...): {ORDER}\n"
            "DeviceSettings(...): strict: unknown key, expected order; 'strict' belongs above the first "
            "[table]",
        ),
    ],
)
def test_settings_built_in_python_are_refused_at_once_in_the_words_of_a_file(make, message):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value) == message
    assert error.value.__cause__ is None and error.value.__suppress_context__


def test_settings_from_returns_what_it_was_given_and_which_fields_were_set():
    settings = settings_from({"strict": True, "disabled": ["math"]})  # the reference: in strict mode only
    assert settings == Settings(strict=True, disabled=("math",))
    assert settings_from(settings) == settings_from(MappingProxyType(dict(settings))) == settings
    assert settings_from(settings).model_fields_set == {"strict", "disabled"}


def test_settings_can_be_changed_neither_in_place_nor_by_the_mapping_that_they_came_from():
    for made, field in ((Settings(), "strict"), (DeviceSettings(order=("cpu",)), "order")):
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            setattr(made, field, True)
    given = {"devices": {"cpu": {"order": ["cpu"]}}}
    settings = settings_from(given)
    given["devices"]["cpu"]["order"].append("math")
    given["devices"]["cuda"] = {"order": ["FA4"]}
    assert settings == Settings(devices={"cpu": DeviceSettings(order=("cpu",))})


def test_a_tuned_table_is_looked_for_beside_the_file_that_names_it(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for written, expected in [
        ("tuned/a.json", tmp_path / "tuned/a.json"),
        ("/opt/a.json", Path("/opt/a.json")),
        ("~/a.json", tmp_path / "home/a.json"),
    ]:
        assert load(write(f"tuned = {written!r}")).settings.tuned == expected
    assert settings_from({"tuned": "tuned/a.json"}).tuned == Path("tuned/a.json")


def test_a_loaded_setting_has_its_line_and_one_of_a_value_tells_that_it_is(write):
    loaded = load(write(GOOD))
    assert loaded.origin.path == write(GOOD)
    assert loaded.origin.describe() == "attnreg.toml"
    for key, line in {
        ("strict",): 1,
        ("disabled", 0): 2,
        ("devices", "cpu", "order"): 7,
        ("devices", "cuda", "order", 1): 8,
        ("devices", "sm_90", "order"): 11,
        ("devices", "sm_90", "order", 1): 13,
    }.items():
        assert loaded.origin.describe(key) == f"attnreg.toml:{line}"
    given = LoadedSettings(settings_from({"strict": True}))
    assert given.origin.path is None
    assert given.origin.describe(("strict",)) == "configure(...)"


def test_unknown_backends_are_refused_with_their_place_and_known_ones_taken_in_any_case(write):
    file = write(GOOD)
    assert check_backends(load(file), ["fa4", "FA2", "CUDNN", "math", "Cpu"]) is None
    expected = "expected one of cpu, cuDNN, FA44, math; did you mean 'FA44'?"
    assert refusal(check_backends, load(file), ("math", "FA44", "cuDNN", "cpu")).splitlines() == [
        f"{file}:8: devices.cuda.order[0]: got 'FA4', {expected}",
        f"{file}:12: devices.\"sm_90\".order[0]: got 'FA4', {expected}",
        f"{file}:13: devices.\"sm_90\".order[1]: got 'FA2', {expected}",
    ]
    given = LoadedSettings(settings_from({"disabled": ["FA2", "cdnn"]}))
    assert refusal(check_backends, given, iter(("FA2", "cuDNN"))) == (
        "configure(...): disabled[1]: got 'cdnn', expected one of cuDNN, FA2; did you mean 'cuDNN'?"
    )


def test_the_schema_describes_every_field_and_is_json(capsys):
    config_schema()
    document = json.loads(capsys.readouterr().out)
    assert document["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    tables = {Settings: document, DeviceSettings: document["$defs"]["DeviceSettings"]}
    for model, table in tables.items():
        assert set(table["properties"]) == set(model.model_fields)
        assert all(field["description"] for field in table["properties"].values())
        assert table["additionalProperties"] is False
    assert document["$defs"]["DeviceSettings"]["properties"]["order"]["minItems"] == 1
    assert document["properties"]["devices"]["propertyNames"] == {"pattern": DEVICE_KEY}


@pytest.mark.parametrize(
    ("key", "valid"),
    [(key, True) for key in ("cpu", "cuda", "xpu", "privateuseone", "sm_80", "sm_90", "sm_120")]
    + [(key, False) for key in ("CPU", "gpu", "cuda:0", "sm_9", "sm_090", "sm_1200", "sm_90a", "cpu\n", "")],
)
def test_the_schema_and_the_check_take_the_same_device_keys(key, valid):
    # JSON schema searches, and its "$" is the very end: "\Z" in Python.
    assert bool(re.search(DEVICE_KEY.replace("$", r"\Z"), key)) is valid
    if valid:
        assert list(settings_from({"devices": {key: {"order": ["a"]}}}).devices) == [key]
    else:
        assert "another device type of torch" in refusal(settings_from, {"devices": {key: {"order": ["a"]}}})


def test_every_device_type_of_torch_is_a_device_key():
    with pytest.raises(RuntimeError, match="Expected one of") as caught:
        torch.device("nonsense")
    listed = re.search("Expected one of (.+) device type", str(caught.value))[1].split(", ")
    assert {"cpu", "cuda"} <= set(listed) <= set(DEVICE_TYPES)


def test_there_is_a_settings_file_for_each_kind_of_machine_with_backends_that_there_are():
    assert [file.name for file in CONFIGS] == ["blackwell.toml", "cpu.toml", "default.toml", "hopper.toml"]
    for file in CONFIGS:
        check_backends(load(file), attnreg.list_backends())


def test_the_examples_in_the_comments_of_a_settings_file_are_valid_as_well(write):
    # An example begins with "#" and no space.
    loaded = load(write(re.sub("^#(?! )", "", DEFAULT.read_text(encoding="utf-8"), flags=re.MULTILINE)))
    check_backends(loaded, attnreg.list_backends())
    assert loaded.settings.tuned
    assert loaded.settings.devices


def test_the_default_file_spells_out_the_defaults_and_mentions_every_setting():
    assert load(DEFAULT).settings == Settings()
    text = DEFAULT.read_text(encoding="utf-8")
    assert all(re.search(rf"^#?\[?{field}\b", text, re.MULTILINE) for field in Settings.model_fields)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("adaptive", "; for this setting write attnreg.configure({'policy': 'adaptive'})"),
        ("Adaptve", "; for this setting write attnreg.configure({'policy': 'adaptive'})"),
        ("recognise", "; for this setting write attnreg.configure({'masks': 'recognise'})"),
        (
            "off",
            "; for this setting write attnreg.configure({'build': 'off'}) or "
            "attnreg.configure({'transformers': 'off'})",
        ),
        ("strict", "; for this setting write attnreg.configure({'strict': ...})"),
        ("policy = 'adaptive'", "; for this setting write attnreg.configure({'policy': ...})"),
        ("fa2", "; for this backend write attnreg.register_backend('FA2')"),
        ("adaptive.toml", ""),
        ("nowhere/adaptive", ""),
    ],
)
def test_a_setting_in_place_of_a_path_is_an_error_that_says_what_to_write(tmp_path, monkeypatch, given, hint):
    monkeypatch.chdir(tmp_path)
    assert refusal(attnreg.configure, given) == (
        f"{tmp_path / given}: can't be read (no such file or directory), "
        f"expected a settings file in TOML{hint}"
    )
    (tmp_path / given).parent.mkdir(exist_ok=True)
    (tmp_path / given).write_text("log_level = 'loud'", encoding="utf-8")
    assert refusal(attnreg.configure, given).startswith(f"{tmp_path / given}:1: log_level: got 'loud'")

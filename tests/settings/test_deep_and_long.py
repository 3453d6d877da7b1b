"""Files that are nested too deeply, and lists of any length: an error of a few lines."""

from __future__ import annotations

import json

import pytest

import attnreg
from attnreg.core.policy import lockfile
from attnreg.core.settings import config, environment
from attnreg.core.times import job_results, table, traces
from attnreg.errors import MOST_LISTED, ConfigError, first_ten, short_repr

DEEP = "[" * 100_000
DEVICE = '{{"type": "cpu", "capability": null, "name": ""}}'
ROW = f'{{{{"forward": 1, "backward": 0, "spec": {{spec}}, "device": {DEVICE}}}}}\n'
# Deep enough for an error where it is shown, compared or hashed, but not where it is parsed.
SHALLOWER = "[" * 900 + "]" * 900
MANY = [f"x{number}" for number in range(5_000)]


@pytest.mark.each_value("text", "variable")
@pytest.mark.parametrize("variable", ["ATTNREG_LOCK", "ATTNREG_RECORD", "ATTNREG_CONFIG", ""])
@pytest.mark.parametrize(
    "text",
    [DEEP, "a = " + DEEP, "a = " + '{"a":' * 50_000, DEEP + "]" * 100_000, ".".join("a" * 5_000) + " = 1"],
    ids=["not closed", "array", "table", "closed", "key"],
)
def test_a_deep_file_is_an_error_of_the_settings(tmp_path, monkeypatch, variable, text):
    file = tmp_path / "deep"
    file.write_text(text)
    if variable:
        monkeypatch.setenv(variable, str(file))
    with pytest.raises(ConfigError) as caught:
        attnreg.reload() if variable else attnreg.configure({"policy": "measured", "tuned": str(file)})
    assert str(file) in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("deep", [DEEP, SHALLOWER], ids=["not parsed", "parsed"])
def test_a_deep_value_in_any_file_is_an_error_that_names_the_file(tmp_path, deep):
    file = tmp_path / "deep.json"
    for read, text in (
        (table.load, deep),
        (table.load, f'{{"format": {deep}}}'),
        (lockfile.load, f'{{"format": "attnreg lockfile", "version": {deep}}}'),
        (traces.read, deep + "\n"),
        (traces.read, ROW.format(spec=deep)),
        (traces.read, ROW.format(spec=f'{{"dtype": {deep}}}')),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read(file)
        assert str(file) in str(caught.value) and len(str(caught.value)) < 1000
    assert job_results.read(deep) is None


WRONG = {
    "unknown": {"disabled": MANY},
    "twice": {"disabled": ["math"] * 5_000},
    "no names": {"disabled": [1] * 5_000},
    "unknown keys": dict.fromkeys(MANY, 1),
    "a list as a value": {"strict": MANY},
    "order": {"devices": {"cpu": {"order": MANY}}},
}


@pytest.mark.each_value("in_file", "wrong")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("in_file", [True, False])
def test_of_a_long_list_the_first_ten_and_a_count_are_said(tmp_path, monkeypatch, wrong, in_file):
    suggestions = []
    suggest = config.did_you_mean
    monkeypatch.setattr(config, "did_you_mean", lambda *given: suggestions.append(given) or suggest(*given))
    settings = WRONG[wrong]
    if in_file:
        settings = tmp_path / "many.toml"
        devices = WRONG[wrong].get("devices", {})
        rows = devices.get("cpu", {}) if devices else WRONG[wrong]
        lines = (f"{name} = {json.dumps(value)}\n" for name, value in rows.items())
        settings.write_text(("[devices.cpu]\n" if devices else "") + "".join(lines))
    with pytest.raises(ConfigError) as caught:
        attnreg.configure(settings)
    said = str(caught.value)
    assert len(said) < 3000 and len(suggestions) <= MOST_LISTED
    if wrong == "a list as a value":
        assert "'x9', ...], expected true or false" in said
    else:
        all_of_them = 4_999 if wrong == "twice" else 5_000
        assert said.endswith(f"\nand {all_of_them - 10} more ({all_of_them} in all)")
        assert len(said.splitlines()) == MOST_LISTED + 1


def test_of_many_unknown_variables_the_first_ten_are_named():
    with pytest.raises(ConfigError) as caught:
        environment.read({f"ATTNREG_{name}": "1" for name in MANY})
    assert str(caught.value).endswith("\nand 4990 more (5000 in all)")
    with pytest.raises(ConfigError) as caught:
        environment.read({"ATTNREG_BACKEND": ",".join([*MANY, "x0"])})
    assert str(caught.value) == "ATTNREG_BACKEND: got 'x0' twice, expected each name once"
    with pytest.raises(ConfigError) as caught:
        environment.read({"ATTNREG_DISABLE": ",".join([*MANY, ""])})
    assert len(str(caught.value)) < 500


def test_lists_are_shortened_behind_ten_values():
    assert first_ten(list(range(10))) == [str(number) for number in range(10)]
    assert first_ten([0] * 12) == [*["0"] * 10, "and 2 more (12 in all)"]
    asked = []
    first_ten(MANY, lambda name: asked.append(name) or name)
    assert asked == MANY[:10]
    assert len(short_repr(MANY)) < 200 and len(short_repr("x" * 10_000)) < 400

"""Promises of `attnreg check` and `attnreg init`: all faults at once, and a file that is right."""

import json

import pytest

import attnreg
from attnreg.core.policy import lockfile
from attnreg.core.times import table as measured
from attnreg.core.times import traces
from attnreg.tools.cli.init import FOLDER

KNOWN = "cpu, cuDNN, efficient, FA2, FA3, FA4, flex, math"


def faults_of(result):
    """Return the faults of each file, from the JSON of a run."""
    return {one["name"]: one["faults"] for one in json.loads(result.stdout)["checked"]}


def test_every_fault_of_a_settings_file_is_shown_with_its_line_and_a_hint(call, tmp_path):
    file = tmp_path / "rollout.toml"
    file.write_text(
        'order = ["FA2"]\npolcy = "order"\n[devices.H100]\norder = ["FA9"]\n[devices.gpu]\norder = ["math"]\n'
    )
    result = call("check", str(file), "--json")
    assert result.exit_code == 2
    assert [line.removeprefix(f"{file}:").partition(": ")[0] for line in faults_of(result)[str(file)]] == [
        *"12345"
    ]
    hints = (
        "'order' belongs to a device, such as [devices.cuda]",
        "'policy'?",
        "'sm_90'?",
        "'FA4'?",
        "'cuda'?",
    )
    for line, hint in zip(faults_of(result)[str(file)], hints, strict=True):
        assert line.endswith(hint)
    shown = call("check", str(file))
    assert (shown.exit_code, "  rollout.toml  5 faults" in shown.stdout) == (
        2,
        False,
    )  # the path as it was given
    assert all(f"  {line}\n" in shown.stdout for line in faults_of(result)[str(file)]), "lines stay whole"


CONTRADICTION = """\
tuned = "no-table.json"
disabled = ["cuDNN", "math"]
{}
[devices.cuda]
order = ["FA2", "cudnn"]
[modules]
"*.attn" = "FA9"
"vision.*" = ["FA2", "FA8"]
"""


@pytest.mark.parametrize("wrong", ["", "strict = 3"])
def test_a_wrong_key_hides_no_contradiction_no_table_and_no_name_of_another_key(call, tmp_path, wrong):
    file = tmp_path / "site.toml"
    file.write_text(CONTRADICTION.format(wrong))
    faults = faults_of(call("check", str(file), "--json"))[str(file)]
    expected = {
        f"{file}:2: disabled[1]: got 'math', expected another backend, or strict = true",
        f"{file}:5: devices.cuda.order[1]: got 'cudnn', expected a backend that isn't disabled: disabled[0]",
        f"{file}:7: modules.\"*.attn\"[0]: got 'FA9', expected one of cpu,",
        f"{file}:8: modules.\"vision.*\"[1]: got 'FA8', expected one of cpu,",
        f"site.toml:1: tuned: {tmp_path}/no-table.json: ",
        *([f"{file}:3: strict: got 3"] if wrong else []),
    }
    assert len(faults) == len(expected)
    assert all(any(fault.startswith(begin) for fault in faults) for begin in expected)


def test_a_typo_is_one_fault_also_in_a_file_that_a_variable_names_as_well(call, tmp_path, monkeypatch):
    file = tmp_path / "rollout.toml"
    file.write_text('[devices.cuda]\nordr = ["FA2"]\n')
    monkeypatch.setenv("ATTNREG_CONFIG", str(file))
    shown = call("check", str(file)).stdout
    fault = f"{file}:2: devices.cuda.ordr: unknown key, expected order; did you mean 'order'?"
    assert shown.partition("Faults\n")[2] == f"  {fault}\n\n"


def test_more_than_ten_faults_are_all_listed_and_an_error_counts_them(call, tmp_path, monkeypatch):
    file = tmp_path / "rollout.toml"
    file.write_text("\n".join(f"key{n} = 1" for n in range(11)) + '\n[devices.cpu]\norder = ["FA9", "FA8"]\n')
    with pytest.raises(attnreg.ConfigError, match=r"and 3 more \(13 in all\)$"):
        attnreg.configure(file)
    for n in range(12):
        monkeypatch.setenv(f"ATTNREG_UNKNOWN{n}", "1")
    faults = faults_of(call("check", str(file), "--json"))
    assert (len(faults[str(file)]), len(faults["variables"])) == (13, 12)
    assert not any(" more (" in line for lines in faults.values() for line in lines)
    assert ["FA9" in faults[str(file)][11], "FA8" in faults[str(file)][12]] == [True, True]


@pytest.mark.parametrize(("wrong", "code"), [({}, 0), ({"fallbacks": [3]}, 2)], ids=["right", "wrong"])
def test_lines_of_a_run_are_checked_as_such(call, tmp_path, wrong, code):
    lists = "fallbacks", "failures", "bypassed", "masks", "overridden", "slow_paths"
    line = {"program": "a.py", "pid": 1, "calls": {}, **{key: [] for key in lists}, **wrong}
    file = tmp_path / "stats.jsonl"
    file.write_text(json.dumps(line) + "\n")
    result = call("check", str(file), "--json")
    faults = faults_of(result)[str(file)]
    assert (result.exit_code, len(faults)) == (code, len(wrong))
    assert all("fallbacks[0] is no object" in fault for fault in faults)


def test_a_variable_of_a_wrong_form_hides_no_fault_of_another(call, monkeypatch):
    wrong = {"POLCY": "order", "STRICT": "maybe", "DISABLE": "mth", "LOCK": "/no/lock.json"}
    for name, value in wrong.items():
        monkeypatch.setenv(f"ATTNREG_{name}", value)
    faults = faults_of(call("check", "--json"))["variables"]
    assert [line.partition(":")[0] for line in faults] == [f"ATTNREG_{name}" for name in wrong]


def test_files_and_variables_that_are_right_have_no_fault(call, tmp_path):
    file = tmp_path / "new.toml"
    assert call("init", str(file)).exit_code == 0
    result = call("check", str(file), "--json")
    assert (result.exit_code, faults_of(result)) == (0, {str(file): [], "variables": []})


def test_faults_of_all_variables_and_of_the_files_that_they_name_are_shown_at_once(
    call, monkeypatch, tmp_path
):
    settings, lock = tmp_path / "site.toml", tmp_path / "lock.json"
    settings.write_text("strict = 3\n")
    lock.write_text(json.dumps({"format": measured.FORMAT}))
    monkeypatch.setenv("ATTNREG_BACKEND", "cpu,maht")
    monkeypatch.setenv("ATTNREG_DISABLE", "nothing")
    monkeypatch.setenv("ATTNREG_CONFIG", str(settings))
    monkeypatch.setenv("ATTNREG_LOCK", str(lock))
    result = call("check", "--json")
    assert result.exit_code == 2
    names, disabled, locked, strict = faults_of(result)["variables"]
    assert (
        names == f"ATTNREG_BACKEND: no backend is named 'maht'; did you mean 'math'? known backends: {KNOWN}"
    )
    assert disabled == f"ATTNREG_DISABLE: no backend is named 'nothing'; known backends: {KNOWN}"
    assert locked.startswith(f"ATTNREG_LOCK: {lock}: ")
    assert strict == f"{settings}:1: strict: got 3, expected true or false"
    monkeypatch.setenv("ATTNREG_BACKND", "cpu")
    assert "ATTNREG_BACKND: unknown variable" in faults_of(call("check", "--json"))["variables"][0]


def test_variables_that_contradict_a_file_are_a_fault(call, monkeypatch, tmp_path):
    file = tmp_path / "site.toml"
    file.write_text('disabled = ["cpu"]\n')
    monkeypatch.setenv("ATTNREG_CONFIG", str(file))
    monkeypatch.setenv("ATTNREG_BACKEND", "cpu")
    asked = "ATTNREG_BACKEND asks for 'cpu', but it is disabled by site.toml:1"
    assert faults_of(call("check", "--json"))["variables"] == [asked]
    monkeypatch.setenv("ATTNREG_STRICT", "maybe")
    assert faults_of(call("check", "--json"))["variables"][1:] == [asked], "whatever else is wrong"


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("x.json", "{}", f": got no format, expected {lockfile.FORMAT!r} or {measured.FORMAT!r}"),
        ("x.json", '{"format": "cheese"}', f": got the format 'cheese', expected {lockfile.FORMAT!r}"),
        ("x.json", json.dumps({"format": lockfile.FORMAT}), ": "),
        ("x.jsonl", "[]\n", ":1: "),
        ("x.txt", "", ": got the suffix '.txt', expected settings (.toml), a lockfile or a table"),
        ("x.toml", "strict =", ":1: not TOML: "),
    ],
    ids=["no format", "another format", "an empty lockfile", "a recording", "a suffix", "no TOML"],
)
def test_a_file_that_is_none_of_attnregs_is_a_fault(call, tmp_path, name, text, fault):
    file = tmp_path / name
    file.write_text(text)
    result = call("check", str(file), "--json")
    assert result.exit_code == 2
    assert faults_of(result)[str(file)][0].startswith(f"{file}{fault}")


def test_a_backend_in_the_order_of_devices_that_it_never_serves_is_a_note(call, tmp_path):
    file = tmp_path / "site.toml"
    orders = {"sm_100": '"FA3", "FA4"', "cpu": '"FA2"', "cuda": '"FA3"'}
    file.write_text("".join(f"[devices.{device}]\norder = [{order}]\n" for device, order in orders.items()))
    (notes, _) = [one["notes"] for one in json.loads(call("check", str(file), "--json").stdout)["checked"]]
    assert [note.partition(": devices.")[2] for note in notes] == [
        "\"sm_100\".order[0]: 'FA3' runs no call there: compute capability must be 9.0, got 10.0 (too new)",
        "cpu.order[0]: 'FA2' runs no call there: device must be cuda, got cpu",
    ]


def test_of_a_lockfile_a_note_says_that_only_its_format_is_right(call, tmp_path, monkeypatch):
    environment = {"device": "x", "torch": "2.13.0", "attnreg": "0.2.0", "backends": {}}
    file = tmp_path / "lock.json"
    lockfile.Lockfile(file, "cpu", measured.Environment(**environment), ()).save()
    monkeypatch.setenv("ATTNREG_LOCK", str(file))
    checked = json.loads(call("check", str(file), "--json").stdout)["checked"]
    says = f": only the format was read; `attnreg lock --check {file}` says whether its rows hold on this"
    assert [one["notes"] for one in checked] == [[f"{file}{says} machine"], [f"ATTNREG_LOCK{says} machine"]]


def test_each_wrong_row_of_a_lockfile_table_or_recording_is_a_fault_and_an_error_names_ten(call, tmp_path):
    environment = {"device": "x", "torch": "2.13.0", "attnreg": "0.2.0", "backends": {}}
    lock, table, recording = (tmp_path / name for name in ("lock.json", "table.json", "calls.jsonl"))
    lockfile.Lockfile(lock, "cpu", measured.Environment(**environment), ()).save()
    measured.Table(measured.Environment(**environment), ()).save(table)
    for file, key in ((lock, "rows"), (table, "points")):
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: [{}] * 12}))
    recording.write_text("{}\n" * 12)
    files = (lock, "rows", lockfile.load), (table, "points", measured.load), (recording, "", traces.read)
    for file, key, load in files:
        faults = faults_of(call("check", str(file), "--json"))[str(file)]
        places = [f"{file}: {key}[{n}]" if key else f"{file}:{n + 1}" for n in range(12)]
        assert [line.startswith(place) for line, place in zip(faults, places, strict=True)] == [True] * 12
        with pytest.raises(attnreg.ConfigError, match=r"and 2 more \(12 in all\)$"):
            load(file)


def test_strict_settings_that_refuse_nothing_are_a_note(call, tmp_path):
    file = tmp_path / "site.toml"
    file.write_text('strict = true\n[devices.cuda]\norder = ["FA4", "Math"]\n')
    result = call("check", str(file))
    note = f"{file}:3: devices.cuda.order: names 'math', which runs every call: strict = true refuses no call"
    assert (result.exit_code, f"Notes\n  {note} here\n" in result.stdout) == (0, True)


@pytest.mark.parametrize("template", ["default", "cpu", "hopper", "blackwell"])
def test_init_writes_a_template_with_its_comments(call, tmp_path, template):
    file = tmp_path / "attnreg.toml"
    assert call("init", str(file), "--template", template).exit_code == 0
    text = (FOLDER / f"{template}.toml").read_text("utf-8")
    assert file.read_text("utf-8") == text.replace("default.toml", "attnreg.toml")
    assert ("ATTNREG_CONFIG=attnreg.toml python" in file.read_text("utf-8")) == (template == "default")
    again = call("init", str(file))
    assert (again.exit_code, again.stderr) == (
        2,
        f"attnreg: {file}: exists, expected the name of a new file\n",
    )


@pytest.mark.parametrize("name", ["attnreg", "attnreg.conf", "attnreg.json", "attnreg.jsonl", "attnreg.toml"])
def test_a_file_that_is_not_there_is_said_to_be_missing_whatever_its_suffix(call, tmp_path, name):
    file = tmp_path / name
    result = call("check", str(file), "--json")
    assert result.exit_code == 2
    (fault,) = faults_of(result)[str(file)]
    assert fault.startswith(f"{file}: can't be read") and "no such file or directory" in fault.lower()


def test_init_names_the_templates(call, tmp_path):
    named = call("init", str(tmp_path / "x.json"))
    assert (named.exit_code, "got the suffix '.json', expected a name" in named.stderr) == (2, True)
    result = call("init", str(tmp_path / "x.toml"), "--template", "hoper")
    expected = "got 'hoper', expected one of blackwell, cpu, default, hopper; did you mean 'hopper'?"
    assert (result.exit_code, result.stderr) == (2, f"attnreg: --template: {expected}\n")

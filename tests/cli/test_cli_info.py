"""Promises of `attnreg info`: whatever is broken is a row, and each setting has its source."""

import json
from types import SimpleNamespace

import pytest
import torch
from support.command_line import broken_loader, rows, words

import attnreg
from attnreg.core.dispatch import planning
from attnreg.core.torchlib import captured


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
    found = rows(result)
    states = {name: (row["state"], row["reason"]) for name, row in found.items()}
    untried = "isn't proven on the hardware that it is written for"
    expected = {
        "good": ("ready", ""),
        "new": ("experimental", untried),
        "absent": ("can't load", "no 'absent' package; install it with: pip install x[y]"),
        "untried": ("can't load", f"no GPU; experimental: it {untried}"),
        "crashes": ("broken", "ImportError: libcuda.so: undefined symbol [abi]"),
        "plugin": ("broken", "RuntimeError: built for another torch"),
        "alien": ("broken", states["alien"][1]),
        "unwanted": ("disabled", "by ATTNREG_DISABLE"),
    }
    assert states.items() >= expected.items()
    assert found["good"].items() >= {"version": "1.2", "origin": "entry point good_package:BACKEND"}.items()
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
    assert result.exit_code == 2
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
    ):
        assert setting in words(result)
    assert "ATTNREG_DISABLE" not in result.output and "What torch does" not in result.output
    everything = call("info", "--verbose")
    assert "ATTNREG_DISABLE not set backends that must not run" in words(everything)
    assert "What torch does without attnreg" in everything.output
    assert "from entry point one_package:BACKEND" in everything.output
    in_force = json.loads(call("info", "--json").stdout)["settings"]["in_force"]
    assert in_force[-1] == {"setting": "settings file", "value": str(file), "source": "ATTNREG_CONFIG"}


def test_info_says_if_a_preferred_backend_cannot_load(call, fake, plugins, monkeypatch):
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
    assert "calls run by attnreg's backends" in words(result)
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
    assert found["flash_implementation"] is None and "FA4" in found["flash_implementations"]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = json.loads(call("info", "--json").stdout)["torch"]
    assert found["chooses"] == {"cpu": "math"}
    assert found["enabled"] == {"flash": False, "efficient": False, "cudnn": False, "math": True}


def test_info_says_when_torch_has_another_implementation_above_the_routers(call, monkeypatch):
    monkeypatch.setattr(captured, "shadowed_by", lambda: "FA4")
    assert "torch.nn.attention has activated 'FA4' above the routers" in words(call("info"))


@pytest.mark.parametrize(("value", "served"), [(None, True), ("1", True), ("0", False)])
def test_info_says_whether_torch_loads_attnreg_by_itself(call, monkeypatch, value, served):
    if value is not None:
        monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", value)
    missed = json.loads(call("info", "--json").stdout)["routers"]["untouched_programs"]
    assert missed == ("" if served else "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading it")

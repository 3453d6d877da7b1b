"""Promises of `on_error = "native"`: faulty settings leave torch's own kernels running, and say so."""

import logging

import pytest
import torch
import torch.nn.functional as F

import attnreg
from attnreg.core import aten
from attnreg.core.policy import current as policy

FAULT = 'on_error = "native"\nstrct = true\n'


@pytest.fixture
def query():
    return torch.randn(1, 2, 4, 8)


@pytest.fixture
def errors(caplog):
    """Return a function that returns the messages of level error."""
    caplog.set_level(logging.ERROR, logger="attnreg")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


@pytest.mark.parametrize(
    "variables",
    [
        {"ATTNREG_ON_ERROR": "Native", "ATTNREG_BACKEND": "maht"},
        {"ATTNREG_ON_ERROR": "native", "ATTNREG_BACKND": "math"},
        {"ATTNREG_CONFIG": FAULT},
        {"ATTNREG_CONFIG": "  on_error = 'native'  # while it is rolled out\n[devices\n"},
    ],
    ids=["a value", "a name", "a file", "a file that is no TOML"],
)
def test_faulty_variables_and_files_are_left_out_and_said(
    monkeypatch, tmp_path, errors, query, ran, variables
):
    for name, value in variables.items():
        if name == "ATTNREG_CONFIG":
            (tmp_path / "site.toml").write_text(value)
            value = str(tmp_path / "site.toml")
        monkeypatch.setenv(name, value)
    aten.ensure()
    for _ in range(2):
        F.scaled_dot_product_attention(query, query, query)
    assert ran() == {}
    (message,) = errors()
    assert message.startswith("attnreg's settings are left out, as on_error = \"native\" asks: torch's own")
    assert policy.left_out() and message.endswith(policy.left_out())
    (note,) = (note for note in attnreg.explain(query, query, query).notes if "left out" in note)
    fault = " ".join(policy.left_out().split())
    assert note == f'settings are left out, as on_error = "native" asks: {fault}'
    attnreg.register_backend("math")
    F.scaled_dot_product_attention(query, query, query)
    assert ran() == {"math": (1, 0)}, "what the program asks for applies"


def test_a_file_of_configure_is_left_out_and_settings_in_force_stay(tmp_path, errors, query, ran):
    attnreg.configure({"devices": {"cpu": {"order": ["math"]}}})
    (tmp_path / "site.toml").write_text(FAULT)
    attnreg.configure(tmp_path / "site.toml")
    F.scaled_dot_product_attention(query, query, query)
    assert ran() == {"math": (1, 0)}
    assert (
        f"asks: the settings that were in force before stay. {tmp_path / 'site.toml'}:2: strct" in errors()[0]
    )
    (tmp_path / "site.toml").write_text('on_error = "native"\n')
    attnreg.configure(tmp_path / "site.toml")
    assert (policy.left_out(), len(errors())) == ("", 1)


@pytest.mark.parametrize(
    "variables",
    [{"ATTNREG_ON_ERROR": "raise"}, {"ATTNREG_ON_ERROR": "natif"}, {}],
    ids=["the variable overrides the file", "a fault of the variable itself", "a comment asks for nothing"],
)
def test_otherwise_a_fault_stays_an_error(monkeypatch, tmp_path, query, variables):
    text = FAULT if variables else '# on_error = "native"\nstrct = true\n'
    (tmp_path / "site.toml").write_text(text)
    for name, value in (variables | {"ATTNREG_CONFIG": str(tmp_path / "site.toml")}).items():
        monkeypatch.setenv(name, value)
    attnreg.install()
    with pytest.raises(attnreg.ConfigError, match=r"strct: unknown key|got 'natif'"):
        F.scaled_dot_product_attention(query, query, query)
    attnreg.uninstall()


@pytest.mark.parametrize("fault", ["a file", "the lockfile"])
def test_with_a_lockfile_a_fault_stays_an_error_that_says_so(monkeypatch, tmp_path, query, ran, fault):
    site = tmp_path / "site.toml"
    site.write_text(FAULT)
    monkeypatch.setenv("ATTNREG_LOCK", str(tmp_path / "gone.json"))
    if fault == "a file":
        monkeypatch.setenv("ATTNREG_CONFIG", str(site))
    else:
        monkeypatch.setenv("ATTNREG_ON_ERROR", "native")
    attnreg.install()
    for _ in range(2):
        with pytest.raises(attnreg.ConfigError) as error:
            F.scaled_dot_product_attention(query, query, query)
    assert ran() == {} and not policy.left_out()
    assert str(error.value).endswith(
        "native\" doesn't apply: ATTNREG_LOCK is set, so no call may run unlocked"
    )
    attnreg.uninstall()


def test_with_a_lockfile_a_fault_in_a_file_of_configure_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "site.toml").write_text(FAULT)
    attnreg.configure({})
    monkeypatch.setenv("ATTNREG_LOCK", "lock.json")
    with pytest.raises(attnreg.ConfigError, match=r"(?s)strct: unknown key.*ATTNREG_LOCK is set"):
        attnreg.configure(tmp_path / "site.toml")

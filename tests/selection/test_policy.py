"""Promises of the policy: who is heard first, by what name, and what happens to those that contradict."""

import dataclasses
import logging
from pathlib import Path

import pytest
from support.policies import ON_HOPPER, SPEC, decided, sdpa
from support.refusals import refusal

import attnreg
from attnreg.core import aten
from attnreg.core.policy import current as policy
from attnreg.core.selection.decision import Policy, Preference
from attnreg.core.settings.config import DeviceSettings, Settings
from attnreg.errors import UnsupportedInputError

pytestmark = pytest.mark.usefixtures("routers", "known")

# Who is heard first


def test_each_layer_is_stronger_than_the_next_named_as_the_source_and_what_really_runs(
    monkeypatch, write, ran
):
    def runs(backend, source):
        sdpa()
        assert (ran(), *decided()) == ({backend: (1, 0)}, backend, source)

    attnreg.configure(write('[devices.cpu]\norder = ["two"]'))
    runs("two", "attnreg.toml:2")
    job = write('# of the operator\n\ndevices.cpu.order = ["one"]', "job.toml")
    monkeypatch.setenv("ATTNREG_CONFIG", str(job))
    attnreg.reload()
    runs("one", "job.toml:3")
    attnreg.configure(Settings(devices={"cpu": DeviceSettings(order=("mine",))}))
    runs("mine", "configure(...)")
    handle = attnreg.register_backend("math")
    runs("math", "register_backend('math')")
    monkeypatch.setenv("ATTNREG_BACKEND", "ENV")
    attnreg.reload()
    runs("env", "ATTNREG_BACKEND")
    with attnreg.use_backend("scoped"):
        runs("scoped", "use_backend('scoped')")
        assert attnreg.explain(SPEC, backend="TWO").source == "backend='two'"
    # The way back
    runs("env", "ATTNREG_BACKEND")
    handle.remove()
    monkeypatch.delenv("ATTNREG_BACKEND")
    attnreg.reload()
    runs("mine", "configure(...)")
    attnreg.configure({})
    runs("one", "job.toml:3")
    monkeypatch.delenv("ATTNREG_CONFIG")
    attnreg.reload()
    runs("two", "attnreg.toml:2")


def test_empty_settings_ask_for_nothing(write, ran):
    attnreg.configure({"devices": {"cpu": {"order": ["one"]}}})
    sdpa()
    assert ran() == {"one": (1, 0)}
    attnreg.configure({})
    attnreg.configure(write("# all of it is commented out"))
    sdpa()
    assert ran() == {}
    assert not policy.is_active()


def test_several_backends_of_one_variable_are_tried_in_its_order(monkeypatch):
    monkeypatch.setenv("ATTNREG_BACKEND", "two, ONE")
    assert attnreg.explain(SPEC).forward.order[:3] == ("two", "one", "env")
    assert policy.current() == Policy((Preference("ATTNREG_BACKEND", ("two", "ONE")),))


def test_an_order_for_an_architecture_is_stronger_than_one_for_all_of_its_kind(write):
    orders = (("cuda", "one"), ("sm_90", "two"), ("cpu", "mine"))
    attnreg.configure(write("\n".join(f'devices.{device}.order = ["{name}"]' for device, name in orders)))
    on_blackwell = dataclasses.replace(SPEC, device=attnreg.Device.parse("sm_100"))
    assert decided(ON_HOPPER) == ("two", "attnreg.toml:2")
    assert decided(on_blackwell) == ("one", "attnreg.toml:1")
    assert decided() == ("mine", "attnreg.toml:3")
    # One of a stronger layer wins over a more exact one of a weaker.
    attnreg.configure({"devices": {"cuda": {"order": ["one"]}}})
    assert decided(ON_HOPPER) == ("one", "configure(...)")


def test_all_sources_are_named_by_file_and_line_and_what_several_disable_by_the_strongest(monkeypatch, write):
    attnreg.configure(
        write('strict = true\ndisabled = [\n  "one",\n  "TWO",\n]\n[devices]\ncpu = { order = ["mine"] }\n')
    )
    assert policy.current() == Policy(
        (Preference("attnreg.toml:7", ("mine",), ("cpu",)),),
        {"one": "attnreg.toml:3", "two": "attnreg.toml:4"},
        "attnreg.toml:1",
    )
    assert attnreg.explain(SPEC).rejected == {
        "one": ("disabled by attnreg.toml:3",),
        "two": ("disabled by attnreg.toml:4",),
        "gpu": ("can't load here: needs a GPU; install it with: make gpu", "device must be cuda, got cpu"),
    }
    monkeypatch.setenv("ATTNREG_DISABLE", "TWO")
    attnreg.reload()
    assert policy.current().disabled == {"two": "ATTNREG_DISABLE", "one": "attnreg.toml:3"}


@pytest.mark.parametrize(
    ("variable", "program", "file", "strict"),
    [
        (None, None, None, ""),
        (None, None, True, "attnreg.toml:1"),
        (None, False, True, ""),
        (None, True, False, "configure(...)"),
        ("0", True, True, ""),
        ("1", False, False, "ATTNREG_STRICT"),
        ("1", None, None, "ATTNREG_STRICT"),
    ],
)
def test_strict_is_what_the_strongest_that_mentions_it_says(
    monkeypatch, write, variable, program, file, strict
):
    if variable is not None:
        monkeypatch.setenv("ATTNREG_STRICT", variable)
    if file is not None:
        attnreg.configure(write(f"strict = {str(file).lower()}"))
    attnreg.configure({"disabled": ["one"]} if program is None else {"strict": program})
    assert policy.current().strict == strict


def test_strict_turns_a_preference_that_cannot_serve_into_an_error_that_names_both(monkeypatch, fake, ran):
    narrow = fake("narrow", dtypes=("float16",)).backend
    monkeypatch.setenv("ATTNREG_STRICT", "yes")
    with attnreg.register_backend(narrow):
        with pytest.raises(UnsupportedInputError) as error:
            sdpa()
        headline = str(error.value).splitlines()[0]
        assert headline == (
            "no attention backend can run this forward on cpu: no backend of "
            "register_backend('narrow') can run it, and strict (ATTNREG_STRICT) makes that an error"
        )
        assert error.value.rejected["narrow"] == ("dtype must be float16, got float32",)
        assert ran() == {}
        monkeypatch.setenv("ATTNREG_STRICT", "no")
        attnreg.reload()
        sdpa()
        assert list(ran()) == ["cpu"]


# When it is read


def test_the_environment_is_read_once_and_again_by_reload_only(monkeypatch):
    monkeypatch.setenv("ATTNREG_BACKEND", "one")
    assert decided() == ("one", "ATTNREG_BACKEND")
    monkeypatch.setenv("ATTNREG_BACKEND", "two")
    attnreg.register_backend("mine").remove()
    assert decided() == ("one", "ATTNREG_BACKEND")
    attnreg.reload()
    assert decided() == ("two", "ATTNREG_BACKEND")
    monkeypatch.delenv("ATTNREG_BACKEND")
    assert decided() == ("two", "ATTNREG_BACKEND")
    attnreg.reload()
    assert decided() == ("env", "default order for cpu")


@pytest.mark.parametrize("given", [str, Path])
def test_a_file_that_is_named_is_read_once_and_again_by_reload_only(monkeypatch, write, tmp_path, given):
    file = write('devices.cpu.order = ["one"]')
    monkeypatch.chdir(tmp_path)
    attnreg.reload()
    assert decided() == ("env", "default order for cpu")
    attnreg.configure(given("attnreg.toml"))
    write('# moved down\ndevices.cpu.order = ["two"]')
    assert decided() == ("one", "attnreg.toml:1")
    monkeypatch.chdir("/")  # the file is the one that was meant, wherever the process is by now
    attnreg.reload()
    assert decided() == ("two", "attnreg.toml:2")
    file.unlink()
    assert decided() == ("two", "attnreg.toml:2")
    message = refusal(attnreg.reload)
    assert message == f"{file}: can't be read (no such file or directory), expected a settings file in TOML"
    assert decided() == ("two", "attnreg.toml:2")


@pytest.mark.parametrize("kind", [dict, Settings])
def test_settings_may_be_given_as_a_mapping_or_as_settings_and_hold_across_a_reload(kind):
    attnreg.configure(kind(devices={"cpu": {"order": ["one"]}}, disabled=["two"]))
    for _ in range(2):
        assert decided() == ("one", "configure(...)")
        assert attnreg.explain(SPEC).rejected["two"] == ("disabled by configure(...)",)
        attnreg.reload()


def test_configure_replaces_the_last_of_its_kind_as_a_whole(write):
    attnreg.configure({"devices": {"cpu": {"order": ["one"]}}, "disabled": ["two"]})
    attnreg.configure(write('disabled = ["env"]'))
    attnreg.configure(write('disabled = ["mine"]'))
    attnreg.configure({"disabled": ["scoped"]})
    assert policy.current() == Policy((), {"scoped": "configure(...)", "mine": "attnreg.toml:1"})


def test_torchs_entry_points_are_served_once_something_asks_for_it(monkeypatch, ran):
    aten.restore()
    attnreg.reload()
    assert not aten.installed()
    attnreg.configure({"devices": {"cpu": {"order": ["one"]}}})
    assert aten.installed()
    sdpa()
    assert ran() == {"one": (1, 0)}
    attnreg.configure({})
    aten.restore()
    monkeypatch.setenv("ATTNREG_BACKEND", "two")
    attnreg.reload()
    assert aten.installed()
    sdpa()
    assert ran() == {"two": (1, 0)}


@pytest.mark.parametrize(
    ("variable", "off", "on"),
    [("STRICT", "0", "1"), ("MASKS", "as_given", "recognise"), ("TRANSFORMERS", "0", "1")],
)
def test_a_variable_that_says_off_leaves_torchs_entry_points_alone(monkeypatch, ran, variable, off, on):
    for value, expected in ((off, {}), (on, {"cpu": (1, 0)}), ("", {})):
        monkeypatch.setenv(f"ATTNREG_{variable}", value)
        attnreg.reload()
        aten.ensure()
        sdpa()
        assert ran() == expected


# The log level


@pytest.fixture
def level():
    log = logging.getLogger("attnreg")
    log.setLevel(logging.NOTSET)
    return lambda: log.level


def test_the_log_level_is_that_of_the_strongest_settings_that_name_one(monkeypatch, write, level):
    attnreg.configure(write('log_level = "error"'))
    assert level() == logging.ERROR
    monkeypatch.setenv("ATTNREG_CONFIG", str(write('log_level = "info"', "job.toml")))
    attnreg.reload()
    assert level() == logging.INFO
    attnreg.configure({"log_level": "debug"})
    assert level() == logging.DEBUG
    attnreg.configure({"strict": True})
    assert level() == logging.INFO
    monkeypatch.delenv("ATTNREG_CONFIG")
    attnreg.reload()
    attnreg.configure(write(""))  # it goes with the settings that named it
    assert level() == logging.NOTSET


def test_settings_that_name_no_log_level_leave_the_programs_own_and_so_do_wrong_ones(level):
    logging.getLogger("attnreg").setLevel(logging.CRITICAL)
    attnreg.configure({"strict": True})
    assert level() == logging.CRITICAL
    refusal(attnreg.configure, {"log_level": "debug", "disabled": ["unknown"]})
    assert level() == logging.CRITICAL


def test_the_log_level_of_a_file_of_the_environment_holds_from_its_first_reading(monkeypatch, write, level):
    monkeypatch.setenv("ATTNREG_CONFIG", str(write('log_level = "debug"')))
    assert level() == logging.NOTSET
    policy.current()
    assert level() == logging.DEBUG

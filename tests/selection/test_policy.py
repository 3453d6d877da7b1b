"""Promises of the policy: who is heard first, by what name, and what happens to those that contradict."""

import dataclasses
import logging

import pytest
import torch
import torch.nn.functional as F

import attnreg
from attnreg import _registry, aten
from attnreg.contract.discovery import Entry
from attnreg.dispatch import scope
from attnreg.errors import (
    BackendUnavailableError,
    ConfigError,
    UnknownBackendError,
    UnsupportedInputError,
)
from attnreg.selection import policy
from attnreg.selection.decision import Policy, Preference
from attnreg.settings.config import DeviceSettings, Settings

pytestmark = pytest.mark.usefixtures("routers", "known")

SPEC = attnreg.AttentionSpec(
    device=attnreg.Device("cpu"), dtype="float32", batch=1, max_q=8, max_k=8, heads_q=2, heads_k=2,
    head_dim=16, head_dim_v=16,
)  # fmt: skip
ON_HOPPER = dataclasses.replace(SPEC, device=attnreg.Device.parse("sm_90"))


@pytest.fixture
def known(monkeypatch, fake):
    """Know five fakes and math, whatever this installation has."""
    names = ("env", "scoped", "mine", "one", "two")
    backends = [fake(name, devices=("cpu", "cuda")).backend for name in names]
    backends.append(
        fake("gpu", devices=("cuda",), unavailable=lambda: "needs a GPU", install="make gpu").backend
    )
    entries = {backend.name: Entry(backend.name, "a test", backend) for backend in backends}
    entries["math"] = _registry.find("math")
    monkeypatch.setattr(_registry, "_entries", entries)
    _registry.changed()
    return {backend.name: backend for backend in backends}


@pytest.fixture
def write(tmp_path):
    def write(text, name="attnreg.toml"):
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        return file

    return write


def decided(spec=SPEC):
    """Return the backend that a call would get, and who decided."""
    explanation = attnreg.explain(spec)
    return explanation.backend, explanation.source


def refusal(kind, function, *args):
    with pytest.raises(kind) as error:
        function(*args)
    return str(error.value)


def sdpa():
    return F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 8, 16))


# Who is heard first


def test_with_nothing_asked_for_the_default_order_decides():
    assert decided() == ("env", "default order for cpu")
    assert decided(ON_HOPPER)[1] == "default order for sm_90"
    assert policy.current() == Policy()


def test_each_layer_is_stronger_than_the_next_and_named_as_the_source(monkeypatch, write):
    attnreg.configure(write('[devices.cpu]\norder = ["two"]'))
    assert decided() == ("two", "attnreg.toml:2")

    monkeypatch.setenv(
        "ATTNREG_CONFIG", str(write('# of the operator\n\ndevices.cpu.order = ["one"]', "job.toml"))
    )
    attnreg.reload()
    assert decided() == ("one", "job.toml:3")

    attnreg.configure(Settings(devices={"cpu": DeviceSettings(order=("mine",))}))
    assert decided() == ("mine", "configure(...)")

    handle = attnreg.register_backend("math")
    assert decided() == ("math", "register_backend('math')")

    monkeypatch.setenv("ATTNREG_BACKEND", "ENV")
    attnreg.reload()
    assert decided() == ("env", "ATTNREG_BACKEND")

    with attnreg.use_backend("scoped"):
        assert decided() == ("scoped", "use_backend('scoped')")
        assert attnreg.explain(SPEC, backend="TWO").source == "backend='two'"

    assert decided() == ("env", "ATTNREG_BACKEND")
    handle.remove()
    monkeypatch.delenv("ATTNREG_BACKEND")
    attnreg.reload()
    assert decided() == ("mine", "configure(...)")
    attnreg.configure({})
    assert decided() == ("one", "job.toml:3")
    monkeypatch.delenv("ATTNREG_CONFIG")
    attnreg.reload()
    assert decided() == ("two", "attnreg.toml:2")


def test_what_really_runs_is_what_the_strongest_layer_asked_for(monkeypatch, write, ran):
    attnreg.configure(write('[devices.cpu]\norder = ["two"]'))
    sdpa()
    assert ran() == {"two": (1, 0)}
    attnreg.register_backend("mine")
    sdpa()
    assert ran() == {"mine": (1, 0)}
    monkeypatch.setenv("ATTNREG_BACKEND", "env")
    attnreg.reload()
    sdpa()
    assert ran() == {"env": (1, 0)}
    with attnreg.use_backend("scoped"):
        sdpa()
    assert ran() == {"scoped": (1, 0)}


def test_several_backends_of_one_variable_are_tried_in_its_order(monkeypatch):
    monkeypatch.setenv("ATTNREG_BACKEND", "two, ONE")
    assert attnreg.explain(SPEC).forward.order[:3] == ("two", "one", "env")
    assert policy.current() == Policy((Preference("ATTNREG_BACKEND", ("two", "ONE")),))


def test_an_order_for_an_architecture_is_stronger_than_one_for_all_of_its_kind(write):
    attnreg.configure(
        write(
            '[devices.cuda]\norder = ["one"]\n[devices.sm_90]\norder = ["two"]\n'
            '[devices.cpu]\norder = ["mine"]'
        )
    )
    assert decided(ON_HOPPER) == ("two", "attnreg.toml:4")
    assert decided(dataclasses.replace(SPEC, device=attnreg.Device.parse("sm_100"))) == (
        "one",
        "attnreg.toml:2",
    )
    assert decided() == ("mine", "attnreg.toml:6")


def test_an_order_of_a_stronger_layer_wins_over_a_more_exact_one_of_a_weaker(write):
    attnreg.configure(write('[devices.sm_90]\norder = ["two"]'))
    attnreg.configure({"devices": {"cuda": {"order": ["one"]}}})
    assert decided(ON_HOPPER) == ("one", "configure(...)")


def test_all_sources_are_named_by_file_and_line(write):
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


def test_what_several_disable_is_disabled_by_the_strongest(monkeypatch, write):
    attnreg.configure(write('disabled = ["one", "two"]'))
    monkeypatch.setenv("ATTNREG_DISABLE", "TWO")
    attnreg.reload()
    assert policy.current().disabled == {"two": "ATTNREG_DISABLE", "one": "attnreg.toml:1"}


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
    if program is not None:
        attnreg.configure({"strict": program})
    assert policy.current().strict == strict


def test_settings_that_do_not_mention_strict_leave_it_to_the_weaker_ones(write):
    attnreg.configure(write("strict = true"))
    attnreg.configure({"disabled": ["one"]})
    assert policy.current().strict == "attnreg.toml:1"


def test_strict_turns_a_preference_that_cannot_serve_into_an_error_that_names_both(monkeypatch, fake, ran):
    narrow = fake("narrow", dtypes=("float16",)).backend
    monkeypatch.setenv("ATTNREG_STRICT", "yes")
    with attnreg.register_backend(narrow):
        with pytest.raises(UnsupportedInputError) as error:
            sdpa()
        headline = str(error.value).splitlines()[0]
        assert headline == (
            "no attention backend can run this forward on cpu: register_backend('narrow') can't serve "
            "this call, and ATTNREG_STRICT makes that an error"
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


def test_a_file_is_read_once_and_again_by_reload_only(monkeypatch, write, tmp_path):
    file = write('devices.cpu.order = ["one"]')
    monkeypatch.chdir(tmp_path)
    attnreg.configure("attnreg.toml")
    write('# moved down\ndevices.cpu.order = ["two"]')
    assert decided() == ("one", "attnreg.toml:1")
    monkeypatch.chdir("/")  # the file is the one that was meant, wherever the process is by now
    attnreg.reload()
    assert decided() == ("two", "attnreg.toml:2")
    file.unlink()
    assert decided() == ("two", "attnreg.toml:2")
    message = refusal(ConfigError, attnreg.reload)
    assert message == (f"{file}: can't be read (no such file or directory), expected a settings file in TOML")
    assert decided() == ("two", "attnreg.toml:2")


def test_no_file_is_read_that_nobody_named(write, tmp_path, monkeypatch):
    write('devices.cpu.order = ["one"]')
    monkeypatch.chdir(tmp_path)
    attnreg.reload()
    assert decided() == ("env", "default order for cpu")


def test_settings_of_the_program_hold_across_a_reload():
    attnreg.configure({"devices": {"cpu": {"order": ["one"]}}})
    attnreg.reload()
    assert decided() == ("one", "configure(...)")


@pytest.mark.parametrize(
    "settings",
    [
        {"devices": {"cpu": {"order": ["one"]}}, "disabled": ["two"]},
        Settings(devices={"cpu": DeviceSettings(order=("one",))}, disabled=("two",)),
    ],
    ids=["mapping", "Settings"],
)
def test_settings_may_be_given_as_a_mapping_or_as_settings(settings):
    attnreg.configure(settings)
    assert decided() == ("one", "configure(...)")
    assert attnreg.explain(SPEC).rejected["two"] == ("disabled by configure(...)",)


@pytest.mark.parametrize("as_path", [str, lambda file: file])
def test_a_file_may_be_given_as_text_or_as_a_path(write, as_path):
    attnreg.configure(as_path(write('devices.cpu.order = ["one"]')))
    assert decided() == ("one", "attnreg.toml:1")


def test_configure_replaces_the_last_of_its_kind_as_a_whole(write):
    attnreg.configure({"devices": {"cpu": {"order": ["one"]}}, "disabled": ["two"]})
    attnreg.configure(write('disabled = ["env"]'))
    attnreg.configure(write('disabled = ["mine"]'))
    attnreg.configure({"disabled": ["scoped"]})
    assert policy.current() == Policy((), {"scoped": "configure(...)", "mine": "attnreg.toml:1"})


def test_configuring_serves_torchs_entry_points(ran):
    aten.restore()
    attnreg.configure({"devices": {"cpu": {"order": ["one"]}}})
    assert aten.installed()
    sdpa()
    assert ran() == {"one": (1, 0)}


def test_reloading_serves_torchs_entry_points_once_something_asks_for_it(monkeypatch, ran):
    aten.restore()
    attnreg.reload()
    assert not aten.installed()
    monkeypatch.setenv("ATTNREG_BACKEND", "two")
    attnreg.reload()
    assert aten.installed()
    sdpa()
    assert ran() == {"two": (1, 0)}


# What is wrong changes nothing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("strict = 2", "{file}:1:1: strict: got 2, expected true or false"),
        (
            '\ndisabled = ["onee"]',
            "{file}:2:13: disabled[0]: got 'onee', "
            "expected one of env, gpu, math, mine, one, scoped, two; did you mean 'one'?",
        ),
        (
            'devices.cpu.order = ["one", "tow"]',
            "{file}:1:29: devices.cpu.order[1]: got 'tow', "
            "expected one of env, gpu, math, mine, one, scoped, two; did you mean 'two'?",
        ),
        ('disabled = ["math"]', None),
    ],
)
def test_a_wrong_file_changes_nothing(write, text, message):
    attnreg.configure({"devices": {"cpu": {"order": ["one"]}}})
    attnreg.configure(write('devices.cpu.order = ["two"]'))
    before = (policy.sources(), _registry.generation)
    file = write(text, "wrong.toml")
    refused = refusal(ConfigError, attnreg.configure, file)
    if message is not None:
        assert refused == message.format(file=file)
    assert (policy.sources(), _registry.generation) == before
    assert decided() == ("one", "configure(...)")


def test_wrong_settings_of_the_program_change_nothing():
    attnreg.configure({"devices": {"cpu": {"order": ["one"]}}})
    before = policy.sources()
    refused = refusal(ConfigError, attnreg.configure, {"devices": {"cpu": {"order": ["three"]}}})
    assert refused == (
        "configure(...): devices.cpu.order[0]: got 'three', "
        "expected one of env, gpu, math, mine, one, scoped, two"
    )
    assert refusal(ConfigError, attnreg.configure, 5) == (
        "configure(...): got 5, expected Settings or a mapping of its fields"
    )
    assert policy.sources() is before


def test_a_reload_that_fails_leaves_everything_in_force_and_the_next_one_mends_it(monkeypatch):
    monkeypatch.setenv("ATTNREG_BACKEND", "one")
    assert decided() == ("one", "ATTNREG_BACKEND")
    monkeypatch.setenv("ATTNREG_BACKEND", "oen")
    assert refusal(ConfigError, attnreg.reload) == (
        "ATTNREG_BACKEND: no backend is named 'oen'; did you mean 'one'? "
        "known backends: env, scoped, mine, one, two, gpu, math"
    )
    assert decided() == ("one", "ATTNREG_BACKEND")
    monkeypatch.setenv("ATTNREG_BACKEND", "two")
    attnreg.reload()
    assert decided() == ("two", "ATTNREG_BACKEND")


# A bad environment


BAD_ENVIRONMENTS = {
    "boolean": (
        {"ATTNREG_STRICT": "2"},
        "ATTNREG_STRICT: got '2', expected one of 1, true, yes, on, 0, false, no, off",
    ),
    "name": (
        {"ATTNREG_BACKEND": "one,tow"},
        "ATTNREG_BACKEND: no backend is named 'tow'; did you mean 'two'? "
        "known backends: env, scoped, mine, one, two, gpu, math",
    ),
    "disabled name": (
        {"ATTNREG_DISABLE": "zzz"},
        "ATTNREG_DISABLE: no backend is named 'zzz'; known backends: env, scoped, mine, one, two, gpu, math",
    ),
    "variable": (
        {"ATTNREG_BACKND": "one"},
        "ATTNREG_BACKND: unknown variable, expected one of ATTNREG_BACKEND, ATTNREG_DISABLE, "
        "ATTNREG_CONFIG, ATTNREG_STRICT, ATTNREG_POLICY, ATTNREG_RECORD, ATTNREG_LOCK, ATTNREG_ROUTERS, "
        "ATTNREG_BUILD; did you mean 'ATTNREG_BACKEND'?",
    ),
    "file": (
        {"ATTNREG_CONFIG": "/no/such/file.toml"},
        "/no/such/file.toml: can't be read (no such file or directory), expected a settings file in TOML",
    ),
    "forced and disabled": (
        {"ATTNREG_BACKEND": "one", "ATTNREG_DISABLE": "two,ONE"},
        "ATTNREG_BACKEND and ATTNREG_DISABLE: both name one, expected it in one of them only",
    ),
    "reference disabled": (
        {"ATTNREG_DISABLE": "Math"},
        "ATTNREG_DISABLE: got 'math', expected another backend, or strict as well "
        "(ATTNREG_STRICT=1, or strict = true in the settings): the reference runs what no other can",
    ),
}


@pytest.mark.parametrize(("variables", "message"), BAD_ENVIRONMENTS.values(), ids=BAD_ENVIRONMENTS)
def test_a_bad_environment_is_an_error_of_every_use_and_of_no_import(
    monkeypatch, packed, ran, variables, message
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    inputs = packed((3, 4))
    for _ in range(2):
        assert refusal(ConfigError, sdpa) == message
        assert refusal(ConfigError, attnreg.varlen_attn, *inputs) == message
        assert refusal(ConfigError, attnreg.explain, SPEC) == message
        assert refusal(ConfigError, attnreg.register_backend, "math") == message
        assert refusal(ConfigError, attnreg.configure, {}) == message
        assert refusal(ConfigError, attnreg.reload) == message
    assert "math" in attnreg.list_backends()
    assert ran() == {}
    for name in variables:
        monkeypatch.delenv(name)
    attnreg.reload()
    attnreg.varlen_attn(*inputs)
    assert ran() == {"env": (1, 0)}


def test_an_error_that_is_raised_again_keeps_nothing_of_the_times_before(monkeypatch, packed):
    monkeypatch.setenv("ATTNREG_STRICT", "2")
    for call in (sdpa, lambda: attnreg.register_backend("math")):
        depths = []
        for _ in range(5):
            with pytest.raises(ConfigError) as error:
                call()
            depths.append(len(error.traceback))
        assert len(set(depths[1:])) == 1, depths


def test_an_environment_that_was_mended_counts_after_a_reload_only(monkeypatch):
    monkeypatch.setenv("ATTNREG_STRICT", "2")
    assert refusal(ConfigError, sdpa).startswith("ATTNREG_STRICT: got '2'")
    monkeypatch.delenv("ATTNREG_STRICT")
    assert refusal(ConfigError, sdpa).startswith("ATTNREG_STRICT: got '2'")
    assert refusal(ConfigError, attnreg.register_backend, "math").startswith("ATTNREG_STRICT: got '2'")
    attnreg.reload()
    sdpa()


def test_a_scope_does_not_hide_a_bad_environment(monkeypatch):
    with attnreg.use_backend("one"):
        monkeypatch.setenv("ATTNREG_STRICT", "2")
        assert refusal(ConfigError, sdpa).startswith("ATTNREG_STRICT: got '2'")


# Contradictions


def test_what_the_environment_asks_for_and_a_file_disables_is_an_error_that_names_both(monkeypatch, write):
    monkeypatch.setenv("ATTNREG_BACKEND", "two,ONE")
    attnreg.configure(write("strict = false"))
    before = policy.sources()
    assert refusal(ConfigError, attnreg.configure, write('\n\ndisabled = ["one"]')) == (
        "ATTNREG_BACKEND asks for 'ONE', but it is disabled by attnreg.toml:3"
    )
    assert refusal(ConfigError, attnreg.configure, {"disabled": ["one"]}) == (
        "ATTNREG_BACKEND asks for 'ONE', but it is disabled by configure(...)"
    )
    assert policy.sources() is before


def test_a_file_of_the_environment_may_not_disable_what_the_environment_asks_for(monkeypatch, write):
    monkeypatch.setenv("ATTNREG_BACKEND", "one")
    monkeypatch.setenv("ATTNREG_CONFIG", str(write('disabled = ["one"]')))
    assert refusal(ConfigError, sdpa) == (
        "ATTNREG_BACKEND asks for 'one', but it is disabled by attnreg.toml:1"
    )


def test_the_environment_may_disable_what_the_program_and_files_ask_for(monkeypatch, write):
    attnreg.configure(write('devices.cpu.order = ["one", "two"]'))
    attnreg.register_backend("one")
    monkeypatch.setenv("ATTNREG_DISABLE", "one")
    attnreg.reload()
    assert decided() == ("two", "attnreg.toml:1")
    assert attnreg.explain(SPEC).rejected["one"] == ("disabled by ATTNREG_DISABLE",)


def test_the_reference_may_be_disabled_in_strict_mode_and_then_does_not_run(monkeypatch, ran):
    monkeypatch.setenv("ATTNREG_DISABLE", "math")
    monkeypatch.setenv("ATTNREG_STRICT", "1")
    assert attnreg.explain(SPEC).rejected["math"] == ("disabled by ATTNREG_DISABLE",)


def test_the_environment_may_not_take_the_strictness_away_that_disabling_the_reference_needs(
    monkeypatch, write
):
    attnreg.configure(write('strict = true\ndisabled = ["math"]'))
    monkeypatch.setenv("ATTNREG_STRICT", "0")
    assert refusal(ConfigError, attnreg.reload) == (
        "attnreg.toml:2: got 'math', expected another backend, or strict as well "
        "(ATTNREG_STRICT=1, or strict = true in the settings): the reference runs what no other can"
    )
    assert policy.current().strict == "attnreg.toml:1"


# Asking for what can't load


def test_a_backend_of_the_environment_that_cannot_load_is_an_error_of_the_calls_that_it_governs_only(
    monkeypatch, packed, ran
):
    monkeypatch.setenv("ATTNREG_BACKEND", "gpu,one")
    attnreg.varlen_attn(*packed((3, 4)))
    sdpa()
    assert ran() == {"one": (2, 0)}
    there = dataclasses.replace(SPEC, device=attnreg.Device("cuda"))
    explanation = attnreg.explain(there)
    assert explanation.forward.refusal == (
        "ATTNREG_BACKEND: gpu can't load here: needs a GPU; install it with: make gpu"
    )
    assert explanation.backend is None


def no_symbols():
    raise ImportError("no _C")


@pytest.mark.parametrize("through", ["ATTNREG_BACKEND", "attnreg.toml:1", "configure(...)"])
@pytest.mark.parametrize(
    ("options", "reason", "cause"),
    [
        (
            {"unavailable": lambda: "not installed", "install": "pip install new"},
            "can't load here: not installed; install it with: pip install new",
            type(None),
        ),
        ({"load": no_symbols}, "failed to load: ImportError: no _C", ImportError),
    ],
    ids=["missing", "broken"],
)
def test_a_backend_asked_for_here_that_cannot_load_is_an_error_at_every_call_with_its_cause(
    monkeypatch, write, fake, packed, ran, through, options, reason, cause
):
    new = Entry("new", "a test", fake("new", **options).backend)
    monkeypatch.setattr(_registry, "_entries", {**_registry.entries(), "new": new})
    if through == "ATTNREG_BACKEND":
        monkeypatch.setenv("ATTNREG_BACKEND", "one,new")
    elif through == "attnreg.toml:1":
        attnreg.configure(write('devices.cpu.order = ["new", "one"]'))
    else:
        attnreg.configure({"devices": {"cpu": {"order": ["new"]}}})
    inputs = packed((3, 4))
    if through == "ATTNREG_BACKEND" and cause is ImportError:
        sdpa()  # "one" runs it, so that nobody has tried to load "new"
        assert ran() == {"one": (1, 0)}
        with pytest.raises(BackendUnavailableError):
            new.kernels()
        _registry.changed()
    for call in (sdpa, lambda: attnreg.varlen_attn(*inputs)):
        for _ in range(2):
            with pytest.raises(BackendUnavailableError) as error:
                call()
            assert str(error.value) == f"{through}: new {reason}"
            assert isinstance(error.value.__cause__, cause)
    assert ran() == {}


def test_a_disabled_backend_need_not_load(monkeypatch, write):
    attnreg.configure(write('devices.cuda.order = ["gpu"]'))
    monkeypatch.setenv("ATTNREG_DISABLE", "gpu")
    attnreg.reload()
    there = dataclasses.replace(SPEC, device=attnreg.Device("cuda"))
    assert decided(there) == ("env", "default order for cuda")


def test_a_scope_names_only_backends_that_are_known_and_load():
    with pytest.raises(UnknownBackendError, match="no backend is named 'tow'; did you mean 'two'"):
        attnreg.use_backend("one", "tow")
    with pytest.raises(
        BackendUnavailableError, match="gpu can't load here: needs a GPU; install it with: make"
    ):
        attnreg.use_backend("gpu")
    assert scope.current() is None


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


def test_the_log_level_goes_with_the_settings_that_named_it(write, level):
    attnreg.configure({"log_level": "debug"})
    attnreg.configure({})
    assert level() == logging.NOTSET


def test_settings_that_name_no_log_level_leave_the_programs_own(level):
    logging.getLogger("attnreg").setLevel(logging.CRITICAL)
    attnreg.configure({"strict": True})
    assert level() == logging.CRITICAL


def test_the_log_level_of_a_file_of_the_environment_holds_from_its_first_reading(monkeypatch, write, level):
    monkeypatch.setenv("ATTNREG_CONFIG", str(write('log_level = "debug"')))
    assert level() == logging.NOTSET
    policy.current()
    assert level() == logging.DEBUG


def test_wrong_settings_leave_the_log_level(level):
    refusal(ConfigError, attnreg.configure, {"log_level": "debug", "disabled": ["nobody"]})
    assert level() == logging.NOTSET

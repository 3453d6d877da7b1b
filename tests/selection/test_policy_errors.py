"""Promises of the policy about what is wrong: settings, the environment, contradictions, missing packages."""

import dataclasses

import pytest
from support.command_line import NO_SYMBOL, broken_loader
from support.policies import SPEC, decided, sdpa
from support.refusals import refusal

import attnreg
from attnreg.core import aten, registry
from attnreg.core.dispatch import scope
from attnreg.core.policy import current as policy
from attnreg.core.registry.entry import Entry
from attnreg.errors import BackendUnavailableError, ConfigError, UnknownBackendError

pytestmark = pytest.mark.usefixtures("routers", "known")

# What is wrong changes nothing


NAMES = "expected one of env, gpu, math, mine, one, scoped, two"
NO_REFERENCE = (
    "got 'math', expected another backend, or strict as well (ATTNREG_STRICT=1, or strict = true in the "
    "settings): the reference runs what no other can"
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("strict = 2", "{file}:1: strict: got 2, expected true or false"),
        (
            'devices.cpu.order = ["one", "tow"]',
            f"{{file}}:1: devices.cpu.order[1]: got 'tow', {NAMES}; did you mean 'two'?",
        ),
        (
            {"devices": {"cpu": {"order": ["three"]}}},
            f"configure(...): devices.cpu.order[0]: got 'three', {NAMES}",
        ),
    ],
)
def test_wrong_settings_change_nothing(write, settings, message):
    attnreg.configure({"devices": {"cpu": {"order": ["one"]}}})
    attnreg.configure(write('devices.cpu.order = ["two"]'))
    before = (policy.sources(), registry.generation)
    given = write(settings, "wrong.toml") if isinstance(settings, str) else settings
    assert refusal(attnreg.configure, given) == message.replace("{file}", str(given))
    assert (policy.sources(), registry.generation) == before
    assert decided() == ("one", "configure(...)")


KNOWN = "known backends: env, scoped, mine, one, two, gpu, math"


def test_a_reload_that_fails_leaves_everything_in_force_and_the_next_one_mends_it(monkeypatch):
    for name in ("one", "two"):
        monkeypatch.setenv("ATTNREG_BACKEND", name)
        attnreg.reload()
        assert decided() == (name, "ATTNREG_BACKEND")
        monkeypatch.setenv("ATTNREG_BACKEND", "oen")
        assert refusal(attnreg.reload).startswith("ATTNREG_BACKEND: no backend is named 'oen'")
        assert decided() == (name, "ATTNREG_BACKEND")


# A bad environment


BAD_ENVIRONMENTS = {
    "boolean": (
        {"ATTNREG_STRICT": "2"},
        "ATTNREG_STRICT: got '2', expected one of 1, true, yes, on, 0, false, no, off",
    ),
    "name": (
        {"ATTNREG_BACKEND": "one,tow"},
        f"ATTNREG_BACKEND: no backend is named 'tow'; did you mean 'two'? {KNOWN}",
    ),
    "disabled name": ({"ATTNREG_DISABLE": "zzz"}, f"ATTNREG_DISABLE: no backend is named 'zzz'; {KNOWN}"),
    "file": (
        {"ATTNREG_CONFIG": "/no/such/file.toml"},
        "/no/such/file.toml: can't be read (no such file or directory), expected a settings file in TOML",
    ),
    "reference disabled": ({"ATTNREG_DISABLE": "Math"}, f"ATTNREG_DISABLE: {NO_REFERENCE}"),
}


@pytest.mark.parametrize(("variables", "message"), BAD_ENVIRONMENTS.values(), ids=BAD_ENVIRONMENTS)
def test_a_bad_environment_is_an_error_of_every_use_and_of_no_import_until_a_reload(
    monkeypatch, fake, packed, ran, variables, message
):
    inputs = packed((3, 4))
    uses = [
        (sdpa,), (attnreg.varlen_attn, *inputs), (attnreg.explain, SPEC),
        (attnreg.register_backend, fake("unheard").backend), (attnreg.configure, {}),
    ]  # fmt: skip
    before = (registry.registrations(), aten._remove)
    with attnreg.use_backend("one"):  # a scope doesn't hide it
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert refusal(sdpa) == message
    for _ in range(2):
        assert [refusal(*use) for use in (*uses, (attnreg.reload,))] == [message] * 6
    assert "math" in attnreg.list_backends()
    assert "unheard" not in attnreg.list_backends()
    assert (registry.registrations(), aten._remove, ran()) == (*before, {})
    for name in variables:
        monkeypatch.delenv(name)
    assert [refusal(*use) for use in uses] == [message] * 5
    attnreg.reload()
    attnreg.varlen_attn(*inputs)
    assert ran() == {"env": (1, 0)}


def test_an_error_that_is_raised_once_more_keeps_no_earlier_traceback(monkeypatch, packed):
    monkeypatch.setenv("ATTNREG_STRICT", "2")
    for call in (sdpa, lambda: attnreg.register_backend("math")):
        depths = []
        for _ in range(5):
            with pytest.raises(ConfigError) as error:
                call()
            depths.append(len(error.traceback))
        assert len(set(depths[1:])) == 1, depths


# Contradictions


def test_what_the_environment_asks_for_and_settings_disable_is_an_error_that_names_both(monkeypatch, write):
    monkeypatch.setenv("ATTNREG_BACKEND", "two,ONE")
    attnreg.configure(write("strict = false"))
    before, asks = policy.sources(), "ATTNREG_BACKEND asks for 'ONE', but it is disabled by "
    file = write('\n\ndisabled = ["one"]')
    assert refusal(attnreg.configure, file) == f"{asks}attnreg.toml:3"
    assert refusal(attnreg.configure, {"disabled": ["one"]}) == f"{asks}configure(...)"
    assert policy.sources() is before
    monkeypatch.setenv("ATTNREG_CONFIG", str(write('disabled = ["one"]', "job.toml")))
    attnreg.configure(write(""))
    assert refusal(attnreg.reload) == f"{asks}job.toml:1"


def test_the_environment_may_disable_what_the_program_and_files_ask_for(monkeypatch, write):
    attnreg.configure(write('devices.cpu.order = ["one", "two"]'))
    attnreg.register_backend("one")
    monkeypatch.setenv("ATTNREG_DISABLE", "one")
    attnreg.reload()
    assert decided() == ("two", "attnreg.toml:1")
    assert attnreg.explain(SPEC).rejected["one"] == ("disabled by ATTNREG_DISABLE",)


def test_the_reference_may_be_disabled_in_strict_mode_and_then_does_not_run(monkeypatch):
    monkeypatch.setenv("ATTNREG_DISABLE", "math")
    monkeypatch.setenv("ATTNREG_STRICT", "1")
    assert attnreg.explain(SPEC).rejected["math"] == ("disabled by ATTNREG_DISABLE",)


def test_the_environment_may_not_take_the_strictness_away_that_disabling_the_reference_needs(
    monkeypatch, write
):
    attnreg.configure(write('strict = true\ndisabled = ["math"]'))
    monkeypatch.setenv("ATTNREG_STRICT", "0")
    assert refusal(attnreg.reload) == f"attnreg.toml:2: {NO_REFERENCE}"
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


@pytest.mark.parametrize("through", ["ATTNREG_BACKEND", "attnreg.toml:1", "configure(...)"])
@pytest.mark.parametrize(
    ("options", "reason", "cause"),
    [
        (
            {"unavailable": lambda: "not installed", "install": "pip install new"},
            "can't load here: not installed; install it with: pip install new",
            type(None),
        ),
        ({"load": broken_loader}, f"failed to load: ImportError: {NO_SYMBOL}", ImportError),
    ],
    ids=["missing", "broken"],
)
def test_a_backend_asked_for_here_that_cannot_load_is_an_error_at_every_call_with_its_cause(
    monkeypatch, write, fake, packed, ran, through, options, reason, cause
):
    new = Entry("new", "a test", fake("new", **options).backend)
    monkeypatch.setattr(registry, "_entries", {**registry.entries(), "new": new})
    if through == "ATTNREG_BACKEND":
        monkeypatch.setenv("ATTNREG_BACKEND", "one,new")
    else:
        file = write('devices.cpu.order = ["new", "one"]')
        attnreg.configure(file if "toml" in through else {"devices": {"cpu": {"order": ["new"]}}})
    inputs = packed((3, 4))
    if through == "ATTNREG_BACKEND" and cause is ImportError:
        sdpa()  # "one" runs it, so that "new" hasn't been loaded
        assert ran() == {"one": (1, 0)}
        with pytest.raises(BackendUnavailableError):
            new.kernels()
        registry.changed()
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

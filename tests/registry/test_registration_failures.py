"""Promises of `register_backend` and `install`: what fails changes nothing."""

import re

import pytest
import torch
import torch.nn.functional as F
from support.command_line import NO_SYMBOL, broken_loader
from support.sdpa import sdpa

import attnreg
from attnreg.core import aten
from attnreg.core.policy import current as policy
from attnreg.errors import BackendUnavailableError, RegistrationError, UnknownBackendError

pytestmark = pytest.mark.usefixtures("routers")


MISSING = "needs flash-attn-4>=4.0, found 3.1"
HINT = "pip install 'attnreg[fa4]'"
KNOWN = "known backends: math, FA4, cuDNN"
NEAREST = {"FA5": "did you mean 'FA4'? ", "mth": "did you mean 'math'? ", "cudn": "did you mean 'cuDNN'? "}


@pytest.mark.parametrize(
    ("name", "options", "kind", "message"),
    [
        *(
            (name, {}, UnknownBackendError, f"no backend is named {name!r}; {NEAREST.get(name, '')}{KNOWN}")
            for name in (*NEAREST, "zzz", "")
        ),
        *(
            (name, {}, UnknownBackendError, f"got {name!r}, expected the name of a backend: math, FA4, cuDNN")
            for name in (None, ["math", "FA4"])
        ),
        (
            "fa4",
            {"unavailable": lambda: MISSING, "install": HINT},
            BackendUnavailableError,
            f"FA4 can't load here: {MISSING}; install it with: {HINT}",
        ),
        (
            "fa4",
            {"load": broken_loader},
            BackendUnavailableError,
            f"FA4 failed to load: ImportError: {NO_SYMBOL}",
        ),
    ],
)
def test_what_cannot_be_registered_says_why_and_leaves_what_was_active_active(
    fake, known, everything, name, options, kind, message
):
    known(fake("FA4", **options).backend, fake("cuDNN").backend)
    attnreg.register_backend("cudnn")
    before = everything()
    with pytest.raises(kind) as error:
        attnreg.register_backend(name)
    assert str(error.value) == message
    assert isinstance(error.value.__cause__, ImportError if "ImportError" in message else type(None))
    assert everything() == before
    assert sdpa() == "cuDNN"


def test_what_is_no_name_is_refused_in_one_line_where_a_name_is_expected(fake, known):
    known(fake("FA4").backend)
    for given, got in ((fake("mine").backend, "a Backend named 'mine'"), (["FA4"], "['FA4']")):
        with pytest.raises(UnknownBackendError) as error:
            attnreg.use_backend(given)
        assert str(error.value) == f"got {got}, expected the name of a backend: math, FA4"


def test_a_backend_object_that_cannot_load_is_not_kept_and_installs_no_router(fake, everything):
    aten.restore()
    before = everything()
    with pytest.raises(BackendUnavailableError):
        attnreg.register_backend(fake("mine", unavailable=lambda: MISSING).backend)
    assert everything() == before
    handle = attnreg.register_backend(fake("other", unavailable=lambda: MISSING).backend, required=False)
    assert not aten.installed()
    assert "other" in attnreg.list_backends()  # until its handle is removed
    handle.remove()
    assert everything() == before


def test_where_it_is_not_required_what_cannot_load_is_logged_and_what_was_active_stays_active(
    fake, known, caplog, everything
):
    known(fake("FA4", unavailable=lambda: MISSING, install=HINT).backend, fake("other").backend)
    attnreg.register_backend("other")
    before = everything()
    handle = attnreg.register_backend("fa4", required=False)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", f"FA4 can't load here: {MISSING}; install it with: {HINT}; going on without it")
    ]
    assert everything() == before
    assert sdpa() == "other"
    assert repr(handle) == "<attnreg.Handle 'FA4', removed>"
    handle.remove()
    assert sdpa() == "other"


def test_where_it_is_not_required_it_is_registered_like_any_other_if_it_loads_and_has_to_exist(fake, caplog):
    with attnreg.register_backend(fake("mine").backend, required=False):
        assert sdpa() == "mine"
    assert caplog.records == []
    with pytest.raises(UnknownBackendError, match="no backend is named 'FA5'"):
        attnreg.register_backend("FA5", required=False)


def test_a_second_backend_of_a_name_is_refused_with_both_origins_and_the_first_stays(fake, everything):
    first = fake("mine")
    attnreg.register_backend(first.backend)
    before = everything()
    here = rf"registered at {re.escape(__file__)}:\d+"
    removed = ", or that the first one's handle is removed before"
    for name, origin, further in (("MINE", here, removed), ("Math", "attnreg.backends.math", "")):
        with pytest.raises(RegistrationError) as error:
            attnreg.register_backend(fake(name).backend)
        assert re.fullmatch(
            rf"a backend named '{name.lower()}' is there already \({origin}\); "
            rf"got another, {here}, expected a name of its own{further}",
            str(error.value),
        )
        assert everything() == before
    assert sdpa() == "mine"
    assert len(first.forwards) == 1


@pytest.fixture
def no_routers(monkeypatch):
    """Make installing the routers fail half-way, the third op being one that torch won't take."""
    aten.restore()
    register, calls = aten._register, []

    def fails(library, op, key, function, layout):
        calls.append(op)
        if len(calls) == 3:
            raise RuntimeError(f"no {key} kernel can be registered for {op}")
        register(library, op, key, function, layout)

    monkeypatch.setattr(aten, "_register", fails)
    return calls


def test_routers_that_fail_to_install_leave_everything_as_it_was(fake, known, no_routers, everything):
    known(fake("other").backend)
    inputs = torch.randn(3, 1, 2, 8, 16)
    expected = F.scaled_dot_product_attention(*inputs)
    before = everything()
    for backend in ("other", fake("mine").backend):
        no_routers.clear()
        with pytest.raises(RegistrationError) as error:
            attnreg.register_backend(backend)
        op = no_routers[2]
        assert re.fullmatch(
            f"routers can't be installed: no C[A-Z]+ kernel can be registered for {op}; "
            "every op is as it was",
            str(error.value),
        )
        assert isinstance(error.value.__cause__, RuntimeError)
        assert everything() == before
    assert attnreg.stats().calls == {}
    torch.testing.assert_close(F.scaled_dot_product_attention(*inputs), expected, rtol=0, atol=0)
    flash, inputs = torch.ops.aten._flash_attention_forward, torch.randn(3, 1, 8, 2, 16)
    with pytest.raises(NotImplementedError):  # it has no kernel on a CPU but a router's
        flash(*inputs, None, None, 8, 8, 0.0, False, False)


def test_routers_that_fail_to_install_leave_the_settings_as_they_were(
    no_routers, tmp_path, monkeypatch, everything
):
    file = tmp_path / "attnreg.toml"
    file.write_text('log_level = "debug"')
    policy.sources()
    before = everything()
    monkeypatch.setenv("ATTNREG_BACKEND", "math")
    for change in (
        lambda: attnreg.configure(file),
        lambda: attnreg.configure({"strict": True}),
        attnreg.reload,
        attnreg.install,
    ):
        no_routers.clear()
        with pytest.raises(RegistrationError, match="routers can't be installed"):
            change()
        assert everything() == before
    assert policy.current() == attnreg.core.selection.decision.Policy()

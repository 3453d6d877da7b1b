"""Promises of `register_backend`: what it asks for holds, can be taken back, and fails whole."""

import copy
import gc
import pickle

import pytest
from support.sdpa import sdpa

import attnreg
from attnreg import api
from attnreg.core import aten, registry
from attnreg.core.policy import current as policy
from attnreg.errors import InvalidInputError, RegistrationError

pytestmark = pytest.mark.usefixtures("routers")


# Registering


@pytest.mark.parametrize("name", ["math", "MATH", "Math", "  math "])
def test_a_name_in_any_case_registers_the_backend(name):
    assert sdpa() == "torch"
    with attnreg.register_backend(name) as handle:
        assert handle.backend == "math"
        assert sdpa() == "math"


def test_a_backend_object_is_known_and_runs_while_it_is_registered_and_the_routers_stay(fake):
    aten.restore()
    mine = fake("mine")
    with attnreg.register_backend(mine.backend):
        assert aten.installed()
        assert "mine" in attnreg.list_backends()
        assert sdpa() == "mine"
    assert len(mine.forwards) == 1
    assert "mine" not in attnreg.list_backends()
    assert (aten.installed(), policy.is_active(), sdpa()) == (True, False, "torch")


@pytest.mark.parametrize(
    ("devices", "governed"),
    [
        (None, ("cpu", "cuda", "xpu")),
        ("cpu", ("cpu",)),
        ("CUDA", ("cuda",)),
        ("sm_90", ("sm_90",)),
        (["cpu", "sm_100"], ("cpu", "sm_100")),
        (iter(("cuda", "cpu")), ("cuda", "cpu")),
    ],
)
def test_devices_say_where_it_is_preferred_all_that_it_serves_if_not_given(fake, devices, governed):
    attnreg.register_backend(fake("mine", devices=("cpu", "cuda", "xpu")).backend, devices=devices)
    assert [r.devices for r in registry.registrations()] == [governed]


def test_a_backend_is_preferred_only_on_the_devices_it_was_registered_for(fake, known):
    known(fake("mine", devices=("cpu", "cuda")).backend)
    with attnreg.register_backend("mine", devices="cuda"):
        assert sdpa() == "cpu"  # torch's own kernel, counted as what it is: something is registered
    with attnreg.register_backend("mine", devices="cpu"):
        assert sdpa() == "mine"


KINDS = "expected kinds of devices ('cuda', 'sm_90')"
SOME = "expected some of those that mine supports: cpu, xpu"


@pytest.mark.parametrize(
    ("devices", "kind", "message"),
    [
        ("cuda", RegistrationError, f"devices: got cuda, {SOME}"),
        ("sm_90", RegistrationError, f"devices: got cuda, {SOME}"),
        (["cpu", "mps", "cuda"], RegistrationError, f"devices: got cuda, mps, {SOME}"),
        ([], RegistrationError, f"devices: got none, {SOME}"),
        (
            ["cpu", "xpu:1"],
            RegistrationError,
            "devices: got xpu:1, expected a kind of device ('cuda', 'sm_90'), not a single one",
        ),
        (3, RegistrationError, f"devices: got 3, {KINDS}"),
        ("", RegistrationError, f"devices: got '', {KINDS}"),
        (b"cpu", RegistrationError, f"devices: got b'cpu', {KINDS}"),
        (["cpu", None], RegistrationError, f"devices: got None, {KINDS}"),
        ("gpu", RegistrationError, f"devices: got gpu, {SOME}"),
        ("hopper", RegistrationError, f"devices: got hopper, {SOME}"),
        ("gpu 0", InvalidInputError, "device: got 'gpu 0', expected 'cpu', 'cuda', 'cuda:N' or 'sm_NN'"),
    ],
)
def test_devices_that_it_cannot_serve_are_refused_and_nothing_changes(
    fake, known, devices, kind, message, everything
):
    known(fake("mine", devices=("cpu", "xpu")).backend)
    attnreg.register_backend("math")
    before = everything()
    with pytest.raises(kind) as error:
        attnreg.register_backend("mine", devices=devices)
    assert str(error.value) == message
    assert everything() == before


@pytest.mark.parametrize(("devices", "meant"), [("gpu", "cuda"), ("hopper", "sm_90")])
def test_another_name_of_a_device_that_it_serves_is_suggested(fake, devices, meant):
    mine = fake("mine", devices=("cpu", "cuda")).backend
    with pytest.raises(RegistrationError) as error:
        attnreg.register_backend(mine, devices=devices)
    assert str(error.value) == (
        f"devices: got {devices}, expected some of those that mine supports: cpu, cuda; "
        f"did you mean '{meant}'?"
    )


def test_registering_a_disabled_backend_warns_that_it_will_not_run(monkeypatch, fake, known, caplog):
    known(fake("mine").backend)
    monkeypatch.setenv("ATTNREG_DISABLE", "MINE")
    attnreg.register_backend("mine")
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "mine is registered, but it is disabled by ATTNREG_DISABLE and won't run")
    ]
    assert sdpa() == "cpu"


# Several registrations


@pytest.mark.parametrize(
    ("removed", "served"),
    [((2, 1, 0), ("second", "first", "torch")), ((0, 1, 2), ("third", "third", "torch"))],
    ids=["newest first", "oldest first"],
)
def test_of_several_registrations_the_newest_comes_first_and_removal_leaves_the_others(fake, removed, served):
    handles = [attnreg.register_backend(fake(name).backend) for name in ("first", "second", "third")]
    assert sdpa() == "third"
    for index, name in zip(removed, served, strict=True):
        handles[index].remove()
        assert sdpa() == name


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_registering_the_same_backend_again_puts_it_first_and_takes_both_handles_to_undo(fake, order):
    mine = fake("mine").backend
    first = attnreg.register_backend(mine)
    attnreg.register_backend("math")
    handles = (first, attnreg.register_backend("MINE"))
    assert sdpa() == "mine"
    handles[order[0]].remove()
    assert sdpa() == ("mine" if order[0] == 0 else "math")
    assert "mine" in attnreg.list_backends()
    handles[order[1]].remove()
    assert sdpa() == "math"
    assert "mine" not in attnreg.list_backends()


# Handles


def test_a_name_is_free_once_its_backend_has_gone_and_the_old_handle_takes_nothing_of_the_next(fake):
    old = attnreg.register_backend(fake("mine").backend)
    old.remove()
    later = fake("MINE")
    attnreg.register_backend(later.backend)
    for _ in range(2):
        old.remove()  # removing twice is removing once
        assert sdpa() == "MINE"
    assert len(registry.registrations()) == 1
    assert len(later.forwards) == 2


def test_a_handle_ends_its_registration_with_the_block_also_when_the_block_fails(fake):
    with pytest.raises(ZeroDivisionError), attnreg.register_backend(fake("mine").backend) as handle:
        assert isinstance(handle, attnreg.Handle)
        assert sdpa() == "mine"
        1 / 0  # noqa: B018
    assert sdpa() == "torch"


def test_a_registration_outlives_its_handle_and_its_routers_being_taken_out(fake):
    attnreg.register_backend(fake("mine").backend)
    gc.collect()
    assert sdpa() == "mine"
    handle = attnreg.register_backend("math")
    attnreg.uninstall()
    assert sdpa() == "torch"
    attnreg.install()
    assert sdpa() == "math"
    handle.remove()
    assert sdpa() == "mine"


def test_a_handle_has_its_backend_and_whether_it_is_in_force():
    handle = attnreg.register_backend("MATH")
    assert handle.backend == "math"
    assert repr(handle) == "<attnreg.Handle 'math', registered>"
    handle.remove()
    assert repr(handle) == "<attnreg.Handle 'math', removed>"
    assert "math" in attnreg.list_backends()  # it was discovered, so it outlives its handles


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_handle_cannot_be_copied_or_pickled_and_says_what_to_do_instead(copied):
    with attnreg.register_backend("math") as handle, pytest.raises(TypeError) as error:
        copied(handle)
    assert str(error.value) == (
        "a Handle can't be pickled or copied: it undoes a change of this process; "
        "register the backend in the other process, or set ATTNREG_BACKEND for both"
    )


# Listing, installing, uninstalling


def test_all_known_backends_are_listed_by_the_names_they_give_themselves(fake, known):
    known(fake("FA4", unavailable=lambda: "needs a GPU").backend, fake("cuDNN", devices=("cuda",)).backend)
    attnreg.list_backends().clear()  # the list is the caller's to change
    assert attnreg.list_backends() == ["math", "FA4", "cuDNN"]


@pytest.mark.slow
def test_a_thousand_registrations_leave_nothing_behind(fake):
    mine = fake("mine").backend
    before = (registry.registrations(), attnreg.list_backends())
    for _ in range(1000):
        attnreg.register_backend(mine).remove()
    assert (registry.registrations(), attnreg.list_backends()) == before
    assert sdpa() == "torch"


def test_a_backend_dropped_between_its_loading_and_its_registration_is_added_anew(fake, monkeypatch):
    mine = fake("mine").backend
    other = attnreg.register_backend(mine)
    # As another thread would do while this one installs the routers.
    monkeypatch.setattr(aten, "ensure", other.remove)
    attnreg.register_backend("mine")
    assert sdpa() == "mine"
    assert "mine" in attnreg.list_backends()


def test_every_name_of_the_module_is_public_api():
    assert set(api.__all__) <= set(attnreg.__all__)

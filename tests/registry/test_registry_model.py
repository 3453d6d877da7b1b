"""Register, configure, scope and take back in any order: what runs is what a small model says."""

import contextlib
import threading

import pytest
import torch
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from support.sdpa import sdpa

import attnreg
from attnreg.core import aten
from attnreg.errors import ConfigError, UnknownBackendError

NAMES = ("one", "two", "three")
names = st.sampled_from(NAMES)


class Model:
    """What was asked for, and what that means."""

    def __init__(self):
        self.scopes, self.handles = [], []
        self.env = self.program = self.file = self.disabled = None
        self.installed = self.active = False

    def settings(self):
        return self.env, self.disabled, self.program, self.file

    def runs(self, scopes):
        """Return what runs a call of SDPA, and one of `varlen_attn`."""
        asked = [*scopes[-1:], self.env, *[name for name, _ in self.handles], self.program, self.file]
        found = [name for name in asked if name and name != self.disabled]
        # Torch's own kernel is called "cpu" where attnreg has decided for it.
        serves = self.installed and (self.active or self.disabled or any(asked))
        return [*found, "cpu"][0] if serves else "torch", [*found, "math"][0]


@contextlib.contextmanager
def variables(backend, disabled=None):
    """Set the two variables, an empty one to mean an unset one, while they are read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNREG_BACKEND", backend or "")
        patch.setenv("ATTNREG_DISABLE", disabled or "")
        yield


def varlen():
    """Run a small packed call and return the name of the backend that ran it."""
    attnreg.reset_stats()
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    attnreg.varlen_attn(*torch.randn(3, 8, 2, 16), offsets, offsets, 5, 5)
    return next(iter(attnreg.stats().calls))


class Registry(stateful.RuleBasedStateMachine):
    """Each rule changes the registry as a program would, and the model as its documentation says."""

    folder = backends = None  # set by the test

    def __init__(self):
        super().__init__()
        self.model, self.open = Model(), []

    # ---- what a program does

    @rule(name=st.sampled_from((*NAMES, "own")))
    def register(self, name):
        handle = attnreg.register_backend(self.backends["own"] if name == "own" else name.upper())
        self.model.handles.insert(0, (name, handle))
        self.model.installed = True

    @precondition(lambda self: self.model.handles)
    @rule(place=st.integers(0, 9), times=st.integers(1, 2))
    def remove(self, place, times):
        handles = self.model.handles
        _, handle = handles.pop(place % len(handles))
        for _ in range(times):
            handle.remove()

    @rule(name=st.none() | names)
    def configure(self, name):
        attnreg.configure({"devices": {"cpu": {"order": [name]}}} if name else {})
        self.model.program, self.model.installed = name, True

    @rule(name=st.none() | names)
    def configure_by_file(self, name):
        file = self.folder / "attnreg.toml"
        file.write_text(f'devices.cpu.order = ["{name}"]' if name else "", encoding="utf-8")
        attnreg.configure(file)
        self.model.file, self.model.installed = name, True

    @rule(name=st.none() | names, disabled=st.none() | st.sampled_from(("one", "two")))
    def set_variables(self, name, disabled):
        model = self.model
        if name and name == disabled:
            with variables(name, disabled), pytest.raises(ConfigError, match=f"both name {name}"):
                attnreg.reload()
            return
        with variables(name, disabled):
            attnreg.reload()
        model.env, model.disabled = name, disabled
        model.installed |= bool(model.handles or model.active or any(model.settings()))

    @rule()
    def install(self):
        attnreg.install()
        self.model.installed = self.model.active = True

    @rule()
    def uninstall(self):
        attnreg.uninstall()
        self.model.installed = self.model.active = False

    @precondition(lambda self: len(self.open) < 3)
    @rule(name=names)
    def enter(self, name):
        scope = attnreg.use_backend(name)
        scope.__enter__()
        self.open.append(scope)
        self.model.scopes.append(name)
        self.model.installed = True

    @precondition(lambda self: self.open)
    @rule()
    def leave(self):
        self.open.pop().__exit__(None, None, None)
        self.model.scopes.pop()

    # ---- what is refused, and changes nothing

    @rule()
    def mistype(self):
        with pytest.raises(UnknownBackendError, match="did you mean 'three'"):
            attnreg.register_backend("thre")
        with pytest.raises(UnknownBackendError):
            attnreg.use_backend("one", "oneself")
        with pytest.raises(ConfigError):
            attnreg.configure({"device": {}})
        with variables("nine"), pytest.raises(ConfigError, match="no backend is named 'nine'"):
            attnreg.reload()

    # ---- what runs

    @invariant()
    def runs_what_the_model_says(self):
        assert aten.installed() == self.model.installed
        assert (sdpa(), varlen()) == self.model.runs(self.model.scopes)

    @rule()
    def another_thread_is_outside_all_scopes(self):
        found = []
        thread = threading.Thread(target=lambda: found.append((sdpa(), varlen())))
        thread.start()
        thread.join()
        assert found == [self.model.runs([])]

    def teardown(self):
        while self.open:
            self.open.pop().__exit__(None, None, None)
        for _, handle in self.model.handles:
            handle.remove()
        attnreg.reload()
        self.configure_by_file(None)
        self.configure(None)
        attnreg.uninstall()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("examples", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_in_any_order_what_runs_is_what_the_model_says(known, fake, tmp_path, monkeypatch, examples):
    known(*[fake(name, priority=-200).backend for name in NAMES])  # below math, the default
    monkeypatch.setattr(Registry, "folder", tmp_path)
    monkeypatch.setattr(Registry, "backends", {"own": fake("own", priority=-200).backend})
    limits = settings(
        max_examples=examples, stateful_step_count=25, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    was_installed = aten.installed()
    aten.restore()  # as the model begins
    stateful.run_state_machine_as_test(Registry, settings=limits)
    if was_installed:
        aten.ensure()

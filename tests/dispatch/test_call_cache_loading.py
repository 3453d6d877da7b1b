"""Promises about what serves calls where nothing is compiled, or can't or mustn't be loaded."""

import pytest
import torch
import torch.nn.functional as F
from support.compiled_files import whole

import attnreg
from attnreg.backends.cpu import choice
from attnreg.core import aten, registry
from attnreg.core.dispatch import call_cache
from attnreg.core.policy import current as policy
from attnreg.core.torchlib import building, caches, captured
from attnreg.errors import BuildError, ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def unbuilt(monkeypatch, tmp_path):
    """Have nothing compiled on this machine; returns where it would be."""
    aten.restore()
    monkeypatch.setattr(caches, "folder", lambda purpose: tmp_path)
    monkeypatch.setattr(call_cache, "_module", None)
    building.target.cache_clear()
    call_cache.forget()
    yield building.target()
    aten.restore()
    call_cache.forget()
    building.target.cache_clear()


def attend():
    """Call SDPA with as many rows as torch's own kernel computes."""
    return F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 24, 16))


def test_where_nothing_is_compiled_calls_run_in_python_without_a_warning(unbuilt, caplog, ran):
    with attnreg.register_backend("cpu"):
        attend()
        assert captured.call_cache_in_use is False
        assert call_cache.load() is None
    assert ran() == {"cpu": (1, 0)}
    assert caplog.messages == []


def test_a_library_that_does_not_load_is_one_warning_and_calls_run_in_python(unbuilt, caplog, ran):
    unbuilt.write_bytes(whole())
    with attnreg.register_backend("cpu"):
        attend()
        attend()
    assert ran() == {"cpu": (2, 0)}
    (message,) = caplog.messages
    assert "can't be loaded" in message
    assert "`attnreg build --force`" in message


def test_what_others_can_write_to_is_not_loaded(unbuilt, built_routers):
    unbuilt.write_bytes(built_routers.read_bytes())
    unbuilt.chmod(0o722)
    with attnreg.register_backend("cpu"):
        assert captured.call_cache_in_use is False
    with pytest.raises(BuildError, match=f"others may write to {unbuilt} "):
        building.loaded()


def test_attnreg_routers_compiled_without_a_compiled_library_is_an_error_that_says_what_to_do(
    unbuilt, monkeypatch
):
    monkeypatch.setenv("ATTNREG_ROUTERS", "compiled")
    with pytest.raises(ConfigError, match=r"ATTNREG_ROUTERS=compiled: .*isn't compiled .*`attnreg build`"):
        attnreg.register_backend("cpu")
    assert not aten.installed()
    assert registry.registrations() == ()


@pytest.mark.parametrize(("value", "used"), [("", True), ("compiled", True), ("Python", False)])
def test_a_compiled_library_is_used_unless_attnreg_routers_is_python(
    unbuilt, built_routers, monkeypatch, ran, planned, value, used
):
    monkeypatch.setattr(building, "built", lambda: built_routers)
    monkeypatch.setenv("ATTNREG_ROUTERS", value)
    # On AMD, whose MKL is slow, the compiled kernel would run the call, which is kept a call later.
    monkeypatch.setattr(choice, "machine", lambda: choice.CpuMachine(avx=True, amx=False, slow_mkl=False))
    with attnreg.register_backend("cpu"):
        assert captured.call_cache_in_use is used
        assert (call_cache.load() is not None) is used
        assert [planned(attend) for _ in range(3)] == [1, *[0 if used else 1] * 2]
    assert ran() == {"cpu": (3, 0)}


def test_before_routers_are_installed_tables_are_looked_up_as_if_they_were(
    unbuilt, built_routers, monkeypatch
):
    """A table has the times of both, and what a process finds compiled its first call will use."""
    assert not policy.current().tables.compiled
    monkeypatch.setattr(building, "built", lambda: built_routers)
    assert captured.call_cache_in_use is None
    assert policy.current().tables.compiled
    monkeypatch.setenv("ATTNREG_ROUTERS", "python")
    attnreg.reload()
    assert not policy.current().tables.compiled
    monkeypatch.delenv("ATTNREG_ROUTERS")
    attnreg.reload()
    aten.ensure()
    assert policy.current().tables.compiled
    with call_cache.paused():
        assert not policy.current().tables.compiled


def test_attnreg_routers_alone_asks_for_no_backend(monkeypatch):
    monkeypatch.setenv("ATTNREG_ROUTERS", "python")
    attnreg.reload()
    assert not policy.is_active()


def test_a_test_of_what_is_compiled_gets_it_whatever_routers_a_test_before_has_left(python_routers, request):
    aten.ensure()
    assert captured.call_cache_in_use is False
    request.getfixturevalue("compiled_routers")
    assert captured.call_cache_in_use is True

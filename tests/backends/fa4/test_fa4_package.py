"""Promises about the package flash-attn-4: releases that don't fit, its disk cache, what is missing."""

import functools
import inspect
import logging
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from support import fake_fa4
from support.fake_fa4 import Package, call_of, dense, forget

from attnreg import BackendUnavailableError
from attnreg.backends.fa4 import BACKEND
from attnreg.backends.fa4 import package as fa4_package
from attnreg.contract.discovery import Entry

SWITCH, FOLDER = fa4_package.SWITCH, fa4_package.FOLDER


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    forget(monkeypatch)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Give the compile cache a folder of the test's own, and unset the variables that would override it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (SWITCH, FOLDER):
        monkeypatch.setenv(name, "")  # so that what loading sets is undone
        monkeypatch.delenv(name)
    return tmp_path / "cache" / "attnreg" / "fa4"


@pytest.fixture
def install(monkeypatch, cache):
    return functools.partial(fake_fa4.install, monkeypatch)


@pytest.fixture
def here(monkeypatch):
    """Have the backend available, whatever this machine has."""
    monkeypatch.setattr(Entry, "unavailable", lambda entry: "")
    monkeypatch.setattr(fa4_package, "version", lambda name: "4.0.0b36")


# Releases that don't fit


@pytest.mark.parametrize("name", ["_flash_attn_fwd", "_flash_attn_bwd"])
def test_a_renamed_keyword_is_reported_at_load(install, name, here):
    install(version="4.0.0b99", **{name: lambda q, k, v, scale, with_lse: None})
    entry = Entry("FA4", "a test", BACKEND)
    with pytest.raises(BackendUnavailableError) as error:
        entry.kernels()
    message = str(error.value.__cause__)
    missing = ", ".join(
        repr(keyword) for keyword in fa4_package.KEYWORDS[name] if keyword not in ("q", "k", "v")
    )
    assert message == (
        f"flash-attn-4 4.0.0b99: {name} takes no {missing}; attnreg knows 4.0.0b19 to 4.0.0b36"
    )


@pytest.mark.parametrize("name", ["_flash_attn_fwd", "_flash_attn_bwd"])
def test_an_unknown_parameter_without_a_default_is_reported_at_load(install, name, here):
    package = install(version="4.0.0b99")
    as_known = inspect.signature(getattr(package.module(), name))
    layout = inspect.Parameter("layout", inspect.Parameter.KEYWORD_ONLY)

    def newer(*args, **kwargs):
        raise AssertionError("a call must not be the first to notice")

    newer.__signature__ = as_known.replace(parameters=[*as_known.parameters.values(), layout])
    install(version="4.0.0b99", **{name: newer})
    with pytest.raises(BackendUnavailableError) as error:
        Entry("FA4", "a test", BACKEND).kernels()
    assert str(error.value.__cause__) == (
        f"flash-attn-4 4.0.0b99: {name} needs 'layout', which attnreg doesn't know; it knows "
        "4.0.0b19 to 4.0.0b36"
    )


def test_a_missing_function_is_reported_at_load(install):
    package = install(version="5.0")
    module = package.module()
    del module._flash_attn_bwd
    sys.modules["flash_attn.cute.interface"] = module
    with pytest.raises(BackendUnavailableError) as error:
        BACKEND.load()
    assert str(error.value) == (
        "flash-attn-4 5.0: there is no _flash_attn_bwd; attnreg knows 4.0.0b19 to 4.0.0b36"
    )


@pytest.mark.parametrize(
    ("results", "got"),
    [
        (torch.ones(1), "Tensor"),
        ((torch.ones(1),), "Tensor"),
        ((), "nothing"),
        (None, "NoneType"),
        ([torch.ones(1), torch.ones(1)], "list"),
        ((torch.ones(1), None, torch.ones(1)), "Tensor, NoneType, Tensor"),
    ],
)
def test_results_of_another_form_are_reported_with_package_and_version(install, results, got):
    package = Package()
    function, *_ = package.functions()

    def other(**given):
        return results

    other.__signature__ = inspect.signature(function)
    install(package, version="4.1", _flash_attn_fwd=other)
    query, key, value, _ = dense()
    with pytest.raises(BackendUnavailableError) as error:
        BACKEND.load().forward(query, key, value, call_of(query, key))
    assert str(error.value) == (
        f"flash-attn-4 4.1: _flash_attn_fwd returned {got}, expected 2 tensors or more; "
        "attnreg knows 4.0.0b19 to 4.0.0b36"
    )


# The compile cache


def settings():
    return os.environ.get(SWITCH), os.environ.get(FOLDER)


def test_what_is_compiled_is_kept_in_the_users_cache_folder(package, cache):
    BACKEND.load()
    assert settings() == ("1", str(cache))
    assert cache.is_dir()
    assert list(cache.iterdir()) == []
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("base", ["", "not/absolute"])
def test_without_a_cache_folder_of_the_user_it_is_the_one_in_the_home(package, monkeypatch, tmp_path, base):
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    monkeypatch.setenv("HOME", str(tmp_path))
    BACKEND.load()
    assert settings() == ("1", str(tmp_path / ".cache" / "attnreg" / "fa4"))


@pytest.mark.parametrize("switch", ["0", "off"])
def test_a_users_own_setting_is_kept(package, monkeypatch, cache, switch):
    monkeypatch.setenv(SWITCH, switch)
    BACKEND.load()
    assert settings() == (switch, None)
    assert not cache.exists()


def test_a_folder_that_the_user_names_is_used(package, monkeypatch, cache, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path / "mine"))
    BACKEND.load()
    assert settings() == ("1", str(tmp_path / "mine"))
    assert not cache.exists()


def test_a_folder_that_cannot_be_written_costs_a_warning_and_nothing_else(package, cache, caplog):
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file where the folder should be")
    query, key, value, _ = dense()
    with caplog.at_level(logging.WARNING, "attnreg"):
        kernels = BACKEND.load()
        kernels.forward(query, key, value, call_of(query, key))
    assert settings() == (None, None)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "FA4 compiles anew in each process: its cache folder can't be used: "
    )


def test_a_folder_without_locks_is_not_used(package, cache, monkeypatch, caplog):
    def refuse(file, how):
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    BACKEND.load()
    assert settings() == (None, None)
    assert "no locks here" in caplog.text


# What is missing


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Describe a machine: what is installed, and its GPUs; without arguments it has all that is needed."""

    def describe(version="4.0.0b36", cute=True, cutlass=True, gpus=((9, 0),)):
        def of(name):
            if version is None:
                raise PackageNotFoundError(name)
            return version

        def spec_of_module(name):
            if name == "cutlass" and cutlass is None:
                raise ValueError("cutlass.__spec__ is None")
            if name == "cutlass" and not cutlass:
                return None
            found = ModuleSpec(name, None, is_package=True)
            found.submodule_search_locations = [str(tmp_path / "elsewhere"), str(tmp_path)]
            return found

        (tmp_path / "cute").mkdir()
        if cute:
            (tmp_path / "cute" / "cache_utils.py").touch()
        monkeypatch.setattr(fa4_package, "version", of)
        monkeypatch.setattr(fa4_package, "find_spec", spec_of_module)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))

    return describe


NO_CUTLASS = "flash-attn-4 4.0.0b36 needs nvidia-cutlass-dsl, and there is no module cutlass"


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({}, None),
        ({"version": None}, "flash-attn-4 isn't installed"),
        (
            {"cute": False},
            "flash-attn-4 4.0.0b36 lacks flash_attn/cute/cache_utils.py, as when flash-attn is installed "
            "over it or removed afterwards; reinstall it with: "
            "pip install --force-reinstall --no-deps flash-attn-4",
        ),
        ({"cutlass": False}, NO_CUTLASS),
        ({"cutlass": None}, NO_CUTLASS),
        ({"gpus": ()}, "torch finds no CUDA GPU here"),
    ],
)
def test_what_is_missing_is_one_sentence_and_nothing_is_imported(machine, missing, message):
    machine(**missing)
    before = set(sys.modules)
    assert BACKEND.unavailable() == message
    assert {name.partition(".")[0] for name in set(sys.modules) - before} <= set(sys.stdlib_module_names)


def test_the_version_is_that_of_the_distribution(machine):
    machine(version="4.0.0b36")
    assert BACKEND.version() == "4.0.0b36"


def test_without_the_distribution_there_is_no_version(machine):
    machine(version=None)
    assert BACKEND.version() is None

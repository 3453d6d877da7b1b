"""Promises about the package flash-attn-4: releases that don't fit, its disk cache, what is missing."""

import inspect
import logging
import os
import stat
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from support.fake_fa4 import Package, call_of, dense, dense_call
from support.refusals import refusal

from attnreg import BackendUnavailableError
from attnreg.backends.fa4 import BACKEND
from attnreg.backends.fa4 import package as fa4_package

SWITCH, FOLDER = fa4_package.SWITCH, fa4_package.FOLDER


@pytest.fixture(autouse=True)
def cache(nothing_compiled, monkeypatch, tmp_path):
    """Give the compile cache a folder of the test's own, and unset the variables that would override it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (SWITCH, FOLDER):
        monkeypatch.setenv(name, "")  # so that what loading sets is undone
        monkeypatch.delenv(name)
    return tmp_path / "cache" / "attnreg" / "fa4"


# Releases that don't fit


@pytest.mark.parametrize("name", fa4_package.KEYWORDS)
def test_a_function_that_is_gone_or_takes_something_else_is_reported_at_load(install, name):
    as_known = inspect.signature(getattr(Package().module(), name))
    layout = inspect.Parameter("layout", inspect.Parameter.KEYWORD_ONLY)
    missing = ", ".join(repr(word) for word in fa4_package.KEYWORDS[name] if word not in ("q", "k", "v"))

    def newer(*args, **kwargs):
        raise AssertionError("a call must not be the first to notice")

    def renamed(q, k, v, scale, with_lse):
        raise AssertionError

    newer.__signature__ = as_known.replace(parameters=[*as_known.parameters.values(), layout])
    for function, problem in (
        (None, f"there is no {name}; attnreg knows"),
        (renamed, f"{name} takes no {missing}; attnreg knows"),
        (newer, f"{name} needs 'layout', which attnreg doesn't know; it knows"),
    ):
        install(version="4.0.0b99", **{name: function})
        message = f"flash-attn-4 4.0.0b99: {problem} 4.0.0b19 to 4.0.0b36"
        assert refusal(BACKEND.load, kind=BackendUnavailableError) == message


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
    query, key, value, _, call = dense_call()
    assert refusal(BACKEND.load().forward, query, key, value, call, kind=BackendUnavailableError) == (
        f"flash-attn-4 4.1: _flash_attn_fwd returned {got}, expected 2 tensors or more; "
        "attnreg knows 4.0.0b19 to 4.0.0b36"
    )


# The compile cache


def settings():
    return os.environ.get(SWITCH), os.environ.get(FOLDER)


@pytest.mark.parametrize(
    ("variables", "switch", "folder"),
    [
        ({}, "1", "cache/attnreg/fa4"),
        ({"XDG_CACHE_HOME": ""}, "1", ".cache/attnreg/fa4"),
        ({"XDG_CACHE_HOME": "not/absolute"}, "1", ".cache/attnreg/fa4"),
        ({FOLDER: "{home}/mine"}, "1", "mine"),
        ({SWITCH: "0"}, "0", None),
        ({SWITCH: "off"}, "off", None),
    ],
)
def test_what_is_compiled_is_kept_in_the_users_cache_folder_or_as_the_user_has_set(
    package, cache, monkeypatch, tmp_path, variables, switch, folder
):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(home=tmp_path))
    BACKEND.load()
    kept = None if folder is None else Path(tmp_path, folder)
    assert settings() == (switch, kept and str(kept))
    assert cache.exists() is (kept == cache)
    if kept:
        assert list(kept.iterdir()) == []
        assert kept.stat().st_mode & 0o777 == 0o700


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


def test_a_folder_that_others_can_write_to_is_not_used(package, cache, monkeypatch, tmp_path, caplog):
    shared = tmp_path / "shared"
    (shared / "cache").mkdir(parents=True)
    shared.chmod(0o777)
    monkeypatch.setenv(fa4_package.SWITCH, "1")
    monkeypatch.setenv(fa4_package.FOLDER, str(shared / "cache"))
    BACKEND.load()
    assert os.environ[fa4_package.SWITCH] == "0"  # the package would run what it finds there
    assert f"its cache folder can't be used: others may write to {shared} (mode 777" in caplog.text


def test_a_folder_with_something_that_another_user_has_put_there_is_not_used(
    package, cache, monkeypatch, caplog
):
    (cache / "kernels").mkdir(parents=True)
    (cache / "kernels" / "one.o").touch()
    lstat, theirs = Path.lstat, cache / "kernels" / "one.o"

    def owned(path):
        found = list(lstat(path))
        found[stat.ST_UID] = 54321 if path == theirs else found[stat.ST_UID]
        return os.stat_result(found)

    monkeypatch.setattr(Path, "lstat", owned)
    BACKEND.load()
    assert settings() == (None, None)
    assert f"cache folder can't be used: {theirs} belongs to another user (id 54321)" in caplog.text


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
    assert BACKEND.version() == missing.get("version", "4.0.0b36")
    assert {name.partition(".")[0] for name in set(sys.modules) - before} <= set(sys.stdlib_module_names)

"""Promises of measured tables: what a file says comes back, and what isn't a table is refused by its key."""

import dataclasses
import functools
import json
import operator
import os
import re

import pytest
from support.refusals import refusal
from support.tuned import point, spec_with, table, took

from attnreg.core.contract.spec import Device
from attnreg.core.times.environments import matched, matched_simulated
from attnreg.core.times.points import Front, Measured
from attnreg.core.times.table import Environment, load

CUDNN = "9.19.0 (frontend 1.32.0)"
HERE = Environment(
    device="NVIDIA H200",
    compute_capability="9.0",
    torch="2.11.0+cu130",
    cuda="13.0",
    cudnn="91900",
    driver="580.65.06",
    attnreg="0.1.0",
    backends={"FA2": "2.11.0+cu130", "cuDNN": CUDNN},
)

WHOLE = table(
    point(
        FA2=took(12.5, 16.0, 0.25),
        cuDNN=Measured(wrong="out is off"),
        FA4=Measured(failed="RuntimeError: no"),
    ),
    point(spec_with(window=(8, 0), varlen=True, tokens_q=300, tokens_k=310), "backward", FA2=31.0),
    fronts=(Front("FA2", True, "forward", 35.4), Front("cuDNN", False, "backward", 120.0)),
    **dataclasses.asdict(HERE),
)


GONE = object()


@pytest.fixture
def file(tmp_path):
    """Write the whole table after a change at a place such as `points[0].dtype`."""

    def write(place, value):
        data = WHOLE.to_dict()
        *keys, last = [int(key) if key.isdigit() else key for key in re.findall(r"\w+", place)]
        inside = functools.reduce(operator.getitem, keys, data)
        if value is GONE:
            del inside[last]
        else:
            inside[last] = value
        path = tmp_path / "table.json"
        path.write_text(json.dumps(data))
        return path

    return write


# The file


@pytest.mark.parametrize("saved", [WHOLE, table()], ids=["points", "no points"])
def test_a_table_comes_back_as_it_was_saved(tmp_path, saved):
    saved.save(tmp_path / "here.json")
    assert load(tmp_path / "here.json") == saved


def test_a_table_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "here.json"
    WHOLE.save(file)
    before = file.read_bytes()
    monkeypatch.setattr(
        "attnreg.core.times.table.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("full"))
    )
    with pytest.raises(OSError, match="full"):
        table().save(file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_a_new_file_has_the_umasks_mode_which_other_threads_keep_and_an_old_file_its_own(
    tmp_path, monkeypatch
):
    """Reading the umask would set it: files that other threads make meanwhile would be open to others."""
    file, before = tmp_path / "here.json", os.umask(0o027)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "umask", lambda mask: pytest.fail("it is the umask of all threads"))
            WHOLE.save(file)
            assert file.stat().st_mode & 0o777 == 0o640
            file.chmod(0o604)
            WHOLE.save(file)
            assert file.stat().st_mode & 0o777 == 0o604
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", "csv", "got 'csv', expected 'attnreg measured table', as `attnreg tune` writes it"),
        ("version", 2, "got 2, expected 1: measure it again"),
        ("points", None, "got None, expected a list of points"),
        ("points[0].head_dim", 0, "got 0, expected 1 or more"),
        ("points[1].dtype", "f33", "got 'f33', expected float64 or float32 or bfloat16 or float16"),
        ("fronts", GONE, "got None, expected a list of fronts"),
        ("fronts[0].host_us", -1, "got -1, expected a number of 0 or more"),
        ("fronts[1].varlen", "no", "got 'no', expected true or false"),
        ("fronts[0].gpu_us", 1.0, "unknown key"),
        ("environment", 3, "got 3, expected a device and its versions"),
        ("environment.driver", GONE, "missing"),
        ("environment.gpu", "H200", "unknown key"),
        ("environment.device", "", "got '', expected the name of a device"),
        ("environment.torch", 2.11, "got 2.11, expected a text"),
        ("environment.backends", [], "got [], expected the versions of backends"),
        ("environment.backends.FA2", 2, "got 2, expected a text"),
        ("points[0]", 5, "got 5, expected a point"),
        ("points[0].mask", "banded", "got 'banded', expected none or causal or window"),
        ("points[1].batch", -1, "got -1, expected 1 or more"),
        ("points[1].batch", True, "got True, expected a whole number"),
        ("points[1].ratio", 0, "got 0, expected 1 or more"),
        ("points[0].dtype", GONE, "missing"),
        ("points[0].speed", 1, "unknown key"),
        ("points[0].window", [1], "got [1], expected two whole numbers"),
        ("points[0].varlen", 1, "got 1, expected true or false"),
        ("points[0].extras", "x", "got 'x', expected a list of names"),
        ("points[0].backends.FA2.gpu_us", "12", "got '12', expected a number of 0 or more"),
        ("points[0].backends.FA2.gpu_us", 0, "got 0, expected more"),
        ("points[0].backends.FA2.host_us", GONE, "missing"),
        ("points[0].backends.cuDNN.wrong", "", "got '', expected a text"),
    ],
)
def test_what_is_no_table_is_refused_with_file_and_key(file, key, value, message):
    path = file(key, value)
    assert refusal(load, path) == f"{path}: {key}: {message}"


def test_a_file_that_is_not_there_or_no_json_or_has_a_place_twice_is_refused(tmp_path, file):
    missing, text = tmp_path / "none.json", tmp_path / "text.json"
    assert refusal(load, missing) == f"{missing}: can't be read: No such file or directory"
    text.write_text("hello")
    assert "got no JSON" in refusal(load, text)
    rows = WHOLE.to_dict()["points"]
    path = file("points", [*rows, rows[0]])
    assert refusal(load, path) == f"{path}: points[2]: is there twice, expected each kind and size once"


# Whether it speaks of this machine


MAJOR = "another major version has other kernels"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"compute_capability": "8.0"},
            "measured with compute capability 8.0, here it is 9.0: another architecture has other kernels",
        ),
        ({"torch": "3.0.0"}, f"measured with torch 3.0.0, here it is 2.11.0+cu130: {MAJOR}"),
        ({"cudnn": "100000"}, f"measured with cuDNN 100000, here it is 91900: {MAJOR}"),
        ({"cuda": ""}, "measured with CUDA none, here it is 13.0: one of them isn't known"),
        ({"cudnn": ""}, "measured with cuDNN none, here it is 91900: one of them isn't known"),
        (
            {"attnreg": "1.2.0"},
            "measured with attnreg 1.2.0, here it is 0.1.0: another major version calls kernels differently",
        ),
        (
            {"backends": HERE.backends | {"cuDNN": "8.9"}},
            f"measured with cuDNN 8.9, here it is {CUDNN}: {MAJOR}",
        ),
    ],
)
def test_a_difference_after_which_kernels_are_others_refuses_the_whole_table(changes, reason):
    assert matched(dataclasses.replace(HERE, **changes), HERE).refused == (reason,)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"device": "NVIDIA H100"}, "measured with device NVIDIA H100, here it is NVIDIA H200"),
        (
            {"torch": "2.12.0+cu130", "backends": HERE.backends | {"FA2": "2.12.0+cu130"}},
            "measured with torch 2.12.0+cu130, here it is 2.11.0+cu130",
        ),
        ({"cuda": "12.8"}, "measured with CUDA 12.8, here it is 13.0"),
        ({"cudnn": "91700"}, "measured with cuDNN 91700, here it is 91900"),
        (
            {"backends": HERE.backends | {"cuDNN": "9.19.0 (frontend 1.30.0)"}},
            f"measured with cuDNN 9.19.0 (frontend 1.30.0), here it is {CUDNN}",
        ),
    ],
)
def test_a_related_card_and_near_versions_make_a_table_a_prior(changes, difference):
    there = dataclasses.replace(HERE, **changes)
    assert matched(there, HERE) == ((), (difference,), ())
    locked = difference.replace("measured", "locked")
    assert matched(there, HERE, "locked", whole=True).differences == (locked,)


def test_a_table_of_a_cpu_is_no_prior_on_another():
    cpu = dataclasses.replace(HERE, compute_capability="", device="one", threads="8")
    for changes in ({"device": "two"}, {"threads": "4"}, {"torch": "2.12.0"}):
        (refused,) = matched(cpu, dataclasses.replace(cpu, **changes)).refused
        assert refused.endswith(": a table of a CPU is no prior")


@pytest.mark.parametrize(
    ("changes", "notes"),
    [
        ({}, ()),
        ({"driver": "580.82.07"}, ("measured with driver 580.82.07, here it is 580.65.06",)),
        ({"attnreg": "0.2.7"}, ("measured with attnreg 0.2.7, here it is 0.1.0",)),
        ({"backends": HERE.backends | {"FA4": "4.0"}}, ("FA4 was measured and doesn't load here",)),
        ({"backends": {"FA2": "2.11.0+cu130"}}, ("cuDNN wasn't measured: it keeps its place",)),
        (  # another patch release of torch, and its own kernels with it
            {"torch": "2.11.1+cu130", "backends": HERE.backends | {"FA2": "2.11.1+cu130"}},
            ("measured with torch 2.11.1+cu130, here it is 2.11.0+cu130",),
        ),
    ],
)
def test_a_difference_that_cannot_matter_is_noted(changes, notes):
    assert matched(dataclasses.replace(HERE, **changes), HERE) == ((), (), notes)


def test_of_a_simulated_device_only_the_capability_is_compared():
    assert matched_simulated(HERE, Device.parse("sm_90")).notes == (
        "assumes that the device is NVIDIA H200, with the same versions",
    )
    assert matched_simulated(HERE, Device.parse("sm_100")).refused == (
        "measured with compute capability 9.0, here it is 10.0",
    )

"""Promises of the tables that come with attnreg: whole, of known backends, and chosen from as measured."""

from pathlib import Path

import pytest

import attnreg
from attnreg import AttentionSpec, Device
from attnreg.core import registry
from attnreg.core.times import table, tables
from attnreg.core.times.index import Kinds
from attnreg.core.times.lookup import predict
from attnreg.core.times.tables import file_name

FILES = sorted(tables.SHIPPED.glob("*.json"))
H200 = tables.SHIPPED / "nvidia-h200.json"


def test_the_folder_of_configs_shows_what_ships():
    configs = Path(__file__).parents[2] / "configs"
    assert (configs / "tuned" / H200.name).samefile(H200)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_table_is_whole_and_named_by_its_gpu(file):
    found = table.load(file)
    assert file.name == file_name(found.environment.device)
    known = {entry.name for entry in registry.entries().values()}
    assert set(found.environment.backends) <= known
    assert {name for point in found.points for name in point.backends} <= known
    assert len({point.place for point in found.points}) == len(found.points)


def call(device="sm_90", **changes):
    given = {
        "device": Device.parse(device), "dtype": "bfloat16", "batch": 8, "max_q": 2048, "max_k": 2048,
        "heads_q": 16, "heads_k": 16, "head_dim": 64, "head_dim_v": 64, "varlen": True,
    }  # fmt: skip
    return AttentionSpec(**{**given, **changes})


TINY = {"batch": 2, "max_q": 128, "max_k": 128}


def chosen(direction="forward", **changes):
    spec = call(needs_backward=direction == "backward", **changes)
    return predict(Kinds(table.load(H200).points), spec, direction, "table").candidates[0]


@pytest.mark.parametrize(
    ("direction", "changes", "backend"),
    [
        ("forward", {}, "FA4"),
        ("backward", {}, "FA4"),
        ("forward", TINY, "FA2"),
        ("backward", TINY, "FA2"),
        ("forward", {"batch": 1, "max_q": 1, "max_k": 8192, "varlen": False}, "FA2"),
    ],
    ids=["long", "its backward", "tiny", "tiny backward", "decode"],
)
def test_the_h200s_table_chooses_the_backend_that_was_fastest(direction, changes, backend):
    assert chosen(direction, **changes).backend == backend


@pytest.fixture
def as_installed(monkeypatch):
    """Have what comes with attnreg where the other tests have nothing."""
    monkeypatch.setattr(tables, "SHIPPED", H200.parent)
    attnreg.reload()


def test_explain_for_a_gpu_that_is_not_here_takes_the_table_of_its_capability_and_says_so(as_installed):
    found = attnreg.explain(call())
    assert (found.backend, found.source) == ("FA4", "measured table nvidia-h100-80gb-hbm3.json")
    assert any("assumes that the device is NVIDIA H100 80GB HBM3" in note for note in found.notes)


def test_explain_for_a_gpu_that_no_table_is_of_takes_the_default_order(as_installed):
    found = attnreg.explain(call("sm_100"))
    assert found.source.startswith("default order for")
    assert not any("table" in note for note in found.notes)

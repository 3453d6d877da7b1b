"""Fixtures of the tests of selection."""

import pytest

from attnreg import _registry
from attnreg.contract.discovery import Entry


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

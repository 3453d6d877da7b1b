"""Fixtures of the tests of selection."""

import pytest
from support.known import know

from attnreg.backends import math as math_backend


@pytest.fixture
def known(monkeypatch, fake):
    """Know five fakes and math, whatever this installation has."""
    names = ("env", "scoped", "mine", "one", "two")
    backends = [fake(name, devices=("cpu", "cuda")).backend for name in names]
    gpu = fake("gpu", devices=("cuda",), unavailable=lambda: "needs a GPU", install="make gpu").backend
    return know(monkeypatch, *backends, gpu, math_backend.BACKEND)


@pytest.fixture
def write(tmp_path):
    def write(text, name="attnreg.toml"):
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        return file

    return write

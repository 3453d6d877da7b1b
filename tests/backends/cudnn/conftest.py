"""A fake package in place of nvidia-cudnn-frontend, and the kernels that run its plans."""

import pytest
from support import fake_cudnn

from attnreg.backends import cudnn


@pytest.fixture
def module(monkeypatch):
    """Install the fake package, and return it: it lists the graphs that are built."""
    return fake_cudnn.install(monkeypatch)


@pytest.fixture
def kernels(module):
    return cudnn._load()

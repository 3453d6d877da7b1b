"""Kernels of the CPU run on one thread."""

import pytest


@pytest.fixture(autouse=True)
def on_one_thread(one_thread):
    pass

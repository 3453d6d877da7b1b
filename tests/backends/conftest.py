"""Kernels, faked or of the CPU, run on one thread unless a test asks for more."""

import pytest


@pytest.fixture(autouse=True)
def on_one_thread(one_thread):
    pass

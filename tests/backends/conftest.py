"""Kernels, faked or of the CPU, run on one thread unless a test asks for more."""

import pytest


@pytest.fixture(autouse=True)
def once_on_one_thread(references_once, one_thread):
    pass

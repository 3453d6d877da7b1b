"""Kernels of the CPU run on one thread."""

import pytest


@pytest.fixture(autouse=True)
def once_on_one_thread(references_once, one_thread):
    pass

"""Kernels, faked or of the CPU, run on one thread unless a test asks for more."""

import pytest
import torch


@pytest.fixture(autouse=True)
def once_on_one_thread(references_once, one_thread, few_lengths):
    pass


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)])
def threads(request, once_on_one_thread):
    """Run a test with one thread and, in the slow tier, with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)

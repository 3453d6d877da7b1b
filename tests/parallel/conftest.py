"""Ranks that all tests share: a process takes seconds to start."""

import pytest
from support.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """Return two processes of one group, with gloo."""
    started = Ranks(2, tmp_path_factory.mktemp("ranks") / "store")
    yield started
    started.close()


@pytest.fixture(scope="session")
def three_ranks(tmp_path_factory):
    """Return three."""
    started = Ranks(3, tmp_path_factory.mktemp("ranks") / "store")
    yield started
    started.close()

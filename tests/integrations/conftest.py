"""transformers with attnreg in it, and the count of read-backs."""

import pytest
from support import transformers_models

from attnreg.integrations import packing, transformers


@pytest.fixture(autouse=True, scope="session")
def installed():
    transformers.install()
    return transformers_models


@pytest.fixture
def read_backs(monkeypatch):
    """Return a list that grows with each read-back of a packing."""
    done, read = [], packing.read

    def counted(numbers):
        done.append(numbers.numel())
        return read(numbers)

    monkeypatch.setattr(packing, "read", counted)
    return done

"""Fixtures of the tests of measuring: a clock that only kernels move, and backends that take time on it."""

import dataclasses

import pytest
from support.tuned import CPU, Clock, slowed

from attnreg.core.registry.entry import Entry
from attnreg.core.times.table import Environment
from attnreg.tools.tuning.checks import Checks
from attnreg.tools.tuning.session import Session


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def entry(fake, clock):
    """Make an entry whose kernels take so many milliseconds on the clock of the test."""

    def make(name, milliseconds=1.0, change=None, **limits):
        backend = slowed(fake(name, **limits), clock, milliseconds / 1e3)
        if change is not None:
            kernels = backend.load()
            backend = dataclasses.replace(backend, load=lambda: change(kernels))
        return Entry(name, "a test", backend)

    return make


@pytest.fixture
def session(clock, tmp_path):
    def make(*entries, **options):
        file = tmp_path / "table.json"
        return Session(file, Environment(device="a test"), entries, CPU, Checks(CPU), clock, **options)

    return make

"""Promises of `locks.rewriting`: one at a time, by any name of the file, and nobody waits in vain."""

import os
from contextlib import contextmanager

import pytest

from attnreg.core.torchlib import locks


class Clock:
    """Stands in for `time`: a sleep takes no time, and runs something."""

    def __init__(self):
        self.now = 0.0
        self.meanwhile = lambda: None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(locks, "time", made)
    return made


@contextmanager
def kept(lock):
    """Hold a lock as another process would; gives its descriptor."""
    held = locks.lock_file(lock)
    try:
        yield held
    finally:
        locks.release(held)


def test_a_holder_that_has_not_written_who_it_is_is_another_process(tmp_path, clock):
    with (
        kept(tmp_path / ".file.lock") as held,
        pytest.raises(TimeoutError, match=r"^another process has kept .*/\.file\.lock locked for 0.05 s$"),
    ):
        os.ftruncate(held, 0)
        with locks.rewriting(tmp_path / "file", seconds=0.05):
            pytest.fail("the lock is held")


def test_waiting_for_a_lock_has_no_limit_on_how_many_hold_it_first_but_on_how_long_each_does(tmp_path, clock):
    file, lock = tmp_path / "file", tmp_path / ".file.lock"
    processes = iter(range(100, 130))

    def the_next_takes_it():
        if process := next(processes, None):
            os.pwrite(held, str(process).encode(), 0)

    clock.meanwhile = the_next_takes_it
    with (
        kept(lock) as held,
        pytest.raises(TimeoutError, match=r"process 129.* has kept .* locked for 0.05 s"),
        locks.rewriting(file, seconds=0.05),
    ):
        pytest.fail("the lock is held")
    assert next(processes, None) is None
    assert 0.3 < clock.now < 0.4
    with locks.rewriting(file):
        assert locks.holder(lock) == str(os.getpid())


def test_all_names_of_a_file_have_one_lock(tmp_path, clock):
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "folder" / "file")
    for one, other in ((link, link.resolve()), (link.resolve(), link)):
        with locks.rewriting(one):
            with pytest.raises(TimeoutError), locks.rewriting(other, seconds=0.0):
                pytest.fail("the lock is held by its other name")
            assert [each.name for each in tmp_path.iterdir() if each.name.endswith(".lock")] == []
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize("taken_by_another", [False, True])
def test_a_lock_that_its_holder_removes_while_one_waits_for_it_is_not_taken_for_the_lock(
    tmp_path, monkeypatch, clock, taken_by_another
):
    """Whoever comes third would make a file of that name anew, and lock that."""
    lock, real, others = tmp_path / ".file.lock", locks.lock_file, []

    def opened_before_and_locked_after(path, **options):
        held = real(path, **options)
        if not others:
            path.unlink()
            others.append(real(path) if taken_by_another else None)
        return held

    def end():
        if taken_by_another and others[0] is not None:
            locks.release(others[0])
            others[0] = None

    monkeypatch.setattr(locks, "lock_file", opened_before_and_locked_after)
    clock.meanwhile = end
    with locks.rewriting(tmp_path / "file"):
        assert others == [None]  # no other is inside
        assert locks.holder(lock) == str(os.getpid())
        assert real(lock) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o664, 0o666])
def test_who_may_write_the_file_may_wait_for_its_lock(tmp_path, mode):
    file, lock = tmp_path / "file", tmp_path / ".file.lock"
    file.touch()
    file.chmod(mode)
    before = os.umask(0o077)
    try:
        with locks.rewriting(file):
            assert lock.stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


def test_the_lock_of_a_file_that_is_not_there_is_for_those_whom_the_umask_lets_write(tmp_path):
    before = os.umask(0o002)
    try:
        with locks.rewriting(tmp_path / "file"):
            assert (tmp_path / ".file.lock").stat().st_mode & 0o777 == 0o664
        with kept(tmp_path / "lock"):
            assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)

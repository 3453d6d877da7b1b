"""Promises of what is kept of offsets."""

import pytest
import torch
from support.processes import forked
from torch.multiprocessing.reductions import StorageWeakRef

from attnreg import InvalidInputError
from attnreg.core.launching import offsets


class Last:
    """The last offset."""

    def __init__(self, given):
        self.value = given[-1].clone()

    def differs(self, newer):
        return self.value != newer.value


def last(given):
    return int(offsets.derived_from((given,), 0, ("last",), Last).value)


def test_memory_that_something_was_derived_from_is_not_reused_while_that_is_kept():
    """Other values at the same address would pass for those before, as `x.data = y` leaves the version."""
    given = torch.tensor([0, 3, 7], dtype=torch.int32)
    memory = StorageWeakRef(given.untyped_storage())
    assert last(given) == 7
    given.data = torch.tensor([0, 3, 8], dtype=torch.int32)
    assert not memory.expired()
    assert last(given) == 8
    del given
    assert memory.expired()


def test_a_write_that_torch_does_not_count_is_an_error_after_a_while(trust_offsets):
    given = torch.tensor([0, 3, 7], dtype=torch.int32)
    assert last(given) == 7
    given.numpy()[2] = 8
    assert [last(given) for _ in range(3)] == [7] * 3
    trust_offsets(0.0)
    assert last(given) == 7  # the comparison has begun
    with pytest.raises(InvalidInputError, match=r"torch\.autograd\.graph\.increment_version\(offsets\)"):
        last(given)
    assert [last(given) for _ in range(3)] == [8] * 3


def test_what_the_call_cache_finds_has_all_forgotten_that_is_known_here():
    given = torch.tensor([0, 3, 7], dtype=torch.int32)
    assert last(given) == 7
    given.numpy()[2] = 8
    with pytest.raises(InvalidInputError, match="written to"):
        offsets.raise_changed()
    assert last(given) == 8


def test_a_write_that_is_reported_is_seen_at_once(trust_offsets):
    trust_offsets(0.0)
    given = torch.tensor([0, 3, 7], dtype=torch.int32)
    assert last(given) == 7
    given.numpy()[2] = 8
    torch.autograd.graph.increment_version(given)
    assert [last(given) for _ in range(3)] == [8] * 3


def test_properties_that_come_to_hold_are_no_error_and_those_that_no_longer_do_are(monkeypatch):
    # Without a GPU torch pins no memory for the read-back.
    monkeypatch.setattr(offsets, "AsyncReadback", lambda launch: launch(torch.zeros(2, dtype=torch.uint8)))
    full, empty_row = (
        offsets.Facts(lambda place, held=held: torch.tensor(held)) for held in ([True, True], [True, False])
    )
    assert (bool(full.differs(empty_row)), bool(empty_row.differs(full))) == (True, False)
    one, other = (offsets.Unused(torch.tensor(rows), None) for rows in ([False, True], [True, False]))
    assert (bool(one.differs(other)), bool(one.differs(one))) == (True, False)


def test_a_tensor_that_is_collected_while_room_is_made_disturbs_nothing(monkeypatch):
    class Collecting(dict):
        """Loses an entry the first time that somebody iterates over it."""

        collected = False

        def __iter__(self):
            for source in super().__iter__():
                if not self.collected:
                    self.collected = True
                    self.popitem()
                yield source

    cache = Collecting()
    monkeypatch.setattr(offsets, "_cache", cache)
    given = [torch.tensor([0, n], dtype=torch.int32) for n in range(offsets._MOST_CACHED + 2)]
    assert [last(one) for one in given] == list(range(len(given)))
    assert cache.collected
    assert len(cache) == offsets._MOST_CACHED
    assert last(given[-1]) == len(given) - 1


AT_EXIT = """
import torch
from attnreg.core.launching import offsets
from attnreg.core.torchlib import readback
from attnreg.core.contract.backend import Call

offsets.TRUSTED = 0.0
given = torch.tensor([0, 3, 7], dtype=torch.int32)
rows = torch.zeros(9, 1, 8)
unused = offsets.find_unused(rows, rows, Call(1.0, 4, 4, (-1, -1), given, given)).queries
assert unused.tolist() == [False] * 7 + [True] * 2
{write}
offsets.find_unused(rows, rows, Call(1.0, 4, 4, (-1, -1), given, given))
"""


@pytest.mark.parametrize(("write", "errors"), [("given.numpy()[2] = 8", 1), ("given[2] = 8", 0)])
def test_what_no_call_has_found_is_logged_at_the_end_of_the_process(write, errors):
    done = forked(AT_EXIT.format(write=write))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("written to in a way that torch doesn't count") == errors

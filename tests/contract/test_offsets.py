"""Promises of what is kept of offsets."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from attnreg.contract import offsets


def test_memory_that_something_was_derived_from_is_not_reused_while_that_is_kept():
    """Other values at the same address would pass for those before, as `x.data = y` leaves the version."""
    given = torch.tensor([0, 3, 7], dtype=torch.int32)
    memory = StorageWeakRef(given.untyped_storage())
    assert offsets.derived_from([given], 0, ("last",), given[-1].item) == 7
    given.data = torch.tensor([0, 3, 8], dtype=torch.int32)
    assert not memory.expired()
    assert offsets.derived_from([given], 0, ("last",), given[-1].item) == 8
    del given
    assert memory.expired()

"""How many plans in Python a call takes, whichever front it comes by."""

import functools

from attnreg.core.aten import routing
from attnreg.core.varlen import plans


def counting(monkeypatch):
    """Return a function that runs another and returns how many plans in Python it took, in all threads."""
    made = []

    def count(original, run):
        made.append(run)
        return original(run)

    for module in (routing, plans):
        monkeypatch.setattr(module, "retry_on_decline", functools.partial(count, module.retry_on_decline))

    def planned(call):
        made.clear()
        call()
        times = len(made)
        made.clear()
        return times

    return planned

"""How the ranks of a job come to one result of the turns that backends take at a kind of call.

The first rank that makes a call of a kind claims it and measures; the others take over what it finds. The
store of the process group has one result for all of them, the first: a rank that has waited too long makes it
`NOTHING`.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
import weakref
from collections.abc import Callable
from typing import Any

from attnreg.core.times.points import Point
from attnreg.core.torchlib import job_store

log = logging.getLogger("attnreg")

NOTHING = "nothing"

# How long one question to the store may take.
STORE_S = 5.0

_failed: weakref.ref[Any] | None = None


def claim(name: str) -> bool:
    """Return whether this rank is to measure; raises RuntimeError."""
    mine = uuid.uuid4().hex
    return _ask(lambda store: store.compare_set(_key(name), "", mine).decode()) == mine


def settled(name: str, text: str) -> str:
    """Make a result known unless there is one; return the one that all ranks take. Raises RuntimeError."""
    return _ask(lambda store: store.compare_set(f"{_key(name)}/point", "", text).decode())


def published(name: str) -> str:
    """Return the result that all ranks take; empty if there is none yet. Raises RuntimeError."""
    key = f"{_key(name)}/point"
    return _ask(lambda store: store.get(key).decode() if store.check([key]) else "")


def read(text: str) -> Point | None:
    """Return a result; None for `NOTHING`, and for what another attnreg has left."""
    try:
        return Point.from_dict(json.loads(text), "the result of another rank")
    except ValueError:
        return None


def _ask(question: Callable[[Any], str]) -> str:
    """Return what the store has. Raises RuntimeError; a store that has failed isn't used any more."""
    global _failed
    store, found = job_store.default(), [""]
    if store is None or (_failed is not None and _failed() is store):
        raise RuntimeError("there is no store to ask")
    try:
        job_store.within(STORE_S, lambda: found.append(question(store)))
    except RuntimeError as error:
        _failed = weakref.ref(store)
        log.info('ranks can\'t tell each other what policy = "adaptive" has seen: %s', error)
        raise
    return found[-1]


def _key(name: str) -> str:
    # The store of torchrun's agent outlives workers: one that measured may be gone.
    return f"attnreg/adaptive/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}/{name}"

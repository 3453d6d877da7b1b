"""A common result, for all ranks of a job, of the turns that backends take at a kind of call.

The first rank with a call of a kind claims it and measures; the other ranks adopt its result. The store of
the process group keeps the first result. A rank that has waited too long writes `NOTHING` as the result.
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

# The longest wait for the store, in seconds.
STORE_S = 5.0

_failed: weakref.ref[Any] | None = None


def claim(name: str) -> bool:
    """Return whether this rank measures; raises RuntimeError if the store fails."""
    mine = uuid.uuid4().hex
    return _ask(lambda store: store.compare_set(_key(name), "", mine).decode()) == mine


def settled(name: str, text: str) -> str:
    """Write a result unless the store has one; return the store's. Raises RuntimeError if the store fails."""
    return _ask(lambda store: store.compare_set(f"{_key(name)}/point", "", text).decode())


def published(name: str) -> str:
    """Return the result of all ranks; empty if there is none yet. Raises RuntimeError if the store fails."""
    key = f"{_key(name)}/point"
    return _ask(lambda store: store.get(key).decode() if store.check([key]) else "")


def read(text: str) -> Point | None:
    """Return a result; None for `NOTHING`, and for text that another version of attnreg has written."""
    try:
        return Point.from_dict(json.loads(text), "the result of another rank")
    except (ValueError, RecursionError):
        return None


def _ask(question: Callable[[Any], str]) -> str:
    """Return the store's answer. Raises RuntimeError; a store that has failed isn't used again."""
    global _failed
    store, answers = job_store.default(), [""]
    if store is None or (_failed is not None and _failed() is store):
        raise RuntimeError("there is no store to ask")
    try:
        job_store.within(STORE_S, lambda: answers.append(question(store)))
    except RuntimeError as error:
        _failed = weakref.ref(store)
        log.info('ranks can\'t tell each other what policy = "adaptive" has seen: %s', error)
        raise
    return answers[-1]


def _key(name: str) -> str:
    # With the restart count, because the store of torchrun's agent outlives workers: the measuring worker may
    # have ended.
    return f"attnreg/adaptive/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}/{name}"

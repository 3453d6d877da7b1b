"""From a spec and what was asked for to a decision; pure, so that `explain` needs no GPU.

Here also: settings in one order of precedence, lock files, agreement between ranks, and the one renderer of
reasons. May import: everything below `dispatch`. Read `decision.py` first.
"""

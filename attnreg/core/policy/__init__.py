"""All requests as one `Policy`: the environment, settings files, the program, lockfiles.

`sources` reads and checks settings, and `current` keeps the settings in force. `lockfile` has earlier
decisions about kinds of calls, `ranges` the lengths of these decisions. `ranks` checks that the ranks of a
job choose alike. May import: `registry`, `times` and all below them. Read `current.py` first.
"""

"""Choosing a backend: a spec, the backends and a policy give a decision, without a tensor or a GPU.

Here also: all settings as one policy (`sources`, `policy`), lockfiles (`lockfile`), the check
that ranks choose alike (`ranks`), the one renderer of reasons (`render`), and the policy "adaptive", which
times the program's own calls (`turns`, `adaptive`, `job_results`). May import: `registry`, `tuning` and all
below them, but no backend. Read `decision.py` first.
"""

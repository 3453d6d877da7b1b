"""Choosing a backend: a spec, the backends and a policy give a decision, without a tensor, torch or a GPU.

`decision` chooses, `predictions` orders backends by measured times, `render` is the one renderer of reasons.
`protocols` says what decisions need of tables, of lockfiles and of the policy "adaptive": rooms above have
their classes. May import: errors, settings, contract. Read `decision.py` first.
"""

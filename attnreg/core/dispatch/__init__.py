"""From tensors to a kernel: spec, plan, call; and what really ran.

Both fronts, `aten` and `varlen`, come here. `calls` looks a plan up, `planning` makes one, `state` keeps
them; `kinds` says what of a call's lengths plans depend on, `declined` has calls decided once more. `scope`
has the choices for some calls only, `counters` and `trace` what ran. `call_cache` is the Python side of the
compiled call cache in `csrc/`. May import: `policy` and all below it, but no backend. Read `calls.py` first,
then `call_cache.py`.
"""

"""From tensors to a kernel: spec, plan, call; and what really ran.

Both fronts, `aten` and `varlen`, come here. May import: everything below `aten`. Read `calls.py` first.
"""

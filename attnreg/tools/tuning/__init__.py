"""How `attnreg tune` measures a table: `workload`, `checks`, `measure` and `session`, in this order.

`representatives` has a small call for each kind, to be run ahead. What a table is, and what it predicts, is
in `core/times/`. May import: `core/` and `measure`.
"""

"""What a call is, and what a kernel promises, as data.

`backend` has `Call`, `Backend` and `Kernels`, `capabilities` what a backend can run, `spec` a call without
tensors, `options` the options of calls, `lengths` the classes of lengths. May import: errors. Read
`backend.py` first.
"""

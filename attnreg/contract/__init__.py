"""What a call is, and what a kernel promises.

Here: the spec of a call, capabilities as data, `Backend`, `Call`, `Kernels`, the checks of arguments and of a
kernel's results, known issues. May import: errors, settings, torchlib. Read `backend.py` first.
"""

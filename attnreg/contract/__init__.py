"""What a call is, and what a kernel promises.

Here: `Call`, `Backend` and `Kernels` (`backend`), launchers, the spec of a call, capabilities as data, the
checks of arguments (`validation`) and of a kernel's results (`results`), what is known of packed offsets,
known issues, and how backends are found (`discovery`). May import: errors, settings, torchlib. Read
`backend.py` first.
"""

"""What a call is, and what a kernel promises.

Here: `Call`, `Backend` and `Kernels` (`backend`), launchers, the spec of a call, capabilities as data, the
checks of arguments and of a kernel's results (`validation`), what is known of packed offsets, rows that see
no key (`rows`), known issues, and how backends are found (`discovery`). May import: errors, settings,
torchlib. Read `backend.py` first.
"""

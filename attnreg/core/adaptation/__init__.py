"""What makes a kernel run calls that it doesn't take as they come: a list, each item applied by its own rule.

`chain` has the list. `padded_dims` pads head dims, `lse_columns` passes the gradient of the LSE in columns.
`sinks.py` rescales results; whether a kernel counts these options itself depends on a call's offsets, so that
`varlen/sinks.py` decides it in each call. May import: errors, settings, torchlib, contract. Read `chain.py`
first.
"""

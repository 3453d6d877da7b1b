"""What a launch needs besides its kernel: launchers, checks of tensors, and what is known of offsets.

`launchers` has what the call cache runs, `validation` the checks of arguments and results, `memory` those of
freed storage. `offsets` and `rows` know which rows of a packed batch see no key, and clear them. `visible`
says which keys each query sees, with a table of blocks to skip. `regular` finds batches of equal lengths.
`elementwise` evaluates functions of single scores, `lifted` makes text of them. May import: errors, settings,
torchlib, contract. Read `launchers.py` first.
"""

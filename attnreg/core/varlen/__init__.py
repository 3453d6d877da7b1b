"""Front 2: `varlen_attn`, attention over packed sequences without padding, on any device.

Here: the function itself (`front`), what its arguments mean and how its plans are looked up (`plans`), the
custom op that torch.compile sees (`custom_op`), and which calls go to ranks (`spread`). `merging` merges the
results of calls that saw parts of the keys. Its part of the call cache is `dispatch/csrc/varlen.h`.
May import: `dispatch` and all below it. Read `front.py` first.
"""

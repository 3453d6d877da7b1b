"""Front 2: `varlen_attn`, attention over packed sequences without padding, on any device.

Here: the function itself, its custom op for torch.compile, and what its arguments mean. May import:
everything below. Read `front.py` first.
"""

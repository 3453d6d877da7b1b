"""What a call passes: from torch's op, or `varlen_attn`, to the kernel that runs it.

No module here imports another wing. `docs/architecture.md` lists the rooms and two walks through them.
"""

"""Attention over packed sequences whose tokens are spread over the ranks of a process group.

Here: which rank has which tokens (`layout`, `balance`), which keys each rank needs and the calls that follow
from it (`spans`, `steps`), three ways to move tokens (`stepwise`, `by_heads`), the choice between them
(`ways`), the check that ranks agree (`agreement`), and the front (`context`).
May import: `varlen` and all below it. Read `layout.py` first, then `steps.py`.
"""

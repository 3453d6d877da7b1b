"""Attention over packed sequences whose tokens are spread over the ranks of a process group.

Here: which rank has which tokens (`layout`, `balance`), which keys each rank needs (`spans`, `needs`), the
steps and calls that follow from it (`steps`, `parts`), three methods to move tokens (`stepwise`, `by_heads`,
by `exchange`; with `results`), the choice between them (`methods`, `estimates`, `machine`), the check that
ranks agree (`calls`, `agreement`), what a rank has of a batch (`batch`), the calls spread by it (`context`),
the front (`front`).
docs/context-parallel.md says what users have to know.
May import: `varlen` and all below it. Read `layout.py` first, then `steps.py`.
"""

"""Attention over packed sequences whose tokens are spread over the ranks of a process group.

Here, module by module:
- `layout`, `balance`: which rank has which tokens.
- `spans`, `needs`: which keys each rank needs.
- `steps`, `parts`: the steps and packed calls that follow from these.
- `stepwise`, `by_heads`: three methods to move tokens, by `exchange`. `results` merges partial results.
- `methods`, `estimates`, `machine`: the choice of a method.
- `calls`, `agreement`: the check that ranks agree.
- `batch`, `context`, `front`: a rank's share of a batch, the calls spread over ranks, the public function.

docs/context-parallel.md is the page for users.
May import: `varlen` and all below it. Read `layout.py` first, then `steps.py`.
"""

"""What `attnreg bench` measures: backends compared with each other and with torch, and what choosing costs.

Each subcommand (`fresh`, `varlen`, `sdpa`, `overhead`, `selection`) has a module or package. They share:

- `sides`: the sides of a comparison. A *side* is a function, its inputs, and the context that decides which
  kernel runs.
- `compare`: draws inputs, checks sides by the accuracy rule, and times them in turn. Rule and timers come
  from `attnreg.tools.measure`.

May import: all but `demo` and `cli`. Only `cli` and `benchmarks/` import this room. Read `sides` first.
"""

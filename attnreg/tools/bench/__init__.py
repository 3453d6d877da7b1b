"""What `attnreg bench` measures: backends compared with each other and with torch, and what choosing costs.

A module or package for each subcommand (`fresh`, `varlen`, `sdpa`, `overhead`, `selection`) and what they
share: a *side* of a comparison (`sides`) is a function, its inputs and what decides which kernel runs;
`compare` draws inputs, checks sides by the accuracy rule and times them in turn, with the rule and the timers
of `attnreg.tools.measure`.
It may import all but `demo` and `cli`; only `cli` and `benchmarks/` import it. Read `sides` first.
"""

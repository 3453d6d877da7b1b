"""Whether kernels are right and how long they take: for `verify`, `tune`, `bench` and the tests.

Each of these exists once in attnreg:

- `cases`: a description of a call, and the input matrix; `inputs`: the tensors of a case.
- `reference`: attention in float64; `rule`: the accuracy rule.
- `sample`: the rule for calls too large to compute in float64.
- `promises`, `invariance`: the rest of the contract; `timing`: the timers.

No module here knows a backend. May import: the contract. Read `rule` first.
"""

from attnreg.tools.measure.cases import CASES, QUICK, Case
from attnreg.tools.measure.inputs import Inputs, copies, copies_beyond_the_cache, inputs
from attnreg.tools.measure.rule import Error, measure, measure_taken
from attnreg.tools.measure.sample import Sample

__all__ = [
    "CASES", "QUICK", "Case", "Error", "Inputs", "Sample", "copies", "copies_beyond_the_cache",
    "inputs", "measure", "measure_taken",
]  # fmt: skip

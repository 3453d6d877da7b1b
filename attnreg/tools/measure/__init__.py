"""Whether kernels are right and how long they take: for `verify`, `tune`, `bench` and the tests.

Each exists once: a description of a call and the input matrix (`cases`), its tensors (`inputs`), attention
in float64 (`reference`), the accuracy rule (`rule`, and `sample` for calls too large to compute), the rest of
the contract (`promises`, `invariance`), the timers (`timing`). Nothing here knows a backend; it may import
the contract. Read `rule` first.
"""

from attnreg.tools.measure.cases import CASES, QUICK, Case
from attnreg.tools.measure.inputs import Inputs, copies, copies_beyond_the_cache, inputs
from attnreg.tools.measure.rule import Error, measure, measure_taken
from attnreg.tools.measure.sample import Sample

__all__ = [
    "CASES", "QUICK", "Case", "Error", "Inputs", "Sample", "copies", "copies_beyond_the_cache",
    "inputs", "measure", "measure_taken",
]  # fmt: skip

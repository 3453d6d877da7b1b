"""Whether kernels are right: the input matrix and the accuracy rule, for tests and the command line.

A kernel passes if its largest error against attention in float64 is at most twice that of plain
PyTorch operations in the inputs' own dtype, plus the rounding of the result itself. Nothing here
knows a backend; a new one is held to the same matrix by `verify`.
"""

from attnreg.measure.cases import Case
from attnreg.measure.inputs import Inputs, inputs
from attnreg.measure.matrix import CASES, QUICK
from attnreg.measure.rule import Error, Outcome, measure, measure_taken, verify

__all__ = [
    "CASES",
    "QUICK",
    "Case",
    "Error",
    "Inputs",
    "Outcome",
    "inputs",
    "measure",
    "measure_taken",
    "verify",
]

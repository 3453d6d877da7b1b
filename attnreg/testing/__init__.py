"""Checks whether a backend keeps the contract: for authors of kernels, `attnreg verify` and attnreg's tests.

    from attnreg.testing import check_backend

    def test_my_backend():
        check_backend(BACKEND)

`pytest -p attnreg.testing.plugin --attnreg-backend=mine` makes each check a test of its own, and `attnreg
verify --backend mine` prints a table. `kit.py` has what all three run; `cases.py` makes the calls that fit
what a backend declares, and `fronts.py` calls it through each front. May import all but bench, demo and cli.
"""

from attnreg.testing.cases import Check, inputs
from attnreg.testing.kit import Conformance, Outcome, Report, check_backend
from attnreg.tools.measure import Case, Inputs

__all__ = ["Case", "Check", "Conformance", "Inputs", "Outcome", "Report", "check_backend", "inputs"]

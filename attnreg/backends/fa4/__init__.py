"""FA4: FlashAttention 4, the CuTe kernels of the package flash-attn-4 for Hopper and Blackwell.

This file declares the backend. Read `adapter` first: it maps the contract's calls to the package's.
`limits` has what is refused, `package` the import and the releases, `replay` how a repeated call leaves the
package's Python out. The reasons are in README.md. The package is imported when the backend loads.
"""

from __future__ import annotations

from attnreg.backends.fa4.adapter import load
from attnreg.backends.fa4.limits import BACKWARD, FORWARD, refuses
from attnreg.backends.fa4.package import installed, unavailable
from attnreg.contract.backend import Backend

BACKEND = Backend(
    name="FA4",
    forward=FORWARD,
    backward=BACKWARD,
    load=load,
    unavailable=unavailable,
    version=installed,
    refuses=refuses,
    install="pip install 'attnreg[fa4]'",
    # The fastest of packed batches on an H200, forward and backward (docs/benchmarks.md).
    priority=30,
)

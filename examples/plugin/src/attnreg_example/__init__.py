"""A backend of attnreg as a package: what its kernels can run, as data. They are in `kernels.py`."""

from importlib.metadata import version

import attnreg

NAME = "example"

# Declare only what the kernels compute: a call with anything else goes to another backend.
CAN = attnreg.Capabilities(
    devices=("cpu", "cuda"),
    dtypes=("float16", "bfloat16", "float32", "float64"),
    gqa=True,
    causal=True,
)


def load() -> attnreg.Kernels:
    """Import the kernels, when a call first needs them."""
    from attnreg_example import kernels

    return attnreg.Kernels(kernels.forward, kernels.backward)


BACKEND = attnreg.Backend(
    name=NAME,
    forward=CAN,
    backward=CAN,
    load=load,
    version=lambda: version("attnreg-example"),
)

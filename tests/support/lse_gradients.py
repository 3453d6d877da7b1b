"""Calls whose LSE has a gradient of some size, and the errors of the gradients by the accuracy rule."""

import torch

from attnreg.tools.measure import inputs
from attnreg.tools.measure.reference import attention
from attnreg.tools.measure.rule import compare


def drawn(case, of_lse=1.0, of_out=1.0, device="cpu", seed=0):
    """Return the inputs of a case, the gradients of LSE and output by these factors larger."""
    given = inputs(case, device, seed)
    call = given.call._replace(grad_lse=given.call.grad_lse * of_lse)
    return given._replace(grad_out=given.grad_out * of_out, call=call)


def beyond_the_rule(case, given, grads):
    """Return the error of each of these gradients of query, key and value that isn't right."""
    truth, plain = (attention(case, given, dtype) for dtype in (torch.float64, given.q.dtype))
    found = {}
    for name, got in zip(("dq", "dk", "dv"), grads, strict=True):
        error = compare((got,), getattr(plain, name), getattr(truth, name), given.q.dtype)
        if not error.passed:
            found[name] = str(error)
    return found

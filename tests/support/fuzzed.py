"""What the results of a random call have to be: also with sinks that the kernels needn't count."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.tools.measure.cases import Case
from attnreg.tools.measure.inputs import Inputs
from attnreg.tools.measure.reference import attention, with_sinks
from attnreg.tools.measure.rule import SOFTCAP_FACTOR, Error, compare


class Given(NamedTuple):
    """The tensors of a call; of the last two those that it has."""

    inputs: Inputs
    sinks: Tensor | None = None
    bias: Tensor | None = None

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What has a gradient."""
        tensors = self.inputs.q, self.inputs.k, self.inputs.v, self.sinks, self.bias
        return tuple(x for x in tensors if x is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of their gradients."""
        return "dq", "dk", "dv", *["dsinks"] * (self.sinks is not None), *["dbias"] * (self.bias is not None)


def measure(case: Case, given: Given, results: dict[str, Tensor], largest: dict[str, Error]) -> None:
    """Measure the errors of a call, and keep the largest of the kernel's and of plain PyTorch's."""
    dtype = given.inputs.q.dtype
    truth, plain = (expected(case, given, one) for one in (torch.float64, dtype))
    for name, got in results.items():
        error = compare((got,), plain[name], truth[name], dtype)
        if not error.passed and given.sinks is None and not case.softcap:
            read = with_the_output(results["out"], case, given.inputs, truth)
            shifted = compare((got,), plain[name], read[name], dtype)
            error = error._replace(kernel=shifted.kernel)  # plain PyTorch's stays that from the truth
        if case.softcap:
            error = error._replace(factor=SOFTCAP_FACTOR)
        largest[name] = Error(*map(max, error, largest.get(name, error)))


def expected(case: Case, given: Given, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the results of a call by name, computed in one dtype throughout."""
    call, grad_out = given.inputs.call, given.inputs.grad_out
    if given.sinks is None:
        wanted = {} if given.bias is None else {"attn_bias": given.bias, "bias_gradient": True}
        return attention(case, given.inputs._replace(call=call._replace(**wanted)), dtype)._asdict()
    plain = attention(case, given.inputs, dtype)
    unseen = plain.lse == -torch.inf
    leaves = plain.out, plain.lse, given.sinks.detach().to(dtype)
    out, lse, sinks = (x.requires_grad_() for x in leaves)
    shared, both = with_sinks(out, lse, sinks)
    # Rows that see no key have no gradient; that of rows past the last sequence may be NaN.
    incoming = [grad_out.to(dtype).masked_fill(unseen.mT[..., None], 0.0), torch.zeros_like(both)]
    if call.grad_lse is not None:
        incoming[1] = call.grad_lse.to(dtype).masked_fill(unseen, 0.0)
    grad_out, grad_lse, dsinks = torch.autograd.grad((shared, both), (out, lse, sinks), incoming)
    inside = given.inputs._replace(grad_out=grad_out, call=call._replace(grad_lse=grad_lse))
    through = attention(case, inside, dtype)._asdict()
    return through | {"out": shared.detach(), "lse": both.detach(), "dsinks": dsinks}


def with_the_output(out: Tensor, case: Case, given: Inputs, truth: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the results with the gradients that an exact flash backward has with this output.

    It computes dS = P * (dP - delta), with delta the sum of dout * out, where plain PyTorch takes that of
    dP * P (https://arxiv.org/abs/2205.14135, algorithm 4). The output is rounded, and with few keys that can
    be the largest of all errors. It changes dq by the mean of the keys and dk by the sum of P * q: attention
    and its gradient give both where the keys stand for the values.
    """
    change = -given.call.scale * ((out.double() - truth["out"]) * given.grad_out.double()).sum(
        -1, keepdim=True
    )
    grad_out = (change * given.q.double()).nan_to_num()
    of_keys = replace(case, dims=(case.dims[0], case.dims[0]))
    keys = attention(of_keys, given._replace(v=given.k, grad_out=grad_out), torch.float64)
    return truth | {"dq": truth["dq"] + (change * keys.out).nan_to_num(), "dk": truth["dk"] + keys.dv}

"""Promises about `varlen_attn` in `torch.func.functionalize`: below, above and beside other transforms."""

import pytest
import torch
from support import truth
from support.packed_calls import LSE, integers, offsets
from torch.func import functionalize, grad, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import attnreg

OFFSETS, LONGEST = offsets(5, 1, 8), 8
SLOPES, SINKS = torch.tensor([0.5, 0.1]), torch.tensor([0.3, -0.4])


def attend(x, offsets=OFFSETS, **options):
    return attnreg.varlen_attn(x, x, x, offsets, offsets, LONGEST, LONGEST, is_causal=True, **options)


def total(x, offsets=OFFSETS):
    return attend(x, offsets).square().sum()


def exact(x):
    """Return the output of `attend`, and the gradient of `total`."""
    x = x.double().requires_grad_()
    out = truth.varlen(x, x, x, OFFSETS, OFFSETS, window=(-1, 0))[0]
    return out.detach(), torch.autograd.grad(out.square().sum(), x)[0]


def by_autograd_outside(x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(functionalize(total)(x), x)[0]


WAYS = {
    "functionalize": (0, 1, functionalize(attend)),
    "without views": (0, 1, functionalize(attend, remove="mutations_and_views")),
    "with writes before": (0, 1, functionalize(lambda x: attend((x.clone().mul_(2) / 2)[:]))),
    "autograd outside": (1, 1, by_autograd_outside),
    "grad inside": (1, 1, functionalize(grad(total))),
    "grad outside": (1, 1, grad(functionalize(total))),
    "grad on both sides": (1, 1, functionalize(grad(functionalize(total)))),
    "vjp inside": (1, 1, functionalize(lambda x: vjp(total, x)[1](torch.ones(()))[0])),
    "vmap inside": (0, 2, lambda x: functionalize(vmap(attend))(torch.stack([x, x]))[1]),
    "vmap outside": (0, 2, lambda x: vmap(functionalize(attend))(torch.stack([x, x]))[1]),
    "vmap of grad": (1, 2, lambda x: functionalize(vmap(grad(total)))(torch.stack([x, x]))[1]),
    "grad of vmap": (
        1, 1, functionalize(grad(lambda x: vmap(total, in_dims=1)(torch.stack([x], 1)).sum()))
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_functionalized_call_is_right_and_runs_on_the_chosen_backend(way, ran):
    x = torch.randn(14, 2, 16)
    is_gradient, calls, function = WAYS[way]
    expected = exact(x)[is_gradient]
    ran()
    with attnreg.use_backend("math"):
        truth.assert_near(function(x), expected)
    assert ran() == {"math": (calls, calls * is_gradient)}


@pytest.mark.parametrize(
    "options", [{"sinks": SINKS}, {"alibi_slopes": SLOPES}, {"softcap": 5.0}, {"return_aux": LSE}], ids=str
)
def test_a_functionalized_call_has_the_options_of_others(options):
    def loss(x):
        results = attend(x, **options)
        return sum(one.square().sum() for one in (results if isinstance(results, tuple) else (results,)))

    x = torch.randn(14, 2, 16)
    given = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(given), given)
    torch.testing.assert_close(functionalize(grad(loss))(x), expected)


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_a_graph_of_a_functionalized_gradient_has_both_ops_and_is_right_for_other_inputs(mode):
    gradient = functionalize(grad(lambda x, offsets: total(x, offsets)))
    graph = make_fx(gradient, tracing_mode=mode)(torch.randn(14, 2, 16), OFFSETS)
    names = [str(node.target) for node in graph.graph.nodes if "attnreg" in str(node.target)]
    assert names == ["attnreg._varlen_attn.default", "attnreg._varlen_attn_backward.default"]
    x = torch.randn(14, 2, 16)
    other = integers(0, 7, 14)
    torch.testing.assert_close(graph(x, other), grad(total)(x, other))


def test_functions_of_others_stay_as_torch_has_them():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

    with pytest.raises(RuntimeError, match="NYI: Functionalize rule for custom_function_call"):
        functionalize(Doubled.apply)(torch.ones(2))

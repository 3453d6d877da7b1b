"""Promises of SDPA in recorders and function transforms: masks recognised, strict on, a backend asked for.

Of a mask nothing is read while a program is recorded: the recording is right for other masks and lengths.
"""

import io

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, jvp, stack_module_state, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import attnreg

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning"),  # torch's own, from 2.15 on
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # torch has no batching rule
]


class Model(torch.nn.Module):
    """Self-attention with two heads of 8: x is (B, S, 16), the mask bool (S, S) or None."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.project = torch.nn.Linear(16, 48)
        self.double()

    def forward(self, x, mask):
        batch, length = x.shape[0], x.shape[1]
        query, key, value = self.project(x).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


def expected_of(model, x, mask):
    query, key, value = model.project(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
    scores = (query @ key.mT / 8**0.5).masked_fill(mask.logical_not(), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def packed(*lengths):
    return torch.block_diag(*[causal(length) for length in lengths]).bool()


def tokens(length, rows=2):
    return torch.randn(rows, length, 16, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _everything_on(recognise):
    attnreg.configure({"masks": "recognise", "strict": True})
    with attnreg.use_backend("math"):
        yield


def scripted(model, x, mask):
    saved = io.BytesIO()
    torch.jit.save(torch.jit.script(model), saved)
    saved.seek(0)
    return torch.jit.load(saved)


def graph(mode):
    def record(model, x, mask):
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        run = make_fx(lambda w, *inputs: functional_call(model, w, inputs), tracing_mode=mode)
        recorded = run(weights, x, mask)
        return lambda *inputs: recorded(weights, *inputs)

    return record


# What records a model, and whether the recording takes other lengths.
RECORDERS = {
    "torch.jit.script": (scripted, True),
    "torch.jit.trace": (lambda model, *given: torch.jit.trace(model, given, check_trace=False), True),
    "fx.symbolic_trace": (lambda model, *given: torch.fx.symbolic_trace(model), True),
    "fx.Tracer": (lambda model, *given: torch.fx.GraphModule(model, torch.fx.Tracer().trace(model)), True),
    "make_fx": (graph("real"), False),
    "make_fx, fake": (graph("fake"), False),
    "make_fx, symbolic": (graph("symbolic"), True),
}


@pytest.mark.parametrize(("record", "takes_other_lengths"), RECORDERS.values(), ids=RECORDERS)
def test_a_recorded_model_is_right_for_other_masks(record, takes_other_lengths):
    model = Model().requires_grad_(False)
    run = record(model, tokens(9), causal(9))
    masks = [causal(9), packed(4, 5)] + ([packed(2, 9), causal(5)] if takes_other_lengths else [])
    for mask in masks:
        x = tokens(len(mask))
        torch.testing.assert_close(run(x, mask), expected_of(model, x, mask))


def loss_of(model, weights, x, mask):
    return functional_call(model, weights, (x, mask)).square().sum()


def gradients(model, x, mask):
    """Return the gradients by the weights of the same loss as `loss_of`, without attnreg."""
    return dict(
        zip(
            dict(model.named_parameters()),
            torch.autograd.grad(expected_of(model, x, mask).square().sum(), list(model.parameters())),
            strict=True,
        )
    )


def assert_ran_on_math():
    assert {name for name, calls in attnreg.stats().calls.items() if calls["forward"]} == {"math"}


@pytest.mark.parametrize("each_with_its_mask", [True, False])
def test_gradients_by_sample_are_right(each_with_its_mask):
    model, x, masks = Model(), tokens(9, rows=3), torch.stack([causal(9), packed(4, 5), packed(2, 7)])
    masks = masks if each_with_its_mask else masks[:1].expand_as(masks)
    dims = 0 if each_with_its_mask else None
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    one = grad(lambda weights, row, mask: loss_of(model, weights, row[None], mask))
    attnreg.reset_stats()
    got = vmap(one, in_dims=(None, 0, dims))(weights, x, masks if each_with_its_mask else masks[0])
    assert_ran_on_math()
    for row, mask in enumerate(masks):
        for name, expected in gradients(model, x[row : row + 1], mask).items():
            torch.testing.assert_close(got[name][row], expected)


def test_an_ensemble_is_right():
    models, x, mask = [Model(seed) for seed in range(3)], tokens(9), packed(4, 5)
    weights, buffers = stack_module_state(models)
    attnreg.reset_stats()
    run = vmap(lambda w, b: functional_call(models[0], (w, b), (x, mask)), in_dims=(0, 0))
    results = run(weights, buffers)
    assert_ran_on_math()
    for got, model in zip(results, models, strict=True):
        torch.testing.assert_close(got, expected_of(model, x, mask))


def test_vjp_is_right_and_functionalize_and_jvp_are_as_with_torch_alone():
    model, x, mask = Model().requires_grad_(False), tokens(9), packed(4, 5)
    given = x.clone().requires_grad_()
    expected = expected_of(model, given, mask)
    (of_x,) = torch.autograd.grad(expected.sum(), given)
    out, pull = vjp(lambda x: model(x, mask), x)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(pull(torch.ones_like(out))[0], of_x)
    torch.testing.assert_close(torch.func.functionalize(model)(x, mask), expected.detach())
    with pytest.raises(NotImplementedError, match="forward AD"):  # torch's kernels have none, either
        jvp(lambda x: model(x, mask), (x,), (x,))

"""`use_backend` and `backend=` in code that is compiled with fullgraph: the choice is part of the graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen as torchs
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import attnreg
from attnreg.core.aten import scoped_ops
from attnreg.core.torchlib import versions

CU = torch.tensor([0, 2, 5], dtype=torch.int32)
MADE = attnreg.use_backend("math")
MADE_OTHER = attnreg.use_backend("cpu")
LAYER = torch.nn.MultiheadAttention(8, 2, batch_first=True)


pytestmark = pytest.mark.usefixtures("cpu_where_compiled")


def dense(x):
    return F.scaled_dot_product_attention(x * 1, x, x)


def packed(x, **options):
    x = x[0].transpose(0, 1)
    return attnreg.varlen_attn(x, x, x, CU, CU, 3, 3, **options)


def block(x):
    with attnreg.use_backend("math"):
        return dense(x)


def masked(x):
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    with attnreg.use_backend("MATH", "cpu"):
        return F.scaled_dot_product_attention(query=x * 1, key=x, value=x, attn_mask=mask, scale=0.3)


@attnreg.use_backend("math")
def decorated(x):
    return dense(x)


def made_outside(x):
    with MADE:
        return dense(x)


def in_another(x):
    with MADE_OTHER, attnreg.use_backend("math"):
        return dense(x)


def packed_block(x):
    with attnreg.use_backend("math"):
        return packed(x)


def packed_in_another(x):
    with attnreg.use_backend("cpu"), MADE:
        return packed(x, sinks=torch.zeros(2))


def by_argument(x):
    with attnreg.use_backend("cpu"):
        return packed(x, backend="math")


def layer(x):
    with MADE:
        y = x[0]  # one object, as in self-attention
        return LAYER(y, y, y, need_weights=False)[0]


def under_autocast(x):
    with torch.autocast("cpu", torch.bfloat16), attnreg.use_backend("math"):
        return dense(x).float()


def backends_of(run, x):
    """Return the output, the gradient and how often each backend ran forward and backward."""
    attnreg.reset_stats()
    out = run(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    ran = {name: (calls["forward"], calls["backward"]) for name, calls in attnreg.stats().calls.items()}
    return out, gradient, ran


# The slow ones' forms and ops are in the others, or in the tests below.
PROGRAMS = (
    masked, decorated, in_another, by_argument, under_autocast,
    *(
        pytest.param(program, marks=pytest.mark.slow)
        for program in (block, layer, made_outside, packed_block, packed_in_another)
    ),
)  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_block_decides_in_one_graph(program):
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    expected = backends_of(program, x)
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    out, gradient, ran = backends_of(compiled, x)
    assert ran == expected[2] == {"math": (1, 1)}
    rounding = {"rtol": 2e-2, "atol": 2e-2} if program is under_autocast else {}
    torch.testing.assert_close(out, expected[0], **rounding)
    torch.testing.assert_close(gradient, expected[1], **rounding)
    with attnreg.use_backend("cpu"):  # outside of the graph
        assert backends_of(compiled, x)[2] == {"math": (1, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("program", [made_outside, packed_block])
def test_the_block_decides_in_code_by_inductor(program, inductor):
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    expected = backends_of(program, x)
    out, gradient, ran = backends_of(torch.compile(program, backend=inductor, fullgraph=True), x)
    assert ran == {"math": (1, 1)}
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(gradient, expected[1])


def test_the_block_ends_where_it_ends():
    def program(x):
        with attnreg.use_backend("math"):
            first = dense(x)
        return first + dense(x)

    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    assert backends_of(compiled, x)[2] == {"math": (1, 1), "cpu": (1, 1)}
    assert torch._C._len_torch_function_stack() == 0


def test_a_block_around_compiled_code_has_ended_when_a_checkpoint_in_it_repeats_its_forward():
    def program(x):
        return checkpoint(packed, x, use_reentrant=False)

    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    expected = backends_of(program, x)
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)

    def in_a_block(x):
        with attnreg.use_backend("math"):
            return compiled(x)

    out, gradient, ran = backends_of(in_a_block, x)
    assert (expected[2], ran) == ({"cpu": (2, 1)}, {"math": (1, 0), "cpu": (1, 1)})
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(gradient, expected[1])


def test_a_checkpoint_in_the_block_repeats_its_forward_by_the_choice():
    def program(x):
        with attnreg.use_backend("math"):
            return checkpoint(dense, x, use_reentrant=False)

    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    assert backends_of(compiled, x)[2] == {"math": (2, 1)}


@pytest.mark.parametrize("name", sorted(scoped_ops._names.values()))
def test_the_ops_are_known_to_draw_random_numbers_where_those_of_aten_are(name):
    tags = getattr(torch.ops.aten, name).default.tags
    assert {*tags} <= {*getattr(torch.ops.attnreg, name).default.tags}


def test_torchs_varlen_attn_runs_by_the_choice_in_one_graph():
    def program(x):
        with attnreg.use_backend("math"):
            x = x[0].transpose(0, 1)
            return torchs.varlen_attn(x, x, x, CU, CU, 3, 3)

    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    out, _, ran = backends_of(torch.compile(program, backend="aot_eager", fullgraph=True), x)
    assert ran == {"math": (1, 1)}
    torch.testing.assert_close(out, packed(x))


@pytest.mark.skipif(not versions.HAS_OUT, reason="torch 2.11 has no varlen_attn_out")
def test_torchs_varlen_attn_out_runs_by_the_choice_in_one_graph():
    def program(x, out):
        with attnreg.use_backend("math"):
            return torchs.varlen_attn_out(out, x, x, x, CU, CU, 3, 3)

    x = torch.randn(5, 2, 8)
    out = torch.empty_like(x)
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), attnreg.register_backend("cpu"):
        returned = compiled(x, out)
    assert attnreg.stats().calls == {"math": {"forward": 1, "backward": 0}}
    expected = attnreg.varlen_attn(x, x, x, CU, CU, 3, 3)
    for found in (out, returned):
        torch.testing.assert_close(found, expected)
    with torch.no_grad(), pytest.raises(Exception, match="out: got"):
        compiled(x, torch.empty(3, 5, 2, 8))


@torch.compiler.disable
def untraced(x):
    return packed(x) + dense(x)[0].transpose(0, 1)


@torch.compiler.disable
def untraced_in_another(x):
    with attnreg.use_backend("math"):
        return untraced(x)


# Torch's own, of tensors that enter a graph while any function mode is in force.
between_graphs = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@between_graphs
@pytest.mark.parametrize("outer, function", [(MADE, untraced), (MADE_OTHER, untraced_in_another)])
def test_the_innermost_block_decides_between_graphs(outer, function):
    def program(x):
        with outer:
            return function(x * 1) * 2

    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    assert backends_of(torch.compile(program, backend="eager"), x)[2] == {"math": (2, 2)}


@between_graphs
def test_dropout_in_the_block_runs_by_the_choice_between_graphs():
    def program(x):
        with MADE:
            return packed(x, dropout_p=0.5)

    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    assert backends_of(torch.compile(program, backend="eager"), x)[2] == {"math": (1, 1)}


def test_an_unknown_backend_is_the_same_error_as_without_a_graph():
    def program(x):
        with attnreg.use_backend("nix"):
            return dense(x)

    with pytest.raises(attnreg.UnknownBackendError, match="no backend is named 'nix'"):
        torch.compile(program, backend="eager")(torch.randn(1, 2, 5, 8))
    torch._dynamo.reset()  # the code is skipped by now
    with pytest.raises(torch._dynamo.exc.Unsupported, match="run the program without"):
        torch.compile(program, backend="eager", fullgraph=True)(torch.randn(1, 2, 5, 8))


def test_an_exported_program_runs_by_the_choice():
    class Program(torch.nn.Module):
        def forward(self, x):
            return block(x) + packed_block(x).transpose(0, 1)

    x = torch.randn(1, 2, 5, 8)
    program = torch.export.export(Program(), (x,)).module()
    attnreg.reset_stats()
    out = program(x)
    assert {name: calls["forward"] for name, calls in attnreg.stats().calls.items()} == {"math": 2}
    torch.testing.assert_close(out, Program()(x))


def test_flops_of_the_ops_are_counted_as_those_of_aten():
    x, name, counted = torch.empty(1, 2, 5, 8, device="meta"), "_scaled_dot_product_flash_attention", []
    for ops, options in ((torch.ops.aten, {}), (torch.ops.attnreg, {"backends": ["math"]})):
        with FlopCounterMode(display=False) as counter:
            getattr(ops, name)(x, x, x, **options)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0

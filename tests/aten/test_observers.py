"""Promises about calls that pass attnreg by: counted with op, reason, shapes and call site, not changed."""

import dataclasses
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import attnreg
from attnreg.core import aten
from attnreg.core.aten import observers
from attnreg.core.dispatch.counters import Bypass
from attnreg.core.torchlib.call_sites import _innermost_of_program

MATH, MATH_OP = "torch's math kernel", "aten::_scaled_dot_product_attention_math"
DROPOUT = "dropout_p must be 0 on a CPU, got 0.5"
TRACED = " (in a graph of torch.compile: counted when it was traced, not when it runs)"
SHAPE = (1, 2, 8, 16)
QUERY = torch.randn(SHAPE)


def attend(query):
    return F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)


def line_of(function, further=1):
    return f"{Path(__file__)}:{function.__code__.co_firstlineno + further}"


def rows():
    found = attnreg.stats().bypassed
    attnreg.reset_stats()
    return found


DROPPED = Bypass(MATH, DROPOUT, 1, MATH_OP, (SHAPE,) * 3, line_of(attend))


@pytest.fixture
def registered(compiled_routers, routers):
    with attnreg.register_backend("math"):
        yield


def test_a_registration_alone_has_calls_counted(compiled_routers, registered):
    for _ in range(3):
        attend(QUERY)
    query, value = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 8)
    F.scaled_dot_product_attention(query, query, value)
    F.scaled_dot_product_attention(query, query, query)  # on the registered backend
    # In the order in which a test before may have met these reasons.
    first, second = sorted(attnreg.stats().bypassed, key=lambda row: row.reason)
    assert first == Bypass(MATH, DROPOUT, 3, MATH_OP, (SHAPE,) * 3, line_of(attend))
    narrow = "head_dim of the value must be that of the query, 16, got 8"
    shapes = ((2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 8))
    place = line_of(test_a_registration_alone_has_calls_counted, 4)
    assert second == Bypass(MATH, narrow, 1, MATH_OP, shapes, place)
    (plain,) = [row for row in attnreg.stats().to_dict()["bypassed"] if row["reason"] == narrow]
    assert plain == {
        "kernel": MATH, "reason": narrow, "count": 1, "op": MATH_OP, "shapes": shapes, "site": place,
    }  # fmt: skip
    assert attnreg.stats().calls == {"math": {"forward": 1, "backward": 0}}


def test_calls_without_queries_or_keys_compute_nothing_to_count(compiled_routers, registered):
    nothing = QUERY[:, :, :0]
    assert F.scaled_dot_product_attention(nothing, QUERY, QUERY).shape == nothing.shape
    assert torch.equal(F.scaled_dot_product_attention(QUERY, nothing, nothing), torch.zeros(SHAPE))
    assert rows() == ()


def test_nothing_is_counted_while_nothing_asks_for_a_backend(compiled_routers, routers):
    attend(QUERY)
    assert rows() == ()
    with attnreg.use_backend("math"):
        attend(QUERY)
    (row,) = rows()
    assert (row.reason, row.count) == (DROPOUT, 1)


def test_without_the_compiled_part_calls_are_counted_where_somebody_observes(python_routers, tmp_path):
    aten.ensure()
    with attnreg.register_backend("math"):
        attend(QUERY)
        assert rows() == ()
        with attnreg.record(tmp_path / "calls.toml"):
            attend(QUERY)
        assert rows() == (dataclasses.replace(DROPPED, op="F.scaled_dot_product_attention"),)


def in_inference_mode():
    with torch.inference_mode():
        attend(torch.randn(SHAPE))


def with_gradient():
    query = QUERY.clone().requires_grad_()
    attend(query).sum().backward()
    assert query.grad.shape == SHAPE


def in_a_thread():
    thread = threading.Thread(target=attend, args=(QUERY,))
    thread.start()
    thread.join()


def with_function_transform():
    torch.func.grad(lambda x: attend(x).sum())(QUERY)


@pytest.mark.parametrize("call", [with_gradient, in_a_thread, with_function_transform])
def test_a_call_is_counted_however_torch_runs_it(call, registered):
    call()
    assert rows() == (DROPPED,)


def test_in_inference_mode_a_call_is_counted_where_somebody_observes(compiled_routers, registered):
    in_inference_mode()
    assert rows() == ()
    aten.bypassed.observe(1)
    in_inference_mode()
    aten.bypassed.observe(-1)
    (row,) = rows()
    assert (row.kernel, row.reason, row.count) == (MATH, DROPOUT, 1)


def test_a_checkpoint_runs_the_call_twice_and_both_count(registered):
    query = QUERY.clone().requires_grad_()
    with set_checkpoint_early_stop(False):  # else the second run ends inside the op
        checkpoint(attend, query, use_reentrant=False).sum().backward()
    (row,) = rows()
    assert (row.count, row.site) == (2, line_of(attend))


def test_observing_changes_no_number(compiled_routers, registered):
    def gradients(observed):
        torch.manual_seed(0)
        query = QUERY.clone().requires_grad_()
        out = attend(query)
        out.square().sum().backward()
        assert len(rows()) == observed
        return out, query.grad

    aten.restore()
    before = gradients(0)
    aten.ensure()
    for now, then in zip(gradients(1), before, strict=True):
        assert torch.equal(now, then)


def traced(row):
    return dataclasses.replace(row, reason=row.reason + TRACED)


def compiled(function, backend, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def test_a_call_in_a_compiled_graph_is_counted_when_it_is_traced(registered):
    graph = compiled(attend, "aot_eager")
    query = QUERY.clone().requires_grad_()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            graph(query).sum().backward()
    assert rows() == (traced(DROPPED),)


def test_a_backend_of_dynamo_that_keeps_the_op_is_counted_at_each_run(registered):
    graph = compiled(attend, "eager")
    graph(QUERY)
    graph(QUERY)
    (row,) = rows()
    assert (row.reason, row.count, row.op) == (DROPOUT, 2, MATH_OP)


@pytest.mark.slow
def test_counting_reads_no_symbolic_size(registered):
    graph = compiled(attend, "aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch, length in ((3, 8), (5, 9), (6, 11)):
            graph(torch.randn(batch, 2, length, 16))
    (row,) = rows()
    assert (row.reason, row.count, row.site) == (DROPOUT + TRACED, 1, line_of(attend))
    batch, _, length, _ = row.shapes[0]
    assert isinstance(batch, str) and isinstance(length, str)


class Attention(torch.nn.Module):
    """Attention with dropout."""

    def forward(self, query):
        """Return the output."""
        return attend(query)


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_is_counted_when_it_runs(registered, strict):
    exported = torch.export.export(Attention(), (QUERY,), strict=strict)
    assert rows() == ()
    targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert targets == ["aten.scaled_dot_product_attention.default"]
    exported.module()(QUERY)
    (row,) = rows()
    assert (row.reason, row.count, row.op) == (DROPOUT, 1, MATH_OP)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning")
def test_an_exported_program_is_decomposed_as_by_torch_alone(registered):
    def operations():
        program = torch.export.export(Attention(), (QUERY,), strict=False).run_decompositions()
        return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]

    observed = operations()
    aten.restore()
    assert observed == operations()
    assert "aten.bmm.default" in observed
    aten.ensure()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.slow
def test_flex_attention_is_counted_where_it_runs_or_is_traced(routers):
    def call(query):
        return flex_attention(query, query, query)

    kernel, why = "torch's flex_attention", "it has kernels of its own"
    torch._dynamo.reset()
    with attnreg.register_backend("math"):
        call(QUERY)
        row = Bypass(kernel, why, 1, "flex_attention", (SHAPE,) * 3, line_of(call))
        assert rows() == (row,)
        compiled(call, "aot_eager")(QUERY)  # whose graph runs flex_attention itself
        (kept,) = rows()
        assert (kept.reason, kept.count) == (why, 1)
        compiled(call, lambda graph, inputs: graph)(QUERY)
        assert traced(row) in rows()


def test_a_kernel_that_the_program_asks_torch_for_is_the_reason(registered):
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(QUERY, QUERY, QUERY)
    (row,) = rows()
    assert row.reason == "the flash kernel is disabled (torch.nn.attention.sdpa_kernel)"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_layers_on_the_fast_path_are_counted_with_dense_and_nested_batches(registered):
    layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for mask, shapes in ((None, ((2, 5, 16),) * 3), (padding, (("nested",),) * 3)):
        with torch.no_grad():
            encoder(torch.randn(2, 5, 16), src_key_padding_mask=mask)
        (row,) = rows()
        assert (row.op, row.count, row.shapes) == ("aten::_native_multi_head_attention", 2, shapes)


def test_removing_the_routers_ends_the_observation(compiled_routers, registered):
    hop = sys.modules["torch._higher_order_ops.flex_attention"].flex_attention
    observed = {**hop.py_kernels}
    aten.restore()
    changed = [key for key, kernel in hop.py_kernels.items() if kernel is not observed[key]]
    assert [key.name for key in changed] == ["CompositeExplicitAutograd"]
    attend(QUERY)
    assert rows() == ()
    aten.ensure()
    attend(QUERY)
    assert rows() == (DROPPED,)


def test_what_cannot_be_observed_keeps_no_router_out(monkeypatch, registered):
    aten.restore()
    unknown = observers.OBSERVED[0]._replace(op="no_such_op")
    monkeypatch.setattr(observers, "OBSERVED", (unknown,))
    aten.ensure()
    attend(QUERY)
    assert rows() == ()
    aten.restore()


def test_a_site_is_the_programs_innermost_line_or_else_that_of_a_package():
    ours, torchs = str(Path(attnreg.__file__)), str(Path(torch.__file__))
    package = "/env/lib/python3.12/site-packages/transformers/integrations/sdpa_attention.py"
    frames = [(ours, 1), (torchs, 2), (package, 3), ("/home/me/model.py", 4), ("/home/me/train.py", 5)]
    assert _innermost_of_program(frames) == "/home/me/model.py:4"
    assert _innermost_of_program(frames[:3]) == f"{package}:3"
    assert _innermost_of_program(frames[:2]) == ""

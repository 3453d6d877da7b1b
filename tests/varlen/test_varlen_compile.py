"""`attnreg.varlen_attn` under torch.compile, export and AOTInductor, and what tools see of its op."""

import functools
import subprocess
import sys
import textwrap

import pytest
import torch
from functorch.compile import make_boxed_func
from support import truth
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.library import opcheck
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import attnreg
from attnreg.backends import math
from attnreg.errors import InvalidInputError, UnsupportedInputError
from attnreg.varlen import custom_op

pytestmark = [
    pytest.mark.usefixtures("routers", "one_thread"),
    # Torch warns of what it has deprecated and its own Inductor and export still use.
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]

LENGTHS_Q, LENGTHS_K = (5, 1, 8, 3), (7, 4, 8, 1)
CAUSAL = (-1, 0)
OP = torch.ops.attnreg._varlen_attn.default
BACKWARD = torch.ops.attnreg._varlen_attn_backward.default


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A compiler that keeps the graphs it is given and runs them as they are."""

    def __init__(self):
        self.targets = []

    def __call__(self, module, inputs):
        self.targets.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return module.forward


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def boxed(compiler):
    """Return a compiler as AOTAutograd wants it."""
    return lambda module, inputs: make_boxed_func(compiler(module, inputs))


def integers(*values):
    return torch.tensor(values, dtype=torch.int32)


def random_like(tensor):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)


def with_gradients(function, inputs, *rest):
    """Return the first result of a function and the gradients of its inputs."""
    result = function(*inputs, *rest)
    out = result[0] if isinstance(result, tuple) else result
    return [out, *torch.autograd.grad(out, inputs, random_like(out))]


def assert_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


# ---- the op as torch's own checks see it


@pytest.fixture
def arguments(packed):
    """Make the arguments of the op: `arguments(lengths_q, lengths_k, scale=..., ...)`."""

    def make(lengths_q, lengths_k, heads_k=4, dim_v=16, pages=None, grad=True, **options):
        query, key, value, cu_q, cu_k, max_q, max_k = packed(lengths_q, lengths_k, heads_k=heads_k, dim=16)
        value = value.detach()[..., :dim_v].contiguous()
        if pages is not None:
            generator = torch.Generator().manual_seed(3)
            key, value = (torch.randn(6, 4, heads_k, 16, generator=generator) for _ in range(2))
            cu_k, max_k, options["block_table"] = None, 8, pages
        inputs = [x.detach().requires_grad_(grad) for x in (query, key, value)]
        asked = {"scale": None, "window_size": [-1, -1], "seqused_k": None, "block_table": None}
        asked |= {"num_splits": None, "backend": ""} | options
        return (*inputs, cu_q, cu_k, max_q, max_k, *asked.values())

    return make


SAMPLES = {
    "plain": ((LENGTHS_Q, LENGTHS_K), {}),
    "causal": ((LENGTHS_Q, LENGTHS_K), {"window_size": [-1, 0]}),
    "window and scale": ((LENGTHS_Q, LENGTHS_K), {"window_size": [2, 1], "scale": 0.3}),
    "grouped heads": ((LENGTHS_Q, LENGTHS_K), {"heads_k": 2}),
    "narrow values": ((LENGTHS_Q, LENGTHS_K), {"dim_v": 8}),
    "seqused_k": ((LENGTHS_Q, LENGTHS_K), {"seqused_k": integers(3, 0, 8, 1)}),
    "pages": (
        ((5, 1), (5, 1)),
        {"pages": integers(5, 2, 0, 1).view(2, 2), "seqused_k": integers(7, 4)},
    ),
    "num_splits and backend": ((LENGTHS_Q, LENGTHS_K), {"num_splits": 2, "backend": "math"}),
    "an empty sequence": (((3, 0, 4), (3, 2, 0)), {}),
    "one token": (((1,), (1,)), {}),
}


@pytest.mark.parametrize(("lengths", "options"), SAMPLES.values(), ids=SAMPLES)
def test_the_forward_passes_every_check_of_torch(arguments, lengths, options):
    results = opcheck(OP, arguments(*lengths, **options))
    assert set(results) == {
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    }
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize(("lengths", "options"), SAMPLES.values(), ids=SAMPLES)
def test_the_backward_passes_the_checks_of_schema_and_fake_tensors(arguments, lengths, options):
    given = arguments(*lengths, **options, grad=False)
    results = OP(*given)
    *rest, _num_splits, backend = given[3:]
    checked = ("test_schema", "test_faketensor")
    grad = random_like(results[0])
    got = opcheck(BACKWARD, (grad, *given[:3], *results, *rest, backend), test_utils=checked)
    assert set(got.values()) == {"SUCCESS"}


@pytest.mark.parametrize(("lengths", "options"), SAMPLES.values(), ids=SAMPLES)
def test_fakes_have_the_shapes_dtypes_and_strides_of_the_real_results(arguments, lengths, options):
    given = arguments(*lengths, **options, grad=False)
    real = OP(*given)
    *rest, _num_splits, backend = given[3:]
    grads = BACKWARD(random_like(real[0]), *given[:3], *real, *rest, backend)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given]
        on_fake = OP(*fake)
        *rest, _num_splits, backend = fake[3:]
        fake_grads = BACKWARD(torch.empty_like(on_fake[0]), *fake[:3], *on_fake, *rest, backend)
    for one, other in zip((*real, *grads), (*on_fake, *fake_grads), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.is_contiguous()
        assert other.is_contiguous()


def test_of_its_results_the_output_alone_is_differentiable(arguments):
    out, lse, carried = OP(*arguments(LENGTHS_Q, LENGTHS_K))
    assert out.requires_grad
    assert not lse.requires_grad
    assert not carried.requires_grad


# ---- in graphs


def scattered(x):
    """Return the same values in strides that nobody expects."""
    return torch.stack((x, x), -1)[..., 0]


SCATTERING = attnreg.Kernels(
    lambda *arguments: tuple(map(scattered, math.forward(*arguments))),
    lambda *arguments: tuple(map(scattered, math.backward(*arguments))),
)


def test_a_backend_may_lay_out_its_results_as_it_likes(packed, fake, ran, inductor):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    rest = (cu_q, cu_k, max_q, max_k)
    expected = with_gradients(attnreg.varlen_attn, inputs, *rest)
    ran()
    with attnreg.register_backend(fake("scattered", load=lambda: SCATTERING).backend):
        # What Inductor generates asserts the strides of everything that an op returns.
        got = with_gradients(compiled(attnreg.varlen_attn, inductor), inputs, *rest)
    assert ran() == {"scattered": (1, 1)}
    assert_same(got, expected)


def test_the_op_is_in_a_whole_graph_forward_and_backward(packed, ran):
    inputs = packed(LENGTHS_Q, LENGTHS_K)
    graphs = Graphs()
    compiled(attnreg.varlen_attn, graphs)(*inputs)
    assert [target for target in graphs.targets[0] if target is OP] == [OP]
    forward, backward = Graphs(), Graphs()
    both = aot_autograd(fw_compiler=boxed(forward), bw_compiler=boxed(backward))
    ran()
    compiled(attnreg.varlen_attn, both)(*inputs).sum().backward()
    assert forward.targets[0].count(OP) == 1
    assert backward.targets[0].count(BACKWARD) == 1
    assert OP not in backward.targets[0]
    assert [sum(n) for n in zip(*ran().values(), strict=True)] == [1, 1]


OPTIONS = {
    "plain": {},
    "is_causal": {"is_causal": True},
    "window and scale": {"window_size": (2, 1), "scale": 0.3},
    "grouped heads": {"enable_gqa": True},
    "num_splits": {"num_splits": 2},
    "backend": {"backend": "math"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_compiled_values_and_gradients_are_those_of_eager(packed, options):
    *inputs, cu_q, cu_k, max_q, max_k = packed(
        LENGTHS_Q, LENGTHS_K, heads_k=2 if "enable_gqa" in options else 4
    )
    rest = (cu_q, cu_k, max_q, max_k)
    attend = functools.partial(attnreg.varlen_attn, **options)
    expected = with_gradients(attend, inputs, *rest)
    assert_same(with_gradients(compiled(attend), inputs, *rest), expected)


def test_compiled_seqused_k_and_pages_have_gradients(packed):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    attend = functools.partial(attnreg.varlen_attn, seqused_k=integers(3, 0, 8, 1))
    rest = (cu_q, cu_k, max_q, max_k)
    expected, _ = truth.varlen(*inputs, cu_q, cu_k, used=(3, 0, 8, 1))
    got = with_gradients(compiled(attend), inputs, *rest)
    right = torch.autograd.grad(expected, inputs, random_like(got[0]).double())
    for one, other in zip(got, (expected, *right), strict=True):
        truth.assert_near(one, other.double())
    pool = [torch.randn(6, 4, 4, 16).requires_grad_() for _ in range(2)]
    paged = functools.partial(
        attnreg.varlen_attn,
        seqused_k=integers(7, 4, 0, 5),
        block_table=integers(5, 2, 0, 0, 1, 3, 4, 3).view(4, 2),
    )
    cached = (inputs[0], *pool)
    rest = (cu_q, None, max_q, 8)
    assert_same(with_gradients(compiled(paged), cached, *rest), with_gradients(paged, cached, *rest))


def test_the_lse_comes_out_of_compiled_code_without_a_gradient(packed):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)

    def attend(*arguments):
        out, lse = attnreg.varlen_attn(*arguments, return_aux=attnreg.AuxRequest(lse=True))
        return out * 2, lse + 1

    out, lse = compiled(attend)(*inputs, cu_q, cu_k, max_q, max_k)
    expected, expected_lse = truth.varlen(*inputs, cu_q, cu_k)
    truth.assert_near(out, expected * 2)
    truth.assert_near(lse, expected_lse + 1)
    assert out.requires_grad
    assert not lse.requires_grad


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_holds_in_compiled_code(packed, fake, inside):
    recorder = fake("mine")
    inputs = packed(LENGTHS_Q, LENGTHS_K)

    def attend(*arguments):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            return attnreg.varlen_attn(*arguments)

    with attnreg.register_backend(recorder.backend):
        if inside:
            out = compiled(attend)(*inputs)
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = compiled(attnreg.varlen_attn)(*inputs)
    assert out.dtype == recorder.forwards[0][0].dtype == torch.bfloat16
    truth.assert_near(out, truth.varlen(*inputs[:5])[0])
    out.float().sum().backward()
    assert inputs[0].grad.dtype == torch.float32


def test_varlen_attn_out_compiles(packed):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, grad=False)
    out = torch.full_like(inputs[0], torch.nan)
    returned = compiled(attnreg.varlen_attn_out)(out, *inputs, cu_q, cu_k, max_q, max_k, is_causal=True)
    expected, _ = truth.varlen(*inputs, cu_q, cu_k, window=CAUSAL)
    truth.assert_near(out, expected)
    assert returned.data_ptr() == out.data_ptr()


def test_compiled_code_checks_what_it_is_given_when_it_runs(packed):
    *inputs, cu_q, cu_k, max_q, max_k = packed((3, 4))
    attend = compiled(attnreg.varlen_attn)
    attend(*inputs, cu_q, cu_k, max_q, max_k)
    with pytest.raises(InvalidInputError, match="cu_seq_q: got 3 after 4 at index 2, expected no decrease"):
        attend(*inputs, integers(0, 4, 3), cu_k, max_q, max_k)


# ---- dynamic shapes

BATCHES = ((5, 1, 8, 3), (2, 9), (4, 4, 4), (6, 2, 3, 11, 7))


def test_one_dynamic_compilation_serves_every_ragged_batch(packed, ran):
    graphs = Graphs()
    attend = compiled(attnreg.varlen_attn, graphs, dynamic=True)
    for lengths in BATCHES:
        *inputs, cu, _, longest, _ = packed(lengths)
        expected, _ = truth.varlen(*inputs, cu, cu)
        got = with_gradients(attend, inputs, cu, cu, longest, longest)
        right = torch.autograd.grad(expected, inputs, random_like(got[0]).double())
        for one, other in zip(got, (expected, *right), strict=True):
            truth.assert_near(one, other.double())
    assert len(graphs.targets) == 1
    assert [sum(n) for n in zip(*ran().values(), strict=True)] == [len(BATCHES)] * 2


def test_marked_dimensions_are_compiled_once(packed):
    graphs = Graphs()

    def attend(query, key, value, cu):
        return attnreg.varlen_attn(query, key, value, cu, cu, 16, 16, is_causal=True)

    attend = compiled(attend, graphs)
    for lengths in BATCHES:
        *inputs, cu, _, _, _ = packed(lengths)
        for tensor in (*inputs, cu):
            torch._dynamo.mark_dynamic(tensor, 0)
        truth.assert_near(attend(*inputs, cu), truth.varlen(*inputs, cu, cu, window=CAUSAL)[0])
    assert len(graphs.targets) == 1


# ---- which backend runs


def test_a_scope_around_a_compiled_call_holds_for_it_and_its_backward(packed, fake, ran, inductor):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    attend = compiled(attnreg.varlen_attn, inductor)
    rest = (cu_q, cu_k, max_q, max_k)
    with attnreg.register_backend(fake("mine").backend), attnreg.register_backend("math"):
        expected = with_gradients(attend, inputs, *rest)
        assert ran() == {"math": (1, 1)}
        with torch._dynamo.config.patch(error_on_recompile=True):
            with attnreg.use_backend("mine"):
                out = attend(*inputs, *rest)
            got = [out, *torch.autograd.grad(out, inputs, random_like(out))]
            assert ran() == {"mine": (1, 1)}
            assert_same(got, expected)
            with_gradients(attend, inputs, *rest)
            assert ran() == {"math": (1, 1)}


def test_a_registration_after_compiling_is_honoured_without_compiling_again(packed, fake, ran):
    inputs = packed(LENGTHS_Q, LENGTHS_K)
    attend = compiled(attnreg.varlen_attn)
    attend(*inputs).sum().backward()
    ran()
    with torch._dynamo.config.patch(error_on_recompile=True):
        with attnreg.register_backend(fake("mine").backend):
            attend(*inputs).sum().backward()
            assert ran() == {"mine": (1, 1)}
        attend(*inputs).sum().backward()
        assert "mine" not in ran()


def test_a_backend_asked_for_inside_compiled_code_is_obeyed_or_refused(packed, fake, ran):
    inputs = packed(LENGTHS_Q, LENGTHS_K)
    attend = compiled(functools.partial(attnreg.varlen_attn, backend="mine"))
    with attnreg.register_backend(fake("mine").backend), attnreg.register_backend("math"):
        attend(*inputs).sum().backward()
        assert ran() == {"mine": (1, 1)}
    with (
        attnreg.register_backend(fake("mine", dtypes=("float16",)).backend),
        pytest.raises(UnsupportedInputError, match="dtype must be float16, got float32"),
    ):
        attend(*inputs)
    assert ran() == {}


def test_a_scope_inside_compiled_code_breaks_the_graph_and_holds(packed, fake, ran):
    inputs = packed(LENGTHS_Q, LENGTHS_K)
    graphs = Graphs()

    def attend(*arguments):
        with attnreg.use_backend("mine"):
            return attnreg.varlen_attn(*arguments)

    with attnreg.register_backend(fake("mine").backend), attnreg.register_backend("math"):
        torch.compile(attend, backend=graphs)(*inputs).sum().backward()
        assert ran() == {"mine": (1, 1)}
        with pytest.raises(torch._dynamo.exc.Unsupported, match="context manager"):
            compiled(attend)(*inputs)


# ---- nothing but shapes


@pytest.mark.parametrize("dim_v", [16, 8])
@pytest.mark.parametrize("way", ["aten", "op"])
def test_fake_tensors_get_the_right_shapes_and_nothing_runs(packed, ran, dim_v, way):
    if way == "op":
        attnreg.uninstall()
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, grad=False)
    inputs[2] = inputs[2][..., :dim_v]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x).requires_grad_() for x in inputs]
        offsets = [mode.from_tensor(x) for x in (cu_q, cu_k)]
        aux = attnreg.AuxRequest(lse=True)
        out, lse = attnreg.varlen_attn(*fakes, *offsets, max_q, max_k, return_aux=aux)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (
            (17, 4, dim_v), torch.float32, (4, 17), torch.float32,
        )  # fmt: skip
        out.sum().backward()
        assert [x.grad.shape for x in fakes] == [x.shape for x in fakes]
    assert ran() == {}


@pytest.mark.parametrize("dim_v", [16, 8])
@pytest.mark.parametrize("way", ["aten", "op"])
def test_meta_tensors_get_the_right_shapes_and_nothing_runs(packed, ran, dim_v, way):
    if way == "op":
        attnreg.uninstall()
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, grad=False)
    inputs[2] = inputs[2][..., :dim_v]
    metas = [x.to("meta").requires_grad_() for x in inputs]
    aux = attnreg.AuxRequest(lse=True)
    out, lse = attnreg.varlen_attn(*metas, cu_q.to("meta"), cu_k.to("meta"), max_q, max_k, return_aux=aux)
    assert (out.device.type, out.shape, lse.shape) == ("meta", (17, 4, dim_v), (4, 17))
    out.sum().backward()
    assert [x.grad.shape for x in metas] == [x.shape for x in metas]
    assert ran() == {}


# ---- checkpointing and counting


@pytest.mark.parametrize("way", ["aten", "op"])
@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpointing_sees_the_op_and_can_keep_its_result(packed, ran, way, policy):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    if way == "op":
        attnreg.uninstall()
    attention = OP if way == "op" else torch.ops.aten._flash_attention_forward.default
    seen = []

    def decide(ctx, op, *args, **kwargs):
        seen.append(op)
        return policy if op is attention else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(query, key, value):
        return attnreg.varlen_attn(query.sin(), key.sin(), value.sin(), cu_q, cu_k, max_q, max_k).cos()

    expected = with_gradients(layer, inputs)
    ran()
    selective = functools.partial(create_selective_checkpoint_contexts, decide)
    got = with_gradients(lambda *x: checkpoint(layer, *x, use_reentrant=False, context_fn=selective), inputs)
    assert all(map(torch.equal, got, expected))
    assert attention in seen
    forwards = 1 if policy == CheckpointPolicy.MUST_SAVE else 2
    assert [sum(n) for n in zip(*ran().values(), strict=True)] == [forwards, 1]


def scores(lengths_q, lengths_k):
    return sum(q * k for q, k in zip(lengths_q, lengths_k, strict=True))


@pytest.mark.parametrize("way", ["aten", "op"])
@pytest.mark.parametrize("heads_k", [4, 2])
def test_floating_point_operations_are_counted_by_the_lengths(packed, way, heads_k):
    inputs = packed(LENGTHS_Q, LENGTHS_K, heads_k=heads_k)
    if way == "op":
        attnreg.uninstall()
    with FlopCounterMode(display=False) as counter:
        out = attnreg.varlen_attn(*inputs, enable_gqa=True)
    pairs = 4 * scores(LENGTHS_Q, LENGTHS_K)  # heads of the query
    assert counter.get_total_flops() == 2 * pairs * (16 + 16)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (3 * 16 + 2 * 16)


def test_operations_of_counted_keys_pages_and_narrow_values_are_counted(arguments):
    cases = (
        (arguments(LENGTHS_Q, LENGTHS_K, seqused_k=integers(3, 0, 8, 1)), LENGTHS_Q, (3, 0, 8, 1), 16),
        (arguments(LENGTHS_Q, LENGTHS_K, dim_v=8), LENGTHS_Q, LENGTHS_K, 8),
        (
            arguments((5, 1), (5, 1), pages=integers(5, 2, 0, 1).view(2, 2), seqused_k=integers(7, 4)),
            (5, 1),
            (7, 4),
            16,
        ),
    )
    for given, lengths_q, lengths_k, dim_v in cases:
        pairs = 4 * scores(lengths_q, lengths_k)
        with FlopCounterMode(display=False) as counter:
            out, *_ = OP(*given)
        assert counter.get_total_flops() == 2 * pairs * (16 + dim_v)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        assert counter.get_total_flops() == 2 * pairs * (3 * 16 + 2 * dim_v)


def test_lengths_that_are_not_at_hand_count_as_the_longest(arguments):
    given = arguments(LENGTHS_Q, LENGTHS_K, grad=False)
    on_meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in given]
    with FlopCounterMode(display=False) as counter:
        OP(*on_meta)
    assert counter.get_total_flops() == 2 * 4 * (4 * 8 * 8) * (16 + 16)
    with FakeTensorMode() as mode, FlopCounterMode(display=False) as counter:
        OP(*[mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given])
    assert counter.get_total_flops() == 2 * 4 * (4 * 8 * 8) * (16 + 16)


def test_the_count_agrees_with_torchs_own_of_the_aten_op(arguments):
    given = arguments(LENGTHS_Q, LENGTHS_K)
    query, key, value, *lengths = given[:7]
    counts = []
    for run in (
        lambda: OP(*given)[0],
        lambda: torch.ops.aten._flash_attention_forward(query, key, value, *lengths, 0.0, False, False)[0],
    ):
        with FlopCounterMode(display=False) as counter:
            run().sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


# ---- exported


class Layer(torch.nn.Module):
    def forward(self, query, key, value, cu):
        out, lse = attnreg.varlen_attn(
            query, key, value, cu, cu, 16, 16, True, attnreg.AuxRequest(lse=True), scale=0.3
        )
        return out.sin(), lse


def exported(packed, dynamic=True):
    *inputs, cu, _, _, _ = packed((5, 1, 8, 3), grad=False)
    tokens, offsets = torch.export.Dim("tokens", min=2), torch.export.Dim("offsets", min=2)
    shapes = ({0: tokens}, {0: tokens}, {0: tokens}, {0: offsets}) if dynamic else None
    return torch.export.export(Layer(), (*inputs, cu), dynamic_shapes=shapes), (*inputs, cu)


def check_layer(run, packed):
    for lengths in BATCHES:
        *inputs, cu, _, _, _ = packed(lengths, grad=False)
        out, lse = run(*inputs, cu)
        expected, expected_lse = truth.varlen(*inputs, cu, cu, window=CAUSAL, scale=0.3)
        truth.assert_near(out, expected.sin())
        truth.assert_near(lse, expected_lse)


def test_an_exported_program_holds_the_op_and_serves_any_batch(packed, fake, ran):
    program, _ = exported(packed)
    assert [node.target for node in program.graph.nodes if node.target is OP] == [OP]
    with attnreg.register_backend(fake("mine").backend):
        check_layer(program.module(), packed)
        assert ran() == {"mine": (len(BATCHES), 0)}
    lowered = program.run_decompositions()
    assert OP in [node.target for node in lowered.graph.nodes]
    check_layer(lowered.module(), packed)


def python(code, *arguments):
    """Run code in a process of its own, where torch loads no plugins."""
    prelude = "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
    command = [sys.executable, "-c", prelude + textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


LOAD = """
    import sys, torch
    {first}
    program = torch.export.load(sys.argv[1])
    inputs = torch.load(sys.argv[2])
    torch.save(program.module()(*inputs), sys.argv[3])
"""


def test_an_exported_program_names_the_op_that_a_process_without_attnreg_lacks(packed, tmp_path):
    program, inputs = exported(packed)
    files = [tmp_path / name for name in ("program.pt2", "inputs.pt", "outputs.pt")]
    torch.export.save(program, files[0])
    torch.save(inputs, files[1])
    without = python(LOAD.format(first="assert 'attnreg' not in sys.modules"), *files)
    assert without.returncode != 0
    assert "We failed to resolve torch.ops.attnreg._varlen_attn.default to an operator" in without.stderr
    assert "Please import the custom op to register it before deserializing" in without.stderr
    done = python(LOAD.format(first="import attnreg.varlen.custom_op"), *files)
    assert done.returncode == 0, done.stderr
    out, lse = torch.load(files[2])
    *inputs, cu = inputs
    expected, expected_lse = truth.varlen(*inputs, cu, cu, window=CAUSAL, scale=0.3)
    truth.assert_near(out, expected.sin())
    truth.assert_near(lse, expected_lse)


@pytest.mark.slow  # compiles C++
def test_inductors_cpp_wrapper_calls_the_op(packed, fake, ran):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    rest = (cu_q, cu_k, max_q, max_k)

    def attend(*arguments):
        return attnreg.varlen_attn(*arguments, is_causal=True).sin()

    expected = with_gradients(attend, inputs, *rest)
    ran()
    with torch._inductor.config.patch(cpp_wrapper=True):
        function = compiled(attend, "inductor")
        assert_same(with_gradients(function, inputs, *rest), expected)
        assert [sum(n) for n in zip(*ran().values(), strict=True)] == [1, 1]
        with attnreg.register_backend(fake("mine").backend):
            assert_same(with_gradients(function, inputs, *rest), expected)
        assert ran() == {"mine": (1, 1)}


@pytest.mark.slow  # compiles C++
def test_aotinductor_packages_call_the_op(packed, fake, ran, tmp_path):
    program, _ = exported(packed)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    run = torch._inductor.aoti_load_package(package)
    ran()
    with attnreg.register_backend(fake("mine").backend):
        check_layer(run, packed)
    assert ran() == {"mine": (len(BATCHES), 0)}


def test_importing_attnreg_does_not_load_the_op():
    done = python("""
        import sys, torch, attnreg
        assert "attnreg.varlen.custom_op" not in sys.modules
        assert "torch.utils.flop_counter" not in sys.modules
        attnreg.varlen_attn
        assert "attnreg.varlen.custom_op" in sys.modules
    """)
    assert done.returncode == 0, done.stderr


def test_the_formulas_are_registered_once():
    assert custom_op.forward is not None
    from torch.utils.flop_counter import flop_registry

    assert {torch.ops.attnreg._varlen_attn, torch.ops.attnreg._varlen_attn_backward} <= flop_registry.keys()

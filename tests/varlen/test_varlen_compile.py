"""Promises of `attnreg.varlen_attn` under torch.compile, export and AOTInductor."""

import functools
import textwrap

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from support import truth
from support.dense import SCATTERING
from support.packed_calls import (
    CAUSAL,
    LENGTHS_K,
    LENGTHS_Q,
    LSE,
    integers,
    random_like,
    run_and_compare,
    total,
    with_gradients,
)
from support.processes import forked
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg.core.contract.backend import Call
from attnreg.core.dispatch import calls
from attnreg.core.launching.offsets import derived_from
from attnreg.core.varlen import custom_op
from attnreg.errors import InvalidInputError, UnsupportedInputError

pytestmark = [
    pytest.mark.usefixtures("nothing_compiled"),
    # Torch warns of what it has deprecated and its own Inductor and export still use.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]

OP = torch.ops.attnreg._varlen_attn.default
BACKWARD = torch.ops.attnreg._varlen_attn_backward.default


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


# ---- in graphs


def test_a_backend_may_lay_out_its_results_as_it_likes(packed, fake, ran, inductor):
    with attnreg.register_backend(fake("scattered", load=lambda: SCATTERING).backend):
        # What Inductor generates asserts the strides of everything that an op returns.
        run_and_compare(packed(LENGTHS_Q, LENGTHS_K), attend=compiled(attnreg.varlen_attn, inductor))
    assert ran() == {"scattered": (1, 1)}


def test_the_op_is_in_the_graphs_of_forward_and_backward(packed, ran):
    given = packed(LENGTHS_Q, LENGTHS_K)
    forward, backward = Graphs(), Graphs()
    both = aot_autograd(fw_compiler=boxed(forward), bw_compiler=boxed(backward))
    compiled(attnreg.varlen_attn, both)(*given).sum().backward()
    assert forward.targets[0].count(OP) == backward.targets[0].count(BACKWARD) == 1
    assert OP not in backward.targets[0]
    assert total(ran()) == (1, 1)


OPTIONS = {
    "is_causal, grouped heads and num_splits": (
        {"is_causal": True, "enable_gqa": True, "num_splits": 2},
        {"window": CAUSAL},
    ),
    "window, scale and softcap": (
        {"window_size": (2, 1), "scale": 0.3, "softcap": 0.8},
        {"window": (2, 1), "scale": 0.3, "softcap": 0.8},
    ),
    "slopes": ({"alibi_slopes": torch.ones(4)}, {"slopes": torch.ones(4)}),
    "seqused_k and backend": ({"seqused_k": integers(3, 0, 8, 1), "backend": "math"}, {"used": (3, 0, 8, 1)}),
}


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        pytest.param(
            *given, id=name, marks=[pytest.mark.slow] * (name in ("slopes", "seqused_k and backend"))
        )
        for name, given in OPTIONS.items()
    ],
)
def test_compiled_values_and_gradients_are_right(packed, options, meant):
    given = packed(LENGTHS_Q, LENGTHS_K, heads_k=2 if "enable_gqa" in options else 4)
    attend = compiled(functools.partial(attnreg.varlen_attn, **options))
    out, lse = run_and_compare(given, meant, attend=attend)
    assert (out.requires_grad, lse.requires_grad) == (True, True)


def test_compiled_pages_have_gradients(packed):
    query, _, _, cu_q, _, max_q, _ = packed(LENGTHS_Q)
    inputs = (query, *[torch.randn(6, 4, 4, 16).requires_grad_() for _ in range(2)])
    table = integers(5, 2, 0, 0, 1, 3, 4, 3).view(4, 2)
    attend = functools.partial(attnreg.varlen_attn, seqused_k=integers(7, 4, 0, 5), block_table=table)
    rest = (cu_q, None, max_q, 8)
    torch.testing.assert_close(
        with_gradients(compiled(attend), inputs, *rest), with_gradients(attend, inputs, *rest)
    )


@pytest.mark.parametrize("inside", [pytest.param(False, marks=pytest.mark.slow), True])
def test_autocast_holds_in_compiled_code(packed, fake, inside):
    recorder = fake("mine")
    given = packed(LENGTHS_Q, LENGTHS_K)

    def attend(*arguments):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            return attnreg.varlen_attn(*arguments)

    with attnreg.register_backend(recorder.backend):
        if inside:
            out = compiled(attend)(*given)
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = compiled(attnreg.varlen_attn)(*given)
    assert out.dtype == recorder.forwards[0][0].dtype == torch.bfloat16
    truth.assert_near(out, truth.varlen(*given[:5])[0])
    out.float().sum().backward()
    assert given[0].grad.dtype == torch.float32


def test_varlen_attn_out_compiles(packed):
    given = packed(LENGTHS_Q, LENGTHS_K, grad=False)
    out = torch.full_like(given[0], torch.nan)
    returned = compiled(attnreg.varlen_attn_out)(out, *given, is_causal=True)
    truth.assert_near(out, truth.varlen(*given[:5], window=CAUSAL)[0])
    assert returned.data_ptr() == out.data_ptr()


def test_compiled_code_checks_what_it_is_given_when_it_runs(packed):
    *inputs, cu_q, cu_k, max_q, max_k = packed((3, 4))
    attend = compiled(attnreg.varlen_attn)
    attend(*inputs, cu_q, cu_k, max_q, max_k)
    with pytest.raises(InvalidInputError, match="cu_seq_q: got 3 after 4 at index 2, expected no decrease"):
        attend(*inputs, integers(0, 4, 3), cu_k, max_q, max_k)


# ---- dynamic shapes, and which backend runs

EACH_FRONT = pytest.mark.parametrize(
    "attend", [attnreg.varlen_attn, torch_varlen.varlen_attn], ids=["attnreg", "torch"]
)
BATCHES = ((5, 1, 8, 3), (2, 9), (4, 4, 4), (6, 2, 3, 11, 7))


@pytest.mark.parametrize(
    "attend",
    [attnreg.varlen_attn, pytest.param(torch_varlen.varlen_attn, marks=pytest.mark.slow)],
    ids=["attnreg", "torch"],
)
def test_one_dynamic_compilation_serves_every_ragged_batch(packed, ran, attend):
    """A symbolic number of attnreg's own would have torch compile twice, to specialize it."""
    attnreg.install()
    counter = CompileCounterWithBackend("aot_eager")
    attend = compiled(attend, counter, dynamic=True)
    for lengths in BATCHES:
        *inputs, cu, _, longest, _ = packed(lengths)
        run_and_compare((*inputs, cu, cu, longest, longest), attend=attend)
    assert counter.frame_count == 1
    assert total(ran()) == (len(BATCHES), len(BATCHES))


def test_a_transform_that_differentiates_breaks_the_graph_and_is_right(packed):
    query, key, value, *rest = packed((5, 1, 8, 3))

    def loss(query):
        return attnreg.varlen_attn(query, key, value, *rest).sin().sum()

    (wanted,) = torch.autograd.grad(loss(query), query)
    compiled_gradient = torch.compile(lambda query: torch.func.grad(loss)(query), backend="aot_eager")
    torch.testing.assert_close(compiled_gradient(query.detach()), wanted)
    with pytest.raises(Exception, match=r"transform differentiates attnreg\.varlen_attn"):
        compiled(lambda query: torch.func.grad(loss)(query), "eager")(query.detach())


@pytest.mark.slow
def test_one_graph_serves_every_window(packed):
    inputs = packed((5, 1, 8, 3))
    counter = CompileCounterWithBackend("aot_eager")
    attend = compiled(attnreg.varlen_attn, counter, dynamic=True)
    for left in (2, 5, 3, 7):
        run_and_compare(inputs, {"window": (left, 1)}, attend, window_size=(left, 1))
    assert counter.frame_count == 1


@pytest.mark.slow
def test_checkpointed_layers_with_a_softcap_share_one_dynamic_graph(packed, ran):
    """Bounds of the softcap that became symbols would belong to the first layer's checkpoint alone."""
    *inputs, cu, _, longest, _ = packed(LENGTHS_Q)

    def layer(query, key, value, cu, longest):
        return attnreg.varlen_attn(query, key, value, cu, cu, longest, longest, softcap=0.8)

    def twice(query, key, value, cu, longest):
        query = checkpoint(layer, query, key, value, cu, longest, use_reentrant=False)
        return checkpoint(layer, query, key, value, cu, longest, use_reentrant=False)

    counter = CompileCounterWithBackend("aot_eager")
    results = with_gradients(compiled(twice, counter, dynamic=True), inputs, cu, longest)
    assert counter.frame_count == 1
    assert total(ran()) == (4, 2)  # checkpoints repeat both forwards
    torch.testing.assert_close(results, with_gradients(twice, inputs, cu, longest))


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_code_with_a_softcap_out_of_range_has_the_error_of_eager_code(packed, fullgraph):
    attend = torch.compile(
        functools.partial(attnreg.varlen_attn, softcap=-1.0), backend="eager", fullgraph=fullgraph
    )
    with pytest.raises(
        InvalidInputError, match=r"softcap: got -1\.0, expected 0 for none, or a number above 0"
    ):
        attend(*packed((3, 4)))


def test_a_misspelt_argument_in_compiled_code_is_named_as_in_eager_code(packed):
    def attend(*tensors):
        return attnreg.varlen_attn(*tensors, 5, 5, is_casual=True)

    named = "unexpected keyword argument 'is_casual'; did you mean 'is_causal'?"
    tensors = packed((3, 5))[:5]
    with pytest.raises(torch._dynamo.exc.Unsupported) as error:
        compiled(attend)(*tensors)
    assert named in str(error.value)
    with pytest.raises(TypeError) as error:
        torch.compile(attend, backend="eager")(*tensors)
    assert named in str(error.value)


def test_longest_lengths_that_are_tensors_break_the_graph_and_are_right(packed, ran):
    attend = torch.compile(
        lambda *call, **options: attnreg.varlen_attn(*call, **options), backend="aot_eager"
    )
    for lengths in BATCHES[:2]:
        *inputs, cu, _, longest, _ = packed(lengths)
        run_and_compare((*inputs, cu, cu, torch.tensor(longest), torch.tensor(longest)), attend=attend)
    assert total(ran()) == (2, 2)


def test_marked_dimensions_are_compiled_once(packed):
    graphs = Graphs()
    attend = compiled(
        lambda q, k, v, cu: attnreg.varlen_attn(q, k, v, cu, cu, 16, 16, is_causal=True), graphs
    )
    for lengths in BATCHES:
        *inputs, cu, _, _, _ = packed(lengths)
        for tensor in (*inputs, cu):
            torch._dynamo.mark_dynamic(tensor, 0)
        truth.assert_near(attend(*inputs, cu), truth.varlen(*inputs, cu, cu, window=CAUSAL)[0])
    assert len(graphs.targets) == 1


def test_a_scope_around_a_compiled_call_holds_for_it_and_its_backward(packed, mine, ran, inductor):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    attend = compiled(attnreg.varlen_attn, inductor)
    rest = (cu_q, cu_k, max_q, max_k)
    expected = with_gradients(attend, inputs, *rest)
    assert ran() == {"math": (1, 1)}
    with torch._dynamo.config.patch(error_on_recompile=True):
        with attnreg.use_backend("mine"):
            out = attend(*inputs, *rest)
        torch.testing.assert_close([out, *torch.autograd.grad(out, inputs, random_like(out))], expected)
        assert ran() == {"mine": (1, 1)}
        with_gradients(attend, inputs, *rest)
        assert ran() == {"math": (1, 1)}


@EACH_FRONT
def test_a_registration_after_compiling_is_honoured_without_compiling_again(packed, fake, ran, attend):
    attnreg.install()
    given = packed(LENGTHS_Q, LENGTHS_K)
    attend = compiled(attend)
    attend(*given).sum().backward()
    ran()
    with torch._dynamo.config.patch(error_on_recompile=True):
        with attnreg.register_backend(fake("mine").backend):
            attend(*given).sum().backward()
            assert ran() == {"mine": (1, 1)}
        attend(*given).sum().backward()
        assert "mine" not in ran()


@pytest.mark.parametrize(
    "attend",
    [attnreg.varlen_attn, pytest.param(torch_varlen.varlen_attn, marks=pytest.mark.slow)],
    ids=["attnreg", "torch"],
)
def test_a_variable_that_changes_after_compiling_holds_from_a_reload_without_compiling_again(
    packed, ran, attend, monkeypatch
):
    # Without the LSE: compiled, its gradient is zeros, which `cpu` takes by its compiled kernel alone.
    monkeypatch.setenv("ATTNREG_BACKEND", "cpu")
    attnreg.install()
    given = packed(LENGTHS_Q, LENGTHS_K)
    attend = compiled(attend)
    run_and_compare(given, attend=attend, return_aux=None)
    assert ran() == {"cpu": (1, 1)}
    with torch._dynamo.config.patch(error_on_recompile=True):
        monkeypatch.setenv("ATTNREG_BACKEND", "math")
        run_and_compare(given, attend=attend, return_aux=None)
        assert ran() == {"cpu": (1, 1)}
        attnreg.reload()
        run_and_compare(given, attend=attend, return_aux=None)
        assert ran() == {"math": (1, 1)}


def test_a_backend_of_a_call_inside_compiled_code_is_obeyed_or_refused(packed, fake, ran):
    given = packed(LENGTHS_Q, LENGTHS_K)
    attend = compiled(functools.partial(attnreg.varlen_attn, backend="mine"))
    with attnreg.register_backend(fake("mine").backend), attnreg.register_backend("math"):
        attend(*given).sum().backward()
        assert ran() == {"mine": (1, 1)}
    with (
        attnreg.register_backend(fake("mine", dtypes=("float16",)).backend),
        pytest.raises(UnsupportedInputError, match="dtype must be float16, got float32"),
    ):
        attend(*given)
    assert ran() == {}


def test_a_scope_inside_compiled_code_is_part_of_the_graph(packed, mine, ran):
    given = packed(LENGTHS_Q, LENGTHS_K)

    def attend(*arguments):
        with attnreg.use_backend("mine"):
            return attnreg.varlen_attn(*arguments)

    compiled(attend)(*given).sum().backward()
    assert ran() == {"mine": (1, 1)}


# ---- exported


class Layer(torch.nn.Module):
    def forward(self, query, key, value, cu):
        out, lse = attnreg.varlen_attn(query, key, value, cu, cu, 16, 16, True, LSE, scale=0.3)
        return out.sin(), lse


def exported(packed):
    *inputs, cu, _, _, _ = packed((5, 1, 8, 3), grad=False)
    tokens, offsets = torch.export.Dim("tokens", min=2), torch.export.Dim("offsets", min=2)
    shapes = ({0: tokens}, {0: tokens}, {0: tokens}, {0: offsets})
    return torch.export.export(Layer(), (*inputs, cu), dynamic_shapes=shapes), (*inputs, cu)


def assert_layer(results, inputs):
    expected, expected_lse = truth.varlen(*inputs, inputs[-1], window=CAUSAL, scale=0.3)
    truth.assert_near(results[0], expected.sin())
    truth.assert_near(results[1], expected_lse)


def assert_layers(run, packed):
    for lengths in BATCHES:
        inputs = packed(lengths, grad=False)[:4]
        assert_layer(run(*inputs), inputs)


def test_an_exported_program_holds_the_op_and_serves_any_batch(packed, fake, ran):
    program, _ = exported(packed)
    assert [node.target for node in program.graph.nodes].count(OP) == 1
    # The torch.export.save of torch 2.11 knows no uint64.
    values = [
        x for node in program.graph.nodes for x in torch.utils._pytree.tree_leaves(node.meta.get("val"))
    ]
    assert torch.uint64 not in {x.dtype for x in values if isinstance(x, torch.Tensor)}
    with attnreg.register_backend(fake("mine").backend):
        assert_layers(program.module(), packed)
        assert ran() == {"mine": (len(BATCHES), 0)}
    lowered = program.run_decompositions()
    assert OP in [node.target for node in lowered.graph.nodes]
    assert_layers(lowered.module(), packed)


LOAD = """
import sys, torch
{first}
program = torch.export.load(sys.argv[1])
inputs = torch.load(sys.argv[2])
torch.save(program.module()(*inputs), sys.argv[3])
"""
NO_PLUGINS = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def test_an_exported_program_names_the_op_that_a_process_without_attnreg_lacks(packed, tmp_path):
    program, inputs = exported(packed)
    files = [tmp_path / name for name in ("program.pt2", "inputs.pt", "outputs.pt")]
    torch.export.save(program, files[0])
    torch.save(inputs, files[1])
    without = forked(LOAD.format(first="assert 'attnreg' not in sys.modules"), *files, **NO_PLUGINS)
    assert without.returncode != 0
    assert "We failed to resolve torch.ops.attnreg._varlen_attn.default to an operator" in without.stderr
    assert "Please import the custom op to register it before deserializing" in without.stderr
    done = forked(LOAD.format(first="import attnreg"), *files, **NO_PLUGINS)
    assert done.returncode == 0, done.stderr
    assert_layer(torch.load(files[2]), inputs)


@pytest.mark.slow  # compiles C++
def test_inductors_cpp_wrapper_calls_the_op(packed, fake, ran):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    rest = (cu_q, cu_k, max_q, max_k)

    def attend(*arguments):
        with attnreg.use_backend("math"):
            doubled = attnreg.varlen_attn(*arguments, score_mod=lambda score, *_: score * 2)
        return attnreg.varlen_attn(*arguments, is_causal=True).sin() + doubled

    expected = with_gradients(attend, inputs, *rest)
    ran()
    with torch._inductor.config.patch(cpp_wrapper=True):
        function = compiled(attend, "inductor")
        torch.testing.assert_close(with_gradients(function, inputs, *rest), expected)
        assert total(ran()) == (2, 2)
        with attnreg.register_backend(fake("mine").backend):
            torch.testing.assert_close(with_gradients(function, inputs, *rest), expected)
        assert ran() == {"mine": (1, 1), "math": (1, 1)}


@pytest.mark.slow  # compiles C++
def test_aotinductor_packages_call_the_op(packed, fake, ran, tmp_path):
    program, _ = exported(packed)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    run = torch._inductor.aoti_load_package(package)
    ran()
    with attnreg.register_backend(fake("mine").backend):
        assert_layers(run, packed)
    assert ran() == {"mine": (len(BATCHES), 0)}


@pytest.mark.slow
def test_importing_attnreg_does_not_load_the_op_and_asking_torch_for_it_does():
    script = """
        import sys, torch, attnreg
        assert "attnreg.core.varlen.custom_op" not in sys.modules
        assert "torch.utils.flop_counter" not in sys.modules
        {use}
        assert "attnreg.core.varlen.custom_op" in sys.modules
        x, cu = torch.ones(3, 1, 8), torch.tensor([0, 3], dtype=torch.int32)
        assert torch.ops.attnreg._varlen_attn(x, x, x, cu, cu, 3, 3)[0].equal(x)
        assert not hasattr(torch.ops.attnreg, "no_such_op")
    """
    uses = "attnreg.varlen_attn", *(f"torch.ops.attnreg._varlen_attn{end}" for end in ("", "_backward"))
    for use in uses:
        done = forked(textwrap.dedent(script).format(use=use), **NO_PLUGINS)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow  # compiles C++
@pytest.mark.parametrize(
    ("module", "name", "attend"),
    [(custom_op, "run", attnreg.varlen_attn), (calls, "plan_for", torch_varlen.varlen_attn)],
    ids=["attnreg", "torch"],
)
def test_nothing_derived_is_taken_for_other_offsets_that_inductor_has_put_in_the_same_tensor(
    module, name, attend, monkeypatch
):
    original, seen = getattr(module, name), []

    class Values:
        def __init__(self, offsets):
            self.offsets = offsets.tolist()

    def record(*arguments, **options):
        (call,) = (argument for argument in arguments if isinstance(argument, Call))
        derived = derived_from((call.cu_seqlens_q,), 0, ("values",), Values)
        seen.append((call.cu_seqlens_q.tolist(), derived.offsets))
        return original(*arguments, **options)

    def ends(lengths):
        return F.pad(lengths.cumsum(0), (1, 0)).int()

    @torch.compile
    def prune(x, first, second):
        for cu_seqlens_q in (ends(first), ends(second)):
            x = attend(x, x, x, cu_seqlens_q, cu_seqlens_q, 8, 8)
        cu_seqlens_q = ends(second - 1 + (x.sum() * 0).long())  # known only once the layers before have run
        return attend(x, x, x, cu_seqlens_q, cu_seqlens_q, 8, 8)

    monkeypatch.setattr(module, name, record)
    with torch.no_grad():
        prune(torch.randn(8, 2, 16), torch.tensor([3, 5]), torch.tensor([6, 2]))
    assert seen == [(offsets, offsets) for offsets in ([0, 3, 8], [0, 6, 8], [0, 5, 6])]

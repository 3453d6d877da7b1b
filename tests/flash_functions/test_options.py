"""ALiBi, dropout, softcap and deterministic gradients of flash-attn's functions, and how dense calls run."""

import contextlib
import functools

import pytest
import torch
from support import known, truth
from support.packed_calls import offsets
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import attnreg
from attnreg import InvalidInputError, UnsupportedInputError, flash_attn
from attnreg.tools.measure.reference import attend

BATCH, HEADS, KEY_HEADS, DIM = 2, 4, 2, 8
SLOPES = {
    "of heads": torch.tensor([0.5, 0.25, 0.125, 2.0]),
    "of sequences": torch.tensor([[0.5, 0.25, 0.125, 2.0], [1.0, 0.0, 0.3, 0.7]]),
}


def batch(length_q=7, length_k=11, dtype=torch.float32, dim_v=DIM):
    shapes = (length_q, HEADS, DIM), (length_k, KEY_HEADS, DIM), (length_k, KEY_HEADS, dim_v)
    return [torch.randn(BATCH, *shape).to(dtype).requires_grad_() for shape in shapes]


def assert_right(out, lse, inputs, **meant):
    """Compare output, LSE and gradients of a dense batch with the float64 reference."""
    copies = [x.detach().double().requires_grad_() for x in inputs]
    expected, expected_lse = attend(*copies, DIM**-0.5, **meant)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    right = torch.autograd.grad(expected, copies, grad.double())
    for one, other in zip((out, *found), (expected, *right), strict=True):
        truth.assert_near(one, other, inputs[0].dtype)
    if lse is not None:
        truth.assert_near(lse, expected_lse, torch.float32)


def packed(x):
    """Return a dense batch as a packed one, a tensor of its own."""
    return x.detach().flatten(0, 1).requires_grad_()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("slopes", SLOPES)
@pytest.mark.parametrize("lengths", [(7, 11), (9, 4)])
def test_alibi_slopes_lower_scores_by_the_distance_forward_and_backward(lengths, slopes, causal):
    inputs, given = batch(*lengths), {"causal": causal, "alibi_slopes": SLOPES[slopes]}
    out, lse, _ = flash_attn.flash_attn_func(*inputs, **given, return_attn_probs=True)
    meant = {"window": (-1, 0) if causal else (-1, -1), "alibi_slopes": SLOPES[slopes]}
    assert_right(out, lse, inputs, **meant)
    rows = [packed(x) for x in inputs]
    cu_seqlens = [offsets(*(n,) * BATCH) for n in lengths]
    whole, whole_lse, _ = flash_attn.flash_attn_varlen_func(
        *rows, *cu_seqlens, *lengths, **given, return_attn_probs=True
    )
    truth.assert_near(whole.view_as(out), out.detach().double(), torch.float32)
    truth.assert_near(whole_lse.view(HEADS, BATCH, -1).transpose(0, 1), lse.double(), torch.float32)
    grad = torch.randn_like(out)
    of_rows = torch.autograd.grad(whole, rows, grad.flatten(0, 1))
    for one, other in zip(of_rows, torch.autograd.grad(out, inputs, grad), strict=True):
        truth.assert_near(one, other.flatten(0, 1).double(), torch.float32)


def test_a_softcap_bounds_scores_forward_and_backward_and_one_below_zero_is_none():
    inputs = batch()
    with attnreg.use_backend("math"):
        out, lse, _ = flash_attn.flash_attn_func(*inputs, softcap=0.8, return_attn_probs=True)
        assert_right(out, lse, inputs, softcap=0.8)
        assert torch.equal(
            flash_attn.flash_attn_func(*inputs, softcap=-1.0), flash_attn.flash_attn_func(*inputs)
        )


# Dropout


def test_dropout_repeats_by_torchs_generator_and_its_gradient_is_that_of_the_same_mask(ran):
    q, k, _ = batch(7, DIM)
    eye = torch.eye(DIM)[None, :, None].expand(BATCH, DIM, KEY_HEADS, DIM)
    drop = {"dropout_p": 0.3, "causal": True}
    with attnreg.use_backend("math"):
        torch.manual_seed(3)
        shown = flash_attn.flash_attn_func(q, k, eye, **drop)  # column j is the weight of key j
        visible = flash_attn.flash_attn_func(q, k, eye, causal=True) != 0
    kept = (shown != 0).transpose(1, 2).double() / 0.7
    assert 0.5 < kept[visible.transpose(1, 2)].count_nonzero() / visible.sum() < 0.9
    inputs = [q, k, torch.randn(BATCH, DIM, KEY_HEADS, DIM, requires_grad=True)]
    with attnreg.use_backend("math"):
        torch.manual_seed(3)
        out = flash_attn.flash_attn_func(*inputs, **drop)
    assert_right(out, None, inputs, window=(-1, 0), kept=kept)
    assert ran() == {"math": (3, 1)}
    assert not torch.equal(out, flash_attn.flash_attn_func(*inputs, **drop))


def test_a_checkpointed_forward_draws_its_mask_again():
    q = batch(6, 6)[0]
    results = []
    for run in (lambda f, x: f(x), lambda f, x: checkpoint.checkpoint(f, x, use_reentrant=False)):
        torch.manual_seed(0)
        out = run(lambda x: flash_attn.flash_attn_func(x, x, x, 0.3), q)
        results.append((out, *torch.autograd.grad(out.square().sum(), q)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_packed_sequences_with_dropout_have_the_gradient_of_their_own_mask(fake, ran):
    first, second = fake("first", dropout=True), fake("second", dropout=True)
    rows = [packed(x) for x in batch(5, 5)]
    lengths = offsets(5, 5), offsets(5, 5), 5, 5
    with attnreg.register_backend(first.backend):
        out = flash_attn.flash_attn_varlen_func(*rows, *lengths, dropout_p=0.5)
        with attnreg.register_backend(second.backend):  # preferred by now, but it didn't draw the mask
            out.sum().backward()
    assert ran() == {"first": (1, 1)}
    drawn, used = first.forwards[0][3].rng_state, first.backwards[0][-1].rng_state
    assert torch.equal(drawn.view(torch.int64), used.view(torch.int64))


# The gradient of the LSE


@pytest.mark.parametrize("alone", [False, True])
def test_the_lse_has_a_gradient(alone):
    inputs = batch()
    copies = [x.detach().double().requires_grad_() for x in inputs]
    out, lse, _ = flash_attn.flash_attn_func(*inputs, alibi_slopes=SLOPES["of heads"], return_attn_probs=True)
    right = attend(*copies, DIM**-0.5, alibi_slopes=SLOPES["of heads"])
    grads = torch.randn_like(out), torch.randn_like(lse)
    first = 1 if alone else 0
    found = torch.autograd.grad((out, lse)[first:], inputs, grads[first:], materialize_grads=True)
    expected = torch.autograd.grad(
        right[first:], copies, [x.double() for x in grads[first:]], materialize_grads=True
    )
    for one, other in zip(found, expected, strict=True):
        truth.assert_near(one, other, torch.float32)


# Deterministic gradients


def dense(inputs, **options):
    return flash_attn.flash_attn_func(*inputs, **options)


def varlen(inputs, **options):
    rows = [x.flatten(0, 1) for x in inputs]
    return flash_attn.flash_attn_varlen_func(*rows, *[offsets(5, 5)] * 2, 5, 5, **options)


@pytest.mark.parametrize("function", [dense, varlen])
def test_a_deterministic_gradient_is_of_a_backend_that_has_one_and_torchs_mode_is_on_for_it_alone(
    fake, ran, function
):
    modes = []

    def backward(*arguments):
        modes.append(torch.are_deterministic_algorithms_enabled())
        return able.backward(*arguments)

    able = fake("able", load=lambda: attnreg.Kernels(able.forward, backward))
    lacking, inputs = fake("lacking", deterministic=False), batch(5, 5)
    with attnreg.register_backend(able.backend), attnreg.register_backend(lacking.backend):
        for deterministic in (False, True):
            function(inputs, deterministic=deterministic).sum().backward()
            assert not torch.are_deterministic_algorithms_enabled()
    assert ran() == {"lacking": (1, 1), "able": (1, 1)}
    assert modes == [True] and able.backwards[0][-1].deterministic


# How dense calls run


def test_a_transposed_dense_batch_reaches_the_kernel_as_it_lies(fake):
    backend, inputs = fake("mine"), [torch.randn(BATCH, HEADS, 6, DIM).transpose(1, 2) for _ in range(3)]
    with attnreg.register_backend(backend.backend):
        out = flash_attn.flash_attn_func(*inputs)
    (*given, call) = backend.forwards[0]
    assert [x.data_ptr() for x in given] == [x.data_ptr() for x in inputs]
    assert [x.stride() for x in given] == [x.stride() for x in inputs]
    assert not call.varlen and out.shape == inputs[0].shape


def test_a_scope_chooses_for_a_call_and_its_backward(ran):
    inputs = batch()
    with attnreg.use_backend("math"):
        out = flash_attn.flash_attn_func(*inputs)
    out.sum().backward()
    flash_attn.flash_attn_func(*inputs)
    assert ran() == {"math": (1, 1), "cpu": (1, 0)}


def test_what_no_backend_can_run_is_refused_with_every_reason(fake, monkeypatch):
    known.know(monkeypatch, fake("lone", alibi=False).backend)
    with pytest.raises(UnsupportedInputError) as error:
        flash_attn.flash_attn_func(*batch(), alibi_slopes=SLOPES["of heads"])
    assert "alibi_slopes must be None, got a tensor" in str(error.value)


def test_a_kernel_that_declines_a_call_leaves_it_to_the_next_backend(fake, ran):
    def forward(*_):
        raise UnsupportedInputError("not today")

    declining = fake("declining", load=lambda: attnreg.Kernels(forward, declining.backward))
    inputs = batch()
    with attnreg.register_backend(declining.backend):
        out, lse, _ = flash_attn.flash_attn_func(*inputs, return_attn_probs=True)
    assert_right(out, lse, inputs)
    assert ran()["cpu"] == (1, 1)


@pytest.mark.parametrize(
    ("slopes", "got"),
    [
        (torch.ones(3), "shape (3,), torch.float32"),
        (torch.ones(HEADS, dtype=torch.float64), "shape (4,), torch.float64"),
    ],
)
def test_slopes_of_another_shape_or_dtype_are_refused(slopes, got):
    with pytest.raises(InvalidInputError) as error:
        flash_attn.flash_attn_func(*batch(), alibi_slopes=slopes)
    assert str(error.value) == (f"alibi_slopes: got {got}, expected (4,) or (2, 4), torch.float32")


@pytest.mark.parametrize(
    ("lengths", "problem"),
    [
        (([0, 5], [0, 5], 5, 5), "cu_seqlens_q: got [0, 5], expected a tensor"),
        ((offsets(5), offsets(5), 5.0, 5), "max_seqlen_q: got 5.0, expected an integer"),
        ((offsets(5), offsets(5), 4, 5), "max_seqlen_q: got 4, expected at least 5, the longest sequence"),
    ],
)
def test_wrong_lengths_are_refused_with_slopes_as_without(lengths, problem):
    rows = [x[0] for x in batch(5, 5)]
    with pytest.raises(InvalidInputError) as error:
        flash_attn.flash_attn_varlen_func(*rows, *lengths, alibi_slopes=SLOPES["of heads"])
    assert str(error.value) == problem


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({"causal": True, "window_size": (3, -1)}, True),
        ({"alibi_slopes": SLOPES["of heads"]}, True),
        ({"deterministic": True}, False),
    ],
)
def test_a_compiled_program_gets_the_same_results_in_one_graph_unless_an_option_breaks_it(options, whole):
    def step(q, k, v):
        return flash_attn.flash_attn_func(q * 1.0, k, v, **options) * 2.0

    torch._dynamo.reset()
    inputs = batch()
    out = torch.compile(step, backend="aot_eager", fullgraph=whole)(*inputs)
    expected = step(*inputs)
    grad = torch.randn_like(out)
    results = (torch.autograd.grad(x, inputs, grad) for x in (out, expected))
    truth.assert_near(out, expected.detach().double(), torch.float32)
    for one, other in zip(*results, strict=True):
        truth.assert_near(one, other.double(), torch.float32)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
@pytest.mark.parametrize("function", ["flash_attn_func", "flash_attn_varlen_func"])
def test_a_scale_that_is_a_tensor_is_read_by_compiled_code_and_compiles_no_further_graph(function):
    lengths = (offsets(7, 7), offsets(11, 11), 7, 11) if "varlen" in function else ()
    inputs = [x.detach().flatten(0, 1 if lengths else 0).requires_grad_() for x in batch()]
    graphs = []

    def step(q, k, v, scale):
        return getattr(flash_attn, function)(q, k, v, *lengths, softmax_scale=scale) * 2.0

    def compiler(graph, _inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=compiler)
    made = []
    for number in (0.3, -0.5, 0.7):
        scale = torch.tensor(number)
        results = [
            (out, *torch.autograd.grad(out.square().sum(), inputs))
            for out in (compiled(*inputs, scale), step(*inputs, number))
        ]
        torch.testing.assert_close(*results)
        made.append(len(graphs))
    assert made == made[:1] * 3
    torch._dynamo.reset()


@pytest.mark.parametrize("option", ["softmax_scale", "softcap", "dropout_p"])
def test_a_number_that_needs_a_gradient_is_refused_as_it_gets_none(option):
    given = {option: torch.nn.Parameter(torch.tensor(0.5))}
    with pytest.raises(InvalidInputError) as error:
        flash_attn.flash_attn_func(*batch(), **given)
    got = "got a tensor that needs a gradient, expected a number, as it gets none"
    assert str(error.value) == f"{option}: {got}"


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_deterministic_is_refused_for_tensors_that_have_no_memory_themselves(packed):
    q, k, v = (TwoTensor(x, x) for x in batch())
    with pytest.raises(UnsupportedInputError, match=r"^deterministic must be False .* for tensor subclasses"):
        if packed:
            one = TwoTensor(*[torch.randn(5, HEADS, DIM)] * 2)
            lengths = offsets(5), offsets(5), 5, 5
            flash_attn.flash_attn_varlen_func(one, one, one, *lengths, deterministic=True)
        else:
            flash_attn.flash_attn_func(q, k, v, deterministic=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # of make_fx
@pytest.mark.parametrize("name", ["cpu", "math"])
def test_deterministic_is_refused_where_a_kernel_would_drop_tangents_or_leave_a_graph(name):
    q, k, v = (x.detach() for x in batch())

    def step(q):
        return flash_attn.flash_attn_func(q, k, v, deterministic=True)

    with attnreg.use_backend(name):
        with pytest.raises(UnsupportedInputError, match=r"^deterministic must be False in .* in make_fx"):
            make_fx(step)(q)
        with forward_ad.dual_level(), pytest.raises(UnsupportedInputError, match=r"^deterministic must be"):
            step(forward_ad.make_dual(q, q))


@pytest.mark.parametrize("how", ["selective checkpoint", "a dispatch mode", "a plain subclass", "a negative"])
def test_deterministic_gradients_are_right_in_modes_and_for_subclasses_that_have_memory(how):
    inputs = batch()

    def step(q, k, v):
        return flash_attn.flash_attn_func(q, k, v, deterministic=True)

    wanted = torch.autograd.grad(step(*inputs).sum(), inputs)
    if how == "selective checkpoint":
        policy = functools.partial(
            checkpoint.create_selective_checkpoint_contexts,
            lambda *_, **__: checkpoint.CheckpointPolicy.PREFER_RECOMPUTE,
        )
        out = checkpoint.checkpoint(step, *inputs, use_reentrant=False, context_fn=policy)
    elif how == "a dispatch mode":
        with FlopCounterMode(display=False):
            out = step(*inputs)
    elif how == "a plain subclass":
        out = step(*(x.as_subclass(type("Named", (torch.Tensor,), {})) for x in inputs))
    else:
        out = step(*(torch._neg_view(-x) for x in inputs))
    torch.testing.assert_close(torch.autograd.grad(out.sum(), inputs), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, functools.partial(FlopCounterMode, display=False)])
def test_a_program_may_write_to_results_that_were_made_while_gradients_were_off(mode, ran):
    inputs = [x.detach() for x in batch()]
    ran()
    with torch.no_grad(), mode(), attnreg.use_backend("math"):
        out, lse, _ = flash_attn.flash_attn_func(*inputs, return_attn_probs=True)
    assert ran() == {"math": (1, 0)}
    number = torch.ones(1, requires_grad=True)
    expected = attend(*(x.double() for x in inputs), DIM**-0.5)
    for result, right in zip((out, lse), expected, strict=True):
        result += number
        truth.assert_near(result - 1, right, torch.float32)
        assert torch.autograd.grad(result.sum(), number)[0] == result.numel()


@pytest.mark.parametrize("name", ["q", "k", "v", "alibi_slopes"])
def test_layouts_that_no_kernel_reads_are_refused_also_after_a_call_of_the_same_shapes(name):
    given = dict(zip(("q", "k", "v"), batch(), strict=True)) | {"alibi_slopes": SLOPES["of heads"]}
    flash_attn.flash_attn_func(**given)
    with pytest.raises(InvalidInputError) as error:
        flash_attn.flash_attn_func(**given | {name: given[name].detach().to_sparse()})
    assert str(error.value) == f"{name}: got torch.sparse_coo, expected torch.strided"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused():
    nested = torch.nested.nested_tensor([torch.randn(3, HEADS, DIM), torch.randn(5, HEADS, DIM)])
    with pytest.raises(InvalidInputError, match="q: got a nested tensor"):
        flash_attn.flash_attn_func(nested, nested, nested)


def test_autocast_casts_as_for_pytorchs_own_attention():
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn.flash_attn_func(*batch())
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["cpu", "math"])
@pytest.mark.parametrize("negated", ["query", "key", "value", "alibi_slopes"])
def test_a_tensor_that_is_negated_lazily_counts_as_it_reads(name, negated):
    """In memory its numbers have the other sign: `z.conj().imag` is one."""
    tensors = dict(zip(("query", "key", "value"), batch(), strict=True)) | {
        "alibi_slopes": SLOPES["of heads"]
    }
    tensors[negated] = torch._neg_view(-tensors[negated].detach())
    assert tensors[negated].is_neg()
    query, key, value, slopes = tensors.values()
    with attnreg.use_backend(name):
        out, lse, _ = flash_attn.flash_attn_func(
            query, key, value, alibi_slopes=slopes, return_attn_probs=True
        )
    inputs = [x.detach().resolve_neg().double() for x in (query, key, value)]
    expected, expected_lse = attend(*inputs, DIM**-0.5, alibi_slopes=slopes.resolve_neg())
    truth.assert_near(out, expected, torch.float32)
    truth.assert_near(lse, expected_lse, torch.float32)

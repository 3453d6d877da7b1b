"""The op `attnreg::_varlen_attn` as torch's checks, fakes, checkpoints and counters see it."""

import functools

import pytest
import torch
from support import dense, truth
from support.packed_calls import (
    CAUSAL,
    LENGTHS_K,
    LENGTHS_Q,
    LSE,
    integers,
    random_like,
    total,
    with_gradients,
)
from torch._subclasses import FakeTensorMode
from torch.library import opcheck
from torch.nn.attention import varlen as torch_varlen  # noqa: F401 - it defines torch's own op
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import attnreg
from attnreg.errors import InvalidInputError

OP = torch.ops.attnreg._varlen_attn.default
BACKWARD = torch.ops.attnreg._varlen_attn_backward.default


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
        rest = {"is_causal": False, "scale": None, "window_size": [-1, -1], "enable_gqa": heads_k != 4}
        rest |= {"seqused_k": None, "block_table": None, "num_splits": None, "backend": ""}
        rest |= {"needs_backward": grad, "softcap": 0.0, "alibi_slopes": None} | options
        return (*inputs, cu_q, cu_k, max_q, max_k, *rest.values())

    return make


def of_backward(given, results):
    """Return the arguments of the backward of a call."""
    *lengths, is_causal, scale, window, _gqa, seqused_k, block_table, _splits, backend, _, softcap, slopes = (
        given[3:]
    )
    out, lse, rng_state = results
    rest = is_causal, rng_state, scale, window, seqused_k, block_table, backend, 0, softcap, None, slopes
    return random_like(out), *given[:3], out, lse, *lengths, *rest


PAGES = {"pages": integers(5, 2, 0, 1).view(2, 2), "seqused_k": integers(7, 4)}
# They take twice as long as the others.
LONG = "causal, grouped heads and narrow values", "window, scale, slopes and seqused_k"
SAMPLES = {
    "causal, grouped heads and narrow values": (
        (LENGTHS_Q, LENGTHS_K),
        {"is_causal": True, "heads_k": 2, "dim_v": 8},
    ),
    "window, scale, slopes and seqused_k": (
        (LENGTHS_Q, LENGTHS_K),
        {
            "window_size": [2, 1],
            "scale": 0.3,
            "alibi_slopes": torch.ones(4),
            "seqused_k": integers(3, 0, 8, 1),
        },
    ),
    "pages": (((5, 1), (5, 1)), PAGES),
    "num_splits, softcap and backend": (
        (LENGTHS_Q, LENGTHS_K),
        {"num_splits": 2, "softcap": 0.8, "backend": "math"},
    ),
    "an empty sequence": (((3, 0, 4), (3, 2, 0)), {}),
}


# torch 2.15 makes its own inputs of the check; it hides this warning only where warnings aren't errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        pytest.param(*given, id=name, marks=[pytest.mark.slow] * (name in LONG))
        for name, given in SAMPLES.items()
    ],
)
def test_the_op_and_its_backward_pass_the_checks_of_torch(arguments, lengths, options):
    """Among them that fakes have the shapes, dtypes and strides of the real results."""
    found = opcheck(OP, arguments(*lengths, **options))
    checks = {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}
    assert found == dict.fromkeys(checks, "SUCCESS")
    given = arguments(*lengths, **options, grad=False)
    results = OP(*given)
    checks = ("test_schema", "test_faketensor")
    found = opcheck(BACKWARD, of_backward(given, results), test_utils=checks)
    assert found == dict.fromkeys(checks, "SUCCESS")
    assert all(x.is_contiguous() for x in (*results, *BACKWARD(*of_backward(given, results))))
    *rest, _, slopes = of_backward(given, results)
    with_lse = *rest, random_like(results[1]), slopes
    assert opcheck(BACKWARD, with_lse, test_utils=checks) == dict.fromkeys(checks, "SUCCESS")


@pytest.mark.parametrize("name", ["_varlen_attn", "_varlen_attn_backward"])
def test_the_arguments_of_torchs_own_op_come_first_in_its_order(name):
    ours, theirs = (
        [(x.name, str(x.type), x.default_value) for x in getattr(ops, name).default._schema.arguments]
        for ops in (torch.ops.attnreg, torch.ops.torch_attn)
    )
    # Torch 2.15 has the kernel that it chose as a number, where attnreg has a backend by its name.
    theirs = [x for x in theirs if x[0] != "backend"]
    assert len(ours) > len(theirs) > 9
    for our, their in zip(ours, theirs, strict=False):
        # None of some can stand where torch takes a tensor alone, as for the offsets of paged keys.
        assert our in (their, (their[0], f"Optional[{their[1]}]", None))


# Torch's own, of what its check does with gradients from 2.14 on.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_short_form_of_torchs_op_is_right_in_both_directions_and_passes_the_checks(packed, ran):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    query, key, value = (x.detach() for x in inputs)
    short = (cu_q, cu_k, max_q, max_k, True)
    out, lse, rng_state = torch.ops.attnreg._varlen_attn(*inputs, *short)
    expected = truth.varlen(*inputs, cu_q, cu_k, window=CAUSAL)
    truth.assert_near(lse, expected[1])
    grad_out = random_like(out)
    grads = torch.autograd.grad(out, inputs, grad_out)
    saved = (out.detach(), lse, *short, rng_state)
    own = torch.ops.attnreg._varlen_attn_backward(grad_out, query, key, value, *saved)
    assert all(map(torch.equal, grads, own))
    assert total(ran()) == (1, 2)
    dense.assert_near((out, *grads), inputs, expected[0])
    assert set(opcheck(torch.ops.attnreg._varlen_attn, (*inputs, *short)).values()) == {"SUCCESS"}
    checks, given = ("test_schema", "test_faketensor"), (grad_out, query, key, value, *saved)
    found = opcheck(torch.ops.attnreg._varlen_attn_backward, given, test_utils=checks)
    assert found == dict.fromkeys(checks, "SUCCESS")


@pytest.mark.parametrize("kind", ["real", "fake"])
def test_the_op_takes_fewer_key_heads_only_where_that_is_allowed(packed, ran, kind):
    given = packed(LENGTHS_Q, LENGTHS_K, heads_k=2, grad=False)
    if kind == "fake":
        mode = FakeTensorMode()
        given = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given]
    with pytest.raises(InvalidInputError) as error:
        OP(*given)
    assert str(error.value) == (
        "heads: got 4 for query and 2 for key, expected equal numbers (or enable_gqa=True)"
    )
    assert ran() == {}


class Called(TorchDispatchMode):
    """Keep the names of the ops of `varlen_attn` that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "varlen_attn" in str(func):
            self.names.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("traced", [False, True], ids=["not traced under modes", "traced"])
def test_a_mode_sees_the_op_of_a_function_that_was_compiled(packed, ran, monkeypatch, traced):
    # Torch compiles nothing under a mode, unless that says that it minds none of the compiler's doing.
    monkeypatch.setattr(Called, "ignore_compile_internals", classmethod(lambda cls: traced))
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    torch._dynamo.reset()
    attend = torch.compile(
        lambda q, k, v: attnreg.varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k), backend="eager"
    )
    with Called() as mode:
        out = attend(*inputs)
        grads = torch.autograd.grad(out, inputs, random_like(out))
    torch._dynamo.reset()
    assert mode.names == ["attnreg._varlen_attn.default", "attnreg._varlen_attn_backward.default"]
    dense.assert_near((out, *grads), inputs, truth.varlen(*inputs, cu_q, cu_k)[0])
    assert total(ran()) == (1, 1)


def test_of_its_results_output_and_lse_are_differentiable(arguments):
    results = OP(*arguments(LENGTHS_Q, LENGTHS_K))
    assert [x.requires_grad for x in results] == [True, True, False]


@pytest.mark.parametrize("dim_v", [16, 8])
@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_tensors_without_values_get_the_right_shapes_and_nothing_runs(packed, ran, dim_v, kind):
    *given, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, grad=False)
    given[2] = given[2][..., :dim_v]
    mode = FakeTensorMode()
    given = [mode.from_tensor(x) if kind == "fake" else x.to("meta") for x in given]
    inputs = [x.requires_grad_() for x in given[:3]]
    out, lse = attnreg.varlen_attn(*given, max_q, max_k, return_aux=LSE)
    assert (out.device, out.shape, out.dtype) == (given[0].device, (17, 4, dim_v), torch.float32)
    assert (lse.device, lse.shape, lse.dtype) == (given[0].device, (4, 17), torch.float32)
    with mode if kind == "fake" else torch.enable_grad():
        out.sum().backward()
    assert [x.grad.shape for x in inputs] == [x.shape for x in inputs]
    assert ran() == {}


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpointing_sees_the_op_and_can_keep_its_result(front, packed, ran, policy):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    seen = []

    def decide(ctx, op, *args, **kwargs):
        seen.append(op)
        return policy if op is OP else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(query, key, value):
        return attnreg.varlen_attn(query.sin(), key.sin(), value.sin(), cu_q, cu_k, max_q, max_k).cos()

    expected = with_gradients(layer, inputs)
    ran()
    selective = functools.partial(create_selective_checkpoint_contexts, decide)
    got = with_gradients(lambda *x: checkpoint(layer, *x, use_reentrant=False, context_fn=selective), inputs)
    assert all(map(torch.equal, got, expected))
    assert OP in seen
    assert total(ran()) == (1 if policy == CheckpointPolicy.MUST_SAVE else 2, 1)


# ---- floating-point operations


def counted(run):
    """Return the operations of a function and of the backward of what it returns, if that has one."""
    with FlopCounterMode(display=False) as counter:
        out = run()
    forward = counter.get_total_flops()
    if not out.requires_grad:
        return forward, 0
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    return forward, counter.get_total_flops()


def operations(lengths_q, lengths_k, dim_v=16):
    """Return how many operations attention with 4 heads of 16 takes, forward and backward."""
    scores = 4 * sum(q * k for q, k in zip(lengths_q, lengths_k, strict=True))
    return 2 * scores * (16 + dim_v), 2 * scores * (3 * 16 + 2 * dim_v)


@pytest.mark.parametrize("heads_k", [4, 2])
def test_flops_are_counted_by_the_lengths(front, packed, heads_k):
    given = packed(LENGTHS_Q, LENGTHS_K, heads_k=heads_k)
    found = counted(lambda: attnreg.varlen_attn(*given, enable_gqa=True))
    assert found == operations(LENGTHS_Q, LENGTHS_K)


def test_operations_of_counted_keys_pages_and_narrow_values_are_counted(arguments):
    both, used, pages = (LENGTHS_Q, LENGTHS_K), (3, 0, 8, 1), ((5, 1), (5, 1))
    for lengths, options, meant in (
        (both, {"seqused_k": integers(*used)}, operations(LENGTHS_Q, used)),
        (both, {"dim_v": 8}, operations(*both, dim_v=8)),
        (pages, PAGES, operations(pages[0], (7, 4))),
    ):
        given = arguments(*lengths, **options)
        assert counted(lambda: OP(*given)[0]) == meant  # noqa: B023


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_lengths_without_values_count_as_the_longest(arguments, kind):
    given = arguments(LENGTHS_Q, LENGTHS_K, grad=False)
    change = FakeTensorMode().from_tensor if kind == "fake" else lambda x: x.to("meta")
    given = [change(x) if isinstance(x, torch.Tensor) else x for x in given]
    assert counted(lambda: OP(*given)[0])[0] == operations([8] * 4, [8] * 4)[0]


def test_the_count_agrees_with_torchs_own_of_the_aten_op(arguments):
    given = arguments(LENGTHS_Q, LENGTHS_K)
    aten_op = torch.ops.aten._flash_attention_forward
    forward, backward = counted(lambda: OP(*given)[0])
    theirs = counted(lambda: aten_op(*given[:7], 0.0, False, False)[0])
    assert (forward, backward) == theirs
    assert min(theirs) > 0

"""Promises of `attnreg.varlen_attn` as a function of torch's: its signature, its results, and autograd."""

import inspect

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen
import torch.nn.functional as F
from support import truth
from support.packed_calls import (
    CAUSAL,
    LENGTHS_K,
    LENGTHS_Q,
    LSE,
    integers,
    offsets,
    random_like,
    run_and_compare,
    total,
)
from torch.utils.checkpoint import checkpoint

import attnreg

# ---- arguments and results


def test_the_signature_takes_what_every_torch_takes():
    ours = inspect.signature(attnreg.varlen_attn).parameters
    theirs = inspect.signature(torch_varlen.varlen_attn).parameters
    positional = [name for name, p in theirs.items() if p.kind is not p.KEYWORD_ONLY]
    assert list(ours)[: len(positional)] == positional
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default
    # torch 2.10 took these two in these places.
    assert list(ours)[7:9] == ["is_causal", "return_aux"]
    assert all(ours[name].kind is ours[name].POSITIONAL_OR_KEYWORD for name in list(ours)[:9])
    assert torch_varlen.AuxRequest._fields == attnreg.AuxRequest._fields
    # Dynamo takes a float for a symbol in dynamic graphs, and compiles these twice.
    assert float not in {type(parameter.default) for parameter in ours.values()}


def test_torchs_own_aux_request_is_taken_as_well(packed):
    given = packed((3, 4))
    theirs = attnreg.varlen_attn(*given, return_aux=torch_varlen.AuxRequest(lse=True))
    assert all(map(torch.equal, theirs, attnreg.varlen_attn(*given, return_aux=LSE)))
    assert isinstance(attnreg.varlen_attn(*given, return_aux=attnreg.AuxRequest()), torch.Tensor)


def test_what_is_no_aux_request_is_refused(packed):
    with pytest.raises(attnreg.InvalidInputError) as error:
        attnreg.varlen_attn(*packed((3, 4)), return_aux=True)
    assert str(error.value) == "return_aux: got True, expected an AuxRequest or None"


def test_varlen_attn_out_writes_into_the_given_tensor(front, packed):
    given = packed(LENGTHS_Q, LENGTHS_K, grad=False)
    backing = torch.full((4, 17, 32), torch.nan)
    for out in (torch.full_like(given[0], torch.nan), backing.transpose(0, 1)[..., ::2]):
        assert attnreg.varlen_attn_out(out, *given, window_size=CAUSAL) is out
        truth.assert_near(out, truth.varlen(*given[:5], window=CAUSAL)[0])
        returned, lse = attnreg.varlen_attn_out(out, *given, return_aux=LSE)
        assert returned is out
        truth.assert_near(out, truth.varlen(*given[:5])[0])
        truth.assert_near(lse, truth.varlen(*given[:5])[1])
    assert backing[..., 1::2].isnan().all()


# ---- the ways to autograd


def test_each_front_of_these_tests_adds_its_own_kind_of_autograd_node(front, packed, fake):
    with attnreg.register_backend(fake("mine").backend):
        out = attnreg.varlen_attn(*packed((3, 4)))
    nodes = {
        "call cache": "CppFunction",
        "autograd function": "_VarlenAttentionBackward",
        "custom op": "GeneratedBackwardFor_attnreg__varlen_attn_defaultBackward",
    }
    assert type(out.grad_fn).__name__ == nodes[front]


# ---- autocast, inference and checkpoints


@pytest.fixture
def given(front, packed):
    """Return inputs of a call that is kept, where calls are."""
    made = packed(LENGTHS_Q, LENGTHS_K)
    for _ in range(3):
        run_and_compare(made)
    return made


def test_autocast_casts_as_it_does_for_scaled_dot_product_attention(front, packed, fake):
    recorder = fake("mine")
    given = packed((3, 4), dtype=torch.float32)
    with attnreg.register_backend(recorder.backend):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attnreg.varlen_attn(*given)
        plain = attnreg.varlen_attn(*given)
    assert (out.dtype, plain.dtype) == (torch.bfloat16, torch.float32)
    assert [call[0].dtype for call in recorder.forwards] == [torch.bfloat16, torch.float32]
    truth.assert_near(out, truth.varlen(*given[:5])[0])
    out.float().sum().backward()
    assert given[0].grad.dtype == torch.float32


def test_autocast_leaves_float64_as_it_does_for_scaled_dot_product_attention(front, packed):
    given = packed((3, 4), dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dense = F.scaled_dot_product_attention(*given[:3])
        out = attnreg.varlen_attn(*given)
    assert out.dtype == dense.dtype == torch.float64
    truth.assert_near(out, truth.varlen(*given[:5])[0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_where_no_gradient_is_wanted(front, packed, fake, mode):
    recorder = fake("half", backward=False)
    given = packed((3, 4))
    with attnreg.register_backend(recorder.backend), mode():
        # A backend without a backward can be insisted on, as none is needed.
        out = attnreg.varlen_attn(*given, backend="half")
        counted = attnreg.varlen_attn(*given, backend="half", seqused_k=integers(3, 4))
    assert not out.requires_grad
    truth.assert_near(out, truth.varlen(*given[:5])[0])
    assert torch.equal(out, counted)
    assert len(recorder.forwards) == 2


@pytest.mark.parametrize("is_recorded", [True, False], ids=["gradients on", "gradients off"])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=["plain", "softcap"])
def test_a_program_may_write_to_outputs(front, given, ran, options, is_recorded):
    wanted, _ = truth.varlen(*given[:5], **options)
    ran()
    with torch.set_grad_enabled(is_recorded):
        out = attnreg.varlen_attn(*given, backend="math", **options)
    assert ran() == {"math": (1, 0)}
    added = torch.ones(1, requires_grad=True)
    out += added
    truth.assert_near(out - 1, wanted)
    assert torch.autograd.grad(out.sum(), added)[0] == out.numel()


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=["plain", "softcap"])
def test_a_program_may_write_to_gradients(front, given, ran, options):
    wanted = torch.autograd.grad(truth.varlen(*given[:5], **options)[0].sum(), given[:3])
    ran()
    out = attnreg.varlen_attn(*given, backend="math", **options)
    added, grads = torch.ones(1, requires_grad=True), torch.autograd.grad(out.sum(), given[:3])
    assert ran() == {"math": (1, 1)}
    for grad, other in zip(grads, wanted, strict=True):
        grad += added
        truth.assert_near(grad - 1, other.double())


def test_inference_tensors_are_as_good_as_others(front):
    with torch.inference_mode():
        query, cu = torch.randn(7, 4, 16), offsets(3, 4)
        out = attnreg.varlen_attn(query, query, query, cu, cu, 4, 4)
        cu[1] = 4
        changed = attnreg.varlen_attn(query, query, query, cu, cu, 4, 4)
    for one, lengths in ((out, (3, 4)), (changed, (4, 3))):
        truth.assert_near(one, truth.varlen(*[query.clone()] * 3, *[offsets(*lengths)] * 2)[0])


def test_a_kept_graph_gives_the_same_gradients_twice(given, ran):
    ran()
    out = attnreg.varlen_attn(*given)
    grad = random_like(out)
    first = torch.autograd.grad(out, given[:3], grad, retain_graph=True)
    second = torch.autograd.grad(out, given[:3], grad)
    assert all(map(torch.equal, first, second))
    assert total(ran()) == (1, 2)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, given[:3], grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_in_its_scope_and_gives_the_same_gradients(
    front, packed, fake, ran, reentrant
):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)

    def layer(query, key, value):
        with attnreg.use_backend("mine"):
            return attnreg.varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, window_size=CAUSAL)

    with attnreg.register_backend(fake("mine").backend), attnreg.register_backend("math"):
        plain = layer(*inputs)
        grad = random_like(plain)
        expected = torch.autograd.grad(plain, inputs, grad)
        for _ in range(3):
            ran()
            for one in inputs:
                one.grad = None
            checkpoint(layer, *inputs, use_reentrant=reentrant).backward(grad)
            assert ran() == {"mine": (2, 1)}
            assert all(torch.equal(one.grad, other) for one, other in zip(inputs, expected, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_whose_scope_has_ended_recomputes_without_it_and_is_right(
    front, packed, fake, ran, reentrant
):
    given = packed(LENGTHS_Q, LENGTHS_K)
    grad = random_like(given[0])
    expected = truth.varlen(*given[:5])[0]
    with attnreg.register_backend(fake("mine").backend), attnreg.register_backend("math"):
        with attnreg.use_backend("mine"):
            out = checkpoint(attnreg.varlen_attn, *given, use_reentrant=reentrant)
        out.backward(grad)
    # A reentrant checkpoint has the autograd node of the second call alone; the other that of the first, in
    # which the op's choice is a saved tensor, and so comes of the second call as well.
    of_the_first = not reentrant and front != "custom op"
    assert ran() == {"mine": (1, int(of_the_first)), "math": (1, int(not of_the_first))}
    truth.assert_near(out, expected)
    right = torch.autograd.grad(expected, given[:3], grad.double())
    for one, other in zip(given[:3], right, strict=True):
        truth.assert_near(one.grad, other.double())


@pytest.mark.parametrize("needing", [(0,), (1,), (2,), (0, 2)])
def test_only_the_inputs_that_need_a_gradient_get_one(given, needing):
    wanted = torch.autograd.grad(attnreg.varlen_attn(*given).sum(), given[:3])
    leaves = [x.detach().requires_grad_(n in needing) for n, x in enumerate(given[:3])]
    for _ in range(3):
        attnreg.varlen_attn(*leaves, *given[3:]).sum().backward()
        for number, (leaf, grad) in enumerate(zip(leaves, wanted, strict=True)):
            assert (leaf.grad is not None) == (number in needing)
            if leaf.grad is not None:
                torch.testing.assert_close(leaf.grad, grad)
            leaf.grad = None


# How each way to autograd says that there is no backward of the backward.
NO_DOUBLE_BACKWARD = {
    "call cache": r"the backward of attnreg\.varlen_attn is not implemented",
    "autograd function": "trying to differentiate twice what attnreg computes",
    "custom op": "no autograd formula was registered",
}


def test_a_double_backward_is_an_error_for_those_who_ask_for_it(front, given):
    out = attnreg.varlen_attn(*given)
    (plain,) = torch.autograd.grad(out.square().sum(), given[0], retain_graph=True)
    (grad,) = torch.autograd.grad(out.square().sum(), given[0], create_graph=True)
    assert torch.equal(grad, plain)
    with pytest.raises(RuntimeError, match=NO_DOUBLE_BACKWARD[front]):
        grad.sum().backward()

"""Promises to programs with jagged nested tensors on a CPU: what is asked for runs, else torch's kernels."""

import pytest
import torch
import torch.nn.functional as F
from support import truth
from torch.nested import nested_tensor_from_jagged
from torch.nested._internal import sdpa
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnreg
from attnreg.core import aten
from attnreg.core.aten.nested import KERNELS
from attnreg.errors import InvalidInputError

pytestmark = [
    pytest.mark.usefixtures("routers"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]


def nested(*inputs, offsets):
    """Return nested tensors (B, H, length, D) of packed ones, (T, H, D)."""
    return [nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in inputs]


def attend(inputs, offsets, cu_seqlens_k=None, **options):
    """Return the packed result of a call of nested tensors."""
    offsets = offsets.long()
    query = nested(inputs[0], offsets=offsets)
    rest = nested(*inputs[1:], offsets=offsets if cu_seqlens_k is None else cu_seqlens_k.long())
    return F.scaled_dot_product_attention(*query, *rest, **options).transpose(1, 2).values()


@pytest.mark.each_value("dtype", "causal", "named")
@pytest.mark.parametrize("named", ["math", "cpu"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_document_and_its_gradients_are_right_on_the_registered_backend(
    named, causal, dtype, packed, ran
):
    *inputs, offsets, _, _, _ = packed([5, 0, 1, 12], dtype=dtype)
    with attnreg.register_backend(named):
        out = attend(inputs, offsets, is_causal=causal, scale=0.3)
        incoming = torch.randn_like(out)
        grads = torch.autograd.grad(out, inputs, incoming)
    assert ran() == {named: (1, 1)}
    precise = [x.detach().double().requires_grad_() for x in inputs]
    expected, _ = truth.varlen(*precise, offsets, offsets, window=(-1, 0 if causal else -1), scale=0.3)
    truth.assert_near(out, expected)
    for got, right in zip(grads, torch.autograd.grad(expected, precise, incoming.double()), strict=True):
        truth.assert_near(got, right)


def test_queries_and_keys_may_have_lengths_of_their_own(packed, ran):
    *inputs, cu_seqlens_q, cu_seqlens_k, _, _ = packed([3, 5], [6, 2])
    with attnreg.register_backend("math"):
        out = attend(inputs, cu_seqlens_q, cu_seqlens_k)
    assert ran() == {"math": (1, 0)}
    truth.assert_near(out, truth.varlen(*inputs, cu_seqlens_q, cu_seqlens_k)[0])


def test_dropout_drops_the_same_weights_for_the_same_seed_and_in_the_backward(packed, ran):
    *inputs, offsets, _, _, _ = packed([64, 40])
    value = inputs[2]
    with attnreg.register_backend("math"):
        results = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            out = attend(inputs, offsets, dropout_p=0.5)
            results.append((out, *torch.autograd.grad(out.sum(), value)))
    assert ran() == {"math": (3, 3)}
    for same, other in zip(results[0], results[1], strict=True):
        assert torch.equal(same, other)
    assert not torch.equal(results[0][0], results[2][0])
    # The output is linear in the value: with the mask of the forward <grad, value> is the sum of the output.
    truth.assert_near((results[0][1] * value).sum(), results[0][0].double().sum())


def test_a_scoped_choice_serves_forward_and_backward(packed, ran):
    *inputs, offsets, _, _, _ = packed([3, 5])
    with attnreg.use_backend("math"):
        out = attend(inputs, offsets)
    out.sum().backward()
    assert ran() == {"math": (1, 1)}


def test_autocast_casts_before_the_backend_runs(packed, ran):
    *inputs, offsets, _, _, _ = packed([3, 5], grad=False)
    with attnreg.register_backend("math"), torch.autocast("cpu", torch.bfloat16):
        out = attend(inputs, offsets)
    assert (out.dtype, ran()) == (torch.bfloat16, {"math": (1, 0)})


def test_the_result_goes_together_with_the_nested_tensors_it_came_from(packed):
    *inputs, offsets, _, _, _ = packed([3, 5], grad=False)
    query, key, value = nested(*inputs, offsets=offsets.long())
    with attnreg.register_backend("math"):
        out = F.scaled_dot_product_attention(query, key, value)
    assert (out.shape, out.layout) == (query.shape, torch.jagged)
    assert torch.equal((out + query).values(), out.values() + query.values())


def test_uninstalled_or_with_nothing_asked_for_torch_gives_its_own_results(packed, ran):
    *inputs, offsets, _, _, _ = packed([3, 5])

    def results():
        out = attend(inputs, offsets)
        return out, *torch.autograd.grad(out.sum(), inputs)

    choosing = sdpa._select_sdp_backend
    aten.restore()
    expected, torchs = results(), sdpa._select_sdp_backend
    aten.ensure()
    assert choosing is not torchs
    found = [results()]
    with attnreg.register_backend("math"):
        results()
        assert ran() == {"math": (1, 1)}
        attnreg.uninstall()
        assert sdpa._select_sdp_backend is torchs
        found.append(results())
        attnreg.install()
    results()
    assert ran() == {"cpu": (1, 1)}
    with attnreg.register_backend("math", devices="cpu"), sdpa_kernel(SDPBackend.MATH):
        found.append(results())
    assert ran() == {}
    for each in found:
        for got, right in zip(each, expected, strict=True):
            assert torch.equal(got, right)


def test_a_choice_that_other_code_has_put_there_stays(monkeypatch):
    def others(*_):
        return SDPBackend.MATH

    monkeypatch.setattr(sdpa, "_select_sdp_backend", others)
    aten.restore()
    assert sdpa._select_sdp_backend is others
    monkeypatch.undo()
    aten.ensure()


def odd(packed):
    return nested(*packed([3, 5], dim=12)[:3], offsets=torch.tensor([0, 3, 8]))


def with_holes(packed):
    starts, lengths = torch.tensor([0, 3, 8]), torch.tensor([2, 5])
    return [nested_tensor_from_jagged(x, starts, lengths).transpose(1, 2) for x in packed([3, 5])[:3]]


def strided(packed):
    return [torch.nested.nested_tensor([torch.randn(4, length, 8) for length in (3, 5)])] * 3


def with_longer_keys(packed):
    *inputs, cu_seqlens_q, cu_seqlens_k, _, _ = packed([3, 5], [6, 2])
    return nested(inputs[0], offsets=cu_seqlens_q.long()) + nested(*inputs[1:], offsets=cu_seqlens_k.long())


# How the tensors are made, whether the call is causal, the reason, and whether torch's own kernels run it.
LEFT = {
    "an odd head dim": (odd, False, "head_dim must be one multiple of 8, got 12", True),
    "a strided layout": (
        strided, False, "the layout of query must be torch.jagged, got torch.strided", True,
    ),
    "holes between sequences": (
        with_holes, False, "; ".join(
            f"{name} must have no lengths(): its sequences must lie one after the other"
            for name in ("query", "key", "value")
        ), False,
    ),
    "causal with other lengths of keys": (
        with_longer_keys, True, "with is_causal query and key must have the same lengths", False,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "is_causal", "reason", "torch_runs_it"), LEFT.values(), ids=LEFT)
def test_what_the_op_cannot_say_is_left_to_torch_counted_and_explained_with_the_reason(
    make, is_causal, reason, torch_runs_it, packed, tmp_path
):
    given = make(packed)
    attnreg.register_backend("math")
    if torch_runs_it or not is_causal:
        explained = attnreg.explain(*given, is_causal=is_causal).forward
        assert explained.backend == KERNELS
        assert explained.rejected["math"][0].endswith(f"sends it to {KERNELS}: {reason}")
    else:
        with pytest.raises(InvalidInputError) as error:
            attnreg.explain(*given, is_causal=is_causal)
        got = f"explain: got is_causal=True, which {KERNELS} refuse, to which it goes: {reason}"
        assert str(error.value) == got
    with attnreg.record(tmp_path / "trace.jsonl"):
        if torch_runs_it:
            F.scaled_dot_product_attention(*given, is_causal=is_causal)
        else:
            # Torch 2.11 built for CUDA asks for a device first, to say why.
            with pytest.raises(RuntimeError, match=r"No viable backend|CUDA error"):
                F.scaled_dot_product_attention(*given, is_causal=is_causal)
    counted = [(row.kernel, row.reason, row.count) for row in attnreg.stats().bypassed]
    assert counted == ([(KERNELS, reason, 1)] if torch_runs_it else [])


@pytest.mark.parametrize("enable_gqa", [True, False])
def test_explain_refuses_shared_heads_where_they_go_to_torchs_kernels_which_do(packed, enable_gqa):
    query, key, value, offsets = *(torch.randn(8, heads, 8) for heads in (4, 2, 2)), torch.tensor([0, 3, 8])
    given = nested(query, key, value, offsets=offsets)
    with pytest.raises(RuntimeError, match="batch dimensions must have the same sizes"):
        F.scaled_dot_product_attention(*given, enable_gqa=enable_gqa)
    with pytest.raises(InvalidInputError) as error:
        attnreg.explain(*given, enable_gqa=enable_gqa)
    assert str(error.value) == (
        f"explain: got 4 and 2 heads, which {KERNELS} refuse, to which it goes: nothing asks for a backend"
    )


def test_images_in_ragged_batches_are_dense_calls_which_the_backend_runs(tmp_path, ran):
    values, offsets = torch.randn(3, 5, 4, 6, 8), torch.tensor([0, 2, 5])
    with attnreg.register_backend("math"), attnreg.record(tmp_path / "trace.jsonl"):
        out = F.scaled_dot_product_attention(*(nested_tensor_from_jagged(x, offsets) for x in values))
    assert ran() == {"math": (1, 0)}
    assert attnreg.stats().bypassed == ()
    truth.assert_near(out.values(), truth.dense(*values)[0])


def test_explain_says_which_backend_runs_a_call(packed):
    *inputs, offsets, _, _, _ = packed([3, 5])
    given = nested(*inputs, offsets=offsets.long())
    assert attnreg.explain(*given).forward.backend == KERNELS
    assert "nothing asks for a backend" in attnreg.explain(*given).forward.rejected["math"][0]
    with attnreg.register_backend("math"):
        found = attnreg.explain(*given, is_causal=True)
    assert (found.forward.backend, found.backward.backend) == ("math", "math")
    assert (found.spec.tokens_q, found.spec.max_q, found.spec.window) == (8, 5, (-1, 0))


def test_a_call_that_is_served_is_not_counted_as_passing_by(packed, monkeypatch, ran):
    monkeypatch.setenv("ATTNREG_STRICT", "1")
    monkeypatch.setenv("ATTNREG_BACKEND", "math")
    attnreg.reload()
    *inputs, offsets, _, _, _ = packed([3, 5])
    attend(inputs, offsets)
    assert ran() == {"math": (1, 0)}
    assert attnreg.stats().bypassed == ()


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        self.out = torch.nn.Linear(16, 16)

    def forward(self, x):
        heads = [linear(x).unflatten(-1, (2, 8)).transpose(1, 2) for linear in self.inputs]
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
def test_a_nested_model_is_right_on_the_backend_and_compiled_on_torchs_kernels(ran):
    torch.manual_seed(0)
    model = Attention()
    tokens, offsets = torch.randn(8, 16), torch.tensor([0, 3, 8])

    def results(function):
        out = function(nested_tensor_from_jagged(tokens, offsets)).values()
        return out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))

    expected = results(model)
    torch._dynamo.reset()
    with attnreg.register_backend("math"):
        assert ran() == {}
        eager = results(model)
        assert ran() == {"math": (1, 1)}
        compiled = results(torch.compile(model, backend="aot_eager"))
        assert ran() == {}
    for found in (eager, compiled):
        for got, right in zip(found, expected, strict=True):
            torch.testing.assert_close(got, right)

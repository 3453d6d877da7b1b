"""Promises of `attnreg.varlen_attn`: its options, its gradients, and what bad input gets."""

import inspect
import threading

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen as torch_varlen
from support import truth
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg.errors import (
    BackendUnavailableError,
    InvalidInputError,
    UnknownBackendError,
    UnsupportedInputError,
)
from attnreg.varlen import front as varlen_front

pytestmark = pytest.mark.usefixtures("routers", "one_thread")

CAUSAL = (-1, 0)
LENGTHS_Q, LENGTHS_K = (5, 1, 8, 3), (7, 4, 8, 1)


@pytest.fixture(params=["call cache", "autograd function", "custom op"])
def front(request, monkeypatch):
    """Run a test on each way that a call can take to autograd."""
    if request.param == "call cache":
        request.getfixturevalue("compiled_routers")
    if request.param == "custom op":
        monkeypatch.setattr(varlen_front, "_is_plain", lambda *tensors: False)
    return request.param


class Seen(TorchDispatchMode):
    """Keep the names of the attention ops that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attn" in str(func) or "attention" in str(func):
            self.names.append(str(func))
        return func(*args, **kwargs or {})


def offsets(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def integers(*values):
    return torch.tensor(values, dtype=torch.int32)


def random_like(tensor, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)


def check_against_truth(inputs, result, expected, expected_lse=None):
    """Hold the output, the LSE and the gradients of query, key and value to the truth."""
    out, lse = result
    truth.assert_near(out, expected)
    if expected_lse is not None:
        truth.assert_near(lse, expected_lse, torch.float32)
    grad = random_like(out)
    got = torch.autograd.grad(out, inputs, grad)
    right = torch.autograd.grad(expected, inputs, grad.double(), materialize_grads=True)
    for name, one, other in zip(("query", "key", "value"), got, right, strict=True):
        assert one.dtype == other.dtype, name
        truth.assert_near(one, other.double())


# What is asked, and what of it the truth has to know.
OPTIONS = {
    "nothing": ({}, {}),
    "is_causal": ({"is_causal": True}, {"window": CAUSAL}),
    "causal window": ({"window_size": CAUSAL}, {"window": CAUSAL}),
    "window": ({"window_size": (2, 1)}, {"window": (2, 1)}),
    "window as a list": ({"window_size": [2, 1]}, {"window": (2, 1)}),
    "no window": ({"window_size": None}, {}),
    "left window": ({"window_size": (2, -1)}, {"window": (2, -1)}),
    "right window": ({"window_size": (-1, 1)}, {"window": (-1, 1)}),
    "causal and left window": ({"window_size": (2, -1), "is_causal": True}, {"window": (2, 0)}),
    "own key alone": ({"window_size": (0, 0)}, {"window": (0, 0)}),
    "window beyond all": ({"window_size": (100, 100)}, {}),
    "scale": ({"scale": 0.7}, {"scale": 0.7}),
    "scale 0": ({"scale": 0.0}, {"scale": 0.0}),
    "negative scale": ({"scale": -0.4}, {"scale": -0.4}),
    "num_splits": ({"num_splits": 2}, {}),
}


@pytest.mark.parametrize(("asked", "meant"), OPTIONS.values(), ids=OPTIONS)
def test_every_option_gives_the_right_output_lse_and_gradients(front, packed, asked, meant):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, dtype=torch.float64)
    aux = attnreg.AuxRequest(lse=True)
    result = attnreg.varlen_attn(*inputs, cu_q, cu_k, max_q, max_k, return_aux=aux, **asked)
    check_against_truth(inputs, result, *truth.varlen(*inputs, cu_q, cu_k, **meant))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [(-1, -1), CAUSAL])
def test_every_dtype_is_right(front, packed, dtype, window):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, dtype=dtype)
    aux = attnreg.AuxRequest(lse=True)
    result = attnreg.varlen_attn(*inputs, cu_q, cu_k, max_q, max_k, return_aux=aux, window_size=window)
    assert result[0].dtype == dtype
    check_against_truth(inputs, result, *truth.varlen(*inputs, cu_q, cu_k, window=window))


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (6, 3)])
def test_several_query_heads_share_a_key_head(front, packed, heads):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, heads=heads[0], heads_k=heads[1])
    aux = attnreg.AuxRequest(lse=True)
    result = attnreg.varlen_attn(*inputs, cu_q, cu_k, max_q, max_k, False, aux, enable_gqa=True)
    check_against_truth(inputs, result, *truth.varlen(*inputs, cu_q, cu_k))


def test_the_values_may_have_another_head_dim(front, packed):
    query, key, value, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    value = value.detach()[..., :5].requires_grad_()
    aux = attnreg.AuxRequest(lse=True)
    result = attnreg.varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, return_aux=aux)
    expected = truth.varlen(query, key, value, cu_q, cu_k)
    check_against_truth((query, key, value), result, *expected)


def test_a_longest_length_that_is_too_large_changes_nothing(front, packed):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    for window in ((-1, -1), CAUSAL, (2, 1)):
        exact = attnreg.varlen_attn(*inputs, cu_q, cu_k, max_q, max_k, window_size=window)
        roomy = attnreg.varlen_attn(*inputs, cu_q, cu_k, max_q + 9, max_k + 9, window_size=window)
        assert torch.equal(exact, roomy)


@pytest.mark.parametrize("used", [(7, 4, 8, 1), (3, 0, 8, 1), (0, 0, 0, 0)])
@pytest.mark.parametrize("window", [(-1, -1), CAUSAL])
def test_seqused_k_counts_keys_forward_and_backward(front, packed, used, window):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    aux = attnreg.AuxRequest(lse=True)
    result = attnreg.varlen_attn(
        *inputs, cu_q, cu_k, max_q, max_k, return_aux=aux, seqused_k=integers(*used), window_size=window
    )
    expected = truth.varlen(*inputs, cu_q, cu_k, used=used, window=window)
    check_against_truth(inputs, result, *expected)


PAGES, PAGE, USED = 7, 4, (7, 4, 0, 5)
TABLE = torch.tensor([[6, 2], [0, 0], [1, 3], [5, 4]], dtype=torch.int32)


def paged(heads=4, grad=True):
    """Return a cache of pages, and the same keys and values packed, with a graph between them."""
    generator = torch.Generator().manual_seed(3)
    cache = [torch.randn(PAGES, PAGE, heads, 16, generator=generator).requires_grad_(grad) for _ in range(2)]
    packed_cache = [
        torch.cat([pool[TABLE[i].long()].flatten(0, 1)[: USED[i]] for i in range(4)]) for pool in cache
    ]
    return cache, packed_cache, offsets(*USED)


@pytest.mark.parametrize("window", [(-1, -1), CAUSAL])
def test_a_block_table_reads_pages_forward_and_backward(front, packed, window):
    query, _, _, cu_q, _, max_q, _ = packed(LENGTHS_Q)
    (key, value), flat, cu_k = paged()
    aux = attnreg.AuxRequest(lse=True)
    result = attnreg.varlen_attn(
        query, key, value, cu_q, None, max_q, 8, return_aux=aux, window_size=window,
        seqused_k=integers(*USED), block_table=TABLE,
    )  # fmt: skip
    expected = truth.varlen(query, *flat, cu_q, cu_k, window=window)
    check_against_truth((query, key, value), result, *expected)


def test_a_block_table_serves_inference(front, packed, ran):
    query, _, _, cu_q, _, max_q, _ = packed(LENGTHS_Q, grad=False)
    (key, value), flat, cu_k = paged(grad=False)
    out = attnreg.varlen_attn(
        query, key, value, cu_q, None, max_q, 8, seqused_k=integers(*USED), block_table=TABLE, num_splits=2
    )
    truth.assert_near(out, truth.varlen(query, *flat, cu_q, cu_k)[0])
    assert sum(n for n, _ in ran().values()) == 1


# ---- the interface


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


def test_torchs_own_aux_request_is_as_good(packed):
    inputs = packed((3, 4))
    theirs = attnreg.varlen_attn(*inputs, return_aux=torch_varlen.AuxRequest(lse=True))
    ours = attnreg.varlen_attn(*inputs, return_aux=attnreg.AuxRequest(lse=True))
    assert all(map(torch.equal, theirs, ours))
    assert isinstance(attnreg.varlen_attn(*inputs, return_aux=attnreg.AuxRequest()), torch.Tensor)


def test_is_causal_is_the_window_of_all_before(front, packed):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    by_window = attnreg.varlen_attn(*inputs, cu_q, cu_k, max_q, max_k, window_size=CAUSAL)
    by_place = attnreg.varlen_attn(*inputs, cu_q, cu_k, max_q, max_k, True)
    without = attnreg.varlen_attn(*inputs, cu_q, cu_k, max_q, max_k)
    assert torch.equal(by_window, by_place)
    assert not torch.equal(by_window, without)


def test_the_lse_is_float32_heads_first_and_not_differentiable(front, packed):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        inputs = packed((3, 4), dtype=dtype)
        out, lse = attnreg.varlen_attn(*inputs, return_aux=attnreg.AuxRequest(lse=True))
        assert (lse.shape, lse.dtype) == ((4, 7), torch.float32)
        assert out.requires_grad
        assert not lse.requires_grad
        with pytest.raises(RuntimeError, match="does not require grad"):
            lse.sum().backward()


def test_a_call_takes_the_way_to_autograd_that_these_tests_name(front, packed, fake):
    with attnreg.register_backend(fake("mine").backend):
        out = attnreg.varlen_attn(*packed((3, 4)))
    nodes = {"call cache": "CppFunction", "autograd function": "_VarlenAttentionBackward"}
    assert type(out.grad_fn).__name__ == nodes.get(
        front, "GeneratedBackwardFor_attnreg__varlen_attn_defaultBackward"
    )


@pytest.mark.parametrize("named", ["call cache", "autograd function"])
def test_a_dispatch_mode_sees_the_custom_op(named, packed, request):
    if named == "call cache":
        request.getfixturevalue("compiled_routers")
    *inputs, cu_q, cu_k, max_q, max_k = packed((3, 4))
    for options in ({}, {"seqused_k": integers(3, 4)}):
        with Seen() as seen:
            attnreg.varlen_attn(*inputs, cu_q, cu_k, max_q, max_k, **options)
        assert seen.names == ["attnreg._varlen_attn.default"]


def test_it_works_where_nothing_is_registered_and_leaves_torchs_entry_points_alone(packed, ran):
    inputs = packed((3, 4))
    attnreg.varlen_attn(*inputs).sum().backward()
    (name,) = ran()
    assert name == attnreg.explain(*inputs).backend
    q = torch.randn(1, 2, 3, 4)
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert ran() == {}


def test_varlen_attn_out_writes_into_the_given_tensor(front, packed):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, grad=False)
    out = torch.full_like(inputs[0], torch.nan)
    returned = attnreg.varlen_attn_out(out, *inputs, cu_q, cu_k, max_q, max_k, window_size=CAUSAL)
    assert returned is out
    truth.assert_near(out, truth.varlen(*inputs, cu_q, cu_k, window=CAUSAL)[0])
    aux = attnreg.AuxRequest(lse=True)
    returned, lse = attnreg.varlen_attn_out(out, *inputs, cu_q, cu_k, max_q, max_k, return_aux=aux)
    assert returned is out
    truth.assert_near(out, truth.varlen(*inputs, cu_q, cu_k)[0])
    truth.assert_near(lse, truth.varlen(*inputs, cu_q, cu_k)[1])


def test_varlen_attn_out_writes_through_strides(packed):
    inputs = packed((3, 4), grad=False)
    backing = torch.full((4, 7, 32), torch.nan)
    out = backing.transpose(0, 1)[..., ::2]
    attnreg.varlen_attn_out(out, *inputs)
    truth.assert_near(out, truth.varlen(*inputs[:5])[0])
    assert backing[..., 1::2].isnan().all()


OUT_ERRORS = {
    "shape": (
        lambda q: q.new_empty(8, 4, 16),
        "out: got shape torch.Size([8, 4, 16]), expected torch.Size([7, 4, 16])",
    ),
    "dtype": (lambda q: q.double(), "out: got dtype torch.float64, expected torch.float32"),
    "device": (lambda q: q.to("meta"), "out: got device meta, expected cpu"),
    "gradient": (
        lambda q: torch.empty_like(q, requires_grad=True),
        "varlen_attn_out: got tensors that need a gradient, expected none (use varlen_attn)",
    ),
}


@pytest.mark.parametrize(("wrong", "message"), OUT_ERRORS.values(), ids=OUT_ERRORS)
def test_varlen_attn_out_refuses_a_tensor_that_does_not_fit(packed, wrong, message):
    inputs = packed((3, 4), grad=False)
    with pytest.raises(InvalidInputError) as error:
        attnreg.varlen_attn_out(wrong(inputs[0]), *inputs)
    assert str(error.value) == message


def test_varlen_attn_out_refuses_inputs_that_need_a_gradient(packed):
    inputs = packed((3, 4))
    with pytest.raises(InvalidInputError, match="got tensors that need a gradient"):
        attnreg.varlen_attn_out(torch.empty(7, 4, 16), *inputs)
    with torch.no_grad():
        truth.assert_near(
            attnreg.varlen_attn_out(torch.empty(7, 4, 16), *inputs), truth.varlen(*inputs[:5])[0]
        )


# ---- which backend runs


def test_a_backend_asked_for_by_the_call_runs_both_directions(front, packed, fake, ran):
    recorder = fake("mine")
    inputs = packed((3, 4))
    with attnreg.register_backend(recorder.backend), attnreg.register_backend("math"):
        attnreg.varlen_attn(*inputs, backend="MINE").sum().backward()
        assert ran() == {"mine": (1, 1)}
        attnreg.varlen_attn(*inputs).sum().backward()
        assert ran() == {"math": (1, 1)}


def test_a_backend_asked_for_by_the_call_refuses_what_it_cannot_run(front, packed, fake, ran):
    inputs = packed((3, 4), grad=False)
    with attnreg.register_backend(fake("mine", causal=False, dtypes=("float16",)).backend):
        with pytest.raises(UnsupportedInputError) as error:
            attnreg.varlen_attn(*inputs, True, backend="mine")
        attnreg.varlen_attn(*inputs, True)
        assert list(ran()) != ["mine"]
    first, given, *rows = str(error.value).splitlines()
    assert first == ("no attention backend can run this forward on cpu: backend='mine' is obeyed or refused")
    assert given.strip() == (
        "query (7, 4, 16) · key (7, 4, 16) · value (7, 4, 16) · float32 · varlen, 2 sequences up to 4 x 4 "
        "· causal"
    )
    text = [" ".join(row.split()) for row in rows]
    assert text[:2] == ["mine dtype must be float16, got float32", "is_causal must be False, got True"]
    assert "math could run it" in text
    assert error.value.rejected["mine"] == (
        "dtype must be float16, got float32",
        "is_causal must be False, got True",
    )


def test_an_unknown_or_missing_backend_is_an_error_that_says_so(front, packed, fake):
    inputs = packed((3, 4))
    missing = fake("absent", unavailable=lambda: "no such package", install="pip install absent")
    with attnreg.register_backend(missing.backend, required=False):
        with pytest.raises(UnknownBackendError, match="no backend is named 'maths'; did you mean 'math'"):
            attnreg.varlen_attn(*inputs, backend="maths")
        with pytest.raises(BackendUnavailableError) as error:
            attnreg.varlen_attn(*inputs, backend="absent")
    assert str(error.value) == "absent can't load here: no such package; install it with: pip install absent"
    attnreg.varlen_attn(*inputs)


def test_a_forward_only_backend_leaves_the_backward_to_another(front, packed, fake, ran):
    recorder = fake("half", backward=False)
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    with attnreg.register_backend(recorder.backend):
        out = attnreg.varlen_attn(*inputs, cu_q, cu_k, max_q, max_k, return_aux=attnreg.AuxRequest(lse=True))
        check_against_truth(inputs, out, *truth.varlen(*inputs, cu_q, cu_k))
    calls = ran()
    assert calls["half"] == (1, 0)
    assert sum(backward for _, backward in calls.values()) == 1


def test_a_backend_asked_for_by_the_call_is_refused_for_the_backward_it_lacks(front, packed, fake, ran):
    inputs = packed((3, 4))
    with attnreg.register_backend(fake("half", backward=False).backend):
        with pytest.raises(UnsupportedInputError, match=r"half +has no backward"):
            attnreg.varlen_attn(*inputs, backend="half")
        assert ran() == {}
        with torch.no_grad():
            attnreg.varlen_attn(*inputs, backend="half")
        assert ran() == {"half": (1, 0)}


def test_the_backward_is_given_what_the_forward_returned_and_was_asked(front, packed, fake):
    recorder = fake("mine")
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    with attnreg.register_backend(recorder.backend):
        out = attnreg.varlen_attn(*inputs, cu_q, cu_k, max_q, max_k, scale=0.3, window_size=(3, 0))
        grad = random_like(out)
        out.backward(grad)
    (given,), (asked,) = recorder.backwards, recorder.forwards
    expected, expected_lse = truth.varlen(*inputs, cu_q, cu_k, scale=0.3, window=(3, 0))
    assert all(map(torch.equal, given[:4], (grad, *inputs)))
    truth.assert_near(given[4], expected)
    truth.assert_near(given[5], expected_lse)
    forward, backward = asked[-1], given[-1]
    assert (forward.scale, forward.window, forward.max_q, forward.max_k) == (0.3, (3, 0), 8, 8)
    assert backward._replace(cu_seqlens_q=None, cu_seqlens_k=None) == forward._replace(
        cu_seqlens_q=None, cu_seqlens_k=None
    )
    assert torch.equal(backward.cu_seqlens_q, cu_q)
    assert torch.equal(backward.cu_seqlens_k, cu_k)


def test_a_scope_holds_for_the_backward_outside_of_it(front, packed, fake, ran):
    with attnreg.register_backend(fake("mine").backend), attnreg.register_backend("math"):
        inputs = packed((3, 4))
        with attnreg.use_backend("mine"):
            out = attnreg.varlen_attn(*inputs)
        out.sum().backward()
        assert ran() == {"mine": (1, 1)}


def test_a_scope_holds_for_the_backward_in_another_thread(front, packed, fake, ran):
    with attnreg.register_backend(fake("mine").backend), attnreg.register_backend("math"):
        inputs = packed((3, 4))
        with attnreg.use_backend("mine"):
            out = attnreg.varlen_attn(*inputs)
        with attnreg.use_backend("math"):
            thread = threading.Thread(target=out.sum().backward)
            thread.start()
            thread.join()
        assert ran() == {"mine": (1, 1)}
        assert inputs[0].grad is not None


def test_scopes_nest_and_the_backward_keeps_each(front, packed, fake, ran):
    with attnreg.register_backend(fake("one").backend), attnreg.register_backend(fake("two").backend):
        inputs = packed((3, 4))
        with attnreg.use_backend("one"):
            with attnreg.use_backend("two"):
                inner = attnreg.varlen_attn(*inputs)
            outer = attnreg.varlen_attn(*inputs)
        ran()
        inner.sum().backward()
        assert ran() == {"two": (0, 1)}
        outer.sum().backward()
        assert ran() == {"one": (0, 1)}


def test_a_scope_of_one_thread_is_unknown_to_another(packed, fake, ran):
    inputs = packed((3, 4), grad=False)
    with attnreg.register_backend(fake("mine").backend), attnreg.register_backend("math"):
        with attnreg.use_backend("mine"):
            thread = threading.Thread(target=attnreg.varlen_attn, args=inputs)
            thread.start()
            thread.join()
        assert ran() == {"math": (1, 0)}


def test_a_call_leads_over_a_scope(front, packed, fake, ran):
    inputs = packed((3, 4))
    with attnreg.register_backend(fake("mine").backend), attnreg.use_backend("mine"):
        attnreg.varlen_attn(*inputs, backend="math").sum().backward()
        assert ran() == {"math": (1, 1)}


def test_a_registration_removed_before_the_backward_leaves_it_to_what_is_there(front, packed, fake, ran):
    inputs = packed((3, 4))
    handle = attnreg.register_backend(fake("mine").backend)
    out = attnreg.varlen_attn(*inputs)
    handle.remove()
    ran()
    grad = random_like(out)
    got = torch.autograd.grad(out, inputs[:3], grad)
    expected = truth.varlen(*inputs[:5])[0]
    for one, other in zip(got, torch.autograd.grad(expected, inputs[:3], grad.double()), strict=True):
        truth.assert_near(one, other.double())
    assert "mine" not in ran()


# ---- autograd and modes


def test_autocast_casts_as_it_does_for_scaled_dot_product_attention(front, packed, fake):
    recorder = fake("mine")
    inputs = packed((3, 4), dtype=torch.float32)
    with attnreg.register_backend(recorder.backend):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attnreg.varlen_attn(*inputs)
        plain = attnreg.varlen_attn(*inputs)
    assert (out.dtype, plain.dtype) == (torch.bfloat16, torch.float32)
    assert [call[0].dtype for call in recorder.forwards] == [torch.bfloat16, torch.float32]
    truth.assert_near(out, truth.varlen(*inputs[:5])[0])
    out.float().sum().backward()
    assert inputs[0].grad.dtype == torch.float32


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_where_no_gradient_is_wanted(front, packed, fake, mode):
    recorder = fake("half", backward=False)
    inputs = packed((3, 4))
    with attnreg.register_backend(recorder.backend), mode():
        # A backend without a backward can be insisted on, as none is needed.
        out = attnreg.varlen_attn(*inputs, backend="half")
        again = attnreg.varlen_attn(*inputs, backend="half", seqused_k=integers(3, 4))
    assert not out.requires_grad
    truth.assert_near(out, truth.varlen(*inputs[:5])[0])
    assert torch.equal(out, again)
    assert len(recorder.forwards) == 2


def test_inference_tensors_are_as_good_as_others(front):
    with torch.inference_mode():
        query = torch.randn(7, 4, 16)
        cu = offsets(3, 4)
        out = attnreg.varlen_attn(query, query, query, cu, cu, 4, 4)
        cu[1] = 4
        changed = attnreg.varlen_attn(query, query, query, cu, cu, 4, 4)
    expected = [truth.varlen(*[query.clone()] * 3, c, c)[0] for c in (offsets(3, 4), offsets(4, 3))]
    truth.assert_near(out, expected[0])
    truth.assert_near(changed, expected[1])


def test_a_kept_graph_gives_the_same_gradients_twice(front, packed, ran):
    inputs = packed(LENGTHS_Q, LENGTHS_K)
    out = attnreg.varlen_attn(*inputs)
    grad = random_like(out)
    first = torch.autograd.grad(out, inputs[:3], grad, retain_graph=True)
    second = torch.autograd.grad(out, inputs[:3], grad)
    assert all(map(torch.equal, first, second))
    assert [sum(n) for n in zip(*ran().values(), strict=True)] == [1, 2]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, inputs[:3], grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_and_gives_the_same_gradients(front, packed, ran, reentrant):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)

    def layer(query, key, value):
        return attnreg.varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, window_size=CAUSAL)

    plain = layer(*inputs)
    grad = random_like(plain)
    expected = torch.autograd.grad(plain, inputs, grad)
    ran()
    out = checkpoint(layer, *inputs, use_reentrant=reentrant)
    out.backward(grad)
    assert all(torch.equal(one.grad, other) for one, other in zip(inputs, expected, strict=True))
    assert [sum(n) for n in zip(*ran().values(), strict=True)] == [2, 1]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_scope_inside_a_checkpoint_holds_when_it_recomputes(front, packed, fake, ran, reentrant):
    *inputs, cu_q, cu_k, max_q, max_k = packed((3, 4))

    def layer(*tensors):
        with attnreg.use_backend("mine"):
            return attnreg.varlen_attn(*tensors, cu_q, cu_k, max_q, max_k)

    with attnreg.register_backend(fake("mine").backend), attnreg.register_backend("math"):
        checkpoint(layer, *inputs, use_reentrant=reentrant).sum().backward()
        assert ran() == {"mine": (2, 1)}


def test_the_gradient_of_a_sum_has_no_strides_and_is_right(front, packed):
    inputs = packed(LENGTHS_Q, LENGTHS_K)
    attnreg.varlen_attn(*inputs).sum().backward()
    expected = torch.autograd.grad(truth.varlen(*inputs[:5])[0].sum(), inputs[:3])
    for tensor, right in zip(inputs, expected, strict=False):
        truth.assert_near(tensor.grad, right.double())


def test_only_the_inputs_that_need_a_gradient_get_one(front, packed):
    query, key, value, *rest = packed((3, 4), grad=False)
    value.requires_grad_()
    attnreg.varlen_attn(query, key, value, *rest).sum().backward()
    assert value.grad is not None
    assert query.grad is None
    assert key.grad is None


def test_a_double_backward_is_an_error(front, packed):
    inputs = packed((3, 4))
    out = attnreg.varlen_attn(*inputs)
    (grad,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"not implemented|no autograd formula was registered"):
        grad.sum().backward()


# ---- layouts

LAYOUTS = {
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other element": lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2],
    "unaligned": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "rows of odd bytes": lambda x: torch.cat((x, x.new_zeros(*x.shape[:2], 1)), -1)[..., :-1],
    "one key head for all": lambda x: x[:, :1].expand_as(x),
    "one token for all": lambda x: x[:1].expand_as(x),
    "part of a fused projection": lambda x: torch.stack((x, x, x), 1)[:, 1],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_strides_give_what_contiguous_tensors_do(front, packed, layout):
    *plain, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, grad=False)
    laid_out = [layout(x).requires_grad_() for x in plain]
    contiguous = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in laid_out]
    assert any(
        x.stride() != y.stride() or x.storage_offset() for x, y in zip(laid_out, contiguous, strict=True)
    )
    out = attnreg.varlen_attn(*laid_out, cu_q, cu_k, max_q, max_k, window_size=CAUSAL)
    expected, _ = truth.varlen(*contiguous, cu_q, cu_k, window=CAUSAL)
    truth.assert_near(out, expected)
    grad = layout(random_like(out))
    got = torch.autograd.grad(out, laid_out, grad)
    right = torch.autograd.grad(expected, contiguous, grad.double())
    for one, other in zip(got, right, strict=True):
        truth.assert_near(one, other.double())


# ---- empty things and the tail

EMPTY = {
    "no sequence": ((), ()),
    "a sequence without queries": ((3, 0, 4), (3, 2, 4)),
    "a sequence without keys": ((3, 2, 4), (3, 0, 4)),
    "a sequence without either": ((3, 0, 4), (3, 0, 4)),
    "the first empty": ((0, 4), (0, 4)),
    "the last empty": ((4, 0), (4, 0)),
    "all empty": ((0, 0, 0), (0, 0, 0)),
    "no query at all": ((0, 0), (3, 4)),
    "no key at all": ((3, 4), (0, 0)),
}


@pytest.mark.parametrize(("lengths_q", "lengths_k"), EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("window", [(-1, -1), CAUSAL])
def test_empty_sequences_give_zeros_and_take_no_gradient(front, packed, lengths_q, lengths_k, window):
    *inputs, cu_q, cu_k, max_q, max_k = packed(lengths_q, lengths_k)
    aux = attnreg.AuxRequest(lse=True)
    result = attnreg.varlen_attn(*inputs, cu_q, cu_k, max_q, max_k, return_aux=aux, window_size=window)
    check_against_truth(inputs, result, *truth.varlen(*inputs, cu_q, cu_k, window=window))


def test_rows_that_see_no_key_give_zeros_and_take_no_gradient(front, packed):
    *inputs, cu_q, cu_k, max_q, max_k = packed((6, 3), (2, 3))
    aux = attnreg.AuxRequest(lse=True)
    out, lse = attnreg.varlen_attn(*inputs, cu_q, cu_k, max_q, max_k, True, aux)
    assert torch.equal(out[:4], torch.zeros(4, 4, 16))
    assert torch.equal(lse[:, :4], torch.full((4, 4), -torch.inf))
    check_against_truth(inputs, (out, lse), *truth.varlen(*inputs, cu_q, cu_k, window=CAUSAL))
    attnreg.varlen_attn(*inputs, cu_q, cu_k, max_q, max_k, True).sum().backward()
    assert torch.equal(inputs[0].grad[:4], torch.zeros(4, 4, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_tokens_past_the_last_offset_give_and_take_nothing(front, packed, dtype, poison):
    *inputs, cu_q, cu_k, max_q, max_k = packed((*LENGTHS_Q, 3), (*LENGTHS_K, 2), dtype=dtype, grad=False)
    cu_q, cu_k = cu_q[:-1], cu_k[:-1]
    tails = [int(cu[-1]) for cu in (cu_q, cu_k, cu_k)]
    for tensor, tail in zip(inputs, tails, strict=True):
        tensor[tail:] = poison
        tensor.requires_grad_()
    out = attnreg.varlen_attn(*inputs, cu_q, cu_k, max_q, max_k, window_size=CAUSAL)
    assert torch.equal(out[tails[0] :], torch.zeros_like(out[tails[0] :]))
    grad = random_like(out)
    grad[tails[0] :] = poison
    got = torch.autograd.grad(out, inputs, grad)
    for gradient, tail in zip(got, tails, strict=True):
        assert torch.equal(gradient[tail:], torch.zeros_like(gradient[tail:]))
    kept = [x.detach()[:tail].requires_grad_() for x, tail in zip(inputs, tails, strict=True)]
    expected, _ = truth.varlen(*kept, cu_q, cu_k, window=CAUSAL)
    truth.assert_near(out[: tails[0]], expected)
    right = torch.autograd.grad(expected, kept, grad[: tails[0]].double())
    for gradient, tail, other in zip(got, tails, right, strict=True):
        truth.assert_near(gradient[:tail], other.double())


def test_nan_in_a_token_that_counts_is_not_hidden(front, packed):
    *inputs, cu_q, cu_k, max_q, max_k = packed((3, 4), grad=False)
    inputs[2][1] = torch.nan
    out = attnreg.varlen_attn(*inputs, cu_q, cu_k, max_q, max_k)
    assert out[:3].isnan().all()
    assert not out[3:].isnan().any()


# ---- bad input


def meta(tensor):
    return tensor.to("meta")


Q, K = torch.randn(7, 4, 16), torch.randn(7, 4, 16)
CU = offsets(3, 4)
GOOD = {"query": Q, "key": K, "value": K, "cu_seq_q": CU, "cu_seq_k": CU, "max_q": 4, "max_k": 4}
POOL = torch.randn(4, 4, 4, 16)
PAGED = {
    "key": POOL,
    "value": POOL,
    "cu_seq_k": None,
    "max_k": 8,
    "block_table": integers(0, 1, 2, 3).view(2, 2),
    "seqused_k": integers(5, 7),
}

BAD = {
    "query of rank 2": (
        {"query": Q[0]},
        "query: got shape (4, 16), expected 3 dimensions (tokens, heads, head_dim)",
    ),
    "query of rank 4": (
        {"query": Q[None]},
        "query: got shape (1, 7, 4, 16), expected 3 dimensions (tokens, heads, head_dim)",
    ),
    "query of rank 1": (
        {"query": Q[0, 0]},
        "query: got shape (16,), expected 3 dimensions (tokens, heads, head_dim)",
    ),
    "key of rank 4": (
        {"key": K[None]},
        "key: got shape (1, 7, 4, 16), expected 3 dimensions (tokens, heads, head_dim)",
    ),
    "value of rank 4": (
        {"value": K[None]},
        "value: got shape (1, 7, 4, 16), expected 3 dimensions (tokens, heads, head_dim)",
    ),
    "head dims": (
        {"key": K[..., :8]},
        "head_dim: got 16 for query and 8 for key, expected equal ones",
    ),
    "key and value lengths": (
        {"value": K[:5]},
        "key and value: got shapes (7, 4, 16) and (5, 4, 16), expected equal lengths",
    ),
    "key and value heads": (
        {"value": K[:, :2]},
        "key and value: got shapes (7, 4, 16) and (7, 2, 16), expected equal lengths",
    ),
    "fewer key heads": (
        {"key": K[:, :2], "value": K[:, :2]},
        "heads: got 4 for query and 2 for key, expected as many (or enable_gqa=True)",
    ),
    "no multiple": (
        {"key": K[:, :3], "value": K[:, :3], "enable_gqa": True},
        "heads: got 4 for query and 3 for key, expected a multiple",
    ),
    "no key head": (
        {"key": K[:, :0], "value": K[:, :0], "enable_gqa": True},
        "heads: got 4 for query and 0 for key, expected a multiple",
    ),
    "mixed dtypes": (
        {"key": K.half()},
        "dtype: got query torch.float32, key torch.float16, value torch.float32, expected one dtype",
    ),
    "integers": (
        {"query": Q.int(), "key": K.int(), "value": K.int()},
        "dtype: got torch.int32, expected a floating-point dtype",
    ),
    "complex numbers": (
        {"query": Q.cfloat(), "key": K.cfloat(), "value": K.cfloat()},
        "dtype: got torch.complex64, expected a floating-point dtype",
    ),
    "key elsewhere": (
        {"key": meta(K)},
        "device: got query cpu, key meta, value cpu, expected one device",
    ),
    "value elsewhere": (
        {"value": meta(K)},
        "device: got query cpu, key cpu, value meta, expected one device",
    ),
    "cu_seq_q elsewhere": (
        {"cu_seq_q": meta(CU)},
        "cu_seq_q: got a tensor on meta, expected cpu, where the query is",
    ),
    "cu_seq_k elsewhere": (
        {"cu_seq_k": meta(CU)},
        "cu_seq_k: got a tensor on meta, expected cpu, where the query is",
    ),
    "seqused_k elsewhere": (
        {"seqused_k": meta(integers(3, 4))},
        "seqused_k: got a tensor on meta, expected cpu, where the query is",
    ),
    "cu_seq_q int64": ({"cu_seq_q": CU.long()}, "cu_seq_q: got torch.int64, expected torch.int32"),
    "cu_seq_k int64": ({"cu_seq_k": CU.long()}, "cu_seq_k: got torch.int64, expected torch.int32"),
    "seqused_k float": (
        {"seqused_k": torch.ones(2)},
        "seqused_k: got torch.float32, expected torch.int32",
    ),
    "cu_seq_q of rank 2": ({"cu_seq_q": CU[None]}, "cu_seq_q: got shape (1, 3), expected 1 dimension"),
    "cu_seq_k of rank 0": ({"cu_seq_k": CU[0]}, "cu_seq_k: got shape (), expected 1 dimension"),
    "cu_seq_q without element": (
        {"cu_seq_q": CU[:0]},
        "cu_seq_q: got no element, expected batch + 1 offsets, the first of them 0",
    ),
    "no cu_seq_k": (
        {"cu_seq_k": None},
        "cu_seq_k: got None, expected a tensor (None goes with a block_table)",
    ),
    "cu_seq_k of another length": (
        {"cu_seq_k": offsets(7)},
        "cu_seq_k: got 2 rows, expected 3, as cu_seq_q has 3 offsets",
    ),
    "seqused_k of another length": (
        {"seqused_k": integers(3, 4, 5)},
        "seqused_k: got 3 rows, expected 2, as cu_seq_q has 3 offsets",
    ),
    "negative max_q": ({"max_q": -1}, "max_q: got -1, expected 0 or more"),
    "negative max_k": ({"max_k": -1}, "max_k: got -1, expected 0 or more"),
    "max_q too small": ({"max_q": 3}, "max_q: got 3, expected at least 4, the longest sequence"),
    "max_k too small": ({"max_k": 3}, "max_k: got 3, expected at least 4, the longest sequence"),
    "first offset": ({"cu_seq_q": integers(1, 3, 7)}, "cu_seq_q: got first offset 1, expected 0"),
    "first offset of the keys": (
        {"cu_seq_k": integers(-1, 3, 7)},
        "cu_seq_k: got first offset -1, expected 0",
    ),
    "decreasing offsets": (
        {"cu_seq_q": integers(0, 4, 3)},
        "cu_seq_q: got 3 after 4 at index 2, expected no decrease",
    ),
    "decreasing offsets of the keys": (
        {"cu_seq_k": integers(0, 8, 7), "max_k": 8},
        "cu_seq_k: got 7 after 8 at index 2, expected no decrease",
    ),
    "offsets past the end": (
        {"cu_seq_q": integers(0, 4, 8)},
        "cu_seq_q: got last offset 8, expected at most 7, the tokens there are",
    ),
    "key offsets past the end": (
        {"cu_seq_k": integers(0, 4, 8)},
        "cu_seq_k: got last offset 8, expected at most 7, the tokens there are",
    ),
    "scale NaN": ({"scale": float("nan")}, "scale: got nan, expected a finite number"),
    "scale infinite": ({"scale": float("inf")}, "scale: got inf, expected a finite number"),
    "window below -1": (
        {"window_size": (-2, 0)},
        "window_size: got (-2, 0), expected (left, right), each -1 or more",
    ),
    "window of three": (
        {"window_size": (1, 2, 3)},
        "window_size: got (1, 2, 3), expected (left, right), each -1 or more",
    ),
    "pages of rank 3": (
        {**PAGED, "key": K},
        "key: got shape (7, 4, 16), expected 4 dimensions (batch, length, heads, head_dim)",
    ),
    "block_table of rank 1": (
        {**PAGED, "block_table": integers(0, 1)},
        "block_table: got shape (2,), expected 2 dimensions",
    ),
    "block_table int64": (
        {**PAGED, "block_table": PAGED["block_table"].long()},
        "block_table: got torch.int64, expected torch.int32",
    ),
    "block_table of another length": (
        {**PAGED, "block_table": integers(0, 1, 2).view(3, 1)},
        "block_table: got 3 rows, expected 2, as cu_seq_q has 3 offsets",
    ),
    "block_table elsewhere": (
        {**PAGED, "block_table": meta(PAGED["block_table"])},
        "block_table: got a tensor on meta, expected cpu, where the query is",
    ),
}


# the fake of attnreg's op, before any check; the result is uninitialised memory. Ranks below 2 are an
# IndexError, as varlen_attn reads shape[-2] first.
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("wrong", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_an_error_and_changes_nothing(ran, wrong, message, grad):
    arguments = GOOD | wrong
    if grad and arguments["query"].is_floating_point():
        arguments = arguments | {"query": arguments["query"].clone().requires_grad_()}
    with pytest.raises(InvalidInputError) as error:
        attnreg.varlen_attn(**arguments)
    assert str(error.value) == message
    assert ran() == {}
    truth.assert_near(attnreg.varlen_attn(**GOOD), truth.varlen(Q, K, K, CU, CU)[0])


def test_a_dense_call_of_two_batch_sizes_is_an_error(ran):
    query, key = torch.randn(2, 5, 4, 16), torch.randn(3, 5, 4, 16)
    attnreg.install()
    with pytest.raises(InvalidInputError) as error:
        torch.ops.aten._flash_attention_forward(query, key, key, None, None, 5, 5, 0.0, False, False)
    assert str(error.value) == "batch: got 2 for query and 3 for key, expected equal ones"
    attnreg.uninstall()
    assert ran() == {}


# Values that only a CPU can check for nothing: a kernel would read past the end, or another sequence.
BAD_VALUES = {
    "negative seqused_k": {"seqused_k": integers(-1, 2)},
    "seqused_k past its sequence": {"seqused_k": integers(4, 4)},
    "seqused_k past its pages": {**PAGED, "seqused_k": integers(5, 9)},
    "seqused_k past max_k": {**PAGED, "max_k": 6},
    "a page that isn't there": {**PAGED, "block_table": integers(0, 1, 2, 4).view(2, 2)},
    "a negative page": {**PAGED, "block_table": integers(0, 1, 2, -1).view(2, 2)},
}


@pytest.mark.parametrize("wrong", BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_numbers_of_keys_and_pages_are_an_error(wrong):
    with pytest.raises(InvalidInputError, match=r"^(seqused_k|block_table|max_k): got "):
        attnreg.varlen_attn(**GOOD | wrong)


def test_a_page_past_the_used_ones_may_be_anything(packed):
    table = integers(0, 99, 2, -1).view(2, 2)
    arguments = GOOD | PAGED | {"block_table": table, "seqused_k": integers(4, 3)}
    out = attnreg.varlen_attn(**arguments)
    keys = torch.cat((POOL[0], POOL[2][:3]))
    truth.assert_near(out, truth.varlen(Q, keys, keys, CU, offsets(4, 3))[0])


def test_numpy_integers_are_integers(front):
    out = attnreg.varlen_attn(
        Q, K, K, CU, CU, np.int64(4), np.int32(4), window_size=(np.int64(1), np.int64(0))
    )
    truth.assert_near(out, truth.varlen(Q, K, K, CU, CU, window=(1, 0))[0])


def test_offsets_changed_in_place_are_checked_again(front, ran):
    cu = offsets(3, 4)
    attnreg.varlen_attn(Q, K, K, cu, cu, 4, 4)
    attnreg.varlen_attn(Q, K, K, cu, cu, 4, 4)
    cu[2] = 9
    with pytest.raises(InvalidInputError, match="cu_seq_q: got last offset 9, expected at most 7"):
        attnreg.varlen_attn(Q, K, K, cu, cu, 4, 4)
    cu[2], cu[1] = 7, 4
    truth.assert_near(attnreg.varlen_attn(Q, K, K, cu, cu, 4, 4), truth.varlen(Q, K, K, cu, cu)[0])
    ran()


def test_key_offsets_changed_in_place_are_checked_again(front):
    cu_q, cu_k = offsets(3, 4), offsets(3, 4)
    attnreg.varlen_attn(Q, K, K, cu_q, cu_k, 4, 4)
    cu_k[2] = 9
    with pytest.raises(InvalidInputError, match="cu_seq_k: got last offset 9, expected at most 7"):
        attnreg.varlen_attn(Q, K, K, cu_q, cu_k, 4, 4)


@pytest.mark.parametrize("write", ["numpy", "data"])
def test_offsets_written_behind_autograds_back_are_checked_again(front, write):
    cu = offsets(3, 4)
    attnreg.varlen_attn(Q, K, K, cu, cu, 4, 4)
    (cu.numpy() if write == "numpy" else cu.data)[2] = 9
    with pytest.raises(InvalidInputError, match="cu_seq_q: got last offset 9, expected at most 7"):
        attnreg.varlen_attn(Q, K, K, cu, cu, 4, 4)


def test_checked_offsets_are_not_taken_for_right_with_other_tokens():
    cu = offsets(3, 4)
    attnreg.varlen_attn(Q, K, K, cu, cu, 4, 4)
    with pytest.raises(InvalidInputError, match="cu_seq_q: got last offset 7, expected at most 6"):
        attnreg.varlen_attn(Q[:6], K, K, cu, cu, 4, 4)
    with pytest.raises(InvalidInputError, match="cu_seq_k: got last offset 7, expected at most 6"):
        attnreg.varlen_attn(Q, K[:6], K[:6], cu, cu, 4, 4)
    with pytest.raises(InvalidInputError, match="max_k: got 3, expected at least 4"):
        attnreg.varlen_attn(Q, K, K, cu, cu, 4, 3)
    with pytest.raises(InvalidInputError, match="max_q: got 3, expected at least 4"):
        attnreg.varlen_attn(Q, K, K, cu, cu, 3, 4)

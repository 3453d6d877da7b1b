"""Promises about packed calls of aten's flash and cuDNN ops: values, the LSE, and who runs them."""

import pytest
import torch
from support import truth
from support.cuda_ops import (
    BACKWARD,
    FLASH_OPTIONS,
    FORWARD,
    LENGTHS_K,
    LENGTHS_Q,
    NativeKernel,
    cudnn_varlen,
    described,
    flash_varlen,
    native_kernels,
    random_state,
)
from support.dense import CAUSAL, SCATTERING, assert_near, random_like, with_gradients

import attnreg
from attnreg.core.aten.routing import router
from attnreg.core.contract.capabilities import Range
from attnreg.core.dispatch.planning import Native
from attnreg.core.torchlib import versions
from attnreg.errors import UnsupportedInputError

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_packed_right(out, inputs, cu_q, cu_k, **meant):
    """Check output and gradients against the reference."""
    assert_near(with_gradients(out, inputs), inputs, truth.varlen(*inputs, cu_q, cu_k, **meant)[0])


# ---- cuDNN's op


@pytest.mark.parametrize("token_major", [True, False])
def test_the_cudnn_op_is_right_with_the_lse_of_older_and_newer_torches(
    route, packed, ran, monkeypatch, fake, token_major
):
    monkeypatch.setattr(versions, "CUDNN_LSE_IS_TOKEN_MAJOR", token_major)
    route()
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    recorder = fake("mine")
    attnreg.register_backend(recorder.backend)
    out, lse, *lengths = cudnn_varlen(inputs, cu_q, cu_k, max_q, max_k, scale=0.3)[:6]
    for got, given in zip(lengths, (cu_q, cu_k, max_q, max_k), strict=True):
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(given))
    # Up to torch 2.13 this op has its LSE by tokens, with one dimension more.
    assert lse.shape == ((17, 4, 1) if token_major else (4, 17))
    assert lse.is_contiguous()
    _, expected_lse = truth.varlen(*inputs, cu_q, cu_k, scale=0.3)
    truth.assert_near(lse.squeeze(-1).t() if token_major else lse, expected_lse)
    assert_packed_right(out, inputs, cu_q, cu_k, scale=0.3)
    truth.assert_near(recorder.backwards[0][5], expected_lse)
    assert ran() == {"mine": (1, 1)}


def test_causal_packed_sequences_of_equal_lengths_are_served_and_a_scope_holds_for_the_backward(
    route, packed, ran, fake
):
    route()
    *inputs, cu, _, longest, _ = packed(LENGTHS_Q)
    with attnreg.register_backend(fake("mine").backend), attnreg.register_backend("math"):
        with attnreg.use_backend("mine"):
            out, *_ = cudnn_varlen(inputs, cu, cu, longest, longest, causal=True)
        assert_packed_right(out, inputs, cu, cu, window=CAUSAL)
    assert ran() == {"mine": (1, 1)}


# Arguments that torch 2.14 brought, which the dispatcher of an older one would refuse.
USED = torch.tensor([3, 0, 8, 1], dtype=torch.int32)
FORWARD_ONLY = {
    "seqused_k": {"seqused_k": USED},
    "block_table": {"seqused_k": USED, "block_table": torch.arange(8, dtype=torch.int32).view(4, 2)},
}


@pytest.mark.parametrize("options", FORWARD_ONLY.values(), ids=FORWARD_ONLY)
@pytest.mark.parametrize("grad", [False, True])
def test_arguments_that_the_backward_lacks_are_right_in_the_forward_and_refused_after(
    routes, packed, ran, options, grad
):
    forward, backward = (router(routes[f"_cudnn_attention_{one}"], None) for one in ("forward", "backward"))
    query, key, value, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, grad=grad)
    pages, cu_pages = [key, value], cu_k
    if "block_table" in options:
        pages, cu_pages = [torch.randn(8, 4, 4, 16) for _ in range(2)], None
        key, value = (x.flatten(0, 1) for x in pages)
        cu_k = torch.arange(0, 33, 8)
    lengths = (cu_q, cu_pages, max_q, max_k)
    result, kept = forward(query, *pages, None, *lengths, True, scale=0.3, **options)
    assert kept is None
    truth.assert_near(result[0], truth.varlen(query, key, value, cu_q, cu_k, used=USED, scale=0.3)[0])
    arguments = (torch.ones(17, 4, 16), query, *pages, *result[:2], *result[6:8], None, *lengths, 0.0, False)
    if grad:
        with pytest.raises(UnsupportedInputError) as error:
            backward(*arguments)
        assert str(error.value) == (
            "seqused_k or block_table: aten::_cudnn_attention_backward receives neither, so its gradients "
            "would be wrong; call attnreg.varlen_attn, whose backward does"
        )
    assert [sum(n) for n in zip(*ran().values(), strict=True)] == [1, 0]


INPLACE = "_cudnn_attention_forward_no_dropout_inplace"
SCHEMA = (
    f"{INPLACE}(Tensor(a!) out, Tensor query, Tensor key, Tensor value, Tensor cum_seq_q, Tensor? cum_seq_k, "
    "SymInt max_q, SymInt max_k, bool is_causal=False, *, float? scale=None, Tensor? seqused_k=None, "
    "Tensor? block_table=None) -> Tensor logsumexp"
)


@pytest.fixture
def inplace():
    """Have the op of torch 2.15 that `varlen_attn_out` calls on Hopper and Blackwell, and return it."""
    library = None
    if not hasattr(torch.ops.aten, INPLACE):
        library = torch.library.Library("aten", "FRAGMENT")
        library.define(SCHEMA)
    yield lambda *given, **options: getattr(torch.ops.aten, INPLACE)(*given, **options)
    if library is not None:
        library._destroy()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"seqused_k": USED}], ids=str)
def test_the_inplace_op_writes_the_output_and_returns_the_lse_of_a_backend(
    inplace, route, packed, ran, fake, options
):
    route()
    query, key, value, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, grad=False)
    meant = {"window": CAUSAL} if "is_causal" in options else {"used": USED} if options else {}
    if "is_causal" in options:  # it is aligned as attnreg's where both sides have the same lengths
        query, cu_q, max_q = key.flip(0), cu_k, max_k
    recorder = fake("mine")
    for repeated in range(3):
        out = torch.full_like(query, torch.nan)
        with attnreg.register_backend(recorder.backend):
            lse = inplace(out, query, key, value, cu_q, cu_k, max_q, max_k, scale=0.3, **options)
        expected, expected_lse = truth.varlen(query, key, value, cu_q, cu_k, scale=0.3, **meant)
        truth.assert_near(out, expected)
        truth.assert_near(lse, expected_lse)
        assert (lse.shape, lse.is_contiguous()) == ((4, len(query)), True)
        assert ran() == {"mine": (1, 0)}, repeated
        query = query.neg()


def test_the_inplace_op_runs_torchs_kernel_where_nothing_else_is_asked_for_or_can_run(
    inplace, route, packed, ran, fake
):
    def native(out, query, key, value, cu_q, cu_k, *rest, **options):
        out.fill_(3.0)
        return query.new_full((4, 17), 5.0)

    kernel = NativeKernel(native)
    route({INPLACE: kernel})
    query, key, value, *lengths = packed(LENGTHS_Q, LENGTHS_K, grad=False)

    def attend(**options):
        out = torch.full_like(query, torch.nan)
        lse = inplace(out, query, key, value, *lengths, **options)
        assert bool((out == 3.0).all()) and bool((lse == 5.0).all())

    attend()
    assert ran() == {}
    with attnreg.register_backend(fake("mine", dtypes=("float16",)).backend):
        attend(scale=0.3)
    assert kernel.calls[-1][1] == {"scale": 0.3}
    assert ran() == {"cuDNN": (1, 0)}


def test_the_inplace_op_leaves_a_mask_of_another_alignment_to_torch(inplace, route, packed, ran):
    route()
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, grad=False)
    with attnreg.register_backend("math"), pytest.raises(UnsupportedInputError) as error:
        inplace(torch.empty_like(inputs[0]), *inputs, cu_q, cu_k, max_q, max_k, True)
    assert str(error.value) == (
        f"aten::{INPLACE}: a packed call with a mask aligned top-left, "
        "and torch has no kernel for this device"
    )
    assert ran() == {}


# ---- the flash op


NO_KEYS = ((6, 3), (2, 3))  # with a causal mask the first four rows see no key


@pytest.mark.parametrize("native", [False, True])
def test_the_lse_of_a_row_without_keys_is_that_of_torchs_own_kernel(route, packed, native):
    route(native_kernels() if native else None)
    *inputs, cu_q, cu_k, max_q, max_k = packed(*NO_KEYS)
    attnreg.register_backend("math")
    out, lse, *_ = flash_varlen(inputs, cu_q, cu_k, max_q, max_k, causal=True)
    assert torch.equal(lse[:, :4], torch.full((4, 4), torch.inf if native else -torch.inf))
    truth.assert_near(lse[:, 4:], truth.varlen(*inputs, cu_q, cu_k, window=CAUSAL)[1][:, 4:])
    assert_packed_right(out, inputs, cu_q, cu_k, window=CAUSAL)


def test_a_backend_is_given_minus_infinity_after_a_forward_of_torchs_own(route, packed, ran, fake):
    kernels = native_kernels()
    route(kernels)
    *inputs, cu_q, cu_k, max_q, max_k = packed(*NO_KEYS)
    out, *_ = flash_varlen(inputs, cu_q, cu_k, max_q, max_k, causal=True)
    recorder = fake("mine")
    with attnreg.register_backend(recorder.backend):
        assert_packed_right(out, inputs, cu_q, cu_k, window=CAUSAL)
        assert ran() == {"mine": (0, 1)}
        assert len(kernels[FORWARD["flash"]].calls) == 1
        flash_varlen(inputs, cu_q, cu_k, max_q, max_k, p=0.2, causal=True)[0].sum().backward()
        assert ran() == {"mine": (1, 1)}
    for *_, lse, _ in recorder.backwards:  # with dropout as well
        assert torch.equal(lse[:, :4], torch.full((4, 4), -torch.inf))


@pytest.mark.parametrize("scoped", [False, True])
def test_torchs_kernel_is_given_plus_infinity_after_a_forward_of_a_backend(route, packed, ran, scoped):
    kernels = native_kernels()  # whose backward asserts it
    route(kernels)
    *inputs, cu_q, cu_k, max_q, max_k = packed(*NO_KEYS)
    lengths = (cu_q, cu_k, max_q, max_k)
    if scoped:
        with attnreg.use_backend("math"), torch.no_grad():
            out, lse, rng_state, *_ = flash_varlen(inputs, *lengths, causal=True)
        saved = (out, lse, *lengths, 0.0, True, rng_state, torch.empty(0))  # the choice token is lost
        torch.ops.aten._flash_attention_backward(torch.ones_like(out), *inputs, *saved)
    else:
        with attnreg.register_backend("math"):
            out, *_ = flash_varlen(inputs, *lengths, causal=True)
        assert_packed_right(out, inputs, cu_q, cu_k, window=CAUSAL)
    assert ran() == {"math": (1, 0)}
    assert len(kernels[BACKWARD["flash"]].calls) == 1


def test_shapes_dtypes_and_strides_are_those_of_torchs_meta_function(route, packed, fake):
    route()
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, grad=False)
    lengths = (cu_q, cu_k, max_q, max_k)

    def to_meta(*values):
        return [x.to("meta") if isinstance(x, torch.Tensor) else x for x in values]

    on_meta = [x.to("meta").as_strided(x.shape, x.stride()) for x in inputs]
    backward = torch.ops.aten._flash_attention_backward
    with attnreg.register_backend(fake("scattered", load=lambda: SCATTERING).backend):
        result = flash_varlen(inputs, *lengths)
        assert described(result) == described(flash_varlen(on_meta, *to_meta(*lengths)))
        grad, saved = random_like(result[0]), (*result[:2], *lengths, 0.0, False, *result[2:4])
        grads = backward(grad, *inputs, *saved)
        assert described(grads) == described(backward(grad.to("meta"), *on_meta, *to_meta(*saved)))
        assert attnreg.stats().calls == {"scattered": {"forward": 1, "backward": 1}}


def test_every_argument_of_the_flash_op_reaches_torchs_kernel(route, packed, ran):
    kernel = NativeKernel(lambda query, *args, **kw: (query, query, *random_state(), query))
    route({FORWARD["flash"]: kernel})
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, grad=False)
    options = {
        "scale": 0.3,
        "window_size_left": 3,
        "window_size_right": 1,
        "seqused_k": torch.tensor([1, 2, 3, 1], dtype=torch.int32),
        "alibi_slopes": torch.ones(4),
        "block_table": torch.zeros(4, 1, dtype=torch.int32),
        "num_splits": 2,
    }
    options = {name: options[name] for name in FLASH_OPTIONS}
    with attnreg.register_backend("math"):
        flash_varlen(inputs, cu_q, cu_k, max_q, max_k, p=0.25, causal=True, debug=True, **options)
    ((args, kwargs),) = kernel.calls
    assert all(x is y for x, y in zip(args[:5], (*inputs, cu_q, cu_k), strict=True))
    assert args[5:] == (8, 8, 0.25, True, True)
    assert kwargs.keys() == options.keys()
    assert all(kwargs[name] is value or kwargs[name] == value for name, value in options.items())
    assert ran() == {}


def test_torchs_own_kernel_is_not_given_head_dims_that_only_padding_makes_possible(
    route, routes, packed, ran, fake
):
    kernels = native_kernels()
    for kind in (FORWARD, BACKWARD):
        routes[kind["flash"]] = routes[kind["flash"]]._replace(native=Native("mine", judged=True))
    route(kernels)
    recorder = fake("mine", head_dim=Range(8, 256, 8), head_dim_v=None)  # whose kernel that of the op is
    with attnreg.register_backend(recorder.backend):
        for dim, seen in ((16, set()), (13, {16}), (13, {16}), (16, set())):
            *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, dim=dim)
            out, *_ = flash_varlen(inputs, cu_q, cu_k, max_q, max_k)
            assert_packed_right(out, inputs, cu_q, cu_k)
            assert ran() == {"mine": (1, 1)}
            given = *(x[:3] for x in recorder.forwards), *(x[1:4] for x in recorder.backwards)
            assert {x.shape[-1] for tensors in given for x in tensors} == seen
            recorder.forwards.clear()
            recorder.backwards.clear()
    of_torch = [args[0].shape[-1] for args, _ in kernels[FORWARD["flash"]].calls]
    assert of_torch == [16, 16]
    assert [args[0].shape[-1] for args, _ in kernels[BACKWARD["flash"]].calls] == [16, 16]

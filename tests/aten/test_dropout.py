"""Promises about dropout in the ops that torch has for CUDA alone: the mask, and who runs the backward."""

import pytest
import torch
from support.cuda_ops import (
    BACKWARD,
    FORWARD,
    LENGTHS_Q,
    NATIVE,
    SDPA,
    backward,
    call,
    cudnn_varlen,
    flash_varlen,
    native_kernels,
    random_state,
)
from support.dense import qkv, random_like, transposed

import attnreg
from attnreg.errors import UnsupportedInputError

pytestmark = pytest.mark.usefixtures("one_thread")


def flash_op(*inputs, p):
    """Call aten's flash op, whose tensors are (B, S, H, D)."""
    lengths = (None, None, inputs[0].shape[2], inputs[1].shape[2])
    return flash_varlen(transposed(*inputs), *lengths, p=p)[0].transpose(1, 2)


def cudnn_op(*inputs, p):
    """Call aten's cuDNN op on packed sequences."""
    batch, _, length, _ = inputs[0].shape
    packed = [x.transpose(1, 2).flatten(0, 1) for x in inputs]
    cu = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32)
    out, *_ = cudnn_varlen(packed, cu, cu, length, length, p=p)
    return out.unflatten(0, (batch, length)).transpose(1, 2)


DROPPING = {
    "flash": lambda *inputs, p: call("flash", inputs, p)[0],
    "cudnn": lambda *inputs, p: call("cudnn", inputs, p)[0],
    "flash op": flash_op,
    "cudnn op": cudnn_op,
}


@pytest.mark.parametrize("attend", DROPPING.values(), ids=DROPPING)
def test_the_backward_drops_what_the_forward_dropped(route, ran, attend):
    route()
    inputs = qkv(3, 3, heads=2, dim=2, dtype=torch.float64)
    grad = random_like(inputs[0])

    def loss(*tensors):
        torch.manual_seed(7)
        return (attend(*tensors, p=0.4) * grad).sum()

    with attnreg.register_backend("math"):
        torch.autograd.grad(loss(*inputs), inputs)
        assert ran() == {"math": (1, 1)}
        options = {"eps": 1e-5, "rtol": 1e-5, "check_undefined_grad": False, "fast_mode": True}
        assert torch.autograd.gradcheck(loss, inputs, **options)


@pytest.mark.parametrize("attend", DROPPING.values(), ids=DROPPING)
def test_dropout_drops_at_its_rate_and_scales_the_rest(route, attend):
    route()
    query, key, _ = (x.detach() for x in qkv(64, 64, dim=64))
    value = torch.eye(64).expand(2, 4, 64, 64).contiguous()  # the output is then the weights
    attnreg.register_backend("math")
    plain = attend(query, key, value, p=0.0)
    dropped, other = (attend(query, key, value, p=0.3) for _ in range(2))
    gone = dropped == 0.0
    assert abs(gone.float().mean().item() - 0.3) < 0.02
    torch.testing.assert_close(dropped[~gone], plain[~gone] / 0.7)
    assert not torch.equal(gone, other == 0.0)
    for alike in (gone[0, 0] == gone[0, 1], gone[0, 0] == gone[1, 0]):
        assert 0.4 < alike.float().mean() < 0.75  # another mask for every head and batch


@pytest.mark.parametrize("attend", DROPPING.values(), ids=DROPPING)
def test_dropout_ties_the_backward_to_the_forwards_backend(route, ran, fake, attend):
    route()
    inputs = qkv()
    with attnreg.register_backend(fake("mine").backend):
        out = attend(*inputs, p=0.2)
        with attnreg.register_backend("math"), attnreg.use_backend("math"):
            out.sum().backward()
        assert ran() == {"mine": (1, 1)}
    for limits, reason in (
        ({"backward": False}, "backward: has no backward"),
        ({"dropout": False}, "dropout_p must be 0, got 0.2"),
    ):
        attnreg.reset_stats()
        with attnreg.register_backend(fake("half", **limits).backend):
            attend(*inputs, p=0.2)
            assert {row.reason for row in attnreg.stats().fallbacks if row.backend == "half"} == {reason}
            assert "half" not in ran()
            attend(*inputs, p=0.0)
            assert ran()["half"] == (1, 0)


@pytest.mark.parametrize("kind", SDPA)
def test_a_mask_that_torchs_own_kernel_drew_stays_with_it(route, ran, kind):
    kernels = native_kernels()
    route(kernels)
    inputs = qkv()
    attnreg.core.policy.current.activate(True)
    out, *_, seed, offset, _ = call(kind, inputs, 0.2)
    with attnreg.register_backend("math"):
        out.sum().backward()
    assert ran() == {NATIVE[kind]: (1, 1)}
    # The choice token is a copy of the offset and has its value; the seed is as it was.
    ((args, _),) = kernels[BACKWARD[kind]].calls
    own_seed, own_offset = (torch.tensor([3, 4]), 0) if kind == "flash" else (torch.tensor(3), 4)
    saved = args[12:14] if kind == "flash" else args[6:8]
    for one, other in ((seed, offset), saved):
        assert torch.equal(one.to(torch.int64), own_seed)
        assert other.item() == own_offset
    for _ in range(3):  # and so in repeated calls
        call(kind, inputs, 0.2)[0].sum().backward()
    assert ran() == {NATIVE[kind]: (3, 3)}


@pytest.mark.parametrize(("kind", "packs"), [("flash", False), ("cudnn", False), ("cudnn", True)])
def test_torchs_own_kernel_draws_its_dropout_as_without_attnreg(route, packed, kind, packs):
    drawn, kernels = [], native_kernels()
    native = kernels[FORWARD[kind]].function

    def drawing(query, *rest, **options):
        drawn.append(torch.rand(()).item())
        if packs:
            return query.clone(), query.new_zeros(17, 4, 1), None, None, 8, 8, *random_state(), None
        return native(query, *rest, **options)

    kernels[FORWARD[kind]].function = drawing
    route(kernels)
    attnreg.core.policy.current.activate(True)
    *inputs, cu, _, longest, _ = packed(LENGTHS_Q, grad=False)
    for _ in range(2):
        torch.manual_seed(3)
        if packs:
            cudnn_varlen(inputs, cu, cu, longest, longest, p=0.2)
        else:
            call(kind, [x.detach() for x in qkv()], 0.2)
    torch.manual_seed(3)
    assert drawn == [torch.rand(()).item()] * 2


@pytest.mark.parametrize("kind", SDPA)
@pytest.mark.parametrize("native", [False, True])
def test_a_mask_of_unknown_origin_is_an_error(route, ran, kind, native):
    route(native_kernels() if native else None)
    inputs = [x.detach() for x in qkv()]
    attnreg.register_backend("math")

    def forward(p):
        return [x.clone() if isinstance(x, torch.Tensor) else x for x in call(kind, inputs, p)]

    result = forward(0.2)
    ran()
    with pytest.raises(UnsupportedInputError) as error:
        backward(kind, inputs, result, torch.ones_like(result[0]), 0.2)
    assert str(error.value) == (
        f"aten::{BACKWARD[kind]}: dropout_p 0.2: can't tell which backend drew the mask, as its "
        "forward ran before attnreg was active or a hook copied what it saved; register backends earlier"
    )
    assert ran() == {}
    # Without dropout nothing is lost with the token.
    result = forward(0.0)
    backward(kind, inputs, result, torch.ones_like(result[0]))
    assert ran() == {"math": (1, 1)}

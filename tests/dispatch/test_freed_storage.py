"""Promises about tensors whose storage was freed, as FSDP leaves parameters: an error, and no kernel runs."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

import attnreg
from attnreg import flash_attn
from attnreg.backends import math
from attnreg.core.contract.backend import Call
from attnreg.core.dispatch import call_cache
from attnreg.errors import UnsupportedInputError

pytestmark = pytest.mark.usefixtures("one_thread")

FREED = "got a tensor whose storage was freed .its size is 0., expected one in memory"
VARLEN = ("query", "key", "value", "cu_seq_q", "cu_seq_k")
FURTHER = {
    "seqused_k": torch.tensor([5, 20], dtype=torch.int32),
    "alibi_slopes": torch.ones(2),
    "sinks": torch.zeros(2),
}


class Blind:
    """A backend that reads no memory, so that a call it gets by mistake doesn't end the process."""

    def __init__(self):
        kernels = attnreg.Kernels(self.forward, self.backward)
        self.ran = []
        self.backend = attnreg.Backend(
            name="blind", forward=math.EVERYTHING, backward=math.EVERYTHING, load=lambda: kernels
        )

    def forward(self, query, key, value, call):
        self.ran.append("forward")
        lse = query.new_zeros(query.shape[:-1]).transpose(-1, -2).contiguous()
        return torch.zeros_like(query), lse

    def backward(self, grad_out, query, key, value, out, lse, call):
        self.ran.append("backward")
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


@pytest.fixture(params=["compiled", "python"])
def blind(installed, request):
    """Register a backend that reads no memory, with and without the call cache; returns it."""
    found = Blind()
    paused = call_cache.paused() if request.param == "python" else contextlib.nullcontext()
    with paused, attnreg.register_backend(found.backend):
        yield found


def packed():
    offsets = [torch.tensor([0, 5, 30], dtype=torch.int32) for _ in range(2)]
    return dict(zip(VARLEN, [*torch.randn(3, 30, 2, 16).clone().unbind(), *offsets], strict=True))


def separate(given):
    """Return copies, each a part of a larger storage of its own, as a fused projection makes them."""
    whole = {name: torch.cat([x.flatten(), x.flatten()]) for name, x in given.items()}
    return {name: whole[name][x.numel() :].view(x.shape) for name, x in given.items()}


def free(tensor):
    tensor.untyped_storage().resize_(0)


def refused(name, attend, blind):
    """Check that a call is refused, by the name of the freed tensor, and again when it is repeated."""
    ran = len(blind.ran)
    for _ in range(2):
        with pytest.raises(UnsupportedInputError, match=rf"^{name}: {FREED}"):
            attend()
    assert len(blind.ran) == ran


@pytest.mark.parametrize("times", [0, 3])
@pytest.mark.parametrize("name", [*VARLEN, *FURTHER])
def test_a_packed_call_is_refused_whatever_ran_before(blind, name, times):
    given = separate(packed() | ({name: FURTHER[name]} if name in FURTHER else {}))
    for _ in range(times):
        attnreg.varlen_attn(**given, max_q=25, max_k=25)
    assert blind.ran == ["forward"] * times
    free(given[name])
    refused(name, lambda: attnreg.varlen_attn(**given, max_q=25, max_k=25), blind)


@pytest.mark.parametrize("times", [0, 3])
@pytest.mark.parametrize("name", VARLEN[:4])
def test_the_backward_of_a_packed_call_is_refused(blind, name, times):
    given = separate(packed())
    for each in VARLEN[:3]:
        given[each].requires_grad_()

    def attend():
        return attnreg.varlen_attn(**given, max_q=25, max_k=25).sum()

    for _ in range(times):
        attend().backward()
    losses = [attend(), attend()]
    free(given[name])
    refused(name, lambda: losses.pop().backward(), blind)


@pytest.mark.parametrize("times", [0, 3])
@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
def test_a_dense_call_is_refused_forward_and_backward(blind, name, times):
    """By torch itself where it looks at the storage before it calls the op that is routed."""
    given = separate(dict.fromkeys(("query", "key", "value"), torch.randn(1, 2, 30, 16)))
    for x in given.values():
        x.requires_grad_()
    if name == "attn_mask":
        given |= separate({name: torch.zeros(1, 2, 30, 30)})
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attend():
        return op(*(given[each] for each in ("query", "key", "value")), attn_mask=given.get("attn_mask"))[0]

    for _ in range(times):
        attend().sum().backward()
    losses = [attend().sum(), attend().sum()]
    ran = len(blind.ran)
    free(given[name])
    of_torch = "out of bounds for storage of size 0"
    for call in (attend, lambda: F.scaled_dot_product_attention(**given), *(x.backward for x in losses)):
        with pytest.raises(RuntimeError, match=f"{FREED}|{of_torch}"):
            call()
    assert len(blind.ran) == ran
    with pytest.raises(UnsupportedInputError, match=FREED):
        attend()


def test_flash_attns_functions_refuse_it_too(blind):
    dense = separate(dict.fromkeys("qkv", torch.randn(2, 30, 2, 16)))
    free(dense["k"])
    refused("k", lambda: flash_attn.flash_attn_func(**dense), blind)
    given = separate(packed())
    free(given["cu_seq_k"])
    for deterministic in (False, True):
        attend = flash_attn.flash_attn_varlen_func
        refused(
            "cu_seq_k",
            lambda: attend(*given.values(), 25, 25, deterministic=deterministic),  # noqa: B023 - called at once
            blind,
        )


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v", "cache_seqlens"])
def test_a_cache_is_not_written_for_a_call_that_is_refused(blind, name):
    cache, new = torch.zeros(2, 40, 2, 16), torch.randn(2, 1, 2, 16)
    lengths = torch.tensor([3, 9], dtype=torch.int32)
    caches = {"k_cache": cache, "v_cache": cache}
    given = separate({"q": new, **caches, "k": new, "v": new, "cache_seqlens": lengths})
    free(given[name])
    refused(name, lambda: flash_attn.flash_attn_with_kvcache(**given), blind)
    assert not any(given[one].any() for one in caches if one != name)


def test_the_op_of_compiled_code_refuses_it(blind):
    given = separate(packed())
    free(given["value"])
    refused("value", lambda: torch.ops.attnreg._varlen_attn(*given.values(), 25, 25), blind)


def test_under_autocast_nothing_is_cast_before(blind):
    given = separate(packed())
    free(given["key"])
    with torch.autocast("cpu", torch.bfloat16):
        refused("key", lambda: attnreg.varlen_attn(**given, max_q=25, max_k=25), blind)


def test_what_has_no_memory_by_itself_and_what_has_no_element_is_not_refused(blind):
    given = packed() | {"query": torch.randn(0, 2, 16), "cu_seq_q": torch.zeros(3, dtype=torch.int32)}
    free(given["query"])
    for _ in range(3):
        assert attnreg.varlen_attn(**given, max_q=0, max_k=25).shape == (0, 2, 16)
    given = packed()
    query = given["query"].requires_grad_()
    for _ in range(3):
        out = attnreg.varlen_attn(**given, max_q=25, max_k=25)
        (grad,) = torch.autograd.grad(out, query, torch._efficientzerotensor(out.shape))
        assert not grad.any()
    assert blind.ran[-1] == "backward"


SHRUNK = "got a tensor that ends at byte [0-9]+ of a storage that was shrunk to [0-9]+ bytes"


def shrink(tensor):
    """Take the last byte of a tensor from its storage, which has nothing behind it."""
    storage = tensor.untyped_storage()
    storage.resize_(storage.size() - 1)


@pytest.mark.parametrize("times", [0, 3])
@pytest.mark.parametrize("name", [*VARLEN, *FURTHER, "block_table"])
def test_a_storage_that_was_shrunk_is_refused_like_one_that_was_freed(blind, name, times):
    given = packed()
    if name in FURTHER:
        given[name] = FURTHER[name]
    if name == "block_table":
        pages, table = torch.randn(2, 4, 16, 2, 16), torch.arange(4, dtype=torch.int32).view(2, 2)
        given |= {"key": pages[0], "value": pages[1], "cu_seq_k": None, "block_table": table}
        given["seqused_k"] = FURTHER["seqused_k"]
    given = {key: x if x is None else separate({key: x})[key] for key, x in given.items()}
    for _ in range(times):
        attnreg.varlen_attn(**given, max_q=25, max_k=32)
    shrink(given[name])
    ran = len(blind.ran)
    for _ in range(2):
        with pytest.raises(UnsupportedInputError, match=f"^{name}: {SHRUNK}"):
            attnreg.varlen_attn(**given, max_q=25, max_k=32)
    assert len(blind.ran) == ran


@pytest.mark.parametrize("name", ["grad_out", "out", "lse"])
@pytest.mark.parametrize("times", [0, 3])
def test_a_backward_is_refused_whose_gradient_or_results_were_shrunk(blind, name, times):
    given = separate(packed())
    given["query"].requires_grad_()
    aux = attnreg.AuxRequest(lse=True)

    def results(lse=False):
        return attnreg.varlen_attn(**given, max_q=25, max_k=25, return_aux=aux if lse else None)

    grad = separate({"grad_out": torch.randn(30, 2, 16)})["grad_out"]
    for _ in range(times):
        results().backward(grad)
    out, lse = results(lse=True)
    ran = len(blind.ran)
    shrink({"grad_out": grad, "out": out, "lse": lse}[name])
    with pytest.raises(UnsupportedInputError, match=f"^{name}: {SHRUNK}"):
        out.backward(grad)
    assert len(blind.ran) == ran


@pytest.mark.parametrize("times", [0, 3])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_dense_call_of_a_shrunk_storage_is_refused(blind, name, times):
    given = separate(dict.fromkeys(("query", "key", "value"), torch.randn(1, 2, 30, 16)))
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for _ in range(times):
        op(*given.values())
    shrink(given[name])
    with pytest.raises(UnsupportedInputError, match=f"^{name}: {SHRUNK}"):
        op(*given.values())
    assert blind.ran == ["forward"] * times


def test_a_tensor_whose_elements_all_lie_before_the_end_is_not_refused(blind):
    given = packed()
    whole = torch.randn(30, 2, 40)
    given["query"] = whole[..., :16]
    whole.untyped_storage().resize_(whole.nbytes - 24 * 4)
    given["key"] = torch.randn(1, 1, 16).expand(30, 2, 16)
    for _ in range(3):
        attnreg.varlen_attn(**given, max_q=25, max_k=25)
    assert len(blind.ran) == 3


def test_no_address_of_a_shrunk_storage_reaches_the_kernel_of_the_cpu(cpu_kernel):
    q, k, v, grad = separate(dict.fromkeys("qkvg", torch.randn(1, 30, 2, 16))).values()
    call = Call(0.25, 30, 30)
    out, lse = cpu_kernel.forward(q, k, v, call)
    launcher = cpu_kernel.specialize("forward", (q, k, v), call)
    shrink(k)
    for attend in (
        lambda: cpu_kernel.forward(q, k, v, call),
        lambda: cpu_kernel.backward(grad, q, k, v, out, lse, call),
        lambda: launcher(q, k, v),
    ):
        with pytest.raises(UnsupportedInputError, match=SHRUNK):
            attend()

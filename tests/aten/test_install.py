"""Installing routers over torch's own ops, and taking them out: all or none."""

import gc
import types
from collections import Counter

import pytest
import torch
from support import truth
from support.dense import qkv
from support.kernels import PLACES, attend, is_ours, same, table, tables

import attnreg
from attnreg.core import aten
from attnreg.core.torchlib import captured
from attnreg.errors import RegistrationError

pytestmark = pytest.mark.usefixtures("uninstalled")


QUERY, CU = torch.randn(7, 4, 16), torch.tensor([0, 3, 7], dtype=torch.int32)


def packed_is_right(out):
    truth.assert_near(out, truth.varlen(QUERY, QUERY, QUERY, CU, CU)[0])
    return True


def flash_varlen_runs():
    """Whether the flash op has a kernel for packed tensors on a CPU; checks what it returns."""
    arguments = QUERY, QUERY, QUERY, CU, CU, 4, 4, 0.0, False, False
    try:
        return packed_is_right(torch.ops.aten._flash_attention_forward(*arguments)[0])
    except NotImplementedError:
        return False


def varlen_attn_is_right():
    return packed_is_right(attnreg.varlen_attn(QUERY, QUERY, QUERY, CU, CU, 4, 4))


# ---- in and out


def test_installing_covers_every_op_and_key_once_and_restoring_gives_each_back():
    before = tables()
    assert not any(map(is_ours, PLACES))
    # CUDA's routers register where torch has no CUDA, too.
    has_cuda = torch.backends.cuda.is_built()
    assert {table(op, key) != "" for op, key in PLACES if key == "CUDA"} == {has_cuda}
    attnreg.install()
    remove, first = aten._remove, tables()
    assert all(map(is_ours, PLACES))
    attnreg.install()
    attnreg.register_backend("math")
    assert aten._remove is remove
    assert tables() == first
    for _ in range(2):
        attnreg.uninstall()
        assert tables() == before


def test_calls_prove_that_uninstalling_gives_torchs_kernels_back_and_installing_the_routers(ran):
    inputs = qkv()
    before = attend(inputs)
    assert not flash_varlen_runs()
    attnreg.register_backend("math")
    for _ in range(2):
        with_math = attend(inputs)
        assert ran() == {"math": (1, 1)}
        assert flash_varlen_runs()
        attnreg.uninstall()
        ran()
        assert same(attend(inputs), before)
        assert ran() == {}
        assert not flash_varlen_runs()
        torch.testing.assert_close(with_math, before)
        attnreg.install()  # what was registered still is


def test_uninstalled_routers_stay_out_until_somebody_registers():
    attnreg.uninstall()
    attnreg.list_backends()
    attnreg.explain(*qkv())
    assert varlen_attn_is_right()
    assert not aten.installed()
    attnreg.register_backend("math")
    assert aten.installed()


def test_installing_many_times_grows_nothing_and_captures_torchs_kernels(ran):
    inputs = qkv()
    before = attend(inputs)

    def cycle(times):
        for _ in range(times):
            aten.ensure()
            aten.restore()
        gc.collect()
        kinds = Counter(map(type, gc.get_objects()))
        kept = (kinds[types.FunctionType], kinds[torch.library.Library])
        return *kept, len(captured._captured), len(torch.library._impls)

    cycle(3)
    assert cycle(1) == cycle(100)
    kept = dict(captured._captured)
    attnreg.install()
    assert captured._captured == kept
    # A router that had captured a router would count twice, or call itself for ever.
    assert same(attend(inputs), before)
    assert ran() == {"cpu": (1, 1)}


# What attnreg has no route for it must not stand before.
UNROUTED = (
    "_flash_attention_forward.quantized",
    "_scaled_dot_product_flash_attention.quantized",
    "_scaled_dot_product_efficient_attention",
    "_fused_sdp_choice",
)
OBSERVED = "_scaled_dot_product_attention_math", "_native_multi_head_attention"


def test_other_ops_overloads_and_keys_are_left_alone():
    assert {key for _, key in PLACES} == {"CPU", "CUDA"}  # nor where autograd or shapes are decided
    before = [torch._C._dispatch_dump_table(f"aten::{op}") for op in UNROUTED]
    attnreg.install()
    assert [torch._C._dispatch_dump_table(f"aten::{op}") for op in UNROUTED] == before


def test_observers_of_calls_that_pass_by_lie_over_torchs_own_kernels_until_the_routers_go():
    before = [torch._C._dispatch_dump_table(f"aten::{op}").splitlines() for op in OBSERVED]
    attnreg.install()
    now = [torch._C._dispatch_dump_table(f"aten::{op}").splitlines() for op in OBSERVED]
    changed = [
        {new.partition(":")[0] for new, old in zip(*lines, strict=True) if new != old}
        for lines in zip(now, before, strict=True)
    ]
    # Without the compiled part calls are counted where the program calls torch's functions.
    observed = [{"AutogradCPU", "AutogradCUDA"}, {"CPU", "NestedTensorCPU"}]
    assert changed == (observed if captured.call_cache_in_use else [set(), set()])
    aten.restore()
    assert [torch._C._dispatch_dump_table(f"aten::{op}").splitlines() for op in OBSERVED] == before


# ---- failures


@pytest.mark.parametrize("failing", range(len(PLACES)))
def test_an_install_that_fails_half_way_leaves_every_op_as_it_was(monkeypatch, failing, ran):
    inputs, before = qkv(), tables()
    own = attend(inputs)
    register, done = aten._register, []

    def registering(library, op, key, function, layout):
        if len(done) == failing:
            raise RuntimeError("torch said no")
        done.append((op, key))
        register(library, op, key, function, layout)

    with monkeypatch.context() as patch:
        patch.setattr(aten, "_register", registering)
        with pytest.raises(RegistrationError) as error:
            attnreg.register_backend("math")
    assert str(error.value) == "routers can't be installed: torch said no; every op is as it was"
    assert isinstance(error.value.__cause__, RuntimeError)
    assert done == PLACES[:failing]
    assert tables() == before
    assert not aten.installed()
    assert same(attend(inputs), own)
    assert not flash_varlen_runs()
    assert ran() == {}
    # The failed registration is not in force, and nothing stands in the way of the next.
    attnreg.install()
    attend(inputs)
    assert ran() == {"cpu": (1, 1)}

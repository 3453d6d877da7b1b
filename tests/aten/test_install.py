"""Installing routers over torch's own ops, and taking them out: whole or not at all."""

import functools
import gc
import re
import subprocess
import sys
import types
import warnings
from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support import truth
from torch._subclasses import FakeTensorMode
from torch.nn.attention import _registry as torch_registry
from torch.utils._python_dispatch import TorchDispatchMode

import attnreg
from attnreg import aten
from attnreg.aten.routing import Layout, Route
from attnreg.dispatch.planning import Native
from attnreg.errors import RegistrationError, UnknownBackendError
from attnreg.torchlib import captured

CPU_OP = "_scaled_dot_product_flash_attention_for_cpu"
FLASH_OP = "_flash_attention_forward"
PLACES = [(route.op, key) for route in aten.ROUTES for key in route.keys]


@pytest.fixture(autouse=True)
def taken_out():
    """Start and end with torch's ops as they were, and no reason to stay out."""
    was_installed = aten.installed()
    aten.restore()
    before = tables()
    aten._kept_out = False
    yield
    aten.restore()
    assert tables() == before, "the test left a kernel behind"
    aten._kept_out = False
    if was_installed:
        aten.ensure()


def table(op, key):
    """Return where the kernel of an op and key was registered; empty if there is none."""
    lines = torch._C._dispatch_dump_table(f"aten::{op}").splitlines()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith(f"{key}:")), "")


def tables():
    return {place: table(*place) for place in PLACES}


def is_ours(place):
    return any(
        file in table(*place) for file in ("attnreg/aten/__init__.py", "attnreg/aten/routers/module.cpp")
    )


def qkv(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 4, 6, 8, generator=generator).requires_grad_() for _ in range(3)]


def attend(inputs):
    """Return output and gradients of `F.scaled_dot_product_attention`."""
    out = F.scaled_dot_product_attention(*inputs, is_causal=True)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


def same(results, others):
    return all(map(torch.equal, results, others))


def varlen_is_served():
    """Whether torch's own varlen op has a kernel on a CPU."""
    query, cu = torch.randn(7, 4, 16), torch.tensor([0, 3, 7], dtype=torch.int32)
    try:
        out, *_ = torch.ops.aten._flash_attention_forward(
            query, query, query, cu, cu, 4, 4, 0.0, False, False
        )
    except NotImplementedError:
        return False
    truth.assert_near(out, truth.varlen(query, query, query, cu, cu)[0])
    return True


class Override:
    """Somebody else's kernel of an op."""

    def __init__(self, op=CPU_OP, key="CPU", answer=None):
        self.calls = 0
        self.answer = answer
        self.library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            self.library.impl(op, self.run, key)

    def run(self, query, *args, **kwargs):
        self.calls += 1
        return torch.zeros_like(query), query.new_zeros(query.shape[:3])

    def remove(self):
        self.library._destroy()


# ---- in and out


def test_installing_covers_every_op_and_key_and_restoring_gives_each_back():
    before = tables()
    assert not any(map(is_ours, PLACES))
    attnreg.install()
    assert all(map(is_ours, PLACES))
    attnreg.uninstall()
    assert tables() == before


def test_cuda_routers_register_where_torch_has_no_cuda():
    assert any(key == "CUDA" for _, key in PLACES)
    assert all(table(op, key) == "" for op, key in PLACES if key == "CUDA")
    attnreg.install()
    assert all(is_ours((op, key)) for op, key in PLACES if key == "CUDA")


def test_restoring_gives_torchs_kernels_back_proved_by_calls(ran):
    inputs = qkv()
    before = attend(inputs)
    assert not varlen_is_served()
    attnreg.register_backend("math")
    with_math = attend(inputs)
    assert ran() == {"math": (1, 1)}
    assert varlen_is_served()
    attnreg.uninstall()
    ran()
    after = attend(inputs)
    assert ran() == {}
    assert not varlen_is_served()
    assert same(before, after)
    torch.testing.assert_close(with_math, before)


def test_registrations_hold_again_after_the_next_install(ran):
    inputs = qkv()
    attnreg.register_backend("math")
    attnreg.uninstall()
    attend(inputs)
    assert ran() == {}
    attnreg.install()
    attend(inputs)
    assert ran() == {"math": (1, 1)}


def test_uninstalled_routers_stay_out_until_somebody_asks():
    attnreg.uninstall()
    query, cu = torch.randn(7, 4, 16), torch.tensor([0, 3, 7], dtype=torch.int32)
    truth.assert_near(
        attnreg.varlen_attn(query, query, query, cu, cu, 4, 4), truth.varlen(query, query, query, cu, cu)[0]
    )
    assert not aten.installed()
    attnreg.register_backend("math")
    assert aten.installed()


def test_importing_and_listing_installs_nothing():
    attnreg.list_backends()
    attnreg.explain(*qkv())
    assert not aten.installed()


def test_installing_twice_is_no_change():
    attnreg.install()
    library, first = aten._remove, tables()
    attnreg.install()
    attnreg.register_backend("math")
    assert aten._remove is library
    assert tables() == first


def test_restoring_twice_is_no_change():
    attnreg.install()
    attnreg.uninstall()
    before = tables()
    attnreg.uninstall()
    assert tables() == before


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


def test_torchs_own_kernels_and_their_autograd_formula_do_not_come_back_to_the_router(monkeypatch, ran):
    calls = []
    for module in (aten.cpu, aten.flash):
        monkeypatch.setattr(
            module, "ROUTES", [route._replace(serve=counted(route, calls)) for route in module.ROUTES]
        )
    aten.ensure((*aten.cpu.ROUTES, *aten.flash.ROUTES))
    attnreg.install()
    attend(qkv())
    assert calls == [CPU_OP, f"{CPU_OP}_backward"]
    assert ran() == {"cpu": (1, 1)}


def counted(route, calls):
    @functools.wraps(route.serve)
    def serve(asked, turn):
        calls.append(turn.op)
        return route.serve(asked, turn)

    return serve


# ---- handles


def test_an_unknown_name_leaves_what_was_active(ran):
    attnreg.register_backend("math")
    with pytest.raises(UnknownBackendError, match="no backend is named 'maht'; did you mean 'math'"):
        attnreg.register_backend("maht")
    attend(qkv())
    assert ran() == {"math": (1, 1)}


def test_the_last_handle_removed_leaves_every_call_to_torchs_kernel(ran):
    inputs = qkv()
    before = attend(inputs)
    first, second = attnreg.register_backend("math"), attnreg.register_backend("math")
    first.remove()
    attend(inputs)
    assert ran() == {"math": (1, 1)}
    second.remove()
    assert same(attend(inputs), before)
    assert ran() == {}


def test_a_handle_removed_twice_takes_nobody_elses_registration(fake, ran):
    first = attnreg.register_backend(fake("mine").backend)
    first.remove()
    second = attnreg.register_backend(fake("other").backend)
    first.remove()
    attend(qkv())
    assert ran() == {"other": (1, 1)}
    second.remove()


def test_a_handle_that_nobody_keeps_leaves_its_registration(ran):
    attnreg.register_backend("math")
    gc.collect()
    attend(qkv())
    assert ran() == {"math": (1, 1)}


# ---- half-way failures


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
    assert not varlen_is_served()
    assert ran() == {}
    # The failed registration is not in force, and nothing stands in the way of the next.
    attnreg.install()
    attend(inputs)
    assert ran() == {"cpu": (1, 1)}


def test_varlen_attn_is_served_where_routers_cannot_be_installed(monkeypatch, caplog):
    def refuse(*args):
        raise RuntimeError("torch said no")

    query, cu = torch.randn(7, 4, 16), torch.tensor([0, 3, 7], dtype=torch.int32)
    expected, _ = truth.varlen(query, query, query, cu, cu)
    with monkeypatch.context() as patch:
        patch.setattr(aten, "_register", refuse)
        for _ in range(3):
            truth.assert_near(attnreg.varlen_attn(query, query, query, cu, cu, 4, 4), expected)
    assert not aten.installed()
    assert caplog.records == []


# ---- other kernels in the way


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_an_op_that_somebody_else_overrides_is_an_error_that_names_it(place):
    op, key = place
    other = Override(op, key)
    before = tables()
    with pytest.raises(RegistrationError) as error:
        attnreg.install()
    assert re.fullmatch(
        rf"aten::{op} is overridden for {key} by other Python code, registered at .*test_install.py:\d+; "
        "remove that, or let attnreg register its routers first",
        str(error.value),
    )
    assert tables() == before
    other.remove()
    attnreg.install()
    assert all(map(is_ours, PLACES))


def test_an_override_stays_in_force_when_installing_fails_and_isnt_taken_for_torchs(monkeypatch, ran):
    inputs = qkv()
    own = attend(inputs)
    # As in a process that has captured nothing yet.
    monkeypatch.setattr(captured, "_captured", {})
    other = Override()
    with pytest.raises(RegistrationError, match=CPU_OP):
        attnreg.register_backend("math")
    assert torch.equal(F.scaled_dot_product_attention(*inputs), torch.zeros(2, 4, 6, 8))
    assert other.calls == 1
    with pytest.raises(RegistrationError, match=CPU_OP):
        captured.kernel(CPU_OP, "CPU")
    other.remove()
    attnreg.install()
    assert same(attend(inputs), own)
    assert ran() == {"cpu": (1, 1)}


def test_an_override_above_the_routers_shadows_them_until_it_goes(ran):
    inputs = [x.detach() for x in qkv()]
    attnreg.register_backend("math")
    other = Override()
    F.scaled_dot_product_attention(*inputs)
    assert ran() == {}
    assert other.calls == 1
    other.remove()
    F.scaled_dot_product_attention(*inputs)
    assert ran() == {"math": (1, 0)}


def test_restoring_beneath_somebody_elses_override_leaves_theirs(ran):
    inputs = [x.detach() for x in qkv()]
    own = F.scaled_dot_product_attention(*inputs)
    attnreg.install()
    other = Override()
    attnreg.uninstall()
    F.scaled_dot_product_attention(*inputs)
    assert other.calls == 1
    other.remove()
    assert torch.equal(F.scaled_dot_product_attention(*inputs), own)
    assert ran() == {}


# ---- torch's own registry


@pytest.fixture
def fa4(monkeypatch):
    """Offer torch a flash attention implementation named FA4; ends with none active."""
    made = []

    class Handle:
        def __init__(self):
            self.override = Override(FLASH_OP, "CUDA")

        def remove(self):
            self.override.remove()

    def register():
        made.append(Handle())
        return made[-1]

    monkeypatch.setitem(torch_registry._FLASH_ATTENTION_IMPLS, "FA4", register)
    yield made
    if torch_registry.current_flash_attention_impl() is not None:
        torch_registry.restore_flash_attention_impl()


def test_an_implementation_active_before_is_restored_with_a_warning(fa4, caplog):
    torch_registry.activate_flash_attention_impl("FA4")
    theirs = table(FLASH_OP, "CUDA")
    assert theirs
    attnreg.install()
    assert torch_registry.current_flash_attention_impl() is None
    assert all(map(is_ours, PLACES))
    assert table(FLASH_OP, "CUDA") != theirs
    assert [record.getMessage() for record in caplog.records] == [
        "torch.nn.attention had 'FA4' active: attnreg has restored torch's own kernels, to which it falls "
        "back, and chooses for each call from now on; register_backend('FA4') asks for it"
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert aten.shadowed_by() == ""
    attnreg.uninstall()
    assert table(FLASH_OP, "CUDA") == ""


def test_a_mere_call_leaves_an_implementation_active_that_somebody_chose(fa4, packed, caplog, ran):
    torch_registry.activate_flash_attention_impl("FA4")
    attnreg.varlen_attn(*packed([3, 4])).sum().backward()
    assert torch_registry.current_flash_attention_impl() == "FA4"
    assert not aten.installed()
    assert caplog.records == []
    assert ran() == {"cpu": (1, 1)}


def test_an_install_that_fails_leaves_that_implementation_active(fa4, monkeypatch, caplog):
    def refuse(*args):
        raise RuntimeError("torch said no")

    torch_registry.activate_flash_attention_impl("FA4")
    before = tables()
    with monkeypatch.context() as patch:
        patch.setattr(aten, "_register", refuse)
        with pytest.raises(RegistrationError, match="torch said no; every op is as it was"):
            attnreg.install()
    assert torch_registry.current_flash_attention_impl() == "FA4"
    assert tables() == before
    assert caplog.records == []


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def ops_on_cuda():
    """Return what `attnreg.varlen_attn` calls on a GPU, as fake tensors tell it."""
    with FakeTensorMode(), Seen() as seen:
        query, cu = torch.empty(7, 4, 16, device="cuda"), torch.empty(3, device="cuda", dtype=torch.int32)
        attnreg.varlen_attn(query, query, query, cu, cu, 4, 4)
    return [name for name in seen.names if "attn" in name or "attention" in name]


def test_an_implementation_activated_after_shadows_and_attnreg_says_so(fa4, ran):
    query, cu = torch.randn(7, 4, 16), torch.tensor([0, 3, 7], dtype=torch.int32)
    attnreg.install()
    assert ops_on_cuda() == ["aten._flash_attention_forward.default"]
    torch_registry.activate_flash_attention_impl("FA4")
    assert aten.shadowed_by() == "FA4"
    assert not is_ours((FLASH_OP, "CUDA"))
    (note,) = [note for note in attnreg.explain(*qkv()).notes if "FA4" in note]
    assert note == (
        "torch.nn.attention has 'FA4' active above attnreg's routers: the flash ops "
        "on CUDA go there; restore_flash_attention_impl() gives them back"
    )
    # On a GPU varlen_attn goes round it; on a CPU there is nothing to go round.
    assert ops_on_cuda() == ["attnreg._varlen_attn.default"]
    truth.assert_near(
        attnreg.varlen_attn(query, query, query, cu, cu, 4, 4), truth.varlen(query, query, query, cu, cu)[0]
    )
    assert sum(forward for forward, _ in ran().values()) == 1
    torch_registry.restore_flash_attention_impl()
    assert aten.shadowed_by() == ""
    assert all(map(is_ours, PLACES))
    assert not [note for note in attnreg.explain(*qkv()).notes if "FA4" in note]


def test_torchs_registry_activates_and_restores_attnreg_itself(ran):
    inputs, before = qkv(), tables()
    own = attend(inputs)
    assert "attnreg" in torch_registry.list_flash_attention_impls()
    torch_registry.activate_flash_attention_impl("attnreg")
    assert torch_registry.current_flash_attention_impl() == "attnreg"
    assert aten.shadowed_by() == ""
    attend(inputs)
    assert ran() == {"cpu": (1, 1)}
    torch_registry.restore_flash_attention_impl()
    assert tables() == before
    assert same(attend(inputs), own)
    assert ran() == {}


# ---- other torches


@pytest.fixture
def nothing_captured(monkeypatch):
    monkeypatch.setattr(captured, "_captured", {})


@pytest.mark.usefixtures("nothing_captured")
def test_a_torch_that_hands_out_no_kernels_is_an_error_with_both_versions(monkeypatch):
    before = tables()
    with monkeypatch.context() as patch:
        patch.delattr(torch.library, "get_kernel")
        patch.setattr(torch, "__version__", "2.8.1")
        with pytest.raises(RegistrationError) as error:
            attnreg.install()
    assert str(error.value) == (
        "torch.library.get_kernel or call_boxed is missing: attnreg needs torch 2.11 or newer, found 2.8.1"
    )
    assert tables() == before


class Fewer(NamedTuple):
    """`_fused_sdp_choice` as somebody might have it wrong."""

    query: torch.Tensor
    value: torch.Tensor
    key: torch.Tensor


def test_an_op_that_torch_lacks_is_an_error():
    route = Route("_no_such_attention", ("CPU",), Fewer, lambda *_: None, Native("cpu"), Layout(0))
    before = tables()
    with pytest.raises(RegistrationError) as error:
        aten.ensure((*aten.ROUTES, route))
    assert str(error.value) == f"torch {torch.__version__} has no aten::_no_such_attention"
    assert tables() == before


def test_an_op_of_a_newer_torch_is_left_out():
    route = Route(
        "_no_such_attention", ("CPU",), Fewer, lambda *_: None, Native("cpu"), Layout(0), since="99.1"
    )
    aten.ensure((*aten.ROUTES, route))
    assert all(map(is_ours, PLACES))


def test_an_op_that_torch_declares_in_another_way_is_an_error_with_both_schemas():
    before = tables()
    route = Route(CPU_OP, ("CPU",), Fewer, lambda *_: None, Native("cpu"), Layout(0))
    with pytest.raises(RegistrationError) as error:
        aten.ensure((route,))
    schema = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default._schema
    assert str(error.value) == (
        f"aten::{CPU_OP} of torch {torch.__version__}: got {schema}, "
        "expected arguments ('query', 'value', 'key')"
    )
    assert tables() == before


def test_no_router_stands_where_autograd_or_shapes_are_decided():
    assert {key for _, key in PLACES} == {"CPU", "CUDA"}


# What attnreg doesn't know how to answer it must not stand before.
LEFT_ALONE = (
    "_flash_attention_forward.quantized",
    "_scaled_dot_product_flash_attention.quantized",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_attention_math",
    "_fused_sdp_choice",
)


def test_other_ops_and_overloads_are_left_alone():
    before = [torch._C._dispatch_dump_table(f"aten::{op}") for op in LEFT_ALONE]
    attnreg.install()
    assert [torch._C._dispatch_dump_table(f"aten::{op}") for op in LEFT_ALONE] == before


# ---- fresh processes


def python(code, *options):
    return subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


CALL = """
import torch, attnreg
import torch.nn.functional as F
q = torch.randn(1, 2, 3, 8, requires_grad=True)
"""


def test_torchs_warning_about_overriding_does_not_appear():
    code = CALL + (
        "attnreg.register_backend('math')\n"
        "F.scaled_dot_product_attention(q, q, q).sum().backward()\n"
        "print(attnreg.stats().calls)\n"
    )
    done = python(code, "-W", "error")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'math': {'forward': 1, 'backward': 1}}\n"
    assert done.stderr == ""


def test_a_process_ends_in_silence_with_a_registration_in_force():
    code = CALL + (
        "import threading\n"
        "handle = attnreg.register_backend('math')\n"
        "out = F.scaled_dot_product_attention(q, q, q)\n"
        "scope = attnreg.use_backend('math'); scope.__enter__()\n"
        "thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(q, q, q)); thread.start()\n"
    )
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_fork_inherits_the_registration_and_both_end_in_silence():
    code = CALL + (
        "import os, sys\n"
        "torch.set_num_threads(1)\n"
        "attnreg.register_backend('math')\n"
        "F.scaled_dot_product_attention(q, q, q)\n"
        "child = os.fork()\n"
        "attnreg.reset_stats()\n"
        "F.scaled_dot_product_attention(q, q, q).sum().backward()\n"
        "assert attnreg.stats().calls == {'math': {'forward': 1, 'backward': 1}}\n"
        "if child: sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

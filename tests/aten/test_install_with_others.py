"""Installing routers with overrides, with the registry of `torch.nn.attention`, and in other torches."""

import itertools
import json
import re
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support import truth
from support.dense import qkv
from support.kernels import CPU_OP, FLASH_OP, PLACES, Override, attend, is_ours, same, table, tables
from support.processes import forked
from torch._subclasses import FakeTensorMode
from torch.nn.attention import _registry as torch_registry
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

import attnreg
from attnreg.core import aten
from attnreg.core.aten.routing import OpLayout, Route
from attnreg.core.dispatch.planning import Native
from attnreg.core.torchlib import captured
from attnreg.errors import RegistrationError
from attnreg.tools.cli import app

pytestmark = pytest.mark.usefixtures("uninstalled")


# ---- overrides


@pytest.mark.parametrize("place", [*PLACES, *((op, "CUDA") for op in aten.ABOVE)], ids=".".join)
def test_an_op_that_somebody_else_overrides_is_an_error_that_names_it(place):
    op, key = place
    other = Override(op, key)
    before = tables()
    with pytest.raises(RegistrationError) as error:
        attnreg.install()
    assert re.fullmatch(
        rf"aten::{op} is overridden for {key} by other Python code, registered at .*support/kernels.py:\d+; "
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


@pytest.mark.parametrize("restored", [False, True])
def test_an_override_above_the_routers_shadows_them_until_it_goes(ran, restored):
    inputs = [x.detach() for x in qkv()]
    own = F.scaled_dot_product_attention(*inputs)
    attnreg.register_backend("math")
    other = Override()
    if restored:
        attnreg.uninstall()
    F.scaled_dot_product_attention(*inputs)
    assert ran() == {}
    assert other.calls == 1
    other.remove()
    torch.testing.assert_close(
        F.scaled_dot_product_attention(*inputs), own, **({"rtol": 0, "atol": 0} if restored else {})
    )
    assert ran() == ({} if restored else {"math": (1, 0)})


def override_of_varlen_attn():
    """Override torch's own op for packed calls on a CPU, as cuDNN's frontend does on a GPU."""
    import torch.nn.attention.varlen  # which defines it

    library = torch.library.Library("torch_attn", "IMPL")
    library.impl("_varlen_attn", lambda *_: None, "CPU")
    return library


OTHERS = {
    f"aten::{FLASH_OP} (CUDA)": lambda: Override(FLASH_OP, "CUDA"),
    f"aten::{CPU_OP} (CPU)": Override,
    f"aten::{aten.ABOVE[2]} (CUDA)": lambda: Override(aten.ABOVE[2], "CUDA"),
    f"aten::{aten.ABOVE[0]} (AutogradCUDA)": lambda: Override(aten.ABOVE[0], "AutogradCUDA"),
    "aten::scaled_dot_product_attention (CPU)": lambda: Override("scaled_dot_product_attention", "CPU"),
    "torch_attn::_varlen_attn (CPU)": override_of_varlen_attn,
}


@pytest.mark.parametrize("op", OTHERS)
def test_an_override_after_the_routers_is_named_once_and_wherever_users_look(packed, caplog, op):
    heads = itertools.count(1)
    attnreg.install()
    attnreg.varlen_attn(*packed([3, 2], heads=next(heads)))
    assert caplog.messages == [] and attnreg.stats().overridden == ()
    other = OTHERS[op]()
    for _ in range(2):
        attnreg.varlen_attn(*packed([3, 2], heads=next(heads)))
    (note,) = attnreg.stats().overridden
    assert caplog.messages == [note]
    assert re.fullmatch(
        rf"\S+/\w+.py overrides {re.escape(op)} above attnreg's routers: calls go there .*", note
    )
    assert note in attnreg.explain(*packed([3, 2])).notes
    assert attnreg.stats().to_dict()["overridden"] == [note]
    report = json.loads(CliRunner().invoke(app, ["info", "--json"]).stdout)
    assert report["routers"]["overridden"] == [note]
    other.remove() if isinstance(other, Override) else other._destroy()
    attnreg.varlen_attn(*packed([3, 2], heads=next(heads)))
    assert attnreg.stats().overridden == () and caplog.messages == [note]


def test_blocks_look_for_overrides_a_hundredth_of_the_time(monkeypatch, caplog):
    attnreg.install()
    now, looks, look = [0.0], [], captured.warn_if_shadowed

    def slow_look():
        now[0] += 1.0
        looks.append(now[0])
        look()

    def blocks(count):
        for _ in range(count):
            with attnreg.use_backend("math"):
                now[0] += 1.0

    monkeypatch.setattr(captured, "time", SimpleNamespace(monotonic=lambda: now[0] / 128))
    monkeypatch.setattr(captured, "warn_if_shadowed", slow_look)
    blocks(250)
    assert looks == [1.0, 101.0, 201.0]
    other = Override(CPU_OP, "CPU")
    blocks(47)
    assert caplog.messages == []
    blocks(1)
    assert caplog.messages == [*attnreg.stats().overridden]
    other.remove()
    looks.clear()
    now[0] += 1000  # a look that takes long, as in a process that was stopped, makes blocks blind for 5 s

    def very_slow_look():
        slow_look()
        now[0] += 9999

    monkeypatch.setattr(captured, "warn_if_shadowed", very_slow_look)
    blocks(int(captured.LONGEST_WAIT * 128))
    assert len(looks) == 1
    blocks(1)
    assert len(looks) == 2


def test_the_first_plans_look_for_overrides_and_further_plans_a_hundredth_of_the_time(
    monkeypatch, caplog, packed, ran
):
    heads, now, looks, look = itertools.count(1), [0.0], [], captured.warn_if_shadowed

    def slow_look():
        now[0] += 1.0
        looks.append(now[0])
        look()

    def plans(count):
        for _ in range(count):
            now[0] += 1.0
            attnreg.varlen_attn(*packed([3, 2], heads=next(heads)), backend="math")

    monkeypatch.setattr(captured, "PROMPT_LOOKS", 3)
    monkeypatch.setattr(captured, "time", SimpleNamespace(monotonic=lambda: now[0] / 128))
    monkeypatch.setattr(captured, "warn_if_shadowed", slow_look)
    attnreg.install()
    captured._next_look = 1000 / 128  # as after a look of a block
    looks.clear()
    plans(3)
    assert len(looks) == 3
    other = Override(CPU_OP, "CPU")
    plans(5)
    assert len(looks) == 3 and caplog.messages == []
    now[0] = 1000.0
    plans(20)
    assert looks[3:] == [1002.0]
    assert caplog.messages == [*attnreg.stats().overridden]
    assert ran() == {"math": (28, 0)}
    other.remove()


def test_an_implementation_of_torchs_registry_is_named_with_the_ops_that_it_overrides(fa4, monkeypatch):
    def cudnn():
        overrides = [Override(aten.ABOVE[2], "CUDA"), Override(aten.ABOVE[3], "CUDA")]
        return SimpleNamespace(remove=lambda: [one.remove() for one in overrides])

    monkeypatch.setitem(torch_registry._FLASH_ATTENTION_IMPLS, "CUDNN", cudnn)
    attnreg.install()
    torch_registry.activate_flash_attention_impl("CUDNN")
    assert attnreg.stats().overridden == (
        f"torch.nn.attention has 'CUDNN' active above attnreg's routers: aten::{aten.ABOVE[2]} (CUDA), "
        f"aten::{aten.ABOVE[3]} (CUDA) go there; restore_flash_attention_impl() gives them back",
    )
    torch_registry.restore_flash_attention_impl()
    assert attnreg.stats().overridden == ()


def test_routers_that_another_thread_removes_meanwhile_are_no_override(monkeypatch):
    """Without them torch's own kernels lie where they were."""
    attnreg.install()
    real = torch._C._dispatch_dump

    def dump(op):
        if aten.installed():
            attnreg.uninstall()
        return real(op)

    monkeypatch.setattr(torch._C, "_dispatch_dump", dump)
    assert captured.overridden() == {}
    assert not aten.installed() and attnreg.stats().overridden == ()


def test_while_the_routers_are_removed_none_counts_as_overridden():
    attnreg.install()
    real, found = aten._remove, []

    def remove():
        real()
        found.append(captured.overridden())

    aten._remove = remove  # which `uninstall` forgets; a patch that is undone would bring it back
    attnreg.uninstall()
    assert found == [{}] and not aten.installed()


def test_a_signal_handler_that_needs_the_routers_while_they_are_registered_registers_none_again(
    monkeypatch,
):
    before, real, calls = tables(), aten._register, []

    def register(*arguments):
        if not calls:
            calls.append(arguments)
            attnreg.install()
        calls.append(arguments)
        real(*arguments)

    monkeypatch.setattr(aten, "_register", register)
    attnreg.install()
    assert len(calls) == 1 + len(PLACES) and captured.overridden() == {}
    attnreg.uninstall()
    assert tables() == before


# ---- torch's own registry


@pytest.fixture
def fa4(monkeypatch):
    """Offer torch flash attention implementations named FA4 and FA99; ends with none active."""
    for name in ("FA4", "FA99"):
        monkeypatch.setitem(torch_registry._FLASH_ATTENTION_IMPLS, name, lambda: Override(FLASH_OP, "CUDA"))
    yield
    if torch_registry.current_flash_attention_impl() is not None:
        torch_registry.restore_flash_attention_impl()


@pytest.mark.parametrize(
    ("name", "advice"),
    [("FA4", "register_backend('FA4') asks for it"), ("FA99", "it knows no backend 'FA99'")],
)
def test_an_implementation_active_before_is_restored_with_a_warning(fa4, caplog, name, advice):
    before = table(FLASH_OP, "CUDA")
    torch_registry.activate_flash_attention_impl(name)
    theirs = table(FLASH_OP, "CUDA")
    assert theirs != before
    attnreg.install()
    assert torch_registry.current_flash_attention_impl() is None
    assert all(map(is_ours, PLACES))
    assert table(FLASH_OP, "CUDA") != theirs
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            f"torch.nn.attention had '{name}' active: attnreg has restored torch's own kernels, to which it "
            f"falls back, and chooses for each call from now on; {advice}",
        )
    ]
    assert captured.shadowed_by() == ""
    attnreg.uninstall()
    assert table(FLASH_OP, "CUDA") == before


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


class CalledOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def attention_ops_of_varlen_attn_on_cuda():
    """Return what `attnreg.varlen_attn` calls on a GPU, by fake tensors."""
    with FakeTensorMode(), CalledOps() as called:
        query, cu = torch.empty(7, 4, 16, device="cuda"), torch.empty(3, device="cuda", dtype=torch.int32)
        attnreg.varlen_attn(query, query, query, cu, cu, 4, 4)
    return [name for name in called.names if "attn" in name or "attention" in name]


@pytest.fixture
def torch_2_12(monkeypatch):
    """Have torch.library refuse a second override of an op in Python, as up to torch 2.12."""
    real = torch.library.Library.impl

    def impl(self, op_name, fn, dispatch_key="", **options):
        if f"{self.ns}/{op_name}/{dispatch_key}" in torch.library._impls:
            raise RuntimeError(f"already a kernel registered from python overriding {op_name}")
        return real(self, op_name, fn, dispatch_key, **options)

    monkeypatch.setattr(torch.library.Library, "impl", impl)


def test_an_implementation_can_be_activated_after_also_where_torch_allows_one_override(fa4, torch_2_12):
    before = tables()
    attnreg.install()
    torch_registry.activate_flash_attention_impl("FA4")
    assert captured.shadowed_by() == "FA4"
    assert not is_ours((FLASH_OP, "CUDA"))
    torch_registry.restore_flash_attention_impl()
    assert all(map(is_ours, PLACES))
    attnreg.uninstall()
    assert tables() == before
    attnreg.install()
    assert all(map(is_ours, PLACES))


@pytest.mark.parametrize("moment", ["a plan of varlen_attn", "register_backend", "install"])
def test_an_implementation_activated_after_is_warned_of_once(fa4, packed, caplog, moment):
    heads = itertools.count(1)

    def comes():
        if moment == "a plan of varlen_attn":
            number = next(heads)
            attnreg.varlen_attn(*packed([3, 2], heads=number))
        else:
            attnreg.install() if moment == "install" else attnreg.register_backend("math")

    attnreg.install()
    comes()
    assert caplog.records == []
    for name in ("FA4", "FA99"):
        torch_registry.activate_flash_attention_impl(name)
        caplog.clear()
        comes()
        comes()
        assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
            (
                "WARNING",
                f"torch.nn.attention has '{name}' active above attnreg's routers: the flash ops "
                "on CUDA go there; restore_flash_attention_impl() gives them back",
            )
        ]
    torch_registry.restore_flash_attention_impl()
    caplog.clear()
    comes()
    assert caplog.records == []


def test_an_implementation_activated_after_shadows_and_attnreg_says_so(fa4, ran):
    query, cu = torch.randn(7, 4, 16), torch.tensor([0, 3, 7], dtype=torch.int32)
    attnreg.install()
    torch_registry.activate_flash_attention_impl("FA4")
    assert captured.shadowed_by() == "FA4"
    assert not is_ours((FLASH_OP, "CUDA"))
    (note,) = [note for note in attnreg.explain(*qkv()).notes if "FA4" in note]
    assert note == (
        "torch.nn.attention has 'FA4' active above attnreg's routers: the flash ops "
        "on CUDA go there; restore_flash_attention_impl() gives them back"
    )
    # varlen_attn calls no op that could be shadowed.
    assert attention_ops_of_varlen_attn_on_cuda() == ["attnreg._varlen_attn.default"]
    out = attnreg.varlen_attn(query, query, query, cu, cu, 4, 4)
    truth.assert_near(out, truth.varlen(query, query, query, cu, cu)[0])
    assert sum(forward for forward, _ in ran().values()) == 1
    torch_registry.restore_flash_attention_impl()
    assert captured.shadowed_by() == ""
    assert all(map(is_ours, PLACES))
    assert not [note for note in attnreg.explain(*qkv()).notes if "FA4" in note]


# ---- other torches


def test_a_torch_that_hands_out_no_kernels_is_an_error_with_both_versions(monkeypatch):
    monkeypatch.setattr(captured, "_captured", {})
    before = tables()
    with monkeypatch.context() as patch:
        patch.delattr(torch.library, "get_kernel")
        patch.setattr(torch, "__version__", "2.99.1")
        with pytest.raises(RegistrationError) as error:
            attnreg.install()
    assert str(error.value) == (
        "torch.library.get_kernel or call_boxed is missing: attnreg needs torch 2.11 or newer, found 2.99.1"
    )
    assert tables() == before


def test_a_torch_that_is_too_old_is_one_error_whatever_else_it_lacks(monkeypatch):
    before = tables()
    with monkeypatch.context() as patch, pytest.raises(RegistrationError) as error:
        patch.setattr(torch, "__version__", "2.10.1+cpu")
        aten.ensure((swapped(CPU_OP), swapped("_no_such_attention")))
    assert str(error.value) == "attnreg needs torch 2.11 or newer, found 2.10.1+cpu"
    assert tables() == before


def test_a_torch_that_is_newer_than_any_that_was_tested_is_one_warning(monkeypatch, caplog):
    captured._warn_of_newer.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.16.0a0+git1")
        for _ in range(2):
            captured.check_version()
    captured._warn_of_newer.cache_clear()
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert message.startswith(
        "torch 2.16.0a0+git1 is newer than 2.15, the newest version that attnreg was tested"
    )


TOO_OLD = """
import sys, torch
torch.__version__ = "2.8.1"
sys.modules["torch.nn.attention._registry"] = None
del torch.nn.attention._registry
import attnreg
try:
    attnreg.install()
except attnreg.RegistrationError as error:
    print(error)
"""


def test_a_torch_without_a_registry_of_implementations_is_the_same_error():
    done = forked(TOO_OLD, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout == "attnreg needs torch 2.11 or newer, found 2.8.1\n", done.stderr


def test_a_torch_that_keeps_no_set_of_overridden_ops_needs_none(monkeypatch):
    library = SimpleNamespace(Library=torch.library.Library)
    fields = {"library": library, "ops": torch.ops, "__version__": torch.__version__}
    monkeypatch.setattr(aten, "torch", SimpleNamespace(**fields))
    attnreg.install()
    assert aten.installed()
    assert all(map(is_ours, PLACES))


class Swapped(NamedTuple):
    """The arguments of an op in a wrong order."""

    query: torch.Tensor
    value: torch.Tensor
    key: torch.Tensor


def swapped(op, **options):
    return Route(op, ("CPU",), Swapped, lambda *_: None, Native("cpu"), OpLayout(0), **options)


def test_an_op_of_a_newer_torch_is_left_out():
    aten.ensure((*aten.ROUTES, swapped("_no_such_attention", since=(99, 1))))
    assert all(map(is_ours, PLACES))


@pytest.mark.parametrize("lacks", [True, False], ids=["lacks", "declares in another way"])
def test_an_op_that_torch_lacks_or_declares_in_another_way_is_an_error(lacks):
    before, torchs = tables(), f"torch {torch.__version__}"
    schema = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default._schema
    with pytest.raises(RegistrationError) as error:
        aten.ensure((*aten.ROUTES, swapped("_no_such_attention" if lacks else CPU_OP)))
    assert str(error.value) == (
        f"{torchs} has no aten::_no_such_attention"
        if lacks
        else f"aten::{CPU_OP} of {torchs}: got {schema}, expected arguments ('query', 'value', 'key')"
    )
    assert tables() == before


def test_a_kernel_that_torch_lacks_is_an_error_with_its_op_and_version():
    with pytest.raises(RegistrationError) as error:
        captured.kernel(FLASH_OP, "CPU")
    assert str(error.value) == f"torch {torch.__version__} has no CPU kernel for aten::{FLASH_OP}"

"""Promises of kernels from the hub, on folders with flash-attn's functions and a stand-in for `kernels`."""

import builtins
import io
import os
import shutil
import subprocess
import sys
import threading
import types
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support import fake_fa2, hub, packages
from support.command_line import invoke, rows, words

import attnreg
from attnreg.backends.fa2 import hub_package
from attnreg.backends.fa2.hub_functions import FlashFunctions
from attnreg.core import registry
from attnreg.core.contract.spec import Device
from attnreg.core.registry import verification
from attnreg.core.registry.sourced import under_test
from attnreg.core.settings import hub_names
from attnreg.core.torchlib import caches, captured
from attnreg.core.torchlib.isolation import run_in_thread
from attnreg.errors import (
    BackendUnavailableError,
    ConfigError,
    RegistrationError,
    UnknownBackendError,
    UnsupportedInputError,
)
from attnreg.testing import Conformance
from attnreg.tools.cli import verify

REPOSITORY, COMMIT, OTHER = "kernels-community/flash-attn3", "a" * 40, "b" * 40
PINNED = f"hub:{REPOSITORY}@{COMMIT}"
HERE = Path(hub.__path__[0])
# What each test needs of a kernel that is wrong, or lacks something: code behind the functions.
WRONG = """
import functools
@functools.wraps(right := flash_attn_func)
def flash_attn_func(*args, **options):
    out, *rest = right(*args, **options)
    return out * 1.5, *rest
"""
RAISING = """
def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
    if q.numel() > 8:
        raise RuntimeError("no kernel image is available")
    return q, q[..., 0].transpose(1, 2)
"""
FORWARD_ONLY = "del _flash_attn_backward, _flash_attn_varlen_backward"


FLASH_3 = """
_dense, _packed, _packed_func = _flash_attn_backward, _flash_attn_varlen_backward, flash_attn_varlen_func
del _flash_attn_varlen_backward

def flash_attn_varlen_func(q, k, v, *args, **options):
    assert k.isfinite().all() and v.isfinite().all(), "a NaN that no query sees is loaded, and spreads"
    return _packed_func(q, k, v, *args, **options)

flash_attn_varlen_func.__wrapped__ = _packed_func

def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
    max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
    window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):
    assert all(x.isfinite().all() for x in (dout, q, k, v, out)), "a NaN spreads"
    mask = 0.0, softmax_scale, is_causal, window_size_left, window_size_right, softcap, deterministic
    tensors = dout, q, k, v, out, softmax_lse, dq, dk, dv
    if cu_seqlens_q is None:
        _dense(*tensors, *mask)
    else:
        _packed(*tensors, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *mask)
"""
# Cases in which the kernels leave something to be converted, and one of each layout besides.
OF_CONVENTIONS = (
    *("heads 6:3", "packed tail of NaN", "no keys", "packed no keys"),
    *("packed empty between", "packed window (8, 2)", "window (0, -1), few keys", "layout odd rows"),
)


@pytest.fixture(autouse=True)
def package(monkeypatch, tmp_path):
    """Install the stand-in for the package `kernels`, with a cache of the test's own and no network."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("HUB", "LOCAL_KERNELS", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield
    sys.modules.pop("kernels", None)


@pytest.fixture(autouse=True)
def verified(monkeypatch):
    """Verify by a few checks in this process; returns the names that were verified."""
    names = []

    def run(name, device):
        names.append(name)
        entry = registry.find(name)
        kit = Conformance(entry.backend, device.type, ["float32"])
        checks = [check for check in kit.checks if check.name in ("heads 4:2", "packed heads 4:2")]
        # A thread has none of the state of the call that waits for this, as another process has none.
        outcomes = run_in_thread(lambda: [kit.run(check) for check in checks])
        data = verify._data(entry, "", kit, outcomes)
        verify._remember(entry, kit, data | {"never_ran": []})
        return ""

    monkeypatch.setattr(verification, "_run", run)
    return names


def made(folder, *further):
    """Return a folder with a kernel of the hub's form: flash-attn's functions, then further code."""
    variant = folder / "build" / "torch-cpu"
    variant.mkdir(parents=True)
    code = (HERE / "flash_kernel.py").read_text() + "\n".join(further)
    (variant / "__init__.py").write_text(code)
    (variant / "metadata.json").write_text('{"id": "_test", "name": "test", "backend": {"type": "cpu"}}')
    return folder


@pytest.fixture
def kernel(tmp_path):
    """Return a function that makes a folder with a kernel, and returns its name as a backend."""
    return lambda *further: f"hub:{made(tmp_path / 'kernel', *further)}"


@pytest.fixture
def on_the_hub(monkeypatch, tmp_path):
    """Put a kernel on the hub, at COMMIT, which is its branch v1; returns a function for the uses of it."""
    place = tmp_path / "hub" / f"kernels--{REPOSITORY.replace('/', '--')}"
    made(place / "snapshots" / COMMIT)
    (place / "refs").mkdir()
    (place / "refs" / "v1").write_text(COMMIT)
    monkeypatch.setenv("HUB", str(tmp_path / "hub"))
    uses = tmp_path / "hub" / "uses.txt"
    return lambda: uses.read_text().split() if uses.exists() else []


def query(*shape, dtype=torch.float32):
    return torch.randn(*(shape or (1, 4, 16, 32)), dtype=dtype)


def calls_of(name):
    return {direction: count for direction, count in attnreg.stats().calls.get(name, {}).items() if count}


def reason_of(name, backend=None):
    """Return the one reason against a plain call on a CPU."""
    q = query()
    with attnreg.use_backend(backend) if backend else nullcontext():
        (reason,) = attnreg.explain(q, q, q).forward.rejected[name]
    return reason


def test_a_kernel_serves_sdpa_and_packed_calls_after_one_verification(kernel, verified):
    name = kernel()
    handle = attnreg.register_backend(name)
    assert (handle.backend, verified) == (name, [])
    q, k, v = (query().requires_grad_() for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert calls_of(name) == {"forward": 1, "backward": 1}
    with attnreg.use_backend("math"):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), (q, k, v)))
    packed, offsets = query(16, 4, 32), torch.tensor([0, 7, 16], dtype=torch.int32)
    got = attnreg.varlen_attn(packed, packed, packed, offsets, offsets, 9, 9, backend=name)
    assert calls_of(name) == {"forward": 2, "backward": 1}
    expected = attnreg.varlen_attn(packed, packed, packed, offsets, offsets, 9, 9, backend="math")
    torch.testing.assert_close(got, expected)
    assert verified == [name]


def test_a_verification_is_remembered_for_the_files_of_a_kernel(kernel, verified, monkeypatch):
    name, q = kernel(), query()
    with attnreg.use_backend(name):
        F.scaled_dot_product_attention(q, q, q)
        monkeypatch.setattr(registry, "_entries", None)  # as in another process
        registry.changed()
    with attnreg.use_backend(name):
        F.scaled_dot_product_attention(q, q, q)
    assert verified == [name]
    file = Path(name.removeprefix("hub:"), "build/torch-cpu/__init__.py")
    before = file.stat()
    file.with_name("cache.txt").write_text("what an import writes is no other kernel")
    file.write_text(file.read_text()[:-1] + " ")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    monkeypatch.setattr(registry, "_entries", None)
    registry.changed()
    with attnreg.use_backend(name):
        F.scaled_dot_product_attention(q, q, q)
    assert verified == [name, name]


def test_a_wrong_kernel_is_left_out_and_the_next_backend_serves(kernel, monkeypatch, caplog):
    name, q = kernel(WRONG), query()
    monkeypatch.setenv("ATTNREG_BACKEND", f"{name},math")
    expected = torch.softmax(q @ q.transpose(-1, -2) / 32**0.5, -1) @ q
    torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), expected)
    assert (calls_of(name), calls_of("math")) == ({}, {"forward": 1})
    reason = reason_of(name)
    assert reason.startswith(
        "its verification failed: 1 of 2 checks are wrong, first heads 4:2, float32: out:"
    )
    assert "first out[0, 0, 0, 0]" in reason
    assert f"`attnreg verify --backend {name} --device cpu` shows all" in reason
    assert reason in caplog.text


def test_only_the_thread_of_the_kit_runs_a_kernel_unverified(kernel):
    name, q = kernel(WRONG), query()

    def call():
        with attnreg.use_backend(name):
            F.scaled_dot_product_attention(q, q, q)

    with under_test(name, registry.changed):
        run_in_thread(call)
        assert calls_of(name) == {}
        registry.changed()
        call()
        assert calls_of(name) == {"forward": 1}
    call()  # no plan of the block is left
    assert calls_of(name) == {"forward": 1}


@pytest.mark.parametrize("front", ["use_backend", "(backend=)"])
def test_the_backward_of_a_check_runs_unverified_on_a_gpu_too(front, kernel, verified, monkeypatch):
    grad = torch.autograd.grad

    def of_a_gpu(*arguments):
        if torch.autograd.is_multithreading_enabled():  # autograd has a thread for each GPU
            return run_in_thread(lambda: grad(*arguments))
        return grad(*arguments)

    monkeypatch.setattr(torch.autograd, "grad", of_a_gpu)
    kit = Conformance(kernel(), "cpu", ["float32"])
    checks = [check for check in kit.checks if check.front.endswith(front)]
    outcomes = [kit.run(check) for check in checks]
    assert [outcome.failure for outcome in outcomes] == [""] * len(checks)
    assert any("dq" in outcome.errors for outcome in outcomes)
    assert verified == []


@pytest.mark.parametrize("failure", ["torch.OutOfMemoryError", "MemoryError", "RuntimeError"])
def test_a_full_device_says_nothing_of_a_kernel(kernel, failure):
    said = "CUDA error: an illegal memory access was encountered" if failure == "RuntimeError" else "full"
    attnreg.register_backend(
        name := kernel(RAISING.replace("RuntimeError", failure).replace("no kernel", said))
    )
    assert "isn't verified: its verification left no result" in reason_of(name)
    assert not list(caches.folder("verified").glob("*.json"))


def test_a_wrong_kernel_is_an_error_where_the_call_names_it(kernel):
    name, packed = kernel(WRONG), query(16, 4, 32)
    offsets = torch.tensor([0, 16], dtype=torch.int32)
    with pytest.raises(UnsupportedInputError, match="its verification failed"):
        attnreg.varlen_attn(packed, packed, packed, offsets, offsets, 16, 16, backend=name)


def test_a_kernel_that_raises_is_left_out_with_its_error(kernel):
    attnreg.register_backend(name := kernel(RAISING))
    assert "RuntimeError: no kernel image is available" in reason_of(name)


def test_a_kernel_without_a_backward_leaves_gradients_to_another_backend(kernel):
    attnreg.register_backend(name := kernel(FORWARD_ONLY))
    q = query().requires_grad_()
    F.scaled_dot_product_attention(q, q, q).sum().backward()
    assert (calls_of(name), calls_of("cpu")) == ({"forward": 1}, {"backward": 1})


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "flash_atn_func = flash_attn_func; del flash_attn_func, flash_attn_varlen_func",
            "has neither flash_attn_func nor flash_attn_varlen_func, expected one of them; it has "
            "flash_atn_func, torch; did you mean 'flash_atn_func'?",
        ),
        (
            "def flash_attn_func(q, k, v, page_size, softmax_scale=None): ...",
            "needs page_size, which attnreg doesn't know",
        ),
        (
            "def flash_attn_func(*args, **options): ...",
            "flash_attn_func of {name} has no argument q, k, v, softmax_scale, expected all of them",
        ),
        (
            "import flash_attn_cuda_abi",
            "can't be imported: ModuleNotFoundError: No module named 'flash_attn_cu",
        ),
    ],
)
def test_a_kernel_that_can_not_be_used_says_why(kernel, code, message):
    name = kernel(code)
    with pytest.raises(BackendUnavailableError) as error:
        attnreg.register_backend(name)
    assert message.format(name=name) in str(error.value)
    handle = attnreg.register_backend(name, required=False)
    assert "removed" in repr(handle)


def test_capabilities_are_the_arguments_of_the_functions(kernel):
    plain = kernel("""
def flash_attn_varlen_func(q, k, v, softmax_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    ...
def flash_attn_func(q, k, v, softmax_scale=None, causal=False): ...
del _flash_attn_varlen_backward
""")
    backend = registry.find(plain).open()
    forward, backward = backend.forward, backend.backward
    assert (forward.causal, forward.window, forward.softcap, forward.alibi, forward.dropout) == (
        *(True, False, False, False), False,
    )  # fmt: skip
    assert (forward.dense, forward.varlen, backward.dense, backward.varlen) == (True, True, True, False)
    assert (backward.window, backward.deterministic, backward.softcap) == (True, True, True)
    assert forward.devices == ("cpu",)


def test_a_backward_declares_what_it_takes_in_both_layouts(kernel):
    backward = (
        registry.find(
            kernel("""
def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    softmax_scale, causal,
): ...
""")
        )
        .open()
        .backward
    )
    assert (backward.dense, backward.varlen, backward.causal) == (True, True, True)
    assert (backward.softcap, backward.window, backward.deterministic) == (False, False, False)


def test_kernels_with_the_conventions_of_flash_attn_2_keep_the_contract(monkeypatch, tmp_path):
    monkeypatch.setattr(captured, "kernel", fake_fa2.Torch().kernel)
    file = made(tmp_path / "kernel") / "build" / "torch-cpu" / "__init__.py"
    file.write_text((HERE / "cuda_kernel.py").read_text())
    backend = registry.find(f"hub:{tmp_path / 'kernel'}").open()
    both, _ = packages.verified(backend, [case for case in packages.SHORT if case.name in OF_CONVENTIONS])
    assert both == set(OF_CONVENTIONS) - {"window (0, -1), few keys"}


def test_kernels_with_the_conventions_of_flash_attn_3_keep_the_contract(kernel):
    backend = registry.find(kernel(FLASH_3)).open()
    both, _ = packages.verified(backend, [case for case in packages.SHORT if case.name in OF_CONVENTIONS])
    assert both == set(OF_CONVENTIONS) - {"window (0, -1), few keys"}
    spec = packages.gpu_spec("cpu", deterministic=True, head_dim=256)
    assert backend.backward.unsupported(spec) == (
        "head_dim must be at most 192 with deterministic algorithms, got 256",
    )
    assert backend.forward.unsupported(spec) == ()


def test_one_backward_for_both_layouts_is_given_the_layout():
    seen = {}

    def forward(q, k, v, softmax_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k): ...

    def backward(dout, q, k, v, softmax_scale, dq, dk, dv, cu_seqlens_q=None, sequed_k=None, is_causal=False):
        seen.update(cu_seqlens_q=cu_seqlens_q, is_causal=is_causal, dq=dq)

    inner = types.SimpleNamespace(_flash_attn_backward=backward)
    module = types.SimpleNamespace(flash_attn_varlen_func=forward, flash_attn_interface=inner)
    functions = FlashFunctions(module, "hub:test")
    assert functions.forwards[0] is None
    assert functions.backwards[0] is None
    x, offsets = query(4, 1, 8), torch.tensor([0, 3], dtype=torch.int32)
    call = attnreg.Call(
        scale=1.0, max_q=3, max_k=3, window=(-1, 0), cu_seqlens_q=offsets, cu_seqlens_k=offsets
    )
    grad, *_ = functions.backward((x, x, x, x, x, torch.zeros(1, 4)), call)
    assert seen == {"cu_seqlens_q": offsets, "is_causal": True, "dq": grad}


def test_a_forward_without_an_lse_is_an_error():
    functions = FlashFunctions(
        types.SimpleNamespace(flash_attn_func=lambda q, k, v, softmax_scale: q), "hub:test"
    )
    x = query(1, 2, 1, 8)
    with pytest.raises(RegistrationError, match="hub:test returned Tensor, expected output and LSE"):
        functions.forward((x, x, x), attnreg.Call(scale=1.0, max_q=2, max_k=2))


def test_a_missing_package_is_said_with_the_line_that_installs_it(kernel, monkeypatch):
    name = kernel()
    monkeypatch.setitem(sys.modules, "kernels", None)
    monkeypatch.setattr(hub_package, "import_module", lambda name: __import__("no_such_kernels_package"))
    monkeypatch.setattr(hub_package, "NAME", "no_such_kernels_package")
    with pytest.raises(BackendUnavailableError) as error:
        attnreg.register_backend(name)
    assert "isn't installed; install it with: pip install 'attnreg[hub]'" in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"hub:{REPOSITORY}", "got no revision, expected one behind an @: a commit"),
        (f"hub:{REPOSITORY}@", "got an empty revision"),
        (f"hub:{REPOSITORY}@../../other", "got '../../other', expected one behind an @"),
        (f"hub:a/..@{COMMIT}", "expected hub:owner/repository@revision"),
        ("hub:~no-such-person/kernel", "but there is no home folder for its ~"),
        ("hub:kernels-community/flash-atn3", "did you mean 'kernels-community/flash-attn3'?"),
        ("hub:flash-attn3@v1", "expected hub:owner/repository@revision, or hub: and the path of a folder"),
        (f"{REPOSITORY}@v1", f"did you mean 'hub:{REPOSITORY}@v1'?"),
        (f"hubb:{REPOSITORY}@v1", f"did you mean 'hub:{REPOSITORY}@v1'?"),
    ],
)
def test_a_malformed_name_is_an_error_everywhere(name, message, monkeypatch, tmp_path):
    with pytest.raises(UnknownBackendError) as error:
        attnreg.register_backend(name)
    assert message in str(error.value)
    with pytest.raises(ConfigError) as error:
        attnreg.configure({"devices": {"cpu": {"order": [name]}}})
    assert message in str(error.value)
    file = tmp_path / "settings.toml"
    file.write_text(f'[devices.cpu]\norder = ["{name}"]\n')
    with pytest.raises(ConfigError) as error:
        attnreg.configure(file)
    assert message in str(error.value)
    assert f"{file}:2: " in str(error.value)
    monkeypatch.setenv("ATTNREG_BACKEND", name)
    with pytest.raises(ConfigError) as error:
        attnreg.reload()
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["hub:{}/b@v1", "hub:{}", "hub:a/b@{}", "a/{}", "hub:a/{}", "hub:./{}"])
def test_messages_about_long_names_are_short(name):
    name = name.format("x" * 10**6)
    with pytest.raises((UnknownBackendError, BackendUnavailableError)) as error:
        attnreg.register_backend(name)
    assert len(str(error.value)) < 2000


def test_names_that_differ_in_case_only_are_not_mistaken_for_each_other(kernel, tmp_path):
    name = kernel()
    made(tmp_path / "Kernel", WRONG)
    registry.find(name)
    with pytest.raises(UnknownBackendError, match="expected the same upper and lower case"):
        registry.find(f"hub:{tmp_path / 'Kernel'}")
    assert registry.find(name.replace("hub:", " HUB:")) is registry.find(name)


def test_a_pinned_revision_needs_the_network_once(on_the_hub, monkeypatch, caplog):
    q = query()
    with attnreg.use_backend(PINNED):
        F.scaled_dot_product_attention(q, q, q)
    assert on_the_hub() == [f"{REPOSITORY}@{COMMIT}"]
    monkeypatch.setattr(registry, "_entries", None)
    registry.changed()
    monkeypatch.delenv("HUB")
    with attnreg.use_backend(PINNED):
        F.scaled_dot_product_attention(q, q, q)
    assert calls_of(PINNED) == {"forward": 2}
    assert "names no commit" not in caplog.text
    assert registry.find(PINNED).version() == f"{COMMIT} (kernels 0.17.2, torch-cpu)"


def test_a_cached_kernel_whose_import_fails_says_why(on_the_hub, monkeypatch, tmp_path):
    assert not registry.find(PINNED).unavailable()
    (file,) = (tmp_path / "kernels").rglob("__init__.py")
    file.write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setattr(registry, "_entries", None)
    monkeypatch.delitem(sys.modules, f"_kernel_{abs(hash(file.parent))}")
    monkeypatch.delenv("HUB")
    why = registry.find(PINNED).unavailable()
    assert f"{PINNED} can't be imported: ImportError: libcudart.so.12: cannot open" in why


@pytest.mark.parametrize("other", ["", "x"])
def test_a_folder_in_the_place_of_a_repository_serves(on_the_hub, monkeypatch, tmp_path, caplog, other):
    made(tmp_path / "mine")
    seen = []
    monkeypatch.setenv("LOCAL_KERNELS", f"{other}{REPOSITORY}={tmp_path / 'mine'}")
    package = hub_package._package()
    get = package.get_kernel
    monkeypatch.setattr(
        package,
        "get_kernel",
        lambda *args, **named: (
            seen.append(args)
            or (get(*args, **named) if other else package.get_local_kernel(tmp_path / "mine"))
        ),
    )
    entry = registry.find(f"hub:{REPOSITORY}@v1")
    assert (entry.unavailable(), len(seen)) == ("", 1)
    assert entry.version().startswith(COMMIT if other else "files ")
    assert ("To keep it" in caplog.text) == bool(other)


def test_only_the_error_about_a_publisher_says_that_it_is_not_trusted():
    name = hub_names.parse("hub:trustyai/flash@v1")
    other = hub_package._explain(ImportError("trustyai/flash: libcudart.so.12"), name)
    assert "can't be imported: ImportError: trustyai/flash" in other
    of_trust = hub_package._explain(ValueError("'a/b' is not from a trusted publisher. Set"), name)
    assert "trustyai/flash isn't of a publisher whom kernels trusts" in of_trust


def test_calls_touch_neither_network_nor_disk(on_the_hub, monkeypatch, tmp_path):
    q, offsets = query(8, 2, 32), torch.tensor([0, 8], dtype=torch.int32)
    attnreg.varlen_attn(q, q, q, offsets, offsets, 8, 8, backend=PINNED)
    shutil.rmtree(tmp_path / "kernels")
    shutil.rmtree(tmp_path / "hub")
    for name in ("open", "stat", "listdir", "scandir"):
        monkeypatch.setattr(os, name, None)
    for place in (builtins, io):
        monkeypatch.setattr(place, "open", None)
    attnreg.varlen_attn(q, q, q, offsets, offsets, 8, 8, backend=PINNED)
    monkeypatch.undo()
    assert calls_of(PINNED) == {"forward": 2}


def test_a_branch_is_said_once_with_the_commit_to_pin(on_the_hub, monkeypatch, caplog):
    name, q = f"hub:{REPOSITORY}@v1", query()
    monkeypatch.setenv("ATTNREG_BACKEND", name)
    for _ in range(2):
        F.scaled_dot_product_attention(q, q, q)
    said = [record.message for record in caplog.records if "names no commit" in record.message]
    assert said == [
        f"{name} names no commit, so another start may load another kernel; it is {COMMIT} now. To keep it: "
        f"{PINNED}"
    ]
    assert on_the_hub() == [f"{REPOSITORY}@v1"]
    assert calls_of(name) == {"forward": 2}
    assert registry.find(name).version().startswith(COMMIT)


def test_the_last_download_of_a_branch_serves_without_a_network(on_the_hub, monkeypatch, caplog):
    entry = registry.find(f"hub:{REPOSITORY}@v1")
    assert not entry.unavailable()
    monkeypatch.setattr(registry, "_entries", None)
    monkeypatch.delenv("HUB")
    again = registry.find(entry.name)
    assert (again.unavailable(), again.version()) == ("", entry.version())
    assert "the hub can't be reached, and the last download of v1 serves" in caplog.text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"hub:{REPOSITORY}@{OTHER}", f"{REPOSITORY} has no revision '{OTHER}': see https://huggingface.co/"),
        (
            f"hub:kernels-community/flash-atn2@{COMMIT}",
            "the hub has no repository kernels-community/flash-atn2, or only for some (HF_TOKEN names who "
            "asks); did you mean 'kernels-community/flash-attn2'?",
        ),
    ],
)
def test_what_the_hub_does_not_have_is_said(on_the_hub, name, message):
    with pytest.raises(BackendUnavailableError) as error:
        attnreg.register_backend(name)
    assert message in str(error.value)


def test_without_a_network_the_error_says_how_to_fill_the_cache(monkeypatch):
    monkeypatch.setenv("ATTNREG_BACKEND", PINNED)
    q = query()
    with pytest.raises(BackendUnavailableError) as error:
        F.scaled_dot_product_attention(q, q, q)
    assert "ATTNREG_BACKEND: hub:" in str(error.value)
    assert "the hub can't be reached (ConnectError: [Errno -2] Name or service not known)" in str(error.value)
    assert f"kernels.install_kernel('{REPOSITORY}', revision='{COMMIT}')" in str(error.value)


def test_reload_tries_again_what_the_network_kept_from_loading(on_the_hub, monkeypatch):
    hub_folder, q = os.environ["HUB"], query()
    monkeypatch.setenv("ATTNREG_BACKEND", PINNED)
    monkeypatch.delenv("HUB")
    attnreg.reload()
    with pytest.raises(BackendUnavailableError, match="the hub can't be reached"):
        F.scaled_dot_product_attention(q, q, q)
    monkeypatch.setenv("HUB", hub_folder)
    with pytest.raises(BackendUnavailableError, match="the hub can't be reached"):
        F.scaled_dot_product_attention(q, q, q)
    attnreg.reload()
    F.scaled_dot_product_attention(q, q, q)
    assert calls_of(PINNED) == {"forward": 1}


def test_names_of_no_kernel_leave_the_registry(kernel, tmp_path):
    name, named_by_a_setting = f"hub:{tmp_path / 'no'}", f"hub:{tmp_path / 'none'}"
    attnreg.configure({"devices": {"cuda": {"order": [named_by_a_setting]}}})
    packed, offsets = query(16, 4, 32), torch.tensor([0, 16], dtype=torch.int32)
    for wrong in (name, named_by_a_setting):
        with pytest.raises(BackendUnavailableError):
            attnreg.register_backend(wrong)
        with pytest.raises(BackendUnavailableError), attnreg.use_backend(wrong):
            pass
        with pytest.raises(BackendUnavailableError):
            attnreg.varlen_attn(packed, packed, packed, offsets, offsets, 16, 16, backend=wrong)
    assert [each for each in attnreg.list_backends() if "hub:" in each] == [named_by_a_setting]


def test_without_a_build_for_this_machine_the_error_says_so(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(BackendUnavailableError, match="Cannot find a build variant for this system"):
        attnreg.register_backend(f"hub:{tmp_path / 'empty'}")
    with pytest.raises(BackendUnavailableError, match="missing, expected a folder with a kernel"):
        attnreg.register_backend(f"hub:{tmp_path / 'missing'}")


def test_settings_and_modules_name_kernels(kernel):
    name, q = kernel(), query()
    attnreg.configure({"devices": {"cpu": {"order": [name]}}})
    F.scaled_dot_product_attention(q, q, q)
    assert calls_of(name) == {"forward": 1}
    attnreg.configure({"disabled": [name]})
    with attnreg.use_backend(name):
        F.scaled_dot_product_attention(q, q, q)
    assert calls_of(name) == {"forward": 1}


@pytest.mark.parametrize("kind", ["file", "program", "variable"])
@pytest.mark.parametrize("is_disabled", [False, True])
def test_a_folder_is_named_by_a_path_from_here_or_from_the_file(
    kernel, monkeypatch, tmp_path, kind, is_disabled
):
    name, q = kernel(), query()
    monkeypatch.chdir(tmp_path)
    if kind == "file":
        (file := tmp_path / "etc" / "settings.toml").parent.mkdir()
        file.write_text(("disabled" if is_disabled else "devices.cpu.order") + ' = ["HUB:../kernel"]')
        attnreg.configure(file)
    elif kind == "program":
        names = {"disabled": ["hub: ./kernel"]}
        attnreg.configure(names if is_disabled else {"devices": {"cpu": {"order": names["disabled"]}}})
    else:
        monkeypatch.setenv("ATTNREG_DISABLE" if is_disabled else "ATTNREG_BACKEND", "hub:./kernel")
        attnreg.reload()
    monkeypatch.chdir("/")
    F.scaled_dot_product_attention(q, q, q)
    assert calls_of(name) == ({} if is_disabled else {"forward": 1})
    if is_disabled:
        assert reason_of(name, backend=name).startswith("disabled by ")


def marked(folder):
    """Return the name of a kernel whose import leaves a mark, and the mark's file."""
    mark = folder.with_name(f"{folder.name}-ran")
    return f"hub:{made(folder, f'import pathlib; pathlib.Path({str(mark)!r}).touch()')}", mark


def test_code_of_a_kernel_runs_only_where_a_setting_that_applies_asks_for_it(monkeypatch, tmp_path):
    (off, off_ran), (of_gpus, of_gpus_ran), (asked, asked_ran), (by_variable, by_variable_ran) = (
        marked(tmp_path / name) for name in ("off", "of-gpus", "asked", "by-variable")
    )
    monkeypatch.setenv("ATTNREG_DISABLE", by_variable)
    attnreg.reload()
    attnreg.configure({"disabled": [off], "devices": {"cuda": {"order": [of_gpus]}}})
    q, packed, offsets = query(), query(16, 4, 32), torch.tensor([0, 16], dtype=torch.int32)
    for _ in range(2):
        F.scaled_dot_product_attention(q, q, q)
        attnreg.varlen_attn(packed, packed, packed, offsets, offsets, 16, 16)
        order = attnreg.explain(q, q, q).forward.order
        # Known now, by a call of another thread, say; disabled as before.
        registry.find(off)
        registry.find(by_variable)
    info = words(invoke("info"))
    assert f"{of_gpus} not loaded" in info
    assert not {off, of_gpus, by_variable}.intersection(order)
    assert not (off_ran.exists() or of_gpus_ran.exists() or by_variable_ran.exists())
    with attnreg.use_backend(off):
        F.scaled_dot_product_attention(q, q, q)
        rejected = attnreg.explain(q, q, q).forward.rejected
    with pytest.raises(RegistrationError, match=r"is disabled by .*, expected one whose code may run"):
        attnreg.register_backend(off)
    assert not off_ran.exists()
    assert [reason.partition(" by ")[0] for reason in rejected[off]] == ["disabled"]
    with attnreg.use_backend(asked):
        F.scaled_dot_product_attention(q, q, q)
    assert (asked_ran.exists(), calls_of(asked)) == (True, {"forward": 1})
    # The kernel is loaded now, but nothing asks for it any more.
    assert asked not in attnreg.explain(q, q, q).forward.order


def test_a_kernel_may_call_attention_on_another_backend_while_it_is_imported(kernel):
    name, q = (
        kernel("""
import attnreg
with attnreg.use_backend("math"):
    x = torch.ones(1, 1, 2, 8)
    assert (torch.nn.functional.scaled_dot_product_attention(x, x, x) == 1).all()
"""),
        query(),
    )
    with attnreg.use_backend(name):
        F.scaled_dot_product_attention(q, q, q)
    assert (calls_of(name), calls_of("math")) == ({"forward": 1}, {"forward": 1})


def test_calls_on_another_backend_do_not_wait_for_a_kernel_that_is_being_loaded(kernel, monkeypatch):
    name, q = kernel("import hub_gate; hub_gate.pass_through()"), query()
    entered, opened = threading.Event(), threading.Event()
    gate = types.SimpleNamespace(pass_through=lambda: (entered.set(), opened.wait(30)))
    monkeypatch.setitem(sys.modules, "hub_gate", gate)
    loading = threading.Thread(target=lambda: registry.find(name).open())
    loading.start()
    try:
        assert entered.wait(30)
        with attnreg.use_backend("math"):
            F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(q, q, q)
        assert loading.is_alive()
    finally:
        opened.set()
        loading.join()
    assert calls_of("math") == {"forward": 1}


def test_commands_name_kernels(kernel, monkeypatch):
    name = kernel()
    result = invoke("verify", "--backend", name, "--case", "packed heads 4:2", "--json")
    assert result.exit_code == 0, result.output
    assert rows(result)[name]["right"] == 1
    monkeypatch.setenv("ATTNREG_BACKEND", name)
    attnreg.reload()
    assert name in words(invoke("info"))
    shown = words(invoke("explain", "--q", "1,16,4,32", "--dtype", "fp32", "--device", "cpu"))
    assert f"{name} forward, by ATTNREG_BACKEND" in shown


def test_a_lock_names_the_commit(on_the_hub, monkeypatch, tmp_path):
    name, q = f"hub:{REPOSITORY}@v1", query()
    trace, lock = tmp_path / "trace.jsonl", tmp_path / "lock.json"
    monkeypatch.setenv("ATTNREG_BACKEND", name)
    with attnreg.record(trace):
        F.scaled_dot_product_attention(q, q, q)
    result = invoke("lock", "--from", trace, "--out", lock, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert f'"{name}": "{COMMIT} (' in lock.read_text()
    monkeypatch.setenv("ATTNREG_LOCK", str(lock))
    attnreg.reload()
    F.scaled_dot_product_attention(q, q, q)
    assert calls_of(name)["forward"] >= 1
    place = tmp_path / "hub" / f"kernels--{REPOSITORY.replace('/', '--')}"
    made(place / "snapshots" / OTHER)
    (place / "refs" / "v1").write_text(OTHER)
    monkeypatch.setattr(registry, "_entries", None)
    monkeypatch.delenv("ATTNREG_BACKEND")
    attnreg.reload()
    with pytest.raises(UnsupportedInputError, match=f"locked with {name} {COMMIT} .*, here it is {OTHER} "):
        F.scaled_dot_product_attention(q, q, q)


def test_a_verification_that_does_not_end_leaves_the_kernel_out(kernel, monkeypatch):
    monkeypatch.undo()
    for problem, said in (
        (subprocess.TimeoutExpired("attnreg", 1800), "its checks didn't end within 1800 s"),
        (OSError("no more processes"), "its checks couldn't be started: no more processes"),
        (subprocess.CompletedProcess([], -11, "", ""), "its checks ended by signal 11"),
        (subprocess.CompletedProcess([], 2, "", "out of\nmemory"), "out of memory"),
    ):

        def run(*_, problem=problem):
            if isinstance(problem, BaseException):
                raise problem
            return problem

        monkeypatch.setattr(verification.children, "run", run)
        assert said in verification._run("hub:test", Device("cpu"))


def test_ranks_do_not_repeat_a_verification_that_has_just_failed(monkeypatch):
    runs, device = [], Device("cpu")
    said = "its checks ended by signal 11"
    monkeypatch.setattr(verification, "_run", lambda *of: runs.append(of) or said)
    for _ in range(2):
        assert f"isn't verified: {said}" in verification.verdict("hub:test", COMMIT, device)
    assert runs == [("hub:test", device)]
    (attempt,) = caches.folder("verified").glob("*.failed")
    os.utime(attempt, (0, 0))
    verification.verdict("hub:test", COMMIT, device)
    assert len(runs) == 2


def test_another_attnreg_verifies_again(monkeypatch):
    before = verification.file_of(COMMIT, Device("cpu"))
    monkeypatch.setattr(attnreg, "__version__", "0.0")
    assert verification.file_of(COMMIT, Device("cpu")) != before


def test_where_nothing_can_be_noted_the_kernel_is_left_out(kernel, monkeypatch, tmp_path):
    name = kernel()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    attnreg.register_backend(name)
    assert "isn't verified, and nothing could be noted" in reason_of(name)


@pytest.mark.slow
def test_the_checks_run_in_a_process_of_their_own(kernel, monkeypatch, verified):
    monkeypatch.setattr(verification, "_run", RUN)
    few = "def flash_attn_func(q, k, v, softmax_scale=None, right=flash_attn_func): return right("
    only = (
        f"{FORWARD_ONLY}, flash_attn_varlen_func\n{few}q, k, v, 0.0, softmax_scale, return_attn_probs=True)"
    )
    attnreg.register_backend(name := kernel(only))
    q = query()
    F.scaled_dot_product_attention(q, q, q)
    assert (calls_of(name), verified) == ({"forward": 1}, [])


RUN = verification._run

"""Promises of discovery: every backend is found without being listed, and a broken one hides no other."""

import dataclasses
import importlib
import shutil
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.policies import SPEC
from support.processes import forked

import attnreg
from attnreg.core import registry
from attnreg.core.registry import discovery
from attnreg.core.registry.discovery import discover
from attnreg.core.registry.entry import Entry
from attnreg.errors import BackendUnavailableError, UnsupportedInputError

ROOT = Path(attnreg.__file__).parent

# What a plugin's module holds: the reference under another name.
SOURCE = """\
import attnreg
from attnreg.backends.math import BACKEND as MATH

BACKEND = attnreg.Backend(name={name!r}, forward=MATH.forward, backward=MATH.backward, load=MATH.load)
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Install a distribution with one entry point: `plugin("name", source)`."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(discovery, "entry_points", entry_points)  # it is installed later than read elsewhere
    modules = []

    def install(point, source, distribution=None):
        module = distribution or f"attnreg_{point}_plugin"
        (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
        info = tmp_path / f"{module}-2.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 2.5\n")
        (info / "entry_points.txt").write_text(f"[attnreg.backends]\n{point} = {module}:BACKEND\n")
        importlib.invalidate_caches()
        modules.append(module)
        return f"entry point {module}:BACKEND of {module} 2.5"

    yield install
    for module in modules:
        sys.modules.pop(module, None)


def found(name):
    return next(entry for entry in discover() if entry.name == name)


def backend_names():
    """Return the files and folders of the package that are backends."""
    return {path.stem for path in (ROOT / "backends").glob("[!_]*") if path.suffix in ("", ".py")}


def test_every_file_or_folder_is_a_backend_unless_its_name_begins_with_an_underscore():
    origins = {entry.origin for entry in discover() if entry.origin.startswith("attnreg.backends.")}
    assert origins == {f"attnreg.backends.{name}" for name in backend_names()}
    assert {"math", "fa3"} < backend_names()


def test_a_file_added_to_a_copy_of_the_package_is_a_backend_and_no_other_file_has_to_change(tmp_path):
    copy = tmp_path / "attnreg"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("*.pyc.*"))
    (copy / "backends" / "extra.py").write_text(SOURCE.format(name="Extra"), encoding="utf-8")
    (copy / "backends" / "broken.py").write_text("1 / 0", encoding="utf-8")
    run = forked(
        # As `import torch` does at its end.
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); torch._import_device_backends()\n"
        "import attnreg, torch, torch.nn.functional as F\n"
        "F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 8, 16))\n"
        "broken = attnreg.core.registry.find('broken')\n"
        "print(attnreg.__file__, 'Extra' in attnreg.list_backends(), attnreg.stats().calls)\n"
        "print(broken.origin, broken.unavailable())\n",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0", ATTNREG_BACKEND="extra",
    )  # fmt: skip
    assert run.stderr == ""
    assert run.stdout.splitlines() == [
        f"{copy / '__init__.py'} True {{'Extra': {{'forward': 1, 'backward': 0}}}}",
        "attnreg.backends.broken failed to load: ZeroDivisionError: division by zero",
    ]


def test_a_plugin_of_another_package_is_a_backend(plugin, ran):
    origin = plugin("extra", SOURCE.format(name="Extra"))
    assert found("Extra").origin == origin
    with attnreg.register_backend("EXTRA"):
        F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 8, 16))
    assert ran() == {"Extra": (1, 0)}


# What a plugin's module holds, and why the plugin is then unavailable.
BROKEN = {
    "raise ImportError('undefined symbol: _ZN3c10')": "ImportError: undefined symbol: _ZN3c10",
    "import no_such_package": "ModuleNotFoundError: No module named 'no_such_package'",
    "raise SystemExit('licence expired')": "SystemExit: licence expired",
    "raise OSError('libcudart.so.13')": "OSError: libcudart.so.13",
    "def (:": "SyntaxError: invalid syntax (attnreg_broken_plugin.py, line 1)",
    "": "AttributeError: module 'attnreg_broken_plugin' has no attribute 'BACKEND'",
    "BACKEND = 'FA5'": "RegistrationError: {origin}: got str, expected attnreg.Backend",
    "import attnreg\nBACKEND = attnreg.Backend": "RegistrationError: {origin}: got type, "
    "expected attnreg.Backend",
    "import attnreg\nBACKEND = attnreg.Backend(name='x', load=print, forward=attnreg.Capabilities("
    "devices='cpu', dtypes=('float32',)))": "RegistrationError: Capabilities.devices: got 'cpu', "
    "expected a non-empty tuple of names",
    "import attnreg\nattnreg.register_backend('math')": "RegistrationError: backends are being discovered: "
    "a module that declares one can't use the registry while it is imported",
}  # fmt: skip


@pytest.mark.parametrize(("source", "reason"), BROKEN.items(), ids=BROKEN.values())
def test_a_broken_plugin_is_kept_with_its_cause_and_hides_no_other(plugin, source, reason):
    before = attnreg.list_backends()
    registry._entries = None
    origin = plugin("broken", source)
    good = plugin("good", SOURCE.format(name="Good"))
    assert attnreg.list_backends() == [*before, "broken", "Good"]
    entry = registry.find("broken")
    expected = f"failed to load: {reason.format(origin=origin)}"
    assert entry.unavailable() == expected
    assert entry.reasons(SPEC, "forward") == entry.reasons(SPEC, "backward") == (expected,)
    assert (entry.backend, entry.version(), type(entry.cause).__name__) == (None, "", reason.split(": ")[0])
    assert registry.find("good").origin == good
    with pytest.raises(BackendUnavailableError) as error:
        attnreg.register_backend("broken")
    assert str(error.value) == f"broken {expected}"
    assert error.value.__cause__ is entry.cause


def test_a_module_that_registers_while_another_thread_discovers_it_waits_for_nobody(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import attnreg, main\n"
        f"{SOURCE.format(name='Mine')}\n"
        "main.is_imported.set(); assert main.is_discovering.wait(60)\n"
        "attnreg.register_backend(BACKEND)\n"
    )
    # Discovery imports `mine`, which the other thread holds the import lock of.
    (tmp_path / "main.py").write_text(
        "import threading\nis_imported, is_discovering = threading.Event(), threading.Event()\n"
    )
    run = forked(
        f"import importlib, os, sys, threading; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import attnreg, main\n"
        "from attnreg.core.registry import discovery\n"
        "from importlib.metadata import EntryPoint\n"
        "point, found = EntryPoint('mine', 'mine:BACKEND', discovery.GROUP), discovery.entry_points\n"
        "def points(group):\n"
        "    main.is_discovering.set()\n"
        "    return [*found(group=group), point]\n"
        "discovery.entry_points = points\n"
        "threading.Thread(target=importlib.import_module, args=('mine',), daemon=True).start()\n"
        "assert main.is_imported.wait(60)\n"
        "other = threading.Thread(target=attnreg.list_backends, daemon=True)\n"
        "other.start(); other.join(20)\n"
        "print(other.is_alive(), flush=True)\n"
        "other.is_alive() and os._exit(1)\n"
        "importlib.import_module('mine')\n"
        "print('Mine' in attnreg.list_backends(), attnreg.core.registry.registrations()[0].entry.name)\n"
    )
    assert run.stdout.split() == ["False", "True", "Mine"], run.stderr


def test_a_broken_plugin_is_logged_once_at_info_and_attention_runs_all_the_same(plugin, caplog, routers, ran):
    origin = plugin("broken", "raise SystemExit(3)")
    with caplog.at_level("INFO", "attnreg"):
        attnreg.list_backends()
        attnreg.list_backends()
        said = [(record.levelname, record.message) for record in caplog.records]
    assert said == [("INFO", f"backend broken is broken ({origin}): SystemExit(3)")]
    with attnreg.register_backend("math"):
        F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 8, 16))
    assert ran() == {"math": (1, 0)}


def test_an_interrupt_during_discovery_passes_and_the_next_discovery_is_whole(plugin, monkeypatch):
    plugin("stopped", "import stopper\nstopper.stop()\n" + SOURCE.format(name="Stopped"))

    class Stopper:
        stops = 1

        def stop(self):
            if self.stops:
                self.stops -= 1
                raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "stopper", Stopper())
    with pytest.raises(KeyboardInterrupt):
        attnreg.list_backends()
    assert "Stopped" in attnreg.list_backends()


def test_of_two_backends_of_one_name_the_first_is_used_and_a_warning_names_both_origins(plugin, caplog):
    second = plugin("other", SOURCE.format(name="eXTRA"), distribution="attnreg_a_plugin")
    first = plugin("extra", SOURCE.format(name="Extra"), distribution="attnreg_b_plugin")
    third = plugin("math", SOURCE.format(name="Math"))
    names = attnreg.list_backends()
    assert [name in names for name in ("Extra", "eXTRA", "math", "Math")] == [True, False, True, False]
    assert registry.find("EXTRA").origin == first
    assert registry.find("math").origin == "attnreg.backends.math"
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", f"two backends are named 'Math': attnreg.backends.math is used, {third} is not"),
        ("WARNING", f"two backends are named 'eXTRA': {first} is used, {second} is not"),
    ]


def test_nothing_is_discovered_before_it_is_needed(monkeypatch):
    def never():
        raise AssertionError("discovered")

    monkeypatch.setattr(registry, "discover", never)
    attnreg.reset_stats()
    assert attnreg.stats().calls == {}
    with pytest.raises(AssertionError, match="discovered"):
        attnreg.list_backends()


def test_discovering_loads_and_probes_no_backend(fake, monkeypatch):
    def never():
        raise AssertionError("touched")

    backend = fake("mine", load=never, unavailable=never, version=never).backend
    monkeypatch.setattr(registry, "discover", lambda: [Entry("mine", "a test", backend)])
    assert attnreg.list_backends() == ["mine"]
    with pytest.raises(AssertionError, match="touched"):
        backend.unavailable()


def test_a_call_that_no_working_backend_can_run_names_the_broken_ones_with_their_cause(
    plugin, packed, monkeypatch
):
    plugin("broken", "raise ImportError('no _C')")
    *tensors, max_q, max_k = packed((3,))
    monkeypatch.setattr(
        registry, "_entries", {name: e for name, e in registry.entries().items() if name == "broken"}
    )
    registry.changed()
    with pytest.raises(UnsupportedInputError) as error:
        attnreg.varlen_attn(*tensors, max_q, max_k)
    assert error.value.rejected == {"broken": ("failed to load: ImportError: no _C",)}
    assert str(error.value).splitlines()[-1] == "  broken  failed to load: ImportError: no _C"


def test_the_backends_of_attnreg_are_found_and_listed_without_a_look_at_a_gpu(routers, monkeypatch):
    # So that workers which are forked afterwards can use CUDA.
    called = []
    for name in ("is_available", "device_count", "get_device_capability", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: called.append(name))
    attnreg.install()
    assert {"math", "FA2", "FA3", "FA4", "cuDNN", "efficient", "flex"} < set(attnreg.list_backends())
    assert called == []
    assert registry.find("FA2").unavailable()
    assert called == ["is_available"]


def test_on_a_gpu_that_is_newer_than_all_kernels_they_say_so_and_math_runs():
    newest = attnreg.Device.parse("sm_130")
    explanation = attnreg.explain(dataclasses.replace(SPEC, device=newest, dtype="bfloat16"))
    assert explanation.backend == "math"
    of_gpus = {name: why for name, why in explanation.rejected.items() if "device must be" not in why[0]}
    assert of_gpus.keys() == {"FA2", "FA3", "FA4", "cuDNN", "efficient", "flex"}
    assert all(why[0].endswith("got 13.0 (too new)") for why in of_gpus.values())

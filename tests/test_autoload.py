"""Promises to unchanged programs: torch finds attnreg by itself, and never fails for it."""

import functools
import json
import sys
import types
from importlib.machinery import ModuleSpec
from unittest.mock import Mock

import pytest
import torch
from support.command_line import in_a_process
from support.processes import WITHOUT_PACKAGES, environment, forked
from support.sdpa import sdpa
from torch.nn import attention

import attnreg
from attnreg import _autoload
from attnreg.core import aten
from attnreg.core.policy import current as policy
from attnreg.core.torchlib import captured
from attnreg.errors import RegistrationError, UnknownBackendError

# A training step of a program that imports torch only. What it prints at its end is for the tests.
PROGRAM = """\
import sys, torch, torch.nn.functional as F
at_start = sorted(name for name in sys.modules if name.partition(".")[0] in ("attnreg", "pydantic"))
try:
    query, key, value = torch.ones(3, 1, 2, 8, 16, requires_grad=True).unbind()
    F.scaled_dot_product_attention(query, key, value).sum().backward()
    error = ""
except Exception as raised:
    error = f"{type(raised).__name__}: {raised}"
at_end = sorted(name for name in sys.modules if name.partition(".")[0] in ("attnreg", "pydantic"))

import json, attnreg
try:
    installed = __import__("attnreg.core.aten").core.aten.installed()
    calls = attnreg.stats().calls
finally:
    print(json.dumps([at_start, at_end, error, installed, calls]))
"""

# What torch has loaded of attnreg where nothing asks for it.
INACTIVE = ["attnreg", "attnreg._autoload"]


def run(*options, program=PROGRAM, anew=True, **variables):
    """Run a program, forked or in a new Python; returns what it printed, and its lines on stderr."""
    if anew:
        done = in_a_process(*options, "-c", program, env=environment(**variables))
    else:
        done = forked(WITHOUT_PACKAGES + program, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr.splitlines()


# Set and unset


@pytest.mark.parametrize("variable", ["ATTNREG_BACKEND", "ATTNREG_CONFIG"])
def test_a_program_that_imports_torch_only_runs_the_backend_that_the_environment_asks_for(variable, tmp_path):
    file = tmp_path / "attnreg.toml"
    file.write_text('devices.cpu.order = ["math"]\n')
    given = {variable: "math" if "BACKEND" in variable else str(file)}
    (_, _, error, installed, calls), said = run(**given, anew=False)
    assert (error, installed, said) == ("", True, [])
    assert calls == {"math": {"forward": 1, "backward": 1}}


@pytest.mark.parametrize(
    ("variables", "loaded"),
    [
        ({}, INACTIVE),
        ({"ATTNREG_BACKEND": "", "ATTNREG_CONFIG": "  ", "ATTNREG_STRICT": "\t"}, INACTIVE),
        pytest.param({"ATTNREG_BUILD": " OFF"}, INACTIVE, marks=pytest.mark.slow),
        ({"ATTNREG_BUILD": "now"}, INACTIVE),
        pytest.param({"ATTNREG_BUILD": "Background"}, INACTIVE, marks=pytest.mark.slow),
        ({"ATTNREG_BACKEND": "math", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, []),
    ],
    ids=["unset", "blank", "build off", "build now", "build in the background", "no autoload"],
)
def test_with_no_variable_set_torch_loads_nothing_of_attnreg_but_the_hook_and_runs_its_own_kernels(
    variables, loaded
):
    (at_start, at_end, error, installed, calls), said = run(**variables, anew=False)
    assert at_start == at_end == loaded
    assert (error, installed, calls, said) == ("", False, {}, [])


# What is wrong


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ATTNREG_BACKEND", "mth", "ATTNREG_BACKEND: no backend is named 'mth'; did you mean 'math'? known "),
        ("ATTNREG_BACKENDS", "math", "ATTNREG_BACKENDS: unknown variable, expected one of ATTNREG_BACKEND"),
        pytest.param(
            "ATTNREG_BUILD",
            "nwo",
            "ATTNREG_BUILD: got 'nwo', expected background, now or off; did you mean 'now'?",
            marks=pytest.mark.slow,
        ),
        ("ATTNREG_CONFIG", "/no/x.toml", "/no/x.toml: can't be read (no such file or directory), expected a"),
        ("ATTNREG_LOCK", "/no/x.json", "ATTNREG_LOCK: /no/x.json: can't be read: No such file or directory"),
    ],
)
def test_a_bad_value_is_one_warning_at_the_import_and_an_error_of_the_first_attention_call(
    variable, value, message
):
    (_, _, error, _, calls), said = run(**{variable: value}, anew=False)
    assert error.startswith(f"ConfigError: {message}")
    warned = [line for line in said if "Warning" in line]
    assert len(warned) == 1
    assert f"UserWarning: attnreg: {message}" in warned[0]
    at = said.index(warned[0])
    assert said[at + 1] == "Attention calls to which this applies will raise it as an error."
    assert calls == {}


@pytest.mark.parametrize(
    "program",
    [
        "import torch.nn.functional as F, torch\nq = torch.ones(1, 2, 8, 16)\n\n"
        "def layer():\n    F.scaled_dot_product_attention(q, q, q)\n\nlayer()",
        "import torch\n\n\n\nimport attnreg; attnreg.register_backend('math')",
    ],
    ids=["a program without attnreg", "a program with attnreg"],
)
def test_a_bad_value_ends_a_program_with_three_lines_without_attnregs_frames(program):
    done = forked(program, ATTNREG_POLICY="fast")
    fault = "ATTNREG_POLICY: got 'fast', expected measured, order, adaptive or batch_invariant"
    assert (done.returncode, done.stderr.splitlines()) == (
        1,
        [
            f"<attnreg>:0: UserWarning: attnreg: {fault}",
            "Attention calls to which this applies will raise it as an error.",
            f"attnreg.ConfigError: {fault} (raised at <string>:5)",
        ],
    )


def test_another_error_of_a_program_with_a_bad_value_has_its_traceback():
    done = forked("import torch\nraise ValueError('mine')", ATTNREG_POLICY="fast")
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.endswith("ValueError: mine\n")


def test_a_variable_in_lower_case_is_a_hint_at_the_import_and_nothing_else():
    lower = {"attnreg_strict": "1", "Attnreg_Backend": "math", "attnreg_home": "/opt", "attnreg_lock": " "}
    (_, _, error, installed, calls), said = run(**lower, anew=False)
    assert (error, installed, calls) == ("", False, {})
    warned = [line.partition("Warning: ")[2] for line in said if "Warning" in line]
    assert sorted(warned) == [
        f"attnreg: {name} has no effect, expected {name.upper()}: variables are in upper case"
        for name in ("Attnreg_Backend", "attnreg_strict")
    ]


def test_usual_variables_cost_an_import_of_torch_nothing():
    variables = {"AWS_DEFAULT_REGION": "eu", "CONTENT_REGISTRY": "x", "VLLM_ATTENTION_BACKEND": "FLASH"}
    (at_start, _, error, installed, _), said = run(**variables, anew=False)
    assert (at_start, error, installed, said) == (INACTIVE, "", False, [])


def test_a_variable_with_a_misspelt_prefix_is_a_hint_at_the_import_and_nothing_else():
    misspelt = {
        "ATNREG_BACKEND": "ATTNREG_BACKEND",
        "ATTREG_STRICT": "ATTNREG_STRICT",
        "ATTN_REG_AS_FLASH_ATTN": "ATTNREG_AS_FLASH_ATTN",
        "ATTNREGPOLICY": "ATTNREG_POLICY",
        "AttnReg.Lock": "ATTNREG_LOCK",
    }
    others = {
        "ATTN_BACKEND": "math",
        "ATTN_TRANSFORMERS": "1",
        "MY_ATTNREG_BACKEND": "cpu",
        "ATNREG_HOME": "/opt",
    }
    blank = {"ATNREG_STATS": " "}
    (_, _, error, installed, calls), said = run(
        **dict.fromkeys(misspelt, "math"), **others, **blank, anew=False
    )
    assert (error, installed, calls) == ("", False, {})
    warned = [line.partition("Warning: ")[2] for line in said if "Warning" in line]
    assert sorted(warned) == sorted(
        f"attnreg: {name} has no effect, expected {variable}" for name, variable in misspelt.items()
    )


def test_a_bad_value_fails_no_import_of_torch_even_where_warnings_are_errors():
    # The last thing that `import torch` does, here in a process that has imported it.
    program = "import warnings, torch; warnings.simplefilter('error'); torch._import_device_backends()\n"
    (_, _, error, _, _), said = run(
        program=program + PROGRAM, anew=False, ATTNREG_BACKEND="mth", TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    assert error.startswith("ConfigError: ATTNREG_BACKEND: no backend is named 'mth'")
    assert said[0].startswith("attnreg: ATTNREG_BACKEND: no backend is named 'mth'; did you mean 'math'?")
    assert said[1:] == ["Attention calls to which this applies will raise it as an error."]


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        (aten, "ensure", RegistrationError("torch 2.13.0 has no aten::_flash_attention_forward")),
        (policy, "current", ZeroDivisionError("division by zero")),
    ],
    ids=["routers that can't be installed", "a fault of attnreg's own"],
)
def test_what_fails_in_the_hook_is_a_warning_and_no_error_of_the_import(monkeypatch, module, name, error):
    monkeypatch.setenv("ATTNREG_BACKEND", "math")
    monkeypatch.setattr(aten, "ensure", lambda: None)
    monkeypatch.setattr(module, name, Mock(side_effect=error))
    with pytest.warns(UserWarning, match="attnreg is not active: ") as caught:
        _autoload.activate()
    messages = [str(warning.message) for warning in caught]
    assert messages == [f"attnreg is not active: {type(error).__name__}: {error}"]


def test_a_registry_of_torchs_that_has_changed_is_a_warning_and_the_routers_are_installed(monkeypatch):
    monkeypatch.setenv("ATTNREG_BACKEND", "math")
    monkeypatch.setattr(aten, "ensure", installing := Mock())
    changed = Mock(side_effect=TypeError("got an unexpected keyword argument 'register_fn'"))
    monkeypatch.setattr(attention._registry, "register_flash_attention_impl", changed)
    with pytest.warns(
        UserWarning, match=r"attnreg can't be activated in torch\.nn\.attention: TypeError: got"
    ):
        _autoload.activate()
    installing.assert_called_once_with()


# Importing torch runs attnreg's entry point while a module of attnreg is half imported.
MODULE_FIRST = """\
import contextlib, json
with contextlib.suppress(ModuleNotFoundError):
    import {}
import torch, torch.nn.functional as F
out = F.scaled_dot_product_attention(*torch.ones(3, 1, 2, 8, 16))
import attnreg
print(json.dumps([out.unique().tolist(), attnreg.stats().calls]))
"""


@pytest.mark.parametrize(
    ("module", "variables"),
    [  # The fast tier has the names of attnreg/api.py, below.
        pytest.param("attnreg.core.aten", {}, marks=pytest.mark.slow),
        pytest.param(
            "attnreg.core.dispatch.planning", {"ATTNREG_MASKS": "recognise"}, marks=pytest.mark.slow
        ),
        pytest.param("attnreg.core.torchlib.layout", {"ATTNREG_STRICT": "1"}, marks=pytest.mark.slow),
    ],
)
def test_where_a_module_of_attnreg_is_imported_before_torch_variables_apply_without_a_warning(
    module, variables
):
    printed, errors = run(program=MODULE_FIRST.format(module), ATTNREG_BACKEND="math", **variables)
    assert (printed, errors) == ([[1.0], {"math": {"forward": 1, "backward": 0}}], [])


@pytest.mark.slow
def test_where_a_module_of_attnreg_imports_torch_and_fails_variables_apply_all_the_same():
    lacking = "import sys\nsys.modules['attnreg.tools.tuning'] = None\n"
    printed, errors = run(
        program=lacking + MODULE_FIRST.format("attnreg.tools.warmup"), ATTNREG_BACKEND="math"
    )
    assert (printed, errors) == ([[1.0], {"math": {"forward": 1, "backward": 0}}], [])


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_waits_for_a_module_that_another_thread_is_importing_runs_once(monkeypatch, when):
    module, ran = types.ModuleType("attnreg.half_imported"), []
    module.__spec__ = spec = ModuleSpec(module.__name__, None)
    spec._initializing = True
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def end_import(_):
        spec._initializing = False
        return True

    if when == "before":  # between the look and the wait
        monkeypatch.setattr(_autoload, "_is_running", end_import)
    _autoload._after_import(module.__name__, lambda: ran.append(when))
    if when == "after":
        assert ran == []
        end_import(module)
    assert ran == [when]


@pytest.mark.slow
def test_the_public_names_may_be_imported_before_torch():
    program = (
        "from attnreg import explain, stats\n"
        "import json, torch, torch.nn.functional as F\n"
        "F.scaled_dot_product_attention(*torch.ones(3, 1, 2, 8, 16))\n"
        "print(json.dumps(stats().calls))"
    )
    assert run(program=program, ATTNREG_BACKEND="math") == ({"math": {"forward": 1, "backward": 0}}, [])


# torch's own registry of implementations


@pytest.fixture
def no_routers():
    """Start and end without routers and without an implementation active in torch."""
    aten.restore()
    yield
    attention.restore_flash_attention_impl(_raise_warn=False)
    aten.restore()


SET_LATER = """\
import os, json, torch, torch.nn.functional as F
import attnreg
os.environ["ATTNREG_BACKEND"] = "math"
tensors = torch.ones(3, 1, 2, 8, 16)
explained = attnreg.explain(*tensors).forward.backend
F.scaled_dot_product_attention(*tensors)
print(json.dumps([explained, attnreg.stats().calls]))
"""


def test_a_variable_that_is_set_after_the_import_of_torch_governs_torchs_functions_too():
    (explained, calls), warned = run(program=SET_LATER, anew=False)
    assert (explained, calls, warned) == ("math", {"math": {"forward": 1, "backward": 0}}, [])


def test_a_later_import_of_attnreg_makes_it_known_where_torch_did_not_load_it():
    program = (
        "import torch, json, torch.nn.attention as a\n"
        "before = a.list_flash_attention_impls()\n"
        "import attnreg\n"
        "print(json.dumps(['attnreg' in x for x in (before, a.list_flash_attention_impls())]))"
    )
    assert run(program=program, anew=False, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == ([False, True], [])


def test_activating_it_in_torch_serves_torchs_entry_points_and_restoring_leaves_torch_as_it_was(no_routers):
    assert sdpa() == "torch"
    for _ in range(2):  # twice is as good as once
        attention.activate_flash_attention_impl("attnreg")
        assert attention.current_flash_attention_impl() == "attnreg"
        assert aten.installed()
        assert sdpa() == "cpu"
    inputs = torch.randn(3, 1, 8, 2, 16)  # for the aten op that has no kernel on a CPU but a router's
    flash = functools.partial(torch.ops.aten._flash_attention_forward, *inputs, None, None, 8, 8, 0.0, False)
    assert flash(False)[0].shape == (1, 8, 2, 16)
    with attnreg.use_backend("math"):
        assert sdpa() == "math"
    attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None
    assert not aten.installed()
    assert sdpa() == "torch"
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        flash(False)


@pytest.mark.parametrize(
    ("before", "while_active", "afterwards"),
    [
        (aten.ensure, "cpu", "torch"),
        (attnreg.install, "cpu", "cpu"),
        (lambda: attnreg.register_backend("math"), "math", "math"),
    ],
    ids=["routers", "install", "a registration"],
)
def test_restoring_leaves_what_was_there_before_as_it_was(no_routers, before, while_active, afterwards):
    before()
    attention.activate_flash_attention_impl("attnreg")
    assert sdpa() == while_active
    attention.restore_flash_attention_impl()
    assert aten.installed()
    assert sdpa() == afterwards


def test_restoring_leaves_a_registration_made_since_serving_and_an_unknown_name_changes_nothing(no_routers):
    attention.activate_flash_attention_impl("attnreg")
    with pytest.raises(UnknownBackendError):
        attnreg.register_backend("FA77")
    assert (attention.current_flash_attention_impl(), sdpa()) == ("attnreg", "cpu")
    handle = attnreg.register_backend("math")
    attention.restore_flash_attention_impl()
    assert aten.installed()
    assert sdpa() == "math"
    handle.remove()
    assert sdpa() == "torch"


@pytest.fixture
def other(monkeypatch):
    """Give torch's registry another implementation, FA99, and return its handle."""
    handle = Mock()
    monkeypatch.setitem(attention._registry._FLASH_ATTENTION_IMPLS, "FA99", lambda: handle)
    return handle


def test_activating_another_in_torch_ends_attnregs_activation(no_routers, other):
    attention.activate_flash_attention_impl("attnreg")
    assert captured.shadowed_by() == ""
    attention.activate_flash_attention_impl("FA99")
    assert not aten.installed()
    assert sdpa() == "torch"
    assert captured.shadowed_by() == "FA99"

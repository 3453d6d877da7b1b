"""Programs that import flash_attn and aren't edited."""

import importlib.metadata
import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
from packaging.version import Version
from support.processes import forked

import attnreg
from attnreg.errors import RegistrationError
from attnreg.flash_attn import activation, bert_padding, directions, functions, kvcache, private, rotary

# What a program does with flash-attn; it knows nothing of attnreg.
PROGRAM = """
import json, sys, torch
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
import flash_attn
from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import flash_attn_varlen_func
q = torch.randn(2, 5, 4, 16, requires_grad=True)
out = flash_attn_func(q, q, q, causal=True)
out.sum().backward()
rows, indices, offsets, longest, _ = unpad_input(q, torch.ones(2, 5))
packed = flash_attn_varlen_func(rows, rows, rows, offsets, offsets, longest, longest, causal=True)
print(json.dumps([
    torch.allclose(pad_input(packed, indices, 2, 5), out), bool(q.grad.isfinite().all()),
    flash_attn.__version__, version("flash_attn"), packages_distributions()["flash_attn"],
    find_spec("flash_attn") is not None,
]))
"""
SEEN = [True, True, "2.8.3+attnreg", "2.8.3+attnreg", ["flash-attn"], True]


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    """Begin and end without a stand-in."""
    # To transformers, which imports what has that name, the folder of these tests is such a package.
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    yield
    activation.deactivate()
    assert not [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install what is named into a folder of its own on the path."""

    def install(distribution, version, files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()

    yield install
    activation.deactivate()
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


REAL = {
    "flash_attn/__init__.py": "__version__ = '2.8.3'\n",
    "flash_attn/flash_attn_interface.py": "loaded = True\n",
    "flash_attn/layers.py": "",
}


def test_a_program_that_imports_torch_and_flash_attn_runs_by_a_variable_alone():
    errors = "import warnings; warnings.simplefilter('error')\n"
    run = forked(errors + PROGRAM, ATTNREG_AS_FLASH_ATTN="1")
    assert (json.loads(run.stdout or "null"), run.stderr) == (SEEN, "")


# As verl imports it.
OF_PADDING = "from flash_attn.bert_padding import index_first_axis, pad_input, rearrange, unpad_input\n"


def test_a_program_that_takes_einops_functions_from_bert_padding_runs(tmp_path):
    (tmp_path / "einops.py").write_text("def rearrange(tensor, pattern): return tensor, pattern\n")
    program = f"import sys, torch; sys.path.insert(0, {str(tmp_path)!r})\n{OF_PADDING}"
    run = forked(program + "print(rearrange(3, 'b -> b'))", ATTNREG_AS_FLASH_ATTN="1")
    assert (run.stdout, run.stderr) == ("(3, 'b -> b')\n", "")


def test_a_program_that_takes_them_where_einops_is_not_installed_is_told_so():
    program = "import sys, torch; sys.modules['einops'] = None\n"
    run = forked(program + OF_PADDING, ATTNREG_AS_FLASH_ATTN="1")
    said = "ImportError: flash_attn.bert_padding.rearrange is a function of einops, which can't be imported"
    assert said in run.stderr


@pytest.mark.parametrize("value", ["0", "off", ""])
def test_the_variable_may_say_no(value):
    run = forked(PROGRAM, ATTNREG_AS_FLASH_ATTN=value)
    assert "ModuleNotFoundError: No module named 'flash_attn'" in run.stderr


def test_the_variable_alone_leaves_pytorchs_own_functions_to_torch():
    program = (
        "import torch, attnreg, torch.nn.functional as F\n"
        "F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 8, 16))\n"
        "print(attnreg.stats().calls)"
    )
    assert forked(program, ATTNREG_AS_FLASH_ATTN="1").stdout == "{}\n"


def test_what_stands_in_has_all_of_flash_attns_functions_and_is_gone_after():
    activation.activate()
    activation.activate()  # changes nothing
    stand_in = importlib.import_module("flash_attn")
    public = [name for name in vars(functions) | vars(kvcache) if name.startswith("flash_attn_")]
    assert len(public) == 7
    for name in public:
        for module in (stand_in, stand_in.flash_attn_interface):
            assert getattr(module, name).__module__.startswith("attnreg.flash_attn.")
    assert stand_in.bert_padding.pad_input is bert_padding.pad_input
    assert Version(stand_in.__version__) >= Version("2.8.3")
    assert importlib.metadata.metadata("flash-attn")["Summary"].startswith("attnreg.flash_attn")
    assert "flash-attn" not in {one.name for one in importlib.metadata.distributions(path=["."])}
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'flash_attn\.losses'"):
        importlib.import_module("flash_attn.losses")
    activation.deactivate()
    activation.deactivate()
    with pytest.raises(ImportError, match=r"cannot import name|No module named"):
        exec("from flash_attn import flash_attn_func")  # noqa: S102
    sys.modules.pop("flash_attn", None)  # the folder of these tests
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")


# What is imported beside the public functions: by flash-attention's own tests, diffusers, ring attention and
# Ulysses, and with a `find_spec("flash_attn")` alone before it by inference servers.
IMPORTED = """
from flash_attn.flash_attn_interface import _get_block_size_n, USE_TRITON_ROCM
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.flash_attn_interface import _wrapped_flash_attn_forward, _wrapped_flash_attn_backward
from flash_attn.flash_attn_interface import _wrapped_flash_attn_varlen_forward, maybe_contiguous
from flash_attn.flash_attn_interface import _wrapped_flash_attn_varlen_backward, round_multiple
from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_backward
from flash_attn.flash_attn_interface import _flash_attn_varlen_forward, _flash_attn_varlen_backward
from flash_attn.flash_attn_interface import FlashAttnFunc, FlashAttnVarlenFunc
from flash_attn.flash_attn_interface import FlashAttnKVPackedFunc, FlashAttnVarlenKVPackedFunc
from flash_attn.flash_attn_interface import FlashAttnQKVPackedFunc, FlashAttnVarlenQKVPackedFunc
from flash_attn.ops.triton.rotary import apply_rotary
"""


def test_what_programs_import_beside_the_public_functions_is_there():
    activation.activate()
    exec(IMPORTED, found := {})  # noqa: S102
    assert found["apply_rotary_emb"] is rotary.apply_rotary_emb
    assert found["apply_rotary"] is rotary.apply_rotary
    assert found["_wrapped_flash_attn_forward"] is directions.flash_attn_forward
    assert found["USE_TRITON_ROCM"] is False
    one_block = found["_get_block_size_n"]("cuda", 64, True, False)
    assert [part.shape for part in torch.zeros(2, 9000).split(one_block, dim=-1)] == [(2, 9000)]


def test_the_docs_page_has_every_such_name():
    page = Path(attnreg.__file__).parents[1] / "docs" / "flash-attn.md"
    text = page.read_text(encoding="utf-8")
    assert [name for name in private.NAMES if f"`{name}`" not in text] == []
    assert set(re.findall(r"`((?:_wrapped)?_flash_attn_\w+)`", text)) <= private.NAMES.keys()


def test_a_program_may_reload_the_stand_in_and_import_it_anew():
    activation.activate()
    made = importlib.import_module("flash_attn")
    assert importlib.reload(made) is made
    importlib.reload(importlib.import_module("flash_attn.bert_padding"))
    del sys.modules["flash_attn"]
    assert importlib.import_module("flash_attn") is made
    assert made.flash_attn_func is functions.flash_attn_func
    assert importlib.util.find_spec("flash_attn").origin == activation.__file__
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.losses")
    activation.deactivate()
    assert "flash_attn" not in sys.modules
    assert activation._finder.find_spec("flash_attn") is None


@pytest.mark.parametrize("stub", [types.ModuleType("flash_attn"), mock.MagicMock()], ids=["module", "mock"])
def test_a_module_that_a_program_has_put_there_is_replaced_on_request_alone(monkeypatch, stub):
    monkeypatch.setitem(sys.modules, "flash_attn", stub)
    with pytest.raises(RegistrationError) as error:
        activation.activate()
    assert str(error.value) == (
        "flash_attn: got a module from sys.modules, where the program has put it, expected none, or "
        "attnreg.flash_attn.activate(replace=True)"
    )
    activation.activate(replace=True)
    assert importlib.import_module("flash_attn").flash_attn_func is functions.flash_attn_func
    activation.deactivate()
    assert sys.modules["flash_attn"] is stub
    del sys.modules["flash_attn"]


def test_an_installed_flash_attn_stays_unless_it_is_to_be_replaced_and_then_comes_back(installed):
    installed("flash-attn", "2.8.3", REAL)
    with pytest.raises(RegistrationError) as error:
        activation.activate()
    assert str(error.value) == (
        "flash_attn: got flash-attn 2.8.3, expected none (pip uninstall flash-attn), or "
        "attnreg.flash_attn.activate(replace=True)"
    )
    activation.activate(replace=True)
    assert importlib.import_module("flash_attn").flash_attn_func is functions.flash_attn_func
    assert importlib.metadata.version("flash-attn") == "2.8.3"
    activation.deactivate()
    real = importlib.import_module("flash_attn")
    assert real.__version__ == "2.8.3" and real.flash_attn_interface.loaded
    assert importlib.import_module("flash_attn.layers").__file__


@pytest.mark.parametrize(
    ("distribution", "files", "found"),
    [
        ("flash-attn-4", {"flash_attn/cute/__init__.py": ""}, "flash-attn-4 4.0"),
        ("flash-attn-4", REAL | {"flash_attn/cute/__init__.py": ""}, "flash-attn-4 4.0"),
        ("another", {"flash_attn/cute/__init__.py": ""}, "the folder PLACE/flash_attn/cute"),
    ],
    ids=["alone", "beside flash-attn", "without its metadata"],
)
@pytest.mark.parametrize("replace", [False, True])
def test_flash_attn_4_is_never_hidden(installed, tmp_path, distribution, files, found, replace):
    installed(distribution, "4.0", files)
    with pytest.raises(RegistrationError) as error:
        activation.activate(replace)
    assert str(error.value) == (
        f"flash_attn: got {found.replace('PLACE', str(tmp_path))}, which a module of that name would hide, "
        "expected none; import from attnreg.flash_attn instead"
    )
    assert importlib.import_module("flash_attn.cute").__file__


def test_a_variable_that_finds_flash_attn_installed_says_so_and_torch_is_imported(installed, tmp_path):
    installed("flash-attn", "2.8.3", REAL)
    # `import torch` ends with the second line.
    program = (
        f"import sys, torch; sys.path.insert(0, {str(tmp_path)!r})\n"
        "torch._import_device_backends()\n"
        "import flash_attn; print(flash_attn.__version__)"
    )
    run = forked(program, ATTNREG_AS_FLASH_ATTN="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert run.stdout == "2.8.3\n"
    said = "attnreg doesn't stand in for flash-attn: RegistrationError: flash_attn: got flash-attn 2.8.3"
    assert said in run.stderr


def test_where_flash_attn_is_installed_the_other_variables_hold(installed, tmp_path):
    installed("flash-attn", "2.8.3", REAL)
    program = (
        f"import sys, torch; sys.path.insert(0, {str(tmp_path)!r})\n"
        "torch._import_device_backends()\n"
        "import attnreg; x = torch.randn(1, 1, 4, 8)\n"
        "torch.nn.functional.scaled_dot_product_attention(x, x, x)\n"
        "print(attnreg.stats().calls, type(sys.meta_path[0]).__name__)"
    )
    run = forked(
        program, ATTNREG_AS_FLASH_ATTN="1", ATTNREG_BACKEND="math", ATTNREG_TRANSFORMERS="1",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )  # fmt: skip
    assert run.stdout == "{'math': {'forward': 1, 'backward': 0}} _AfterImport\n"
    assert "attnreg is not active" not in run.stderr


def test_importing_attnreg_leaves_the_room_alone():
    program = "import sys, torch, attnreg; attnreg.varlen_attn; print('attnreg.flash_attn' in sys.modules)"
    assert forked(program).stdout == "False\n"

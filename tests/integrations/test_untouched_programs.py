"""Promises to programs that set ATTNREG_TRANSFORMERS and import transformers, whenever they do."""

import json
from pathlib import Path

import pytest
from support.processes import forked, python

import attnreg

ROOT = Path(attnreg.__file__).parents[1]

# What of transformers attnreg registers with, in a package of its name.
INTERFACE = "from transformers.interface import Interface\nclass {}(Interface): names = {{}}\n"
MASKS = INTERFACE.format("AttentionMaskInterface") + "def sdpa_mask(): pass\n"
MODULES = {
    "__init__": "__version__ = '5.8.0'\n",
    "interface": "class Interface:\n    names = {}\n    @classmethod\n"
    "    def register(cls, name, function):\n        cls.names[name] = function.__name__\n",
    "masking_utils": MASKS,
    "modeling_utils": INTERFACE.format("AttentionInterface"),
}
PROGRAM = """\
import json, sys
sys.path.insert(0, {folder!r})
{begin}
early = sorted(name for name in sys.modules if name.partition(".")[0] == "transformers")
finders = len(sys.meta_path)
from transformers import masking_utils, modeling_utils
names = modeling_utils.AttentionInterface.names, masking_utils.AttentionMaskInterface.names
print(json.dumps([early, names, finders - len(sys.meta_path), modeling_utils.__spec__.name]))
"""


def write_modules(tmp_path, **changes):
    folder = tmp_path / "transformers"
    folder.mkdir()
    for name, text in (MODULES | changes).items():
        (folder / f"{name}.py").write_text(text)


def run(tmp_path, begin="import torch", **variables):
    write_modules(tmp_path)
    done = forked(PROGRAM.format(folder=str(tmp_path), begin=begin), **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_the_name_is_registered_as_soon_as_transformers_is_imported_and_not_before(tmp_path):
    (early, names, removed, module), said = run(tmp_path, ATTNREG_TRANSFORMERS="1")
    assert early == []
    assert names == [{"attnreg": "attention"}, {"attnreg": "shared_mask"}]
    assert (removed, module, said) == (2, "transformers.modeling_utils", "")


def settings_file(tmp_path, by, setting):
    """Return the line and the variables by which a program has a settings file say `transformers = ...`."""
    file = tmp_path / "site.toml"
    file.write_text(f'transformers = "{setting}"\n')
    if by == "configure":
        return f"import torch, attnreg; attnreg.configure({str(file)!r})", {}
    return "import torch", {by: str(file)}


@pytest.mark.parametrize(
    ("by", "setting", "count"),
    [
        ("ATTNREG_CONFIG", "attnreg", 1),
        ("configure", "attnreg", 1),
        ("configure", "off", 0),
        pytest.param("ATTNREG_CONFIG", "off", 0, marks=pytest.mark.slow),
    ],
)
def test_a_settings_file_asks_for_the_name_as_well(tmp_path, by, setting, count):
    begin, variables = settings_file(tmp_path, by, setting)
    (_, names, _, _), said = run(tmp_path, begin, **variables)
    assert names == [{"attnreg": name} if count else {} for name in ("attention", "shared_mask")]
    assert said == ""


BEHIND = """
import transformers
from transformers.utils import is_flash_attn_2_available as available
early = available()
from transformers import modeling_utils
print(early, available(), transformers.utils.is_flash_attn_2_available())
functions = modeling_utils.AttentionInterface._global_mapping
ours = [name for name in ("attnreg", "flash_attention_2") if name in functions]
print(*(name for name in ours if functions[name].__module__.startswith("attnreg.")))
"""


@pytest.mark.parametrize("variables", [{}, {"ATTNREG_TRANSFORMERS": "0"}, {"ATTNREG_TRANSFORMERS": " "}])
def test_without_the_variable_nothing_is_registered_until_a_model_asks(variables, tmp_path):
    (early, names, removed, module), said = run(tmp_path, **variables)
    assert (early, names, said) == ([], [{}, {}], "")
    assert (removed, module) == (1, "transformers.modeling_utils")


def test_a_value_that_is_none_is_a_warning_and_no_error_of_an_import(tmp_path):
    (_, names, _, _), said = run(tmp_path, ATTNREG_TRANSFORMERS="flash")
    assert names == [{}, {}]
    assert (
        "ATTNREG_TRANSFORMERS: got 'flash', expected one of 1, true, yes, on, 0, false, no, off or " in said
    )


def test_a_wrong_value_of_another_variable_is_said_to_leave_transformers_as_it_is(tmp_path):
    (_, names, _, _), said = run(tmp_path, ATTNREG_TRANSFORMERS="1", ATTNREG_POLICY="meassured")
    assert names == [{}, {}]
    assert "ATTNREG_POLICY: got 'meassured'" in said
    assert "Until it is mended these have no effect: ATTNREG_TRANSFORMERS." in said


IMPORTS_TORCH = f"""import torch
{MODULES["modeling_utils"]}
class PreTrainedModel:
    def get_correct_attn_implementation(self, name):
        return name, *AttentionInterface.names
"""
ASKS = """
from transformers.modeling_utils import PreTrainedModel
print(*PreTrainedModel().get_correct_attn_implementation("attnreg"))
import sys
spec = sys.modules["transformers.modeling_utils"].__spec__
assert type(spec).__name__ == "ModuleSpec" and "attnreg_calls" not in vars(spec)
"""


@pytest.mark.slow
def test_a_model_finds_the_name_where_its_module_imports_torch_first(tmp_path):
    write_modules(tmp_path, modeling_utils=IMPORTS_TORCH)
    done = python("-W", "error", "-c", ASKS, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (done.stdout, done.returncode) == ("attnreg attnreg\n", 0), done.stderr


@pytest.mark.parametrize("version", ["4.57.6", "5.7.0"])
def test_an_old_transformers_is_a_warning_and_no_error_of_its_import(version, tmp_path, monkeypatch):
    monkeypatch.setitem(MODULES, "__init__", f"__version__ = '{version}'\n")
    (_, names, _, _), said = run(tmp_path, ATTNREG_TRANSFORMERS="1")
    assert names == [{}, {}]
    message = f"RegistrationError: transformers: got {version}, expected 5.8 or later"
    assert f"attnreg is not installed in transformers: {message}" in said


@pytest.mark.slow
@pytest.mark.parametrize("by", ["ATTNREG_CONFIG", "ATTNREG_TRANSFORMERS"])
def test_flash_attn_is_there_for_who_asks_right_after_transformers_is_imported(tmp_path, by):
    begin, variables = "import torch", {by: "flash_attention_2"}
    if by == "ATTNREG_CONFIG":
        begin, variables = settings_file(tmp_path, by, "flash_attention_2")
    done = forked(f"{begin}\n{BEHIND}", **variables)
    assert (done.stdout, done.stderr) == ("True True True\nattnreg flash_attention_2\n", "")

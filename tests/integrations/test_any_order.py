"""Promises of the name "attnreg" in transformers: a model finds it, whatever was imported first."""

import sys
from types import ModuleType

import pytest
from support.processes import forked, python

from attnreg import _autoload

MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    attn_implementation="attnreg",
)
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()
ids, mask = torch.arange(10).view(2, 5), torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
with torch.no_grad():
    packed = model(input_ids=ids, attention_mask=mask).logits[0, 1:]
    model.set_attn_implementation("eager")
    alone = model(input_ids=ids[:1, 1:]).logits[0]
torch.testing.assert_close(packed, alone)
"""
RAN = "import attnreg; print(*attnreg.stats().calls)"


# The fast tier has it below, with a module in the place of transformers' models.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "variables"),
    [
        ("import attnreg", {}),
        ("import transformers, attnreg", {}),
        ("", {"ATTNREG_BACKEND": "math"}),
    ],
    ids=["attnreg first", "transformers first", "a variable alone"],
)
def test_a_model_that_asks_for_the_name_runs_on_attnreg(before, variables):
    done = forked(f"{before}\n{MODEL}\n{RAN}", **variables)
    assert (done.stdout.strip(), done.returncode) == ("math" if variables else "cpu", 0), done.stderr


# Whose first import of torch lies in the middle of the module that has the names. What stands in for that
# module is tested in test_untouched_programs.py, in less than half the time.
@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, {"ATTNREG_TRANSFORMERS": "1"}], ids=["no variable", "a variable"])
def test_a_program_that_imports_transformers_models_before_torch_finds_the_name(variables):
    code = "from transformers.modeling_utils import PreTrainedModel, AttentionInterface\n" + ASKED
    done = python("-W", "error", "-c", code, **variables)
    assert (done.stdout, done.returncode) == ("attnreg True\n", 0), done.stderr


ASKED = """
import sys
class Model(PreTrainedModel):
    _supports_sdpa = True
name = Model.get_correct_attn_implementation(Model.__new__(Model), "attnreg")
spec = sys.modules["transformers.modeling_utils"].__spec__
print(name, "attnreg" in AttentionInterface._global_mapping)
assert type(spec).__name__ == "ModuleSpec" and "attnreg_calls" not in vars(spec)
"""


@pytest.mark.parametrize("code", ["x = 1", "1 / 0"], ids=["runs", "fails"])
def test_what_waits_for_a_module_runs_once_its_code_has_run(tmp_path, monkeypatch, code):
    called = []
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_autoload, "waited_for", called, raising=False)
    (tmp_path / "waited.py").write_text(
        "from attnreg import _autoload\n"
        "for n in range(2):\n"
        "    _autoload._after_import('waited', lambda n=n: _autoload.waited_for.append((n, x)))\n" + code
    )
    if "x" in code:
        sys.modules.pop(__import__("waited").__name__)
        assert called == [(0, 1), (1, 1)]
    else:
        with pytest.raises(ZeroDivisionError):
            __import__("waited")
        assert called == []


class Model:
    def get_correct_attn_implementation(self, requested):
        return f"found {requested}"


@pytest.fixture
def module(monkeypatch):
    """Return a module in the place of transformers' models, to which the name isn't offered yet."""
    made = ModuleType("transformers.modeling_utils")
    made.PreTrainedModel = type("PreTrainedModel", (Model,), dict(vars(Model)))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(_autoload, "_is_offered", False)
    return made


def test_another_name_installs_nothing(module, monkeypatch):
    monkeypatch.setattr(_autoload.importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    _autoload.offer_to_transformers()
    assert module.PreTrainedModel().get_correct_attn_implementation("sdpa") == "found sdpa"


def test_the_first_model_that_asks_installs_it_and_torchs_method_is_back(module, monkeypatch):
    installed = []
    integration = ModuleType("integration")
    integration.install = lambda: installed.append(1)
    monkeypatch.setattr(_autoload.importlib, "import_module", lambda name: integration)
    before = module.PreTrainedModel.get_correct_attn_implementation
    for _ in range(2):
        _autoload.offer_to_transformers()
        assert module.PreTrainedModel().get_correct_attn_implementation("attnreg") == "found attnreg"
    assert (installed, module.PreTrainedModel.get_correct_attn_implementation) == ([1], before)


def test_a_transformers_that_looks_in_another_way_is_left_as_it_is(module):
    module.PreTrainedModel = object
    _autoload.offer_to_transformers()
    assert module.PreTrainedModel is object

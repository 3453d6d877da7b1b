"""Promises of the name "attnreg" in transformers: a model finds it, whatever was imported first."""

import sys
from types import ModuleType

import pytest
from support.processes import forked

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


@pytest.mark.parametrize(
    ("before", "variables"),
    [("import attnreg", {}), ("import transformers, attnreg", {}), ("", {"ATTNREG_BACKEND": "math"})],
    ids=["attnreg first", "transformers first", "a variable alone"],
)
def test_a_model_that_asks_for_the_name_runs_on_attnreg(before, variables):
    done = forked(f"{before}\n{MODEL}\n{RAN}", **variables)
    assert (done.stdout.strip(), done.returncode) == ("math" if variables else "cpu", 0), done.stderr


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

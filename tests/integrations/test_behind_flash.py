"""Promises of attnreg behind the name flash_attention_2: what transformers and other libraries find there."""

import copy
import inspect
import logging
import pickle
import sys

import pytest
import torch
import transformers
from packaging.version import Version
from support import transformers_models as models
from transformers import modeling_flash_attention_utils
from transformers.utils import import_utils

import attnreg
from attnreg.core.varlen import plans
from attnreg.errors import InvalidInputError, UnsupportedInputError
from attnreg.integrations import behind_flash
from attnreg.integrations.transformers import install
from attnreg.tools.measure.reference import attend

NAME = "flash_attention_2"


@pytest.fixture(autouse=True, scope="module")
def behind():
    install(behind=NAME)
    install(behind=NAME)  # changes nothing


def assert_close(got, expected):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


def test_transformers_finds_the_package_usable_wherever_it_asks():
    assert transformers.utils.is_flash_attn_2_available()
    assert import_utils.is_flash_attn_2_available(kernels_fallback_ok=True)
    assert modeling_flash_attention_utils.is_flash_attn_available()
    for name, module in (
        ("is_flash_attn_2_available", import_utils),
        ("_lazy_imports", modeling_flash_attention_utils),
    ):
        ours = getattr(module, name)
        assert pickle.loads(pickle.dumps(ours)) is copy.deepcopy(ours) is ours
        assert (ours.__module__, ours.__name__) == (module.__name__, name)
        assert b"attnreg" not in pickle.dumps(ours) and "attnreg" not in repr(ours)
        assert inspect.signature(ours) == inspect.signature(ours.__wrapped__)
    sys.modules.pop("flash_attn", None)  # transformers 5.24 imports it to ask: the folder of tests, here


@pytest.mark.parametrize("name", ["Gemma2", "ModernBert"])
def test_lengths_are_read_back_once_for_all_layers_under_this_name_too(name, read_backs):
    docs = models.documents()
    eager = models.model(name, "eager")
    one = models.model(name, NAME)
    assert one.config._attn_implementation == NAME
    batch = models.padded(docs, "left")
    attnreg.reset_stats()
    outs = models.by_document(models.results(one, batch), batch, docs)
    assert_close(outs, [models.results(eager, {"input_ids": doc})[0] for doc in docs])
    assert len(read_backs) == 1
    (calls,) = attnreg.stats().calls.values()
    assert calls["forward"] == one.config.num_hidden_layers


def test_the_images_of_a_vision_tower_are_one_call_in_each_layer():
    tower, patches, grids, expected = models.vision_tower()
    tower.set_attn_implementation(NAME)
    attnreg.reset_stats()
    assert_close([tower(patches, grid_thw=grids).last_hidden_state], [torch.cat(expected)])
    assert attnreg.stats().calls == {"cpu": {"forward": 2, "backward": 0}}


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_continuous_batching_generates_what_generate_does(name, caplog):
    if Version(transformers.__version__) < Version("5.9"):
        pytest.skip("this transformers imports flash_attn for it, whatever the implementation is called")
    docs = models.documents()
    one = models.model(name, "eager")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
    expected = [
        one.generate(doc, attention_mask=torch.ones_like(doc), **options)[0, doc.shape[1] :].tolist()
        for doc in docs
    ]
    one.set_attn_implementation(NAME)
    config = transformers.ContinuousBatchingConfig
    page_size = "page_size" if hasattr(config, "page_size") else "block_size"  # renamed by transformers 5.17
    attnreg.reset_stats()
    with caplog.at_level(logging.CRITICAL):
        out = one.generate_batch(
            [doc[0].tolist() for doc in docs],
            generation_config=transformers.GenerationConfig(**options),
            continuous_batching_config=config(**{page_size: 4}, num_blocks=64, max_batch_tokens=64),
            progress_bar=False,
        )
    assert [one.generated_tokens for one in out.values()] == expected
    assert attnreg.stats().calls == {"cpu": {"forward": 8, "backward": 0}}


def test_a_library_that_calls_the_functions_of_flash_attn_by_transformers_gets_those_of_attnreg():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 6, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    options = {"softmax_scale": 0.3, "sliding_window": 3, "softcap": 2.0, "attn_implementation": NAME}
    attnreg.reset_stats()
    out = modeling_flash_attention_utils._flash_attention_forward(
        query, key, value, None, 6, is_causal=True, **options
    )
    expected, _ = attend(query, key, value, 0.3, (2, 0), softcap=2.0)
    torch.testing.assert_close(out, expected)
    padding = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    out = modeling_flash_attention_utils._flash_attention_forward(
        query, key, value, padding, 6, is_causal=True, **options
    )
    expected, _ = attend(query[1:, 2:], key[1:, 2:], value[1:, 2:], 0.3, (2, 0), softcap=2.0)
    torch.testing.assert_close(out[1:, 2:], expected)
    assert attnreg.stats().calls == {"math": {"forward": 2, "backward": 0}}


def test_a_call_may_ask_for_deterministic_gradients_by_itself(monkeypatch):
    inputs = torch.randn(3, 2, 6, 4, 8, dtype=torch.float64).unbind()
    seen, plan_for = [], plans.plan_for

    def looking(direction, query, key, value, call, *rest, **options):
        seen.append((direction, call.deterministic))
        return plan_for(direction, query, key, value, call, *rest, **options)

    monkeypatch.setattr(plans, "plan_for", looking)
    query = inputs[0].clone().requires_grad_()
    out = modeling_flash_attention_utils._flash_attention_forward(
        query, *inputs[1:], None, 6, True, deterministic=True, attn_implementation=NAME
    )
    expected, _ = attend(*inputs, 8**-0.5, (-1, 0))
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert seen == [("forward", True), ("backward", True)]


def test_what_these_functions_do_not_have_is_an_error():
    query = torch.randn(2, 6, 4, 8)
    with pytest.raises(UnsupportedInputError, match="got deterministic=True for a call with sinks, expected"):
        behind_flash.flash_attn_func(query, query, query, deterministic=True, s_aux=torch.randn(4))


def test_another_name_is_an_error():
    with pytest.raises(
        InvalidInputError, match="got 'flash_attention_3', expected 'flash_attention_2' or None"
    ):
        install(behind="flash_attention_3")

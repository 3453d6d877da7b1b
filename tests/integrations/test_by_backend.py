"""Promises of documents in a batch, as tests/gpu/test_gpu_transformers.py checks them, on a CPU."""

import pytest
import torch
from support import models_on_device, transformers_models
from support.transformers_models import ENCODERS

from attnreg.integrations import transformers

BACKENDS = ("cpu", "math")
OFFSETS = "packed, offsets by the collator"
# test_transformers.py has all forms of each model.
OTHERS = [
    pytest.param(name, form, marks=[pytest.mark.slow] * (form not in (OFFSETS, "padded on the left")))
    for name in models_on_device.SIZES
    for form in models_on_device.FORMS
    # With padding behind each document they are held in test_transformers.py.
    if name != "Llama" and transformers_models.takes(name, form) and "padding behind" not in form
]


@pytest.mark.each_value("form", "dtype", "backend")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", models_on_device.FORMS)
def test_each_document_of_a_batch_is_computed_as_by_itself_on_the_backend_that_is_asked_for(
    form, dtype, backend
):
    models_on_device.check("Llama", form, "cpu", dtype, backend)


@pytest.mark.each_value("name", "form", "backend")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "form"), OTHERS)
def test_windows_softcaps_sinks_and_images_count_in_bfloat16(name, form, backend):
    models_on_device.check(name, form, "cpu", torch.bfloat16, backend)


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=pytest.mark.slow), "math"])
def test_each_image_of_a_vision_tower_is_computed_as_by_itself_in_bfloat16(backend):
    models_on_device.check_images("cpu", torch.bfloat16, backend)


@pytest.mark.parametrize("name", ["Llama", "Qwen2VL", "Bert"])
def test_a_document_that_sees_another_is_not_within_the_rule(monkeypatch, name):
    if not transformers_models.takes(name, OFFSETS):
        pytest.skip("this transformers hands the offsets of a text to its vision tower")

    def as_one_document(docs):
        batch = transformers_models.packed(docs, True)
        one = transformers_models.packed([torch.cat(docs, 1)], True)
        return one | {"position_ids": batch["position_ids"]}

    monkeypatch.setitem(models_on_device.FORMS, OFFSETS, as_one_document)
    # An encoder's tokens see the documents behind them, too.
    number = 0 if name in ENCODERS else 1
    with pytest.raises(AssertionError, match=rf"^results of document {number}: "):
        models_on_device.check(name, OFFSETS, "cpu", torch.float32, "math")


def test_an_image_in_other_positions_is_not_within_the_rule(monkeypatch):
    together = transformers_models.given_together

    def of_text(one, batch, docs):
        return together(one, batch, docs) | {"position_ids": batch["position_ids"]}

    monkeypatch.setattr(transformers_models, "given_together", of_text)
    with pytest.raises(AssertionError, match=r"^results of document 1: "):
        models_on_device.check("Qwen2VL", "padded on the left", "cpu", torch.float32, "math")


def no_window(window, options):
    return (-1, 0 if window[1] == 0 else -1), options


def no_softcap(window, options):
    return window, options._replace(softcap=0.0)


def no_sinks(window, options):
    return window, options._replace(sinks=options.sinks - 50.0)


@pytest.mark.parametrize(
    ("name", "without"),
    [
        *((name, no_window) for name in ("Qwen2", "Gemma2", "Gemma3", "ModernBert")),
        ("Gemma2", no_softcap),
        ("GptOss", no_sinks),
    ],
)
def test_layers_without_one_of_their_options_are_not_within_the_rule(monkeypatch, name, without):
    packed = transformers._packed

    def changed(query, key, value, packing, window, options):
        return packed(query, key, value, packing, *without(window, options))

    monkeypatch.setattr(transformers, "_packed", changed)
    with pytest.raises(AssertionError, match=r": \d\.\d\de[+-]\d\d, plain PyTorch"):
        models_on_device.check(name, OFFSETS, "cpu", torch.bfloat16, "math")

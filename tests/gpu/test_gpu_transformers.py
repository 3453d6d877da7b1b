"""On a GPU: models of transformers, with their documents in one batch, on each backend."""

import importlib.util

import pytest
import torch
from support import gpu

pytestmark = pytest.mark.gpu

FORMS = (
    "packed, offsets by the collator",
    "packed, positions that start anew",
    "packed, positions that start anew, padding behind each",
    "padded on the right",
    "padded on the left",
)


# Windows, some with softcap or sinks, some of an encoder: not every backend has them. BERT has none of these,
# and Qwen2-VL is a language model with a vision tower.
ENCODERS = ("Bert", "ModernBert")
OTHERS = [
    (name, form)
    for name in ("Qwen2", "Qwen2VL", "Gemma2", "Gemma3", "GptOss", *ENCODERS)
    for form in FORMS
    if name not in ENCODERS or "positions" not in form  # encoders pass no positions to their attention
]


@pytest.fixture
def on_device():
    """Return the checks that tests/integrations runs on a CPU; without transformers a failure says so."""
    if importlib.util.find_spec("transformers") is None:
        pytest.fail("needs transformers: pip install -c constraints.txt transformers", pytrace=False)
    from support import models_on_device

    assert tuple(models_on_device.FORMS) == FORMS
    assert {"Llama", *(name for name, _ in OTHERS)} == models_on_device.SIZES.keys()
    return models_on_device


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("form", FORMS)
def test_each_document_of_a_batch_is_computed_as_by_itself_on_the_backend_that_is_asked_for(
    on_device, form, dtype, named
):
    on_device.check("Llama", form, "cuda", dtype, named)


@pytest.mark.parametrize(("name", "form"), OTHERS)
def test_windows_softcaps_sinks_and_images_count_on_the_backend_that_is_asked_for_or_one_that_has_them(
    on_device, name, form, named
):
    if not on_device.models.takes(name, form):
        pytest.skip("this transformers hands the offsets of a text to its vision tower")
    on_device.check(name, form, "cuda", torch.bfloat16, named)


def test_each_image_of_a_vision_tower_is_computed_as_by_itself_on_the_backend_that_is_asked_for(
    on_device, named
):
    on_device.check_images("cuda", torch.bfloat16, named)


# Packed in the calls before the capture; within it nothing can be read back, and most run with a mask.
CAPTURED = [
    ("Llama", "packed, positions that start anew"),
    ("Llama", "padded on the left"),
    ("Qwen2", "padded on the left"),
    ("Qwen2", "padded on the right"),
    ("Gemma2", "padded on the left"),
    ("Bert", "padded on the right"),
    ("ModernBert", "padded on the left"),
]


@pytest.mark.parametrize(("name", "form"), CAPTURED)
def test_a_captured_forward_reads_documents_and_padding_at_each_replay(on_device, name, form):
    def record(forward):
        graph, results = gpu.capture(lambda: (forward(),))
        return lambda: gpu.replay(graph, results)[0]

    on_device.check_captured(name, form, "cuda", torch.bfloat16, record)

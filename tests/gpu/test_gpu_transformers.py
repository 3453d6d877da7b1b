"""On a GPU: a model of transformers, with its documents in one batch, on each backend."""

import importlib.util

import pytest
import torch

pytestmark = pytest.mark.gpu

FORMS = (
    "packed, offsets by the collator",
    "packed, positions that start anew",
    "padded on the right",
    "padded on the left",
)


@pytest.fixture
def check():
    """Return the check that tests/integrations runs on a CPU; without transformers a failure says so."""
    if importlib.util.find_spec("transformers") is None:
        pytest.fail("needs transformers: pip install -c constraints.txt transformers", pytrace=False)
    from support import llama_on_device

    assert tuple(llama_on_device.FORMS) == FORMS
    return llama_on_device.check


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("form", FORMS)
def test_each_document_of_a_batch_is_computed_as_by_itself_on_the_backend_that_is_asked_for(
    check, form, dtype, named
):
    check(form, "cuda", dtype, named)

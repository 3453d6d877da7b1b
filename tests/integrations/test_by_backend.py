"""Promises of documents in a batch, as tests/gpu/test_gpu_transformers.py checks them, on a CPU."""

import pytest
import torch
from support import llama_on_device


@pytest.mark.parametrize("backend", ["cpu", "math"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", llama_on_device.FORMS)
def test_each_document_of_a_batch_is_computed_as_by_itself_on_the_backend_that_is_asked_for(
    form, dtype, backend
):
    llama_on_device.check(form, "cpu", dtype, backend)


def test_a_document_that_sees_another_is_not_within_the_rule(monkeypatch):
    def without_offsets(docs):
        return {"input_ids": torch.cat(docs, 1)}

    form = "packed, offsets by the collator"
    monkeypatch.setitem(llama_on_device.FORMS, form, without_offsets)
    with pytest.raises(AssertionError, match=r"^logits of document 1: "):
        llama_on_device.check(form, "cpu", torch.float32, "math")

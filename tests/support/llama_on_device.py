"""A small random Llama on a device, its documents in one batch held to each of them alone in float64."""

import copy
import functools
from typing import NamedTuple

import torch
import transformers
from support import transformers_models as models

import attnreg
from attnreg.integrations.transformers import install
from attnreg.measure.rule import FACTOR, TOLERANCES

LENGTHS = (5, 300, 42)
LAYERS = 2
FORMS = {
    "packed, offsets by the collator": lambda docs: models.packed(docs, True),
    "packed, positions that start anew": lambda docs: models.packed(docs, False),
    "padded on the right": lambda docs: models.padded(docs, "right"),
    "padded on the left": lambda docs: models.padded(docs, "left"),
}


class Results(NamedTuple):
    """The logits of each document, and the gradients of all parameters, by name."""

    logits: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]

    def named(self):
        """Return all tensors by a name, in float64 on the CPU."""
        logits = {f"logits of document {number}": out for number, out in enumerate(self.logits)}
        return {name: x.detach().cpu().double() for name, x in (logits | self.gradients).items()}


@functools.cache
def _model(dtype):
    """Return the model, whose parameters are numbers of the dtype, with transformers' eager attention."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=LAYERS, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


def _model_on(device, dtype, rounded_to):
    """Return a copy of the model on a device; computes in a dtype."""
    return copy.deepcopy(_model(rounded_to)).to(device, dtype)


def _results(one, outs, dtype):
    """Return the results of a forward, with the gradients of a weighted sum of all logits."""
    generator = torch.Generator().manual_seed(1)
    weights = [
        torch.randn(out.shape, generator=generator).to(dtype).to(out.device, out.dtype) for out in outs
    ]
    sum((out * weight).sum().double() for out, weight in zip(outs, weights, strict=True)).backward()
    return Results(outs, {name: x.grad for name, x in one.named_parameters()})


@functools.cache
def alone(device, dtype, rounded_to):
    """Return what plain PyTorch makes of each document by itself, by name."""
    one = _model_on(device, dtype, rounded_to)
    outs = [one(doc.to(device)).logits[0] for doc in models.documents(lengths=LENGTHS)]
    return _results(one, outs, rounded_to).named()


def in_a_batch(form, device, dtype, backend):
    """Return the same of the documents in one batch, by attnreg on a backend, and the calls that ran."""
    install()
    docs = models.documents(lengths=LENGTHS)
    one = _model_on(device, dtype, dtype)
    one.set_attn_implementation("attnreg")
    batch = FORMS[form](docs)
    on_device = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    attnreg.reset_stats()
    with attnreg.use_backend(backend):
        logits = one(**on_device, use_cache=False).logits
    outs = models.by_document(logits, on_device, docs)
    return _results(one, outs, dtype).named(), attnreg.stats().calls


def check(form, device, dtype, backend):
    """Hold the logits and gradients of a batch to float64 by the accuracy rule, and which backend ran.

    The rule is about one call of attention. Here plain PyTorch computes the whole model in the dtype, with
    each document alone.
    """
    got, calls = in_a_batch(form, device, dtype, backend)
    assert calls == {backend: {"forward": LAYERS, "backward": LAYERS}}
    plain, right = alone(device, dtype, dtype), alone("cpu", torch.float64, dtype)
    assert got.keys() == right.keys()
    for name, expected in right.items():
        relative, absolute = TOLERANCES.get(dtype, (torch.finfo(dtype).eps / 2, 0.0))
        largest = expected.abs().max().item()
        error, of_plain = ((x[name] - expected).abs().max().item() for x in (got, plain))
        allowed = FACTOR * of_plain + relative * largest + absolute
        assert error <= allowed, f"{name}: {error:.2e}, plain PyTorch {of_plain:.2e}, largest {largest:.2e}"

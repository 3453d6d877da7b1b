"""Small random models on a device, the documents of one batch held to each of them alone in float64."""

import copy
import functools
from typing import NamedTuple

import torch
from support import transformers_models as models

import attnreg
from attnreg.integrations.transformers import install
from attnreg.tools.measure.rule import FACTOR, TOLERANCES

# A CPU without bfloat16 instructions takes seconds for what a GPU needs.
ON_GPU = torch.cuda.is_available()
LENGTHS = (5, 300 if ON_GPU else 90, 42)
IMAGES = ((1, 16, 18), (1, 2, 6))
FORMS = {
    "packed, offsets by the collator": lambda docs: models.packed(docs, True),
    "packed, positions that start anew": lambda docs: models.packed(docs, False),
    "packed, positions that start anew, padding behind each": models.packed_and_padded,
    "padded on the right": lambda docs: models.padded(docs, "right"),
    "padded on the left": lambda docs: models.padded(docs, "left"),
}
# Wide enough for the kernels of GPUs, with windows that are neither a document nor a tile of theirs, and
# scores that are large enough for a softcap to count.
_HEAD_DIM = 64 if ON_GPU else 32
_WIDTH = 4 * _HEAD_DIM
_WIDE = {"hidden_size": _WIDTH, "intermediate_size": _WIDTH, "max_position_embeddings": 512}
_HEADS = _WIDE | {"head_dim": _HEAD_DIM}
_WINDOW = _HEADS | {"sliding_window": 37, "initializer_range": 0.1}
SIZES = {
    "Llama": _HEADS,
    "Qwen2": _WINDOW,
    "Qwen2VL": _WIDE | {"vision": {"embed_dim": _WIDTH}},
    "Gemma2": _WINDOW | {"query_pre_attn_scalar": _HEAD_DIM},
    "Gemma3": _WINDOW | {"query_pre_attn_scalar": _HEAD_DIM},
    # With one expert no rounding leads a token to another; with 16 heads there are as many sinks.
    "GptOss": _WINDOW | {"num_local_experts": 1, "num_attention_heads": 16},
    # With smaller weights a random BERT attends to all tokens alike. The gradients of query and key are then
    # small differences, which kernels lose that round the output: PyTorch's flash kernels, too.
    "Bert": _WIDE | {"initializer_range": 0.2, "num_hidden_layers": 2},
    "ModernBert": _WIDE | {"local_attention": 74, "initializer_range": 0.1},
}

# BERT adds it to each key, which changes no weight of attention: its gradient is 0, and rounding.
IS_ZERO = "attention.self.key.bias"


class Results(NamedTuple):
    """The logits or hidden states of each document, and the gradients of parameters, by name."""

    outs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]

    def named(self):
        """Return all tensors by a name, in float64 on the CPU."""
        outs = {f"results of document {number}": out for number, out in enumerate(self.outs)}
        return {name: x.detach().cpu().double() for name, x in (outs | self.gradients).items()}


@functools.cache
def _model(name, dtype):
    """Return a model whose parameters are numbers of the dtype, with transformers' eager attention."""
    return models.built(name, **SIZES[name]).to(dtype)


def _model_on(name, device, dtype, rounded_to):
    """Return a copy of a model on a device; computes in a dtype."""
    return copy.deepcopy(_model(name, rounded_to)).to(device, dtype)


def _on(device, batch):
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}


def _results(one, outs, dtype):
    """Return the results of a forward, with the gradients of a weighted sum of all of them."""
    generator = torch.Generator().manual_seed(1)
    weights = [
        torch.randn(out.shape, generator=generator).to(dtype).to(out.device, out.dtype) for out in outs
    ]
    sum((out * weight).sum().double() for out, weight in zip(outs, weights, strict=True)).backward()
    gradients = {name: x.grad for name, x in one.named_parameters() if x.grad is not None}
    return Results(outs, {name: x for name, x in gradients.items() if not name.endswith(IS_ZERO)})


@functools.cache
def alone(name, device, dtype, rounded_to):
    """Return what plain PyTorch makes of each document by itself, by name."""
    one = _model_on(name, device, dtype, rounded_to)
    docs = models.documents_of(name, LENGTHS)
    outs = [models.results(one, _on(device, models.given(one, doc)))[0] for doc in docs]
    return _results(one, outs, rounded_to).named()


def in_a_batch(name, form, device, dtype, backend):
    """Return the same of the documents in one batch, by attnreg on a backend, and the calls that ran."""
    install()
    docs = models.documents_of(name, LENGTHS)
    one = _model_on(name, device, dtype, dtype)
    one.set_attn_implementation("attnreg")
    batch = models.given_together(one, FORMS[form](docs), docs)
    on_device = _on(device, batch | ({} if name in models.ENCODERS else {"use_cache": False}))
    attnreg.reset_stats()
    with attnreg.use_backend(backend):
        out = models.results(one, on_device)
    outs = models.by_document(out, on_device, docs)
    return _results(one, outs, dtype).named(), attnreg.stats().calls


def check(name, form, device, dtype, backend):
    """Hold results and gradients of a batch to float64 by the accuracy rule, and which backend ran.

    The rule is about one call of attention. Here plain PyTorch computes the whole model in the dtype, with
    each document alone.
    """
    got, calls = in_a_batch(name, form, device, dtype, backend)
    assert_counted(calls, attention_calls(_model(name, dtype).config))
    if name in ("Llama", "Bert"):  # other models have options that not every backend has
        assert list(calls) == [backend]
    assert_within_the_rule(
        got, alone(name, device, dtype, dtype), alone(name, "cpu", torch.float64, dtype), dtype
    )


def attention_calls(config):
    """Return how many calls of attention a batch takes: one of each layer, and in a tower of each image."""
    of_images = len(models.GRIDS) * config.vision_config.depth if hasattr(config, "vision_config") else 0
    return config.get_text_config().num_hidden_layers + of_images


def check_images(device, dtype, backend):
    """Hold the images of one batch of Qwen2-VL's vision tower to each of them alone in the same way."""
    install()
    tower, patches, grids, _ = models.vision_tower(IMAGES, embed_dim=_WIDTH, hidden_size=_WIDTH)
    rounded = tower.to(dtype)

    def alone(device, computed_in):
        one = copy.deepcopy(rounded).to(device, computed_in)
        given = patches.to(dtype).to(device, computed_in)
        return _results(one, models.by_image(one, given, grids.to(device)), dtype).named()

    one = copy.deepcopy(rounded).to(device)
    one.set_attn_implementation("attnreg")
    attnreg.reset_stats()
    with attnreg.use_backend(backend):
        out = one(patches.to(device, dtype), grid_thw=grids.to(device)).last_hidden_state
    got = _results(one, list(out.split(grids.prod(-1).tolist())), dtype).named()
    assert_counted(attnreg.stats().calls, len(IMAGES) * one.config.depth)
    assert_within_the_rule(got, alone(device, dtype), alone("cpu", torch.float64), dtype)


def assert_counted(calls, expected):
    """Compare how many calls ran, on whichever backends."""
    for direction in ("forward", "backward"):
        assert sum(of_backend[direction] for of_backend in calls.values()) == expected, calls


def assert_within_the_rule(got, plain, right, dtype):
    """Compare tensors by name with right ones, by the error that plain PyTorch has.

    Errors are root mean squares: the largest of a gradient that a whole model's rounding went into is chance.
    """
    assert got.keys() == plain.keys() == right.keys()
    for name, expected in right.items():
        relative, absolute = TOLERANCES.get(dtype, (torch.finfo(dtype).eps / 2, 0.0))
        size, error, of_plain = (_rms(x) for x in (expected, got[name] - expected, plain[name] - expected))
        allowed = FACTOR * of_plain + relative * size + absolute
        assert error <= allowed, f"{name}: {error:.2e}, plain PyTorch {of_plain:.2e}, size {size:.2e}"


def _rms(x):
    return x.square().mean().sqrt().item()


def check_captured(name, form, device, dtype, record):
    """Hold a forward that a CUDA graph recorded, of a batch in one of `FORMS`, to each document alone.

    `record` is given a function that returns a tensor, and returns one that computes it again into the
    same memory. The graph is replayed over other documents than those that were recorded.
    """
    install()
    one = _model_on(name, device, dtype, dtype)
    one.set_attn_implementation("attnreg")
    docs = models.documents_of(name, LENGTHS)
    in_reverse = docs[::-1]
    given, others = (_on(device, FORMS[form](each)) for each in (docs, in_reverse))
    of_decoders = {} if name in models.ENCODERS else {"use_cache": False}
    with torch.no_grad():
        again = record(lambda: models.results(one, given | of_decoders))
        for key, x in others.items():
            given[key].copy_(x)
        out = again()
    got = Results(models.by_document(out, given, in_reverse)[::-1], {}).named()
    plain, right = (
        {key: x for key, x in alone(name, where, computed_in, dtype).items() if key in got}
        for where, computed_in in ((device, dtype), ("cpu", torch.float64))
    )
    assert_within_the_rule(got, plain, right, dtype)

"""Promises of attn_implementation="attnreg" in graphs with a dynamic length: torch.export and make_fx.

A window makes no assumption about the length: the graph is right for lengths below, at and above it.
"""

import copy

import pytest
import torch
from support import transformers_models as models
from torch.export import Dim, export
from torch.fx.experimental.proxy_tensor import make_fx

from attnreg.integrations import transformers

WINDOW = 5  # of all models here with a window
DYNAMIC = {0: Dim("rows", min=2, max=16), 1: Dim("length", min=2, max=64)}


def drawn(lengths):
    """Return documents of these lengths, and a batch of them padded on the left to the longest."""
    docs = models.documents(seed=sum(lengths), lengths=lengths)
    batch = models.padded(docs, "left")
    del batch["position_ids"]
    return docs, batch


# By name, with what makes them small, or lets their experts be exported. torch takes seconds for each.
MODELS = [
    ("Qwen2", {"num_hidden_layers": 1, "max_window_layers": 0}),
    ("Gemma2", {}),
    ("GptOss", {"experts_implementation": "batched_mm"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), MODELS, ids=str)
@torch.no_grad()
def test_a_model_with_a_window_is_exported_for_any_length(name, sizes):
    eager = models.built(name, **sizes).double()
    one = copy.deepcopy(eager)
    one.set_attn_implementation("attnreg")
    one.config.use_cache = False
    given = drawn((4, 6, 5))[1]
    program = export(one, (), given, dynamic_shapes=dict.fromkeys(given, DYNAMIC), strict=False).module()
    for lengths in ((2, 1), (3, WINDOW - 1), (3, 1, 4, WINDOW), (19, 9)):
        docs, batch = drawn(lengths)
        expected = [models.results(eager, {"input_ids": doc})[0] for doc in docs]
        results = models.by_document(program(**batch).logits, batch, docs)
        for got, other in zip(results, expected, strict=True):
            torch.testing.assert_close(got, other, rtol=0, atol=2e-6 * max(1.0, other.abs().max().item()))


class Layer(torch.nn.Module):
    is_causal = True

    def forward(self, query, key):
        return transformers.attention(self, query, key, key, None, sliding_window=WINDOW)[0]


def layer_inputs(length):
    return [torch.randn(2, heads, length, 8, dtype=torch.float64) for heads in (4, 2)]


def exported(given, strict):
    of_length = {2: Dim("length", min=2, max=64)}
    return export(Layer(), tuple(given), dynamic_shapes=(of_length,) * 2, strict=strict).module()


GRAPHS = {
    "export": lambda given: exported(given, strict=False),
    "strict export": lambda given: exported(given, strict=True),
    "make_fx": lambda given: make_fx(Layer(), tracing_mode="symbolic")(*given),
}


BELOW, ABOVE = WINDOW - 1, WINDOW + 3


# The length of a graph's example decides nothing but for the bounds that torch finds for it.
@pytest.mark.parametrize(
    ("way", "length"),
    [
        *(("export", BELOW), ("export", ABOVE), ("make_fx", ABOVE)),
        pytest.param("strict export", BELOW, marks=pytest.mark.slow),
    ],
)
def test_a_layer_without_a_mask_is_right_below_at_and_above_its_window(way, length):
    graph = GRAPHS[way](layer_inputs(length))
    for other in (2, WINDOW - 1, WINDOW, WINDOW + 1, 17):
        given = layer_inputs(other)
        torch.testing.assert_close(graph(*given), Layer()(*given))

"""Promise: every causal model of transformers keeps packed documents apart by `position_ids`, or refuses."""

import pytest
import torch
import transformers
from support.causal_models import NAMES, build_model
from transformers.utils import logging

from attnreg.errors import AttnregError

LENGTHS = 6, 9
# Decoders in these forms; the rest of the models only in the slow run.
SAMPLE = ("ctrl", "fuyu", "gpt_bigcode", "llama4_text", "moshi", "persimmon")
# The state of their recurrent layers goes on from one document to the next.
RECURRENT = {
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling_text",
    "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h",
    "olmo_hybrid", "qwen3_5",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm",
    "zamba", "zamba2",
}  # fmt: skip
# Of transformers 5.23: models that no small configuration makes, with what is in the way.
NOT_SMALL = {
    "some of its sizes are fixed": "blt dots3_note dots3_note_text phi4_multimodal roc_bert",
    "its configuration checks lists of layers": "cohere_compass_text gemma3n_text gemma4_assistant "
    "gemma4_unified_assistant gpt_neo zaya",
    "its configuration has parts with names of their own": "dbrx musicgen musicgen_melody prophetnet xlnet",
    "its heads have sizes of their own": "deepseek_v2 dots1",
    "it needs a package that may be missing": "gemma3n",
    "it runs after a call or an option alone": "reformer xmod",
}
REASONS = {name: reason for reason, names in NOT_SMALL.items() for name in names.split()}


def forms_of(ids):
    ones = torch.ones_like(ids)
    padded = ones.index_fill(1, torch.tensor([ids.shape[1] - 1]), 0)
    return {
        "without a mask": {"use_cache": False},
        "a mask of ones": {"use_cache": False, "attention_mask": ones},
        "a cache": {},
        "padding": {"use_cache": False, "attention_mask": padded},
    }


def logits(one, ids, **options):
    return one(input_ids=ids, **options).logits


def is_close(got, expected):
    return bool((got - expected).abs().max() < 1e-4 * expected.abs().max())


def reason_against(one, ids, positions):
    """Return why documents of a model with eager attention can't be told apart by positions, or None."""
    whole = logits(one, ids, use_cache=False)
    other = ids.clone()
    other[:, -1] = (ids[:, -1] - 2) % 61 + 3
    if not is_close(logits(one, other, use_cache=False)[:, :-1], whole[:, :-1]):
        return "its attention isn't causal"
    if is_close(logits(one, ids, use_cache=False, position_ids=positions), whole):
        return "it ignores position_ids"
    return None


def of_name(name):
    return name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [of_name(name) for name in NAMES])
@pytest.mark.filterwarnings("ignore")  # of models that are made too small
@torch.no_grad()
def test_documents_by_positions_are_apart_or_refused(name):
    logging.set_verbosity_error()
    if name in RECURRENT:
        pytest.skip("it has recurrent layers")
    ids = torch.randint(3, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    one = build_model(name, ids)
    if isinstance(one, str):
        is_known = name in REASONS or not transformers.__version__.startswith("5.23.")
        assert is_known, one
        pytest.skip(REASONS.get(name, one))
    reason = reason_against(one, ids, positions)
    expected = torch.cat([logits(one, part, use_cache=False) for part in ids.split(LENGTHS, 1)], 1)
    one.set_attn_implementation("attnreg")
    if reason is not None or one.config._attn_implementation != "attnreg":
        pytest.skip(reason or "it has attention of its own")
    for form, options in forms_of(ids).items():
        try:
            got = logits(one, ids, position_ids=positions, **options)
        except AttnregError:
            continue
        counted = slice(0, sum(LENGTHS) - (form == "padding"))
        assert is_close(got[:, counted], expected[:, counted]), form

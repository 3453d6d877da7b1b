"""A small random model of every causal architecture of the installed transformers."""

import contextlib
import re

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MOST_PARAMETERS = 3_000_000

# Fields of configurations that make a model small, by their value.
_FIELDS = {
    64: "vocab_size vocab_size_per_layer_input max_position_embeddings n_positions n_ctx",
    48: "intermediate_size n_inner d_ff ffn_dim decoder_ffn_dim encoder_ffn_dim dff moe_intermediate_size "
    "shared_expert_intermediate_size intermediate_size_mlp expert_ffn_hidden_size ffn_hidden_size "
    "moe_shared_expert_intermediate_size shared_intermediate_size mlp_hidden_size",
    32: "hidden_size n_embd d_model word_embed_proj_dim embedding_size emb_dim dim",
    16: "q_lora_rank kv_lora_rank o_lora_rank mamba_head_dim mamba_d_head",
    8: "head_dim global_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim attention_head_dim rotary_dim "
    "hidden_size_per_layer_input",
    4: "num_attention_heads n_head decoder_attention_heads encoder_attention_heads n_heads num_heads "
    "attention_heads num_local_experts num_experts n_routed_experts moe_num_experts mamba_n_heads "
    "mamba_num_heads",
    2: "num_hidden_layers n_layer num_layers decoder_layers encoder_layers n_layers num_key_value_heads "
    "num_experts_per_tok moe_k moe_topk eos_token_id",
    1: "n_group topk_group num_expert_groups bos_token_id",
    0: "pad_token_id",
}
SIZES = {name: value for value, names in _FIELDS.items() for name in names.split()}
TOKENS = {name: SIZES[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}  # of heads with 8 numbers

# What is left out or changed in turn, until a model runs.
VARIANTS = (
    {},
    {"num_key_value_heads": 4},
    {"head_dim": None},
    {"head_dim": None, "num_key_value_heads": 4},
    {"head_dim": 8},
    {"head_dim": 8, "num_key_value_heads": 4},
    {"layer_types": None},
    {"layer_types": None, "head_dim": None, "num_key_value_heads": 4},
    {"rope_parameters": MROPE},
)


def _sizes_for(config_class, changes, known):
    """Return arguments of a configuration class, and of those inside of it, for a small model."""
    default = config_class()
    values = {name: _value(default, name) for name in known}
    left_out = (list, tuple, type(None))
    sizes = {name: known[name] for name, value in values.items() if not isinstance(value, left_out)}
    sizes |= TOKENS
    kinds = _value(default, "layer_types")
    if kinds:
        sizes["layer_types"] = (list(dict.fromkeys(kinds)) * 2)[:2]
    for name in getattr(default, "sub_configs", None) or {}:
        part = _value(default, name)
        if part is not None:
            # The towers of images and audio have rotary embeddings of other kinds.
            of_text = changes if name == "text_config" else changes | {"rope_parameters": None}
            sizes[name] = _sizes_for(type(part), of_text, known)
            sizes[name] |= {"model_type": part.model_type} if part.model_type else {}
    for name, value in changes.items():
        if hasattr(config_class, name) or name in vars(default):
            sizes[name] = value
    return {name: value for name, value in sizes.items() if name in TOKENS or value is not None}


def _value(config, name):
    with contextlib.suppress(Exception):  # some fields differ by layer, and raise errors of their own
        return getattr(config, name, None)
    return None


def small_config(name, changes, more_sizes=None):
    """Return a small configuration; fields that can't be set are left out."""
    config_class = CONFIG_MAPPING[name]
    sizes = _sizes_for(config_class, changes, SIZES | (more_sizes or {}))
    while True:
        try:
            return config_class(**sizes)
        except Exception as error:
            fixed = re.match(r"(?:property|Validation error for field) '(\w+)'", str(error))
            if fixed is None or fixed[1] not in sizes:
                raise
            del sizes[fixed[1]]


def small_model(make, config, implementation, most=MOST_PARAMETERS):
    """Return a model of `make` with an implementation of attention; an error above `most` parameters."""
    with torch.device("meta"):
        count = sum(x.numel() for x in make(config).parameters())
    if count > most:
        raise ValueError(f"too large: {count} parameters")
    torch.manual_seed(0)
    return enlarge(make(config, attn_implementation=implementation).eval())


def enlarge(one):
    """Draw a model's weights larger than transformers does, so that attention matters for the results."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in one.parameters():
            if x.ndim > 1:
                x.copy_(torch.randn(x.shape, generator=generator) * 0.3)
    return one


def build_model(name, ids):
    """Return a model with eager attention that runs on tokens (B, S), or the reason that none does."""
    reason = ""
    for changes in VARIANTS:
        try:
            one = small_model(AutoModelForCausalLM.from_config, small_config(name, changes), "eager")
            with torch.no_grad():
                if one(input_ids=ids, use_cache=False).logits.isfinite().all():
                    return one
            reason = reason or "its results aren't finite"
        except Exception as error:  # whatever a configuration doesn't like
            reason = reason or f"{type(error).__name__}: {error}"
    return reason

"""Small random models of transformers, made from configs, and batches of the same documents in every form."""

import copy
import functools
import inspect
import math

import torch
import transformers
from transformers import masking_utils
from transformers.utils import generic

# The argument with earlier keys and values, of models and of functions that make masks: 5.24 has renamed it.
CACHE = (
    "cache"
    if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters
    else "past_key_values"
)
LENGTHS = (7, 12, 3)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
DECODER = SIZES | {
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = SIZES | {"num_hidden_layers": 3, "pad_token_id": 0}
GEMMA = {
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
IMAGE, VIDEO = 1, 2  # tokens that no document has of itself
GRIDS = ((1, 4, 4), (1, 2, 6))  # patches of each image: in time, height and width
MERGED = 4  # patches that become one token
VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}


def _config(name, **fixed):
    """Return what makes a configuration, with other sizes by name: transformers loads it when it is made."""
    return lambda **sizes: getattr(transformers, name)(**fixed | sizes)


def _with_vision(vision=None, **sizes):
    """Return the configuration of a language model with a vision tower."""
    # A third of a head's dim is turned by each of an image token's three positions, or nearly.
    half = sizes.get("hidden_size", DECODER["hidden_size"]) // DECODER["num_attention_heads"] // 2
    rope = ROPE | {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    text = DECODER | {"rope_parameters": rope} | sizes
    return transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=VISION | {"hidden_size": text["hidden_size"]} | (vision or {}),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )


CONFIGS = {
    "Llama": _config("LlamaConfig", **DECODER),
    "Qwen2": _config(
        "Qwen2Config", **DECODER, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "Gemma2": _config("Gemma2Config", **DECODER, **GEMMA, attn_logit_softcapping=2.0),
    "Gemma3": _config("Gemma3TextConfig", **DECODER, **GEMMA),
    "GptOss": _config(
        "GptOssConfig", **DECODER, head_dim=8, sliding_window=5, layer_types=GEMMA["layer_types"],
        num_local_experts=2, num_experts_per_tok=1, experts_implementation="eager", rope_parameters=ROPE,
    ),
    "Qwen2VL": _with_vision,
    "Bert": _config("BertConfig", **ENCODER),
    "ModernBert": _config(
        "ModernBertConfig", **ENCODER, local_attention=8, global_attn_every_n_layers=3,
        bos_token_id=1, cls_token_id=1, eos_token_id=2, sep_token_id=2,
    ),
}  # fmt: skip
ENCODERS = ("Bert", "ModernBert")


def takes(name, form):
    """Return whether a model can be given a form of batch."""
    if name in ENCODERS:  # they pass no positions to their attention
        return "positions" not in form
    if name == "Qwen2VL" and "padding behind" in form:  # it makes its positions itself where there is a mask
        return False
    # Versions before 5.20 hand the offsets of a text to the vision tower as well.
    return name != "Qwen2VL" or "offsets" not in form or hasattr(generic, "_FLASH_VARLEN_KWARGS")


def built(name, **sizes):
    """Return a new model in float32 with eager attention; always the same weights."""
    torch.manual_seed(0)
    kind = "" if name in ENCODERS else "ForImageTextToText" if name == "Qwen2VL" else "ForCausalLM"
    make = getattr(transformers, f"AutoModel{kind}").from_config
    one = make(CONFIGS[name](**sizes), attn_implementation="eager").eval()
    for layer in one.model.layers if name == "GptOss" else ():
        torch.nn.init.normal_(layer.self_attn.sinks)
    return one


@functools.cache
def _model(name, **sizes):
    return built(name, **sizes).double()


def model(name, attention, **sizes):
    """Return a model in float64 with an attention implementation; always the same weights."""
    one = copy.deepcopy(_model(name, **sizes))
    one.set_attn_implementation(attention)
    return one


def documents(seed=0, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 64, (1, length), generator=generator) for length in lengths]


def documents_of(name, lengths=LENGTHS):
    """Return documents for a model: for Qwen2-VL the longest shows images, with a token between them."""
    docs = documents(lengths=lengths)
    if name == "Qwen2VL":
        longest, place = max(docs, key=torch.Tensor.numel), 1
        for tokens in (math.prod(grid) // MERGED for grid in GRIDS):
            longest[0, place : place + tokens] = IMAGE
            place += tokens + 1
    return docs


def given(one, ids):
    """Return what a model takes of tokens: Qwen2-VL also takes the images that are among them."""
    if one.config.model_type != "qwen2_vl":
        return {"input_ids": ids}
    shown = ids == IMAGE
    inputs = {"input_ids": ids, "mm_token_type_ids": shown.int()}
    if shown.any():
        generator = torch.Generator().manual_seed(2)
        patches = torch.randn(sum(map(math.prod, GRIDS)), 3 * 2 * 4 * 4, generator=generator)
        # The same numbers in every dtype that a model computes in.
        inputs |= {"pixel_values": patches.bfloat16(), "image_grid_thw": torch.tensor(GRIDS)}
    return inputs


def given_together(one, batch, docs):
    """Return a batch of documents with what a model takes besides: Qwen2-VL has positions of three kinds.

    It makes them itself where documents are padded. Those of a packed batch come from its user.
    """
    inputs = batch | given(one, batch["input_ids"])
    if inputs.keys() == batch.keys():
        return batch
    positions = inputs.pop("position_ids")
    if "attention_mask" not in batch:
        each = [{name: x for name, x in given(one, doc).items() if name != "pixel_values"} for doc in docs]
        inputs["position_ids"] = torch.cat([one.model.get_rope_index(**of_doc)[0] for of_doc in each], -1)
        if "cu_seq_lens_q" not in batch:  # the positions by which transformers finds documents come first
            inputs["position_ids"] = torch.cat([positions[None], inputs["position_ids"]])
    return inputs


def padded(docs, side, length=None):
    """Return what a tokenizer makes of documents: padded on one side, with mask and positions."""
    length = length or max(doc.shape[1] for doc in docs)
    ids = torch.zeros(len(docs), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, doc in enumerate(docs):
        place = slice(0, doc.shape[1]) if side == "right" else slice(length - doc.shape[1], length)
        ids[row, place], mask[row, place] = doc[0], 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def packed(docs, with_offsets):
    """Return what `DataCollatorWithFlattening` makes of documents."""
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=with_offsets)
    batch = collator([{"input_ids": doc[0].tolist()} for doc in docs])
    batch.pop("labels")
    return dict(batch)


def packed_and_padded(docs):
    """Return documents in one row by their positions, with padding behind each, its positions counted on."""
    counts = [torch.cat([torch.ones_like(doc), torch.zeros_like(doc[:, :3])], -1) for doc in docs]
    ids = [
        torch.nn.functional.pad(doc, (0, ones.shape[-1] - doc.shape[-1]))
        for doc, ones in zip(docs, counts, strict=True)
    ]
    positions = [torch.arange(ones.shape[-1])[None] for ones in counts]
    parts = {"input_ids": ids, "attention_mask": counts, "position_ids": positions}
    return {name: torch.cat(each, -1) for name, each in parts.items()}


def results(one, batch):
    """Return logits, or the last hidden states, of a forward."""
    out = one(**batch)
    return out.logits if "logits" in out else out.last_hidden_state


def by_document(out, batch, docs):
    """Return the rows of each document of a batch in any form."""
    if "attention_mask" in batch and len(out) == 1:
        return list(out[0][batch["attention_mask"][0].bool()].split([doc.shape[1] for doc in docs]))
    if "attention_mask" in batch:
        return [row[mask.bool()] for row, mask in zip(out, batch["attention_mask"], strict=True)]
    return list(out[0].split([doc.shape[1] for doc in docs]))


def gradients(one, outs):
    """Return the gradients of all parameters of a loss over every result, the same in every form."""
    one.zero_grad()
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(out.shape, generator=generator, dtype=out.dtype) for out in outs]
    sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True)).backward()
    return {name: x.grad for name, x in one.named_parameters() if x.grad is not None}


def vision_tower(grids=GRIDS, **sizes):
    """Return Qwen2-VL's vision tower, patches and sizes of images, and what eager makes of each alone."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    torch.manual_seed(0)
    config = Qwen2VLVisionConfig(**VISION | sizes)
    tower = Qwen2VisionTransformerPretrainedModel._from_config(config, attn_implementation="eager")
    grids = torch.tensor(grids)
    patches = torch.randn(int(grids.prod(-1).sum()), 3 * 2 * 4 * 4, dtype=torch.float64)
    tower = tower.double().eval()
    return tower, patches, grids, by_image(tower, patches, grids)


def by_image(tower, patches, grids):
    """Return what a vision tower makes of each image alone."""
    parts = zip(patches.split(grids.prod(-1).tolist()), grids, strict=True)
    return [tower(x, grid_thw=grid[None]).last_hidden_state for x, grid in parts]

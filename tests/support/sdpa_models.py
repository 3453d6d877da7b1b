"""A small random model of every architecture of the installed transformers that says it supports `sdpa`."""

import importlib
import inspect

import torch
import transformers
from support import causal_models
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

NAMES = sorted(CONFIG_MAPPING.keys())
MOST_PARAMETERS = 26_000_000
LENGTH = 12
PADDED = 3  # tokens at the end of the second row, in the padded form

# What has the results of `eager`, and what can't be made, by the names of configurations, with the reason:
# rows of docs/transformers.md.
AS_EAGER = dict.fromkeys(
    ("aimv2", "aimv2_text_model", "colpali", "paligemma"),
    "`sdpa` forgets that its text is causal where there is no padding",
) | {"phi4_multimodal_vision": "`sdpa` takes its images for causal where there is no padding"}
NAMED = dict.fromkeys(
    ("data2vec-vision", "deepseek_ocr2_sam_vision_model", "deepseek_ocr2_vision", "deepseek_vl_hybrid",
     "falcon", "sam", "sam_hq", "sam_hq_vision_model", "sam_vision_model", "unlimited_ocr",
     "unlimited_ocr_sam_vision_model", "unlimited_ocr_vision"),
    "it takes the names in a table of its own, and making it with `attnreg` is a `KeyError`",
)  # fmt: skip

# Fields of images and audio that make a model small, by their value.
_FIELDS = {
    32: "image_size embed_dim vision_hidden_size encoder_hidden_dim num_mel_bins encoder_embed_dim",
    8: "patch_size num_queries max_source_positions",
    4: "num_attention_heads encoder_attention_heads decoder_attention_heads vision_attention_heads",
    2: "depth encoder_num_hidden_layers decoder_num_hidden_layers",
}
SIZES = {name: value for value, names in _FIELDS.items() for name in names.split()}


def class_of(name):
    """Return a class of models of a configuration's name, without a head if there is such, or None."""
    of_auto = MODEL_MAPPING_NAMES.get(name)
    if isinstance(of_auto, str) and hasattr(transformers, of_auto):
        return getattr(transformers, of_auto)
    config = CONFIG_MAPPING[name]
    try:
        module = importlib.import_module(config.__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return None
    models = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, PreTrainedModel)]
    own = (x for x in models if x.config_class is config and "forward" in vars(x))
    return next(own, None)


def _field(config, *names):
    """Return a field of a configuration, or of one inside of it."""
    parts = [config] + [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {}]
    for part in parts:
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, (list, tuple)) and value:
                value = value[0]
            if isinstance(value, int):
                return value
    return None


def _randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _made(one):
    """Return functions that make arguments of a model's forward, by name."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (2, LENGTH), generator=generator)
    size = _field(one.config, "image_size") or 32
    channels = _field(one.config, "num_channels", "in_channels", "in_chans") or 3
    mels = _field(one.config, "num_mel_bins", "feature_size", "input_feat_per_channel") or 80
    frames = 2 * (_field(one.config, "max_source_positions") or 32)
    grid = torch.tensor([[1, 4, 4], [1, 4, 6]])
    patch = channels * (_field(one.config, "temporal_patch_size") or 1) * SIZES["patch_size"] ** 2
    boxes = torch.randint(0, 8, (2, LENGTH, 4), generator=generator).sort(-1).values
    return {
        "input_ids": lambda: ids,
        "decoder_input_ids": lambda: ids.flip(1),
        "pixel_values": lambda: _randn(2, channels, size, size),
        "bbox": lambda: boxes,
        "input_values": lambda: _randn(2, 2000),
        "input_features": lambda: _randn(2, mels, frames),
        "grid_thw": lambda: grid,
        "hidden_states": lambda: _randn(int(grid.prod(-1).sum()), patch),
    }


def inputs_for(one, is_of_both=False):
    """Return arguments for a model's forward by the names in its signature; `is_of_both` adds an image."""
    names, made = inspect.signature(one.forward).parameters, _made(one)
    needed = {name for name, x in names.items() if x.default is inspect.Parameter.empty}
    needed |= {getattr(one, "main_input_name", "input_ids")} | {"bbox"}
    needed |= {"input_ids", "pixel_values"} if is_of_both else set()
    if "grid_thw" in names and "pixel_values" in names:
        made["pixel_values"] = made["hidden_states"]
    given = {name: make() for name, make in made.items() if name in needed & set(names)}
    if "decoder_input_ids" in names and given.keys() & {"input_ids", "input_features"}:
        given["decoder_input_ids"] = made["decoder_input_ids"]()
    return given


def forms_of(one):
    """Return a model's arguments by form of batch: without a mask, and, for a text, with ones or padding."""
    given = one.inputs
    forms = {"plain": given}
    if "input_ids" in given and "attention_mask" in inspect.signature(one.forward).parameters:
        ones = torch.ones(2, LENGTH, dtype=torch.long)
        padded = ones.clone()
        padded[1, LENGTH - PADDED :] = 0
        forms |= {"ones": given | {"attention_mask": ones}, "padded": given | {"attention_mask": padded}}
    return forms


def results(one, given):
    """Return the floating-point tensors of a forward, by name."""
    torch.manual_seed(0)  # some hide patches at random
    out = one(**given)
    items = out.items() if hasattr(out, "items") else enumerate(out)
    tensors = {str(k): x for k, x in items if isinstance(x, torch.Tensor) and x.is_floating_point()}
    return {name: _counted(x) if "attention_mask" in given else x for name, x in tensors.items()}


def _counted(x):
    """Return what isn't padding of a result of the padded form."""
    is_by_token = x.ndim > 1 and x.shape[:2] == (2, LENGTH)
    return torch.cat([x[0], x[1, : LENGTH - PADDED]]) if is_by_token else x


def build_model(name):
    """Return a model with `sdpa` that runs, with its `inputs`, or the reason that none does."""
    kind, reason = class_of(name), ""
    if not getattr(kind, "_supports_sdpa", False):
        return "it has no sdpa"
    for changes in causal_models.VARIANTS:
        try:
            config = causal_models.small_config(name, changes, SIZES)
            one = causal_models.small_model(kind._from_config, config, "sdpa", MOST_PARAMETERS)
        except Exception as error:  # whatever a configuration doesn't like
            reason = reason or f"{type(error).__name__}: {error}"
            continue
        for is_of_both in (False, True):
            try:
                one.inputs = inputs_for(one, is_of_both)
                with torch.no_grad():
                    found = [results(one, given) for given in forms_of(one).values()]
                if all(form and all(x.isfinite().all() for x in form.values()) for form in found):
                    return one
                reason = reason or "its results aren't finite"
            except Exception as error:  # or a model of such inputs
                reason = reason or f"{type(error).__name__}: {error}"
    return reason

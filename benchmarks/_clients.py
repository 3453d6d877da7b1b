"""The programs that `clients.py` measures: what runs in each, by PyTorch alone and by attnreg."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnreg.flash_attn

Run = Callable[[], list[Tensor]]

PYTORCH = "PyTorch"
CLIENTS = FLASH_ATTN, MODULES, DIFFUSERS = "flash-attn", "modules", "diffusers"
# Lengths as shares of the longest sequence: a third is padding.
LENGTHS = (1.0, 0.95, 0.85, 0.75, 0.6, 0.5, 0.4, 0.28)


class Program(NamedTuple):
    """A program, as functions by PyTorch alone and a function by attnreg.

    Attributes:
        client: the library whose functions or modules it calls.
        name: a description.
        dtype: the dtype of all its tensors.
        pytorch: functions by PyTorch alone, by name.
        attnreg: the function by attnreg: another function, or the same through PyTorch's own entry points.
        has_mask: whether there is a boolean mask that attnreg could recognise.
        others: further functions, by neither, by name.
        in_graph: whether its calls are recorded in a CUDA graph, whose replay is timed.
    """

    client: str
    name: str
    dtype: str
    pytorch: dict[str, Run]
    attnreg: Run
    has_mask: bool = False
    others: dict[str, Run] = {}  # noqa: RUF012 - never changed
    in_graph: bool = False


class Sizes(NamedTuple):
    """The sizes of the programs on a device.

    Attributes:
        dtypes: each program is measured in each of these.
        batch, length, heads, dim: for flash-attn's functions; `length` is the longest sequence.
        cache, key_heads: tokens and heads of a cache; the query has `heads` heads.
        module: batch, length, width, heads, width of the MLP and layers of PyTorch's modules.
        dit, flux: batch, heads, head dim, tokens, tokens of text and layers of each kind.
        unet: batch, pixels of a side, widths.
    """

    dtypes: tuple[str, ...]
    batch: int
    length: int
    heads: int
    dim: int
    cache: int
    key_heads: int
    module: tuple[int, int, int, int, int, int]
    dit: tuple[int, int, int, int, int, int]
    flux: tuple[int, int, int, int, int, int]
    unet: tuple[int, int, tuple[int, ...]]


SIZES = {
    "cuda": Sizes(
        ("bfloat16",), 16, 2048, 16, 128, 8192, 4, (16, 1024, 2048, 16, 8192, 2), (8, 16, 72, 1024, 0, 4),
        (2, 24, 128, 4096, 512, 2), (8, 64, (320, 640, 1280)),
    ),
    "cpu": Sizes(
        ("float32", "bfloat16"), 8, 512, 8, 64, 2048, 2, (8, 256, 512, 8, 1024, 2), (2, 16, 72, 256, 0, 1),
        (1, 8, 128, 256, 64, 1), (1, 16, (320,)),
    ),
}  # fmt: skip


def programs(sizes: Sizes, device: torch.device, wanted: list[str]) -> Iterator[Program]:
    """Yield each program when it is measured, so that its memory is free before the next program."""
    of_client: dict[str, list[Callable[..., Program]]] = {
        FLASH_ATTN: [
            functools.partial(packed, causal=True), functools.partial(packed, causal=False), dense, decoding,
            *(
                functools.partial(decoding, tokens=tokens, in_graph=True)
                for tokens in ((1, 4) if device.type == "cuda" else ())
            ),
        ],
        MODULES: [multihead, encoder, masked, nested],
        DIFFUSERS: [
            functools.partial(make, trains=way) for make in (dit, flux, unet) for way in (False, True)
        ],
    }  # fmt: skip
    for client, makers in of_client.items():
        for dtype, make in itertools.product(sizes.dtypes, makers if client in wanted else ()):
            yield make(sizes, dtype, {"dtype": getattr(torch, dtype), "device": device})


def lengths_of(batch: int, longest: int) -> list[int]:
    """Return the lengths of a batch."""
    return [round(share * longest) for share in LENGTHS] * (batch // len(LENGTHS))


def gradients(out: Tensor, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Return an output and the gradients of the leaves that it depends on."""
    grads = torch.autograd.grad(out, leaves, grad, allow_unused=True)
    return [out.detach(), *(x for x in grads if x is not None)]


def real(name: str) -> Any:
    """Return a function of the installed package flash-attn, or None."""
    return getattr(importlib.import_module("flash_attn"), name) if find_spec("flash_attn_2_cuda") else None


def packed(sizes: Sizes, dtype: str, made: dict[str, Any], causal: bool) -> Program:
    """Return sequences of different lengths, packed, forward and backward."""
    lengths = lengths_of(sizes.batch, sizes.length)
    longest, device = max(lengths), made["device"]
    shape = sum(lengths), sizes.heads, sizes.dim
    leaves = [torch.randn(shape, **made, requires_grad=True) for _ in range(3)]
    grad = torch.randn(shape, **made)
    counts = torch.tensor(lengths, device=device)
    offsets = F.pad(counts.cumsum(0), (1, 0)).int()
    is_token = torch.arange(longest, device=device) < counts[:, None]
    rows = is_token.flatten().nonzero().flatten()
    # With padding on the right a causal mask alone hides the padding from tokens.
    mask = {"is_causal": True} if causal else {"attn_mask": is_token[:, None, None]}

    def padded() -> list[Tensor]:
        each = (
            x.new_zeros(is_token.numel(), *x.shape[1:]).index_copy(0, rows, x).unflatten(0, is_token.shape)
            for x in leaves
        )
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in each), **mask).transpose(1, 2)
        return gradients(out.flatten(0, 1).index_select(0, rows), leaves, grad)

    def torchs() -> list[Tensor]:
        from torch.nn.attention.varlen import varlen_attn

        options = {"window_size": (-1, 0)} if causal else {}
        return gradients(varlen_attn(*leaves, offsets, offsets, longest, longest, **options), leaves, grad)

    def by(function: Any) -> Run:
        arguments = offsets, offsets, longest, longest
        return lambda: gradients(function(*leaves, *arguments, causal=causal), leaves, grad)

    name = f"flash_attn_varlen_func, {'causal' if causal else 'not causal'}, forward + backward"
    theirs = real("flash_attn_varlen_func")
    return Program(
        FLASH_ATTN, name, dtype,
        {"padded SDPA": padded} | ({"varlen_attn": torchs} if device.type == "cuda" else {}),
        by(attnreg.flash_attn.flash_attn_varlen_func),
        others={} if theirs is None else {"flash-attn": by(theirs)},
    )  # fmt: skip


def dense(sizes: Sizes, dtype: str, made: dict[str, Any]) -> Program:
    """Return a dense causal batch, forward and backward."""
    shape = sizes.batch, sizes.length, sizes.heads, sizes.dim
    leaves = [torch.randn(shape, **made, requires_grad=True) for _ in range(3)]
    grad = torch.randn(shape, **made)

    def by_torch() -> list[Tensor]:
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), is_causal=True)
        return gradients(out.transpose(1, 2), leaves, grad)

    def by(function: Any) -> Run:
        return lambda: gradients(function(*leaves, causal=True), leaves, grad)

    theirs = real("flash_attn_func")
    return Program(
        FLASH_ATTN, "flash_attn_func, causal, forward + backward", dtype, {"SDPA": by_torch},
        by(attnreg.flash_attn.flash_attn_func), others={} if theirs is None else {"flash-attn": by(theirs)},
    )  # fmt: skip


def decoding(
    sizes: Sizes, dtype: str, made: dict[str, Any], tokens: int = 1, in_graph: bool = False
) -> Program:
    """Return a step of decoding: new tokens of each sequence are appended to its cache, and see the cache."""
    batch, room, heads, dim = sizes.batch, sizes.cache, sizes.key_heads, sizes.dim
    caches = [torch.randn(batch, room, heads, dim, **made) for _ in range(2)]
    query, *new = (torch.randn(batch, tokens, count, dim, **made) for count in (sizes.heads, heads, heads))
    used = torch.tensor(lengths_of(batch, room - tokens), dtype=torch.int32, device=made["device"])
    each, places = torch.arange(batch, device=used.device)[:, None], torch.arange(room, device=used.device)
    further = torch.arange(tokens, device=used.device)

    @torch.no_grad()
    def by_torch() -> list[Tensor]:
        at = used[:, None] + further
        for cache, rows in zip(caches, new, strict=True):
            cache[each, at.long()] = rows
        # The query heads of a key head become rows, because PyTorch has no fused kernel for a mask with GQA.
        grouped = query.unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)
        mask = (places <= at[..., None]).repeat(1, grouped.shape[2], 1)[:, None]
        keys, values = (cache.transpose(1, 2) for cache in caches)
        out = F.scaled_dot_product_attention(grouped.flatten(2, 3), keys, values, attn_mask=mask)
        return [out.view(grouped.shape).permute(0, 3, 1, 2, 4).reshape(query.shape)]

    def by(function: Any) -> Run:
        return lambda: [function(query, *caches, *new, cache_seqlens=used, causal=True)]

    theirs = real("flash_attn_with_kvcache")
    step = f"a step of decoding{'' if tokens == 1 else f' with {tokens} tokens'}"
    return Program(
        FLASH_ATTN, f"flash_attn_with_kvcache, {step}{', in a CUDA graph' if in_graph else ''}", dtype,
        {"SDPA with a mask": by_torch}, by(attnreg.flash_attn.flash_attn_with_kvcache),
        others={} if theirs is None else {"flash-attn": by(theirs)}, in_graph=in_graph,
    )  # fmt: skip


def hidden(batch: int, length: int, device: torch.device) -> Tensor:
    """Return `key_padding_mask`, (B, S): True at padding."""
    counts = torch.tensor(lengths_of(batch, length), device=device)
    return torch.arange(length, device=device) >= counts[:, None]


def multihead(sizes: Sizes, dtype: str, made: dict[str, Any]) -> Program:
    """Return `nn.MultiheadAttention` on a padded batch, forward and backward."""
    batch, length, width, heads, _, _ = sizes.module
    module = nn.MultiheadAttention(width, heads, batch_first=True, **made)
    x = torch.randn(batch, length, width, **made, requires_grad=True)
    mask, grad = hidden(batch, length, made["device"]), torch.randn(x.shape, **made)

    def run() -> list[Tensor]:
        out, _ = module(x, x, x, key_padding_mask=mask, need_weights=False)
        return gradients(out, [x, *module.parameters()], grad)

    name = "MultiheadAttention, padding, forward + backward"
    return Program(MODULES, name, dtype, {PYTORCH: run}, run)


def encoder(sizes: Sizes, dtype: str, made: dict[str, Any]) -> Program:
    """Return `nn.TransformerEncoder` on a padded batch, forward and backward."""
    batch, length, width, heads, wide, layers = sizes.module
    layer = nn.TransformerEncoderLayer(width, heads, wide, dropout=0.0, batch_first=True, **made)
    module = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    x = torch.randn(batch, length, width, **made, requires_grad=True)
    mask, grad = hidden(batch, length, made["device"]), torch.randn(x.shape, **made)

    def run() -> list[Tensor]:
        return gradients(module(x, src_key_padding_mask=mask), [x, *module.parameters()], grad)

    name = f"TransformerEncoder, {layers} layers, padding, forward + backward"
    return Program(MODULES, name, dtype, {PYTORCH: run}, run)


def masked(sizes: Sizes, dtype: str, made: dict[str, Any]) -> Program:
    """Return a layer that passes SDPA a boolean mask; PyTorch's own modules convert masks to numbers."""
    batch, length, width, heads, _, _ = sizes.module
    into, outof = nn.Linear(width, 3 * width, **made), nn.Linear(width, width, **made)
    x = torch.randn(batch, length, width, **made, requires_grad=True)
    mask = ~hidden(batch, length, made["device"])[:, None, None]
    leaves = [x, *into.parameters(), *outof.parameters()]
    grad = torch.randn(x.shape, **made)

    def run() -> list[Tensor]:
        qkv = (part.transpose(1, 2) for part in into(x).unflatten(-1, (3, heads, -1)).unbind(2))
        out = F.scaled_dot_product_attention(*qkv, attn_mask=mask)
        return gradients(outof(out.transpose(1, 2).flatten(2)), leaves, grad)

    name = "a layer with SDPA and a boolean mask, padding, forward + backward"
    return Program(MODULES, name, dtype, {PYTORCH: run}, run, has_mask=True)


def nested(sizes: Sizes, dtype: str, made: dict[str, Any]) -> Program:
    """Return SDPA of jagged nested tensors, forward and backward."""
    lengths, heads, dim = lengths_of(sizes.batch, sizes.length), sizes.heads, sizes.dim
    offsets = F.pad(torch.tensor(lengths, device=made["device"]).cumsum(0), (1, 0))
    leaves = [torch.randn(sum(lengths), heads, dim, **made, requires_grad=True) for _ in range(3)]
    grad = torch.randn(leaves[0].shape, **made)

    def run() -> list[Tensor]:
        bounds = {"min_seqlen": min(lengths), "max_seqlen": max(lengths)}
        each = (torch.nested.nested_tensor_from_jagged(x, offsets, **bounds).transpose(1, 2) for x in leaves)
        out = F.scaled_dot_product_attention(*each).transpose(1, 2)
        return gradients(out.values(), leaves, grad)

    def loop() -> list[Tensor]:
        # (H, S, D) of each sequence in turn, as (1, H, S, D): with three dims SDPA has no fused kernel.
        each = zip(*(x.transpose(0, 1)[None].split(lengths, dim=2) for x in leaves), strict=True)
        out = torch.cat([F.scaled_dot_product_attention(*qkv) for qkv in each], dim=2)
        return gradients(out[0].transpose(0, 1), leaves, grad)

    name = "SDPA of jagged nested tensors, forward + backward"
    return Program(MODULES, name, dtype, {"nested tensors": run, "a loop of SDPA": loop}, run)


class Plain(nn.Module):
    """Transformer blocks of the sizes of a diffusion model, for machines without diffusers."""

    def __init__(self, width: int, heads: int, layers: int, text: int, made: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.text = heads, text
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "norm": nn.LayerNorm(width, **made), "qkv": nn.Linear(width, 3 * width, **made),
                "out": nn.Linear(width, width, **made), "wide": nn.Linear(width, 4 * width, **made),
                "narrow": nn.Linear(4 * width, width, **made),
            })
            for _ in range(layers)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens (B, S, width)."""
        for layer in self.layers:
            qkv = layer["qkv"](layer["norm"](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
            out = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in qkv))
            x = x + layer["out"](out.transpose(1, 2).flatten(2))
            x = x + layer["narrow"](F.gelu(layer["wide"](layer["norm"](x))))
        return x


def of_diffusion(
    name: str, dtype: str, model: nn.Module, call: Callable[[], Tensor], trains: bool, is_plain: bool
) -> Program:
    """Return a model's forward, with `trains` also the gradients of its weights."""
    grad = torch.randn_like(call()) if trains else None
    weights = [*model.parameters()]

    def run() -> list[Tensor]:
        if grad is not None:
            return gradients(call(), weights, grad)
        with torch.no_grad():
            return [call()]

    what = f"{'plain blocks of the sizes of ' if is_plain else ''}{name}"
    directions = "forward + backward" if trains else "forward"
    return Program(DIFFUSERS, f"{what}, {directions}", dtype, {PYTORCH: run}, run)


def has_diffusers() -> bool:
    """Whether diffusers is installed; if so, switch off its log messages."""
    if find_spec("diffusers") is None:
        return False
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    return True


def plain(
    name: str, dtype: str, sizes: tuple[int, int, int, int, int, int], made: dict[str, Any], trains: bool
) -> Program:
    """Return plain blocks that replace a transformer of diffusers if that isn't installed."""
    batch, heads, dim, tokens, text, layers = sizes
    model = Plain(heads * dim, heads, layers, text, made)
    x = torch.randn(batch, tokens + text, heads * dim, **made)
    return of_diffusion(name, dtype, model, lambda: model(x), trains, True)


def dit(sizes: Sizes, dtype: str, made: dict[str, Any], trains: bool) -> Program:
    """Return layers of DiT-XL/2: self-attention of 16 heads of 72."""
    batch, heads, dim, tokens, _, layers = sizes.dit
    name = f"DiT, {layers} layer{'s' * (layers > 1)}, {tokens} tokens"
    if not has_diffusers():
        return plain(name, dtype, sizes.dit, made, trains)
    import diffusers

    side = 2 * round(tokens**0.5)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=heads, attention_head_dim=dim, in_channels=4, out_channels=4, num_layers=layers,
        sample_size=side, patch_size=2, num_embeds_ada_norm=1000,
    ).to(made["device"], made["dtype"])  # fmt: skip
    x = torch.randn(batch, 4, side, side, **made)
    times, labels = (torch.arange(batch, device=x.device) for _ in range(2))
    inputs = {"timestep": times, "class_labels": labels}
    return of_diffusion(name, dtype, model.eval(), lambda: model(x, **inputs).sample, trains, False)


def flux(sizes: Sizes, dtype: str, made: dict[str, Any], trains: bool) -> Program:
    """Return blocks of Flux: joint attention of text and image."""
    batch, heads, dim, tokens, text, layers = sizes.flux
    name = f"Flux, {layers} + {layers} blocks, {tokens} + {text} tokens"
    if not has_diffusers():
        return plain(name, dtype, sizes.flux, made, trains)
    import diffusers

    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=layers, num_single_layers=layers, attention_head_dim=dim,
        num_attention_heads=heads, joint_attention_dim=512, pooled_projection_dim=256,
        axes_dims_rope=(dim // 8, 7 * dim // 16, 7 * dim // 16),
    ).to(made["device"], made["dtype"])  # fmt: skip
    device = made["device"]
    places = torch.arange(tokens, device=device)
    inputs = {
        "hidden_states": torch.randn(batch, tokens, 64, **made),
        "encoder_hidden_states": torch.randn(batch, text, 512, **made),
        "pooled_projections": torch.randn(batch, 256, **made),
        "timestep": torch.full((batch,), 0.5, **made),
        "img_ids": torch.stack((places * 0, places // 64, places % 64), -1).float(),
        "txt_ids": torch.zeros(text, 3, device=device),
    }
    return of_diffusion(name, dtype, model.eval(), lambda: model(**inputs).sample, trains, False)


def unet(sizes: Sizes, dtype: str, made: dict[str, Any], trains: bool) -> Program:
    """Return a U-Net with self- and cross-attention of 8 heads, as in Stable Diffusion 1.5."""
    batch, side, widths = sizes.unet
    name = f"U-Net, width {', '.join(map(str, widths))}, {side * side} tokens"
    if not has_diffusers():
        return plain(name, dtype, (batch, 8, widths[0] // 8, side * side, 0, 2), made, trains)
    import diffusers

    model = diffusers.UNet2DConditionModel(
        sample_size=side, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=widths,
        down_block_types=("CrossAttnDownBlock2D",) * len(widths), cross_attention_dim=768,
        up_block_types=("CrossAttnUpBlock2D",) * len(widths), attention_head_dim=8,
    ).to(made["device"], made["dtype"])  # fmt: skip
    x, text = torch.randn(batch, 4, side, side, **made), torch.randn(batch, 77, 768, **made)
    times = torch.arange(batch, device=x.device)
    return of_diffusion(name, dtype, model.eval(), lambda: model(x, times, text).sample, trains, False)

"""Train a Llama of transformers on packed documents through attnreg, and another one on the same padded.

    python examples/finetune_packed.py
    python examples/finetune_packed.py --device cuda --dtype bfloat16 --layers 16 --hidden 2048 --heads 32 \
        --kv-heads 8 --intermediate 8192 --context 4096 --batch 16    # a model of 1 billion parameters

Both start from the same random weights and see the same documents: docstrings and texts of this machine's
Python as bytes, as in `attnreg demo`. The packed batch is what `DataCollatorWithFlattening` makes, the padded
one runs with transformers' own implementation `sdpa`.
"""

import argparse
import copy
import time

import torch
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

import attnreg
from attnreg.demo.batches import corpus, draw
from attnreg.integrations.transformers import install

PAD = 256  # the first number that is no byte


def padded(documents: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, documents))
    ids = torch.full((len(documents), longest), PAD)
    for row, document in zip(ids, documents, strict=True):
        row[: len(document)] = torch.tensor(document)
    is_text = ids != PAD
    return {
        "input_ids": ids,
        "attention_mask": is_text.long(),
        "labels": torch.where(is_text, ids, -100),
    }


def packed(documents: list[list[int]]) -> dict[str, torch.Tensor]:
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return dict(collate([{"input_ids": document} for document in documents]))


def step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: dict) -> tuple[float, float]:
    """Train on a batch; returns the loss and the seconds that it took."""
    device = model.device
    start = time.perf_counter()
    batch = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), time.perf_counter() - start  # reading the loss has waited for the device


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="packed training through attnreg beside padded training")
    sizes = {"layers": 4, "hidden": 128, "heads": 4, "kv-heads": 2, "intermediate": 352}
    for name, default in (sizes | {"context": 512, "batch": 8, "steps": 12, "seed": 0}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    return parser.parse_args()


def main() -> None:
    given = arguments()
    install()
    torch.manual_seed(given.seed)
    config = LlamaConfig(
        vocab_size=PAD + 1, hidden_size=given.hidden, intermediate_size=given.intermediate,
        num_hidden_layers=given.layers, num_attention_heads=given.heads, num_key_value_heads=given.kv_heads,
        max_position_embeddings=given.context, pad_token_id=PAD, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(given.device, getattr(torch, given.dtype))
    models = {"packed": model, "padded": copy.deepcopy(model)}
    models["packed"].set_attn_implementation("attnreg")
    models["padded"].set_attn_implementation("sdpa")
    optimizers = {layout: torch.optim.AdamW(one.parameters(), lr=1e-3) for layout, one in models.items()}
    print(f"{sum(x.numel() for x in model.parameters()) / 1e6:.1f} million parameters, on {given.device}")

    texts = draw(corpus(given.context), given.batch, given.steps + 1, given.seed)
    seconds, tokens = dict.fromkeys(models, 0.0), 0
    for number, batch in enumerate(texts):
        documents = [list(text) for text in batch]
        losses = {}
        for layout, make in (("packed", packed), ("padded", padded)):
            losses[layout], took = step(models[layout], optimizers[layout], make(documents))
            seconds[layout] += took if number else 0.0  # the first step warms up
        tokens += sum(map(len, documents)) if number else 0
        print(f"step {number:3}  loss " + "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))
    for layout, took in seconds.items():
        print(f"{layout}: {tokens / took:,.0f} tokens/s, padding not counted")
    print("backends of the packed training:", attnreg.stats().calls)


if __name__ == "__main__":
    main()

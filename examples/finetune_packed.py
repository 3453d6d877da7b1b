"""Train a Llama by transformers' Trainer on packed documents through attnreg, and one on the same, padded.

    python examples/finetune_packed.py
    python examples/finetune_packed.py --device cuda --dtype bfloat16 --layers 16 --hidden 2048 --heads 32 \
        --kv-heads 8 --intermediate 8192 --context 4096 --batch 16    # a model of 1 billion parameters

Both start from the same random weights and see the same documents: docstrings and texts of this machine's
Python as bytes, as in `attnreg demo`. `DataCollatorWithFlattening` makes the packed batches; the padded ones
run with transformers' own implementation `sdpa`. Trainer needs the package accelerate.
"""

import argparse
import copy
import tempfile
import time

import torch
import transformers
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import attnreg
from attnreg.integrations.transformers import install
from attnreg.tools.demo.batches import corpus, draw

PAD = 256  # the first number that is no byte


def padded(documents: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(document["input_ids"]) for document in documents]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    labels = ids.masked_fill(ids == PAD, -100)
    labels[:, 0] = -100  # nothing predicts it, and Trainer divides by the number of labels
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


class Watch(transformers.TrainerCallback):
    """Keeps the loss of each step, and the time of all steps but the first, which warms up."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.start = self.end = 0.0

    def on_log(self, args: object, state: object, control: object, logs: dict, **_: object) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])  # reading it has waited for the device
            self.end = time.perf_counter()
            self.start = self.start or self.end


def train(
    model: LlamaForCausalLM, collate: object, documents: list[dict], given: argparse.Namespace
) -> Watch:
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, per_device_train_batch_size=given.batch, max_steps=given.steps + 1, learning_rate=1e-3,
            lr_scheduler_type="constant", train_sampling_strategy="sequential", logging_steps=1, report_to=[],
            save_strategy="no", disable_tqdm=True, seed=given.seed, use_cpu=given.device == "cpu",
        )  # fmt: skip
        trainer = Trainer(model, options, collate, documents, callbacks=[watch])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return watch


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
    config = transformers.LlamaConfig(
        vocab_size=PAD + 1, hidden_size=given.hidden, intermediate_size=given.intermediate,
        num_hidden_layers=given.layers, num_attention_heads=given.heads, num_key_value_heads=given.kv_heads,
        max_position_embeddings=given.context, pad_token_id=PAD, bos_token_id=None, eos_token_id=None,
        use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(given.device, getattr(torch, given.dtype))
    print(f"{sum(x.numel() for x in model.parameters()) / 1e6:.1f} million parameters, on {given.device}")
    batches = list(draw(corpus(given.context), given.batch, given.steps + 1, given.seed))
    documents = [{"input_ids": list(text)} for batch in batches for text in batch]
    lengths = [[len(text) for text in batch] for batch in batches[1:]]  # of the steps that are timed
    tokens, room = sum(map(sum, lengths)), sum(given.batch * max(batch) for batch in lengths)
    print(f"{1 - tokens / room:.0%} of the padded batches is padding")

    collators = {
        "packed": transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True),
        "padded": padded,
    }
    watches = {}
    for layout, implementation in (("packed", "attnreg"), ("padded", "sdpa")):
        one = copy.deepcopy(model)
        one.set_attn_implementation(implementation)
        if layout == "padded":
            attnreg.uninstall()  # PyTorch's own kernels run it
        watches[layout] = train(one, collators[layout], documents, given)
    for number, losses in enumerate(zip(*(watch.losses for watch in watches.values()), strict=True)):
        print(f"step {number:3}  loss packed {losses[0]:.4f}  padded {losses[1]:.4f}")
    for layout, watch in watches.items():
        print(f"{layout}: {tokens / (watch.end - watch.start):,.0f} tokens/s, padding not counted")
    print("backends of the packed training:", attnreg.stats().calls)


if __name__ == "__main__":
    main()

"""`attnreg demo`: train a small model on real text, packed and padded, and compare the two."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnreg.errors import InvalidInputError
from attnreg.tools.cli.options import AsJson, DeviceHere, present_device, valued
from attnreg.tools.cli.output import FAILED, console, finite, import_torch, print_json, progress, table

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from attnreg.tools.demo.train import Result

CONTEXT = 1024
BATCH = 8
OUT = Path("demo-output")


def demo(
    # In longer trainings rounding errors grow until they look like a mistake.
    steps: Annotated[
        int, valued("--steps", "N", "How many batches to train on.", min=2, max=100, show_default=True)
    ] = 30,
    out: Annotated[Path, valued("--out", "DIR", "The folder for the plot.", show_default=True)] = OUT,
    seed: Annotated[
        int, valued("--seed", "N", "Seed of the weights and of the choice of documents.", show_default=True)
    ] = 0,
    device: DeviceHere = "",
    as_json: AsJson = False,
) -> None:
    """Train a small model twice, packed and padded, and compare.

    Both trainings read the same real text. Prints whether the losses agree and how fast each training was,
    and draws a plot. The exit code is 1 if the losses differ.

    Example: attnreg demo --steps 50 --out demo-output
    """
    import_torch()
    place, where = console(stderr=as_json), present_device(device)
    try:  # now, so that the command doesn't fail after the training
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(
            f"--out: got {str(out)!r}, expected a folder to write to ({error.strerror})"
        ) from None
    result = _train(place, steps, seed, where)
    plot = None
    if importlib.util.find_spec("matplotlib") is not None:
        from attnreg.tools.demo.plot import draw

        plot = out / "demo.png"
        draw(result, plot)
    if as_json:
        print_json({**_data(result), "plot": plot and str(plot)})
    else:
        _print(place, result)
        line = f"Plot: {plot}" if plot else "No plot: to draw one, pip install 'attnreg[plots]'"
        place.print(line, soft_wrap=True)
    if not result.agrees:
        raise typer.Exit(FAILED)


def _train(place: Console, steps: int, seed: int, device: torch.device) -> Result:
    import attnreg
    from attnreg.tools.demo.batches import corpus, draw
    from attnreg.tools.demo.train import Result, explain_step, train

    documents = corpus(CONTEXT)
    place.print(f"Training a transformer on bytes, twice, on {device} in float32", style="bold")
    attnreg.reset_stats()
    done = []
    with progress(steps) as update:
        for step in train(draw(documents, BATCH, steps, seed), CONTEXT, device, seed):
            done.append(step)
            update(advance=1, description=f"loss {step.loss['packed']:.3f}")
    return Result(steps=tuple(done), ran=attnreg.stats(), why=explain_step(done[-1], device))


def _data(result: Result) -> dict[str, Any]:
    from attnreg.tools.demo.train import LAYOUTS, TOLERANCE

    return {
        "steps": len(result.steps),
        "documents": len(result.lengths),
        "padding": result.padding,
        "loss": {name: [finite(step.loss[name]) for step in result.steps] for name in LAYOUTS},
        "largest_difference": finite(result.largest_difference),
        "tolerance": TOLERANCE,
        "agrees": result.agrees,
        "tokens_per_second": {name: result.throughput(name) for name in LAYOUTS},
        "stats": result.ran.to_dict(),
        "explanation": result.why.to_dict(),
    }


def _print(place: Console, result: Result) -> None:
    from attnreg.tools.demo.train import TOLERANCE

    lengths, first, last = result.lengths, result.steps[0].loss, result.steps[-1].loss
    through = {"packed": "attnreg.varlen_attn", "padded": "F.scaled_dot_product_attention, is_causal=True"}
    slower = "" if result.speedup >= 1 else ": it is slower here"
    tables = {
        "Text, one token per byte": {
            "documents": f"{len(lengths):,} in {len(result.steps)} batches, drawn at random",
            "lengths": f"{lengths[0]:,} to {lengths[-1]:,} tokens, median {lengths[len(lengths) // 2]:,}",
            "padding": f"{result.padding:.0%} of the padded batches",
        },
        "Losses": {
            **{name: f"{first[name]:.4f} to {last[name]:.4f} nats per token" for name in first},
            "difference": f"at most {result.largest_difference:.1e}; rounding explains up to {TOLERANCE:.0e}",
            "result": "equal but for rounding" if result.agrees else "WRONG: the trainings differ",
        },
        "Speed, in tokens of text per second": {
            **{name: f"{_speed(result, name)}, through {how}" for name, how in through.items()},
            "ratio": f"packed is {result.speedup:.2f} times as fast{slower}",
            "counted": f"the median of {len(result.speeds('packed'))} steps, and in parentheses their middle "
            "half; padding isn't counted",
        },
    }
    for title, rows in tables.items():
        table(title, rows.items(), place=place)
    slow_paths = (("slow path", path) for path in result.ran.slow_paths)
    table("What ran", [("packed", result.why.answer), *slow_paths], place=place)


def _speed(result: Result, layout: str) -> str:
    low, high = result.spread(layout)
    return f"{result.throughput(layout):,.0f} ({low:,.0f} to {high:,.0f})"

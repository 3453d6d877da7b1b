"""`attnreg demo`: train on real text, packed and padded, and compare what comes of it."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnreg.cli.output import AsJson, console, finite, heading, print_json, table

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from attnreg.demo.result import Result

__all__ = ["demo"]

DISAGREE = 1
CONTEXT = 1024
BATCH = 8

# In longer trainings rounding grows, until it can't be told from a mistake.
Steps = Annotated[int, typer.Option(min=2, max=100, help="How many batches to train on.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where to write the plot.")]
Seed = Annotated[int, typer.Option(help="Of the weights, and of the choice of documents.")]
Where = Annotated[str, typer.Option("--device", help="As torch names it; a GPU if there is one.")]


def demo(
    steps: Steps = 30,
    out: Out = Path("demo-output"),
    seed: Seed = 0,
    device: Where = "",
    as_json: AsJson = False,
) -> None:
    """Train a small model on real text, packed and padded: are they equal, how fast, what ran."""
    place = console(stderr=as_json)
    where, folder = _device(device), _folder(out)
    result = _trained(place, steps, seed, where)
    plot = _plotted(result, folder)
    if as_json:
        print_json({**_data(result), "plot": plot and str(plot)})
    else:
        _print(place, result)
        told = f"Plot: {plot}" if plot else "No plot: pip install 'attnreg[plots]' brings what draws it"
        place.print(told, soft_wrap=True)
    if not result.agrees:
        raise typer.Exit(DISAGREE)


def _device(name: str) -> "torch.device":
    import torch

    try:
        probe = torch.zeros((), device=name or ("cuda" if torch.cuda.is_available() else "cpu"))
        probe.item()  # a device that keeps no values, such as meta, trains nothing
    except (RuntimeError, AssertionError) as error:
        raise typer.BadParameter(str(error).splitlines()[0], param_hint="--device") from None
    return probe.device


def _folder(out: Path) -> Path:
    """Make the folder now: nobody wants to train first and then hear that it can't be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{out}: {error.strerror}", param_hint="--out") from None
    return out


def _trained(place: "Console", steps: int, seed: int, device: "torch.device") -> "Result":
    import attnreg
    from attnreg.demo.result import Result, explain_step
    from attnreg.demo.text import batches, corpus
    from attnreg.demo.train import train

    documents = corpus(CONTEXT)
    heading(place, f"Training on {device}, in float32: a transformer that reads bytes, twice")
    attnreg.reset_stats()
    taken = []
    with _progress(place) as progress:
        bar = progress.add_task("", total=steps, loss="")
        for step in train(batches(documents, BATCH, steps, seed), CONTEXT, device, seed):
            taken.append(step)
            progress.update(bar, advance=1, loss=f"{step.loss['packed']:.3f}")
    return Result(steps=tuple(taken), ran=attnreg.stats(), why=explain_step(taken[-1], device))


def _progress(place: "Console") -> "Progress":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("  step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        console=place,
    )


def _plotted(result: "Result", folder: Path) -> Path | None:
    """Write the plot and return its path; None where matplotlib, an extra, isn't installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from attnreg.demo.plot import draw

    draw(result, folder / "demo.png")
    return folder / "demo.png"


def _data(result: "Result") -> dict[str, Any]:
    from attnreg.demo.result import TOLERANCE
    from attnreg.demo.train import LAYOUTS

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


def _print(place: "Console", result: "Result") -> None:
    for title, rows in (
        ("The text, a token for each byte", _text(result)),
        ("The losses", _losses(result)),
        ("The speed, in tokens of text per second: the median step, padding not counted", _speed(result)),
    ):
        heading(place, title)
        table(place, ("", ""), rows)
    heading(place, "What ran")
    counts = ((name, *map(str, n.values())) for name, n in result.ran.calls.items())
    table(place, ("backend", "forward", "backward"), counts, right=2)
    heading(place, "Why, for the last batch")
    place.print(str(result.why), soft_wrap=True)
    place.print()


def _text(result: "Result") -> "list[tuple[str, str]]":
    lengths = result.lengths
    return [
        ("source", "docstrings of Python's library, its licence, attnreg's own files"),
        ("documents", f"{len(lengths):,} in {len(result.steps)} batches, drawn whatever their lengths"),
        ("lengths", f"{lengths[0]:,} to {lengths[-1]:,}, half of them under {lengths[len(lengths) // 2]:,}"),
        ("padding", f"{result.padding:.0%} of the padded batches"),
    ]


def _losses(result: "Result") -> "list[tuple[str, str]]":
    from attnreg.demo.result import TOLERANCE

    first, last = result.steps[0].loss, result.steps[-1].loss
    apart = f"at most {result.largest_difference:.1e}, where rounding may make {TOLERANCE:.0e}"
    return [
        *((name, f"{first[name]:.4f} to {last[name]:.4f} nats per token") for name in first),
        ("apart", apart),
        ("verdict", "one training but for rounding" if result.agrees else "WRONG: these are two trainings"),
    ]


def _speed(result: "Result") -> "list[tuple[str, str]]":
    through = {"packed": "attnreg.varlen_attn", "padded": "F.scaled_dot_product_attention, is_causal=True"}
    rows = [(name, f"{result.throughput(name):>9,.0f}  through {how}") for name, how in through.items()]
    slower = "" if result.speedup >= 1 else ": it is slower here"
    return [*rows, ("so", f"packed is {result.speedup:.2f} times as fast{slower}")]

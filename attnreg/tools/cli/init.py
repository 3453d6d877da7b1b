"""`attnreg init`: a settings file with a comment for each setting."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnreg.errors import ConfigError, did_you_mean
from attnreg.tools.cli.options import valued

FOLDER = Path(__file__).parents[2] / "core" / "settings" / "files"

Out = Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")]
Template = Annotated[
    str, valued("--template", "NAME", "default, cpu, hopper or blackwell.", show_default=True)
]


def init(file: Out = Path("attnreg.toml"), template: Template = "default") -> None:
    """Write a settings file with comments.

    An existing file stays as it is.

    Example: attnreg init rollout.toml --template hopper
    """
    names = sorted(path.stem for path in FOLDER.glob("*.toml"))
    if template not in names:
        near = did_you_mean(template, names)
        raise ConfigError(f"--template: got {template!r}, expected one of {', '.join(names)}{near}")
    if file.suffix != ".toml":  # by which `attnreg check` knows what a file is
        raise ConfigError(f"{file}: got the suffix {file.suffix!r}, expected a name that ends in .toml")
    text = (FOLDER / f"{template}.toml").read_text("utf-8").replace("default.toml", file.name)
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise ConfigError(f"{file}: exists, expected the name of a new file") from None
    except OSError as error:
        raise ConfigError(f"{file}: can't be written: {error.strerror or error}") from error
    typer.echo(f"{file} is written; `attnreg check {file}` checks it, ATTNREG_CONFIG={file} uses it")

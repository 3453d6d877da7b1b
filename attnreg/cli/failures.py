"""What a command does with an error: one line on stderr, an exit code, and never a traceback."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import typer

from attnreg.cli.output import print_json
from attnreg.errors import AttnregError, BackendUnavailableError, UnsupportedInputError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["INTERRUPTED", "NOTHING_RUNS", "reported"]

NOTHING_RUNS = 1
USAGE = 2
INTERRUPTED = 130


def reported(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command that reports attnreg's own errors, in JSON too where that was asked for."""

    @functools.wraps(command)
    def reporting(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except AttnregError as error:
            typer.echo(f"attnreg: {error}", err=True)
            if options.get("as_json"):
                print_json({"error": {"type": type(error).__name__, "message": str(error)}})
            nothing_runs = isinstance(error, UnsupportedInputError | BackendUnavailableError)
            raise typer.Exit(NOTHING_RUNS if nothing_runs else USAGE) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None

    return reporting

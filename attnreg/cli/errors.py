"""How a command ends: its exit codes, and errors as one line on stderr, never as a traceback."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

import typer

from attnreg.cli.output import print_json
from attnreg.errors import AttnregError, BackendUnavailableError, UnsupportedInputError

if TYPE_CHECKING:
    from collections.abc import Callable

FAILED = 1
USAGE = 2
INTERRUPTED = 130


def report_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command that prints attnreg's own errors on stderr and, with `--json`, as JSON on stdout."""

    @functools.wraps(command)
    def reporting(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except AttnregError as error:
            typer.echo(f"attnreg: {error}", err=True)
            if options.get("as_json"):
                print_json({"error": {"type": type(error).__name__, "message": str(error)}})
            nothing_runs = isinstance(error, UnsupportedInputError | BackendUnavailableError)
            raise typer.Exit(FAILED if nothing_runs else USAGE) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None

    return reporting


def import_torch() -> None:
    """Import torch before any module of attnreg that imports it.

    Torch's entry point installs attnreg's routers if an environment variable selects backends. It must
    not run while a module of attnreg is half imported. Its warning about settings that can't be read is
    silenced, because the command reports them as an error.
    """
    warnings.filterwarnings("ignore", message="attnreg", category=UserWarning)
    import torch  # noqa: F401

"""`attnreg config-schema`: the JSON schema of a settings file."""

from typing import Annotated

import typer

from attnreg.cli.output import print_json

__all__ = ["config_schema"]


def config_schema(
    json: Annotated[
        bool, typer.Option("--json", help="As every command takes it; the schema is JSON.")
    ] = True,
) -> None:
    """Print the JSON schema of settings files.

    Editors complete and check a file with it.
    """
    from attnreg.settings import config

    print_json(config.schema())

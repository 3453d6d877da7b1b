"""`attnreg config-schema`: the JSON schema of a settings file."""

from typing import Annotated

import typer

from attnreg.tools.cli.output import print_json

Json = Annotated[bool, typer.Option("--json", show_default=False, help="Has no effect: the schema is JSON.")]


def config_schema(json: Json = True) -> None:
    """Print the JSON schema of a settings file.

    Editors use it to complete and check settings files.

    Example: attnreg config-schema > attnreg.schema.json
    """
    from attnreg.core.settings.config import Settings

    dialect = "https://json-schema.org/draft/2020-12/schema"
    print_json({"$schema": dialect, **Settings.model_json_schema()})

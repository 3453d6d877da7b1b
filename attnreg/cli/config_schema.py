"""`attnreg config-schema`: the JSON schema of a settings file."""

from attnreg.cli.output import print_json

__all__ = ["config_schema"]


def config_schema() -> None:
    """Print the JSON schema of settings files.

    Editors complete and check a file with it.
    """
    from attnreg import config

    print_json(config.schema())

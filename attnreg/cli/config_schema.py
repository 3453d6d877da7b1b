"""`attnreg config-schema`: the JSON schema of a settings file."""

from attnreg.cli.output import print_json

__all__ = ["config_schema"]


def config_schema() -> None:
    """Print the JSON schema of a settings file, for editors that complete and check it."""
    from attnreg import config

    print_json(config.schema())

"""Processes that tests start: what their environment is."""

import os


def environment(**variables):
    """Return the variables of a process: of attnreg's own only these, and nothing is compiled."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("ATTNREG_")}
    return others | {"ATTNREG_BUILD": "off"} | variables

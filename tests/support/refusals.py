"""What is said where something is refused."""

import pytest

from attnreg.errors import ConfigError


def refusal(function, *args, kind=ConfigError):
    """Return the message of the error that the function raises."""
    with pytest.raises(kind) as caught:
        function(*args)
    return str(caught.value)

"""Files that stand in for what attnreg compiles."""

from attnreg.core.torchlib import libraries


def whole(contents=b"no library"):
    """Return contents with their digest behind them, as a library that isn't damaged has it."""
    return contents + libraries.DIGEST(contents).digest()


def stand_in(library):
    """Put a file that isn't damaged where a library would be, and return it."""
    file = libraries.target(library)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.write_bytes(whole())
    return file

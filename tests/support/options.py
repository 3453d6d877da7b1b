"""Values of options, by their rows: a new option is in the tests that take them."""

from attnreg.core.contract.options import OPTIONS

NUMBERS = [row for row in OPTIONS if row.values in ("number", "integer")]


def number_of(row):
    """Return a number that a call with the option may have."""
    return next(number for number in (2, 0.5) if row.is_on(number) and row.low <= number <= row.high)


def value_in_spec(row):
    """Return a value of `AttentionSpec`'s field for a call with the option."""
    if row in NUMBERS:
        return number_of(row)
    return 16 if row.values == "pages" else True

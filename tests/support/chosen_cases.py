"""Which cases of the input matrix, and which arguments of a test, stand for others that are taken alike."""

import hashlib
import re

# Of lengths, heads, head dims and windows.
CHOSEN = re.compile(
    r"length (1|33|129|203|257)\b|lengths (7 and 8|64 and 1|113 and 211)\b|heads (1:1|4:1|6:3|8:1)"
    r"|dims? (5|40|64|96|192|203|256)\b|window \((-1, 0|0, 0|4, 0|0, -1|-1, 4|8, 2|-1, 100)\)"
)
SEVERAL = re.compile(r"\b(lengths?|heads|dims?|window) \S*\d")


# One or two of each kind, and of the layouts.
FEWER = re.compile(
    r"length 33\b|lengths 113 and 211\b|heads 6:3|dim 40\b|dims 5 and 3\b|window \((4, 0|8, 2)\)"
    r"|layout (fused qkv|odd rows)"
)


def is_chosen(case):
    """Return whether a case is the only one of its kind, or one of those that stand for it."""
    return not SEVERAL.search(case.name) or bool(CHOSEN.search(case.name))


def is_among_fewer(case):
    """Return the same for fewer cases, where those that are chosen run in another dtype."""
    several = SEVERAL.search(case.name) or "layout" in case.name
    return not several or bool(FEWER.search(case.name))


# Of the fewer cases those that differ from another one in a number, a layout or a lesser option.
ALIKE = re.compile(
    r"^dim (5|40|96|192|203)$|^dims (40 and 64|5 and 3)$|^window \((4, 0|-1, 4|0, 0|8, 2)\), few"
    r"|^packed window \((4, 0|-1, 4|0, 0)\)$|^layout fused|^packed layout odd|^scale (0|0\.3)$|^values x5$"
    r"|^causal lengths|^packed gradient of a sum|^(additive|gradient of a) bias$|^(packed )?softcap (2|1\.5)$"
    r"|^packed (num_splits|deterministic|counted sinks, scale)"
)


def for_fakes(cases):
    """Return the cases to run on a fake, long ones with half of their lengths.

    Fakes compute in float64 and sequence by sequence, and read heads and layouts in one way.
    """
    chosen = [
        case
        for case in cases
        if (is_among_fewer(case) if re.search("heads|layout|^length|^causal", case.name) else is_chosen(case))
        and max(case.max_q, case.max_k) < 300
        and "300 sequences" not in case.name
    ]
    long = [max(case.max_q, case.max_k) > 100 for case in chosen]
    return [case.scaled(0.5, 0.5) if is_long else case for case, is_long in zip(chosen, long, strict=True)]


def are_pairwise(rows, name=""):
    """Return of each row of values whether it stays, so that any two values of two columns still meet.

    The rows are all combinations of the values of three columns or more. Beside any two values there is one
    of a third column that makes the sum of their numbers a multiple of the shortest column's length.
    """
    assert len(rows[0]) >= 3, f"got {len(rows[0])} arguments, expected 3 or more"  # two are pairs themselves
    numbers, counts = _numbered(rows)
    return [sum(row) % min(counts) == 0 for row in numbers]


def have_each_value(rows, name):
    """Return of each row of values whether it stays, so that each value stays once, the fewer ones in turn.

    The rows are all combinations of the values of two columns or more. Which values meet depends on the name:
    tests that list the same values in the same order keep different pairs.
    """
    assert len(rows[0]) >= 2, f"got {len(rows[0])} argument, expected 2 or more"
    numbers, counts = _numbered(rows)
    shifts = hashlib.sha256(name.encode()).digest()
    kept = {
        tuple((turn + shift) % count for shift, count in zip(shifts, counts, strict=False))
        for turn in range(max(counts))
    }
    return [row in kept for row in numbers]


def _numbered(rows):
    """Return the rows with numbers for their values, and how many values each column has."""
    columns, numbers = [[] for _ in rows[0]], []
    for row in rows:
        for values, value in zip(columns, row, strict=True):
            if value not in values:
                values.append(value)
        numbers.append(tuple(values.index(value) for values, value in zip(columns, row, strict=True)))
    return numbers, [len(values) for values in columns]

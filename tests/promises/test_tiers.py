"""Promises of the fast tier: what its tests leave to the slow one is tested in a smaller form."""

import itertools

import pytest
from support.chosen_cases import are_pairwise, have_each_value


@pytest.mark.parametrize(
    "sizes", [(2, 2, 2), (5, 4, 2), (2, 3, 4), (3, 3, 3), (9, 3, 2, 2), (4, 4, 4, 3)], ids=str
)
def test_any_two_values_meet_in_the_combinations_that_stay_of_a_pairwise_test(sizes):
    rows = list(itertools.product(*map(range, sizes)))
    left = [row for row, stays in zip(rows, are_pairwise(rows), strict=True) if stays]
    assert len(left) * min(sizes) == len(rows)
    for one, other in itertools.combinations(range(len(sizes)), 2):
        assert {(row[one], row[other]) for row in left} == {(row[one], row[other]) for row in rows}


@pytest.mark.parametrize("sizes", [(2, 2), (9, 2), (3, 4, 2)], ids=str)
def test_each_value_is_in_a_combination_that_stays_and_no_more_stay_than_that_takes(sizes):
    rows, seen = list(itertools.product(*map(range, sizes))), set()
    for name in "abcdefghijkl":
        left = [row for row, stays in zip(rows, have_each_value(rows, name), strict=True) if stays]
        assert len(left) == max(sizes)
        assert [set(values) for values in zip(*left, strict=True)] == [set(range(size)) for size in sizes]
        seen.add(tuple(left))
    assert len(seen) > 1, "which values meet depends on the name"


def test_two_arguments_are_no_pairwise_test():
    with pytest.raises(AssertionError, match="got 2 arguments, expected 3 or more"):
        are_pairwise([(1, 2), (1, 3)])

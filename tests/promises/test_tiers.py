"""Promises of the fast tier: what its tests leave to the slow one is tested in a smaller form."""

import itertools

import pytest
from support.chosen_cases import are_pairwise


@pytest.mark.parametrize(
    "sizes", [(2, 2, 2), (5, 4, 2), (2, 3, 4), (3, 3, 3), (9, 3, 2, 2), (4, 4, 4, 3)], ids=str
)
def test_any_two_values_meet_in_the_combinations_that_stay_of_a_pairwise_test(sizes):
    rows = list(itertools.product(*map(range, sizes)))
    left = [row for row, stays in zip(rows, are_pairwise(rows), strict=True) if stays]
    assert len(left) * min(sizes) == len(rows)
    for one, other in itertools.combinations(range(len(sizes)), 2):
        assert {(row[one], row[other]) for row in left} == {(row[one], row[other]) for row in rows}


def test_two_arguments_are_no_pairwise_test():
    with pytest.raises(AssertionError, match="got 2 arguments, expected 3 or more"):
        are_pairwise([(1, 2), (1, 3)])

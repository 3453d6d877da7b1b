"""Promises of the cases that kernels are compared on."""

from attnreg.tools.measure import Case


def test_a_reordered_case_has_the_same_sequences_in_reverse():
    case = Case(name="packed", lens_q=(1, 2), lens_k=(3, 4), varlen=True, seqused_k=(3, 1), poison=True)
    reordered = case.reordered()
    assert (reordered.lens_q, reordered.lens_k, reordered.seqused_k) == ((2, 1), (4, 3), (1, 3))

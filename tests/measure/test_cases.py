"""Promises of the cases that kernels are compared on."""

from attnreg.tools.measure import Case


def test_a_reordered_case_has_the_same_sequences_in_reverse():
    case = Case(name="packed", lens_q=(1, 2), lens_k=(3, 4), varlen=True, seqused_k=(3, 1), poison=True)
    reordered = case.reordered()
    assert (reordered.lens_q, reordered.lens_k, reordered.seqused_k) == ((2, 1), (4, 3), (1, 3))


def test_a_scaled_case_has_keys_for_all_that_count():
    case = Case(name="packed", lens_q=(5, 91), lens_k=(0, 91), varlen=True, seqused_k=(0, 82), poison=True)
    shorter, longer = case.scaled(0.5, 0.5), case.scaled(1.0, 1.5)
    assert (shorter.lens_q, shorter.lens_k, shorter.seqused_k) == ((3, 46), (0, 46), (0, 41))
    assert (longer.lens_q, longer.lens_k, longer.seqused_k) == ((5, 91), (0, 137), (0, 123))

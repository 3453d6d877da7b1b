"""Promises about recognising masks: what is recognised is the mask, bit for bit, and usual masks are."""

import random

import pytest
import torch
from support.masks import drawn, rebuilt

from attnreg.masks import cache
from attnreg.masks.structure import describe, structure_of


def recognised(mask, in_place=True):
    """Return the structure of a mask (B, S_q, S_k), or why it has none."""
    return structure_of(describe(mask), tuple(mask.shape), tuple(mask.shape), in_place)


def assert_says_the_same(found, mask):
    """Fail unless what was recognised is the mask, also where what counts is copied together."""
    assert torch.equal(rebuilt(found, mask.shape), mask)
    copied = recognised(mask, in_place=False)
    assert all(part.cu_seq_q.diff().min() > 0 and part.cu_seq_k.diff().min() > 0 for part in copied.parts)
    assert torch.equal(rebuilt(copied, mask.shape), mask)


def hidden_from(length, *pairs):
    mask = torch.ones(1, length, length, dtype=torch.bool).tril()
    for pair in pairs:
        mask[(0, *pair)] ^= True
    return mask


PLACES = torch.arange(8)
LONG = torch.arange(16)
CAUSAL = (PLACES[:, None] >= PLACES)[None].expand(2, 8, 8)
COUNTS = torch.tensor([3, 8])[:, None] > PLACES
DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
SAME = (DOCUMENTS[:, None] == DOCUMENTS)[None]
NEAR = ((PLACES[:, None] - PLACES).abs() <= 2)[None]
LEFT_PADDED = CAUSAL & COUNTS.flip(-1)[:, None]
USUAL = {
    "nothing": (torch.ones(2, 8, 8).bool(), "nothing hidden", [(-1, -1)]),
    "causal": (CAUSAL, "causal", [(-1, 0)]),
    "padded keys": (COUNTS[:, None].expand(2, 8, 8), "padded keys", [(-1, -1)]),
    "padding": (COUNTS[:, None] & COUNTS[..., None], "padded queries, padded keys", [(-1, -1)]),
    "causal, padded keys": (CAUSAL & COUNTS[:, None], "padded keys, causal", [(-1, 0), (-1, -1)]),
    "causal, padded left": (LEFT_PADDED, "padded queries, padded keys, causal", [(-1, 0)]),
    "the same, whose padding sees all": (
        LEFT_PADDED | ~LEFT_PADDED.any(-1, keepdim=True), "causal", [(-1, 0), (-1, -1)]
    ),
    "a causal window": (CAUSAL & NEAR, "causal, a window", [(2, 0)]),
    "a window": (NEAR, "a window", [(2, 2)]),
    "documents": (SAME, "documents", [(-1, -1)]),
    "causal documents": (SAME & CAUSAL, "causal, documents", [(-1, 0)]),
    "documents and a window": (SAME & NEAR & CAUSAL[:1], "causal, documents", [(-1, 0)]),
    "a prefix that all see": (CAUSAL | (PLACES < 3), "causal", [(-1, 0), (-1, -1)]),
    "new queries after a cache": (torch.ones(1, 3, 8).tril(5).bool(), "causal", [(-1, 0)]),
}  # fmt: skip


@pytest.mark.parametrize(("mask", "seen", "windows"), USUAL.values(), ids=USUAL)
def test_usual_masks_are_recognised_as_what_they_are(mask, seen, windows):
    found = recognised(mask)
    assert (found.seen, [part.window for part in found.parts]) == (seen, windows)
    assert_says_the_same(found, mask)


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 40))]
)
def test_masks_that_are_drawn_from_structures_are_recognised_bit_for_bit(seed):
    draw = random.Random(seed)
    for _ in range(10):
        mask = drawn(draw)[:, 0]
        found = recognised(mask)
        if not mask.any():
            assert found == "no query sees a key"
            continue
        assert not isinstance(found, str), (found, mask.int())
        assert_says_the_same(found, mask)


@pytest.mark.parametrize("seed", range(10))
def test_a_mask_with_a_flipped_bit_is_never_taken_for_another(seed):
    draw = random.Random(seed)
    refused = 0
    for _ in range(20):
        mask = drawn(draw)[:, 0].clone()
        mask.view(-1)[draw.randrange(mask.numel())] ^= True
        found = recognised(mask)
        refused += isinstance(found, str)
        if not isinstance(found, str):
            assert_says_the_same(found, mask)
    assert refused


@pytest.mark.parametrize(
    "sizes",
    [
        *((1, 3, 2), (1, 2, 3)),
        *(
            pytest.param(sizes, marks=pytest.mark.slow)
            for sizes in ((1, 3, 3), (1, 4, 2), (1, 2, 4), (2, 2, 2), (3, 1, 3))
        ),
    ],
)
def test_of_all_small_masks_none_is_taken_for_another(sizes):
    count = sizes[0] * sizes[1] * sizes[2]
    several = 0
    for number in range(2**count):
        mask = torch.tensor([number >> bit & 1 for bit in range(count)], dtype=torch.bool).view(sizes)
        found = recognised(mask)
        if not isinstance(found, str):
            several += 1
            assert_says_the_same(found, mask)
    assert several > 1


NOT_STRUCTURE = {
    "a gap": (hidden_from(8, (5, 2)), "some query sees keys with gaps between them"),
    "nothing at all": (torch.zeros(2, 4, 4).bool(), "no query sees a key"),
    "a window of another width for each query": (
        torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]])[None].bool(),
        "the keys of one query don't follow from those of the query before",
    ),
    "more windows than are worth a call each": (
        (LONG[:, None] - LONG <= LONG[1:12, None, None]) & (LONG - LONG[:, None] <= 1),
        "it would take 11 packed calls, each with another window: at most 8",
    ),
    "keys of each query's own": (
        ((PLACES * 5 % 7)[:, None] <= PLACES)[None] & ((PLACES * 3 % 5 + 3)[:, None] >= PLACES)[None]
        | torch.eye(8).bool()[None] & False,
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("mask", "reason"), NOT_STRUCTURE.values(), ids=NOT_STRUCTURE)
def test_what_is_no_structure_is_left_with_a_reason(mask, reason):
    found = recognised(mask)
    assert isinstance(found, str)
    assert reason is None or found == reason


def test_a_large_mask_is_looked_at_in_pieces_with_the_same_result(monkeypatch):
    mask = CAUSAL & COUNTS[:, None]
    whole = describe(mask)
    monkeypatch.setattr("attnreg.masks.structure.MOST_ELEMENTS", 64)
    assert torch.equal(describe(mask), whole)


@pytest.mark.parametrize("keys", [7, 8, 1024, 1025, 2049])
def test_first_and_last_keys_are_exact_at_every_end_of_a_word_and_of_a_sum_of_words(keys):
    places = torch.arange(keys)
    firsts = torch.tensor([0, 1, keys // 2, keys - 1, 0])
    lasts = torch.tensor([keys - 1, keys - 2, keys // 2, keys - 1, -1])
    mask = (places >= firsts[:, None]) & (places <= lasts[:, None])
    expected = [1, *[1] * keys, *firsts.tolist(), *lasts.tolist()]
    assert describe(mask[None]).tolist() == expected
    mask[0, keys - 2] = False
    assert describe(mask[None])[0] == 0  # the first query sees keys with a gap between them
    assert describe(mask[None].view(torch.uint8).mul(2).view(torch.bool)).equal(describe(mask[None]))


def test_packed_calls_with_the_same_keys_have_one_tensor_of_them_on_any_device():
    """Where every row of the batch is padded: the queries before the padding see what those in it see."""
    all_padded = (torch.tensor([3, 6])[:, None] > PLACES)[:, None]
    one, other = recognised(CAUSAL & all_padded, in_place=False).to(torch.device("cpu")).parts
    assert one.rows_k is other.rows_k
    assert one.rows_k.tolist() == [0, 1, 2, 8, 9, 10, 11, 12, 13]
    moved = recognised(CAUSAL & all_padded, in_place=False).to(torch.device("meta")).parts
    assert moved[0].rows_k is moved[1].rows_k
    some = recognised(CAUSAL & COUNTS[:, None], in_place=False).parts  # one has no padding, nor queries in it
    assert [len(part.rows_k) for part in some] == [11, 3]


def test_each_byte_but_0_is_true_as_to_torch():
    numbers = torch.ones(1, 1, 6, 6, dtype=torch.uint8)
    numbers[0, 0, 2] = torch.tensor([2, 0, 0, 2, 0, 0])
    reason = cache.find(numbers.view(torch.bool), (1, 6, 6))
    assert reason == "some query sees keys with gaps between them"
    numbers[0, 0, 2] = 255
    assert cache.find(numbers.view(torch.bool), (1, 6, 6)).seen == "nothing hidden"

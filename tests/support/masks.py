"""Masks drawn at random, made of what they mean, and masks made anew of what was recognised."""

import torch


def drawn(draw):
    """Return a mask (B, 1, S_q, S_k) that has structure, drawn by a `random.Random`."""
    batch, length = draw.randint(1, 3), draw.randint(2, 12)
    kind = draw.choice(("other lengths", "padding", "documents"))
    queries = torch.arange(length)[:, None]
    if kind == "other lengths":
        keys = torch.arange(draw.randint(2, 12))
        mask = torch.ones(batch, 1, length, len(keys), dtype=torch.bool)
        if draw.random() < 0.7:
            mask = mask & (keys <= queries + draw.choice((0, len(keys) - length)))
        return mask
    keys = torch.arange(length)
    mask = torch.ones(batch, 1, length, length, dtype=torch.bool)
    if kind == "documents":
        starts = torch.tensor([[draw.random() < 0.3 for _ in keys] for _ in range(batch)])
        number = starts.cumsum(-1)
        mask = mask & (number[:, None, :, None] == number[:, None, None, :])
    left, right = draw.choice(((-1, -1), (-1, 0), (2, 0), (3, 2), (0, 0), (1, 4)))
    mask = mask if left < 0 else mask & (keys >= queries - left)
    mask = mask if right < 0 else mask & (keys <= queries + right)
    if kind == "padding":
        count = torch.tensor([draw.randint(1, length) for _ in range(batch)])[:, None]
        counts = keys < count if draw.random() < 0.5 else keys >= length - count
        both = draw.random() < 0.5
        if left <= 0 and right <= 0 and draw.random() < 0.5:  # without a window tokens may lack anywhere
            counts = torch.tensor([[draw.random() < 0.7 for _ in keys] for _ in range(batch)])
            both = both or right == 0  # each gap among its keys would cut a causal sequence in two
        mask = mask & counts[:, None, None]
        mask = mask & counts[:, None, :, None] if both else mask
    return mask


def rebuilt(structure, sizes):
    """Return the mask (B, S_q, S_k) that the packed calls of a structure have, one query at a time."""
    batch, length_q, length_k = sizes
    mask = torch.zeros(batch * length_q, batch * length_k, dtype=torch.bool)
    for part in structure.parts:
        rows_q = range(batch * length_q) if part.rows_q is None else part.rows_q.tolist()
        rows_k = range(batch * length_k) if part.rows_k is None else part.rows_k.tolist()
        offsets = part.cu_seq_q.tolist(), part.cu_seq_k.tolist()
        assert [x[-1] for x in offsets] == [len(rows_q), len(rows_k)]
        for q0, q1, k0, k1 in zip(*(x[i:] for x in offsets for i in (0, 1)), strict=False):
            assert (q0, k0) != (q1, k1), "a sequence of nothing"
            assert 0 <= q1 - q0 <= part.max_q
            assert 0 <= k1 - k0 <= part.max_k
            for t in range(q1 - q0):
                center = t + (k1 - k0) - (q1 - q0)
                left = 0 if part.window[0] < 0 else max(0, center - part.window[0])
                right = k1 - k0 if part.window[1] < 0 else min(k1 - k0, center + part.window[1] + 1)
                for s in range(left, right):
                    place = rows_q[q0 + t], rows_k[k0 + s]
                    assert not mask[place], "a key counts twice"
                    mask[place] = True
    blocks = mask.view(batch, length_q, batch, length_k)
    of_itself = torch.stack([blocks[b, :, b] for b in range(batch)])
    assert mask.sum() == of_itself.sum(), "a query sees keys of another row"
    return of_itself

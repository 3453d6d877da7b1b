"""Calls of `F.scaled_dot_product_attention` with a boolean mask, run as packed calls without the mask.

With `masks = "recognise"` this applies to masks of padding, causality, a window or blocks of documents:
`structure` describes a mask once, `cache` keeps the description until the mask changes, `serving` runs packed
calls instead. `sequences` and `rows` are parts of these. May import: the fronts and all below them. Read
`structure.py` first.
"""

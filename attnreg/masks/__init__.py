"""Boolean masks of `F.scaled_dot_product_attention` that say where attention looks: run without the mask.

With `masks = "recognise"` a mask of padding, causality, a window or blocks of documents is described once
(`structure`), kept as long as it is unchanged (`cache`), and calls that have it run as packed ones
(`serving`). May import: the fronts and all below them. Read `structure.py` first.
"""

"""The demo: train a small model on real text, packed and padded, and compare the two trainings.

`batches` finds documents and packs or pads a batch of them, `train` trains a transformer over bytes and
compares, `plot` draws. Only `attnreg.tools.cli.demo` imports this room; it uses attnreg's public names alone,
as any user's program would. Read `batches.py` first.
"""

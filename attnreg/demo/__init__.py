"""The demo: train a small model on real text, packed and padded, and compare the two trainings.

`text` finds the documents, `layout` packs or pads a batch of them, `model` is a transformer over bytes,
`train` trains and compares, `plot` draws. Only `attnreg.cli.demo` imports this room; it uses attnreg's
public names alone, as any user's program would. Read `layout.py` first.
"""

"""Measured choice: what backends cost on this machine, as a table, and what the table says of a call.

Nothing here is imported by `import attnreg`. `kinds`, `points`, `table`, `matching`, `index`,
`lookup` and `ranking` are pure; `machine` asks torch for versions; the rest runs kernels and is for
`attnreg tune` alone.
"""

"""Tables of measured times: their file, what they predict for a call, and how `attnreg tune` measures them.

Read in this order: `points` and `table` (the file), `kinds`, `index` and `lookup` (what it predicts),
`tables` (which one is in force); then `traces`, `workload`, `checks`, `measure` and `session` (measuring).
`representatives` has a small call for each kind, to be run ahead.
May import: errors, settings, torchlib, contract, measure; `import attnreg` imports none of it.
"""

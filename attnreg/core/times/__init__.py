"""Measured times: tables, what they predict for a call, and the policy "adaptive".

Read in this order: `points` and `table` (the file), `kinds`, `index` and `lookup` (what it predicts),
`tables` (which one is in force on a device), `environments` (where it was measured). `adaptive` and `turns`
time the program's own calls; the ranks of a job share them by `job_results`. `traces` are files of recorded
calls. `attnreg tune` writes tables (`tools/tuning/`). May import: `selection` and all below it.
"""

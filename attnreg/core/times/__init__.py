"""Measured times: tables, their predictions for a call, and the policy "adaptive".

Read in this order: `points` and `table` (the file), `kinds`, `index` and `lookup` (the prediction), `tables`
(the table in force on a device), `environments` (the environment of a measurement). `adaptive` and `turns`
time the program's own calls; the ranks of a job share results by `job_results`. `traces` reads and writes
files of recorded calls. `attnreg tune` writes tables (`tools/tuning/`). May import: `selection` and all below
it.
"""

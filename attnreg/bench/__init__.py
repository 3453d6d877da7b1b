"""What `attnreg bench` measures: backends beside each other, beside torch, and what choosing costs.

Nothing imports this room but the command line and the scripts in `benchmarks/`.
"""

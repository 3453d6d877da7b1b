"""Settings from outside the program: environment variables and TOML files, parsed strictly.

May import: errors. Read `environment.py` first, then `config.py`.
"""

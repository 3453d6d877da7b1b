"""What users ask for outside the program: environment variables and TOML files, parsed strictly.

May import: errors. Read `environment.py` first, then `config.py`.
"""

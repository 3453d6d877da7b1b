"""Settings from outside the program: environment variables and TOML files, parsed strictly.

`environment` has the variables, `config` the keys of a file as a pydantic model (and is imported only where
a file or a `Settings` is used), `toml_file` errors with file and line, `other_names` what other libraries
call our backends. What settings mean is in `policy/sources.py`. May import: errors. Read `environment.py`
first.
"""

"""What attnreg needs of torch's inside, and of the operating system below it.

Here: torch's own kernels, captured before a router covers them; packed offsets; read-backs that don't wait;
building C++. May import: errors, settings. Read `captured.py` first.
"""

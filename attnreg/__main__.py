"""`python -m attnreg`: the command line."""

from attnreg.cli import main

if __name__ == "__main__":
    main()

"""`python -m attnreg`: the command line."""

import os
import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # Python has put the current folder there, whose `torch.py` isn't torch. This one is on the path too.
        sys.path[0] = os.path.dirname(os.__file__)  # noqa: PTH120 - before anything else is imported
    from attnreg.tools.cli import main

    main()

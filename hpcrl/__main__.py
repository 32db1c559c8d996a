"""`python -m hpcrl`: the same as the command `hpcrl`."""

import sys

from hpcrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

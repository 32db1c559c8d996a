"""`python -m hpcrl.sandbox.harbor DIR`: whether tasks can be learned from (`check.py`).

Invariant: the exit status is 0 only if all of them can.
"""

import sys

from hpcrl.sandbox.harbor.check import main

if __name__ == "__main__":
    sys.exit(main())

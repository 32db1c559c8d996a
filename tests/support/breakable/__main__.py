"""The engine role, with a server that loads our extension's breakable cousin."""

import sys

from hpcrl.engine import main

main.SERVER = "tests.support.breakable.server"
sys.exit(main.main())

"""hpcrl.engine.serve with another worker extension."""

import sys

from hpcrl.engine import serve, settings

settings.EXTENSION = "tests.breakable.extension.Extension"
if __name__ == "__main__":
    sys.exit(serve.main())

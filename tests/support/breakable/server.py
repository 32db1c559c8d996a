"""hpcrl.engine.server with another worker extension."""

import sys

from hpcrl.engine import server, server_settings

server_settings.EXTENSION = "tests.support.breakable.extension.Extension"
if __name__ == "__main__":
    sys.exit(server.main())

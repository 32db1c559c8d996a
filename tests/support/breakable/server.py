"""hpcrl.engine.server with another worker extension."""

import sys

from hpcrl.engine import server, server_settings
from tests.support.breakable import fp8_on_cpu

fp8_on_cpu.install_if_told()
server_settings.EXTENSION = "tests.support.breakable.extension.Extension"
if __name__ == "__main__":
    sys.exit(server.main())
